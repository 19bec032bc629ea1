"""Predicts the memory of steps of Llama-3-8B on long sequences: ``python -m benchmark long_context --memory TOKENS``.

One sequence on one GPU; MLPs are tiled, checkpoints are on the host, and the optimizer steps in the backward.
"""

import dataclasses

from transformers import LlamaConfig

from benchmark.common.markdown import table
from liger_like.planning import Prediction, Setting, predict

STEP = Setting(checkpoint="full", checkpoint_on_host=True, tiled_mlp=True, step_in_backward=True)
WAYS = {
    "AdamW": STEP,
    "AdamW in 8 bits": dataclasses.replace(STEP, optimizer="adamw8bit"),
    "two layers a checkpoint": dataclasses.replace(STEP, checkpoint_layers=2),
    "attention kept": dataclasses.replace(STEP, checkpoint="attention"),
}


def predicted(config: LlamaConfig, tokens: int) -> list[Prediction]:
    """Return the prediction of each of ``WAYS``."""
    return [predict(config, dataclasses.replace(way, seq=tokens), "h200") for way in WAYS.values()]


def memory_table(config: LlamaConfig, several: list[int]) -> str:
    """Return a table of the GiB that sequences of so many tokens take of a GPU and of the host."""
    rows = (
        (f"{tokens:,}", *(f"{found.gib:.1f} + {found.host_gib}" for found in predicted(config, tokens)))
        for tokens in several
    )
    return table(("tokens: GiB of GPU + host", *WAYS), rows)
