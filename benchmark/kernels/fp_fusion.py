"""Compares the kernels with and without fused products and sums on a GPU: the error of each op, and its time.

    python -m benchmark fp_fusion                    every op
    python -m benchmark fp_fusion --only rope,swiglu    those ops

Fused, a product and a sum are rounded once, else twice. Triton fuses them by default up to version 3.9, but not from
3.10 on; every launch of an op passes what ``launcher.OPTIONS`` says.

* error: the worst output or gradient, against float64, as a share of the error that ``testing.compare`` allows, over
  several draws of the test shape with the most parts. 1 is the limit.
* time: a forward and a backward in bf16 on the first shape of the benchmarks, by the replay of a CUDA graph; the
  median of rounds in which both kinds take turns.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmark.common.measure import environment, gpu_times
from liger_like.runtime import launcher
from liger_like.testing import SPECS, OpSpec, compare

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FUSED = (True, False)
DRAWS, ROUNDS, REPLAYS, WARMUP = 8, 15, 10, 3


def fusing(fused: bool) -> Any:
    """Return a context in which kernels are launched with or without fused products and sums."""
    return patch.dict(launcher.OPTIONS, enable_fp_fusion=fused)


def error(spec: OpSpec, dtype: torch.dtype, fused: bool) -> float:
    """Return the worst error of an output or gradient as a share of what is allowed, on the same draws every time."""
    shape = max(spec.test_shapes, key=lambda shape: (len(shape), str(shape)))
    torch.manual_seed(0)
    with fusing(fused):
        compared = compare(spec.fn, spec.ref, partial(spec.inputs, dtype, "cuda", **shape), spec.options[0], DRAWS)
    return max(c.kernel / c.allowed(spec.k) for c in compared if c.norm)


def step_of(spec: OpSpec) -> Callable[[], Any]:
    """Return a forward and backward of an op on the first shape of the benchmarks."""
    torch.manual_seed(0)
    inputs = spec.inputs(torch.bfloat16, "cuda", **spec.bench_shapes[0])
    leaves = [t for t in inputs.values() if t.requires_grad]

    def outputs() -> list[torch.Tensor]:
        result = spec.fn(**inputs, **spec.options[0])
        several = result if isinstance(result, tuple) else (result,)
        return [t for t in several if t is not None and t.requires_grad]

    upstream = [torch.randn_like(t) for t in outputs()]
    return lambda: torch.autograd.grad(outputs(), leaves, upstream)


def times(spec: OpSpec) -> list[float]:
    """Return the times of a step in us, fused and not fused."""
    step, graphs = step_of(spec), []
    for fused in FUSED:
        with fusing(fused):
            for _ in range(WARMUP):
                step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        graphs.append(graph)
    rounds = [[statistics.median(gpu_times(graph.replay, REPLAYS)) for graph in graphs] for _ in range(ROUNDS)]
    return [statistics.median(several) * 1e3 for several in zip(*rounds, strict=True)]


def measured(specs: Iterable[OpSpec]) -> Table:
    """Measure ops and return a table of a row for each."""
    columns = [f"error {name}, {kind}" for name in DTYPES for kind in ("fused", "not")]
    table = Table("op", *columns, "us, fused", "us, not")
    for spec in specs:
        errors = [error(spec, dtype, fused) for dtype in DTYPES.values() for fused in FUSED]
        table.add_row(spec.name, *(f"{x:.4f}" for x in errors), *(f"{x:.1f}" for x in times(spec)))
        torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of ops, with commas between them")
    only = parser.parse_args().only
    names = only.split(",") if only else [spec.name for spec in SPECS]
    if unknown := {*names} - {spec.name for spec in SPECS}:
        parser.error(f"--only takes names of ops, got {', '.join(sorted(unknown))}")
    console = Console(width=160)
    console.print(environment())
    console.print(measured(spec for spec in SPECS if spec.name in names))
