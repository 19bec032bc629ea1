"""Recogniser for RMSNorm modules, in all the ways in which Hugging Face models round weight * x / rms(x)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.glu import swiglu
from liger_like.ops.rms_norm import rms_norm
from liger_like.patches.forms import match
from liger_like.patches.norm import Norm
from liger_like.runtime.support import unhooked

ACT2FN: Any = {}  # stands for transformers' table of that name


def llama(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds before the weight; the result has the wider dtype of x and weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * h.to(x.dtype)  # type: ignore[no-any-return]


def t5(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds before the weight, to the weight's dtype."""
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        h = h.to(self.weight.dtype)
    return self.weight * h  # type: ignore[no-any-return]


def olmo(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds once, after the weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight * h).to(x.dtype)  # type: ignore[no-any-return]


def helium(self: Any, x: Tensor) -> Tensor:
    """Match a norm that casts the weight to fp32 and rounds once, after the weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight.to(torch.float32) * h).to(x.dtype)  # type: ignore[no-any-return]


def gemma(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds once and adds 1 to the stored weight."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (h * (1.0 + self.weight.to(torch.float32))).to(x.dtype)  # type: ignore[no-any-return]


def gemma3n(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds once; it has a weight if ``scaled``."""
    h = x.to(torch.float32)
    h = h * torch.pow(h.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
    if self.scaled:
        h = h * self.weight.to(torch.float32)
    return h.to(x.dtype)


def weightless(self: Any, x: Tensor) -> Tensor:
    """Match a norm without a weight."""
    h = x.to(torch.float32)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rounded_scale(self: Any, x: Tensor) -> Tensor:
    """Match a norm without a weight that also rounds 1 / rms(x); the kernel does not round it."""
    scale = torch.rsqrt(x.to(torch.float32).square().mean(-1, keepdim=True) + self.eps)
    return x * scale.to(x.dtype)


def gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Match ``llama`` times an activation of another tensor."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight * h.to(x.dtype) * ACT2FN[self.act](gate.to(torch.float32))).to(x.dtype)  # type: ignore[no-any-return]


def gated_once(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Match ``helium`` times an activation of another tensor; it rounds once, at the end."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    h = self.weight.to(torch.float32) * h
    return (h * ACT2FN[self.act](gate.to(torch.float32))).to(x.dtype)  # type: ignore[no-any-return]


def grouped(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Match ``llama`` over groups of features, of x times SiLU of another tensor if given."""
    h = x.to(torch.float32)
    if gate is not None:
        h = h * nn.functional.silu(gate.to(torch.float32))
    *rows, features = h.shape
    groups = features // self.size
    g = h.view(*rows, groups, self.size)
    g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + self.eps)
    h = g.view(*rows, groups * self.size)
    return self.weight * h.to(x.dtype)  # type: ignore[no-any-return]


def _rounds_once(x: Tensor, weight: Tensor | None, bias: None, eps: float) -> Tensor:
    return rms_norm(x, weight, eps, offset=0.0, casting_mode="gemma")


def _t5(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    if x.dtype == weight.dtype:
        return rms_norm(x, weight, eps)
    return weight * rms_norm(x.to(torch.float32), None, eps).to(weight.dtype)


def _gated(x: Tensor, gate: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    h = rms_norm(x, weight, eps)
    return swiglu(gate.to(h.dtype), h).to(x.dtype)


def _gated_once(x: Tensor, gate: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    h = rms_norm(x.to(torch.float32), weight.to(torch.float32), eps)
    return swiglu(gate.to(torch.float32), h).to(x.dtype)


def _grouped(x: Tensor, gate: Tensor | None, weight: Tensor, bias: None, eps: float, size: int) -> Tensor:
    h = x.to(torch.float32)
    h = h if gate is None else swiglu(gate.to(torch.float32), h)
    return weight * rms_norm(h.reshape(*x.shape[:-1], -1, size), None, eps).flatten(-2).to(x.dtype)


PATTERNS = (llama, t5, olmo, helium, gemma, gemma3n, weightless, rounded_scale, gated, gated_once, grouped)
KERNELS: dict[str, Callable[..., Tensor]] = {
    "llama": lambda x, weight, bias, eps: rms_norm(x, weight, eps, offset=0.0, casting_mode="llama"),
    "t5": _t5,
    "olmo": _rounds_once,
    "helium": _rounds_once,
    "gemma": lambda x, weight, bias, eps: rms_norm(x, weight, eps, offset=1.0, casting_mode="gemma"),
    "gemma3n": _rounds_once,
    "weightless": _rounds_once,
    "rounded_scale": _rounds_once,
    "gated": _gated,
    "gated_once": _gated_once,
    "grouped": _grouped,
}
# offset and casting mode of the patterns that a fused kernel (add_rms_norm, qk_norm_rope) can compute
MODES = {"llama": (0.0, "llama"), "olmo": (0.0, "gemma"), "helium": (0.0, "gemma"), "gemma": (1.0, "gemma")}


def fusible(norm: Any) -> bool:
    """Return True if a fused kernel may replace a call of ``norm``: patched, without hooks, its weight not sharded."""
    if not _is_patched(type(norm)) or not unhooked(norm):
        return False
    return not hasattr(norm.fused_arguments()[0], "device_mesh")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_patched(cls: type[Any]) -> bool:
    """Return True if ``cls`` gives arguments: a graph that asked the class would guard each layer part by part."""
    return hasattr(cls, "fused_arguments")


class RMSNorm(Norm):
    """Recogniser for modules whose forward has the form of one of PATTERNS; most have a weight [N]."""

    pattern = "rms_norm"
    named = r"(?<!layer)(?<!layer_)norm(\d\w*|gated)?$"
    patterns, kernels = PATTERNS, KERNELS

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, and a method that gives fused kernels the weight, eps, offset and casting mode."""
        methods = super().methods(cls, variant)
        if variant in MODES:
            _, part = match(cls.forward, cls, PATTERNS)
            weight, eps, mode = part["weight"], part["eps"], MODES[variant]
            methods["fused_arguments"] = lambda self: (getattr(self, weight), getattr(self, eps), *mode)
        return methods
