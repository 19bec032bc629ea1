"""Measures every op against every peer that is installed: what ``liger-like bench`` runs.

    make bench                                             all of it, into results/, and from it the report
    liger-like bench --op rms_norm --peer Liger            some ops, ours and some of the peers
    liger-like bench --shape Llama-3-8B --shape rows       the shapes of some models and sweeps
    liger-like bench --quick                               a shape of each op, one round; without a GPU a tiny one
    liger-like bench --report                              the report again, without a GPU

bf16, random data. A contestant is first compared with the reference in float64 by the rule of ``testing``, where torch
in the same dtype is the reference or the contestant "torch", whichever is less exact. One that breaks the rule is shown
as wrong, without times. Of what would not fit into memory in float64 fewer tokens are compared.

* forward, backward, both: the kernels alone, by replays of a CUDA graph; the backward is both less the forward.
* wall: eager forwards and backwards between two waits for the GPU. host: the same without the waits.
* kept, peak: memory above the inputs, of a forward's results and of all that waits for the backward, and at most.
* rate: the bytes or FLOPs that the op needs over the time of both, or the wall time if a step cannot be captured. The
  ceilings are a copy and a product of matrices, measured in the same run. "bmm" is a bound, not a contestant: the
products of experts that have equally many rows, and nothing else.

All contestants of a shape are measured in the same rounds, in random order. Every label counts, all sequences have the
same positions, and a loss has the gradient 1. No cache is flushed: tensors of less than about 50 MB, in the sweep of
rows, stay in it, and may be faster than a copy. What is measured is written at once; a file keeps what it has of other
ops, shapes and peers.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmark.common.markdown import Row
from benchmark.common.measure import (
    Build,
    Inputs,
    Repeats,
    Setting,
    Step,
    attempt,
    environment,
    gpu_row,
    locked,
    microseconds,
    rounded,
    settle,
    upstream_of,
)
from benchmark.common.processes import DEVICE, GPU, times
from benchmark.kernels import bench_report
from benchmark.kernels.bench_shapes import SHAPES, Case, Shape, cases
from benchmark.kernels.contestants import OPS, Attention, Plain, libraries, named, shape_text
from benchmark.kernels.experts import BOUND
from liger_like.testing import Comparison

PEERS = ("torch", "torch.compile", "flex_attention", BOUND, *libraries(OPS.values()))
DTYPE = torch.bfloat16
LOG_WIDTH = 160  # characters, if the output is not a terminal
ROUNDS, QUICK_ROUNDS = 5, 1
ROUND_SECONDS, MOST = 0.02, Repeats(graph=5, replays=4, eager=20)
ELEMENTS, SCORES = 2**27, 1024  # limits of a float64 reference: elements of a tensor, tokens of attention
COPIED, MULTIPLIED = (2**28, 8192) if GPU else (2**20, 256)  # sizes of the ceilings
TINY = {
    "lead": (16,),
    "N": 64,
    "V": 96,
    "B": 2,
    "S": 16,
    "Sk": 16,
    "H": 8,
    "I": 16,
    "E": 32,
    "K": 2,
    "Hk": 2,
    "D": 16,
    "R": 16,
    "Dv": 16,
}
TINY_DOCUMENTS = ((9, 9), (7, 7))
wait: Step = torch.cuda.synchronize if GPU else lambda: None


def tiny(shape: Shape) -> Shape:
    """Return the smallest form of ``shape``, for a machine without a GPU."""
    documents = {"lengths": TINY_DOCUMENTS} if "lengths" in shape else {}
    return {**shape, **{key: n for key, n in TINY.items() if key in shape}, **documents}


def fewer(shape: Shape) -> Shape:
    """Return ``shape`` with as many rows as fit into memory in float64, and its full widths."""
    if "lengths" in shape:
        longest = SCORES // len(shape["lengths"])
        return {**shape, "lengths": tuple((min(n, longest),) * 2 for n, _ in shape["lengths"])}
    if "Sk" in shape:
        return {**shape, "B": 1, "S": min(shape["S"], SCORES), "Sk": min(shape["Sk"], SCORES)}
    if "lead" in shape:
        rows = ELEMENTS // max(shape.get("N", 1), shape.get("V", 1))
        return {**shape, "lead": (min(shape["lead"][0], rows),)}
    return shape


def make_inputs(op: Plain | Attention, shape: Shape) -> Inputs:
    torch.manual_seed(0)
    inputs = op.spec.inputs(DTYPE, DEVICE, **shape)
    if "target" in inputs:
        inputs["target"].clamp_(min=0)
    for name in {"cos", "sin"} & inputs.keys():
        inputs[name][1:] = inputs[name][0]
    return inputs


def results(build: Build, inputs: Inputs, upstream: Iterable[Tensor]) -> Inputs:
    """Return outputs and gradients by name."""
    setting = Setting(build, inputs, [*upstream])
    outputs = setting.forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    kept = {f"out{i}": t.detach().clone() for i, t in enumerate(outputs)}  # a backward may overwrite the outputs
    gradients = torch.autograd.grad(outputs, [*setting.leaves.values()], setting.upstream, allow_unused=True)
    if missing := [name for name, t in zip(setting.leaves, gradients, strict=True) if t is None]:
        raise ValueError(f"no gradient of {', '.join(missing)}")
    return kept | {f"d{name}": t for name, t in zip(setting.leaves, gradients, strict=True)}


class Truth:
    """The results of an op in float64, and torch's distance from them."""

    def __init__(self, op: Plain | Attention, shape: Shape) -> None:
        self.inputs, self.k = make_inputs(op, shape), op.spec.k
        reference = named(op.spec.ref, **op.options)
        self.upstream = upstream_of(partial(op.spec.ref, **op.options), self.inputs)
        double = {
            name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for name, t in self.inputs.items()
        }
        self.exact = results(reference, double, [t.double() for t in self.upstream])
        plain = [self.errors(build) for build in (reference, op.contestants().get("torch", reference))]
        self.torch = {name: max(errors[name] for errors in plain) for name in self.exact}

    def errors(self, build: Build) -> dict[str, float]:
        got = results(build, self.inputs, self.upstream)
        return {name: float((got[name] - true).norm()) for name, true in self.exact.items()}

    def check(self, build: Build) -> Row:
        """Return the largest error in units of torch's."""
        errors = self.errors(build)
        compared = [Comparison(n, errors[n], self.torch[n], float(true.norm())) for n, true in self.exact.items()]
        ratios = [self.k * c.kernel / c.allowed(self.k) if c.kernel else 0.0 for c in compared]
        row: Row = {"error": float(torch.tensor(ratios).amax())}  # amax keeps NaN
        return row if all(c.passes(self.k) for c in compared) else row | {"reason": "wrong"}


