"""Check the arguments of ``moe_experts``."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.runtime.checks import require, require_choice, require_number, require_positive

ACTS = ("silu", "gelu", "gelu_tanh")
INTEGERS = (torch.int32, torch.int64)


class Gate(NamedTuple):
    """The gated unit between the two products, and the form of the weights, as ``moe_experts`` takes them."""

    act: str
    limit: float | None
    alpha: float | None
    transposed: bool
    interleaved: bool


def checked_gate(act: Any, limit: Any, alpha: Any, transposed: Any, interleaved: Any) -> Gate:
    """Return the options as a ``Gate``, with None for an infinite limit, or raise TypeError or ValueError."""
    require_choice("act", act, ACTS)
    require_choice("transposed", transposed, (False, True))
    require_choice("interleaved", interleaved, (False, True))
    limit = None if limit is None or (type(limit) is float and limit == math.inf) else require_positive("limit", limit)
    alpha = None if alpha is None else require_number("alpha", alpha)
    if alpha is not None and act != "silu":
        raise ValueError(f"alpha needs act='silu', got act={act!r}")
    return Gate(act, limit, alpha, transposed, interleaved)


def check_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, transposed: bool
) -> None:
    """Raise TypeError or ValueError unless the experts' parameters fit ``x`` and one another."""
    require("x", x)
    require("gate_up", gate_up, like=x)
    H = x.shape[-1]
    E, wide, depth = gate_up.shape if gate_up.dim() == 3 else (0, 0, 0)
    wide, depth = (depth, wide) if transposed else (wide, depth)
    if E == 0 or wide == 0 or wide % 2 or depth != H:
        form = f"[E, {H}, 2I]" if transposed else f"[E, 2I, {H}]"
        raise ValueError(f"gate_up must have shape {form}, with E and I of at least 1, got {list(gate_up.shape)}")
    require("down", down, like=x, shape=(E, wide // 2, H) if transposed else (E, H, wide // 2))
    for name, bias, columns in (("gate_up_bias", gate_up_bias, wide), ("down_bias", down_bias, H)):
        if bias is not None:
            require(name, bias, like=x, shape=(E, columns))
    for name, tensor in (("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if tensor is not None and tensor.dtype != gate_up.dtype:
            raise TypeError(f"{name} must have the dtype of gate_up, {gate_up.dtype}, got {tensor.dtype}")


def check_routing(x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Raise TypeError or ValueError unless ``index`` and ``weights`` name the experts of each row of ``x``."""
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be a tensor, got {type(index).__name__}")
    if index.dtype not in INTEGERS:
        raise TypeError(f"index must be int32 or int64, got {index.dtype}")
    if index.device != x.device:
        raise ValueError(f"index must be on {x.device}, got {index.device}")
    if index.dim() != x.dim() or index.shape[:-1] != x.shape[:-1] or index.shape[-1] == 0:
        form = ", ".join(map(str, (*x.shape[:-1], "K")))
        raise ValueError(f"index must have shape [{form}], with K of at least 1, got {list(index.shape)}")
    if index.numel() >= 2**31:  # rows are numbered by int32
        raise ValueError(f"index must have less than 2^31 numbers, got shape {list(index.shape)}")
    require("weights", weights, like=x, shape=index.shape)
