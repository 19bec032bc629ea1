"""Operands of the fused linear losses: checks, and the low-rank term of the logits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_like.ops.losses.vocab_shards import Shard, summed_gradient
from liger_like.runtime.checks import require, require_number
from liger_like.runtime.support import autocast_dtype, has_known_size

FEW_TOKENS = 1024  # so many logits take about the memory that a chunk of the op takes, too

Lora = tuple[Tensor, Tensor, float] | tuple[Tensor, Tensor]


def without_ignored(x: Tensor, u: Tensor | None, ignored: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` [T, H] and ``u`` [T, r] with zeros in the rows of ``ignored`` tokens [T]."""
    rows = ignored[:, None]
    return x.masked_fill(rows, 0), None if u is None else u.masked_fill(rows, 0)


def low_rank(x: Tensor, lora: Lora, shard: Shard, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factors u [T, r] and b [V, r] of the logits u b^T that ``lora`` adds for ``x`` [T, H].

    A NaN in the x of ``ignored`` tokens [T] does not get into the gradient of A, in which it is multiplied by 0.
    A vocabulary shard computes a part of their gradients: the gradient of u is summed over the processes, or that of A
    if dx is not.
    """
    if len(lora) == 2:
        u = lora[0].reshape(-1, lora[0].shape[-1])
    else:
        x = x if ignored is None else without_ignored(x, None, ignored)[0]
        parts_meet_here = shard and not shard.reduce_dx  # else the gradient of u is summed
        u = linear(x, summed_gradient(lora[0], shard) if parts_meet_here else lora[0]) * lora[2]
    return summed_gradient(u, shard) if shard.reduce_dx else u, lora[1]


def checked_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora: Any, shard: Shard
) -> tuple[Tensor, Tensor | None, Lora | None]:
    """Return x, bias and lora in the dtype of autocast. Raise unless the operands of the logits fit each other.

    The weight is not cast here: an autograd function casts it, so that its gradient is rounded once, to its own dtype.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        require(name, tensor)
    if bias is not None:
        require("bias", bias)
    lora, weight_dtype = _checked_lora(lora), x.dtype
    if dtype := autocast_dtype(x):
        weight_dtype = weight.dtype
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        lora = None if lora is None else (lora[0].to(dtype), lora[1].to(dtype), *lora[2:])
    _check_operands(x, weight, weight_dtype, bias, lora, shard)
    return x, bias, lora


def _check_operands(
    x: Tensor, weight: Tensor, weight_dtype: torch.dtype, bias: Tensor | None, lora: Lora | None, shard: Shard
) -> None:
    """Raise unless the operands of the logits have matching dtypes, shapes and devices."""
    H, V = x.shape[-1], weight.shape[0]
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape [V, {H}], got {list(weight.shape)}")
    if V == 0:
        raise ValueError(f"weight must have at least one row, got shape {list(weight.shape)}")
    if not isinstance(shard, Shard):
        raise TypeError(f"shard must be a Shard, got {type(shard).__name__}")
    operands: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [("weight", weight, weight_dtype, (V, H))]
    if bias is not None:
        operands.append(("bias", bias, x.dtype, (V,)))
    if lora is not None:
        first = lora[0].shape
        shape, rank = ((first[0], H), first[0]) if len(lora) == 3 else ((*x.shape[:-1], first[-1]), first[-1])
        operands += [("lora[0]", lora[0], x.dtype, shape), ("lora[1]", lora[1], x.dtype, (V, rank))]
    for name, tensor, dtype, shape in operands:
        require(name, tensor, like=x, shape=shape)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of x, {dtype}, got {tensor.dtype}")


def _checked_lora(lora: Any) -> Lora | None:
    """Return ``lora`` with its scaling as a Python float. Raise unless its form is valid; shapes are not checked."""
    if lora is None:
        return None
    if not isinstance(lora, tuple | list) or len(lora) not in (2, 3):
        raise TypeError(f"lora must be (A, B, scaling) or (u, B), got {_kind(lora)}")
    for i, matrix in enumerate(lora[:2]):
        require(f"lora[{i}]", matrix)
    return (*lora[:2], *(require_number("lora[2]", scaling) for scaling in lora[2:]))  # type: ignore[return-value]


def _kind(value: Any) -> str:
    """Return the name of the type of ``value``, and of the types in a tuple or list."""
    name = type(value).__name__
    return f"{name} of {[_kind(item) for item in value]}" if isinstance(value, tuple | list) else name


def checked_outputs(outputs: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``outputs`` as a tuple. Raise unless all of them are ``known``."""
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs must be a tuple out of {known}, got {_kind(outputs)}")
    unknown = [name for name in outputs if not isinstance(name, str) or name not in known]
    if unknown:
        raise ValueError(f"outputs must be out of {known}, got {unknown}")
    return tuple(outputs)


def is_small(target: Tensor) -> bool:
    """Return True in a compiled graph with so few tokens that Inductor's kernels need less host time and memory."""
    return torch.compiler.is_compiling() and has_known_size(target) and target.numel() <= FEW_TOKENS
