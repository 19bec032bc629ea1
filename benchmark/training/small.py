"""Times small training steps, which are launch-bound: eager, compiled and as CUDA graphs; of whole models and of LoRA.

    make bench-small                                  measures, writes results/ and from it the report
    python -m benchmark small --settings 0 3          some of the settings; results/ keeps what it has of the others
    python -m benchmark small --contestants Liger     and some of the contestants
    python -m benchmark small --quick                 a tiny model, printed only; needs no GPU
    python -m benchmark small --report                the report again, without a GPU

Every contestant of a setting has a process of its own. All processes build and compile at once, then they take turns,
each round in another order. As many run side by side as fit into the GPU's memory. A contestant that fails beside
others is measured again alone. What is measured is written at once.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmark.common.markdown import Row
from benchmark.common.measure import (
    Step,
    Timer,
    attempt,
    environment,
    merged,
    microseconds,
    present,
    rounded,
    settle,
    update,
)
from benchmark.common.processes import GPU, times
from benchmark.common.turns import Remote
from benchmark.training.small_report import tables, write_report
from benchmark.training.training import (
    Preparation,
    Setting,
    build,
    compile_it,
    nothing,
    optimizer_of,
    patch,
    patch_and_compile,
    patch_by_liger,
    tokens_of,
    trainer,
)
from examples.parallel import LARGER
from examples.train import CONFIGS
from liger_like import GraphedStep

WARMUP, STEPS, ROUNDS = 5, 8, 5  # reduce-overhead and GraphedStep replay from the third or fourth step on
TIMEOUT = 240.0  # seconds of a contestant's start or turn
RANK = 16
CONTEXT_GIB = 1.5  # of CUDA, its libraries and what the allocator cannot use


class Model(NamedTuple):
    """A config, and more GiB than a step needs for the activations of 1024 tokens."""

    config: PreTrainedConfig
    gib: float


MODELS = {
    "Llama-3.2-1B": Model(CONFIGS["1b"], 2.5),
    "Qwen3-0.6B": Model(
        Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        2.5,
    ),
    "SmolLM2-135M": Model(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        ),
        1.5,
    ),
    "Llama-3-8B": Model(LARGER["8b"], 9),
    "tiny": Model(CONFIGS["tiny"], 1),
}
SHAPES = (1, 128), (1, 512), (1, 1024), (4, 512)
LORA_SHAPES = (1, 256), (1, 1024), (4, 512)
SETTINGS = (
    *(
        setting
        for model in ("Llama-3.2-1B", "Qwen3-0.6B", "SmolLM2-135M")
        for setting in (*(Setting(model, *shape) for shape in SHAPES), Setting(model, 4, 512, checkpointing=True))
    ),
    *(Setting(model, *shape, lora=True) for model in ("Llama-3.2-1B", "Llama-3-8B") for shape in LORA_SHAPES),
)
QUICK = Setting("tiny", 1, 32), Setting("tiny", 2, 32, checkpointing=True), Setting("tiny", 1, 32, lora=True)


def patch_for_graph(model: PreTrainedModel) -> None:
    patch(model)
    if model.is_gradient_checkpointing:  # a graph cannot restore random numbers
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def graphed(model: PreTrainedModel) -> Callable[[Tensor], Any]:
    """Return a training step on tokens [B, S] that becomes a CUDA graph."""
    step = GraphedStep(model, optimizer_of(model))
    return lambda tokens: step(input_ids=tokens, labels=tokens, use_cache=False)


class Contestant(NamedTuple):
    """How a model is changed, and what makes a training step of it."""

    prepare: Preparation
    trainer: Callable[[PreTrainedModel], Callable[[Tensor], Any]] = trainer


CONTESTANTS = {
    "transformers": Contestant(nothing),
    "transformers, compiled": Contestant(compile_it),
    "transformers, reduce-overhead": Contestant(partial(compile_it, mode="reduce-overhead")),
    "liger_like": Contestant(patch),
    "liger_like, compiled": Contestant(patch_and_compile),
    "liger_like, reduce-overhead": Contestant(partial(patch_and_compile, mode="reduce-overhead")),
    "liger_like, graph": Contestant(patch_for_graph, graphed),
    "Liger": Contestant(patch_by_liger),
}
ORDER = {setting.text(): CONTESTANTS for setting in (*SETTINGS, *QUICK)}


def adapt(model: PreTrainedModel) -> None:
    """Freeze the model and give every linear layer except the head an adapter of the weight's dtype."""
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, target_modules="all-linear"), model)


