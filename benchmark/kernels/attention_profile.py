"""What bounds the kernels of attention, by Nsight Compute's counters: needs a GPU and ncu on the path.

    python -m benchmark attention_profile               measures, prints a table
    python -m benchmark attention_profile counters.csv  the table of what ncu wrote earlier

"tensor" is the share of the time in which tensor cores multiply, "exp" that of the pipe which has the exponentials,
"issue" that of the cycles in which a scheduler issues. Stalls are those of a warp for each instruction that it issues;
"barrier" is a wait for the other warps of a group, "long_scoreboard" one for memory, mbarriers included. The clock is
what power leaves of it.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmark.common.markdown import table
from benchmark.kernels.attention import SPECS, Case

CAUSAL = {"causal": True}
HEADS = {"H": 32, "Hk": 8, "D": 128}
SHAPES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"B": 4, "S": 4096, **HEADS}, CAUSAL),
    ({"B": 4, "S": 4096, **HEADS}, {}),
    ({"B": 1, "S": 16384, **HEADS}, CAUSAL),
    ({"B": 4, "S": 4096, **HEADS, "D": 64}, CAUSAL),
    ({"B": 4, "S": 4096, "H": 16, "Hk": 8, "D": 256}, CAUSAL),
]
SECTIONS = "SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "DRAM": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
TIME, CLOCK = "gpu__time_duration.sum", "gpc__cycles_elapsed.avg.per_second"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = 2  # how many stalls are shown, largest first
COLUMNS = ("shape", "kernel", "us", *(f"{name} %" for name in SHARES), "GHz", "stalls")
FIRST = "_attention_fwd"  # the first kernel of a case


def step(shape: dict[str, int], options: dict[str, Any]) -> None:
    """Run forward and backward twice, the second time under the profiler: by then everything is compiled and tuned."""
    spec = SPECS["flash_attention"]
    inputs = spec.inputs(torch.bfloat16, "cuda", **shape, Sk=shape["S"])
    qkv = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
    upstream = torch.randn_like(qkv[0])
    for profiled in (False, True):
        if profiled:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        torch.autograd.grad(spec.fn(*qkv, deterministic=False, **options), qkv, upstream)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def counters() -> list[str]:
    """Return ncu's output for a process that runs every case."""
    sections = [option for name in SECTIONS for option in ("--section", name)]
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", *sections, "--csv", "--page", "raw"]
    command += [sys.executable, "-m", __spec__.name, "--steps"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def kernels(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Return the counters of each kernel by name, without ncu's messages before its table and the row of units."""
    rows = csv.reader(lines)
    head = next(row for row in rows if row[:1] == ["ID"])
    next(rows)
    return (dict(zip(head, row, strict=True)) for row in rows)


def _number(text: str) -> float:
    return float(text.replace(",", "") or 0)


def cells(kernel: dict[str, str]) -> list[str]:
    """Return the row of a kernel without its shape."""
    before, after = STALL.split("{}")
    stalls = {
        name.removeprefix(before).removesuffix(after): _number(text)
        for name, text in kernel.items()
        if name.startswith(before) and name.endswith(after) and "selected" not in name
    }
    most = sorted(stalls, key=stalls.__getitem__, reverse=True)[:STALLS]
    return [
        kernel["Kernel Name"].removeprefix("void ").partition("<")[0],
        f"{_number(kernel[TIME]) / 1e3:.0f}",
        *(f"{_number(kernel[name]):.0f}" for name in SHARES.values()),
        f"{_number(kernel[CLOCK]) / 1e9:.2f}",
        ", ".join(f"{name} {stalls[name]:.1f}" for name in most),
    ]


def report(lines: Iterable[str]) -> str:
    """Return the table; its rows are in the order of the cases."""
    texts = iter([Case(SPECS["flash_attention"], shape, options).text() for shape, options in SHAPES])
    rows, text = [], ""
    for kernel in kernels(lines):
        if kernel["Kernel Name"].startswith(FIRST):
            text = next(texts)
        rows.append([text, *cells(kernel)])
    return table(COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark attention_profile")
    parser.add_argument("file", nargs="?", type=Path, help="what ncu wrote: needs no GPU")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)  # what ncu profiles
    options = parser.parse_args()
    if options.steps:
        for case in SHAPES:
            step(*case)
    else:
        print(report(options.file.read_text().splitlines() if options.file else counters()))
