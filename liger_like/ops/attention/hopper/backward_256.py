"""The backward of ``_backward`` for heads of 192 and 256 on Hopper, in Gluon: one warp loads by TMA, two warp groups
multiply.

Two kernels, as the portable backward has them, so that nothing is added up in memory: one pass would be bound by what
goes through shared memory. For dk and dv a program owns 64 keys of a key head: one warp group makes p and sums dv, the
other makes ds and sums dk. p goes from the first to the second by way of shared memory, in the dtype of the tensors and
times the slopes of a softcap, so that only the first knows of masks. For dq a program owns 128 queries of a head, 64
for each warp group, which need nothing of each other. In both the scores of a block are multiplied while what was made
of the block before is summed.
"""

import torch
from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.buffers import (
    ROWS,
    barriers,
    buffers,
    descriptor,
    fill,
    load_rows,
    parts_of,
    rows_of,
)
from liger_like.ops.attention.hopper.products import add_product, contract, store_parts, wait_for, zero_parts
from liger_like.ops.attention.hopper.rows import bounds, hide, keys_of, tile_of
from liger_like.ops.attention.masking import Masking, section_of, section_of_keys
from liger_like.ops.attention.softmax import LOG2E, scores, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    cp_async,
    cp_async_arrive,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from liger_like.runtime.launcher import launch

STAGES = gl.constexpr(2)
BLOCK_N = ROWS.value  # keys of a program for dk and dv
BLOCK_M = 2 * ROWS.value  # queries of one for dq
# widths of heads -> buffers for values in the kernel for dq
STAGES_V = {(192, 128): 2, (256, 256): 1}


