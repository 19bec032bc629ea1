"""The steps of a chunk of tokens in the forward of the fused linear losses, as dispatcher ops.

``fill_rows`` computes logits and the results of each token, ``fill_dlogits`` the gradient of the logits, and
``add_chunk`` its products. ``run_chunks`` calls them in turn, within an op, or around a Python function of the results.
"""

from typing import Any

import torch
from torch import Tensor

from liger_like.ops.losses.dw_sum import add_products, scale_rows
from liger_like.ops.losses.exponentials import store_exponentials
from liger_like.ops.losses.products import addmm, pitch, store_logits
from liger_like.ops.losses.row_kernels import NOTHING, launch_bwd, launch_fwd
from liger_like.ops.losses.rows import OPTIONS_SCHEMA, Options, top_words
from liger_like.ops.losses.unstored import HOPPER, reduce_rows
from liger_like.ops.losses.vocab_shards import SHARD_SCHEMA, Shard, launch_fwd_of_shard
from liger_like.runtime.fallback import BROKEN
from liger_like.runtime.layout import packed
from liger_like.runtime.registry import op

NO_WORD = -1  # the id of no word


def _split(flat: tuple[Any, ...]) -> tuple[Shard, Options]:
    own = len(Shard._fields)
    return Shard(*flat[:own]), Options(*flat[own:])


def _unless_empty(tensors: list[Tensor]) -> list[Tensor | None]:
    return [t if t.numel() else None for t in tensors]


def _flops_of_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None,
    class_weight: Tensor | None, index: Tensor, *args: Any,
) -> int:  # fmt: skip
    return 2 * len(index) * weight.shape[0] * (x.shape[1] + (0 if u is None else u.shape[1]))


@op(
    "linear_loss_rows(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b, Tensor? class_weight,"
    " Tensor index, Tensor(a!) x_c, Tensor(b!) z, Tensor(c!)[] rows, Tensor(d!)[] further, SymInt topk,"
    f" Tensor(e!)? kept, Tensor(f!)? kept_rows, Tensor(g!)? tops, {SHARD_SCHEMA}, {OPTIONS_SCHEMA}) -> ()",
    lambda *args: None,
    flops=_flops_of_rows,
)
def fill_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None,
    class_weight: Tensor | None, index: Tensor, x_c: Tensor, z: Tensor, rows: list[Tensor], further: list[Tensor],
    topk: int, kept: Tensor | None, kept_rows: Tensor | None, tops: Tensor | None, *flat: Any,
) -> None:  # fmt: skip
    """Fill ``x_c`` [n, H], the tokens ``index`` of ``x``, their logits ``z`` [n, V], ``rows`` and ``further`` results.

    ``rows`` and ``further`` [T] are the first results of ``linear_cross_entropy_fwd`` and of ``TokenResults``; empty
    tensors stay empty. ``kept`` gets the first rows of ``z``, and ``kept_rows`` [3, T] their lse, lse_rest and entropy
    if they are rounded. With ``tops`` [n, parts] ``kept``, or ``z`` if nothing is kept, gets exponentials in their
    place (``exponentials.py``).
    """
    shard, options = _split(flat)
    torch.index_select(x, 0, index, out=x_c)
    if tops is not None and kept is None:
        if HOPPER not in BROKEN:
            reduce_rows(x_c, weight, target, rows, index, options, z, tops)
            return
        z, kept = z.new_empty((len(z), pitch(len(weight))), dtype=torch.float32)[:, : len(weight)], z
    store_logits(z, x_c, weight, bias, None if u is None else u[index], b)
    wanted, more = _unless_empty(rows), _unless_empty(further) or NOTHING
    if tops is not None:
        store_exponentials(z, options.logit_scale, kept.view(torch.float16), tops)
    elif kept is not None:
        kept.copy_(z[: len(kept)])
    if shard:
        rounded = None if kept_rows is None else kept
        launch_fwd_of_shard(z, target, class_weight, wanted, options, index, shard, more, topk, rounded, kept_rows)
        return
    if topk:
        ignored = target[index] == options.ignore_index
        best = top_words(z, topk, options.logit_scale).masked_fill(ignored[:, None], NO_WORD)
        further[2][index, -topk:] = best
    launch_fwd(z, target, class_weight, wanted, options, index, more)
    if kept_rows is not None:
        lse, lse_rest, entropy = kept_rows
        of_kept = None, None, lse, None if wanted[3] is None else entropy, None, lse_rest
        launch_fwd(kept, target, None, of_kept, options, index[: len(kept)])


