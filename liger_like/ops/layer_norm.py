"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * w + b   (Ba, Kiros & Hinton, arXiv:1607.06450)

x and y [..., N] are read as M rows; w and b are [N], mean and rstd [M] in fp32. The maths are in fp32. y and dx are in
x.dtype, dw and db in the dtype of their parameter, accumulated in fp32. The variance merges blocks by Chan's formula,
which has no cancellation for rows far from zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.rms_norm import rows_alike
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import accumulate, load_tile, load_vector, store_tile
from liger_like.runtime.checks import require, require_eps
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed, with_stride
from liger_like.runtime.registry import on_shards, op
from liger_like.runtime.support import use_row_kernel
from liger_like.runtime.tiles import Tile, partial_sums, row_constants, sum_partials, tiled


def layer_norm_ref(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute ``layer_norm`` in plain torch; this defines the op."""
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(acc)
    y = y if bias is None else y + bias.to(acc)
    return y.to(x.dtype).contiguous()  # torch's layer_norm returns contiguous memory for every stride of x


@triton.jit
def _block_moments(x, n, offs_n, N, BLOCK_N: tl.constexpr, EVEN: tl.constexpr):
    """Return the mean of the block at column ``n``, the sum of squared deviations from it, and its column count."""
    count = tl.minimum(N - n, BLOCK_N)
    mean = tl.sum(x, axis=1) / count
    centred = x - mean[:, None]
    if not EVEN:
        centred = tl.where((offs_n < N)[None, :], centred, 0.0)
    return mean, tl.sum(centred * centred, axis=1), count


@triton.jit
def _normalise(x, mean, rstd, w_ptr, b_ptr, offs_n, N):
    y = (x - mean[:, None]) * rstd[:, None]
    if w_ptr is not None:
        y *= load_vector(w_ptr, offs_n, N)[None, :]
    if b_ptr is not None:
        y += load_vector(b_ptr, offs_n, N)[None, :]
    return y


@triton.jit(do_not_specialize=["M"])
def _layer_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, M, eps,
    N: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_BLOCK:
        x = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N, EVEN)
        mean, square, _ = _block_moments(x, 0, offs_n, N, BLOCK_N, EVEN)
        rstd = tl.rsqrt(square / N + eps)
        # weight and bias are loaded last: held during the sums, their registers would lower the occupancy
        store_tile(y_ptr, N, offs_m, offs_n, M, N, _normalise(x, mean, rstd, w_ptr, b_ptr, offs_n, N), EVEN)
    else:
        mean = tl.zeros((BLOCK_M,), tl.float32)
        square = tl.zeros((BLOCK_M,), tl.float32)
        for n in range(0, N, BLOCK_N):
            x = load_tile(x_ptr, stride_xm, offs_m, n + offs_n, M, N, EVEN)
            block_mean, block_square, count = _block_moments(x, n, n + offs_n, N, BLOCK_N, EVEN)
            delta = block_mean - mean
            share = count / (n + count)
            square += block_square + delta * delta * (n * share)
            mean += delta * share
        rstd = tl.rsqrt(square / N + eps)
        for n in range(0, N, BLOCK_N):
            x = load_tile(x_ptr, stride_xm, offs_m, n + offs_n, M, N, EVEN)
            y = _normalise(x, mean, rstd, w_ptr, b_ptr, n + offs_n, N)
            store_tile(y_ptr, N, offs_m, n + offs_n, M, N, y, EVEN)
    tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)


@triton.jit
def _products(dy_ptr, x_ptr, w_ptr, mean, rstd, stride_dym, stride_xm, offs_m, offs_n, M, N, EVEN: tl.constexpr):
    """Return a block's normalised x, dy, and dy times the weight, in fp32."""
    xhat = (load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N, EVEN) - mean) * rstd
    dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N, EVEN)
    return xhat, dy, dy if w_ptr is None else dy * load_vector(w_ptr, offs_n, N)[None, :]


