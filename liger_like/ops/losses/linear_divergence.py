"""Divergence of a student's distribution from a teacher's, of the words that their language-model heads predict.

For the student's x [T, H] and weight [V, H] the scores are z = softcap(logit_scale (x W^T + b)) / temperature, and
p = softmax(z); q is that of the teacher's head, whose hidden size may be another one. The divergence of a token is
KL(q || p) for beta 0, KL(p || q) for beta 1, and else the generalised Jensen-Shannon divergence
beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q (arXiv:2306.13649).

The logits of both models exist for one chunk of tokens at a time, in fp32. Both lse are known before they are read for
the second time, so one more product makes dx and one dw: four products with a head, for every beta. A scalar loss has
one unknown upstream factor, so the forward computes its gradients, as in ``fused_linear_cross_entropy``; for a frozen
head the factor may be another one for each token. Else the backward computes both logits again.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.ops.losses.chunks import Forward, flat
from liger_like.ops.losses.divergence_chunks import Teacher, TeacherRows, linear_divergence_bwd, linear_divergence_fwd
from liger_like.ops.losses.divergence_rows import scale_of
from liger_like.ops.losses.gradients import factor_of, recomputed, scaled
from liger_like.ops.losses.linear_logprobs import logits_ref, tempered
from liger_like.ops.losses.operands import Lora, checked_operands, checked_outputs, is_small, low_rank
from liger_like.ops.losses.rows import (
    SOFTCAP_MAX,
    SOFTCAP_MUST,
    Options,
    checked_num_items,
    checked_options,
    reduce_loss,
    scores_ref,
)
from liger_like.ops.losses.vocab_shards import WHOLE, Shard
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.checks import require, require_choice, require_integer, require_number, require_positive
from liger_like.runtime.registry import refuses_dtensors
from liger_like.runtime.support import autocast_dtype, use_kernel

OUTPUTS = ("divergence", "entropy", "teacher_entropy", "agree")
IGNORED = -100  # label of a token outside the mask; others have label 0


class DivergenceOutput(NamedTuple):
    """Loss and the per-token results that ``outputs`` names, [...], without gradient; the others are None.

    Tokens outside the mask have 0 (agree False).
    """

    loss: Tensor
    divergence: Tensor | None = None
    entropy: Tensor | None = None
    teacher_entropy: Tensor | None = None
    agree: Tensor | None = None


def fused_linear_divergence_ref(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    lora: Lora | None = None,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    outputs: tuple[str, ...] = (),
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> Tensor | DivergenceOutput:
    """Compute ``fused_linear_divergence`` in plain torch; this defines the op.

    ``accumulate_grad`` and ``chunk_rows`` do not change the definition.
    """
    shape, target = x.shape[:-1], _labels(x, mask)
    ignored = target == IGNORED
    logits = logits_ref(x.reshape(-1, x.shape[-1]), weight, bias, lora, torch.float32, ignored, shard)
    teacher_x = teacher_x.reshape(-1, teacher_x.shape[-1])
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    teacher = teacher_x.detach(), teacher_weight.detach(), teacher_bias
    teacher_logits = logits_ref(*teacher, None, torch.float32, ignored, shard)
    options = Options(IGNORED, 0.0, 0.0, softcap, logit_scale)
    raw, z = scores_ref(logits, tempered(options, temperature))
    options = options._replace(softcap=teacher_softcap, logit_scale=teacher_logit_scale)
    teacher_raw, teacher_z = scores_ref(teacher_logits, tempered(options, temperature))
    logp, logq = z.log_softmax(-1), teacher_z.log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    if 0 < beta < 1:
        log_m = ((1 - beta) * p + beta * q).log()
        rows = beta * _expected(q, logq - log_m) + (1 - beta) * _expected(p, logp - log_m)
    else:
        rows = _expected(p, logp - logq) if beta else _expected(q, logq - logp)
    entropies = -_expected(p, logp).detach(), -_expected(q, logq)
    agree = raw.argmax(-1) == teacher_raw.argmax(-1)
    rows, *entropies = (t.masked_fill(ignored, 0) for t in (rows, *entropies))
    loss = rows if reduction == "none" else rows.sum()
    results = loss, rows.detach(), *entropies, agree & ~ignored
    return _finish(results, target, mask, shape, reduction, num_items, outputs)


def _expected(p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times ``values``, of those words that have a probability."""
    return (p * values.where(p > 0, 0)).sum(-1)


