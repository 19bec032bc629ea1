"""The loss of a head whose words are spread over all processes, and attention of a sequence that is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmark.common.markdown import Row
from benchmark.common.measure import peak_mib, settle
from benchmark.common.processes import DEVICE, GPU, median, times, worst
from benchmark.kernels.losses import step_of
from liger_like import flash_attention, testing
from liger_like.parallel import context_parallel, vocab_parallel_cross_entropy

DTYPE = torch.bfloat16 if GPU else torch.float32
REPEATS, ROUNDS = 3, 3
SPEC = next(spec for spec in testing.SPECS if spec.name == "flash_attention")
METHODS = ("allgather", "ring", "ulysses")


def by_loss_parallel(dtype: torch.dtype, x: Tensor, weight: DTensor, target: Tensor) -> Tensor:
    """Compute the loss of a head under ColwiseParallel with torch, with logits in ``dtype``."""
    logits = F.linear(DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False), weight)
    return F.cross_entropy(logits.to(dtype), target)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "liger_like": vocab_parallel_cross_entropy,
    "loss_parallel, logits in fp32": partial(by_loss_parallel, torch.float32),
    "loss_parallel, logits in bf16": partial(by_loss_parallel, torch.bfloat16),
}


def losses(names: Sequence[str], shape: Mapping[str, int]) -> Iterator[Row]:
    """Time of a forward and backward, its peak memory above the inputs, and that for each of the process's logits."""
    mesh = dist.init_device_mesh(DEVICE, (dist.get_world_size(),))
    T, H, V = (shape[size] for size in "THV")
    torch.manual_seed(0)
    options = {"device": DEVICE, "dtype": DTYPE}
    x, whole = torch.randn(T, H, **options), torch.randn(V, H, **options).mul_(0.02)
    target = torch.randint(V, (T,), device=DEVICE)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    del whole
    for name in names:
        leaves = x.requires_grad_(), weight.requires_grad_()
        step = step_of(partial(LOSSES[name], *leaves, target), *leaves)
        with loss_parallel() if name.startswith("loss_parallel") else nullcontext():
            mib, (loss, *_) = peak_mib(step) if GPU else (0.0, step())
            row = {"ms": median(step, REPEATS), "loss": loss.item()}
        mib = worst(mib)[0]
        yield {**row, "mib": mib, "bytes": mib * 2**20 / (T * weight.to_local().shape[0])}


def attentions(methods: Sequence[str], shape: Mapping[str, int]) -> Iterator[Row]:
    """Time all processes together, and each alone with the whole sequence.

    The error of a row is the largest of all results, between both.
    """
    mesh = dist.init_device_mesh(DEVICE, (dist.get_world_size(),))
    torch.manual_seed(0)
    inputs = SPEC.inputs(DTYPE, DEVICE, **shape)
    whole = [inputs[name].detach().requires_grad_() for name in "qkv"]
    upstream = torch.randn_like(whole[0])
    alone = partial(flash_attention, causal=True)
    *_, flops = SPEC.cost(DTYPE.itemsize, **shape, causal=True)
    for method in methods:
        context = context_parallel(mesh, method=method)
        parts = [context.shards.own(t.detach()).requires_grad_() for t in whole]
        own = context.shards.own(upstream)
        expected = [context.shards.own(t) for t in results(alone, whole, upstream)]
        got = results(context.attend, parts, own)
        error = max(worst(*map(relative_error, got, expected)))
        del expected, got
        timers = {
            "alone_forward_ms": partial(alone, *whole),
            "alone_ms": partial(results, alone, whole, upstream),
            "forward_ms": partial(context.attend, *parts),
            "ms": partial(results, context.attend, parts, own),
        }
        row: Row = {key: partial(times, step, REPEATS) for key, step in timers.items()}
        settle([row], ROUNDS, wait=dist.barrier)
        yield {"flops": flops, "error": error, **dict(zip(row, worst(*row.values()), strict=True))}


def results(attend: Callable[..., Tensor], qkv: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Return the output and the gradients."""
    out = attend(*qkv)
    return out.detach(), *torch.autograd.grad(out, qkv, upstream)


def relative_error(got: Tensor, true: Tensor) -> float:
    return float((got.float() - true.float()).norm() / true.float().norm())
