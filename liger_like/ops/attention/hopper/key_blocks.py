"""Programs that own a block of keys, for dk and dv on Hopper: their launch, and the warp that loads their queries."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_like.ops.attention.hopper.buffers import Sequence, load_rows
from liger_like.ops.attention.masking import Masking, key_heads_together
from liger_like.runtime.gluon import TensorDescriptor, cp_async, cp_async_arrive, gl, gluon, mbarrier
from liger_like.runtime.hopper import ROWS
from liger_like.runtime.launcher import launch
from liger_like.runtime.support import num_programs

STAGES = gl.constexpr(2)


@gluon.jit
def _fill(desc, sequence, h, m, ring, ptr, numbers, use):
    """Load queries, and the number of each at ``ptr`` (lse or delta), as the use-th filling of a ring.

    TMA loads zeros past the end of the sequence. These rows get the number of the last query: the next sequence's may
    be NaN.
    """
    s = use % STAGES
    mbarrier.wait(ring.empty.index(s), use // STAGES & 1 ^ 1)
    # not by TMA, for which a packed sequence would have to start at a multiple of 16 bytes
    offs = m + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    cp_async(numbers.index(s), ptr + gl.minimum(offs, sequence.end - 1))
    cp_async_arrive(ring.full.index(s), increment_count=False)
    load_rows(desc, sequence, h, m, ring.buffers, s, ring.full.index(s), STAGES)


@gluon.jit
def load_queries(block, shared, descs, stats_ptr, B, PADDED, H: gl.constexpr):
    """Load the keys and values of a KeyBlock into ``shared``, then the queries that see them into its rings."""
    q_desc, k_desc, v_desc, dout_desc = descs
    keys = Sequence(block.batch, block.end_k)
    queries = Sequence(block.batch, block.end_q)
    load_rows(k_desc, keys, block.head, block.row, shared.k, 0, shared.kv_full, 1)
    load_rows(v_desc, keys, block.head, block.row, shared.v, 0, shared.kv_full, 1)
    use = 0
    for h in range(block.first_head, block.first_head + block.heads):
        lse_ptr = stats_ptr + (block.batch * H + h).to(gl.int64) * PADDED
        delta_ptr = lse_ptr + B.to(gl.int64) * H * PADDED
        for m in range(block.start, block.end, ROWS):
            _fill(q_desc, queries, h, m, shared.q, lse_ptr, shared.lse, use)
            _fill(dout_desc, queries, h, m, shared.dout, delta_ptr, shared.delta, use)
            use += 1


def launch_over_keys(
    kernel: Callable[..., Any], block_n: int, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, masking: Masking,
    splits: int, dk: Tensor, dv: Tensor, descriptors: tuple[TensorDescriptor, ...], *taken: Tensor | None,
    **constants: Any,
) -> None:  # fmt: skip
    """Launch ``kernel``, whose programs own ``block_n`` keys of a key head and a split of its query heads.

    It fills dk and dv [splits, B, Sk, Hk, D]. With a counter ``taken``, one program for each multiprocessor draws
    blocks of keys.
    """
    (B, S, H, D), (SK, HK, DV) = q.shape, v.shape[1:]
    blocks = masking.num_blocks(SK, block_n)
    programs = blocks * B * HK
    if any(t is not None for t in taken):
        programs = min(programs, num_programs(q.device, 1))
    launch(
        kernel,
        (programs, splits),
        (stats, dk, dv, masking.cu_seqlens_q, masking.cu_seqlens_k, masking.spans, *taken),
        (B, S, SK, stats.shape[3], masking.sequences, blocks, key_heads_together(masking, q, k, v, block_n), splits,
         masking.left, masking.right),
        (masking.scale,),
        descriptors,
        H=H,
        HK=HK,
        D=D,
        DV=DV,
        **constants,
        num_warps=4,
    )  # fmt: skip
