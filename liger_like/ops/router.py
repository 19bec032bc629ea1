"""Routing of a mixture of experts: the top K of E scores per token   (Shazeer et al., arXiv:1701.06538)

logits [..., E] are read as M rows. A score is the softmax or the sigmoid of the logits, or the logit itself; ``bias``
is added for the choice only. With groups only the experts of the best groups take part. The weights are the scores of
the chosen experts, or the softmax over their logits, normalised and scaled. The maths and the weights are in fp32.

The kernels keep a row in registers and take its maximum K times, of integers in the order of the scores; of equal ones
the first column is taken. The backward reads logits and index, and computes the scores again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import load_tile, store_tile
from liger_like.runtime.checks import require, require_choice, require_eps, require_integer, require_number
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed, with_stride
from liger_like.runtime.registry import LIBRARY, on_shards, op
from liger_like.runtime.support import KERNEL_DTYPES, refused, use_kernel
from liger_like.runtime.tiles import Tile, tiled

SCORES = ("softmax", "sigmoid", "softmax_of_top")
GROUP_SCORES = ("max", "top2")
MAX_EXPERTS = 4096  # of the kernels, whose programs hold whole rows, padded to powers of 2
LEAST = tl.constexpr(-(1 << 31))  # below every number, for experts that cannot be chosen


class Settings(NamedTuple):
    """Options of ``moe_route`` as the dispatcher ops take them; one group is no groups."""

    top_k: int
    score: str
    normalize: bool
    eps: float
    scale: float
    groups: int
    chosen: int
    group_score: str
    dtype: torch.dtype


SCHEMA = (
    "int top_k, str score, bool normalize, float eps, float scale, int groups, int chosen, str group_score,"
    " ScalarType dtype"
)


def highest_first(x: Tensor) -> Tensor:
    """Return the indices [..., N] of ``x`` from its highest number to its lowest; of equal ones the first leads."""
    x = x.where(~x.isnan(), torch.nan)  # a GPU sorts NaN by its sign
    return x.sort(dim=-1, descending=True, stable=True).indices


def moe_route_ref(
    logits: Tensor, top_k: int, *, score: str = "softmax", normalize: bool = True, eps: float = 0.0, scale: float = 1.0,
    bias: Tensor | None = None, groups: tuple[int, int, str] | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``moe_route`` in plain torch; this defines the op."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = {"softmax": lambda: z.softmax(-1), "sigmoid": z.sigmoid}.get(score, lambda: z)()
    # without a bias and sums the logits have the order of the scores, and fewer of them are equal
    choice = scores if bias is not None or (groups and groups[2] == "top2") else z
    choice = choice.detach() if bias is None else choice.detach() + bias.detach().to(z.dtype)
    order = highest_first(choice)
    if groups is not None:
        n, chosen, group_score = groups
        by_group = choice.unflatten(-1, (n, -1))
        top = by_group.sort(-1, descending=True).values[..., : GROUP_SCORES.index(group_score) + 1]
        best = highest_first(top.sum(-1))[..., :chosen]
        others = torch.ones_like(top[..., 0], dtype=torch.bool).scatter(-1, best, 0)  # torch.jit knows no False here
        others = others.unsqueeze(-1).expand_as(by_group).flatten(-2)
        # experts of other groups come last, whatever their score
        order = order.gather(-1, others.gather(-1, order).sort(dim=-1, stable=True).indices)
    index = order[..., :top_k]
    weights = scores.gather(-1, index)
    if score == "softmax_of_top":
        weights = weights.softmax(-1)
    elif normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * scale
    return weights if dtype is None else weights.to(dtype), index


@triton.jit
def order_of(x, exists):
    """Return int32 in the order of the fp32 numbers ``x`` [M, N], and LEAST in columns that do not exist.

    Zero has no sign. NaN counts as the greatest number, as for torch.topk.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0
    order = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return tl.where(exists[None, :], order, LEAST)


