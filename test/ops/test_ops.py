"""Properties that every op of the table has."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from conftest import DEVICE
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from liger_like import ops
from liger_like.runtime import launcher, replay
from liger_like.testing import SPECS, assert_accurate, run

CASES = [(spec, options) for spec in SPECS for options in spec.options]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
each_op = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
with_gradient = [spec for spec in SPECS if spec.differentiable]
each_differentiable_op = pytest.mark.parametrize("spec", with_gradient, ids=lambda spec: spec.name)


def of_cases(cases):
    ids = [f"{spec.name}-{'-'.join(map(str, options.values()))}" for spec, options in cases]
    return pytest.mark.parametrize(("spec", "options"), cases, ids=ids)


each_case = of_cases(CASES)
each_differentiable_case = of_cases([(spec, options) for spec, options in CASES if spec.differentiable])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def small(spec):
    """Return a shape of several rows, with every optional tensor that the op's shapes have.

    A loss has a program for each row. Without a GPU 19 rows will do: they are two chunks, as its options cut them.
    """
    shape = max((s for s in spec.test_shapes if s.get("N", 0) < 1000), key=lambda s: (len(s), str(s)))
    return shape | {"lead": (19,)} if "V" in shape and DEVICE == "cpu" else shape


def few(spec):
    """Return the shape of ``small`` with three rows of one batch, for a test of the arguments that are no tensors."""
    shape = small(spec)
    return shape | {k: v for k, v in {"lead": (3,), "B": 1, "S": 3, "Sk": 5}.items() if k in shape}


@each_dtype
@each_case
def test_accuracy(spec, options, dtype, device, poisoned):
    loss = {"target", "teacher_x"} & {*spec.inputs(dtype, device, **spec.test_shapes[0])}
    shapes, turn = spec.test_shapes, spec.options.index(options)
    if dtype != torch.float32:
        # In half precision the rounding of the label's logit dominates the error of a row, so compare many rows.
        shapes = [s for s in shapes if torch.Size(s.get("lead", ())).numel() >= 35 * bool(loss)]
        # fp32 compares every option in every shape; here those of slow ops share the shapes, or take them in turn
        slow = device == "cpu" and (loss or spec.name == "moe_experts")
        shapes = shapes[turn % len(shapes) :: len(spec.options)] if slow else shapes
    for shape in shapes:
        enough = (2000 if device == "cuda" else 300) // max(1, torch.Size(shape.get("lead", ())).numel())
        draws = 1 if dtype == torch.float32 else 1 + enough if loss else 4 if device == "cpu" else 32
        # the interpreter takes long for the rows of dw of many words: it computes them with one option
        frozen = device == "cpu" and turn and shape.get("V", 0) > 4096 and "H" in shape
        try:
            inputs = lambda: spec.inputs(dtype, device, **shape)  # noqa: B023, E731
            make = lambda: (x := inputs()) | ({"weight": x["weight"].detach()} if frozen else {})  # noqa: B023, E731
            assert_accurate(spec.fn, spec.ref, make, options, draws, spec.k)
        except AssertionError as e:
            raise AssertionError(f"{shape}: {e}") from None


VIEWS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.nn.functional.pad(t, (3, 5))[..., 3:-5],
    "offset": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
    "strided": lambda t: torch.stack((t, torch.zeros_like(t)), -1)[..., 0],
}


@each_op
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(spec, view, device, poisoned):
    def on_views(fn):
        def call(**kwargs):
            # With equal rows in the weight, equal keys or equal values, some exact gradients are zero.
            equal = {"weight", "lora_a", "lora_b"} | ({"k", "v"} if "cu_seqlens_k" in kwargs else set())
            equal |= {"k_cache", "v_cache"}  # pages of no key are NaN
            fixed = equal if view == "expanded" else ()
            viewed = {
                n: VIEWS[view](t)
                for n, t in kwargs.items()
                if isinstance(t, torch.Tensor)
                and n not in fixed
                and (view == "strided" or (t.dim() > 1 and (t.requires_grad or not spec.differentiable)))
            }
            return fn(**{**kwargs, **viewed})

        return call

    inputs = spec.inputs(torch.float32, device, **small(spec))
    assert_accurate(on_views(spec.fn), on_views(spec.ref), lambda: inputs, spec.options[-1], k=spec.k)


class Viewed(torch.autograd.Function):
    """The identity, whose gradient has other strides, or equal rows."""

    @staticmethod
    def forward(ctx, x, view):
        ctx.view = VIEWS[view]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return ctx.view(upstream) if upstream.dim() > 1 else upstream, None


@each_differentiable_op
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_upstream(spec, view, device, poisoned):
    def viewed(fn):
        def call(**kwargs):
            out = fn(**kwargs)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(t if t is None or not t.requires_grad else Viewed.apply(t, view) for t in out)

        return call

    inputs = spec.inputs(torch.float32, device, **small(spec))
    assert_accurate(viewed(spec.fn), viewed(spec.ref), lambda: inputs, spec.options[-1], k=spec.k)


@each_differentiable_op
def test_zero_stride_upstream(spec, device):
    def summed(fn):
        def call(**kwargs):
            out = fn(**kwargs)
            out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None and t.requires_grad]
            # The output is zero, so only gradients are compared: errors in a long sum cancel by luck.
            return sum((t - t.detach()).sum(tuple(range(t.dim()))) for t in out)

        return call

    make = lambda: spec.inputs(torch.float32, device, **small(spec))  # noqa: E731
    for options in spec.options:
        assert_accurate(summed(spec.fn), summed(spec.ref), make, options, draws=4, k=spec.k)


def differentiable(result):
    outputs = result if isinstance(result, tuple) else (result,)
    return [t for t in outputs if t is not None and t.requires_grad]


@each_differentiable_case
def test_second_backward_and_untouched_tensors(spec, options, device, poisoned):
    inputs = spec.inputs(torch.float32, device, **small(spec))
    leaves = [t for t in inputs.values() if t.requires_grad]
    outputs = differentiable(spec.fn(**inputs, **options))
    upstream = [torch.randn_like(t) for t in outputs]
    kept = [*inputs.values(), *outputs, *upstream]
    before = [t.detach().clone() for t in kept]
    first = [t.clone() for t in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    for a, b in zip((*first, *kept), (*second, *before), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@each_differentiable_case
def test_frozen_inputs(spec, options, device, poisoned):
    inputs = spec.inputs(torch.float32, device, **small(spec))
    full = run(spec.fn, inputs, options)
    names = [n for n, t in inputs.items() if t.requires_grad]
    # one alone and all but one; with further options all but one
    counts = {len(names) - 1} if options != spec.options[0] else {1, len(names) - 1}
    for trained in itertools.chain.from_iterable(itertools.combinations(names, r) for r in counts):
        got = run(spec.fn, {n: t.detach().requires_grad_(n in trained) for n, t in inputs.items()}, options)
        assert {n for n in got if n.startswith("d")} == {f"d{n}" for n in trained}
        for name, tensor in got.items():
            # Without dx, Triton picks another layout for the block, so dw and db add the rows in another order.
            another = device == "cuda" and spec.name == "layer_norm" and name in ("dweight", "dbias")
            # The forward computes the gradients of a frozen head, for an upstream gradient of 1.
            another |= spec.name == "fused_linear_divergence" and options.get("reduction") == "none"
            exact = {} if another else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(tensor, full[name], **exact)


@each_op
def test_no_grad_gives_the_same_and_keeps_no_graph(spec, device):
    inputs = spec.inputs(torch.float32, device, **small(spec))
    for options in spec.options:
        expected = run(spec.fn, inputs, options)
        with torch.no_grad():
            got = spec.fn(**inputs, **options)
        got = [t for t in (got if isinstance(got, tuple) else (got,)) if t is not None]
        assert not any(t.requires_grad for t in got)
        assert not {t.data_ptr() for t in got} & {t.data_ptr() for t in inputs.values() if isinstance(t, torch.Tensor)}
        for i, t in enumerate(got):
            torch.testing.assert_close(t, expected[f"out{i}"], rtol=0, atol=0)


def test_no_grad_leaves_other_derivatives_alone(device):
    """A derivative that an autograd function refuses must not be lost in silence where no backward follows."""
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    with torch.no_grad():
        with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
            ops.rms_norm(forward_ad.make_dual(x, x), weight)
        with pytest.raises(RuntimeError, match="functorch"):
            torch.func.vmap(ops.rms_norm, (0, None))(x[None], weight)


@each_differentiable_op
def test_recomputed_by_a_checkpoint(spec, device):
    """A checkpoint hands out each saved tensor once."""

    def recomputed(**kwargs):
        return checkpoint(spec.fn, use_reentrant=False, **kwargs)

    inputs = spec.inputs(torch.float32, device, **small(spec))
    expected = run(spec.fn, inputs, spec.options[-1])
    for name, t in run(recomputed, inputs, spec.options[-1]).items():
        assert torch.equal(t, expected[name]), name


@each_differentiable_op
def test_double_backward_raises(spec, device):
    inputs = spec.inputs(torch.float32, device, **small(spec))
    leaves = [t for t in inputs.values() if t.requires_grad]
    outputs = differentiable(spec.fn(**inputs))

    def twice(upstream, alone):
        grads = torch.autograd.grad(outputs, leaves, upstream, create_graph=True, retain_graph=True)
        sum(g.sum() for g in grads).backward(inputs=leaves[:1] if alone else None)

    for constant, alone in ((False, False), (True, False), (True, True)):
        if alone and spec.name == "rope":  # rope is linear: its second derivative by the inputs is zero
            continue
        upstream = [torch.randn_like(t, requires_grad=not constant) for t in outputs]
        with pytest.raises(RuntimeError, match="differentiate twice"):
            twice(upstream, alone)


@pytest.mark.parametrize(
    "spec", [spec for spec in with_gradient if spec.name != "fused_linear_token_loss"], ids=lambda spec: spec.name
)
def test_first_derivatives_of_a_graph(spec, device):
    """Gradients under ``create_graph`` are right, also in a checkpoint; fused losses have computed their own before."""
    inputs = spec.inputs(torch.float32, device, **small(spec))
    later = {"fused_linear_cross_entropy": {"recompute": True}, "fused_linear_divergence": {"reduction": "none"}}
    options = later.get(spec.name, {})
    leaves = [t for t in inputs.values() if t.requires_grad]

    def grads(fn, graph):
        outputs = differentiable(fn(**inputs, **options))
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], create_graph=graph)

    again = lambda **kwargs: checkpoint(spec.fn, use_reentrant=False, **kwargs)  # noqa: E731
    for fn in (spec.fn, again):
        for found, expected in zip(grads(fn, True), grads(spec.fn, False), strict=True):
            assert torch.equal(found, expected)


@each_case
def test_meta_device(spec, options):
    """Shapes and dtypes of outputs and gradients come without data, as where a model is built before its weights."""
    inputs = spec.inputs(torch.float32, "cpu", **small(spec))
    expected = run(spec.ref, inputs, options)
    got = run(
        spec.fn, {name: t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in inputs.items()}, options
    )
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert all(t.is_meta for t in got.values())


@each_op
def test_bitwise_repeatable(spec, device, poisoned):
    inputs = spec.inputs(torch.float16, device, **small(spec))
    for options in spec.options:
        first, second = run(spec.fn, inputs, options), run(spec.fn, inputs, options)
        assert all(torch.equal(t, second[name]) for name, t in first.items())


class _Filled(TorchDispatchMode):
    """Record the results of torch's own ops with their sizes, without views and unfilled memory."""

    def __init__(self):
        super().__init__()
        self.filled = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            self.filled += [(func.name(), t.numel()) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result


@each_differentiable_case
def test_torch_fills_nothing_large(spec, options, device):
    """Neither in the forward nor in the backward, where a slice that is no view would be zeros and a copy."""
    inputs = spec.inputs(torch.float32, device, **small(spec))
    # torch computes the low-rank products, checks ids on the CPU, and copies x without what a mask leaves out
    inputs = {name: t for name, t in inputs.items() if "lora" not in name and name not in ("ids", "mask")}
    leaves = [t for t in inputs.values() if t.requires_grad]
    with _Filled() as mode:
        outputs = differentiable(spec.fn(**inputs, **options))
    upstream = [torch.ones_like(t) for t in outputs]
    with mode:
        torch.autograd.grad(outputs, leaves, upstream)
    large = min(t.numel() for t in leaves if t.dim() > 1)
    # a chunk of x has zeros in the rows of ignored tokens, lest their NaN gets into gradients
    assert {name for name, size in mode.filled if size >= large} <= {"aten::masked_fill_.Scalar"}


class _Calls(TorchDispatchMode):
    """The calls of this library's ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_like":
            self.calls.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@each_case
def test_opcheck(spec, options, device):
    with _Calls() as recorded:
        run(spec.fn, spec.inputs(torch.float32, device, **small(spec)), options)
    assert recorded.calls
    for func, (args, kwargs) in recorded.calls.items():
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(func, tuple(args), kwargs)


@each_case
def test_compile_fullgraph(spec, options, device):
    torch._dynamo.reset()
    compiled = torch.compile(spec.fn, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    make = lambda: spec.inputs(torch.float32, device, **small(spec))  # noqa: E731
    assert_accurate(compiled, spec.ref, make, options, k=spec.k)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_compile_over_lengths(options, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    fn = lambda x, w, y: ops.fused_linear_cross_entropy(ops.rms_norm(x), w, y, chunk_rows=24, **options)  # noqa: E731
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    w = torch.randn(40, 16, device=device, dtype=dtype, requires_grad=True)
    for rows in range(20, 70 if device == "cuda" else 26):
        x = torch.randn(rows, 16, device=device, dtype=dtype, requires_grad=True)
        y = torch.randint(0, 40, (rows,), device=device)
        results = []
        for f in (compiled, fn):
            loss = f(x, w, y)
            results.append((loss, *torch.autograd.grad(loss.sum(), (x, w))))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2


@each_op
def test_float64_runs_the_reference(spec, device):
    inputs = spec.inputs(torch.float64, device, **small(spec))
    got, expected = (run(fn, inputs, spec.options[-1]) for fn in (spec.fn, spec.ref))
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


@each_differentiable_op
def test_gradcheck_of_the_reference(spec):
    shape = {k: min(v, 8) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in small(spec).items()}
    tiny = {"lead": (3,), "S": 3, "D": 6, "R": 4, "lengths": ((3, 5), (0, 2), (2, 2))}
    shape |= {k: v for k, v in tiny.items() if k in shape}
    inputs = spec.inputs(torch.float64, "cpu", **shape)
    names = [n for n, t in inputs.items() if t.requires_grad]
    for options in spec.options:
        options = {**options, "casting_mode": "gemma"} if "casting_mode" in options else options

        def fn(*leaves, options=options):
            out = spec.ref(**{**inputs, **dict(zip(names, leaves, strict=True))}, **options)
            return tuple(differentiable(out))

        assert torch.autograd.gradcheck(fn, tuple(inputs[n] for n in names))


NUMBERS = (1, 1.0, True, 0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5))


@each_op
def test_numbers_of_any_type(spec, device, poisoned, monkeypatch):
    """A number gives what it gives to a process that has launched nothing, whatever its type and what came before."""
    parameters = inspect.signature(getattr(ops, spec.name)).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if "float" in str(parameter.annotation) and "Tensor" not in str(parameter.annotation)
    ]
    inputs = spec.inputs(torch.float32, device, **few(spec))
    for name in names:
        fresh = {}
        for value in (0.5, 1.0):
            monkeypatch.setattr(launcher, "_COMPILED", {})
            monkeypatch.setattr(replay, "PLANS", {})
            fresh[value] = run(spec.fn, inputs, {name: value})
        for order in (1, -1):
            monkeypatch.setattr(launcher, "_COMPILED", {})
            monkeypatch.setattr(replay, "PLANS", {})
            for number in NUMBERS[::order]:
                try:
                    found = run(spec.fn, inputs, {name: number})
                except TypeError as error:
                    assert name in str(error)  # noqa: PT017
                    continue
                for key, expected in fresh[float(number)].items():
                    assert torch.equal(found[key], expected), (name, number, key)


TWICE = {
    "swiglu": {"up": "gate"},
    "geglu": {"up": "gate"},
    "add_rms_norm": {"residual": "x"},
    "layer_norm": {"bias": "weight"},
    "rope": {"k": "q", "sin": "cos"},
    "qk_norm_rope": {"k": "q", "k_weight": "q_weight", "sin": "cos"},
    "flash_attention": {"v": "k", "k": "q"},
    "flash_attention_varlen": {"v": "k", "cu_seqlens_k": "cu_seqlens_q"},
}


@pytest.mark.parametrize("name", TWICE)
def test_a_tensor_in_two_places_compiles(name, device, poisoned):
    """Compare with the gradients of eager mode."""
    spec = next(spec for spec in SPECS if spec.name == name)
    for second, first in TWICE[name].items():
        shapes = (shape | {"Hk": shape["H"]} if "Hk" in shape else shape for shape in spec.test_shapes)
        drawn = (spec.inputs(torch.float32, device, **shape) for shape in shapes)
        inputs = next(x for x in drawn if first in x and second in x and x[first].shape == x[second].shape)
        twice = lambda fn, first=first, second=second: lambda **kwargs: fn(**kwargs | {second: kwargs[first]})  # noqa: E731
        torch._dynamo.reset()
        compiled = torch.compile(twice(spec.fn), backend="aot_eager", fullgraph=True)
        expected, found = (run(fn, inputs, {}) for fn in (twice(spec.fn), compiled))
        for key in expected:
            torch.testing.assert_close(found[key], expected[key])
