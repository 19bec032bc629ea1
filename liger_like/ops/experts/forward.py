"""Forward of the experts: z = x W1 + b1 and h in one kernel, y = h W2 + b2, and the weighted sum of a token's rows.

Programs loop over the tiles that the routing lists. Rows of x are gathered by the product, unless they come sorted.
With u [S, R] and v [E, R, N] the products also add u v, for v of each row's expert (see ``lora``).
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.experts.blocks import add_low_rank, columns, gated, halves, product, rows_of, source_of
from liger_like.ops.experts.checks import Gate
from liger_like.ops.experts.choice import ROWS, hopper_kernels, in_layout
from liger_like.ops.experts.tiles import tiles_for
from liger_like.runtime.blocks import block_of, grouped
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed, with_stride
from liger_like.runtime.registry import op
from liger_like.runtime.support import programs


@triton.jit
def _store_gate_up(
    acc, z_ptr, h_ptr, offs_m, mask_m, first, I, limit, alpha,
    ACT: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Store z and h of columns of gate from ``first`` on, and of as many of up."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1] // 2
    rows = offs_m[:, None]
    cols = first + tl.arange(0, BLOCK_N)
    mask = columns(cols < I, mask_m, EVEN_N)
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * BLOCK_N)
        if z_ptr is not None:
            tl.store(z_ptr + rows * 2 * I + both[None, :], acc, mask=columns(both < 2 * I, mask_m, EVEN_N))
        g, u = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
    else:
        g, u = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 8, 2, 8)), (0, 1, 3, 2)))
        g, u = tl.reshape(g, (BLOCK_M, BLOCK_N)), tl.reshape(u, (BLOCK_M, BLOCK_N))
        if z_ptr is not None:
            tl.store(z_ptr + rows * 2 * I + cols[None, :], g, mask=mask)
            tl.store(z_ptr + rows * 2 * I + I + cols[None, :], u, mask=mask)
    tl.store(h_ptr + rows * I + cols[None, :], gated(g, u, limit, alpha, ACT, LIMITED), mask=mask)


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, u_ptr, v_ptr, row_ptr, offsets_ptr, tiles_ptr, z_ptr, h_ptr,
    stride_xm, stride_we, stride_wn, stride_wk, R, E, H, I, limit, alpha, TOPK: tl.constexpr,
    ACT: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute z, if it is to be kept, and h.

    A tile has BLOCK_N columns of gate and as many of up, in turn by 8, or by 1 if INTERLEAVED. Both are then in one
    product, and in the registers of one thread.
    """
    tiles_n = tl.cdiv(I, BLOCK_N)
    tiles_m = tl.load(offsets_ptr + E + 1)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert, offs_m, within, mask_m = rows_of(tiles_ptr, offsets_ptr, m, BLOCK_M)
        source = source_of(row_ptr, within, TOPK)
        j = tl.arange(0, 2 * BLOCK_N)
        if INTERLEAVED:
            offs_n = 2 * n * BLOCK_N + j
            inside = offs_n < 2 * I
        else:
            col = n * BLOCK_N + j // 16 * 8 + j % 8
            offs_n = col + j // 8 % 2 * I
            inside = col < I
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = x_ptr + source[:, None] * stride_xm + offs_k[None, :]
        b_ptrs = w_ptr + expert * stride_we + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk
        acc = product(a_ptrs, b_ptrs, inside, stride_wk, H, EVEN_N, EVEN_K, BLOCK_M, 2 * BLOCK_N, BLOCK_K)
        if u_ptr is not None:
            acc = add_low_rank(acc, u_ptr, v_ptr, within, expert, offs_n, inside, R, 2 * I, EVEN_N)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * 2 * I + offs_n, mask=inside, other=0.0).to(tl.float32)[None, :]
        left, right = halves(acc)  # half the columns at a time, for want of registers
        first = n * BLOCK_N
        _store_gate_up(left, z_ptr, h_ptr, offs_m, mask_m, first, I, limit, alpha, ACT, LIMITED, INTERLEAVED, EVEN_N)
        first += BLOCK_N // 2
        _store_gate_up(right, z_ptr, h_ptr, offs_m, mask_m, first, I, limit, alpha, ACT, LIMITED, INTERLEAVED, EVEN_N)


