"""A gated linear unit and the linear layer after it, linear(act(gate) * up), without keeping the input of that layer.

The backward computes act(gate) * up again together with the gradients of gate and up: six readings and writings of that
size where five are needed, and one tensor less to keep.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_like.ops.few_rows import gated
from liger_like.ops.glu import GLUS, bwd_outputs, check_halves, glu_backward, glu_fwd
from liger_like.runtime.autograd import apply, is_untransformed, once_differentiable
from liger_like.runtime.registry import LIBRARY, op
from liger_like.runtime.support import autocast_dtype, has_known_size, is_local, unhooked, use_kernel

OLD_DYNAMO = torch.__version__ < "2.12"  # it takes torch.compiler.is_exporting() for True wherever it traces
LARGE = 1 << 26  # bytes of ``gate``, from which on the memory of a compiled step matters


@op(
    "glu_bwd_y_for_dy(Tensor(a!) dy, Tensor gate, Tensor? up, str act, bool[2] needs) -> (Tensor dgate, Tensor dup)",
    bwd_outputs,
    inlined=True,
    replayed=True,
)
def _glu_bwd_y_for_dy(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients, and overwrite ``dy`` with y."""
    return glu_backward(dy, gate, up, act, needs, True)


def _linear_outputs(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return gate.new_empty(*gate.shape[:-1], weight.shape[0])


@op(
    "glu_linear_fwd(Tensor gate, Tensor? up, Tensor weight, Tensor? bias, str act) -> Tensor",
    _linear_outputs,
    flops=lambda gate, up, weight, *_: 2 * gate.shape[:-1].numel() * weight.numel(),
    inlined=True,
)
def _glu_linear_fwd(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Compute linear(act(gate) * up) as a named op, so that a checkpoint policy need not save its output.

    Policies save the outputs of matrix products. Most layers only add this output to the residual, so no backward
    reads it.
    """
    return nn.functional.linear(glu_fwd(gate, up, act), weight, bias)


class _GLULinear(torch.autograd.Function):
    """Autograd node that saves the operands of linear(act(gate) * up), and returns the result if ``values``.

    In a checkpoint it returns an empty tensor of that shape, and ``_GLULinearValues`` computes the values afterwards. A
    recomputation stops once all saved tensors are restored, so it skips the product and act(gate) * up.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str, values: bool
    ) -> Tensor:
        _save(ctx, (gate, up, weight, bias, act), None)
        if values:
            return _glu_linear_fwd(gate, up, weight, bias, act)
        return gate.new_empty(()).expand(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        needs = list(ctx.needs_input_grad)
        y = torch.matmul(dout, weight)  # holds dy here; the next line overwrites it with y
        dgate, dup = _glu_bwd_y_for_dy(y, gate, up, ctx.act, needs[:2])
        rows = dout.reshape(gate.shape[:-1].numel(), weight.shape[0])
        dweight = torch.mm(rows.t(), y.view(-1, weight.shape[1]))
        dbias = rows.sum(0) if needs[3] else None
        others = (None,) * (len(needs) - 4)
        return dgate if needs[0] else None, dup if needs[1] else None, dweight, dbias, *others


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    gate, up, weight, _, ctx.act = inputs
    ctx.save_for_backward(gate, up, weight)


_OP = torch.ops.liger_like.glu_linear_fwd.default
torch.library.register_autograd(_OP, _GLULinear.backward, setup_context=_save, lib=LIBRARY)


class _GLULinearValues(torch.autograd.Function):
    """Autograd node that computes linear(act(gate) * up) and passes its gradient on to ``_GLULinear``."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str
    ) -> Tensor:
        return _glu_linear_fwd(gate, up, weight, bias, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        return dout, None, None, None, None, None


def glu_linear(act: str, linear: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return ``linear(act(gate) * up)`` for a key ``act`` of GLUS, without saving the linear layer's input.

    The backward recomputes that input in the kernel of the gradients of gate and up. This moves 6 tensors instead of 5
    and saves one tensor less. A linear layer that is not a plain trained ``nn.Linear`` is called as it is.
    """
    exporting = torch.compiler._is_exporting_flag if OLD_DYNAMO else torch.compiler.is_exporting()
    compiling = torch.compiler.is_compiling() and torch.is_grad_enabled() and not exporting
    wanted = torch.is_grad_enabled() and (not compiling or (is_untransformed() and _is_large(gate)))
    if not (wanted and use_kernel(gate) and _is_plain(linear, gate)):
        # the partitioner saves the input of a product, unless a checkpoint says to recompute that input
        recomputed = compiling and is_untransformed()  # transforms refuse checkpoints
        glu = partial(checkpoint, GLUS[act], use_reentrant=False) if recomputed else GLUS[act]
        return linear(glu(gate, up))
    check_halves(gate, up)
    operands = gate, up, linear.weight, linear.bias
    if torch.compiler.is_compiling():  # exports, too: they hold an op with its gradients
        return apply(_GLULinear, *operands, act, op=_OP)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # not in a checkpoint
        return apply(_GLULinear, *operands, act, True)
    kept = apply(_GLULinear, *operands, act, False)
    return apply(_GLULinearValues, kept, *(None if t is None else t.detach() for t in operands), act)


def gated_mlp(act: str, gate: Any, up: Any, down: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``down(act(gate(x)) * up(x))`` for a key ``act`` of GLUS; few rows take one kernel before down."""
    y = gated(act, x, gate, up)
    return glu_linear(act, down, gate(x), up(x)) if y is None else down(y)


def _is_large(gate: Tensor) -> bool:
    """Return True for at least LARGE bytes, for which a compiled graph launches the kernels.

    Inductor's own kernel of the backward takes new memory for each of its three results, instead of that of ``dy``.
    """
    return has_known_size(gate) and gate.numel() * gate.element_size() >= LARGE


def _is_plain(linear: Any, x: Tensor) -> bool:
    """True for an unhooked ``nn.Linear`` that trains, on local tensors of one dtype, without autocast."""
    if type(linear) is not nn.Linear or not unhooked(linear):
        return False
    weight = linear.weight
    plain = weight.requires_grad and is_local(weight) and is_local(x)
    return plain and weight.dtype == x.dtype and not autocast_dtype(x)
