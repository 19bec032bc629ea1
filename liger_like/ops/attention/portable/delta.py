"""Compute the numbers of each query that the backward kernels read, delta_i = do_i . o_i among them, and dsinks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.attention.softmax import LOG2E
from liger_like.runtime.blocks import block_of
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import dense, packed
from liger_like.runtime.registry import op

MAX_BLOCK = 128  # queries in the largest block of a backward kernel


@triton.jit(do_not_specialize=["B", "S", "PADDED", "blocks"])
def _delta_kernel(
    dout_ptr, out_ptr, lse_ptr, sums_ptr, dlse_ptr, sinks_ptr, stats_ptr, dsinks_ptr, stride_b, stride_s, stride_h,
    stride_lb, stride_lh, stride_ls, B, S, PADDED, H, blocks, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // H, head % H
    rows, cols = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, BLOCK_D)
    mask = rows < S
    both = mask[:, None] & (cols < DV)[None, :]
    dout_ptrs = dout_ptr + b * stride_b + h * stride_h + rows[:, None] * stride_s + cols[None, :]
    out_ptrs = out_ptr + ((b * S + rows) * H + h)[:, None] * DV + cols[None, :]
    dout = tl.load(dout_ptrs, mask=both, other=0.0).to(tl.float32)
    delta = tl.sum(dout * tl.load(out_ptrs, mask=both, other=0.0).to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + b * stride_lb + h * stride_lh + rows * stride_ls, mask=mask, other=0.0)
    count = tl.cast(B, tl.int64) * H
    max_ptr = lse_ptr if sums_ptr is None else sums_ptr
    row_max = tl.load(max_ptr + head * S + rows, mask=mask, other=float("-inf"))
    unseen = row_max == float("-inf")
    row_max, delta = tl.where(unseen, float("inf"), row_max), tl.where(unseen, 0.0, delta)
    stats_ptr += head * PADDED + rows
    inside, log_sum = rows < PADDED, 0.0
    tl.store(stats_ptr, row_max, mask=inside)
    tl.store(stats_ptr + count * PADDED, delta, mask=inside)
    if sums_ptr is not None:
        log_sum = tl.load(sums_ptr + (count + head) * S + rows, mask=mask, other=0.0)
        tl.store(stats_ptr + 2 * count * PADDED, log_sum, mask=inside)
    if sinks_ptr is not None:
        p = tl.exp2((tl.load(sinks_ptr + h).to(tl.float32) - row_max) * LOG2E - log_sum)
        tl.store(dsinks_ptr + tl.program_id(0), -tl.sum(p * delta, 0))


def _delta_outputs(
    dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor | None, dlse: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, H, S = lse.shape
    count = 2 if sums is None or not sums.numel() else 3
    padded = -(-S // MAX_BLOCK) * MAX_BLOCK + MAX_BLOCK
    stats = torch.empty((count, B, H, padded), dtype=lse.dtype, device=lse.device)
    return stats, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


@op(
    "attention_delta(Tensor dout, Tensor out, Tensor lse, Tensor? sums, Tensor? dlse, Tensor? sinks)"
    " -> (Tensor stats, Tensor dsinks)",
    _delta_outputs,
    inlined=True,
    replayed=True,
)
def attention_delta(
    dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor | None, dlse: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the numbers of each row that the backward reads, and the gradient of the sinks.

    The stats [2 or 3, B, H, more than S] in fp32 are lse, or inf where no key was seen, so that every p is 0; delta =
    sum(dout * out) - dlse; and, if ``sums`` [2, B, H, S] of ``attention_fwd`` are given, their log2, beside the
    greatest score in place of lse. Rows past S let blocks be read whole.
    """
    stats, dsinks = _delta_outputs(dout, out, lse, sums, dlse, sinks)
    B, S, H, DV = out.shape
    if not out.numel():
        return stats, dsinks.zero_()
    apart = stats.shape[0] == 3
    dout, block_d = dense(dout), block_of(int(DV))
    block_m = max(1, 4096 // block_d)
    blocks = -(-stats.shape[3] // block_m)
    partial = None if sinks is None else lse.new_empty(B, H, blocks)
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    launch(
        _delta_kernel,
        (B * H * blocks,),
        (dout, out, lse, sums if apart else None, dlse, packed(sinks), stats, partial),
        (*dout.stride()[:3], *strides, B, S, stats.shape[3], H, blocks),
        DV=DV,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
    )
    return stats, dsinks if partial is None else partial.sum((0, 2)).to(dsinks.dtype)
