"""dk and dv of heads of 192 features with values of 128 on Hopper, in Gluon: two warp groups of 64 keys each.

The sums of 64 keys, 160 registers of a thread, leave room for the scores of 64 queries or for dp, not for both. So p is
kept in the dtype of the tensors until ds is made of it, and dp starts at -delta. The slopes of a softcap need more:
``backward_256`` has a kernel for them. Each group multiplies while the other exponentiates.

192 features are held in two parts of 128 and 64, not three of 64: Triton 3.9 copies an operand in registers for each
product with a part.
"""

from typing import NamedTuple

from torch import Tensor

from liger_like.ops.attention.choice import widths_of
from liger_like.ops.attention.hopper.buffers import Sequence, at, descriptor, load_rows, parts_of, rows_of
from liger_like.ops.attention.hopper.products import start_add_product, start_contract, store_sums, zero_sums
from liger_like.ops.attention.hopper.rows import Problem, bounds, hide, keys_of
from liger_like.ops.attention.masking import Masking, key_heads_together
from liger_like.ops.attention.softmax import LOG2E, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    cp_async,
    cp_async_arrive,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.runtime.hopper import ROWS, Ring, barriers, buffers, sum_layout, wait_for, zero_sum
from liger_like.runtime.launcher import launch

BLOCK_N = 2 * ROWS.value  # keys of a program
STAGES = gl.constexpr(2)


class Shared(NamedTuple):
    """Shared memory: rings of q and dout, blocks of k and v, lse and delta per query. q and k are in parts."""

    q: Ring
    dout: Ring
    k: tuple[gl.tensor, gl.tensor]
    v: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    kv_full: gl.tensor


@gluon.jit
def _load_parts(desc, sequence, h, row, parts, s, full):
    """Load rows by TMA into the s-th buffers of both parts of 192 features; the load is one arrival at ``full``."""
    first, rest = parts
    mbarrier.expect(full, 3 * desc.block_type.nbytes)
    for i in gl.static_range(3):
        place = at(desc, sequence, h, row, i * ROWS)
        tma_load(desc, place, full, first.index(2 * s + i) if i < 2 else rest.index(s))