def repeats(setting: Setting) -> Repeats:
    """Return the number of steps that fill the time of a round."""
    setting.step()
    wait()
    seconds = microseconds(setting.step, 1, wait)[0] / 1e6
    return Repeats(*(min(most, max(1, math.ceil(ROUND_SECONDS / seconds))) for most in MOST))


def timers(build: Build, inputs: Inputs, upstream: list[Tensor], pool: Any) -> Row:
    """Measure one contestant; its graphs share ``pool`` with those of the others."""
    setting = Setting(build, inputs, upstream)
    several = repeats(setting)
    host = partial(microseconds, setting.step, several.eager)
    return {**gpu_row(setting, several, pool), "host_us": host} if GPU else {"wall_us": host}


def rated(row: Row, work: float, ceiling: float) -> Row:
    """Return ``row`` with the figures that follow from its times; the rate is ``work`` per microsecond."""
    us = row.get("us", row.get("wall_us"))
    if us is None:
        return row
    backward = {"backward_us": row["us"] - row["forward_us"]} if {"us", "forward_us"} <= row.keys() else {}
    return {**row, **backward, "rate": work / us, "share": work / us / ceiling}


def rows_of(op: Plain | Attention, shape: Shape, builds: Mapping[str, Build], rounds: int) -> list[Row]:
    """Return the errors of each contestant, and times of those whose errors are small enough; a bound has no error."""
    truth = Truth(op, fewer(shape))
    rows: list[Row] = [{"name": name} for name in builds]
    for row in rows:
        if row["name"] != BOUND:
            row |= attempt(partial(truth.check, builds[row["name"]]))
    del truth
    inputs = make_inputs(op, shape)
    upstream = upstream_of(partial(op.spec.fn, **op.options), inputs)
    pool = torch.cuda.graph_pool_handle() if GPU else None
    for row in rows:
        if "reason" not in row:
            row |= attempt(partial(timers, builds[row["name"]], inputs, upstream, pool))
    settle(rows, rounds, wait)
    return rows


def measure(case: Case, names: Collection[str], ceilings: Mapping[str, float], rounds: int) -> Row:
    """Measure each contestant whose name, up to a comma, is one of ``names``."""
    op = OPS[case.op]
    torch.compiler.reset()
    builds = {name: build for name, build in op.contestants().items() if name.partition(",")[0] in names}
    outcome = attempt(lambda: {"rows": rows_of(op, case.shape, builds, rounds)})
    rows = outcome.get("rows", [{"name": name, **outcome} for name in builds])  # one reason for all
    forward, backward, flops = op.spec.cost(DTYPE.itemsize, **case.shape, **op.options)
    unit, work = ("TFLOP/s", flops / 1e6) if flops else ("GB/s", (forward + backward) / 1e3)
    rows = [rated(row, work, ceilings[unit]) for row in rows]
    return {"op": case.op, "shape": shape_text(case.shape), "of": ", ".join(case.of), "unit": unit, "rows": rows}


