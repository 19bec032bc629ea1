"""A gated MLP, down(act(gate(x)) * up(x)), a tile of tokens at a time, without keeping more than x for the backward.

The intermediate tensors [T, I] and their gradients exist for one tile. The backward computes gate and up again. Sums of
weight gradients over tiles are in fp32 and are rounded once, so that each weight gets one gradient as exact as that of
a single product. Without a checkpoint around it, this costs the products of gate and up once more; within one, the
recomputation of the checkpoint stops before the products, so that they are computed as often as without tiles.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_like.ops.glu import glu_fwd
from liger_like.ops.glu_linear import _glu_bwd_y_for_dy
from liger_like.ops.losses.products import addmm, even_step
from liger_like.runtime.autograd import is_forward_only, once_differentiable
from liger_like.runtime.registry import op
from liger_like.runtime.support import autocast_dtype, is_local, unhooked, use_kernel

TILE = 8192  # tokens: products of fewer are slower, and more take memory


def _tiles(T: int) -> Iterator[slice]:
    """Yield equal tiles of ``T`` tokens, of at most TILE."""
    rows = even_step(T, TILE)
    return (slice(start, min(start + rows, T)) for start in range(0, T, rows))


def _outputs(x: Tensor, gate: Tensor, gate_bias: Any, up: Any, up_bias: Any, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], down.shape[0])


def _flops(x: Tensor, gate: Tensor, gate_bias: Any, up: Tensor | None, up_bias: Any, down: Tensor, *_: Any) -> int:
    weights = gate.numel() + down.numel() + (0 if up is None else up.numel())
    return 2 * x.shape[:-1].numel() * weights


@op(
    "tiled_mlp_fwd(Tensor x, Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias, Tensor down, "
    "Tensor? down_bias, str act) -> Tensor",
    _outputs,
    flops=_flops,
)
def _tiled_mlp_fwd(
    x: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    act: str,
) -> Tensor:
    """Compute the MLP as a named op, so that a checkpoint policy saves none of its products."""
    out = _outputs(x, gate, gate_bias, up, up_bias, down)
    x, rows = x.reshape(-1, x.shape[-1]), out.view(-1, down.shape[0])
    for tile in _tiles(len(x)):
        y = glu_fwd(*_halves(x[tile], gate, gate_bias, up, up_bias), act)
        if down_bias is None:
            torch.mm(y, down.t(), out=rows[tile])
        else:
            torch.addmm(down_bias, y, down.t(), out=rows[tile])
        del y  # before the next tile's tensors
    return out


def _halves(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None, up: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the inputs of the gated unit; packed if ``up`` is None."""
    return nn.functional.linear(x, gate, gate_bias), None if up is None else nn.functional.linear(x, up, up_bias)


