"""What RMSNorm and LayerNorm have in common: modules that normalise the last dimension."""

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
NO_KERNEL = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


class Norm(Recogniser):
    """Modules whose forward has the form of one of ``patterns``.

    Its attributes play the parts "weight", "bias" (both [N] or None), "eps", "shape" (one dimension) and "size" (of the
    groups that are normalised each).
    """

    options = ("norm",)
    named: str
    patterns: tuple[Callable[..., Tensor], ...]
    # by pattern, a function of the forward's inputs, weight, bias and eps. Constants are in code rather than in data,
    # which torch.compile would take for inputs once two models differ in them
    kernels: dict[str, Callable[..., Tensor]]

    def looks_like(self, module: nn.Module) -> bool:
        """By name, without a part that is one."""
        return _is_named(self.named, module) and not any(_is_named("norm", part) for part in module.children())

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """The name of the pattern, and what it is without."""
        if isinstance(module, NO_KERNEL):
            raise NothingToDoError("normalises no last dimension")
        pattern, part = match(type(module).forward, type(module), self.patterns)
        values: dict[str, Any] = {role: getattr(module, name, None) for role, name in part.items()}
        for role in VECTORS:
            if values.get(role) is not None and values[role].dim() != 1:
                raise UnrecognisedError(f"needs a {role} [N], has {[*values[role].shape]}")
        if "eps" in part and not isinstance(values["eps"], int | float):
            raise UnrecognisedError("needs a number as eps")
        dimensions = len(values["shape"]) if "shape" in part else 1
        if dimensions != 1:
            raise UnrecognisedError(f"normalises {dimensions} dimensions")
        if values.get("act", "silu") != "silu":
            raise UnrecognisedError(f"no kernel for the activation {values['act']}")
        return ", ".join((pattern, *(f"no {role}" for role in VECTORS if role in part and values[role] is None)))

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Its forward."""
        pattern, part = match(cls.forward, cls, self.patterns)
        weight, bias, eps = (part.get(role, "_") for role in (*VECTORS, "eps"))
        kernel, names = self.kernels[pattern], [*inspect.signature(cls.forward).parameters][1:]
        more = [part[role] for role in ("size",) if role in part]

        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            inputs = *args, *(kwargs.get(name) for name in names[len(args) :])
            own = getattr(self, weight, None), getattr(self, bias, None), getattr(self, eps, 0.0)
            return kernel(*inputs, *own, *(getattr(self, name) for name in more))

        return {"forward": forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """A norm over 8 features, otherwise as ``module``; it has a parameter in any case, for its dtype."""
        cls = type(module)
        _, part = match(cls.forward, cls, self.patterns)
        attributes = {name: getattr(module, name, None) for name in part.values()}
        sized = {name: random_parameter(8) for name, value in attributes.items() if isinstance(value, Tensor)}
        own = {"eps": 1e-3, "shape": (8,), "size": 4}
        sized |= {part[role]: value for role, value in own.items() if role in part}  # type: ignore[misc]
        return bare(cls, **attributes | sized, empty=random_parameter(0))

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Six rows for each input."""
        _, part = match(type(module).forward, type(module), self.patterns)
        vectors = [getattr(module, part[role], None) for role in VECTORS if role in part]
        parameters = tuple(vector for vector in vectors if vector is not None)
        like = next(module.parameters(), torch.empty(0))
        size = parameters[0].numel() if parameters else (*getattr(module, part.get("shape", ""), (8,)),)[0]
        count = len(inspect.signature(type(module).forward).parameters) - 1
        inputs = tuple(random_like(like, 2, 3, size) for _ in range(count))
        original, replacement = type(module).forward.__get__(module), methods["forward"].__get__(module)
        return Trial(original, replacement, inputs, parameters)


def _is_named(pattern: str, module: nn.Module) -> bool:
    return re.search(pattern, type(module).__name__, re.IGNORECASE) is not None