@gluon.jit
def _fill(desc, rows, h, m, bufs, ptr, numbers, ring, use):
    """Load rows, and with them a number of each, into the buffers that the use-th filling of a ring goes to.

    Those behind the last, which are zeros, have the number of the last: that of another sequence may be NaN.
    """
    full, empty = ring
    s = use % STAGES
    mbarrier.wait(empty.index(s), use // STAGES & 1 ^ 1)
    # not by TMA, for which a packed sequence would have to start at a multiple of 16 bytes
    offs = m + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    cp_async(numbers.index(s), ptr + gl.minimum(offs, rows[1] - 1))
    cp_async_arrive(full.index(s), increment_count=False)
    load_rows(desc, rows, h, m, bufs, s, full.index(s), STAGES)


@gluon.jit
def _load_queries(block, descs, rows_ptr, bufs, kv_full, q_ring, dout_ring, B, PADDED, H: gl.constexpr):
    b, hk, row, end_k, end_q, _, start, end, _, _, first_head, heads = block
    q_desc, k_desc, v_desc, dout_desc = descs
    q_s, k_s, v_s, dout_s, lse_s, delta_s = bufs
    keys = b, end_k
    queries = b, end_q
    load_rows(k_desc, keys, hk, row, k_s, 0, kv_full, 1)
    load_rows(v_desc, keys, hk, row, v_s, 0, kv_full, 1)
    use = 0
    for h in range(first_head, first_head + heads):
        lse_ptr = rows_ptr + (b * H + h).to(gl.int64) * PADDED
        delta_ptr = lse_ptr + B.to(gl.int64) * H * PADDED
        for m in range(start, end, ROWS):
            _fill(q_desc, queries, h, m, q_s, lse_ptr, lse_s, q_ring, use)
            _fill(dout_desc, queries, h, m, dout_s, delta_ptr, delta_s, dout_ring, use)
            use += 1


@gluon.jit
def _sum_dv(
    block, dv_ptr, spans_ptr, bufs, p_s, kv_full, q_ring, dout_ring, p_full, B, SK, left, right, scale,
    HK: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    b, hk, row, end_k, end_q, shift, start, end, inner_start, inner_end, _, heads = block
    q_s, k_s, _, dout_s, lse_s, _ = bufs
    q_full, q_empty = q_ring
    dout_full, dout_empty = dout_ring
    dtype: gl.constexpr = q_s.dtype
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    layout_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dout_s.shape[-1], 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout_v, 2)
    none = gl.zeros([ROWS, ROWS], gl.float32, layout_s)
    dv = zero_parts(dout_s, STAGES, layout_v)
    unit = unit_of_scores(scale, SOFTCAP, False)
    keys = (row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s)))[:, None]
    spans = None
    if spans_ptr is not None:
        spans = load_spans(spans_ptr, b.to(gl.int64), B, SK, keys)
    # the parts of a split group stand one behind the other
    dv_ptr += (((gl.program_id(1) * B + b).to(gl.int64) * SK + row) * HK + hk) * DV
    length = end_k - row
    limits = bounds(keys - shift, right, left, spans, end_q, HAS_RIGHT, HAS_LEFT)
    steps = heads * gl.cdiv(end - start, ROWS)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    s_acc = contract(parts_of(k_s, 0, 1), parts_of(q_s, 0, STAGES), none)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    m = start
    for use in range(0, steps):
        s = use % STAGES
        lse = lse_s.index(s).load(gl.SliceLayout(0, layout_s)) * LOG2E
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[None, :])
        edge = (m < inner_start) | (m + ROWS > inner_end)
        if SOFTCAP is not None:
            edge = True  # a branch would keep both p and slopes in registers
        if edge:
            p = hide(p, m, limits)
        p_operand = gl.convert_layout(p.to(dtype), operand)
        # free since the queries came here, for which the other group had to be done with those before
        p_s.index(s).store((p * slopes).to(dtype))
        mbarrier.arrive(p_full.index(s), count=1)
        mbarrier.arrive(q_empty.index(s), count=1)
        mbarrier.wait(dout_full.index(s), use // STAGES & 1)
        dv = add_product(dv, p_operand, parts_of(dout_s, s, STAGES))
        m += ROWS
        m = gl.where(m < end, m, start)
        t = (use + 1) % STAGES
        mbarrier.wait(q_full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        q = parts_of(q_s, t, STAGES)
        # an index that the compiler does not know to be 0: else what describes k to the tensor cores stays in registers
        s_acc = contract(parts_of(k_s, use >> 30, 1), q, none)
        dv = wait_for(dv, len(q))
        mbarrier.arrive(dout_empty.index(s), count=1)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    store_parts(dv_ptr, dv, length, HK, DV)


@gluon.jit
def _sum_dk(
    block, dk_ptr, bufs, p_s, kv_full, q_ring, dout_ring, p_full, B, SK, scale, HK: gl.constexpr, D: gl.constexpr
):
    b, hk, row, end_k, _, _, start, end, _, _, _, heads = block
    q_s, _, v_s, dout_s, _, delta_s = bufs
    q_full, q_empty = q_ring
    dout_full, dout_empty = dout_ring
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    layout_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, q_s.shape[-1], 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout_k, 2)
    none = gl.zeros([ROWS, ROWS], gl.float32, layout_s)
    dk = zero_parts(q_s, STAGES, layout_k)
    dk_ptr += (((gl.program_id(1) * B + b).to(gl.int64) * SK + row) * HK + hk) * D
    length = end_k - row
    steps = heads * gl.cdiv(end - start, ROWS)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(dout_full.index(0), 0, pred=steps > 0)
    dp = contract(parts_of(v_s, 0, 1), parts_of(dout_s, 0, STAGES), none)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    for use in range(0, steps):
        s = use % STAGES
        phase = use // STAGES & 1
        delta = delta_s.index(s).load(gl.SliceLayout(0, layout_s))
        mbarrier.wait(p_full.index(s), phase)
        p = p_s.index(s).load(layout_s)
        dp -= delta[None, :]
        ds = (p.to(gl.float32) * dp).to(p.dtype)
        mbarrier.arrive(dout_empty.index(s), count=1)
        mbarrier.wait(q_full.index(s), phase)
        dk = add_product(dk, gl.convert_layout(ds, operand), parts_of(q_s, s, STAGES))
        t = (use + 1) % STAGES
        mbarrier.wait(dout_full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        dout = parts_of(dout_s, t, STAGES)
        dp = contract(parts_of(v_s, use >> 30, 1), dout, none)
        dk = wait_for(dk, len(dout))
        mbarrier.arrive(q_empty.index(s), count=1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    store_parts(dk_ptr, dk, length, HK, D, scale)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "section", "splits", "left", "right"])
def _attention_dkv_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK, PADDED, count,
    blocks, section, splits, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = -(-D // q_desc.block_type.shape[-1])
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    q_s = buffers(q_desc, STAGES * PARTS)
    k_s = buffers(k_desc, PARTS)
    v_s = buffers(v_desc, 1)
    dout_s = buffers(dout_desc, STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, ROWS], p_layout)
    kv_full = barriers(1, 2).index(0)
    # full: lse or delta by the loading warp's threads, q or dout by one of them
    q_ring = barriers(STAGES, 33), barriers(STAGES, 2)
    dout_ring = barriers(STAGES, 33), barriers(STAGES, 2)
    p_full = barriers(STAGES, 1)
    fence_async_shared()
    pointers = cu_q_ptr, cu_k_ptr, spans_ptr
    sizes = SK, count, blocks, section, splits
    block = keys_of(pointers, sizes, B, S, left, right, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, ROWS, ROWS)
    descs = q_desc, k_desc, v_desc, dout_desc
    bufs = q_s, k_s, v_s, dout_s, lse_s, delta_s
    gl.warp_specialize(
        [
            (_sum_dv, (block, dv_ptr, spans_ptr, bufs, p_s, kv_full, q_ring, dout_ring, p_full, B, SK, left, right,
                       scale, HK, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_sum_dk, (block, dk_ptr, bufs, p_s, kv_full, q_ring, dout_ring, p_full, B, SK, scale, HK, D)),
            (_load_queries, (block, descs, rows_ptr, bufs, kv_full, q_ring, dout_ring, B, PADDED, H)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


@gluon.jit
def _load_keys(tile, descs, bufs, q_full, dout_full, k_ring, v_ring, H: gl.constexpr, HK: gl.constexpr):
    b, h, row, start_q, length_q, start_k, length_k, start, end, _, _ = tile
    q_desc, k_desc, v_desc, dout_desc = descs
    q_s, k_s, v_s, dout_s = bufs
    k_full, k_empty = k_ring
    v_full, v_empty = v_ring
    hk = h // (H // HK)
    queries = b, start_q + length_q
    keys = b, start_k + length_k
    load_rows(q_desc, queries, h, start_q + row, q_s, 0, q_full, 1)
    for use in range(0, gl.cdiv(end - start, ROWS)):
        n = start_k + start + use * ROWS
        fill(k_desc, keys, hk, n, k_s, k_full, k_empty, use, STAGES)
        if use == 0:  # behind what is needed first
            load_rows(dout_desc, queries, h, start_q + row, dout_s, 0, dout_full, 1)
        fill(v_desc, keys, hk, n, v_s, v_full, v_empty, use, v_s.shape[0])


@gluon.jit
def _sum_dq(
    g: gl.constexpr, tile, dq_ptr, rows_ptr, spans_ptr, bufs, q_full, dout_full, k_ring, v_ring, B, S, PADDED, left,
    right, scale, H: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    b, h, row, start_q, length_q, _, length_k, start, end, inner_start, inner_end = tile
    q_s, k_s, v_s, dout_s = bufs
    k_full, k_empty = k_ring
    v_full, v_empty = v_ring
    STAGES_V: gl.constexpr = v_s.shape[0]
    dtype: gl.constexpr = q_s.dtype
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    layout_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, q_s.shape[-1], 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout_q, 2)
    none = gl.zeros([ROWS, ROWS], gl.float32, layout_s)
    row += g * ROWS
    queries = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s))
    spans = None
    if spans_ptr is not None:
        spans = load_spans(spans_ptr, b.to(gl.int64), B, S, queries[:, None])
    limits = bounds((queries + length_k - length_q)[:, None], left, right, spans, length_k, HAS_LEFT, HAS_RIGHT)
    dq_ptr += ((b.to(gl.int64) * S + start_q + row) * H + h) * D
    length = length_q - row
    lse_ptrs = rows_ptr + (b * H + h).to(gl.int64) * PADDED + start_q + queries
    mask = queries < length_q  # there may be no memory so far behind
    lse = gl.load(lse_ptrs, mask=mask, other=float("inf")) * LOG2E
    delta = gl.load(lse_ptrs + B.to(gl.int64) * H * PADDED, mask=mask, other=0.0)
    unit = unit_of_scores(scale, SOFTCAP, False)
    dq = zero_parts(q_s, 1, layout_q)
    steps = gl.cdiv(end - start, ROWS)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(dout_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s_acc = contract(rows_of(parts_of(q_s, 0, 1), g * ROWS), parts_of(k_s, 0, STAGES), none)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    for use in range(0, steps):
        n = start + use * ROWS
        s = use % STAGES
        mbarrier.wait(v_full.index(use % STAGES_V), use // STAGES_V & 1)
        # an index that the compiler does not know to be 0: else what describes v, dout and q stays in registers
        zero = use >> 30
        v = parts_of(v_s, zero + use % STAGES_V, STAGES_V)
        dp = contract(rows_of(parts_of(dout_s, zero, 1), g * ROWS), v, none)
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[:, None]) * slopes
        if (n < inner_start) | (n + ROWS > inner_end):
            p = hide(p, n, limits)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_empty.index(use % STAGES_V), count=1)
        ds = (p * (dp - delta[:, None])).to(dtype)
        dq = add_product(dq, gl.convert_layout(ds, operand), parts_of(k_s, s, STAGES))
        t = (use + 1) % STAGES
        mbarrier.wait(k_full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        q = rows_of(parts_of(q_s, zero, 1), g * ROWS)
        s_acc = contract(q, parts_of(k_s, t, STAGES), none)
        dq = wait_for(dq, len(q))
        mbarrier.arrive(k_empty.index(s), count=1)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    store_parts(dq_ptr, dq, length, H, D, scale)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "section", "left", "right"])
def _attention_dq_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK, PADDED, count, blocks,
    section, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = -(-D // q_desc.block_type.shape[-1])
    q_s = buffers(q_desc, PARTS)
    k_s = buffers(k_desc, STAGES * PARTS)
    v_s = buffers(v_desc, STAGES_V)
    dout_s = buffers(dout_desc, 1)
    q_full = barriers(1, 1).index(0)
    dout_full = barriers(1, 1).index(0)
    k_ring = barriers(STAGES, 1), barriers(STAGES, 2)
    v_ring = barriers(STAGES_V, 1), barriers(STAGES_V, 2)
    fence_async_shared()
    pointers = cu_q_ptr, cu_k_ptr, spans_ptr
    sizes = SK, count, blocks, section
    tile = tile_of(
        gl.program_id(0), pointers, sizes, B, S, left, right, H, HAS_LEFT, HAS_RIGHT, SEQUENCES, 2 * ROWS, ROWS
    )
    descs = q_desc, k_desc, v_desc, dout_desc
    bufs = q_s, k_s, v_s, dout_s
    gl.warp_specialize(
        [
            (_sum_dq, (0, tile, dq_ptr, rows_ptr, spans_ptr, bufs, q_full, dout_full, k_ring, v_ring, B, S, PADDED,
                       left, right, scale, H, D, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_sum_dq, (1, tile, dq_ptr, rows_ptr, spans_ptr, bufs, q_full, dout_full, k_ring, v_ring, B, S, PADDED,
                       left, right, scale, H, D, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_load_keys, (tile, descs, bufs, q_full, dout_full, k_ring, v_ring, H, HK)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """dk and dv [splits, B, Sk, Hk, D] get what the parts of the query heads of a key head give."""
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    width, width_v = widths_of(D, DV)
    blocks = masking.num_blocks(SK, BLOCK_N)
    launch(
        _attention_dkv_hopper_kernel,
        (blocks * B * HK, splits),
        (rows, dk, dv, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans),
        (B, S, SK, rows.shape[3], masking.sequences, blocks, section_of_keys(masking, SK, BLOCK_N, k.device), splits,
         masking.left, masking.right),
        (masking.scale,),
        tuple(descriptor(x, 64, n, masking) for x, n in ((q, width), (k, width), (v, width_v), (dout, width_v))),
        H=H,
        HK=HK,
        D=D,
        DV=DV,
        **masking.constants(),
        num_warps=4,
    )  # fmt: skip


def make_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking) -> Tensor:
    """The gradient of q."""
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    widths = width, width_v = widths_of(D, DV)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks = masking.num_blocks(S, BLOCK_M)
    launch(
        _attention_dq_hopper_kernel,
        (blocks * B * H,),
        (rows, dq, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans),
        (B, S, SK, rows.shape[3], masking.sequences, blocks, section_of(k, v, masking.max_seqlen_k, H // HK),
         masking.left, masking.right),
        (masking.scale,),
        (descriptor(q, BLOCK_M, width, masking), descriptor(k, BLOCK_N, width, masking),
         descriptor(v, BLOCK_N, width_v, masking), descriptor(dout, BLOCK_M, width_v, masking)),
        H=H,
        HK=HK,
        D=D,
        **masking.constants(),
        STAGES_V=STAGES_V[widths],
        num_warps=4,
    )  # fmt: skip
    return dq
