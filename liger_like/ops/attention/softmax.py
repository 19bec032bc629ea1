"""Scores, and the numbers of an online softmax, in base 2; for the portable kernels and those for Hopper."""

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
        # an absolute error of tanh, times a large cap, would be as large as a score
        capped, slopes = tanh_and_slope(products * (scale / SOFTCAP), EXACT or SOFTCAP > 256.0)
        products = capped * SOFTCAP
    elif EXACT or bias is not None:
        products *= scale
    if bias is not None:
        products += bias
    return products, slopes


@triton.jit
def finish(most, total, sink):
    """Compute the factor of the products of rows, their greatest score, and the log2 of their sum relative to it, with
    the sink that joins them.

    A row that sees no key has the factor 0 and the greatest score -inf.
    """
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    most = tl.where(none, 0.0, most)
    factor = tl.where(none, 0.0, 1.0 / total)
    if sink is not None:
        new_most = tl.maximum(most, sink)
        decay = tl.exp2((most - new_most) * LOG2E)
        total = total * decay + tl.exp2((sink - new_most) * LOG2E)
        factor, most = tl.where(none, 0.0, decay / total), new_most
    return factor, tl.where(none, float("-inf"), most), tl.log2(total)
