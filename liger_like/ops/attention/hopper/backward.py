"""Attention backward in one pass for Hopper, in Gluon: one warp loads by TMA, and two warp groups multiply.

A program owns 128 keys of a key head, 64 for each warp group, and loops over the blocks of queries that see them, for
each of its query heads. Scores are [keys, queries], so that p and ds are multiplied from registers for dv and dk. ds
also goes to shared memory, where each group reads both halves for its part of dq; TMA adds dq up in global memory in
fp32 (Shah et al., arXiv:2407.08608). This happens one block later, so that no group waits for the softmax of the other,
and during the products of the next scores. Queries come into a ring of STAGES buffers, ds into a ring of two.

Shared memory limits this kernel, so keys and values stay in registers if these suffice. The groups multiply in turn
where heads are multiplied whole: one computes exponentials while the other multiplies.

Where a block of keys has few queries, and heads are narrow, the first loads and the last stores of a program take a
good part of its time. There a program draws one block after another: the loading warp runs ahead, so that the first
queries of a block come while the sums of the block before are stored.
"""

import torch
import triton
from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.backward_loads import Barriers, Buffers, load_key_blocks
from liger_like.ops.attention.hopper.buffers import (
    Sequence,
    at,
    columns_of,
    descriptor,
    parts_of,
    product_widths,
    rows_of,
    sum_of,
)
from liger_like.ops.attention.hopper.key_blocks import launch_over_keys
from liger_like.ops.attention.hopper.products import (
    load_first,
    parts_that_fit,
    start_add_product,
    start_contract,
    store_sums,
    zero_sums,
)
from liger_like.ops.attention.hopper.rows import (
    KEY_FIELDS,
    KeyBlock,
    Problem,
    bounds,
    hide,
    keys_of,
    take_tile,
    tile_queue,
)
from liger_like.ops.attention.masking import Masking
from liger_like.ops.attention.softmax import LOG2E, scores, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    FREE_BARRIER,
    arrive_at,
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    here,
    mbarrier,
    reinterpret,
    sync_at,
    tma_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.runtime.hopper import FAR, ROWS, barriers, buffers, sum_layout, zero_sum

BLOCK_N = 2 * ROWS.value
# widths of heads -> queries in a block, and with a softcap, which takes registers; wider heads do not fit
BLOCK_M = {(64, 64): (128, 64), (128, 128): (64, 64)}
STAGES = 2
# Programs draw blocks of keys for heads up to so wide, if a key is seen by at most so many queries of one head. The
# state of a loop around the steps slows them, which long rows do not win back.
DRAWS, MOST_QUERIES = 96, 2048
# Later compilers keep less of that state in registers: drawing takes 4 to 13 % longer with Triton 3.9.
DRAWING = triton.__version__.startswith(("3.6.", "3.7."))


