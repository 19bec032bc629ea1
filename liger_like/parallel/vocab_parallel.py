"""Fused loss of a vocabulary-parallel head: each process of a group has some of its words (rows of the weight).

See Megatron-LM, arXiv:1909.08053.
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
    """Return ``fused_linear_cross_entropy`` for a head whose words are sharded over ``group``, of R processes.

    ``x`` [..., H] is the same in all processes; with ``sequence_sharded`` it is [..., S / R, H], the process's part of
    the tokens, as in sequence parallelism. ``target`` [...] or [..., S] is whole. ``weight_shard`` [V', H] has the
    words from ``vocab_start`` on, of ``vocab_size``; without these two, all shards have equal sizes in the order of the
    ranks. A DTensor sharded by its words, evenly or not, provides group, start and size. ``x`` may be a DTensor that is
    replicated or sharded by its tokens.

    ``loss_options`` are those of ``fused_linear_cross_entropy``: ``bias`` [V'] and the second matrix [V', r] of
    ``lora`` are shards, ``class_weight`` [V] is whole. Loss and per-token outputs are the same in all processes. Each
    process gets the gradients of its own words and of its ``x``. The gradient of a whole ``x`` is summed over the
    processes while the next chunk of tokens is computed; for a sharded ``x`` there is one reduce-scatter. Each chunk
    needs an all-gather of 4 to 9 numbers per token.

    Raises as ``fused_linear_cross_entropy`` does, and ValueError for an empty shard, a shard outside the vocabulary, a
    DTensor with other placements, and a target that does not have R times the tokens of a sharded ``x``.
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
        raise TypeError("group must be a ProcessGroup unless weight_shard is a DTensor, got None")
    require_type("group", group, dist.ProcessGroup)
    require_type("target", target, Tensor)
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
        return fused_linear_cross_entropy(x, weight_shard, target, shard=shard, **loss_options)
    if target.shape != (*x.shape[:-2], x.shape[-2] * processes):
        raise ValueError(f"target must have {processes} times the tokens of x {[*x.shape]}, got {[*target.shape]}")
    # the gathered tokens are in the order of the processes; reorder the labels to match
    target = target.view(*target.shape[:-1], processes, -1).movedim(-2, 0)
    x = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    lora = loss_options.get("lora")
    if lora is not None and len(lora) == 2:  # u [..., S / R, r] is sharded by tokens, too
        loss_options["lora"] = _GatherTokens.apply(lora[0], group), lora[1]  # type: ignore[no-untyped-call]
    result = fused_linear_cross_entropy(x, weight_shard, target, shard=shard, **loss_options)
    if isinstance(result, LossOutput):
        return result._replace(**{name: _in_order(t) for name, t in result._asdict().items() if t is not None})
    return _in_order(result)


def _words_of(weight: DTensor) -> tuple[dist.ProcessGroup, int, int]:
    """Return the group that shards ``weight``, the first word of this process, and the number of all words."""
    dims = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or weight.placements[dims[0]] != Shard(0):
        raise ValueError(f"weight_shard must be sharded by its words, in one dimension, got {weight.placements}")
    mesh, V = weight.device_mesh, weight.shape[0]
    return mesh.get_group(dims[0]), mesh.get_local_rank(dims[0]) * -(-V // mesh.size(dims[0])), V


def _in_order(result: Tensor) -> Tensor:
    """Return a per-token result in the order of the tokens; a scalar loss is returned as it is."""
    return result if result.dim() == 0 else result.movedim(0, -2).flatten(-2)


class VocabParallelHead(ParallelStyle):
    """Plan of ``parallelize_module`` for "lm_head": shards the words of a linear head over a mesh.

    The head of a patched model then computes its loss with ``vocab_parallel_cross_entropy``. Hidden states are tensors,
    the same in all processes, or DTensors, replicated or sharded by tokens. If the model needs logits, every process
    gets the logits of all words.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to_dtensor: Any = self._as_dtensor  # torch annotates its type as returning None
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
