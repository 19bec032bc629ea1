"""Gated linear units: y = act(gate) * up, with act = SiLU (SwiGLU) or GELU (GeGLU)   (Shazeer, arXiv:2002.05202)

gate, up, y [..., N] are seen as M rows; packed input is [..., 2N] = [gate | up] and is read and differentiated in
place of its halves, without split or cat. Maths in fp32, one rounding to the input dtype; the backward recomputes
act(gate).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_like.ops._common import as_rows, load_tile, op, require, require_choice, store_tile, use_kernel


def swiglu_ref(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The definition, in plain torch."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    acc = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(acc)) * up.to(acc)).to(gate.dtype)


def geglu_ref(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """The definition, in plain torch."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    acc = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.gelu(gate.to(acc), approximate=approximate) * up.to(acc)).to(gate.dtype)


@triton.jit
def _act_and_slope(x, ACT: tl.constexpr):
    if ACT == "silu":
        sigmoid = tl.sigmoid(x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:  # 0.5 (1 + tanh(u)) = sigmoid(2u), which does not cancel
        tl.static_assert(ACT == "gelu_tanh")
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid) * slope)


@triton.jit(do_not_specialize=["M"])
def _glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gm, stride_um, M, N, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    act, _ = _act_and_slope(load_tile(gate_ptr, stride_gm, offs_m, offs_n, M, N), ACT)
    store_tile(y_ptr, N, offs_m, offs_n, M, N, act * load_tile(up_ptr, stride_um, offs_m, offs_n, M, N))


@triton.jit(do_not_specialize=["M"])
def _glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, stride_dym, stride_gm, stride_um, stride_dm, M, N,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    act, slope = _act_and_slope(load_tile(gate_ptr, stride_gm, offs_m, offs_n, M, N), ACT)
    dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N)
    if dgate_ptr is not None:
        up = load_tile(up_ptr, stride_um, offs_m, offs_n, M, N)
        store_tile(dgate_ptr, stride_dm, offs_m, offs_n, M, N, dy * up * slope)
    if dup_ptr is not None:
        store_tile(dup_ptr, stride_dm, offs_m, offs_n, M, N, dy * act)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [M, N] of gate and up; views where the input is packed."""
    rows = as_rows(gate)
    return (rows, as_rows(up)) if up is not None else (rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :])


def _tile(M: int, N: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_n = min(triton.next_power_of_2(N), 1024)
    block_m = min(32, max(1, 512 // block_n))
    return (triton.cdiv(M, block_m), triton.cdiv(N, block_n)), {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4}


def _fwd_output(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    return gate.new_empty(gate.shape) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


@op("glu_fwd(Tensor gate, Tensor? up, str act) -> Tensor", _fwd_output)
def _glu_fwd(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    y = _fwd_output(gate, up, act)
    gate, up = _halves(gate, up)
    M, N = gate.shape
    grid, tile = _tile(M, N)
    _glu_fwd_kernel[grid](gate, up, y, gate.stride(0), up.stride(0), M, N, ACT=act, **tile)
    return y


def _bwd_outputs(dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    dgate = gate.new_empty(gate.shape if needs[0] else 0)
    return dgate, gate.new_empty(0) if up is None or not needs[1] else up.new_empty(up.shape)


@op("glu_bwd(Tensor dy, Tensor gate, Tensor? up, str act, bool[2] needs) -> (Tensor dgate, Tensor dup)", _bwd_outputs)
def _glu_bwd(dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    dgate, dup = _bwd_outputs(dy, gate, up, act, needs)
    packed = up is None
    dy_rows = as_rows(dy)
    gate_rows, up_rows = _halves(gate, up)
    M, N = gate_rows.shape
    dgate_rows, dup_rows = _halves(dgate, None) if packed else (dgate, dup)
    grid, tile = _tile(M, N)
    _glu_bwd_kernel[grid](
        dy_rows,
        gate_rows,
        up_rows,
        dgate_rows if needs[0] else None,
        dup_rows if packed or needs[1] else None,
        dy_rows.stride(0),
        gate_rows.stride(0),
        up_rows.stride(0),
        2 * N if packed else N,
        M,
        N,
        ACT=act,
        **tile,
    )
    return dgate, dup


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, act: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return _glu_fwd(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:2])
        dgate, dup = _glu_bwd(dy, *ctx.saved_tensors, ctx.act, needs)
        return dgate if needs[0] else None, dup if needs[1] else None, None


def _check(gate: Tensor, up: Tensor | None) -> None:
    require("gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"gate must be packed [..., 2I] when up is None, got an odd last dimension {gate.shape[-1]}"
            )
    else:
        require("up", up, like=gate, shape=gate.shape)
        if up.dtype != gate.dtype:
            raise TypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` for ``gate`` and ``up`` [..., I], or for packed ``gate`` [..., 2I] = [gate | up]; returns
    [..., I].

    Maths in fp32, result in gate.dtype; bf16, fp16 and fp32, other dtypes and devices run the plain-torch reference.
    Packed input gets one packed gradient.

    Raises TypeError for tensors that are not floating point or differ in dtype, ValueError for shapes that do not
    fit. See Shazeer, arXiv:2002.05202.
    """
    _check(gate, up)
    return _GLU.apply(gate, up, "silu") if use_kernel(gate) else swiglu_ref(gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up`` for ``gate`` and ``up`` [..., I], or for packed ``gate`` [..., 2I] = [gate | up]; returns
    [..., I].

    ``approximate``: "tanh", or "none" for the exact erf. Otherwise as ``swiglu``.
    """
    _check(gate, up)
    require_choice("approximate", approximate, ("tanh", "none"))
    if not use_kernel(gate):
        return geglu_ref(gate, up, approximate=approximate)
    return _GLU.apply(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")
