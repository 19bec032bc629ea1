"""What the attention kernels for Hopper share: tensors as TMA moves them, rings of buffers that
it fills, and which rows a program has and sees.

Sizes of a buffer are powers of 2: 192 features are held as three parts of 64, in the forward 96 as three of 32, and a
product over features is the sum of those over the parts. A tensor in parts is a tuple.

In a ring of STAGES buffers each has a barrier for "full" and one for "empty"; the use-th filling goes into buffer
use % STAGES, and the parity of use // STAGES is the barriers' phase.

What TMA loads from behind the rows of a batch is zero, and it stores nothing there. So it is behind each of packed
sequences, whatever the next one holds, by an idea of Triton's tools/ragged_tma.py: addresses wrap around at 2^64 bytes,
so that a descriptor of FAR rows can have its end wherever two more coordinates say.
"""

import functools
import math

import triton
from torch import Tensor

from liger_like.ops._gluon import (
    TensorDescriptor,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.ops.attention._blocks import bounds_of_spans, schedule, start_of, zones
from liger_like.ops.attention._setup import Masking

ROWS = gl.constexpr(64)  # of a warp group
QUAD = gl.constexpr(6)  # the bits of a column by which the threads that share a row differ
FAR = gl.constexpr(1 << 30)  # more rows than there are; FAR times the stride 2^34 is 0 modulo 2^64


class _Descriptor(TensorDescriptor):
    """A descriptor without checks, which take longer than all else and which ``hopper_kernels`` has made."""

    def __post_init__(self) -> None: ...


def descriptor(x: Tensor, rows: int, width: int, masking: Masking) -> TensorDescriptor:
    """``x`` [B, S, H, D] for TMA, which moves rows of ``width`` features, or a part of those, to or from ``at``."""
    (B, S, H, D), (stride_b, stride_s, stride_h, _) = x.shape, x.stride()
    shape, strides = [B, H, S, D], [stride_b, stride_h, stride_s, 1]
    if masking.cu_seqlens_q is not None:
        far = FAR.value
        shape, strides = [far + 1, far + 1, H, far, D], [2**34 - stride_s, stride_s, *strides[1:]]
    part = width & -width
    block = [1] * (len(shape) - 2) + [rows, part]
    return _Descriptor(x, shape, strides, block, _layout(part, x.element_size(), len(shape)))


@functools.cache
def _layout(width: int, itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, width * itemsize), element_bitwidth=8 * itemsize, rank=rank)


@gluon.jit
def at(desc, rows, h, row, col):
    """The coordinates of a row and a column of a head; ``rows`` are the batch and what is behind the last of them."""
    b, end = rows
    if len(desc.block_type.shape) == 5:
        return FAR, end, h, FAR - end + row, col
    else:
        return b, h, row, col


@triton.constexpr_function
def _several(count, shape):
    return [count, *shape]


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Shared memory for so many times what TMA moves."""
    return gl.allocate_shared_memory(desc.dtype, _several(COUNT, desc.block_type.shape), desc.layout)


@triton.constexpr_function
def _as_many(shape, other):
    return [math.prod(other) // math.prod(shape), *shape]


@gluon.jit
def buffers_in(desc, bufs):
    """The memory of ``bufs``, of the same dtype, for as many times what TMA moves as fit."""
    return reinterpret(bufs, desc.dtype, _as_many(desc.block_type.shape, bufs.shape), desc.layout)


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
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers whose phases take so many arrivals; a fence follows before others use them."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


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
def load_rows(desc, rows, h, row, bufs, s, full, COUNT: gl.constexpr):
    """TMA loads rows into the s-th of so many buffers, which may be in parts; they are one arrival at ``full``."""
    PARTS: gl.constexpr = bufs.shape[0] // COUNT
    mbarrier.expect(full, PARTS * desc.block_type.nbytes)
    for i in gl.static_range(PARTS):
        place = at(desc, rows, h, row, i * bufs.shape[-1])
        tma_load(desc, place, full, bufs.index(s * PARTS + i))


@gluon.jit
def fill(desc, rows, h, row, bufs, full, empty, use, STAGES: gl.constexpr):
    """Load rows into the buffer that the use-th filling of a ring goes to, once it is empty."""
    s = use % STAGES
    mbarrier.wait(empty.index(s), use // STAGES & 1 ^ 1)
    load_rows(desc, rows, h, row, bufs, s, full.index(s), STAGES)


@gluon.jit
def parts_of(bufs, s, COUNT: gl.constexpr):
    """The s-th of so many buffers [rows, D], in parts."""
    PARTS: gl.constexpr = bufs.shape[0] // COUNT
    LENGTH: gl.constexpr = bufs.shape[-2]
    BLOCK_D: gl.constexpr = bufs.shape[-1]
    parts = ()
    for i in gl.static_range(PARTS):
        parts += (bufs.index(s * PARTS + i).reshape([LENGTH, BLOCK_D]),)
    return parts


@gluon.jit
def rows_of(parts, first: gl.constexpr):
    """Of a buffer in parts, the rows of a warp group."""
    some = ()
    for i in gl.static_range(len(parts)):
        some += (parts[i].slice(first, ROWS),)
    return some


@gluon.jit
def contract(a, b, none):
    """a b^T of buffers in parts, once it is waited for; ``none`` are zeros."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), none, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def zero_parts(bufs, COUNT: gl.constexpr, layout: gl.constexpr):
    """Sums for ``add_product`` of one out of so many buffers."""
    BLOCK_D: gl.constexpr = bufs.shape[-1]
    parts = ()
    for _ in gl.static_range(bufs.shape[0] // COUNT):
        parts += (gl.zeros([ROWS, BLOCK_D], gl.float32, layout),)
    return parts


@gluon.jit
def add_product(acc, a, b):
    """``acc`` + ``a`` ``b``, in parts but for ``a``, once it is waited for."""
    parts = ()
    for i in gl.static_range(len(acc)):
        parts += (warpgroup_mma(a, b[i], acc[i], is_async=True),)
    return parts


@gluon.jit
def wait_for(acc, later: gl.constexpr):
    """A sum in parts, when no more than ``later`` products are on their way; those of parts count each."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(later, deps=acc),)
    else:
        return warpgroup_mma_wait(later, deps=acc)


@gluon.jit
def store_rows(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, START: gl.constexpr = 0):
    """Store the first ``length`` rows of ``x``, columns of a head out of so many from START on, as far as D."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    cols = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + rows * (HEADS * D) + cols, x.to(ptr.dtype.element_ty), mask=(rows < length) & (cols < D))


@gluon.jit
def store_parts(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, scale=1.0):
    """``store_rows`` of ``x`` in parts, times a number."""
    for i in gl.static_range(len(x)):
        store_rows(ptr, x[i] * scale, length, HEADS, D, i * x[0].shape[1])


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
