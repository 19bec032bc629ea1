"""What the benchmarks share: how to time, and what to do with what was measured."""

import datetime
import fcntl
import importlib.metadata
import json
import os
import random
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmark.markdown import RESULTS, Row

T = TypeVar("T")
Step = Callable[[], Any]
Timer = Callable[[], list[float]]

PACKAGES = {"Liger": "liger-kernel", "CCE": "cut-cross-entropy", "fla": "fla-core"}  # what a contestant needs
WARMUP = 3


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def present(contestants: Mapping[str, T]) -> dict[str, T]:
    """Those that are installed, by their names up to a comma."""
    return {name: c for name, c in contestants.items() if version(PACKAGES.get(name.partition(",")[0], "torch"))}


def environment(*peers: str) -> Row:
    """What a file of results begins with."""
    packages = ("torch", "triton", *(PACKAGES.get(peer, peer) for peer in peers))
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in packages},
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


def captured(step: Step, times: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``step``, that many times."""
    torch.cuda.set_sync_debug_mode("error")  # finds a step that waits for the GPU: a failed capture would outlive it
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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

    In each round every timer runs once, in another order: the GPU's clock depends on what ran before.
    """
    times: list[tuple[Row, str, Timer, list[float]]] = [
        (row, key, value, []) for row in rows for key, value in row.items() if callable(value)
    ]
    order = random.Random(0)
    for _ in range(rounds):
        for _, _, timer, several in order.sample(times, len(times)):
            wait()
            several += timer()
    for row, key, _, several in times:
        row[key] = statistics.median(several)


def rounded(result: Row) -> Row:
    """With four digits, which are more than a repetition would confirm."""
    numbers: Row = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return numbers


def path_of(result: Row, prefix: str) -> Path:
    name = f"{result['gpu']} {result['gpus']}x" if "gpus" in result else result["gpu"]
    slug = re.sub("[^a-z0-9]+", "-", name.lower())
    return RESULTS / f"{prefix}-{slug}.json"


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
    folder = os.open(RESULTS, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        path = path_of(result, prefix)
        save(merged(json.loads(path.read_text()) if path.exists() else {}, result, order), prefix)
    finally:
        os.close(folder)  # ends the lock
