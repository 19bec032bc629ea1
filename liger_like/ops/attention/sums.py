"""Round the sums of the backward in one launch: dq, which is summed in fp32, and the parts of dk and dv."""

import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.launcher import launch

BLOCK = 2048


@triton.jit
def _sum_parts(parts_ptr, out_ptr, block, N, splits, factor, BLOCK: tl.constexpr):
    """Store one block of the sum of ``splits`` parts of N numbers each, times ``factor``; skip None."""
    if out_ptr is not None:
        offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < N
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, splits):
            total += tl.load(parts_ptr + tl.cast(i, tl.int64) * N + offs, mask=mask, other=0.0)
        tl.store(out_ptr + offs, total * factor, mask=mask)


@triton.jit(do_not_specialize=["splits", "blocks_q", "blocks_k"])
def _round_sums_kernel(
    dk_parts_ptr, dv_parts_ptr, dq_sum_ptr, dq_ptr, dk_ptr, dv_ptr, NQ, NK, NV, splits, blocks_q, blocks_k, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    block = tl.program_id(0)
    if block < blocks_q:
        _sum_parts(dq_sum_ptr, dq_ptr, block, NQ, 1, scale, BLOCK)
    elif block < blocks_q + blocks_k:
        _sum_parts(dk_parts_ptr, dk_ptr, block - blocks_q, NK, splits, 1.0, BLOCK)
    else:
        _sum_parts(dv_parts_ptr, dv_ptr, block - blocks_q - blocks_k, NV, splits, 1.0, BLOCK)


def round_sums(
    dq_sum: Tensor | None, dq: Tensor | None, dk_parts: Tensor, dv_parts: Tensor, dk: Tensor | None,
    dv: Tensor | None, splits: int, scale: float,
) -> None:  # fmt: skip
    """Store ``scale`` times ``dq_sum`` in dq, and the sums over the ``splits`` parts in dk and dv; skip None.

    The order of additions is always the same. All tensors are contiguous.
    """
    sizes = [0 if x is None else x.numel() for x in (dq, dk, dv)]
    blocks_q, blocks_k, blocks_v = (-(-size // BLOCK) for size in sizes)
    launch(
        _round_sums_kernel,
        (blocks_q + blocks_k + blocks_v,),
        (dk_parts, dv_parts, dq_sum, dq, dk, dv),
        (*sizes, splits, blocks_q, blocks_k),
        (scale,),
        BLOCK=BLOCK,
    )
