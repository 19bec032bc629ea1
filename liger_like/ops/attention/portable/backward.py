"""Attention backward in Triton, for every GPU and every option: dq, dk and dv.

For dk and dv a program owns a block of keys and sums over the queries that see it, for all query heads of its key head;
for dq a program owns a block of queries. Nothing is added up in global memory, so a repetition gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.attention.masking import (
    Masking,
    constants_of,
    heads_in_l2,
    key_heads_together,
    strides_of,
)
from liger_like.ops.attention.portable.parts import (
    add_product,
    less_delta,
    load_bias,
    load_log_sum,
    load_parts,
    probabilities,
    scale_parts,
    store_parts,
    zero_parts,
)
from liger_like.ops.attention.tiles import is_long, tile_for
from liger_like.ops.attention.visibility import (
    between,
    bounds_of_spans,
    find_rows,
    load_spans,
    schedule,
    shift_of,
    visible,
    visible_range,
    within,
)
from liger_like.runtime.launcher import launch


@triton.jit
def _add_queries(
    state, k, v, m, edge, q_ptr, dout_ptr, stats_ptr, count, bias_ptr, STRIDE_Q, STRIDE_D, stride_bs, stride_bk,
    keys, seen_keys, spans, shift, length_q, length_k, left, right, scale, SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SPLIT_LSE: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what the block of queries at ``m`` gives to dk and dv."""
    dk, dv = state
    rows, first = tl.arange(0, BLOCK_M), tl.cast(m, tl.int64)
    if D <= 128:
        first = tl.multiple_of(first, BLOCK_M)  # a load of lse or delta moves two queries; slower for wider heads
    queries = m + rows
    mask = queries < length_q
    row_max = tl.load(stats_ptr + first + rows)  # before the wait for what is loaded ahead
    log_sum = load_log_sum(stats_ptr + first + rows, count, SPLIT_LSE)
    q = load_parts(q_ptr + first * STRIDE_Q, rows, STRIDE_Q, mask, D)
    dout = load_parts(dout_ptr + first * STRIDE_D, rows, STRIDE_D, mask, DV)
    bias = None
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, queries[None, :], keys[:, None], stride_bs, stride_bk, length_q, length_k)
    log_sum = log_sum if log_sum is None else log_sum[None, :]
    p, slopes = probabilities(k, q, bias, row_max[None, :], log_sum, scale, SOFTCAP, START)
    if edge:
        if D <= 128:  # p of queries past the last one of a batch is 0
            end = length_q - m if PACKED else BLOCK_M
            seen = between(rows[None, :], (keys - m)[:, None], -shift, end, right, left, HAS_RIGHT, HAS_LEFT)
        else:
            seen = visible(queries[None, :], keys[:, None], shift, length_k, left, right, HAS_LEFT, HAS_RIGHT)
            seen = seen & mask[None, :]
        seen = within(seen, spans, queries[None, :])
        if seen_keys is not None:
            seen = seen & seen_keys[:, None]
        p = tl.where(seen, p, 0.0)
    dv, p = add_product(dv, p, dout), p * slopes
    if PACKED:
        rows = tl.minimum(rows, length_q - 1 - m)  # 0 times the delta of the next sequence may be NaN
    delta = tl.load(stats_ptr + count + first + rows)  # during that product
    ds = p * less_delta(v, dout, delta[None, :])
    return add_product(dk, ds, q), dv


