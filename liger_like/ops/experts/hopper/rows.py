"""Rows times the matrix of their expert, for Hopper: z and h, y = h W2 + b2, and dx = dz W1^T.

The rows of x are sorted before, by one copy: TMA gathers none, and a product with gathered rows takes longer than both.
A tile's results leave by TMA during the next tile's products. The product of z and h gains by a fourth stage of the
ring, the others do not.
"""

from torch import Tensor

from liger_like.ops.experts.blocks import gated
from liger_like.ops.experts.checks import Gate
from liger_like.ops.experts.forward import gate_arguments
from liger_like.ops.experts.hopper.products import factors_of, load_tiles, rows_of_one, steps_of, within
from liger_like.ops.experts.tiles import GROUP
from liger_like.runtime.blocks import grouped
from liger_like.runtime.gluon import fence_async_shared, gl, gluon, tma_store, tma_store_wait
from liger_like.runtime.hopper import ROWS, buffers, sum_layout
from liger_like.runtime.hopper_products import HALF, halves_of, multiply_steps, operands, start_store
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed
from liger_like.runtime.support import programs

STAGES, GLU_STAGES, PARTS = 3, 4, gl.constexpr(1)


@gluon.jit
def _bias(ptr, first, end, layout: gl.constexpr):
    """Return HALF columns of a bias from ``first`` on, zeros from ``end`` on."""
    cols = first + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    return gl.load(ptr + cols, mask=cols < end, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _multiply(
    half: gl.constexpr, z_desc, h_desc, offsets_ptr, tiles_ptr, bias_ptr, E, N, steps, limit, alpha, ring, out_s,
    ACT: gl.constexpr, LIMITED: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    KEEP_Z: gl.constexpr = z_desc is not None
    GLU: gl.constexpr = h_desc is not None
    SPLIT: gl.constexpr = GLU and not INTERLEAVED
    layout: gl.constexpr = sum_layout(HALF)
    tiles_n = gl.cdiv(N, HALF if GLU else 2 * HALF)
    tiles_m = gl.load(offsets_ptr + E + 1)
    COUNT: gl.constexpr = out_s.shape[0] // 2
    left_s = out_s.index(COUNT * half)
    right_s = out_s.index(COUNT * half + COUNT - 1)
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert = gl.load(tiles_ptr + 2 * m)
        row = gl.load(tiles_ptr + 2 * m + 1) + half * ROWS
        end = gl.load(offsets_ptr + expert + 1)
        acc, use = multiply_steps(half, ring, use, steps, PARTS, STAGES)
        left, right = halves_of(acc)
        first = n * HALF if SPLIT else n * 2 * HALF
        second = N + first if SPLIT else HALF + first
        if bias_ptr is not None:
            width = 2 * N if GLU else N
            ptr = bias_ptr + expert.to(gl.int64) * width
            left += _bias(ptr, first, width, layout)
            right += _bias(ptr, second, width, layout)
        tma_store_wait(0)  # the results of the tile before have left
        if KEEP_Z:
            start_store(z_desc, within(end, 0, row, first), left_s, left)
            tma_store_wait(COUNT - 1)  # a single buffer is free again
            start_store(z_desc, within(end, 1 if SPLIT else 0, row, first if SPLIT else second), right_s, right)
        if GLU:
            if KEEP_Z:
                tma_store_wait(0)  # z has left its buffer
            if SPLIT:
                start_store(h_desc, within(end, 0, row, first), left_s, gated(left, right, limit, alpha, ACT, LIMITED))
            else:
                h_s = left_s.reshape([ROWS, HALF])
                for i in gl.static_range(2):
                    gate, up = gl.split(gl.reshape((left, right)[i], [ROWS, HALF // 2, 2]))
                    h = gated(gate, up, limit, alpha, ACT, LIMITED)
                    h_s.slice(i * HALF // 2, HALF // 2, dim=1).store(h.to(h_desc.dtype))
                fence_async_shared()
                tma_store(h_desc, within(end, 0, row, n * HALF), left_s)
    tma_store_wait(0)


@gluon.jit
def _experts_rows_hopper_kernel(
    a_desc, w_desc, u_desc, v_desc, z_desc, h_desc, offsets_ptr, tiles_ptr, bias_ptr, E, N, K, R, limit, alpha,
    ACT: gl.constexpr, LIMITED: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store a w + u v + bias in z and the gated unit in h, those of them that are given.

    N: the columns of w, or of gate if h is given.
    """
    ring = operands(a_desc, w_desc, STAGES)
    steps = steps_of(K, R)
    # a ring of four stages leaves room for one buffer of a warp group
    out_s = buffers(z_desc, 4) if h_desc is None else buffers(h_desc, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, z_desc, h_desc, offsets_ptr, tiles_ptr, bias_ptr, E, N, steps, limit, alpha, ring, out_s,
                         ACT, LIMITED, INTERLEAVED, GROUP, STAGES)),
            (_multiply, (1, z_desc, h_desc, offsets_ptr, tiles_ptr, bias_ptr, E, N, steps, limit, alpha, ring, out_s,
                         ACT, LIMITED, INTERLEAVED, GROUP, STAGES)),
            (load_tiles, (a_desc, w_desc, u_desc, v_desc, offsets_ptr, tiles_ptr, E, N, K, R, ring, h_desc is not None,
                          INTERLEAVED, GROUP, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def gate_up(
    x: Tensor, w: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, offsets: Tensor, tiles: Tensor,
    gate: Gate, z: Tensor | None, h: Tensor,
) -> None:  # fmt: skip
    """Fill ``h`` and, unless it is None, ``z`` of ``moe_gate_up``, for sorted rows ``x`` [S, H]."""
    I = h.shape[1]
    floats, constants = gate_arguments(gate)
    descriptors, R = factors_of(x, w, gate.transposed, u, v)
    z_desc = None if z is None else rows_of_one(z, HALF.value, 1 if gate.interleaved else 2)
    launch(
        _experts_rows_hopper_kernel,
        programs(x.device, len(tiles) * -(-I // HALF.value)),
        (offsets, tiles, packed(bias)),
        (len(w), I, x.shape[1], R),
        floats,
        (*descriptors, z_desc, rows_of_one(h, HALF.value)),
        GROUP=GROUP,
        STAGES=GLU_STAGES,
        **constants,
        num_warps=4,
    )


def rows_times(
    a: Tensor, w: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, offsets: Tensor, tiles: Tensor,
    transposed: bool, out: Tensor,
) -> None:  # fmt: skip
    """Fill ``out`` of ``moe_rows_times``."""
    N = out.shape[1]
    descriptors, R = factors_of(a, w, transposed, u, v)
    launch(
        _experts_rows_hopper_kernel,
        programs(a.device, len(tiles) * -(-N // (2 * HALF.value))),
        (offsets, tiles, packed(bias)),
        (len(w), N, a.shape[1], R),
        (0.0, 0.0),
        (*descriptors, rows_of_one(out, HALF.value), None),
        ACT="silu",
        LIMITED=False,
        INTERLEAVED=False,
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=4,
    )
