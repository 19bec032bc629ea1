"""RMSNorm: y = x * rsqrt(mean(x^2) + eps) * (w + offset)   (Zhang & Sennrich, arXiv:1910.07467)

x, residual and y [..., N] are read as M rows; w is [N], rstd [M] in fp32. ``add_rms_norm`` rounds s = x + residual to
its dtype, as a residual stream does, normalises s and returns both. The maths are in fp32. ``casting_mode`` says where
they are rounded: "llama" rounds the normalised row to x.dtype before the weight, "gemma" rounds once at the end,
"none" rounds every step to x.dtype. dx is in x.dtype and dw in w.dtype; both are accumulated in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import accumulate, load_tile, load_vector, load_weight, round_to, store_tile
from liger_like.runtime.checks import require, require_choice, require_eps, require_number
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed, with_stride
from liger_like.runtime.registry import on_shards, op
from liger_like.runtime.support import use_row_kernel
from liger_like.runtime.tiles import Tile, partial_sums, row_constants, sum_partials, tiled

CASTING_MODES = ("llama", "gemma", "none")


def rms_norm_ref(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """Compute ``rms_norm`` in plain torch; this defines the op."""
    acc = torch.promote_types(x.dtype, torch.float32)
    x = x.contiguous()  # so that the result is contiguous, as the kernel's is
    h = x if casting_mode == "none" else x.to(acc)
    # "none" rounds each step to x.dtype; within a step a GPU computes in fp32
    variance = h.square().mean(-1, keepdim=True, dtype=acc).to(h.dtype) + eps
    h = h * torch.rsqrt(variance.to(acc)).to(h.dtype)
    if weight is None:
        return h.to(x.dtype)
    w = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    return (h * w).to(x.dtype) if casting_mode == "gemma" else h.to(x.dtype) * w.to(weight.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Compute ``add_rms_norm`` in plain torch; this defines the op."""
    s = (x + residual).contiguous()
    return rms_norm_ref(s, weight, eps, **kwargs), s


@triton.jit
def _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, offs_n, M, N, dtype: tl.constexpr, EVEN: tl.constexpr):
    x = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N, EVEN)
    if res_ptr is not None:
        x = round_to(x + load_tile(res_ptr, stride_rm, offs_m, offs_n, M, N, EVEN), dtype)
    return x


@triton.jit
def sum_of_squares(x, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return each row's sum of squares; ``CASTING`` "none" rounds every square to ``dtype`` first."""
    return tl.sum(round_to(x * x, dtype) if CASTING == "none" else x * x, axis=1)


@triton.jit
def rsqrt_of_mean(square, N, eps, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return 1 / rms of rows of N elements from their sums of squares."""
    if CASTING == "none":
        return round_to(tl.rsqrt(round_to(round_to(square / N, dtype) + eps, dtype)), dtype)
    else:
        return tl.rsqrt(square / N + eps)


@triton.jit
def normalise(x, rstd, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return rows ``x`` (fp32) times ``rstd`` times ``w`` + ``offset``; ``w`` is in its own dtype, or None for 1."""
    y = x * rstd[:, None]
    if CASTING != "gemma":
        y = round_to(y, dtype)
    if w is not None:
        factor = w.to(tl.float32) + offset
        y *= (factor if CASTING == "gemma" else round_to(factor, w.dtype))[None, :]
    return y


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, stride_xm, stride_rm, M, eps, offset,
    CASTING: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_BLOCK:
        w = load_weight(w_ptr, offs_n, N)  # first: this load overlaps the sum over the row
        x = _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, offs_n, M, N, dtype, EVEN)
        if s_ptr is not None:
            store_tile(s_ptr, N, offs_m, offs_n, M, N, x, EVEN)
        rstd = rsqrt_of_mean(sum_of_squares(x, dtype, CASTING), N, eps, dtype, CASTING)
        y = normalise(x, rstd, w, offset, dtype, CASTING)
        store_tile(y_ptr, N, offs_m, offs_n, M, N, y, EVEN)
    else:
        square = tl.zeros((BLOCK_M,), tl.float32)
        for n in range(0, N, BLOCK_N):
            x = _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, n + offs_n, M, N, dtype, EVEN)
            if s_ptr is not None:
                store_tile(s_ptr, N, offs_m, n + offs_n, M, N, x, EVEN)
            square += sum_of_squares(x, dtype, CASTING)
        rstd = rsqrt_of_mean(square, N, eps, dtype, CASTING)
        for n in range(0, N, BLOCK_N):
            x = _load_sum(x_ptr, res_ptr, stride_xm, stride_rm, offs_m, n + offs_n, M, N, dtype, EVEN)
            y = normalise(x, rstd, load_weight(w_ptr, n + offs_n, N), offset, dtype, CASTING)
            store_tile(y_ptr, N, offs_m, n + offs_n, M, N, y, EVEN)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)


