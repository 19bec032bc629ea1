"""Multiply with warp groups, on buffers in parts, and store the sums."""

from liger_like.ops.attention.hopper.buffers import ROWS
from liger_like.runtime.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def start_contract(a, b, zeros):
    """Start a b^T for buffers in parts; the result is valid after a wait. ``zeros`` has the layout of the sum."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def zero_sums(bufs, COUNT: gl.constexpr, layout: gl.constexpr):
    """Return zeros [ROWS, D] in parts, for ``start_add_product`` with one of COUNT buffers."""
    BLOCK_D: gl.constexpr = bufs.shape[-1]
    parts = ()
    for _ in gl.static_range(bufs.shape[0] // COUNT):
        parts += (gl.zeros([ROWS, BLOCK_D], gl.float32, layout),)
    return parts


@gluon.jit
def start_add_product(acc, a, b):
    """Start ``acc`` + ``a`` ``b`` for ``acc`` and ``b`` in parts; the result is valid after ``wait_for``."""
    parts = ()
    for i in gl.static_range(len(acc)):
        parts += (warpgroup_mma(a, b[i], acc[i], is_async=True),)
    return parts


@gluon.jit
def wait_for(acc, later: gl.constexpr):
    """Return a sum in parts once at most ``later`` products are unfinished; the product of each part counts."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(later, deps=acc),)
    else:
        return warpgroup_mma_wait(later, deps=acc)


@gluon.jit
def store_rows(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, START: gl.constexpr = 0):
    """Store the first ``length`` rows of ``x``: columns START to D of one of HEADS heads."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    cols = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + rows * (HEADS * D) + cols, x.to(ptr.dtype.element_ty), mask=(rows < length) & (cols < D))


@gluon.jit
def store_sums(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, scale=1.0):
    """Store the first ``length`` rows of ``x`` in parts, times ``scale``."""
    for i in gl.static_range(len(x)):
        store_rows(ptr, x[i] * scale, length, HEADS, D, i * x[0].shape[1])
