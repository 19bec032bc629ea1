"""Measures training steps in the terms of ``planning.Setting``, for `python -m benchmark plan` to compare with.

    python -m benchmark planned                   measures and writes results/
    python -m benchmark planned --settings 0 3    some of the settings; results/ keeps what it has of the others
    python -m benchmark planned --quick           a tiny model, printed only; needs no GPU

The settings are those that no other benchmark has: adapters, several passes, optimizers with fewer states, grouped
checkpoints. ``gib`` is the peak of all that torch allocated in warm steps, ``reserved`` of all that it held of the GPU.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from benchmark.common.markdown import Row
from benchmark.common.measure import attempt, environment, rounded, update
from benchmark.common.processes import DEVICE, GPU, reset_peak, times
from benchmark.training.training import clear, tokens_of
from examples.train import CONFIGS
from liger_like.parallel import group_checkpoints, step_in_backward
from liger_like.planning import Setting
from liger_like.planning._models import build, materialise, model_class

MODEL, CONFIG, PREFIX = "Llama-3.2-1B", CONFIGS["1b"], "planned"
ROWS = {"micro_batch": 4, "seq": 1024}
SETTINGS = (
    Setting(**ROWS, lora=16),
    Setting(**ROWS, lora=16, patched=False),
    Setting(**ROWS, lora=16, checkpoint="full"),
    Setting(**ROWS, accumulation=4),
    Setting(**ROWS, step_in_backward=True),
    Setting(**ROWS, optimizer="sgd"),
    Setting(**ROWS, optimizer="adamw8bit"),
    Setting(8, 4096, checkpoint="full", checkpoint_layers=2),
)
QUICK = Setting(2, 32, lora=4, accumulation=2), Setting(2, 32, checkpoint="full", checkpoint_layers=2)
WARMUPS, STEPS = 3, 3


def text_of(setting: Setting) -> str:
    """Return the setting in words, with the tokens of a row."""
    return f"S {setting.seq}, {setting.text()}"


ORDER = {MODEL: [*map(text_of, SETTINGS)]}


def optimizer_kind(name: str) -> Any:
    """Return a function of parameters that makes the optimizer ``name`` of a setting."""
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return partial(AdamW8bit, lr=1e-5)
    return partial({"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name], lr=1e-5, fused=True)


def measured(config: Any, setting: Setting) -> Row:
    """Return time and peaks of a step of ``setting`` with random weights and tokens."""
    model = build(*model_class(config), setting)
    materialise(model, DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    if setting.checkpoint_layers > 1:
        group_checkpoints(model, setting.checkpoint_layers)
    kind = optimizer_kind(setting.optimizer)
    if setting.step_in_backward:
        step_in_backward(model, kind)
    optimizer = None if setting.step_in_backward else kind([p for p in model.parameters() if p.requires_grad])
    tokens = tokens_of(config, setting.micro_batch, setting.seq)

    def step() -> None:
        for _ in range(setting.accumulation):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    times(step, WARMUPS)
    reset_peak()
    ms = statistics.median(times(step, STEPS))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if GPU else (0, 0)
    gib, reserved = (peak / 2**30 for peak in peaks)
    return {"ms": ms, "tokens": setting.batch * setting.seq / ms * 1e3, "gib": gib, "reserved": reserved}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark planned")
    numbers = range(len(SETTINGS))
    listed = "; ".join(f"{i}: {text_of(setting)}" for i, setting in enumerate(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=listed)
    parser.add_argument("--quick", action="store_true", help="a tiny model, printed only; needs no GPU")
    options = parser.parse_args()
    if not GPU and not options.quick:
        parser.error("needs a GPU (all but --quick)")
    result = environment("transformers", "peft", "bitsandbytes") | {"parts": {MODEL: {}}}
    config = CONFIGS["tiny"] if options.quick else CONFIG
    for setting in QUICK if options.quick else [SETTINGS[i] for i in options.settings]:
        clear()
        row = result["parts"][MODEL][text_of(setting)] = attempt(partial(measured, config, setting))
        print(f"{text_of(setting)}: {row}", flush=True)
        if not options.quick:
            update(rounded(result), PREFIX, ORDER)
