"""Gradients in the backward of the fused linear losses: those of the forward, scaled, or recomputed ones.

``ctx`` of the autograd functions holds ``options``, ``accumulate_grad``, and ``like``: the dtypes of x and of the
weight, and the columns of x. Their first five arguments are x, weight, bias, u and b.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_like.ops.losses.chunks import flat
from liger_like.ops.losses.dw_sum import scale_rows
from liger_like.ops.losses.last_chunk import linear_cross_entropy_last
from liger_like.ops.losses.slices import Backward, linear_cross_entropy_bwd
from liger_like.ops.losses.units import unit
from liger_like.runtime.autograd import is_last_backward


def grad_to_add_to(ctx: Any, weight: Tensor) -> Tensor | None:
    """Return the weight's ``grad`` if it exists and the backward may add to it in place, else None."""
    if not ctx.accumulate_grad or not ctx.needs_input_grad[1] or torch.compiler.is_compiling() or not weight.is_leaf:
        return None
    grad = weight.grad
    if grad is None or not grad.is_contiguous():
        return None
    torch.autograd.graph.increment_version(grad)  # kernels change no version
    return grad


def factor_of(ctx: Any, dloss: Tensor, weight_unit: Tensor | None) -> Tensor:
    """Return the factor [1] or [T] of gradients that are in the unit of ``unit`` and ``weight_unit``."""
    factor = (dloss / unit(ctx.options)).reshape(-1)
    return factor if weight_unit is None else factor / weight_unit


def scaled(
    ctx: Any, saved: tuple[Tensor, ...], factor: Tensor, of_rows: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the forward's gradients times ``factor``, rounded once.

    ``saved`` holds the weight and the forward's results from ``order`` on. ``factor`` is [1], or [T] if the weight, the
    bias and b need no gradient; ``of_rows`` [T] takes its place for dx and du. In the last backward dw takes the memory
    of its sum where it fits, and the last chunk's logits are freed.
    """
    weight, order, chunk_bounds, *sums = saved
    dx_sum, dw_sum, exponents, last_logits, last_x, dbias, du_sum, db = sums
    of_rows = factor if of_rows is None else of_rows
    dtype, dw_dtype, H = ctx.like
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = ctx.needs_input_grad[:5]
    last_use = is_last_backward()
    dx = du = dw = None
    if needs_dw and exponents.numel():
        dw = dw_sum.view(dw_dtype) if last_use else torch.empty_like(dw_sum, dtype=dw_dtype)
        dx_sum = dx_sum if last_use else dx_sum.clone()
        linear_cross_entropy_last(
            dx_sum, dw_sum, exponents, last_logits, last_x, weight, order, chunk_bounds, factor, dw
        )
        if last_use:
            last_logits.untyped_storage().resize_(0)
    elif needs_dw and (grad := grad_to_add_to(ctx, weight)) is not None:
        scale_rows(dw_sum, None, factor, grad, True)
    elif needs_dw:
        fits = last_use and dw_sum.itemsize == dw_dtype.itemsize
        dw = dw_sum.view(dw_dtype) if fits else torch.empty_like(dw_sum, dtype=dw_dtype)
        scale_rows(dw_sum, None, factor, dw, False)
    if needs_dx:
        dx = dx_sum.new_empty((dx_sum.shape[0], H), dtype=dtype)
        scale_rows(dx_sum[:, :H], order, of_rows, dx, False)
    if needs_du:
        du = torch.empty_like(du_sum, dtype=dtype)
        scale_rows(du_sum, order, of_rows, du, False)
    dbias, db = (
        (grad * factor).to(dtype) if needed else None for grad, needed in ((dbias, needs_dbias), (db, needs_db))
    )
    return dx, dw, dbias, du, db


def recomputed(
    ctx: Any,
    saved: tuple[Tensor, ...],
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    more: tuple[Any, ...] = (),
    op: Callable[..., tuple[Tensor, ...]] = linear_cross_entropy_bwd,
) -> tuple[Tensor | None, ...]:
    """Return the gradients for per-token ``upstream`` gradients of loss, logprob and entropy, from recomputed logits.

    ``saved`` holds the arguments of ``Backward`` up to ``entropy``, and ``more`` further arguments of ``op``.
    """
    x, weight, *rest = saved
    dtype, dw_dtype, H = ctx.like
    dloss, *others = upstream
    if dloss is None:
        dloss = x.new_zeros(x.shape[0], dtype=torch.float32)
    dw_sum = grad_to_add_to(ctx, weight)
    needs = list(ctx.needs_input_grad[:5])
    call = Backward(x, weight.to(dtype), *rest, dloss, *others, dw_sum, needs, dw_dtype, ctx.shard, ctx.options)
    dx, dw, dbias, du, db = op(*flat(call), *more)
    if dtype != torch.float32:
        dx = dx.view(dtype)[:, H:]
    return dx, None if dw_sum is not None else dw, dbias.to(dtype), du.to(dtype), db.to(dtype)