def _labels(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return labels [T] that say which tokens count, as the chunks of the fused losses read them."""
    zeros = torch.zeros(math.prod(x.shape[:-1]), dtype=torch.int64, device=x.device)
    return zeros if mask is None else zeros.masked_fill(~mask.reshape(-1).bool(), IGNORED)


def _finish(
    results: tuple[Tensor, ...],
    target: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    reduction: str,
    num_items: float | Tensor | None,
    outputs: tuple[str, ...],
) -> Tensor | DivergenceOutput:
    """Return the reduced loss, and the ``outputs`` among ``results``, the fields of ``DivergenceOutput``."""
    loss = results[0]
    if mask is None and num_items is None:
        num_items = len(target)  # a compiled graph would sum constants beside the loss, which Triton 3.6 fails on
    loss = loss.view(shape) if reduction == "none" else reduce_loss(loss, reduction, target, None, IGNORED, num_items)
    if not outputs:
        return loss
    named = dict(zip(DivergenceOutput._fields[1:], results[1:], strict=True))
    return DivergenceOutput(loss, **{name: named[name].view(shape) for name in outputs})


class Settings(NamedTuple):
    """How the loss is computed, and which results.

    ``per_token``: the loss is [T]. ``agree``: argmax of both models.
    """

    differentiable: bool
    per_token: bool
    accumulate_grad: bool
    entropy: bool
    teacher_entropy: bool
    agree: bool
    chunk_rows: int | None


class _FusedLinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        scores: tuple[float | None, float, float],
        settings: Settings,
        shard: Shard,
        options: Options,
    ) -> Any:
        needs = [settings.differentiable and needed for needed in ctx.needs_input_grad[:5]]
        frozen_head = not (needs[1] or needs[2] or needs[4])
        ctx.grads_now = settings.differentiable and (frozen_head or not settings.per_token)
        call = Forward(
            x, weight.to(x.dtype), target, bias, u, b, None, None,
            needs=[ctx.grads_now and needed for needed in needs],
            entropy=settings.entropy,
            argmax=settings.agree,
            chunk_rows=settings.chunk_rows,
            accum_dtype=None,
            dw_dtype=weight.dtype,
            reads_count=True,
            shard=shard,
            options=options,
        )  # fmt: skip
        teacher = Teacher(teacher_x, teacher_weight.to(teacher_x.dtype), teacher_bias, *scores)
        outs = linear_divergence_fwd(*flat(call), *teacher, settings.teacher_entropy)
        own = len(outs) - len(TeacherRows._fields)
        loss, _, lse, entropy, argmax, lse_rest, order, *sums = outs[:own]
        rows = TeacherRows(*outs[own:])
        ctx.set_materialize_grads(False)
        ctx.accumulate_grad, ctx.shard, ctx.options, ctx.scores = settings.accumulate_grad, shard, options, scores
        ctx.like = x.dtype, weight.dtype, x.shape[1]
        fixed = entropy, rows.entropy, argmax, rows.argmax
        ctx.mark_non_differentiable(*fixed)
        if ctx.grads_now:
            ctx.save_for_backward(weight, target, order, *sums)
        else:
            ctx.save_for_backward(
                x, weight, target, bias, u, b, order, sums[0], lse, lse_rest, entropy, *teacher[:3], *rows[:3]
            )
        if settings.per_token:
            return loss, *fixed
        ctx.mark_non_differentiable(loss, *fixed)
        return loss.sum(), loss, *fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Any:
        none = (None,) * len(ctx.needs_input_grad)
        if dloss is None:
            return none
        dloss = dloss * scale_of(ctx.scores[2])
        if ctx.grads_now:
            weight, target, *sums = ctx.saved_tensors
            dloss = dloss.where(target != IGNORED, 0) if dloss.dim() else dloss
            grads = scaled(ctx, (weight, *sums), factor_of(ctx, dloss, None))
        else:
            *saved, teacher_x, teacher_weight, teacher_bias, lse, lse_rest, mean = ctx.saved_tensors
            more = *Teacher(teacher_x, teacher_weight, teacher_bias, *ctx.scores), lse, lse_rest, mean
            operands = (*saved[:6], None, *saved[6:])  # no class weights
            grads = recomputed(ctx, operands, (dloss, None, None), more, linear_divergence_bwd)
        asked = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:5], strict=True))
        return *asked, *none[5:]


def _checked_teacher(
    teacher_x: Tensor, teacher_weight: Tensor, bias: Tensor | None, x: Tensor, V: int
) -> tuple[Tensor, Tensor | None]:
    """Return the teacher's x and bias in the dtype of autocast. Raise unless its head has ``V`` words.

    Its operands must have matching dtypes and the tokens of ``x``.
    """
    for name, tensor in (("teacher_x", teacher_x), ("teacher_weight", teacher_weight)):
        require(name, tensor, like=x)
    if bias is not None:
        require("teacher_bias", bias)
    weight_dtype = teacher_x.dtype
    if dtype := autocast_dtype(teacher_x):
        weight_dtype, teacher_x = teacher_weight.dtype, teacher_x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if teacher_x.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"teacher_x must have shape {[*x.shape[:-1], 'H']}, got {list(teacher_x.shape)}")
    H = teacher_x.shape[-1]
    operands: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]]
    operands = [("teacher_weight", teacher_weight, weight_dtype, (V, H))]
    if bias is not None:
        operands.append(("teacher_bias", bias, teacher_x.dtype, (V,)))
    for name, tensor, dtype, shape in operands:
        require(name, tensor, like=x, shape=shape)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of teacher_x, {dtype}, got {tensor.dtype}")
    return teacher_x, bias


def _fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora: Lora | None, target: Tensor, masked: bool, teacher: Teacher,
    settings: Settings, shard: Shard, options: Options,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the fields of ``DivergenceOutput``, all of them, by the kernels: the loss is a sum, or [T].

    ``masked``: some tokens may not count.
    """
    x, teacher_x = x.reshape(-1, x.shape[-1]), teacher.x.reshape(-1, teacher.x.shape[-1])
    u = b = None
    if lora is not None:
        u, b = low_rank(x, lora, shard, target == IGNORED if masked else None)
    results = apply(
        _FusedLinearDivergence, x, weight, bias, u, b, target, teacher_x, teacher.weight, teacher.bias, teacher[3:],
        settings, shard, options,
    )  # fmt: skip
    loss, *rows, entropy, teacher_entropy, argmax, teacher_argmax = results
    divergence = rows[0] if rows else loss.detach()
    return loss, divergence, entropy, teacher_entropy, (argmax == teacher_argmax) & (argmax >= 0)


def _check_mask(mask: Tensor | None, x: Tensor) -> None:
    """Raise unless ``mask`` [...] holds bools or integers for the tokens of ``x``."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask must be bool or an integer, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask must have shape {list(x.shape[:-1])}, got {list(mask.shape)}")
    if mask.device != x.device:
        raise ValueError(f"mask must be on {x.device}, got {mask.device}")


def _checked_teacher_options(softcap: Any, logit_scale: Any) -> Options:
    """Return the options of the teacher's scores. Raise, by the names of its arguments, if one is out of range."""
    if softcap is not None:
        softcap = require_number("teacher_softcap", softcap, SOFTCAP_MUST, 1 / SOFTCAP_MAX, SOFTCAP_MAX)
    return Options(IGNORED, 0.0, 0.0, softcap, require_number("teacher_logit_scale", logit_scale))


@refuses_dtensors("liger_like.parallel.vocab_parallel_divergence")
def fused_linear_divergence(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    lora: Lora | None = None,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    outputs: tuple[str, ...] = (),
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> Tensor | DivergenceOutput:
    """Return the divergence of a student's head from a teacher's, without materialising all logits of either.

    ``x`` is [..., H], ``weight`` [V, H], ``bias`` [V]; the teacher's are [..., H'], [V, H'] and [V], in a dtype of
    their own, and get no gradient. ``mask`` [...] is true, or not 0, for the tokens that count; None counts all. The
    scores are ``softcap * tanh(logit_scale * (x weight^T + bias) / softcap) / temperature``, likewise the teacher's;
    the temperature multiplies nothing else. With p and q, the student's and the teacher's softmax, ``beta`` 0 gives
    KL(q || p), 1 KL(p || q), and a number between beta KL(q || m) + (1 - beta) KL(p || m) with
    m = (1 - beta) p + beta q, the generalised Jensen-Shannon divergence (Agarwal et al., arXiv:2306.13649).

    ``reduction`` is "mean", the sum over the tokens that count divided by their number or by ``num_items``, "sum", or
    "none", [...]. The loss is in fp32. ``lora`` and ``accumulate_grad`` are as in ``fused_linear_cross_entropy``, and
    so is ``chunk_rows`` (None: 1024, or 2048 for an fp32 ``x``, or more for a small vocabulary). With ``outputs``, a
    tuple out of "divergence" (that of each token), "entropy" (the student's), "teacher_entropy" and "agree" (both
    models have the same first largest score), the op returns a ``DivergenceOutput`` of results [...] without gradient.

    The logits are summed in fp32; the gradient of the student's logits is rounded to x.dtype. The forward computes the
    gradients, unless the reduction is "none" and weight, bias or lora[1] needs one: then the backward computes both
    logits again.

    Under autocast the operands are cast to its dtype. The kernel takes bf16, fp16 and fp32; other dtypes and devices
    run the plain-torch reference, which materialises all logits, and so do graphs of torch.compile with few tokens.

    Raises TypeError or ValueError for invalid arguments, as for a teacher of another vocabulary.
    """
    x, bias, lora = checked_operands(x, weight, bias, lora, shard)
    outputs = checked_outputs(outputs, OUTPUTS)
    teacher_x, teacher_bias = _checked_teacher(teacher_x, teacher_weight, teacher_bias, x, weight.shape[0])
    _check_mask(mask, x)
    beta = require_number("beta", beta, "must be in [0, 1]", 0.0, 1.0)
    temperature = require_positive("temperature", temperature)
    options = checked_options(IGNORED, 0.0, 0.0, softcap, logit_scale)
    teacher_options = _checked_teacher_options(teacher_softcap, teacher_logit_scale)
    num_items = checked_num_items(num_items, reduction)
    require_choice("accumulate_grad", accumulate_grad, (False, True))
    chunk_rows = None if chunk_rows is None else require_integer("chunk_rows", chunk_rows, 1)
    target = _labels(x, mask)
    fused = use_kernel(x) and use_kernel(teacher_x)
    if not fused or (chunk_rows is None and not shard and is_small(target)):
        return fused_linear_divergence_ref(
            x, weight.to(x.dtype), teacher_x, teacher_weight.to(teacher_x.dtype), mask, bias, teacher_bias, beta=beta,
            temperature=temperature, softcap=softcap, logit_scale=logit_scale, teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale, lora=lora, reduction=reduction, num_items=num_items,
            outputs=outputs, shard=shard,
        )  # fmt: skip
    scores = tempered(teacher_options, temperature)
    teacher = Teacher(teacher_x, teacher_weight, teacher_bias, scores.softcap, scores.logit_scale, beta)
    settings = Settings(
        torch.is_grad_enabled(), reduction == "none", accumulate_grad, "entropy" in outputs,
        "teacher_entropy" in outputs, "agree" in outputs, chunk_rows,
    )  # fmt: skip
    options = tempered(options, temperature)
    results = _fused(x, weight, bias, lora, target, mask is not None, teacher, settings, shard, options)
    return _finish(results, target, mask, x.shape[:-1], reduction, num_items, outputs)
