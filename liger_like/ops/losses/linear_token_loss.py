"""A sum of losses of tokens, each a function of the token's log-probability and the like, in one pass over the head.

The gradient of such a sum by a token's results is known as soon as these results are, so the forward can compute all
gradients but for one upstream factor. It runs the chunks of ``fused_linear_logprobs``: logits, the results of their
tokens, the function of these and its gradient by autograd, the gradient of the logits, and two products. That makes
three products with the head, where a backward that recomputes the logits makes four.

In fp16 the gradient of the logits could underflow or overflow. Each chunk's is divided by about the largest upstream
gradient so far. Where that grows, the sums of the chunks before are multiplied by the ratio; rows of dx keep theirs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.ops.losses.chunks import Forward, TokenForward, TokenResults, Upstream, run_chunks, token_outputs
from liger_like.ops.losses.gradients import scaled
from liger_like.ops.losses.linear_logprobs import (
    TokenOutputs,
    checked_arguments,
    fused_linear_logprobs,
    fused_linear_logprobs_ref,
    shaped,
    tempered,
)
from liger_like.ops.losses.operands import Lora, low_rank
from liger_like.ops.losses.rows import Options
from liger_like.ops.losses.units import size_of_gradient
from liger_like.ops.losses.vocab_shards import WHOLE, Shard
from liger_like.runtime.autograd import once_differentiable
from liger_like.runtime.registry import refuses_dtensors
from liger_like.runtime.support import use_kernel

LossFn = Callable[..., Tensor]
HEADROOM = 16  # a gradient this much larger than the unit is in the range of fp16


def fused_linear_token_loss_ref(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *per_token: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    outputs: tuple[str, ...] = (),
    ids: Tensor | None = None,
    topk: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> Tensor | tuple[Tensor, TokenOutputs]:
    """Compute ``fused_linear_token_loss`` in plain torch; this defines the op.

    ``accumulate_grad`` and ``chunk_rows`` do not change the definition.
    """
    tokens = fused_linear_logprobs_ref(
        x, weight, target, bias, ignore_index=ignore_index, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, lora=lora, outputs=("logprob", *outputs), ids=ids, topk=topk,
        logits_dtype=logits_dtype, shard=shard,
    )  # fmt: skip
    return _summed(tokens, target, loss_fn, per_token, ignore_index, x.dtype, outputs)


def _summed(
    tokens: TokenOutputs, target: Tensor, loss_fn: LossFn, per_token: tuple[Tensor, ...], ignore_index: int,
    dtype: torch.dtype, outputs: tuple[str, ...],
) -> Tensor | tuple[Tensor, TokenOutputs]:  # fmt: skip
    """Return the sum of the losses of ``tokens``, and those of their results that were asked for."""
    counts = target.reshape(-1) != ignore_index
    flat = [None if t is None else _flat(t, target) for t in tokens]
    # ignored tokens send no NaN back
    args = [t.where(_column(counts, t), t.detach()) if t.requires_grad else t for t in _rows_of(per_token, target)]
    losses = _checked_losses(loss_fn(TokenOutputs(*flat), *args), counts)
    total = losses.to(torch.promote_types(dtype, torch.float32)).where(counts, 0).sum()
    # what the losses do not depend on gets a gradient of 0, as from the kernels
    total = total + sum(t[:0].sum() for t in (flat[0], *args) if t is not None and t.requires_grad)
    found = TokenOutputs(*(None if t is None else t.detach() for t in tokens))
    return _with_results(total, found, outputs)


def _with_results(total: Tensor, found: TokenOutputs, outputs: tuple[str, ...]) -> Tensor | tuple[Tensor, TokenOutputs]:
    """Return ``total`` with the results of ``found`` that were asked for, or alone if none were."""
    asked = TokenOutputs(*(found if "logprob" in outputs else (None, *found[1:])))
    return total if all(t is None for t in asked) else (total, asked)


def _flat(t: Tensor, target: Tensor) -> Tensor:
    """Return ``t``, shaped like the target or with one dimension more, as [T] or [T, K]."""
    return t.reshape(target.numel(), *t.shape[target.dim() :])


def _rows_of(per_token: tuple[Tensor, ...], target: Tensor) -> list[Tensor]:
    """Return ``per_token`` as [T, ...], in at least fp32 where a gradient is required, so that it is rounded once."""
    wide = (t.to(torch.promote_types(t.dtype, torch.float32)) if t.requires_grad else t for t in per_token)
    return [_flat(t, target) for t in wide]


def _column(counts: Tensor, like: Tensor) -> Tensor:
    """Return ``counts`` [n] in a shape that broadcasts to ``like`` [n, ...]."""
    return counts.view(-1, *(1,) * (like.dim() - 1))


def _checked_losses(losses: Any, counts: Tensor) -> Tensor:
    """Return the result of ``loss_fn``. Raise unless it holds a floating-point number for each token."""
    if isinstance(losses, Tensor) and losses.is_floating_point() and losses.shape == counts.shape:
        return losses
    got = f"{losses.dtype} of shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ValueError(f"loss_fn must return floating-point losses of shape {list(counts.shape)}, got {got}")


def _check_per_token(per_token: tuple[Any, ...], target: Tensor) -> None:
    for i, t in enumerate(per_token):
        if not isinstance(t, Tensor):
            raise TypeError(f"per_token[{i}] must be a tensor, got {type(t).__name__}")
        if t.shape[: target.dim()] != target.shape:
            raise ValueError(f"per_token[{i}] must have shape {[*target.shape, '...']}, got {list(t.shape)}")
        if t.device != target.device:
            raise ValueError(f"per_token[{i}] must be on {target.device}, got {t.device}")


class Settings(NamedTuple):
    """Which results are computed, and how.

    ``differentiable``: a backward may follow. ``outputs`` includes "logprob".
    """

    differentiable: bool
    accumulate_grad: bool
    chunk_rows: int | None
    outputs: tuple[str, ...]
    topk: int
    logits_dtype: torch.dtype
    shard: Shard


class _Losses:
    """The losses of tokens and their gradients by the tokens' results, for one range of ``order`` after the other."""

    def __init__(
        self, loss_fn: LossFn, per_token: list[Tensor], call: Forward, more: TokenForward, outs: tuple[Tensor, ...],
        results: TokenResults, outputs: tuple[str, ...], trained: list[bool],
    ) -> None:  # fmt: skip
        self.loss_fn, self.per_token, self.call, self.ids, self.topk = loss_fn, per_token, call, more.ids, more.topk
        self.rows, self.order, self.results, self.outputs = outs[:6], outs[6], results, outputs
        self.trained, self.differentiable = trained, any(trained) or any(call.needs)
        zeros = functools.partial(call.x.new_zeros, dtype=torch.float32)
        T = call.x.shape[0]
        self.losses, self.d_logprob = zeros(T), zeros(T)
        self.d_entropy = zeros(T) if call.entropy else None
        self.d_at = None if more.ids is None else zeros(more.ids.shape)
        self.d_per_token = [t.new_zeros(t.shape if needed else 0) for t, needed in zip(per_token, trained, strict=True)]
        self.unit = self.units = None
        if call.x.dtype == torch.float16 and any(call.needs):
            self.unit, self.units = zeros(1), zeros(T) + 1

    def found(self, index: Tensor | None = None) -> TokenOutputs:
        """Return the results of the tokens ``index``, of all for None."""
        rows, (mean, squares, words, at, *_) = self.rows, self.results
        K = 0 if self.ids is None else self.ids.shape[1]
        free = [rows[1], *([rows[3]] if "entropy" in self.outputs else []), *([at[:, :K]] if K else [])]
        fixed = rows[2] if "lse" in self.outputs else rows[2][:0], rows[4], mean, squares, at[:, K:], words[:, K:]
        taken = (t if index is None or not t.numel() else t[index] for t in (*free, *fixed))
        target = self.call.target if index is None else self.call.target[index]
        return shaped(tuple(taken), target, self.outputs, K > 0, self.topk)

    def __call__(self, first: int, last: int) -> Upstream | None:
        """Compute the losses of the tokens of ``order`` from ``first`` to ``last``, and return their gradients."""
        if first == 0:  # the order is known now
            self.sorted = [t.detach()[self.order] for t in self.per_token]
            self.counts = (self.call.target != self.call.options.ignore_index)[self.order]
        index, counts = self.order[first:last], self.counts[first:last]
        tokens, args = self.found(index), [t[first:last] for t in self.sorted]
        free = tokens.logprob, tokens.entropy, tokens.logprob_at
        leaves = [*free, *(t if needed else None for t, needed in zip(args, self.trained, strict=True))]
        grads = self._differentiate(tokens, args, leaves, first, counts)
        if not self.differentiable:
            return None
        totals = [self.d_logprob, self.d_entropy, self.d_at, *self.d_per_token]
        for total, grad in zip(totals, grads, strict=True):
            if grad is not None:
                total[index] = grad.to(total.dtype)
        if not any(self.call.needs):
            return None
        others = (None if grad is None else total for total, grad in zip(totals[1:3], grads[1:3], strict=True))
        return self._in_unit([self.d_logprob, *others], index)

    def _differentiate(
        self, tokens: TokenOutputs, args: list[Tensor], leaves: list[Tensor | None], first: int, counts: Tensor
    ) -> list[Tensor | None]:  # fmt: skip
        """Store the losses and return their gradients by the ``leaves``, 0 for ignored tokens and None for none."""
        given = [t for t in leaves if t is not None]
        # a checkpoint must not see the graph of the losses, which ends here
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
        with torch.set_grad_enabled(self.differentiable), hooks:
            for t in given if self.differentiable else ():
                t.requires_grad_()
            losses = _checked_losses(self.loss_fn(tokens, *args), counts)
            self.losses[first : first + len(counts)] = losses.detach().where(counts, 0)
            if not self.differentiable or not losses.requires_grad:
                return [None] * len(leaves)
            _check_leaves(losses, given)
            grads = iter(torch.autograd.grad(losses, given, counts.to(losses.dtype), allow_unused=True))
        asked = (None if t is None else next(grads) for t in leaves)
        return [None if grad is None else grad.where(_column(counts, grad), 0) for grad in asked]

    def _in_unit(self, grads: list[Tensor | None], index: Tensor) -> Upstream:
        """Return gradients of the tokens ``index`` as the kernel takes them: in fp16 in a unit that others share."""
        if self.unit is None:
            return Upstream(*grads, ratio=None)
        given = [None if grad is None else grad[index] for grad in grads]
        sizes = [None, *given[:2], None if given[2] is None else given[2].where(self.ids[index] >= 0, 0).abs().sum(1)]
        size = size_of_gradient(sizes, self.call.target, None, self.rows[2], self.call.options)
        unit = torch.where(size > HEADROOM * self.unit, size, self.unit)
        ratio, self.unit = self.unit / unit, unit
        self.units[index] = unit
        return Upstream(*(None if grad is None else grad / unit for grad in grads), ratio=ratio)


