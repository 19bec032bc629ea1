"""Dispatcher ops for the backward of the fused linear losses, from logits recomputed in slices of the vocabulary."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.losses.chunks import call_of, flops
from liger_like.ops.losses.dw_sum import scale_rows
from liger_like.ops.losses.operands import without_ignored
from liger_like.ops.losses.products import addmm, in_memory_of, logits_behind, slices, store_logits
from liger_like.ops.losses.row_kernels import launch_bwd
from liger_like.ops.losses.rows import OPTIONS_SCHEMA, Options
from liger_like.ops.losses.units import size_of_gradient
from liger_like.ops.losses.unstored import takes_no_logits, unstored_kernels
from liger_like.ops.losses.vocab_shards import SHARD_SCHEMA, Shard
from liger_like.runtime.layout import packed
from liger_like.runtime.registry import op
from liger_like.runtime.support import in_graph

SliceVisit = Callable[[Tensor, Tensor, Tensor, Tensor | None, slice], None]
SMALL_PRODUCT = 2**22  # elements below which cuBLAS splits the sum over tokens and rounds its parts to the dtype


class Backward(NamedTuple):
    """Arguments of ``linear_cross_entropy_bwd``, in the order of its schema; ``shard`` and ``options`` follow flat.

    ``order`` to ``entropy`` are results of the forward; ``dloss`` to ``dentropy`` are upstream gradients [T].
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    u: Tensor | None
    b: Tensor | None
    class_weight: Tensor | None
    order: Tensor
    chunk_bounds: Tensor
    lse: Tensor
    lse_rest: Tensor
    entropy: Tensor
    dloss: Tensor
    dlogprob: Tensor | None
    dentropy: Tensor | None
    dw_sum: Tensor | None
    needs: list[bool]
    dw_dtype: torch.dtype
    shard: Shard
    options: Options


class TokenBackward(NamedTuple):
    """Further arguments of ``linear_logprobs_bwd``, after those of ``Backward``, in the order of its schema.

    ``ids`` [T, K] and ``dlogprob_at`` [T, K], the upstream gradient of their log-probabilities. ``kept_logits``: logits
    of the first tokens of ``order``, which are not recomputed; their gradient takes their memory if they are all that
    count. With ``kept_tops`` they are exponentials of all tokens (``exponentials.py``).
    """

    logits_dtype: torch.dtype
    ids: Tensor | None
    dlogprob_at: Tensor | None
    kept_logits: Tensor | None
    kept_tops: Tensor | None


def _bwd_outputs(call: Backward) -> tuple[Tensor, ...]:
    x, u = call.x, call.u
    (T, H), V, rank = x.shape, call.weight.shape[0], 0 if u is None else u.shape[1]
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = call.needs
    dx = x.new_empty((T if needs_dx else 0, H), dtype=torch.float32)
    dw = x.new_empty((V if needs_dw and call.dw_sum is None else 0, H), dtype=call.dw_dtype)
    dbias = x.new_empty(V if needs_dbias else 0, dtype=torch.float32)
    du = x.new_empty((T if needs_du else 0, rank), dtype=torch.float32)
    db = x.new_empty((V if needs_db else 0, rank), dtype=torch.float32)
    return dx, dw, dbias, du, db


ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b, Tensor? class_weight, Tensor order,"
    " Tensor chunk_bounds, Tensor lse, Tensor lse_rest, Tensor entropy, Tensor dloss, Tensor? dlogprob,"
    " Tensor? dentropy, Tensor(a!)? dw_sum, bool[5] needs, ScalarType dw_dtype,"
    f" {SHARD_SCHEMA}, {OPTIONS_SCHEMA}"
)
RESULTS = "Tensor dx, Tensor dw, Tensor dbias, Tensor du, Tensor db"


