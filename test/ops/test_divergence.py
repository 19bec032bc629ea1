"""Results, routes, errors and edge cases of ``fused_linear_divergence``."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from liger_like import ops
from liger_like.ops.losses import divergence_chunks, dw_sum
from liger_like.ops.losses import products as product_parts
from liger_like.ops.losses.linear_divergence import OUTPUTS, fused_linear_divergence_ref
from liger_like.runtime import support
from liger_like.testing import SPECS, assert_accurate

SPEC = next(s for s in SPECS if s.name == "fused_linear_divergence")
HALF = (torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu))
BETAS = (0.0, 1e-3, 0.5, 1.0)
each_beta = pytest.mark.parametrize("beta", BETAS)


def inputs_of(device, lead=(19,), dtype=torch.float32, **shape):
    return SPEC.inputs(dtype, device, lead=lead, **{"H": 24, "Ht": 16, "V": 97, **shape})


def trained(inputs, *names):
    return {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}


def gradients(inputs, upstream=None, **options):
    """The loss and the gradients of the inputs that need one."""
    loss = SPEC.fn(**inputs, **options)
    loss = loss.loss if isinstance(loss, tuple) else loss
    return loss.detach(), *torch.autograd.grad(loss, [t for t in inputs.values() if t.requires_grad], upstream)


def same_models(device, T=19, H=24, V=97, dtype=torch.float32):
    """Inputs of a student that equals its teacher."""
    x, weight = (torch.randn(n, H, device=device, dtype=dtype) for n in (T, V))
    leaves = {"x": x.clone().requires_grad_(), "weight": weight.clone().requires_grad_()}
    return leaves | {"teacher_x": x, "teacher_weight": weight}


@each_beta
def test_equals_trl(beta, device):
    """The convention of beta, scaling, softcap and temperature is TRL's, and so are the numbers."""
    kernel = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    inputs = inputs_of(device, bias=True)
    x, weight, teacher_x, teacher_weight, bias, teacher_bias = inputs.values()
    options = {
        "temperature": 0.7,
        "logit_scale": 1.3,
        "softcap": 5.0,
        "teacher_logit_scale": 0.8,
        "teacher_softcap": 6.0,
    }
    upstream = torch.randn(19, device=device)
    heads = x, weight, bias, teacher_x, teacher_weight, teacher_bias
    expected, entropy = kernel.apply(*heads, beta, *options.values())
    got = ops.fused_linear_divergence(**inputs, beta=beta, reduction="none", outputs=("entropy",), **options)
    torch.testing.assert_close(got.loss, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-4, atol=1e-6)
    grads = [torch.autograd.grad(loss, (x, weight, bias), upstream) for loss in (got.loss, expected)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_results_are_those_of_the_distributions(device):
    inputs = {n: t.detach() for n, t in inputs_of(device, (3, 7), mask=True).items()}
    inputs["teacher_weight"][:, 0] = 3 * inputs["weight"][:, 0]  # some argmax agree
    inputs["x"][..., 0] = inputs["teacher_x"][..., 0] = 4
    p, q = (
        torch.distributions.Categorical(logits=linear(inputs[f"{of}x"], inputs[f"{of}weight"]))
        for of in ("", "teacher_")
    )
    counts = inputs["mask"]
    want = {
        "divergence": torch.distributions.kl_divergence(q, p),
        "entropy": p.entropy(),
        "teacher_entropy": q.entropy(),
        "agree": p.logits.argmax(-1) == q.logits.argmax(-1),
    }
    assert want["agree"][counts].unique().numel() == 2
    assert tuple(want) == OUTPUTS
    for reduction in ("mean", "sum", "none"):
        got = ops.fused_linear_divergence(**inputs, reduction=reduction, outputs=OUTPUTS)
        rows = want["divergence"].masked_fill(~counts, 0)
        total = {"mean": rows.sum() / counts.sum(), "sum": rows.sum(), "none": rows}[reduction]
        torch.testing.assert_close(got.loss, total)
        for name in OUTPUTS:
            torch.testing.assert_close(getattr(got, name), want[name].masked_fill(~counts, 0))
    only = ops.fused_linear_divergence(**inputs, outputs=("agree",))
    assert [n for n, t in only._asdict().items() if t is not None] == ["loss", "agree"]
    torch.testing.assert_close(ops.fused_linear_divergence(**inputs, num_items=7), want["divergence"][counts].sum() / 7)
    as_integers = inputs | {"mask": counts.int() * 3}
    assert torch.equal(SPEC.fn(**as_integers), SPEC.fn(**inputs))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@each_beta
def test_accuracy(beta, reduction, device, monkeypatch, poisoned):
    """In slices of 32 columns, with half of the tokens and a student and teacher of different widths.

    Chunks of 8 tokens compute the teacher's logits of 3 tokens at a time.
    """
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", 32)
    monkeypatch.setattr(divergence_chunks, "PART_ROWS", 3)
    options = {"beta": beta, "reduction": reduction, "chunk_rows": 8, "temperature": 1.3, "logit_scale": 1.2}

    def make():
        inputs = inputs_of(device, mask=True, bias=True, rank=4)
        inputs["mask"] = torch.arange(19, device=device) % 2 == 0
        return inputs

    assert_accurate(SPEC.fn, SPEC.ref, make, options)


@pytest.mark.parametrize("beta", [2.0**-14, 1 - 2.0**-14 - 2.0**-26])
def test_beta_near_its_ends(beta, device):
    """In fp32 the second beta is rounded by 2^-26, which is 2^-12 of the divergence that is left."""
    inputs = inputs_of(device)
    exact = SPEC.ref(**{n: t.double() for n, t in inputs.items()}, beta=beta)
    loss = SPEC.fn(**inputs, beta=beta)
    torch.testing.assert_close(loss.double(), exact, rtol=5e-5, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("beta", "reduction"), [(0.0, "none"), (1e-3, "mean")])
def test_accuracy_in_half_precision(beta, reduction, dtype, device):
    options = {"beta": beta, "reduction": reduction, "chunk_rows": 16, "softcap": 9.0}
    make = lambda: inputs_of(device, (30,), dtype, bias=True)  # noqa: E731
    assert_accurate(SPEC.fn, SPEC.ref, make, options, draws=4 if device == "cpu" else 60)


@pytest.mark.parametrize("beta", [1e-6, 0.5, 1.0])
def test_small_gradients_in_fp16(beta, device):
    """A small beta and a large number of items: in fp16 the gradients of the logits would be 0."""
    inputs = inputs_of(device, (30,), torch.float16)
    for reduction, items in (("mean", 1e6), ("none", None)):
        scale = 1e3 / max(beta * (1 - beta), 1e-3)
        upstream = torch.full((30,), 1e-6, device=device) if items is None else None
        half = trained(inputs, "x", "weight")
        loss = SPEC.fn(**half, beta=beta, reduction=reduction, num_items=items)
        loss = loss if upstream is None else (loss * upstream).sum()
        got = torch.autograd.grad(loss * scale * 1e3, (half["x"], half["weight"]))
        exact = {n: t.detach().double().requires_grad_(n in ("x", "weight")) for n, t in inputs.items()}
        want = torch.autograd.grad(
            SPEC.ref(**exact, beta=beta, reduction="sum") * 1e-6 * scale * 1e3, (exact["x"], exact["weight"])
        )
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).norm() <= 3e-3 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_beta
def test_equal_models(beta, dtype, device):
    for options in ({"chunk_rows": 8}, {"reduction": "none"}):
        inputs = same_models(device, dtype=dtype)
        loss, *grads = gradients(inputs, None if options.get("chunk_rows") else torch.ones(19, device=device),
                                 beta=beta, **options)  # fmt: skip
        assert not loss.any()
        assert not any(grad.any() for grad in grads)


