"""Fused losses of a vocabulary-parallel head: each process of a group has some of its words (rows of the weight).

See Megatron-LM, arXiv:1909.08053.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from liger_like.ops.losses import vocab_shards
from liger_like.ops.losses.linear_cross_entropy import LossOutput, fused_linear_cross_entropy
from liger_like.ops.losses.linear_logprobs import TokenOutputs, fused_linear_logprobs
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss
from liger_like.parallel.tokens import gather_parts
from liger_like.runtime.checks import require, require_integer, require_type


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
    needs an all-gather of 3 to 8 numbers per token.

    Raises as ``fused_linear_cross_entropy`` does, and ValueError for an empty shard, a shard outside the vocabulary, a
    DTensor with other placements, and a target that does not have R times the tokens of a sharded ``x``.
    """
    words = group, vocab_start, vocab_size
    tokens = {"target": target}
    return over_words(fused_linear_cross_entropy, x, weight_shard, words, tokens, sequence_sharded, loss_options)  # type: ignore[no-any-return]


def vocab_parallel_logprobs(
    x: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    sequence_sharded: bool = False,
    ids: Tensor | None = None,
    topk: int = 0,
    **options: Any,
) -> TokenOutputs:
    """Return ``fused_linear_logprobs`` for a head whose words are sharded over ``group``, of R processes.

    Tensors, words and gradients are as in ``vocab_parallel_cross_entropy``; ``ids`` [..., K], or [..., S, K] with
    ``sequence_sharded``, is whole and has words of the whole vocabulary. ``options`` are those of
    ``fused_linear_logprobs``; ``keep_logits`` counts the bytes of this process, for V / R words. All results are the
    same in all processes, and so must be their upstream gradients.

    Each chunk of tokens needs one all-gather of 3 numbers per token, and one more for each of "entropy", "mean_logit",
    "log_sum_sq_prob" and the K ids, two for "argmax" or "correct" or each of the ``topk`` words, and two, or three with
    "entropy", for kept logits that are rounded. Gradients need the collectives of ``vocab_parallel_cross_entropy``.
    With ``uniform_gradient`` an all-reduce of one number lets all processes agree whether those of the forward serve.

    Raises as ``fused_linear_logprobs`` and ``vocab_parallel_cross_entropy`` do, and ValueError for ``ids`` that do not
    have R times the tokens of a sharded ``x``.
    """

    def logprobs(x: Tensor, weight: Tensor, target: Tensor, ids: Tensor | None = None, **more: Any) -> TokenOutputs:
        return fused_linear_logprobs(x, weight, target, ids=ids, **more)

    words, tokens = (group, vocab_start, vocab_size), {"target": target} | _given(ids)
    return over_words(logprobs, x, weight_shard, words, tokens, sequence_sharded, {**options, "topk": topk})  # type: ignore[no-any-return]


def vocab_parallel_token_loss(
    x: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    loss_fn: Callable[..., Tensor],
    *per_token: Tensor,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    sequence_sharded: bool = False,
    ids: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, TokenOutputs]:
    """Return ``fused_linear_token_loss`` for a head whose words are sharded over ``group``, of R processes.

    Tensors, words and gradients are as in ``vocab_parallel_cross_entropy``, the exchange of results as in
    ``vocab_parallel_logprobs``. ``per_token`` [..., S] or [..., S, K] and ``ids`` are whole like ``target``, and the
    same in all processes. So are the results of the tokens that ``loss_fn`` gets, their losses, and the gradients of
    ``per_token``: ``loss_fn`` must not depend on the process. ``options`` are those of ``fused_linear_token_loss``.

    Raises as ``fused_linear_token_loss`` and ``vocab_parallel_cross_entropy`` do, and ValueError for ``per_token`` or
    ``ids`` that do not have R times the tokens of a sharded ``x``.
    """
    tokens = {"target": target, **{f"per_token[{i}]": t for i, t in enumerate(per_token)}}

    def token_loss(x: Tensor, weight: Tensor, target: Tensor, *others: Tensor, **more: Any) -> Any:
        per_token, ids = others[: len(tokens) - 1], others[len(tokens) - 1 :]
        return fused_linear_token_loss(x, weight, target, loss_fn, *per_token, ids=ids[0] if ids else None, **more)

    words = group, vocab_start, vocab_size
    return over_words(token_loss, x, weight_shard, words, tokens | _given(ids), sequence_sharded, options)  # type: ignore[no-any-return]


def _given(ids: Tensor | None) -> dict[str, Tensor]:
    return {} if ids is None else {"ids": ids}


