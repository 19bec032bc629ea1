"""Compute scores and finish an online softmax, in base 2, for the portable kernels and those for Hopper."""

import triton
import triton.language as tl

from liger_like.runtime.blocks import tanh_and_slope

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def unit_of_scores(scale, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr = False):
    """Return the factor that turns ``scores`` into exponents of 2."""
    return scale * LOG2E if SOFTCAP is None and not HAS_BIAS and not EXACT else LOG2E


@triton.jit
def scores(products, bias, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Compute the scores, and their slopes with respect to the scaled products.

    Plain products stay unscaled unless ``EXACT``: then ``unit_of_scores`` holds the scale.
    """
    slopes = 1.0
    if SOFTCAP is not None:
        # times a large cap, the absolute error of the fast tanh would be as large as a score
        capped, slopes = tanh_and_slope(products * (scale / SOFTCAP), EXACT or SOFTCAP > 256.0)
        products = capped * SOFTCAP
    elif EXACT or bias is not None:
        products *= scale
    if bias is not None:
        products += bias
    return products, slopes


@triton.jit
def online_softmax(s, total, row_max, unit, APART: tl.constexpr):
    """Return p of a block of scores, the factor of all earlier sums, the new sum of each row and its greatest score.

    APART: the greatest score is subtracted before the product with the unit, which may overflow otherwise.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    exponents = (s - finite[:, None]) * unit if APART else s * unit - (finite * unit)[:, None]
    decay = tl.exp2((row_max - finite) * unit)
    p = tl.exp2(exponents)
    return p, decay, total * decay + tl.sum(p, 1), new_max


@triton.jit
def join(state, other, unit):
    """Return the products in parts, sums and greatest scores of two sets of keys as those of both.

    Each operation is spelled out, so that every kernel rounds the same. An empty set leaves the bits of the other.
    """
    acc, total, row_max = state
    acc_other, total_other, max_other = other
    new_max = tl.maximum(row_max, max_other)
    finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay, weight = tl.exp2((row_max - finite) * unit), tl.exp2((max_other - finite) * unit)
    first = tl.fma(acc[0], decay[:, None], acc_other[0] * weight[:, None])
    total = tl.fma(total, decay, total_other * weight)
    if len(acc) == 1:
        return (first,), total, new_max
    else:
        return (first, tl.fma(acc[1], decay[:, None], acc_other[1] * weight[:, None])), total, new_max


@triton.jit
def finish(row_max, total, sink):
    """Return the factor that normalises the output of each row, its greatest score, and the log2 of its sum relative to
    that score; the ``sink`` joins the sum.

    A row that sees no key has the factor 0 and the greatest score -inf.
    """
    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    row_max = tl.where(unseen, 0.0, row_max)
    factor = tl.where(unseen, 0.0, 1.0 / total)
    if sink is not None:
        new_max = tl.maximum(row_max, sink)
        decay = tl.exp2((row_max - new_max) * LOG2E)
        total = total * decay + tl.exp2((sink - new_max) * LOG2E)
        factor, row_max = tl.where(unseen, 0.0, decay / total), new_max
    return factor, tl.where(unseen, float("-inf"), row_max), tl.log2(total)
