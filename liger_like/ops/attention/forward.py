"""Attention forward: one pass over the keys with an online softmax (arXiv:1805.02867).

This file registers the op and chooses its kernel.
"""

from typing import Any

import torch
from torch import Tensor

from liger_like.ops.attention.choice import FORWARD, hopper_kernels, is_small
from liger_like.ops.attention.flops import forward_flops
from liger_like.ops.attention.masking import FIELDS, MASKING_SCHEMA, Masking
from liger_like.ops.attention.portable import forward as portable
from liger_like.ops.attention.tiles import tile_for
from liger_like.runtime.layout import dense, packed
from liger_like.runtime.registry import op
from liger_like.runtime.support import refused

FEW = "all queries that share a key head fit into one block: its keys are split among programs instead"


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H, _ = q.shape
    lse = torch.empty((B, H, S), dtype=torch.float32, device=q.device)
    apart = q.dtype == torch.float32 or bias is not None
    return q.new_empty(B, S, H, v.shape[-1]), lse, lse.new_empty((2, B, H, S) if apart else 0)


@op(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? sinks, {MASKING_SCHEMA},"
    " bool deterministic=False) -> (Tensor, Tensor, Tensor)",
    _outputs,
    flops=forward_flops,
    inlined=lambda q, k, v, sinks, *options: is_small(q, k, v, *options),
    replayed=True,
)
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output [B, S, H, Dv] and lse [B, H, S] of q [B, S, H, D], k [B, Sk, Hk, D] and v [B, Sk, Hk, Dv].

    For the backward in fp32 and with a bias, whose scores may be so large that an lse in fp32 loses the log of the sum,
    also return the sums [2, B, H, S]: each row's greatest score, and the log2 of the sum relative to it.
    The last option, ``deterministic``, is for the backward of compiled graphs.
    """
    out, lse, sums = _outputs(q, k, v, sinks, *options)
    if not q.numel():
        return out, lse, sums
    masking, sinks = Masking(*options[:FIELDS]), packed(sinks)
    q, k, v = map(dense, (q, k, v))
    tile, decode = (tile_for(kernel, q, v, masking) for kernel in ("fwd", "few"))
    # all queries that share a key head fit into one block, whose keys are then split among programs
    rows = masking.max_seqlen_q * (q.shape[2] // k.shape[2])
    few = rows <= tile.block_m
    if rows <= decode.block_m:
        tile = decode
    if hopper := (not few or refused(FEW)) and hopper_kernels(FORWARD, masking, q, k, v):
        hopper.attention_fwd_hopper(q, k, v, sinks, masking, out, lse)
    else:
        portable.fill_output(q, k, v, sinks, masking, tile, few, out, lse, sums if sums.numel() else None)
    return out, lse, sums
