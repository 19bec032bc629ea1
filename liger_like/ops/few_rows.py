"""Linear layers of one input of few rows, as in decode steps: y_i = x W_i^T + b_i, or act(y_0) * y_1

x [..., K] is read as M rows, W_i [N_i, K], b_i [N_i]. Such products take as long as their weights take to be read, and
most are too small to reach the bandwidth of the memory. So one kernel reads the weights of up to three layers. Sums and
gated units are in fp32, and are rounded once. More than 64 rows are split into blocks. Each block reads the weights
again, mostly from the L2 cache.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from liger_like.ops.glu import act_and_slope
from liger_like.runtime.autograd import is_untransformed
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import with_stride
from liger_like.runtime.registry import op
from liger_like.runtime.support import autocast_dtype, gpu_class, is_local, num_programs, unhooked, use_kernel

MOST_ROWS = 256  # on Hopper; else FEW
FEW, BLOCK_N = 64, 64  # rows of one block, with so many outputs
MOST_LAYERS = 3
TILES = (  # rows, outputs and features of a block, warps and stages, for more than FEW rows
    (64, 64, 64, 4, 5),
    (128, 64, 64, 4, 5),
    (128, 128, 64, 8, 4),
)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, y0_ptr, y1_ptr, y2_ptr,
    stride_xm, N0, N1, N2, M, K,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # find the layer of this program; those of the same outputs are neighbours, which read their weights together
    blocks = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0) // blocks
    w_ptr, b_ptr, y_ptr, N = w0_ptr, b0_ptr, y0_ptr, N0
    if y1_ptr is not None and tile >= tl.cdiv(N0, BLOCK_N):
        tile -= tl.cdiv(N0, BLOCK_N)
        w_ptr, y_ptr, N = w1_ptr, y1_ptr, N1
        if b_ptr is not None:
            b_ptr = b1_ptr
        if y2_ptr is not None and tile >= tl.cdiv(N1, BLOCK_N):
            tile -= tl.cdiv(N1, BLOCK_N)
            w_ptr, y_ptr, N = w2_ptr, y2_ptr, N2
            if b_ptr is not None:
                b_ptr = b2_ptr
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m, offs_k = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows = tl.minimum(offs_n, N - 1).to(tl.int64)[:, None]
    w_ptrs = w_ptr + rows * K + offs_k[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[None, :] * stride_xm + offs_k[:, None]
    inside = (offs_m < M)[None, :]
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if ACT is not None:
        up_ptrs = w1_ptr + rows * K + offs_k[None, :]
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + first, mask=inside, other=0.0)
        y = tl.dot(tl.load(w_ptrs + first, eviction_policy="evict_first"), x, y)
        if ACT is not None:
            up = tl.dot(tl.load(up_ptrs + first, eviction_policy="evict_first"), x, up)
    if b_ptr is not None:
        y += tl.load(b_ptr + rows).to(tl.float32)
    if ACT is not None:
        if b_ptr is not None:
            up += tl.load(b1_ptr + rows).to(tl.float32)
        act, _ = act_and_slope(y, ACT)
        y = act * up
    y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(y_ptrs, y, mask=inside & (offs_n < N)[:, None])


def _outputs(x: Tensor, weights: Sequence[Tensor], biases: Any, act: str | None, tile: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], w.shape[0])) for w in (weights[:1] if act else weights)]


@op(
    "few_rows_linear(Tensor x, Tensor[] weights, Tensor[] biases, str? act, int[] tile) -> Tensor[]",
    _outputs,
    flops=lambda x, weights, *_: 2 * math.prod(x.shape[:-1]) * sum(w.numel() for w in weights),
)
def _few_rows_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], act: str | None, tile: list[int]
) -> list[Tensor]:
    """Return the results of up to three layers, or with ``act`` the gated unit of two; ``tile`` is from ``_tile``."""
    ys = _outputs(x, weights, biases, act, tile)
    x, stride_xm = with_stride(x)
    M, K = x.numel() // x.shape[-1], x.shape[-1]
    block_m, block_n, block_k, warps, stages = tile
    launch(
        _few_rows_kernel,
        (_blocks(M, block_m) * sum(_blocks(y.shape[-1], block_n) for y in ys),),
        (x, *_three(weights), *_three(biases), *_three(ys)),
        (stride_xm, *_three([w.shape[0] for w in weights], 0), M, K),
        ACT=act,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return ys


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _tile(device: torch.device, M: int, K: int, sizes: Sequence[int], gated: bool) -> tuple[int, ...] | None:
    """Return rows, outputs and features of a block, warps and stages, or None where products of torch are faster.

    ``sizes``: outputs of each layer. More than FEW rows take the smallest tile by which all programs run at once.
    """
    kind, at_once = gpu_class(device), num_programs(device, 1)
    if M <= FEW:
        block_k = 128 if K % 128 == 0 and kind in ("hopper", "large") else 64
        # few programs keep more in flight; more of them share the memory of a multiprocessor
        stages = 5 if sum(_blocks(N, BLOCK_N) for N in sizes) <= at_once and not gated else 3
        return max(16, triton.next_power_of_2(M)), BLOCK_N, block_k, 4, stages
    for tile in TILES if kind == "hopper" else ():
        if _blocks(M, tile[0]) * sum(_blocks(N, tile[1]) for N in sizes) <= at_once:
            return tile
    return None


def _three(values: list[Any], missing: Any = None) -> list[Any]:
    return [*values, *[missing] * (MOST_LAYERS - len(values))]


def of_few_rows(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: str | None = None
) -> list[Tensor] | None:
    """Return x W_i^T + b_i for each of up to three weights, or act(y_0) * y_1 alone for a key ``act`` of GLUS.

    Return None where the kernel does not apply: for more than 64 rows (on Hopper 256, if all programs run at once), in
    grad mode, under autocast, in a compiled graph, if only some layers have a bias, for K that is no multiple of 64,
    for other dtypes than fp16 and bf16, for subclasses of tensors, sparse and nested ones, for weights that are not
    contiguous, and for other shapes than those of a linear layer, some of which torch broadcasts.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    given = [b for b in biases if b is not None]
    if not all(_is_like(t, x) for t in (x, *weights, *given)) or not x.dim():
        return None
    K = x.shape[-1]
    applies = (
        len(weights) <= MOST_LAYERS
        and len(given) in (0, len(weights))
        and 0 < x.numel() <= MOST_ROWS * K
        and K % 64 == 0
        and all(w.dim() == 2 and w.shape[1] == K and w.numel() for w in weights)
        and all(b.shape == w.shape[:1] for b, w in zip(given, weights, strict=False))
        and all(t.is_contiguous() for t in (*weights, *given))
        and (act is None or weights[0].shape == weights[1].shape)
        and use_kernel(x)
        and not autocast_dtype(x)
        and is_untransformed()
    )
    if not applies:
        return None
    sizes = [w.shape[0] for w in (weights[:1] if act else weights)]
    tile = _tile(x.device, x.numel() // K, K, sizes, act is not None)
    return None if tile is None else _few_rows_linear(x, [*weights], given, act, tile)


def _is_like(t: Tensor, x: Tensor) -> bool:
    plain = is_local(t) and t.layout is torch.strided and not t.is_nested
    return plain and t.dtype == x.dtype and t.device == x.device


def linears(x: Tensor, *layers: Any) -> list[Any]:
    """Return ``layer(x)`` for each of ``layers``, two or three of them by one kernel if it applies."""
    groups = [layers[i : i + MOST_LAYERS] for i in range(0, len(layers), MOST_LAYERS)]
    return [y for group in groups for y in (group[1:] and _of_layers(x, group)) or [layer(x) for layer in group]]


def gated(act: str, x: Tensor, gate: Any, up: Any) -> Tensor | None:
    """Return act(gate(x)) * up(x) by one kernel, or None if it does not apply."""
    found = _of_layers(x, (gate, up), act)
    return None if found is None else found[0]


def _of_layers(x: Tensor, layers: Sequence[Any], act: str | None = None) -> list[Tensor] | None:
    if torch.is_grad_enabled() or not all(type(layer) is nn.Linear and unhooked(layer) for layer in layers):
        return None
    return of_few_rows(x, [layer.weight for layer in layers], [layer.bias for layer in layers], act)
