"""Dispatcher ops of the fused linear cross-entropy.

The forward runs over chunks of tokens and can compute the gradients at once. ``linear_cross_entropy_last`` finishes the
last chunk. The backward runs over slices of the vocabulary and recomputes the logits.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.losses.cross_entropy import launch_bwd, launch_fwd
from liger_like.ops.losses.dw_sum import MAX_ROUNDS, add_products, exponents_like, has_products, scale_rows
from liger_like.ops.losses.rows import OPTIONS_SCHEMA, Options, raise_bad_label
from liger_like.ops.losses.units import size_of_gradient, unit
from liger_like.ops.losses.vocab_shards import SHARD_SCHEMA, Shard, launch_fwd_of_shard
from liger_like.runtime.layout import packed
from liger_like.runtime.registry import op
from liger_like.runtime.support import in_graph

CHUNK_ROWS = 2048  # tokens per chunk at which the products reach full speed; half as many without gradients
CHUNK_BYTES = 64 * 2**20  # least bytes of logits per chunk: with a small vocabulary CHUNK_ROWS tokens are too few
SLICE_COLUMNS = 2048  # least columns of logits per slice, in new memory where dw has no room
SMALL_PRODUCT = 2**22  # elements below which cuBLAS splits the sum over tokens and rounds its parts to the dtype
READS_HOST = torch.Tag.cudagraph_unsafe  # the host reads the token count: torch.compile keeps it out of CUDA graphs
COMPACT_BELOW = 0.75  # if a smaller share of the tokens counts, the backward gathers these first


def _addmm(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Store a @ b in ``out``, or add it to ``out`` if ``accumulate``; the sum is kept in the dtype of ``out``."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(accumulate), out=out)


def _logits(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None) -> None:
    """Store x weight^T + bias + u b^T in ``out``."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
    if u is not None:
        out.addmm_(u, b.t())


def _losses_and_gradient(
    z: Tensor, target: Tensor, class_weight: Tensor | None, weight_unit: Tensor | None, rows: tuple[Tensor, ...],
    options: Options, index: Tensor, shard: Shard, differentiate: bool,
) -> None:  # fmt: skip
    """Fill ``rows`` from logits ``z``, and overwrite ``z`` with its gradient if ``differentiate``."""
    wanted = [t if t.numel() else None for t in rows]
    if shard:
        launch_fwd_of_shard(z, target, class_weight, wanted, options, index, shard)
    else:
        launch_fwd(z, target, class_weight, wanted, options, index)
    if differentiate:
        launch_bwd(
            z, z, target, class_weight, (rows[2], rows[5]), None, (None, None, None), options,
            unit=unit(options), factor=weight_unit, order=index, v_start=shard.first_word,
            vocabulary=shard.words or z.shape[1],
        )  # fmt: skip


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


def flat(call: Forward | Backward) -> tuple[Any, ...]:
    """Return the arguments of a call as the op takes them."""
    return *call[:-2], *call.shard, *call.options


def _call(kind: Any, args: tuple[Any, ...]) -> Any:
    """Return the arguments of an op as a ``kind``, Forward or Backward: the inverse of ``flat``."""
    own = len(kind._fields) - 2
    sharded = own + len(Shard._fields)
    return kind(*args[:own], Shard(*args[own:sharded]), Options(*args[sharded:]))


