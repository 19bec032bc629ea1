"""Check arguments: each error names the argument, what was expected and what came."""

import math
import numbers
from typing import Any

import torch
from torch import Tensor

FLOAT_MAX = torch.finfo(torch.float32).max


def require(name: str, value: Tensor, *, like: Tensor | None = None, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless ``value`` is a dense floating-point tensor on the device of ``like`` with the given ``shape``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested one" if value.is_nested else value.layout
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    sizes = value.shape
    if not sizes or sizes[-1] == 0:
        raise ValueError(f"{name} must have a last dimension of at least 1, got shape {list(sizes)}")
    if like is not None and like is not value and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    if shape is not None and sizes != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(sizes)}")


def require_type(name: str, value: object, kind: type) -> None:
    """Raise unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``, and of its type: True is not 1."""
    if type(value) is str and value in choices:
        return
    alike = (c for c in choices if isinstance(value, type(c)) and isinstance(value, bool) == isinstance(c, bool))
    if not any(value == choice for choice in alike):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _number(value: Any) -> Any:
    """Return ``value``, or in a trace of torch.jit, whose sizes are tensors, its number."""
    return value.item() if isinstance(value, Tensor) and torch.jit.is_tracing() else value


def require_number(
    name: str, value: Any, must: str = "must be finite", low: float = -FLOAT_MAX, high: float = FLOAT_MAX
) -> float:
    """Return ``value`` as a Python float. Raise unless it is a number, of Python or NumPy, in [``low``, ``high``]."""
    if type(value) is float and not torch.compiler.is_compiling() and low <= value <= high:
        return value
    value = _number(value)
    if not isinstance(value, int | float) and not isinstance(value, torch.SymInt | torch.SymFloat | numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not torch.compiler.is_compiling() and not low <= value <= high:  # a traced number may have no value
        raise ValueError(f"{name} {must}, got {value}")
    return value if isinstance(value, float) else float(value)


def require_positive(name: str, value: Any) -> float:
    """Return ``value`` as a Python float. Raise unless it is a positive, finite number."""
    return require_number(name, value, "must be positive and finite", low=math.ulp(0.0))


def require_eps(eps: Any) -> float:
    """Return ``eps`` as a Python float. Raise unless it is a non-negative number."""
    eps = require_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps


def require_integer(name: str, value: Any, low: int | None = None) -> int:
    """Return ``value`` as a Python int. Raise unless it is an integer, of Python or NumPy, and at least ``low``."""
    value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not torch.compiler.is_compiling():  # a traced number may have no value
        if low is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} must be an integer of 64 bits, got {value}")
    return value if isinstance(value, int | torch.SymInt) else int(value)
