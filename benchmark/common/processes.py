"""Measurements in processes of their own, one for each GPU, or two without any: what a contestant changes or leaves in
memory is gone with them.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from benchmark.common.markdown import Row
from benchmark.common.measure import Step, gpu_times, reason
from liger_like import ops  # noqa: F401  # before examples.train, which would have the kernels interpreted

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Worker = Callable[..., Iterator[Row]]
ROWS, TOLD = "rows", 100  # a file; the exit code of a process that wrote its reason there
GRACE = 1.0  # seconds
# plain torch is faster than interpreted kernels; segments that grow avoid fragmentation
ENVIRONMENT = {"TRITON_INTERPRET": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Processes(NamedTuple):
    """``count`` processes that run tasks for at most ``timeout`` seconds each."""

    count: int
    timeout: float

    def run(self, worker: Worker, *args: Any) -> list[Row]:
        """Return what ``worker(*args)``, a function of a module, yields in the first process.

        The first process to fail, or the end of the time, ends all of them, and the last row is the reason. A row that
        has more than a reason is a result.
        """
        spawned = get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, ROWS)
            file.touch()
            work = (self, folder, worker, args)
            several = [spawned.Process(target=_work, args=(rank, *work), daemon=True) for rank in range(self.count)]
            for rank, process in enumerate(several):
                with mock.patch.dict(os.environ, ENVIRONMENT, LOCAL_RANK=str(rank)):  # as torchrun sets it
                    process.start()
            failure = self._failure(several)
            for process in several:
                process.kill()
                process.join()
            rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()]
        told = next((i for i, row in enumerate(rows) if [*row] == ["reason"]), len(rows))
        return [*rows[:told], {"reason": failure}] if failure else rows[: told + 1]

    def run_all(self, worker: Worker, tasks: Sequence[Any], *args: Any) -> list[Row]:
        """Run ``worker(tasks, *args)``, which yields a row for each task; behind one that fails it is run anew."""
        rows: list[Row] = []
        while len(rows) < len(tasks):
            rows += self.run(worker, tasks[len(rows) :], *args)
        return rows

    def _failure(self, several: list[Any]) -> str:
        """Wait for all processes, or until one fails. Return why, unless the process told."""
        end = time.monotonic() + self.timeout
        running = {process.sentinel for process in several}
        while running and not any(process.exitcode for process in several):
            ended = wait(running, max(0.0, end - time.monotonic()))
            if not ended:
                return f"more than {self.timeout:.0f} s"
            running.difference_update(ended)
        if running:
            time.sleep(GRACE)  # a killed process may be seen after one that failed because of it
        silent = {process.exitcode for process in several} - {0, None, TOLD}
        return f"a process ended with {min(silent)}" if silent else ""


def _work(rank: int, processes: Processes, folder: str, worker: Worker, args: tuple[Any, ...]) -> None:
    """Run one process; the first reason in the file is that of the first failure."""

    def tell(row: Row) -> None:
        with Path(folder, ROWS).open("a") as file:
            file.write(json.dumps(row) + "\n")

    try:
        if GPU:
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        options: dict[str, Any] = {"store": dist.FileStore(f"{folder}/store", processes.count)}
        options["timeout"] = timedelta(seconds=processes.timeout)
        dist.init_process_group("nccl" if GPU else "gloo", world_size=processes.count, rank=rank, **options)
        worst(0.0)  # allocates the buffers of collectives while memory is free
        for row in worker(*args):
            if rank == 0:
                tell(row)
            dist.barrier()  # no process may fail before the row is written
    except Exception as error:
        traceback.print_exc()
        tell({"reason": reason(error)})
        os._exit(TOLD)  # an ordinary exit would wait for processes that wait for this one
    os._exit(0)  # an ordinary exit may be aborted by gloo's threads


def worst(*values: float) -> list[float]:
    """Return the largest of each over all processes."""
    largest = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def times(step: Step, repeats: int) -> list[float]:
    """Return times in ms, measured on the host without a GPU."""
    if GPU:
        return gpu_times(step, repeats)
    ends = [time.perf_counter()]
    for _ in range(repeats):
        step()
        ends.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in itertools.pairwise(ends)]


def median(step: Step, repeats: int) -> float:
    """Return the times of ``step`` in the slowest process."""
    return worst(statistics.median(times(step, repeats)))[0]


def reset_peak() -> None:
    if GPU:
        torch.cuda.reset_peak_memory_stats()
