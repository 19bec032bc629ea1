"""Training steps on several GPUs in the terms of ``planning.Setting``: stages of ZeRO, and tensor parallelism.

Parallelism is that of the trace: torch's DistributedDataParallel and ZeroRedundancyOptimizer in bf16, ``fully_shard``,
and the stages of ``examples/parallel.py``, whose residual stream is sharded along the sequence. All ways to train a
model have the same global batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import PreTrainedConfig

from benchmark.common.markdown import Row
from benchmark.common.processes import DEVICE, GPU, median, reset_peak, times, worst
from benchmark.training.sharded_models import STEPS, WARMUP, fill
from benchmark.training.training import tokens_of
from examples import parallel
from liger_like.planning import Setting
from liger_like.planning._models import build, materialise, mesh_of, model_class, shard, shortened
from liger_like.planning._settings import WHOLE

MODELS: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B, untied": parallel.MODELS["1b"],
    "Llama-3-8B, 8 layers": shortened(parallel.MODELS["8b"], 8),
}
SHARDED = {"dtype": "fp32"}
WAYS: Mapping[str, Callable[[int], dict[str, Any]]] = {  # fields of a setting, by the number of GPUs
    "DDP": lambda gpus: {"fsdp": gpus, "zero": 0},
    "ZeRO-1": lambda gpus: {"fsdp": gpus, "zero": 1},
    "ZeRO-2": lambda gpus: {"fsdp": gpus, "zero": 2, **SHARDED},
    "FSDP2": lambda gpus: {"fsdp": gpus, **SHARDED},
    "TP": lambda gpus: {"tp": gpus, **SHARDED},
    "TP x FSDP2": lambda gpus: {"tp": 2, "fsdp": gpus // 2, **SHARDED},
}
SETTINGS = {f"{model}, {way}": (model, way) for model in MODELS for way in WAYS}


def fields_of(names: Iterable[str], gpus: int, share: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return the fields of the settings ``names``, without a setting for more GPUs.

    ``share``: rows for each GPU in a step, and tokens of a row.
    """
    ways = {name: WAYS[SETTINGS[name][1]](gpus) for name in names}
    return {
        name: {"micro_batch": share[0] * gpus // fields.get("fsdp", 1), "seq": share[1], **fields}
        for name, fields in ways.items()
        if fields.get("fsdp") != 1
    }


def made(setting: Setting, config: PreTrainedConfig, mesh: DeviceMesh) -> tuple[Any, Any]:
    """Return this process's part of a model of random weights, and its optimizer."""
    model = build(*model_class(config), setting)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # materialise gives buffers no values
    if setting.zero not in WHOLE:
        model = shard(model, mesh, setting)
    materialise(model, DEVICE)
    fill(model, config.initializer_range)
    kind: Any = partial(ZeroRedundancyOptimizer, optimizer_class=AdamW) if setting.zero == 1 else AdamW
    optimizer = kind(model.parameters(), lr=1e-5, fused=True)
    return DistributedDataParallel(model) if setting.zero in WHOLE else model, optimizer


def step_of(
    setting: Setting, config: PreTrainedConfig, mesh: DeviceMesh, model: Any, optimizer: Any
) -> Callable[[], Tensor]:
    """Return a training step on random tokens; it returns the loss, of this process's rows or of all."""
    torch.manual_seed(mesh["fsdp"].get_local_rank())  # processes that share rows have the same tokens
    tokens = tokens_of(config, setting.micro_batch, setting.seq)
    if setting.staged:
        predicted = setting.batch * (setting.seq - 1)
        gradients = partial(parallel.step_of(model, mesh, 1, predicted), tokens.repeat(setting.fsdp, 1))

    def step() -> Tensor:
        if setting.staged:
            loss = gradients()
        else:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def measured(setting: Setting, config: PreTrainedConfig) -> Iterator[Row]:
    """Yield time, tokens/s of all processes, and GiB of the process with the most.

    ``gib`` is the peak that torch allocated, ``reserved`` what it held of the GPU, and ``outside`` the memory of the
    GPU that torch does not count: CUDA's context and NCCL.
    """
    mesh = mesh_of(setting, DEVICE)
    step = step_of(setting, config, mesh, *made(setting, config, mesh))
    times(step, WARMUP)
    reset_peak()
    ms = median(step, STEPS)
    sizes = [0, 0, 0]
    if GPU:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        sizes = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), outside]
    gib, reserved, outside = worst(*(size / 2**30 for size in sizes))
    tokens = setting.batch * setting.seq / ms * 1e3
    yield {"ms": ms, "tokens": tokens, "gib": gib, "reserved": reserved, "outside": outside}
