"""Plans compute what launches without them do, bit for bit: the kernels are interpreted at the pointers of the plan.

Memory that a plan allocates is never used again: it holds 0xFF, which is NaN, before and after its life.
"""

import ctypes
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_replay import pretended  # noqa: F401  # a fixture of all tests
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

from liger_like.runtime import launcher, recording, registry, replay
from liger_like.runtime.recording import ALIGNMENT
from liger_like.testing import SPECS, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the plans of all tests")
EXPERTS = {"H": 32, "I": 16, "E": 4, "K": 2}


class Memory(np.ndarray):
    """The bytes of a tensor."""


@pytest.fixture(autouse=True)
def executed(monkeypatch):
    """Launches of plans run their kernels."""
    kept = []
    monkeypatch.setattr(InterpretedFunction, "params", (), raising=False)
    monkeypatch.setattr(launcher, "start", started)
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kind: allocated(kept, *args, **kind))


def started(kernel, grid, given, options):
    """Run a kernel, and return one that runs it for pointers."""
    dtypes = [t.dtype if isinstance(t, Tensor) else None for t in given]

    def run(*args):
        pairs = zip(args[9:], dtypes, strict=True)
        tensors = [pointed(arg, dtype) if dtype and arg is not None else arg for arg, dtype in pairs]
        with _disable_current_modes(), torch.no_grad():
            kernel[args[:3]](*tensors, **options)

    with _disable_current_modes(), torch.no_grad():
        kernel[grid](*given, **options)
    return SimpleNamespace(run=run, function=None, packed_metadata=None)


def pointed(pointer, dtype):
    """Return a tensor that starts at ``pointer``."""
    return torch.frombuffer((ctypes.c_byte * 8).from_address(pointer), dtype=dtype) if pointer else torch.empty(0)


def allocated(kept, shape, stride, *, dtype, device):
    """Return memory of its own, which ``kept`` keeps from other use."""
    size = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * all(shape)
    raw = np.full(size + ALIGNMENT, 255, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    memory = raw[start : start + size].view(Memory)
    weakref.finalize(memory, raw.fill, 255)
    kept.append(raw)
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))


def compared(fn, given, options=None):
    """Run ``fn`` with and without plans."""
    found, expected = run(fn, given, options or {}), unplanned(fn, given, options)
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        bits = [x.contiguous().flatten().view(torch.uint8) for x in (found[name], t)]
        assert (found[name].dtype, found[name].stride()) == (t.dtype, t.stride()), name
        assert torch.equal(*bits), name
        assert not t.isnan().any()


def unplanned(fn, given, options=None, seed=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "signature", lambda args: None)
        return run(fn, given, options or {}, seed)


def plans():
    return {key[0].__name__ for key, plan in replay.PLANS.items() if type(plan) is not bool}


def within_checkpoint(**given):
    return checkpoint(moe.fn, use_reentrant=False, **given)


def with_hooks(**given):
    with save_on_cpu():
        return moe.fn(**given)


def turned(b):
    """Return B as the patch passes it beside transposed experts."""
    return b.detach().mT.contiguous().mT.requires_grad_()


moe = next(spec for spec in SPECS if spec.name == "moe_experts")
PASSES = {"_experts", "_gradients"}
CASES = {
    "plain": (moe.fn, {}, {}),
    "biases": (moe.fn, {"bias": True}, {"limit": 0.5, "alpha": 1.7}),
    "adapters": (moe.fn, {"rank": 16}, {"interleaved": True, "transposed": True}),
    "adapters that are copied": (moe.fn, {"rank": 16}, {}),
    "ids of no expert": (moe.fn, {"elsewhere": 3}, {"act": "gelu"}),
    "no tokens": (moe.fn, {"lead": (0,)}, {}),
    "a checkpoint": (within_checkpoint, {"bias": True}, {}),
    "hooks": (with_hooks, {"bias": True}, {"act": "gelu_tanh"}),
}


@pytest.mark.parametrize("small", [recording.SMALL, 64])
@pytest.mark.parametrize("case", CASES)
def test_experts_compute_the_same(case, small, monkeypatch):
    """Values, experts and frozen arguments change; without small memory each allocation ends before its plan."""
    monkeypatch.setattr(recording, "SMALL", small)
    fn, sizes, options = CASES[case]
    for frozen in ((), ("x", "down"), ("gate_up", "weights", "gate_up_bias", "gate_up_lora_a")):
        for _ in range(4):
            given = moe.inputs(torch.float32, "cpu", **{"lead": (13,)} | EXPERTS | sizes)
            if options.get("transposed"):
                given |= {name: turned(t) for name, t in given.items() if "lora_b" in name}
            given |= {name: given[name].detach() for name in frozen if name in given}
            compared(fn, given, options)
        assert plans() >= ({"_gradients"} if "copied" in case else PASSES)
        replay.PLANS.clear()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_ops_compute_the_same(spec, monkeypatch):
    monkeypatch.setattr(recording, "SMALL", 64)
    for _ in range(3):
        compared(spec.fn, spec.inputs(torch.float32, "cpu", **spec.test_shapes[0]))


def test_backwards_in_any_order_and_twice():
    """Each call has memory of its own, which lives until its graph is freed."""
    given, calls = [], []
    for seed in range(6):
        leaves = moe.inputs(torch.float32, "cpu", lead=(13,), bias=True, **EXPERTS)
        given.append(leaves)
        generator = torch.Generator().manual_seed(seed)
        calls.append((moe.fn(**leaves), torch.randn(13, 32, generator=generator, dtype=torch.float64).float()))
        if len(calls) < 3:
            calls[-1][0].backward(calls[-1][1], retain_graph=True)
    assert plans() >= PASSES
    for i in (4, 2, 5, 3, 2, 4):
        calls[i][0].backward(calls[i][1], retain_graph=True)
    for i, times in ((2, 2), (3, 1), (4, 2), (5, 1)):
        expected = unplanned(moe.fn, given[i], seed=i)
        assert torch.equal(calls[i][0], expected["out0"])
        assert all(torch.equal(t.grad, times * expected[f"d{n}"]) for n, t in given[i].items() if t.requires_grad)


@pytest.mark.parametrize("name", ["x", "gate_up", "down", "down_bias", "weights", "index"])
def test_arguments_that_are_modified_before_the_backward(name):
    """A plan saves what the function saves, so torch notices."""
    for _ in range(4):
        given = moe.inputs(torch.float32, "cpu", lead=(13,), bias=True, **EXPERTS)
        out = moe.fn(**given)
        with torch.no_grad():
            given[name].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_two_threads():
    """They follow one plan at once, each with memory of its own."""
    given = [moe.inputs(torch.float32, "cpu", lead=(5,), **EXPERTS) for _ in range(12)]
    found, lock = {}, threading.Lock()

    def steps(first):
        for i in range(first, 12, 2):
            found[i] = run(moe.fn, given[i], {})

    interpreted = InterpretedFunction.__getitem__

    def one_at_a_time(kernel, grid):
        def launch(*args, **options):
            with lock:  # the interpreter knows no threads
                interpreted(kernel, grid)(*args, **options)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__getitem__", one_at_a_time)
        threads = [threading.Thread(target=steps, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert plans() >= PASSES
    for i, results in found.items():
        expected = unplanned(moe.fn, given[i])
        assert all(torch.equal(t, expected[name]) for name, t in results.items())
