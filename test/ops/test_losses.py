"""Options, errors and edge cases of the losses."""

import pytest
import torch
from torch.nn import functional

from liger_like import ops
from liger_like.ops.losses.cross_entropy import cross_entropy_ref
from liger_like.ops.losses.rows import Options, reduce_loss, reduce_rows, row_losses_ref
from liger_like.testing import SPECS, assert_accurate

LINEAR = next(s for s in SPECS if s.name == "fused_linear_cross_entropy")


def test_equals_torch(device):
    logits, y = torch.randn(6, 5, 40, device=device), torch.randint(0, 40, (6, 5), device=device)
    y[0, :3] = 7
    weight = torch.rand(40, device=device)
    for reduction in ("mean", "sum", "none"):
        for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.3}):
            expected = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=7, reduction=reduction, **options
            )
            got = ops.cross_entropy(logits, y, ignore_index=7, reduction=reduction, **options)
            torch.testing.assert_close(got, expected.view(got.shape))


@pytest.mark.parametrize("fused", [False, True])
def test_frozen_backbone_trains_the_head(device, fused):
    x = torch.randn(9, 16, device=device)
    w = torch.randn(50, 16, device=device, requires_grad=True)
    y = torch.randint(0, 50, (9,), device=device)
    loss = ops.fused_linear_cross_entropy(x, w, y) if fused else ops.cross_entropy(functional.linear(x, w), y)
    loss.backward()
    expected = torch.autograd.grad(functional.cross_entropy(functional.linear(x, w), y), w)[0]
    torch.testing.assert_close(w.grad, expected)


@pytest.mark.parametrize("training", [False, True])
def test_logits_of_ignored_rows_are_left_alone(device, training):
    logits = torch.randn(4, 30, device=device, requires_grad=training)
    before = logits.detach().clone()
    loss = ops.cross_entropy(logits, torch.full((4,), -100, device=device))
    if training:
        loss.backward()
        assert logits.grad.eq(0).all()
    assert loss == 0
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("num_items", "reduction"), [(None, "mean"), (None, "sum"), (None, "none"), (0, "mean"), ("tensor", "mean")]
)
def test_all_rows_ignored(device, reduction, num_items):
    num_items = torch.zeros((), dtype=torch.int64, device=device) if num_items == "tensor" else num_items
    x = torch.randn(5, 16, device=device, requires_grad=True)
    w = torch.randn(30, 16, device=device, requires_grad=True)
    y = torch.full((5,), -100, device=device)
    loss = ops.fused_linear_cross_entropy(x, w, y, reduction=reduction, num_items=num_items).sum()
    loss.backward()
    assert loss == 0
    assert x.grad.eq(0).all()
    assert w.grad.eq(0).all()


