"""Linear layer and cross-entropy in one: the logits [T, V] never exist at once.

x [T, H], weight [V, H], bias [V]. In the forward, a chunk of tokens' logits are one product into a reused buffer; the
cross-entropy kernel reads them once and overwrites them by their gradient, which two more products turn into dx and a
share of dw. Losses that end in a scalar have one unknown upstream factor, so these gradients are made unscaled, and
multiplied by it in the backward (1/N never meets the fp16 logits gradient, where it would underflow). dx waits for
that in fp32, a bf16 dw in 16 bits that are worth 11 (``_accumulate``): both are rounded once.

Per-token upstream gradients (reduction "none", "logprob", "entropy") are known only in the backward. It makes the
logits again, in slices of the vocabulary over all tokens, whose parts of dw are final. That is a third more work and
needs the least memory, so it is also what ``recompute`` asks for.

Ignored tokens take no part in the products. How many there are is known on the GPU; the host learns it after it has
queued the first chunk, so the GPU has work while the host waits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_like.ops.losses.chunks import linear_cross_entropy_bwd, linear_cross_entropy_fwd, linear_cross_entropy_last
from liger_like.ops.losses.dw_sum import scale_rows
from liger_like.ops.losses.rows import (
    Options,
    RowLosses,
    check_class_weight,
    check_target,
    checked_num_items,
    checked_options,
    reduce_loss,
    row_losses_ref,
)
from liger_like.ops.losses.units import unit, unit_of_weights
from liger_like.ops.losses.vocab_shards import WHOLE, Shard, all_words, summed_gradient
from liger_like.runtime.autograd import apply, is_last_backward, once_differentiable
from liger_like.runtime.checks import require, require_choice, require_integer, require_number
from liger_like.runtime.registry import on_shards
from liger_like.runtime.support import autocast_dtype, use_kernel

OUTPUTS = ("logprob", "lse", "entropy", "argmax", "correct")

Lora = tuple[Tensor, Tensor, float] | tuple[Tensor, Tensor]


class LossOutput(NamedTuple):
    """The loss and the per-token results asked for by ``outputs``, shaped like the target; None where not asked for.

    Ignored tokens hold 0 (argmax -1, correct False).
    """

    loss: Tensor
    logprob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    correct: Tensor | None = None


def fused_linear_cross_entropy_ref(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    lora: Lora | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    outputs: tuple[str, ...] = (),
    recompute: bool = False,
    accumulate_grad: bool = False,
    shard: Shard = WHOLE,
) -> Tensor | LossOutput:
    """The definition, in plain torch; ``accum_dtype``, ``chunk_rows``, ``recompute`` and ``accumulate_grad`` say how
    and not what.
    """
    x = x.reshape(-1, x.shape[-1])
    logits = linear(summed_gradient(x, shard) if shard.reduce_dx else x, weight, bias)
    if lora is not None:
        u, b = _low_rank(x, lora, shard)
        logits = torch.addmm(logits, u, b.t())
    if shard:
        logits = all_words(logits, shard)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = row_losses_ref(logits, target.reshape(-1), class_weight, options)
    return _finish(rows, reduction, target, class_weight, ignore_index, num_items, outputs)


def _low_rank(x: Tensor, lora: Lora, shard: Shard) -> tuple[Tensor, Tensor]:
    """The factors [T, r] and [V, r] of what ``lora`` adds to the logits of ``x`` [T, H].

    A shard of the words gives the first a part of its gradient.
    """
    if len(lora) == 2:
        u = lora[0].reshape(-1, lora[0].shape[-1])
    else:
        parts_meet_here = shard and not shard.reduce_dx  # else in u
        u = linear(x, summed_gradient(lora[0], shard) if parts_meet_here else lora[0]) * lora[2]
    return summed_gradient(u, shard) if shard.reduce_dx else u, lora[1]


def _finish(
    rows: RowLosses,
    reduction: str,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
    outputs: tuple[str, ...],
) -> Tensor | LossOutput:
    if reduction == "none":
        loss = rows.loss.view(target.shape)
    else:
        loss = reduce_loss(rows.loss.sum(), reduction, target, class_weight, ignore_index, num_items)
    if not outputs:
        return loss
    results = rows._asdict()
    if "correct" in outputs:
        results["correct"] = rows.argmax == target.reshape(-1)
    return LossOutput(loss, **{name: results[name].view(target.shape) for name in outputs})


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        grads_now: bool,
        accumulate_grad: bool,
        wants_entropy: bool,
        wants_argmax: bool,
        chunk_rows: int | None,
        accum_dtype: torch.dtype | None,
        shard: Shard,
        *scalars: Any,
    ) -> Any:
        weight_unit = unit_of_weights(target, class_weight, Options(*scalars), x.dtype) if grads_now else None
        inputs = x, weight.to(x.dtype), target, bias, u, b, class_weight, weight_unit
        needs = [grads_now and needed for needed in ctx.needs_input_grad[:5]]
        wants = needs, wants_entropy, wants_argmax, chunk_rows, accum_dtype, weight.dtype
        outs = linear_cross_entropy_fwd(*inputs, *wants, *shard, *scalars)
        loss, logprob, lse, entropy, argmax, lse_rest, order, kept = outs[:8]
        ctx.set_materialize_grads(False)
        ctx.grads_now, ctx.accumulate_grad, ctx.shard, ctx.scalars = grads_now, accumulate_grad, shard, scalars
        ctx.like = x.dtype, weight.dtype, x.shape[1]
        rows = (logprob, lse, entropy if wants_entropy else None, argmax if wants_argmax else None)
        if grads_now:
            ctx.mark_non_differentiable(*(t for t in rows if t is not None))
            ctx.save_for_backward(weight, weight_unit, order, kept, *outs[8:])
            return loss.sum(), *rows
        ctx.mark_non_differentiable(*(t for t in (lse, rows[3]) if t is not None))
        ctx.save_for_backward(x, weight, target, bias, u, b, class_weight, order, kept, lse, lse_rest, entropy)
        return loss, *rows

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, dlogprob: Tensor | None, _lse: None, dentropy: Tensor | None, _argmax: None
    ) -> Any:
        if dloss is None and dlogprob is None and dentropy is None:
            return (None,) * (14 + len(ctx.scalars))
        grads = _scaled(ctx, dloss) if ctx.grads_now else _recomputed(ctx, dloss, dlogprob, dentropy)
        kept = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:5], strict=True))
        return *kept, *(None,) * (9 + len(ctx.scalars))


def _grad_to_add_to(ctx: Any, weight: Tensor) -> Tensor | None:
    """The weight's ``grad``, if the caller wants it added to in place and it exists."""
    if not ctx.accumulate_grad or not ctx.needs_input_grad[1] or torch.compiler.is_compiling() or not weight.is_leaf:
        return None
    grad = weight.grad
    return grad if grad is not None and grad.is_contiguous() else None


