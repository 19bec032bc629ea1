"""dz, w h and the parts of dw out of dh = dout W2^T and z, for Hopper.

Two warp groups multiply. They round a tile of dh, leave it in shared memory, and go on with the next tile. A third one
then reads z and stores what it makes of both: it takes as long as a product, which would otherwise wait for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.experts.blocks import gated_and_grads
from liger_like.ops.experts.checks import Gate
from liger_like.ops.experts.forward import gate_arguments
from liger_like.ops.experts.hopper.products import factors_of, load_tiles, steps_of
from liger_like.ops.experts.tiles import GROUP
from liger_like.runtime.blocks import grouped
from liger_like.runtime.gluon import fence_async_shared, gl, gluon, mbarrier
from liger_like.runtime.hopper import ROWS, barriers
from liger_like.runtime.hopper_products import HALF, multiply_steps, operands
from liger_like.runtime.launcher import launch
from liger_like.runtime.support import programs

COLUMNS = 2 * HALF.value  # of a tile: dw has a part for each
STAGES = 3
CHUNK = gl.constexpr(8)  # rows that are loaded at a time
STRIP = gl.constexpr(8)  # neighbours in a row that a thread has


@gluon.jit
def _multiply(half: gl.constexpr, offsets_ptr, E, I, steps, ring, dh_s, dh_full, dh_empty, STAGES: gl.constexpr):
    tiles = gl.load(offsets_ptr + E + 1) * gl.cdiv(I, 2 * HALF)
    use = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc, use = multiply_steps(half, ring, use, steps, 2, STAGES)
        mbarrier.wait(dh_empty.index(half), tile // gl.num_programs(0) & 1 ^ 1)
        for i in gl.static_range(2):
            dh_s.index(half).slice(i * HALF, HALF, dim=1).store(acc[i].to(dh_s.dtype))
        mbarrier.arrive(dh_full.index(half), count=1)


@triton.constexpr_function
def _layout(each):
    """Return a layout of rows in which a thread has ``each`` neighbours, and a warp a row of a tile."""
    return gl.BlockedLayout([1, each], [1, 32], [4, 1], [1, 0])


@gluon.jit
def _read(z_ptr, weights_ptr, rows, end, first, I, INTERLEAVED: gl.constexpr):
    """Return gate, up and weight of CHUNK rows of a tile whose columns start at ``first``."""
    layout: gl.constexpr = _layout(STRIP)
    weight = gl.load(weights_ptr + rows, mask=rows < end, other=0.0)
    if INTERLEAVED:
        layout_z: gl.constexpr = _layout(2 * STRIP)
        rows = gl.convert_layout(rows, gl.SliceLayout(1, layout_z))
        cols = 2 * first + gl.arange(0, 4 * HALF, gl.SliceLayout(0, layout_z))
        mask = (rows < end)[:, None] & (cols < 2 * I)[None, :]
        z = gl.load(z_ptr + (rows.to(gl.int64) * 2 * I)[:, None] + cols[None, :], mask=mask, other=0.0)
        g, u = gl.split(gl.reshape(z, [CHUNK, 2 * HALF, 2]))
        g = gl.convert_layout(g, layout, assert_trivial=True)
        return g, gl.convert_layout(u, layout, assert_trivial=True), weight
    else:
        cols = first + gl.arange(0, 2 * HALF, gl.SliceLayout(0, layout))
        mask = (rows < end)[:, None] & (cols < I)[None, :]
        ptrs = z_ptr + (rows.to(gl.int64) * 2 * I)[:, None] + cols[None, :]
        return gl.load(ptrs, mask=mask, other=0.0), gl.load(ptrs + I, mask=mask, other=0.0), weight


@gluon.jit
def _store_pairs(ptr, rows, end, first, I, dg, du):
    """Store gate and up in turn."""
    layout: gl.constexpr = _layout(2 * STRIP)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    cols = 2 * first + gl.arange(0, 4 * HALF, gl.SliceLayout(0, layout))
    mask = (rows < end)[:, None] & (cols < 2 * I)[None, :]
    dz = gl.convert_layout(gl.reshape(gl.join(dg, du), [CHUNK, 4 * HALF]), layout, assert_trivial=True)
    gl.store(ptr + (rows.to(gl.int64) * 2 * I)[:, None] + cols[None, :], dz, mask=mask)


@gluon.jit
def _differentiate(
    weights_ptr, z_ptr, offsets_ptr, tiles_ptr, dz_ptr, wh_ptr, part_ptr, E, I, limit, alpha, dh_s, dh_full,
    dh_empty, ACT: gl.constexpr, LIMITED: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = _layout(STRIP)
    dtype: gl.constexpr = dh_s.dtype
    tiles_n = gl.cdiv(I, 2 * HALF)
    tiles_m = gl.load(offsets_ptr + E + 1)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert = gl.load(tiles_ptr + 2 * m)
        first = gl.load(tiles_ptr + 2 * m + 1)
        end = gl.load(offsets_ptr + expert + 1)
        cols = n * 2 * HALF + gl.arange(0, 2 * HALF, gl.SliceLayout(0, layout))
        rows = first + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        gate, up, weight = _read(z_ptr, weights_ptr, rows, end, n * 2 * HALF, I, INTERLEAVED)
        for half in gl.static_range(2):
            mbarrier.wait(dh_full.index(half), tile // gl.num_programs(0) & 1)
            for chunk in gl.static_range(0, ROWS, CHUNK):
                own = rows
                g = gate.to(gl.float32)
                u = up.to(gl.float32)
                w = weight.to(gl.float32)[:, None]
                rows += CHUNK
                if half * ROWS + chunk + CHUNK < HALF:  # while this chunk is computed, the next one is loaded
                    gate, up, weight = _read(z_ptr, weights_ptr, rows, end, n * 2 * HALF, I, INTERLEAVED)
                dh = dh_s.index(half).slice(chunk, CHUNK).load(layout).to(gl.float32)
                h, dg, du = gated_and_grads(g, u, dh * w, limit, alpha, ACT, LIMITED)
                place = own.to(gl.int64)
                mask = (own < end)[:, None] & (cols < I)[None, :]
                if wh_ptr is not None:
                    gl.store(wh_ptr + (place * I)[:, None] + cols[None, :], (h * w).to(dtype), mask=mask)
                if dz_ptr is not None:
                    if INTERLEAVED:
                        _store_pairs(dz_ptr, own, end, n * 2 * HALF, I, dg.to(dtype), du.to(dtype))
                    else:
                        ptrs = dz_ptr + (place * 2 * I)[:, None] + cols[None, :]
                        gl.store(ptrs, dg.to(dtype), mask=mask)
                        gl.store(ptrs + I, du.to(dtype), mask=mask)
                if part_ptr is not None:
                    gl.store(part_ptr + place * tiles_n + n, gl.sum(dh * h, 1), mask=own < end)
            mbarrier.arrive(dh_empty.index(half), count=1)


@gluon.jit
def _experts_down_bwd_hopper_kernel(
    dout_desc, w_desc, u_desc, v_desc, weights_ptr, z_ptr, offsets_ptr, tiles_ptr, dz_ptr, wh_ptr, part_ptr, E,
    strips, H, R, limit, alpha, ACT: gl.constexpr, LIMITED: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    I = strips * STRIP  # so that the compiler knows that rows are aligned to 16 bytes
    ring = operands(dout_desc, w_desc, STAGES)
    steps = steps_of(H, R)
    dh_s = gl.allocate_shared_memory(dout_desc.dtype, [2, ROWS, 2 * HALF], gl.NVMMASharedLayout(128, 16, 2))
    dh_full = barriers(2, 1)
    dh_empty = barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, offsets_ptr, E, I, steps, ring, dh_s, dh_full, dh_empty, STAGES)),
            (_multiply, (1, offsets_ptr, E, I, steps, ring, dh_s, dh_full, dh_empty, STAGES)),
            (_differentiate, (weights_ptr, z_ptr, offsets_ptr, tiles_ptr, dz_ptr, wh_ptr, part_ptr, E, I,
                              limit, alpha, dh_s, dh_full, dh_empty, ACT, LIMITED, INTERLEAVED, GROUP)),
            (load_tiles, (dout_desc, w_desc, u_desc, v_desc, offsets_ptr, tiles_ptr, E, I, H, R, ring, False, False,
                          GROUP, STAGES)),
        ],
        worker_num_warps=[4, 4, 1],
        worker_num_regs=[160, 160, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def _sorted_weights_kernel(weights_ptr, row_ptr, out_ptr, S, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + offs, mask=offs < S, other=0)
    tl.store(out_ptr + offs, tl.load(weights_ptr + row), mask=offs < S)


def down_bwd(
    dout: Tensor, w: Tensor, u: Tensor | None, v: Tensor | None, weights: Tensor, z: Tensor, row: Tensor,
    offsets: Tensor, tiles: Tensor, gate: Gate, dz: Tensor | None, wh: Tensor | None, part: Tensor | None,
) -> None:  # fmt: skip
    """Fill what is not None of dz and wh of ``moe_down_bwd`` and the parts of dw, for sorted rows ``dout`` [S, H]."""
    I, S = z.shape[1] // 2, len(row)
    ordered = weights.new_empty(S)
    launch(_sorted_weights_kernel, (-(-S // 1024),), (weights, row, ordered), (S,), BLOCK=1024, num_warps=4)
    descriptors, R = factors_of(dout, w, not gate.transposed, u, v)
    floats, constants = gate_arguments(gate)
    launch(
        _experts_down_bwd_hopper_kernel,
        programs(z.device, len(tiles) * -(-I // COLUMNS)),
        (ordered, z, offsets, tiles, dz, wh, part),
        (len(w), I // STRIP.value, dout.shape[1], R),
        floats,
        descriptors,
        GROUP=GROUP,
        STAGES=STAGES,
        **constants,
        num_warps=4,
    )
