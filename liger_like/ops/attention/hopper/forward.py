"""Attention forward for Hopper, in Gluon: one warp loads by TMA, and warp groups of 64 queries each multiply.

A program takes tiles, 64 queries of a head for each warp group, until none is left. Keys and values come from the last
block to the first, into rings of STAGES buffers. The first loads of a tile run while the tile before it is multiplied
and stored.

With TURNS, groups start their products in turn, so that one multiplies while the others exponentiate. With OVERLAP, a
group starts the scores of a block together with the product of the block before with its values (Shah et al.,
arXiv:2407.08608), and waits for both before the softmax: ptxas moves a later wait there anyway, but not what says that
the buffers are empty. Without OVERLAP, a group ends the product of a block with the values before it starts the next
scores. Three groups hide that; with heads wider than 64 they have no registers for both.

With LAZY, a row is relative to a reference that is seldom raised, not to its greatest score (``online_softmax``).

Parts of the queries stay in registers (LOADED) where products with few keys at a time would wait for shared memory.
Heads wider than 128 leave room for half of the output of a group: it is stored in two halves.

Named barriers say that a buffer is empty: an mbarrier would first synchronise the warps of a group, for each block.
Triton does so before it waits a second time for a buffer to be full, unless the warps have met in between: they meet
while products run.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.buffers import (
    Sequence,
    at,
    columns_of,
    descriptor,
    load_rows,
    parts_of,
    product_widths,
)
from liger_like.ops.attention.hopper.online_softmax import softmax, sum_in_threads
from liger_like.ops.attention.hopper.products import (
    load_first,
    start_add_product,
    start_contract,
    zero_sums,
)
from liger_like.ops.attention.hopper.rows import (
    FIELDS,
    Problem,
    TileQueue,
    bounds,
    hide,
    keys_seen,
    next_tile,
    put_tile,
    take_tile,
    tile_of,
    tile_queue,
)
from liger_like.ops.attention.masking import Masking, heads_in_l2
from liger_like.ops.attention.softmax import LN2, finish, scores, unit_of_scores
from liger_like.ops.attention.tiles import hopper_forward
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    FREE_BARRIER,
    arrive_at,
    fence_async_shared,
    gl,
    gluon,
    group_barrier,
    mbarrier,
    sync_at,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from liger_like.runtime.hopper import ROWS, Ring, barriers, buffers, sum_layout, wait_for, zero_sum
from liger_like.runtime.launcher import launch
from liger_like.runtime.support import num_programs

MOST_GROUPS = gl.constexpr(3)
KEYS_EMPTY = gl.constexpr(FREE_BARRIER + MOST_GROUPS)  # the first of STAGES named barriers, after one turn per group


class Shared(NamedTuple):
    """Arguments of the loading warp and of the warp groups that multiply.

    ``k_full``, ``v_full``: barriers of the buffers ``k`` and ``v``.
    """

    problem: Problem
    tiles: gl.tensor
    q: Ring
    k: gl.tensor
    v: gl.tensor
    k_full: gl.tensor
    v_full: gl.tensor
    queue: TileQueue


@gluon.jit
def _fill(desc, sequence, h, row, bufs, full, empty, use, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Start the use-th filling of a ring, once the warp groups have left the buffer. ``empty``: its first barrier."""
    s = use % STAGES
    if use >= STAGES:
        sync_at(empty + s, GROUPS * 128 + 32)
    load_rows(desc, sequence, h, row, bufs, s, full.index(s), STAGES)


