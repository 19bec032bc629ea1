"""Gradients of which every rank of a mesh holds a share of the sum."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from liger_like.runtime.checks import require_type


def finalize_partial_grads(model: nn.Module) -> None:
    """Reduce the gradients of ``model`` that are Partial DTensors: ``grad`` is then the same on every rank, Replicate.

    Such are those of parameters that all ranks hold whole and use on their own shards, as norms under
    SequenceParallel. An optimizer and ``clip_grad_norm_`` would reduce them one by one, and each anew. Call it on all
    ranks after the last backward before these; the gradients of one dtype and mesh dimension take one all-reduce. FSDP
    reduces the gradients of its parameters itself. Raises TypeError if ``model`` is no module.
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
