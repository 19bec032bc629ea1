"""Linear layer and cross-entropy in one: the logits [T, V] are never materialised as a whole.

x is [T, H], weight [V, H], bias [V]. The forward computes the logits of one chunk of tokens at a time, in a reused
buffer. The cross-entropy kernel reads them once and overwrites them with their gradient; two more products turn that
into dx and the chunk's share of dw. A scalar loss has one unknown upstream factor, so the forward leaves these
gradients unscaled and the backward multiplies by the factor. The factor 1/N thus never meets the fp16 gradient of the
logits, which would underflow. Until then dx is kept in fp32, and a bf16 dw in 16 bits with an 11-bit significand
(``dw_sum``); both are rounded once.

Per-token upstream gradients (reduction "none", "logprob", "entropy") are known only in the backward. It recomputes the
logits of all tokens in slices of the vocabulary; each slice's rows of dw are final. This takes a third more work and
the least memory, so ``recompute`` selects it, too.

Ignored tokens take no part in the products. Their number is known on the GPU only; the host asks for it after it has
queued the first chunk, so the GPU has work while the host waits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from liger_like.ops.losses.chunks import Forward, flat, linear_cross_entropy_fwd, without_count
from liger_like.ops.losses.gradients import factor_of, recomputed, scaled
from liger_like.ops.losses.operands import Lora, checked_operands, checked_outputs, is_small, low_rank
from liger_like.ops.losses.rows import (
    Options,
    RowLosses,
    check_class_weight,
    check_target,
    checked_num_items,
    checked_options,
    is_correct,
    raise_bad_label,
    reduce_loss,
    row_losses_ref,
)
from liger_like.ops.losses.units import unit_of_weights
from liger_like.ops.losses.vocab_shards import WHOLE, Shard, all_vocab_logits, summed_gradient
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.checks import require_choice, require_integer
from liger_like.runtime.registry import refuses_dtensors
from liger_like.runtime.support import use_kernel

OUTPUTS = ("logprob", "lse", "entropy", "argmax", "correct")


class LossOutput(NamedTuple):
    """Loss and the per-token results that ``outputs`` names, shaped like the target; the others are None.

    Ignored tokens have 0 (argmax -1, correct False).
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
    """Compute ``fused_linear_cross_entropy`` in plain torch; this defines the op.

    ``accum_dtype``, ``chunk_rows``, ``recompute`` and ``accumulate_grad`` do not change the definition.
    """
    ignored = target.reshape(-1) == ignore_index
    x = x.reshape(-1, x.shape[-1]).masked_fill(ignored[:, None], 0)
    logits = linear(summed_gradient(x, shard) if shard.reduce_dx else x, weight, bias)
    if lora is not None:
        u, b = low_rank(x, lora, shard, None)
        logits = torch.addmm(logits, u.masked_fill(ignored[:, None], 0), b.t())
    if shard:
        logits = all_vocab_logits(logits, shard)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = row_losses_ref(logits, target.reshape(-1), class_weight, options)
    return _finish(rows, reduction, target, class_weight, ignore_index, num_items, outputs)


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
        results["correct"] = is_correct(rows.argmax, target)
    return LossOutput(loss, **{name: results[name].view(target.shape) for name in outputs})


class Settings(NamedTuple):
    """How the loss is computed: gradients in the forward, dw added to ``weight.grad``, more results, chunks, dw's
    dtype.
    """

    grads_now: bool
    accumulate_grad: bool
    entropy: bool
    argmax: bool
    chunk_rows: int | None
    accum_dtype: torch.dtype | None


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
        settings: Settings,
        shard: Shard,
        options: Options,
    ) -> Any:
        grads_now = settings.grads_now
        weight_unit = unit_of_weights(target, class_weight, options, x.dtype) if grads_now else None
        call = Forward(
            x,
            weight.to(x.dtype),
            target,
            bias,
            u,
            b,
            class_weight,
            weight_unit,
            needs=[grads_now and needed for needed in ctx.needs_input_grad[:5]],
            entropy=settings.entropy,
            argmax=settings.argmax,
            chunk_rows=settings.chunk_rows,
            accum_dtype=settings.accum_dtype,
            dw_dtype=weight.dtype,
            reads_count=True,
            shard=shard,
            options=options,
        )
        if torch.compiler.is_compiling():
            outs = linear_cross_entropy_fwd(*flat(call))
        else:
            if not isinstance(x, FakeTensor):
                raise_bad_label(x.device)
            outs = linear_cross_entropy_fwd(*without_count(call))
        loss, logprob, lse, entropy, argmax, lse_rest, order, chunk_bounds = outs[:8]
        ctx.set_materialize_grads(False)
        ctx.grads_now, ctx.accumulate_grad, ctx.shard, ctx.options = grads_now, settings.accumulate_grad, shard, options
        ctx.like = x.dtype, weight.dtype, x.shape[1]
        rows = (logprob, lse, entropy if settings.entropy else None, argmax if settings.argmax else None)
        if grads_now:
            ctx.mark_non_differentiable(*(t for t in rows if t is not None))
            ctx.save_for_backward(weight, weight_unit, order, chunk_bounds, *outs[8:])
            return loss.sum(), *rows
        ctx.mark_non_differentiable(*(t for t in (lse, rows[3]) if t is not None))
        ctx.save_for_backward(x, weight, target, bias, u, b, class_weight, order, chunk_bounds, lse, lse_rest, entropy)
        return loss, *rows

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, dlogprob: Tensor | None, _lse: None, dentropy: Tensor | None, _argmax: None
    ) -> Any:
        if dloss is None and dlogprob is None and dentropy is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        if ctx.grads_now:
            weight, weight_unit, *sums = saved
            grads = scaled(ctx, (weight, *sums), factor_of(ctx, dloss, weight_unit))
        else:
            grads = recomputed(ctx, saved, (dloss, dlogprob, dentropy))
        asked = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:5], strict=True))
        return *asked, *(None,) * (len(ctx.needs_input_grad) - 5)


