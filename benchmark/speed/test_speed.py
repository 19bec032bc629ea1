"""Times of every op, ours and torch's, forward and backward, to compare two commits: ``pytest benchmark``.

The shapes are those of Llama-3-8B, in bf16. Two events on the GPU bound each forward and each backward. The GPU is kept
busy while the host launches, so that a time is that of the kernels. Without a GPU nothing is timed, but
``pytest benchmark --benchmark-disable`` runs every step once, on tiny shapes.
"""

from functools import partial

import pytest
import torch

from benchmark.common.measure import Setting, upstream_of
from benchmark.kernels.bench import GPU, make_inputs, tiny
from benchmark.kernels.bench_shapes import EIGHT_B, SHAPES
from benchmark.kernels.contestants import OPS, named

ROUNDS = {"rounds": 30, "warmup_rounds": 5}
BUSY_CYCLES = 4_000_000  # about two milliseconds
TORCH = "torch", "torch, flash", "flex_attention"  # in order of preference


class Moment:
    """A moment of the GPU; the difference of two is in seconds."""

    def __init__(self):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, start):
        self.event.synchronize()
        return start.event.elapsed_time(self.event) / 1e3


pytestmark = [
    pytest.mark.benchmark(timer=Moment),
    pytest.mark.parametrize("contestant", ["liger_like", "torch"]),
    pytest.mark.parametrize("op", OPS),
]


def keep_busy():
    """Let the GPU wait, so that launches queue up behind this."""
    if GPU:
        torch.cuda._sleep(BUSY_CYCLES)


@pytest.fixture(autouse=True)
def _gpu(benchmark):
    if benchmark.enabled and not GPU:
        pytest.exit("needs a GPU; --benchmark-disable runs every step once on a CPU", returncode=2)


def shape_of(op):
    """Return the shape of the op in Llama-3-8B, or in the first model that has it."""
    return EIGHT_B.get(op) or next(shapes[op][0] for shapes in SHAPES.values() if op in shapes)


@pytest.fixture
def setting(op, contestant):
    """Return inputs, upstream gradients and a forward: of ours or of torch's, or without a GPU of the reference."""
    row, shape = OPS[op], shape_of(op) if GPU else tiny(shape_of(op))
    builds = row.contestants()
    found = (builds[name] for name in TORCH if name in builds)
    torchs = next(found) if GPU else named(row.spec.ref, **row.options)
    inputs = make_inputs(row, shape)
    upstream = upstream_of(partial(row.spec.fn, **row.options), inputs)
    return Setting(builds["liger_like"] if contestant == "liger_like" else torchs, inputs, upstream)


def test_forward(benchmark, setting, op):
    benchmark.group = f"{op}, forward"
    benchmark.pedantic(setting.forward, setup=keep_busy, **ROUNDS)


def test_backward(benchmark, setting, op):
    benchmark.group = f"{op}, backward"

    def prepare():
        outputs = setting.forward()
        keep_busy()
        return (outputs, [*setting.leaves.values()], setting.upstream), {}

    gradients = benchmark.pedantic(torch.autograd.grad, setup=prepare, **ROUNDS)
    assert all(gradient.isfinite().all() for gradient in gradients)
