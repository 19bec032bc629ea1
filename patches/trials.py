"""Compare original and replacement on the inputs of a trial."""

from typing import Any

import torch
from torch import Tensor

from liger_like.patches import Trial, UnrecognisedError
from liger_like.patches.foreign import replaced_in_torch


def compare(trial: Trial, what: str) -> float:
    """Return the largest relative difference of outputs and gradients.

    Raises UnrecognisedError if the difference is more than rounding, or if a dtype or shape differs.
    """
    errors = []
    for expected, got in zip(_results(trial.original, trial), _results(trial.replacement, trial), strict=True):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            raise UnrecognisedError(
                f"on {what} the replacement gives {got.dtype} {[*got.shape]}, not {expected.dtype} {[*expected.shape]}"
            )
        difference, norm = (got.double() - expected.double()).norm(), expected.double().norm()
        errors.append(difference / norm.clamp(min=torch.finfo(torch.float64).tiny))
    error, dtype = float(torch.stack(errors).max()), trial.inputs[0].dtype
    bound = 4 * torch.finfo(dtype).eps + trial.depth**0.5 / 4 * torch.finfo(torch.float32).eps
    if not error <= bound:  # true for a NaN, too
        reason = f"on {what} the replacement differs by {error:.1e} (relative), more than {bound:.1e}"
        raise UnrecognisedError("; ".join((reason, *replaced_in_torch())))
    return error


def _results(function: Any, trial: Trial) -> list[Tensor]:
    """Return the outputs of ``function``, and the gradients of inputs and parameters for a fixed random upstream."""
    inputs = [x.detach().requires_grad_() for x in trial.inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator("cpu").manual_seed(1)  # differs from the seed of the inputs
    upstream = [torch.randn(y.shape, generator=generator, device="cpu").to(y) for y in outputs]
    leaves = [x for x in (*inputs, *trial.parameters) if x.requires_grad]
    return [y.detach() for y in (*outputs, *torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True))]