@triton.jit
def _number_of(order):
    """Return the number that ``order_of`` has replaced."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def take_first(order, N: tl.constexpr):
    """Return the greatest element of each row of ``order`` [M, N], its first column, and the row with LEAST there."""
    columns = tl.arange(0, N)[None, :]
    best = tl.max(order, axis=1)
    column = tl.min(tl.where(order == best[:, None], columns, N), axis=1)
    return best, column, tl.where(columns == column[:, None], LEAST, order)


@triton.jit
def _without_other_groups(
    order, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TOP2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return ``order`` with LEAST outside the best ``CHOSEN`` of the groups."""
    by_group = tl.reshape(order, (BLOCK_M * BLOCK_G, BLOCK_S))
    best, _, others = take_first(by_group, BLOCK_S)
    score = tl.reshape(best, (BLOCK_M, BLOCK_G))
    if TOP2:
        second = tl.reshape(tl.max(others, axis=1), (BLOCK_M, BLOCK_G))
        score = order_of(_number_of(score) + _number_of(second), tl.arange(0, BLOCK_G) < GROUPS)
    for _ in range(CHOSEN):
        _, _, score = take_first(score, BLOCK_G)
    taken = tl.reshape(score == LEAST, (BLOCK_M * BLOCK_G,))
    return tl.reshape(tl.where(taken[:, None], by_group, LEAST), (BLOCK_M, BLOCK_G * BLOCK_S))


@triton.jit
def softmax_of_rows(z):
    """Return the softmax of each row of ``z``; columns of -inf give 0."""
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def load_logits(ptr, stride_m, offs_m, columns, exists, M):
    """Load ``columns`` [1 or M, N] of rows in fp32: -inf where a column does not exist, 0 past the last row."""
    mask = (offs_m < M)[:, None] & exists[None, :]
    z = tl.load(ptr + offs_m[:, None] * stride_m + columns, mask=mask, other=0.0).to(tl.float32)
    return tl.where(exists[None, :], z, -float("inf"))


