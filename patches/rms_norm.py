"""RMSNorm modules: the three ways in which Hugging Face models round weight * x / rms(x)."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.rms_norm import rms_norm
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, random_parameter
from liger_like.patches.forms import match


def llama(self: Any, x: Tensor) -> Tensor:
    """Rounds before the weight; the result has the wider dtype of x and weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * h.to(x.dtype)  # type: ignore[no-any-return]


def olmo(self: Any, x: Tensor) -> Tensor:
    """Rounds once, after the weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight * h).to(x.dtype)  # type: ignore[no-any-return]


def gemma(self: Any, x: Tensor) -> Tensor:
    """Rounds once; the weight is stored less one."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (h * (1.0 + self.weight.to(torch.float32))).to(x.dtype)  # type: ignore[no-any-return]


PATTERNS = (llama, olmo, gemma)
# constants in code rather than in data, which torch.compile would take for inputs once two models differ in them
KERNELS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "llama": lambda x, weight, eps: rms_norm(x, weight, eps, offset=0.0, casting_mode="llama"),
    "olmo": lambda x, weight, eps: rms_norm(x, weight, eps, offset=0.0, casting_mode="gemma"),
    "gemma": lambda x, weight, eps: rms_norm(x, weight, eps, offset=1.0, casting_mode="gemma"),
}


class RMSNorm(Recogniser):
    """Modules with a weight [N] and an eps whose forward has the form of one of PATTERNS."""

    pattern = "rms_norm"

    def looks_like(self, module: nn.Module) -> bool:
        """Any normalisation, by name."""
        return re.search(r"norm(\d\w*|gated)?$", type(module).__name__, re.IGNORECASE) is not None

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """The rounding: the name of the pattern."""
        variant, part = match(type(module).forward, type(module), PATTERNS)
        weight, eps = (getattr(module, part[role], None) for role in ("weight", "eps"))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, int | float):
            raise UnrecognisedError("needs a weight [N] and a number as eps")
        return variant

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Its forward."""
        _, part = match(cls.forward, cls, PATTERNS)
        weight, eps, kernel = part["weight"], part["eps"], KERNELS[variant]

        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = (*args, *kwargs.values())  # the parameter's name differs from family to family
            return kernel(x, getattr(self, weight), getattr(self, eps))

        return {"forward": forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """A norm over 8 features."""
        cls = type(module)
        _, part = match(cls.forward, cls, PATTERNS)
        return bare(cls, **{part["weight"]: random_parameter(8), part["eps"]: 1e-3})

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Six rows."""
        (weight,) = module.parameters()
        original, replacement = type(module).forward.__get__(module), methods["forward"].__get__(module)
        return Trial(original, replacement, (random_like(weight, 2, 3, *weight.shape),), (weight,))