@gluon.jit
def _take_turn(g: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the group before has started its products."""
    if TURNS:
        sync_at(FREE_BARRIER + g, 256)


@gluon.jit
def _pass_turn(g: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        arrive_at(FREE_BARRIER + (g + 1) % GROUPS, 256)


@gluon.jit
def _load(
    shared, sources, H: gl.constexpr, HK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SEQUENCES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, taken_ptr = sources
    use = 0
    turn = 0
    count = 0
    tile = gl.program_id(0)
    while tile < shared.tiles:
        own = tile_of(tile, shared.problem, H, HAS_LEFT, HAS_RIGHT, SEQUENCES, GROUPS * ROWS, BLOCK_N)
        if own.row < own.length_q:
            put_tile(shared.queue, turn, own[:FIELDS])
            hk = own.head // (H // HK)
            queries = Sequence(own.batch, own.start_q + own.length_q)
            keys = Sequence(own.batch, own.start_k + own.length_k)
            first = own.start_k + own.start
            last = own.start_k + own.end - BLOCK_N
            _fill(k_desc, keys, hk, last, shared.k, shared.k_full, KEYS_EMPTY, use, STAGES, GROUPS)
            for g in gl.static_range(GROUPS):
                mbarrier.wait(shared.q.empty.index(g), turn & 1 ^ 1)
                row = own.start_q + own.row + g * ROWS
                load_rows(q_desc, queries, own.head, row, shared.q.buffers, g, shared.q.full.index(g), GROUPS)
            turn += 1
            for n in range(last, first - BLOCK_N, -BLOCK_N):
                if n > first:  # the next keys are needed before these values
                    row = n - BLOCK_N
                    _fill(k_desc, keys, hk, row, shared.k, shared.k_full, KEYS_EMPTY, use + 1, STAGES, GROUPS)
                _fill(v_desc, keys, hk, n, shared.v, shared.v_full, KEYS_EMPTY + STAGES, use, STAGES, GROUPS)
                use += 1
        tile = next_tile(taken_ptr, count)
        count += 1
    put_tile(shared.queue, turn, (-1,))  # no tile is left


@gluon.jit
def _masked(s, n, limits, inner_start, inner_end, scale, SOFTCAP: gl.constexpr, STARTS: gl.constexpr):
    """Return the scores of a block of products, -inf where a query does not see the key."""
    s, _ = scores(s, None, scale, SOFTCAP, False)
    if n + s.shape[1] > inner_end:
        s = hide(s, n, limits, STARTS=False, hidden=float("-inf"))
    if STARTS:  # noqa: SIM102, the compiler needs a condition of its own to leave the block out
        if n < inner_start:
            s = hide(s, n, limits, ENDS=False, hidden=float("-inf"))
    return s


@gluon.jit
def _skip_block(g: gl.constexpr, shared, use, STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr):
    """Leave the buffers of a block of keys unread, and let the turn of this group pass."""
    s = use % STAGES
    mbarrier.wait(shared.k_full.index(s), use // STAGES & 1)
    arrive_at(KEYS_EMPTY + s, GROUPS * 128 + 32)
    mbarrier.wait(shared.v_full.index(s), use // STAGES & 1)
    arrive_at(KEYS_EMPTY + STAGES + s, GROUPS * 128 + 32)
    _take_turn(g, TURNS)
    _pass_turn(g, GROUPS, TURNS)


@gluon.jit
def _narrow(acc, WIDTH: gl.constexpr):
    """Return a sum in parts of at most WIDTH columns: one part of twice as many is split."""
    if acc[0].shape[1] > WIDTH:
        left, right = acc[0].reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)).split()
        return gl.convert_layout(left, sum_layout(WIDTH)), gl.convert_layout(right, sum_layout(WIDTH))
    else:
        return acc


@gluon.jit
def _send(acc, factor, buf, desc, sequence, h, row, col):
    """Store a sum in parts, times a factor of each row, by TMA: through a buffer, once its last content has left it.

    All parts but the last are equally wide.
    """
    tma_store_wait(0)
    for i in gl.static_range(len(acc)):
        f = gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout))[:, None]
        x = gl.where(f == 0.0, 0.0, acc[i] * f)  # a row that sees no key may have summed 0 times NaN
        out = buf.reshape([ROWS, buf.shape[-1]]).slice(i * acc[0].shape[1], acc[i].shape[1], dim=1)
        out.store(x.to(buf.dtype))
    fence_async_shared()
    tma_store(desc, at(desc, sequence, h, row, col), buf)


@gluon.jit
def _attend(
    g: gl.constexpr, shared, outputs, H: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr, LOADED: gl.constexpr,
    LAZY: gl.constexpr,
):  # fmt: skip
    out_desc, lse_ptr, sinks_ptr, scale, out_s = outputs
    problem = shared.problem
    k = shared.k
    v = shared.v
    VALUES_EMPTY: gl.constexpr = KEYS_EMPTY + STAGES
    READERS: gl.constexpr = GROUPS * 128 + 32  # with the loading warp
    WIDTHS: gl.constexpr = product_widths(D, k.shape[-1], 128)
    WIDTHS_V: gl.constexpr = product_widths(DV, v.shape[-1])
    PARTS_V: gl.constexpr = len(WIDTHS_V)
    dtype: gl.constexpr = out_desc.dtype
    STARTS: gl.constexpr = HAS_LEFT or problem.spans_ptr is not None
    SKIPS: gl.constexpr = GROUPS > 2 or BLOCK_N < 2 * ROWS
    layout_s: gl.constexpr = sum_layout(BLOCK_N)
    rows_s: gl.constexpr = gl.SliceLayout(1, layout_s)
    zeros = zero_sum(BLOCK_N)
    unit = unit_of_scores(scale, SOFTCAP, False)
    q_parts = columns_of(parts_of(shared.q.buffers, g, GROUPS), WIDTHS)
    use = 0
    turn = 0
    if g == GROUPS - 1:
        _pass_turn(g, GROUPS, TURNS)
    row, batch, head, start_q, length_q, length_k, start, end = take_tile(shared.queue, turn)
    while row >= 0:
        row += g * ROWS
        queries = row + gl.arange(0, ROWS, rows_s)
        spans = None
        if problem.spans_ptr is not None:
            spans = load_spans(problem.spans_ptr, batch.to(gl.int64), problem.B, problem.S, queries[:, None])
        positions = (queries + length_k - length_q)[:, None]
        limits = bounds(positions, problem.left, problem.right, spans, length_k, HAS_LEFT, HAS_RIGHT)
        first = start
        seen_start, seen_end, inner_start, inner_end = keys_seen(
            problem, batch, row, length_q, length_k, HAS_LEFT, HAS_RIGHT, ROWS, BLOCK_N
        )
        if SKIPS:  # skip the blocks that only other groups see, but not all
            seen_end = gl.where(row < length_q, seen_end, 0)
            while end - BLOCK_N >= gl.maximum(seen_end, start + BLOCK_N):
                _skip_block(g, shared, use, STAGES, GROUPS, TURNS)
                end -= BLOCK_N
                use += 1
            start = gl.minimum(start + gl.maximum(seen_start - start, 0) // BLOCK_N * BLOCK_N, end - BLOCK_N)
        total = sum_in_threads(zeros)
        references = gl.full_like(total, float("-inf")) if LAZY else gl.full([ROWS], float("-inf"), gl.float32, rows_s)
        acc = zero_sums(columns_of(parts_of(v, 0, STAGES), WIDTHS_V))
        mbarrier.wait(shared.q.full.index(g), turn & 1)
        mbarrier.wait(shared.k_full.index(use % STAGES), use // STAGES & 1)
        q = load_first(q_parts, LOADED, layout_s) + q_parts[LOADED:]
        s = start_contract(q, columns_of(parts_of(k, use % STAGES, STAGES), WIDTHS), zeros)
        group_barrier()
        s = warpgroup_mma_wait(0, deps=(s,))
        arrive_at(KEYS_EMPTY + use % STAGES, READERS)
        s = _masked(s, end - BLOCK_N, limits, inner_start, inner_end, scale, SOFTCAP, STARTS)
        p, references, total, _ = softmax(s, references, total, (), unit, dtype)
        for n in range(end - 2 * BLOCK_N, start - BLOCK_N, -BLOCK_N):
            last = use
            use += 1
            if OVERLAP:
                mbarrier.wait(shared.k_full.index(use % STAGES), use // STAGES & 1)
                _take_turn(g, TURNS)
                s = start_contract(q, columns_of(parts_of(k, use % STAGES, STAGES), WIDTHS), zeros)
                mbarrier.wait(shared.v_full.index(last % STAGES), last // STAGES & 1)
                acc = start_add_product(acc, p, columns_of(parts_of(v, last % STAGES, STAGES), WIDTHS_V))
                _pass_turn(g, GROUPS, TURNS)
                group_barrier()
                s = warpgroup_mma_wait(PARTS_V, deps=(s,))
                arrive_at(KEYS_EMPTY + use % STAGES, READERS)
                acc = wait_for(acc, 0)
                arrive_at(VALUES_EMPTY + last % STAGES, READERS)
            else:  # p leaves its registers before the scores take theirs
                mbarrier.wait(shared.v_full.index(last % STAGES), last // STAGES & 1)
                _take_turn(g, TURNS)
                acc = start_add_product(acc, p, columns_of(parts_of(v, last % STAGES, STAGES), WIDTHS_V))
                mbarrier.wait(shared.k_full.index(use % STAGES), use // STAGES & 1)
                acc = wait_for(acc, 0)
                s = start_contract(q, columns_of(parts_of(k, use % STAGES, STAGES), WIDTHS), zeros)
                _pass_turn(g, GROUPS, TURNS)
                group_barrier()
                arrive_at(VALUES_EMPTY + last % STAGES, READERS)
                s = warpgroup_mma_wait(0, deps=(s,))
                arrive_at(KEYS_EMPTY + use % STAGES, READERS)
            s = _masked(s, n, limits, inner_start, inner_end, scale, SOFTCAP, STARTS)
            p, references, total, acc = softmax(s, references, total, acc, unit, dtype)
        group_barrier()  # a warp waits for its own products; Triton 3.6 takes the meeting before that for enough
        mbarrier.arrive(shared.q.empty.index(g), count=1)
        last = use % STAGES
        mbarrier.wait(shared.v_full.index(last), use // STAGES & 1)
        acc = start_add_product(acc, p, columns_of(parts_of(v, last, STAGES), WIDTHS_V))
        acc = wait_for(acc, 0)
        arrive_at(VALUES_EMPTY + last, READERS)
        use += 1
        if SKIPS:
            for _ in range(first, start, BLOCK_N):
                _skip_block(g, shared, use, STAGES, GROUPS, TURNS)
                use += 1
        turn += 1
        sink = None
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head).to(gl.float32)
        total = gl.convert_layout(gl.sum(total, 1), rows_s)
        if LAZY:
            references = gl.convert_layout(gl.max(references, 1), rows_s)
        factor, row_max, log_sum = finish(references * LN2, total, sink)
        lse_ptrs = lse_ptr + (batch.to(gl.int64) * H + head) * problem.S + start_q + queries
        gl.store(lse_ptrs, row_max + log_sum * LN2, mask=queries < length_q)
        own_rows = Sequence(batch, start_q + length_q)
        if out_s.shape[-1] == v.shape[-1]:
            _send(acc, factor, out_s.index(g), out_desc, own_rows, head, start_q + row, 0)
        else:  # the buffer holds half of the output
            acc = _narrow(acc, out_s.shape[-1])
            for i in gl.static_range(len(acc)):
                col = i * out_s.shape[-1]
                _send(acc[i : i + 1], factor, out_s.index(g), out_desc, own_rows, head, start_q + row, col)
        row, batch, head, start_q, length_q, length_k, start, end = take_tile(shared.queue, turn)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["B", "S", "SK", "count", "blocks", "heads_together", "tiles", "left", "right"])
def _attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, taken_ptr, B, S, SK,
    count, blocks, heads_together, tiles, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr,
    LOADED: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[-1]
    PARTS: gl.constexpr = -(-D // BLOCK_D)
    q_s = buffers(q_desc, GROUPS * PARTS)
    out_s = buffers(out_desc, GROUPS)
    k_s = buffers(k_desc, STAGES * PARTS)
    v_s = buffers(v_desc, STAGES)
    q = Ring(q_s, barriers(GROUPS, 1), barriers(GROUPS, 1))
    queue = tile_queue(GROUPS)
    fence_async_shared()
    problem = Problem(B, S, SK, count, blocks, heads_together, 1, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    shared = Shared(problem, tiles, q, k_s, v_s, barriers(STAGES, 1), barriers(STAGES, 1), queue)
    outputs = out_desc, lse_ptr, sinks_ptr, scale, out_s
    sources = q_desc, k_desc, v_desc, taken_ptr
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, shared, outputs, H, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 2,
                           TURNS, OVERLAP, LOADED, LAZY)),
                (_attend, (1, shared, outputs, H, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 2,
                           TURNS, OVERLAP, LOADED, LAZY)),
                (_load, (shared, sources, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 2)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (0, shared, outputs, H, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 3,
                           TURNS, OVERLAP, LOADED, LAZY)),
                (_attend, (1, shared, outputs, H, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 3,
                           TURNS, OVERLAP, LOADED, LAZY)),
                (_attend, (2, shared, outputs, H, D, DV, SOFTCAP, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 3,
                           TURNS, OVERLAP, LOADED, LAZY)),
                (_load, (shared, sources, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_N, STAGES, 3)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, 24],
        )  # fmt: skip


def attention_fwd_hopper(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, masking: Masking, out: Tensor, lse: Tensor
) -> None:
    """Fill ``out`` [B, S, H, Dv] and ``lse`` [B, H, S] of a call that ``hopper_kernels`` accepts."""
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    width, width_v = widths_of(D, DV)
    tile = hopper_forward(D, DV, masking, S, SK)
    blocks = masking.num_blocks(S, 64 * tile.groups)
    tiles = blocks * B * H
    programs = min(tiles, num_programs(q.device, 1))
    rounds = 1 if masking.sequences else 2 if masking.uneven else 3  # short calls save the kernel that clears a counter
    taken = torch.zeros(1, dtype=torch.int32, device=q.device) if tiles > rounds * programs else None
    launch(
        _attention_fwd_hopper_kernel,
        (programs,),
        (lse, sinks, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans, taken),
        (B, S, SK, masking.sequences, blocks, heads_in_l2(masking, k, v, H // HK), tiles, masking.left,
         masking.right),
        (masking.scale,),
        (descriptor(q, 64, width, masking), descriptor(k, tile.block_n, width, masking),
         descriptor(v, tile.block_n, width_v, masking),
         descriptor(out, 64, width_v if width <= 128 else width_v // 2, masking)),
        H=H,
        HK=HK,
        D=D,
        DV=DV,
        **masking.constants(),
        **tile.constants(),
    )  # fmt: skip
