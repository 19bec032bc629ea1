"""Low-rank adapters of experts (LoRA, Hu et al., arXiv:2106.09685): x (W + s B A)^T = x W^T + (s x A^T) B^T.

u = s x A^T [S, R] is rounded once. The product with W adds u B^T to its sum, and the backward, likewise, v A with
v = s dy B. Neither B A nor a gradient of its size is ever computed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from liger_like.ops.experts.blocks import DEPTH, columns, product, rows_of, source_of
from liger_like.ops.experts.forward import matrix_strides
from liger_like.ops.experts.tiles import tiles_for
from liger_like.runtime.blocks import grouped
from liger_like.runtime.checks import require, require_number
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import with_stride
from liger_like.runtime.registry import op
from liger_like.runtime.support import programs

Lora = tuple[Tensor, Tensor, float]


class Scales(NamedTuple):
    """The factors s of the adapters of gate_up and of down."""

    gate_up: float
    down: float


def parts_of(name: str, lora: Any) -> tuple[Any, Any, Any]:
    """Return A, B and the scale of an adapter, each None without one. Raise TypeError for anything else."""
    if lora is None:
        return None, None, None
    if not isinstance(lora, tuple | list) or len(lora) != 3:
        raise TypeError(f"{name} must be (A, B, scale), got {type(lora).__name__}")
    return lora[0], lora[1], lora[2]


def checked_lora(name: str, a: Any, b: Any, scale: Any, x: Tensor, shape: tuple[int, int, int]) -> Lora | None:
    """Return the adapter of a matrix of ``shape`` [E, out, in], or raise TypeError or ValueError."""
    if a is b is scale is None:
        return None
    E, wide, depth = shape
    for part, matrix in (("A", a), ("B", b)):
        require(f"{part} of {name}", matrix, like=x)
    R = a.shape[1] if a.dim() == 3 else 0
    if R == 0 or a.shape != (E, R, depth):
        raise ValueError(f"A of {name} must have shape [{E}, R, {depth}], with R of at least 1, got {list(a.shape)}")
    require(f"B of {name}", b, shape=(E, wide, R))
    return a, b, require_number(f"scale of {name}", scale)


def each_lora(lora: Lora | None, E: int, dtype: torch.dtype) -> list[Lora | None]:
    """Return the adapter of each expert, A [R, in] and B [out, R] in ``dtype``."""
    if lora is None:
        return [None] * E
    a, b, scale = lora
    return [(a, b, scale) for a, b in zip(a.to(dtype), b.to(dtype), strict=True)]


def factors(lora: Lora | None, dtype: torch.dtype, transposed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return A [E, R, in] and B [E, out, R] in ``dtype``, with zeros up to a rank that is a multiple of DEPTH.

    A is contiguous. So is B, or its transpose if ``transposed``: its memory has the layout of the experts' matrices.
    Each is the given tensor if it has that form.
    """
    if lora is None:
        return None, None
    a, b = (t.to(dtype) for t in lora[:2])
    if more := -a.shape[1] % DEPTH.value:  # a pad of 0 is a copy, too
        a, b = nn.functional.pad(a, (0, 0, 0, more)), nn.functional.pad(b, (0, more))
    fits = (b.mT if transposed else b).is_contiguous()
    return a.contiguous(), b if fits else b.mT.contiguous().mT if transposed else b.contiguous()


def turned(b: Tensor | None) -> Tensor | None:
    """Return B^T [E, R, out] of B [E, out, R]."""
    return None if b is None else b.mT


@triton.jit
def _low_rank_kernel(
    a_ptr, w_ptr, row_ptr, offsets_ptr, tiles_ptr, out_ptr, stride_am, stride_we, stride_wn, stride_wk, E, N, K, scale,
    TOPK: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.load(offsets_ptr + E + 1)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert, offs_m, within, mask_m = rows_of(tiles_ptr, offsets_ptr, m, BLOCK_M)
        source = source_of(row_ptr, within, TOPK)
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + source[:, None] * stride_am + offs_k[None, :]
        b_ptrs = w_ptr + expert * stride_we + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk
        acc = product(a_ptrs, b_ptrs, offs_n < N, stride_wk, K, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], acc * scale, mask=columns(offs_n < N, mask_m, EVEN_N))


def _low_rank_outputs(
    a: Tensor, w: Tensor, row: Tensor | None, offsets: Tensor, tiles: Tensor, topk: int, scale: float
) -> Tensor:
    return a.new_empty(a.shape[0] if row is None else row.shape[0], w.shape[1])


@op(
    "moe_low_rank(Tensor a, Tensor w, Tensor? row, Tensor offsets, Tensor tiles, int topk, float scale) -> Tensor",
    _low_rank_outputs,
    flops=lambda a, w, row, *_: 2 * (a if row is None else row).shape[0] * w.shape[1:].numel(),
    replayed=True,
)
def moe_low_rank(
    a: Tensor, w: Tensor, row: Tensor | None, offsets: Tensor, tiles: Tensor, topk: int, scale: float
) -> Tensor:
    """Return scale times a [S, K] times the matrix of each row's expert, w [E, R, K]: [S, R].

    With ``row`` the rows of a [T, K] are gathered by token.
    """
    out = _low_rank_outputs(a, w, row, offsets, tiles, topk, scale)
    a, stride_am = with_stride(a)
    N, K = w.shape[1:]
    tile = tiles_for(a, K).rows_times.narrowed(N=N)
    launch(
        _low_rank_kernel,
        programs(a.device, tiles.shape[0] * -(-N // tile.block_n)),
        (a, w, row, offsets, tiles, out),
        (stride_am, *matrix_strides(w, False), w.shape[0], N, K),
        (scale,),
        TOPK=topk,
        EVEN_N=N % tile.block_n == 0,
        EVEN_K=K % tile.block_k == 0,
        **tile.constants(),
    )
    return out
