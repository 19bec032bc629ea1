"""Contestants in processes of their own: where their timers run, and what becomes of failures."""

import os
import time

import pytest

from benchmark.common.measure import attempt, settle
from benchmark.common.turns import Remote

TIMEOUT = 90


def contestant(kind):
    """Return a row with a timer, or fail as ``kind`` says: at once, or in the timer."""
    if kind == "raises":
        raise ValueError("no")
    if kind == "ends":
        os._exit(3)
    if kind == "waits":
        time.sleep(600)

    def timer():
        if kind == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        if kind == "dies":
            os._exit(4)
        return [os.getpid(), os.getppid(), int(os.environ["TRITON_INTERPRET"])]

    return {"gib": 2.0, "us": timer}


@pytest.fixture
def start():
    remotes = []

    def start(kind, timeout=TIMEOUT):
        remotes.append(Remote(contestant, kind, timeout=timeout))
        return remotes[-1]

    yield start
    for remote in remotes:
        remote.end()


def test_timers_run_in_processes_of_their_own(start, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    remotes = [start("works"), start("works")]
    rows = [remote.row() for remote in remotes]
    settle(rows, 2, wait=lambda: None, reduce=list)
    pids = [remote._process.pid for remote in remotes]
    assert rows == [{"gib": 2.0, "us": [pid, os.getpid(), 0] * 2} for pid in pids]
    assert len({*pids, os.getpid()}) == 3
    remotes[0].end()
    assert not remotes[0]._process.is_alive()
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_failures_are_rows_and_end_nothing_else(start):
    """A failure stays the same in later rounds, and its process is gone."""
    kinds = ("raises", "ends", "memory", "dies", "works")
    remotes = [start(kind) for kind in kinds]
    rows = [attempt(remote.row) for remote in remotes]
    settle(rows, 3, wait=lambda: None, reduce=len)
    assert rows == [
        {"reason": "ValueError: no"},
        {"reason": "a process ended with 3"},
        {"gib": 2.0, "reason": "out of memory"},
        {"gib": 2.0, "reason": "a process ended with 4"},
        {"gib": 2.0, "us": 9},
    ]
    assert [remote._process.is_alive() for remote in remotes] == [False] * 4 + [True]


def test_the_end_of_the_time_is_a_reason(start):
    waits = start("waits", timeout=1)
    assert attempt(waits.row) == {"reason": "more than 1 s"}
    assert not waits._process.is_alive()
