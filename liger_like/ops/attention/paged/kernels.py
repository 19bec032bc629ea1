"""Attention over paged caches in Triton, for every GPU.

A program has rows of one sequence, for all query heads that share a key head. Sequences of few rows are split into
chunks of keys, whose size does not depend on the batch. Several chunks make a group. A program takes one chunk where
programs are few, and else a group: it joins its chunks in the order in which the merge would, so that the bits are the
same. The merge sums the groups. Other sequences take blocks of rows over all their keys. The number of rows of a
sequence decides, so that no bit of a row depends on others.

Queries are the left operand of the products. Keys on the left, loaded by TMA in persistent programs, gave wrong results
and an illegal access in an experiment; its cause is unknown, so no kernel here has that form.
"""

import triton
import triton.language as tl

from liger_like.ops.attention.paged.places import (
    count_chunks,
    count_items,
    find_item,
    items_before,
    keys_of,
    load_ids,
    place_of,
    rows_of,
)
from liger_like.ops.attention.portable.parts import (
    add_product,
    contract,
    load_parts,
    scale_parts,
    store_parts,
    values_first,
    zero_parts,
)
from liger_like.ops.attention.softmax import LN2, finish, join, online_softmax, scores, unit_of_scores
from liger_like.ops.attention.visibility import start_of, visible, visible_range


@triton.jit
def _load_keys(ptr, page, row, rows, stride_p, STRIDE: tl.constexpr, mask, WHOLE: tl.constexpr, D: tl.constexpr):
    """Load a block of keys or values in parts; WHOLE: it lies in one page, from ``row`` on."""
    if WHOLE:
        return load_parts(ptr + page * stride_p + row * STRIDE, rows, STRIDE, mask, D)
    else:
        return load_parts(ptr, page * stride_p + row * STRIDE, 1, mask, D)


