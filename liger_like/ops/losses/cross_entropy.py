"""Cross-entropy with label smoothing (Szegedy et al., arXiv:1512.00567), z-loss (Chowdhery et al., arXiv:2204.02311)
and logit softcap.

logits [..., V] are read as M rows, one program per row, with z = softcap(logit_scale * logits). For lse = logsumexp(z),
class weights w and smoothing e, a row's loss is (1 - e) w_y (lse - z_y) + e/V sum_c w_c (lse - z_c) + z_loss * lse^2.
The forward reads the logits once (online softmax); the backward reads them once and writes their gradient once. Maths
and losses are in fp32. Near 10^4 an fp32 lse has an error of 10^-3, but the gradient needs exp(z - lse) to a small
relative error, so ``lse_rest`` holds the rounding error of lse.

A label outside [0, V) is never used as an index. The kernel treats its row as ignored and writes the label to pinned
host memory. The next call reads that memory without waiting for the GPU, and raises.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.losses.rows import (
    OPTIONS_SCHEMA,
    Options,
    bad_label,
    check_class_weight,
    check_target,
    checked_num_items,
    checked_options,
    raise_bad_label,
    reduce_loss,
    reduce_rows,
    row_losses_ref,
)
from liger_like.runtime.autograd import apply, is_last_backward, once_differentiable
from liger_like.runtime.blocks import tanh_and_slope
from liger_like.runtime.checks import require, require_choice
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import as_rows, packed
from liger_like.runtime.registry import op, refuses_dtensors
from liger_like.runtime.support import use_kernel


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Compute ``cross_entropy`` in plain torch; this defines the op."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)


@triton.jit
def _load_scores(z_ptr, offs_v, V, logit_scale, MASKED: tl.constexpr):
    """Return logits times ``logit_scale`` in fp32; ``MASKED``: columns may lie beyond V, and give -inf."""
    if not MASKED:
        return tl.load(z_ptr + offs_v).to(tl.float32) * logit_scale
    raw = tl.load(z_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32) * logit_scale
    return tl.where(offs_v < V, raw, float("-inf"))


@triton.jit
def _cap_scores(raw, inside, logit_scale, SOFTCAP: tl.constexpr):
    """Return the softcapped scores, -inf where not ``inside``, and their derivatives by the logits."""
    z = raw
    slope = tl.full(raw.shape, logit_scale, tl.float32)
    if SOFTCAP is not None:
        capped, slope_of_tanh = tanh_and_slope(raw / SOFTCAP, True)
        z = tl.where(inside, capped * SOFTCAP, float("-inf"))
        slope *= slope_of_tanh
    return z, slope


@triton.jit
def _load_weights(w_ptr, offs, mask):
    """Return class weights in fp32, 0 where masked; all 1 without ``w_ptr``."""
    w = tl.full(offs.shape, 1.0, tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return w


@triton.jit
def _add_exactly(a, b):
    """Return a + b rounded, and its rounding error (Knuth's two-sum), 0 for an infinite sum."""
    total = a + b
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)
    return total, tl.where(tl.abs(total) == float("inf"), 0.0, rest)


@triton.jit
def _store(ptr, row, value):
    if ptr is not None:
        tl.store(ptr + row, value)


@triton.jit
def _load(ptr, row, default):
    value = default
    if ptr is not None:
        value = tl.load(ptr + row).to(tl.float32)
    return value


@triton.jit
def _token(order_ptr, target_ptr, ignore_index, vocabulary):
    """Return this program's token, its label, and whether the label is valid and not ignored."""
    row = tl.program_id(0).to(tl.int64)
    if order_ptr is not None:
        row = tl.load(order_ptr + row).to(tl.int64)
    label = tl.load(target_ptr + row).to(tl.int64)
    return row, label, (label != ignore_index) & (label >= 0) & (label < vocabulary)


