"""Attention backward in one pass for Hopper, in Gluon: one warp loads by TMA, and two warp groups multiply.

A program owns 128 keys of a key head, 64 for each warp group, and loops over the blocks of queries that see them, for
each of its query heads. Scores are [keys, queries], so that p and ds are multiplied from registers for dv and dk. ds
also goes to shared memory, where each group reads both halves for its part of dq; TMA adds dq up in global memory in
fp32 (Shah et al., arXiv:2407.08608). This happens one block later, so that no group waits for the softmax of the other,
and during the products of the next scores. Queries come into a ring of STAGES buffers, ds into a ring of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.buffers import FAR, ROWS, Sequence, at, barriers, buffers, descriptor, load_rows
from liger_like.ops.attention.hopper.products import store_rows
from liger_like.ops.attention.hopper.rows import Problem, bounds, hide, keys_of
from liger_like.ops.attention.masking import Masking, section_of_keys
from liger_like.ops.attention.softmax import LOG2E, scores, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    cp_async,
    cp_async_arrive,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.runtime.launcher import launch

BLOCK_N = 2 * ROWS.value
# widths of heads -> queries in a block, and with a softcap, which takes registers; wider heads do not fit
BLOCK_M = {(64, 64): (128, 64), (128, 128): (64, 64)}
STAGES = 2


class Buffers(NamedTuple):
    """Shared memory for blocks of q, k, v and dout, and for lse and delta of each query."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    lse: gl.tensor
    delta: gl.tensor


