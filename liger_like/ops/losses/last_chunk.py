"""Dispatcher op for the products of the fused linear losses' last chunk, which the backward scales as it runs them."""

from torch import Tensor

from liger_like.ops.losses.dw_sum import add_products
from liger_like.ops.losses.products import addmm, even_step
from liger_like.runtime.registry import op


@op(
    "linear_cross_entropy_last(Tensor(a!) dx, Tensor dw, Tensor exponents, Tensor last_logits, Tensor last_x,"
    " Tensor weight, Tensor order, Tensor chunk_bounds, Tensor factor, Tensor(b!) out) -> ()",
    lambda *args: None,
    replayed=True,
)
def linear_cross_entropy_last(
    dx: Tensor,
    dw: Tensor,
    exponents: Tensor,
    last_logits: Tensor,
    last_x: Tensor,
    weight: Tensor,
    order: Tensor,
    chunk_bounds: Tensor,
    factor: Tensor,
    out: Tensor,
) -> None:
    """Compute the products that ``linear_cross_entropy_fwd`` left: the last rows of ``dx`` and the last part of dw.

    ``out`` gets the whole sum of dw times ``factor``, and may share the memory of ``dw``.
    """
    # a recording notices this, but not tolist() of memory on the host
    start, end = map(int, chunk_bounds[1:]) if chunk_bounds.numel() else _last_chunk(len(order), last_logits.shape[0])
    V, H = weight.shape
    if start == end:
        out.zero_()
        return
    z = last_logits[: end - start, :V]
    x = last_x[: end - start] if last_x.numel() else dx[start:end].view(z.dtype)[:, :H]  # autocast's, not the weight's
    add_products(dw, exponents, z, x, accumulate=start > 0, out=out, factor=factor)
    if not last_x.numel():
        addmm(dx[start:end, :H], z, weight.to(z.dtype), False)


def _last_chunk(T: int, step: int) -> tuple[int, int]:
    """Return the start and the end of the last chunk of ``run_chunks`` where all tokens count."""
    start, rest = 0, T - step
    if rest > 0:
        even = even_step(rest, step)
        start = step + (rest - 1) // even * even
    return start, T
