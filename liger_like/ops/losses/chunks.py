"""Dispatcher ops for the forward of the fused linear losses.

The forward runs over chunks of tokens and can compute the gradients at once. ``linear_cross_entropy_last`` finishes the
last chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.losses.dw_sum import MAX_ROUNDS, add_products, exponents_like, has_products
from liger_like.ops.losses.products import addmm, even_step, kept_first, pitch, store_logits
from liger_like.ops.losses.row_kernels import launch_bwd, launch_fwd
from liger_like.ops.losses.rows import OPTIONS_SCHEMA, Options, raise_bad_label, top_words
from liger_like.ops.losses.units import unit
from liger_like.ops.losses.vocab_shards import SHARD_SCHEMA, Shard, launch_fwd_of_shard
from liger_like.runtime.registry import op

CHUNK_ROWS = 2048  # tokens per chunk at which the products reach full speed; half as many without gradients
CHUNK_BYTES = 64 * 2**20  # least bytes of logits per chunk: with a small vocabulary CHUNK_ROWS tokens are too few
NO_WORD = -1  # the id of no word
Visit = Callable[[Tensor, Tensor | None, Tensor], None]
READS_HOST = torch.Tag.cudagraph_unsafe  # the host reads the token count: torch.compile keeps it out of CUDA graphs


class Forward(NamedTuple):
    """Arguments of ``linear_cross_entropy_fwd``, in the order of its schema; ``shard`` and ``options`` follow flat.

    ``needs``: gradients of x, weight, bias, u and b to compute. ``entropy``, ``argmax``: results to compute.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    u: Tensor | None
    b: Tensor | None
    class_weight: Tensor | None
    weight_unit: Tensor | None
    needs: list[bool]
    entropy: bool
    argmax: bool
    chunk_rows: int | None
    accum_dtype: torch.dtype | None
    dw_dtype: torch.dtype
    shard: Shard
    options: Options


class TokenForward(NamedTuple):
    """Further arguments of ``linear_logprobs_fwd``, after those of ``Forward``, in the order of its schema.

    ``mean_logit``, ``log_sum_sq_prob``: results to compute. ``ids`` [T, K]: words whose log-probabilities to compute,
    and those of the ``topk`` best. ``kept``: number of tokens whose logits to return.
    """

    logits_dtype: torch.dtype
    mean_logit: bool
    log_sum_sq_prob: bool
    ids: Tensor | None
    topk: int
    kept: int


class TokenResults(NamedTuple):
    """Further results of ``linear_logprobs_fwd``, after those of ``linear_cross_entropy_fwd``; empty if not computed.

    ``words`` [T, K + topk]: ids, then the best words. ``logprob_at``: their log-probabilities. ``kept_logits``: logits
    of the first ``kept`` tokens of ``order``, in the dtype of x. ``kept_rows``: lse, lse_rest and entropy [T] of the
    logits as they are kept, if this rounds them.
    """

    mean_logit: Tensor
    log_sum_sq_prob: Tensor
    words: Tensor
    logprob_at: Tensor
    kept_logits: Tensor
    kept_rows: Tensor