def measured_ceilings() -> dict[str, float]:
    """Return GB/s of a copy and TFLOP/s of a product of matrices."""
    a, b, out = (torch.randn(MULTIPLIED, MULTIPLIED, dtype=DTYPE, device=DEVICE) for _ in range(3))
    source, target = (torch.randn(COPIED, dtype=DTYPE, device=DEVICE) for _ in range(2))
    steps: dict[str, tuple[Step, float]] = {
        "GB/s": (partial(target.copy_, source), 2 * source.nbytes / 1e6),
        "TFLOP/s": (partial(torch.mm, a, b, out=out), 2 * MULTIPLIED**3 / 1e9),
    }
    return {unit: work / statistics.median(times(step, 30)[10:]) for unit, (step, work) in steps.items()}


def merged(earlier: Row, now: Row) -> Row:
    """Return the new rows, and the earlier rows of other shapes and contestants with the same versions."""
    found: dict[tuple[str, str], Row] = {}
    for case in (*earlier.get("cases", ()), *now["cases"]):
        known = found.get((case["op"], case["shape"]), {"rows": []})
        rows = {row["name"]: row for row in (*known["rows"], *case["rows"])}
        found[case["op"], case["shape"]] = {**case, "rows": [*rows.values()]}
    before = earlier.get("versions", {})  # keep versions of packages that are not installed now
    return {
        **now,
        "versions": {name: version or before.get(name) for name, version in now["versions"].items()},
        "cases": sorted(found.values(), key=lambda case: [*OPS].index(case["op"])),
    }


def show(case: Row, console: Console) -> None:
    """Return the columns that have a value."""
    rows = [bench_report.cells(case, row) for row in case["rows"]]
    columns = [column for column in zip(bench_report.COLUMNS, *rows, strict=True) if {*column[1:]} != {"-"}][2:]
    title = f"{case['op']}, {case['shape']} ({case['of']})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name, *_ in columns:
        table.add_column(name, overflow="fold", max_width=32)
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    console.print(table)


def complaint(ops: Collection[str], peers: Collection[str], names: Collection[str], quick: bool) -> str:
    """Return the reason why ``run`` cannot run, or None."""
    for given, known in ((ops, OPS), (peers, PEERS), (names, SHAPES)):
        if unknown := {*given} - {*known}:
            return f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}"
    return "" if GPU or quick else "needs a GPU (all but --quick and --report)"


def run(ops: Collection[str], peers: Collection[str], names: Collection[str], quick: bool, folder: Path) -> Path:
    """Measure, print, and write the files into ``folder``; return the path of the results."""
    chosen = cases(ops or OPS, names or SHAPES)
    if quick:
        chosen = [*{case.op: case for case in reversed(chosen)}.values()][::-1]
    if not GPU:
        chosen = [case._replace(shape=tiny(case.shape)) for case in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    ceilings = measured_ceilings()
    of_run = {**environment(*libraries(OPS.values())), "quick": quick, "ceilings": ceilings}
    path = folder / f"{bench_report.stem(of_run)}.json"
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{case.op}, {shape_text(case.shape)}")
            row = measure(case, {bench_report.OURS, *(peers or PEERS)}, ceilings, QUICK_ROUNDS if quick else ROUNDS)
            with locked(folder):  # other processes may write their ops
                earlier = json.loads(path.read_text()) if path.exists() else {}
                path.write_text(json.dumps(merged(earlier, rounded({**of_run, "cases": [row]})), indent=1) + "\n")
            show(row, console)
            progress.advance(task)
    with locked(folder):
        bench_report.write_beside(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark bench", description="measures ops against their peers")
    parser.add_argument("--op", action="append", default=[], help="an op; may be repeated; all, if none is given")
    parser.add_argument("--peer", action="append", default=[], help="a peer; may be repeated")
    parser.add_argument("--shape", action="append", default=[], help="a model, or a sweep; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a shape of each op; without a GPU a tiny one")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="the folder for what is written")
    parser.add_argument("--report", action="store_true", help="only write the report of benchmark/results/")
    options = parser.parse_args()
    if options.report:
        bench_report.write_report()
        return
    chosen = options.op, options.peer, options.shape, options.quick
    if message := complaint(*chosen):
        parser.error(message)
    print(run(*chosen, options.out))
