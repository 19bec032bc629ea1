"""Gradient of an additive bias: ds summed over the axes along which the bias is broadcast. ds is never in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.attention.masking import Masking, constants_of, strides_of
from liger_like.ops.attention.portable.parts import less_delta, load_bias, load_log_sum, load_parts, probabilities
from liger_like.ops.attention.tiles import tile_for
from liger_like.ops.attention.visibility import load_spans, shift_of, visible, within
from liger_like.runtime.launcher import launch


@triton.jit(do_not_specialize=["B", "S", "SK", "PADDED", "left", "right"])
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, bias_ptr, mask_ptr, offsets_ptr, spans_ptr, dbias_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_db, stride_dh, stride_bb, stride_bh, stride_bs, stride_bk, B, S, SK, PADDED, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_D: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    EACH_B: tl.constexpr, EACH_H: tl.constexpr, EACH_S: tl.constexpr, EACH_K: tl.constexpr,
    SPLIT_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum ds for a block of the bias; EACH_* says along which axes the bias is not broadcast."""
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    blocks_m, blocks_n = tl.cdiv(S, BLOCK_M), tl.cdiv(SK, BLOCK_N)
    rest = tl.program_id(0)
    own_n, rest = (rest % blocks_n, rest // blocks_n) if EACH_K else (0, rest)
    own_m, rest = (rest % blocks_m, rest // blocks_m) if EACH_S else (0, rest)
    own_h, own_b = (rest % H, rest // H) if EACH_H else (0, rest)
    num_n, num_m = 1 if EACH_K else blocks_n, 1 if EACH_S else blocks_m
    num_h, num_b = 1 if EACH_H else H, 1 if EACH_B else B
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(0, num_n * num_m * num_h * num_b):
        n, m = own_n + i % num_n, own_m + i // num_n % num_m
        h = tl.cast(own_h + i // num_n // num_m % num_h, tl.int64)
        b = tl.cast(own_b + i // num_n // num_m // num_h, tl.int64)
        shift = shift_of(offsets_ptr, b, S, SK)
        queries, keys = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (queries < S)[:, None] & visible(
            queries[:, None], keys[None, :], shift, SK, left, right, HAS_LEFT, HAS_RIGHT
        )
        spans = spans_ptr if spans_ptr is None else load_spans(spans_ptr, b, B, S, queries[:, None])
        seen = within(seen, spans, keys[None, :])
        mask_k = keys < SK
        if mask_ptr is not None:
            mask_k = tl.load(mask_ptr + b * SK + keys, mask=mask_k, other=0) != 0
        seen = seen & mask_k[None, :]
        hk = h // (H // HK)
        q = load_parts(q_ptr + b * stride_qb + h * stride_qh, queries.to(tl.int64), STRIDE_Q, queries < S, D)
        dout = load_parts(dout_ptr + b * stride_db + h * stride_dh, queries.to(tl.int64), STRIDE_D, queries < S, DV)
        k = load_parts(k_ptr + b * stride_kb + hk * stride_kh, keys.to(tl.int64), STRIDE_K, mask_k, D)
        v = load_parts(v_ptr + b * stride_vb + hk * stride_vh, keys.to(tl.int64), STRIDE_V, mask_k, DV)
        bias = load_bias(
            bias_ptr + b * stride_bb + h * stride_bh, queries[:, None], keys[None, :], stride_bs, stride_bk, S, SK
        )
        row_ptrs = stats_ptr + (b * H + h) * PADDED + queries
        count = tl.cast(B, tl.int64) * H * PADDED
        row_max, delta = tl.load(row_ptrs), tl.load(row_ptrs + count)
        log_sum = load_log_sum(row_ptrs, count, SPLIT_LSE)
        log_sum = log_sum if log_sum is None else log_sum[:, None]
        p, _ = probabilities(q, k, bias, row_max[:, None], log_sum, scale, SOFTCAP, False)
        total += tl.where(seen, p, 0.0) * less_delta(dout, v, delta[:, None])
    rows, cols = own_m * BLOCK_M + tl.arange(0, BLOCK_M), own_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_b, cols_b = S if EACH_S else 1, SK if EACH_K else 1
    if not EACH_S:
        total = tl.where((rows == 0)[:, None], tl.sum(total, 0)[None, :], 0.0)
    if not EACH_K:
        total = tl.where((cols == 0)[None, :], tl.sum(total, 1)[:, None], 0.0)
    place = tl.cast(own_b, tl.int64) * (H if EACH_H else 1) + own_h
    ptrs = dbias_ptr + (place * rows_b + rows[:, None]) * cols_b + cols[None, :]
    tl.store(ptrs, total, mask=(rows < rows_b)[:, None] & (cols < cols_b)[None, :])


def attention_dbias(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking) -> Tensor:
    """Return the gradient of ``masking.bias`` in its shape and dtype, for tensors with dense features."""
    bias, (B, S, H, _), SK = masking.bias, q.shape, k.shape[1]
    assert bias is not None
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
    tile = tile_for("dbias", q, v, masking)
    each = [n == m for n, m in zip(bias.shape, (B, H, S, SK), strict=True)]
    programs = 1
    for own, n in zip(each, (B, H, -(-S // tile.block_m), -(-SK // tile.block_n)), strict=True):
        programs *= n if own else 1
    sizes = *strides_of(q, k, v, dout), *masking.bias_strides(), B, S, SK, stats.shape[3], masking.left, masking.right
    constants = masking.constants() | constants_of(q, k, v)
    constants |= {"STRIDE_D": dout.stride(1), "SPLIT_LSE": stats.shape[0] == 3}
    del constants["SEQUENCES"]
    launch(
        _attention_dbias_kernel,
        (programs,),
        (q, k, v, dout, stats, bias, masking.key_padding_mask, masking.offsets, masking.spans, dbias),
        sizes,
        (masking.scale,),
        **constants,
        **dict(zip(("EACH_B", "EACH_H", "EACH_S", "EACH_K"), each, strict=True)),
        **tile.constants(),
    )
    return dbias