@triton.jit
def _rows_times_kernel(
    a_ptr, w_ptr, bias_ptr, u_ptr, v_ptr, offsets_ptr, tiles_ptr, out_ptr,
    stride_we, stride_wn, stride_wk, R, E, N, K,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.load(offsets_ptr + E + 1)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert, offs_m, within, mask_m = rows_of(tiles_ptr, offsets_ptr, m, BLOCK_M)
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + within[:, None] * K + offs_k[None, :]
        b_ptrs = w_ptr + expert * stride_we + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk
        acc = product(a_ptrs, b_ptrs, offs_n < N, stride_wk, K, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        if u_ptr is not None:
            acc = add_low_rank(acc, u_ptr, v_ptr, within, expert, offs_n, offs_n < N, R, N, EVEN_N)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        mask = columns(offs_n < N, mask_m, EVEN_N)
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask)


@triton.jit
def _combine_kernel(y_ptr, weights_ptr, pos_ptr, out_ptr, N, TOPK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum the rows of a token in the order of k, each times its weight if there are weights."""
    t = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOPK):
        place = tl.load(pos_ptr + t * TOPK + k).to(tl.int64)
        end = tl.where(place >= 0, N, 0)
        y = tl.load(y_ptr + place * N + offs_n, mask=offs_n < end, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y = tl.where(place >= 0, y * tl.load(weights_ptr + t * TOPK + k).to(tl.float32), 0.0)
        acc += y
    tl.store(out_ptr + t * N + offs_n, acc, mask=offs_n < N)


@triton.jit
def _spread_kernel(x_ptr, pos_ptr, out_ptr, stride_xm, N, TOPK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Copy the row of a token to the places of its rows; x is read once."""
    t = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + t * stride_xm + offs_n, mask=offs_n < N, other=0.0)
    for k in tl.static_range(TOPK):
        place = tl.load(pos_ptr + t * TOPK + k).to(tl.int64)
        tl.store(out_ptr + place * N + offs_n, x, mask=offs_n < tl.where(place >= 0, N, 0))


def gate_arguments(gate: Gate) -> tuple[tuple[float, float], dict[str, Any]]:
    """Return limit and alpha, and the constexprs of a kernel with a gated unit."""
    act = gate.act if gate.alpha is None else "scaled"
    constants = {"ACT": act, "LIMITED": gate.limit is not None, "INTERLEAVED": gate.interleaved}
    return (gate.limit or 0.0, gate.alpha or 0.0), constants


def matrix_strides(w: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return the strides of ``w`` [E, N, K], or [E, K, N] if ``transposed``, over experts, columns and depth."""
    e, n, k = w.stride()
    return (e, k, n) if transposed else (e, n, k)


def rank(v: Tensor | None) -> int:
    """Return R of ``v`` [E, R, N], 0 without."""
    return 0 if v is None else v.shape[1]


def low_rank_flops(u: Tensor | None, v: Tensor | None) -> int:
    """Return the FLOPs of u v."""
    return 0 if u is None or v is None else 2 * u.shape[0] * v.shape[1:].numel()


def _gate_up_outputs(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, row: Tensor | None,
    offsets: Tensor, tiles: Tensor, topk: int, act: str, limit: float | None, alpha: float | None, transposed: bool,
    interleaved: bool, keep_z: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide, S = gate_up.shape[2 if transposed else 1], (x if row is None else row).shape[0]
    return x.new_empty((S, wide) if keep_z else (0,)), x.new_empty(S, wide // 2)


GATE_SCHEMA = "str act, float? limit, float? alpha, bool transposed, bool interleaved"


@op(
    "moe_gate_up(Tensor x, Tensor gate_up, Tensor? bias, Tensor? u, Tensor? v, Tensor? row, Tensor offsets,"
    f" Tensor tiles, int topk, {GATE_SCHEMA}, bool keep_z) -> (Tensor z, Tensor h)",
    _gate_up_outputs,
    flops=lambda x, w, bias, u, v, row, *_: (
        2 * (x if row is None else row).shape[0] * w.shape[1:].numel() + low_rank_flops(u, v)
    ),
    replayed=True,
)
def moe_gate_up(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, row: Tensor | None,
    offsets: Tensor, tiles: Tensor, topk: int, *options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return z [S, 2I] in the form of ``gate_up``, empty unless the last option says to keep it, and h [S, I].

    ``x`` [T, H], or [S, H] in the order of the rows if ``row`` is None.
    """
    z, h = _gate_up_outputs(x, gate_up, bias, u, v, row, offsets, tiles, topk, *options)
    gate, keep_z, tile = Gate(*options[:-1]), options[-1], tiles_for(x, x.shape[1], h.shape[1]).gate_up
    factor = in_layout(v, x, gate.transposed)
    if hopper := hopper_kernels(ROWS, x if row is None else None, gate_up, h, u, factor):
        hopper.gate_up(x, gate_up, bias, u, factor, offsets, tiles, gate, z if keep_z else None, h)
        return z, h
    x, stride_xm = with_stride(x)
    H, I, E = x.shape[-1], h.shape[1], len(gate_up)
    floats, constants = gate_arguments(gate)
    launch(
        _gate_up_kernel,
        programs(x.device, len(tiles) * -(-I // tile.block_n)),
        (x, gate_up, packed(bias), u, packed(v), row, offsets, tiles, z if keep_z else None, h),
        (stride_xm, *matrix_strides(gate_up, gate.transposed), rank(v), E, H, I),
        floats,
        TOPK=topk,
        EVEN_N=I % tile.block_n == 0,
        EVEN_K=H % tile.block_k == 0,
        **constants,
        **tile.constants(),
    )
    return z, h


def _rows_times_outputs(
    a: Tensor, w: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, offsets: Tensor, tiles: Tensor,
    transposed: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty(a.shape[0], w.shape[2 if transposed else 1])


@op(
    "moe_rows_times(Tensor a, Tensor w, Tensor? bias, Tensor? u, Tensor? v, Tensor offsets, Tensor tiles,"
    " bool transposed) -> Tensor",
    _rows_times_outputs,
    flops=lambda a, w, bias, u, v, *_: 2 * a.shape[0] * w.shape[1:].numel() + low_rank_flops(u, v),
    replayed=True,
)
def moe_rows_times(
    a: Tensor, w: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None, offsets: Tensor, tiles: Tensor,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """Return a [S, K] times the matrix of each row's expert, w [E, N, K] or if ``transposed`` [E, K, N]: [S, N]."""
    out = _rows_times_outputs(a, w, bias, u, v, offsets, tiles, transposed)
    tile = tiles_for(a, *w.shape[1:]).rows_times
    K, N = a.shape[1], out.shape[1]
    factor = in_layout(v, a, transposed)
    if hopper := hopper_kernels(ROWS, a, w, u, factor):
        hopper.rows_times(a, w, bias, u, factor, offsets, tiles, transposed, out)
        return out
    launch(
        _rows_times_kernel,
        programs(a.device, len(tiles) * -(-N // tile.block_n)),
        (a, w, packed(bias), u, packed(v), offsets, tiles, out),
        (*matrix_strides(w, transposed), rank(v), len(w), N, K),
        EVEN_N=N % tile.block_n == 0,
        EVEN_K=K % tile.block_k == 0,
        **tile.constants(),
    )
    return out


@op(
    "moe_combine(Tensor y, Tensor? weights, Tensor pos) -> Tensor",
    lambda y, weights, pos: y.new_empty(pos.shape[0], y.shape[1]),
    replayed=True,
)
def moe_combine(y: Tensor, weights: Tensor | None, pos: Tensor) -> Tensor:
    """Return for each token the sum of its rows of y [S, N], times ``weights`` [T, K] if given: [T, N]."""
    (T, topk), N = pos.shape, y.shape[1]
    out, block_n = y.new_empty(T, N), min(1024, block_of(N))
    if T:
        grid = T, -(-N // block_n)
        launch(_combine_kernel, grid, (y, packed(weights), pos, out), (N,), TOPK=topk, BLOCK_N=block_n, num_warps=4)
    return out


@op(
    "moe_spread(Tensor x, Tensor pos, SymInt rows) -> Tensor",
    lambda x, pos, rows: x.new_empty(rows, x.shape[1]),
    replayed=True,
)
def moe_spread(x: Tensor, pos: Tensor, rows: int) -> Tensor:
    """Return the rows of x [T, N] in their places ``pos`` [T, K]: [rows, N]. Rows of no expert are not written."""
    (T, topk), N = pos.shape, x.shape[1]
    out, block_n = x.new_empty(rows, N), min(1024, block_of(N))
    x, stride_xm = with_stride(x)
    if T:
        grid = T, -(-N // block_n)
        launch(_spread_kernel, grid, (x, pos, out), (stride_xm, N), TOPK=topk, BLOCK_N=block_n, num_warps=4)
    return out
