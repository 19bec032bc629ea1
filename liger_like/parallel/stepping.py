"""The optimizer's step within the backward: each gradient is used, and freed, as soon as it is complete."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_like.runtime.checks import require_type

Optimizer = torch.optim.Optimizer


def step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> dict[str, Optimizer]:
    """Update each parameter of ``model`` in the backward, once its gradient is complete, and free that gradient.

    Gradients then take the memory of the largest ones, not of all. ``make_optimizer`` is called for each parameter that
    trains, with a list of it alone, and returns its optimizer. Returns these optimizers by the parameter's name: a
    schedule changes the learning rate of each, and a checkpoint saves each. Updates are those of one optimizer of all
    parameters, bit for bit, if that optimizer treats each parameter by itself.

    Each backward is a step, and no gradient is left after it. Do not call ``step``, accumulate gradients over several
    backwards, clip them by their total norm, or scale the loss by a ``GradScaler``. Under FSDP2 shard first: gradients
    are complete once they are reduced. Checkpoints must have use_reentrant=False, else a parameter that two of them
    share is updated twice.

    Raises ValueError if no parameter trains, if one has a gradient already, or for a ``model`` in
    DistributedDataParallel or FSDP1, which reduce gradients after the step; and RuntimeError for a second call. The
    backward raises RuntimeError if a gradient is left from before, as by DistributedDataParallel around ``model``.
    """
    require_type("model", model, nn.Module)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(f"model must be sharded by fully_shard or not at all, got {type(module).__name__}")
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
        p._liger_like_optimizer = optimizers[name]  # type: ignore[attr-defined]  # hooks that hold it are never freed
        p.register_hook(_fresh(name, p))  # type: ignore[no-untyped-call]
        p.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]
    return optimizers


def _fresh(name: str, p: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def check(_: torch.Tensor) -> None:
        if p.grad is not None:
            raise RuntimeError(
                f"the gradient of {name} is left from before this backward: "
                "do not wrap the model in DistributedDataParallel, nor set gradients"
            )

    return check


def _step(p: Any) -> None:
    p._liger_like_optimizer.step()
    p._liger_like_optimizer.zero_grad()