@triton.jit(do_not_specialize=["M"])
def _moe_route_fwd_kernel(
    logits_ptr, bias_ptr, weights_ptr, index_ptr, stride_m, M, eps, scale,
    K: tl.constexpr, RANK: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, CHOSEN: tl.constexpr, TOP2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    eps, scale = tl.cast(eps, tl.float32), tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    BLOCK_E: tl.constexpr = BLOCK_G * BLOCK_S
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    # a group of SIZE experts fills its own BLOCK_S columns
    group, member = tl.arange(0, BLOCK_E) // BLOCK_S, tl.arange(0, BLOCK_E) % BLOCK_S
    exists, expert = (group < GROUPS) & (member < SIZE), group * SIZE + member
    z = load_logits(logits_ptr, stride_m, offs_m, expert[None, :], exists, M)
    rank = z
    if RANK == "softmax":
        rank = softmax_of_rows(z)
    elif RANK == "sigmoid":
        rank = 1.0 / (1.0 + tl.exp(-z))
    if bias_ptr is not None:
        rank += tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
    order = order_of(rank, exists)
    if GROUPS > 1:
        order = _without_other_groups(order, GROUPS, CHOSEN, TOP2, BLOCK_M, BLOCK_G, BLOCK_S)
    index = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for k in range(K):
        _, column, order = take_first(order, BLOCK_E)
        index = tl.where((offs_k == k)[None, :], (column // BLOCK_S * SIZE + column % BLOCK_S)[:, None], index)
    weights = load_logits(logits_ptr, stride_m, offs_m, index, offs_k < K, M)
    if SCORE == "softmax":
        top = tl.max(z, axis=1)[:, None]
        weights = tl.exp(weights - top) / tl.sum(tl.exp(z - top), axis=1)[:, None]
    elif SCORE == "sigmoid":
        weights = 1.0 / (1.0 + tl.exp(-weights))
    else:
        weights = softmax_of_rows(weights)
    if NORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None] + eps
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    offs = offs_m[:, None] * K + offs_k[None, :]
    tl.store(weights_ptr + offs, weights * scale, mask=mask)
    tl.store(index_ptr + offs, index.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _moe_route_bwd_kernel(
    dweights_ptr, logits_ptr, index_ptr, dlogits_ptr, stride_dm, stride_m, M, eps, scale,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    eps, scale = tl.cast(eps, tl.float32), tl.cast(scale, tl.float32)  # Inductor passes floats in fp64
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    chosen = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    index = tl.load(index_ptr + offs_m[:, None] * K + offs_k[None, :], mask=chosen, other=0).to(tl.int32)
    dp = load_tile(dweights_ptr, stride_dm, offs_m, offs_k, M, K)
    z = load_logits(logits_ptr, stride_m, offs_m, index, offs_k < K, M)
    # p: the scores of the chosen experts; dz: their gradients over p, without the experts' common term
    dz = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCORE == "softmax":
        row = load_logits(logits_ptr, stride_m, offs_m, offs_n[None, :], offs_n < E, M)
        top = tl.max(row, axis=1)[:, None]
        dz = tl.exp(row - top)
        total = tl.sum(dz, axis=1)[:, None]
        dz, p = dz / total, tl.exp(z - top) / total
    elif SCORE == "sigmoid":
        p = 1.0 / (1.0 + tl.exp(-z))
    else:
        p = softmax_of_rows(z)
    if SCORE == "softmax_of_top" or NORMALIZE:
        # the sum of dp * p over equal dp would cancel but for its rounding: without the largest dp it is exactly 0
        most = tl.max(tl.where(offs_k[None, :] < K, dp, -float("inf")), axis=1)[:, None]
        dp -= most  # before the scale: a GPU fuses a product with a difference, which then keeps its rounding
        most *= scale
    dp *= scale
    common = tl.sum(dp * p, axis=1)[:, None]
    if NORMALIZE:
        total = tl.sum(p, axis=1)[:, None] + eps
        share = eps / total
        common /= total
        dp = (dp - common + most * share) / total
        common = (common + most * (1.0 - share)) * share  # the sum of dp * p
    if SCORE == "sigmoid":
        dp *= p / (1.0 + tl.exp(z))
    elif SCORE == "softmax":
        dz, dp = -common * dz, dp * p
    else:
        dp = (dp - common) * p
    for k in range(K):
        own = (offs_k == k)[None, :]
        at, value = tl.sum(tl.where(own, index, 0), axis=1), tl.sum(tl.where(own, dp, 0.0), axis=1)
        dz += tl.where(offs_n[None, :] == at[:, None], value[:, None], 0.0)
    store_tile(dlogits_ptr, E, offs_m, offs_n, M, E, dz)


def _blocks(E: int, groups: int) -> tuple[int, int]:
    """Return the numbers of groups and of experts per group, as powers of 2."""
    return triton.next_power_of_2(groups), triton.next_power_of_2(E // groups)


def _scored(settings: Settings) -> dict[str, Any]:
    """Return the constants of weights and gradients: the softmax over all, normalised, is the one over the chosen."""
    divided = settings.normalize and settings.score != "softmax_of_top"
    of_top = divided and settings.score == "softmax" and not settings.eps
    score = "softmax_of_top" if of_top else settings.score
    return {"SCORE": score, "NORMALIZE": divided and not of_top, "K": settings.top_k}


def _fwd_outputs(logits: Tensor, bias: Tensor | None, top_k: int, *args: Any) -> tuple[Tensor, Tensor]:
    shape = *logits.shape[:-1], top_k
    return logits.new_empty(shape, dtype=args[-1]), logits.new_empty(shape, dtype=torch.int64)


@op(
    f"moe_route_fwd(Tensor logits, Tensor? bias, {SCHEMA}) -> (Tensor weights, Tensor index)",
    _fwd_outputs,
    inlined=True,
    replayed=True,
)
def _moe_route_fwd(logits: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    settings = Settings(*args)
    weights, index = _fwd_outputs(logits, bias, *args)
    M, E = math.prod(logits.shape[:-1]), int(logits.shape[-1])
    logits, stride_m = with_stride(logits)
    block_g, block_s = _blocks(E, settings.groups)
    top2 = settings.groups > 1 and settings.group_score == "top2"

    def run(tile: Tile) -> None:
        launch(
            _moe_route_fwd_kernel,
            (-(-M // tile.block_m),),
            (logits, packed(bias), weights, index),
            (stride_m, M),
            (settings.eps, settings.scale),
            RANK=settings.score if bias is not None or top2 else "logits",
            GROUPS=settings.groups,
            SIZE=E // settings.groups,
            CHOSEN=settings.chosen,
            TOP2=top2,
            BLOCK_M=tile.block_m,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            BLOCK_K=triton.next_power_of_2(settings.top_k),
            num_warps=tile.num_warps,
            **_scored(settings),
        )

    if weights.numel():
        tiled("moe_route_fwd", logits, block_g * block_s, run)
    return weights, index


@op(
    f"moe_route_bwd(Tensor dweights, Tensor logits, Tensor index, {SCHEMA}) -> Tensor dlogits",
    lambda dweights, logits, *args: torch.empty_like(logits, memory_format=torch.contiguous_format),
    inlined=True,
    replayed=True,
)
def _moe_route_bwd(dweights: Tensor, logits: Tensor, index: Tensor, *args: Any) -> Tensor:
    settings = Settings(*args)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    M, E = math.prod(logits.shape[:-1]), int(logits.shape[-1])
    dweights, stride_dm = with_stride(dweights)
    logits, stride_m = with_stride(logits)

    def run(tile: Tile) -> None:
        launch(
            _moe_route_bwd_kernel,
            (-(-M // tile.block_m),),
            (dweights, logits, index, dlogits),
            (stride_dm, stride_m, M),
            (settings.eps, settings.scale),
            E=E,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=triton.next_power_of_2(settings.top_k),
            num_warps=tile.num_warps,
            **_scored(settings),
        )

    if dlogits.numel():
        tiled("moe_route_bwd", logits, E, run)
    return dlogits


class _MoERoute(torch.autograd.Function):
    launch = staticmethod(_moe_route_fwd)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, outs = args
        _save(ctx, inputs, outs)
        return outs  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor | None, _: Any) -> Any:
        logits, index = ctx.saved_tensors
        dlogits = None if dweights is None else _moe_route_bwd(dweights, logits, index, *ctx.settings)
        return dlogits, *(None,) * (len(ctx.needs_input_grad) - 1)


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    logits, _, *ctx.settings = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for index


_OP = torch.ops.liger_like.moe_route_fwd.default
torch.library.register_autograd(_OP, _MoERoute.backward, setup_context=_save, lib=LIBRARY)


def _checked_groups(groups: Any, E: int) -> tuple[int, int, str]:
    """Return the number of groups, how many are chosen, and by which score. Raise unless they fit ``E`` experts."""
    if groups is None:
        return 1, 1, "max"
    if not isinstance(groups, tuple | list) or len(groups) != 3:
        raise TypeError(f"groups must be None or (number of groups, chosen ones, 'max' or 'top2'), got {groups!r}")
    n, chosen = require_integer("groups[0]", groups[0], 1), require_integer("groups[1]", groups[1], 1)
    require_choice("groups[2]", groups[2], GROUP_SCORES)
    if E % n:
        raise ValueError(f"groups[0] must divide the number of experts, {E}, got {n}")
    if chosen > n:
        raise ValueError(f"groups[1] must be at most the number of groups, {n}, got {chosen}")
    if groups[2] == "top2" and E // n < 2:
        raise ValueError(f"groups[2] 'top2' needs groups of at least 2 experts, got {n} groups of {E} experts")
    return (n, chosen, groups[2]) if n > 1 else (1, 1, "max")


def checked_settings(
    E: int,
    top_k: Any,
    score: Any = "softmax",
    normalize: Any = True,
    eps: Any = 0.0,
    scale: Any = 1.0,
    groups: Any = None,
    dtype: Any = None,
) -> Settings:
    """Return the options of ``moe_route`` as Python values. Raise unless they fit ``E`` experts."""
    top_k = int(require_integer("top_k", top_k, 1))
    require_choice("score", score, SCORES)
    require_choice("normalize", normalize, (False, True))
    n, chosen, group_score = _checked_groups(groups, E)
    if top_k > E // n * chosen:
        which = f"the {E} experts" if n == chosen else f"the {E // n * chosen} experts of the chosen groups"
        raise ValueError(f"top_k must be at most {which}, got {top_k}")
    require_choice("dtype", dtype, (None, *KERNEL_DTYPES, torch.float64))
    options = top_k, score, normalize, require_eps(eps), require_number("scale", scale), n, chosen, group_score
    return Settings(*options, dtype or torch.float32)


def _tokens(logits: Tensor, **_: Any) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: those of the tokens."""
    return {"logits": {dim: dim for dim in range(logits.dim() - 1)}}


@on_shards(_tokens, replayed=True)
def moe_route(
    logits: Tensor, top_k: int, *, score: str = "softmax", normalize: bool = True, eps: float = 0.0, scale: float = 1.0,
    bias: Tensor | None = None, groups: tuple[int, int, str] | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the weights [..., K] and the index [..., K] in int64 of the ``top_k`` experts of each row.

    ``logits`` [..., E]. ``score``: "softmax" or "sigmoid" of the logits, or "softmax_of_top": experts are chosen by
    logits, and the weights are the softmax over the K chosen logits. Other weights are the chosen scores, with
    ``normalize`` divided by their sum plus ``eps``. All weights are multiplied by ``scale``. ``bias`` [E] is added to
    the scores for the choice only, and gets no gradient. ``groups=(n, chosen, by)``: the experts are n equal groups,
    and only those of the ``chosen`` best groups take part; ``by`` is "max", the best score of a group, or "top2", the
    sum of its two best scores (each with the bias).

    Experts come in the order of their scores; of equal scores the lower expert comes first, while torch.topk on a GPU
    promises no order. NaN comes first. Without a bias or "top2" the choice is by logits, which have the order of the
    scores. The maths are in fp32, as are the weights unless ``dtype`` is given. Only the weights are differentiable;
    the backward keeps logits and index. The kernel takes bf16, fp16 and fp32 and up to 4096 experts; otherwise the
    plain-torch reference runs, for float64 with weights in float64 where ``dtype`` is None.

    Raises TypeError or ValueError for invalid arguments: K greater than the experts that take part, groups that do not
    divide E, a bias that is not [E]. See Shazeer et al., arXiv:1701.06538, and DeepSeek-V3, arXiv:2412.19437.
    """
    require("logits", logits)
    E = int(logits.shape[-1])
    settings = checked_settings(E, top_k, score, normalize, eps, scale, groups, dtype)
    if bias is not None:
        require("bias", bias, like=logits, shape=(E,))
    few = torch.Size(_blocks(E, settings.groups)).numel() <= MAX_EXPERTS
    if use_kernel(logits) and (few or refused(f"kernels route to up to {MAX_EXPERTS} experts")):
        return apply(_MoERoute, logits, bias, *settings, op=_OP)
    *options, n, chosen, group_score, _ = settings
    names = dict(zip(Settings._fields, options, strict=False))
    groups = (n, chosen, group_score) if n > 1 else None
    return moe_route_ref(logits, bias=bias, groups=groups, dtype=dtype, **names)