@pytest.mark.parametrize("rows", [1, 4096, 9000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("reduction", "num_items"), [("sum", None), ("mean", None), ("mean", 7), ("mean", "tensor")])
def test_sum_of_many_rows(rows, weighted, reduction, num_items, device):
    loss, target = torch.randn(rows, device=device), torch.randint(0, 5, (rows,), device=device)
    loss[::3], target[::3] = 0, -100  # with a single row, all rows are ignored
    weight = torch.rand(5, device=device) if weighted else None
    num_items = torch.tensor(7, device=device) if num_items == "tensor" else num_items
    options = reduction, target, weight, -100, num_items
    out, factor = reduce_rows(loss, *options)
    for got, total in ((out, loss.double().sum()), (factor, torch.ones_like(out, dtype=torch.float64))):
        torch.testing.assert_close(got, reduce_loss(total, *options).float())


def test_ignored_rows_do_not_count(device):
    x, w = torch.randn(20, 16, device=device), torch.randn(40, 16, device=device)
    y = torch.randint(0, 40, (20,), device=device)
    y[::3] = -100
    kept = y != -100
    for num_items in (None, 13, torch.tensor(13, device=device)):
        got = ops.fused_linear_cross_entropy(x, w, y, num_items=num_items)
        same = ops.fused_linear_cross_entropy(x[kept], w, y[kept], num_items=num_items)
        torch.testing.assert_close(got, same)


def test_chunks_do_not_change_the_result(device):
    inputs = LINEAR.inputs(torch.float32, device, lead=(45,), H=16, V=77)
    results = []
    for chunk_rows in (1, 7, 44, 45, 1000, None):
        loss = ops.fused_linear_cross_entropy(**inputs, chunk_rows=chunk_rows)
        results.append((loss, *torch.autograd.grad(loss, (inputs["x"], inputs["weight"]))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_outputs_are_those_of_the_logits(device):
    inputs = {n: t.detach() for n, t in LINEAR.inputs(torch.float32, device, lead=(4, 9), H=24, V=99).items()}
    y, ignored = inputs["target"], inputs["target"] == -100
    out = ops.fused_linear_cross_entropy(**inputs, outputs=("correct", "argmax", "entropy", "lse", "logprob"))
    logp = functional.linear(inputs["x"], inputs["weight"]).log_softmax(-1)
    torch.testing.assert_close(out.entropy[~ignored], torch.distributions.Categorical(logits=logp).entropy()[~ignored])
    torch.testing.assert_close(out.logprob[~ignored], logp.gather(-1, y.clamp(0)[..., None])[..., 0][~ignored])
    assert torch.equal(out.argmax, logp.argmax(-1).masked_fill(ignored, -1))
    assert torch.equal(out.correct, logp.argmax(-1) == y)
    assert all(t.shape == y.shape for t in (out.entropy, out.lse, out.logprob, out.argmax))
    assert all(not t[ignored].any() for t in (out.entropy, out.lse, out.logprob, out.correct))


@pytest.mark.parametrize("fn", [ops.fused_linear_cross_entropy, ops.fused_linear_logprobs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
def test_ignored_tokens_of_label_minus_1_are_not_correct(fn, dtype, device):
    """Their argmax is -1, too."""
    x, weight = (torch.randn(shape, dtype=dtype, device=device) for shape in ((4, 8), (20, 8)))
    y = (x @ weight.T).argmax(-1).index_fill(0, torch.tensor([0, 2], device=device), -1)
    assert fn(x, weight, y, ignore_index=-1, outputs=("correct",)).correct.tolist() == [False, True, False, True]


def test_only_what_was_asked_for(device):
    inputs = LINEAR.inputs(torch.float32, device, lead=(5,), H=8, V=20)
    out = ops.fused_linear_cross_entropy(**inputs, outputs=("lse",))
    assert out._fields == ("loss", "logprob", "lse", "entropy", "argmax", "correct")
    assert [n for n, t in out._asdict().items() if t is not None] == ["loss", "lse"]
    assert out.loss.requires_grad
    assert not out.lse.requires_grad


def test_infinite_logits(device):
    """A vocabulary masked by -inf, whole blocks of it, and labels outside of the mask."""
    logits = torch.randn(4, 9000, device=device)
    logits[:, :8500] = float("-inf")
    logits[1, 100] = 3.0
    logits.requires_grad_()
    y = torch.tensor([8600, 100, 8999, 8500], device=device)
    loss = ops.cross_entropy(logits, y, reduction="none")
    expected = functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(loss, expected)
    got, want = (torch.autograd.grad(t.sum(), logits, retain_graph=True)[0] for t in (loss, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize(("mean", "std"), [(1e4, 3), (-1e4, 3), (500, 1), (0, 30)])
def test_logits_far_from_zero(mean, std, options, device):
    """Neither loss nor gradient may lose what lse loses where it is rounded to fp32."""

    def make():
        logits = torch.randn(30, 300, device=device) * std + mean
        return {"logits": logits.requires_grad_(), "target": torch.randint(300, (30,), device=device)}

    assert_accurate(ops.cross_entropy, cross_entropy_ref, make, options, draws=4)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"outputs": ("entropy", "logprob")}], ids=str)
def test_logits_of_a_head_far_from_zero(options, device):
    """Use products that are exact in fp32, so that only the loss can be wrong."""

    def make():
        x, w, bias = (torch.randn(shape, device=device) for shape in ((30, 8), (300, 8), (300,)))
        leaves = {"x": x.round(), "weight": (w * 8).round() / 8, "bias": (bias * 8).round() / 8 + 1e4}
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
        return leaves | {"target": torch.randint(300, (30,), device=device)}

    assert_accurate(LINEAR.fn, LINEAR.ref, make, options | {"chunk_rows": 16}, draws=4)


@pytest.mark.parametrize("descending", [False, True])
def test_largest_logit_moves_over_the_blocks(device, descending):
    logits = torch.linspace(30, -30, 20000, device=device)[None] * (1 if descending else -1)
    y = torch.tensor([9000], device=device)
    out = ops.fused_linear_cross_entropy(logits.new_ones(1, 1), logits.mT, y, outputs=("lse", "entropy", "argmax"))
    torch.testing.assert_close(ops.cross_entropy(logits, y), functional.cross_entropy(logits, y))
    torch.testing.assert_close(out.lse, logits.logsumexp(-1))
    torch.testing.assert_close(out.entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert out.argmax == logits.argmax()


def test_nan_stays_in_its_row(device):
    logits = torch.randn(3, 50, device=device)
    logits[1, 4] = float("nan")
    logits.requires_grad_()
    loss = ops.cross_entropy(logits, torch.tensor([1, 2, 3], device=device), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert logits.grad.isnan().any(-1).tolist() == [False, True, False]


def test_upstream_nan_stays_in_its_row(device):
    x, w = torch.randn(3, 16, device=device, requires_grad=True), torch.randn(30, 16, device=device)
    y = torch.tensor([1, 2, 3], device=device)
    upstream = torch.tensor([1.0, float("nan"), float("inf")], device=device)
    ops.fused_linear_cross_entropy(x, w, y, reduction="none").backward(upstream)
    assert x.grad.isfinite().all(-1).tolist() == [True, False, False]


def test_half_precision_gradients_do_not_underflow(device):
    """Upstream gradients of 1e-7, below fp16's smallest number, as of a mean over ten million tokens."""
    x = torch.randn(40, 16, device=device).half().requires_grad_()
    w = torch.randn(300, 16, device=device).half().requires_grad_()
    y = torch.randint(0, 300, (40,), device=device)
    for reduction in ("sum", "none"):
        loss = ops.fused_linear_cross_entropy(x, w, y, reduction=reduction).sum()
        large = torch.autograd.grad(loss, (x, w), retain_graph=True)
        small = torch.autograd.grad(loss * 1e-4 * 1e-3, (x, w))
        for a, b in zip(large, small, strict=True):
            kept = a.abs() > 1
            torch.testing.assert_close(b[kept] * 2**13, a[kept] * 2**13 * 1e-7, rtol=0.3, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}], ids=str
)
def test_half_precision_gradients_of_class_weights_of_any_scale(options, device):
    """A mean over weights does not change with their scale: by powers of two, not a bit."""
    inputs = LINEAR.inputs(torch.float16, device, lead=(20,), H=16, V=40, weighted=True)
    results = []
    for exponent in (0, -27, -60, 17, 60):
        weights = inputs["class_weight"] * 2.0**exponent
        loss = ops.fused_linear_cross_entropy(**inputs | {"class_weight": weights}, **options)
        results.append((loss, *torch.autograd.grad(loss, (inputs["x"], inputs["weight"]))))
    assert results[0][1].any()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_half_precision_gradients_of_class_weights_far_apart(options, device):
    """They differ by more than fp16 holds, and the largest ones have no label."""

    def make():
        inputs = LINEAR.inputs(torch.float16, device, lead=(20,), H=16, V=40)
        inputs["target"].clamp_(max=12)
        return inputs | {"class_weight": torch.logspace(-9, 9, 40, device=device)}

    assert_accurate(LINEAR.fn, LINEAR.ref, make, options, draws=4)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"outputs": ("logprob",)}], ids=str)
def test_half_precision_gradients_of_labels_without_weight(options, device):
    """They are 0, however large the upstream gradient is: a scaler of gradients begins with 65536."""
    inputs = LINEAR.inputs(torch.float16, device, lead=(20,), H=16, V=40)
    inputs["target"].zero_()
    weights = torch.ones(40, device=device)
    weights[0] = 0
    result = ops.fused_linear_cross_entropy(**inputs, class_weight=weights, **options)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    for gradient in torch.autograd.grad(loss * 65536, (inputs["x"], inputs["weight"])):
        assert not gradient.any()


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_half_precision_gradients_of_a_large_z_loss(options, device):
    make = lambda: LINEAR.inputs(torch.float16, device, lead=(20,), H=64, V=200)  # noqa: E731
    assert_accurate(LINEAR.fn, LINEAR.ref, make, {"z_loss": 5e3, **options}, draws=16)


def test_weight_gradient_over_many_chunks(device):
    """Chunks of one token: a half-precision accumulator would lose what this one keeps."""
    make = lambda: LINEAR.inputs(torch.float16, device, lead=(200,), H=16, V=40)  # noqa: E731
    assert_accurate(LINEAR.fn, LINEAR.ref, make, {"chunk_rows": 8})


def test_accumulation_dtype(device):
    inputs = LINEAR.inputs(torch.float16, device, lead=(64,), H=16, V=40)
    loss = ops.fused_linear_cross_entropy(**inputs, chunk_rows=8)
    half = ops.fused_linear_cross_entropy(**inputs, chunk_rows=8, accum_dtype=torch.float16)
    exact, rough = (torch.autograd.grad(t, inputs["weight"])[0] for t in (loss, half))
    assert exact.dtype == rough.dtype == torch.float16
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0.05, atol=1e-3)


