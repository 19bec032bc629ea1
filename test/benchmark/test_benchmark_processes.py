"""Measurements in processes of their own: their rows, and what becomes of failures."""

import os
import time

import pytest
import torch.distributed as dist

from benchmark.common.processes import GPU, Processes

pytestmark = pytest.mark.skipif(GPU, reason="a process for each GPU, which are not always two")


def worker(tasks):
    """One process fails while the other waits for it."""
    for task in tasks:
        if dist.get_rank() == 1:
            if task == "memory":
                raise RuntimeError("CUDA out of memory.")
            if task == "end":
                os._exit(3)
            if task == "wait":
                time.sleep(60)
        dist.barrier()
        yield {"task": task}


def test_failures_are_rows():
    assert Processes(2, 60).run_all(worker, ["a", "memory", "end", "b"]) == [
        {"task": "a"},
        {"reason": "out of memory"},
        {"reason": "a process ended with 3"},
        {"task": "b"},
    ]


def contestants():
    yield {"name": "a", "reason": "out of memory"}
    yield {"name": "b", "ms": 1.0}


def test_the_failure_of_a_contestant_is_a_result():
    assert Processes(2, 60).run(contestants) == [*contestants()]


def local_rank():
    """Yield the rank that torchrun would set; each process has its own."""
    rank = os.environ["LOCAL_RANK"]
    assert rank == str(dist.get_rank())
    yield {"rank": rank}


def test_processes_have_their_local_rank():
    assert Processes(2, 60).run(local_rank) == [{"rank": "0"}]


def test_the_end_of_the_time_is_a_row():
    assert Processes(2, 5).run(worker, ["wait"]) == [{"reason": "more than 5 s"}]
