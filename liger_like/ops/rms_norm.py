"""RMSNorm: y = x * rsqrt(mean(x^2) + eps) * (w + offset)   (Zhang & Sennrich, arXiv:1910.07467)

x, residual, y [..., N] are seen as M rows; w [N]; rstd [M] in fp32. ``add_rms_norm`` normalises s = x + residual,
rounded to its dtype as a residual stream would be, and returns both. Maths in fp32; three conventions of rounding
(``casting_mode``): "llama" rounds the normalised row to x.dtype before the weight, "gemma" rounds once at the end,
"none" rounds every step to x.dtype. Gradients: dx in x.dtype, dw in w.dtype, both accumulated in fp32.
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
    require_choice,
    require_eps,
    round_to,
    row_tile,
    store_tile,
    use_kernel,
)

CASTING_MODES = ("llama", "gemma", "none")


def rms_norm_ref(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """The definition, in plain torch."""
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x if casting_mode == "none" else x.to(acc)
    # "none" rounds each step to x.dtype, but a step is exact before it is rounded, as on a GPU
    variance = h.square().mean(-1, keepdim=True, dtype=acc).to(h.dtype) + eps
    h = h * torch.rsqrt(variance.to(acc)).to(h.dtype)
    if weight is None:
        return h.to(x.dtype)
    w = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    return (h * w).to(x.dtype) if casting_mode == "gemma" else h.to(x.dtype) * w.to(weight.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The definition, in plain torch."""
    s = x + residual
    return rms_norm_ref(s, weight, eps, **kwargs), s


@triton.jit
def _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, offs_n, M, N, dtype: tl.constexpr):
    x = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N)
    if res_ptr is not None:
        x = round_to(x + load_tile(res_ptr, stride_rm, offs_m, offs_n, M, N), dtype)
    return x


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, stride_xm, stride_rm, M, N, eps, offset,
    CASTING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    square = tl.zeros((BLOCK_M,), tl.float32)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        x = _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, offs_n, M, N, dtype)
        if s_ptr is not None:
            store_tile(s_ptr, N, offs_m, offs_n, M, N, x)
        square += tl.sum(round_to(x * x, dtype) if CASTING == "none" else x * x, axis=1)
    if CASTING == "none":
        rstd = round_to(tl.rsqrt(round_to(round_to(square / N, dtype) + eps, dtype)), dtype)
    else:
        rstd = tl.rsqrt(square / N + eps)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        y = _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, offs_n, M, N, dtype) * rstd[:, None]
        if CASTING != "gemma":
            y = round_to(y, dtype)
        if w_ptr is not None:
            w = load_vector(w_ptr, offs_n, N) + offset
            y *= (w if CASTING == "gemma" else round_to(w, w_ptr.dtype.element_ty))[None, :]
        store_tile(y_ptr, N, offs_m, offs_n, M, N, y)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, stride_dym, stride_dsm, stride_xm, M, N, offset,
    ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # persistent: a program owns one fp32 row of partial dw, so there are no atomics and the sum repeats bit for bit
    step = tl.num_programs(0) * BLOCK_M
    dw_one_block = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(pid * BLOCK_M, M, step):
        offs_m = start + tl.arange(0, BLOCK_M).to(tl.int64)
        rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        dot = tl.zeros((BLOCK_M,), tl.float32)
        if dx_ptr is not None:
            for n in range(0, N, BLOCK_N):
                offs_n = n + tl.arange(0, BLOCK_N)
                dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N)
                xhat = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N) * rstd
                if w_ptr is not None:
                    dy *= (load_vector(w_ptr, offs_n, N) + offset)[None, :]
                dot += tl.sum(dy * xhat, axis=1)
        mean_dot = (dot / N)[:, None]
        for n in range(0, N, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N)
            xhat = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N) * rstd
            if dw_ptr is not None:
                dw = tl.sum(dy * xhat, axis=0)
                if ONE_BLOCK:
                    dw_one_block += dw
                else:
                    offs_dw = pid.to(tl.int64) * N + offs_n
                    accumulate(dw_ptr, offs_dw, offs_n < N, start >= step, dw)
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= (load_vector(w_ptr, offs_n, N) + offset)[None, :]
                dx = (dy - xhat * mean_dot) * rstd
                if ds_ptr is not None:
                    dx += load_tile(ds_ptr, stride_dsm, offs_m, offs_n, M, N)
                store_tile(dx_ptr, N, offs_m, offs_n, M, N, dx)
    if dw_ptr is not None and ONE_BLOCK:
        offs_n = tl.arange(0, BLOCK_N)
        tl.store(dw_ptr + pid.to(tl.int64) * N + offs_n, dw_one_block, mask=offs_n < N)


def _fwd_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    s = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    if weight is not None and casting_mode != "gemma":
        dtype = torch.promote_types(dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), s, x.new_empty(x.shape[:-1], dtype=torch.float32)