def _check_leaves(losses: Tensor, leaves: list[Tensor]) -> None:
    """Raise if ``losses`` depend on other tensors that require a gradient, which they would not get."""
    nodes, seen = [losses.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf of the graph
        if variable is not None and all(variable is not leaf for leaf in leaves):
            shape = list(variable.shape)
            raise ValueError(f"loss_fn must get tensors that require a gradient as per_token, but reads one of {shape}")
        nodes += [following for following, _ in node.next_functions]


class _FusedLinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        ids: Tensor | None,
        loss_fn: LossFn,
        settings: Settings,
        options: Options,
        *per_token: Tensor,
    ) -> Any:
        outputs = settings.outputs
        needs = [settings.differentiable and needed for needed in ctx.needs_input_grad]
        call = Forward(
            x, weight.to(x.dtype), target, bias, u, b, None, None,
            needs=needs[:5],
            entropy="entropy" in outputs,
            argmax="argmax" in outputs or "correct" in outputs,
            chunk_rows=settings.chunk_rows,
            accum_dtype=torch.float32 if x.dtype == torch.float16 else None,  # another unit would cost 16 bits some
            dw_dtype=weight.dtype,
            reads_count=True,
            shard=settings.shard,
            options=options,
        )  # fmt: skip
        dtype = settings.logits_dtype
        more = TokenForward(dtype, "mean_logit" in outputs, "log_sum_sq_prob" in outputs, ids, settings.topk, 0)
        with torch.cuda.device_of(x):
            outs, results = token_outputs(call, more)
            losses = _Losses(loss_fn, list(per_token), call, more, outs, results, outputs, needs[10:])
            run_chunks(call, outs, more, results, losses)
        ctx.set_materialize_grads(False)
        ctx.grads_now, ctx.accumulate_grad = True, settings.accumulate_grad
        ctx.like = x.dtype, weight.dtype, x.shape[1]
        ctx.save_for_backward(weight, losses.unit, losses.units, *outs[6:], *losses.d_per_token)
        found = losses.found()
        ctx.mark_non_differentiable(*(t for t in found if t is not None))
        return losses.losses.sum(), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> Any:
        none = (None,) * len(ctx.needs_input_grad)
        if dloss is None:
            return none
        weight, unit, units, *saved = ctx.saved_tensors
        sums, d_per_token = saved[:10], saved[10:]
        factor = dloss.reshape(1)
        grads = scaled(
            ctx, (weight, *sums), factor if unit is None else factor * unit, None if units is None else factor * units
        )
        asked = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:5], strict=True))
        needed = ctx.needs_input_grad[10:]
        of_tokens = (grad * factor if asked else None for grad, asked in zip(d_per_token, needed, strict=True))
        return *asked, *none[5:10], *of_tokens


