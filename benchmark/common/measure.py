"""Time contestants, and save and merge their results: shared by all benchmarks."""

import datetime
import fcntl
import gc
import importlib.metadata
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmark.common.markdown import RESULTS, Row

T = TypeVar("T")
Inputs = dict[str, Tensor]
Step = Callable[[], Any]
Build = Callable[[Inputs], Step]  # returns the forward, so that imports are not timed
Timer = Callable[[], list[float]]

PACKAGES = {  # contestant: the package it needs
    "Liger": "liger-kernel",
    "CCE": "cut-cross-entropy",
    "fla": "fla-core",
    "quack": "quack-kernels",
    "Unsloth": "unsloth",
    "flash-attn-4": "flash-attn-4",
    "transformers": "transformers",
    "TRL": "trl",
    "verl": "verl",
}
WARMUP = 3
GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")  # as nvidia-smi names them


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def present(contestants: Mapping[str, T]) -> dict[str, T]:
    """Return the contestants whose package is installed; the name up to a comma selects the package."""
    return {name: c for name, c in contestants.items() if version(PACKAGES.get(name.partition(",")[0], "torch"))}


def gpu_state() -> dict[str, str]:
    """Return driver, clocks and power limit of the GPU, or {} if nvidia-smi does not report them."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return {}
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
    return dict(zip(GPU_STATE, told, strict=True)) if len(told) == len(GPU_STATE) else {}


def environment(*peers: str) -> Row:
    """Return the head of a results file: GPU, date, versions and the state of the GPU."""
    packages = ("torch", "triton", *(PACKAGES.get(peer, peer) for peer in peers))
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in packages},
        "state": gpu_state(),
    }


class ToldError(Exception):
    """Failure in another process; its text is the reason that this process told."""


def reason(error: Exception) -> str:
    """Return the text of a row without figures: why ``error`` prevented the measurement."""
    if isinstance(error, ToldError):
        return str(error)
    if "out of memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def attempt(measure: Callable[[], Row]) -> Row:
    """Return the row of ``measure``, or a row with the reason of its failure: a peer's failure is a result, too."""
    try:
        return measure()
    except Exception as error:
        return {"reason": reason(error)}


def gpu_times(step: Step, repeats: int, prepare: Step = lambda: None) -> list[float]:
    """Return ``repeats`` times in ms, each between two events around ``step``; ``prepare`` is not timed."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        prepare()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def captured(step: Step, times: int = 1, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture ``step``, run ``times`` times, as a CUDA graph. ``pool``: memory shared with graphs of unused results."""
    torch.cuda.set_sync_debug_mode("error")  # raises where a step waits: a failed capture cannot be undone
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(times):
            step()
    return graph


def peak_mib(step: Callable[[], T]) -> tuple[float, T]:
    """Return the peak memory of a warm ``step`` above the memory allocated before, in MiB, and its result."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20, result


def kept_mib(forward: Step) -> float:
    """Return the memory that a warm ``forward`` leaves allocated, for the backward and as its results, in MiB."""
    gc.collect()  # cycles of the step before would be freed within this one
    before = torch.cuda.memory_allocated()
    results = forward()
    kept = torch.cuda.memory_allocated() - before
    del results
    return kept / 2**20


def settle(
    rows: Iterable[Row],
    rounds: int,
    wait: Step = torch.cuda.synchronize,
    reduce: Callable[[list[float]], Any] = statistics.median,
) -> None:
    """Replace every timer in ``rows`` by the median of its times, or by what else ``reduce`` makes of them.

    In each round every timer runs once, in a new order: the GPU's clock depends on the work before. A timer may run out
    of memory; its row then gets a reason.
    """
    times: list[tuple[Row, str, Timer, list[float]]] = [
        (row, key, value, []) for row in rows for key, value in row.items() if callable(value)
    ]
    order = random.Random(0)
    for _ in range(rounds):
        for row, _, timer, several in order.sample(times, len(times)):
            wait()
            row |= attempt(partial(_add, timer, several))
    for row, key, _, several in times:
        del row[key]
        if several:
            row[key] = reduce(several)


def _add(timer: Timer, several: list[float]) -> Row:
    several += timer()
    return {}


class Setting:
    """Inputs and upstream gradients of one contestant, and its forward built from them."""

    def __init__(self, build: Build, inputs: Inputs, upstream: Sequence[Tensor]) -> None:
        self.filling = [t.detach() for t in (*inputs.values(), *upstream)]
        copies = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
        self.leaves = {name: t for name, t in copies.items() if t.requires_grad}
        self.upstream = [t.clone() for t in upstream]
        self.filled = [t.detach() for t in (*copies.values(), *self.upstream)]
        self.forward = build(copies)

    def step(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), [*self.leaves.values()], self.upstream)

    def refill(self) -> None:
        for kept, original in zip(self.filled, self.filling, strict=True):
            kept.copy_(original)


def upstream_of(fn: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Return a random gradient for each output of ``fn``, strided as the first input of its shape; 1 for a loss."""
    outputs = fn(**inputs)
    like = (
        next((t for t in inputs.values() if t.is_floating_point() and t.shape == output.shape), output)
        for output in (outputs if isinstance(outputs, tuple) else (outputs,))
    )
    return [torch.randn_like(t, requires_grad=False) if t.dim() else torch.ones_like(t) for t in like]


