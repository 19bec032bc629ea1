"""Attention backward for heads of 192 and 256 on Hopper, in Gluon: one warp loads by TMA, and two warp groups multiply.

There are two kernels, as in the portable backward, so that nothing is added up in global memory: shared-memory traffic
would bound a single pass. ``backward_192`` has a faster kernel for dk and dv of heads of 192 without a softcap. Here,
for dk and dv a program owns 64 keys of a key head. One warp group computes p and sums dv, the other computes ds and
sums dk. p goes from the first to the second through shared memory, in the dtype of the tensors and times the slopes of
a softcap, so that only the first group needs masks. For dq a program owns 128 queries of a head, 64 for each warp
group, and the groups are independent. In both kernels the scores of a block are multiplied while the products of the
block before are summed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.buffers import Sequence, descriptor, fill, load_rows, parts_of, rows_of
from liger_like.ops.attention.hopper.key_blocks import STAGES, launch_over_keys, load_queries
from liger_like.ops.attention.hopper.products import start_add_product, start_contract, store_sums, zero_sums
from liger_like.ops.attention.hopper.rows import Problem, bounds, hide, keys_of, tile_of
from liger_like.ops.attention.masking import Masking, heads_in_l2
from liger_like.ops.attention.softmax import LOG2E, scores, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from liger_like.runtime.hopper import ROWS, Ring, barriers, buffers, sum_layout, wait_for, zero_sum
from liger_like.runtime.launcher import launch

BLOCK_N = ROWS.value  # keys of a program for dk and dv
BLOCK_M = 2 * ROWS.value  # queries of one for dq
# widths of heads -> buffers for values in the kernel for dq
STAGES_V = {(192, 128): 2, (256, 256): 1}


class DkvShared(NamedTuple):
    """Shared memory of the kernel for dk and dv: rings of q and dout, blocks of k, v and p, lse and delta per query."""

    q: Ring
    dout: Ring
    k: gl.tensor
    v: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    p: gl.tensor
    p_full: gl.tensor
    kv_full: gl.tensor


class DqShared(NamedTuple):
    """Shared memory of the kernel for dq: blocks of q and dout, and rings of k and v."""

    q: gl.tensor
    dout: gl.tensor
    k: Ring
    v: Ring
    q_full: gl.tensor
    dout_full: gl.tensor


@gluon.jit
def _sum_dv(
    block, problem, shared, dv_ptr, scale, HK: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    q_ring = shared.q
    dout_ring = shared.dout
    start = block.start
    end = block.end
    dtype: gl.constexpr = q_ring.buffers.dtype
    layout_s: gl.constexpr = sum_layout(ROWS)
    zeros = zero_sum(ROWS)
    dv = zero_sums(parts_of(dout_ring.buffers, 0, STAGES))
    unit = unit_of_scores(scale, SOFTCAP, False)
    keys = (block.row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s)))[:, None]
    spans = None
    if problem.spans_ptr is not None:
        spans = load_spans(problem.spans_ptr, block.batch.to(gl.int64), problem.B, problem.SK, keys)
    # the sums of each split have memory of their own
    dv_ptr += (
        ((gl.program_id(1) * problem.B + block.batch).to(gl.int64) * problem.SK + block.row) * HK + block.head
    ) * DV
    length = block.end_k - block.row
    limits = bounds(keys - block.shift, problem.right, problem.left, spans, block.end_q, HAS_RIGHT, HAS_LEFT)
    steps = block.heads * gl.cdiv(end - start, ROWS)
    mbarrier.wait(shared.kv_full, 0)
    mbarrier.wait(q_ring.full.index(0), 0, pred=steps > 0)
    s_acc = start_contract(parts_of(shared.k, 0, 1), parts_of(q_ring.buffers, 0, STAGES), zeros)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    m = start
    for use in range(0, steps):
        s = use % STAGES
        lse = shared.lse.index(s).load(gl.SliceLayout(0, layout_s)) * LOG2E
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[None, :])
        edge = (m < block.inner_start) | (m + ROWS > block.inner_end)
        if SOFTCAP is not None:
            edge = True  # a branch would keep both p and slopes in registers
        if edge:
            p = hide(p, m, limits)
        p_operand = p.to(dtype)
        # free since the queries came here, for which the other group had to be done with those before
        shared.p.index(s).store((p * slopes).to(dtype))
        mbarrier.arrive(shared.p_full.index(s), count=1)
        mbarrier.arrive(q_ring.empty.index(s), count=1)
        mbarrier.wait(dout_ring.full.index(s), use // STAGES & 1)
        dv = start_add_product(dv, p_operand, parts_of(dout_ring.buffers, s, STAGES))
        m += ROWS
        m = gl.where(m < end, m, start)
        t = (use + 1) % STAGES
        mbarrier.wait(q_ring.full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        q = parts_of(q_ring.buffers, t, STAGES)
        # an index that the compiler does not know to be 0: else what describes k to the tensor cores stays in registers
        s_acc = start_contract(parts_of(shared.k, use >> 30, 1), q, zeros)
        dv = wait_for(dv, len(q))
        mbarrier.arrive(dout_ring.empty.index(s), count=1)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    store_sums(dv_ptr, dv, length, HK, DV)


@gluon.jit
def _sum_dk(block, problem, shared, dk_ptr, scale, HK: gl.constexpr, D: gl.constexpr):
    q_ring = shared.q
    dout_ring = shared.dout
    start = block.start
    end = block.end
    layout_s: gl.constexpr = sum_layout(ROWS)
    zeros = zero_sum(ROWS)
    dk = zero_sums(parts_of(q_ring.buffers, 0, STAGES))
    dk_ptr += (
        ((gl.program_id(1) * problem.B + block.batch).to(gl.int64) * problem.SK + block.row) * HK + block.head
    ) * D
    length = block.end_k - block.row
    steps = block.heads * gl.cdiv(end - start, ROWS)
    mbarrier.wait(shared.kv_full, 0)
    mbarrier.wait(dout_ring.full.index(0), 0, pred=steps > 0)
    dp = start_contract(parts_of(shared.v, 0, 1), parts_of(dout_ring.buffers, 0, STAGES), zeros)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    for use in range(0, steps):
        s = use % STAGES
        phase = use // STAGES & 1
        delta = shared.delta.index(s).load(gl.SliceLayout(0, layout_s))
        mbarrier.wait(shared.p_full.index(s), phase)
        p = shared.p.index(s).load(layout_s)
        dp -= delta[None, :]
        ds = (p.to(gl.float32) * dp).to(p.dtype)
        mbarrier.arrive(dout_ring.empty.index(s), count=1)
        mbarrier.wait(q_ring.full.index(s), phase)
        dk = start_add_product(dk, ds, parts_of(q_ring.buffers, s, STAGES))
        t = (use + 1) % STAGES
        mbarrier.wait(dout_ring.full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        dout = parts_of(dout_ring.buffers, t, STAGES)
        dp = start_contract(parts_of(shared.v, use >> 30, 1), dout, zeros)
        dk = wait_for(dk, len(dout))
        mbarrier.arrive(q_ring.empty.index(s), count=1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    store_sums(dk_ptr, dk, length, HK, D, scale)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_dkv_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK, PADDED,
    count, blocks, heads_together, splits, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, DV:
    gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr,
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
    q_ring = Ring(q_s, barriers(STAGES, 33), barriers(STAGES, 2))
    dout_ring = Ring(dout_s, barriers(STAGES, 33), barriers(STAGES, 2))
    p_full = barriers(STAGES, 1)
    fence_async_shared()
    problem = Problem(B, S, SK, count, blocks, heads_together, splits, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    block = keys_of(gl.program_id(0), problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, ROWS, ROWS)
    shared = DkvShared(q_ring, dout_ring, k_s, v_s, lse_s, delta_s, p_s, p_full, kv_full)
    descs = q_desc, k_desc, v_desc, dout_desc
    gl.warp_specialize(
        [
            (_sum_dv, (block, problem, shared, dv_ptr, scale, HK, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_sum_dk, (block, problem, shared, dk_ptr, scale, HK, D)),
            (load_queries, (block, shared, descs, stats_ptr, B, PADDED, H)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


@gluon.jit
def _load_keys(tile, shared, descs, H: gl.constexpr, HK: gl.constexpr):
    q_desc, k_desc, v_desc, dout_desc = descs
    hk = tile.head // (H // HK)
    queries = Sequence(tile.batch, tile.start_q + tile.length_q)
    keys = Sequence(tile.batch, tile.start_k + tile.length_k)
    row = tile.start_q + tile.row
    load_rows(q_desc, queries, tile.head, row, shared.q, 0, shared.q_full, 1)
    for use in range(0, gl.cdiv(tile.end - tile.start, ROWS)):
        n = tile.start_k + tile.start + use * ROWS
        fill(k_desc, keys, hk, n, shared.k, use, STAGES)
        if use == 0:  # after q and k, which are needed first
            load_rows(dout_desc, queries, tile.head, row, shared.dout, 0, shared.dout_full, 1)
        fill(v_desc, keys, hk, n, shared.v, use, shared.v.buffers.shape[0])


@gluon.jit
def _sum_dq(
    g: gl.constexpr, tile, problem, shared, dq_ptr, stats_ptr, PADDED, scale, H: gl.constexpr, D: gl.constexpr,
    SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    k_ring = shared.k
    v_ring = shared.v
    length_q = tile.length_q
    length_k = tile.length_k
    B = problem.B
    b = tile.batch
    STAGES_V: gl.constexpr = v_ring.buffers.shape[0]
    dtype: gl.constexpr = shared.q.dtype
    layout_s: gl.constexpr = sum_layout(ROWS)
    zeros = zero_sum(ROWS)
    row = tile.row + g * ROWS
    queries = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s))
    spans = None
    if problem.spans_ptr is not None:
        spans = load_spans(problem.spans_ptr, b.to(gl.int64), B, problem.S, queries[:, None])
    positions = (queries + length_k - length_q)[:, None]
    limits = bounds(positions, problem.left, problem.right, spans, length_k, HAS_LEFT, HAS_RIGHT)
    dq_ptr += ((b.to(gl.int64) * problem.S + tile.start_q + row) * H + tile.head) * D
    length = length_q - row
    lse_ptrs = stats_ptr + (b * H + tile.head).to(gl.int64) * PADDED + tile.start_q + queries
    mask = queries < length_q  # the memory may end before the block does
    lse = gl.load(lse_ptrs, mask=mask, other=float("inf")) * LOG2E
    delta = gl.load(lse_ptrs + B.to(gl.int64) * H * PADDED, mask=mask, other=0.0)
    unit = unit_of_scores(scale, SOFTCAP, False)
    dq = zero_sums(parts_of(shared.q, 0, 1))
    steps = gl.cdiv(tile.end - tile.start, ROWS)
    mbarrier.wait(shared.q_full, 0)
    mbarrier.wait(shared.dout_full, 0)
    mbarrier.wait(k_ring.full.index(0), 0)
    s_acc = start_contract(rows_of(parts_of(shared.q, 0, 1), g * ROWS), parts_of(k_ring.buffers, 0, STAGES), zeros)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    for use in range(0, steps):
        n = tile.start + use * ROWS
        s = use % STAGES
        mbarrier.wait(v_ring.full.index(use % STAGES_V), use // STAGES_V & 1)
        # an index that the compiler does not know to be 0: else what describes v, dout and q stays in registers
        zero = use >> 30
        v = parts_of(v_ring.buffers, zero + use % STAGES_V, STAGES_V)
        dp = start_contract(rows_of(parts_of(shared.dout, zero, 1), g * ROWS), v, zeros)
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[:, None]) * slopes
        if (n < tile.inner_start) | (n + ROWS > tile.inner_end):
            p = hide(p, n, limits)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_ring.empty.index(use % STAGES_V), count=1)
        ds = (p * (dp - delta[:, None])).to(dtype)
        dq = start_add_product(dq, ds, parts_of(k_ring.buffers, s, STAGES))
        t = (use + 1) % STAGES
        mbarrier.wait(k_ring.full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        q = rows_of(parts_of(shared.q, zero, 1), g * ROWS)
        s_acc = start_contract(q, parts_of(k_ring.buffers, t, STAGES), zeros)
        dq = wait_for(dq, len(q))
        mbarrier.arrive(k_ring.empty.index(s), count=1)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    store_sums(dq_ptr, dq, length, H, D, scale)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "left", "right"])
def _attention_dq_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK, PADDED, count,
    blocks, heads_together, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, SOFTCAP:
    gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = -(-D // q_desc.block_type.shape[-1])
    q_s = buffers(q_desc, PARTS)
    k_s = buffers(k_desc, STAGES * PARTS)
    v_s = buffers(v_desc, STAGES_V)
    dout_s = buffers(dout_desc, 1)
    q_full = barriers(1, 1).index(0)
    dout_full = barriers(1, 1).index(0)
    k_ring = Ring(k_s, barriers(STAGES, 1), barriers(STAGES, 2))
    v_ring = Ring(v_s, barriers(STAGES_V, 1), barriers(STAGES_V, 2))
    fence_async_shared()
    problem = Problem(B, S, SK, count, blocks, heads_together, 1, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    tile = tile_of(gl.program_id(0), problem, H, HAS_LEFT, HAS_RIGHT, SEQUENCES, 2 * ROWS, ROWS)
    shared = DqShared(q_s, dout_s, k_ring, v_ring, q_full, dout_full)
    descs = q_desc, k_desc, v_desc, dout_desc
    gl.warp_specialize(
        [
            (_sum_dq, (0, tile, problem, shared, dq_ptr, stats_ptr, PADDED, scale, H, D, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_sum_dq, (1, tile, problem, shared, dq_ptr, stats_ptr, PADDED, scale, H, D, SOFTCAP, HAS_LEFT, HAS_RIGHT)),
            (_load_keys, (tile, shared, descs, H, HK)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query heads of a key head."""
    width, width_v = widths_of(q.shape[-1], v.shape[-1])
    moved = (q, width), (k, width), (v, width_v), (dout, width_v)
    descriptors = tuple(descriptor(x, 64, n, masking) for x, n in moved)
    launch_over_keys(
        _attention_dkv_hopper_kernel, BLOCK_N, q, k, v, stats, masking, splits, dk, dv, descriptors,
        **masking.constants(),
    )  # fmt: skip


def make_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking) -> Tensor:
    """Return the gradient of q."""
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    widths = width, width_v = widths_of(D, DV)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks = masking.num_blocks(S, BLOCK_M)
    launch(
        _attention_dq_hopper_kernel,
        (blocks * B * H,),
        (stats, dq, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans),
        (B, S, SK, stats.shape[3], masking.sequences, blocks, heads_in_l2(masking, k, v, H // HK),
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
