"""Sort rows by their experts on the GPU, and list the tiles of rows that each expert needs.

Row t K + k is the work of token t's k-th expert. The sort is stable, so it always gives the same order. Only the GPU
knows how many rows an expert gets. Nothing waits for it: the table of tiles has a size that fits any routing.
Ids outside [0, E) count as expert E, whose rows come last and take part in nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.blocks import block_of
from liger_like.runtime.launcher import launch
from liger_like.runtime.registry import op

BLOCK = 64  # rows that are ranked among one another
BINS = 64  # experts that are counted at once
SCHEMA = "Tensor row, Tensor offsets, Tensor tiles"


class Routing(NamedTuple):
    """The order of the rows; all int32.

    ``row`` [S]: the rows, sorted by expert; those without one come last, or are left out. ``offsets`` [E + 2]: first
    place of each expert, the number of rows with an expert, the number of tiles. ``tiles`` [S // block_m + E, 2]:
    expert and first place of each tile. ``pos`` [T, K]: the place of each row, -1 without an expert.
    """

    row: Tensor
    offsets: Tensor
    tiles: Tensor
    pos: Tensor


@triton.jit
def _experts_of(index_ptr, offs, S, E):
    """Return the experts of rows: E for ids outside [0, E), and for rows past S."""
    e = tl.load(index_ptr + offs, mask=offs < S, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def _count_kernel(index_ptr, counts_ptr, S, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Count the rows that each expert has in a block."""
    pid = tl.program_id(0).to(tl.int64)
    e = _experts_of(index_ptr, pid * BLOCK + tl.arange(0, BLOCK), S, E)
    for first in range(0, E + 1, BINS):
        bins = first + tl.arange(0, BINS)
        count = tl.sum((e[:, None] == bins[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + pid * (E + 1) + bins, count, mask=bins <= E)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(counts_ptr, totals_ptr, blocks, E, BLOCK: tl.constexpr):
    """Replace an expert's counts by the sums over the blocks before, and store its total."""
    e = tl.program_id(0)
    total = 0
    for first in range(0, blocks, BLOCK):
        offs = first + tl.arange(0, BLOCK).to(tl.int64)
        ptrs, mask = counts_ptr + offs * (E + 1) + e, offs < blocks
        count = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, total + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + e, total)


@triton.jit(do_not_specialize=["entries"])
def _tiles_kernel(
    totals_ptr, offsets_ptr, tiles_ptr, entries, E,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first place of expert ``e`` and its tiles; those of expert E fill the rest of the table."""
    e = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < e, other=0)
    start = tl.sum(totals, 0)
    tile = tl.sum((totals + BLOCK_M - 1) // BLOCK_M, 0)
    end = tile + (tl.load(totals_ptr + e) + BLOCK_M - 1) // BLOCK_M
    tl.store(offsets_ptr + e, start)
    if e == E:
        tl.store(offsets_ptr + E + 1, tile)
        end = entries
    for first in range(tile, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        tl.store(tiles_ptr + 2 * entry, e + tl.zeros_like(entry), mask=entry < end)
        tl.store(tiles_ptr + 2 * entry + 1, start + (entry - tile) * BLOCK_M, mask=entry < end)


@triton.jit(do_not_specialize=["S", "rows"])
def _place_kernel(index_ptr, counts_ptr, offsets_ptr, row_ptr, pos_ptr, S, rows, E, BLOCK: tl.constexpr):
    """Store the place of each row, behind the rows of its expert in earlier blocks and earlier in this block."""
    pid = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    offs = pid * BLOCK + i
    e = _experts_of(index_ptr, offs, S, E)
    rank = tl.sum(((e[:, None] == e[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    place = tl.load(offsets_ptr + e) + tl.load(counts_ptr + pid * (E + 1) + e) + rank
    tl.store(row_ptr + place, offs, mask=(offs < S) & (place < rows))
    tl.store(pos_ptr + offs, tl.where(e < E, place, -1), mask=offs < S)


def _outputs(index: Tensor, E: int, block_m: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = lambda *shape: index.new_empty(shape, dtype=torch.int32)  # noqa: E731
    return new(rows), new(E + 2), new(rows // block_m + E, 2), new(*index.shape)


@op(
    "moe_rows(Tensor index, int E, int block_m, SymInt rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _outputs,
    replayed=True,
)
def moe_rows(index: Tensor, E: int, block_m: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``Routing`` of ``index`` [T, K], for E experts and tiles of ``block_m`` rows.

    ``rows`` is S: at least the number of rows with an expert, at most T K.
    """
    row, offsets, tiles, pos = _outputs(index, E, block_m, rows)
    index, S = index.contiguous(), index.numel()
    blocks = -(-S // BLOCK)
    counts, totals = offsets.new_empty(blocks, E + 1), offsets.new_empty(E + 1)
    if S:
        launch(_count_kernel, (blocks,), (index, counts), (S, E), BLOCK=BLOCK, BINS=BINS, num_warps=4)
    launch(_scan_kernel, (E + 1,), (counts, totals), (blocks, E), BLOCK=1024, num_warps=4)
    launch(
        _tiles_kernel,
        (E + 1,),
        (totals, offsets, tiles),
        (tiles.shape[0], E),
        BLOCK_M=block_m,
        BINS=block_of(E + 1),
        BLOCK=BLOCK,
        num_warps=4,
    )
    if S:
        tensors = index, counts, offsets, row, pos
        launch(_place_kernel, (blocks,), tensors, (S, rows, E), BLOCK=BLOCK, num_warps=8)
    return row, offsets, tiles, pos