def flat(call: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, Forward or Backward, as the op takes them."""
    return *call[:-2], *call.shard, *call.options


def call_of(kind: Any, args: tuple[Any, ...]) -> Any:
    """Return the arguments of an op as a ``kind``, Forward or Backward: the inverse of ``flat``."""
    own = len(kind._fields) - 2
    sharded = own + len(Shard._fields)
    return kind(*args[:own], Shard(*args[own:sharded]), Options(*args[sharded:]))


def _unless_empty(x: Tensor, wanted: bool, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty(shape if wanted else (0,) * len(shape), dtype=dtype)


def _outputs(call: Forward, wide: bool = False) -> tuple[Tensor, ...]:
    x, u, shard = call.x, call.u, call.shard
    (T, H), V = x.shape, call.weight.shape[0]
    unless_empty = functools.partial(_unless_empty, x)
    rows = [unless_empty(wanted, (T,)) for wanted in (True, True, True, call.entropy)]
    rows += [unless_empty(call.argmax, (T,), torch.int64), unless_empty(True, (T,))]
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = call.needs
    step, dw_in_16_bits = _chunks(call, wide)
    # the products read these rows, which must start at multiples of 16 bytes
    dx = unless_empty(needs_dx, (T, -(-H // 4) * 4))
    dw = unless_empty(needs_dw, (V, H), torch.float16 if dw_in_16_bits else call.accum_dtype or torch.float32)
    exponents = exponents_like(dw) if dw_in_16_bits else x.new_empty((0, 0), dtype=torch.uint8)
    last_logits = unless_empty(dw_in_16_bits, (step, pitch(V)), x.dtype)
    last_x = unless_empty(dw_in_16_bits and (shard.released or shard.reduce_dx or not needs_dx), (step, H), x.dtype)
    rank = 0 if u is None else u.shape[1]
    dbias, du, db = (
        unless_empty(needs_dbias, (V,)),
        unless_empty(needs_du, (T, rank)),
        unless_empty(needs_db, (V, rank)),
    )
    order, chunk_bounds = x.new_empty(T, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    return *rows, order, chunk_bounds, dx, dw, exponents, last_logits, last_x, dbias, du, db


def _token_results(call: Forward, more: TokenForward) -> TokenResults:
    T, V = call.x.shape[0], call.weight.shape[0]
    unless_empty = functools.partial(_unless_empty, call.x)
    columns = more.topk + (0 if more.ids is None else more.ids.shape[1])
    return TokenResults(
        unless_empty(more.mean_logit, (T,)),
        unless_empty(more.log_sum_sq_prob, (T,)),
        unless_empty(columns > 0, (T, columns), torch.int64),
        unless_empty(columns > 0, (T, columns)),
        call.x.new_empty((more.kept, pitch(V))),
        unless_empty(more.kept > 0 and more.logits_dtype != call.x.dtype, (3, T)),
    )


def flops(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, u: Tensor | None, *args: Any) -> int:
    """Return the FLOPs of the logits of all tokens and of the needed gradients, deferred products included."""
    needs_dx, needs_dw, _, needs_du, needs_db = next(arg for arg in args if isinstance(arg, list))
    rank = 0 if u is None else u.shape[1]
    each = x.shape[1] * (1 + needs_dx + needs_dw) + rank * (1 + needs_du + needs_db)
    return 2 * x.shape[0] * weight.shape[0] * each


ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b, Tensor? class_weight,"
    " Tensor? weight_unit, bool[5] needs, bool entropy, bool argmax, SymInt? chunk_rows, ScalarType? accum_dtype,"
    f" ScalarType dw_dtype, {SHARD_SCHEMA}, {OPTIONS_SCHEMA}"
)
RESULTS = (
    "Tensor loss, Tensor logprob, Tensor lse, Tensor entropy, Tensor argmax, Tensor lse_rest, Tensor order,"
    " Tensor chunk_bounds, Tensor dx, Tensor dw, Tensor exponents, Tensor last_logits, Tensor last_x, Tensor dbias,"
    " Tensor du, Tensor db"
)


@op(
    f"linear_cross_entropy({ARGUMENTS}) -> ({RESULTS})",
    lambda *args: _outputs(call_of(Forward, args)),
    READS_HOST,
    flops=flops,
)
def linear_cross_entropy_fwd(*args: Any) -> tuple[Tensor, ...]:
    """Return per-token results of the logits x weight^T + bias + u b^T, and the gradients that ``needs`` names.

    The arguments are those of ``Forward``.

    The gradients are for an upstream gradient of ``unit``, times ``weight_unit`` [] if given. ``order`` is the order of
    rows in dx and du, with the tokens that went through the products first. ``chunk_bounds``, on the host, holds their
    number and the start and end of the last chunk. A non-empty ``exponents`` leaves the last chunk's product for dw to
    ``linear_cross_entropy_last``: ``last_logits`` holds the gradient of its logits, ``last_x`` its x. If ``last_x`` is
    empty, x is in the memory of dx, and the product for dx is left, too. With a ``shard``, weight, bias and b are a
    vocabulary shard; the sum of a chunk's dx over the processes overlaps the next chunk.
    """
    call: Forward = call_of(Forward, args)
    outs = _outputs(call)
    _run_chunks(call, outs)
    return outs


@op(
    f"linear_logprobs({ARGUMENTS}, ScalarType logits_dtype, bool mean_logit, bool log_sum_sq_prob, Tensor? ids,"
    f" SymInt topk, SymInt kept) -> ({RESULTS}, Tensor mean_logit, Tensor log_sum_sq_prob, Tensor words,"
    " Tensor logprob_at, Tensor kept_logits, Tensor kept_rows)",
    lambda *args: _token_outputs(args)[2],
    READS_HOST,
    flops=flops,
)
def linear_logprobs_fwd(*args: Any) -> tuple[Tensor, ...]:
    """Return what ``linear_cross_entropy_fwd`` does, and the further results of each token in ``TokenResults``.

    The arguments are those of ``Forward`` and of ``TokenForward``.
    """
    call, more, outs = _token_outputs(args)
    own = len(outs) - len(TokenResults._fields)
    _run_chunks(call, outs[:own], more, TokenResults(*outs[own:]))
    return outs


def _token_outputs(args: tuple[Any, ...]) -> tuple[Forward, TokenForward, tuple[Tensor, ...]]:
    further = len(TokenForward._fields)
    call, more = call_of(Forward, args[:-further]), TokenForward(*args[-further:])
    outs = _outputs(call, wide=more.logits_dtype != call.x.dtype)
    return call, more, (*outs, *_token_results(call, more))


def _run_chunks(
    call: Forward, outs: tuple[Tensor, ...], more: TokenForward | None = None, results: TokenResults | None = None,
    visit: Visit | None = None,
) -> None:  # fmt: skip
    """Fill ``outs``, the results of ``linear_cross_entropy_fwd``, and the further ``results``.

    ``visit(z, dz, index)`` computes another loss: it fills the rows of the tokens ``index`` and, unless ``dz`` is None,
    the gradient ``dz`` of their logits ``z``, which may share their memory.
    """
    x, weight, target, bias, u, b, _, _, needs, *_, shard, options = call
    raise_bad_label(x.device)
    (T, H), V = x.shape, weight.shape[0]
    rows, order, chunk_bounds = outs[:6], outs[6], outs[7]
    argmax, (dx, dw, exponents, last_logits, last_x, dbias, du, db) = outs[4], outs[8:]
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    chunk_bounds.zero_()  # without tokens no chunk sets it
    zeros = [t for t in (*rows, *(results or ())[:4]) if t.dtype == torch.float32]
    zeros += [t for t in (dw, exponents, dbias, db) if T == 0 or needs_dbias]
    torch._foreach_zero_(zeros)  # one launch
    argmax.fill_(-1)
    wide = more is not None and more.logits_dtype != x.dtype
    step, _ = _chunks(call, wide)
    count = kept_first(target, options.ignore_index, order, many=step < T)
    # the gradient of the logits takes their memory if it has their dtype
    logits = None if wide and not any(needs) else last_logits
    if logits is not None and not logits.numel():
        logits = x.new_empty((step, pitch(V)))
    wide_logits = x.new_empty((step, pitch(V)), dtype=more.logits_dtype) if wide else logits
    if more is not None:
        _spread_words(more, results)
    start, end, n = 0, step, T
    sums: list[Any] = []
    while start < end:
        chunk, accumulate = slice(start, end), start > 0
        index, z = order[chunk], wide_logits[: end - start, :V]
        dz = z if logits is None else logits[: end - start, :V]
        if last_x.numel():
            x_c = last_x[: end - start]
        else:
            x_c = dx[chunk].view(x.dtype)[:, :H] if needs_dx else x.new_empty((end - start, H))
        torch.index_select(x, 0, index, out=x_c)
        u_c = None if u is None else u[index]
        store_logits(z, x_c, weight, bias, u_c, b)
        if visit is not None:
            visit(z, dz if any(needs) else None, index)
        else:
            _fill_rows(call, z, index, rows, more, results)
            if results is not None and start < len(results.kept_logits):
                _keep(call, z, order, start, results)
            if any(needs):
                _differentiate(call, z, dz, index, rows)
        if start == 0:
            n = count()
            step = even_step(n - end, step)
        if needs_dbias:
            dbias += dz.sum(0, dtype=torch.float32)
        if needs_du:
            addmm(du[chunk], dz, b, False)
        if needs_db:
            addmm(db, dz.t(), u_c, accumulate)
        chunk_bounds.copy_(torch.tensor([n, start, end]))
        is_left = exponents.numel() > 0 and end >= n
        if needs_dw and not exponents.numel():
            addmm(dw, dz.t(), x_c, accumulate)
        elif needs_dw and not is_left:
            add_products(dw, exponents, dz, x_c, accumulate=accumulate)
        if needs_dx and (last_x.numel() or not is_left):  # after the last use of x_c
            addmm(dx[chunk, :H], dz, weight, False)
        if needs_dx and shard.reduce_dx:
            sums.append(dist.all_reduce(dx[chunk], group=shard.processes(), async_op=True))
        if is_left:
            break
        start, end = end, max(end, min(end + step, n))
    for work in sums:
        work.wait()
    for grad in (dx, du) if end < T else ():
        grad[end:].zero_()
    if results is not None and results.kept_rows.numel():
        others = order[len(results.kept_logits) :]
        for of_kept, row in zip(results.kept_rows, (rows[2], rows[5], rows[3]), strict=True):
            if row.numel():
                of_kept[others] = row[others]


@op(
    "linear_cross_entropy_last(Tensor(a!) dx, Tensor dw, Tensor exponents, Tensor last_logits, Tensor last_x,"
    " Tensor weight, Tensor chunk_bounds, Tensor factor, Tensor(b!) out) -> ()",
    lambda *args: None,
    READS_HOST,
)
def linear_cross_entropy_last(
    dx: Tensor,
    dw: Tensor,
    exponents: Tensor,
    last_logits: Tensor,
    last_x: Tensor,
    weight: Tensor,
    chunk_bounds: Tensor,
    factor: Tensor,
    out: Tensor,
) -> None:
    """Compute the products that ``linear_cross_entropy_fwd`` left: the last rows of ``dx`` and the last part of dw.

    ``out`` gets the whole sum of dw times ``factor``, and may share the memory of ``dw``.
    """
    _, start, end = chunk_bounds.tolist()
    V, H = weight.shape
    if start == end:
        out.zero_()
        return
    z = last_logits[: end - start, :V]
    x = last_x[: end - start] if last_x.numel() else dx[start:end].view(z.dtype)[:, :H]  # autocast's, not the weight's
    add_products(dw, exponents, z, x, accumulate=start > 0, out=out, factor=factor)
    if not last_x.numel():
        addmm(dx[start:end, :H], z, weight.to(z.dtype), False)


def _chunks(call: Forward, wide: bool) -> tuple[int, bool]:
    """Return the tokens per chunk, enough for products at full speed, and True if dw is summed in 16 bits.

    ``wide``: the logits take more memory than their gradient.
    """
    x, V, needs = call.x, call.weight.shape[0], call.needs
    T, H = x.shape
    dw_in_16_bits = needs[1] and call.accum_dtype is None and call.dw_dtype == torch.bfloat16 and H % 8 == 0
    dw_in_16_bits = dw_in_16_bits and has_products(x.device)
    most = CHUNK_ROWS if any(needs) and not wide else CHUNK_ROWS // 2
    rows = call.chunk_rows or max(most, CHUNK_BYTES // (V * x.itemsize))
    few_rounds = -(-T // (MAX_ROUNDS * 128)) * 128
    if (
        dw_in_16_bits and call.chunk_rows is None and few_rounds <= rows + H
    ):  # larger chunks take more memory than a dw in fp32
        rows = max(rows, few_rounds)
    # sym_min: traced code with a symbolic T must not depend on whether T exceeds a chunk
    return torch.sym_min(T, rows), dw_in_16_bits and MAX_ROUNDS * rows >= T


def _spread_words(more: TokenForward, results: TokenResults) -> None:
    """Store the ids of all tokens in ``words``, and no word where the best ones will be."""
    if results.words.numel():
        results.words.fill_(NO_WORD)
        if more.ids is not None:
            results.words[:, : more.ids.shape[1]] = more.ids


def _fill_rows(
    call: Forward, z: Tensor, index: Tensor, rows: tuple[Tensor, ...], more: TokenForward | None,
    results: TokenResults | None,
) -> None:  # fmt: skip
    """Fill ``rows`` and the further ``results`` of the tokens ``index`` from their logits."""
    wanted = [t if t.numel() else None for t in rows]
    options = call.options
    if call.shard:
        launch_fwd_of_shard(z, call.target, call.class_weight, wanted, options, index, call.shard)
        return
    if results is None:
        launch_fwd(z, call.target, call.class_weight, wanted, options, index)
        return
    if more.topk:
        ignored = call.target[index] == options.ignore_index
        best = top_words(z, more.topk, options.logit_scale).masked_fill(ignored[:, None], NO_WORD)
        results.words[index, -more.topk :] = best
    launch_fwd(z, call.target, None, wanted, options, index, [t if t.numel() else None for t in results[:4]])


def _keep(call: Forward, z: Tensor, order: Tensor, start: int, results: TokenResults) -> None:
    """Keep the logits of the chunk from ``start`` on as far as they fit, and the numbers of their rounded rows."""
    kept = results.kept_logits[start : start + len(z), : z.shape[1]]
    kept.copy_(z[: len(kept)])
    if results.kept_rows.numel():
        lse, lse_rest, entropy = results.kept_rows
        rows = None, None, lse, entropy if call.entropy else None, None, lse_rest
        launch_fwd(kept, call.target, None, rows, call.options, order[start : start + len(kept)])


def _differentiate(call: Forward, z: Tensor, dz: Tensor, index: Tensor, rows: tuple[Tensor, ...]) -> None:
    """Fill ``dz`` with the gradient of the logits ``z`` for an upstream gradient of ``unit``."""
    shard = call.shard
    launch_bwd(
        z, dz, call.target, call.class_weight, (rows[2], rows[5]), None, (None, None, None), call.options,
        unit=unit(call.options), factor=call.weight_unit, order=index, v_start=shard.first_word,
        vocabulary=shard.words or z.shape[1],
    )  # fmt: skip
