"""The units in which the fused loss makes gradients of logits, so that fp16 neither underflows nor overflows."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_like.ops.losses.rows import Options

SLOPE = 2 * 10  # about that of the z-loss, lse^2, in a model


def unit(options: Options) -> float:
    """Return the upstream gradient under which the logits' gradient is p - 1 at the label, near a number that every
    dtype has; it is smaller where the z-loss outweighs the label, for an lse of about 10.

    Under 1 the gradient would be near -(1 - label_smoothing) * logit_scale, rounded the same way in every row.
    """
    return 1 / (abs(_largest_factor(options) * options.logit_scale) or 1)


def _largest_factor(options: Options) -> float:
    """Return about the largest factor of a token's gradient: that of the label, times a power of 2 for the z-loss.

    A power of 2 changes no rounding.
    """
    label = 1 - options.label_smoothing or 1.0
    return label * 2.0 ** max(0, math.frexp(SLOPE * abs(options.z_loss) / label)[1])


def _power_of_2(x: Tensor) -> Tensor:
    """Return the power of 2 that is at most ``x``, and more than its half; 0 for 0."""
    return torch.exp2(torch.floor(torch.log2(x)))


def weight_of_tokens(target: Tensor, class_weight: Tensor, options: Options) -> Tensor:
    """Return how much the class weights enlarge each token's gradient [T]; 0 for ignored tokens and broken weights."""
    size = class_weight.float().abs().nan_to_num(0.0, 0.0)
    of_label = size[target.clamp(0, size.shape[0] - 1)]
    weights = (1 - options.label_smoothing) * of_label + options.label_smoothing * size.mean()
    return weights.where(target != options.ignore_index, 0)


def unit_of_weights(target: Tensor, class_weight: Tensor | None, options: Options, dtype: torch.dtype) -> Tensor | None:
    """Return the factor [] of ``unit`` under which fp16 holds the logits' gradient whatever the scale of
    ``class_weight``; None where it is 1.
    """
    if class_weight is None or dtype != torch.float16 or not target.numel():
        return None
    weights = weight_of_tokens(target, class_weight, options)
    least = max(SLOPE * abs(options.z_loss), torch.finfo(torch.float32).tiny)  # which no class weight multiplies
    return _power_of_2(_largest_factor(options) / weights.amax().clamp_min(least))


def size_of_gradient(
    upstream: list[Tensor | None], target: Tensor, class_weight: Tensor | None, lse: Tensor, options: Options
) -> Tensor:
    """Return about the largest element [1] of the logits' gradient under ``upstream``; NaN and inf do not count.

    Divided by it, the gradient neither underflows nor overflows in fp16, and a NaN stays in its row.
    """
    size: Any = 1.0 if class_weight is None else weight_of_tokens(target, class_weight, options)
    if options.z_loss:
        size = size + 2 * abs(options.z_loss) * lse.abs()
    tiny = torch.finfo(torch.float32).tiny
    dloss, *others = upstream
    given, made = (
        torch.cat([g for g in (first, *others) if g is not None]).nan_to_num(0.0, 0.0, 0.0).abs().amax().clamp_min(tiny)
        for first in (dloss, dloss if dloss is None else dloss * size)
    )
    # but for powers of 2 the upstream gradient: a row whose gradient is 1 must stay one, else all round the same way
    ratio = made * (abs(options.logit_scale) or 1) / given
    return (given * _power_of_2(ratio.clamp_min(2.0**-60))).clamp_min(tiny).reshape(1)  # 0 where all weights are 0
