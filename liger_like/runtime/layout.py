"""Views of tensors as rows, in the layouts that kernels read."""

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., N] as [M, N] with a contiguous last dimension; copies only if no view has that form."""
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def with_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x`` [..., N] with a contiguous last dimension, and the stride from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows(x)
    return x, x.stride(0)


def dense(x: Tensor) -> Tensor:
    """Return ``x`` with a contiguous last dimension; copies only if it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory with the strides of ``x`` if ``x`` is dense, as transposed heads are, else contiguous memory.

    The last dimension is contiguous in both cases.
    """
    like = torch.empty_like(x, dtype=dtype)
    return like if like.stride(-1) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


def packed(vector: Tensor | None) -> Tensor | None:
    """Return ``vector`` with stride 1, as kernels read vectors; copies only if it has another."""
    return None if vector is None else vector.contiguous()
