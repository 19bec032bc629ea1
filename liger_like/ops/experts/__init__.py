"""Experts of a mixture: out_t = sum_k w_tk (h_tk W2_e + b2_e), with h = act(gate) * up, [gate | up] = x_t W1_e + b1_e
and e = index[t, k]   (Shazeer et al., arXiv:1701.06538; SonicMoE, arXiv:2512.14080)

x and out [..., H], index and weights [..., K], gate_up [E, 2I, H], down [E, H, I]. Products take the dtype of the
experts, all other maths are in fp32; z = [gate | up], h, h W2 and the gradients are rounded to that dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.experts.backward import moe_depth_product, moe_down_bwd, moe_sum_rows
from liger_like.ops.experts.checks import Gate, check_experts, check_routing, checked_gate
from liger_like.ops.experts.forward import moe_combine, moe_gate_up, moe_rows_times
from liger_like.ops.experts.routing import Routing, moe_rows
from liger_like.ops.experts.tiles import tile_rows
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.layout import with_stride
from liger_like.runtime.registry import on_shards
from liger_like.runtime.support import autocast_dtype, use_kernel

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _gated(z: Tensor, gate: Gate) -> Tensor:
    """Return act(gate) * up [M, I] of z [M, 2I]."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    g, u = (z[:, ::2], z[:, 1::2]) if gate.interleaved else z.chunk(2, -1)
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if gate.alpha is not None:
        return (u + 1) * g * torch.sigmoid(gate.alpha * g)
    if gate.act == "silu":
        return nn.functional.silu(g) * u
    return nn.functional.gelu(g, approximate=APPROXIMATE[gate.act]) * u


def moe_experts_ref(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, act: str = "silu", limit: float | None = None, alpha: float | None = None,
    transposed: bool = False, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``moe_experts`` in plain torch, for operands of one dtype; this defines the op."""
    gate, acc = Gate(act, limit, alpha, transposed, interleaved), torch.promote_types(x.dtype, torch.float32)
    T, E = x.shape[:-1].numel(), len(gate_up)
    rows, index, weights = (t.reshape(T, t.shape[-1]) for t in (x, index, weights))
    out = torch.zeros_like(rows, dtype=acc)
    matrices = ((w.mT if transposed else w).unbind() for w in (gate_up, down))
    biases = ([None] * E if b is None else b.unbind() for b in (gate_up_bias, down_bias))
    for e, (w1, w2, b1, b2) in enumerate(zip(*matrices, *biases, strict=True)):
        token, k = (index == e).nonzero(as_tuple=True)
        h = _gated(nn.functional.linear(rows[token], w1, b1), gate).to(x.dtype)
        y = nn.functional.linear(h, w2, b2).to(acc)
        out = out.index_add(0, token, y * weights[token, k, None].to(acc))
    return out.to(x.dtype).view(x.shape)


class _Experts(torch.autograd.Function):
    """Autograd node that computes z and h, saves the operands, and returns an empty tensor of the output's shape.

    ``_ExpertsValues`` runs afterwards and computes the values. A checkpoint's recomputation stops once all saved
    tensors are restored, so it skips the product with down.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
        weights: Tensor, index: Tensor, gate: Gate, keep_z: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        routing = Routing(*moe_rows(index, len(gate_up), tile_rows(x.dtype)))
        z, h = moe_gate_up(x, gate_up, gate_up_bias, *routing[:3], index.shape[1], *gate, keep_z)
        ctx.save_for_backward(x, gate_up, down, down_bias, weights, index, z, *routing)
        ctx.gate = gate
        ctx.mark_non_differentiable(h, *routing)
        ctx.set_materialize_grads(False)
        return x.new_empty(()).expand(x.shape), h, *routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: None) -> Any:
        x, gate_up, down, down_bias, weights, index, z, *tensors = ctx.saved_tensors
        dout, _ = with_stride(dout)  # three kernels read it: a copy, if it takes one, is made once
        row, offsets, tiles, pos = Routing(*tensors)
        needs_x, needs_gate_up, needs_down, needs_bias, needs_down_bias, needs_weights, *_ = ctx.needs_input_grad
        needs = [needs_x or needs_gate_up or needs_bias, needs_down, needs_weights]
        topk, transposed = pos.shape[1], ctx.gate.transposed
        dx = dgate_up = ddown = dbias = ddown_bias = dweights = None
        if any(needs):
            dz, wh, dweights = moe_down_bwd(
                dout, down, down_bias, index, weights, z, row, offsets, tiles, pos, *ctx.gate, needs
            )
            if needs_down:
                ddown = moe_depth_product(wh, dout, row, offsets, topk, not transposed)
            del wh
            if needs_gate_up:
                dgate_up = moe_depth_product(dz, x, row, offsets, topk, transposed)
            if needs_bias:
                dbias = moe_sum_rows(dz, None, row, offsets, topk)
            if needs_x:
                dx = moe_combine(moe_rows_times(dz, gate_up, None, offsets, tiles, not transposed), None, pos)
        if needs_down_bias:
            ddown_bias = moe_sum_rows(dout, weights, row, offsets, topk)
        return dx, dgate_up, ddown, dbias, ddown_bias, dweights if needs_weights else None, None, None, None


