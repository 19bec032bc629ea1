"""Kernels of the losses: one program per row of logits, which reads the row once in blocks of columns.

The forward computes every per-row result by an online softmax; the backward writes the gradient of the logits. Maths
and results are in fp32. Near 10^4 an fp32 lse has an error of 10^-3, but the gradient needs exp(z - lse) to a small
relative error, so ``lse_rest`` holds the rounding error of lse.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.losses import exponentials
from liger_like.ops.losses.exponentials import load_probabilities, load_scores
from liger_like.ops.losses.rows import Options, bad_label, raise_bad_label
from liger_like.runtime.blocks import block_of, tanh_and_slope
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed

NOTHING: Sequence[Tensor | None] = (None,) * 4  # no further results of ``launch_fwd``


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
def _load_at(ids_ptr, z_ptr, offs_k, K, v_start, V, logit_scale):
    """Return the K ids of a row as columns from ``v_start`` on, their scaled logits, and which ids have a column."""
    ids = tl.load(ids_ptr + offs_k, mask=offs_k < K, other=-1).to(tl.int64) - v_start
    known = (offs_k < K) & (ids >= 0) & (ids < V)
    return ids, tl.load(z_ptr + ids, mask=known, other=0.0).to(tl.float32) * logit_scale, known


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
    z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, sum_z, squares,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr,
    SMOOTHING: tl.constexpr, MASKED: tl.constexpr, BLOCK_V: tl.constexpr,
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
    if MEAN:
        sum_z += tl.sum(tl.where(offs_v < V, z, 0.0), axis=0)
    if SQUARES:
        squares = squares * rescale * rescale + tl.sum(e * e, axis=0)
    if SMOOTHING:  # sum of w (z - top), relative to top for the same reason, and the sum of w
        w = tl.where(offs_v < V, _load_weights(w_ptr, offs_v, offs_v < V), 0.0)
        smooth += moved * seen + tl.sum(w * tl.where(offs_v < V, z - shift, 0.0), axis=0)
        seen += tl.sum(w, axis=0)
    return new_top, total, dot, smooth, seen, best, best_raw, sum_z, squares


@triton.jit
def _cross_entropy_fwd_kernel(
    z_ptr, order_ptr, target_ptr, w_ptr, loss_ptr, logprob_ptr, lse_ptr, entropy_ptr, argmax_ptr, lse_rest_ptr,
    mean_ptr, squares_ptr, ids_ptr, at_ptr, bad_label_ptr, stride_zm, V, ignore_index, K, smoothing, z_loss,
    logit_scale, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
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
        _store(mean_ptr, row, 0.0)
        _store(squares_ptr, row, 0.0)
        if ids_ptr is not None:
            offs_k = tl.arange(0, BLOCK_K)
            tl.store(at_ptr + row * K + offs_k, tl.zeros((BLOCK_K,), tl.float32), mask=offs_k < K)
        return

    z_ptr += tl.program_id(0).to(tl.int64) * stride_zm
    ENTROPY: tl.constexpr = entropy_ptr is not None
    ARGMAX: tl.constexpr = argmax_ptr is not None
    MEAN: tl.constexpr = mean_ptr is not None
    SQUARES: tl.constexpr = squares_ptr is not None
    top, total, dot, smooth, seen, best, best_raw = float("-inf"), 0.0, 0.0, 0.0, 0.0, 0, float("-inf")
    sum_z, squares = 0.0, 0.0
    whole = V // BLOCK_V * BLOCK_V
    for v in range(0, whole, BLOCK_V):
        top, total, dot, smooth, seen, best, best_raw, sum_z, squares = _reduce_block(
            z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, sum_z, squares,
            SOFTCAP, ENTROPY, ARGMAX, MEAN, SQUARES, SMOOTHING, False, BLOCK_V,
        )  # fmt: skip
    for v in range(whole, V, BLOCK_V):
        top, total, dot, smooth, seen, best, best_raw, sum_z, squares = _reduce_block(
            z_ptr, w_ptr, v, V, logit_scale, top, total, dot, smooth, seen, best, best_raw, sum_z, squares,
            SOFTCAP, ENTROPY, ARGMAX, MEAN, SQUARES, SMOOTHING, True, BLOCK_V,
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
    _store(mean_ptr, row, sum_z / V)
    _store(squares_ptr, row, tl.log(squares) - 2.0 * log_total)
    if ids_ptr is not None:
        offs_k = tl.arange(0, BLOCK_K)
        _, raw, known = _load_at(ids_ptr + row * K, z_ptr, offs_k, K, 0, V, logit_scale)
        logprob_at = (_cap_scores(raw, known, logit_scale, SOFTCAP)[0] - top) - log_total
        tl.store(at_ptr + row * K + offs_k, tl.where(known, logprob_at, 0.0), mask=offs_k < K)


@triton.jit
def _merge_parts_kernel(
    top_ptr, total_ptr, dot_ptr, at_ptr, order_ptr, target_ptr, loss_ptr, logprob_ptr, lse_ptr, entropy_ptr,
    lse_rest_ptr, bad_label_ptr, parts, V, ignore_index, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, label, counts = _token(order_ptr, target_ptr, ignore_index, V)
    tl.store(bad_label_ptr, label, mask=(counts == 0) & (label != ignore_index))
    start = tl.program_id(0).to(tl.int64) * parts
    top, total, dot = float("-inf"), 0.0, 0.0
    for first in range(0, parts, BLOCK_V):
        offs = first + tl.arange(0, BLOCK_V)
        tops = tl.load(top_ptr + start + offs, mask=offs < parts, other=float("-inf"))
        totals = tl.load(total_ptr + start + offs, mask=offs < parts, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        moved = tl.where(tops == float("-inf"), 0.0, tops - shift)
        e = tl.exp(tops - shift)
        rescale = tl.exp(top - shift)
        if dot_ptr is not None:
            dots = tl.load(dot_ptr + start + offs, mask=offs < parts, other=0.0)
            dot = (dot + tl.where(top == float("-inf"), 0.0, top - shift) * total) * rescale
            dot += tl.sum((dots + moved * totals) * e, axis=0)
        total = total * rescale + tl.sum(totals * e, axis=0)
        top = new_top
    log_total = tl.log(total)
    lse, lse_rest = _add_exactly(top, log_total)
    logprob = (tl.load(at_ptr + tl.program_id(0)) - top) - log_total
    _store(loss_ptr, row, tl.where(counts, -logprob, 0.0))
    _store(logprob_ptr, row, tl.where(counts, logprob, 0.0))
    _store(lse_ptr, row, tl.where(counts, lse, 0.0))
    _store(entropy_ptr, row, tl.where(counts, log_total - dot / total, 0.0))
    _store(lse_rest_ptr, row, tl.where(counts, lse_rest, 0.0))


@triton.jit
def _gradient(
    raw, words, inside, w_ptr, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot, spread,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the softcapped scores of ``words``, and these scores' derivatives by the logits."""
    z, slope = _cap_scores(raw, inside, logit_scale, SOFTCAP)
    logp = (z - lse) - lse_rest
    p = tl.exp(logp)
    dz = p * slope_p
    if ENTROPY:
        dz -= p * tl.where(p > 0.0, logp + entropy, 0.0) * dentropy
    if SMOOTHING:
        dz -= spread * _load_weights(w_ptr, words, inside)
    return tl.where(words == label, dz - hot, dz), slope


