"""Train a tiny Llama by TRL's DPO on Python's own sources: lines as they are, preferred to the same lines shuffled.

    python examples/dpo.py                # random weights, a token per byte, no download; a minute on a CPU
    python examples/dpo.py --steps 100

Needs `pip install trl` besides liger_like with its extras hf and cli. The call of patch_trainer is all that concerns
liger_like: its report's row "trl head" says that TRL's head runs our op, and strict=True makes it raise where this head
or a module of the model would be left alone. Exit code 1: the loss did not fall.
"""

import random
import statistics
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from liger_like.trainer import patch_trainer

GPU = torch.cuda.is_available()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, one for the end and one for padding."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def pairs(count: int) -> Dataset:
    """Return lines of the standard library, each after the line before it, and the same lines shuffled."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if 20 < len(line) < 40]
    draw, found = random.Random(0), []
    for i in draw.sample(range(1, len(lines)), count):
        shuffled = draw.sample(lines[i], len(lines[i]))
        found.append({"prompt": lines[i - 1] + "\n", "chosen": lines[i], "rejected": "".join(shuffled)})
    return Dataset.from_list(found)


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights, the same at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def main(
    steps: Annotated[int, typer.Option(min=4)] = 30,
    batch: Annotated[int, typer.Option(min=1, help="pairs in a step")] = 8,
) -> None:
    """Train with TRL's DPOTrainer, whose head runs fused_linear_logprobs."""
    tokenizer = byte_tokenizer()
    with TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=3e-3,
            logging_steps=1,
            bf16=GPU,
            use_cpu=not GPU,
            report_to=[],
            save_strategy="no",
        )
        trainer = DPOTrainer(
            tiny_llama(tokenizer),
            ref_model=tiny_llama(tokenizer),
            args=arguments,
            train_dataset=pairs(steps * batch),
            processing_class=tokenizer,
        )
        report = patch_trainer(trainer, strict=True)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(report)
    print(
        "TRL's head ran fused_linear_logprobs, " + ("its kernels" if GPU else "without a GPU its definition in torch")
    )
    last = statistics.mean(losses[-3:])
    print(f"loss {losses[0]:.4f} at the first step, {last:.4f} in the last three of {len(losses)}")
    if not last < losses[0]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
