"""Shared memory, TMA and sums of the kernels for Hopper.

In a ring of STAGES buffers each buffer has a barrier for "full" and one for "empty". The use-th filling goes into
buffer use % STAGES, and the parity of use // STAGES is the phase of its barriers.

Rows of a tensor that end where others begin, as packed sequences do, get a descriptor of FAR rows, whose addresses wrap
around at 2^64 bytes: it ends wherever two more coordinates say, by an idea of Triton's tools/ragged_tma.py.
"""

import functools
import math
from typing import NamedTuple

import triton

from liger_like.runtime.gluon import TensorDescriptor, gl, gluon, mbarrier, reinterpret, warpgroup_mma_wait

ROWS = gl.constexpr(64)  # of a warp group
FAR = gl.constexpr(1 << 30)  # more rows than there are; FAR times the stride 2^34 is 0 modulo 2^64


class Descriptor(TensorDescriptor):
    """A descriptor without Triton's checks: the callers make them, and they take most of the host time."""

    def __post_init__(self) -> None: ...


@functools.cache
def block(rows: int, part: int, itemsize: int, rank: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    """Return the shape of a block and its layout in shared memory."""
    layout = gl.NVMMASharedLayout(min(128, part * itemsize), element_bitwidth=8 * itemsize, rank=rank)
    return [1] * (rank - 2) + [rows, part], layout


class Ring(NamedTuple):
    """Buffers, and their barriers for "full" and "empty"."""

    buffers: gl.tensor
    full: gl.tensor
    empty: gl.tensor


@triton.constexpr_function
def _several(count, shape):
    return [count, *shape]


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Allocate COUNT shared-memory buffers of one TMA block each."""
    return gl.allocate_shared_memory(desc.dtype, _several(COUNT, desc.block_type.shape), desc.layout)


@triton.constexpr_function
def _as_many(shape, other):
    return [math.prod(other) // math.prod(shape), *shape]


@gluon.jit
def buffers_in(desc, bufs):
    """View the memory of ``bufs``, of the same dtype, as buffers of one TMA block of ``desc`` each."""
    return reinterpret(bufs, desc.dtype, _as_many(desc.block_type.shape, bufs.shape), desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers whose phases take ARRIVALS; a fence must follow before other warps use them."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@triton.constexpr_function
def sum_layout(width):
    """Return the layout of a sum of products [ROWS, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def zero_sum(WIDTH: gl.constexpr):
    """Return zeros [ROWS, WIDTH]."""
    return gl.zeros([ROWS, WIDTH], gl.float32, sum_layout(WIDTH))


@gluon.jit
def wait_for(acc, later: gl.constexpr):
    """Return a sum in parts once at most ``later`` products are unfinished; the product of each part counts."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(later, deps=acc),)
    else:
        return warpgroup_mma_wait(later, deps=acc)
