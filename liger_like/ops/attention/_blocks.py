"""What the attention kernels share: which rows and keys a program has, what sees what, and the scores.

A head of D features is read in parts whose widths are powers of 2, as ``tl.dot`` wants them: 96 as 64 + 32 and 192 as
128 + 64, where padding to 128 and 256 would waste a quarter of the products. A tensor in parts is a tuple.
"""

import triton
import triton.language as tl
from triton import next_power_of_2

from liger_like.ops._common import tanh_and_slope

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def part_width(D, part):
    """Width of the first or second part of D features; 0 for a second part that there is not."""
    whole = max(16, next_power_of_2(D))
    first = whole // 2
    rest = max(16, next_power_of_2(max(1, D - first)))
    return (whole, 0)[part] if first < 16 or first + rest >= whole else (first, rest)[part]


@triton.constexpr_function
def product_precision(dtype):
    """How ``tl.dot`` multiplies: fp32 without a loss."""
    return "ieee" if dtype == tl.float32 else None


@triton.jit
def _load_part(ptr, offs, STRIDE: tl.constexpr, mask, D: tl.constexpr, PART: tl.constexpr):
    START: tl.constexpr = PART * part_width(D, 0)
    WIDTH: tl.constexpr = part_width(D, PART)
    cols = START + tl.arange(0, WIDTH)
    if STRIDE >= 1 << 23:  # 32 bits hold the offsets within a block otherwise
        offs = offs.to(tl.int64)
    ptrs = ptr + offs[:, None] * STRIDE + cols[None, :]
    mask = mask[:, None]
    if START + WIDTH > D:
        inside = (cols < D)[None, :]
        mask = inside & mask
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_parts(ptr, offs, STRIDE: tl.constexpr, mask, D: tl.constexpr):
    """Rows ``offs``, of 64 bits or less than 256, of D features in parts, zero where not ``mask``.

    The stride is a constant, so that one register points to the rows that a thread loads.
    """
    first = _load_part(ptr, offs, STRIDE, mask, D, 0)
    if part_width(D, 1) == 0:
        return (first,)
    else:
        return first, _load_part(ptr, offs, STRIDE, mask, D, 1)


@triton.jit
def _store_part(ptr, offs, STRIDE: tl.constexpr, mask, x, D: tl.constexpr, PART: tl.constexpr):
    cols = PART * part_width(D, 0) + tl.arange(0, part_width(D, PART))
    tl.store(ptr + offs[:, None] * STRIDE + cols[None, :], x, mask=mask[:, None] & (cols < D)[None, :])


@triton.jit
def store_parts(ptr, offs, STRIDE: tl.constexpr, mask, x, D: tl.constexpr):
    """Store what ``load_parts`` would load."""
    _store_part(ptr, offs, STRIDE, mask, x[0], D, 0)
    if len(x) > 1:
        _store_part(ptr, offs, STRIDE, mask, x[1], D, 1)


@triton.jit
def zero_parts(ROWS: tl.constexpr, D: tl.constexpr):
    """Zeros [ROWS, D] in parts, in fp32."""
    first = tl.zeros((ROWS, part_width(D, 0)), tl.float32)
    if part_width(D, 1) == 0:
        return (first,)
    else:
        return first, tl.zeros((ROWS, part_width(D, 1)), tl.float32)


@triton.jit
def scale_parts(x, factor):
    """``x`` times a number, or times one for each row given as [ROWS, 1]."""
    if len(x) == 1:
        return (x[0] * factor,)
    else:
        return x[0] * factor, x[1] * factor


@triton.jit
def contract(a, b, acc=None):
    """a b^T [M, N] for tensors in parts [M, D] and [N, D], added to ``acc``, in fp32."""
    precision: tl.constexpr = product_precision(a[0].dtype)
    out = tl.dot(a[0], tl.trans(b[0]), acc, input_precision=precision)
    if len(a) > 1:
        out = tl.dot(a[1], tl.trans(b[1]), out, input_precision=precision)
    return out