class _ExpertsValues(torch.autograd.Function):
    """Autograd node that computes the output, and passes its gradient on to ``_Experts``."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, h: Tensor, down: Tensor, down_bias: Tensor | None, weights: Tensor, offsets: Tensor,
        tiles: Tensor, pos: Tensor, transposed: bool,
    ) -> Tensor:  # fmt: skip
        return moe_combine(moe_rows_times(h, down, down_bias, offsets, tiles, transposed), weights, pos)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        return dout, *(None,) * 8


def _run(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, index: Tensor,
    weights: Tensor, gate: Gate,
) -> Tensor:  # fmt: skip
    """Return the output of the kernels [T, H] for operands of one dtype, x [T, H], index and weights [T, K]."""
    operands = x, gate_up, down, gate_up_bias, down_bias, weights
    keep_z = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    kept, h, *tensors = apply(_Experts, *operands, index, gate, keep_z)
    _, offsets, tiles, pos = Routing(*tensors)
    values = (None if t is None else t.detach() for t in (down, down_bias, weights))
    return apply(_ExpertsValues, kept, h, *values, offsets, tiles, pos, gate.transposed)


def _tokens(x: Tensor, gate_up: Any, *args: Tensor, **kwargs: Tensor) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: those of the tokens. Each rank needs all experts."""
    placements = getattr(gate_up, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(
            f"moe_experts takes whole experts, got gate_up as {placements}: use liger_like.parallel.expert_parallel"
        )
    dims = {dim: dim for dim in range(x.dim() - 1)}
    return {"x": dims, "index": dims, "weights": dims}


@on_shards(_tokens)
def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, act: str = "silu", limit: float | None = None, alpha: float | None = None,
    transposed: bool = False, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return for each row of ``x`` [..., H] the weighted sum of its experts' gated MLPs, [..., H] in x.dtype.

    ``gate_up`` [E, 2I, H] holds the rows of gate, then those of up; ``down`` is [E, H, I]. ``transposed``: they are
    [E, H, 2I] and [E, I, H]. ``interleaved``: gate and up take turns along 2I. ``gate_up_bias`` [E, 2I], ``down_bias``
    [E, H]. Row t goes to the experts ``index[t]`` [..., K], int32 or int64 and distinct, with the ``weights`` [..., K]
    of any floating dtype. An id outside [0, E) stands for no expert: it adds nothing, and its weight's gradient is 0.

    An expert computes down(act(gate) * up) with ``act`` "silu", "gelu" or "gelu_tanh". ``limit`` clamps gate from above
    and up on both sides before. With ``alpha`` the unit is (up + 1) * gate * sigmoid(alpha * gate), as in GPT-OSS.

    All tensors but index are differentiable. The backward keeps x and z = x W1, and repeats bit for bit; nothing waits
    for the GPU. x is cast to the dtype of the experts; under autocast x and
    the experts are cast. Kernels take bf16, fp16
    and fp32; other dtypes and devices run the plain-torch reference, a loop over the experts.

    Raises TypeError if a tensor is not floating point, or index not an integer, or if the experts' dtypes differ,
    ValueError for shapes, devices and options that do not fit. See SonicMoE, arXiv:2512.14080.
    """
    gate = checked_gate(act, limit, alpha, transposed, interleaved)
    check_experts(x, gate_up, down, gate_up_bias, down_bias, transposed)
    check_routing(x, index, weights)
    dtype = autocast_dtype(gate_up) or gate_up.dtype
    operands = (None if t is None else t.to(dtype) for t in (x, gate_up, down, gate_up_bias, down_bias))
    rows, gate_up, down, gate_up_bias, down_bias = operands
    if not (x.is_meta or use_kernel(rows)):
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return moe_experts_ref(rows, gate_up, down, index, weights, **biases, **gate._asdict()).to(x.dtype)
    T = x.shape[:-1].numel()
    rows, index, weights = (t.reshape(T, t.shape[-1]) for t in (rows, index, weights))
    out = _run(rows, gate_up, down, gate_up_bias, down_bias, index, weights, gate)
    return out.to(x.dtype).view(x.shape)
