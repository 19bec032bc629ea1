"""What the attention kernels share: which rows and keys a program has, what sees what, and the scores.

A head of D features is read in parts whose widths are powers of 2, as ``tl.dot`` wants them: 96 as 64 + 32 and 192 as
128 + 64, where padding to 128 and 256 would waste a quarter of the products. A tensor in parts is a tuple.
"""

import triton
import triton.language as tl
from triton import next_power_of_2

from liger_like.ops.attention.softmax import LOG2E, scores


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
def load_bias(ptr, queries, keys, stride_s, stride_k, length_q, length_k):
    """A block of the bias in fp32, for rows that broadcast."""
    ptrs = ptr + queries.to(tl.int64) * stride_s + keys.to(tl.int64) * stride_k
    return tl.load(ptrs, mask=(queries < length_q) & (keys < length_k), other=0.0).to(tl.float32)


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
