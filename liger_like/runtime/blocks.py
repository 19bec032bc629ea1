"""Triton functions that several kernels share: blocks of rows, sums and roundings."""

import functools

import triton
import triton.language as tl

# Triton's own function takes microseconds at each call
block_of = functools.cache(triton.next_power_of_2)


@triton.jit
def load_tile(ptr, stride_m, offs_m, offs_n, M, N, EVEN: tl.constexpr = False):
    """Load rows ``offs_m`` and columns ``offs_n`` in fp32, zero outside [M, N].

    ``offs_m`` are int64: rows times stride pass 2^31. EVEN: no column is outside.
    """
    mask = (offs_m < M)[:, None] if EVEN else (offs_m < M)[:, None] & (offs_n < N)[None, :]
    return tl.load(ptr + offs_m[:, None] * stride_m + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, stride_m, offs_m, offs_n, M, N, value, EVEN: tl.constexpr = False):
    """Store ``value`` where ``load_tile`` would load it, rounded to the dtype of ``ptr``."""
    mask = (offs_m < M)[:, None] if EVEN else (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + offs_m[:, None] * stride_m + offs_n[None, :], value, mask=mask)


@triton.jit
def load_weight(ptr, offs_n, N):
    """Load elements ``offs_n`` of a vector in its dtype, zero past N; None if ``ptr`` is None."""
    w = None
    if ptr is not None:
        w = tl.load(ptr + offs_n, mask=offs_n < N, other=0.0)
    return w


@triton.jit
def load_vector(ptr, offs_n, N):
    """Load elements ``offs_n`` of a vector in fp32, zero past N."""
    return load_weight(ptr, offs_n, N).to(tl.float32)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) in fp32 by 5 instructions; those of ``tl.sigmoid`` are 11, to divide by huge numbers."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit(do_not_specialize=["P"])
def sum_rows_kernel(x_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum P rows of N fp32 numbers, always in the same order."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for p in range(0, P, BLOCK_P):
        total += load_tile(x_ptr, N, p + tl.arange(0, BLOCK_P).to(tl.int64), offs_n, P, N)
    tl.store(out_ptr + offs_n, tl.sum(total, axis=0), mask=offs_n < N)


@triton.jit
def accumulate(ptr, offs, mask, again, value):
    """Add ``value`` to the program's own memory; overwrite on the first pass, when ``again`` is False."""
    tl.store(ptr + offs, value + tl.load(ptr + offs, mask=tl.where(again, mask, False), other=0.0), mask=mask)


@triton.jit
def tanh_and_slope(x, EXACT: tl.constexpr):
    """Return tanh(x) and its derivative in fp32; EXACT bounds the relative error, else only the absolute one is
    bounded.
    """
    if not EXACT:
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
        return y, 1.0 - y * y
    # e = exp(-2|x|), tanh |x| = (1 - e) / (1 + e), its slope 4e / (1 + e)^2; near 0, where this cancels, the series
    e = tl.exp(-2.0 * tl.abs(x))
    x2 = x * x
    near = -17.0 / 315 + x2 * (62.0 / 2835 - 1382.0 / 155925 * x2)
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * near)))
    y = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where(x2 < 0.1, near, y), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return ``x`` rounded to ``dtype``, in fp32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def grouped(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of a tile; GROUP rows of tiles go through the columns together, to share operands in L2."""
    first = tile // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inner = tile % (GROUP * tiles_n)
    return first + inner % size, inner // size