def over_words(
    function: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    words: tuple[dist.ProcessGroup | None, int | None, int | None],
    tokens: dict[str, Tensor],
    sequence_sharded: bool,
    options: dict[str, Any],
) -> Any:
    """Return ``function(x, weight, *tokens, shard=..., **options)`` for the ``weight`` of this process's words.

    ``words`` is (group, vocab_start, vocab_size). ``tokens`` are whole tensors, [...] or [..., K], by the names of the
    caller's arguments. The results have all tokens in their order.
    """
    group, start, vocabulary = words
    if isinstance(weight, DTensor):
        group, start, vocabulary = _words_of(weight)
        weight = weight.to_local()
    if isinstance(x, DTensor):
        if x.placements not in ((Replicate(),), (Shard(x.dim() - 2),)):
            raise ValueError(f"x must be replicated, or sharded by its tokens, got {x.placements}")
        sequence_sharded, x = x.placements != (Replicate(),), x.to_local()
    if isinstance(bias := options.get("bias"), DTensor):
        options = {**options, "bias": bias.to_local()}
    require("x", x)
    require("weight_shard", weight)
    if group is None:
        raise TypeError("group must be a ProcessGroup unless weight_shard is a DTensor, got None")
    require_type("group", group, dist.ProcessGroup)
    for name, tensor in tokens.items():
        require_type(name, tensor, Tensor)
    for name, number in (("vocab_start", start), ("vocab_size", vocabulary)):
        if number is not None:
            require_integer(name, number, 0)
    processes, own = dist.get_world_size(group), weight.shape[0]
    start = dist.get_rank(group) * own if start is None else start
    vocabulary = processes * own if vocabulary is None else vocabulary
    if own == 0 or not 0 <= start <= vocabulary - own:
        raise ValueError(
            f"weight_shard must lie in a vocabulary of {vocabulary} words, got {own} words from {start} on"
        )
    shard = vocab_shards.Shard(
        group.group_name, start, vocabulary, not sequence_sharded, width=-(-vocabulary // processes)
    )
    if not sequence_sharded:
        return function(x, weight, *tokens.values(), shard=shard, **options)
    last, shape = x.dim() - 2, (*x.shape[:-2], x.shape[-2] * processes)
    for name, tensor in tokens.items():
        if tensor.shape[: last + 1] != shape:
            raise ValueError(f"{name} must have {processes} times the tokens of x {[*x.shape]}, got {[*tensor.shape]}")
    # the gathered tokens are in the order of the processes: reorder the labels to match
    parts = [t.view(*shape[:-1], processes, x.shape[-2], *t.shape[last + 1 :]) for t in tokens.values()]
    ordered = [t.movedim(last, 0) for t in parts]
    x = gather_parts(x, group)
    lora = options.get("lora")
    if lora is not None and len(lora) == 2:  # u [..., S / R, r] is sharded by tokens, too
        options = {**options, "lora": (gather_parts(lora[0], group), lora[1])}
    return _in_order(function(x, weight, *ordered, shard=shard, **options), last)


def _words_of(weight: DTensor) -> tuple[dist.ProcessGroup, int, int]:
    """Return the group that shards ``weight``, the first word of this process, and the number of all words."""
    dims = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or weight.placements[dims[0]] != Shard(0):
        raise ValueError(f"weight_shard must be sharded by its words, in one dimension, got {weight.placements}")
    mesh, V = weight.device_mesh, weight.shape[0]
    return mesh.get_group(dims[0]), mesh.get_local_rank(dims[0]) * -(-V // mesh.size(dims[0])), V


def _in_order(result: Any, last: int) -> Any:
    """Return per-token results [R, ..., S / R] or [R, ..., S / R, K], alone or in a tuple, in the order of the tokens.

    ``last`` is the dimension of the tokens within a sequence. A scalar loss is returned as it is.
    """
    if isinstance(result, Tensor):
        return result if result.dim() == 0 else result.movedim(0, last).flatten(last, last + 1)
    if result is None:
        return None
    parts = [_in_order(part, last) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


class VocabParallelHead(ParallelStyle):
    """Plan of ``parallelize_module`` for "lm_head": shards the words of a linear head over a mesh.

    The head of a patched model then computes its loss with ``vocab_parallel_cross_entropy``. Hidden states are tensors,
    the same in all processes, or DTensors, replicated or sharded by tokens. If the model needs logits, every process
    gets the logits of all words.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to_dtensor: Any = self._as_dtensor  # torch annotates its type as returning None
        return distribute_module(module, device_mesh, self._shard, to_dtensor, self._returned)

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
    def _returned(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.full_tensor() if isinstance(output, DTensor) else output
