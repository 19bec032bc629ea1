"""The loss fused with a head whose words are spread over the processes of a tensor-parallel group (Megatron-LM,
arXiv:1909.08053).
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from liger_like.ops.losses import vocab_shards
from liger_like.ops.losses.linear_cross_entropy import LossOutput, fused_linear_cross_entropy
from liger_like.runtime.autograd import once_differentiable
from liger_like.runtime.checks import require, require_integer, require_type


class _GatherTokens(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return vocab_shards.gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        own = dx.new_empty(dx.shape[1:])
        vocab_shards.reduce_scatter(own, dx.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


def vocab_parallel_cross_entropy(
    x: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
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
    many, in the order of their ranks. A DTensor that is sharded by its words knows them, however uneven, and its
    group. Other DTensors are taken for what they are here: ``x`` sharded by its tokens, or replicated.

    ``loss_options`` are those of ``fused_linear_cross_entropy``, ``bias`` [V'] among them; ``class_weight`` [V] is
    whole, and of ``lora`` the second matrix [V', r] is a shard. Loss and per-token outputs are the same in all
    processes. Each gets the gradients of its own words, and that of all of ``x`` or of its part: the first is summed
    over the processes while the next chunk of tokens is computed, the second is one reduce-scatter. A chunk's logits
    cost an all-gather of 4 to 9 numbers a token.

    Raises as ``fused_linear_cross_entropy`` does, and ValueError for a shard without words or outside the vocabulary, a
    DTensor that is sharded in another way, and tokens that do not come to as many for each process.
    """
    if isinstance(weight_shard, DTensor):
        group, vocab_start, vocab_size = _words_of(weight_shard)
        weight_shard = weight_shard.to_local()
    if isinstance(x, DTensor):
        if x.placements not in ((Replicate(),), (Shard(x.dim() - 2),)):
            raise ValueError(f"x must be replicated, or sharded by its tokens, got {x.placements}")
        sequence_sharded, x = x.placements != (Replicate(),), x.to_local()
    if isinstance(bias := loss_options.get("bias"), DTensor):
        loss_options["bias"] = bias.to_local()
    require("weight_shard", weight_shard)
    if group is None:
        raise TypeError("group must be given for a weight_shard that is no DTensor")
    require_type("group", group, dist.ProcessGroup)
    require_type("target", target, Tensor)
    for name, number in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if number is not None:
            require_integer(name, number, 0)
    processes, own = dist.get_world_size(group), weight_shard.shape[0]
    start = dist.get_rank(group) * own if vocab_start is None else vocab_start
    words = processes * own if vocab_size is None else vocab_size
    if own == 0 or not 0 <= start <= words - own:
        raise ValueError(f"a shard of {own} words from {start} on is none of a vocabulary of {words}")
    shard = vocab_shards.Shard(group.group_name, start, words, not sequence_sharded)
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


def _words_of(weight: DTensor) -> tuple[dist.ProcessGroup, int, int]:
    """The group that shares the words, the number of the first one here, and how many there are in all."""
    dims = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or weight.placements[dims[0]] != Shard(0):
        raise ValueError(f"weight_shard must be sharded by its words, in one dimension, got {weight.placements}")
    mesh, V = weight.device_mesh, weight.shape[0]
    return mesh.get_group(dims[0]), mesh.get_local_rank(dims[0]) * -(-V // mesh.size(dims[0])), V


def _in_order(result: Tensor) -> Tensor:
    """A per-token result as the tokens were; the loss of all of them has no order."""
    return result if result.dim() == 0 else result.movedim(0, -2).flatten(-2)


class VocabParallelHead(ParallelStyle):
    """Spreads the words of a linear head over a mesh: a plan of ``parallelize_module`` has it for "lm_head".

    The head of a patched model then computes its loss by ``vocab_parallel_cross_entropy``, from hidden states that are
    tensors, the same in all processes, or DTensors, sharded by their tokens or not. Where logits are wanted, all
    processes get those of all words.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to_dtensor: Any = self._as_dtensor  # typed as if it returned nothing
        return distribute_module(module, device_mesh, self._shard, to_dtensor, self._whole)

    def _shard(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))

    @staticmethod
    def _as_dtensor(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *others = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return x, *others

    @staticmethod
    def _whole(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.full_tensor() if isinstance(output, DTensor) else output
