"""Shared memory of the attention kernels for Hopper: tensors as TMA moves them, and rings of buffers that TMA fills.

Sizes of a buffer are powers of 2. 192 features are held as three parts of 64. Up to 96 features in a buffer of 128 are
multiplied as slices of 64 columns and, for the others, 16 or 32. A product over features is the sum of the products
over the parts. A tensor in parts is a tuple.

TMA loads zeros past the rows of a batch, and stores nothing there. The same holds past each packed sequence, whatever
the next one holds: descriptors of packed tensors have FAR rows, see ``runtime.hopper``.
"""

from typing import NamedTuple

import triton
from torch import Tensor

from liger_like.ops.attention.masking import Masking
from liger_like.runtime.gluon import TensorDescriptor, gl, gluon, mbarrier, tma_load
from liger_like.runtime.hopper import FAR, ROWS, Descriptor, block


def descriptor(x: Tensor, rows: int, width: int, masking: Masking) -> TensorDescriptor:
    """Return a descriptor of ``x`` [B, S, H, D] for TMA, which moves ``rows`` rows of ``width`` features at a time.

    A ``width`` that is no power of 2 is moved in parts. ``at`` gives the coordinates.
    """
    (B, S, H, D), (stride_b, stride_s, stride_h, _) = x.shape, x.stride()
    shape, strides = [B, H, S, D], [stride_b, stride_h, stride_s, 1]
    if masking.cu_seqlens_q is not None:
        far = FAR.value
        shape, strides = [far + 1, far + 1, H, far, D], [2**34 - stride_s, stride_s, *strides[1:]]
    return Descriptor(x, shape, strides, *block(rows, width & -width, x.element_size(), len(shape)))


class Sequence(NamedTuple):
    """The batch of a sequence and the row after its last one."""

    batch: gl.tensor
    end: gl.tensor


@gluon.jit
def at(desc, sequence, h, row, col):
    """Return the coordinates of a row and a column of head ``h`` of a Sequence."""
    if len(desc.block_type.shape) == 5:
        return FAR, sequence.end, h, FAR - sequence.end + row, col
    else:
        return sequence.batch, h, row, col


@gluon.jit
def load_rows(desc, sequence, h, row, bufs, s, full, COUNT: gl.constexpr):
    """Load rows by TMA into the s-th of COUNT buffers, which may be in parts; the load is one arrival at ``full``.

    A pair of buffers holds two parts that are multiplied as one, then one more.
    """
    APART: gl.constexpr = isinstance(bufs, gl.tuple)
    first = bufs[0] if APART else bufs
    PARTS: gl.constexpr = first.shape[0] // COUNT
    COLS: gl.constexpr = first.shape[-1]
    mbarrier.expect(full, (PARTS + APART) * desc.block_type.nbytes)
    for i in gl.static_range(PARTS):
        tma_load(desc, at(desc, sequence, h, row, i * COLS), full, first.index(s * PARTS + i))
    if APART:
        tma_load(desc, at(desc, sequence, h, row, PARTS * COLS), full, bufs[1].index(s))


@gluon.jit
def fill(desc, sequence, h, row, ring, use, STAGES: gl.constexpr):
    """Load rows into the buffer of the use-th filling of a ring, once the buffer is empty."""
    s = use % STAGES
    mbarrier.wait(ring.empty.index(s), use // STAGES & 1 ^ 1)
    load_rows(desc, sequence, h, row, ring.buffers, s, ring.full.index(s), STAGES)


@gluon.jit
def parts_of(bufs, s, COUNT: gl.constexpr):
    """Return the s-th of COUNT buffers [rows, D], in parts."""
    PARTS: gl.constexpr = bufs.shape[0] // COUNT
    LENGTH: gl.constexpr = bufs.shape[-2]
    BLOCK_D: gl.constexpr = bufs.shape[-1]
    parts = ()
    for i in gl.static_range(PARTS):
        parts += (bufs.index(s * PARTS + i).reshape([LENGTH, BLOCK_D]),)
    return parts


@triton.constexpr_function
def product_widths(D, WIDTH, MOST=256):
    """Return the widths, at most MOST, of the slices in which products take D features that buffers hold in WIDTH
    columns each.
    """
    slices = (widths for widths in ((64,), (64, 16), (64, 32)) if D <= sum(widths) <= WIDTH)
    return next(slices, (min(WIDTH, MOST),) * max(1, WIDTH // MOST))


@triton.constexpr_function
def sum_of(widths, count=None):
    """Return the sum of the first ``count`` widths, or of all."""
    return sum(widths[:count])


@gluon.jit
def columns_of(parts, WIDTHS: gl.constexpr):
    """Return slices of WIDTHS columns, one after another, of each buffer of a tensor in parts."""
    slices = ()
    for i in gl.static_range(len(parts)):
        for j in gl.static_range(len(WIDTHS)):
            slices += (parts[i].slice(sum_of(WIDTHS, j), WIDTHS[j], dim=1),)
    return slices


@gluon.jit
def rows_of(parts, first: gl.constexpr):
    """Return the ROWS rows from ``first`` on, those of a warp group, of a buffer in parts."""
    some = ()
    for i in gl.static_range(len(parts)):
        some += (parts[i].slice(first, ROWS),)
    return some
