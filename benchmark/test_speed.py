"""Times forward plus backward of every op of ``testing.SPECS`` against eager torch and torch.compile, in bf16 on a GPU.

    make bench
    python -m pytest benchmark -k rms_norm

A round is many steps and one wait for the GPU, so the host's overhead counts where the GPU is faster than the host.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liger_like import testing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PEERS: dict[str, Callable[[testing.OpSpec], Callable[..., Any]]] = {
    "liger_like": lambda spec: spec.fn,
    "torch": lambda spec: spec.ref,
    "torch.compile": lambda spec: torch.compile(spec.ref, dynamic=False),
}
CASES = [
    pytest.param(spec, shape, id=f"{spec.name}-{'-'.join(f'{key}{value}' for key, value in shape.items())}")
    for spec in testing.SPECS
    for shape in spec.bench_shapes
    if "attention" not in spec.name  # whose reference holds all scores; benchmark.attention has its peers
]
ROUND_SECONDS = 0.02


def make_step(fn: Callable[..., Any], inputs: testing.Inputs) -> Callable[[], None]:
    """One forward and backward of ``fn``, under a random upstream gradient."""
    leaves = [t for t in inputs.values() if t.requires_grad]

    def forward() -> tuple[torch.Tensor, ...]:
        result = fn(**inputs)
        return result if isinstance(result, tuple) else (result,)

    upstream = [torch.randn_like(t) for t in forward()]

    def step() -> None:
        torch.autograd.grad(forward(), leaves, upstream)

    return step


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_speed(benchmark: Any, spec: testing.OpSpec, shape: dict[str, Any], peer: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.cuda.empty_cache()
    step = make_step(PEERS[peer](spec), spec.inputs(torch.bfloat16, "cuda", **shape))
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    steps = math.ceil(ROUND_SECONDS / (time.perf_counter() - start))

    def steps_of_a_round() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    benchmark.pedantic(steps_of_a_round, rounds=20, warmup_rounds=2)
    seconds = benchmark.stats.stats.median / steps
    *moved, flops = spec.cost(torch.bfloat16.itemsize, **shape)
    benchmark.extra_info |= {
        "us": seconds * 1e6,
        "GB/s": sum(moved) / seconds / 1e9,
        "TFLOP/s": flops / seconds / 1e12,
        "peak MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }
