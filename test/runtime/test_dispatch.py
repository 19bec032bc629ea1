"""The ops skip torch's dispatcher only where it would do nothing but call them; for modes see test_opcheck, too."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import profile
from torch.utils._pytree import tree_leaves, tree_map

import liger_like
from liger_like.ops.losses import rows
from liger_like.ops.rms_norm import _rms_norm_fwd as rms_norm_fwd
from liger_like.runtime import registry, support
from liger_like.testing import SPECS, run

OPS = ["liger_like::rms_norm_fwd", "liger_like::rms_norm_bwd"]


class Wrapped(torch.Tensor):
    """A tensor that hands each op to the tensor it holds, and notes its name."""

    @staticmethod
    def __new__(cls, held, seen):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held, seen):
        self.held, self.seen = held, seen

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen = next(x.seen for x in args if isinstance(x, cls))
        seen.append(func.name())
        out = func(*tree_map(lambda x: x.held if isinstance(x, cls) else x, args), **(kwargs or {}))
        return tree_map(lambda x: cls(x, seen) if isinstance(x, torch.Tensor) else x, out)


def step(x):
    """A forward and a backward of an op."""
    weight = torch.nn.Parameter(torch.ones(x.shape[-1], device=x.device))
    y = liger_like.rms_norm(x, weight)
    y.backward(torch.ones_like(y))
    return y


@pytest.fixture
def x(device):
    return torch.randn(4, 32, device=device, requires_grad=True)


def test_nobody_listens(x, monkeypatch):
    """Neither forward nor backward takes the way through the dispatcher."""
    calls = []
    for name in ("_is_heard", "_is_special"):
        asked = getattr(registry, name)
        monkeypatch.setattr(registry, name, lambda *args, asked=asked: calls.append(asked(*args)) or calls[-1])
    step(x)
    assert len(calls) in (3, 5)  # a known signature is not special
    assert not any(calls)


def test_the_profiler_sees_the_ops(x):
    with profile() as prof:
        step(x)
    assert [name for name in OPS if any(event.key == name for event in prof.key_averages())] == OPS


def test_subclasses_see_the_ops(x):
    seen = []
    y = liger_like.rms_norm(Wrapped(x.detach(), seen))
    assert OPS[0] in seen
    torch.testing.assert_close(y.held, liger_like.rms_norm(x).detach())


def test_fake_tensors(x):
    """Call under the mode that made the tensors, and without it."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(step(fake), FakeTensor)
    y = liger_like.rms_norm(fake.detach())
    assert isinstance(y, FakeTensor)
    assert y.shape == x.shape


def test_tensors_without_data():
    y, rstd = rms_norm_fwd(torch.empty(4, 32, device="meta"), None, 1e-6, 0.0, "llama")
    assert (y.shape, y.device.type, rstd.shape, rstd.device.type) == ((4, 32), "meta", (4,), "meta")


