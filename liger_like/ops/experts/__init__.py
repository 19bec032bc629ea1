"""Experts of a mixture: out_t = sum_k w_tk (h_tk W2_e + b2_e), with h = act(gate) * up, [gate | up] = x_t W1_e + b1_e
and e = index[t, k]   (Shazeer et al., arXiv:1701.06538; SonicMoE, arXiv:2512.14080)

x and out [..., H], index and weights [..., K], gate_up [E, 2I, H], down [E, H, I]. Products take the dtype of the
experts, all other maths are in fp32; z = [gate | up], h, h W2 and the gradients are rounded to that dtype.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_like.ops.experts.backward import moe_depth_product, moe_down_bwd, moe_sum_rows
from liger_like.ops.experts.checks import Gate, check_experts, check_routing, checked_gate
from liger_like.ops.experts.choice import sorts_rows
from liger_like.ops.experts.forward import moe_combine, moe_gate_up, moe_rows_times, moe_spread
from liger_like.ops.experts.lora import Lora, Scales, checked_lora, each_lora, factors, moe_low_rank, parts_of, turned
from liger_like.ops.experts.routing import Routing, moe_rows
from liger_like.ops.experts.tiles import tile_rows
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.layout import with_stride
from liger_like.runtime.registry import on_shards, together
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


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, lora: Lora | None) -> Tensor:
    y = nn.functional.linear(x, w, bias)
    if lora is None:
        return y
    a, b, scale = lora
    return y + scale * nn.functional.linear(nn.functional.linear(x, a), b)


def moe_experts_ref(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, gate_up_lora: Lora | None = None, down_lora: Lora | None = None,
    act: str = "silu", limit: float | None = None, alpha: float | None = None, transposed: bool = False,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``moe_experts`` in plain torch, for operands of one dtype; this defines the op."""
    gate, acc = Gate(act, limit, alpha, transposed, interleaved), torch.promote_types(x.dtype, torch.float32)
    T, E = math.prod(x.shape[:-1]), len(gate_up)  # Size.numel() makes an exported size a constant
    rows, index, weights = (t.reshape(T, t.shape[-1]) for t in (x, index, weights))
    out = torch.zeros_like(rows, dtype=acc)
    matrices = ((w.mT if transposed else w).unbind() for w in (gate_up, down))
    biases = ([None] * E if b is None else b.unbind() for b in (gate_up_bias, down_bias))
    loras = (each_lora(lora, E, x.dtype) for lora in (gate_up_lora, down_lora))
    for e, (w1, w2, b1, b2, lora1, lora2) in enumerate(zip(*matrices, *biases, *loras, strict=True)):
        token, k = (index == e).nonzero(as_tuple=True)
        h = _gated(_linear(rows[token], w1, b1, lora1), gate).to(x.dtype)
        y = _linear(h, w2, b2, lora2).to(acc)
        out = out.index_add(0, token, y * weights[token, k, None].to(acc))
    return out.to(x.dtype).view(x.shape)


class Operands(NamedTuple):
    """The tensors that may have gradients. ``a1`` [E, R, in] and ``b1`` [E, out, R] are the factors of gate_up's
    adapter, ``a2`` and ``b2`` those of down's (see ``lora``).
    """

    x: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any
    weights: Any
    a1: Any
    b1: Any
    a2: Any
    b2: Any


COUNT = 6 + len(Operands._fields)  # the arguments of ``_Experts``, whose results follow unless it is compiled


