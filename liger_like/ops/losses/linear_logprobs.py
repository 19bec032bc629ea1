"""Per-token log-probabilities of a language-model head, the numbers that post-training losses are functions of.

For x [T, H], weight [V, H] and bias [V] the scores are z = softcap(logit_scale (x W^T + b)) / temperature. The results
of a token are functions of its scores alone: logprob = z_y - lse with lse = logsumexp(z), entropy = lse - sum p z, and
others. For upstream gradients g, h of these two, the gradient of the scores is g (e_y - p) - h p (z - lse + entropy).

The logits of one chunk of tokens at a time are computed in a reused buffer, as for ``fused_linear_cross_entropy``. By
default they are fp32: products of bf16 operands are summed in fp32, and rounding them to bf16 would change a
log-probability by 10^-2. Their gradient is rounded to the dtype of x.

There are four routes to the gradients. By default the backward recomputes the logits. Where the head needs no
gradient, a token's row of dx is its upstream gradient times a row that the forward computes. With ``keep_logits`` the
forward keeps logits in the dtype of x, or exponentials in 16 bits. With ``uniform_gradient`` the forward computes all
gradients for a common upstream gradient. The backward recomputes where the last two do not apply.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_like.ops.losses.chunks import Forward, TokenForward, TokenResults, flat, linear_logprobs_fwd
from liger_like.ops.losses.gradients import factor_of, recomputed, scaled
from liger_like.ops.losses.operands import Lora, checked_operands, checked_outputs, is_small, low_rank
from liger_like.ops.losses.products import pitch
from liger_like.ops.losses.rows import (
    Options,
    check_labels,
    check_target,
    checked_options,
    is_correct,
    row_losses_ref,
    scores_ref,
)
from liger_like.ops.losses.slices import TokenBackward, linear_logprobs_bwd
from liger_like.ops.losses.steps import NO_WORD
from liger_like.ops.losses.vocab_shards import WHOLE, Shard, all_vocab_logits, on_all, summed_gradient
from liger_like.runtime.autograd import apply, is_last_backward, once_differentiable
from liger_like.runtime.checks import require_choice, require_integer, require_positive
from liger_like.runtime.registry import refuses_dtensors
from liger_like.runtime.support import in_graph, use_kernel

OUTPUTS = ("logprob", "entropy", "lse", "argmax", "correct", "mean_logit", "log_sum_sq_prob")
MAX_TOPK = 128


class TokenOutputs(NamedTuple):
    """Numbers of each token, shaped like the target, or [..., K]; those not asked for are None.

    ``logprob``, ``entropy`` and ``logprob_at`` are differentiable. All are in fp32 but the int64 ``argmax`` and
    ``topk_ids`` and the bool ``correct``. Ignored tokens have 0 (argmax and topk_ids -1, correct False).
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    argmax: Tensor | None = None
    correct: Tensor | None = None
    mean_logit: Tensor | None = None
    log_sum_sq_prob: Tensor | None = None
    logprob_at: Tensor | None = None
    topk_logprob: Tensor | None = None
    topk_ids: Tensor | None = None


