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
from liger_like.ops.attention.hopper.buffers import descriptor, parts_of, rows_of
from liger_like.ops.attention.hopper.key_blocks import STAGES, launch_over_keys, load_queries
from liger_like.ops.attention.hopper.products import start_add_product, start_contract, store_sums, zero_sums
from liger_like.ops.attention.hopper.rows import Problem, bounds, hide, keys_of
from liger_like.ops.attention.masking import Masking
from liger_like.ops.attention.softmax import LOG2E, unit_of_scores
from liger_like.ops.attention.visibility import load_spans
from liger_like.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    here,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.runtime.hopper import ROWS, Ring, barriers, buffers, sum_layout, wait_for, zero_sum

BLOCK_N = 2 * ROWS.value  # keys of a program


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
def _parts(parts, s):
    """Return the s-th buffers [rows, 128] and [rows, 64] of 192 features."""
    first, rest = parts
    COUNT: gl.constexpr = rest.shape[0]
    LENGTH: gl.constexpr = rest.shape[-2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    wide = reinterpret(first, first.dtype, [COUNT, LENGTH, 2 * ROWS], layout)
    return wide.index(s), rest.index(s).reshape([LENGTH, ROWS])


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
        k = rows_of(_parts(shared.k, here(zero)), g * ROWS)
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
    block = keys_of(gl.program_id(0), problem, H, HK, HAS_LEFT, HAS_RIGHT, SEQUENCES, ROWS, 2 * ROWS)
    shared = Shared(q_ring, dout_ring, k_s, v_s, lse_s, delta_s, kv_full)
    descs = q_desc, k_desc, v_desc, dout_desc
    outputs = dk_ptr, dv_ptr
    gl.warp_specialize(
        [
            (_sum, (0, block, problem, shared, outputs, scale, HK, D, DV, HAS_LEFT, HAS_RIGHT)),
            (_sum, (1, block, problem, shared, outputs, scale, HK, D, DV, HAS_LEFT, HAS_RIGHT)),
            (load_queries, (block, shared, descs, stats_ptr, B, PADDED, H)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def fill_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking, splits: int, dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv [splits, B, Sk, Hk, D] with the sums over each split of the query heads of a key head."""
    width, width_v = widths_of(q.shape[-1], v.shape[-1])
    constants = {name: value for name, value in masking.constants().items() if name != "SOFTCAP"}
    moved = (q, 64, width), (k, BLOCK_N, width), (v, BLOCK_N, width_v), (dout, 64, width_v)
    descriptors = tuple(descriptor(x, rows, n, masking) for x, rows, n in moved)
    launch_over_keys(
        _attention_dkv_192_hopper_kernel, BLOCK_N, q, k, v, stats, masking, splits, dk, dv, descriptors, **constants
    )
