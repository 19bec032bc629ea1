"""Dispatcher ops for the forward of the fused linear losses.

The forward runs over chunks of tokens and can compute the gradients at once. ``last_chunk.py`` finishes the last chunk.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from liger_like.ops.losses.dw_sum import MAX_ROUNDS, exponents_like, has_products
from liger_like.ops.losses.exponentials import parts_of
from liger_like.ops.losses.products import even_step, in_memory_of, kept_first, pitch
from liger_like.ops.losses.rows import OPTIONS_SCHEMA, Options, raise_bad_label
from liger_like.ops.losses.steps import NO_WORD, add_chunk, fill_dlogits, fill_rows
from liger_like.ops.losses.units import unit
from liger_like.ops.losses.unstored import loads_operands, run_unstored, takes_no_logits, unstored_kernels
from liger_like.ops.losses.vocab_shards import SHARD_SCHEMA, Shard
from liger_like.runtime.launcher import is_recorded
from liger_like.runtime.registry import op
from liger_like.runtime.support import in_graph

CHUNK_ROWS = 2048  # tokens per chunk at which products reach full speed; half as many for logits alone or in fp32
FREE_TOKENS = 256  # so few take the time in which their products read the weight, ignored or not
CHUNK_BYTES = 64 * 2**20  # least bytes of logits per chunk: with a small vocabulary CHUNK_ROWS tokens are too few
Visit = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]


class Forward(NamedTuple):
    """Arguments of ``linear_cross_entropy_fwd``, in the order of its schema; ``shard`` and ``options`` follow flat.

    ``needs``: gradients of x, weight, bias, u and b to compute. ``entropy``, ``argmax``: results to compute.
    ``reads_count``: the host reads how many tokens count; False in a compiled graph that becomes a CUDA graph.
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
    reads_count: bool
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
    logits as they are kept, if this rounds them. ``kept_tops`` [T, parts]: if the logits of all tokens are kept as
    exponentials (``exponentials.py``), the scores to which these belong.
    """

    mean_logit: Tensor
    log_sum_sq_prob: Tensor
    words: Tensor
    logprob_at: Tensor
    kept_logits: Tensor
    kept_rows: Tensor
    kept_tops: Tensor


def flat(call: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, Forward or Backward, as the op takes them."""
    return *call[:-2], *call.shard, *call.options


def call_of(kind: Any, args: tuple[Any, ...]) -> Any:
    """Return the arguments of an op as a ``kind``, Forward or Backward: the inverse of ``flat``."""
    own = len(kind._fields) - 2
    sharded = own + len(Shard._fields)
    return kind(*args[:own], Shard(*args[own:sharded]), Options(*args[sharded:]))


