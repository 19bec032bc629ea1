"""Products of warp groups, and how their sums are stored."""

from liger_like.ops.attention.hopper.buffers import ROWS
from liger_like.runtime.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def contract(a, b, none):
    """a b^T of buffers in parts, once it is waited for; ``none`` are zeros."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), none, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def zero_parts(bufs, COUNT: gl.constexpr, layout: gl.constexpr):
    """Sums for ``add_product`` of one out of so many buffers."""
    BLOCK_D: gl.constexpr = bufs.shape[-1]
    parts = ()
    for _ in gl.static_range(bufs.shape[0] // COUNT):
        parts += (gl.zeros([ROWS, BLOCK_D], gl.float32, layout),)
    return parts


@gluon.jit
def add_product(acc, a, b):
    """``acc`` + ``a`` ``b``, in parts but for ``a``, once it is waited for."""
    parts = ()
    for i in gl.static_range(len(acc)):
        parts += (warpgroup_mma(a, b[i], acc[i], is_async=True),)
    return parts


@gluon.jit
def wait_for(acc, later: gl.constexpr):
    """A sum in parts, when no more than ``later`` products are on their way; those of parts count each."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(later, deps=acc),)
    else:
        return warpgroup_mma_wait(later, deps=acc)


@gluon.jit
def store_rows(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, START: gl.constexpr = 0):
    """Store the first ``length`` rows of ``x``, columns of a head out of so many from START on, as far as D."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    cols = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + rows * (HEADS * D) + cols, x.to(ptr.dtype.element_ty), mask=(rows < length) & (cols < D))


@gluon.jit
def store_parts(ptr, x, length, HEADS: gl.constexpr, D: gl.constexpr, scale=1.0):
    """``store_rows`` of ``x`` in parts, times a number."""
    for i in gl.static_range(len(x)):
        store_rows(ptr, x[i] * scale, length, HEADS, D, i * x[0].shape[1])