@gluon.jit
def _load(
    block, descs, rows_ptr, bufs, kv_full, full, empty, B, PADDED, H: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, dout_desc = descs
    keys = Sequence(block.batch, block.end_k)
    queries = Sequence(block.batch, block.end_q)
    load_rows(k_desc, keys, block.head, block.row, bufs.k, 0, kv_full, 1)
    load_rows(v_desc, keys, block.head, block.row, bufs.v, 0, kv_full, 1)
    use = 0
    offs = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    for h in range(block.first_head, block.first_head + block.heads):
        lse_ptr = rows_ptr + (block.batch * H + h).to(gl.int64) * PADDED
        delta_ptr = lse_ptr + B.to(gl.int64) * H * PADDED
        for m in range(block.start, block.end, BLOCK_M):
            s = use % STAGES
            mbarrier.wait(empty.index(s), use // STAGES & 1 ^ 1)
            # not by TMA, for which a packed sequence would have to start at a multiple of 16 bytes
            cp_async(bufs.lse.index(s), lse_ptr + m + offs)
            # 0 times what the next sequence has may be NaN
            cp_async(bufs.delta.index(s), delta_ptr + gl.minimum(m + offs, block.end_q - 1))
            cp_async_arrive(full.index(s), increment_count=False)
            load_rows(q_desc, queries, h, m, bufs.q, s, full.index(s), STAGES)
            load_rows(dout_desc, queries, h, m, bufs.dout, s, full.index(s), STAGES)
            use += 1


@gluon.jit
def _operands(k_s, v_s, index, g: gl.constexpr, first_col: gl.constexpr, WIDTH: gl.constexpr):
    """Return k and v of the keys of a warp group, and the columns of all k that its part of dq takes."""
    k = k_s.index(index).reshape([2 * ROWS, k_s.shape[-1]])
    v = v_s.index(index).reshape([2 * ROWS, v_s.shape[-1]])
    return k.slice(g * ROWS, ROWS), v.slice(g * ROWS, ROWS), k.slice(first_col, WIDTH, dim=1)


@gluon.jit
def _add_dq(dq, desc, buf, sequence, h, row, col):
    """Add dq to global memory from ``row`` and ``col`` on, once the last content of the buffer has left it."""
    tma_store_wait(0)
    buf.reshape(dq.shape).store(dq)
    fence_async_shared()
    tma_add(desc, at(desc, sequence, h, row, col), buf)


@gluon.jit
def _multiply(
    g: gl.constexpr, block, problem, outputs, bufs, ds_s, dq_s, kv_full, full, empty, ds_full, ds_empty, scale,
    HK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dq_desc, dk_ptr, dv_ptr = outputs
    start = block.start
    end = block.end
    end_k = block.end_k
    spans_ptr = problem.spans_ptr
    BLOCK_D: gl.constexpr = bufs.q.shape[-1]
    # the part of dq that a group makes: half of the queries if there are two times 64, else half of the features
    WIDTH: gl.constexpr = dq_s.shape[-1]
    first_row: gl.constexpr = 0 if WIDTH < BLOCK_D else g * ROWS
    first_col: gl.constexpr = g * WIDTH if WIDTH < BLOCK_D else 0
    dtype: gl.constexpr = bufs.q.dtype
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    layout_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    layout_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout_k, 2)
    cols: gl.constexpr = gl.SliceLayout(0, layout_s)
    no_scores = gl.zeros([ROWS, BLOCK_M], gl.float32, layout_s)
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout_q)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout_k)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout_k)
    queries = Sequence(block.batch, block.end_q)
    mbarrier.wait(kv_full, 0)
    row = block.row + g * ROWS
    unit = unit_of_scores(scale, SOFTCAP, False)
    inner_end = block.inner_end
    if row + ROWS > end_k:
        inner_end = start
    keys = (row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s)))[:, None]
    spans = None
    if spans_ptr is not None:
        spans = load_spans(spans_ptr, block.batch.to(gl.int64), problem.B, problem.SK, keys)
    starts, ends = bounds(keys - block.shift, problem.right, problem.left, spans, block.end_q, HAS_RIGHT, HAS_LEFT)
    limits = gl.where(keys < end_k, starts, FAR), ends
    ENDS: gl.constexpr = PACKED or HAS_LEFT or spans_ptr is not None
    steps = block.heads * gl.cdiv(end - start, BLOCK_M)
    mbarrier.wait(full.index(0), 0, pred=steps > 0)
    q = bufs.q.index(0).reshape([BLOCK_M, BLOCK_D])
    k_first, _, k_last = _operands(bufs.k, bufs.v, 0, g, first_col, WIDTH)
    s_acc = warpgroup_mma(k_first, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    h, m = block.first_head, start
    mbarrier.arrive(ds_full.index(0), count=1)  # of the block before the first, of which nothing is added
    last_h, last_m = block.first_head - 1, start - BLOCK_M
    for use in range(0, steps):
        # an index that the compiler does not know to be 0: else what describes k and v to the tensor cores stays in
        # registers
        k, v, k_part = _operands(bufs.k, bufs.v, use >> 30, g, first_col, WIDTH)
        s = use % STAGES
        t = (use + 1) % STAGES
        phase = (use + 1) // STAGES & 1
        q = bufs.q.index(s).reshape([BLOCK_M, BLOCK_D])
        dout = bufs.dout.index(s).reshape([BLOCK_M, BLOCK_D])
        if SOFTCAP is None:
            dp = warpgroup_mma(v, dout.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        lse = bufs.lse.index(s).load(cols) * LOG2E
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[None, :])
        edge = (m < block.inner_start) | (m + BLOCK_M > inner_end)
        if SOFTCAP is not None and spans_ptr is None:
            edge = True  # a branch would keep both p and slopes in registers; spans need one all the same
        if edge:
            p = hide(p, m, limits, ENDS=ENDS)
        p_operand = gl.convert_layout(p.to(dtype), operand)
        if SOFTCAP is not None:  # before, there are no registers for it
            p *= slopes
            dp = warpgroup_mma(v, dout.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        dv = warpgroup_mma(p_operand, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp - bufs.delta.index(s).load(cols)[None, :])).to(dtype)
        mbarrier.wait(ds_empty.index(t), phase ^ 1)
        ds_s.index(t).slice(g * ROWS, ROWS).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(t), count=1)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        mbarrier.wait(ds_full.index(s), use // STAGES & 1)
        ds_part = ds_s.index(s).slice(first_row, ROWS, dim=1).permute((1, 0))
        dq = warpgroup_mma(ds_part, k_part, zeros, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(1, deps=(dv, dk))
        mbarrier.arrive(empty.index(s), count=1)
        mbarrier.wait(full.index(t), phase, pred=use + 1 < steps)
        q = bufs.q.index(t).reshape([BLOCK_M, BLOCK_D])
        s_acc = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(ds_empty.index(s), count=1)
        if use > 0:
            _add_dq(dq, dq_desc, dq_s.index(g), queries, last_h, last_m + first_row, first_col)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
        last_h, last_m = h, m
        m += BLOCK_M
        h = gl.where(m < end, h, h + 1)
        m = gl.where(m < end, m, start)
    if steps > 0:
        mbarrier.wait(ds_full.index(steps % STAGES), steps // STAGES & 1)
        ds_part = ds_s.index(steps % STAGES).slice(first_row, ROWS, dim=1).permute((1, 0))
        dq = warpgroup_mma(ds_part, k_last, zeros, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _add_dq(dq, dq_desc, dq_s.index(g), queries, last_h, last_m + first_row, first_col)
    tma_store_wait(0)
    # the sums of each split have memory of their own
    first = ((gl.program_id(1) * problem.B + block.batch).to(gl.int64) * problem.SK + row) * HK + block.head
    store_rows(dk_ptr + first * D, dk * scale, end_k - row, HK, D)
    store_rows(dv_ptr + first * DV, dv, end_k - row, HK, DV)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK,
    PADDED, count, blocks, heads_together, splits, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D:
    gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES:
    gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * ROWS, BLOCK_M], q_desc.dtype)
    q_s = buffers(q_desc, STAGES)
    k_s = buffers(k_desc, 1)
    v_s = buffers(v_desc, 1)
    dout_s = buffers(dout_desc, STAGES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 2 * ROWS, BLOCK_M], ds_layout)
    dq_s = buffers(dq_desc, 2)
    kv_full = barriers(1, 2).index(0)
    full = barriers(STAGES, 34)  # lse and delta: the loading warp's threads; q and dout: one of them each
    empty = barriers(STAGES, 2)
    ds_full = barriers(STAGES, 2)
    ds_empty = barriers(STAGES, 2)
    fence_async_shared()
    problem = Problem(B, S, SK, count, blocks, heads_together, splits, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    block = keys_of(problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_M, 2 * ROWS)
    descs = q_desc, k_desc, v_desc, dout_desc
    outputs = dq_desc, dk_ptr, dv_ptr
    bufs = Buffers(q_s, k_s, v_s, dout_s, lse_s, delta_s)
    PACKED: gl.constexpr = cu_k_ptr is not None
    gl.warp_specialize(
        [
            (_multiply, (0, block, problem, outputs, bufs, ds_s, dq_s, kv_full, full, empty, ds_full, ds_empty, scale,
                         HK, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, PACKED, BLOCK_M, STAGES)),
            (_multiply, (1, block, problem, outputs, bufs, ds_s, dq_s, kv_full, full, empty, ds_full, ds_empty, scale,
                         HK, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, PACKED, BLOCK_M, STAGES)),
            (_load, (block, descs, rows_ptr, bufs, kv_full, full, empty, B, PADDED, H, BLOCK_M, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


@triton.jit
def _scale_kernel(sum_ptr, out_ptr, N, scale, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    tl.store(out_ptr + offs, tl.load(sum_ptr + offs, mask=mask) * scale, mask=mask)


def add_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> Tensor:
    """Return dq, and fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query heads of a key
    head.
    """
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    widths = width, _ = widths_of(D, DV)
    block_m = BLOCK_M[widths][masking.softcap is not None]
    blocks = masking.num_blocks(SK, BLOCK_N)
    share = width if block_m == BLOCK_N else width // 2
    dq, total = q.new_empty(q.shape), rows.new_zeros(q.shape)
    launch(
        _attention_bwd_hopper_kernel,
        (blocks * B * HK, splits),
        (rows, dk, dv, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans),
        (B, S, SK, rows.shape[3], masking.sequences, blocks, section_of_keys(masking, SK, BLOCK_N, k.device), splits,
         masking.left, masking.right),
        (masking.scale,),
        tuple(descriptor(x, block, n, masking) for x, block, n in (
            (q, block_m, width), (k, BLOCK_N, width), (v, BLOCK_N, width), (dout, block_m, width), (total, 64, share),
        )),
        H=H,
        HK=HK,
        D=D,
        DV=DV,
        **masking.constants(),
        BLOCK_M=block_m,
        STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
    launch(_scale_kernel, (triton.cdiv(q.numel(), 2048),), (total, dq), (q.numel(),), (masking.scale,), BLOCK=2048)
    return dq
