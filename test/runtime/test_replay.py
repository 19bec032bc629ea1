"""Ops that repeat the launches of an earlier call launch what the launcher would, for any arguments."""

import itertools
import random
import threading
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton

from liger_like.runtime import fallback, launcher, machine, recording, replay, support
from liger_like.runtime.hopper import Descriptor
from liger_like.runtime.launcher import launch
from liger_like.runtime.recording import SMALL
from liger_like.runtime.replay import Plan, repeat, signature


class Kernel:
    """Stands in for a kernel; ``runs`` notes what reaches the GPU: grid, stream, bases of descriptors and arguments."""

    def __init__(self, tensors=1, descriptors=0):
        names = [*"d" * descriptors, *"t" * tensors, "M", "eps", "N"]
        self.params, self.pre_run_hooks = [SimpleNamespace(name=name) for name in names], []
        self.runs, self.compiled, self.observed = [], 0, lambda: None

    def __getitem__(self, grid):
        def compile_and_run(*given, **options):
            def run(*args):
                self.observed()
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
    monkeypatch.setattr(replay, "is_here", lambda x: isinstance(x, torch.Tensor) and x.device.type == "cpu")
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


@pytest.mark.filterwarnings("ignore:.*(in beta|prototype) s")
@pytest.mark.parametrize("order", [1, -1])
def test_signatures_know_arguments_apart(order, monkeypatch):
    """Whatever a launcher may look at tells signatures apart."""
    base = torch.randn(9, 40)
    tensors = [base[:8, :8], base[:4, :8], base[:8, :8].half(), base[:8, :8].clone(), base[:8, 1:9], base[:8, :8].T]
    values = [
        *((x, None, 0.5, True, [True]) for x in tensors),
        *((tensors[0], None, eps, True, [True]) for eps in (0.0, -0.0, 1, 1.0, True, "1", torch.float16)),
        *((tensors[0], None, 0.5, flag, [True]) for flag in (False, 1, 0, 1.0)),
        *((tensors[0], None, 0.5, True, needs) for needs in ([False], [1], (True,), [True, True], [])),
        (tensors[0], tensors[1], 0.5, True, [True]),
        (tensors[0].clone().requires_grad_(), None, 0.5, True, [True]),
    ]
    keys = [signature(args)[0] for args in values[::order]]
    keys += signature((base, [], 5))[0], signature((base, [5]))[0]
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    for dtype in (torch.bfloat16, torch.float16):  # noqa: B007  # read by the lambda
        keys.append(signature((base, 5))[0])
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert signature((base, torch.empty(0)))
    for without in (
        torch._neg_view(base), torch._efficientzerotensor((9, 40)), torch.empty(9, 40, device="meta"), base.to_sparse(),
        base.to_sparse_csr(), torch.nested.nested_tensor([base, base[1:]]),
    ):  # fmt: skip
        assert signature((base, without)) is None  # its memory is no array of its values
    assert signature((base, [base])) is None
    assert signature((base, torch.nn.Parameter)) is None
    assert signature((1.0, base)) is None
    assert signature(()) is None


STATES = {
    "x": [
        torch.randn(6, 8)[:4], torch.randn(4, 9)[:, :8], torch.randn(8, 4).T, torch.randn(40)[8:].view(4, 8),
        torch.randn(4, 8).half(), torch.randn(33)[1:].view(4, 8), torch.randn(4, 8, requires_grad=True),
        torch._neg_view(torch.randn(4, 8)), torch.randn(1, 8).expand(4, 8), torch.nn.Parameter(torch.randn(4, 8)),
    ],
    "other": [torch.randn(4, 8), torch.randn(3, 8), None],
    "eps": [0.0, -0.0, 1, 1.0],
    "flag": [1, True],
    "mode": [torch.no_grad, torch.inference_mode, torch.enable_grad],
    "autocast": [None, torch.bfloat16, torch.float16],
    "fused": [True, False],
    "broken": [{}, {"a": "does not compile"}],
    "default": [torch.float32, torch.float64],
}  # fmt: skip


