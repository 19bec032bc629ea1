"""Model torch's caching allocator in a step: the bytes that it counts as allocated, and those that it reserves.

It gives each tensor the smallest free block that is large enough, else a new segment. A block keeps what is left of
it, up to 1 MiB, and then counts as a whole. Not modelled: expandable segments, which leave nothing over, blocks of
further streams, as FSDP2's gathers have, and what it gives back to a GPU whose memory is full.
"""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
SMALL = MIB  # bytes of a tensor up to which it is in a pool of its own
SEGMENT, MEDIUM, LARGE = 2 * MIB, 10 * MIB, 20 * MIB  # of the small pool; tensors below MEDIUM share LARGE ones
UNIT = 512
STEPS = 3  # until the segments are those that later steps find


class Part(NamedTuple):
    """Whose memory it is: a kind, the layer (None outside of layers), and the module within it."""

    kind: str
    layer: int | None
    module: str


class Change(NamedTuple):
    """A change of memory in bytes; ``counts`` if the new sum may be the peak."""

    part: Part
    size: int
    counts: bool


class Block:
    """Bytes of a segment, with the blocks before and after it there."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool, before: "Block | None", after: "Block | None") -> None:
        self.address, self.size, self.small = address, size, small
        self.before, self.after, self.free = before, after, False


class Allocator:
    """Two pools of free blocks, by size; ``allocated`` and ``reserved`` are bytes, ``peak`` the most allocated."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak = 0
        self._pools: tuple[list[tuple[int, int, Block]], ...] = ([], [])

    def allocate(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes."""
        small = size <= SMALL
        pool = self._pools[small]
        if (found := bisect.bisect_left(pool, (size,))) < len(pool):
            block = pool.pop(found)[2]
            block.free = False
        else:
            whole = SEGMENT if small else LARGE if size < MEDIUM else -(-size // SEGMENT) * SEGMENT
            block = Block(self.reserved, whole, small, None, None)
            self.reserved += whole
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:
            after = Block(block.address + size, rest, small, block, block.after)
            block.size, block.after = size, after
            self._join(after)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Free ``block``, which becomes one with free neighbours."""
        self.allocated -= block.size
        before, after = block.before, block.after
        if after is not None and after.free:
            self._take(after)
            block.size, block.after = block.size + after.size, after.after
        if before is not None and before.free:
            self._take(before)
            before.size, before.after = before.size + block.size, block.after
            block = before
        self._join(block)

    def _join(self, block: Block) -> None:
        if block.after is not None:
            block.after.before = block
        block.free = True
        bisect.insort(self._pools[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._pools[block.small]
        pool.pop(bisect.bisect_left(pool, (block.size, block.address)))


class Held(NamedTuple):
    """Bytes that torch counts at the peak of a later step, and that it holds of the GPU then."""

    allocated: int
    reserved: int


def held(start: Sequence[Change], changes: Sequence[Change]) -> Held:
    """Return what ``changes`` after ``start`` take of the allocator in the last of several steps.

    The optimizer makes its states at the end of the first step, in the blocks that activations left. Changes that leave
    memory behind, such as those that make a model, happen once.
    """
    allocator = Allocator()
    blocks: dict[tuple[Part, int], list[Block]] = defaultdict(list)
    # sums that autograd writes into a term, which the trace frees behind them
    sums: dict[int, list[Part]] = defaultdict(list)

    def change(part: Part, size: int, counts: bool) -> None:
        own = blocks[part, abs(size)]
        if size > 0 and counts:
            own.append(allocator.allocate(size))
        elif size > 0:
            sums[size].append(part)
        elif sums[-size]:
            blocks[sums[-size].pop(0), -size].extend([own.pop()] if own else [])
        elif own:
            allocator.release(own.pop())

    for each in start:
        if each.part.kind != "optimizer":
            change(*each)
    last = max((i for i, each in enumerate(changes) if each.size > 0), default=-1)
    behind = (i for i in range(last + 1, len(changes)) if changes[i].part.kind == "gradients")
    stepped = next(behind, len(changes))  # an optimizer's step finds the gradients, but no activations
    states = [each for each in start if each.part.kind == "optimizer"]
    for number in range(1 if sum(each.size for each in changes) else STEPS):
        allocator.peak = allocator.allocated
        first = number == 0
        for each in (*changes[:stepped], *(states if first else ()), *changes[stepped:]):
            change(*each)
    return Held(allocator.peak, allocator.reserved)
