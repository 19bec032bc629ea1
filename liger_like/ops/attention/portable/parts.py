"""Load, multiply and store heads in parts, and compute p of the backward kernels.

A head of D features is read in parts whose widths are powers of 2, as ``tl.dot`` requires: 96 as 64 + 32 and 192 as
128 + 64. Padding to 128 and 256 would waste a quarter of the products. A tensor in parts is a tuple.
"""

import triton
import triton.language as tl
from triton import next_power_of_2

from liger_like.ops.attention.softmax import LOG2E, scores


@triton.constexpr_function
def part_width(D, part):
    """Return the width of the first or second part of D features; 0 if there is no second part."""
    whole = max(16, next_power_of_2(D))
    first = whole // 2
    rest = max(16, next_power_of_2(max(1, D - first)))
    return (whole, 0)[part] if first < 16 or first + rest >= whole else (first, rest)[part]


@triton.constexpr_function
def values_first(D, DV):
    """Return True if a block's values must be loaded before its scores are computed: they are narrower than its keys.

    Where no copies run ahead, as of rows that are not aligned, the values would take the shared memory of the keys. The
    ptxas 12.8 of Triton 3.6 then computes addresses of narrower values from the wrong register; ptxas 12.9 does not.
    """
    return part_width(DV, 0) < part_width(D, 0)


@triton.constexpr_function
def product_precision(dtype):
    """Return the precision of ``tl.dot``: full fp32 for fp32 operands."""
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
    """Load rows ``offs`` of D features in parts, zero where not ``mask``; ``offs`` are int64, or int32 below 256.

    The stride is a constexpr, so that one register addresses all rows that a thread loads.
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
    """Store ``x`` in parts where ``load_parts`` would load it."""
    _store_part(ptr, offs, STRIDE, mask, x[0], D, 0)
    if len(x) > 1:
        _store_part(ptr, offs, STRIDE, mask, x[1], D, 1)


@triton.jit
def zero_parts(ROWS: tl.constexpr, D: tl.constexpr):
    """Return zeros [ROWS, D] in parts, in fp32."""
    first = tl.zeros((ROWS, part_width(D, 0)), tl.float32)
    if part_width(D, 1) == 0:
        return (first,)
    else:
        return first, tl.zeros((ROWS, part_width(D, 1)), tl.float32)


@triton.jit
def scale_parts(x, factor):
    """Return ``x`` in parts times ``factor``, a number or [ROWS, 1]."""
    if len(x) == 1:
        return (x[0] * factor,)
    else:
        return x[0] * factor, x[1] * factor


@triton.jit
def contract(a, b, acc=None):
    """Return ``acc`` + a b^T [M, N] in fp32, for a [M, D] and b [N, D] in parts."""
    precision: tl.constexpr = product_precision(a[0].dtype)
    out = tl.dot(a[0], tl.trans(b[0]), acc, input_precision=precision)
    if len(a) > 1:
        out = tl.dot(a[1], tl.trans(b[1]), out, input_precision=precision)
    return out


@triton.jit
def add_product(acc, a, b):
    """Return ``acc`` [M, D] + ``a`` [M, N] ``b`` [N, D] in fp32, for ``acc`` and ``b`` in parts."""
    precision: tl.constexpr = product_precision(b[0].dtype)
    a = a.to(b[0].dtype)
    first = tl.dot(a, b[0], acc[0], input_precision=precision)
    if len(acc) == 1:
        return (first,)
    else:
        return first, tl.dot(a, b[1], acc[1], input_precision=precision)


@triton.jit
def load_bias(ptr, queries, keys, stride_s, stride_k, length_q, length_k):
    """Load a block of the bias in fp32, for queries and keys that broadcast."""
    ptrs = ptr + queries.to(tl.int64) * stride_s + keys.to(tl.int64) * stride_k
    return tl.load(ptrs, mask=(queries < length_q) & (keys < length_k), other=0.0).to(tl.float32)


@triton.jit
def load_log_sum(ptrs, count, SPLIT_LSE: tl.constexpr):
    """Load the log2 of the softmax sums from the stats of ``attention_delta``; None unless SPLIT_LSE."""
    log_sum = None
    if SPLIT_LSE:
        log_sum = tl.load(ptrs + 2 * count)
    return log_sum


@triton.jit
def probabilities(a, b, bias, row_max, log_sum, scale, SOFTCAP: tl.constexpr, START: tl.constexpr):
    """Compute p from the products of ``a`` and ``b``, and the slopes of the scores.

    ``row_max`` broadcasts: the lse of each query, or with ``log_sum`` its greatest score. ``log_sum``: the log2 of its
    sum. START: the products start at -``row_max`` where they can, which saves registers, but waits for its load.
    """
    ROWS: tl.constexpr = a[0].shape[0]
    COLS: tl.constexpr = b[0].shape[0]
    EXACT: tl.constexpr = a[0].dtype == tl.float32
    PLAIN: tl.constexpr = SOFTCAP is None and bias is None and not EXACT  # in fp32 each product would be rounded
    if START and PLAIN:
        start = tl.broadcast_to(row_max * (-1.0 / scale), (ROWS, COLS))
        return tl.exp2(contract(a, b, start) * (scale * LOG2E)), 1.0
    elif PLAIN:
        return tl.exp2(contract(a, b) * (scale * LOG2E) - row_max * LOG2E), 1.0
    else:
        s, slopes = scores(contract(a, b), bias, scale, SOFTCAP, EXACT)
        exponents = (s - row_max) * LOG2E
        if log_sum is not None:
            exponents -= log_sum
        return tl.exp2(exponents), slopes


@triton.jit
def less_delta(a, b, delta):
    """Return a b^T - ``delta``, which broadcasts."""
    ROWS: tl.constexpr = a[0].shape[0]
    COLS: tl.constexpr = b[0].shape[0]
    return contract(a, b, tl.broadcast_to(-delta, (ROWS, COLS)))