def step_of(contestant: Contestant, setting: Setting) -> Step:
    config = MODELS[setting.model].config

    def prepare(model: PreTrainedModel) -> None:
        if setting.lora:
            adapt(model)
        contestant.prepare(model)

    train_on = contestant.trainer(build(prepare, config, setting.checkpointing))
    return partial(train_on, tokens_of(config, setting.batch, setting.seq))


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def host_us(step: Step) -> list[float]:
    """Return times in us from the call of a step, while the GPU is idle, to its return."""
    several: list[float] = []
    for _ in range(STEPS):
        wait()
        several += microseconds(step, 1)
    return several


def turn(step: Step, timer: Timer) -> list[float]:
    """Return the times of warm steps, and leave no unused memory."""
    step()
    several = timer()
    wait()
    torch.cuda.empty_cache()
    return several


def contend(name: str, setting: Setting) -> Row:
    """Return the peak memory of a contestant that is warm, and timers of its step and of the host's part."""
    step = step_of(CONTESTANTS[name], setting)
    timers: Row = {"ms": partial(times, step, STEPS), "host_us": partial(host_us, step)}
    turn(step, partial(times, step, WARMUP))
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"gib": gib, **{key: partial(turn, step, timer) for key, timer in timers.items()}}


def in_turns(names: Sequence[str], setting: Setting, timeout: float) -> dict[str, Row]:
    remotes = {name: Remote(contend, name, setting, timeout=timeout) for name in names}
    rows = {name: attempt(remote.row) for name, remote in remotes.items()}
    settle(rows.values(), ROUNDS, wait=lambda: None)
    for remote in remotes.values():
        remote.end()
    for row in rows.values():
        if "reason" not in row:
            row["tokens"] = setting.batch * setting.seq / row["ms"] * 1e3
    return rows


def needed(setting: Setting) -> float:
    """Return more bytes than a contestant takes: its context, weights, states of AdamW and activations."""
    model = MODELS[setting.model]
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(model.config).num_parameters()
    activations = model.gib * setting.batch * setting.seq / 1024
    return parameters * (2 if setting.lora else 8) + (CONTEXT_GIB + activations) * 2**30


def together(setting: Setting) -> int:
    """Return the number of contestants whose memory fits at once."""
    memory = torch.cuda.get_device_properties().total_memory if GPU else 4 << 30
    return max(1, int(memory / needed(setting)))


def measure(names: Sequence[str], setting: Setting, timeout: float) -> dict[str, Row]:
    """Return the row of each contestant."""
    groups = -(-len(names) // together(setting))
    rows: dict[str, Row] = {}
    for i in range(groups):
        group = names[i::groups]
        rows |= in_turns(group, setting, timeout)
        for name in group:
            if "reason" in rows[name] and len(group) > 1:
                rows[name] = in_turns([name], setting, timeout)[name] | {"alone": True}
    return {name: rows[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark small")
    numbers = range(len(SETTINGS))
    listed = "; ".join(f"{i}: {setting.text()}" for i, setting in enumerate(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=listed)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of a contestant's start or turn")
    parser.add_argument("--quick", action="store_true", help="a tiny model, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not GPU and not options.quick:
            parser.error("needs a GPU (all but --quick and --report)")
        result = environment("transformers", "peft", "Liger") | {"parts": {}}
        names = [name for name in present(CONTESTANTS) if name in options.contestants]
        for setting in QUICK if options.quick else [SETTINGS[i] for i in options.settings]:
            rows = result["parts"][setting.text()] = measure(names, setting, options.timeout)
            print(f"{setting.text()}: {rows}", flush=True)
            if not options.quick:
                update(rounded(result), "small", ORDER)
        print(tables(merged({}, rounded(result), ORDER)))
        if options.quick:
            return
    write_report()
