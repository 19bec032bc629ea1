"""Times training steps of TRL's trainers on a GPU: as they are, and by ``patch_trainer``; whole models and LoRA.

    make bench-trainers                              measures, writes results/ and from it the report
    python -m benchmark trainers --settings 0 5      some of the settings; results/ keeps what it has of the others
    python -m benchmark trainers --quick             a tiny model, printed only; needs no GPU
    python -m benchmark trainers --report            the report again, without a GPU

SFT, DPO and GRPO train a model of random weights in bf16 on random tokens. GRPO gets its completions: nothing is
generated and nothing is rewarded. DPO compares with a second model, with LoRA with the model without its adapters.
A step is what the trainer does between two ends of steps, the optimizer included; the time is the median, the memory
the peak of all that torch allocated. What is measured is written at once.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from benchmark.common.markdown import Row
from benchmark.common.measure import attempt, environment, merged, present, rounded, update
from benchmark.common.processes import DEVICE, GPU
from benchmark.training.trainers_report import PREFIX, tables, write_report
from benchmark.training.training import build, clear, nothing
from examples.train import CONFIGS

WARMUP, STEPS = 3, 8
RANK = 16
WORDS = 1000  # of the tokenizer


class Size(NamedTuple):
    """A config's name, sequences of a step, and tokens of a prompt and of a completion."""

    config: str
    sequences: int
    prompt: int
    completion: int


class Setting(NamedTuple):
    """A trainer, whether it trains adapters alone, and how large its steps are."""

    kind: str
    lora: bool
    size: Size

    def text(self) -> str:
        model, sequences, prompt, completion = self.size
        options = ", LoRA" * self.lora
        return f"{self.kind}, Llama-3.2-{model.upper()}, B {sequences} S {prompt + completion}{options}"


FULL, TINY = Size("1b", 8, 256, 768), Size("tiny", 4, 4, 12)
SETTINGS, QUICK = (
    tuple(Setting(kind, lora, size) for kind in ("SFT", "DPO", "GRPO") for lora in (False, True))
    for size in (FULL, TINY)
)


class Clock(TrainerCallback):
    """Records when steps end: on the GPU, or on the host without one."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if GPU:
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())

    def times(self) -> list[float]:
        """Return the times in ms between the ends of warm steps."""
        pairs = itertools.pairwise(self.ends[WARMUP - 1 :])
        if GPU:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1 and so on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def text(tokens: int) -> str:
    return "".join(f" w{i}" for i in torch.randint(2, 200, (tokens,)).tolist())


def model_of(size: Size) -> PreTrainedModel:
    return build(nothing, CONFIGS[size.config], checkpointing=False)


def arguments(folder: str, sequences: int) -> dict[str, Any]:
    """Return the arguments that all trainers share."""
    return {
        "output_dir": folder,
        "max_steps": WARMUP + STEPS,
        "per_device_train_batch_size": sequences,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "use_cpu": not GPU,
        "bf16": False,  # the model is
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def sft(size: Size, folder: str, options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    length = size.prompt + size.completion
    rows = [{"input_ids": torch.randint(2, 200, (length,)).tolist()} for _ in range(size.sequences)]
    config = SFTConfig(**arguments(folder, size.sequences), max_length=length)
    return SFTTrainer(model_of(size), config, train_dataset=Dataset.from_list(rows), **options)


def dpo(size: Size, folder: str, options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    names = {"prompt": size.prompt, "chosen": size.completion - 1, "rejected": size.completion - 1}  # and an end
    rows = [{name: text(tokens) for name, tokens in names.items()} for _ in range(size.sequences)]
    config = DPOConfig(**arguments(folder, size.sequences // 2), max_length=size.prompt + size.completion)
    reference = None if "peft_config" in options else model_of(size)
    return DPOTrainer(model_of(size), reference, config, train_dataset=Dataset.from_list(rows), **options)


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def grpo(size: Size, folder: str, options: dict[str, Any]) -> Any:
    """Return a trainer whose batches hold completions and advantages."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": text(size.prompt)} for _ in range(size.sequences)]
    lengths = {"num_generations": size.sequences, "max_completion_length": size.completion}
    config = GRPOConfig(**arguments(folder, size.sequences), **lengths)
    model, rewards = model_of(size), no_reward
    trainer = GRPOTrainer(model, rewards, config, train_dataset=Dataset.from_list(rows), **options)
    batch: dict[str, Any] = {
        f"{name}_ids": torch.randint(2, 200, (size.sequences, tokens), device=DEVICE)
        for name, tokens in (("prompt", size.prompt), ("completion", size.completion))
    }
    batch |= {name.replace("ids", "mask"): torch.ones_like(ids) for name, ids in batch.items()}
    batch["advantages"] = torch.randn(size.sequences, device=DEVICE)
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    trainer._prepare_inputs = lambda _: dict(batch)
    return trainer


KINDS = {"SFT": sft, "DPO": dpo, "GRPO": grpo}


def patched(trainer: Any) -> None:
    """Patch a trainer. Raises RuntimeError if TRL's head would still run: its time is not ours."""
    from liger_like.trainer import patch_trainer  # type: ignore[attr-defined]

    heads = [row for row in patch_trainer(trainer).rows if row.pattern == "trl head"]
    if not heads or any(row.status != "patched" for row in heads):
        raise RuntimeError("; ".join(row.reason for row in heads) or "no head of TRL")


CONTESTANTS: dict[str, Callable[[Any], None]] = {"TRL": nothing, "liger_like": patched}
ORDER = {setting.text(): CONTESTANTS for setting in (*SETTINGS, *QUICK)}


def train(prepare: Callable[[Any], None], setting: Setting) -> Row:
    """Return step time, tokens/s and peak memory of a new trainer."""
    from peft import LoraConfig

    clear()
    torch.manual_seed(0)
    clock = Clock()
    options: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [clock]}
    if setting.lora:
        options["peft_config"] = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        trainer = KINDS[setting.kind](setting.size, folder, options)
        prepare(trainer)
        trainer.train()
    ms = statistics.median(clock.times())
    tokens = setting.size.sequences * (setting.size.prompt + setting.size.completion)
    return {"ms": ms, "tokens": tokens / ms * 1e3, "gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark trainers")
    numbers = range(len(SETTINGS))
    listed = "; ".join(f"{i}: {setting.text()}" for i, setting in enumerate(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=listed)
    parser.add_argument("--quick", action="store_true", help="a tiny model, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not GPU and not options.quick:
            parser.error("needs a GPU (all but --quick and --report)")
        result = environment("transformers", "peft", "TRL") | {"parts": {}}
        settings = QUICK if options.quick else SETTINGS
        for setting in (settings[i] for i in options.settings):
            contestants = present(CONTESTANTS)
            rows = {name: attempt(partial(train, prepare, setting)) for name, prepare in contestants.items()}
            result["parts"][setting.text()] = rows
            print(f"{setting.text()}: {rows}", flush=True)
            if not options.quick:
                update(rounded(result), PREFIX, ORDER)
        print(tables(merged({}, rounded(result), ORDER)))
        if options.quick:
            return
    write_report()
