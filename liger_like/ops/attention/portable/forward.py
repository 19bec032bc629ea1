"""Attention forward in Triton, for every GPU and every option; where queries are few, their keys are split."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from liger_like.ops.attention.masking import Masking, constants_of, heads_in_l2, strides_of
from liger_like.ops.attention.portable.parts import (
    add_product,
    contract,
    load_bias,
    load_parts,
    scale_parts,
    store_parts,
    values_first,
    zero_parts,
)
from liger_like.ops.attention.softmax import LN2, LOG2E, finish, online_softmax, scores, unit_of_scores
from liger_like.ops.attention.tiles import Tile
from liger_like.ops.attention.visibility import (
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
from liger_like.runtime.support import num_programs


@triton.jit
def _unpadded(mask_ptr, keys, length_k):
    """Return which of ``keys`` are in the sequence and no padding."""
    mask = keys < length_k
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + keys, mask=mask, other=0) != 0
    return mask


@triton.jit
def _attend_block(
    state, q, n, edge, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries, spans,
    shift, length_q, length_k, left, right, scale, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the block of keys at ``n`` into running products, sums and maxima."""
    EXACT: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    acc, total, row_max = state
    rows, first = tl.arange(0, BLOCK_N), tl.cast(n, tl.int64)
    keys = n + rows
    k = load_parts(k_ptr + first * STRIDE_K, rows, STRIDE_K, keys < length_k, D)
    if values_first(D, DV):
        v = load_parts(v_ptr + first * STRIDE_V, rows, STRIDE_V, _unpadded(mask_ptr, keys, length_k), DV)
    bias = None
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, queries[:, None], keys[None, :], stride_bs, stride_bk, length_q, length_k)
    s, _ = scores(contract(q, k), bias, scale, SOFTCAP, EXACT)
    unit = unit_of_scores(scale, SOFTCAP, bias_ptr is not None, EXACT)
    mask = _unpadded(mask_ptr, keys, length_k)
    if mask_ptr is not None:
        s = tl.where(mask[None, :], s, float("-inf"))
    if edge:
        seen = visible(queries[:, None], keys[None, :], shift, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        seen = within(seen, spans, keys[None, :])
        s = tl.where(seen, s, float("-inf"))
    # scores times the unit may overflow in fp32, and those of a softcap or a bias in any dtype
    APART: tl.constexpr = EXACT or SOFTCAP is not None or bias_ptr is not None
    p, decay, total, row_max = online_softmax(s, total, row_max, unit, APART)
    if not values_first(D, DV):
        v = load_parts(v_ptr + first * STRIDE_V, rows, STRIDE_V, mask, DV)  # zero where masked: there may be NaN
    acc = add_product(scale_parts(acc, decay[:, None]), p, v)
    return acc, total, row_max


@triton.jit
def _store_sums(lse_ptr, sums_ptr, place, count, mask, row_max, log_sum):
    """Store the lse of rows, and its two parts, each where there is memory for it."""
    if lse_ptr is not None:
        tl.store(lse_ptr + place, row_max + log_sum * LN2, mask=mask)
    if sums_ptr is not None:
        tl.store(sums_ptr + place, row_max, mask=mask)
        tl.store(sums_ptr + count + place, log_sum, mask=mask)


@triton.jit(do_not_specialize=["B", "S", "SK", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, bias_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr, spans_ptr, out_ptr,
    lse_ptr, sums_ptr, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_bb, stride_bh, stride_bs, stride_bk, B, S, SK, count, blocks, heads_together, splits, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    PACK: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    block, head = schedule(tl.program_id(0), blocks, B * H // PACK, heads_together)
    b, h = head // (H // PACK), head % (H // PACK) * PACK
    index, row, start_q, length_q, start_k, length_k = find_rows(
        b, block, cu_q_ptr, cu_k_ptr, count, S, SK, BLOCK_M, PACK, SEQUENCES
    )
    if cu_q_ptr is not None and length_q == 0:
        return
    first, tokens, heads = row // PACK, tl.arange(0, BLOCK_M), h.to(tl.int64)
    if PACK > 1:  # a row is one of the heads that attend with a key head
        heads = h.to(tl.int64) + (row + tokens) % PACK
        tokens = (row + tokens) // PACK - first
    of_head = heads[:, None] if PACK > 1 else heads
    queries = first + tokens
    mask_q = queries < length_q
    b, hk, first_q = b.to(tl.int64), (h // (H // HK)).to(tl.int64), start_q + first
    q = load_parts(q_ptr + b * stride_qb + of_head * stride_qh + first_q * STRIDE_Q, tokens, STRIDE_Q, mask_q, D)
    k_ptr += b * stride_kb + start_k * STRIDE_K + hk * stride_kh
    v_ptr += b * stride_vb + start_k * STRIDE_V + hk * stride_vh
    bias_rows = bias_ptr if bias_ptr is None else bias_ptr + b * stride_bb + of_head * stride_bh
    mask_ptr = mask_ptr if mask_ptr is None else mask_ptr + b * SK
    shift = shift_of(offsets_ptr, index, length_q, length_k)
    spans = spans_ptr if spans_ptr is None else load_spans(spans_ptr, b, B, S, queries[:, None])
    last = tl.minimum((row + BLOCK_M - 1) // PACK, length_q - 1)
    bounds = bounds_of_spans(spans_ptr, b, B, S, first, last)
    start, end, inner_start, inner_end = visible_range(
        first + shift, last + shift, left, right, bounds, length_k, tl.program_id(1), splits, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    state = zero_parts(BLOCK_M, DV), tl.zeros((BLOCK_M,), tl.float32), row_max
    for n in tl.range(start, end, BLOCK_N):
        edge = (n < inner_start) | (n + BLOCK_N > inner_end)
        state = _attend_block(
            state, q, n, edge, k_ptr, v_ptr, bias_rows, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries,
            spans, shift, length_q, length_k, left, right, scale, SOFTCAP, HAS_LEFT, HAS_RIGHT, D, DV, BLOCK_N,
        )  # fmt: skip
    acc, total, row_max = state
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads).to(tl.float32)
    unit = unit_of_scores(scale, SOFTCAP, bias_ptr is not None, k_ptr.dtype.element_ty == tl.float32)
    factor, row_max, log_sum = finish(row_max * (unit * LN2), total, sink)
    out = scale_parts(acc, factor[:, None])
    b += tl.program_id(1).to(tl.int64) * B  # the parts of a split softmax stand one behind the other
    mask_q = tokens < length_q - first
    store_parts(out_ptr + ((b * S + first_q) * H + of_head) * DV, tokens, H * DV, mask_q, out, DV)
    place = (b * H + heads) * S + first_q + tokens
    _store_sums(lse_ptr, sums_ptr, place, tl.num_programs(1) * tl.cast(B, tl.int64) * H * S, mask_q, row_max, log_sum)


@triton.jit(do_not_specialize=["R", "S", "splits"])
def _merge_kernel(
    parts_ptr, parts_sums_ptr, sinks_ptr, out_ptr, lse_ptr, sums_ptr, R, S, H, splits, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum a row [DV] of the output from its parts, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)  # of [B, H, S]
    b, h, s = row // S // H, row // S % H, row % S
    offs, cols = tl.arange(0, SPLITS).to(tl.int64), tl.arange(0, BLOCK_D)
    maxima = tl.load(parts_sums_ptr + offs * R + row, mask=offs < splits, other=float("-inf"))
    log_sums = tl.load(parts_sums_ptr + (splits + offs) * R + row, mask=offs < splits, other=0.0)
    row_max = tl.max(maxima, 0)
    finite = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((maxima - finite) * LOG2E + log_sums)
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
    factor, row_max, log_sum = finish(row_max, tl.sum(weights, 0), sink)
    place = ((b * S + s) * H + h) * DV
    ptrs = parts_ptr + place + (offs * (R * DV))[:, None] + cols[None, :]
    parts = tl.load(ptrs, mask=(offs < splits)[:, None] & (cols < DV)[None, :], other=0.0)
    out = tl.sum(parts * (weights * factor)[:, None], 0)
    tl.store(out_ptr + place + cols, out, mask=cols < DV)
    _store_sums(lse_ptr, sums_ptr, row, R, row < R, row_max, log_sum)


def _splits(masking: Masking, tile: Tile, programs: int, device: torch.device) -> int:
    """In how many parts to take the keys, so that a few rows fill the GPU, too."""
    fill = 2 * num_programs(device, 1) // max(1, programs)
    return max(1, min(fill, masking.max_seqlen_k // (2 * tile.block_n), 64))


def fill_output(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, masking: Masking, tile: Tile, few: bool, out: Tensor,
    lse: Tensor, sums: Tensor | None,
) -> None:  # fmt: skip
    """Fill ``out`` [B, S, H, Dv], ``lse`` [B, H, S] and, if given, ``sums`` [2, B, H, S], for dense features.

    ``few``: a block holds all queries that share a key head, as rows, and several programs share the keys.
    """
    (B, S, H, _), (SK, HK, DV) = q.shape, v.shape[1:]
    pack = H // HK if few else 1
    blocks, heads = masking.num_blocks(S * pack, tile.block_m), B * H // pack
    splits = _splits(masking, tile, blocks * heads, q.device) if few else 1
    outs: tuple[Tensor | None, ...] = out, lse, sums
    if splits > 1:
        parts = lse.new_empty((splits, *out.shape)), lse.new_empty((2, splits, B, H, S))
        outs = parts[0], None, parts[1]
    launch(
        _attention_fwd_kernel,
        (blocks * heads, splits),
        (q, k, v, None if splits > 1 else sinks, *masking.pointers(), *outs),
        (*strides_of(q, k, v), *masking.bias_strides(), B, S, SK, masking.sequences, blocks,
         heads_in_l2(masking, k, v, H // HK // pack), splits, masking.left, masking.right),
        (masking.scale,),
        **masking.constants(),
        **constants_of(q, k, v),
        PACK=pack,
        **tile.constants(),
    )  # fmt: skip
    if splits > 1:
        sizes = B * H * S, S, H, splits
        constants = {"DV": DV, "BLOCK_D": next_power_of_2(DV), "SPLITS": next_power_of_2(splits)}
        launch(_merge_kernel, (B * H * S,), (*parts, sinks, out, lse, sums), sizes, **constants)