class _RoundedGradient(torch.autograd.Function):
    """Identity whose gradient is rounded to a dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return dx.to(ctx.dtype).to(dx.dtype), None


def logits_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora: Lora | None, logits_dtype: torch.dtype, ignored: Tensor,
    shard: Shard = WHOLE,
) -> Tensor:  # fmt: skip
    """Return the logits [..., V] in at least ``logits_dtype``, whose gradient is rounded to the dtype of ``x``.

    A NaN of ``ignored`` tokens [...] gets into no gradient. The logits of a ``shard`` are gathered.
    """
    dtype, outside = torch.promote_types(x.dtype, logits_dtype), ignored.unsqueeze(-1)
    x = x.masked_fill(outside, 0)
    factor = summed_gradient(x, shard) if shard.reduce_dx else x
    logits = linear(factor.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if lora is not None:
        u, b = low_rank(x.reshape(-1, x.shape[-1]), lora, shard, None)
        u = u.view(*ignored.shape, u.shape[-1]).masked_fill(outside, 0)
        logits = logits + linear(u.to(dtype), b.to(dtype))
    if shard:
        logits = all_vocab_logits(logits, shard)
    if dtype != x.dtype and logits.requires_grad:
        logits = _RoundedGradient.apply(logits, x.dtype)
    return logits


def fused_linear_logprobs_ref(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    outputs: tuple[str, ...] = ("logprob",),
    ids: Tensor | None = None,
    topk: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    keep_logits: int = 0,
    uniform_gradient: bool = False,
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> TokenOutputs:
    """Compute ``fused_linear_logprobs`` in plain torch; this defines the op.

    ``keep_logits``, ``uniform_gradient``, ``accumulate_grad`` and ``chunk_rows`` do not change the definition.
    """
    ignored = target == ignore_index
    logits = logits_ref(x, weight, bias, lora, logits_dtype, ignored, shard)
    options = tempered(Options(ignore_index, 0.0, 0.0, softcap, logit_scale), temperature)
    results = row_losses_ref(logits, target, None, options)._asdict()
    raw, z = scores_ref(logits, options)
    logp = z.log_softmax(-1)
    results["correct"] = (results["argmax"] == target) & ~ignored
    results["mean_logit"] = z.detach().mean(-1).masked_fill(ignored, 0)
    results["log_sum_sq_prob"] = (2 * logp.detach()).logsumexp(-1).masked_fill(ignored, 0)
    asked, ignored = {name: results[name] for name in outputs}, ignored.unsqueeze(-1)
    if ids is not None:
        check_labels(ids, z.shape[-1], NO_WORD, "ids")
        at = logp.gather(-1, ids.clamp(min=0)).masked_fill(ignored | (ids < 0), 0)
        asked["logprob_at"] = at
    if topk:
        best = raw.detach().sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        at = logp.detach().gather(-1, best).masked_fill(ignored, 0)
        asked |= {"topk_logprob": at, "topk_ids": best.masked_fill(ignored, NO_WORD)}
    return TokenOutputs(**asked)


def tempered(options: Options, temperature: float) -> Options:
    """Return the options of the scores divided by ``temperature``."""
    softcap = None if options.softcap is None else options.softcap / temperature
    return options._replace(softcap=softcap, logit_scale=options.logit_scale / temperature)


class Settings(NamedTuple):
    """How the results are computed, and which.

    ``differentiable``: a backward may follow. ``uniform``: upstream gradients of ``logprob`` are expected to be equal.
    ``keep_logits``: bytes for logits.
    """

    differentiable: bool
    uniform: bool
    keep_logits: int
    accumulate_grad: bool
    chunk_rows: int | None
    outputs: tuple[str, ...]
    topk: int
    logits_dtype: torch.dtype


class _FusedLinearLogprobs(torch.autograd.Function):
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
        settings: Settings,
        shard: Shard,
        options: Options,
    ) -> Any:
        outputs, topk, dtype = settings.outputs, settings.topk, settings.logits_dtype
        needs = [settings.differentiable and needed for needed in ctx.needs_input_grad[:5]]
        frozen_head = not (needs[1] or needs[2] or needs[4])
        # dlogprob is then the only unknown of the gradients: a factor of each row of dx, or of all sums
        ctx.in_forward = any(needs) and "logprob" in outputs and (frozen_head or settings.uniform)
        kept = 0
        if any(needs) and not ctx.in_forward and settings.keep_logits:
            kept = min(x.shape[0], settings.keep_logits // (pitch(shard.width or weight.shape[0]) * x.itemsize))
        call = Forward(
            x, weight.to(x.dtype), target, bias, u, b, None, None,
            needs=[ctx.in_forward and needed for needed in needs],
            entropy="entropy" in outputs,
            argmax="argmax" in outputs or "correct" in outputs,
            chunk_rows=settings.chunk_rows,
            accum_dtype=None,
            dw_dtype=weight.dtype,
            reads_count=True,
            shard=shard,
            options=options,
        )  # fmt: skip
        more = TokenForward(dtype, "mean_logit" in outputs, "log_sum_sq_prob" in outputs, ids, topk, kept)
        outs = linear_logprobs_fwd(*flat(call), *more)
        further = len(TokenResults._fields)
        _, logprob, lse, entropy, argmax, lse_rest, order, *sums = outs[:-further]
        results = TokenResults(*outs[-further:])
        ctx.set_materialize_grads(False)
        ctx.frozen_head, ctx.accumulate_grad, ctx.shard, ctx.options = (
            frozen_head, settings.accumulate_grad, shard, options,
        )  # fmt: skip
        ctx.like, ctx.logits_dtype = (x.dtype, weight.dtype, x.shape[1]), dtype
        K = 0 if ids is None else ids.shape[1]
        # copies: of two outputs that share memory, one of them without a gradient, torch 2.11 compiles a wrong backward
        at, best = (t.clone() for t in results.logprob_at.tensor_split([K], 1))
        fixed = lse, argmax, results.mean_logit, results.log_sum_sq_prob, best, results.words[:, K:]
        # only what was asked for: torch 2.11 compiles a None among the outputs into wrong gradients
        ctx.free = "entropy" in outputs, K > 0
        asked = entropy, at
        free = (t for t, is_asked in zip(asked, ctx.free, strict=True) if is_asked)
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(
            x, weight, target, bias, u, b, ids, lse, lse_rest, entropy, *results[-3:], order, *sums,
        )  # fmt: skip
        return logprob, *free, *fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprob: Tensor | None, *others: Tensor | None) -> Any:
        none = (None,) * len(ctx.needs_input_grad)
        grads = iter(others)
        dentropy, d_at = (next(grads) if is_asked else None for is_asked in ctx.free)
        if dlogprob is None and dentropy is None and d_at is None:
            return none
        x, weight, target, bias, u, b, ids, lse, lse_rest, entropy, *kept_and_sums = ctx.saved_tensors
        kept_logits, kept_rows, kept_tops, order, *sums = kept_and_sums
        dloss = None
        if ctx.in_forward and dentropy is None and d_at is None:
            dloss = _factor(dlogprob, target, ctx)
        if dloss is not None:
            dtensors = scaled(ctx, (weight, order, *sums), factor_of(ctx, dloss, None))
        else:
            if kept_rows.numel():
                lse, lse_rest, entropy = kept_rows
            if kept_logits.numel() and not is_last_backward():
                kept_logits = kept_logits.clone()
            saved = x, weight, target, bias, u, b, None, order, sums[0], lse, lse_rest, entropy
            at = (None, None) if d_at is None else (ids, d_at)
            kept = (t if t.numel() else None for t in (kept_logits, kept_tops))
            more = TokenBackward(ctx.logits_dtype, *at, *kept)
            dtensors = recomputed(ctx, saved, (None, dlogprob, dentropy), more, linear_logprobs_bwd)
        asked = (grad if needed else None for grad, needed in zip(dtensors, ctx.needs_input_grad[:5], strict=True))
        return *asked, *none[5:]


def _factor(dlogprob: Tensor, target: Tensor, ctx: Any) -> Tensor | None:
    """Return the factor of the forward's gradients, [T] for a frozen head, or None if they are of no use.

    The forward has computed the gradients of -logprob. The host reads one bool unless the head is frozen.
    """
    counted = target != ctx.options.ignore_index
    dlogprob = dlogprob.where(counted, 0)
    if ctx.frozen_head:
        return -dlogprob
    if torch.compiler.is_compiling() or in_graph(target) or not target.numel():
        return None
    first = dlogprob[counted.to(torch.int8).argmax(0, keepdim=True)]
    uniform = ((dlogprob == first) | ~counted).all()
    if ctx.shard:
        uniform = on_all(uniform, ctx.shard)
    return -first if uniform.item() else None


def _checked_words(ids: Any, topk: Any, target: Tensor, V: int) -> int:
    """Return ``topk`` as a Python int. Raise unless it fits ``V``, and ``ids`` are words [..., K] or -1 for none."""
    topk = require_integer("topk", topk, 0)
    if topk > min(MAX_TOPK, V):
        raise ValueError(f"topk must be at most {min(MAX_TOPK, V)}, got {topk}")
    if ids is None:
        return topk
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, got {getattr(ids, 'dtype', type(ids).__name__)}")
    if ids.dim() != target.dim() + 1 or ids.shape[:-1] != target.shape or ids.shape[-1] == 0:
        raise ValueError(f"ids must have shape {[*target.shape, 'K']} with K of at least 1, got {list(ids.shape)}")
    if ids.device != target.device:
        raise ValueError(f"ids must be on {target.device}, got {ids.device}")
    check_labels(ids, V, NO_WORD, "ids")
    return topk


class Arguments(NamedTuple):
    """Arguments of an op of per-token results, checked, and cast to the dtype of autocast."""

    x: Tensor
    bias: Tensor | None
    options: Options
    temperature: float
    lora: Lora | None
    outputs: tuple[str, ...]
    topk: int
    chunk_rows: int | None


def checked_arguments(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: Any, temperature: Any, softcap: Any,
    logit_scale: Any, lora: Any, outputs: Any, ids: Any, topk: Any, logits_dtype: Any, accumulate_grad: Any,
    chunk_rows: Any, shard: Any,
) -> Arguments:  # fmt: skip
    """Return the arguments as the kernels take them. Raise unless they are valid and fit each other."""
    x, bias, lora = checked_operands(x, weight, bias, lora, shard)
    outputs = checked_outputs(outputs, OUTPUTS)
    options = checked_options(ignore_index, 0.0, 0.0, softcap, logit_scale)
    temperature = require_positive("temperature", temperature)
    check_target(target, x, x.shape[:-1])
    topk = _checked_words(ids, topk, target, shard.words or weight.shape[0])
    require_choice("logits_dtype", logits_dtype, tuple(dict.fromkeys((torch.float32, x.dtype))))
    require_choice("accumulate_grad", accumulate_grad, (False, True))
    chunk_rows = None if chunk_rows is None else require_integer("chunk_rows", chunk_rows, 1)
    return Arguments(x, bias, options, temperature, lora, outputs, topk, chunk_rows)


@refuses_dtensors("liger_like.parallel.vocab_parallel_logprobs")
def fused_linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    outputs: tuple[str, ...] = ("logprob",),
    ids: Tensor | None = None,
    topk: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    keep_logits: int = 0,
    uniform_gradient: bool = False,
    accumulate_grad: bool = False,
    chunk_rows: int | None = None,
    shard: Shard = WHOLE,
) -> TokenOutputs:
    """Return the log-probability of ``target`` and other numbers of each token, without materialising all logits.

    ``x`` is [..., H], ``weight`` [V, H], ``bias`` [V], ``target`` [...] with ``ignore_index`` for tokens that do not
    count. The scores are ``softcap * tanh(logit_scale * (x weight^T + bias) / softcap) / temperature``. ``lora`` is as
    in ``fused_linear_cross_entropy``. ``outputs`` names results out of "logprob", "entropy", "lse" (logsumexp of the
    scores), "argmax", "correct" (the target is the first largest score), "mean_logit" (mean score) and
    "log_sum_sq_prob" (log of the sum of squared probabilities). ``ids`` [..., K] adds ``logprob_at``, the
    log-probabilities of these words; -1 stands for no word, which gives 0. ``topk``, at most 128, adds the ids and
    log-probabilities of the largest scores in descending order; of equal scores the lower id comes first. No formula
    cancels, but a score is a sum in fp32, whose last bit is 10^-3 near 10^4. An error d of the scores changes a
    log-probability by up to 2 d, and an entropy by up to d times the mean of abs(log p + entropy).

    ``logits_dtype``: torch.float32 sums the logits in fp32 and rounds them to nothing else; x.dtype rounds them as a
    linear layer does. The gradient of the logits is rounded to x.dtype in both cases. The backward computes the
    logits again, in the memory of the weight's gradient; without a gradient of weight, bias and lora[1] the forward
    computes the gradient of x for "logprob" instead. ``keep_logits``: bytes in which the forward keeps logits, in
    x.dtype, so that the backward does not compute them again. If all fit, without softcap and ``ids``, it keeps
    exponentials in fp16 in their place, and 4 bytes for 256 words, so that gradients stay as exact as those of
    logits in fp32. ``uniform_gradient``: expect equal upstream gradients of all "logprob", as of their mean, so
    that the forward computes all gradients; the backward waits for the GPU to learn whether they are equal, and
    computes the logits again if not, or if "entropy" or ``ids`` get gradients. ``accumulate_grad`` and
    ``chunk_rows`` are those of ``fused_linear_cross_entropy`` (None: 1024 tokens for logits in fp32, 2048 for
    exponentials, 4096 where a Hopper GPU stores neither). ``shard`` is set by
    ``liger_like.parallel.vocab_parallel_logprobs``.

    Under autocast the operands are cast to its dtype. The kernel takes bf16, fp16 and fp32; other dtypes and devices
    run the plain-torch reference, which materialises all logits, and so do graphs of torch.compile with few tokens.

    Raises TypeError or ValueError for invalid arguments (all operands share a dtype), ValueError also for a label
    outside [0, V): at once on the CPU, in the next call on a GPU.
    """
    x, bias, options, temperature, lora, outputs, topk, chunk_rows = checked_arguments(
        x, weight, target, bias, ignore_index, temperature, softcap, logit_scale, lora, outputs, ids, topk,
        logits_dtype, accumulate_grad, chunk_rows, shard,
    )  # fmt: skip
    keep_logits = require_integer("keep_logits", keep_logits, 0)
    require_choice("uniform_gradient", uniform_gradient, (False, True))
    if not use_kernel(x) or (chunk_rows is None and not shard and is_small(target)):
        return fused_linear_logprobs_ref(
            x, weight.to(x.dtype), target, bias, ignore_index=ignore_index, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, lora=lora, outputs=outputs, ids=ids, topk=topk, logits_dtype=logits_dtype,
            shard=shard,
        )  # fmt: skip
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    u, b = (None, None) if lora is None else low_rank(rows, lora, shard, labels == options.ignore_index)
    uniform = uniform_gradient and not (torch.compiler.is_compiling() or in_graph(x))
    settings = Settings(
        torch.is_grad_enabled(), uniform, keep_logits, accumulate_grad, chunk_rows, outputs, topk, logits_dtype
    )
    operands = rows, weight, bias, u, b, labels
    flat_ids = None if ids is None else ids.reshape(-1, ids.shape[-1])
    results = apply(_FusedLinearLogprobs, *operands, flat_ids, settings, shard, tempered(options, temperature))
    return shaped(results, target, outputs, ids is not None, topk)


def shaped(rows: tuple[Tensor, ...], target: Tensor, outputs: tuple[str, ...], at: bool, topk: int) -> TokenOutputs:
    """Return the results of the autograd function in the shape of ``target``, and None for those not asked for."""
    free = "logprob", *(["entropy"] if "entropy" in outputs else []), *(["logprob_at"] if at else [])
    fixed = "lse", "argmax", "mean_logit", "log_sum_sq_prob", "topk_logprob", "topk_ids"
    results = dict(zip((*free, *fixed), rows, strict=True))
    if "correct" in outputs:
        results["correct"] = is_correct(results["argmax"], target)
    asked = [*outputs, *(["logprob_at"] if at else []), *(["topk_logprob", "topk_ids"] if topk else [])]
    return TokenOutputs(**{name: results[name].view(*target.shape, *results[name].shape[1:]) for name in asked})