def test_autocast(device):
    x = torch.randn(6, 16, device=device, requires_grad=True)
    w = torch.randn(40, 16, device=device, requires_grad=True)
    y = torch.randint(0, 40, (6,), device=device)
    dtype = torch.float16
    with torch.autocast(device, dtype=dtype):
        loss = ops.fused_linear_cross_entropy(x, w, y)
    loss.backward()
    half = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
    expected = ops.fused_linear_cross_entropy(*half, y)
    expected.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, half[0].grad.float(), rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_low_rank_term_whose_first_product_is_made(autocast, device):
    """Call as a caller with a dropout before the head does."""
    x, w = torch.randn(2, 3, 16, device=device), torch.randn(40, 16, device=device)
    y = torch.randint(0, 40, (2, 3), device=device)
    lora = [torch.randn(shape, device=device) for shape in ((4, 16), (40, 4))]
    results = []
    for made in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, *lora)]
        with torch.autocast(device, torch.float16, enabled=autocast):
            u = torch.nn.functional.linear(leaves[0], leaves[1]) * 0.5
            term = (u.to(x.dtype), leaves[2]) if made else (leaves[1], leaves[2], 0.5)
            loss = ops.fused_linear_cross_entropy(leaves[0], w, y, lora=term)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3 if autocast else None, atol=1e-4 if autocast else None)
    with pytest.raises(ValueError, match=r"lora\[0\] must"):
        ops.fused_linear_cross_entropy(x, w, y, lora=(lora[0], lora[1]))


