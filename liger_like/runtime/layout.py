"""Views of tensors as rows, in the layouts that kernels read."""

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., N] as [M, N] with a contiguous last dimension; copies only where no view has that form."""
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def with_stride(x: Tensor) -> tuple[Tensor, int]:
    """``x`` [..., N] as memory of rows with a contiguous last dimension, and the stride from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows(x)
    return x, x.stride(0)


def dense(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of the strides of ``x``, if it is dense, as transposed heads are; but with a contiguous last dimension."""
    like = torch.empty_like(x, dtype=dtype)
    return like if like.stride(-1) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


def packed(vector: Tensor | None) -> Tensor | None:
    """``vector`` with stride 1, as kernels read vectors; copies only where it has another."""
    return None if vector is None else vector.contiguous()