@op(
    "rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset, str casting_mode)"
    " -> (Tensor y, Tensor s, Tensor rstd)",
    _fwd_outputs,
)
def _rms_norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, rstd = _fwd_outputs(x, residual, weight, eps, offset, casting_mode)
    rows = as_rows(x)
    M, N = rows.shape
    res = rows if residual is None else as_rows(residual)
    tile = row_tile(N, backward=False)
    _rms_norm_fwd_kernel[(triton.cdiv(M, tile["BLOCK_M"]),)](
        rows,
        None if residual is None else res,
        packed(weight),
        y,
        None if residual is None else s,
        rstd,
        rows.stride(0),
        res.stride(0),
        M,
        N,
        eps,
        offset,
        CASTING=casting_mode,
        **tile,
    )
    return y, s, rstd


def _bwd_outputs(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, dx: bool, dw: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if dx else 0), x.new_empty(0) if weight is None or not dw else torch.empty_like(weight)


@op(
    "rms_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, float offset, bool needs_dx,"
    " bool needs_dw) -> (Tensor dx, Tensor dw)",
    _bwd_outputs,
)
def _rms_norm_bwd(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx, dw = _bwd_outputs(dy, ds, x, weight, rstd, offset, needs_dx, needs_dw)
    dy_rows, rows = as_rows(dy), as_rows(x)
    ds_rows = dy_rows if ds is None else as_rows(ds)
    M, N = rows.shape
    tile = row_tile(N, backward=True)
    programs = min(num_programs(x.device), triton.cdiv(M, tile["BLOCK_M"]))
    partial = x.new_empty((programs, N), dtype=torch.float32) if needs_dw else None
    _rms_norm_bwd_kernel[(programs,)](
        dy_rows,
        None if ds is None else ds_rows,
        rows,
        packed(weight),
        rstd,
        dx if needs_dx else None,
        partial,
        dy_rows.stride(0),
        ds_rows.stride(0),
        rows.stride(0),
        M,
        N,
        offset,
        ONE_BLOCK=tile["BLOCK_N"] >= N,
        **tile,
    )
    return dx, dw if partial is None else partial.sum(0).to(dw.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        casting_mode: str,
    ) -> Any:
        y, s, rstd = _rms_norm_fwd(x, residual, weight, eps, offset, casting_mode)
        ctx.save_for_backward(x if residual is None else s, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.x_dtype = offset, x.dtype
        ctx.residual_dtype = x.dtype if residual is None else residual.dtype
        return y if residual is None else (y, s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> Any:
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_dw = ctx.needs_input_grad[:3]
        dx, dw = ds, None
        if dy is not None:
            needs_dx = needs_x or needs_residual
            dx, dw = _rms_norm_bwd(dy, ds, x, weight, rstd, ctx.offset, needs_dx, needs_dw)
        return (
            dx.to(ctx.x_dtype) if needs_x and dx is not None else None,
            dx.to(ctx.residual_dtype) if needs_residual and dx is not None else None,
            dw if needs_dw else None,
            None,
            None,
            None,
        )


def _check(x: Tensor, weight: Tensor | None, eps: float, casting_mode: str) -> None:
    require("x", x)
    if weight is not None:
        require("weight", weight, like=x, shape=x.shape[-1:])
    require_eps(eps)
    require_choice("casting_mode", casting_mode, CASTING_MODES)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """RMS-normalise the last dimension of ``x`` [..., N] and scale it by ``weight`` [N] + ``offset``; returns [..., N].

    ``eps`` is added to the mean square. ``casting_mode``: "llama" normalises in fp32, rounds to x.dtype and
    multiplies by the weight in that dtype (the result takes the promoted dtype of both, as in the Hugging Face
    class); "gemma" does everything in fp32 and rounds once to x.dtype; "none" does all maths in x.dtype. ``offset``
    is added to the weight in fp32 (Gemma: 1.0). bf16, fp16 and fp32; other dtypes and devices run the plain-torch
    reference.

    Raises TypeError for tensors that are not floating point, ValueError for a weight that is not [N] on the device
    of ``x``, a negative ``eps`` or an unknown ``casting_mode``. See Zhang & Sennrich, arXiv:1910.07467.
    """
    _check(x, weight, eps, casting_mode)
    if not use_kernel(x):
        return rms_norm_ref(x, weight, eps, offset=offset, casting_mode=casting_mode)
    return _RMSNorm.apply(x, None, weight, eps, offset, casting_mode)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Add ``x`` and ``residual`` (both [..., N]) and RMS-normalise the sum; returns (normed, x + residual), both [...,
    N].

    The sum is rounded to its dtype before it is normalised, as a residual stream would be. The other arguments and
    errors are those of ``rms_norm``; ValueError also if ``residual`` has not the shape of ``x``.
    """
    _check(x, weight, eps, casting_mode)
    require("residual", residual, like=x, shape=x.shape)
    if not (use_kernel(x) and use_kernel(residual)):
        return add_rms_norm_ref(x, residual, weight, eps, offset=offset, casting_mode=casting_mode)
    return _RMSNorm.apply(x, residual, weight, eps, offset, casting_mode)