def test_a_repetition_is_a_fresh_call_in_any_state(monkeypatch):
    """The launcher reads all that it may, and calls that differ in one thing alternate."""
    kernel, draw, seen, repeats = Kernel(3), random.Random(0), {}, 0

    def run(x, other, eps, flag):
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        reads = cast, *launcher.OPTIONS.values(), *fallback.BROKEN, x.requires_grad, x.data_ptr() & 15, x.stride()
        y = torch.empty_like(x, dtype=cast or x.dtype)
        launch(kernel, (1,), (x, other, y), (seen.setdefault(reads, len(seen)),), (eps,), N=flag)
        return y, x.new_empty(2)

    state = {name: values[0] for name, values in STATES.items()}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: state["autocast"] is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: state["autocast"])
    for _ in range(600):
        state.update((name, draw.choice(STATES[name])) for name in draw.choices([*STATES], k=2))
        monkeypatch.setattr(launcher, "OPTIONS", {"enable_fp_fusion": state["fused"]})
        monkeypatch.setattr(fallback, "BROKEN", state["broken"])
        torch.set_default_dtype(state["default"])
        args = tuple(state[name] for name in ("x", "other", "eps", "flag"))
        try:
            with state["mode"]():
                if signature(args) is None:
                    assert state["x"].is_neg()
                    continue
                (found, repeated), fresh = called(run, *args), run(*args)
        finally:
            torch.set_default_dtype(torch.float32)
        repeats += repeated
        for t, same in zip(found, fresh, strict=True):
            assert (t.dtype, t.shape, t.stride(), t.is_inference()) == (
                same.dtype, same.shape, same.stride(), same.is_inference()
            )  # fmt: skip
        runs = [[*run[1:3], *map(repr, run[4:])] for run in kernel.runs[-2:]]  # but for the pointer of the result
        assert runs[0] == runs[1]
    assert repeats > 50


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
    "a copy of memory from outside": lambda kernel, x: launch(kernel, (1,), (OUTSIDE.clone(),), (1,), (1.0,), N=1),
    "a copy on another device": lambda kernel, x: [x.to("meta")].clear(),
    "an op in place": lambda kernel, x: launch(kernel, (1,), (torch.empty_like(x).neg_(),), (1,), (1.0,), N=1),
    "a kernel that reads a result of torch": lambda kernel, x: launch(kernel, (1,), (x.sum(0),), (1,), (1.0,), N=1),
    "a call of torch on memory from outside": lambda kernel, x: [OUTSIDE.zero_()].clear(),
    "a place in memory": lambda kernel, x: launch(kernel, (1,), (x.as_strided((4,), (1,), 0),), (1,), (1.0,), N=1),
    "a value": lambda kernel, x: launch(kernel, (1,), (x,), (int(x[0, 0]),), (1.0,), N=1),
    "memory from outside": lambda kernel, x: launch(kernel, (1,), (OUTSIDE,), (1,), (1.0,), N=1),
    "memory that is not aligned": lambda kernel, x: launch(kernel, (1,), (x.view(-1)[1:],), (1,), (1.0,), N=1),
    "a named tuple": lambda kernel, x: Results(torch.empty_like(x)),
    "its input": lambda kernel, x: x,
    "a view of the front": lambda kernel, x: torch.empty_like(x)[:1],
    "a view": lambda kernel, x: torch.empty_like(x)[1:],
    "memory from outside as a result": lambda kernel, x: OUTSIDE,
}
OUTSIDE = torch.empty(64)


class Results(NamedTuple):
    y: torch.Tensor


def test_calls_of_torch(monkeypatch):
    """A plan repeats them in their order, on views of its arguments and memory.

    Memory that nobody reads is not allocated, and small memory that kernels alone read is one allocation.
    """
    kernel, made = Kernel(7), []
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kw: made.append(args) or torch.ones(*args[:1], **kw))

    def run(x, index):
        x.new_empty(7)
        parts = torch.empty(3, 5), x.new_empty(2, 8), torch.empty(SMALL)
        out, total = torch.empty_like(x), x.new_zeros(4, 8)
        torch.index_select(x[:2], 0, index, out=out.view(torch.int32)[1:].view(x.dtype)[:2])
        torch._foreach_zero_([out[:1], out[3:]])
        launch(kernel, (1,), (x, total, *parts, parts[1][1:], torch.zeros(2)), (1,), (1.0,), N=1)
        rest = x[0:].index_select(0, index)
        rest.masked_fill_((rest == 1.0)[:, 1:2], -1.0)
        return out, None, rest.sum(0).to(torch.float16), total, x[:, :4].t().index_select(0, index)

    for repeats in (False, False, True, True):
        x, index = torch.arange(32.0).view(4, 8) + repeats, torch.tensor([int(repeats), 0])
        made.clear()
        (out, none, summed, total, columns), found = called(run, x, index)
        assert (found, none) == (repeats, None)
        assert [args[0] for args in made] == [(4, 8), (1024,), (SMALL,)] * repeats  # the large one when it is needed
        rows = x[index]
        assert torch.equal(out, torch.cat((torch.zeros(1, 8), rows, torch.zeros(1, 8))))
        rows[rows[:, 1] == 1.0] = -1.0
        assert torch.equal(summed, rows.sum(0).half())
        assert (total == 0).all()
        assert torch.equal(columns, x[:, index].T[:, :4])
        x_ptr, total_ptr, part_ptr, next_ptr, _, view_ptr = kernel.runs[-1][1:7]
        assert (x_ptr, total_ptr) == (x.data_ptr(), total.data_ptr())
        assert not repeats or (next_ptr, view_ptr) == (part_ptr + 512, part_ptr + 512 + 32)


