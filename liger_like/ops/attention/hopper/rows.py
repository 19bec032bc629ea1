"""Which rows and keys a program for Hopper has and sees, and the queue that hands out tiles."""

from liger_like.ops.attention.hopper.buffers import barriers
from liger_like.ops.attention.visibility import bounds_of_spans, schedule, start_of, zones
from liger_like.runtime.gluon import gl, gluon, mbarrier

QUAD = gl.constexpr(6)  # the bits of a column by which the threads that share a row differ


@gluon.jit
def find_rows(block, cu_ptr, cu_other_ptr, count, total, total_other, BLOCK: gl.constexpr, SEQUENCES: gl.constexpr):
    """Where a block of rows of packed sequences lies: its first row, where its sequence starts, the length of that, and
    where the other side of it starts and its length.

    A sequence has a block for each multiple of BLOCK in it, and one more; those that it does not need have no length on
    the other side. What follows the last sequence is one more, with nothing on the other side.
    """
    offs = gl.arange(0, SEQUENCES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    starts = start_of(cu_ptr, offs, count, total)
    index = gl.sum(((offs <= count) & (starts // BLOCK + offs <= block)).to(gl.int32), 0) - 1
    start = start_of(cu_ptr, index, count, total)
    length = gl.maximum(start_of(cu_ptr, index + 1, count, total) - start, 0)
    start_other = start_of(cu_other_ptr, index, count, total_other)
    length_other = gl.maximum(start_of(cu_other_ptr, index + 1, count, total_other) - start_other, 0)
    row = (block - start // BLOCK - index) * BLOCK
    row = gl.where(row < 0, length, row)  # of offsets that fall
    return row, start, length, start_other, gl.where((row < length) & (index < count), length_other, 0)


@gluon.jit
def tile_of(
    tile, pointers, sizes, B, S, left, right, H: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SEQUENCES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Where a tile of queries is: batch, head, first row; first rows and lengths of its sequence; the blocks of keys,
    at least one, that it sees; and which of them need no mask.
    """
    cu_q_ptr, cu_k_ptr, spans_ptr = pointers
    SK, count, blocks, section = sizes
    block, head = schedule(tile, blocks, B * H, section)
    b = head // H
    row = block * BLOCK_M
    start_q = 0
    length_q = S
    start_k = 0
    length_k = SK
    if cu_q_ptr is not None:
        row, start_q, length_q, start_k, length_k = find_rows(
            block, cu_q_ptr, cu_k_ptr, count, S, SK, BLOCK_M, SEQUENCES
        )
    shift = length_k - length_q
    last = gl.minimum(row + BLOCK_M, length_q) - 1
    bounds = bounds_of_spans(spans_ptr, b.to(gl.int64), B, S, row, last)
    start, end, inner_start, inner_end = zones(
        row + shift, last + shift, left, right, bounds, length_k, 0, 1, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    end = start + gl.maximum(gl.cdiv(end - start, BLOCK_N), 1) * BLOCK_N
    return b, head % H, row, start_q, length_q, start_k, length_k, start, end, inner_start, inner_end


@gluon.jit
def keys_of(
    pointers, sizes, B, S, left, right, H: gl.constexpr, HK: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What a program for dk and dv has: batch, key head, first key; what is behind the last key and query of its
    sequence; position of its first query minus that of its first key; the blocks of queries that see the keys, and
    from where to where they need no mask; its first query head, and how many. Rows are those of the tensors.
    """
    cu_q_ptr, cu_k_ptr, spans_ptr = pointers
    SK, count, blocks, section, splits = sizes
    block, head = schedule(gl.program_id(0), blocks, B * HK, section)
    if HAS_RIGHT or spans_ptr is not None:
        block = blocks - 1 - block  # under a causal mask, which spans may be, the first keys are seen most
    b = head // HK
    hk = head % HK
    row = block * BLOCK_N
    start_k = 0
    length_k = SK
    start_q = 0
    length_q = S
    if cu_k_ptr is not None:
        row, start_k, length_k, start_q, length_q = find_rows(
            block, cu_k_ptr, cu_q_ptr, count, SK, S, BLOCK_N, SEQUENCES
        )
    shift = length_k - length_q
    last = gl.minimum(row + BLOCK_N, length_k) - 1
    bounds = bounds_of_spans(spans_ptr, b.to(gl.int64), B, SK, row, last)
    start, end, inner_start, inner_end = zones(
        row - shift, last - shift, right, left, bounds, length_q, 0, 1, HAS_RIGHT, HAS_LEFT, BLOCK_M
    )
    group: gl.constexpr = H // HK
    share = gl.cdiv(group, splits)
    skipped = gl.program_id(1) * share
    heads = gl.maximum(gl.minimum(share, group - skipped), 0)
    return (
        b, hk, start_k + row, start_k + length_k, start_q + length_q, shift + start_k - start_q, start_q + start,
        start_q + end, start_q + inner_start, start_q + inner_end, hk * group + skipped, heads,
    )  # fmt: skip


@gluon.jit
def tile_queue(READERS: gl.constexpr):
    """Where one warp tells so many readers which tile a program has next, and the barriers for "full" and "empty"."""
    tiles = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tiles, barriers(2, 1), barriers(2, READERS)


@gluon.jit
def draw_tile(taken_ptr, queue, count):
    """Take the next tile that no program has, and tell the readers; the count-th time."""
    tiles, full, empty = queue
    s = count % 2
    mbarrier.wait(empty.index(s), count // 2 & 1 ^ 1)
    tile = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
    tiles.index(s).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    mbarrier.arrive(full.index(s), count=1)
    return tile


@gluon.jit
def read_tile(queue, count):
    """What ``draw_tile`` told, for the same ``count``."""
    tiles, full, empty = queue
    s = count % 2
    mbarrier.wait(full.index(s), count // 2 & 1)
    tile = gl.sum(tiles.index(s).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    mbarrier.arrive(empty.index(s), count=1)
    return tile


@gluon.jit
def bounds(rows, behind, ahead, spans, length, HAS_BEHIND: gl.constexpr, HAS_AHEAD: gl.constexpr):
    """From where to where each of ``rows`` sees, out of ``length``, as ``zones`` has it of a block of them."""
    starts = gl.zeros_like(rows)
    ends = starts + length
    if HAS_AHEAD:
        ends = gl.minimum(ends, rows + ahead + 1)
    if HAS_BEHIND:
        starts = rows - behind
    if spans is not None:
        starts = gl.maximum(starts, spans[0])
        ends = gl.minimum(ends, spans[1])
    return starts, ends


@gluon.jit
def hide(x, first, limits, STARTS: gl.constexpr = True, ENDS: gl.constexpr = True, hidden=0.0):
    """``x`` [rows, columns] of columns from ``first`` on, but ``hidden`` where those are out of the bounds of a row, or
    out of one of the two.

    The bounds are moved by what differs between threads. The columns that are left are numbers that the compiler knows:
    it need not keep one in a register for each element that a thread has.
    """
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    first += cols & QUAD
    cols &= ~QUAD
    starts, ends = limits
    if STARTS:
        x = gl.where(cols >= starts - first, x, hidden)
    if ENDS:
        x = gl.where(cols < ends - first, x, hidden)
    return x