def _in_order(x: Tensor, routing: Routing, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return x [T, H] and the rows to gather, or the rows themselves [S, H] and None where products want them so."""
    return (moe_spread(x, routing.pos, len(routing.row)), None) if sorts_rows(x, weights) else (x, routing.row)


class _Experts(torch.autograd.Function):
    """Autograd node that computes z and h, saves the operands, and returns the output, or without ``whole`` an empty
    tensor of its shape.

    ``_ExpertsValues`` then runs afterwards and computes the values. A checkpoint's recomputation stops once all saved
    tensors are restored, so it skips the product with down.
    """

    @staticmethod
    def launch(
        index: Tensor, gate: Gate, scales: Scales, keep_z: bool, S: int, whole: bool, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        """Return row, offsets, tiles and pos of the routing, z and u, then the output or h."""
        t = Operands(*tensors)
        routing, topk = Routing(*moe_rows(index, len(t.gate_up), tile_rows(t.x.dtype), S)), index.shape[1]
        rows, order = _in_order(t.x, routing, t.gate_up)
        u = None if t.a1 is None else moe_low_rank(rows, t.a1, order, *routing[1:3], topk, scales.gate_up)
        v = turned(t.b1)
        z, h = moe_gate_up(rows, t.gate_up, t.gate_up_bias, u, v, order, *routing[1:3], topk, *gate, keep_z)
        if whole:
            del rows
            (h,) = _ExpertsValues.launch(t.x, h, *_second_operands(t), *routing[1:], gate.transposed, scales.down)
        return *routing, z, u, h

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        index, gate, scales, _, _, whole, *tensors = args[:COUNT]
        *routing, z, u, h = _Experts.launch(*args) if torch.compiler.is_compiling() else args[COUNT]
        t = Operands(*tensors)
        ctx.save_for_backward(*t._replace(gate_up_bias=None), index, z, u, *routing)
        ctx.gate, ctx.scales = gate, scales
        if whole:
            return h
        ctx.mark_non_differentiable(h, *routing)
        ctx.set_materialize_grads(False)
        return t.x.new_empty(()).expand(t.x.shape), h, *routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: None) -> Any:
        needs = ctx.needs_input_grad
        grads = Operands(*_gradients(dout, *ctx.saved_tensors, *ctx.scales, *ctx.gate, [*needs[6:COUNT]]))
        grads = grads._replace(b1=turned(grads.b1), b2=turned(grads.b2))
        return *(None,) * 6, *grads, *(None,) * (len(needs) - COUNT)


@together
def _gradients(dout: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands that the last argument names, of B the transposes, else None."""
    *args, needs = args
    n = len(Operands._fields)
    t, (index, z, u, *sorted_rows), needs = Operands(*args[:n]), args[n : n + 7], Operands(*needs)
    routing, scales, gate = Routing(*sorted_rows), Scales(*args[n + 7 : n + 9]), Gate(*args[n + 9 :])
    row, offsets, tiles, pos = routing
    dout, _ = with_stride(dout)  # several kernels read it: a copy, if it takes one, is made once
    topk, transposed = pos.shape[1], gate.transposed
    needs_dz = needs.x or needs.gate_up or needs.gate_up_bias or needs.a1 or needs.b1
    wanted = [needs_dz, needs.down or needs.a2 or needs.b2, needs.weights]
    grads: dict[str, Tensor] = {}
    if any(wanted):
        rows, order = _in_order(dout, routing, t.down)
        v = None if t.b2 is None else moe_low_rank(rows, turned(t.b2), order, offsets, tiles, topk, scales.down)
        in_order = rows if order is None else None
        dz, wh, dweights = moe_down_bwd(
            dout, in_order, t.down, t.down_bias, v, t.a2, index, t.weights, z, *routing, *gate, wanted
        )
        if needs.weights:
            grads["weights"] = dweights
        if needs.down:
            grads["down"] = moe_depth_product(wh, rows, order, offsets, topk, not transposed)
        if needs.a2:
            grads["a2"] = moe_depth_product(v, wh, None, offsets, 1, False)
        if needs.b2:
            u2 = moe_low_rank(wh, t.a2, None, offsets, tiles, 1, scales.down)
            grads["b2"] = moe_depth_product(u2, rows, order, offsets, topk, False)
        del wh, rows, in_order
        if needs.gate_up:
            rows, order = _in_order(t.x, routing, t.gate_up)
            grads["gate_up"] = moe_depth_product(dz, rows, order, offsets, topk, transposed)
            del rows
        if needs.gate_up_bias:
            grads["gate_up_bias"] = moe_sum_rows(dz, None, row, offsets, topk)
        if needs.b1:
            grads["b1"] = moe_depth_product(u, dz, None, offsets, 1, False)
        v = None
        if t.b1 is not None and (needs.x or needs.a1):
            v = moe_low_rank(dz, turned(t.b1), None, offsets, tiles, 1, scales.gate_up)
        if needs.a1:
            grads["a1"] = moe_depth_product(v, t.x, row, offsets, topk, False)
        if needs.x:
            dx = moe_rows_times(dz, t.gate_up, None, v, t.a1, offsets, tiles, not transposed)
            grads["x"] = moe_combine(dx, None, pos)
    if needs.down_bias:
        grads["down_bias"] = moe_sum_rows(dout, t.weights, row, offsets, topk)
    return tuple(map(grads.get, Operands._fields))


class _ExpertsValues(torch.autograd.Function):
    """Autograd node that computes the output, and passes its gradient on to ``_Experts``."""

    inputs = 1  # the others need no edge

    @staticmethod
    def launch(
        kept: Tensor, h: Tensor, down: Tensor, down_bias: Tensor | None, weights: Tensor, a2: Tensor | None,
        b2: Tensor | None, offsets: Tensor, tiles: Tensor, pos: Tensor, transposed: bool, scale: float,
    ) -> tuple[Tensor]:  # fmt: skip
        u = None if a2 is None else moe_low_rank(h, a2, None, offsets, tiles, 1, scale)
        y = moe_rows_times(h, down, down_bias, u, turned(b2), offsets, tiles, transposed)
        return (moe_combine(y, weights, pos),)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        (out,) = _ExpertsValues.launch(*args) if torch.compiler.is_compiling() else args[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        return dout, *(None,) * (len(ctx.needs_input_grad) - 1)


def _second_operands(t: Operands) -> tuple[Tensor | None, ...]:
    return t.down, t.down_bias, t.weights, t.a2, t.b2


def _tokens(x: Tensor, gate_up: Any, *args: Any, **kwargs: Any) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: those of the tokens. Each rank needs all experts.

    An adapter would get the gradient of a rank's tokens only, since ``run_on_shards`` sees no factors.
    """
    for name in ("gate_up_lora", "down_lora"):
        if kwargs.get(name) is not None:
            raise TypeError(f"{name} must be None beside DTensors: give local tensors (to_local())")
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
    down_bias: Tensor | None = None, gate_up_lora: Lora | None = None, down_lora: Lora | None = None,
    act: str = "silu", limit: float | None = None, alpha: float | None = None, transposed: bool = False,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return for each row of ``x`` [..., H] the weighted sum of its experts' gated MLPs, [..., H] in x.dtype.

    ``gate_up`` [E, 2I, H] holds the rows of gate, then those of up; ``down`` is [E, H, I]. ``transposed``: they are
    [E, H, 2I] and [E, I, H]. ``interleaved``: gate and up take turns along 2I. ``gate_up_bias`` [E, 2I], ``down_bias``
    [E, H]. Row t goes to the experts ``index[t]`` [..., K], int32 or int64 and distinct, with the ``weights`` [..., K]
    of any floating dtype. An id outside [0, E) stands for no expert: it adds nothing, and its weight's gradient is 0.

    An expert computes down(act(gate) * up) with ``act`` "silu", "gelu" or "gelu_tanh". ``limit`` clamps gate from above
    and up on both sides before; infinity is no limit. With ``alpha`` the unit is (up + 1) * gate *
    sigmoid(alpha * gate), as in GPT-OSS.

    ``gate_up_lora`` (A, B, scale) adds scale B A [E, 2I, H] to ``gate_up``, with A [E, R, H] and B [E, 2I, R], and
    ``down_lora`` to ``down``, with A [E, R, I] and B [E, H, R], whether ``transposed`` or not. The sums are not made:
    neither they nor their gradients take memory. The factors may have any floating dtype.

    All tensors but index are differentiable. The backward keeps x and z = x W1, and repeats bit for bit; nothing waits
    for the GPU. x and the adapters are cast to the dtype of the experts; under autocast all are cast. Kernels take
    bf16, fp16 and fp32; other dtypes and devices run the plain-torch reference, a loop over the experts.

    Raises TypeError if a tensor is not floating point, or index not an integer, or if the experts' dtypes differ,
    ValueError for shapes, devices and options that do not fit. See SonicMoE, arXiv:2512.14080.
    """
    biases, loras = (gate_up_bias, down_bias), (gate_up_lora, down_lora)
    return run_experts(x, gate_up, down, index, weights, (act, limit, alpha, transposed, interleaved), biases, loras)


def run_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate: tuple[Any, ...],
    biases: tuple[Tensor | None, Tensor | None], loras: tuple[Lora | None, Lora | None] = (None, None),
    S: int | None = None,
) -> Tensor:  # fmt: skip
    """Return ``moe_experts``; ``S`` is the number of ids that have an expert, which takes less memory than any."""
    parts = parts_of("gate_up_lora", loras[0]), parts_of("down_lora", loras[1])
    compiled = torch.compiler.is_compiling()
    whole = not compiled and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # not in a checkpoint
    return _experts(x, gate_up, down, index, weights, *biases, *parts[0], *parts[1], *gate, S, whole)


@together
def _experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Any, b1: Any, scale1: Any, a2: Any, b2: Any, scale2: Any, act: Any, limit: Any,
    alpha: Any, transposed: Any, interleaved: Any, S: int | None, whole: bool,
) -> Tensor:  # fmt: skip
    """Return ``moe_experts``; ``whole``: as one autograd node."""
    gate = checked_gate(act, limit, alpha, transposed, interleaved)
    check_experts(x, gate_up, down, gate_up_bias, down_bias, gate.transposed)
    check_routing(x, index, weights)
    wide, H = gate_up.shape[2 if gate.transposed else 1], x.shape[-1]
    loras = (
        checked_lora("gate_up_lora", a1, b1, scale1, x, (len(down), wide, H)),
        checked_lora("down_lora", a2, b2, scale2, x, (len(down), H, wide // 2)),
    )
    dtype = autocast_dtype(gate_up) or gate_up.dtype
    given = (None if t is None else t.to(dtype) for t in (x, gate_up, down, gate_up_bias, down_bias))
    rows, gate_up, down, gate_up_bias, down_bias = given
    if not (x.is_meta or use_kernel(rows)):
        options = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, **gate._asdict()}
        options |= {"gate_up_lora": loras[0], "down_lora": loras[1]}
        return moe_experts_ref(rows, gate_up, down, index, weights, **options).to(x.dtype)
    if x.dim() != 2:  # of two dimensions a view would be another tensor
        rows, index, weights = (t.reshape(math.prod(x.shape[:-1]), t.shape[-1]) for t in (rows, index, weights))
    adapters = (factor for lora in loras for factor in factors(lora, dtype, gate.transposed))
    operands = Operands(rows, gate_up, down, gate_up_bias, down_bias, weights, *adapters)
    scales = Scales(*(1.0 if lora is None else lora[2] for lora in loras))
    keep_z = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    out = apply(_Experts, index, gate, scales, keep_z, index.numel() if S is None else S, whole, *operands)
    if not whole:
        kept, h, _, *routing = out
        out = apply(_ExpertsValues, kept, h, *_second_operands(operands), *routing, gate.transposed, scales.down)
    out = out.to(x.dtype)
    return out if x.dim() == 2 else out.view(x.shape)
