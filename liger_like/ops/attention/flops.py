"""Count the FLOPs of the attention kernels as torch counts its own attention: masked pairs count, too."""

from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

from liger_like.ops.attention.masking import FIELDS, Masking


def _scores(q: Tensor, k: Tensor, masking: Masking) -> int:
    """Return the number of scores; packed sequences of unknown lengths count as the longest."""
    (B, S, H, _), SK = q.shape, k.shape[1]
    cu_q, cu_k = masking.cu_seqlens_q, masking.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return B * H * S * SK
    if isinstance(cu_q, FakeTensor):
        return H * masking.sequences * masking.max_seqlen_q * masking.max_seqlen_k
    return H * int((cu_q.diff().long() * cu_k.diff()).sum())


def forward_flops(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> int:
    """Return the FLOPs of the scores and of their product with v."""
    return 2 * _scores(q, k, Masking(*options[:FIELDS])) * (q.shape[-1] + v.shape[-1])


def backward_flops(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, key_spans: Tensor | None, *args: Any
) -> int:
    """Return the FLOPs of the scores, computed again, of their gradient, and of the gradients that ``needs`` names."""
    *options, _, (needs_q, needs_k, needs_v, needs_bias) = args
    of_v = needs_v + any((needs_q, needs_k, needs_bias))
    each = q.shape[-1] * (1 + needs_q + needs_k) + v.shape[-1] * of_v
    return 2 * _scores(q, k, Masking(*options)) * each
