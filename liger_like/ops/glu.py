"""Gated linear units: y = act(gate) * up, with act = SiLU (SwiGLU) or GELU (GeGLU)   (Shazeer, arXiv:2002.05202)

gate, up and y [..., N] are read as M rows. Packed input is [..., 2N] = [gate | up]; the kernels read both halves by
stride and write one packed gradient, without split or cat. The maths are in fp32 and are rounded once, to the input
dtype. The backward recomputes act(gate). ``glu_linear`` recomputes y, too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import load_tile, sigmoid, store_tile
from liger_like.runtime.checks import require, require_choice
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import with_stride
from liger_like.runtime.registry import on_shards, op
from liger_like.runtime.support import use_row_kernel
from liger_like.runtime.tiles import Tile, tiled

GELUS = {"tanh": "gelu_tanh", "none": "gelu"}


def swiglu_ref(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute ``swiglu`` in plain torch; this defines the op."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    acc = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(acc)) * up.to(acc)).to(gate.dtype).contiguous()


def geglu_ref(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Compute ``geglu`` in plain torch; this defines the op."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    acc = torch.promote_types(gate.dtype, torch.float32)
    h = torch.nn.functional.gelu(gate.to(acc), approximate=approximate) * up.to(acc)
    return h.to(gate.dtype).contiguous()


@triton.jit
def act_and_slope(x, ACT: tl.constexpr):
    """Return act(x) and its derivative in fp32, for a key ``ACT`` of GLUS."""
    if ACT == "silu":
        s = sigmoid(x)
        act = x * s
        return act, s + act * (1.0 - s)
    elif ACT == "gelu":
        # erf by Abramowitz & Stegun 7.1.26 (error 1.5e-7): reuses the slope's exponential, no cancellation in the tail
        density = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.231641888 * tl.abs(x))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        cdf = tl.where(x < 0, density * tail, 1.0 - density * tail)
        return x * cdf, cdf + x * density * 0.3989422804014327
    else:  # 0.5 (1 + tanh(u)) = sigmoid(2u), and the sigmoid has no cancellation
        tl.static_assert(ACT == "gelu_tanh")
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, s + x * s * (1.0 - s) * slope


@triton.jit
def _block(N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows and columns of this program; consecutive programs read neighbouring memory."""
    blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    offs_m = (pid // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return offs_m, pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gm, stride_um, M, N,
    ACT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n = _block(N, BLOCK_M, BLOCK_N)
    gate = load_tile(gate_ptr, stride_gm, offs_m, offs_n, M, N, EVEN)
    up = load_tile(up_ptr, stride_um, offs_m, offs_n, M, N, EVEN)
    act, _ = act_and_slope(gate, ACT)
    store_tile(y_ptr, N, offs_m, offs_n, M, N, act * up, EVEN)


@triton.jit(do_not_specialize=["M"])
def _glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, stride_dym, stride_gm, stride_um, stride_dm, M, N,
    Y_FOR_DY: tl.constexpr, ACT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n = _block(N, BLOCK_M, BLOCK_N)
    gate = load_tile(gate_ptr, stride_gm, offs_m, offs_n, M, N, EVEN)
    dy = load_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N, EVEN)
    if Y_FOR_DY or dgate_ptr is not None:
        up = load_tile(up_ptr, stride_um, offs_m, offs_n, M, N, EVEN)
    act, slope = act_and_slope(gate, ACT)
    if dgate_ptr is not None:
        store_tile(dgate_ptr, stride_dm, offs_m, offs_n, M, N, dy * up * slope, EVEN)
    if dup_ptr is not None:
        store_tile(dup_ptr, stride_dm, offs_m, offs_n, M, N, dy * act, EVEN)
    if Y_FOR_DY:
        store_tile(dy_ptr, stride_dym, offs_m, offs_n, M, N, act * up, EVEN)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """Return gate, up and their row strides; packed input is split into two views of the same rows."""
    gate, stride_gm = with_stride(gate)
    if up is None:
        return gate, gate[..., gate.shape[-1] // 2 :], stride_gm, stride_gm
    up, stride_um = with_stride(up)
    return gate, up, stride_gm, stride_um


def _grid(M: int, N: int, tile: Tile) -> tuple[int]:
    return (-(-M // tile.block_m) * -(-N // tile.block_n),)


def _constants(N: int, act: str, tile: Tile) -> dict[str, Any]:
    even = N % tile.block_n == 0
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return {"ACT": act, "EVEN": even, **blocks, "num_warps": tile.num_warps}


def _fwd_output(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    # not empty_like: a graph merges it with that of dgate, and a checkpoint that saves the op's result saves both
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)))


@op("glu_fwd(Tensor gate, Tensor? up, str act) -> Tensor", _fwd_output, inlined=True, replayed=True)
def glu_fwd(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """Return act(gate) * up; ``up`` None: packed halves of ``gate``."""
    y = _fwd_output(gate, up, act)
    gate, up, *strides = _halves(gate, up)
    N = y.shape[-1]
    M = y.numel() // N

    def run(tile: Tile) -> None:
        launch(_glu_fwd_kernel, _grid(M, N, tile), (gate, up, y), (*strides, M, N), **_constants(N, act, tile))

    if M:
        tiled("glu_fwd", y, N, run)
    return y


def bwd_outputs(dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    """Return memory for the gradients of gate and up; empty where ``needs`` is False."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs[0] else gate.new_empty(0)
    wanted = up is not None and needs[1]
    return dgate, torch.empty_like(up, memory_format=torch.contiguous_format) if wanted else gate.new_empty(0)


def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool], y_for_dy: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; with ``y_for_dy``, also overwrite ``dy`` with act(gate) * up."""
    dgate, dup = bwd_outputs(dy, gate, up, act, needs)
    N = dy.shape[-1]
    M = dy.numel() // N
    stride_dm = 2 * N if up is None else N
    halves = (dgate if needs[0] else None, dup if needs[1] else None)
    if up is None and needs[0]:
        halves = dgate, dgate[..., N:]
    dy, stride_dym = with_stride(dy)
    gate, up, *strides = _halves(gate, up)

    def run(tile: Tile) -> None:
        launch(
            _glu_bwd_kernel,
            _grid(M, N, tile),
            (dy, gate, up, *halves),
            (stride_dym, *strides, stride_dm, M, N),
            Y_FOR_DY=y_for_dy,
            **_constants(N, act, tile),
        )

    if M:
        tiled("glu_bwd", dy, N, run)
    return dgate, dup


@op(
    "glu_bwd(Tensor dy, Tensor gate, Tensor? up, str act, bool[2] needs) -> (Tensor dgate, Tensor dup)",
    bwd_outputs,
    replayed=True,
)
def _glu_bwd(dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return glu_backward(dy, gate, up, act, needs, False)


class _GLU(torch.autograd.Function):
    @staticmethod
    def launch(*args: Any) -> tuple[Tensor]:
        return (glu_fwd(*args),)

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, act: str, results: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:2])
        dgate, dup = _glu_bwd(dy, *ctx.saved_tensors, ctx.act, needs)
        return dgate if needs[0] else None, dup if needs[1] else None, None, None


def _elements(gate: Tensor, up: Tensor | None = None, **kwargs: Any) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: all, but not the last of packed input."""
    dims = {dim: dim for dim in range(gate.dim() - (up is None))}
    return {"gate": dims, "up": dims}


def gelu_of(approximate: str) -> str:
    """Return the key of GLUS for ``approximate``, torch's name of a GELU approximation, or raise ValueError."""
    require_choice("approximate", approximate, tuple(GELUS))
    return GELUS[approximate]


def check_halves(gate: Tensor, up: Tensor | None) -> None:
    """Raise TypeError or ValueError unless ``gate`` and ``up``, or the packed ``gate``, fit together."""
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


@on_shards(_elements, replayed=True)
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` [..., I] for ``gate`` and ``up`` [..., I], or packed ``gate`` [..., 2I] = [gate | up].

    The maths are in fp32, the result in gate.dtype. The kernel takes bf16, fp16 and fp32; other dtypes and devices run
    the plain-torch reference. Packed input gets one packed gradient.

    Raises TypeError if a tensor is not floating point or the dtypes differ, ValueError if shapes or devices do not
    match. See Shazeer, arXiv:2002.05202.
    """
    check_halves(gate, up)
    return apply(_GLU, gate, up, "silu") if use_row_kernel(gate) else swiglu_ref(gate, up)


@on_shards(_elements, replayed=True)
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Return ``gelu(gate) * up`` [..., I] for ``gate`` and ``up`` [..., I], or packed ``gate`` [..., 2I] = [gate | up].

    ``approximate`` is "tanh", or "none" for the exact erf; ValueError otherwise. Dtypes and errors as for ``swiglu``.
    """
    check_halves(gate, up)
    act = gelu_of(approximate)
    return apply(_GLU, gate, up, act) if use_row_kernel(gate) else geglu_ref(gate, up, approximate=approximate)


GLUS: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    **{act: functools.partial(geglu, approximate=approximate) for approximate, act in GELUS.items()},
}
