"""Peers of ``moe_experts`` in torch, of transformers and of Liger; and a bound, the products of equal experts.

With adapters the experts are frozen, and the peers add the adapter of each expert to its matrix, as PEFT does.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmark.common.measure import Inputs, Step
from liger_like.testing import costs
from liger_like.testing.inputs import SCALES, experts_inputs

BOUND = "bmm"


def gated(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def torch_experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sort the rows by expert and multiply them by ``F.grouped_mm``."""
    (T, K), E = index.shape, len(gate_up)
    experts, order = index.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(E, device=x.device), right=True, out_int32=True)
    h = gated(F.grouped_mm(x[order // K], gate_up.mT, offs=ends))
    y = F.grouped_mm(h, down.mT, offs=ends) * weights.flatten()[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(T * K, device=x.device)
    return y[place].view(T, K, -1).sum(1).to(x.dtype)


def adapted_inputs(dtype: torch.dtype, device: str, **shape: Any) -> Inputs:
    """Return the arguments of ``moe_experts`` with adapters, and frozen experts."""
    inputs = experts_inputs(dtype, device, **shape)
    return inputs | {name: inputs[name].detach() for name in ("gate_up", "down")}


def adapted_cost(
    itemsize: int, lead: tuple[int, ...], H: int, I: int, E: int, K: int, rank: int, **_: Any
) -> costs.Cost:
    """Return the cost of experts with adapters: no gradient of a matrix, and the products with the factors."""
    forward, backward, flops = costs.experts(itemsize, lead, H, I, E, K)
    rows, factors = torch.Size(lead).numel() * K, rank * (2 * H + 3 * I)
    moved = E * factors * itemsize
    return forward + moved, backward - 3 * E * H * I * itemsize + 2 * moved, flops * 2 // 3 + 6 * rows * factors


def added(
    gate_up: Tensor, down: Tensor, gate_up_lora_a: Tensor, gate_up_lora_b: Tensor, down_lora_a: Tensor,
    down_lora_b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the matrices of all experts with their adapters added."""
    return (
        gate_up + SCALES["gate_up_lora"] * torch.bmm(gate_up_lora_b, gate_up_lora_a),
        down + SCALES["down_lora"] * torch.bmm(down_lora_b, down_lora_a),
    )


def torch_adapted_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, **factors: Tensor
) -> Tensor:
    """Add the adapters to the matrices, then run ``torch_experts``."""
    return torch_experts(x, *added(gate_up, down, **factors), index, weights)


def transformers_adapted_experts(inputs: Inputs) -> Step:
    """Run transformers' default form of experts on matrices with their adapters added."""
    x, gate_up, down, index, weights, *_ = inputs.values()
    factors = {name: t for name, t in inputs.items() if "lora" in name}

    def step() -> Any:
        matrices = added(gate_up, down, **factors)
        names = ("x", "gate_up", "down", "index", "weights")
        return transformers_experts(dict(zip(names, (x, *matrices, index, weights), strict=True)))()

    return step


def torch_experts_loop(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Loop over the experts, as the eager form of transformers does; it waits for the GPU at each."""
    out = torch.zeros_like(x)
    for e, (w1, w2) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        token, k = (index == e).nonzero(as_tuple=True)
        y = F.linear(gated(F.linear(x[token], w1)), w2) * weights[token, k, None]
        out = out.index_add(0, token, y.to(x.dtype))
    return out


def transformers_experts(inputs: Inputs) -> Step:
    """Run the form of experts that transformers takes by default, with all that it does for other experts."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    x, gate_up, down, index, weights = inputs.values()
    others = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    experts: Any = SimpleNamespace(num_experts=len(gate_up), has_gate=True, **dict.fromkeys(others, False))
    experts.gate_up_proj, experts.down_proj, experts._apply_gate = gate_up, down, gated
    return partial(grouped_mm_experts_forward, experts, x, index, weights)


def liger_experts(inputs: Inputs) -> Step:
    """Run Liger's op on int32 ids; its first steps try tiles unless LIGER_FUSED_MOE_AUTOTUNE is 0."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, gate_up, down, index, weights = inputs.values()
    return partial(LigerFusedMoEFunction.apply, x, gate_up, down, index.int(), weights)


class _Products(torch.autograd.Function):
    """The nine products of ``moe_experts`` where experts have equally many rows: x [E, n, H], z [E, n, 2I].

    All operands but the weights are given. The results only have the right shapes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, rows: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, down, weights, rows, z)
        ctx.tokens = len(x)
        torch.bmm(rows, gate_up.mT)
        return torch.bmm(z.chunk(2, -1)[0], down.mT).flatten(0, 1)[: len(x)]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        gate_up, down, weights, rows, z = ctx.saved_tensors
        h = z.chunk(2, -1)[0]
        torch.bmm(rows, down)
        d_down, d_gate_up = torch.bmm(rows.mT, h), torch.bmm(z.mT, rows)
        return (
            torch.bmm(z, gate_up).flatten(0, 1)[: ctx.tokens],
            d_gate_up,
            d_down,
            torch.zeros_like(weights),
            None,
            None,
        )


def equal_experts(inputs: Inputs) -> Step:
    """Multiply rows that lie side by side, as many by each expert: a bound, and no result."""
    x, gate_up, down, index, weights = inputs.values()
    n = -(-index.numel() // len(gate_up))
    rows, z = (torch.randn(len(w), n, w.shape[2], device=x.device, dtype=x.dtype) for w in (gate_up, gate_up.mT))
    return partial(_Products.apply, x, gate_up, down, weights, rows, z)