@refuses_dtensors("liger_like.parallel.vocab_parallel_cross_entropy")
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
    """Return the cross-entropy of ``x weight^T + bias`` and ``target``, without materialising all logits.

    ``x`` is [..., H], ``weight`` [V, H], ``bias`` [V], ``target`` [...]. The loss options are those of
    ``cross_entropy`` (``class_weight`` [V] is its ``weight``); the loss is in fp32. ``lora=(A, B, scaling)`` with
    A [r, H] and B [V, r] adds ``scaling * x A^T B^T`` to the logits, ``lora=(u, B)`` with u [..., r] adds ``u B^T``.
    With ``outputs``, a tuple out of "logprob", "lse", "entropy", "argmax", "correct", the op returns a ``LossOutput``
    of per-token results [...]; "logprob" and "entropy" are differentiable.

    The forward computes the gradients, for ``chunk_rows`` tokens at a time (None: 2048, or more for a small vocabulary
    or over 16 times that many tokens). Until the backward it keeps the gradients, that of x in fp32, and for a bf16
    ``weight`` the last chunk's logits. ``accum_dtype``: dtype in which the gradient of ``weight`` is summed over
    chunks, torch.float32 or x.dtype (None: as accurately as one product over all tokens; in the gradient's own memory
    for a bf16 ``weight`` on a Hopper or Blackwell GPU and up to 16 chunks, else in fp32). ``recompute``: the backward
    recomputes the logits and computes the gradients, which takes a third more time and little memory but dx in fp32;
    reduction "none" and differentiable outputs do so, too. ``accumulate_grad``: the backward may add the weight's
    gradient to an existing ``weight.grad`` in place, in its dtype, which with ``recompute`` needs no memory of its own;
    hooks on the weight (DDP, FSDP) then do not run. ``shard`` is set by
    ``liger_like.parallel.vocab_parallel_cross_entropy``.

    Under autocast the operands are cast to its dtype. The kernel takes bf16, fp16 and fp32; other dtypes and devices
    run the plain-torch reference, which materialises all logits. So does a graph of torch.compile for a fixed number of
    tokens, at most 1024, without ``chunk_rows``.

    Raises TypeError or ValueError for invalid arguments (all operands share a dtype), ValueError also for a label
    outside [0, V): at once on the CPU, in the next call on a GPU.
    """
    x, bias, lora = checked_operands(x, weight, bias, lora, shard)
    outputs = checked_outputs(outputs, OUTPUTS)
    chunk_rows = None if chunk_rows is None else require_integer("chunk_rows", chunk_rows, 1)
    require_choice("accum_dtype", accum_dtype, (None, *dict.fromkeys((torch.float32, x.dtype))))
    require_choice("recompute", recompute, (False, True))
    require_choice("accumulate_grad", accumulate_grad, (False, True))
    options = checked_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    num_items = checked_num_items(num_items, reduction)
    check_target(target, x, x.shape[:-1])
    check_class_weight("class_weight", class_weight, x, shard.words or weight.shape[0])
    if not use_kernel(x) or (chunk_rows is None and not shard and is_small(target)):
        others = {"reduction": reduction, "class_weight": class_weight, "num_items": num_items, "lora": lora}
        others |= {"outputs": outputs, "shard": shard, **options._asdict()}
        return fused_linear_cross_entropy_ref(x, weight.to(x.dtype), target, bias, **others)
    x = x.reshape(-1, x.shape[-1])
    u, b = (None, None) if lora is None else low_rank(x, lora, shard, target.reshape(-1) == ignore_index)
    per_token = reduction == "none" or "logprob" in outputs or "entropy" in outputs
    grads_now = torch.is_grad_enabled() and not (per_token or recompute)
    wants_argmax = "argmax" in outputs or "correct" in outputs
    settings = Settings(grads_now, accumulate_grad, "entropy" in outputs, wants_argmax, chunk_rows, accum_dtype)
    operands = x, weight, bias, u, b, target.reshape(-1), class_weight
    rows = apply(_FusedLinearCrossEntropy, *operands, settings, shard, options)
    return _finish(RowLosses(*rows), reduction, target, class_weight, ignore_index, num_items, outputs)