def all_tokens(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an op, those of ``Forward`` first, with which the host reads nothing."""
    place = Forward._fields.index("reads_count")
    return *args[:place], False, *args[place + 1 :]


def without_count(call: Forward) -> tuple[Any, ...]:
    """Return the arguments of ``linear_cross_entropy_fwd``: of one chunk of few tokens the host reads nothing."""
    few = 0 < call.x.shape[0] <= min(FREE_TOKENS, _chunks(call, False)[0])
    return all_tokens(flat(call)) if few else flat(call)


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
    last_logits = unless_empty(dw_in_16_bits, (step, pitch(V) * (2 if wide else 1)), x.dtype)
    last_x = unless_empty(dw_in_16_bits and (shard.released or shard.reduce_dx or not needs_dx), (step, H), x.dtype)
    rank = 0 if u is None else u.shape[1]
    dbias, du, db = (
        unless_empty(needs_dbias, (V,)),
        unless_empty(needs_du, (T, rank)),
        unless_empty(needs_db, (V, rank)),
    )
    order = x.new_empty(T, dtype=torch.int64)
    # a CUDA graph must not hold a tensor of the host
    chunk_bounds = torch.empty(3, dtype=torch.int64, device="cpu") if call.reads_count else torch.empty_like(order[:0])
    return *rows, order, chunk_bounds, dx, dw, exponents, last_logits, last_x, dbias, du, db


def _token_results(call: Forward, more: TokenForward) -> TokenResults:
    T, V = call.x.shape[0], call.weight.shape[0]
    unless_empty = functools.partial(_unless_empty, call.x)
    columns = more.topk + (0 if more.ids is None else more.ids.shape[1])
    exponentials = _keeps_exponentials(call, more)
    return TokenResults(
        unless_empty(more.mean_logit, (T,)),
        unless_empty(more.log_sum_sq_prob, (T,)),
        unless_empty(columns > 0, (T, columns), torch.int64),
        unless_empty(columns > 0, (T, columns)),
        call.x.new_empty((more.kept, pitch(V))),
        unless_empty(more.kept > 0 and more.logits_dtype != call.x.dtype and not exponentials, (3, T)),
        unless_empty(exponentials, (T, parts_of(V))),
    )


def _keeps_exponentials(call: Forward, more: TokenForward) -> bool:
    """Return True if logits are kept as exponentials: those in fp32 of all tokens, with nothing that needs others."""
    wide = more.logits_dtype != call.x.dtype and call.options.softcap is None
    return wide and more.ids is None and 0 < more.kept == call.x.shape[0]


def _takes_no_logits(call: Forward, more: TokenForward) -> bool:
    """Return True if kernels that store no logits in fp32 compute the results, wherever operands are in memory."""
    kept = more.kept > 0 and not _keeps_exponentials(call, more)
    flags = call.argmax, more.mean_logit, more.log_sum_sq_prob, more.topk, call.shard, kept
    absent = call.bias, call.u, call.class_weight, more.ids, *(flag or None for flag in flags)
    return takes_no_logits(call.x, call.weight, more.logits_dtype, call.options, *absent)


def flops(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, u: Tensor | None, *args: Any) -> int:
    """Return the FLOPs of the logits of all tokens and of the needed gradients, deferred products included."""
    needs_dx, needs_dw, _, needs_du, needs_db = next(arg for arg in args if isinstance(arg, list))
    rank = 0 if u is None else u.shape[1]
    each = x.shape[1] * (1 + needs_dx + needs_dw) + rank * (1 + needs_du + needs_db)
    return 2 * x.shape[0] * weight.shape[0] * each


ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b, Tensor? class_weight,"
    " Tensor? weight_unit, bool[5] needs, bool entropy, bool argmax, SymInt? chunk_rows, ScalarType? accum_dtype,"
    f" ScalarType dw_dtype, bool reads_count, {SHARD_SCHEMA}, {OPTIONS_SCHEMA}"
)
RESULTS = (
    "Tensor loss, Tensor logprob, Tensor lse, Tensor entropy, Tensor argmax, Tensor lse_rest, Tensor order,"
    " Tensor chunk_bounds, Tensor dx, Tensor dw, Tensor exponents, Tensor last_logits, Tensor last_x, Tensor dbias,"
    " Tensor du, Tensor db"
)


@op(
    f"linear_cross_entropy({ARGUMENTS}) -> ({RESULTS})",
    lambda *args: _outputs(call_of(Forward, args)),
    flops=flops,
    in_cuda_graph=all_tokens,
    replayed=True,
)
def linear_cross_entropy_fwd(*args: Any) -> tuple[Tensor, ...]:
    """Return per-token results of the logits x weight^T + bias + u b^T, and the gradients that ``needs`` names.

    The arguments are those of ``Forward``.

    The gradients are for an upstream gradient of ``unit``, times ``weight_unit`` [] if given. ``order`` is the order of
    rows in dx and du, with the tokens that went through the products first. ``chunk_bounds``, on the host, holds their
    number and the start and end of the last chunk. It is empty without ``reads_count``: all tokens went through them. A
    non-empty ``exponents`` leaves the last chunk's product for dw to ``linear_cross_entropy_last``: ``last_logits``
    holds the gradient of its logits, ``last_x`` its x. If ``last_x`` is empty, x is in the memory of dx, and the
    product for dx is left, too. With a ``shard``, weight, bias and b are a
    vocabulary shard; the sum of a chunk's dx over the processes overlaps the next chunk.
    """
    call: Forward = call_of(Forward, args)
    outs = _outputs(call)
    run_chunks(call, outs)
    return outs


@op(
    f"linear_logprobs({ARGUMENTS}, ScalarType logits_dtype, bool mean_logit, bool log_sum_sq_prob, Tensor? ids,"
    f" SymInt topk, SymInt kept) -> ({RESULTS}, Tensor mean_logit, Tensor log_sum_sq_prob, Tensor words,"
    " Tensor logprob_at, Tensor kept_logits, Tensor kept_rows, Tensor kept_tops)",
    lambda *args: tuple(itertools.chain(*token_outputs(*_token_call(args)))),
    flops=flops,
    in_cuda_graph=all_tokens,
)
def linear_logprobs_fwd(*args: Any) -> tuple[Tensor, ...]:
    """Return what ``linear_cross_entropy_fwd`` does, and the further results of each token in ``TokenResults``.

    The arguments are those of ``Forward`` and of ``TokenForward``.
    """
    call, more = _token_call(args)
    outs, results = token_outputs(call, more)
    if not any(call.needs) and _takes_no_logits(call, more) and unstored_kernels(call.x, call.weight):
        _clear(call, outs, results)
        run_unstored(call, outs, results)
    else:
        run_chunks(call, outs, more, results)
    return *outs, *results


def _token_call(args: tuple[Any, ...]) -> tuple[Forward, TokenForward]:
    further = len(TokenForward._fields)
    return call_of(Forward, args[:-further]), TokenForward(*args[-further:])


def token_outputs(call: Forward, more: TokenForward) -> tuple[tuple[Tensor, ...], TokenResults]:
    """Return memory for the results of ``linear_cross_entropy_fwd`` and for the further ones."""
    wide = more.logits_dtype != call.x.dtype and not (any(call.needs) and _takes_no_logits(call, more))
    return _outputs(call, wide), _token_results(call, more)


class Upstream(NamedTuple):
    """Gradients of a sum of losses by the results of the tokens of a chunk: [T], and [T, K] for those of ``ids``.

    ``ratio`` [1]: factor with which sums over the chunks before get the units of these gradients.
    """

    dlogprob: Tensor
    dentropy: Tensor | None
    dlogprob_at: Tensor | None
    ratio: Tensor | None


def run_chunks(
    call: Forward,
    outs: tuple[Tensor, ...],
    more: TokenForward | None = None,
    results: TokenResults | None = None,
    upstream: Callable[[int, int], Upstream | None] | None = None,
    visit: Visit | None = None,
) -> None:
    """Fill ``outs``, the results of ``linear_cross_entropy_fwd``, and the further ``results``.

    The gradients are those of the loss in ``unit``, or those that ``upstream`` returns for the tokens of ``order`` from
    one position to another, once their results are known. For another loss ``visit(x_c, z, dz, index)`` fills ``x_c``,
    the logits ``z`` and the results of the tokens ``index``, and unless ``dz`` is None the gradient of the logits,
    which may share their memory.
    """
    x, weight, target, _, u, b, _, _, needs, *_, shard, options = call
    if not (isinstance(x, FakeTensor) or is_recorded()):  # the caller of a plan does so
        raise_bad_label(x.device)
    (T, H), V = x.shape, weight.shape[0]
    rows, order, chunk_bounds = outs[:6], outs[6], outs[7]
    dx, dw, exponents, last_logits, last_x, dbias, du, db = outs[8:]
    _clear(call, outs, results)
    exponentials = more is not None and visit is None and any(needs) and _takes_no_logits(call, more)
    unstored = exponentials and loads_operands(x, weight)  # only an op imports what may not compile
    wide = more is not None and more.logits_dtype != x.dtype and not exponentials
    step, _ = _chunks(call, wide)
    count = kept_first(target, options.ignore_index, order, many=step < T and call.reads_count)
    dtype = more.logits_dtype if wide else torch.float16 if unstored else x.dtype
    # their gradient takes their memory
    logits = last_logits.view(dtype) if last_logits.numel() else x.new_empty((step, pitch(V)), dtype=dtype)
    tops = x.new_empty((step, parts_of(V)), dtype=torch.float32) if unstored else None
    scores = logits.new_empty(logits.shape, dtype=more.logits_dtype) if exponentials and not unstored else logits
    _spread_words(more, results)
    start, end, n = 0, step, T
    sums: list[Any] = []
    given: Upstream | None = None
    while start < end:
        if last_x.numel():
            x_c = last_x[: end - start]
        else:
            x_c = dx[start:end].view(x.dtype)[:, :H] if needs[0] else x.new_empty((end - start, H))
        z, index = scores[: end - start, :V], order[start:end]
        dz = in_memory_of(logits[: end - start, :V], x.dtype) if any(needs) else None
        tops_c = None if tops is None else tops[: end - start]
        if visit is not None:
            visit(x_c, z, dz, index)
        else:
            _fill(call, z, x_c, order, start, rows, more, results, tops_c)
            given = None if upstream is None else upstream(start, end)
            if dz is not None:
                _differentiate(call, z, dz, index, rows, more, given, tops_c)
        if start == 0:
            n = count()
            step = even_step(n - end, step)
        if call.reads_count:
            chunk_bounds.copy_(torch.tensor([n, start, end], device="cpu"))
        is_left = exponents.numel() > 0 and end >= n
        if dz is not None:
            own_x = None if needs[0] and not last_x.numel() else x_c
            u_c = None if u is None else u[index]
            # ignored tokens come last, but only the second chunk knows their number
            if (needs[1] or needs[4]) and (start == 0 or not call.reads_count or in_graph(target)):
                ignored = (target.index_select(0, index) == options.ignore_index)[:, None]
                x_c.masked_fill_(ignored, 0)  # their gradient is 0, but 0 times NaN is NaN
                u_c = None if u is None else u_c.masked_fill(ignored, 0)
            add_chunk(
                dz, own_x, weight, u_c, b, [dx, dw, exponents, dbias, du, db],
                None if given is None else given.ratio, needs, start, end, is_left,
            )  # fmt: skip
        if needs[0] and shard.reduce_dx:
            sums.append(dist.all_reduce(dx[start:end], group=shard.processes(), async_op=True))
        if is_left:
            break
        start, end = end, max(end, min(end + step, n))
    for work in sums:
        work.wait()
    for grad in (dx, du) if end < T else ():
        grad[end:].zero_()
    if results is not None and results.kept_rows.numel():
        _copy_rows_not_kept(rows, order, results)


def _copy_rows_not_kept(rows: tuple[Tensor, ...], order: Tensor, results: TokenResults) -> None:
    """Copy lse, lse_rest and entropy to ``kept_rows`` for the tokens whose logits are not kept."""
    others = order[len(results.kept_logits) :]
    for of_kept, row in zip(results.kept_rows, (rows[2], rows[5], rows[3]), strict=True):
        if row.numel():
            of_kept[others] = row[others]


def _clear(call: Forward, outs: tuple[Tensor, ...], results: TokenResults | None) -> None:
    """Fill the results of ignored tokens, which no chunk may compute, and sums that chunks add to."""
    rows, chunk_bounds, (_, dw, exponents, _, _, dbias, _, db) = outs[:6], outs[7], outs[8:]
    if call.reads_count:
        chunk_bounds.zero_()  # without tokens no chunk sets it
    zeros = [t for t in (*rows, *(results or ())[:4]) if t.dtype == torch.float32]
    zeros += [t for t in (dw, exponents, dbias, db) if call.x.shape[0] == 0 or call.needs[2]]
    torch._foreach_zero_(zeros)  # one launch
    if call.argmax:
        rows[4].fill_(-1)


def _chunks(call: Forward, wide: bool) -> tuple[int, bool]:
    """Return the tokens per chunk, enough for products at full speed, and True if dw is summed in 16 bits.

    ``wide``: the logits are in fp32, and their gradient in 16 bits takes half of that memory.
    """
    x, V, needs = call.x, call.shard.width or call.weight.shape[0], call.needs
    T, H = x.shape
    dw_in_16_bits = needs[1] and call.accum_dtype is None and call.dw_dtype == torch.bfloat16 and H % 8 == 0
    dw_in_16_bits = dw_in_16_bits and has_products(x.device)
    most = CHUNK_ROWS // 2 if wide or not any(needs) else CHUNK_ROWS
    itemsize = 4 if wide else x.itemsize
    rows = call.chunk_rows or max(most, CHUNK_BYTES // (V * itemsize))
    few_rounds = -(-T // (MAX_ROUNDS * 128)) * 128
    if (
        dw_in_16_bits and call.chunk_rows is None and few_rounds <= rows + 2 * H // itemsize
    ):  # larger chunks take more memory than a dw in fp32
        rows = max(rows, few_rounds)
    # sym_min: traced code with a symbolic T must not depend on whether T exceeds a chunk
    return torch.sym_min(T, rows), dw_in_16_bits and MAX_ROUNDS * rows >= T


def _spread_words(more: TokenForward | None, results: TokenResults | None) -> None:
    """Store the ids of all tokens in ``words``, and no word where the best ones will be."""
    if more is not None and results is not None and results.words.numel():
        results.words.fill_(NO_WORD)
        if more.ids is not None:
            results.words[:, : more.ids.shape[1]] = more.ids


def _fill(
    call: Forward, z: Tensor, x_c: Tensor, order: Tensor, start: int, rows: tuple[Tensor, ...],
    more: TokenForward | None, results: TokenResults | None, tops: Tensor | None,
) -> None:  # fmt: skip
    """Fill ``x_c``, logits ``z``, ``rows`` and further ``results`` of the tokens of ``order`` from ``start`` on.

    With ``tops`` ``z`` gets exponentials.
    """
    operands = *call[:7], order[start : start + len(z)]
    topk, kept, kept_rows = 0 if more is None else more.topk, None, None
    if results is not None and start < len(results.kept_logits):
        kept = results.kept_logits[start : start + len(z), : z.shape[1]]
        kept_rows = results.kept_rows if results.kept_rows.numel() else None
        tops = results.kept_tops[start : start + len(z)] if results.kept_tops.numel() else None
    further = [*(results or ())[:4]]
    fill_rows(*operands, x_c, z, [*rows], further, topk, kept, kept_rows, tops, *call.shard, *call.options)


def _differentiate(
    call: Forward, z: Tensor, dz: Tensor, index: Tensor, rows: tuple[Tensor, ...], more: TokenForward | None,
    given: Upstream | None, tops: Tensor | None,
) -> None:  # fmt: skip
    """Fill ``dz`` with the gradient of the logits ``z``, for an upstream gradient of ``unit`` or the ``given`` ones."""
    upstream: tuple[Tensor | None, ...] = (None,) * 5
    if given is not None:
        ids = (None, None) if given.dlogprob_at is None else (more.ids, given.dlogprob_at)
        upstream = None if given.dentropy is None else rows[3], given.dlogprob, given.dentropy, *ids
    size = unit(call.options) if given is None else 0.0
    labels = call.target, call.class_weight, call.weight_unit, index, rows[2], rows[5]
    fill_dlogits(z, dz, *labels, *upstream, tops, size, *call.shard, *call.options)
