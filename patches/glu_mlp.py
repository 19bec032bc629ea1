"""Gated MLPs, down(act(gate(x)) * up(x)), with two projections or one packed one, and SiLU or GELU as the activation.

The projections stay modules and are called as such, so that biases, adapters and sharding hooks work as before.
"""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.glu import geglu, swiglu
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like
from liger_like.patches.forms import match


def split(self: Any, x: Tensor) -> Tensor:
    """Two projections."""
    return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def packed(self: Any, x: Tensor) -> Tensor:
    """One projection to [gate | up]."""
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(up * self.act(gate))  # type: ignore[no-any-return]


PATTERNS = (split, packed)
KERNELS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu tanh": functools.partial(geglu, approximate="tanh"),
    "geglu erf": functools.partial(geglu, approximate="none"),
}
# by the class of the live module's activation; the trial runs that very activation, so a namesake does not pass
ACTIVATIONS = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "GELUTanh": "geglu tanh", "GELUActivation": "geglu erf"}


class GLUMLP(Recogniser):
    """MLPs whose forward has the form of one of PATTERNS with an activation of ACTIVATIONS."""

    pattern = "glu_mlp"
    option = "mlp"

    def looks_like(self, module: nn.Module) -> bool:
        """Any MLP or block of experts, by name."""
        return (
            re.search("(mlp|feed_?forward|ffn|experts|moe|moe_?block)$", type(module).__name__, re.IGNORECASE)
            is not None
        )

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """The kernel that the activation of ``module`` needs."""
        _, part = match(type(module).forward, type(module), PATTERNS)
        activation = type(getattr(module, part["act"])).__name__
        if activation not in ACTIVATIONS:
            raise UnrecognisedError(f"no kernel for the activation {activation}")
        return ACTIVATIONS[activation]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Its forward."""
        form, part = match(cls.forward, cls, PATTERNS)
        kernel = KERNELS[variant]

        def split_forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = (*args, *kwargs.values())  # the parameter's name differs from family to family
            gate, up, down = getattr(self, part["gate"]), getattr(self, part["up"]), getattr(self, part["down"])
            return down(kernel(gate(x), up(x)))  # type: ignore[no-any-return]

        def packed_forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = (*args, *kwargs.values())
            return getattr(self, part["down"])(kernel(getattr(self, part["gate_up"])(x)))  # type: ignore[no-any-return]

        return {"forward": split_forward if form == "split" else packed_forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """4 features, 6 inside, and the activation of ``module``."""
        _, part = match(type(module).forward, type(module), PATTERNS)
        sizes = {"gate": (4, 6), "up": (4, 6), "gate_up": (4, 12), "down": (6, 4)}
        layers = {
            name: nn.Linear(*sizes[role], device="cpu", dtype=torch.float32)
            for role, name in part.items()
            if role != "act"
        }
        return bare(type(module), **layers, **{part["act"]: copy.deepcopy(getattr(module, part["act"]))})

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Six rows."""
        _, part = match(type(module).forward, type(module), PATTERNS)
        first = getattr(module, part.get("gate", part.get("gate_up", "")))
        parameters = tuple(module.parameters())
        x = random_like(parameters[0], 2, 3, first.in_features)
        original, replacement = type(module).forward.__get__(module), methods["forward"].__get__(module)
        return Trial(original, replacement, (x,), parameters)
