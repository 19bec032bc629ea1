"""Checks of the arguments of ``liger_like.losses``, and their sums over tokens."""

from typing import Any

import torch
from torch import Tensor

from liger_like.runtime.checks import require, require_number

Items = float | Tensor | None


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` in at least fp32. Raise unless it is a floating-point tensor of the given shape."""
    require(name, value, shape=shape)
    tensor: Tensor = value.to(torch.promote_types(value.dtype, torch.float32))
    return tensor


def _checked_mask(name: str, mask: Any, shape: tuple[int, ...]) -> Tensor:
    """Return ``mask`` as bools. Raise unless it is a tensor of the given shape [B, S]."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if len(shape) != 2 or mask.shape != shape:
        raise ValueError(
            f"{name} must have the shape [B, S] of the log-probabilities, {list(shape)}, got {list(mask.shape)}"
        )
    return mask.bool()


def _tokens(name: str, value: Any, mask: Tensor) -> Tensor:
    """Return per-token numbers [B, S], 0 outside the ``mask``."""
    return _checked(name, value, tuple(mask.shape)).masked_fill(~mask, 0)


def _summed(name: str, value: Any, mask: Tensor) -> Tensor:
    """Return the sums [B] over the ``mask`` of per-token numbers, or ``value`` if it holds sums."""
    if isinstance(value, Tensor) and value.dim() == 1:
        return _checked(name, value, tuple(mask.shape[:1]))
    return _tokens(name, value, mask).sum(1)


def _length(mask: Tensor) -> Tensor:
    return mask.sum(1).clamp(min=1)


def _mean(values: Tensor, num_items: Items, count: int | Tensor) -> Tensor:
    """Return the sum of ``values`` divided by ``num_items``, or by ``count`` for None; by 1 if that is 0."""
    items = count if num_items is None else num_items
    if not isinstance(items, Tensor):
        return values.sum() / (require_number("num_items", items, "must be finite and not negative", 0.0) or 1)
    if items.numel() != 1:
        raise ValueError(f"num_items must be a number or a tensor of one number, got shape {list(items.shape)}")
    items = items.to(values.device).reshape(())
    return values.sum() / items.where(items != 0, 1)
