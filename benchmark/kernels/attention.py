"""Times attention on a GPU against torch's flash and cuDNN back-ends, compiled flex_attention, and FlashAttention-4.

    make bench-attention                     measures, writes results/ and from it the report
    python -m benchmark attention --cases 0  some of the shapes; results/ keeps what it has of the others
    python -m benchmark attention --quick    the first shapes, printed only
    python -m benchmark attention --report   the report again, without a GPU

Kernels alone: the replay of a CUDA graph of one forward, or of one forward and backward, in bf16, on random data; the
time of a backward is the difference. FLOPs are those of the products that the mask leaves, two of the forward and five
of the backward, whatever a contestant computes beside them. All contestants of a shape are measured in the same rounds,
in random order. What is measured is written at once.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmark.common.markdown import Row
from benchmark.common.measure import (
    Build,
    Inputs,
    Setting,
    Step,
    attempt,
    captured,
    environment,
    gpu_times,
    known,
    peak_mib,
    rounded,
    save,
    settle,
    upstream_of,
)
from benchmark.kernels.attention_report import tables, write_report
from benchmark.kernels.contestants import MATH, OPS, SPECS, Attention, libraries, shape_text
from liger_like import testing
from liger_like.ops.attention import choice
from liger_like.runtime import replay

PORTABLE = "liger_like, portable"
REPLAYS, ROUNDS, QUICK_ROUNDS, QUICK_CASES = 4, 7, 3, 3


class Case(NamedTuple):
    """A row of ``testing.SPECS``, one of its shapes, and a mask."""

    spec: testing.OpSpec
    shape: Mapping[str, Any]
    options: Mapping[str, Any]

    def text(self) -> str:
        """Return the shape and the mask as the report names them."""
        tokens = f"T {sum(n for n, _ in self.shape['lengths'])} " if "lengths" in self.shape else ""
        masks = (key if value is True else f"{key} {value[0] + 1}" for key, value in self.options.items())
        return ", ".join((tokens + shape_text(self.shape), *masks))


def cases() -> list[Case]:
    """Return every shape of the table, causal and not, and a window."""
    causal, window = {"causal": True}, {"causal": True, "window": (1023, 0)}
    batch, packed = SPECS["flash_attention"], SPECS["flash_attention_varlen"]
    full = [Case(batch, shape, options) for shape, options in itertools.product(batch.bench_shapes, (causal, {}))]
    varlen = [Case(packed, shape, causal) for shape in packed.bench_shapes]
    return [*full, Case(batch, batch.bench_shapes[0], window), *varlen]


def contestants(case: Case) -> dict[str, Build]:
    """Return the contestants without the one that stores all scores; ours twice, also with its portable kernels."""
    builds = Attention(case.spec, case.options).contestants()
    builds.pop(MATH, None)
    return {"liger_like": builds["liger_like"], PORTABLE: builds["liger_like"], **builds}


def kernel_us(graph: torch.cuda.CUDAGraph, setting: Setting) -> list[float]:
    """Time a graph that reads the tensors of ``setting``."""
    return [ms * 1e3 for ms in gpu_times(graph.replay, REPLAYS)]


def gpu_row(name: str, build: Build, inputs: Inputs, upstream: Sequence[Tensor]) -> Row:
    """Return peak memory and timers of the kernels; the contestant PORTABLE runs the portable ones on every GPU."""
    setting = Setting(build, inputs, upstream)
    steps: dict[str, Step] = {"forward_us": setting.forward, "us": setting.step}
    widths = () if name == PORTABLE else choice.WIDTHS
    # without the plans of the contestants before: they repeat the launches of other kernels
    with mock.patch.object(choice, "WIDTHS", widths), mock.patch.dict(replay.PLANS, clear=True):
        mib = peak_mib(steps["us"])[0]
        return {"mib": mib, **{key: partial(kernel_us, captured(step), setting) for key, step in steps.items()}}


def timed(case: Case, builds: Mapping[str, Build]) -> Row:
    """Return the peak memory of each contestant, and timers of its kernels."""
    torch.manual_seed(0)
    torch.compiler.reset()  # otherwise flex_attention reaches torch's limit of recompilations
    inputs = case.spec.inputs(torch.bfloat16, "cuda", **case.shape)
    upstream = upstream_of(partial(case.spec.fn, **case.options), inputs)
    rows = [
        {"name": name, **attempt(partial(gpu_row, name, build, inputs, upstream))} for name, build in builds.items()
    ]
    *_, flops = case.spec.cost(2, **case.shape, **case.options)
    return {"shape": case.text(), "flops": flops, "rows": rows}


def measure(case: Case, rounds: int) -> Row:
    """Measure every contestant of a case."""
    result = timed(case, contestants(case))
    settle(result["rows"], rounds)
    return result


def measure_all(
    prefix: str, several: Sequence[Case], chosen: Iterable[int], measured: Callable[[Case, int], Row]
) -> Row:
    """Measure the ``chosen`` of ``several`` cases. After each, save it beside earlier results of the others."""
    result = environment(*libraries([OPS["flash_attention"]]))
    found = {row["shape"]: row for row in known(result, prefix).get("cases", ())}
    for i in chosen:
        found[several[i].text()] = measured(several[i], ROUNDS)
        result["cases"] = [found[case.text()] for case in several if case.text() in found]
        save(rounded(result), prefix)
    return rounded(result)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark attention")
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(cases())), help="their numbers; else all")
    parser.add_argument("--quick", action="store_true", help="the first shapes, printed only")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        several = cases()
        if options.quick:
            result = environment(*libraries([OPS["flash_attention"]]))
            result["cases"] = [measure(case, QUICK_ROUNDS) for case in several[:QUICK_CASES]]
            print(tables(rounded(result)))
            return
        print(tables(measure_all("attention", several, options.cases or range(len(several)), measure)))
    write_report()