@op(
    f"linear_cross_entropy_bwd({ARGUMENTS}) -> ({RESULTS})",
    lambda *args: _bwd_outputs(call_of(Backward, args)),
    flops=flops,
)
def linear_cross_entropy_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients for upstream gradients [T], from logits recomputed for a slice of the vocabulary at a time.

    The arguments are those of ``Backward``. A slice's rows of dw are final: one product over all tokens, rounded once,
    or added to ``dw_sum``. The other gradients are in fp32. dx and du are summed over slices; a half-precision dx is
    the second half of each fp32 row.
    """
    return _gradients(call_of(Backward, args), None)


def _flops_without_kept(*args: Any) -> int:
    """Return the FLOPs of ``flops`` less those of the logits that are kept."""
    call, more = _token_call(args)
    kept = 0 if more.kept_logits is None else len(more.kept_logits)
    rank = 0 if call.u is None else call.u.shape[1]
    return flops(*args) - 2 * kept * call.weight.shape[0] * (call.x.shape[1] + rank)


@op(
    f"linear_logprobs_bwd({ARGUMENTS}, ScalarType logits_dtype, Tensor? ids, Tensor? dlogprob_at,"
    f" Tensor(b!)? kept_logits, Tensor? kept_tops) -> ({RESULTS})",
    lambda *args: _bwd_outputs(_token_call(args)[0]),
    flops=_flops_without_kept,
)
def linear_logprobs_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return what ``linear_cross_entropy_bwd`` does; the arguments are those of ``Backward`` and ``TokenBackward``."""
    return _gradients(*_token_call(args))


def _token_call(args: tuple[Any, ...]) -> tuple[Backward, TokenBackward]:
    further = len(TokenBackward._fields)
    return call_of(Backward, args[:-further]), TokenBackward(*args[-further:])


def _upstream(call: Backward, more: TokenBackward | None) -> tuple[list[Tensor | None], Tensor | None, Tensor]:
    """Return the upstream gradients of loss, logprob and entropy, that of ``logprob_at``, and the factor [1] that they
    lack, with which fp16 holds the gradient of the logits.
    """
    upstream = [packed(g) for g in (call.dloss, call.dlogprob, call.dentropy)]
    d_at = None if more is None else packed(more.dlogprob_at)
    if call.x.dtype != torch.float16:
        return upstream, d_at, call.x.new_ones(1, dtype=torch.float32)
    given = upstream if d_at is None else [*upstream, d_at.where(more.ids >= 0, 0).abs().sum(1)]
    counts = call.target != call.options.ignore_index  # the kernel does not read other tokens' gradients
    sizes = [None if g is None else g.where(counts, 0) for g in given]
    factor = size_of_gradient(sizes, call.target, call.class_weight, call.lse, call.options)
    return [None if g is None else g / factor for g in upstream], None if d_at is None else d_at / factor, factor