@triton.jit
def _reduce_block(
    z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SMOOTHING: tl.constexpr, MASKED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Update the running sums of the online softmax by one block of columns, and return them."""
    offs_v = v + tl.arange(0, BLOCK_V)
    raw = _load_scores(z_ptr, offs_v, V, logit_scale, MASKED)
    z = _cap_scores(raw, offs_v < V, logit_scale, SOFTCAP)[0]
    if ARGMAX:
        block_raw = tl.max(raw, axis=0)
        best = tl.where(block_raw > best_raw, v + tl.argmax(raw, axis=0), best)
        best_raw = tl.maximum(best_raw, block_raw)
    new_top = tl.maximum(top, tl.max(z, axis=0))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # logits of -inf are legal: no inf - inf
    e = tl.exp(z - shift)
    rescale = tl.exp(top - shift)
    moved = tl.where(top == float("-inf"), 0.0, top - shift)
    if ENTROPY:  # sum of e (z - top), which is small for a peaked row, so the entropy has no cancellation
        dot = (dot + moved * total) * rescale + tl.sum(e * tl.where(e > 0.0, z - shift, 0.0), axis=0)
    total = total * rescale + tl.sum(e, axis=0)
    if SMOOTHING:  # sum of w (z - top), relative to top for the same reason, and the sum of w
        w = tl.where(offs_v < V, _load_weights(w_ptr, offs_v, offs_v < V), 0.0)
        smooth += moved * seen + tl.sum(w * tl.where(offs_v < V, z - shift, 0.0), axis=0)
        seen += tl.sum(w, axis=0)
    return new_top, total, dot, smooth, seen, best, best_raw


@triton.jit
def _cross_entropy_fwd_kernel(
    z_ptr, order_ptr, target_ptr, w_ptr, loss_ptr, logprob_ptr, lse_ptr, entropy_ptr, argmax_ptr, lse_rest_ptr,
    bad_label_ptr, stride_zm, V, ignore_index, smoothing, z_loss, logit_scale,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, label, counts = _token(order_ptr, target_ptr, ignore_index, V)
    if counts == 0:
        tl.store(bad_label_ptr, label, mask=label != ignore_index)
        _store(loss_ptr, row, 0.0)
        _store(logprob_ptr, row, 0.0)
        _store(lse_ptr, row, 0.0)
        _store(entropy_ptr, row, 0.0)
        _store(argmax_ptr, row, -1)
        _store(lse_rest_ptr, row, 0.0)
        return

    z_ptr += tl.program_id(0).to(tl.int64) * stride_zm
    ENTROPY: tl.constexpr = entropy_ptr is not None
    ARGMAX: tl.constexpr = argmax_ptr is not None
    top, total, dot, smooth, seen, best, best_raw = float("-inf"), 0.0, 0.0, 0.0, 0.0, 0, float("-inf")
    whole = V // BLOCK_V * BLOCK_V
    for v in range(0, whole, BLOCK_V):
        top, total, dot, smooth, seen, best, best_raw = _reduce_block(
            z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, SOFTCAP,
            ENTROPY, ARGMAX, SMOOTHING, False, BLOCK_V,
        )  # fmt: skip
    for v in range(whole, V, BLOCK_V):
        top, total, dot, smooth, seen, best, best_raw = _reduce_block(
            z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, SOFTCAP,
            ENTROPY, ARGMAX, SMOOTHING, True, BLOCK_V,
        )  # fmt: skip
    log_total = tl.log(total)
    lse, lse_rest = _add_exactly(top, log_total)
    raw_label = _load_scores(z_ptr, label + tl.arange(0, 1), V, logit_scale, False)
    z_label = tl.sum(_cap_scores(raw_label, label < V, logit_scale, SOFTCAP)[0], axis=0)
    logprob = (z_label - top) - log_total  # z_label - lse would cancel where the label is the top
    loss = z_loss * lse * lse - (1.0 - smoothing) * _load(w_ptr, label, 1.0) * logprob
    if SMOOTHING:
        loss += smoothing / V * (seen * log_total - smooth)
    _store(loss_ptr, row, loss)
    _store(logprob_ptr, row, logprob)
    _store(lse_ptr, row, lse)
    _store(entropy_ptr, row, log_total - dot / total)
    _store(argmax_ptr, row, best)
    _store(lse_rest_ptr, row, lse_rest)


@triton.jit
def _differentiate_block(
    z_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot, spread,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, MASKED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = v + tl.arange(0, BLOCK_V)
    raw = _load_scores(z_ptr, offs_v, V, logit_scale, MASKED)
    z, slope = _cap_scores(raw, offs_v < V, logit_scale, SOFTCAP)
    logp = (z - lse) - lse_rest
    p = tl.exp(logp)
    dz = p * slope_p
    if ENTROPY:
        dz -= p * tl.where(p > 0.0, logp + entropy, 0.0) * dentropy
    if SMOOTHING:
        dz -= spread * _load_weights(w_ptr, v_start + offs_v, offs_v < V)
    dz = tl.where(v_start + offs_v == label, dz - hot, dz) * slope
    if MASKED:
        tl.store(dz_ptr + offs_v, dz, mask=offs_v < V)
    else:
        tl.store(dz_ptr + offs_v, dz)


@triton.jit
def _cross_entropy_bwd_kernel(
    z_ptr, dz_ptr, order_ptr, target_ptr, w_ptr, w_sum_ptr, lse_ptr, lse_rest_ptr, entropy_ptr, factor_ptr, dloss_ptr,
    dlogprob_ptr, dentropy_ptr, stride_zm, stride_dzm, stride_dlm, V, v_start, vocabulary, ignore_index, smoothing,
    z_loss, logit_scale, unit, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    z_ptr += tl.program_id(0).to(tl.int64) * stride_zm
    dz_ptr += tl.program_id(0).to(tl.int64) * stride_dzm
    row, label, counts = _token(order_ptr, target_ptr, ignore_index, vocabulary)
    if counts == 0:
        for v in range(0, V, BLOCK_V):
            offs_v = v + tl.arange(0, BLOCK_V)
            tl.store(dz_ptr + offs_v, tl.zeros((BLOCK_V,), tl.float32), mask=offs_v < V)
        return

    lse, lse_rest = tl.load(lse_ptr + row), tl.load(lse_rest_ptr + row)
    entropy = _load(entropy_ptr, row, 0.0)
    dloss = _load(dloss_ptr, row * stride_dlm, unit) * _load(factor_ptr, 0, 1.0)
    dentropy = _load(dentropy_ptr, row, 0.0)
    hot = dloss * (1.0 - smoothing) * _load(w_ptr, label, 1.0) - _load(dlogprob_ptr, row, 0.0)
    spread = dloss * smoothing / vocabulary
    slope_p = hot + spread * _load(w_sum_ptr, 0, vocabulary) + dloss * 2.0 * z_loss * lse
    ENTROPY: tl.constexpr = dentropy_ptr is not None
    whole = V // BLOCK_V * BLOCK_V
    for v in range(0, whole, BLOCK_V):
        _differentiate_block(
            z_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot,
            spread, SOFTCAP, ENTROPY, SMOOTHING, False, BLOCK_V,
        )  # fmt: skip
    for v in range(whole, V, BLOCK_V):
        _differentiate_block(
            z_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot,
            spread, SOFTCAP, ENTROPY, SMOOTHING, True, BLOCK_V,
        )  # fmt: skip


def _tile(V: int, most: int, per_warp: int) -> dict[str, int]:
    """Return the columns per block and the number of warps."""
    block_v = min(triton.next_power_of_2(V), most)
    return {"BLOCK_V": block_v, "num_warps": max(1, block_v // per_warp)}


def _sum(weight: Tensor | None, options: Options) -> Tensor | None:
    """Return the sum of the class weights [] if label smoothing needs it, else None."""
    return weight.sum(dtype=torch.float32) if weight is not None and options.label_smoothing else None


def launch_fwd(
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    rows: Sequence[Tensor | None],
    options: Options,
    order: Tensor | None = None,
) -> None:
    """Fill ``rows``, (loss, logprob, lse, entropy, argmax, lse_rest) of the tokens, from ``z`` [M, V]; skip None.

    Row i of ``z`` belongs to token ``order[i]`` (None: i) of ``target`` and ``rows``.
    """
    M, V = z.shape
    # a plain loss takes twice the columns per thread; with the other sums these would spill registers
    plain = not options.label_smoothing and options.softcap is None and rows[3] is None and rows[4] is None
    launch(
        _cross_entropy_fwd_kernel,
        (M,),
        (z, order, packed(target), packed(weight), *rows, bad_label(z.device.type)),
        (z.stride(0), V, options.ignore_index),
        (options.label_smoothing, options.z_loss, options.logit_scale),
        SOFTCAP=options.softcap,
        SMOOTHING=options.label_smoothing != 0,
        **_tile(V, 4096, 1024 if plain else 512),
    )
    if z.device.type == "cpu":
        raise_bad_label(z.device)


def launch_bwd(
    z: Tensor,
    dz: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: tuple[Tensor, Tensor],
    entropy: Tensor | None,
    upstream: Sequence[Tensor | None],
    options: Options,
    *,
    unit: float = 1.0,
    factor: Tensor | None = None,
    order: Tensor | None = None,
    v_start: int = 0,
    vocabulary: int | None = None,
) -> None:
    """Fill ``dz`` [M, V], the gradient of ``z``, whose memory it may share; ``lse`` is (lse, lse_rest).

    ``upstream`` holds the gradients of loss, logprob and entropy. The gradient of the loss is [T], or a scalar for all
    tokens, or None for ``unit``; the scalar ``factor`` multiplies it. None is 0 for the other two. ``z`` may hold only
    the columns from ``v_start`` on of logits over ``vocabulary``.
    """
    M, V = z.shape
    labels, weights, w_sum, dloss = packed(target), packed(weight), _sum(weight, options), upstream[0]
    stride_dlm = dloss.stride(0) if dloss is not None and dloss.dim() else 0
    launch(
        _cross_entropy_bwd_kernel,
        (M,),
        (z, dz, order, labels, weights, w_sum, *lse, entropy, factor, *upstream),
        (z.stride(0), dz.stride(0), stride_dlm, V, v_start, vocabulary or V, options.ignore_index),
        (options.label_smoothing, options.z_loss, options.logit_scale, unit),
        SOFTCAP=options.softcap,
        SMOOTHING=options.label_smoothing != 0,
        **_tile(vocabulary or V, 2048, 512),
    )


def _fwd_outputs(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, {OPTIONS_SCHEMA})"
    " -> (Tensor loss, Tensor lse, Tensor lse_rest)",
    _fwd_outputs,
)
def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, *scalars: Any
) -> tuple[Tensor, Tensor, Tensor]:
    raise_bad_label(logits.device)
    loss, lse, lse_rest = _fwd_outputs(logits)
    rows = loss, None, lse, None, None, lse_rest
    launch_fwd(as_rows(logits), target.reshape(-1), weight, rows, Options(*scalars))
    return loss, lse, lse_rest


@op(
    "cross_entropy_bwd(Tensor dloss, Tensor? factor, Tensor logits, Tensor lse, Tensor lse_rest, Tensor target,"
    f" Tensor? weight, Tensor(a!) dlogits, {OPTIONS_SCHEMA}) -> ()",
    lambda *args: None,
)
def _cross_entropy_bwd(
    dloss: Tensor, factor: Tensor | None, logits: Tensor, lse: Tensor, lse_rest: Tensor, target: Tensor,
    weight: Tensor | None, dlogits: Tensor, *scalars: Any,
) -> None:  # fmt: skip
    """Fill ``dlogits``, which is contiguous and may share the memory of ``logits``."""
    z, dz, labels = as_rows(logits), dlogits.view(-1, logits.shape[-1]), target.reshape(-1)
    upstream = (dloss.reshape(-1) if dloss.dim() else dloss, None, None)
    launch_bwd(z, dz, labels, weight, (lse, lse_rest), None, upstream, Options(*scalars), factor=factor)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        inplace_backward: bool,
        reduction: str,
        num_items: float | Tensor | None,
        *scalars: Any,
    ) -> Tensor:
        loss, *lse = _cross_entropy_fwd(logits, target, weight, *scalars)
        factor = None
        if reduction != "none":
            loss, factor = reduce_rows(loss, reduction, target, weight, scalars[0], num_items)
        ctx.save_for_backward(logits, *lse, target, weight, factor)
        ctx.inplace_backward, ctx.scalars = inplace_backward, scalars
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, *lse, target, weight, factor = ctx.saved_tensors  # raises if the logits were changed in place
        if ctx.inplace_backward and logits.is_contiguous() and is_last_backward():
            dlogits = logits.detach()
            torch.autograd.graph.increment_version(logits)  # another backward that saved the logits will raise
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _cross_entropy_bwd(dloss, factor, logits, *lse, target, weight, dlogits, *ctx.scalars)
        return dlogits, *(None for _ in range(5 + len(ctx.scalars)))


@refuses_dtensors("liger_like.parallel.vocab_parallel_cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Return the cross-entropy of ``logits`` [..., V] and integer ``target`` [...] in fp32: [], or [...] for "none".

    ``weight`` [V]: class weights. Rows with label ``ignore_index`` give zero loss and gradient. ``reduction``: "mean"
    divides the sum by ``num_items`` (a number, or a tensor of one element) if given, else by the number of rows not
    ignored (with ``weight``, by their summed weights, as torch does); if that is 0, the loss is 0.
    ``label_smoothing`` is in [0, 1]; ``z_loss`` adds z_loss * logsumexp^2 to each row. The logits z are first mapped to
    ``logit_scale * z``, or with ``softcap`` to ``softcap * tanh(logit_scale * z / softcap)``. ``inplace_backward``: the
    backward overwrites the logits with their gradient, if they are contiguous and no retain_graph is given; autograd
    raises if another function needs their values afterwards. The kernel takes bf16, fp16 and fp32; other dtypes and
    devices run the plain-torch reference.

    Raises TypeError or ValueError for invalid arguments, ValueError also for a label outside [0, V): at once on the
    CPU, in the next call on a GPU.
    """
    require("logits", logits)
    options = checked_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    num_items = checked_num_items(num_items, reduction)
    check_target(target, logits, logits.shape[:-1])
    check_class_weight("weight", weight, logits, logits.shape[-1])
    require_choice("inplace_backward", inplace_backward, (False, True))
    if use_kernel(logits):
        return apply(_CrossEntropy, logits, target, weight, inplace_backward, reduction, num_items, *options)
    loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)
