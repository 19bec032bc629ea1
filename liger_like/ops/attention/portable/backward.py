"""Attention backward: dv_j = sum_i p_ij do_i and, with ds_ij = p_ij (do_i . v_j - delta_i), delta_i = do_i . o_i,
dq_i = scale sum_j ds_ij k_j and dk_j = scale sum_i ds_ij q_i; p is formed again from q, k and lse.

For dk and dv a program owns a block of keys and sums over the queries that see it, those of all query heads of its key
head; for dq one owns a block of queries. Nothing is added up in memory, so a repetition gives the same bits. So does
``_backward_hopper_256``; ``_backward_hopper`` makes all in one pass where that is not asked for.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from liger_like.ops.attention.choice import BACKWARD, BACKWARD_256, hopper_kernels
from liger_like.ops.attention.flops import backward_flops
from liger_like.ops.attention.masking import (
    MASKING_SCHEMA,
    Masking,
    constants_of,
    section_of,
    section_of_keys,
    strides_of,
)
from liger_like.ops.attention.portable.bias import attention_dbias
from liger_like.ops.attention.portable.parts import (
    add_product,
    less_delta,
    load_bias,
    load_parts,
    load_rest,
    probabilities,
    scale_parts,
    store_parts,
    zero_parts,
)
from liger_like.ops.attention.softmax import LOG2E
from liger_like.ops.attention.tiles import tile_for
from liger_like.ops.attention.visibility import (
    bounds_of_spans,
    find_rows,
    load_spans,
    schedule,
    shift_of,
    visible,
    within,
    zones,
)
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import dense, packed
from liger_like.runtime.registry import op
from liger_like.runtime.support import num_programs

ROWS = 128  # at most so many queries in a block


@triton.jit(do_not_specialize=["B", "S", "PADDED", "blocks"])
def _delta_kernel(
    dout_ptr, out_ptr, lse_ptr, sums_ptr, dlse_ptr, sinks_ptr, rows_ptr, dsinks_ptr, stride_b, stride_s, stride_h,
    stride_lb, stride_lh, stride_ls, B, S, PADDED, H, blocks, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // H, head % H
    rows, cols = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, BLOCK_D)
    mask = rows < S
    both = mask[:, None] & (cols < DV)[None, :]
    dout_ptrs = dout_ptr + b * stride_b + h * stride_h + rows[:, None] * stride_s + cols[None, :]
    out_ptrs = out_ptr + ((b * S + rows) * H + h)[:, None] * DV + cols[None, :]
    dout = tl.load(dout_ptrs, mask=both, other=0.0).to(tl.float32)
    delta = tl.sum(dout * tl.load(out_ptrs, mask=both, other=0.0).to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + b * stride_lb + h * stride_lh + rows * stride_ls, mask=mask, other=0.0)
    count = tl.cast(B, tl.int64) * H
    most_ptr = lse_ptr if sums_ptr is None else sums_ptr
    most = tl.load(most_ptr + head * S + rows, mask=mask, other=float("-inf"))
    none = most == float("-inf")
    most, delta = tl.where(none, float("inf"), most), tl.where(none, 0.0, delta)
    rows_ptr += head * PADDED + rows
    inside, rest = rows < PADDED, 0.0
    tl.store(rows_ptr, most, mask=inside)
    tl.store(rows_ptr + count * PADDED, delta, mask=inside)
    if sums_ptr is not None:
        rest = tl.load(sums_ptr + (count + head) * S + rows, mask=mask, other=0.0)
        tl.store(rows_ptr + 2 * count * PADDED, rest, mask=inside)
    if sinks_ptr is not None:
        p = tl.exp2((tl.load(sinks_ptr + h).to(tl.float32) - most) * LOG2E - rest)
        tl.store(dsinks_ptr + tl.program_id(0), -tl.sum(p * delta, 0))


@triton.jit
def _add_queries(
    state, k, v, m, edge, q_ptr, dout_ptr, rows_ptr, count, bias_ptr, STRIDE_Q, STRIDE_D, stride_bs, stride_bk,
    keys, seen_keys, spans, shift, length_q, length_k, left, right, scale, SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, APART: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what the block of queries at ``m`` gives to dk and dv."""
    dk, dv = state
    rows, first = tl.arange(0, BLOCK_M), tl.cast(m, tl.int64)
    queries = m + rows
    mask = queries < length_q
    most = tl.load(rows_ptr + first + rows)  # before the wait for what is loaded ahead
    rest = load_rest(rows_ptr + first + rows, count, APART)
    q = load_parts(q_ptr + first * STRIDE_Q, rows, STRIDE_Q, mask, D)
    dout = load_parts(dout_ptr + first * STRIDE_D, rows, STRIDE_D, mask, DV)
    bias = None
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, queries[None, :], keys[:, None], stride_bs, stride_bk, length_q, length_k)
    p, slopes = probabilities(k, q, bias, most[None, :], rest if rest is None else rest[None, :], scale, SOFTCAP)
    if edge:
        seen = visible(queries[None, :], keys[:, None], shift, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        seen = within(seen, spans, queries[None, :])
        if seen_keys is not None:
            seen = seen & seen_keys[:, None]
        p = tl.where(seen & mask[None, :], p, 0.0)
    dv, p = add_product(dv, p, dout), p * slopes
    if PACKED:
        rows = tl.minimum(rows, length_q - 1 - m)  # 0 times the delta of the next sequence may be NaN
    delta = tl.load(rows_ptr + count + first + rows)  # during that product
    ds = p * less_delta(v, dout, delta[None, :])
    return add_product(dk, ds, q), dv


@triton.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "section", "splits", "left", "right"])
def _attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, rows_ptr, bias_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr, spans_ptr,
    dk_ptr, dv_ptr, stride_qb, stride_qh, stride_kb, stride_kh,
    stride_vb, stride_vh, stride_db, stride_dh, stride_bb, stride_bh, stride_bs, stride_bk,
    B, S, SK, PADDED, count, blocks, section, splits, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_D: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SEQUENCES: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, head = schedule(tl.program_id(0), blocks, B * HK, section)
    b, hk = head // HK, (head % HK).to(tl.int64)
    if HAS_RIGHT or spans_ptr is not None:
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
    start, end, inner_start, inner_end = zones(
        row - shift, last - shift, right, left, bounds, length_q, 0, 1, HAS_RIGHT, HAS_LEFT, BLOCK_M
    )
    seen_keys = mask if mask_ptr is not None else None
    state = zero_parts(BLOCK_N, D), zero_parts(BLOCK_N, DV)
    count_rows = tl.cast(B, tl.int64) * H * PADDED
    group = H // HK
    share = tl.cdiv(group, splits)
    first_head = hk * group + tl.program_id(1) * share
    for i in tl.range(0, tl.minimum(share, group - tl.program_id(1) * share)):
        h = first_head + i
        q_head = q_ptr + b * stride_qb + start_q * STRIDE_Q + h * stride_qh
        dout_head = dout_ptr + b * stride_db + start_q * STRIDE_D + h * stride_dh
        rows_head = rows_ptr + (b * H + h) * PADDED + start_q
        bias_head = bias_ptr if bias_ptr is None else bias_ptr + b * stride_bb + h * stride_bh
        for m in tl.range(start, end, BLOCK_M):
            edge = unseen | (m < inner_start) | (m + BLOCK_M > inner_end)
            state = _add_queries(
                state, k, v, m, edge, q_head, dout_head, rows_head, count_rows, bias_head, STRIDE_Q, STRIDE_D,
                stride_bs, stride_bk, keys, seen_keys, spans, shift, length_q, length_k, left, right, scale, SOFTCAP,
                HAS_LEFT, HAS_RIGHT, D, DV, APART, cu_k_ptr is not None, BLOCK_M,
            )  # fmt: skip
    dk, dv = state
    b += tl.program_id(1).to(tl.int64) * B  # the parts of a split group stand one behind the other
    place, mask = (b * SK + first_k) * HK + hk, rows < length_k - row
    store_parts(dk_ptr + place * D, rows, HK * D, mask, scale_parts(dk, scale), D)
    store_parts(dv_ptr + place * DV, rows, HK * DV, mask, dv, DV)


