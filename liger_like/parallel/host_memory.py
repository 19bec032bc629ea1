"""Pinned memory of the host in pages, and copies between it and a GPU that nothing waits for on the host."""

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE, SLAB = 1 << 20, 1 << 30  # bytes: what a tensor takes multiples of, and what is pinned at once
SHARE = 0.8  # of the host's free memory, unless the user gives a number
MEMINFO, CGROUP, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CAPTURED = "offload_checkpoints cannot run in a CUDA graph: capture the step without it"


def free_bytes() -> int:
    """Return the memory of the host that is free for this process: its share of what the kernel and cgroup allow."""
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) << 10]
    for limit, usage in _limits():
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            free.append(int(most) - int(usage.read_text()))
    return max(0, int(SHARE * min(free))) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _limits() -> Iterator[tuple[Path, Path]]:
    """Yield the files of limit and usage of each cgroup that this process is in, version 1 and 2, up to the root."""
    for line in OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):
            group = root.joinpath(*parts[:depth])
            yield group / names[0], group / names[1]


class Budget:
    """Bytes of the host that the slabs of all devices may take together."""

    def __init__(self, size: int) -> None:
        self.size, self.rest = size, size

    def slab(self) -> int:
        """Return the size of the next slab, a power of two since torch rounds pinned memory up to one, or 0."""
        size = min(SLAB, 1 << self.rest.bit_length() >> 1)
        size = size if size >= PAGE else 0
        self.rest -= size
        return size


class Copies:
    """Copies between a GPU and pinned memory, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.seconds = 0.0

    def memory(self, size: int) -> Tensor:
        """Return ``size`` bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def current(self) -> Any:
        """Return the current stream of this thread. Raises RuntimeError within the capture of a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        return torch.cuda.current_stream(self.device)

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], owner: Any) -> Any:
        """Copy each (target, source) after the work that the current stream and ``owner`` have now; return the end.

        ``owner`` is the stream that uses the GPU's memory of the copies, and may use it again once it is free.
        """
        for stream in (owner, self.current()):
            self.stream.wait_stream(stream)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream.record_event(), owner

    def wait(self, end: Any, tensor: Tensor) -> None:
        """Let the current stream and the owner of ``tensor`` wait for the ``end`` of its copies, and note how long.

        The tensor may be used on the current stream, and be freed, from now on.
        """
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream, (event, owner) = self.current(), end
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        if stream != owner:  # as in a backward whose thread has another current stream
            owner.wait_event(event)
            tensor.record_stream(stream)
        self.waits.append((before, after))
        self._count(wait=False)

    def waited(self) -> float:
        """Return the seconds that streams have waited for copies; waits until they are known."""
        self._count(wait=True)
        return self.seconds

    def _count(self, wait: bool) -> None:
        while self.waits and (wait or self.waits[0][1].query()):  # type: ignore[no-untyped-call]
            before, after = self.waits.popleft()
            after.synchronize()
            self.seconds += before.elapsed_time(after) / 1e3


ENGINES: dict[str, type[Copies]] = {"cuda": Copies}  # by the type of a device; others have no memory of their own


class Pages:
    """Pages of pinned memory for the tensors of one device; slabs are kept for the next step."""

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.device, self.copies, self.budget = device, ENGINES[device.type](device), budget
        self.slabs: list[Tensor] = []
        self.places: list[tuple[int, int]] = []  # slab and offset of each page
        self.free: list[int] = []

    def take(self, size: int) -> list[int] | None:
        """Return pages for ``size`` bytes, the lowest that are free, or None if the budget does not allow them."""
        count = -(-size // PAGE)
        while len(self.free) < count and (slab := self.budget.slab()):
            self.slabs.append(self.copies.memory(slab))
            pages = range(len(self.places), len(self.places) + slab // PAGE)
            self.places += [(len(self.slabs) - 1, offset) for offset in range(0, slab, PAGE)]
            self.free.extend(pages)
        if len(self.free) < count:
            return None
        self.free.sort()
        taken = self.free[:count]
        del self.free[:count]
        return taken

    def give(self, pages: list[int]) -> None:
        """Take back pages; copies that were started before are done before the next copies of this device.

        Any thread may call this at any time, as Python does when it collects garbage, so it is one step.
        """
        self.free.extend(pages)

    def parts(self, pages: list[int], size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the memory of ``size`` bytes in pieces that adjoin, each with the number of bytes before it."""
        start = 0
        for (slab, _), run in itertools.groupby(
            enumerate(pages), lambda item: (self.places[item[1]][0], item[1] - item[0])
        ):
            places = [self.places[page][1] for _, page in run]
            length = min(len(places) * PAGE, size - start)
            yield start, self.slabs[slab][places[0] : places[0] + length]
            start += length