def test_label_out_of_range_on_the_cpu():
    logits = torch.randn(4, 20, requires_grad=True)
    for label in (20, -1, 2**40):
        y = torch.tensor([1, label, 2, -100])
        for call in (
            lambda: ops.cross_entropy(logits, y),  # noqa: B023
            lambda: ops.fused_linear_cross_entropy(logits, torch.randn(20, 20), y),  # noqa: B023
            lambda: ops.fused_linear_cross_entropy(logits, torch.randn(20, 20), y, recompute=True),  # noqa: B023
            lambda: ops.fused_linear_cross_entropy(logits, torch.randn(20, 20), y, chunk_rows=2),  # noqa: B023
            lambda: row_losses_ref(logits, y, None, Options(-100, 0.0, 0.0, None, 1.0)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"label {label}"):
                call()
    ops.cross_entropy(logits, torch.tensor([0, 19, 2, -100]))


def test_inplace_backward(device):
    leaf = torch.randn(6, 5, 40, device=device, requires_grad=True)
    y = torch.randint(0, 40, (6, 5), device=device)
    y[0, :3] = -100
    upstream = torch.rand(6, 5, device=device)
    seen = []

    def gradient(inplace, view, keep=False):
        z = view(leaf * 1.0)
        z.register_hook(lambda grad: seen.append(grad.data_ptr() == z.data_ptr()))
        values = z.detach().clone()
        loss = ops.cross_entropy(z, y, reduction="none", label_smoothing=0.1, inplace_backward=inplace)
        results = [torch.autograd.grad(loss, leaf, upstream, retain_graph=True)[0].clone() for _ in range(2 * keep)]
        assert torch.equal(z, values)
        return [*results, *torch.autograd.grad(loss, leaf, upstream)]

    (want,) = gradient(False, lambda z: z)
    cases = [
        (lambda z: z, False, [True]),
        (lambda z: z, True, [False, False, True]),
        (lambda z: torch.cat((z, z), -1)[..., :40], False, [False]),
    ]
    for view, keep, in_place in cases:
        seen.clear()
        for grad in gradient(True, view, keep):
            torch.testing.assert_close(grad, want)
        assert seen == in_place
    seen.clear()
    gradient(False, lambda z: z)
    assert seen == [False]


def test_inplace_backward_raises_for_others_that_need_the_logits(device):
    y = torch.randint(0, 40, (6,), device=device)

    def loss(inplace):
        z = torch.randn(6, 40, device=device, requires_grad=True) * 1.0
        return z, z.square().sum(), ops.cross_entropy(z, y, inplace_backward=inplace)

    z, other, ce = loss(False)
    (ce + other).backward()
    z, other, ce = loss(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (ce + other).backward()  # the loss's backward runs first and overwrites the logits
    z, _, ce = loss(True)
    with torch.no_grad():
        z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ce.backward()
    z, _, ce = loss(True)
    with pytest.raises(RuntimeError, match=r"differentiate twice|once_differentiable"):
        torch.autograd.grad(ce, z, torch.ones_like(ce, requires_grad=True), create_graph=True)[0].sum().backward()


def test_nothing_is_computed_for_the_backward_without_one(device, monkeypatch):
    from liger_like.ops.losses import steps as module

    calls = []
    monkeypatch.setattr(module, "addmm", lambda *args: calls.append(args))
    x, w = torch.randn(6, 16, device=device, requires_grad=True), torch.randn(40, 16, device=device)
    y = torch.randint(0, 40, (6,), device=device)
    with torch.no_grad():
        ops.fused_linear_cross_entropy(x, w, y)
    ops.fused_linear_cross_entropy(x.detach(), w, y)
    assert not calls
    ops.fused_linear_cross_entropy(x, w, y)
    assert len(calls) == 1  # one product for dx; none for dw, since the weight is frozen


def test_compile_with_symbolic_numbers(device):
    z, y = torch.randn(6, 11, device=device), torch.randint(11, (6,), device=device)
    compiled = torch.compile(ops.cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    for softcap in (5.0, 6.0):
        assert torch.equal(compiled(z, y, softcap=softcap), ops.cross_entropy(z, y, softcap=softcap))