@triton.jit
def add_product(acc, a, b):
    """``acc`` [M, D] + ``a`` [M, N] ``b`` [N, D], for ``acc`` and ``b`` in parts, in fp32."""
    precision: tl.constexpr = product_precision(b[0].dtype)
    a = a.to(b[0].dtype)
    first = tl.dot(a, b[0], acc[0], input_precision=precision)
    if len(acc) == 1:
        return (first,)
    else:
        return first, tl.dot(a, b[1], acc[1], input_precision=precision)


@triton.jit
def schedule(pid, blocks, heads, section):
    """Block and head of a program.

    ``section`` heads at a time, so that their keys stay in L2, and of these the last blocks, which have the most to do
    under a causal mask, first.
    """
    skipped = pid // (section * blocks) * section
    pid -= skipped * blocks
    size = tl.minimum(section, heads - skipped)
    return blocks - 1 - pid // size, skipped + pid % size


@triton.jit
def start_of(cu_ptr, index, count, total):
    """Return the row at which a packed sequence starts: 0 for the first, ``total`` past the last of ``count``.

    Offsets outside of ``total`` rows are clamped, so that wrong ones cannot lead out of the tensor.
    """
    start = tl.load(cu_ptr + index, mask=(index > 0) & (index <= count), other=0)
    start = tl.minimum(tl.maximum(start, 0), total).to(tl.int32)
    return tl.where(index > count, total, start)