def _scaled(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients that the forward made, times the upstream one, rounded once.

    What was saved is scaled where it is, and freed when it is used up, if nobody needs it again.
    """
    weight, weight_unit, order, kept, *saved = ctx.saved_tensors
    dx_sum, dw_sum, exponents, last_logits, last_x, dbias, du_sum, db = saved
    dtype, dw_dtype, H = ctx.like
    needs_dx, needs_dw, _, needs_du, _ = ctx.needs_input_grad[:5]
    factor = (dloss / unit(Options(*ctx.scalars))).reshape(1)
    factor = factor if weight_unit is None else factor / weight_unit
    last_use = is_last_backward()
    dx = du = dw = None
    if needs_dw and exponents.numel():
        dw = dw_sum.view(dw_dtype) if last_use else torch.empty_like(dw_sum, dtype=dw_dtype)
        dx_sum = dx_sum if last_use else dx_sum.clone()
        linear_cross_entropy_last(dx_sum, dw_sum, exponents, last_logits, last_x, weight, kept, factor, dw)
        if last_use:
            last_logits.untyped_storage().resize_(0)
    elif needs_dw and (grad := _grad_to_add_to(ctx, weight)) is not None:
        scale_rows(dw_sum, None, factor, grad, True)
    elif needs_dw:
        fits = last_use and dw_sum.itemsize == dw_dtype.itemsize
        dw = dw_sum.view(dw_dtype) if fits else torch.empty_like(dw_sum, dtype=dw_dtype)
        scale_rows(dw_sum, None, factor, dw, False)
    if needs_dx:
        dx = dx_sum.new_empty((dx_sum.shape[0], H), dtype=dtype)
        scale_rows(dx_sum[:, :H], order, factor, dx, False)
    if needs_du:
        du = torch.empty_like(du_sum, dtype=dtype)
        scale_rows(du_sum, order, factor, du, False)
    return dx, dw, (dbias * factor).to(dtype), du, (db * factor).to(dtype)


def _recomputed(
    ctx: Any, dloss: Tensor | None, dlogprob: Tensor | None, dentropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients for upstream ones of every token."""
    x, weight, *rest = ctx.saved_tensors
    dtype, dw_dtype, H = ctx.like
    if dloss is None:
        dloss = torch.zeros_like(dentropy if dlogprob is None else dlogprob)
    dw_sum = _grad_to_add_to(ctx, weight)
    upstream = dloss, dlogprob, dentropy
    needs = list(ctx.needs_input_grad[:5])
    dx, dw, dbias, du, db = linear_cross_entropy_bwd(
        x, weight.to(dtype), *rest, *upstream, dw_sum, needs, dw_dtype, *ctx.shard, *ctx.scalars
    )
    if dtype != torch.float32:
        dx = dx.view(dtype)[:, H:]
    return dx, None if dw_sum is not None else dw, dbias.to(dtype), du.to(dtype), db.to(dtype)


def _check(
    x: Tensor, weight: Tensor, weight_dtype: torch.dtype, bias: Tensor | None, lora: Lora | None, shard: Shard
) -> None:
    """Raise unless the operands of the logits have the dtypes, shapes and device that fit together."""
    H, V = x.shape[-1], weight.shape[0]
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape [V, {H}], got {list(weight.shape)}")
    if V == 0:
        raise ValueError(f"weight must have at least one row, got shape {list(weight.shape)}")
    if not isinstance(shard, Shard):
        raise TypeError(f"shard must be a Shard, got {type(shard).__name__}")
    operands: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [("weight", weight, weight_dtype, (V, H))]
    if bias is not None:
        operands.append(("bias", bias, x.dtype, (V,)))
    if lora is not None:
        first = lora[0].shape
        shape, rank = ((first[0], H), first[0]) if len(lora) == 3 else ((*x.shape[:-1], first[-1]), first[-1])
        operands += [("lora[0]", lora[0], x.dtype, shape), ("lora[1]", lora[1], x.dtype, (V, rank))]
    for name, tensor, dtype, shape in operands:
        require(name, tensor, like=x, shape=shape)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of x, {dtype}, got {tensor.dtype}")


def _checked_lora(lora: Any) -> Lora | None:
    """Return ``lora`` with its scaling as a Python float. Raise unless it has the form of one; operands come later."""
    if lora is None:
        return None
    if not isinstance(lora, tuple | list) or len(lora) not in (2, 3):
        raise TypeError(f"lora must be (A, B, scaling) or (u, B), got {_kind(lora)}")
    for i, matrix in enumerate(lora[:2]):
        require(f"lora[{i}]", matrix)
    return (*lora[:2], *(require_number("lora[2]", scaling) for scaling in lora[2:]))  # type: ignore[return-value]


def _kind(value: Any) -> str:
    """Name the type of ``value``, and the types in a tuple or list."""
    name = type(value).__name__
    return f"{name} of {[_kind(item) for item in value]}" if isinstance(value, tuple | list) else name


def _checked_outputs(outputs: Any) -> tuple[str, ...]:
    """Return ``outputs`` as a tuple. Raise unless all of them are known."""
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs must be a tuple out of {OUTPUTS}, got {_kind(outputs)}")
    unknown = [name for name in outputs if not isinstance(name, str) or name not in OUTPUTS]
    if unknown:
        raise ValueError(f"outputs must be out of {OUTPUTS}, got {unknown}")
    return tuple(outputs)


@on_shards("liger_like.parallel.vocab_parallel_cross_entropy")
def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    lora: Lora | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    outputs: tuple[str, ...] = (),
    recompute: bool = False,
    accumulate_grad: bool = False,
    shard: Shard = WHOLE,
) -> Tensor | LossOutput:
    """Cross-entropy of ``x weight^T + bias`` and ``target``, for ``x`` [..., H], ``weight`` [V, H], ``bias`` [V] and
    ``target`` [...].

    The loss options are those of ``cross_entropy`` (``class_weight`` [V] is its ``weight``); the loss is in fp32.
    ``lora=(A, B, scaling)`` with A [r, H] and B [V, r] adds ``scaling * x A^T B^T`` to the logits, ``lora=(u, B)`` with
    u [..., r] adds ``u B^T``. ``outputs``, a tuple out of "logprob", "lse", "entropy", "argmax", "correct", asks for
    per-token results [...] and returns a ``LossOutput``; "logprob" and "entropy" are differentiable.

    The gradients that some input needs are made in the forward, and the logits exist for ``chunk_rows`` tokens at a
    time (None: 2048, or more where the vocabulary is small or there are over 16 times that many tokens). Until the
    backward the gradients wait, that of x in fp32, and for a bf16 ``weight`` the last chunk's logits. ``accum_dtype``:
    dtype in which the gradient of ``weight`` is summed over chunks, torch.float32 or that of ``x`` (None: as accurately
    as one product over all tokens, for a bf16 ``weight`` on a Hopper or Blackwell GPU and up to 16 chunks in the
    gradient's own memory, else fp32). ``recompute`` is the lean setting: the backward makes the logits again and then
    the gradients, which takes a third more time, and beside them little but dx in fp32; so do reduction "none" and
    differentiable outputs. ``accumulate_grad``: the backward may add the weight's gradient to ``weight.grad`` in place,
    if that exists, in its dtype, which with ``recompute`` saves all memory for it; hooks on the weight (DDP, FSDP) then
    do not run. ``shard`` is for ``liger_like.parallel.vocab_parallel_cross_entropy``.

    Under autocast the operands are cast to its dtype. bf16, fp16 and fp32; other dtypes and devices run the
    plain-torch reference, which does hold all logits.

    Raises TypeError or ValueError for arguments that do not fit (all operands share a dtype), and for a label
    outside [0, V): at once on the CPU, by the next call on a GPU.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        require(name, tensor)
    if bias is not None:
        require("bias", bias)
    lora, outputs = _checked_lora(lora), _checked_outputs(outputs)
    chunk_rows = None if chunk_rows is None else require_integer("chunk_rows", chunk_rows, 1)
    weight_dtype = x.dtype
    if dtype := autocast_dtype(x.device):  # the kernel path casts the weight itself: its gradient needs no cast
        weight_dtype = weight.dtype
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        lora = None if lora is None else (lora[0].to(dtype), lora[1].to(dtype), *lora[2:])
    _check(x, weight, weight_dtype, bias, lora, shard)
    require_choice("accum_dtype", accum_dtype, (None, *dict.fromkeys((torch.float32, x.dtype))))
    require_choice("recompute", recompute, (False, True))
    require_choice("accumulate_grad", accumulate_grad, (False, True))
    options = checked_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    num_items = checked_num_items(num_items, reduction)
    check_target(target, x, x.shape[:-1])
    check_class_weight("class_weight", class_weight, x, shard.words or weight.shape[0])
    if not use_kernel(x):
        others = {"reduction": reduction, "class_weight": class_weight, "num_items": num_items, "lora": lora}
        others |= {"outputs": outputs, "shard": shard, **options._asdict()}
        return fused_linear_cross_entropy_ref(x, weight.to(x.dtype), target, bias, **others)
    x = x.reshape(-1, x.shape[-1])
    u, b = (None, None) if lora is None else _low_rank(x, lora, shard)
    per_token = reduction == "none" or "logprob" in outputs or "entropy" in outputs
    grads_now = torch.is_grad_enabled() and not (per_token or recompute)
    rows = apply(
        _FusedLinearCrossEntropy,
        x, weight, bias, u, b, target.reshape(-1), class_weight, grads_now, accumulate_grad, "entropy" in outputs,
        "argmax" in outputs or "correct" in outputs, chunk_rows, accum_dtype, shard, *options,
    )  # fmt: skip
    return _finish(RowLosses(*rows), reduction, target, class_weight, ignore_index, num_items, outputs)