def microseconds(step: Step, steps: int, finish: Step = lambda: None) -> list[float]:
    """Return the mean host time of ``steps`` consecutive steps, in us, as a list of one time."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return [(time.perf_counter() - start) / steps * 1e6]


class Repeats(NamedTuple):
    """Counts of steps in a graph, of its replays in a round, and of eager steps in a round."""

    graph: int
    replays: int
    eager: int


def wall_us(setting: Setting, steps: int) -> list[float]:
    setting.refill()
    torch.cuda.synchronize()
    return microseconds(setting.step, steps, torch.cuda.synchronize)


def kernel_us(graph: torch.cuda.CUDAGraph, repeats: Repeats, refill: Step) -> list[float]:
    return [ms / repeats.graph * 1e3 for ms in gpu_times(graph.replay, repeats.replays, refill)]


def kernel_timers(setting: Setting, repeats: Repeats, pool: Any) -> Row:
    steps = {"forward_us": setting.forward, "us": setting.step}
    return {
        key: partial(kernel_us, captured(step, repeats.graph, pool), repeats, setting.refill)
        for key, step in steps.items()
    }


def gpu_row(setting: Setting, repeats: Repeats, pool: Any = None) -> Row:
    """Return peak and kept memory, a timer of the wall time and, if the step can be captured, timers of the kernels."""
    row = {"mib": peak_mib(setting.step)[0], "kept_mib": kept_mib(setting.forward)}
    row["wall_us"] = partial(wall_us, setting, repeats.eager)
    return row | attempt(partial(kernel_timers, setting, repeats, pool))


def rounded(result: Row) -> Row:
    """Return ``result`` with floats of four digits: a second run would not confirm more."""
    numbers: Row = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return numbers


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``folder``, so that no other process writes between a read and a write."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def slug(name: str) -> str:
    """Return ``name`` in lower case with hyphens, for file names."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def path_of(result: Row, prefix: str) -> Path:
    name = f"{result['gpu']} {result['gpus']}x" if "gpus" in result else result["gpu"]
    return RESULTS / f"{prefix}-{slug(name)}.json"


def known(result: Row, prefix: str) -> Row:
    """Return the saved results for the GPU of ``result``, or {}."""
    path = path_of(result, prefix)
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def save(result: Row, prefix: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    path_of(result, prefix).write_text(json.dumps(result, indent=1) + "\n")


def merged(earlier: Row, now: Row, order: Mapping[str, Iterable[str]]) -> Row:
    """Return ``now`` with the parts and contestants of ``earlier`` that it lacks, in ``order``."""
    found = {part: earlier.get("parts", {}).get(part, {}) | now["parts"].get(part, {}) for part in order}
    parts = {part: {name: found[part][name] for name in names if name in found[part]} for part, names in order.items()}
    return now | {"parts": parts}


def update(result: Row, prefix: str, order: Mapping[str, Iterable[str]]) -> None:
    """Save ``result`` merged into its file, which other processes may have updated meanwhile."""
    RESULTS.mkdir(exist_ok=True)
    with locked(RESULTS):
        save(merged(known(result, prefix), result, order), prefix)