@triton.jit
def _add_keys(
    dq, q, dout, n, edge, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries, most,
    rest, delta, spans, shift, length_q, length_k, left, right, scale, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr,
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
    p, slopes = probabilities(q, k, bias, most[:, None], rest if rest is None else rest[:, None], scale, SOFTCAP)
    if mask_ptr is not None:
        p = tl.where(mask[None, :], p, 0.0)
    if edge:
        seen = visible(queries[:, None], keys[None, :], shift, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(within(seen, spans, keys[None, :]), p, 0.0)
    ds = p * slopes * less_delta(dout, v, delta[:, None])
    return add_product(dq, ds, k)


@triton.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "section", "left", "right"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, rows_ptr, bias_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr, spans_ptr, dq_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_db, stride_dh, stride_bb, stride_bh, stride_bs, stride_bk,
    B, S, SK, PADDED, count, blocks, section, left, right, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_D: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SEQUENCES: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, head = schedule(tl.program_id(0), blocks, B * H, section)
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
    rows_ptr += (b * H + h) * PADDED + first_q
    count_rows = tl.cast(B, tl.int64) * H * PADDED
    most, delta = tl.load(rows_ptr + rows), tl.load(rows_ptr + count_rows + rows)
    rest = load_rest(rows_ptr + rows, count_rows, APART)
    k_ptr += b * stride_kb + start_k * STRIDE_K + hk * stride_kh
    v_ptr += b * stride_vb + start_k * STRIDE_V + hk * stride_vh
    bias_ptr = bias_ptr if bias_ptr is None else bias_ptr + b * stride_bb + h * stride_bh
    mask_ptr = mask_ptr if mask_ptr is None else mask_ptr + b * SK
    shift = shift_of(offsets_ptr, index, length_q, length_k)
    last = tl.minimum(row + BLOCK_M, length_q) - 1
    spans = spans_ptr if spans_ptr is None else load_spans(spans_ptr, b, B, S, queries[:, None])
    bounds = bounds_of_spans(spans_ptr, b, B, S, row, last)
    start, end, inner_start, inner_end = zones(
        row + shift, last + shift, left, right, bounds, length_k, 0, 1, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    dq = zero_parts(BLOCK_M, D)
    for n in tl.range(start, end, BLOCK_N):
        edge = (n < inner_start) | (n + BLOCK_N > inner_end)
        dq = _add_keys(
            dq, q, dout, n, edge, k_ptr, v_ptr, bias_ptr, mask_ptr, STRIDE_K, STRIDE_V, stride_bs, stride_bk, queries,
            most, rest, delta, spans, shift, length_q, length_k, left, right, scale, SOFTCAP, HAS_LEFT, HAS_RIGHT, D,
            DV, BLOCK_N,
        )  # fmt: skip
    place = (b * S + first_q) * H + h
    store_parts(dq_ptr + place * D, rows, H * D, rows < length_q - row, scale_parts(dq, scale), D)


def _group_splits(programs: int, group: int, device: torch.device) -> int:
    """In how many parts to take the query heads of a key head, so that a few key heads fill the GPU, too."""
    return max(1, min(group, num_programs(device, 1) // max(1, programs)))


def _spans_of_keys(spans: Tensor | None, SK: int) -> Tensor | None:
    """The queries that see a key, as ``spans`` [2, B, S] has the keys that a query sees: those whose end is behind the
    key, up to the last one that starts there or before.
    """
    if spans is None:
        return None
    keys = torch.arange(SK, dtype=torch.int32, device=spans.device).repeat(*spans.shape[:2], 1)
    return torch.searchsorted(spans.flip(0), keys, right=True, out_int32=True)


def _delta_outputs(
    dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor | None, dlse: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, H, S = lse.shape
    count = 2 if sums is None or not sums.numel() else 3
    rows = lse.new_empty(count, B, H, -(-S // ROWS) * ROWS + ROWS)
    return rows, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


@op(
    "attention_delta(Tensor dout, Tensor out, Tensor lse, Tensor? sums, Tensor? dlse, Tensor? sinks)"
    " -> (Tensor rows, Tensor dsinks)",
    _delta_outputs,
)
def attention_delta(
    dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor | None, dlse: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute what the backward needs of each row, and the gradient of the sinks.

    The rows [2 or 3, B, H, more than S] in fp32 are lse, or inf where no key was seen, so that every p is 0; delta =
    sum(dout * out) - dlse; and, if ``sums`` [2, B, H, S] of ``attention_fwd`` are given, their log2, beside the
    greatest score in place of lse. Rows past S let blocks be read whole.
    """
    rows, dsinks = _delta_outputs(dout, out, lse, sums, dlse, sinks)
    B, S, H, DV = out.shape
    if not out.numel():
        return rows, dsinks.zero_()
    apart = rows.shape[0] == 3
    dout, block_d = dense(dout), next_power_of_2(DV)
    block_m = max(1, 4096 // block_d)
    blocks = -(-rows.shape[3] // block_m)
    partial = None if sinks is None else lse.new_empty(B, H, blocks)
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    launch(
        _delta_kernel,
        (B * H * blocks,),
        (dout, out, lse, sums if apart else None, dlse, packed(sinks), rows, partial),
        (*dout.stride()[:3], *strides, B, S, rows.shape[3], H, blocks),
        DV=DV,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
    )
    return rows, dsinks if partial is None else partial.sum((0, 2)).to(dsinks.dtype)


def _arguments(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking
) -> tuple[list[int], dict[str, Any]]:
    """The sizes and the constants that both kernels take."""
    strides = *strides_of(q, k, v, dout), *masking.bias_strides()
    sizes = [*strides, q.shape[0], q.shape[1], k.shape[1], rows.shape[3], masking.sequences]
    constants = {"STRIDE_D": dout.stride(1), "APART": rows.shape[0] == 3}
    return sizes, masking.constants() | constants_of(q, k, v) | constants


def _fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """dk and dv [splits, B, Sk, Hk, ...] get what the parts of the query heads of a key head give."""
    B, SK, HK, _ = k.shape
    sizes, constants = _arguments(dout, q, k, v, rows, masking)
    tile = tile_for("dkv", q, v, masking)
    blocks = masking.num_blocks(SK, tile.block_n)
    section = section_of_keys(masking, SK, tile.block_n, k.device)
    launch(
        _attention_dkv_kernel,
        (blocks * B * HK, splits),
        (q, k, v, dout, rows, *masking.pointers(), dk, dv),
        (*sizes, blocks, section, splits, masking.left, masking.right),
        (masking.scale,),
        **constants,
        **tile.constants(),
    )


def _make_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking) -> Tensor:
    """The gradient of q."""
    (B, S, H, _), HK = q.shape, k.shape[2]
    sizes, constants = _arguments(dout, q, k, v, rows, masking)
    dq, tile = torch.empty(q.shape, dtype=q.dtype, device=q.device), tile_for("dq", q, v, masking)
    blocks = masking.num_blocks(S, tile.block_m)
    launch(
        _attention_dq_kernel,
        (blocks * B * H,),
        (q, k, v, dout, rows, *masking.pointers(), dq),
        (*sizes, blocks, section_of(k, v, masking.max_seqlen_k, H // HK), masking.left, masking.right),
        (masking.scale,),
        **constants,
        **tile.constants(),
    )
    return dq


def _grads(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_spans: Tensor | None, bias: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *_, (needs_q, needs_k, needs_v, needs_bias) = args
    dq, dk, dv = (x.new_empty(x.shape if need else 0) for x, need in ((q, needs_q), (k, needs_k), (v, needs_v)))
    return dq, dk, dv, q.new_empty(0) if bias is None or not needs_bias else bias.new_empty(bias.shape)


@op(
    f"attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor rows, Tensor? key_spans, {MASKING_SCHEMA},"
    " bool deterministic, bool[4] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    _grads,
    flops=backward_flops,
)
def _attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_spans: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, deterministic, needs = args
    if not (q.numel() and k.numel()):
        empty = _grads(dout, q, k, v, rows, key_spans, options[0], needs)
        return tuple(t.zero_() for t in empty)  # type: ignore[return-value]
    dq, dk, dv, dbias = (q.new_empty(0) for _ in needs)
    masking = Masking(*options)
    dout, q, k, v = map(dense, (dout, q, k, v))
    tensors = dout, q, k, v, rows
    B, (SK, HK), group = q.shape[0], k.shape[1:3], q.shape[2] // k.shape[2]
    wants_all = needs[0] and (needs[1] or needs[2]) and not deterministic
    at_once = wants_all and hopper_kernels(BACKWARD, masking, q, k, v, dout)
    wide = hopper_kernels(BACKWARD_256, masking, q, k, v, dout)
    if needs[1] or needs[2]:
        of_keys = masking._replace(spans=key_spans)
        hopper = at_once or wide
        block_n = hopper.BLOCK_N if hopper else tile_for("dkv", q, v, masking).block_n
        splits = _group_splits(masking.num_blocks(SK, block_n) * B * HK, group, q.device)
        dtype = q.dtype if splits == 1 else torch.float32
        sums = [torch.empty((splits, *x.shape), dtype=dtype, device=x.device) for x in (k, v)]
        if at_once:
            dq = at_once.add_gradients(*tensors, of_keys, splits, *sums)
        else:
            (wide.fill_dkv if wide else _fill_dkv)(*tensors, of_keys, splits, *sums)
        whole = (x[0] if splits == 1 else x.sum(0).to(q.dtype) for x in sums)
        dk, dv = (x if need else x.new_empty(0) for x, need in zip(whole, needs[1:3], strict=True))
    if needs[0] and not at_once:
        dq = (wide.make_dq if wide else _make_dq)(*tensors, masking)
    if needs[3] and masking.bias is not None:
        dbias = attention_dbias(dout, q, k, v, rows, masking)
    return dq, dk, dv, dbias


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias, for what ``attention_delta`` gives of whole rows; k and v may be a part.

    The spans of keys are no part of the op, so that torch.compile makes them once for all layers of a model.
    """
    *options, _, needs = args
    key_spans = _spans_of_keys(Masking(*options).spans, k.shape[1]) if needs[1] or needs[2] else None
    return _attention_bwd(dout, q, k, v, rows, key_spans, *args)
