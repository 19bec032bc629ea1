"""Logits of routers in fp32: x weight^T, for x [..., H] and weight [E, H] in bf16

Products of two bf16 numbers are exact in fp32, and the sums are in fp32: these are the numbers that
F.linear(x.float(), weight.float()) sums, without copies of x and weight in fp32. Tensor cores truncate where they sum,
which adds up over thousands of products. So they sum 64 products, and ordinary additions sum the results.

The backward multiplies dlogits as two numbers in bf16, hi + lo, which together are as exact as 16 bits of significand.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch has it

from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import block_of
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import as_rows, dense, with_stride
from liger_like.runtime.machine import on_gpu
from liger_like.runtime.registry import LIBRARY, op
from liger_like.runtime.support import use_kernel


def router_logits_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``router_logits`` in plain torch; this defines the op."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


@triton.jit(do_not_specialize=["M"])
def _router_logits_kernel(
    x_ptr, w_ptr, logits_ptr, stride_xm, stride_wn, M, E, H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(E, BLOCK_N)
    offs_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None]
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, SUMMED * BLOCK_K):
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.static_range(SUMMED):
            first = k + i * BLOCK_K
            a = tl.load(x_ptrs + first, mask=(offs_m < M)[:, None] & (offs_k < H - first)[None, :], other=0.0)
            b = tl.load(w_ptrs + first, mask=(offs_k < H - first)[:, None] & (offs_n < E)[None, :], other=0.0)
            part = tl.dot(a, b, part, input_precision="ieee")
        logits += part
    mask = (offs_m < M)[:, None] & (offs_n < E)[None, :]
    tl.store(logits_ptr + offs_m[:, None] * E + offs_n[None, :], logits, mask=mask)


def _fwd_outputs(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


@op(
    "router_logits_fwd(Tensor x, Tensor weight) -> Tensor",
    _fwd_outputs,
    flops=lambda x, weight: 2 * x.numel() * weight.shape[0],
    inlined=True,
    replayed=True,
)
def _router_logits_fwd(x: Tensor, weight: Tensor) -> Tensor:
    logits = _fwd_outputs(x, weight)
    M, (E, H) = math.prod(x.shape[:-1]), weight.shape
    x, stride_xm = with_stride(x)
    weight = dense(weight)
    widest = 64 if H % 16 else 128  # rows that are not aligned are loaded through registers
    block_n = min(widest, max(16, block_of(int(E))))
    if logits.numel():
        launch(
            _router_logits_kernel,
            (-(-M // 64) * -(-E // block_n),),
            (x, weight, logits),
            (stride_xm, weight.stride(0), M, E, H),
            BLOCK_M=64,
            BLOCK_N=block_n,
            BLOCK_K=32,
            SUMMED=2,
            num_warps=4,
            num_stages=3,
        )
    return logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32: with outputs in bf16 cuBLAS may round parts of the sum to bf16."""
    return torch.mm(a, b, out_dtype=torch.float32) if on_gpu(a) else a.float() @ b.float()


@op(
    "router_logits_bwd(Tensor dlogits, Tensor x, Tensor weight, bool needs_dx, bool needs_dw)"
    " -> (Tensor dx, Tensor dw)",
    lambda dlogits, x, weight, needs_dx, needs_dw: (
        x.new_empty(x.shape if needs_dx else (0,)),
        weight.new_empty(weight.shape if needs_dw else (0,)),
    ),
    flops=lambda dlogits, x, weight, needs_dx, needs_dw: 2 * x.numel() * weight.shape[0] * (needs_dx + needs_dw),
)
def _router_logits_bwd(
    dlogits: Tensor, x: Tensor, weight: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    dz = as_rows(dlogits)
    hi = dz.to(x.dtype)
    parts = torch.cat((hi, (dz - hi).to(x.dtype)), dim=1)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    if needs_dx:
        dx = _product(parts, torch.cat((weight, weight))).to(x.dtype).view(x.shape)
    if needs_dw:
        dw = _product(parts.t(), as_rows(x)).view(2, *weight.shape).sum(0).to(weight.dtype)
    return dx, dw


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _router_logits_fwd(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> Any:
        needs = ctx.needs_input_grad
        grads = _router_logits_bwd(dlogits, *ctx.saved_tensors, *needs)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_OP = torch.ops.liger_like.router_logits_fwd.default
torch.library.register_autograd(_OP, _RouterLogits.backward, setup_context=_save, lib=LIBRARY)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T [..., E] in fp32 for ``x`` [..., H] and ``weight`` [E, H].

    The kernel takes bf16. Any other dtype is cast to fp32 first, as in the reference, whose backward then keeps x in
    fp32; float64 stays as it is.
    """
    if x.dtype == weight.dtype == torch.bfloat16 and use_kernel(x):
        return apply(_RouterLogits, x, weight, op=_OP)
    return router_logits_ref(x, weight)