@triton.jit
def _products(dy_ptr, x_ptr, w_ptr, rstd, stride_dym, stride_xm, offs_m, offs_n, M, N, offset, EVEN: tl.constexpr):
    """Return a block's normalised x, dy, and dy times the weight, in fp32."""
    xhat = load_tile(x_ptr, stride_xm, offs_m, offs_n, M, N, EVEN) * rstd
    dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N, EVEN)
    return xhat, dy, dy if w_ptr is None else dy * (load_vector(w_ptr, offs_n, N) + offset)[None, :]


@triton.jit
def _store_dx(xhat, wdy, mean, rstd, ds_ptr, dx_ptr, stride_dsm, offs_m, offs_n, M, N, EVEN: tl.constexpr):
    dx = (wdy - xhat * mean[:, None]) * rstd
    if ds_ptr is not None:
        dx += load_tile(ds_ptr, stride_dsm, offs_m, offs_n, M, N, EVEN)
    store_tile(dx_ptr, N, offs_m, offs_n, M, N, dx, EVEN)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, stride_dym, stride_dsm, stride_xm, M, offset,
    N: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # persistent: each program owns one fp32 row of partial dw, so no atomics and dw is repeatable bit for bit
    blocks = tl.cdiv(M, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(pid, blocks, tl.num_programs(0), num_stages=STAGES):
        # last rows first: they were written last, so their dy is still in L2
        offs_m = (blocks - 1 - block).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        if ONE_BLOCK:
            xhat, dy, wdy = _products(
                dy_ptr, x_ptr, w_ptr, rstd, stride_dym, stride_xm, offs_m, offs_n, M, N, offset, EVEN
            )
            dw += dy * xhat
            if dx_ptr is not None:
                mean = tl.sum(wdy * xhat, axis=1) / N
                _store_dx(xhat, wdy, mean, rstd, ds_ptr, dx_ptr, stride_dsm, offs_m, offs_n, M, N, EVEN)
        else:
            dot = tl.zeros((BLOCK_M,), tl.float32)
            for n in range(0, N, BLOCK_N):
                xhat, dy, wdy = _products(
                    dy_ptr, x_ptr, w_ptr, rstd, stride_dym, stride_xm, offs_m, n + offs_n, M, N, offset, EVEN
                )
                dot += tl.sum(wdy * xhat, axis=1)
            for n in range(0, N, BLOCK_N):
                xhat, dy, wdy = _products(
                    dy_ptr, x_ptr, w_ptr, rstd, stride_dym, stride_xm, offs_m, n + offs_n, M, N, offset, EVEN
                )
                if dw_ptr is not None:
                    mask_n = n + offs_n < N
                    accumulate(dw_ptr, pid.to(tl.int64) * N + n + offs_n, mask_n, block != pid, tl.sum(dy * xhat, 0))
                if dx_ptr is not None:
                    _store_dx(xhat, wdy, dot / N, rstd, ds_ptr, dx_ptr, stride_dsm, offs_m, n + offs_n, M, N, EVEN)
    if dw_ptr is not None and ONE_BLOCK:
        tl.store(dw_ptr + pid.to(tl.int64) * N + offs_n, tl.sum(dw, axis=0), mask=offs_n < N)


def _like(x: Tensor, weight: Tensor | None, casting_mode: str) -> Tensor:
    """Return an empty contiguous tensor like ``x`` in the output dtype of ``casting_mode``."""
    wider = weight is not None and casting_mode != "gemma"
    dtype = torch.promote_types(x.dtype, weight.dtype) if wider else x.dtype
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _launch_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, s: Tensor | None, rstd: Tensor,
    eps: float, offset: float, casting_mode: str,
) -> None:  # fmt: skip
    M, N = rstd.numel(), x.shape[-1]
    x, stride_xm = with_stride(x)
    residual, stride_rm = (None, N) if residual is None else with_stride(residual)
    weight = packed(weight)

    def run(tile: Tile) -> None:
        launch(
            _rms_norm_fwd_kernel,
            (-(-M // tile.block_m),),
            (x, residual, weight, y, s, rstd),
            (stride_xm, stride_rm, M),
            (eps, offset),
            CASTING=casting_mode,
            **row_constants(tile, N),
        )

    if M:
        tiled("rms_norm_fwd" if s is None else "add_rms_norm_fwd", x, N, run)


def _fwd_outputs(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor]:
    return _like(x, weight, casting_mode), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@op(
    "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset, str casting_mode) -> (Tensor y, Tensor rstd)",
    _fwd_outputs,
    replayed=True,
)
def _rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor]:
    y, rstd = _fwd_outputs(x, weight, eps, offset, casting_mode)
    _launch_fwd(x, None, weight, y, None, rstd, eps, offset, casting_mode)
    return y, rstd


def _add_fwd_outputs(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    s = _like(x, residual, casting_mode="none")
    return _like(s, weight, casting_mode), s, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@op(
    "add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode)"
    " -> (Tensor y, Tensor s, Tensor rstd)",
    _add_fwd_outputs,
    replayed=True,
)
def _add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, rstd = _add_fwd_outputs(x, residual, weight, eps, offset, casting_mode)
    _launch_fwd(x, residual, weight, y, s, rstd, eps, offset, casting_mode)
    return y, s, rstd


def _bwd_outputs(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else x.new_empty(0)
    return dx, x.new_empty(0) if weight is None or not needs[1] else torch.empty_like(weight)


@op(
    "rms_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, float offset, bool[2] needs)"
    " -> (Tensor dx, Tensor dw)",
    _bwd_outputs,
    replayed=True,
)
def _rms_norm_bwd(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dw = _bwd_outputs(dy, ds, x, weight, rstd, offset, needs)
    M, N = rstd.numel(), x.shape[-1]
    dy, stride_dym = with_stride(dy)
    ds, stride_dsm = (None, N) if ds is None else with_stride(ds)
    x, stride_xm = with_stride(x)
    weight = packed(weight)

    def run(tile: Tile) -> None:
        programs, partial = partial_sums(dw, -(-M // tile.block_m), tile, whole=tile.block_n >= N)
        launch(
            _rms_norm_bwd_kernel,
            (programs,),
            (dy, ds, x, weight, rstd, dx if needs[0] else None, partial if needs[1] else None),
            (stride_dym, stride_dsm, stride_xm, M),
            (offset,),
            STAGES=tile.num_stages,
            **row_constants(tile, N),
        )
        if needs[1]:
            sum_partials(partial, dw)

    if M:
        tiled("rms_norm_bwd" if ds is None else "add_rms_norm_bwd", x, N, run)
        return dx, dw
    return dx, dw.zero_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def launch(x: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = (
            _rms_norm_fwd(x, *args) if residual is None else _add_rms_norm_fwd(x, residual, *args)
        )
        return results

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        casting_mode: str,
        results: tuple[Tensor, ...],
    ) -> Any:
        ctx.offset, ctx.x_dtype = offset, x.dtype
        if residual is None:
            y, rstd = results
            ctx.save_for_backward(x, weight, rstd)
            return y
        y, s, rstd = results
        ctx.save_for_backward(s, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.residual_dtype = residual.dtype
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> Any:
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_dw = ctx.needs_input_grad[:3]
        dx, dw = ds, None
        if dy is not None:
            dx, dw = _rms_norm_bwd(dy, ds, x, weight, rstd, ctx.offset, [needs_x or needs_residual, needs_dw])
        return (
            dx.to(ctx.x_dtype) if needs_x and dx is not None else None,
            dx.to(ctx.residual_dtype) if needs_residual and dx is not None else None,
            dw if needs_dw else None,
            *(None,) * 4,
        )


def rows_alike(x: Tensor, **kwargs: Any) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: all but the last."""
    rows = {dim: dim for dim in range(x.dim() - 1)}
    return {"x": rows, "residual": rows}


def _checked(x: Tensor, weight: Tensor | None, eps: Any, offset: Any, casting_mode: str) -> tuple[float, float]:
    """Return ``eps`` and ``offset`` as Python floats. Raise unless the arguments fit together."""
    require("x", x)
    if weight is not None:
        require("weight", weight, like=x, shape=x.shape[-1:])
    require_choice("casting_mode", casting_mode, CASTING_MODES)
    return require_eps(eps), require_number("offset", offset)


@on_shards(rows_alike, replayed=True)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """RMS-normalise the last dimension of ``x`` [..., N], multiply by ``weight`` [N] + ``offset`` and return [..., N].

    ``eps`` is added to the mean square, ``offset`` to the weight in fp32 (Gemma: 1.0). ``casting_mode``: "llama"
    normalises in fp32, rounds to x.dtype and multiplies by the weight (the result has the promoted dtype of both, as in
    the Hugging Face class); "gemma" computes in fp32 and rounds once to x.dtype; "none" rounds every step to x.dtype.
    The kernel takes bf16, fp16 and fp32; other dtypes and devices run the plain-torch reference.

    Raises TypeError if a tensor is not floating point, ValueError if ``weight`` is not [N] on the device of ``x``,
    ``eps`` is negative or ``casting_mode`` is unknown. See Zhang & Sennrich, arXiv:1910.07467.
    """
    eps, offset = _checked(x, weight, eps, offset, casting_mode)
    if not use_row_kernel(x):
        return rms_norm_ref(x, weight, eps, offset=offset, casting_mode=casting_mode)
    return apply(_RMSNorm, x, None, weight, eps, offset, casting_mode)


@on_shards(rows_alike, replayed=True)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return (normed, x + residual), both [..., N]: RMS-normalise the sum of ``x`` and ``residual`` [..., N].

    The sum is rounded to its dtype before it is normalised, as a residual stream is. The other arguments and errors
    are those of ``rms_norm``. Also raises ValueError if ``residual`` does not have the shape and device of ``x``.
    """
    eps, offset = _checked(x, weight, eps, offset, casting_mode)
    require("residual", residual, like=x, shape=x.shape)
    if not (use_row_kernel(x) and use_row_kernel(residual)):
        return add_rms_norm_ref(x, residual, weight, eps, offset=offset, casting_mode=casting_mode)
    return apply(_RMSNorm, x, residual, weight, eps, offset, casting_mode)
