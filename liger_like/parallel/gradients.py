"""Reduction of gradients that are Partial DTensors."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from liger_like.runtime.checks import require_type


def finalize_partial_grads(model: nn.Module) -> None:
    """Reduce the gradients of ``model`` that are Partial DTensors to Replicate ones, the same on all ranks.

    Parameters that are replicated but used on sharded inputs have Partial gradients, as norms under SequenceParallel.
    ``clip_grad_norm_`` and the optimizer would each reduce them again, one by one. Call this function on all ranks
    between the last backward and these; it takes one all-reduce per dtype and mesh dimension. FSDP reduces the
    gradients of its own parameters. Raises TypeError if ``model`` is not a module.
    """
    require_type("model", model, nn.Module)
    buckets: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            for dim, placement in enumerate(parameter.grad.placements):
                if isinstance(placement, Partial):
                    mesh = parameter.grad.device_mesh
                    buckets[mesh, dim, placement.reduce_op, parameter.grad.dtype].append(parameter)
    for (mesh, dim, reduction, _), parameters in buckets.items():
        grads: list[Any] = [parameter.grad for parameter in parameters]
        bucket = torch.cat([grad.to_local().flatten() for grad in grads])
        dist.all_reduce(bucket, getattr(dist.ReduceOp, reduction.upper()), mesh.get_group(dim))
        parts = torch.split(bucket, [grad.to_local().numel() for grad in grads])
        for parameter, grad, part in zip(parameters, grads, parts, strict=True):
            placements = [*grad.placements[:dim], Replicate(), *grad.placements[dim + 1 :]]
            local = part.view(grad.to_local().shape)
            parameter.grad = DTensor.from_local(local, mesh, placements, shape=grad.shape, stride=grad.stride())
