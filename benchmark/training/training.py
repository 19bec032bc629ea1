"""Times training steps of whole models on a GPU: as transformers has them, patched by liger_like, and by Liger.

    make bench-training                            measures, writes results/ and from it the report
    python -m benchmark training --settings 0 4    some of the settings; results/ keeps what it has of the others
    python -m benchmark training --contestants transformers liger_like Liger    and some of the contestants
    python -m benchmark training --forms           only what one model may fuse, against each other
    python -m benchmark training --report          the report again, without a GPU

A step is forward, backward and fused AdamW in bf16, on random tokens and weights; its time is between two events on the
GPU, and nothing waits for the GPU between steps. Peak memory is all that torch allocated: weights, gradients and the
optimizer's state, too. Every model is built anew from one seed; Liger comes last, because it changes transformers for
the whole process.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmark.common.markdown import Row
from benchmark.common.measure import Step, attempt, environment, gpu_times, known, present, rounded, save, settle
from benchmark.common.processes import DEVICE, reset_peak, times
from benchmark.training.training_report import tables, write_report
from examples.train import CONFIGS
from liger_like import patching
from liger_like.parallel import checkpoint_policy
from liger_like.patches import Recogniser
from liger_like.patches.add_rms_norm import AddRMSNorm
from liger_like.patches.qk_norm_rope import QKNormRope

WARMUP, STEPS, ROUNDS = 3, 8, 9
SELECTIVE = "liger_like, selective"  # measured in the checkpointed settings
FUSED = (QKNormRope.pattern, AddRMSNorm.pattern)
Preparation = Callable[[PreTrainedModel], None]
MODELS: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B": CONFIGS["1b"],
    "Qwen3-1.7B": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Gemma-2-2B": Gemma2Config(
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=256000,
    ),
    "Qwen3-30B-A3B, 6 layers": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
    ),
    "GPT-OSS-20B, 4 layers": GptOssConfig(
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
    ),
    # so many of the 256 experts, and of the three dense layers, that a step fits into 80 GB
    "DeepSeek-V3, 4 layers of 16 experts": DeepseekV3Config(
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=16,
        num_experts_per_tok=8,
        vocab_size=129280,
    ),
}


class Setting(NamedTuple):
    """A model's name and what it is trained on."""

    model: str
    batch: int
    seq: int
    checkpointing: bool = False
    lora: bool = False

    def text(self) -> str:
        """Return model, shape and options as the report names them."""
        options = ", checkpointed" * self.checkpointing + ", LoRA" * self.lora
        return f"{self.model}, B {self.batch} S {self.seq}{options}"


SETTINGS = (
    Setting("Llama-3.2-1B", 4, 1024),
    Setting("Llama-3.2-1B", 2, 8192),
    Setting("Llama-3.2-1B", 8, 4096, checkpointing=True),
    Setting("Llama-3.2-1B", 64, 1024, checkpointing=True),
    Setting("Qwen3-1.7B", 4, 2048),
    Setting("Gemma-2-2B", 4, 2048),
    Setting("Qwen3-30B-A3B, 6 layers", 4, 2048),
    Setting("GPT-OSS-20B, 4 layers", 4, 2048),
    Setting("DeepSeek-V3, 4 layers of 16 experts", 4, 2048),
)
SETTINGS_OF_FORMS = Setting("Llama-3.2-1B", 4, 1024), Setting("Qwen3-1.7B", 4, 2048)


def nothing(_: object) -> None: ...


def compile_it(model: PreTrainedModel, mode: str = "default") -> None:
    model.compile(dynamic=False, mode=mode)


def patch(model: PreTrainedModel) -> None:
    patching.patch(model)


def patch_and_select(model: PreTrainedModel, *save: str) -> None:
    """Checkpoint layers and keep these results; without names, those of the policy's default."""
    patch(model)
    policy = checkpoint_policy(save) if save else checkpoint_policy()
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})


def patch_and_keep_attention(model: PreTrainedModel) -> None:
    patch_and_select(model, "attention", "loss")


def patch_and_compile(model: PreTrainedModel, mode: str = "default") -> None:
    patch(model)
    compile_it(model, mode)


def patch_with(*fused: Recogniser) -> Preparation:
    """Return ``patch`` with these of the recognisers that fuse what others recognise one by one."""
    others = {name: r for name, r in patching.RECOGNISERS.items() if name not in FUSED}

    def prepare(model: PreTrainedModel) -> None:
        with mock.patch.object(patching, "RECOGNISERS", {r.pattern: r for r in fused} | others):
            patch(model)

    return prepare


