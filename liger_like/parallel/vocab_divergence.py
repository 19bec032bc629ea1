"""Divergence of two vocabulary-parallel heads: each process of a group has the same words of both."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from liger_like.ops.losses import vocab_shards
from liger_like.ops.losses.linear_divergence import DivergenceOutput, fused_linear_divergence
from liger_like.parallel.vocab_parallel import _GatherTokens, _words_of
from liger_like.runtime.checks import require, require_integer, require_type


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
    if isinstance(weight_shard, DTensor):
        group, vocab_start, vocab_size = _words_of(weight_shard)
    if isinstance(x, DTensor):
        if x.placements not in ((Replicate(),), (Shard(x.dim() - 2),)):
            raise ValueError(f"x must be replicated, or sharded by its tokens, got {x.placements}")
        sequence_sharded = x.placements != (Replicate(),)
    x, weight_shard, teacher_x, teacher_weight_shard = map(_local, (x, weight_shard, teacher_x, teacher_weight_shard))
    options |= {name: _local(options[name]) for name in ("bias", "teacher_bias") if name in options}
    require("weight_shard", weight_shard)
    if group is None:
        raise TypeError("group must be a ProcessGroup unless weight_shard is a DTensor, got None")
    require_type("group", group, dist.ProcessGroup)
    for name, number in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if number is not None:
            require_integer(name, number, 0)
    processes, own = dist.get_world_size(group), weight_shard.shape[0]
    start = dist.get_rank(group) * own if vocab_start is None else vocab_start
    words = processes * own if vocab_size is None else vocab_size
    if own == 0 or not 0 <= start <= words - own:
        raise ValueError(f"weight_shard must lie in a vocabulary of {words} words, got {own} words from {start} on")
    shard = vocab_shards.Shard(group.group_name, start, words, not sequence_sharded)
    if not sequence_sharded:
        return fused_linear_divergence(x, weight_shard, teacher_x, teacher_weight_shard, mask, shard=shard, **options)
    if mask is not None:
        require_type("mask", mask, Tensor)
        if mask.shape != (*x.shape[:-2], x.shape[-2] * processes):
            raise ValueError(f"mask must have {processes} times the tokens of x {[*x.shape]}, got {[*mask.shape]}")
        # the gathered tokens are in the order of the processes
        mask = mask.view(*mask.shape[:-1], processes, -1).movedim(-2, 0)
    x = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    teacher_x = vocab_shards.gathered(teacher_x.detach(), group)
    lora = options.get("lora")
    if lora is not None and len(lora) == 2:  # u [..., S / R, r] is sharded by tokens, too
        options["lora"] = _GatherTokens.apply(lora[0], group), lora[1]  # type: ignore[no-untyped-call]
    result = fused_linear_divergence(x, weight_shard, teacher_x, teacher_weight_shard, mask, shard=shard, **options)
    if isinstance(result, DivergenceOutput):
        return result._replace(**{name: _in_order(t) for name, t in result._asdict().items() if t is not None})
    return _in_order(result)


def _local(tensor: Any) -> Any:
    """Return the local part of a DTensor; other values as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_order(result: Tensor) -> Tensor:
    """Return a per-token result [R, ..., S / R] in the order of the tokens; a scalar loss as it is."""
    return result if result.dim() == 0 else result.movedim(0, -2).flatten(-2)