@each_beta
def test_never_negative(beta, device):
    """Models that differ by rounding errors."""
    inputs = same_models(device, T=40, H=8, V=300)
    inputs["teacher_x"] = inputs["teacher_x"] * (1 + 1e-6 * torch.randn(40, 1, device=device))
    rows = SPEC.fn(**inputs, beta=beta, reduction="none")
    assert (rows >= 0).all()
    assert rows.max() < 1e-6


@each_beta
def test_words_without_probability(beta, device):
    """A bias of -inf on padded words changes nothing, and peaks far from all other words are finite."""
    inputs = inputs_of(device, bias=True)
    inputs["bias"].data[90:] = inputs["teacher_bias"][90:] = -torch.inf
    inputs["bias"].data[:3] += 300
    inputs["teacher_bias"][2:5] += 300
    fewer = {n: t.detach()[:90] if "weight" in n or "bias" in n else t.detach() for n, t in inputs.items()}
    fewer = {n: t.requires_grad_(inputs[n].requires_grad) for n, t in fewer.items()}
    loss, dx, dweight, dbias = gradients(inputs, beta=beta)
    want = gradients(fewer, beta=beta)
    assert loss.isfinite()
    torch.testing.assert_close((loss, dx, dweight[:90], dbias[:90]), want)
    assert not dweight[90:].any()
    assert not dbias[90:].any()
    exact = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in fewer.items()}
    for a, b in zip(want, gradients(exact, beta=beta), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_outside_the_mask(rank, reduction, device):
    """In the student's states and in the teacher's, and in the upstream gradient."""
    inputs = trained(inputs_of(device, mask=True, rank=rank), "x", "weight", *(("lora_a", "lora_b") if rank else ()))
    inputs["mask"][:2], inputs["mask"][2:5] = False, True
    upstream = torch.rand(19, device=device) if reduction == "none" else None
    want = gradients(inputs, upstream, beta=0.5, reduction=reduction)
    for name in ("x", "teacher_x"):
        inputs[name].data[~inputs["mask"]] = torch.nan
    if upstream is not None:
        upstream[~inputs["mask"]] = torch.nan
    for as_graph in (False, True):
        support._as_in_graph = as_graph
        got = gradients(inputs, upstream, beta=0.5, reduction=reduction)
        support._as_in_graph = False
        torch.testing.assert_close(got, want)
        assert not got[1][~inputs["mask"]].any()
    frozen = trained(inputs, "x")
    torch.testing.assert_close(gradients(frozen, upstream, beta=0.5, reduction=reduction)[1], want[1])


@each_beta
def test_nan_stays_in_its_row(beta, device):
    for name in ("x", "teacher_x"):
        inputs = trained(inputs_of(device, (5,)), "x")
        inputs[name].data[1] = torch.nan
        rows, dx = gradients(inputs, torch.ones(5, device=device), beta=beta, reduction="none")
        assert rows.isnan().tolist() == dx.isnan().any(-1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_products_of_each_route(beta, device):
    """Four with both heads for a scalar loss, three for a frozen head, and six where the gradient comes later."""
    given = {"H": 16, "Ht": 16, "V": 96}
    for names, reduction, expected in (
        (("x", "weight"), "mean", (4, 0)),
        (("x",), "none", (3, 0)),
        (("x", "weight"), "none", (2, 4)),
    ):
        inputs = trained(inputs_of(device, (12,), **given), *names)
        with FlopCounterMode(display=False) as forward:
            loss = SPEC.fn(**inputs, beta=beta, reduction=reduction)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(loss.sum(), [inputs[name] for name in names])
        counts = forward.get_total_flops(), backward.get_total_flops()
        assert counts == tuple(n * 2 * 12 * 16 * 96 for n in expected)


def test_frozen_head(device, poisoned):
    """The forward computes dx, also for a gradient of each token."""
    make = lambda: trained(inputs_of(device, mask=True, bias=True), "x")  # noqa: E731
    assert_accurate(SPEC.fn, SPEC.ref, make, {"beta": 0.5, "reduction": "none", "chunk_rows": 8})


def test_the_teacher_gets_no_gradient(device):
    """Neither where it asks for one, nor where both models share a head."""
    inputs = inputs_of(device, Ht=24)
    for name in ("teacher_x", "teacher_weight"):
        inputs[name].requires_grad_()
    for fn in (SPEC.fn, SPEC.ref):
        fn(**inputs).backward()
        assert inputs["teacher_x"].grad is inputs["teacher_weight"].grad is None
    shared = inputs | {"teacher_weight": inputs["weight"]}
    (got,) = torch.autograd.grad(SPEC.fn(**shared), inputs["weight"])
    apart = inputs | {"teacher_weight": inputs["weight"].detach().clone()}
    assert torch.equal(got, torch.autograd.grad(SPEC.fn(**apart), inputs["weight"])[0])
    compiled = torch.compile(lambda **kwargs: SPEC.fn(**kwargs, chunk_rows=8), backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(**shared), inputs["weight"])
    torch.testing.assert_close(found, got)


def test_dtypes_of_student_and_teacher_may_differ(device):
    inputs = inputs_of(device)
    half = inputs | {name: inputs[name].half() for name in ("teacher_x", "teacher_weight")}
    whole = inputs | {name: half[name].float() for name in ("teacher_x", "teacher_weight")}
    torch.testing.assert_close(gradients(half), gradients(whole))


def test_autocast(device):
    leaves = {n: t.detach() for n, t in inputs_of(device, bias=True).items()}
    leaves = {n: t.requires_grad_("teacher" not in n) for n, t in leaves.items()}
    half = {n: t.detach().half().requires_grad_(t.requires_grad) for n, t in leaves.items()}
    with torch.autocast(device, dtype=torch.float16):
        loss = SPEC.fn(**leaves, beta=0.5)
    grads = torch.autograd.grad(loss, [leaves[n] for n in ("x", "weight", "bias")])
    want, *same = gradients(half, beta=0.5)
    assert torch.equal(loss, want)
    assert {t.dtype for t in grads} == {torch.float32}
    for a, b in zip(grads, same, strict=True):
        torch.testing.assert_close(a.half(), b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_token_counts(reduction, device):
    for rows in (0, 5):
        inputs = inputs_of(device, (rows,), mask=True)
        inputs["mask"].fill_(False)
        loss, *grads = gradients(inputs, None if reduction == "mean" else torch.ones(rows, device=device),
                                 reduction=reduction, beta=0.5, outputs=OUTPUTS)  # fmt: skip
        assert not loss.any()
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_is_added_to_an_existing_one(reduction, device):
    inputs = inputs_of(device)
    upstream = None if reduction == "mean" else torch.rand(19, device=device)
    _, _, want = gradients(inputs, upstream, beta=0.5, reduction=reduction)
    inputs["weight"].grad = torch.ones_like(want)
    memory = inputs["weight"].grad.data_ptr()
    SPEC.fn(**inputs, beta=0.5, reduction=reduction, accumulate_grad=True).backward(upstream)
    torch.testing.assert_close(inputs["weight"].grad, want + 1)
    assert inputs["weight"].grad.data_ptr() == memory


def test_strides_of_the_teacher(device):
    inputs = inputs_of(device, (4, 5))
    want = gradients(inputs)
    inputs["teacher_x"] = inputs["teacher_x"].transpose(0, 1).contiguous().transpose(0, 1)
    inputs["teacher_weight"] = inputs["teacher_weight"].t().contiguous().t()
    torch.testing.assert_close(gradients(inputs), want)


X, HEAD, OTHER = torch.randn(3, 8), torch.randn(11, 8), torch.randn(11, 6)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, r"teacher_weight must have shape \[11, 6\], got \[10, 6\]", {"teacher_weight": OTHER[:10]}),
        (ValueError, r"teacher_x must have shape \[3, 'H'\], got \[2, 6\]", {"teacher_x": X[:2, :6]}),
        (ValueError, "teacher_x must be on cpu", {"teacher_x": X[:, :6].to("meta")}),
        (TypeError, "teacher_weight must have the dtype of teacher_x", {"teacher_weight": OTHER.half()}),
        (ValueError, r"teacher_bias must have shape \[11\]", {"teacher_bias": X[0]}),
        (ValueError, r"bias must have shape \[11\]", {"bias": X[0]}),
        (TypeError, "weight must have the dtype of x", {"weight": HEAD.half()}),
        (TypeError, "mask must be bool or an integer, got torch.float32", {"mask": X[:, 0]}),
        (TypeError, "mask must be bool or an integer, got list", {"mask": [1, 1, 0]}),
        (ValueError, r"mask must have shape \[3\], got \[2\]", {"mask": X[:2, 0] > 0}),
        (ValueError, "mask must be on cpu", {"mask": (X[:, 0] > 0).to("meta")}),
        (ValueError, r"beta must be in \[0, 1\], got 1.5", {"beta": 1.5}),
        (ValueError, r"beta must be in \[0, 1\], got nan", {"beta": float("nan")}),
        (ValueError, "temperature must be positive", {"temperature": 0.0}),
        (ValueError, "teacher_softcap must be positive", {"teacher_softcap": -1.0}),
        (TypeError, "teacher_logit_scale must be a number", {"teacher_logit_scale": "a"}),
        (ValueError, "outputs must be out of", {"outputs": ("logprob",)}),
        (ValueError, "reduction must be one of", {"reduction": "batchmean"}),
        (ValueError, "num_items divides", {"reduction": "none", "num_items": 3}),
        (ValueError, "accumulate_grad must be one of", {"accumulate_grad": 1}),
        (ValueError, "chunk_rows must be at least 1", {"chunk_rows": 0}),
    ],
)
def test_error_names_the_argument(error, message, changed):
    given = {"x": X, "weight": HEAD, "teacher_x": X[:, :6], "teacher_weight": OTHER}
    with pytest.raises(error, match=message):
        ops.fused_linear_divergence(**given | changed)