@op(
    "linear_loss_dlogits(Tensor(a!) z, Tensor(b!) dz, Tensor target, Tensor? class_weight, Tensor? weight_unit,"
    " Tensor index, Tensor lse, Tensor lse_rest, Tensor? entropy, Tensor? dlogprob, Tensor? dentropy, Tensor? ids,"
    f" Tensor? dlogprob_at, Tensor? tops, float unit, {SHARD_SCHEMA}, {OPTIONS_SCHEMA}) -> ()",
    lambda *args: None,
)
def fill_dlogits(
    z: Tensor, dz: Tensor, target: Tensor, class_weight: Tensor | None, weight_unit: Tensor | None,
    index: Tensor, lse: Tensor, lse_rest: Tensor, entropy: Tensor | None, dlogprob: Tensor | None,
    dentropy: Tensor | None, ids: Tensor | None, dlogprob_at: Tensor | None, tops: Tensor | None, unit: float,
    *flat: Any,
) -> None:  # fmt: skip
    """Fill ``dz``, which may lie in the memory of ``z``, with the gradient of the logits ``z`` [n, V] of the tokens
    ``index``.

    The upstream gradient of each loss is ``unit``, times ``weight_unit`` [] if given; those of the other results are
    [T], and [T, K] for the words ``ids``. With ``tops`` ``z`` holds exponentials.
    """
    shard, options = _split(flat)
    launch_bwd(
        z, dz, target, class_weight, (lse, lse_rest), entropy, (None, dlogprob, dentropy), options,
        unit=unit, factor=weight_unit, order=index, v_start=shard.first_word, vocabulary=shard.words or z.shape[1],
        at=(packed(ids), packed(dlogprob_at)), tops=tops,
    )  # fmt: skip


def _flops_of_products(
    dz: Tensor, x: Tensor | None, weight: Tensor, u: Tensor | None, b: Tensor | None, sums: list[Tensor],
    ratio: Tensor | None, needs: list[bool], *args: Any,
) -> int:  # fmt: skip
    needs_dx, needs_dw, _, needs_du, needs_db = needs
    rank = 0 if u is None else u.shape[1]
    return 2 * dz.numel() * (weight.shape[1] * (needs_dx + needs_dw) + rank * (needs_du + needs_db))


@op(
    "linear_loss_products(Tensor dz, Tensor? x, Tensor weight, Tensor? u, Tensor? b, Tensor(a!)[] sums, Tensor? ratio,"
    " bool[5] needs, SymInt start, SymInt end, bool is_left) -> ()",
    lambda *args: None,
    flops=_flops_of_products,
)
def add_chunk(
    dz: Tensor, x: Tensor | None, weight: Tensor, u: Tensor | None, b: Tensor | None, sums: list[Tensor],
    ratio: Tensor | None, needs: list[bool], start: int, end: int, is_left: bool,
) -> None:  # fmt: skip
    """Add to ``sums`` what the gradient ``dz`` [n, V] of the logits of the rows from ``start`` to ``end`` gives.

    ``sums`` is (dx, dw, exponents, dbias, du, db) of ``linear_cross_entropy_fwd``. ``x`` None: the tokens' x [n, H] is
    in the memory of their rows of dx. ``ratio`` [1] first multiplies the sums of the chunks before. ``is_left``: leave
    the products that ``linear_cross_entropy_last`` computes.
    """
    dx, dw, exponents, dbias, du, db = sums
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    chunk, accumulate, H = slice(start, end), start > 0, weight.shape[1]
    x_c = dx[chunk].view(dz.dtype)[:, :H] if x is None else x
    if ratio is not None and accumulate:
        dbias *= ratio
        db *= ratio
        scale_rows(dw, None, ratio, dw, False)
    if needs_dw and not exponents.numel():
        addmm(dw, dz.t(), x_c, accumulate)
    elif needs_dw and not is_left:
        add_products(dw, exponents, dz, x_c, accumulate=accumulate)
    if needs_dbias:
        dbias += dz.sum(0, dtype=torch.float32)
    if needs_du:
        addmm(du[chunk], dz, b, False)
    if needs_db:
        addmm(db, dz.t(), u, accumulate)
    if needs_dx and (x is not None or not is_left):  # after the last use of x_c
        addmm(dx[chunk, :H], dz, weight, False)
