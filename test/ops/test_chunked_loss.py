"""How the fused loss makes its gradients: chunks, slices of the vocabulary, ignored tokens, memory reused."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils import checkpoint

from liger_like import ops
from liger_like.ops.losses import chunks, linear_cross_entropy, slices, steps
from liger_like.ops.losses import products as product_parts
from liger_like.ops.losses.vocab_shards import WHOLE
from liger_like.runtime import support
from liger_like.testing import SPECS, assert_accurate, run

LINEAR = next(s for s in SPECS if s.name == "fused_linear_cross_entropy")
each_recompute = pytest.mark.parametrize("recompute", [False, True])


def test_size_of_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "has_products", lambda device: True)

    def planned(T, H, V, dw=True, chunk_rows=None, dtype=torch.bfloat16, wide=False):
        x, weight = (torch.empty(rows, H, dtype=dtype, device="meta") for rows in (T, V))
        needs = [True, dw, False, False, False]
        sizes = {"needs": needs, "chunk_rows": chunk_rows, "accum_dtype": None, "dw_dtype": dtype, "shard": WHOLE}
        return chunks._chunks(SimpleNamespace(x=x, weight=weight, **sizes), wide)

    assert planned(8192, 4096, 128256) == (2048, True)
    assert planned(100, 4096, 128256) == (100, True)
    assert planned(65536, 4096, 128256) == (4096, True)  # at most 16 chunks are summed
    assert planned(131072, 4096, 128256) == (2048, False)  # larger chunks would take more memory than dw in fp32
    assert planned(65536, 4096, 128256, dw=False) == (2048, False)
    assert planned(65536, 4096, 128256, dtype=torch.float16) == (2048, False)
    assert planned(65536, 4096, 1000) == (33554, True)  # a chunk has at least 64 MiB of logits
    assert planned(8192, 4096, 128256, wide=True) == (1024, True)  # logits in fp32
    assert planned(32768, 2880, 201088, wide=True) == (2048, True)
    assert planned(65536, 2880, 201088, wide=True) == (1024, False)
    assert planned(8192, 4096, 128256, chunk_rows=512) == (512, True)
    assert planned(8192, 4096, 128256, chunk_rows=511) == (511, False)


def products(monkeypatch, H, V):
    """A list that gets the number of tokens of every product of the loss."""
    tokens = []

    def counted(fn, out, a, b, *accumulate):
        tokens.append(a.shape[0] * a.shape[1] * b.shape[1] // (H * V))
        return fn(a, b, out=out) if fn is mm else fn(out, a, b, *accumulate)

    mm, addmm = torch.mm, steps.addmm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: counted(mm, out, a, b))
    for module in (steps, slices):
        monkeypatch.setattr(module, "addmm", lambda *args: counted(addmm, *args))
    return tokens


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_ignored_tokens_take_no_part(options, device, monkeypatch):
    H, V, chunk = 24, 101, 16
    backward = 1 if options else 0  # the backward recomputes the logits
    for kept in (0, 5, 20, 64):
        x = torch.randn(64, H, device=device, requires_grad=True)
        w = torch.randn(V, H, device=device, requires_grad=True)
        y = torch.full((64,), -100, device=device)
        index = torch.randperm(64, device=device)[:kept]
        y[index] = torch.randint(0, V, (kept,), device=device)
        with monkeypatch.context() as patched:
            tokens = products(patched, H, V)
            loss = ops.fused_linear_cross_entropy(x, w, y, chunk_rows=chunk, **options)
            forward = max(kept, chunk)  # the first chunk is queued before `kept` is known
            assert sum(tokens) == forward * (1 if backward else 3)
            upstream = torch.randn_like(loss)
            got = torch.autograd.grad(loss, (x, w), upstream)
            assert sum(tokens) == (forward + 3 * kept if backward else 3 * forward)
        same = ops.fused_linear_cross_entropy(x[index], w, y[index], **options)
        want = torch.autograd.grad(same, (x, w), upstream[index] if same.dim() else upstream)
        assert kept == 0 or loss.any()
        torch.testing.assert_close((loss[index] if same.dim() else loss, *got), (same, *want))


@each_recompute
def test_ignored_tokens_take_part_as_in_a_graph(recompute, device, monkeypatch):
    x = torch.randn(64, 24, device=device, requires_grad=True)
    w = torch.randn(101, 24, device=device, requires_grad=True)
    y = torch.randint(0, 101, (64,), device=device).masked_fill(torch.arange(64, device=device) > 4, -100)

    def results():
        loss = ops.fused_linear_cross_entropy(x, w, y, chunk_rows=16, recompute=recompute)
        return loss, *torch.autograd.grad(loss, (x, w))

    want = results()
    tokens = products(monkeypatch, 24, 101)
    with support.as_in_graph():
        got = results()
    assert sum(tokens) == 64 * (4 if recompute else 3)
    torch.testing.assert_close(got, want)
    tokens.clear()
    results()
    assert sum(tokens) == (16 + 3 * 5 if recompute else 3 * 16)


def behind_dw(monkeypatch, columns):
    """A list that gets, for every slice of the vocabulary, whether its logits lie behind the rows of dw."""
    behind = []

    def logits_behind(dw, end, *args):
        z = room(dw, end, *args)
        behind.append(z.untyped_storage().data_ptr() == dw.untyped_storage().data_ptr() if dw.numel() else False)
        return z

    room = slices.logits_behind
    monkeypatch.setattr(slices, "logits_behind", logits_behind)
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", columns)
    return behind


ALL = {"label_smoothing": 0.1, "softcap": 8.0, "logit_scale": 1.1, "z_loss": 1e-3, "num_items": 30}


@pytest.mark.parametrize(
    ("dtype", "flags", "options"),
    [
        (torch.float32, {"bias": True, "weighted": True, "rank": 3}, ALL),
        (torch.float16, {}, {}),
        pytest.param(torch.bfloat16, {}, {}, marks=pytest.mark.gpu),
    ],
    ids=["all", "fp16", "bf16"],
)
def test_recompute_in_slices(dtype, flags, options, device, monkeypatch, poisoned):
    options = options | {"recompute": True, "chunk_rows": 16}
    draws = 1 if dtype == torch.float32 else 8 if device == "cpu" else 60
    behind = behind_dw(monkeypatch, 32)
    if dtype == torch.float32:  # in half precision cuBLAS rounds parts of small products
        monkeypatch.setattr(slices, "SMALL_PRODUCT", 0)
    make = lambda: LINEAR.inputs(dtype, device, lead=(37,), H=31, V=333, **flags)  # noqa: E731
    assert_accurate(LINEAR.fn, LINEAR.ref, make, options, draws)
    assert {*behind} == {True, False}

    def frozen():
        return {n: t.detach().requires_grad_(n == "x") if n in ("x", "weight") else t for n, t in make().items()}

    behind.clear()
    assert_accurate(LINEAR.fn, LINEAR.ref, frozen, options, draws)
    assert behind == [False] * 6 * draws  # without dw slices of twice the least columns


def test_recompute_equals_the_default(device):
    for shape in ({"lead": (2, 9), "H": 16, "V": 40}, {"lead": (37,), "H": 15, "V": 301, "bias": True, "rank": 2}):
        inputs = LINEAR.inputs(torch.float32, device, **shape)
        leaves = [t for t in inputs.values() if t.requires_grad]
        for options in ({"chunk_rows": 16}, {"label_smoothing": 0.1}, {"chunk_rows": 8, "outputs": ("argmax", "lse")}):
            results = []
            for recompute in (False, True):
                out = LINEAR.fn(**inputs, **options, recompute=recompute)
                loss, *outs = [t for t in out if t is not None] if isinstance(out, tuple) else [out]
                results.append((loss, *outs, *torch.autograd.grad(loss, leaves, torch.full_like(loss, -0.3))))
            torch.testing.assert_close(*results)


@each_recompute
def test_accumulate_grad(recompute, device):
    inputs = LINEAR.inputs(torch.float32, device, lead=(37,), H=16, V=40)
    options = {"recompute": recompute, "chunk_rows": 16}
    x, w = inputs["x"], inputs["weight"]
    expected = torch.autograd.grad(ops.fused_linear_cross_entropy(**inputs, **options), (x, w))
    seen, versions = [], []
    w.register_hook(lambda grad: seen.append(grad))
    for rounds in (1, 2, 3):
        before = w.grad
        ops.fused_linear_cross_entropy(**inputs, **options, accumulate_grad=True).backward()
        assert w.grad is before or before is None
        torch.testing.assert_close(w.grad, rounds * expected[1])
        torch.testing.assert_close(x.grad, rounds * expected[0])
        versions.append(w.grad._version)
    assert versions == sorted(set(versions))  # by which GraphedStep sees what has changed
    assert len([grad for grad in seen if grad is not None]) == 1  # only the first gradient goes through autograd

    x.grad = w.grad = None
    doubled = w * 2.0
    for rounds in (1, 2):  # a weight that is no leaf gets the ordinary gradient
        ops.fused_linear_cross_entropy(x, doubled, inputs["target"], accumulate_grad=True, **options).backward(
            retain_graph=True
        )
        ordinary = ops.fused_linear_cross_entropy(x, w * 2.0, inputs["target"], **options)
        torch.testing.assert_close(w.grad, rounds * torch.autograd.grad(ordinary, w)[0])


@each_recompute
def test_activation_checkpointing(recompute, device, monkeypatch):
    launches, launch = [], steps.launch_fwd
    monkeypatch.setattr(steps, "launch_fwd", lambda *args: (launches.append(1), launch(*args)))
    inputs = LINEAR.inputs(torch.float32, device, lead=(12,), H=16, V=40)
    leaves = inputs["x"], inputs["weight"]

    def loss(x, w):
        return ops.fused_linear_cross_entropy(x.sin(), w, inputs["target"], recompute=recompute)

    def selected():
        return checkpoint.create_selective_checkpoint_contexts([torch.ops.liger_like.linear_cross_entropy.default])

    expected = torch.autograd.grad(loss(*leaves), leaves)
    for options, forwards in ({"context_fn": selected}, 1), ({}, 2):
        launches.clear()
        out = checkpoint.checkpoint(loss, *leaves, use_reentrant=False, **options)
        got = torch.autograd.grad(out, leaves)
        assert len(launches) == forwards
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@each_recompute
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_no_token_to_learn_from(tokens, recompute, device, poisoned):
    for dtype in (torch.float32, torch.float16) + ((torch.bfloat16,) if device == "cuda" else ()):
        inputs = LINEAR.inputs(dtype, device, lead=(tokens,), H=16, V=40, bias=True, rank=2)
        inputs["target"] = torch.full((tokens,), -100, device=device)
        for chunk_rows in (16, None):
            loss = LINEAR.fn(**inputs, recompute=recompute, chunk_rows=chunk_rows)
            leaves = [t for t in inputs.values() if t.requires_grad]
            assert loss == 0
            assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_nan_and_inf_stay_in_their_row(options, device):
    for dtype in (torch.float32, torch.float16):
        inputs = LINEAR.inputs(dtype, device, lead=(37,), H=16, V=40)
        inputs["target"].clamp_(min=0)
        with torch.no_grad():
            inputs["x"][3, 5], inputs["x"][20, 0] = float("nan"), float("inf")
        out = ops.fused_linear_cross_entropy(**inputs, chunk_rows=16, outputs=("lse", "argmax"), **options)
        (dx,) = torch.autograd.grad(out.loss.sum(), inputs["x"])
        for rows in (out.lse, dx.sum(1)) + ((out.loss,) if out.loss.dim() else ()):
            assert (~rows.isfinite()).nonzero().flatten().tolist() == [3, 20]
        assert out.loss.dim() or out.loss.isnan()


@each_recompute
def test_strided_inputs(recompute, device):
    x, w = torch.randn(16, 37, device=device).T, torch.randn(40, 50, device=device)[:, 7:23]
    y = torch.randint(0, 40, (74,), device=device)[::2]
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    packed = [t.contiguous().requires_grad_() for t in (x, w)]
    results = []
    for operands, labels in ((leaves, y), (packed, y.contiguous())):
        loss = ops.fused_linear_cross_entropy(*operands, labels, chunk_rows=16, recompute=recompute)
        results.append((loss, *torch.autograd.grad(loss, operands)))
    assert not leaves[0].is_contiguous()
    torch.testing.assert_close(*results)


def test_of_no_tokens_no_chunk_is_left(monkeypatch, device, poisoned):
    """The backward reads, from memory that nobody may have written, which rows of the last chunk it has to multiply."""
    true, kept = linear_cross_entropy.linear_cross_entropy_fwd, []

    def forward(*args):
        outs = true(*args)
        kept.append(outs[7].tolist())
        return outs

    monkeypatch.setattr(linear_cross_entropy, "linear_cross_entropy_fwd", forward)
    inputs = LINEAR.inputs(torch.float32, device, lead=(0,), H=8, V=16)
    run(LINEAR.fn, inputs, {})
    assert kept == [[0, 0, 0]]
