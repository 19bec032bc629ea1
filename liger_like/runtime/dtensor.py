"""The ops on DTensors: each rank runs the op on its own shards, without communication.

An op's rule names the dimensions along which its first tensor may be sharded, and maps each to the dimension along
which every other tensor must then be sharded: ``{"q": {0: 0, 1: 1, 2: 2}, "cos": {2: 1}}``. A tensor without an entry
must be replicated; its gradient is Partial, a sum over the ranks.
"""

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Dims = dict[str, dict[int, int]]


def run_on_shards(op: Callable[..., Any], rule: Callable[..., Dims], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)`` for DTensors, each result sharded as the first tensor of ``rule``.

    Result i has the sizes of tensor i of the rule along sharded dimensions, or of the first tensor if the rule has
    fewer. Raises TypeError if some tensors are not DTensors or if their meshes differ, ValueError for placements that
    the rule does not allow.
    """
    code = op.__code__
    arguments = dict(zip(code.co_varnames[: code.co_argcount], args, strict=False)) | kwargs
    tensors: dict[str, Any] = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    dims = rule(**arguments)  # it may know a better way for what is refused below
    _check_kinds(op.__name__, tensors)
    lead = next(iter(dims))
    placements = tensors[lead].placements
    for placement in placements:
        if not placement.is_replicate() and getattr(placement, "dim", None) not in dims[lead]:
            allowed = " or ".join(["Replicate()", *(f"Shard({dim})" for dim in dims[lead])])
            raise ValueError(
                f"{op.__name__} takes {lead} as {allowed}, got {placement}: redistribute it, or give local tensors"
                " (to_local())"
            )
    for name, tensor in tensors.items():
        arguments[name] = _local(op.__name__, name, tensor, *_placements(placements, dims.get(name, {})))
    results = op(**arguments)
    if isinstance(results, Tensor):
        return _distributed(results, tensors[lead], placements)
    like = chain(dims, repeat(lead))
    return tuple(_distributed(local, tensors[name], placements) for local, name in zip(results, like, strict=False))


def _check_kinds(op: str, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"{op} got DTensors, and {name} as a plain tensor: distribute it, too (SequenceParallel does so with"
                " a module's parameters), or give local tensors (to_local())"
            )
    if len({tensor.device_mesh for tensor in tensors.values()}) > 1:
        raise TypeError(f"{op} got DTensors of several meshes: { ({n: t.device_mesh for n, t in tensors.items()}) }")


def _placements(lead: tuple[Placement, ...], dims: dict[int, int]) -> tuple[list[Placement], list[Placement]]:
    """Return the placements of a tensor and of its gradient.

    ``lead`` places the rule's first tensor; ``dims`` maps that tensor's sharded dimensions to those of this tensor.
    """
    pairs: list[tuple[Placement, Placement]] = []
    for placement in lead:
        if not isinstance(placement, Shard):
            pairs.append((Replicate(), Replicate()))
        elif placement.dim in dims:
            pairs.append((Shard(dims[placement.dim]),) * 2)
        else:
            pairs.append((Replicate(), Partial()))
    wanted, grads = zip(*pairs, strict=True)
    return list(wanted), list(grads)


def _local(op: str, name: str, tensor: DTensor, wanted: list[Placement], grads: list[Placement]) -> Tensor:
    have = list(tensor.placements)
    if not all(mine == want or mine.is_replicate() for mine, want in zip(have, wanted, strict=True)):
        raise ValueError(f"{op} takes {name} as {wanted} beside the first tensor, got {have}: redistribute it")
    if have != wanted:
        tensor = tensor.redistribute(placements=wanted)  # replicated to sharded: each rank slices, nothing is sent
    return tensor.to_local(grad_placements=grads)


def _distributed(local: Tensor, whole: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return ``local`` as this rank's part of a DTensor with the sizes of ``whole`` along sharded dimensions."""
    sharded = {placement.dim for placement in placements if isinstance(placement, Shard)}
    shape = torch.Size(whole.shape[dim] if dim in sharded else size for dim, size in enumerate(local.shape))
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):  # innermost first
        stride[dim] = step
        step *= max(1, shape[dim])
    return DTensor.from_local(local, whole.device_mesh, placements, shape=shape, stride=tuple(stride))