@gluon.jit
def _parts(parts, s):
    """Return the s-th buffers [rows, 128] and [rows, 64] of 192 features."""
    first, rest = parts
    COUNT: gl.constexpr = rest.shape[0]
    LENGTH: gl.constexpr = rest.shape[-2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    wide = reinterpret(first, first.dtype, [COUNT, LENGTH, 2 * ROWS], layout)
    return wide.index(s), rest.index(s).reshape([LENGTH, ROWS])


@gluon.jit
def _fill(desc, sequence, h, m, ring, ptr, numbers, use):
    """Load queries, and the number of each at ``ptr`` (lse or delta), as the use-th filling of a ring.

    Rows past the end of the sequence get the number of the last query: the next sequence's may be NaN.
    """
    s = use % STAGES
    mbarrier.wait(ring.empty.index(s), use // STAGES & 1 ^ 1)
    # not by TMA, for which a packed sequence would have to start at a multiple of 16 bytes
    offs = m + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    cp_async(numbers.index(s), ptr + gl.minimum(offs, sequence.end - 1))
    cp_async_arrive(ring.full.index(s), increment_count=False)
    if desc.block_type.shape[-1] == ROWS:
        _load_parts(desc, sequence, h, m, ring.buffers, s, ring.full.index(s))
    else:
        load_rows(desc, sequence, h, m, ring.buffers, s, ring.full.index(s), STAGES)


@gluon.jit
def _load_queries(block, shared, descs, stats_ptr, B, PADDED, H: gl.constexpr):
    q_desc, k_desc, v_desc, dout_desc = descs
    keys = Sequence(block.batch, block.end_k)
    queries = Sequence(block.batch, block.end_q)
    _load_parts(k_desc, keys, block.head, block.row, shared.k, 0, shared.kv_full)
    load_rows(v_desc, keys, block.head, block.row, shared.v, 0, shared.kv_full, 1)
    use = 0
    for h in range(block.first_head, block.first_head + block.heads):
        lse_ptr = stats_ptr + (block.batch * H + h).to(gl.int64) * PADDED
        delta_ptr = lse_ptr + B.to(gl.int64) * H * PADDED
        for m in range(block.start, block.end, ROWS):
            _fill(q_desc, queries, h, m, shared.q, lse_ptr, shared.lse, use)
            _fill(dout_desc, queries, h, m, shared.dout, delta_ptr, shared.delta, use)
            use += 1


@gluon.jit
def _packed(x):
    """Return ``x``, of 16 bits, with two numbers in a register; else the compiler keeps each in its own one, too."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def _sum(
    g: gl.constexpr, block, problem, shared, outputs, scale, HK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr = outputs
    q_ring = shared.q
    dout_ring = shared.dout
    start = block.start
    end = block.end
    dtype: gl.constexpr = dout_ring.buffers.dtype
    layout_s: gl.constexpr = sum_layout(ROWS)
    cols: gl.constexpr = gl.SliceLayout(0, layout_s)
    zeros = zero_sum(ROWS)
    dk = zero_sums(_parts(q_ring.buffers, 0))
    dv = zero_sums(parts_of(dout_ring.buffers, 0, STAGES))
    unit = unit_of_scores(scale, None, False)
    row = block.row + g * ROWS
    keys = (row + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s)))[:, None]
    spans = None
    if problem.spans_ptr is not None:
        spans = load_spans(problem.spans_ptr, block.batch.to(gl.int64), problem.B, problem.SK, keys)
    limits = bounds(keys - block.shift, problem.right, problem.left, spans, block.end_q, HAS_RIGHT, HAS_LEFT)
    steps = block.heads * gl.cdiv(end - start, ROWS)
    mbarrier.wait(shared.kv_full, 0)
    mbarrier.wait(q_ring.full.index(0), 0, pred=steps > 0)
    k = rows_of(_parts(shared.k, 0), g * ROWS)
    s_acc = start_contract(k, _parts(q_ring.buffers, 0), zeros)
    s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    m = start
    for use in range(0, steps):
        # an index that the compiler does not know to be 0: else what describes k and v stays in registers
        zero = use >> 30
        s = use % STAGES
        phase = use // STAGES & 1
        lse = shared.lse.index(s).load(cols) * LOG2E
        p = gl.exp2(s_acc * unit - lse[None, :])
        if (m < block.inner_start) | (m + ROWS > block.inner_end):
            p = hide(p, m, limits)
        p = _packed(p.to(dtype))
        mbarrier.wait(dout_ring.full.index(s), phase)
        dout = parts_of(dout_ring.buffers, s, STAGES)
        (v,) = rows_of(parts_of(shared.v, zero, 1), g * ROWS)
        dp = zeros - shared.delta.index(s).load(cols)[None, :]
        dp = warpgroup_mma(v, dout[0].permute((1, 0)), dp, is_async=True)
        dv = start_add_product(dv, p, dout)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p.to(gl.float32) * dp).to(dtype)
        dv = wait_for(dv, 0)
        mbarrier.arrive(dout_ring.empty.index(s), count=1)
        dk = start_add_product(dk, ds, _parts(q_ring.buffers, s))
        m += ROWS
        m = gl.where(m < end, m, start)
        t = (use + 1) % STAGES
        mbarrier.wait(q_ring.full.index(t), (use + 1) // STAGES & 1, pred=use + 1 < steps)
        k = rows_of(_parts(shared.k, zero), g * ROWS)
        s_acc = start_contract(k, _parts(q_ring.buffers, t), zeros)
        dk = wait_for(dk, len(k))
        mbarrier.arrive(q_ring.empty.index(s), count=1)
        s_acc = warpgroup_mma_wait(0, deps=(s_acc,))
    # the sums of each split have memory of their own
    first = ((gl.program_id(1) * problem.B + block.batch).to(gl.int64) * problem.SK + row) * HK + block.head
    store_sums(dk_ptr + first * D, dk, block.end_k - row, HK, D, scale)
    store_sums(dv_ptr + first * DV, dv, block.end_k - row, HK, DV)


@gluon.jit(do_not_specialize=["B", "S", "SK", "PADDED", "count", "blocks", "heads_together", "splits", "left", "right"])
def _attention_dkv_192_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, spans_ptr, B, S, SK, PADDED,
    count, blocks, heads_together, splits, left, right, scale, H: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, DV:
    gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SEQUENCES: gl.constexpr,
):  # fmt: skip
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = buffers(q_desc, 2 * STAGES), buffers(q_desc, STAGES)
    k_s = buffers(k_desc, 2), buffers(k_desc, 1)
    v_s = buffers(v_desc, 1)
    dout_s = buffers(dout_desc, STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    kv_full = barriers(1, 2).index(0)
    # full: lse or delta by the loading warp's threads, q or dout by one of them
    q_ring = Ring(q_s, barriers(STAGES, 33), barriers(STAGES, 2))
    dout_ring = Ring(dout_s, barriers(STAGES, 33), barriers(STAGES, 2))
    fence_async_shared()
    problem = Problem(B, S, SK, count, blocks, heads_together, splits, left, right, cu_q_ptr, cu_k_ptr, spans_ptr)
    block = keys_of(problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, ROWS, 2 * ROWS)
    shared = Shared(q_ring, dout_ring, k_s, v_s, lse_s, delta_s, kv_full)
    descs = q_desc, k_desc, v_desc, dout_desc
    outputs = dk_ptr, dv_ptr
    gl.warp_specialize(
        [
            (_sum, (0, block, problem, shared, outputs, scale, HK, D, DV, HAS_LEFT, HAS_RIGHT)),
            (_sum, (1, block, problem, shared, outputs, scale, HK, D, DV, HAS_LEFT, HAS_RIGHT)),
            (_load_queries, (block, shared, descs, stats_ptr, B, PADDED, H)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query heads of a key head."""
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    width, width_v = widths_of(D, DV)
    blocks = masking.num_blocks(SK, BLOCK_N)
    constants = {name: value for name, value in masking.constants().items() if name != "SOFTCAP"}
    launch(
        _attention_dkv_192_hopper_kernel, (blocks * B * HK, splits), (stats, dk, dv, masking.cu_seqlens_q,
        masking.cu_seqlens_k, masking.spans), (B, S, SK, stats.shape[3], masking.sequences, blocks,
        key_heads_together(masking, q, k, v, BLOCK_N), splits,
         masking.left, masking.right),
        (masking.scale,),
        tuple(descriptor(x, rows, n, masking) for x, rows, n in (
            (q, 64, width), (k, BLOCK_N, width), (v, BLOCK_N, width_v), (dout, 64, width_v))),
        H=H,
        HK=HK,
        D=D,
        DV=DV,
        **constants,
        num_warps=4,
    )  # fmt: skip