@triton.jit(do_not_specialize=["B", "S", "SK", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, bias_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr, spans_ptr,
    dk_ptr, dv_ptr, stride_qb, stride_qh, stride_kb, stride_kh,
    stride_vb, stride_vh, stride_db, stride_dh, stride_bb, stride_bh, stride_bs, stride_bk,
    B, S, SK, PADDED, count, blocks, heads_together, splits, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_D: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SEQUENCES: tl.constexpr, SPLIT_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    block, head = schedule(tl.program_id(0), blocks, B * HK, heads_together)
    b, hk = head // HK, (head % HK).to(tl.int64)
    HAS_END: tl.constexpr = HAS_RIGHT or spans_ptr is not None
    # without masks, p of queries past the last one is 0, since their lse is infinite
    MASKED: tl.constexpr = HAS_LEFT or HAS_END or mask_ptr is not None or cu_k_ptr is not None
    if HAS_END:
        block = blocks - 1 - block  # under a causal mask, which spans may be, the first keys are seen most
    index, row, start_k, length_k, start_q, length_q = find_rows(
        b, block, cu_k_ptr, cu_q_ptr, count, SK, S, BLOCK_N, 1, SEQUENCES
    )
    if cu_k_ptr is not None and length_k == 0:
        return
    b, first_k = b.to(tl.int64), start_k + row
    rows = tl.arange(0, BLOCK_N)
    keys = row + rows
    mask, unseen = keys < length_k, False  # what a key behind the last one gives is not stored
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + b * SK + keys, mask=mask, other=0) != 0
        unseen = tl.min(mask.to(tl.int32)) == 0
    k = load_parts(k_ptr + b * stride_kb + hk * stride_kh + first_k * STRIDE_K, rows, STRIDE_K, mask, D)
    v = load_parts(v_ptr + b * stride_vb + hk * stride_vh + first_k * STRIDE_V, rows, STRIDE_V, mask, DV)
    shift = shift_of(offsets_ptr, index, length_q, length_k)
    last = tl.minimum(row + BLOCK_N, length_k) - 1
    spans = spans_ptr if spans_ptr is None else load_spans(spans_ptr, b, B, SK, keys[:, None])
    bounds = bounds_of_spans(spans_ptr, b, B, SK, row, last)
    start, end, inner_start, inner_end = visible_range(
        row - shift, last - shift, right, left, bounds, length_q, 0, 1, HAS_RIGHT, HAS_LEFT, BLOCK_M
    )
    seen_keys = mask if mask_ptr is not None else None
    state = zero_parts(BLOCK_N, D), zero_parts(BLOCK_N, DV)
    count_stats = tl.cast(B, tl.int64) * H * PADDED
    group = H // HK
    share = tl.cdiv(group, splits)
    first_head = hk * group + tl.program_id(1) * share
    for i in tl.range(0, tl.minimum(share, group - tl.program_id(1) * share)):
        h = first_head + i
        q_head = q_ptr + b * stride_qb + start_q * STRIDE_Q + h * stride_qh
        dout_head = dout_ptr + b * stride_db + start_q * STRIDE_D + h * stride_dh
        stats_head = stats_ptr + (b * H + h) * PADDED + start_q
        bias_head = bias_ptr if bias_ptr is None else bias_ptr + b * stride_bb + h * stride_bh
        for m in tl.range(start, end, BLOCK_M):
            edge = MASKED and (unseen | (m < inner_start) | (m + BLOCK_M > inner_end))
            state = _add_queries(
                state, k, v, m, edge, q_head, dout_head, stats_head, count_stats, bias_head, STRIDE_Q, STRIDE_D,
                stride_bs, stride_bk, keys, seen_keys, spans, shift, length_q, length_k, left, right, scale, SOFTCAP,
                HAS_LEFT, HAS_RIGHT, D, DV, SPLIT_LSE, cu_k_ptr is not None, MASKED and D > 128, BLOCK_M,
            )  # fmt: skip
    dk, dv = state
    b += tl.program_id(1).to(tl.int64) * B  # the parts of a split group stand one behind the other
    place, mask = (b * SK + first_k) * HK + hk, rows < length_k - row
    store_parts(dk_ptr + place * D, rows, HK * D, mask, scale_parts(dk, scale), D)
    store_parts(dv_ptr + place * DV, rows, HK * DV, mask, dv, DV)


@triton.jit
def _add_keys(
    dq, q, dout, n, edge, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries, row_max,
    log_sum, delta, spans, shift, length_q, length_k, left, right, scale, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the block of keys at ``n`` gives to dq."""
    rows, first = tl.arange(0, BLOCK_N), tl.cast(n, tl.int64)
    keys = n + rows
    mask = keys < length_k
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + keys, mask=mask, other=0) != 0
    k = load_parts(k_ptr + first * STRIDE_K, rows, STRIDE_K, mask, D)
    v = load_parts(v_ptr + first * STRIDE_V, rows, STRIDE_V, mask, DV)
    bias = None
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, queries[:, None], keys[None, :], stride_bs, stride_bk, length_q, length_k)
    log_sum = log_sum if log_sum is None else log_sum[:, None]
    p, slopes = probabilities(q, k, bias, row_max[:, None], log_sum, scale, SOFTCAP, D > 128)
    if mask_ptr is not None:
        p = tl.where(mask[None, :], p, 0.0)
    if edge:
        seen = visible(queries[:, None], keys[None, :], shift, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(within(seen, spans, keys[None, :]), p, 0.0)
    ds = p * slopes * less_delta(dout, v, delta[:, None])
    return add_product(dq, ds, k)


@triton.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "left", "right"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, bias_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr, spans_ptr, dq_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_db, stride_dh, stride_bb, stride_bh, stride_bs, stride_bk,
    B, S, SK, PADDED, count, blocks, heads_together, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_D: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SEQUENCES: tl.constexpr, SPLIT_LSE: tl.constexpr, LONG: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    block, head = schedule(tl.program_id(0), blocks, B * H, heads_together)
    b, h = head // H, (head % H).to(tl.int64)
    index, row, start_q, length_q, start_k, length_k = find_rows(
        b, block, cu_q_ptr, cu_k_ptr, count, S, SK, BLOCK_M, 1, SEQUENCES
    )
    if cu_q_ptr is not None and length_q == 0:
        return
    b, hk, first_q = b.to(tl.int64), h // (H // HK), start_q + row
    rows = tl.arange(0, BLOCK_M)
    queries = row + rows
    mask_q = queries < length_q
    q = load_parts(q_ptr + b * stride_qb + h * stride_qh + first_q * STRIDE_Q, rows, STRIDE_Q, mask_q, D)
    dout = load_parts(dout_ptr + b * stride_db + h * stride_dh + first_q * STRIDE_D, rows, STRIDE_D, mask_q, DV)
    stats_ptr += (b * H + h) * PADDED + first_q
    count_stats = tl.cast(B, tl.int64) * H * PADDED
    row_max, delta = tl.load(stats_ptr + rows), tl.load(stats_ptr + count_stats + rows)
    log_sum = load_log_sum(stats_ptr + rows, count_stats, SPLIT_LSE)
    k_ptr += b * stride_kb + start_k * STRIDE_K + hk * stride_kh
    v_ptr += b * stride_vb + start_k * STRIDE_V + hk * stride_vh
    bias_ptr = bias_ptr if bias_ptr is None else bias_ptr + b * stride_bb + h * stride_bh
    mask_ptr = mask_ptr if mask_ptr is None else mask_ptr + b * SK
    shift = shift_of(offsets_ptr, index, length_q, length_k)
    last = tl.minimum(row + BLOCK_M, length_q) - 1
    spans = spans_ptr if spans_ptr is None else load_spans(spans_ptr, b, B, S, queries[:, None])
    bounds = bounds_of_spans(spans_ptr, b, B, S, row, last)
    start, end, inner_start, inner_end = visible_range(
        row + shift, last + shift, left, right, bounds, length_k, 0, 1, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    dq = zero_parts(BLOCK_M, D)
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or spans_ptr is not None or mask_ptr is not None
    APART: tl.constexpr = LONG or (not MASKED and D <= 128)  # wider heads leave no registers for two loops
    if APART:  # only blocks at the end of the keys need a mask
        whole = tl.maximum(inner_end, 0) // BLOCK_N * BLOCK_N
        for n in tl.range(start, whole, BLOCK_N):
            dq = _add_keys(
                dq, q, dout, n, False, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk,
                queries, row_max, log_sum, delta, spans, shift, length_q, length_k, left, right, scale, SOFTCAP,
                HAS_LEFT, HAS_RIGHT, D, DV, BLOCK_N,
            )  # fmt: skip
        start = whole
    for n in tl.range(start, end, BLOCK_N, num_stages=1 if APART else None):
        edge = APART or ((n < inner_start) | (n + BLOCK_N > inner_end))
        dq = _add_keys(
            dq, q, dout, n, edge, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries,
            row_max, log_sum, delta, spans, shift, length_q, length_k, left, right, scale, SOFTCAP, HAS_LEFT, HAS_RIGHT,
            D, DV, BLOCK_N,
        )  # fmt: skip
    place = (b * S + first_q) * H + h
    store_parts(dq_ptr + place * D, rows, H * D, rows < length_q - row, scale_parts(dq, scale), D)


def _arguments(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking
) -> tuple[list[int], dict[str, Any]]:
    """Return the sizes and the constants that both kernels take."""
    strides = *strides_of(q, k, v, dout), *masking.bias_strides()
    sizes = [*strides, q.shape[0], q.shape[1], k.shape[1], stats.shape[3], masking.sequences]
    constants = {"STRIDE_D": dout.stride(1), "SPLIT_LSE": stats.shape[0] == 3}
    return sizes, masking.constants() | constants_of(q, k, v) | constants


def fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query heads of a key head."""
    B, SK, HK, _ = k.shape
    sizes, constants = _arguments(dout, q, k, v, stats, masking)
    tile = tile_for("dkv", q, v, masking)
    blocks = masking.num_blocks(SK, tile.block_n)
    heads_together = key_heads_together(masking, q, k, v, tile.block_n)
    launch(
        _attention_dkv_kernel,
        (blocks * B * HK, splits),
        (q, k, v, dout, stats, *masking.pointers(), dk, dv),
        (*sizes, blocks, heads_together, splits, masking.left, masking.right),
        (masking.scale,),
        **constants,
        **tile.constants(),
    )


def make_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking) -> Tensor:
    """Return the gradient of q."""
    (B, S, H, _), HK = q.shape, k.shape[2]
    sizes, constants = _arguments(dout, q, k, v, stats, masking)
    dq, tile = torch.empty(q.shape, dtype=q.dtype, device=q.device), tile_for("dq", q, v, masking)
    blocks = masking.num_blocks(S, tile.block_m)
    launch(
        _attention_dq_kernel,
        (blocks * B * H,),
        (q, k, v, dout, stats, *masking.pointers(), dq),
        (*sizes, blocks, heads_in_l2(masking, k, v, H // HK), masking.left, masking.right),
        (masking.scale,),
        **constants,
        LONG=is_long(q, k, v, masking),
        **tile.constants(),
    )
    return dq
