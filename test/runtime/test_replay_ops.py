"""Whole ops repeat their launches: with and without gradients, with their checks twice."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_replay import Kernel, called, pretended  # noqa: F401  # a fixture of all tests
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

import liger_like
from liger_like.ops.attention import choice
from liger_like.ops.losses import dw_sum, row_kernels
from liger_like.runtime import autograd, launcher, registry, replay, tma
from liger_like.runtime.launcher import launch
from liger_like.runtime.replay import Node, Plan
from liger_like.testing import SPECS, run
from liger_like.testing.inputs import attention_inputs, linear_loss_inputs

# ops take CPU tensors to their kernels only where these are interpreted
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the plans of all tests")


@pytest.fixture
def doubling(monkeypatch):
    """A kernel, and an op that launches it."""
    kernel = Kernel(2)
    monkeypatch.setattr(registry, "LIBRARY", torch.library.Library("liger_like_replay", "DEF"))
    monkeypatch.setattr(torch.ops, "liger_like", torch.ops.liger_like_replay)
    monkeypatch.setattr(torch.library, "register_fake", lambda *args, **kwargs: None)

    @registry.op("double(Tensor x, float eps) -> Tensor", None, replayed=True)
    def double(x, eps):
        y = torch.empty_like(x)
        launch(kernel, (1,), (x, y), (1,), (eps,), N=1)
        return y

    yield kernel, double
    registry.LIBRARY._destroy()


def test_an_op_that_a_compiled_graph_calls_repeats_its_launches(doubling):
    """Graphs call the dispatcher. A recording of what is around the op becomes no plan, which would not call it."""
    (kernel, _), op = doubling, torch.ops.liger_like_replay.double.default

    def around(x):
        return op(x, 0.5)

    for recorded in (False, False, False, True, True, True):
        x = torch.randn(8)
        y = called(around, x)[0] if recorded else around(x)
        assert kernel.runs[-1][1:3] == (x.data_ptr(), y.data_ptr())
    plans = {key[0]: type(plan) for key, plan in replay.PLANS.items()}
    assert plans.pop(around) is bool
    assert [*plans.values()] == [Plan]


def test_sums_of_gradients_take_the_memory_of_a_recorded_one():
    """torch adds in place if nothing else holds the memory, nor a Python object of its storage."""
    kernel, pointers = Kernel(2), []

    def double(dy):
        dx = torch.empty_like(dy)
        launch(kernel, (1,), (dy, dx), (1,), (1.0,), N=1)
        pointers.append(dx.data_ptr())
        return dx

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return called(double, dy)[0]

    for _ in range(2):  # the second backward is recorded
        x = torch.ones(8, requires_grad=True)
        first = x * 3
        (Doubled.apply(x) + first).sum().backward()
        assert x.grad.data_ptr() == pointers[-1]
    assert len(replay.PLANS) == 1
    assert all(isinstance(plan, Plan) for plan in replay.PLANS.values())


def test_a_function_repeats_the_launches_of_its_ops(doubling):
    """Without gradients its checks run twice, and all modes still see its ops."""
    (kernel, double), checked = doubling, []

    @registry.on_shards(None, replayed=True)
    def twice(x, *, eps=1.0, unused=1.0):
        checked.append(eps)
        return double(double(x, eps), eps)

    for call in range(4):
        x = torch.randn(8)
        with torch.no_grad():
            y = twice(x=x, eps=0.5)
        (*_, x_ptr, inner, _, _, _), (*_, same, y_ptr, _, eps, _) = kernel.runs[-2:]
        assert (x_ptr, y_ptr, eps) == (x.data_ptr(), y.data_ptr(), 0.5)
        assert inner == same != y_ptr
        assert len(checked) == min(call + 1, 2)
    with torch.no_grad(), profile() as prof:
        twice(x=x, eps=0.5)
    assert [event.count for event in prof.key_averages() if event.key == "liger_like_replay::double"] == [2]
    twice(x=x, eps=0.5)
    with torch.no_grad():
        twice(x=x, eps=0.25)
        twice(x=x, unused=0.5)
    assert checked[2:] == [0.5, 0.5, 0.25, 1.0]


def linear_of(double):
    """An autograd function of two tensors and a factor, whose results come from ``double``."""

    class Linear(torch.autograd.Function):
        launch = staticmethod(lambda x, factor, other, *_: (double(x, factor), double(other, factor)))

        @staticmethod
        def forward(ctx, x, factor, other, *more):
            ctx.factor, ctx.results = factor, more[-1]
            return more[-1]

        @staticmethod
        def backward(ctx, dy, dz):
            return dy * ctx.factor, None, dz * ctx.factor * 10, None, None

    return Linear


def test_a_function_in_grad_mode_makes_the_node_alone(doubling):
    """Its checks run twice for whatever it looks at; gradients are those of its own arguments."""
    (kernel, double), checked = doubling, []
    linear = linear_of(double)

    @registry.on_shards(None, replayed=True)
    def op(x, other, *, factor=1.0, turned=False, unused=0.0):
        checked.append(torch.are_deterministic_algorithms_enabled())
        y, z = autograd.apply(linear, x, factor, other)
        return (z, y) if turned else z

    def step(needs=(True, True), **options):
        before = len(checked)
        x, other = (torch.randn(8).requires_grad_(need) for need in needs)
        found = op(x, other, **options)
        y, z = found[::-1] if options.get("turned") else (None, found)
        first = z.grad_fn.results[0] if z.requires_grad else y
        pointers = [(x.data_ptr(), first.data_ptr()), (other.data_ptr(), z.data_ptr())]
        assert [run[1:3] for run in kernel.runs[-2:]] == pointers
        dz = torch.randn(8)
        if z.requires_grad:
            (z * dz + (0 if y is None else y * 3)).sum().backward()
            factor = options.get("factor", 1.0)
            assert (
                x.grad is None if not needs[0] else torch.equal(x.grad, torch.full((8,), (y is not None) * 3 * factor))
            )
            assert other.grad is None if not needs[1] else torch.allclose(other.grad, dz * factor * 10)
        return len(checked) > before

    for options in (
        {},
        {"factor": 2.0},
        {"turned": True, "factor": 0.5},
        {"needs": (False, True)},
        {"turned": False},
        {"unused": 2.0},
    ):
        assert [step(**options) for _ in range(4)] == [True, True, False, False], options
    with torch.no_grad():
        assert [step(turned=True) for _ in range(3)] == [True, True, False]
    with profile() as prof:
        assert step()
    assert any(event.key == "liger_like_replay::double" for event in prof.key_averages())
    torch.use_deterministic_algorithms(True)
    try:
        assert step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not step()
    kernel.pre_run_hooks.append(lambda metadata: None)
    assert step()
    kernel.pre_run_hooks.clear()
    same = torch.randn(8, requires_grad=True)
    for _ in range(3):
        op(same, same, factor=3.0)
    assert checked[-3:] == [False] * 3
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        op(torch.autograd.forward_ad.make_dual(same, same.detach()), same, factor=3.0)


def test_a_plan_loses_no_tangent(doubling):
    """Without gradients, too, where a plan would return a tensor without one."""
    linear = linear_of(doubling[1])
    op = registry.together(lambda x, other: autograd.apply(linear, x, 1.0, other))
    with torch.no_grad():
        for _ in range(3):
            op(torch.randn(8), torch.randn(8))
        assert Plan in map(type, replay.PLANS.values())
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
            op(torch.autograd.forward_ad.make_dual(torch.randn(8), torch.randn(8)), torch.randn(8))


def test_a_call_that_failed_in_grad_mode_is_not_the_first(doubling):
    linear, calls, full = linear_of(doubling[1]), [], [True]

    @registry.together
    def op(x, other):
        calls.append(x)
        if full and full.pop():
            raise torch.OutOfMemoryError
        return autograd.apply(linear, x, 1.0, other)

    with pytest.raises(torch.OutOfMemoryError):
        op(torch.randn(8, requires_grad=True), torch.randn(8))
    for times in (2, 3, 3):
        op(torch.randn(8, requires_grad=True), torch.randn(8))
        assert len(calls) == times


@pytest.mark.parametrize(("hidden", "times"), [(False, 2), (True, 4)])
def test_a_function_of_one_tensor_and_one_result(hidden, times, doubling):
    """A tuple of one tensor stays a tuple, and a tensor is not taken apart; a node keeps no tensor of an older call."""
    (_, double), calls = doubling, []

    class Linear(torch.autograd.Function):
        launch = staticmethod(lambda x, *more: (double(x, 1.0),))
        forward = staticmethod(lambda ctx, x, *more: more[-1])
        backward = staticmethod(lambda ctx, dy: (dy * 3, *(None,) * (len(ctx.needs_input_grad) - 1)))

    @registry.on_shards(None, replayed=True)
    def op(x):
        calls.append(x)
        return (autograd.apply(Linear, x, *[(1.0, [x])] * hidden)[0],)

    for _ in range(4):
        x = torch.randn(8, requires_grad=True)
        (y,) = op(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((8,), 3.0))
    assert len(calls) == times


def test_a_function_of_two_nodes(doubling):
    """The second node launches for results of the first, and gets edges to its first inputs alone."""
    (kernel, double), calls = doubling, []

    class First(torch.autograd.Function):
        launch = staticmethod(lambda factor, x: (double(x, factor), double(x, 2 * factor)))

        @staticmethod
        def forward(ctx, factor, x, results):
            ctx.factor = factor
            ctx.mark_non_differentiable(results[1])
            return results

        @staticmethod
        def backward(ctx, dy, _):
            return None, dy * ctx.factor, None

    class Second(torch.autograd.Function):
        inputs = 1
        launch = staticmethod(lambda y, half, other, factor: (double(half, factor), double(other, factor)))
        forward = staticmethod(lambda ctx, y, results: results)
        backward = staticmethod(lambda ctx, dz, du: (dz * 5 + du * 7, None))

    @registry.together
    def op(x, other, factor):
        calls.append(factor)
        return autograd.apply(Second, *autograd.apply(First, factor, x), other, 10 * factor)

    for factor in (0.5, 0.25):
        for called_before in (0, 1, 2, 2):
            assert len(calls) == called_before
            x, other = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
            z, u = op(x, other, factor)
            (*_, x_ptr, y_ptr, _, a, _), (*_, same, half, _, b, _), (*_, read, out, _, c, _), last = kernel.runs[-4:]
            assert (x_ptr, same, read, out) == (x.data_ptr(), x.data_ptr(), half, z.data_ptr())
            assert (*last[1:3], a, b, c) == (other.data_ptr(), u.data_ptr(), factor, 2 * factor, 10 * factor)
            assert y_ptr != half
            (z + u).sum().backward()
            assert torch.equal(x.grad, torch.full((8,), 12 * factor))
            assert other.grad is None
        calls.clear()
        kernel.pre_run_hooks.append(lambda metadata: None)
        op(x, other, factor)
        assert calls == [factor]
        calls.clear()
        kernel.pre_run_hooks.clear()


MORE = {
    "an argument of the backward alone": lambda apply, x, other: apply(x, 1.0, other, x * 2),
    "another argument": lambda apply, x, other: apply(x + 0, 1.0, other),
    "another result": lambda apply, x, other: (apply(x, 1.0, other)[0] * 1,),
    "a result of the first of two nodes": lambda apply, x, other: (apply(x, 1.0, other), apply(other, 1.0, x))[0],
    "none": lambda apply, x, other: (x * 2, other * 2),
}


@pytest.mark.parametrize("name", MORE)
def test_what_a_node_cannot_repeat(name, doubling):
    linear, calls = linear_of(doubling[1]), []

    @registry.on_shards(None, replayed=True)
    def op(x, other):
        calls.append(x)
        return MORE[name](lambda *args: autograd.apply(linear, *args), x, other)

    for _ in range(4):
        op(torch.randn(8, requires_grad=True), torch.randn(8))
    assert len(calls) == 4
    assert replay._watched.tensors is None


def test_ops_of_a_backward_are_one_plan(doubling):
    """``together`` asks once; a profiler sees each op."""
    (kernel, double), calls = doubling, []

    @registry.together
    def backward(dy, factor, needs):
        calls.append(factor)
        return tuple(double(dy, factor) if need else None for need in needs)

    for called_before in (0, 1, 2, 2):
        dy = torch.randn(8)
        assert len(calls) == called_before
        with torch.no_grad():
            dx, none = backward(dy, 0.5, [True, False])
        assert none is None
        assert kernel.runs[-1][1:3] == (dy.data_ptr(), dx.data_ptr())
    with torch.no_grad(), profile() as prof:
        backward(dy, 0.5, [True, False])
    assert any(event.key == "liger_like_replay::double" for event in prof.key_averages())


EXPERTS = {"H": 64, "I": 32, "E": 4, "K": 2, "bias": True}


@interpreted
@pytest.mark.parametrize("sizes", [{}, {"sinks": True}])
def test_attention_is_repeated(sizes, monkeypatch):
    """On Hopper, too, whose backward adds dq to zeros: both passes have one plan each."""
    without_kernels(monkeypatch)
    monkeypatch.setattr(choice, "INTERPRET", False)
    monkeypatch.setattr(choice, "architecture", lambda device: 9)
    inputs = attention_inputs(torch.float16, "cpu", B=1, S=256, Sk=256, H=2, Hk=1, D=64, **sizes)
    for _ in range(4):
        run(liger_like.flash_attention, inputs, {"deterministic": False})
    kinds = {key[0].__name__: type(plan) for key, plan in replay.PLANS.items() if plan is not True}
    assert kinds == {"flash_attention": Node, "_gradients": Plan}


@interpreted
def test_losses_of_few_tokens_are_repeated(monkeypatch):
    """A loss of more tokens or of several chunks reads how many labels count, so each call prepares its launches."""
    without_kernels(monkeypatch)
    monkeypatch.setattr(dw_sum, "architecture", lambda device: 9)
    monkeypatch.setattr(row_kernels, "raise_bad_label", lambda device: None)  # read after each launch on a CPU
    for T, rows, kind in ((256, None, Plan), (257, None, bool), (256, 128, bool)):
        replay.PLANS.clear()
        inputs = linear_loss_inputs(torch.bfloat16, "cpu", lead=(T,), H=64, V=128)
        for _ in range(3):
            run(liger_like.fused_linear_cross_entropy, inputs, {"chunk_rows": rows})
        kinds = {key[0].__name__: type(plan) for key, plan in replay.PLANS.items()}
        assert kinds == {"linear_cross_entropy_fwd": kind, "linear_cross_entropy_last": kind}


def without_kernels(monkeypatch):
    """Kernels are neither compiled nor run; return a list that gets the arguments of each launch but the first."""
    runs = []
    found = SimpleNamespace(run=lambda *args: runs.append(args), function=None, packed_metadata=None)
    monkeypatch.setattr(launcher, "start", lambda *args: found)
    monkeypatch.setattr(InterpretedFunction, "params", (), raising=False)
    return runs


ONE_PLAN = {"_experts": Node, "_gradients": Plan}


def routed(logits):
    return liger_like.moe_route(logits, 2, groups=(4, 2, "max"), dtype=logits.dtype)


FORWARD = "moe_rows", "moe_spread", "moe_low_rank", "moe_gate_up", "moe_rows_times", "moe_combine"
SEVERAL = dict.fromkeys(FORWARD, Plan)  # of rows that the function views
MIXTURES = {
    "portable": ("moe_experts", EXPERTS, False, ONE_PLAN),
    "on Hopper": ("moe_experts", EXPERTS, True, ONE_PLAN),
    "adapters": ("moe_experts", EXPERTS | {"rank": 16}, True, ONE_PLAN),
    "adapters of transposed experts": ("moe_experts", EXPERTS | {"rank": 16, "turned": True}, False, ONE_PLAN),
    "A of transposed experts, copied for TMA": ("moe_experts", EXPERTS | {"rank": 16, "turned": True}, True, ONE_PLAN),
    "three dimensions": ("moe_experts", EXPERTS | {"lead": (37, 1), "rank": 16}, True, {"_gradients": Plan} | SEVERAL),
    "router": ("moe_route", {"E": 8}, False, {"moe_route": Node, "_moe_route_bwd": Plan}),
}


@interpreted
@pytest.mark.parametrize("case", MIXTURES)
def test_ops_of_mixtures_are_repeated(case, monkeypatch):
    """The experts have a plan of each pass: the host limits a mixture with few rows."""
    name, sizes, hopper, expected = MIXTURES[case]
    without_kernels(monkeypatch)
    monkeypatch.setattr(tma, "_is_hopper", lambda device: hopper)
    spec = next(spec for spec in SPECS if spec.name == name)
    turned = sizes.get("turned", False)
    for _ in range(4):
        given = spec.inputs(torch.float16, "cpu", **{"lead": (37,)} | {n: v for n, v in sizes.items() if n != "turned"})
        if turned:  # as the patch passes B
            given |= {n: t.detach().mT.contiguous().mT.requires_grad_() for n, t in given.items() if "lora_b" in n}
        options = {"transposed": True} if turned else {}
        run(routed if name == "moe_route" else spec.fn, given, options)
    kinds = {key[0].__name__: type(plan) for key, plan in replay.PLANS.items() if type(plan) is not bool}
    first = {*SEVERAL} - {*expected}  # of the first call, in which ops may repeat their own launches
    assert {name: kind for name, kind in kinds.items() if name not in first} == expected


@interpreted
def test_a_checkpoint_of_experts_skips_the_last_product(monkeypatch):
    """Also by plans: within a checkpoint the forward is two nodes, and the recomputation stops at the second."""
    runs = without_kernels(monkeypatch)
    spec = next(spec for spec in SPECS if spec.name == "moe_experts")
    given, counts, kinds = spec.inputs(torch.float16, "cpu", lead=(37,), **EXPERTS), [], []
    for within in (False, True):
        fn = partial(checkpoint, spec.fn, use_reentrant=False) if within else spec.fn
        replay.PLANS.clear()
        for _ in range(4):
            runs.clear()
            run(fn, given, {})
        counts.append(len(runs))
        kinds.append([len(plan.links) for plan in replay.PLANS.values() if type(plan) is Node])
    assert kinds == [[1], [2]]
    assert counts[1] - counts[0] == 5  # the sort and the product with gate_up


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.differentiable], ids=lambda spec: spec.name)
def test_results_are_modified_in_place(spec, monkeypatch):
    """Autograd refuses this for a view that a function returns, such as an argument that its forward returns."""
    without_kernels(monkeypatch)
    for _ in range(3):
        found = spec.fn(**spec.inputs(torch.float32, "cpu", **spec.test_shapes[0]))
        for t in found if isinstance(found, tuple) else (found,):
            if t is not None and t.requires_grad:
                t.mul_(2)
