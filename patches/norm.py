"""Base recogniser of RMSNorm and LayerNorm: modules that normalise the last dimension."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.patches import (
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    bare,
    random_like,
    random_parameter,
)
from liger_like.patches.forms import match

VECTORS = ("weight", "bias")
NO_KERNEL = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.utils.parametrizations._WeightNorm)


class Norm(Recogniser):
    """Recogniser for modules whose forward has the form of one of ``patterns``.

    Its attributes have the roles "weight", "bias" (both [N] or None), "eps", "shape" (one dimension) and "size" (number
    of features in each separately normalised group).
    """

    options = ("norm",)
    named: str
    patterns: tuple[Callable[..., Tensor], ...]
    # pattern -> function of the forward's inputs, weight, bias and eps. Constants are code, not data: torch.compile
    # would turn data into graph inputs as soon as two models differ in them
    kernels: dict[str, Callable[..., Tensor]]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for modules named like this norm that contain no other norm."""
        return _is_named(self.named, module) and not any(_is_named("norm", part) for part in module.children())

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the pattern's name and the missing vectors, as in "torch_nn, no bias". Raises UnrecognisedError."""
        if isinstance(module, NO_KERNEL):
            raise NothingToDoError("does not normalise the last dimension")
        pattern, part = match(type(module).forward, type(module), self.patterns)
        values: dict[str, Any] = {role: getattr(module, name, None) for role, name in part.items()}
        for role in VECTORS:
            if values.get(role) is not None and values[role].dim() != 1:
                raise UnrecognisedError(f"its {role} must have one dimension, got shape {[*values[role].shape]}")
        if "eps" in part and not isinstance(values["eps"], int | float):
            raise UnrecognisedError("its eps is not a number")
        dimensions = len(values["shape"]) if "shape" in part else 1
        if dimensions != 1:
            raise UnrecognisedError(f"normalises {dimensions} dimensions, not one")
        if values.get("act", "silu") != "silu":
            raise UnrecognisedError(f"no kernel for the activation {values['act']}")
        return ", ".join((pattern, *(f"no {role}" for role in VECTORS if role in part and values[role] is None)))

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which calls the kernel of the pattern."""
        pattern, part = match(cls.forward, cls, self.patterns)
        weight, bias, eps = (part.get(role) for role in (*VECTORS, "eps"))
        kernel, names = self.kernels[pattern], [*inspect.signature(cls.forward).parameters][1:]
        more = [part[role] for role in ("size",) if role in part]

        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            inputs: tuple[Any, ...] = args
            if len(args) < len(names):
                inputs = *args, *(kwargs.get(name) for name in names[len(args) :])
            # a module takes microseconds to say that it lacks an attribute
            own = (
                None if weight is None else getattr(self, weight, None),
                None if bias is None else getattr(self, bias, None),
                0.0 if eps is None else getattr(self, eps, 0.0),
            )
            return kernel(*inputs, *own, *(getattr(self, name) for name in more))

        return {"forward": forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a norm over 8 features, otherwise like ``module``, with at least one parameter for its dtype."""
        cls = type(module)
        _, part = match(cls.forward, cls, self.patterns)
        attributes = {name: getattr(module, name, None) for name in part.values()}
        sized = {name: random_parameter(8) for name, value in attributes.items() if isinstance(value, Tensor)}
        own = {"eps": 1e-3, "shape": (8,), "size": 4}
        sized |= {part[role]: value for role, value in own.items() if role in part}  # type: ignore[misc]
        return bare(cls, **attributes | sized, empty=random_parameter(0))

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with six rows for each input."""
        _, part = match(type(module).forward, type(module), self.patterns)
        vectors = [getattr(module, part[role], None) for role in VECTORS if role in part]
        parameters = tuple(vector for vector in vectors if vector is not None)
        like = next(module.parameters(), torch.empty(0, device="cpu"))
        size = parameters[0].numel() if parameters else (*getattr(module, part.get("shape", ""), (8,)),)[0]
        count = len(inspect.signature(type(module).forward).parameters) - 1
        inputs = tuple(random_like(like, 2, 3, size) for _ in range(count))
        original, replacement = type(module).forward.__get__(module), methods["forward"].__get__(module)
        return Trial(original, replacement, inputs, parameters)


def _is_named(pattern: str, module: nn.Module) -> bool:
    return re.search(pattern, type(module).__name__, re.IGNORECASE) is not None