@triton.constexpr_function
def _widths_of_groups(widths):
    """Return the number of features of dq that each warp group makes."""
    return widths if len(widths) == 2 else (widths[0] // 2,) * 2


@triton.constexpr_function
def _in_turn(D, width):
    """Return True if the warp groups multiply in turn: heads in slices, of 80 or 96 features, take longer so."""
    return len(product_widths(D, width)) == 1


@gluon.jit
def _take_turn(g: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    if _in_turn(D, WIDTH):
        sync_at(FREE_BARRIER + g, 256)


@gluon.jit
def _end_turn(g: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    if _in_turn(D, WIDTH):
        arrive_at(FREE_BARRIER + 1 - g, 256)


@gluon.jit
def _rows_of_group(bufs, index, g: gl.constexpr, WIDTHS: gl.constexpr):
    """Return the keys or values of a warp group in parts."""
    return columns_of(rows_of(parts_of(bufs, index, 1), g * ROWS), WIDTHS)


@gluon.jit
def _columns(bufs, index, first: gl.constexpr, WIDTH: gl.constexpr):
    """Return WIDTH columns of all keys."""
    return bufs.index(index).reshape([2 * ROWS, bufs.shape[-1]]).slice(first, WIDTH, dim=1)


@triton.constexpr_function
def _turned_layout(width):
    """Return TMA's layout of fp32 [ROWS, width], in which ``_turn`` has exchanged columns."""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    rows = [[1, 4 + 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout(columns + rows + [[0, 32]] * (width > 32), alignment=1024)


@gluon.jit
def _turn(x):
    """Exchange the halves of each 32 columns in the odd rows of a sum of products."""
    COUNT: gl.constexpr = x.shape[1] // 32
    left, right = x.reshape([ROWS, COUNT, 2, 16]).permute((0, 1, 3, 2)).split()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout)))
    odd = ((rows & 1) == 1)[:, None, None]
    both = gl.join(gl.where(odd, right, left), gl.where(odd, left, right))
    return both.permute((0, 1, 3, 2)).reshape(x.shape)


@gluon.jit
def _add_dq(dq, desc, buf, sequence, h, row, col):
    """Add dq to global memory from ``row`` and ``col`` on, once the last content of the buffer has left it.

    Half a warp stores 32 bytes of each of four rows at a time. If these are the same columns, TMA's layout has only two
    places for them, and the store takes twice as long. So odd rows are turned.

    A narrow dq leaves columns of the buffer unwritten. These are past the head, where TMA adds nothing.
    """
    WIDTH: gl.constexpr = buf.shape[-1]
    if dq.shape[1] >= 32:
        rows = reinterpret(buf, gl.float32, [ROWS, WIDTH], _turned_layout(WIDTH))
        dq = _turn(dq)
    else:
        rows = buf.reshape([ROWS, WIDTH])
    tma_store_wait(0)
    rows.slice(0, dq.shape[1], dim=1).store(dq)
    fence_async_shared()
    tma_add(desc, at(desc, sequence, h, row, col), buf)


@gluon.jit
def _start_dq(bufs, ds, zero, first_row: gl.constexpr, first_col: gl.constexpr, zeros):
    """Start the product of the ds-th ds with keys, from a row and a column on, for the part of dq like ``zeros``."""
    ds_part = bufs.ds.index(ds % 2).slice(first_row, ROWS, dim=1).permute((1, 0))
    keys = _columns(bufs.k, zero, first_col, zeros.shape[1])
    return warpgroup_mma(ds_part, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _limits_of(keys, block, problem, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Return the bounds of the queries that see each of ``keys``; none sees those past the end."""
    keys = keys[:, None]
    spans = None
    if problem.spans_ptr is not None:
        spans = load_spans(problem.spans_ptr, block.batch.to(gl.int64), problem.B, problem.SK, keys)
    starts, ends = bounds(keys - block.shift, problem.right, problem.left, spans, block.end_q, HAS_RIGHT, HAS_LEFT)
    return gl.where(keys < block.end_k, starts, FAR), ends


@gluon.jit
def _sum_block(
    g: gl.constexpr, block, problem, outputs, bufs, bars, use, count, scale, H: gl.constexpr, HK: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sum dk and dv of a KeyBlock, and add up its part of dq, from the use-th filling of the ring of queries on.

    Return the next numbers. ds has number use + count, since each block of keys starts with a ds that is not added.
    """
    dq_desc, dk_ptr, dv_ptr = outputs
    start = block.start
    BLOCK_D: gl.constexpr = bufs.q.shape[-1]
    WIDTHS: gl.constexpr = product_widths(D, BLOCK_D)
    WIDTHS_V: gl.constexpr = product_widths(DV, BLOCK_D)
    # the part of dq that a group makes: half of the queries if there are two times 64, else some of the features
    WHOLE: gl.constexpr = BLOCK_M > ROWS
    WIDTH: gl.constexpr = BLOCK_D if WHOLE else _widths_of_groups(WIDTHS)[g]
    first_row: gl.constexpr = g * ROWS if WHOLE else 0
    first_col: gl.constexpr = 0 if WHOLE else g * _widths_of_groups(WIDTHS)[0]
    # of scores, dp, the slopes of a softcap, dk and dv; k, then v, get the remaining registers
    REGISTERS: gl.constexpr = ((2 if SOFTCAP is None else 3) * BLOCK_M + sum_of(WIDTHS) + sum_of(WIDTHS_V)) // 2
    K_LOADED: gl.constexpr = parts_that_fit(REGISTERS, WIDTHS)
    V_LOADED: gl.constexpr = parts_that_fit(REGISTERS + sum_of(WIDTHS, K_LOADED) // 4, WIDTHS_V)
    dtype: gl.constexpr = bufs.q.dtype
    layout_s: gl.constexpr = sum_layout(BLOCK_M)
    cols: gl.constexpr = gl.SliceLayout(0, layout_s)
    no_scores = zero_sum(BLOCK_M)
    zeros = zero_sum(WIDTH)
    dk = zero_sums(columns_of(parts_of(bufs.q, 0, STAGES), WIDTHS))
    dv = zero_sums(columns_of(parts_of(bufs.dout, 0, STAGES), WIDTHS_V))
    queries = Sequence(block.batch, block.end_q)
    row = block.row + g * ROWS
    unit = unit_of_scores(scale, SOFTCAP, False)
    inner_end = gl.where(row + ROWS > block.end_k, start, block.inner_end)
    limits = _limits_of(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s)), block, problem, HAS_LEFT, HAS_RIGHT)
    ENDS: gl.constexpr = problem.cu_k_ptr is not None or HAS_LEFT or problem.spans_ptr is not None
    steps = gl.maximum(block.heads * gl.cdiv(block.end - start, BLOCK_M), 0)
    some = steps > 0
    mbarrier.wait(bars.full.index(use % STAGES), use // STAGES & 1, pred=some)
    q = columns_of(parts_of(bufs.q, use % STAGES, STAGES), WIDTHS)
    mbarrier.wait(bars.k_full, count & 1, pred=some)
    k_first = _rows_of_group(bufs.k, 0, g, WIDTHS)
    k_loaded = load_first(k_first, K_LOADED, layout_s)
    s_acc = start_contract(k_loaded + k_first[K_LOADED:], q, no_scores)
    mbarrier.wait(bars.v_full, count & 1, pred=some)
    v_loaded = load_first(_rows_of_group(bufs.v, 0, g, WIDTHS_V), V_LOADED, layout_s)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    h, m = block.first_head, start
    # of the block before the first, of which nothing is added
    mbarrier.arrive(bars.ds_full.index((use + count) % 2), count=1, pred=some)
    last_h, last_m = block.first_head - 1, start - BLOCK_M
    first_use, end_use = use, use + steps
    for use in range(first_use, end_use):
        # an index that the compiler does not know to be 0: else what describes k and v to the tensor cores stays in
        # registers
        zero = use >> 30
        k = k_loaded + _rows_of_group(bufs.k, zero, g, WIDTHS)[K_LOADED:]
        v = v_loaded + _rows_of_group(bufs.v, zero, g, WIDTHS_V)[V_LOADED:]
        s = use % STAGES
        t = (use + 1) % STAGES
        last_ds = use + count
        next_ds = last_ds + 1
        q = columns_of(parts_of(bufs.q, s, STAGES), WIDTHS)
        dout = columns_of(parts_of(bufs.dout, s, STAGES), WIDTHS_V)
        if SOFTCAP is None:
            dp = start_contract(v, dout, no_scores)
        lse = bufs.lse.index(s).load(cols) * LOG2E
        p, slopes = scores(s_acc, None, scale, SOFTCAP, False)
        p = gl.exp2(p * unit - lse[None, :])
        edge = (m < block.inner_start) | (m + BLOCK_M > inner_end)
        if SOFTCAP is not None and problem.spans_ptr is None:
            edge = True  # a branch would keep both p and slopes in registers; spans need one all the same
        if edge:
            p = hide(p, m, limits, ENDS=ENDS)
        p_operand = p.to(dtype)
        if SOFTCAP is not None:  # before, there are no registers for it
            p *= slopes
            dp = start_contract(v, dout, no_scores)
        _take_turn(g, D, BLOCK_D)
        dv = start_add_product(dv, p_operand, dout)
        dp = warpgroup_mma_wait(len(dv), deps=(dp,))
        ds = (p * (dp - bufs.delta.index(s).load(cols)[None, :])).to(dtype)
        mbarrier.wait(bars.ds_empty.index(next_ds % 2), next_ds // 2 & 1 ^ 1)
        bufs.ds.index(next_ds % 2).slice(g * ROWS, ROWS).store(ds)
        fence_async_shared()
        mbarrier.arrive(bars.ds_full.index(next_ds % 2), count=1)
        dk = start_add_product(dk, ds, q)
        mbarrier.wait(bars.ds_full.index(last_ds % 2), last_ds // 2 & 1)
        dq = _start_dq(bufs, last_ds, here(zero), first_row, first_col, zeros)
        sums = warpgroup_mma_wait(1, deps=dv + dk)
        dv, dk = sums[: len(dv)], sums[len(dv) :]
        mbarrier.arrive(bars.empty.index(s), count=1)
        mbarrier.wait(bars.full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < end_use)
        q = columns_of(parts_of(bufs.q, here(t), STAGES), WIDTHS)
        s_acc = start_contract(k, q, no_scores)
        _end_turn(g, D, BLOCK_D)
        dq = warpgroup_mma_wait(len(q), deps=(dq,))
        mbarrier.arrive(bars.ds_empty.index(last_ds % 2), count=1)
        if last_m >= start:
            _add_dq(dq, dq_desc, bufs.dq.index(g), queries, last_h, last_m + first_row, first_col)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
        last_h, last_m = h, m
        m += BLOCK_M
        if H > HK:
            h = gl.where(m < block.end, h, h + 1)
            m = gl.where(m < block.end, m, start)
    if some:
        last_ds = end_use + count
        mbarrier.wait(bars.ds_full.index(last_ds % 2), last_ds // 2 & 1)
        dq = _start_dq(bufs, last_ds, 0, first_row, first_col, zeros)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        group_barrier()  # a warp waits for its own products
        mbarrier.arrive(bars.ds_empty.index(last_ds % 2), count=1)
        mbarrier.arrive(bars.kv_empty, count=1)
        _add_dq(dq, dq_desc, bufs.dq.index(g), queries, last_h, last_m + first_row, first_col)
    # the sums of each split have memory of their own
    first = ((gl.program_id(1) * problem.B + block.batch).to(gl.int64) * problem.SK + row) * HK + block.head
    store_sums(dk_ptr + first * D, dk, block.end_k - row, HK, D, scale)
    store_sums(dv_ptr + first * DV, dv, block.end_k - row, HK, DV)
    return end_use, gl.where(some, count + 1, count)


@gluon.jit
def _multiply(
    g: gl.constexpr, block, queue, problem, outputs, bufs, bars, scale, H: gl.constexpr, HK: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if g == 1:  # the first turn is that of the other group
        _end_turn(g, D, bufs.q.shape[-1])
    if len(queue) == 0:
        _sum_block(
            g, block, problem, outputs, bufs, bars, 0, 0, scale, H, HK, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT,
            BLOCK_M, STAGES,
        )  # fmt: skip
    else:
        use = 0
        count = 0
        turn = 0
        own = take_tile(queue, turn)
        while own[0] >= 0:
            # the last two: one query head, that of the keys
            keys = KeyBlock(
                own[0], own[1], own[2], own[3], own[4], own[5], own[6], own[7], own[8], own[9], own[1], 1
            )  # fmt: skip
            use, count = _sum_block(
                g, keys, problem, outputs, bufs, bars, use, count, scale, H, HK, D, DV, SOFTCAP, HAS_LEFT,
                HAS_RIGHT, BLOCK_M, STAGES,
            )  # fmt: skip
            turn += 1
            own = take_tile(queue, turn)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, stats_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, taken_ptr, B,
    S, SK, PADDED, count, blocks, heads_together, splits, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D:
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
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, 2 * ROWS, BLOCK_M], ds_layout)
    bufs = Buffers(q_s, k_s, v_s, dout_s, lse_s, delta_s, ds_s, buffers(dq_desc, 2))
    # full: lse and delta by the loading warp's threads, q and dout by one of them each
    queries = barriers(STAGES, 34), barriers(STAGES, 2)
    bars = Barriers(
        barriers(1, 1).index(0), barriers(1, 1).index(0), barriers(1, 2).index(0), queries[0], queries[1],
        barriers(2, 2), barriers(2, 2),
    )  # fmt: skip
    problem = Problem(B, S, SK, count, blocks, heads_together, splits, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    block = ()
    queue = ()
    if taken_ptr is None:
        block = keys_of(gl.program_id(0), problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_M, 2 * ROWS)
    else:
        queue = tile_queue(2, KEY_FIELDS)
    fence_async_shared()
    descs = q_desc, k_desc, v_desc, dout_desc
    outputs = dq_desc, dk_ptr, dv_ptr
    gl.warp_specialize(
        [
            (_multiply, (0, block, queue, problem, outputs, bufs, bars, scale, H, HK, D, DV, SOFTCAP, HAS_LEFT,
                         HAS_RIGHT, BLOCK_M, STAGES)),
            (_multiply, (1, block, queue, problem, outputs, bufs, bars, scale, H, HK, D, DV, SOFTCAP, HAS_LEFT,
                         HAS_RIGHT, BLOCK_M, STAGES)),
            (load_key_blocks, (block, queue, problem, taken_ptr, descs, stats_ptr, bufs, bars, PADDED, H, HK, HAS_LEFT,
                     HAS_RIGHT, SEQUENCES, BLOCK_M, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def _draws(q: Tensor, k: Tensor, masking: Masking) -> bool:
    """Return True if programs take less time when they draw blocks of keys (see DRAWS)."""
    seen = q.shape[1] / max(1, masking.sequences)
    if masking.right >= 0 or masking.spans is not None:
        seen /= 2
    if masking.left >= 0 and masking.right >= 0:
        seen = min(seen, masking.left + masking.right + 1)
    return DRAWING and q.shape[2] == k.shape[2] and q.shape[3] <= DRAWS and seen <= MOST_QUERIES


def add_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> Tensor:
    """Return dq / scale in fp32, and fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query
    heads of a key head.
    """
    widths = width, _ = widths_of(q.shape[-1], v.shape[-1])
    block_m = BLOCK_M[widths][masking.softcap is not None]
    share = width if block_m == BLOCK_N else width // 2
    memory = stats.new_zeros(q.numel() + 4)
    total = memory[:-4].view(q.shape)
    taken = memory[-4:].view(torch.int32) if _draws(q, k, masking) else None
    moved = (q, block_m, width), (k, BLOCK_N, width), (v, BLOCK_N, width), (dout, block_m, width), (total, 64, share)
    descriptors = tuple(descriptor(x, rows, n, masking) for x, rows, n in moved)
    launch_over_keys(
        _attention_bwd_hopper_kernel, BLOCK_N, q, k, v, stats, masking, splits, dk, dv, descriptors, taken,
        **masking.constants(), BLOCK_M=block_m, STAGES=STAGES,
    )  # fmt: skip
    return total
