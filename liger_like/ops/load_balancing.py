"""Load balancing loss of routers: E sum_e f_e P_e   (Fedus, Zoph & Shazeer, arXiv:2101.03961)

Over all rows of all layers' logits [..., E], f_e is the share of rows that choose expert e among their top K, and P_e
the mean of their softmax probabilities for e; a mask [...] weights the rows. The loss is K if rows are spread evenly.
The maths are in fp32. The forward reads the logits of each layer once, and keeps dloss/dP [E] up to a constant.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.router import LEAST, MAX_EXPERTS, highest_first, load_logits, order_of, softmax_of_rows, take_first
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import accumulate, load_tile, store_tile
from liger_like.runtime.checks import require, require_integer
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed, with_stride
from liger_like.runtime.registry import op, refuses_dtensors
from liger_like.runtime.support import num_programs, refused, use_kernel
from liger_like.runtime.tiles import Tile, tiled


def load_balancing_loss_ref(logits: Tensor | Sequence[Tensor], top_k: int, *, mask: Tensor | None = None) -> Tensor:
    """Compute ``load_balancing_loss`` in plain torch; this defines the op."""
    return loss_of(*sums_of([logits] if isinstance(logits, Tensor) else logits, top_k, mask))


def sums_of(layers: Sequence[Tensor], top_k: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many rows of all ``layers`` choose each expert, the sums of its probabilities, and the rows."""
    first, E = layers[0], layers[0].shape[-1]
    dtype = torch.promote_types(first.dtype, torch.float32)
    weight = (torch.ones_like(first[..., 0]) if mask is None else mask).reshape(-1).to(dtype)
    counts = probabilities = first.new_zeros(E, dtype=dtype)
    for layer in layers:
        z = layer.reshape(-1, E).to(dtype)
        chosen = torch.zeros_like(z).scatter(-1, highest_first(z)[..., :top_k], 1.0)
        z = z.where(weight[:, None] != 0, 0)  # padding may hold NaN
        counts = counts + (chosen * weight[:, None]).sum(0)
        probabilities = probabilities + (z.softmax(-1) * weight[:, None]).sum(0)
    return counts, probabilities, weight.sum() * len(layers)


def loss_of(counts: Tensor, probabilities: Tensor, rows: Tensor) -> Tensor:
    """Return the loss [] of the sums [E] of experts over ``rows``."""
    return (counts * probabilities).sum() * len(counts) / rows.square().where(rows != 0, 1)


@triton.jit
def _row_weights(mask_ptr, offs_m, M):
    """Return the rows' weights [M, 1]: those of the mask, or 1; 0 past the last row."""
    weight = (offs_m < M).to(tl.float32)
    if mask_ptr is not None:
        weight = tl.load(mask_ptr + offs_m, mask=offs_m < M, other=0).to(tl.float32)
    return weight[:, None]