@triton.jit(do_not_specialize=["M"])
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dparams_ptr, stride_dym, stride_xm, M,
    N: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_DB: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # persistent: each program owns fp32 rows of partial dw and db, so no atomics and repeatable sums
    blocks = tl.cdiv(M, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if dparams_ptr is not None:
        dw_ptr = dparams_ptr + pid.to(tl.int64) * N * (2 if HAS_DB else 1)
    for block in tl.range(pid, blocks, tl.num_programs(0), num_stages=STAGES):
        # last rows first: they were written last, so their dy is still in L2
        offs_m = (blocks - 1 - block).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mean = tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        if ONE_BLOCK:
            xhat, dy, wdy = _products(
                dy_ptr, x_ptr, w_ptr, mean, rstd, stride_dym, stride_xm, offs_m, offs_n, M, N, EVEN
            )
            dw += dy * xhat
            if HAS_DB:
                db += dy
            if dx_ptr is not None:
                mean_dy, mean_dot = tl.sum(wdy, axis=1) / N, tl.sum(wdy * xhat, axis=1) / N
                dx = (wdy - mean_dy[:, None] - xhat * mean_dot[:, None]) * rstd
                store_tile(dx_ptr, N, offs_m, offs_n, M, N, dx, EVEN)
        else:
            total = tl.zeros((BLOCK_M,), tl.float32)
            dot = tl.zeros((BLOCK_M,), tl.float32)
            for n in range(0, N, BLOCK_N):
                xhat, dy, wdy = _products(
                    dy_ptr, x_ptr, w_ptr, mean, rstd, stride_dym, stride_xm, offs_m, n + offs_n, M, N, EVEN
                )
                total += tl.sum(wdy, axis=1)
                dot += tl.sum(wdy * xhat, axis=1)
            for n in range(0, N, BLOCK_N):
                xhat, dy, wdy = _products(
                    dy_ptr, x_ptr, w_ptr, mean, rstd, stride_dym, stride_xm, offs_m, n + offs_n, M, N, EVEN
                )
                if dparams_ptr is not None:
                    accumulate(dw_ptr, n + offs_n, n + offs_n < N, block != pid, tl.sum(dy * xhat, axis=0))
                    if HAS_DB:
                        accumulate(dw_ptr + N, n + offs_n, n + offs_n < N, block != pid, tl.sum(dy, axis=0))
                if dx_ptr is not None:
                    dx = (wdy - (total / N)[:, None] - xhat * (dot / N)[:, None]) * rstd
                    store_tile(dx_ptr, N, offs_m, n + offs_n, M, N, dx, EVEN)
    if dparams_ptr is not None and ONE_BLOCK:
        tl.store(dw_ptr + offs_n, tl.sum(dw, axis=0), mask=offs_n < N)
        if HAS_DB:
            tl.store(dw_ptr + N + offs_n, tl.sum(db, axis=0), mask=offs_n < N)


def _fwd_outputs(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@op(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    _fwd_outputs,
    replayed=True,
)
def _layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _fwd_outputs(x, weight, bias, eps)
    M, N = rstd.numel(), x.shape[-1]
    x, stride_xm = with_stride(x)
    weight, bias = packed(weight), packed(bias)

    def run(tile: Tile) -> None:
        launch(
            _layer_norm_fwd_kernel,
            (-(-M // tile.block_m),),
            (x, weight, bias, y, mean, rstd),
            (stride_xm, M),
            (eps,),
            **row_constants(tile, N),
        )

    if M:
        tiled("layer_norm_fwd", x, N, run)
    return y, mean, rstd


def _bwd_outputs(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else x.new_empty(0)
    parameters = [t for t in (weight, bias) if t is not None and needs[1]]
    if not parameters:
        return dx, x.new_empty(0)
    dtype = torch.promote_types(parameters[0].dtype, parameters[-1].dtype)
    return dx, torch.empty((1 if bias is None else 2, x.shape[-1]), dtype=dtype, device=x.device)


@op(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool[2] needs)"
    " -> (Tensor dx, Tensor dparams)",
    _bwd_outputs,
    replayed=True,
)
def _layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dparams = _bwd_outputs(dy, x, weight, bias, mean, rstd, needs)
    M, N = rstd.numel(), x.shape[-1]
    dy, stride_dym = with_stride(dy)
    x, stride_xm = with_stride(x)
    weight = packed(weight)

    def run(tile: Tile) -> None:
        programs, partial = partial_sums(dparams, -(-M // tile.block_m), tile, whole=tile.block_n >= N)
        launch(
            _layer_norm_bwd_kernel,
            (programs,),
            (dy, x, weight, mean, rstd, dx if needs[0] else None, partial if needs[1] else None),
            (stride_dym, stride_xm, M),
            HAS_DB=bias is not None,
            STAGES=tile.num_stages,
            **row_constants(tile, N),
        )
        if needs[1]:
            sum_partials(partial, dparams)

    if M:
        tiled("layer_norm_bwd", x, N, run)
        return dx, dparams
    return dx, dparams.zero_()


class _LayerNorm(torch.autograd.Function):
    launch = staticmethod(_layer_norm_fwd)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, results: Any) -> Tensor:
        y, mean, rstd = results
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx, dparams = _layer_norm_bwd(dy, x, weight, bias, mean, rstd, [needs_dx, needs_dw or needs_db])
        return (
            dx if needs_dx else None,
            dparams[0].to(weight.dtype) if needs_dw else None,
            dparams[1].to(bias.dtype) if needs_db else None,
            None,
            None,
        )


@on_shards(rows_alike, replayed=True)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return LayerNorm of ``x`` [..., N] over its last dimension, [..., N] in x.dtype.

    ``x`` is normalised to zero mean and unit variance, multiplied by ``weight`` [N] and shifted by ``bias`` [N].
    ``eps`` is added to the biased variance. The maths are in fp32. The kernel takes bf16, fp16 and fp32; other dtypes
    and devices run the plain-torch reference.

    Raises TypeError if a tensor is not floating point, ValueError if a parameter is not [N] on the device of ``x`` or
    ``eps`` is negative. See Ba, Kiros & Hinton, arXiv:1607.06450.
    """
    require("x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require(name, parameter, like=x, shape=x.shape[-1:])
    eps = require_eps(eps)
    if not use_row_kernel(x):
        return layer_norm_ref(x, weight, bias, eps)
    return apply(_LayerNorm, x, weight, bias, eps)
