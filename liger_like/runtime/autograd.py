"""Support of the autograd functions: one differentiation, tensors passed twice, memory that may be reused."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from liger_like.runtime.replay import applied, inputs_of

TWICE = "trying to differentiate twice: the ops of liger_like are differentiable once, so not with create_graph=True"
NO_RULES = "the ops of liger_like have no rules for the derivatives of torch.func and of forward-mode AD"


class _Once(torch.autograd.Function):
    """Identity on gradients whose own derivative raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(TWICE)


class _ReadOnce:
    """A context that reads its saved tensors once, since a checkpoint gives them out once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a second differentiation of ``backward`` raise. This costs time only under ``create_graph``.

    torch's own decorator does not connect the error with the inputs of the function: a second derivative with respect
    to these alone is silently zero. A function that computes its gradients in the forward (``ctx.grads_now``) saves no
    inputs, and raises at once.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        if getattr(ctx, "grads_now", False):
            raise RuntimeError(TWICE)
        context = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(context, *grads)
        results = results if isinstance(results, tuple) else (results,)
        given = [t for t in (*grads, *context.saved_tensors) if t is not None and t.requires_grad]
        made = [result for result in results if result is not None]
        # a linear function saves nothing: its second derivative is zero, but a sum that holds it raises
        once: Any = _Once.apply
        connected = iter(once(len(made), *made, *(given or [made[0].new_empty(0, requires_grad=True)])))
        return tuple(result if result is None else next(connected) for result in results)

    return run


class _Forgets:
    """Context of a forward that no backward follows."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = (False,) * len(args)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def is_forward_only() -> bool:
    """Return True if nothing differentiates: no backward follows, and neither a transform nor a dual level is there."""
    return not torch.is_grad_enabled() and is_untransformed()


def is_untransformed() -> bool:
    """Return True if nothing but a backward may differentiate: neither a transform nor a dual level is there."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


@torch.compiler.assume_constant_result
def _is_differentiated() -> bool:
    """Return True within torch.func.grad, torch.func.jvp and a dual level, also where torch.compile traces them."""
    levels = get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() is not TransformType.Vmap for level in levels)


def apply(function: Any, *args: Any, op: Any = None) -> Any:
    """Return ``function.apply(*args)``, or under torch.compile ``op(*args)`` if the op itself is differentiable.

    A function with ``launch(*args)`` gets its results, a tuple, as a further, last argument of its forward: later calls
    repeat the launches. A tensor as an argument would be returned as a view, which must not be modified in place.

    Without gradients the forward is called by itself, which saves host time in each step of a generation.

    A checkpoint that torch 2.11 compiles recomputes ops, but not what an autograd function computes. A repeated tensor
    argument is passed to the compiler as a view: torch 2.11 computes wrong gradients for it, and newer versions refuse
    to compile it. A graph loses derivatives of torch.func silently: there the function leaves the graph, and raises.
    """
    if not torch.compiler.is_compiling():
        if not hasattr(function, "launch"):
            return function.forward(_Forgets(args), *args) if is_forward_only() else function.apply(*args)
        inputs = inputs_of(function, args)
        if torch._C._are_functorch_transforms_active():
            return function.apply(*inputs, None)  # raises
        if is_forward_only():
            return function.forward(_Forgets(inputs), *inputs, function.launch(*args))
        return applied(function, args)
    if _is_differentiated():
        return _apply_untraced(function, *args)
    distinct: list[Any] = []
    for arg in args:
        again = isinstance(arg, Tensor) and any(arg is other for other in distinct)
        distinct.append(arg.view_as(arg) if again else arg)
    return function.apply(*distinct) if op is None else op(*distinct)


@torch.compiler.disable(reason=NO_RULES)
def _apply_untraced(function: Any, *args: Any) -> Any:
    """Run ``apply`` outside of the graph that is traced."""
    return apply(function, *args)


def is_last_backward() -> bool:
    """Return True within a backward without ``retain_graph``, which may overwrite its saved tensors.

    Traced code must not modify its saved tensors: there the result is always False.
    """
    return not (torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())
