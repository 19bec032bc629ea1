"""Divergence of two vocabulary-parallel heads: each process of a group has the same words of both."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_like.ops.losses.linear_divergence import DivergenceOutput, fused_linear_divergence
from liger_like.ops.losses.vocab_shards import Shard, gathered
from liger_like.parallel.vocab_parallel import over_words


def vocab_parallel_divergence(
    x: Tensor,
    weight_shard: Tensor,
    teacher_x: Tensor,
    teacher_weight_shard: Tensor,
    mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    sequence_sharded: bool = False,
    **options: Any,
) -> Tensor | DivergenceOutput:
    """Return ``fused_linear_divergence`` for heads whose words are sharded over ``group``, of R processes.

    Tensors, words and gradients of the student are as in ``vocab_parallel_cross_entropy``. ``teacher_weight_shard``
    [V', H'] has the same words as ``weight_shard``, and ``teacher_x`` the same tokens as ``x``: with
    ``sequence_sharded`` both are the process's part. ``mask`` [...], or [..., S] of all tokens, is whole. ``options``
    are those of ``fused_linear_divergence``; ``bias``, ``teacher_bias`` and the second matrix of ``lora`` are shards.

    Each chunk of tokens needs one all-gather of 5 numbers per token for a KL divergence, and of 4 and then 2 numbers
    for a beta between 0 and 1; "entropy" and "teacher_entropy" add a number each, and "agree" four.

    Raises as ``fused_linear_divergence`` and ``vocab_parallel_cross_entropy`` do, and ValueError for a mask that does
    not have R times the tokens of a sharded ``x``.
    """
    teacher_x, teacher_weight, teacher_bias = map(
        _local, (teacher_x, teacher_weight_shard, options.pop("teacher_bias", None))
    )

    def divergence(x: Tensor, weight: Tensor, mask: Tensor | None = None, *, shard: Shard, **more: Any) -> Any:
        # a sharded x has been gathered
        whole = teacher_x if shard.reduce_dx else gathered(teacher_x.detach(), shard.processes())
        return fused_linear_divergence(
            x, weight, whole, teacher_weight, mask, teacher_bias=teacher_bias, shard=shard, **more
        )

    words, tokens = (group, vocab_start, vocab_size), {} if mask is None else {"mask": mask}
    return over_words(divergence, x, weight_shard, words, tokens, sequence_sharded, options)  # type: ignore[no-any-return]


def _local(tensor: Any) -> Any:
    """Return the local part of a DTensor; other values as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
