"""Find the rows and keys of a program for Hopper, hide scores outside a mask, and hand out tiles to programs."""

from typing import NamedTuple

from liger_like.ops.attention.visibility import bounds_of_spans, schedule, start_of, visible_range
from liger_like.runtime.gluon import gl, gluon, mbarrier
from liger_like.runtime.hopper import barriers

FIELDS = gl.constexpr(8)  # of a QueryTile that the warp groups read: those before the start of the sequence of keys
KEY_FIELDS = gl.constexpr(16)  # room for those of a KeyBlock
QUAD = gl.constexpr(6)  # the bits of a column by which the threads that share a row differ


class Problem(NamedTuple):
    """Sizes, masks and schedule of a call, as the kernels get them.

    ``count``: packed sequences. ``blocks``: blocks of rows of a sequence, or of all packed ones. ``heads_together``:
    heads whose blocks run at the same time. ``splits``: programs that share the query heads of a key head. ``left`` and
    ``right``: the window. ``cu_q_ptr``, ``cu_k_ptr``: offsets of packed sequences, or None. ``spans_ptr``: spans, or
    None.
    """

    B: gl.tensor
    S: gl.tensor
    SK: gl.tensor
    count: gl.tensor
    blocks: gl.tensor
    heads_together: gl.tensor
    splits: gl.tensor
    left: gl.tensor
    right: gl.tensor
    cu_q_ptr: gl.tensor | None
    cu_k_ptr: gl.tensor | None
    spans_ptr: gl.tensor | None


class QueryTile(NamedTuple):
    """A tile of queries: first row in its sequence, batch, head, the start and length of the sequence of queries, the
    length of that of keys, the keys from ``start`` to ``end`` that it sees, the start of the sequence of keys, and the
    keys from ``inner_start`` to ``inner_end`` that need no mask.
    """

    row: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    start_q: gl.tensor
    length_q: gl.tensor
    length_k: gl.tensor
    start: gl.tensor
    end: gl.tensor
    start_k: gl.tensor
    inner_start: gl.tensor
    inner_end: gl.tensor


class KeyBlock(NamedTuple):
    """A block of keys: batch, key head, first key, the ends of its sequence of keys and of queries, the position of the
    first query minus that of the first key, the queries from ``start`` to ``end`` that see the keys, of which
    ``inner_start`` to ``inner_end`` need no mask, the first query head and the number of heads. Rows are those of the
    tensors.
    """

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    end_k: gl.tensor
    end_q: gl.tensor
    shift: gl.tensor
    start: gl.tensor
    end: gl.tensor
    inner_start: gl.tensor
    inner_end: gl.tensor
    first_head: gl.tensor
    heads: gl.tensor


class TileQueue(NamedTuple):
    """Shared memory for numbers of the next tiles of a program, and its barriers."""

    tiles: gl.tensor
    full: gl.tensor
    empty: gl.tensor


@gluon.jit
def find_packed_rows(
    block, cu_ptr, cu_other_ptr, count, total, total_other, BLOCK: gl.constexpr, SEQUENCES: gl.constexpr
):
    """Return the first row of a block in its packed sequence, the start and length of the sequence, and the start and
    length of its other side (keys for queries, queries for keys).

    A sequence has a block for each multiple of BLOCK in it, and one more; blocks that it does not need have length 0 on
    the other side. The rows after the last sequence are one more sequence, with length 0 on the other side.
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
def keys_seen(
    problem, batch, row, length_q, length_k, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, COUNT: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the range of keys that COUNT queries from ``row`` on see, and the inner range that needs no mask."""
    shift = length_k - length_q
    last = gl.minimum(row + COUNT, length_q) - 1
    bounds = bounds_of_spans(problem.spans_ptr, batch.to(gl.int64), problem.B, problem.S, row, last)
    return visible_range(
        row + shift, last + shift, problem.left, problem.right, bounds, length_k, 0, 1, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )


