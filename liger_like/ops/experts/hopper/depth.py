"""a^T b over the rows of each expert, for Hopper: the gradients of the weights.

TMA loads zeros past the end of an expert's rows, so no row needs a mask. An expert without rows gets zeros.
"""

from torch import Tensor

from liger_like.ops.experts.hopper.products import rows_of_one, within
from liger_like.ops.experts.tiles import GROUP
from liger_like.runtime.blocks import grouped
from liger_like.runtime.gluon import fence_async_shared, gl, gluon, tma_store_wait
from liger_like.runtime.hopper import ROWS, buffers
from liger_like.runtime.hopper_products import (
    HALF,
    STEP,
    halves_of,
    load_step,
    matrices,
    multiply_steps,
    operands,
    start_store,
)
from liger_like.runtime.launcher import launch
from liger_like.runtime.support import programs

STAGES, PARTS = 3, gl.constexpr(1)


@gluon.jit
def _tile_of(tile, offsets_ptr, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Return the expert of a tile, its first row and its end, and the row and column of tiles."""
    expert = tile // (tiles_m * tiles_n)
    m, n = grouped(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    return expert, gl.load(offsets_ptr + expert), gl.load(offsets_ptr + expert + 1), m, n


@gluon.jit
def _load(a_desc, b_desc, offsets_ptr, E, M, N, ring, GROUP: gl.constexpr, STAGES: gl.constexpr):
    tiles_m = gl.cdiv(M, HALF)
    tiles_n = gl.cdiv(N, 2 * HALF)
    use = 0
    for tile in range(gl.program_id(0), E * tiles_m * tiles_n, gl.num_programs(0)):
        _, start, end, m, n = _tile_of(tile, offsets_ptr, tiles_m, tiles_n, GROUP)
        for k in range(start, end, STEP):
            left = within(end, 0, k, n * 2 * HALF)
            right = within(end, 0, k, n * 2 * HALF + HALF)
            load_step(a_desc, within(end, 0, k, m * HALF), b_desc, left, right, ring, use, STAGES)
            use += 1


@gluon.jit
def _multiply(
    half: gl.constexpr, out_desc, offsets_ptr, E, M, N, ring, out_s, GROUP: gl.constexpr, STAGES: gl.constexpr
):
    tiles_m = gl.cdiv(M, HALF)
    tiles_n = gl.cdiv(N, 2 * HALF)
    use = 0
    for tile in range(gl.program_id(0), E * tiles_m * tiles_n, gl.num_programs(0)):
        expert, start, end, m, n = _tile_of(tile, offsets_ptr, tiles_m, tiles_n, GROUP)
        acc, use = multiply_steps(half, ring, use, gl.cdiv(end - start, STEP), PARTS, STAGES)
        left, right = halves_of(acc)
        row = m * HALF + half * ROWS
        tma_store_wait(0)  # the sums of the tile before have left
        start_store(out_desc, [expert, row, n * 2 * HALF], out_s.index(2 * half), left)
        start_store(out_desc, [expert, row, n * 2 * HALF + HALF], out_s.index(2 * half + 1), right)
    tma_store_wait(0)


@gluon.jit
def _experts_depth_hopper_kernel(
    a_desc, b_desc, out_desc, offsets_ptr, E, M, N, GROUP: gl.constexpr, STAGES: gl.constexpr
):
    ring = operands(a_desc, b_desc, STAGES)
    out_s = buffers(out_desc, 4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out_desc, offsets_ptr, E, M, N, ring, out_s, GROUP, STAGES)),
            (_multiply, (1, out_desc, offsets_ptr, E, M, N, ring, out_s, GROUP, STAGES)),
            (_load, (a_desc, b_desc, offsets_ptr, E, M, N, ring, GROUP, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def depth_product(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Fill ``out`` [E, M, N] with a^T b over the rows of each expert, for ``a`` [S, M] and ``b`` [S, N]."""
    E, M, N = out.shape
    launch(
        _experts_depth_hopper_kernel,
        programs(a.device, E * -(-M // HALF.value) * -(-N // (2 * HALF.value))),
        (offsets,),
        (E, M, N),
        (),
        (rows_of_one(a, HALF.value), rows_of_one(b, HALF.value), matrices(out, 64, HALF.value)),
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=4,
    )
