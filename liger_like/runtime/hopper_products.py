"""Load operands and multiply them, for kernels on Hopper whose programs loop over tiles of [128, 256].

One warp loads by TMA, 64 of depth at a time, into a ring of STAGES buffers. Two warp groups multiply 64 rows each. A
buffer is empty once both have read it.

The right operand of a step has two halves of 128 columns, which need not be neighbours: of gate and of up.
"""

from typing import NamedTuple

from torch import Tensor

from liger_like.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warpgroup_mma,
)
from liger_like.runtime.hopper import (
    ROWS,
    Descriptor,
    barriers,
    block,
    buffers,
    buffers_in,
    sum_layout,
    wait_for,
    zero_sum,
)

STEP = gl.constexpr(64)  # depth
HALF = gl.constexpr(128)  # columns of half a tile, and rows of a tile
LOADED = gl.constexpr(3 * 128 * 64 * 2)  # bytes of a step


class Operands(NamedTuple):
    """The ring of a kernel: left operands, right operands, and the barriers for "full" and "empty".

    ``halves`` and ``b`` are the same memory: TMA loads half a right operand, a product reads it whole.
    """

    a: gl.tensor
    halves: gl.tensor
    b: gl.tensor
    full: gl.tensor
    empty: gl.tensor


def matrices(w: Tensor, rows: int, cols: int) -> Descriptor:
    """Return a descriptor of ``w`` [E, M, N] in blocks of one expert; TMA fills up with zeros past its end."""
    return Descriptor(w, list(w.shape), list(w.stride()), *block(rows, cols, w.element_size(), 3))


def weights_of(w: Tensor, transposed: bool) -> Descriptor:
    """Return the descriptor of ``w`` [E, N, K], or [E, K, N] if ``transposed``, in blocks of half a step's columns."""
    return matrices(w, STEP.value, HALF.value) if transposed else matrices(w, HALF.value, STEP.value)


def rows_of_all(a: Tensor) -> Descriptor:
    """Return a descriptor of ``a`` [S, K] in blocks of a step's depth: rows past an expert's end are others'."""
    return Descriptor(a, list(a.shape), list(a.stride()), *block(128, 64, a.element_size(), 2))


@gluon.jit
def operands(a_desc, b_desc, STAGES: gl.constexpr):
    """Allocate the ring for blocks of two descriptors: one block on the left, two on the right."""
    NK: gl.constexpr = b_desc.block_type.shape[-1] == STEP
    b = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, 2 * HALF, STEP] if NK else [STAGES, STEP, 2 * HALF], gl.NVMMASharedLayout(128, 16, 2)
    )
    return Operands(buffers(a_desc, STAGES), buffers_in(b_desc, b), b, barriers(STAGES, 1), barriers(STAGES, 2))


@gluon.jit
def load_step(a_desc, a_place, b_desc, left_place, right_place, ring, use, STAGES: gl.constexpr):
    """Load the operands of the use-th step, once its buffer is empty."""
    s = use % STAGES
    full = ring.full.index(s)
    mbarrier.wait(ring.empty.index(s), use // STAGES & 1 ^ 1)
    mbarrier.expect(full, LOADED)
    tma_load(a_desc, a_place, full, ring.a.index(s))
    tma_load(b_desc, left_place, full, ring.halves.index(2 * s))
    tma_load(b_desc, right_place, full, ring.halves.index(2 * s + 1))


@gluon.jit
def multiply_steps(half: gl.constexpr, ring, use, steps, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Return the sum of the products of some steps for the rows of a warp group, and the next use.

    The sum [ROWS, 256] has PARTS of equally many columns. A kernel with three warp groups needs two, since the compiler
    then has no registers for the result of a product as wide as that.
    """
    KM: gl.constexpr = ring.a.shape[-1] == HALF  # the left operand has its depth in rows
    NK: gl.constexpr = ring.b.shape[-1] == STEP
    WIDTH: gl.constexpr = 2 * HALF // PARTS
    acc = ()
    for _ in gl.static_range(PARTS):
        acc += (zero_sum(WIDTH),)
    for step in range(steps):
        s = use % STAGES
        mbarrier.wait(ring.full.index(s), use // STAGES & 1)
        if KM:
            a = ring.a.index(s).reshape([STEP, HALF]).slice(half * ROWS, ROWS, dim=1).permute((1, 0))
        else:
            a = ring.a.index(s).slice(half * ROWS, ROWS)
        sums = ()
        for i in gl.static_range(PARTS):
            if NK:
                b = ring.b.index(s).slice(i * WIDTH, WIDTH).permute((1, 0))
            else:
                b = ring.b.index(s).slice(i * WIDTH, WIDTH, dim=1)
            sums += (warpgroup_mma(a, b, acc[i], is_async=True),)
        acc = wait_for(sums, PARTS)  # the products before these are done
        mbarrier.arrive(ring.empty.index((use + STAGES - 1) % STAGES), count=1, pred=step > 0)
        use += 1
    acc = wait_for(acc, 0)
    mbarrier.arrive(ring.empty.index((use + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, use


@gluon.jit
def halves_of(sums):
    """Return the left and the right half of the columns of a sum in parts; each thread has both."""
    if len(sums) == 2:
        return sums
    else:
        N: gl.constexpr = sums[0].shape[1] // 2
        layout: gl.constexpr = sum_layout(N)
        left, right = gl.split(gl.permute(gl.reshape(sums[0], [ROWS, 2, N]), (0, 2, 1)))
        left = gl.convert_layout(left, layout, assert_trivial=True)
        return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def start_store(desc, place, buffer, x):
    """Start to store ``x`` [ROWS, N] by way of a buffer that is free."""
    buffer.reshape([ROWS, x.shape[1]]).store(x.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, place, buffer)
