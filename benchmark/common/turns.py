"""Contestants that each have a process of their own, and take turns on one GPU."""

import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing import get_context

from benchmark.common.markdown import Row
from benchmark.common.measure import ToldError, reason
from benchmark.common.processes import GPU

NOT_INTERPRETED = {"TRITON_INTERPRET": "0"}  # plain torch is faster than interpreted kernels


class Remote:
    """Process that builds a row for ``settle``; the timers of the row run there.

    All processes build at once: ``row`` waits for the row. A process that fails, ends or needs more than ``timeout``
    seconds for an answer is ended. Each later question raises its reason again.
    """

    def __init__(self, build: Callable[..., Row], *args: Any, timeout: float) -> None:
        spawned = get_context("spawn")
        self._connection, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(theirs, build, args), daemon=True)
        self._timeout, self._failure = timeout, ""
        with mock.patch.dict(os.environ, NOT_INTERPRETED):
            self._process.start()
        theirs.close()  # the end of the process then ends the connection

    def row(self) -> Row:
        """Return the row that the process built."""
        row: Row = self._answer()
        return {key: partial(self._answer, key) if value is None else value for key, value in row.items()}

    def end(self) -> None:
        """End the process, which frees its memory."""
        self._process.kill()
        self._process.join()

    def _answer(self, *keys: str) -> Any:
        """Return the row, or the times of the timer at a key. Raise ToldError with the reason if there are none."""
        answer = None
        if not self._failure:
            answer, self._failure = self._asked(keys)
        if self._failure:
            self.end()
            raise ToldError(self._failure)
        return answer

    def _asked(self, keys: tuple[str, ...]) -> tuple[Any, str]:
        try:
            for key in keys:
                self._connection.send(key)
            if self._connection.poll(self._timeout):
                answer: tuple[Any, str] = self._connection.recv()
                return answer
        except (EOFError, OSError):
            self._process.join()
            return None, f"a process ended with {self._process.exitcode}"
        return None, f"more than {self._timeout:.0f} s"


def _serve(connection: Any, build: Callable[..., Row], args: tuple[Any, ...]) -> None:
    """Send the row, with None for each timer, then the times of each timer that is asked for."""
    if not GPU:
        torch.set_num_threads(1)
    try:
        row = build(*args)
        connection.send(({key: None if callable(value) else value for key, value in row.items()}, ""))
        while True:
            connection.send((row[connection.recv()](), ""))
    except Exception as error:
        traceback.print_exc()
        connection.send((None, reason(error)))
