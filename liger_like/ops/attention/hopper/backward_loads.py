"""Shared memory of the one-pass attention backward for Hopper, and the warp that loads into it."""

from typing import NamedTuple

from liger_like.ops.attention.hopper.buffers import Sequence, load_rows
from liger_like.ops.attention.hopper.rows import keys_of, next_tile, put_tile
from liger_like.runtime.gluon import cp_async, cp_async_arrive, gl, gluon, mbarrier
from liger_like.runtime.hopper import ROWS


class Buffers(NamedTuple):
    """Shared memory for blocks of q, k, v and dout, for lse and delta of each query, and for ds and dq."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    ds: gl.tensor
    dq: gl.tensor


class Barriers(NamedTuple):
    """Barriers of k, of v and of both, of the rings of queries, and of ds."""

    k_full: gl.tensor
    v_full: gl.tensor
    kv_empty: gl.tensor
    full: gl.tensor
    empty: gl.tensor
    ds_full: gl.tensor
    ds_empty: gl.tensor


@gluon.jit
def _load_block(
    block, descs, stats_ptr, bufs, bars, use, count, B, PADDED, H: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load the queries of a KeyBlock, from the use-th filling of their ring on, and its keys and values, as the
    count-th ones, after the first queries. Return the next numbers.
    """
    q_desc, k_desc, v_desc, dout_desc = descs
    keys = Sequence(block.batch, block.end_k)
    queries = Sequence(block.batch, block.end_q)
    offs = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    first_use = use
    for h in range(block.first_head, block.first_head + block.heads):
        lse_ptr = stats_ptr + (block.batch * H + h).to(gl.int64) * PADDED
        delta_ptr = lse_ptr + B.to(gl.int64) * H * PADDED
        for m in range(block.start, block.end, BLOCK_M):
            s = use % STAGES
            mbarrier.wait(bars.empty.index(s), use // STAGES & 1 ^ 1)
            # not by TMA, for which a packed sequence would have to start at a multiple of 16 bytes
            cp_async(bufs.lse.index(s), lse_ptr + m + offs)
            # 0 times what the next sequence has may be NaN
            cp_async(bufs.delta.index(s), delta_ptr + gl.minimum(m + offs, block.end_q - 1))
            cp_async_arrive(bars.full.index(s), increment_count=False)
            load_rows(q_desc, queries, h, m, bufs.q, s, bars.full.index(s), STAGES)
            load_rows(dout_desc, queries, h, m, bufs.dout, s, bars.full.index(s), STAGES)
            if use == first_use:
                mbarrier.wait(bars.kv_empty, count & 1 ^ 1)
                load_rows(k_desc, keys, block.head, block.row, bufs.k, 0, bars.k_full, 1)
                load_rows(v_desc, keys, block.head, block.row, bufs.v, 0, bars.v_full, 1)
            use += 1
    return use, gl.where(use > first_use, count + 1, count)


@gluon.jit
def load_key_blocks(
    block, queue, problem, taken_ptr, descs, stats_ptr, bufs, bars, PADDED, H: gl.constexpr, HK: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    B = problem.B
    use = 0
    count = 0
    if taken_ptr is None:
        _load_block(block, descs, stats_ptr, bufs, bars, use, count, B, PADDED, H, BLOCK_M, STAGES)
    else:
        turn = 0
        tile = gl.program_id(0)
        while tile < problem.blocks * B * HK:
            own = keys_of(tile, problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, BLOCK_M, 2 * ROWS)
            if own.row < own.end_k:
                put_tile(queue, turn, own)
                use, count = _load_block(own, descs, stats_ptr, bufs, bars, use, count, B, PADDED, H, BLOCK_M, STAGES)
                turn += 1
            tile = next_tile(taken_ptr, 0)
        put_tile(queue, turn, (-1,))  # no block is left
