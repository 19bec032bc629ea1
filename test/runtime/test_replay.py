"""Ops that repeat the launches of an earlier call launch what the launcher would, for any arguments."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.profiler import profile
from triton.runtime.interpreter import InterpretedFunction

from liger_like.runtime import fallback, launcher, machine, registry, replay, support, tma
from liger_like.runtime.hopper import Descriptor
from liger_like.runtime.launcher import launch
from liger_like.runtime.replay import Plan, repeat, signature
from liger_like.testing import SPECS, run


class Kernel:
    """Stands in for a kernel; ``runs`` notes what reaches the GPU: grid, stream, bases of descriptors and arguments."""

    def __init__(self, tensors=1, descriptors=0):
        names = [*"d" * descriptors, *"t" * tensors, "M", "eps", "N"]
        self.params, self.pre_run_hooks = [SimpleNamespace(name=name) for name in names], []
        self.runs, self.compiled = [], 0

    def __getitem__(self, grid):
        def compile_and_run(*given, **options):
            def run(*args):
                self.runs.append((args[:4], *(d.base.data_ptr() if isinstance(d, Descriptor) else d for d in args[9:])))

            self.compiled += 1
            numbers = *given, options["N"]
            pointers = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in numbers]
            run(*grid, *(1,) * (3 - len(grid)), 7, *(None,) * 5, *pointers)
            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        return compile_and_run


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    """CPU tensors are on the current GPU, whose kernels are launched without Triton."""
    for module in (replay, registry):
        monkeypatch.setattr(module, "is_here", lambda x: isinstance(x, torch.Tensor) and x.device.type == "cpu")
    monkeypatch.setattr(launcher, "support", SimpleNamespace(INTERPRET=False))
    monkeypatch.setattr(launcher, "DIRECT", True)
    monkeypatch.setattr(launcher, "_COMPILED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def called(run, *args):
    """Return the results of a call, and whether there was a plan."""
    key, pointers = signature(args)
    found = isinstance(replay.PLANS.get((run, *key)), Plan)
    return repeat(run, args, {}, key, pointers), found


def scaled(kernel):
    """A launcher with a view of its input, memory of its own and two results."""

    def run(x, other, eps, flag, needs):
        y, total = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
        part = torch.zeros(1, dtype=torch.int32)
        tail = None if other is None else other[1:]
        tensors = x.reshape(-1, x.shape[-1]), tail, y[1:], total, part
        launch(kernel, (len(x), 2), tensors, (x.stride(0),), (eps,), N=len(needs) + flag)
        return y, total

    return run


def test_a_repetition_launches_the_same():
    """The third call runs no launcher, and uses the memory of its own arguments and results."""
    kernel = Kernel(5)
    run = scaled(kernel)
    for repeats in (False, False, True, True):
        x, other = torch.randn(4, 8), torch.randn(4, 8)
        (y, total), found = called(run, x, other, 0.5, True, [True, False])
        assert found == repeats
        assert (y.shape, y.dtype, total.shape, total.dtype) == ((4, 8), x.dtype, (4,), torch.float32)
        head, x_ptr, tail_ptr, y_ptr, total_ptr, part_ptr, *numbers = kernel.runs[-1]
        assert head == (4, 2, 1, 7)
        assert (x_ptr, tail_ptr) == (x.data_ptr(), other[1:].data_ptr())
        assert (y_ptr, total_ptr) == (y[1:].data_ptr(), total.data_ptr())
        assert part_ptr not in (x_ptr, y_ptr, total_ptr)
        assert [(type(n), n) for n in numbers] == [(int, 8), (float, 0.5), (int, 3)]
    assert kernel.compiled == 1


@pytest.mark.parametrize("order", [1, -1])
def test_signatures_know_arguments_apart(order):
    """Whatever a launcher may look at tells signatures apart."""
    base = torch.randn(9, 40)
    tensors = [base[:8, :8], base[:4, :8], base[:8, :8].half(), base[:8, :8].clone(), base[:8, 1:9], base[:8, :8].T]
    values = [
        *((x, None, 0.5, True, [True]) for x in tensors),
        *((tensors[0], None, eps, True, [True]) for eps in (0.0, -0.0, 1, 1.0, True, "1", torch.float16)),
        *((tensors[0], None, 0.5, flag, [True]) for flag in (False, 1, 0, 1.0)),
        *((tensors[0], None, 0.5, True, needs) for needs in ([False], [1], (True,), [True, True], [])),
        (tensors[0], tensors[1], 0.5, True, [True]),
        (tensors[0], torch.empty(4, 8, device="meta"), 0.5, True, [True]),
        (tensors[0].clone().requires_grad_(), None, 0.5, True, [True]),
    ]
    keys = [signature(args)[0] for args in values[::order]]
    keys += signature((base, [], 5))[0], signature((base, [5]))[0]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert signature((base, [base])) is None
    assert signature((base, torch.nn.Parameter)) is None
    assert signature((1.0, base)) is None
    assert signature(()) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_and_copies_that_are_none(mode):
    """In inference mode, too, where torch shows reshape() and contiguous() whole; a view may be empty."""
    kernel = Kernel(4)

    def run(x, weight):
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
        launch(kernel, (1,), (x.reshape(-1, 8), weight.contiguous(), x[2:], y), (1,), (1.0,), N=1)
        return y

    for repeats in (False, False, True, True):
        with mode():
            x, weight = torch.randn(2, 4, 8), torch.ones(8)
            y, found = called(run, x, weight)
        assert (found, y.is_inference()) == (repeats, x.is_inference())
        _, x_ptr, weight_ptr, empty_ptr, y_ptr, *_ = kernel.runs[-1]
        assert (x_ptr, weight_ptr, y_ptr) == (x.data_ptr(), weight.data_ptr(), y.data_ptr())
        assert empty_ptr in (0, x.data_ptr() + x.nbytes)  # Triton takes no negative pointer


def test_tensors_in_two_places():
    """A call with one tensor twice records nothing: the plan would use one of two tensors twice."""
    kernel = Kernel(5)
    run = scaled(kernel)
    x, other = torch.randn(4, 8), torch.randn(4, 8)
    for first, second, repeats in ((x, x, 0), (x, x, 0), (x, x, 0), (x, other, 0), (other, x, 1), (x, x, 1)):
        _, found = called(run, first, second, 0.5, True, [True])
        assert found == bool(repeats)
        assert kernel.runs[-1][1:3] == (first.data_ptr(), second[1:].data_ptr())


REFUSED = {
    "an op of torch": lambda kernel, x: launch(kernel, (1,), (x * 1,), (1,), (1.0,), N=1),
    "a copy": lambda kernel, x: launch(kernel, (1,), (x.T.contiguous(),), (1,), (1.0,), N=1),
    "a fill": lambda kernel, x: launch(kernel, (1,), (torch.empty_like(x).zero_(),), (1,), (1.0,), N=1),
    "a place in memory": lambda kernel, x: launch(kernel, (1,), (x.as_strided((4,), (1,), 0),), (1,), (1.0,), N=1),
    "a value": lambda kernel, x: launch(kernel, (1,), (x,), (int(x[0, 0]),), (1.0,), N=1),
    "memory from outside": lambda kernel, x: launch(kernel, (1,), (OUTSIDE,), (1,), (1.0,), N=1),
    "memory that is not aligned": lambda kernel, x: launch(kernel, (1,), (x.view(-1)[1:],), (1,), (1.0,), N=1),
    "its input": lambda kernel, x: x,
    "a view": lambda kernel, x: torch.empty_like(x)[1:],
    "memory from outside as a result": lambda kernel, x: OUTSIDE,
}
OUTSIDE = torch.empty(64)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_cannot_repeat(name):
    kernel, calls = Kernel(), []
    run = lambda x: calls.append(x) or REFUSED[name](kernel, x)  # noqa: E731
    for _ in range(4):
        called(run, torch.ones(4, 8))
    assert len(calls) == 4
    assert [*replay.PLANS.values()] == [False]


def test_descriptors():
    """Each launch gets descriptors of its own, with the memory of its arguments."""
    kernel = Kernel(1, 2)

    def run(x):
        y = torch.empty_like(x)
        made = [Descriptor(t, [4, 8], [8, 1], [1, 8], None) for t in (x[1:], y)]
        launch(kernel, (1,), (x,), (1,), (1.0,), tuple(made), N=1)
        return y

    for repeats in (False, False, True, True):
        x = torch.randn(5, 8)
        y, found = called(run, x)
        assert found == repeats
        assert kernel.runs[-1][1:4] == (x[1:].data_ptr(), y.data_ptr(), x.data_ptr())


def test_who_watches_sees_launches(monkeypatch):
    kernel = Kernel(5)
    run = scaled(kernel)
    args = torch.randn(4, 8), torch.randn(4, 8), 0.5, True, [True]
    for _ in range(3):
        called(run, *args)
    assert called(run, *args)[1]
    hook = lambda metadata: None  # noqa: E731
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(hook)
        try:
            assert signature(args) is None
        finally:
            chain.remove(hook)
    with launcher.recorded():
        assert signature(args) is None
    with support.collected_reasons():
        assert signature(args) is None
    with machine.pretended(machine.Machine("a", 9, 1, 1, 1, 1)):
        assert signature(args) is None
    compiled = kernel.compiled
    kernel.pre_run_hooks.append(hook)
    called(run, *args)
    assert kernel.compiled == compiled + 1  # Triton itself launches, and calls the hook
    kernel.pre_run_hooks.clear()
    with monkeypatch.context() as patch:
        patch.setitem(fallback.BROKEN, "a", "does not compile")  # later calls choose portable kernels
        assert not called(run, *args)[1]
    monkeypatch.setattr(launcher, "OPTIONS", {"enable_fp_fusion": False})
    assert not called(run, *args)[1]


def test_a_function_repeats_the_launches_of_its_ops(monkeypatch):
    """Without gradients its checks run twice, and all modes still see its ops."""
    kernel, checked = Kernel(2), []
    monkeypatch.setattr(registry, "LIBRARY", library := torch.library.Library("liger_like_replay", "DEF"))
    monkeypatch.setattr(torch.ops, "liger_like", torch.ops.liger_like_replay)
    monkeypatch.setattr(torch.library, "register_fake", lambda *args, **kwargs: None)

    @registry.op("double(Tensor x, float eps) -> Tensor", None, replayed=True)
    def double(x, eps):
        y = torch.empty_like(x)
        launch(kernel, (1,), (x, y), (1,), (eps,), N=1)
        return y

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
    del library


def test_other_threads():
    """A recording hears of the launches of its own thread alone."""
    kernel, other = Kernel(), Kernel()

    def elsewhere():
        for _ in range(2):
            launch(other, (1,), (OUTSIDE,), (1,), (1.0,), N=1)

    def run(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        launch(kernel, (1,), (x,), (1,), (1.0,), N=1)

    for _ in range(3):
        called(run, torch.ones(4))
    assert called(run, torch.ones(4))[1]
    assert len(other.runs) == 4


def test_plans_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for n in range(1, 9):
        called(len, torch.ones(n))
    assert len(replay.PLANS) <= 3


EXPERTS = {"H": 64, "I": 32, "E": 4, "K": 2, "bias": True}


@pytest.mark.parametrize(
    ("name", "sizes", "hopper", "calls"),
    [
        ("moe_experts", EXPERTS, False, 11),
        ("moe_experts", EXPERTS | {"rank": 16}, True, 22),
        ("moe_route", {"E": 8}, False, 2),
    ],
)
def test_ops_of_mixtures_are_repeated(name, sizes, hopper, calls, monkeypatch):
    """Each op of a step has a plan: the host limits a mixture with few rows."""
    found = SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)
    monkeypatch.setattr(launcher, "start", lambda *args: found)
    monkeypatch.setattr(InterpretedFunction, "params", (), raising=False)
    monkeypatch.setattr(tma, "_is_hopper", lambda device: hopper)
    spec = next(spec for spec in SPECS if spec.name == name)
    for _ in range(3):
        run(spec.fn, spec.inputs(torch.float16, "cpu", lead=(37,), **sizes), spec.options[0])
    assert [key[0].__name__ for key, plan in replay.PLANS.items() if type(plan) is not Plan] == []
    assert len(replay.PLANS) == calls
