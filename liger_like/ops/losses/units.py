"""Units of the logits' gradients in the fused loss, chosen so that fp16 neither underflows nor overflows."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_like.ops.losses.rows import Options

SLOPE = 2 * 10  # derivative of lse^2, the z-loss, at a typical lse of 10


def unit(options: Options) -> float:
    """Return the upstream gradient for which the logits' gradient at the label is p - 1, near the exact number -1.

    For an upstream gradient of 1 it would be near -(1 - label_smoothing) * logit_scale, and every row would be rounded
    the same way. The unit is smaller where the z-loss outweighs the label at an lse of about 10.
    """
    return 1 / (abs(_largest_factor(options) * options.logit_scale) or 1)


def _largest_factor(options: Options) -> float:
    """Return the approximate largest factor of a token's gradient: the label's, times a power of 2 for the z-loss.

    Multiplying by a power of 2 changes no rounding.
    """
    label = 1 - options.label_smoothing or 1.0
    return label * 2.0 ** max(0, math.frexp(SLOPE * abs(options.z_loss) / label)[1])


def _power_of_2(x: Tensor) -> Tensor:
    """Return the largest power of 2 that is at most ``x``; 0 for 0."""
    return torch.exp2(torch.floor(torch.log2(x)))


def weight_of_tokens(target: Tensor, class_weight: Tensor, options: Options) -> Tensor:
    """Return the class weights' factor [T] in each token's gradient; 0 for ignored tokens and NaN or inf weights."""
    size = class_weight.float().abs().nan_to_num(0.0, 0.0)
    of_label = size[target.clamp(0, size.shape[0] - 1)]
    weights = (1 - options.label_smoothing) * of_label + options.label_smoothing * size.mean()
    return weights.where(target != options.ignore_index, 0)


def unit_of_weights(target: Tensor, class_weight: Tensor | None, options: Options, dtype: torch.dtype) -> Tensor | None:
    """Return the factor [] for ``unit`` with which fp16 holds the logits' gradient at any scale of ``class_weight``.

    None stands for 1.
    """
    if class_weight is None or dtype != torch.float16 or not target.numel():
        return None
    weights = weight_of_tokens(target, class_weight, options)
    least = max(SLOPE * abs(options.z_loss), torch.finfo(torch.float32).tiny)  # class weights do not scale the z-loss
    return _power_of_2(_largest_factor(options) / weights.amax().clamp_min(least))


def size_of_gradient(
    upstream: list[Tensor | None], target: Tensor, class_weight: Tensor | None, lse: Tensor, options: Options
) -> Tensor:
    """Return the approximate largest element [1] of the logits' gradient for ``upstream``, ignoring NaN and inf.

    Divided by this number, the gradient neither underflows nor overflows in fp16, and a NaN stays in its row.
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
    # the upstream gradient times a power of 2: a row's gradient of 1 stays exact, else all rows would round alike
    ratio = made * (abs(options.logit_scale) or 1) / given
    return (given * _power_of_2(ratio.clamp_min(2.0**-60))).clamp_min(tiny).reshape(1)  # clamped: all weights may be 0