@refuses_dtensors("liger_like.parallel.vocab_parallel_token_loss")
def fused_linear_token_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *per_token: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    outputs: tuple[str, ...] = (),
    ids: Tensor | None = None,
    topk: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> Tensor | tuple[Tensor, TokenOutputs]:
    """Return the sum of ``loss_fn`` over the tokens that count, with all gradients from one pass over the head.

    ``loss_fn(tokens, *per_token)`` gets the ``TokenOutputs`` of n tokens and the same tokens' rows of ``per_token``,
    tensors [...] or [..., K] shaped like ``target`` [...], and returns their losses [n]. It is called for one chunk of
    tokens after the other, in any order, so a token's loss must depend on its own rows only. ``tokens`` holds
    ``logprob``, what ``outputs`` names, ``logprob_at`` for ``ids``, and the words of ``topk``; these and the other
    options are those of ``fused_linear_logprobs``. Gradients flow to ``logprob``, ``entropy``, ``logprob_at`` and
    ``per_token``, whose tensors that require a gradient ``loss_fn`` gets in at least fp32, but not to other tensors.
    ``liger_like.losses`` has such functions: ``token_policy``, ``token_dft``.

    Returns the sum [] in fp32, to be divided by a number of tokens for their mean, or with ``outputs``, ``ids`` or
    ``topk`` a tuple of the sum and the ``TokenOutputs`` of all tokens, without gradient. An ignored token has loss 0
    and sends no gradient, whatever ``loss_fn`` returns for it. What the losses do not depend on gets a gradient of 0.

    The forward computes the gradients, with three products with the head, and the backward multiplies them by the
    upstream gradient: without gradient of the head two products, without grad mode a single one. Until the backward it
    keeps the gradients, that of x in fp32, and for a bf16 ``weight`` the last chunk's gradient of the logits. A graph
    of torch.compile holds ``fused_linear_logprobs`` and ``loss_fn`` instead, and makes four products;
    ``torch.compiler.disable`` of this function makes three, between two graphs. The kernel takes bf16, fp16 and fp32;
    other dtypes and devices run the plain-torch reference, which materialises all logits.

    Raises TypeError or ValueError for invalid arguments (all operands share a dtype), ValueError also if ``loss_fn``
    does not return floating-point losses [n] or reads another tensor that requires a gradient, and for a label outside
    [0, V): at once on the CPU, in the next call on a GPU.
    """
    checked = checked_arguments(
        x, weight, target, bias, ignore_index, temperature, softcap, logit_scale, lora, outputs, ids, topk,
        logits_dtype, accumulate_grad, chunk_rows, shard,
    )  # fmt: skip
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    _check_per_token(per_token, target)
    names = ("logprob", *checked.outputs)
    if torch.compiler.is_compiling() or not use_kernel(checked.x):
        tokens = fused_linear_logprobs(
            x, weight, target, bias, ignore_index=ignore_index, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, lora=lora, outputs=names, ids=ids, topk=topk, logits_dtype=logits_dtype,
            accumulate_grad=accumulate_grad, chunk_rows=chunk_rows, shard=shard,
        )  # fmt: skip
        return _summed(tokens, target, loss_fn, per_token, ignore_index, checked.x.dtype, checked.outputs)
    rows = checked.x.reshape(-1, x.shape[-1])
    labels = target.reshape(-1)
    u, b = (None, None) if checked.lora is None else low_rank(rows, checked.lora, shard, labels == ignore_index)
    differentiable = torch.is_grad_enabled()
    settings = Settings(differentiable, accumulate_grad, checked.chunk_rows, names, checked.topk, logits_dtype, shard)
    total, *found = _FusedLinearTokenLoss.apply(
        rows, weight, checked.bias, u, b, labels, None if ids is None else ids.reshape(-1, ids.shape[-1]),
        loss_fn, settings, tempered(checked.options, checked.temperature), *_rows_of(per_token, target),
    )  # fmt: skip
    results = (None if t is None else t.view(*target.shape, *t.shape[1:]) for t in found)
    return _with_results(total, TokenOutputs(*results), checked.outputs)
