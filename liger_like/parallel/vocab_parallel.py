"""The loss fused with a head whose words are spread over the processes of a tensor-parallel group (Megatron-LM,
arXiv:1909.08053).
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd
from torch.distributed.tensor import DTensor, Shard

from liger_like.ops import _shards
from liger_like.ops._common import once_differentiable, require
from liger_like.ops.linear_cross_entropy import LossOutput, fused_linear_cross_entropy


class _GatherTokens(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _shards.gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        own = dx.new_empty(dx.shape[1:])
        _shards.reduce_scatter(own, dx.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


def vocab_parallel_cross_entropy(
    x: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    sequence_sharded: bool = False,
    **loss_options: Any,
) -> Tensor | LossOutput:
    """``fused_linear_cross_entropy`` of a head of which each process of ``group`` has some of the words.

    ``x`` [..., H] is the same in all R processes; with ``sequence_sharded`` it is [..., S / R, H], the process's part
    of the tokens, as sequence parallelism leaves it. ``target`` [...] or [..., S] is always whole. ``weight_shard``
    [V', H] has the words from ``vocab_start`` on, of ``vocab_size`` in all; without the two, all processes have as
    many, in the order of their ranks. A DTensor that is sharded by its words knows both, however uneven.

    ``loss_options`` are those of ``fused_linear_cross_entropy``, ``bias`` [V'] among them; ``class_weight`` [V] is
    whole, and of ``lora`` the second matrix [V', r] is a shard. Loss and per-token outputs are the same in all
    processes. Each gets the gradients of its own words, and that of all of ``x`` or of its part: the first is summed
    over the processes while the next chunk of tokens is computed, the second is one reduce-scatter. A chunk's logits
    cost an all-gather of 4 to 7 numbers a token.

    Raises as ``fused_linear_cross_entropy`` does, and ValueError for a shard without words or outside the vocabulary, a
    DTensor that is sharded in another way, and tokens that do not come to as many for each process.
    """
    if isinstance(weight_shard, DTensor):
        weight_shard, vocab_start, vocab_size = _local(weight_shard)
    require("weight_shard", weight_shard)
    processes, own = dist.get_world_size(group), weight_shard.shape[0]
    start = dist.get_rank(group) * own if vocab_start is None else vocab_start
    words = processes * own if vocab_size is None else vocab_size
    if own == 0 or not 0 <= start <= words - own:
        raise ValueError(f"a shard of {own} words from {start} on is none of a vocabulary of {words}")
    shard = _shards.Shard(group.group_name, start, words, not sequence_sharded)
    if not sequence_sharded:
        return fused_linear_cross_entropy(x, weight_shard, target, shard=shard, **loss_options)
    if target.shape != (*x.shape[:-2], x.shape[-2] * processes):
        raise ValueError(f"target must have {processes} times the tokens of x {[*x.shape]}, got {[*target.shape]}")
    # gathered parts stand one behind the other, so the labels are put in their order
    target = target.view(*target.shape[:-1], processes, -1).movedim(-2, 0)
    x = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    lora = loss_options.get("lora")
    if lora is not None and len(lora) == 2:  # the first is of tokens, too
        loss_options["lora"] = _GatherTokens.apply(lora[0], group), lora[1]  # type: ignore[no-untyped-call]
    result = fused_linear_cross_entropy(x, weight_shard, target, shard=shard, **loss_options)
    if isinstance(result, LossOutput):
        return result._replace(**{name: _in_order(t) for name, t in result._asdict().items() if t is not None})
    return _in_order(result)


def _local(weight: DTensor) -> tuple[Tensor, int, int]:
    """The words that this process has, the number of the first, and how many there are in all."""
    sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or weight.placements[sharded[0]] != Shard(0):
        raise ValueError(f"weight_shard must be sharded by its words, in one dimension, got {weight.placements}")
    mesh, V = weight.device_mesh, weight.shape[0]
    start = mesh.get_local_rank(sharded[0]) * -(-V // mesh.size(sharded[0]))
    return weight.to_local(), start, V


def _in_order(result: Tensor) -> Tensor:
    """A per-token result as the tokens were; the loss of all of them has no order."""
    return result if result.dim() == 0 else result.movedim(0, -2).flatten(-2)
