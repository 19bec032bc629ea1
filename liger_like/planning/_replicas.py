"""Whole copies of a model on several GPUs: what DistributedDataParallel and ZeroRedundancyOptimizer add to a trace.

A copy's step is that of one GPU. Its gradients are copied into buckets, which stay, and the buckets are summed over the
GPUs. ZeroRedundancyOptimizer gives each parameter to one GPU, which has its states, updates and sends it (ZeRO-1 of
Rajbhandari et al., arXiv:1910.02054).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_like.planning._allocator import Change
from liger_like.planning._clock import Clock
from liger_like.planning._optimizers import optimizer_of
from liger_like.planning._prediction import part_of
from liger_like.planning._settings import Setting
from liger_like.planning._tracer import Live, rounded

BUCKETS = 2**20, 25 * 2**20  # bytes of the first bucket, and of the others, unless a gradient is larger
Named = tuple[str, Tensor]


def trained(model: nn.Module) -> list[Named]:
    """Return the parameters of ``model`` that have gradients, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def replicated(start: list[Change], clock: Clock, setting: Setting, parameters: Sequence[Named]) -> list[Change]:
    """Return ``start``, a GPU's memory before a step, with that of ``setting.replicas``; ``clock`` gets their time.

    ``parameters``: all that are trained. The GPU is the one with the most states.
    """
    count = setting.replicas
    if count == 1:
        return start
    sizes = _buckets([p for _, p in parameters])
    total = sum(p.nbytes for _, p in parameters)
    clock.add("network", 2 * (count - 1) / count * sum(sizes) / clock.link)
    found = [*start, *(_change("buckets", "gradients", size) for size in sizes)]
    if setting.zero == 0:
        return found
    own = max(_shares(parameters, count), key=lambda share: sum(p.nbytes for _, p in share))
    clock.add("network", (count - 1) / count * total / clock.link)
    updated = sum(p.nbytes for _, p in own) / total
    clock.add("optimizer", (updated - 1) * clock.groups["optimizer"])
    return [change for change in found if change.part.kind != "optimizer"] + _states(setting.optimizer, own)


def _change(module: str, kind: str, size: int) -> Change:
    return Change(part_of(Live(size, "", module, kind)), rounded(size), True)


def _buckets(parameters: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each bucket: gradients fill them in the order of the backward."""
    ready = [*reversed(parameters)]
    assigned: Any = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    groups, _ = assigned(ready, [*BUCKETS], [False] * len(ready))
    return [sum(ready[i].nbytes for i in group) for group in groups]


def _shares(parameters: Sequence[Named], count: int) -> list[list[Named]]:
    """Return the parameters of each GPU: the largest first, each to the GPU with the fewest elements so far."""
    shares: list[list[Named]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name, p in sorted(parameters, key=lambda named: named[1].numel(), reverse=True):
        fewest = sizes.index(min(sizes))
        shares[fewest].append((name, p))
        sizes[fewest] += p.numel()
    return shares


def _states(optimizer: str, own: Sequence[Named]) -> list[Change]:
    """Return what ``optimizer`` keeps for ``own`` parameters."""
    found = []
    with FakeTensorMode():
        for name, p in own:
            parameter = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
            parameter.grad = torch.empty_like(parameter)
            made = optimizer_of(optimizer, [parameter])
            made.step()
            sizes = [t.nbytes for t in made.state[parameter].values()]
            found += [_change(name.rpartition(".")[0], "optimizer", size) for size in sizes]
    return found
