"""Train a tiny Llama by TRL's GRPO to continue lines of Python's own sources in small letters.

    python examples/grpo.py               # random weights, a token per byte, no download; a minute on a CPU
    python examples/grpo.py --steps 100

Needs `pip install trl` besides liger_like with its extras hf and cli. The call of patch_trainer is all that concerns
liger_like: its report's row "trl head" says that TRL's head runs our op, and strict=True makes it raise where this head
or a module of the model would be left alone. Exit code 1: the reward did not rise.
"""

import random
import statistics
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from liger_like.trainer import patch_trainer

GPU = torch.cuda.is_available()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, one for the end and one for padding."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def prompts(count: int) -> Dataset:
    """Return lines of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if 20 < len(line) < 40]
    return Dataset.from_list([{"prompt": line} for line in random.Random(0).sample(lines, count)])


def small_letters(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the share of small letters in each completion."""
    return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in completions]


def main(
    steps: Annotated[int, typer.Option(min=10)] = 40,
    completions: Annotated[int, typer.Option(min=2, help="completions of a prompt")] = 8,
) -> None:
    """Train with TRL's GRPOTrainer, whose head runs fused_linear_logprobs."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
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
    with TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4 * completions,
            num_generations=completions,
            max_completion_length=12,
            learning_rate=1e-2,
            logging_steps=1,
            bf16=GPU,
            use_cpu=not GPU,
            report_to=[],
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=small_letters,
            args=arguments,
            train_dataset=prompts(4 * steps),
            processing_class=tokenizer,
        )
        report = patch_trainer(trainer, strict=True)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(report)
    print(
        "TRL's head ran fused_linear_logprobs, " + ("its kernels" if GPU else "without a GPU its definition in torch")
    )
    print(f"reward {first:.3f} in the first five steps, {last:.3f} in the last five of {len(rewards)}")
    if not last > first:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