@gluon.jit
def tile_of(
    tile, problem, H: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the QueryTile of number ``tile``; its range of keys holds at least one block."""
    B = problem.B
    S = problem.S
    SK = problem.SK
    block, head = schedule(tile, problem.blocks, B * H, problem.heads_together)
    b = head // H
    row = block * BLOCK_M
    start_q = 0
    length_q = S
    start_k = 0
    length_k = SK
    if problem.cu_q_ptr is not None:
        row, start_q, length_q, start_k, length_k = find_packed_rows(
            block, problem.cu_q_ptr, problem.cu_k_ptr, problem.count, S, SK, BLOCK_M, SEQUENCES
        )
    start, end, inner_start, inner_end = keys_seen(
        problem, b, row, length_q, length_k, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
    )
    end = start + gl.maximum(gl.cdiv(end - start, BLOCK_N), 1) * BLOCK_N
    return QueryTile(row, b, head % H, start_q, length_q, length_k, start, end, start_k, inner_start, inner_end)


@gluon.jit
def keys_of(
    tile, problem, H: gl.constexpr, HK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SEQUENCES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the KeyBlock of number ``tile``, whose dk and dv are sums over the queries that see it."""
    B = problem.B
    S = problem.S
    SK = problem.SK
    block, head = schedule(tile, problem.blocks, B * HK, problem.heads_together)
    if HAS_RIGHT or problem.spans_ptr is not None:
        block = problem.blocks - 1 - block  # under a causal mask, which spans may be, the first keys are seen most
    b = head // HK
    hk = head % HK
    row = block * BLOCK_N
    start_k = 0
    length_k = SK
    start_q = 0
    length_q = S
    if problem.cu_k_ptr is not None:
        row, start_k, length_k, start_q, length_q = find_packed_rows(
            block, problem.cu_k_ptr, problem.cu_q_ptr, problem.count, SK, S, BLOCK_N, SEQUENCES
        )
    shift = length_k - length_q
    last = gl.minimum(row + BLOCK_N, length_k) - 1
    bounds = bounds_of_spans(problem.spans_ptr, b.to(gl.int64), B, SK, row, last)
    start, end, inner_start, inner_end = visible_range(
        row - shift, last - shift, problem.right, problem.left, bounds, length_q, 0, 1, HAS_RIGHT, HAS_LEFT, BLOCK_M
    )
    group: gl.constexpr = H // HK
    share = gl.cdiv(group, problem.splits)
    skipped = gl.program_id(1) * share
    heads = gl.maximum(gl.minimum(share, group - skipped), 0)
    return KeyBlock(
        b, hk, start_k + row, start_k + length_k, start_q + length_q, shift + start_k - start_q, start_q + start,
        start_q + end, start_q + inner_start, start_q + inner_end, hk * group + skipped, heads,
    )  # fmt: skip


@gluon.jit
def next_tile(taken_ptr, count):
    """Return the number of the next tile of a program, after its first one and ``count`` others.

    A counter gives the next tile that no program has. Without one, rounds in which each program has a tile turn back:
    of two rounds under a causal mask, a program has a longer and a shorter tile.
    """
    programs = gl.num_programs(0)
    if taken_ptr is not None:
        return programs + gl.atomic_add(taken_ptr, 1, sem="relaxed")
    else:
        place = gl.where(count % 2 == 0, programs - 1 - gl.program_id(0), gl.program_id(0))
        return (count + 1) * programs + place


@gluon.jit
def tile_queue(READERS: gl.constexpr, COUNT: gl.constexpr = FIELDS):
    """Return a queue in which one warp tells READERS warp groups COUNT numbers of the next tile of the program."""
    tiles = gl.allocate_shared_memory(gl.int32, [2, COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return TileQueue(tiles, barriers(2, 1), barriers(2, READERS))


@gluon.jit
def put_tile(queue, count, fields):
    """Put the first fields of a QueryTile or KeyBlock into the queue, for the count-th time."""
    index = gl.arange(0, queue.tiles.shape[-1], gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    tile = index
    for i in gl.static_range(len(fields)):
        tile = gl.where(index == i, fields[i], tile)
    s = count % 2
    mbarrier.wait(queue.empty.index(s), count // 2 & 1 ^ 1)
    queue.tiles.index(s).store(tile)
    mbarrier.arrive(queue.full.index(s), count=1)


@gluon.jit
def take_tile(queue, count):
    """Return what ``put_tile`` put for the same ``count``."""
    COUNT: gl.constexpr = queue.tiles.shape[-1]
    layout: gl.constexpr = gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0])  # each thread has all
    s = count % 2
    mbarrier.wait(queue.full.index(s), count // 2 & 1)
    tile = queue.tiles.index(s).load(layout)
    mbarrier.arrive(queue.empty.index(s), count=1)
    fields = ()
    for i in gl.static_range(COUNT):
        fields += (gl.sum(gl.where(gl.arange(0, COUNT, layout) == i, tile, 0), 0),)
    return fields


@gluon.jit
def bounds(rows, before, after, spans, length, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr):
    """Return the start and end of the range that each of ``rows`` sees, out of ``length``, as ``visible_range``."""
    starts = gl.zeros_like(rows)
    ends = starts + length
    if HAS_AFTER:
        ends = gl.minimum(ends, rows + after + 1)
    if HAS_BEFORE:
        starts = rows - before
    if spans is not None:
        starts = gl.maximum(starts, spans[0])
        ends = gl.minimum(ends, spans[1])
    return starts, ends


@gluon.jit
def hide(x, first, limits, STARTS: gl.constexpr = True, ENDS: gl.constexpr = True, hidden=0.0):
    """Return ``x`` [rows, columns] with ``hidden`` where a column is out of the bounds of its row.

    ``x`` has the columns from ``first`` on. ``limits``: starts and ends of rows; STARTS and ENDS say which of them
    hold. The part of a column that differs between threads is subtracted from the bounds. The rest of each column is
    then a constant, which needs no register.
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