@triton.jit
def _attend_block(
    state, q, qv, n, edge, low, end, queries, k_ptr, v_ptr, page, row, stride_kp, stride_vp, STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr, left, scale, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys ``n`` to n + BLOCK_N, from ``low`` and before ``end``, into running products, sums and maxima.

    With ``qv`` the values are keys, too, and are loaded once for both products.
    """
    EXACT: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    acc, total, row_max = state
    rows = tl.arange(0, BLOCK_N)
    keys = n + rows
    mask = (keys >= low) & (keys < end)  # what nobody sees may be NaN, and may have no page
    k = _load_keys(k_ptr, page, row, rows, stride_kp, STRIDE_K, mask, WHOLE, D)
    if qv is not None or values_first(D, DV):
        v = _load_keys(v_ptr, page, row, rows, stride_vp, STRIDE_V, mask, WHOLE, DV)
    products = contract(q, k)
    if qv is not None:  # as a chain, Triton would compute the first product twice and move it between warps
        products = tl.fma(contract(qv, v), 1.0, products)
    s, _ = scores(products, None, scale, SOFTCAP, EXACT)
    if edge:
        seen = visible(queries[:, None], keys[None, :], 0, end, left, 0, HAS_LEFT, True)
        s = tl.where(seen, s, float("-inf"))
    unit = unit_of_scores(scale, SOFTCAP, False, EXACT)
    p, decay, total, row_max = online_softmax(s, total, row_max, unit, EXACT or SOFTCAP is not None)
    if qv is None and not values_first(D, DV):
        v = _load_keys(v_ptr, page, row, rows, stride_vp, STRIDE_V, mask, WHOLE, DV)
    return add_product(scale_parts(acc, decay[:, None]), p, v), total, row_max


@triton.jit
def _no_keys(BLOCK_M: tl.constexpr, DV: tl.constexpr):
    """Return the products, sums and maxima of no keys."""
    return zero_parts(BLOCK_M, DV), tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), float("-inf"), tl.float32)


@triton.jit
def _fill_behind(
    cu_ptr, out_ptr, lse_ptr, item, items, end, hk, rows, B, T, HK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Store zeros for the heads ``rows`` of what follows the last sequence before ``end``, shared by ``items``."""
    mask = rows < GROUP
    heads = hk * GROUP + rows
    unseen = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for t in range(start_of(cu_ptr, B, B, T) + item, end, items):
        place = (tl.cast(t, tl.int64) * (HK * GROUP) + heads) * DV
        store_parts(out_ptr, place, 1, mask, zero_parts(BLOCK_M, DV), DV)
        tl.store(lse_ptr + heads * T + t, unseen, mask=mask)


@triton.jit(do_not_specialize=["B", "T", "N", "capacity", "chunk", "own", "splits", "height", "left"])
def _attention_paged_kernel(
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr, qv_ptr, pages_ptr, lengths_ptr, cu_ptr, sinks_ptr, out_ptr, lse_ptr,
    parts_ptr, parts_sums_ptr, stride_qh, stride_kp, stride_kh, stride_vp, stride_vh, stride_nkh, stride_nvh,
    stride_qvh, stride_pb, B, T, N, capacity, chunk, own, splits, height, left, scale, HK: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr, STRIDE_NK: tl.constexpr, STRIDE_NV: tl.constexpr, STRIDE_QV: tl.constexpr,
    PAGE: tl.constexpr, SLOTS: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr,
    FEW: tl.constexpr, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr, JOIN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows over some keys. FEW: of the sequences of at most TOKENS rows, else of the others.

    With FEW a program has ``own`` keys: a ``chunk``, or with JOIN a group of chunks. If they are not all keys of their
    sequence, it stores its products, not normalised, in its part of [programs, HK, height, DV], in fp32. The parts are
    empty if no sequence can have two, since a kernel without them would round differently.
    """
    # programs of all heads are neighbours, so that those which read the same keys find them in the L2 cache
    BLOCKS: tl.constexpr = (TOKENS * GROUP + BLOCK_M - 1) // BLOCK_M if FEW else 1  # of rows of a sequence
    item, hk = tl.program_id(0) // (HK * BLOCKS), (tl.program_id(0) // BLOCKS % HK).to(tl.int64)
    b, rank = item, tl.program_id(1)
    rows = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    if SLOTS or not FEW:
        counts = count_items(
            cu_ptr, lengths_ptr, B, T, capacity, left, own, GROUP, TOKENS, FEW, HAS_LEFT, STARTS, SLOTS, BLOCK_M,
            BLOCK_N, SEQUENCES,
        )  # fmt: skip
        b, rank = find_item(item, counts)
    start_q, length_q = rows_of(cu_ptr, b, B, T)
    start_k, length = keys_of(lengths_ptr, b, B, capacity, STARTS, SLOTS)
    if FEW and cu_ptr is not None:  # after the loads above, which then take no time of their own
        end, items = tl.where(tl.program_id(1) == 0, T, 0), tl.num_programs(0) // (HK * BLOCKS)
        _fill_behind(cu_ptr, out_ptr, lse_ptr, item, items, end, hk, rows, B, T, HK, GROUP, BLOCK_M, DV)
    if b >= B or (FEW and (length_q == 0 or length_q > TOKENS)):
        return
    shift = length - length_q
    first = 0 if FEW else rank * BLOCK_M // GROUP
    last = (length_q if FEW else tl.minimum((rank * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length_q)) - 1
    start, end, inner_start, inner_end = visible_range(
        first + shift, last + shift, left, 0, None, length, 0, 1, HAS_LEFT, True, BLOCK_N
    )
    whole = True
    if FEW:
        whole = end - start <= own
        start = start + rank * own
        end = tl.minimum(end, start + own)
        if rank > 0 and start >= end:
            return

    if not FEW:
        rows += rank * BLOCK_M
    mask_q = rows < length_q * GROUP
    heads = hk * GROUP + rows % GROUP
    tokens = tl.cast(start_q, tl.int64) + rows // GROUP
    q = load_parts(q_ptr + heads[:, None] * stride_qh, tokens, STRIDE_Q, mask_q, D)
    qv = None
    if qv_ptr is not None:
        qv = load_parts(qv_ptr + heads[:, None] * stride_qvh, tokens, STRIDE_QV, mask_q, DV)
    queries = rows // GROUP + shift
    low = first + shift - left if HAS_LEFT else 0
    k_ptr += hk * stride_kh
    v_ptr += hk * stride_vh
    cached = end if new_k_ptr is None else tl.minimum(end, shift)  # the keys before this one come from the cache
    WHOLE: tl.constexpr = pages_ptr is None or (not SLOTS and PAGE % BLOCK_N == 0)
    keys = start if WHOLE else start + tl.arange(0, BLOCK_N)
    ids = load_ids(pages_ptr, b, start_k, stride_pb, keys, keys < cached, PAGE, SLOTS)
    unit = unit_of_scores(scale, SOFTCAP, False, k_ptr.dtype.element_ty == tl.float32)
    state, joined = _no_keys(BLOCK_M, DV), _no_keys(BLOCK_M, DV)
    next_chunk = start + chunk
    for n in tl.range(start, cached, BLOCK_N):
        if JOIN and n == next_chunk:
            joined, state = join(joined, state, unit), _no_keys(BLOCK_M, DV)
            next_chunk += chunk
        keys = n if WHOLE else n + tl.arange(0, BLOCK_N)
        page, row = place_of(ids, keys, pages_ptr is not None, PAGE, SLOTS)
        page = tl.minimum(tl.maximum(page, 0), N - 1)  # wrong pages cannot lead out of the cache
        ahead = keys + BLOCK_N  # loaded one block before use
        ids = load_ids(pages_ptr, b, start_k, stride_pb, ahead, ahead < cached, PAGE, SLOTS)
        edge = (n < inner_start) | (n + BLOCK_N > tl.minimum(inner_end, cached))
        state = _attend_block(
            state, q, qv, n, edge, low, cached, queries, k_ptr, v_ptr, page, row, stride_kp, stride_vp, STRIDE_K,
            STRIDE_V, left, scale, SOFTCAP, HAS_LEFT, WHOLE, D, DV, BLOCK_N,
        )  # fmt: skip
    if new_k_ptr is not None:
        n_new = tl.maximum(start, shift)
        if FEW:  # the new keys of a chunk are no more than a block
            n_new -= (n_new - start) % chunk
        for n in tl.range(n_new, end, chunk if FEW else BLOCK_N):
            if JOIN and n == next_chunk:
                joined, state = join(joined, state, unit), _no_keys(BLOCK_M, DV)
                next_chunk += chunk
            key, stop = tl.maximum(n, shift), tl.minimum(end, n + chunk) if FEW else end
            row = tl.cast(start_q + key - shift, tl.int64)
            state = _attend_block(
                state, q, None, key, True, low, stop, queries, new_k_ptr + hk * stride_nkh, new_v_ptr + hk * stride_nvh,
                0, row, 0, 0, STRIDE_NK, STRIDE_NV, left, scale, SOFTCAP, HAS_LEFT, True, D, DV, BLOCK_N,
            )  # fmt: skip
    if JOIN:
        state = join(joined, state, unit)
    acc, total, row_max = state
    if whole:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + heads).to(tl.float32)
        factor, row_max, log_sum = finish(row_max * (unit * LN2), total, sink)
        acc = scale_parts(acc, factor[:, None])
        store_parts(out_ptr, (tokens * (HK * GROUP) + heads) * DV, 1, mask_q, acc, DV)
        tl.store(lse_ptr + heads * T + tokens, row_max + log_sum * LN2, mask=mask_q)
    else:
        part = item if SLOTS else b * splits + rank
        place = (tl.cast(part, tl.int64) * HK + hk) * height + rows
        mask_q = mask_q & (rows < height)
        store_parts(parts_ptr, place * DV, 1, mask_q, acc, DV)
        tl.store(parts_sums_ptr + place * 2, row_max, mask=mask_q)
        tl.store(parts_sums_ptr + place * 2 + 1, total, mask=mask_q)


@triton.jit
def _load_part(
    ptr, sums_ptr, part, parts, inside, hk, r, height, HK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a row's products, sums and maxima from each ``part`` [BLOCK_C] that is ``inside``."""
    part = tl.minimum(part, parts - 1).to(tl.int64)  # starts that decrease cannot lead out of the parts
    place = (part * HK + hk) * height + r
    row_max = tl.load(sums_ptr + place * 2, mask=inside, other=float("-inf"))
    total = tl.load(sums_ptr + place * 2 + 1, mask=inside, other=0.0)
    cols = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (cols < DV)[None, :]
    acc = tl.load(ptr + place[:, None] * DV + cols[None, :], mask=mask, other=0.0)
    return (acc,), total, row_max


@triton.jit(do_not_specialize=["B", "T", "capacity", "parts", "own", "together", "splits", "height", "left"])
def _attention_paged_merge_kernel(
    parts_ptr, parts_sums_ptr, sinks_ptr, lengths_ptr, cu_ptr, out_ptr, lse_ptr, B, T, capacity, parts, own, together,
    splits, height, left, scale, HK: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum a row of a sequence from its parts: each is a group, or a chunk of a group of TOGETHER."""
    row = tl.program_id(0)
    r, hk, b = row % height, row // height % HK, row // height // HK
    start_q, length_q = rows_of(cu_ptr, b, B, T)
    _, length = keys_of(lengths_ptr, b, B, capacity, STARTS, SLOTS)
    count = count_chunks(length_q, length, left, own, HAS_LEFT, BLOCK_N)
    if count == 1 or length_q > TOKENS or r >= length_q * GROUP:
        return
    first = b * splits
    if SLOTS:
        first = items_before(b, count_items(
            cu_ptr, lengths_ptr, B, T, capacity, left, own, GROUP, TOKENS, True, HAS_LEFT, STARTS, SLOTS, 16, BLOCK_N,
            SEQUENCES,
        ))  # fmt: skip
    cols = tl.arange(0, BLOCK_D)
    unit = unit_of_scores(scale, SOFTCAP, False, out_ptr.dtype.element_ty == tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total, row_max = 0.0, float("-inf")
    for c in range(0, count, BLOCK_C * together):
        offs = c + tl.arange(0, BLOCK_C) * together
        groups = _load_part(
            parts_ptr, parts_sums_ptr, first + offs, parts, offs < count, hk, r, height, HK, DV, BLOCK_D
        )
        if TOGETHER > 1 and together > 1:
            for j in tl.static_range(1, TOGETHER):
                chunks = _load_part(
                    parts_ptr, parts_sums_ptr, first + offs + j, parts, offs + j < count, hk, r, height, HK, DV, BLOCK_D
                )
                groups = join(groups, chunks, unit)
        x, totals, maxima = groups
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2((maxima - finite) * unit)
        decay = tl.exp2((row_max - finite) * unit)
        acc = acc * decay + tl.sum(x[0] * weights[:, None], 0)
        total, row_max = total * decay + tl.sum(totals * weights, 0), new_max
    token, head = tl.cast(start_q + r // GROUP, tl.int64), hk * GROUP + r % GROUP
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    factor, row_max, log_sum = finish(row_max * (unit * LN2), total, sink)
    tl.store(out_ptr + (token * (HK * GROUP) + head) * DV + cols, acc * factor, mask=cols < DV)
    tl.store(lse_ptr + tl.cast(head, tl.int64) * T + token, row_max + log_sum * LN2)