def test_large_memory_lives_as_long_as_without_a_plan(monkeypatch):
    """It is allocated before the first launch that reads it and freed behind the last, also while it is recorded."""
    kernel, alive = Kernel(3), weakref.WeakSet()
    make, sizes = torch.empty_strided, []
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kw: [t := make(*args, **kw), alive.add(t)][0])
    kernel.observed = lambda: sizes.append(sorted(t.numel() for t in alive if t.nbytes > SMALL))

    def run(x):
        first, few = torch.empty_strided((SMALL,), (1,)), torch.empty_strided((4,), (1,))
        launch(kernel, (1,), (x, first, few), (1,), (1.0,), N=1)
        second = torch.empty_strided((SMALL + 1,), (1,))
        launch(kernel, (1,), (first, second, few), (2,), (1.0,), N=1)
        del first
        third, apart = torch.empty_strided((SMALL + 2,), (1,)), torch.empty_strided((SMALL + 3,), (1,))
        launch(kernel, (1,), (second, third, apart[8:]), (3,), (1.0,), N=1)
        del second
        launch(kernel, (1,), (third.view(torch.int32), apart, few), (4,), (1.0,), N=1)
        return third

    lives = [[0], [0, 1], [1, 2, 3], [2, 3]]
    for repeats in (False, False, True, True):
        sizes.clear()
        third, found = called(run, torch.ones(8))
        # the memory of a view has its pointer from the start
        expected = [sorted({*life, 3}) if repeats else life for life in lives]
        assert (found, sizes) == (repeats, [[SMALL + n for n in life] for life in expected])
        assert [*alive] == [third]
        *_, (_, _, third_ptr, view_ptr, *_), (_, same_ptr, apart_ptr, *_) = kernel.runs
        assert (third_ptr, same_ptr, view_ptr) == (third.data_ptr(), third.data_ptr(), apart_ptr + 32)
        del third


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies(mode):
    """Each call copies its own argument, for kernels and as a result."""
    kernel = Kernel(2)

    def run(x):
        columns = x[1:].T.contiguous()
        launch(kernel, (1,), (x.T.contiguous(), columns), (1,), (1.0,), N=1)
        return columns

    for repeats in (False, False, True, True):
        x = torch.randn(5, 8)
        with mode():
            columns, found = called(run, x)
        assert (found, columns.is_contiguous()) == (repeats, True)
        assert torch.equal(columns, x[1:].T)
        assert kernel.runs[-1][2] == columns.data_ptr() != kernel.runs[-1][1] != x.data_ptr()


def test_memory_that_lasts(monkeypatch):
    """A plan passes memory of the process to its kernels, such as the flag of a bad label."""
    kernel = Kernel(2)
    monkeypatch.setattr(recording, "LASTING", [torch.zeros(1), OUTSIDE])
    run = lambda x: launch(kernel, (1,), (x, OUTSIDE), (1,), (1.0,), N=1)  # noqa: E731
    for repeats in (False, False, True):
        x = torch.randn(8)
        assert called(run, x) == (None, repeats)
        assert kernel.runs[-1][1:3] == (x.data_ptr(), OUTSIDE.data_ptr())


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


def test_a_call_that_failed_is_not_the_first():
    """It has not compiled all kernels: a recording would miss one, and no later call would follow a plan."""
    kernels, full = (Kernel(), Kernel()), [True]

    def run(x):
        for kernel in kernels:
            launch(kernel, (1,), (x,), (1,), (1.0,), N=1)
            if full and full.pop():
                raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        called(run, torch.ones(4))
    assert [called(run, torch.ones(4))[1] for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("calls", [1, 2])
def test_plans_do_not_pile_up(calls, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for n in range(1, 9):
        for _ in range(calls):
            called(len, torch.ones(n))
    assert len(replay.PLANS) <= 3


def test_signatures_that_come_once_do_not_drop_plans(monkeypatch):
    """As sizes of expert parallelism, which differ in each step."""
    monkeypatch.setattr(replay, "MOST", 8)
    kernel = Kernel(5)
    run, inputs = scaled(kernel), (torch.randn(3, 4), None, 0.5, True, [1, 2])
    assert [called(run, *inputs)[1] for _ in range(3)] == [False, False, True]
    for n in range(1, 40):
        called(len, torch.ones(n))
        assert called(run, *inputs)[1]
        assert len(replay.PLANS) <= 8