def test_sums_of_dw_in_16_bits(device, monkeypatch):
    """The last chunk is left for the backward, which knows the factor. fp16 operands of a bf16 weight."""
    if device == "cpu":
        monkeypatch.setattr(dw_sum, "architecture", lambda device: 10)
    inputs = trained(inputs_of(device, (40,), V=72), "x", "weight")
    inputs["weight"] = inputs["weight"].detach().bfloat16().requires_grad_()
    upstream, names = torch.tensor(0.7, device=device), ("x", "weight")
    with torch.autocast(device, dtype=torch.float16):
        loss = SPEC.fn(**inputs, beta=0.5, chunk_rows=16)
    grads = torch.autograd.grad(loss, [inputs[n] for n in names], upstream)
    exact = {n: t.detach().half().double().requires_grad_(n in names) for n, t in inputs.items()}
    want = SPEC.ref(**exact, beta=0.5)
    expected = torch.autograd.grad(want, [exact[n] for n in names], upstream.double())
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    for a, b in zip(grads, expected, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()


@pytest.mark.gpu
@each_beta
def test_more_than_2_31_logits(beta):
    """A single chunk of rows that start beyond 2^31 elements."""
    T, V = 8400, 262144
    x, weight, teacher_x, teacher_weight = (
        torch.randn(n, 16, device="cuda", dtype=torch.bfloat16) for n in (T, V, T, V)
    )
    rows = slice(T - 64, T)
    mask = torch.zeros(T, dtype=torch.bool, device="cuda").index_fill(0, torch.arange(T - 64, T, device="cuda"), True)
    leaves = x.requires_grad_(), weight.requires_grad_()
    heads = {"weight": weight, "teacher_weight": teacher_weight, "beta": beta}
    results = []
    with support.as_in_graph():  # tokens stay in their order
        for chunk_rows in (T, None):
            loss = ops.fused_linear_divergence(x=x, teacher_x=teacher_x, mask=mask, chunk_rows=chunk_rows, **heads)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
    want = fused_linear_divergence_ref(x=x[rows], teacher_x=teacher_x[rows], **heads)
    torch.testing.assert_close(results[0][0], want, rtol=1e-3, atol=1e-5)
    for a, b in zip(results[0][1:], torch.autograd.grad(want, leaves), strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_capture(reduction):
    inputs = trained(inputs_of("cuda", (45,), torch.bfloat16, mask=True), "x", "weight")
    upstream = torch.rand((45,) if reduction == "none" else (), device="cuda")
    step = lambda: gradients(inputs, upstream, beta=0.5, reduction=reduction, chunk_rows=16)  # noqa: E731
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)
