"""What the autograd functions of the ops share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TWICE = "trying to differentiate twice: the ops of liger_like are differentiable once, so not with create_graph=True"


class _Once(torch.autograd.Function):
    """Gradients as they are, whose derivative by the other tensors is not known."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(TWICE)


class _ReadOnce:
    """A context whose saved tensors are read once, as a checkpoint gives them out once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a second differentiation of ``backward`` raise; costs time only where a graph of the gradients is asked for.

    torch's own decorator does not connect the error with the inputs of the function: a second derivative by these alone
    is silently zero. What makes its gradients in the forward (``ctx.grads_now``) keeps no inputs, and raises at once.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if getattr(ctx, "grads_now", False):
            raise RuntimeError(TWICE)
        context = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(context, *grads)
        results = results if isinstance(results, tuple) else (results,)
        given = [t for t in (*grads, *context.saved_tensors) if t is not None and t.requires_grad]
        made = [result for result in results if result is not None]
        # a linear function has saved nothing: zero is its second derivative by its inputs, but sums of it raise
        once: Any = _Once.apply
        connected = iter(once(len(made), *made, *(given or [made[0].new_empty(0, requires_grad=True)])))
        return tuple(result if result is None else next(connected) for result in results)

    return run


def apply(function: Any, *args: Any) -> Any:
    """Return ``function.apply(*args)``; under torch.compile a tensor that is passed again is passed as a view.

    torch 2.11 computes wrong gradients for a tensor in two places, and newer versions refuse to compile it.
    """
    if not torch.compiler.is_compiling():
        return function.apply(*args)
    distinct: list[Any] = []
    for arg in args:
        again = isinstance(arg, Tensor) and any(arg is other for other in distinct)
        distinct.append(arg.view_as(arg) if again else arg)
    return function.apply(*distinct)


def is_last_backward() -> bool:
    """Within a backward: whether what it saved may be overwritten, since it runs without ``retain_graph``.

    Never so in traced code, which must not modify what it saved.
    """
    return not (torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())
