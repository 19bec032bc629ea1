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

from liger_like.ops.attention.masking import Masking
from liger_like.runtime.gluon import TensorDescriptor, gl, gluon, mbarrier, reinterpret, tma_load

ROWS = gl.constexpr(64)  # of a warp group
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
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers whose phases take so many arrivals; a fence follows before others use them."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


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
