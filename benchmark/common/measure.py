"""What the benchmarks share: how to time, and what to do with what was measured."""

import datetime
import fcntl
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
Build = Callable[[Inputs], Step]  # of a forward; what it imports is no part of the host's time
Timer = Callable[[], list[float]]

PACKAGES = {  # what a contestant needs
    "Liger": "liger-kernel",
    "CCE": "cut-cross-entropy",
    "fla": "fla-core",
    "quack": "quack-kernels",
    "Unsloth": "unsloth",
    "flash-attn-4": "flash-attn-4",
}
WARMUP = 3
GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")  # as nvidia-smi names them


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def present(contestants: Mapping[str, T]) -> dict[str, T]:
    """Those that are installed, by their names up to a comma."""
    return {name: c for name, c in contestants.items() if version(PACKAGES.get(name.partition(",")[0], "torch"))}


def gpu_state() -> dict[str, str]:
    """Driver, clocks and power, if nvidia-smi can tell."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return {}
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
    return dict(zip(GPU_STATE, told, strict=True)) if len(told) == len(GPU_STATE) else {}


def environment(*peers: str) -> Row:
    """What a file of results begins with."""
    packages = ("torch", "triton", *(PACKAGES.get(peer, peer) for peer in peers))
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in packages},
        "state": gpu_state(),
    }


def reason(error: Exception) -> str:
    """Of a row without figures."""
    if "out of memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def attempt(measure: Callable[[], Row]) -> Row:
    """What ``measure`` returns, or why it could not: other code's failure is a result, too."""
    try:
        return measure()
    except Exception as error:
        return {"reason": reason(error)}


def gpu_times(step: Step, repeats: int, prepare: Step = lambda: None) -> list[float]:
    """Times between two events around ``step``, in ms."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        prepare()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def captured(step: Step, times: int = 1, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``step``, that many times, in memory that it may share with graphs whose results nobody reads."""
    torch.cuda.set_sync_debug_mode("error")  # finds a step that waits for the GPU: a failed capture would outlive it
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
    """The peak memory of ``step`` above what was there, once it is warm, and what it returns."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20, result


def settle(rows: Iterable[Row], rounds: int, wait: Step = torch.cuda.synchronize) -> None:
    """Put the median of its times in the place of every timer in ``rows``.

    In each round every timer runs once, in another order: the GPU's clock depends on what ran before. Memory may be
    short by then: one that fails leaves a reason.
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
            row[key] = statistics.median(several)


def _add(timer: Timer, several: list[float]) -> Row:
    several += timer()
    return {}


class Setting:
    """Inputs and upstream gradients of one contestant, and the forward that it builds of them."""

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
    """Random gradients of what ``fn`` returns, with the strides of the first input of that shape, if there is one; of a
    loss 1, as in training.
    """
    outputs = fn(**inputs)
    like = (
        next((t for t in inputs.values() if t.shape == output.shape), output)
        for output in (outputs if isinstance(outputs, tuple) else (outputs,))
    )
    return [torch.randn_like(t, requires_grad=False) if t.dim() else torch.ones_like(t) for t in like]


def microseconds(step: Step, steps: int, finish: Step = lambda: None) -> list[float]:
    """The mean of so many steps in a row, as the host sees it."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return [(time.perf_counter() - start) / steps * 1e6]


class Repeats(NamedTuple):
    """Steps of a graph, its replays in a round, and eager steps in a round."""

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
    """Peak memory, and timers of the wall time and, if a graph of the kernels can be had, of theirs."""
    row = {"mib": peak_mib(setting.step)[0], "wall_us": partial(wall_us, setting, repeats.eager)}
    return row | attempt(partial(kernel_timers, setting, repeats, pool))


def rounded(result: Row) -> Row:
    """With four digits, which are more than a repetition would confirm."""
    numbers: Row = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return numbers


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process after the other: what it read there is still so when it writes."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def slug(name: str) -> str:
    """For the name of a file."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def path_of(result: Row, prefix: str) -> Path:
    name = f"{result['gpu']} {result['gpus']}x" if "gpus" in result else result["gpu"]
    return RESULTS / f"{prefix}-{slug(name)}.json"


def known(result: Row, prefix: str) -> Row:
    """What results/ has of the GPU of ``result``, if anything."""
    path = path_of(result, prefix)
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def save(result: Row, prefix: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    path_of(result, prefix).write_text(json.dumps(result, indent=1) + "\n")


def merged(earlier: Row, now: Row, order: Mapping[str, Iterable[str]]) -> Row:
    """What was measured now, and what was earlier of the other parts and contestants; those of each part in order."""
    found = {part: earlier.get("parts", {}).get(part, {}) | now["parts"].get(part, {}) for part in order}
    parts = {part: {name: found[part][name] for name in names if name in found[part]} for part, names in order.items()}
    return now | {"parts": parts}


def update(result: Row, prefix: str, order: Mapping[str, Iterable[str]]) -> None:
    """Save it ``merged`` with what the file has by now: other processes may measure other contestants."""
    RESULTS.mkdir(exist_ok=True)
    with locked(RESULTS):
        save(merged(known(result, prefix), result, order), prefix)