def _outputs(call: Forward) -> tuple[Tensor, ...]:
    x, u, shard = call.x, call.u, call.shard
    (T, H), V = x.shape, call.weight.shape[0]

    def unless_empty(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return x.new_empty(shape if wanted else (0,) * len(shape), dtype=dtype)

    rows = [unless_empty(wanted, (T,)) for wanted in (True, True, True, call.entropy)]
    rows += [unless_empty(call.argmax, (T,), torch.int64), unless_empty(True, (T,))]
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = call.needs
    step, dw_in_16_bits = _chunks(x, V, call.needs, call.chunk_rows, call.accum_dtype, call.dw_dtype)
    # the products read these rows, which must start at multiples of 16 bytes
    dx = unless_empty(needs_dx, (T, -(-H // 4) * 4))
    dw = unless_empty(needs_dw, (V, H), torch.float16 if dw_in_16_bits else call.accum_dtype or torch.float32)
    exponents = exponents_like(dw) if dw_in_16_bits else x.new_empty((0, 0), dtype=torch.uint8)
    last_logits = unless_empty(dw_in_16_bits, (step, -(-V // 16) * 16), x.dtype)
    last_x = unless_empty(dw_in_16_bits and (shard.released or shard.reduce_dx or not needs_dx), (step, H), x.dtype)
    rank = 0 if u is None else u.shape[1]
    dbias, du, db = (
        unless_empty(needs_dbias, (V,)),
        unless_empty(needs_du, (T, rank)),
        unless_empty(needs_db, (V, rank)),
    )
    order, chunk_bounds = x.new_empty(T, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    return *rows, order, chunk_bounds, dx, dw, exponents, last_logits, last_x, dbias, du, db


def _flops(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, u: Tensor | None, *args: Any) -> int:
    """Return the FLOPs of the logits of all tokens and of the needed gradients, deferred products included."""
    needs_dx, needs_dw, _, needs_du, needs_db = next(arg for arg in args if isinstance(arg, list))
    rank = 0 if u is None else u.shape[1]
    each = x.shape[1] * (1 + needs_dx + needs_dw) + rank * (1 + needs_du + needs_db)
    return 2 * x.shape[0] * weight.shape[0] * each


@op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b,"
    " Tensor? class_weight, Tensor? weight_unit, bool[5] needs, bool entropy, bool argmax, SymInt? chunk_rows,"
    f" ScalarType? accum_dtype, ScalarType dw_dtype, {SHARD_SCHEMA},"
    f" {OPTIONS_SCHEMA}) -> (Tensor loss, Tensor logprob, Tensor lse, Tensor entropy, Tensor argmax,"
    " Tensor lse_rest, Tensor order, Tensor chunk_bounds, Tensor dx, Tensor dw, Tensor exponents, Tensor last_logits,"
    " Tensor last_x, Tensor dbias, Tensor du, Tensor db)",
    lambda *args: _outputs(_call(Forward, args)),
    READS_HOST,
    flops=_flops,
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
    call: Forward = _call(Forward, args)
    x, weight, target, bias, u, b, class_weight, weight_unit, needs, *_, shard, options = call
    raise_bad_label(x.device)
    (T, H), V = x.shape, weight.shape[0]
    outs = _outputs(call)
    rows, order, chunk_bounds = outs[:6], outs[6], outs[7]
    argmax, (dx, dw, exponents, last_logits, last_x, dbias, du, db) = outs[4], outs[8:]
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    chunk_bounds.zero_()  # without tokens no chunk sets it
    zeros = [t for t in rows if t.dtype != torch.int64]
    zeros += [t for t in (dw, exponents, dbias, db) if T == 0 or needs_dbias]
    torch._foreach_zero_(zeros)  # one launch
    argmax.fill_(-1)
    step, _ = _chunks(x, V, needs, call.chunk_rows, call.accum_dtype, call.dw_dtype)
    count = _kept_first(target, options.ignore_index, order, many=step < T)
    logits = last_logits if last_logits.numel() else x.new_empty((step, -(-V // 16) * 16))
    start, end, n = 0, step, T
    sums: list[Any] = []
    while start < end:
        chunk, accumulate = slice(start, end), start > 0
        index, z = order[chunk], logits[: end - start, :V]
        if last_x.numel():
            x_c = last_x[: end - start]
        else:
            x_c = dx[chunk].view(x.dtype)[:, :H] if needs_dx else x.new_empty((end - start, H))
        torch.index_select(x, 0, index, out=x_c)
        u_c = None if u is None else u[index]
        _logits(z, x_c, weight, bias, u_c, b)
        _losses_and_gradient(z, target, class_weight, weight_unit, rows, options, index, shard, any(needs))
        if start == 0:
            n = count()
            step = _even(n - end, step)
        if needs_dbias:
            dbias += z.sum(0, dtype=torch.float32)
        if needs_du:
            _addmm(du[chunk], z, b, False)
        if needs_db:
            _addmm(db, z.t(), u_c, accumulate)
        chunk_bounds.copy_(torch.tensor([n, start, end]))
        is_left = exponents.numel() > 0 and end >= n
        if needs_dw and not exponents.numel():
            _addmm(dw, z.t(), x_c, accumulate)
        elif needs_dw and not is_left:
            add_products(dw, exponents, z, x_c, accumulate=accumulate)
        if needs_dx and (last_x.numel() or not is_left):  # after the last use of x_c
            _addmm(dx[chunk, :H], z, weight, False)
        if needs_dx and shard.reduce_dx:
            sums.append(dist.all_reduce(dx[chunk], group=shard.processes(), async_op=True))
        if is_left:
            break
        start, end = end, max(end, min(end + step, n))
    for work in sums:
        work.wait()
    for grad in (dx, du) if end < T else ():
        grad[end:].zero_()
    return outs


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
        _addmm(dx[start:end, :H], z, weight.to(z.dtype), False)


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


@op(
    "linear_cross_entropy_bwd(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b,"
    " Tensor? class_weight, Tensor order, Tensor chunk_bounds, Tensor lse, Tensor lse_rest, Tensor entropy,"
    " Tensor dloss, Tensor? dlogprob, Tensor? dentropy, Tensor(a!)? dw_sum, bool[5] needs, ScalarType dw_dtype,"
    f" {SHARD_SCHEMA}, {OPTIONS_SCHEMA})"
    " -> (Tensor dx, Tensor dw, Tensor dbias, Tensor du, Tensor db)",
    lambda *args: _bwd_outputs(_call(Backward, args)),
    READS_HOST,
    flops=_flops,
)
def linear_cross_entropy_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients for upstream gradients [T], from logits recomputed for a slice of the vocabulary at a time.

    The arguments are those of ``Backward``. A slice's rows of dw are final: one product over all tokens, rounded once,
    or added to ``dw_sum``. The other gradients are in fp32. dx and du are summed over slices; a half-precision dx is
    the second half of each fp32 row.
    """
    call: Backward = _call(Backward, args)
    x, weight, target, bias, u, b, class_weight, order, chunk_bounds, *_, shard, options = call
    dw_sum, needs = call.dw_sum, call.needs
    outs = _bwd_outputs(call)
    dx, dw, dbias, du, db = outs
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    V, H = weight.shape
    index = order[: int(chunk_bounds[0])] if int(chunk_bounds[0]) < COMPACT_BELOW * x.shape[0] else None
    if index is not None:
        x, u = x[index], None if u is None else u[index]
    n = x.shape[0]
    if n == 0:
        for t in outs:
            t.zero_()
        return outs
    upstream = [packed(g) for g in (call.dloss, call.dlogprob, call.dentropy)]
    factor = x.new_ones(1, dtype=torch.float32)
    if x.dtype == torch.float16:
        factor = size_of_gradient(upstream, target, class_weight, call.lse, options)
        upstream = [None if g is None else g / factor for g in upstream]
    entropies = call.entropy if call.entropy.numel() else None
    du_sum = du.new_empty((n, du.shape[1]))
    for start, end in _slices(V, n, H * dw.itemsize // x.itemsize if dw.numel() else 0):
        part, accumulate = slice(start, end), start > 0
        z = None  # frees the last slice's memory before the next is allocated
        z = _logits_behind(dw, end, x, end - start)
        w, b_part = weight[part], None if b is None else b[part]
        _logits(z, x, w, None if bias is None else bias[part], u, b_part)
        launch_bwd(
            z, z, target, class_weight, (call.lse, call.lse_rest), entropies, upstream, options,
            order=index, v_start=shard.first_word + start, vocabulary=shard.words or V,
        )  # fmt: skip
        if needs_dx:
            _addmm(dx[:n], z, w, accumulate)
        if needs_du:
            _addmm(du_sum, z, b_part, accumulate)
        if needs_db:
            _addmm(db[part], z.t(), u, False)
        if needs_dbias:
            torch.sum(z, 0, dtype=torch.float32, out=dbias[part])
        if needs_dw:
            out = dw[part] if dw_sum is None else dw_sum[part]
            # cuBLAS stores a product in its operands' dtype or in fp32 only; fp16 still needs the factor
            if x.dtype == torch.float16 or out.dtype not in (x.dtype, torch.float32) or out.numel() < SMALL_PRODUCT:
                product = torch.empty_like(out, dtype=torch.float32)
                _addmm(product, z.t(), x, False)
                scale_rows(product, None, factor, out, dw_sum is not None)
            else:
                _addmm(out, z.t(), x, dw_sum is not None)
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


def _chunks(
    x: Tensor,
    V: int,
    needs: list[bool],
    chunk_rows: int | None,
    accum_dtype: torch.dtype | None,
    dw_dtype: torch.dtype,
) -> tuple[int, bool]:
    """Return the tokens per chunk, enough for products at full speed, and True if dw is summed in 16 bits."""
    T, H = x.shape
    dw_in_16_bits = needs[1] and accum_dtype is None and dw_dtype == torch.bfloat16 and H % 8 == 0
    dw_in_16_bits = dw_in_16_bits and has_products(x.device)
    rows = chunk_rows or max(CHUNK_ROWS if any(needs) else CHUNK_ROWS // 2, CHUNK_BYTES // (V * x.itemsize))
    few_rounds = -(-T // (MAX_ROUNDS * 128)) * 128
    if (
        dw_in_16_bits and chunk_rows is None and few_rounds <= rows + H
    ):  # larger chunks take more memory than a dw in fp32
        rows = max(rows, few_rounds)
    # sym_min: traced code with a symbolic T must not depend on whether T exceeds a chunk
    return torch.sym_min(T, rows), dw_in_16_bits and MAX_ROUNDS * rows >= T


def _even(rest: int, step: int) -> int:
    """Return tokens per chunk for the remaining ``rest``: equal chunks of at most ``step``, in multiples of 128."""
    chunks = max(1, -(-rest // step))
    return min(step, max(1, -(-rest // chunks // 128)) * 128)


def _kept_first(target: Tensor, ignore_index: int, order: Tensor, *, many: bool) -> Callable[[], int]:
    """Fill ``order`` with the tokens, and return a function that returns how many of them are computed.

    With ``many`` chunks the tokens that are not ignored come first, so that the rest can be skipped. On a GPU the
    function waits until the stream has counted them; call it after a chunk of products is queued, so that the GPU stays
    busy. A graph under capture cannot wait: it computes all tokens.
    """
    T = target.shape[0]
    if not many or in_graph(target):
        torch.arange(T, out=order)
        return lambda: T
    ignored = target == ignore_index
    torch.argsort(ignored, stable=True, out=order)
    count = (T - ignored.sum()).to(torch.int64)
    if not count.is_cuda:
        return lambda: int(count)
    on_host = torch.empty_like(count, device="cpu", pin_memory=True).copy_(count, non_blocking=True)
    known = torch.cuda.Event()
    known.record()

    def ask() -> int:
        known.synchronize()
        return int(on_host)

    return ask


def _slices(V: int, rows: int, dw_row: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of slices of a vocabulary of ``V``, in multiples of 128 columns.

    A slice's logits [rows, columns] take the memory of dw after the slice's own rows, which is not yet written; a row
    of dw has ``dw_row`` elements. Slices are as large as that allows, but not below a minimum.
    """
    start = 0
    while start < V:
        size = max((V - start) * dw_row // (rows + dw_row) // 128 * 128, SLICE_COLUMNS if dw_row else 4 * SLICE_COLUMNS)
        yield start, min(start + size, V)
        start += size


def _logits_behind(dw: Tensor, end: int, x: Tensor, columns: int) -> Tensor:
    """Return a buffer for logits: the memory of ``dw`` from row ``end`` on if it suffices, else new memory."""
    pitch = -(-columns // 16) * 16
    free = dw[end:].view(-1).view(x.dtype)
    if free.numel() < x.shape[0] * pitch:
        free = x.new_empty(x.shape[0] * pitch)
    return free[: x.shape[0] * pitch].view(-1, pitch)[:, :columns]
