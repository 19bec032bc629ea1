"""The optimizer's step within the backward: each gradient is used, and freed, as soon as it is complete."""

from collections.abc import Callable

import torch
from torch import nn

Optimizer = torch.optim.Optimizer


def step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> dict[str, Optimizer]:
    """Update each parameter of ``model`` in the backward, once its gradient is complete, and free that gradient.

    Gradients then take the memory of the largest ones, not of all. ``make_optimizer`` is called for each parameter that
    trains, with a list of it alone, and returns its optimizer. Returns these optimizers by the parameter's name: a
    schedule changes the learning rate of each, and a checkpoint saves each. Updates are those of one optimizer of all
    parameters, bit for bit.

    Each backward is a step, and no gradient is left after it. Do not call ``step``, accumulate gradients over several
    backwards, or clip them by their total norm. Under FSDP2 shard first: gradients are complete once they are reduced.

    Raises ValueError if no parameter trains or one has a gradient already, and RuntimeError for a second call.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("model must have a parameter that requires a gradient, got none")
    for name, p in trained.items():
        if p.grad is not None:
            raise ValueError(f"gradients must be None before the first step, got that of {name}: call zero_grad")
        if p._post_accumulate_grad_hooks:
            raise RuntimeError(f"{name} has a hook of accumulated gradients already: call step_in_backward once")
    optimizers = {name: make_optimizer([p]) for name, p in trained.items()}
    for name, p in trained.items():
        p.register_post_accumulate_grad_hook(_stepping(optimizers[name]))  # type: ignore[no-untyped-call]
    return optimizers


def _stepping(optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step