def _operands(call: Backward, kept: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x and u of the tokens that take part, and their ``index``: None for all tokens in their own order."""
    x, target, u, order = call.x, call.target, call.u, call.order
    bounds = call.chunk_bounds.tolist()
    counted, last_start, _ = bounds or (len(order), 0, 0)  # empty: not counted
    index = order[:counted] if counted < x.shape[0] or kept is not None else None
    if index is not None:
        x, u = x[index], None if u is None else u[index]
    if (call.needs[1] or call.needs[4]) and counted == len(order) and (last_start == 0 or in_graph(target)):
        # the forward did not count; the gradient of an ignored token is 0, but 0 times NaN is NaN
        x, u = without_ignored(x, u, (target if index is None else target[index]) == call.options.ignore_index)
    return x, u, index


def _kernels(call: Backward, x: Tensor, kept: Tensor | None, logits_dtype: torch.dtype, d_at: Tensor | None) -> Any:
    """Return the kernels that store no logits, or False if they do not accept the call."""
    absent = call.bias, call.u, call.class_weight, call.shard or None, kept, d_at
    plain = takes_no_logits(x, call.weight, logits_dtype, call.options, *absent)
    return plain and unstored_kernels(x, call.weight)


def _logits(
    call: Backward, x: Tensor, u: Tensor | None, part: slice, kept: Tensor | None, dw: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the logits of the words ``part``: those that are kept, and the others computed."""
    k = 0 if kept is None else min(len(x), len(kept))
    if k == len(x):
        return kept[:k, part]
    z = logits_behind(dw, part.stop, x, part.stop - part.start, dtype)
    if k:
        z[:k] = kept[:k, part]
    bias, b = (None if t is None else t[part] for t in (call.bias, call.b))
    store_logits(z[k:], x[k:], call.weight[part], bias, None if u is None else u[k:], b)
    return z


def _gradients(call: Backward, more: TokenBackward | None, visit: SliceVisit | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of ``linear_cross_entropy_bwd``.

    ``visit(z, dz, dloss, index, part)`` fills ``dz`` for another loss, with the gradient of logits ``z`` of the words
    ``part`` and the tokens ``index`` (None: all) for upstream gradients ``dloss`` [T].
    """
    _, weight, target, _, _, b, class_weight, *_, shard, options = call
    dw_sum, needs, lse = call.dw_sum, call.needs, (call.lse, call.lse_rest)
    outs = _bwd_outputs(call)
    dx, dw, dbias, du, db = outs
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    V, H = weight.shape
    kept, tops = (None, None) if more is None else (more.kept_logits, more.kept_tops)
    kept = kept if tops is None else kept.view(torch.float16)
    x, u, index = _operands(call, kept)
    n = x.shape[0]
    if n == 0:
        for t in outs:
            t.zero_()
        return outs
    upstream, d_at, factor = _upstream(call, more)
    logits_dtype, at = (x.dtype, (None, None)) if more is None else (more.logits_dtype, (packed(more.ids), d_at))
    entropies = call.entropy if call.entropy.numel() else None
    du_sum = du.new_empty((n, du.shape[1]))
    kernels = visit is None and more is not None and _kernels(call, x, kept, logits_dtype, d_at)
    held = x.dtype if kernels else logits_dtype
    times = 2 if kernels else 1  # a column of the gradient takes half of the memory of its logits
    parts = slices(V, n * held.itemsize, H * dw.itemsize if dw.numel() else 0, times)
    for start, end in ((0, V),) if kept is not None and len(kept) >= n else parts:
        part, accumulate = slice(start, end), start > 0
        z = dz = None  # frees the last slice's memory before the next is allocated
        w, b_part = weight[part], None if b is None else b[part]
        if kernels:
            dz = logits_behind(dw, end, x, end - start, held)
            kernels.differentiate_logits(x, w, index, target, lse, entropies, upstream, options, start, V, dz)
        else:
            z = _logits(call, x, u, part, kept, dw, held)
            dz = in_memory_of(z, x.dtype)
        if visit is not None:
            visit(z, dz, upstream[0], index, part)
        elif not kernels:
            launch_bwd(
                z, dz, target, class_weight, lse, entropies, upstream, options,
                order=index, v_start=shard.first_word + start, vocabulary=shard.words or V, at=at, tops=tops,
            )  # fmt: skip
        if needs_dx:
            addmm(dx[:n], dz, w, accumulate)
        if needs_du:
            addmm(du_sum, dz, b_part, accumulate)
        if needs_db:
            addmm(db[part], dz.t(), u, False)
        if needs_dbias:
            torch.sum(dz, 0, dtype=torch.float32, out=dbias[part])
        if needs_dw:
            out = dw[part] if dw_sum is None else dw_sum[part]
            # cuBLAS stores a product in its operands' dtype or in fp32 only; fp16 still needs the factor
            if x.dtype == torch.float16 or out.dtype not in (x.dtype, torch.float32) or out.numel() < SMALL_PRODUCT:
                product = torch.empty_like(out, dtype=torch.float32)
                addmm(product, dz.t(), x, False)
                scale_rows(product, None, factor, out, dw_sum is not None)
            else:
                addmm(out, dz.t(), x, dw_sum is not None)
    if needs_dx and shard.reduce_dx:
        dist.all_reduce(dx[:n], group=shard.processes())
    dbias *= factor
    db *= factor
    if needs_du:
        scale_rows(du_sum, index, factor, du if index is None else du.zero_(), False)
    if needs_dx and x.dtype != torch.float32:
        first, second = dx.view(x.dtype).split(H, 1)
        scale_rows(dx[:n], None, factor, first, False)
        scale_rows(first[:n], index, torch.ones_like(factor), second if index is None else second.zero_(), False)
    elif needs_dx and index is not None:
        dx_sum = dx[:n].clone()
        scale_rows(dx_sum, index, factor, dx.zero_(), False)
    return outs