@triton.jit(do_not_specialize=["M", "layer"])
def _load_balancing_fwd_kernel(
    logits_ptr, mask_ptr, sums_ptr, stride_m, M, layer,
    E: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # persistent: each program owns a row of sums for all layers, so no atomics and repeatable sums
    offs_n = tl.arange(0, BLOCK_N)
    counts, probabilities = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        z = load_logits(logits_ptr, stride_m, offs_m, offs_n[None, :], offs_n < E, M)
        weight = _row_weights(mask_ptr, offs_m, M)
        order = order_of(z, offs_n < E)
        for _ in range(K):
            _, _, order = take_first(order, BLOCK_N)
        counts += tl.where(order == LEAST, weight, 0.0)  # columns past E, too, which are not stored
        probabilities += tl.where(weight != 0.0, softmax_of_rows(z) * weight, 0.0)
    sums_ptr += tl.program_id(0).to(tl.int64) * 2 * E
    accumulate(sums_ptr, offs_n, offs_n < E, layer > 0, tl.sum(counts, axis=0))
    accumulate(sums_ptr + E, offs_n, offs_n < E, layer > 0, tl.sum(probabilities, axis=0))


@triton.jit(do_not_specialize=["P", "M", "layers"])
def _load_balancing_loss_kernel(
    sums_ptr, loss_ptr, slope_ptr, P, M, layers,
    E: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the programs' sums; store the loss, and its derivative by the sum of the probabilities of each expert.

    The derivatives lack their maximum: the softmax cancels a common term, but not its rounding.
    """
    offs_n = tl.arange(0, BLOCK_N)
    counts, probabilities = tl.zeros((BLOCK_P, BLOCK_N), tl.float32), tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for p in range(0, P, BLOCK_P):
        offs_p = p + tl.arange(0, BLOCK_P).to(tl.int64)
        counts += load_tile(sums_ptr, 2 * E, offs_p, offs_n, P, E)
        probabilities += load_tile(sums_ptr + E, 2 * E, offs_p, offs_n, P, E)
    count = tl.sum(counts, axis=0)
    rows = tl.cast(M, tl.float32) * layers
    if MASKED:
        rows = tl.sum(count, axis=0) / K
        rows = tl.where(rows == 0.0, 1.0, rows)
    factor = E / rows
    slope = (count - tl.max(count, axis=0)) / rows * factor
    tl.store(slope_ptr + offs_n, slope, mask=offs_n < E)
    tl.store(loss_ptr, tl.sum(count / rows * factor * tl.sum(probabilities, axis=0), axis=0))


@triton.jit(do_not_specialize=["M"])
def _load_balancing_bwd_kernel(
    dloss_ptr, slope_ptr, logits_ptr, mask_ptr, dlogits_ptr, stride_m, M,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    p = softmax_of_rows(load_logits(logits_ptr, stride_m, offs_m, offs_n[None, :], offs_n < E, M))
    slope = tl.load(slope_ptr + offs_n, mask=offs_n < E, other=0.0)[None, :]
    weight = _row_weights(mask_ptr, offs_m, M)
    dz = p * (slope - tl.sum(p * slope, axis=1)[:, None]) * weight * tl.load(dloss_ptr)
    dz = tl.where(weight != 0.0, dz, 0.0)  # padding may hold NaN
    store_tile(dlogits_ptr, E, offs_m, offs_n, M, E, dz)


def _fwd_outputs(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape[-1], dtype=torch.float32)


@op(
    "load_balancing_fwd(Tensor logits, Tensor[] others, Tensor? mask, int top_k) -> (Tensor loss, Tensor slope)",
    _fwd_outputs,
    inlined=True,
)
def _load_balancing_fwd(logits: Tensor, others: list[Tensor], mask: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the loss over the layers ``logits`` and ``others``, and its derivative as the kernel stores it."""
    loss, slope = _fwd_outputs(logits)
    M, E = math.prod(logits.shape[:-1]), int(logits.shape[-1])
    layers = [with_stride(layer) for layer in (logits, *others)]

    def run(tile: Tile) -> None:
        programs = min(num_programs(logits.device, tile.per_sm), -(-M // tile.block_m))
        sums = logits.new_empty((programs, 2, E), dtype=torch.float32)
        for number, (layer, stride_m) in enumerate(layers):
            launch(
                _load_balancing_fwd_kernel,
                (programs,),
                (layer, mask, sums),
                (stride_m, M, number),
                E=E,
                K=top_k,
                STAGES=tile.num_stages,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                num_warps=tile.num_warps,
            )
        launch(
            _load_balancing_loss_kernel,
            (1,),
            (sums, loss, slope),
            (programs, M, len(layers)),
            E=E,
            K=top_k,
            MASKED=mask is not None,
            BLOCK_P=max(1, 4096 // tile.block_n),
            BLOCK_N=tile.block_n,
            num_warps=8,
        )

    if M:
        tiled("load_balancing_fwd", logits, E, run)
        return loss, slope
    return loss.zero_(), slope.zero_()


@op(
    "load_balancing_bwd(Tensor logits, Tensor dloss, Tensor slope, Tensor? mask) -> Tensor dlogits",
    lambda logits, *args: torch.empty_like(logits, memory_format=torch.contiguous_format),
    inlined=True,
)
def _load_balancing_bwd(logits: Tensor, dloss: Tensor, slope: Tensor, mask: Tensor | None) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    M, E = math.prod(logits.shape[:-1]), int(logits.shape[-1])
    logits, stride_m = with_stride(logits)

    def run(tile: Tile) -> None:
        launch(
            _load_balancing_bwd_kernel,
            (-(-M // tile.block_m),),
            (dloss, slope, logits, mask, dlogits),
            (stride_m, M),
            E=E,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
        )

    if M:
        tiled("load_balancing_bwd", logits, E, run)
    return dlogits


class _LoadBalancing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, top_k: int, mask: Tensor | None, logits: Tensor, *others: Tensor) -> Tensor:
        loss, slope = _load_balancing_fwd(logits, list(others), mask, top_k)
        ctx.save_for_backward(slope, mask, logits, *others)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        slope, mask, *layers = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        grads = (
            _load_balancing_bwd(layer, dloss, slope, mask) if needed else None
            for layer, needed in zip(layers, needs, strict=True)
        )
        return None, None, *grads


def _check_layers(layers: Sequence[Tensor]) -> None:
    """Raise unless all layers have as many rows of as many experts, on one device."""
    for i, layer in enumerate(layers):
        name = f"logits[{i}]" if len(layers) > 1 else "logits"
        require(name, layer)
        require(name, layer, like=layers[0], shape=layers[0].shape)
        if layer.dtype != layers[0].dtype:
            raise TypeError(f"{name} must have the dtype of logits[0], {layers[0].dtype}, got {layer.dtype}")


def _check_mask(mask: Tensor, logits: Tensor) -> None:
    rows = math.prod(logits.shape[:-1])  # Size.numel() makes an exported size a constant
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor or None, got {type(mask).__name__}")
    if mask.is_complex() or mask.requires_grad:
        raise TypeError("mask must be real and need no gradient: the loss is not differentiated by it")
    if mask.numel() != rows:
        raise ValueError(f"mask must have a number for each of the {rows} rows of a layer, got {list(mask.shape)}")
    if mask.device != logits.device:
        raise ValueError(f"mask must be on {logits.device}, got {mask.device}")


@refuses_dtensors("full_tensor()")
def load_balancing_loss(logits: Tensor | Sequence[Tensor], top_k: int, *, mask: Tensor | None = None) -> Tensor:
    """Return the load balancing loss of routers [] in fp32: E times the sum over experts of share times probability.

    ``logits`` [..., E], or a sequence with the logits [..., E] of each layer, all of one shape and dtype: the loss is
    over the rows of all layers, as if they were concatenated. An expert's share is the number of rows that have it
    among their ``top_k`` highest logits, divided by the number of rows; its probability is the mean of its softmax.
    ``mask`` (bool, integer or float) has one number for each row of a layer, in their order, as the attention mask
    [B, S] for logits [B * S, E]: it weights the row in all layers, and 0 leaves padding out. Without rows the loss
    is 0. This is ``load_balancing_loss_func`` of transformers, whose ``num_experts`` is E; the maths are in fp32, where
    transformers rounds probabilities to the dtype of the logits. Only logits are differentiable: the shares are
    constants. The kernel takes bf16, fp16 and fp32, and up to 4096 experts; otherwise the plain-torch reference runs,
    for float64 with the loss in float64.

    Raises TypeError or ValueError for invalid arguments. See Fedus, Zoph & Shazeer, arXiv:2101.03961.
    """
    layers = [logits] if isinstance(logits, Tensor) else logits
    if not isinstance(layers, tuple | list) or not layers:
        raise TypeError(f"logits must be a tensor or a sequence of tensors, got {type(logits).__name__}")
    _check_layers(layers)
    E = int(layers[0].shape[-1])
    top_k = int(require_integer("top_k", top_k, 1))
    if top_k > E:
        raise ValueError(f"top_k must be at most the {E} experts, got {top_k}")
    if mask is not None:
        _check_mask(mask, layers[0])
    if use_kernel(layers[0]) and (E <= MAX_EXPERTS or refused(f"kernels route to up to {MAX_EXPERTS} experts")):
        return apply(_LoadBalancing, top_k, None if mask is None else packed(mask.reshape(-1)), *layers)
    return load_balancing_loss_ref(layers, top_k, mask=mask)
