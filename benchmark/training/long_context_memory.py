"""Traces the GPU memory of steps of Llama-3-8B on long sequences: ``python -m benchmark long_context --memory TOKENS``.

AdamW in bf16 steps in the backward, MLPs are tiled, and the inputs of checkpoints have no memory between forward
and backward, as if they were on the host.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig

import liger_like
from benchmark.common.markdown import table
from liger_like.parallel import group_checkpoints, step_in_backward
from liger_like.parallel.offload import _by_checkpoint
from liger_like.planning import traced
from liger_like.planning._models import materialise, model_class


def _pack(tensor: Tensor) -> Any:
    return (tensor.shape, tensor.dtype) if _by_checkpoint() and tensor.is_floating_point() else tensor


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else torch.empty(packed[0], dtype=packed[1])


def traced_gib(config: LlamaConfig, tokens: int, layers: int) -> float:
    """Return the peak of a step's memory, in GiB, where so many layers share a checkpoint."""
    with torch.device("meta"):
        model = model_class(config)[1]._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
    liger_like.patch(model, mlp="tiled")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    group_checkpoints(model, layers)
    with traced("h100") as trace:
        materialise(model)
        step_in_backward(model, partial(torch.optim.AdamW, lr=1e-5, fused=True))
        ids = torch.empty((1, tokens), dtype=torch.int64)
        for _ in range(2):  # the first step makes the moments
            trace.restart()
            with saved_tensors_hooks(_pack, _unpack):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return trace.gib


def memory_table(config: LlamaConfig, several: list[int]) -> str:
    """Return a table of the GiB of sequences of so many tokens, with one and with two layers a checkpoint."""
    rows = ((f"{tokens:,}", *(f"{traced_gib(config, tokens, layers):.1f}" for layers in (1, 2))) for tokens in several)
    return table(("tokens", "GPU GiB", "two layers a checkpoint"), rows)