@triton.jit
def _differentiate_block(
    z_ptr, top_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot,
    spread, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_V: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    if top_ptr is None:
        offs_v = v + tl.arange(0, BLOCK_V)
        raw = _load_scores(z_ptr, offs_v, V, logit_scale, MASKED)
    else:
        offs_v = v + tl.arange(0, BLOCK_V // WORDS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        if ENTROPY:
            raw = load_scores(z_ptr, top_ptr, v, offs_v, V, BLOCK_V, WORDS)
    if top_ptr is None or ENTROPY:
        dz, slope = _gradient(
            raw, v_start + offs_v, offs_v < V, w_ptr, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy,
            hot, spread, SOFTCAP, ENTROPY, SMOOTHING,
        )  # fmt: skip
    else:  # no softcap and no smoothing
        dz = load_probabilities(z_ptr, top_ptr, v, offs_v, V, lse, lse_rest, BLOCK_V, WORDS) * slope_p
        dz, slope = tl.where(v_start + offs_v == label, dz - hot, dz), logit_scale
    if z_ptr.dtype.element_ty != dz_ptr.dtype.element_ty:
        tl.debug_barrier()  # dz may lie in the memory of z, in that of blocks which all threads have read now
    if MASKED:
        tl.store(dz_ptr + offs_v, dz * slope, mask=offs_v < V)
    else:
        tl.store(dz_ptr + offs_v, dz * slope)


@triton.jit
def _cross_entropy_bwd_kernel(
    z_ptr, dz_ptr, order_ptr, target_ptr, w_ptr, w_sum_ptr, lse_ptr, lse_rest_ptr, entropy_ptr, factor_ptr, dloss_ptr,
    dlogprob_ptr, dentropy_ptr, ids_ptr, dat_ptr, top_ptr, stride_zm, stride_dzm, stride_dlm, stride_tm, V, v_start,
    vocabulary, ignore_index, K, smoothing, z_loss, logit_scale, unit,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    z_ptr += tl.program_id(0).to(tl.int64) * stride_zm
    dz_ptr += tl.program_id(0).to(tl.int64) * stride_dzm
    if top_ptr is not None:
        top_ptr += tl.program_id(0).to(tl.int64) * stride_tm
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
    if ids_ptr is not None:
        offs_k = tl.arange(0, BLOCK_K)
        ids, raw_at, here = _load_at(ids_ptr + row * K, z_ptr, offs_k, K, v_start, V, logit_scale)
        d_at = tl.zeros((BLOCK_K,), tl.float32)
        for k in range(0, K):
            word = tl.load(ids_ptr + row * K + k).to(tl.int64)
            dlogprob = tl.where((word >= 0) & (word < vocabulary), tl.load(dat_ptr + row * K + k), 0.0)
            slope_p -= dlogprob
            d_at += tl.where(ids + v_start == word, dlogprob, 0.0)  # an id may occur several times
        tl.debug_barrier()  # dz may lie in the memory of z
    whole = V // BLOCK_V * BLOCK_V
    for v in range(0, whole, BLOCK_V):
        _differentiate_block(
            z_ptr, top_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy,
            hot, spread, SOFTCAP, ENTROPY, SMOOTHING, False, BLOCK_V, WORDS,
        )  # fmt: skip
    for v in range(whole, V, BLOCK_V):
        _differentiate_block(
            z_ptr, top_ptr, dz_ptr, w_ptr, v, V, v_start, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy,
            hot, spread, SOFTCAP, ENTROPY, SMOOTHING, True, BLOCK_V, WORDS,
        )  # fmt: skip
    if ids_ptr is not None:
        dz, slope = _gradient(
            raw_at, v_start + ids, here, w_ptr, label, logit_scale, lse, lse_rest, entropy, slope_p, dentropy, hot,
            spread, SOFTCAP, ENTROPY, SMOOTHING,
        )  # fmt: skip
        tl.debug_barrier()  # the blocks hold these words, too, without their own gradients
        tl.store(dz_ptr + ids, (dz + d_at) * slope, mask=here)


def _tile(V: int, most: int, per_warp: int) -> dict[str, int]:
    """Return the columns per block and the number of warps."""
    block_v = min(block_of(V), most)
    return {"BLOCK_V": block_v, "num_warps": max(1, block_v // per_warp)}


def _width(ids: Tensor | None) -> int:
    return 1 if ids is None else ids.shape[1]


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
    more: Sequence[Tensor | None] = NOTHING,
) -> None:
    """Fill ``rows``, (loss, logprob, lse, entropy, argmax, lse_rest) of the tokens, from ``z`` [M, V]; skip None.

    Row i of ``z`` belongs to token ``order[i]`` (None: i) of ``target`` and ``rows``. ``more`` is (mean score, log of
    the sum of squared probabilities, ids, their log-probabilities); the last two are [T, K]. An id outside [0, V) gives
    0.
    """
    M, V = z.shape
    # a plain loss takes twice the columns per thread; with the other sums these would spill registers
    further = any(t is not None for t in (rows[3], rows[4], *more[:2]))
    plain = not options.label_smoothing and options.softcap is None and not further
    launch(
        _cross_entropy_fwd_kernel,
        (M,),
        (z, order, packed(target), packed(weight), *rows, *more, bad_label(z.device.type)),
        (z.stride(0), V, options.ignore_index, _width(more[2])),
        (options.label_smoothing, options.z_loss, options.logit_scale),
        SOFTCAP=options.softcap,
        SMOOTHING=options.label_smoothing != 0,
        BLOCK_K=block_of(_width(more[2])),
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
    at: Sequence[Tensor | None] = (None, None),
    tops: Tensor | None = None,
) -> None:
    """Fill ``dz`` [M, V], the gradient of ``z``, whose memory it may share if its rows start at the same addresses and
    its dtype is not wider; ``lse`` is (lse, lse_rest).

    ``upstream`` holds the gradients of loss, logprob and entropy. The gradient of the loss is [T], or a scalar for all
    tokens, or None for ``unit``; the scalar ``factor`` multiplies it. None is 0 for the other two. ``z`` may hold only
    the columns from ``v_start`` on of logits over ``vocabulary``. ``at`` holds ids [T, K] and the gradients of their
    log-probabilities. With ``tops`` [M, P] ``z`` holds exponentials (``exponentials.py``), with no
    softcap and no smoothing.
    """
    M, V = z.shape
    labels, weights, w_sum, dloss = packed(target), packed(weight), _sum(weight, options), upstream[0]
    stride_dlm = dloss.stride(0) if dloss is not None and dloss.dim() else 0
    strides = z.stride(0), dz.stride(0), stride_dlm, 0 if tops is None else tops.stride(0)
    launch(
        _cross_entropy_bwd_kernel,
        (M,),
        (z, dz, order, labels, weights, w_sum, *lse, entropy, factor, *upstream, *at, tops),
        (*strides, V, v_start, vocabulary or V, options.ignore_index, _width(at[0])),
        (options.label_smoothing, options.z_loss, options.logit_scale, unit),
        SOFTCAP=options.softcap,
        SMOOTHING=options.label_smoothing != 0,
        BLOCK_K=block_of(_width(at[0])),
        WORDS=exponentials.WORDS,
        **_tile(max(vocabulary or V, 0 if tops is None else exponentials.WORDS), 2048, 512),
    )


def launch_merge(
    parts: Tensor,
    at: Tensor,
    target: Tensor,
    rows: Sequence[Tensor | None],
    order: Tensor,
    ignore_index: int,
    V: int,
) -> None:
    """Fill ``rows``, (loss, logprob, lse, entropy, lse_rest) of the tokens ``order``, from sums over parts of scores.

    ``parts`` [2 or 3, M, P] holds for each of P parts of the ``V`` words the largest score, the sum of
    e = exp(score - largest), and for an entropy the sum of e (score - largest). ``at`` [M]: scores of the labels.
    """
    top, total, *dot = parts
    M, P = top.shape
    launch(
        _merge_parts_kernel,
        (M,),
        (top, total, dot[0] if dot else None, at, order, packed(target), *rows, bad_label(parts.device.type)),
        (P, V, ignore_index),
        BLOCK_V=min(block_of(P), 1024),
        num_warps=2,
    )
