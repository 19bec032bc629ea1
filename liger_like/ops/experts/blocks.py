"""Triton functions that the experts' kernels share: tiles, the loop of a product, and the gated unit."""

import triton
import triton.language as tl

from liger_like.ops.glu import act_and_slope
from liger_like.runtime.blocks import sigmoid

DEPTH = tl.constexpr(16)  # ranks of adapters are multiples: the least depth of a product


@triton.jit
def rows_of(tiles_ptr, offsets_ptr, m, BLOCK_M: tl.constexpr):
    """Return expert and places of a tile of rows, and the places with those past the expert's end moved to its last.

    A product may compute rows twice, but must not read memory that nothing wrote. Expert and places are int64.
    """
    expert = tl.load(tiles_ptr + 2 * m).to(tl.int64)
    offs_m = tl.load(tiles_ptr + 2 * m + 1) + tl.arange(0, BLOCK_M)
    end = tl.load(offsets_ptr + expert + 1)
    return expert, offs_m.to(tl.int64), tl.minimum(offs_m, end - 1).to(tl.int64), offs_m < end


@triton.jit
def source_of(row_ptr, places, TOPK: tl.constexpr):
    """Return the tokens of rows, or their places if they are sorted."""
    if row_ptr is None:
        return places.to(tl.int64)
    else:  # Triton would also compile code after the return
        return (tl.load(row_ptr + places) // TOPK).to(tl.int64)


@triton.jit
def product(
    a_ptrs, b_ptrs, inside, stride_bk, K,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a b [BLOCK_M, BLOCK_N] in fp32 over a depth of K; ``inside`` are the columns of b that exist.

    The pointers are those of the first block of depth; a is dense along it. EVEN_N, EVEN_K: no block passes the end.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return add_product(acc, a_ptrs, b_ptrs, inside, stride_bk, K, EVEN_N, EVEN_K, BLOCK_K)


@triton.jit
def add_product(
    acc, a_ptrs, b_ptrs, inside, stride_bk, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return acc + a b; the arguments are those of ``product``."""
    offs_k = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs) if EVEN_K else tl.load(a_ptrs, mask=(offs_k < K - k)[None, :], other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, mask=inside[None, :] & (offs_k < K - k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def add_low_rank(acc, u_ptr, v_ptr, within, expert, offs_n, inside, R, N, EVEN_N: tl.constexpr):
    """Return acc + u v, for the rows ``within`` of u [S, R] and the columns ``offs_n`` of the expert's v [R, N]."""
    offs_r = tl.arange(0, DEPTH)
    a_ptrs = u_ptr + within[:, None] * R + offs_r[None, :]
    b_ptrs = v_ptr + expert * R * N + offs_r[:, None] * N + offs_n[None, :]
    return add_product(acc, a_ptrs, b_ptrs, inside, N, R, EVEN_N, True, DEPTH)


@triton.jit
def halves(acc):
    """Return the left and the right columns."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def columns(inside, mask_m, EVEN: tl.constexpr):
    """Return the mask of rows and columns; EVEN: no column is outside."""
    return mask_m[:, None] if EVEN else mask_m[:, None] & inside[None, :]


@triton.jit
def clamped(g, u, limit, LIMITED: tl.constexpr):
    """Return gate clamped from above, and up on both sides; NaN stays NaN."""
    if LIMITED:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(u, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return g, u


@triton.jit
def gated(g, u, limit, alpha, ACT: tl.constexpr, LIMITED: tl.constexpr):
    """Return act(gate) * up; ACT "scaled": (up + 1) * gate * sigmoid(alpha * gate)."""
    g, u = clamped(g, u, limit, LIMITED)
    if ACT == "scaled":
        return (u + 1.0) * g * sigmoid(alpha * g)
    else:  # Triton would also compile code after the return
        act, _ = act_and_slope(g, ACT)
        return act * u


@triton.jit
def gated_and_grads(g, u, dh, limit, alpha, ACT: tl.constexpr, LIMITED: tl.constexpr):
    """Return h, and the gradients of gate and up for the gradient of h."""
    c, v = clamped(g, u, limit, LIMITED)
    if ACT == "scaled":
        s = sigmoid(alpha * c)
        act, v = c * s, v + 1.0
        slope = s + alpha * act * (1.0 - s)
    else:
        act, slope = act_and_slope(c, ACT)
    dg, du = dh * v * slope, dh * act
    if LIMITED:
        dg, du = tl.where(g <= limit, dg, 0.0), tl.where(tl.abs(u) <= limit, du, 0.0)
    return act * v, dg, du
