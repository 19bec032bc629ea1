"""Fuse the load balancing loss that the forward of a mixture of experts calls by a global name.

The model's class gets a copy of its own forward that finds another function under this name. The Python module keeps
its function, so no other model changes.
"""

import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_like.ops.load_balancing import load_balancing_loss
from liger_like.patches import Trial, UnrecognisedError, attention
from liger_like.patches.rewriting import rewrapped, with_names
from liger_like.patches.trials import compare
from liger_like.runtime.support import use_kernel

NAME = "load_balancing_loss_func"
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def with_balance(forward: Any) -> Any:
    """Return ``forward`` with the loss fused, or ``forward`` itself if it calls no such loss."""
    inner = inspect.unwrap(forward)
    called = isinstance(inner, FunctionType) and NAME in inner.__code__.co_names
    function = inner.__globals__.get(NAME) if called else None
    if not isinstance(function, FunctionType) or not _agrees(function):
        return forward
    try:
        return rewrapped(forward, with_names(inner, {NAME: _fused(function)}))
    except UnrecognisedError:  # it has no source
        return forward


def _fused(original: FunctionType) -> Any:
    """Return a function that runs ``load_balancing_loss``, or ``original`` if its arguments do not fit the op.

    Within ``context_parallel`` it returns the part of this process.
    """

    def loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        layers, mask = gate_logits if isinstance(gate_logits, tuple) else (), attention_mask
        if layers and attention.context is not None:
            return attention.context.balance(layers, top_k)
        kinds = {(z.shape, z.dtype, z.device, isinstance(z, DTensor)) for z in layers}
        if len(kinds) == 1:
            ((shape, _, device, sharded),) = kinds
            fits = len(shape) == 2 and shape[-1] == num_experts and not sharded and use_kernel(layers[0])
            if fits and (mask is None or mask.numel() == shape[0]):
                return load_balancing_loss(layers, top_k, mask=None if mask is None else mask.detach().to(device))
        return original(gate_logits, num_experts, top_k, attention_mask)

    return loss


@functools.cache
def _agrees(function: FunctionType) -> bool:
    """Return True if ``function`` computes ``load_balancing_loss``, in value and gradients, with and without a mask."""
    if [*inspect.signature(function).parameters] != PARAMETERS:
        return False
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.default_generator.manual_seed(0)
        logits = tuple(torch.randn(6, 5, device="cpu", dtype=torch.float32) for _ in range(3))
        for mask in (None, torch.tensor([[0, 1, 1], [1, 0, 1]], device="cpu")):
            trial = Trial(
                lambda *layers, mask=mask: function(layers, 5, 2, mask),
                lambda *layers, mask=mask: load_balancing_loss(layers, 2, mask=mask),
                logits,
                depth=len(logits) * 6 * 5,
            )
            try:
                compare(trial, "the load balancing loss")
            except Exception:  # the model's own code may raise anything; then its loss stays as it is
                return False
    return True
