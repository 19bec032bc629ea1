"""Llama sharded by FSDP2 over all processes: training steps, and the longest sequence that one still fits.

Parameters and the optimizer's state are in fp32, what is computed, on GPUs, in bf16; gradients are reduced in fp32.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmark.common.markdown import Row
from benchmark.common.processes import DEVICE, GPU, median, reset_peak, times, worst
from benchmark.training.training import (
    SELECTIVE,
    Preparation,
    nothing,
    patch,
    patch_and_keep_attention,
    patch_and_select,
    patch_by_liger,
    tokens_of,
)
from liger_like.parallel import context_parallel

WARMUP, STEPS = 2, 4
ROOM = 0.9  # share of the GPU's memory that a length may be predicted to fill
LADDER = (*itertools.chain(*((n, n * 3 // 2) for n in (1 << i for i in range(13, 22)))), 1 << 22)


class Contestant(NamedTuple):
    """How a model is changed; ``spread``: each process has a part of every sequence."""

    prepare: Preparation
    spread: bool = False


def compile_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(dynamic=False)


TRAINED = {
    "transformers": Contestant(nothing),
    "transformers, compiled layers": Contestant(compile_layers),
    "liger_like": Contestant(patch),
    SELECTIVE: Contestant(patch_and_select),
    "liger_like, attention kept": Contestant(patch_and_keep_attention),
    "Liger": Contestant(patch_by_liger),
}
CLIMBING = {
    "transformers": Contestant(nothing),
    "liger_like": Contestant(patch),
    "liger_like, context parallel": Contestant(patch, spread=True),
    "Liger": Contestant(patch_by_liger),
}


@torch.no_grad()
def build(prepare: Preparation, config: PreTrainedConfig, mesh: DeviceMesh) -> PreTrainedModel:
    """Return a checkpointed model of random weights, of which each process never has more than its shards."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    prepare(model)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if GPU else {}
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    model.to_empty(device=DEVICE)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # to_empty left its buffers without values
    fill(model, config.initializer_range)
    return model


@torch.no_grad()
def fill(model: nn.Module, std: float) -> None:
    """Give a model random weights, and norms weights of one; each process draws its own shards."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shard.normal_(std=std) if parameter.dim() > 1 else shard.fill_(1)


def step_of(contestant: Contestant, config: PreTrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return a training step of a new model on tokens [B, S]; it returns the loss, or this process's part of it."""
    mesh = dist.init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = build(contestant.prepare, config, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Tensor) -> Tensor:
        batch = {"input_ids": tokens, "labels": tokens}
        with context_parallel(mesh, method="ring") if contestant.spread else nullcontext() as context:
            loss: Tensor = model(**context.shard(batch) if context else batch, use_cache=False).loss
            (loss * mesh.size() if context else loss).backward()  # FSDP averages the gradients of the parts: undo it
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(settings: Sequence[tuple[int, int]], contestant: Contestant, config: PreTrainedConfig) -> Iterator[Row]:
    """Yield step time, tokens/s of all processes and highest peak memory, for each batch and sequence of a process."""
    step = step_of(contestant, config)
    for batch, seq in settings:
        timed = partial(step, tokens_of(config, batch, seq))
        times(timed, WARMUP)
        reset_peak()
        ms = median(timed, STEPS)
        gib = worst(torch.cuda.max_memory_allocated() / 2**30)[0]
        yield {"ms": ms, "tokens": dist.get_world_size() * batch * seq / ms * 1e3, "gib": gib}


def next_length(ladder: Sequence[int], length: int, above: float, room: float) -> int | None:
    """Return the longest length that is sure to fit; if none is, the next one.

    A step of ``length`` needed ``above`` of ``room``, and memory grows at most in proportion to the length.
    """
    longer = [n for n in ladder if n > length]
    return max([n for n in longer if n * above <= length * room] or longer[:1], default=None)


def climb(contestant: Contestant, config: PreTrainedConfig, ladder: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each length that fits, and before each step the next length, which may not fit."""
    step, room = step_of(contestant, config), ROOM * torch.cuda.mem_get_info()[1] if GPU else 0.0
    length: int | None = ladder[0]
    step(tokens_of(config, 1, ladder[0]))  # allocates the optimizer's state
    while length:
        reset_peak()
        step(tokens_of(config, 1, length))
        peak, resting = worst(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
        further = next_length(ladder, length, peak - resting, room - resting)
        yield {"length": length, "gib": peak / 2**30, "next": further}
        length = further