def patch_by_liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


CONTESTANTS: dict[str, Preparation] = {
    "transformers": nothing,
    "transformers, compiled": compile_it,
    "liger_like": patch,
    SELECTIVE: patch_and_select,
    "liger_like, compiled": patch_and_compile,
    "Liger": patch_by_liger,
}
FORMS: dict[str, Preparation] = {
    "norms of q and k fused with RoPE": patch_with(QKNormRope()),
    "additions fused with norms": patch_with(AddRMSNorm()),
    "neither": patch_with(),
}


def clear() -> None:
    gc.collect()  # models hold reference cycles: the last one would count as the next one's memory
    torch.compiler.reset()
    torch.cuda.empty_cache()
    reset_peak()


def build(prepare: Preparation, config: PreTrainedConfig, checkpointing: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    prepare(model)
    return model


def tokens_of(config: PreTrainedConfig, batch: int, seq: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, seq), device=DEVICE)


def optimizer_of(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=DEVICE == "cuda")


def trainer(model: PreTrainedModel) -> Callable[..., None]:
    """Return a training step on tokens [B, S], which tells the name of each phase as it ends, and can be captured."""
    optimizer = optimizer_of(model)

    def step(tokens: Tensor, ended: Callable[[str], None] = nothing) -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        ended("forward")
        loss.backward()
        ended("backward")
        optimizer.step()
        optimizer.zero_grad()
        ended("optimizer")

    return step


def step_of(prepare: Preparation, setting: Setting) -> Step:
    """Return a training step of a new model, warm."""
    config = MODELS[setting.model]
    train_on = trainer(build(prepare, config, setting.checkpointing))
    step = partial(train_on, tokens_of(config, setting.batch, setting.seq))
    times(step, WARMUP)
    return step


def row_of(step: Step, tokens: int, repeats: int) -> Row:
    """Measure step time, tokens/s and peak memory."""
    ms = statistics.median(times(step, repeats))
    return {"ms": ms, "tokens": tokens / ms * 1e3, "gib": torch.cuda.max_memory_allocated() / 2**30}


def train(prepare: Preparation, setting: Setting) -> Row:
    clear()
    return row_of(step_of(prepare, setting), setting.batch * setting.seq, STEPS)


def compare_forms(setting: Setting) -> list[Row]:
    """Return step times of models that fuse different layers; all stay in memory and take turns, so that 1 % shows."""
    clear()
    rows: list[Row] = [
        {"name": name, "ms": partial(gpu_times, step_of(prepare, setting), 2)} for name, prepare in FORMS.items()
    ]
    settle(rows, ROUNDS)
    return rows


def measure(settings: Collection[Setting], names: Collection[str]) -> dict[str, list[Row]]:
    """Return rows of contestants for each setting; Liger runs after all others, since it changes the process."""
    rows: dict[str, list[Row]] = {setting.text(): [] for setting in settings}
    for name, prepare in present({name: CONTESTANTS[name] for name in CONTESTANTS if name in names}).items():
        for setting in settings:
            if name == SELECTIVE and not setting.checkpointing:
                continue
            rows[setting.text()].append({"name": name} | attempt(partial(train, prepare, setting)))
    return rows


def merged(earlier: Row, now: Row) -> Row:
    """Return the rows measured now, and earlier rows of other settings and contestants."""
    for key, names in (("forms", FORMS), ("settings", CONTESTANTS)):
        before, found = earlier.get(key, {}), {}
        for text in (setting.text() for setting in SETTINGS):
            rows = {row["name"]: row for row in (*before.get(text, ()), *now[key].get(text, ()))}
            if text in before or text in now[key]:
                found[text] = sorted(rows.values(), key=lambda row: [*names].index(row["name"]))
        now[key] = found
    return now


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark training")
    numbers = range(len(SETTINGS))
    listed = "; ".join(f"{i}: {setting.text()}" for i, setting in enumerate(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=listed)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--forms", action="store_true", help="only what one model may fuse, against each other")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        chosen = [SETTINGS[i] for i in options.settings]
        result = environment("transformers", "Liger")
        result["forms"] = {setting.text(): compare_forms(setting) for setting in SETTINGS_OF_FORMS if setting in chosen}
        result["settings"] = {} if options.forms else measure(chosen, options.contestants)
        result = merged(known(result, "training"), rounded(result))
        print(tables(result))
        save(result, "training")
    write_report()
