"""Exchange of tokens between the processes of a group: each process has a part of every sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd

from liger_like.ops.losses import vocab_shards
from liger_like.runtime.autograd import once_differentiable


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return part i of ``x`` [R, ...], summed over the R processes, in process i."""
    own = x.new_empty(x.shape[1:])
    vocab_shards.reduce_scatter(own, x.contiguous().flatten(0, 1), group=group)
    return own


class _Gather(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return vocab_shards.gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        return _summed(dx, ctx.group), None


class _Sum(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        return vocab_shards.gathered(dx, ctx.group), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # transfers between processes stay out of graphs
def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x`` [...] of all R processes, [R, ...]. The gradient of ``x`` is summed over them."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # transfers between processes stay out of graphs
def sum_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the R processes of this process's part of ``x`` [R, ...]. Gradients are gathered."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out