@triton.jit
def find_rows(
    b, block, cu_ptr, cu_other_ptr, count, total, total_other, BLOCK: tl.constexpr, PACK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Where the given block of rows lies: index of the sequence, the first row in it, where the sequence starts, its
    length, and where the other side of it starts and its length.

    Without ``cu_ptr`` a sequence is a batch of ``total`` rows. With it there are ``count`` in one batch, each of which
    starts a block; what follows the last one is one more, with nothing on the other side, and the length is 0 for a
    block beyond that. A row counts ``PACK`` times.
    """
    zero = tl.full((), 0, tl.int64)
    if cu_ptr is None:
        return b, block * BLOCK, zero, total, zero, total_other
    else:
        offs = tl.arange(0, SEQUENCES)
        starts, ends = start_of(cu_ptr, offs, count, total), start_of(cu_ptr, offs + 1, count, total)
        lengths = tl.maximum(ends - starts, 0)  # offsets that fall are wrong, and so is the result, but nothing else
        blocks = tl.cdiv(lengths * PACK, BLOCK)
        index = tl.sum((tl.cumsum(blocks) <= block).to(tl.int32))
        here = offs == index
        row = (block - tl.sum(tl.where(offs < index, blocks, 0))) * BLOCK
        start = tl.sum(tl.where(here, starts, 0)).to(tl.int64)
        length = tl.sum(tl.where(here & (row >= 0), lengths, 0))
        start_other = start_of(cu_other_ptr, index, count, total_other)
        length_other = tl.maximum(start_of(cu_other_ptr, index + 1, count, total_other) - start_other, 0)
        return index, row, start, length, start_other.to(tl.int64), tl.where(index < count, length_other, 0)


@triton.jit
def shift_of(offsets_ptr, index, length_q, length_k):
    """Position of the first query minus that of the first key; last query and last key stand together by default."""
    if offsets_ptr is None:
        return length_k - length_q
    else:
        # what follows packed sequences has no keys, and no offset
        return tl.load(offsets_ptr + index, mask=(length_q > 0) & (length_k > 0), other=0).to(tl.int32)


@triton.jit
def load_spans(ptr, b, B, total, rows):
    """Where the spans of ``rows`` start and end, in a batch of ``total``; those behind have the span of the last."""
    ptrs = ptr + b * total + tl.minimum(rows, total - 1)
    return tl.load(ptrs), tl.load(ptrs + tl.cast(B, tl.int64) * total)


@triton.jit
def bounds_of_spans(ptr, b, B, total, first, last):
    """Of rows ``first`` to ``last``, whose spans do not fall, the least and the greatest start, and the same of their
    ends: scalars, by which the compiler knows that all threads take the same way. None without spans.
    """
    bounds = None
    if ptr is not None:
        least_start, least_end = load_spans(ptr, b, B, total, first)
        greatest_start, greatest_end = load_spans(ptr, b, B, total, last)
        bounds = least_start, greatest_start, least_end, greatest_end
    return bounds


@triton.jit
def zones(
    first, last, behind, ahead, bounds, length, part, num_parts, HAS_BEHIND: tl.constexpr, HAS_AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``last`` see from ``behind`` before themselves to ``ahead`` after, in spans of these
    ``bounds``, if there are any, and out of ``length``: where the ``part`` of ``num_parts`` of what they see starts and
    ends, and from where to where all see all.
    """
    start, end, inner_start, inner_end = 0, length, 0, length
    if HAS_AHEAD:
        end = tl.minimum(end, tl.maximum(last + ahead + 1, 0))
        inner_end = tl.minimum(inner_end, first + ahead + 1)
    if HAS_BEHIND:
        start = tl.maximum(first - behind, 0) // BLOCK * BLOCK
        inner_start = last - behind
    if bounds is not None:
        least_start, greatest_start, least_end, greatest_end = bounds
        start, end = tl.maximum(start, least_start // BLOCK * BLOCK), tl.minimum(end, greatest_end)
        inner_start, inner_end = tl.maximum(inner_start, greatest_start), tl.minimum(inner_end, least_end)
    start = tl.minimum(start, end)
    share = tl.cdiv(tl.cdiv(end - start, BLOCK), num_parts) * BLOCK
    start = tl.minimum(start + part * share, end)
    return start, tl.minimum(start + share, end), inner_start, inner_end


@triton.jit
def load_bias(ptr, queries, keys, stride_s, stride_k, length_q, length_k):
    """A block of the bias in fp32, for rows that broadcast."""
    ptrs = ptr + queries.to(tl.int64) * stride_s + keys.to(tl.int64) * stride_k
    return tl.load(ptrs, mask=(queries < length_q) & (keys < length_k), other=0.0).to(tl.float32)


@triton.jit
def visible(queries, keys, shift, length_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the keys a query sees; both in rows of their sequence."""
    seen = keys < length_k
    distance = keys - queries - shift
    if HAS_LEFT:
        seen = seen & (distance >= -left)
    if HAS_RIGHT:
        seen = seen & (distance <= right)
    return seen


@triton.jit
def within(seen, spans, others):
    """``seen``, but for ``others`` outside the spans, if there are any, of the rows with which they broadcast."""
    if spans is not None:
        seen = seen & (others >= spans[0]) & (others < spans[1])
    return seen


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
def load_rest(ptrs, count, APART: tl.constexpr):
    """Load the log2 of the sums from the rows of ``attention_delta``; None unless they are kept APART."""
    rest = None
    if APART:
        rest = tl.load(ptrs + 2 * count)
    return rest


@triton.jit
def probabilities(a, b, bias, most, rest, scale, SOFTCAP: tl.constexpr):
    """Compute p from the products of ``a`` and ``b``, and the slopes of the scores.

    ``most`` broadcasts: the lse of the rows, or with ``rest`` the greatest score, and ``rest`` the log2 of the sum.
    """
    ROWS: tl.constexpr = a[0].shape[0]
    COLS: tl.constexpr = b[0].shape[0]
    EXACT: tl.constexpr = a[0].dtype == tl.float32
    if SOFTCAP is None and bias is None and not EXACT:
        # the products start at what is to be subtracted: no register keeps that for later. In fp32 each of them would
        # be rounded to what that is
        start = tl.broadcast_to(most * (-1.0 / scale), (ROWS, COLS))
        return tl.exp2(contract(a, b, start) * (scale * LOG2E)), 1.0
    else:
        s, slopes = scores(contract(a, b), bias, scale, SOFTCAP, EXACT)
        exponents = (s - most) * LOG2E
        if rest is not None:
            exponents -= rest
        return tl.exp2(exponents), slopes


@triton.jit
def less_delta(a, b, delta):
    """The products of ``a`` and ``b``, less a delta that broadcasts."""
    ROWS: tl.constexpr = a[0].shape[0]
    COLS: tl.constexpr = b[0].shape[0]
    return contract(a, b, tl.broadcast_to(-delta, (ROWS, COLS)))


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