def negated(value):
    """Return floating-point tensors as minus their memory, as the imaginary part of a conjugate is."""
    if isinstance(value, list | tuple):
        return type(value)(map(negated, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    t = value.detach()
    return torch.complex(t, -t).conj().imag.requires_grad_(value.requires_grad)


@pytest.mark.parametrize("name", ["add_rms_norm", "flash_attention", "fused_linear_cross_entropy", "moe_experts"])
def test_memory_that_is_negated(name, device):
    """Kernels read memory: negation that torch has put off happens before, in the forward and in the backward."""
    spec = next(spec for spec in SPECS if spec.name == name)
    inputs, found = spec.inputs(torch.float32, device, **spec.test_shapes[0]), []
    for change in (lambda value: value, negated):
        changed = {name: change(value) for name, value in inputs.items()}
        y = spec.fn(**changed, **spec.options[0])
        y = y[0] if isinstance(y, tuple) else y
        y.backward(change(torch.ones_like(y)))
        found.append([y, *(t.grad for t in changed.values() if isinstance(t, torch.Tensor) and t.requires_grad)])
    assert changed[next(iter(inputs))].is_neg()
    assert all(map(torch.equal, *found))
    assert len(found[0]) > 2


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_another_default_device(spec, device):
    """``torch.set_default_device`` chooses where new tensors are: an op's own are where its arguments are."""
    rows.bad_label.cache_clear()
    shape = max((s for s in spec.test_shapes if s.get("N", 0) < 1000), key=lambda s: (len(s), str(s)))
    inputs = spec.inputs(torch.float32, device, **shape)
    leaves = [t for t in inputs.values() if t.requires_grad]

    def results(options):
        outputs = spec.fn(**inputs, **options)
        outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
        made = [t for t in outputs if t.requires_grad]
        upstream = [torch.ones_like(t) for t in made]
        return [*outputs, *torch.autograd.grad(made, leaves, upstream)] if spec.differentiable else outputs

    for options in spec.options:
        with torch.device("meta"):
            found = results(options)
        assert all(map(torch.equal, found, results(options))), options


def test_zeros_without_memory(device):
    """Torch makes such tangents and gradients; in lists the dispatcher finds them, too."""
    zeros = torch._efficientzerotensor((4, 32), device=device)
    assert not liger_like.rms_norm(zeros, torch.ones(32, device=device)).any()
    layers = torch.zeros(5, 4, device=device), torch._efficientzerotensor((5, 4), device=device)
    found, expected = (liger_like.load_balancing_loss(each, 2) for each in (layers, layers[:1]))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*(in beta|prototype) s")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged, torch.strided])
def test_layouts_that_are_no_array(layout, device):
    rows = torch.ones(3, 32, device=device)
    nested = layout in (torch.jagged, torch.strided)
    x = torch.nested.nested_tensor([rows, rows[1:]], layout=layout) if nested else rows.to_sparse(layout=layout)
    weight, got = torch.ones(32, device=device), "a nested one" if nested else layout
    for fn, *more in ((liger_like.rms_norm, weight), (liger_like.swiglu, x), (liger_like.flash_attention, x, x)):
        with pytest.raises(TypeError, match=f"(x|gate|q) must be a dense tensor, got {got}"):
            fn(x, *more)


READS = {
    "tolist": lambda x, host: x[:1].tolist(),
    "item": lambda x, host: x[0].item(),
    "bool": lambda x, host: bool(x[0] > 0),
    "a copy": lambda x, host: x.cpu().numpy(),
    "nonzero": lambda x, host: len(x.nonzero()),
    "values on the host": lambda x, host: host.tolist(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", READS)
def test_no_plan_of_what_the_host_reads(read, mode):
    found = []

    @registry.together
    def function(x, host):
        found.append(READS[read](x, host))
        return torch.empty_like(x)

    with mode():
        for _ in range(4):
            function(torch.zeros(4, device="cuda"), torch.zeros(1))
    assert len(found) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_ops_repeat_their_results(spec, monkeypatch):
    """Fresh inputs of a known signature give the bits that an op gives which repeats nothing."""
    options = spec.options[0]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # as use_deterministic_algorithms

    def results(inputs):
        with torch.no_grad():
            outputs = spec.fn(**inputs, **options)
        outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
        return run(spec.fn, inputs, options) | {f"out{i} without gradients": t for i, t in enumerate(outputs)}

    for shape, seed in itertools.product(spec.test_shapes, range(4)):
        torch.manual_seed(seed)
        inputs = spec.inputs(torch.float16, "cuda", **shape)
        found = results(inputs)
        with monkeypatch.context() as alone:
            alone.setattr(registry, "signature", lambda args: None)
            expected = results(inputs)
        assert [name for name, t in found.items() if not torch.equal(t, expected[name])] == [], (shape, seed)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_trace_of_torch_jit_holds_plain_torch(spec, device):
    """Trace with other numbers than those that the trace is then given."""
    shape = max((s for s in spec.test_shapes if s.get("N", 0) < 1000), key=len)
    for options in spec.options:
        first, second = (spec.inputs(torch.float32, device, **shape) for _ in range(2))
        names = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        rest = {name: value for name, value in first.items() if name not in names}

        def call(*tensors, fn=spec.fn, names=names, rest=rest, options=options):
            results = fn(**dict(zip(names, tensors, strict=True)), **rest, **options)
            return tuple(t for t in tree_leaves(results) if isinstance(t, torch.Tensor))

        traced = torch.jit.trace(call, tuple(first[name].detach() for name in names), check_trace=False)
        assert not [node for node in traced.graph.nodes() if "liger_like" in node.kind()]
        values = [second[name].detach() for name in names]
        torch.testing.assert_close(traced(*values), call(*values, fn=spec.ref), equal_nan=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_sizes_are_tensors_in_a_trace_of_torch_jit(device):
    def call(q, table):
        turned, _ = liger_like.rope(q, q, table, table, rotary_dim=table.shape[-1])
        return liger_like.flash_attention(turned, q, q, scale=q.shape[-1])

    q, table = torch.randn(1, 3, 5, 16, device=device), torch.randn(5, 16, device=device)
    torch.testing.assert_close(torch.jit.trace(call, (q, table))(q, table), call(q, table))
    with pytest.raises(TypeError, match="rotary_dim must be an integer, got Tensor"):
        liger_like.rope(q, q, table, table, rotary_dim=torch.tensor(16))


@pytest.mark.parametrize("kind", support.HOOKS)
def test_hooks_of_a_module_and_of_all_modules(kind):
    module = torch.nn.Linear(2, 2)
    assert support.unhooked(module)
    for hooks in (getattr(module, kind), getattr(torch.nn.modules.module, f"_global{kind}")):
        handle = torch.utils.hooks.RemovableHandle(hooks)
        with handle:
            hooks[handle.id] = print
            assert not support.unhooked(module)
        assert support.unhooked(module)


def test_a_forward_that_is_set_on_the_class(monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    assert not support.unhooked(torch.nn.Linear(2, 2))


def test_the_library_s_own_hooks_of_all_modules_look_on():
    from liger_like.planning._tracer import Tracer

    with Tracer().listening():
        assert support.unhooked(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("transform", ["jvp", "grad", "dual level"])
@pytest.mark.parametrize("name", ["rope", "cross_entropy"])  # a differentiable op, and an autograd function
def test_a_graph_does_not_lose_derivatives_of_transforms(name, transform, device):
    """They were zero, or none, without a word; now they raise what they raise without a graph."""
    spec = next(spec for spec in SPECS if spec.name == name)
    inputs = spec.inputs(torch.float32, device, **spec.test_shapes[-1])
    x = inputs.pop(next(iter(inputs))).detach()

    def loss(x):
        out = spec.fn(x, **inputs)
        return (out[0] if isinstance(out, tuple) else out).pow(2).sum()

    def derivative(x):
        if transform == "grad":
            return torch.func.grad(loss)(x)
        if transform == "jvp":
            return torch.func.jvp(loss, (x,), (x,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(x, x))).tangent

    for fullgraph, error in ((False, "setup_context|jvp"), (True, "no rules")):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=error):
            torch.compile(derivative, backend="aot_eager", fullgraph=fullgraph)(x)