class _Sums:
    """Sums over tiles of the gradients of a layer's weight and bias, in fp32."""

    def __init__(self, weight: Tensor, needs: tuple[bool, bool]) -> None:
        self.weight, self.needs, self.begun = weight, needs, False
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dw = weight.new_empty(weight.shape, dtype=wide) if needs[0] else None
        self.db = weight.new_zeros(weight.shape[0], dtype=wide) if needs[1] else None

    def add(self, dout: Tensor, x: Tensor) -> None:
        """Add the gradients of the rows ``x``, whose outputs have the gradient ``dout``."""
        if self.dw is not None:
            addmm(self.dw, dout.t(), x, self.begun)
        if self.db is not None:
            self.db += dout.sum(0, dtype=self.db.dtype)
        self.begun = True

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients in the dtype of the weight."""
        dw, db = ((None if t is None else t.to(self.weight.dtype)) for t in (self.dw, self.db))
        return dw, db


class _TiledMLP(torch.autograd.Function):
    """Autograd node that saves x and the weights of the MLP, and returns the result if ``values``.

    In a checkpoint it returns an empty tensor of that shape, and ``_TiledMLPValues`` computes the values afterwards:
    the recomputation then stops before the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        gate_bias: Tensor | None,
        up: Tensor | None,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        act: str,
        values: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, gate_bias, up, up_bias, down)
        ctx.act = act
        if values:
            return _tiled_mlp_fwd(x, gate, gate_bias, up, up_bias, down, down_bias, act)
        return x.new_empty(()).expand(*x.shape[:-1], down.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, gate, gate_bias, up, up_bias, down = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows, dout = x.reshape(-1, x.shape[-1]), dout.reshape(-1, down.shape[0])
        dx = torch.empty_like(rows) if needs[0] else None
        of_gate, of_down = _Sums(gate, needs[1:3]), _Sums(down, needs[5:7])
        of_up = None if up is None else _Sums(up, needs[3:5])
        for tile in _tiles(len(rows)):
            halves = _halves(rows[tile], gate, gate_bias, up, up_bias)
            y = torch.mm(dout[tile], down)  # holds dy here; the next line overwrites it with y
            dgate, dup = _glu_bwd_y_for_dy(y, *halves, ctx.act, [True, up is not None])
            del halves
            of_down.add(dout[tile], y)
            of_gate.add(dgate, rows[tile])
            if of_up is not None:
                of_up.add(dup, rows[tile])
            if dx is not None:
                torch.mm(dgate, gate, out=dx[tile])
                if up is not None:
                    dx[tile].addmm_(dup, up)
            del y, dgate, dup
        of_both = (*of_gate.results(), *(of_up.results() if of_up is not None else (None, None)))
        return None if dx is None else dx.view_as(x), *of_both, *of_down.results(), None, None


class _TiledMLPValues(torch.autograd.Function):
    """Autograd node that computes the MLP and passes its gradient on to ``_TiledMLP``."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, *operands: Any) -> Tensor:
        return _tiled_mlp_fwd(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        return dout, *(None,) * 8


def tiled_mlp(
    act: str, gate: nn.Module, up: nn.Module | None, down: nn.Module, x: Tensor, untiled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``untiled(x)``, which is down(act(gate(x)) * up(x)), a tile of tokens at a time.

    ``act`` is a key of GLUS. ``up`` None: ``gate`` is packed. ``untiled`` itself runs for few tokens, in compiled
    graphs, and where the layers are not plain ``nn.Linear``.
    """
    layers = [layer for layer in (gate, up, down) if layer is not None]
    if torch.compiler.is_compiling() or x.shape[:-1].numel() <= TILE or not use_kernel(x):
        return untiled(x)
    if not all(is_plain(layer, x) for layer in layers):
        return by_modules(layers, x, untiled)
    dtype = autocast_dtype(x) or x.dtype
    pairs = ((None, None) if layer is None else (layer.weight, layer.bias) for layer in (gate, up, down))
    operands = [None if t is None else t.to(dtype) for t in (x, *(t for pair in pairs for t in pair))]
    if is_forward_only():
        return _tiled_mlp_fwd(*operands, act)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # not in a checkpoint
        return _TiledMLP.apply(*operands, act, True)
    kept = _TiledMLP.apply(*operands, act, False)
    return _TiledMLPValues.apply(kept, *(None if t is None else t.detach() for t in operands), act)


def by_modules(layers: list[nn.Module], x: Tensor, untiled: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``untiled(x)`` through a checkpoint for each tile, if ``are_tileable``, else at once."""
    if not (are_tileable(layers) and is_local(x)):
        return untiled(x)
    rows = x.reshape(-1, x.shape[-1])
    parts = [checkpoint(untiled, rows[tile], use_reentrant=False) for tile in _tiles(len(rows))]
    out = torch.cat(parts)
    return out.view(*x.shape[:-1], out.shape[-1])


def are_tileable(layers: list[nn.Module]) -> bool:
    """Return True if ``layers`` have no hooks, and train local weights in fp32 alone, as adapters are.

    Hooks may gather weights, for each tile anew. Sums of gradients over tiles are exact enough in fp32.
    """
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    local = all(is_local(p) and p.dtype == torch.float32 for p in trained)
    return local and all(map(unhooked, layers))


def is_plain(layer: Any, x: Tensor) -> bool:
    """Return True for an unhooked ``nn.Linear`` on local tensors, of one dtype unless autocast is on."""
    if type(layer) is not nn.Linear or not unhooked(layer):
        return False
    weight = layer.weight
    return is_local(weight) and is_local(x) and (weight.dtype == x.dtype or autocast_dtype(x) is not None)
