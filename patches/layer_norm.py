"""Recogniser for LayerNorm modules over one dimension: torch's class, and the classes of model families."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch has it

from liger_like.ops.layer_norm import layer_norm
from liger_like.patches.norm import Norm


def torch_nn(self: Any, x: Tensor) -> Tensor:
    """Match ``torch.nn.LayerNorm``."""
    return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def cohere(self: Any, x: Tensor) -> Tensor:
    """Match a norm that rounds once and has no bias."""
    h = x.to(torch.float32)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight.to(torch.float32) * h).to(x.dtype)  # type: ignore[no-any-return]


def olmo(self: Any, x: Tensor) -> Tensor:
    """Match a norm without parameters."""
    return F.layer_norm(x.to(torch.float32), self.shape, None, None, eps=1e-5).to(x.dtype)


def _torch_nn(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # autocast runs torch's layer_norm in fp32
        x = x.to(torch.float32)
    return layer_norm(x, weight, bias, eps)


PATTERNS = (torch_nn, cohere, olmo)
KERNELS: dict[str, Callable[..., Tensor]] = {
    "torch_nn": _torch_nn,
    "cohere": lambda x, weight, bias, eps: layer_norm(x, weight, bias, eps),
    "olmo": lambda x, weight, bias, eps: layer_norm(x, None, None, 1e-5),
}


class LayerNorm(Norm):
    """Recogniser for modules whose forward has the form of one of PATTERNS, with or without weight and bias."""

    pattern = "layer_norm"
    named = r"layer_?norm(\d\w*)?$"
    patterns, kernels = PATTERNS, KERNELS
