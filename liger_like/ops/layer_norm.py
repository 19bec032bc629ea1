"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * w + b   (Ba, Kiros & Hinton, arXiv:1607.06450)

x, y [..., N] are seen as M rows; w, b [N]; mean, rstd [M] in fp32. Maths in fp32; y and dx in x.dtype, dw and db in
the dtype of the parameter, accumulated in fp32. The variance merges blocks by Chan's formula, so it does not cancel
for rows far from zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_like.ops._common import (
    accumulate,
    as_rows,
    load_tile,
    load_vector,
    num_programs,
    op,
    packed,
    require,
    require_eps,
    row_tile,
    store_tile,
    use_kernel,
)


def layer_norm_ref(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The definition, in plain torch."""
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(acc)
    y = y if bias is None else y + bias.to(acc)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    square = tl.zeros((BLOCK_M,), tl.float32)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        x = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N)
        count = tl.minimum(N - n, BLOCK_N)
        block_mean = tl.sum(x, axis=1) / count
        centred = tl.where((offs_n < N)[None, :], x - block_mean[:, None], 0.0)
        delta = block_mean - mean
        share = count / (n + count)
        square += tl.sum(centred * centred, axis=1) + delta * delta * (n * share)
        mean += delta * share
    rstd = tl.rsqrt(square / N + eps)
    tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        y = (load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N) - mean[:, None]) * rstd[:, None]
        if w_ptr is not None:
            y *= load_vector(w_ptr, offs_n, N)[None, :]
        if b_ptr is not None:
            y += load_vector(b_ptr, offs_n, N)[None, :]
        store_tile(y_ptr, N, offs_m, offs_n, M, N, y)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, stride_dym, stride_xm, M, N,
    ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # persistent: a program owns a row of partial dw and db in fp32: no atomics, and sums that repeat bit for bit
    step = tl.num_programs(0) * BLOCK_M
    dw_one_block = tl.zeros((BLOCK_N,), tl.float32)
    db_one_block = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(pid * BLOCK_M, M, step):
        offs_m = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mean = tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        total = tl.zeros((BLOCK_M,), tl.float32)
        dot = tl.zeros((BLOCK_M,), tl.float32)
        if dx_ptr is not None:
            for n in range(0, N, BLOCK_N):
                offs_n = n + tl.arange(0, BLOCK_N)
                dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N)
                xhat = (load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N) - mean) * rstd
                if w_ptr is not None:
                    dy *= load_vector(w_ptr, offs_n, N)[None, :]
                total += tl.sum(dy, axis=1)
                dot += tl.sum(dy * xhat, axis=1)
        mean_dy, mean_dot = (total / N)[:, None], (dot / N)[:, None]
        for n in range(0, N, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            offs_p, mask_n = pid.to(tl.int64) * N + offs_n, offs_n < N
            dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N)
            xhat = (load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N) - mean) * rstd
            if ONE_BLOCK:
                dw_one_block += tl.sum(dy * xhat, axis=0)
                db_one_block += tl.sum(dy, axis=0)
            else:
                if dw_ptr is not None:
                    accumulate(dw_ptr, offs_p, mask_n, start >= step, tl.sum(dy * xhat, axis=0))
                if db_ptr is not None:
                    accumulate(db_ptr, offs_p, mask_n, start >= step, tl.sum(dy, axis=0))
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= load_vector(w_ptr, offs_n, N)[None, :]
                store_tile(dx_ptr, N, offs_m, offs_n, M, N, (dy - mean_dy - xhat * mean_dot) * rstd)
    if ONE_BLOCK:
        offs_n = tl.arange(0, BLOCK_N)
        offs_p = pid.to(tl.int64) * N + offs_n
        if dw_ptr is not None:
            tl.store(dw_ptr + offs_p, dw_one_block, mask=offs_n < N)
        if db_ptr is not None:
            tl.store(db_ptr + offs_p, db_one_block, mask=offs_n < N)


def _fwd_outputs(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


@op(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    _fwd_outputs,
)
def _layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _fwd_outputs(x, weight, bias, eps)
    rows = as_rows(x)
    M, N = rows.shape
    tile = row_tile(N, backward=False)
    grid = (triton.cdiv(M, tile["BLOCK_M"]),)
    _layer_norm_fwd_kernel[grid](rows, packed(weight), packed(bias), y, mean, rstd, rows.stride(0), M, N, eps, **tile)
    return y, mean, rstd


def _bwd_outputs(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = (x if needs[0] else None, weight if needs[1] else None, bias if needs[2] else None)
    dx, dw, db = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted)
    return dx, dw, db


@op(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool[3] needs)"
    " -> (Tensor dx, Tensor dw, Tensor db)",
    _bwd_outputs,
)
def _layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _bwd_outputs(dy, x, weight, bias, mean, rstd, needs)
    dy_rows, rows = as_rows(dy), as_rows(x)
    M, N = rows.shape
    tile = row_tile(N, backward=True)
    programs = min(num_programs(x.device), triton.cdiv(M, tile["BLOCK_M"]))
    dw_partial, db_partial = (x.new_empty((programs, N), dtype=torch.float32) if n else None for n in needs[1:])
    _layer_norm_bwd_kernel[(programs,)](
        dy_rows,
        rows,
        packed(weight),
        mean,
        rstd,
        dx if needs[0] else None,
        dw_partial,
        db_partial,
        dy_rows.stride(0),
        rows.stride(0),
        M,
        N,
        ONE_BLOCK=tile["BLOCK_N"] >= N,
        **tile,
    )
    dw = dw if dw_partial is None else dw_partial.sum(0).to(dw.dtype)
    db = db if db_partial is None else db_partial.sum(0).to(db.dtype)
    return dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _layer_norm_fwd(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:3])
        grads = _layer_norm_bwd(dy, *ctx.saved_tensors, needs)
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension of ``x`` [..., N] to zero mean and unit variance, then scale and shift it by
    ``weight`` and ``bias`` [N]; returns [..., N] in x.dtype.

    ``eps`` is added to the (biased) variance. Maths in fp32. bf16, fp16 and fp32; other dtypes and devices run the
    plain-torch reference.

    Raises TypeError for tensors that are not floating point, ValueError for parameters that are not [N] on the
    device of ``x`` or a negative ``eps``. See Ba, Kiros & Hinton, arXiv:1607.06450.
    """
    require("x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require(name, parameter, like=x, shape=x.shape[-1:])
    require_eps(eps)
    if not use_kernel(x):
        return layer_norm_ref(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)
