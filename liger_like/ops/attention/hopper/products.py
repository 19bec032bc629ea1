"""Multiply with warp groups, on buffers in parts, and store the sums."""

import triton

from liger_like.runtime.gluon import gl, gluon, warpgroup_mma
from liger_like.runtime.hopper import sum_layout, zero_sum

# of the 240 registers of a thread, those for sums, products and operands; with more, Triton 3.9 spills
MOST_REGISTERS = gl.constexpr(184)


@gluon.jit
def start_contract(a, b, zeros):
    """Start a b^T for buffers in parts; the result is valid after a wait. ``zeros`` has the layout of the sum."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, is_async=True)
    return acc


@triton.constexpr_function
def parts_that_fit(registers, widths):
    """Return how many parts [ROWS, width] of a left operand a warp group can hold in registers, beside ``registers`` of
    a thread for sums and products.
    """
    return sum(registers + sum(widths[:count]) // 4 <= MOST_REGISTERS.value for count in range(1, len(widths) + 1))


@gluon.jit
def load_first(parts, COUNT: gl.constexpr, layout: gl.constexpr):
    """Load the first COUNT parts of a left operand, whose products with results of ``layout`` then read no shared
    memory for it.
    """
    loaded = ()
    for i in gl.static_range(COUNT):
        loaded += (parts[i].load(gl.DotOperandLayout(0, layout, 2)),)
    return loaded


@gluon.jit
def zero_sums(b):
    """Return zeros [ROWS, D] in parts, for ``start_add_product`` with ``b``."""
    parts = ()
    for i in gl.static_range(len(b)):
        parts += (zero_sum(b[i].shape[-1]),)
    return parts


@gluon.jit
def start_add_product(acc, a, b):
    """Start ``acc`` + ``a`` ``b`` for ``acc`` and ``b`` in parts; the result is valid after ``wait_for``.

    ``a`` is in registers. Its conversion to the operand of each part moves nothing.
    """
    parts = ()
    for i in gl.static_range(len(acc)):
        operand = gl.convert_layout(a, gl.DotOperandLayout(0, sum_layout(b[i].shape[-1]), 2))
        parts += (warpgroup_mma(operand, b[i], acc[i], is_async=True),)
    return parts


@gluon.jit
def times_rows(acc, factors):
    """Return a sum in parts, times a factor of each row."""
    parts = ()
    for i in gl.static_range(len(acc)):
        parts += (acc[i] * gl.convert_layout(factors, gl.SliceLayout(1, acc[i].type.layout))[:, None],)
    return parts


@triton.constexpr_function
def row_layout(width, dtype):
    """Return a layout of [ROWS, width] in which a thread has 16 bytes of a row at a time.

    The rows of a warp are those that it has in ``sum_layout``.
    """
    each = 128 // dtype.primitive_bitwidth
    across = min(width // each, 8)
    return gl.BlockedLayout([across // 2, each], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def store_rows(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, START: gl.constexpr = 0):
    """Store the first ``length`` rows of ``x``: columns START to D of one of HEADS heads."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    x = x.to(dtype)
    # Memory takes 32 bytes at a time, of which a sum writes 16. So threads exchange rows in shared memory, which has no
    # room for wider ones.
    if x.shape[1] <= 128:
        x = gl.convert_layout(x, row_layout(x.shape[1], dtype))
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    cols = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + rows * (HEADS * D) + cols, x, mask=(rows < length) & (cols < D))


@gluon.jit
def store_sums(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, scale=1.0):
    """Store the first ``length`` rows of ``x`` in parts, times ``scale``; all parts but the last are equally wide."""
    for i in gl.static_range(len(x)):
        store_rows(ptr, x[i] * scale, length, HEADS, D, i * x[0].shape[1])
