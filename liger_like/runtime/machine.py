"""The GPU that the ops are to take for theirs while ``liger_like.planning`` traces tensors without data.

In real life ``current`` is None. Every function that asks a device, a pointer or the host looks here first, so a trace
runs the launchers of the ops, whose temporaries it counts, without a GPU; only ``launch`` does nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Machine:
    """Answers of a GPU; sizes are in bytes. ``shared_memory`` is that of one program."""

    name: str
    architecture: int
    multiprocessors: int
    l2: int
    shared_memory: int
    memory: int


current: Machine | None = None
own_modes = 0  # dispatch modes of the trace itself, which must not change what runs


@contextlib.contextmanager
def pretended(machine: Machine) -> Iterator[None]:
    """Let the ops take ``machine`` for their GPU within the context; not for several threads at once."""
    global current
    before, current = current, machine
    try:
        yield
    finally:
        current = before


def is_watched() -> bool:
    """Return True if a dispatch mode sees each op, other than those of a trace."""
    return torch._C._len_torch_dispatch_stack() > own_modes


def on_gpu(x: Tensor) -> bool:
    """Return True if ``x`` is on a GPU, or in a trace that pretends so."""
    return x.is_cuda or current is not None


def address(x: Tensor) -> int:
    """Return the address of ``x``; in a trace its offset, since torch aligns what it allocates."""
    return x.data_ptr() if current is None else x.storage_offset() * x.element_size()
