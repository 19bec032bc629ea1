"""Train a Hugging Face model twice, unpatched and patched, and compare losses, speed and memory.

    python examples/train.py                           # a tiny Llama on a CPU, the shape of Llama-3.2-1B on a GPU
    python examples/train.py --config DIR --tokenizer DIR --text FILE --steps 100

Exit code 1: the losses differ by more than rounding explains.
"""

import gc
import os
import statistics
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

# without a GPU Triton interprets the same kernels; it reads this variable when it is imported
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig

import liger_like

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

CONFIGS = {
    "tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    ),
    "1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 3  # the first steps compile kernels and fill the allocator: tokens/s leaves them out
# How much may the losses differ? The patched model rounds in other places, and training amplifies any difference. So
# the unpatched model is trained once more with every weight moved by one rounding of its dtype. Rounding can explain a
# difference as large as that run's. The loss, a sum over tokens in fp32, may also differ by a few roundings of its own.
ROUNDINGS_OF_THE_LOSS = 10


@dataclass(frozen=True)
class Job:
    """Settings that all runs share: the model, its batches [steps, batch, seq] and how it is trained."""

    config: PreTrainedConfig
    batches: Tensor
    dtype: torch.dtype
    compile: bool
    checkpointing: bool
    lr: float
    seed: int


@dataclass(frozen=True)
class Run:
    """Result of one training run: the loss of each step, tokens/s and the peak GiB allocated on the GPU."""

    losses: Tensor
    speed: float
    memory: float | None
    report: str = ""


def read_tokens(text: Path | None, tokenizer: Path | None, config: PreTrainedConfig) -> Tensor:
    """Return token ids [T] of the file ``text``, or of the sources of Python's standard library.

    Without a tokenizer each byte is a token. Raises typer.BadParameter if an id is outside the model's vocabulary.
    """
    files = [text] if text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)
    if tokenizer:
        ids = AutoTokenizer.from_pretrained(tokenizer)(data.decode(errors="replace"), return_tensors="pt").input_ids[0]
    else:
        ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    if ids.max() >= config.vocab_size:
        raise typer.BadParameter(f"token {int(ids.max())} is outside the model's vocabulary of {config.vocab_size}")
    return ids


def make_batches(ids: Tensor, steps: int, batch: int, seq: int, seed: int) -> Tensor:
    """Return random windows [steps, batch, seq] of ``ids`` [T]. Raises typer.BadParameter if ``seq`` exceeds T."""
    if len(ids) < seq:
        raise typer.BadParameter(f"{seq} is longer than the text of {len(ids)} tokens", param_hint="--seq")
    starts = torch.randint(len(ids) - seq + 1, (steps, batch, 1), generator=torch.Generator().manual_seed(seed))
    return ids[starts + torch.arange(seq)].to(DEVICE)


@torch.no_grad()
def move_by_one_rounding(model: torch.nn.Module) -> None:
    """Multiply each weight by 1 + eps or 1 - eps of its dtype at random, in place."""
    for weight in model.parameters():
        weight.mul_(1 + torch.finfo(weight.dtype).eps * (2 * torch.randint_like(weight, 2) - 1))


def train(name: str, job: Job, progress: Progress, *, patched: bool = False, moved: bool = False) -> Run:
    """Train a new model on the job's batches; ``moved`` starts with every weight moved by one rounding."""
    gc.collect()  # models hold reference cycles: without this the last model would count into this run's memory
    torch.compiler.reset()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(job.seed)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(job.config, dtype=job.dtype).train()
    if moved:
        move_by_one_rounding(model)
    report = str(liger_like.patch(model)) if patched else ""
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    if job.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, fused=GPU)

    losses, seconds = [], []
    task = progress.add_task(name, total=len(job.batches), state="")
    for batch in job.batches:
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # synchronises, so the time is that of the whole step
        seconds.append(time.perf_counter() - start)
        state = f"loss {losses[-1]:.4f}, {batch.numel() / seconds[-1]:,.0f} tokens/s"
        progress.update(task, advance=1, state=state)
    speed = job.batches[0].numel() / statistics.median(seconds[WARM_UP:])
    memory = torch.cuda.max_memory_allocated() / 2**30 if GPU else None
    return Run(torch.tensor(losses, dtype=torch.float64), speed, memory, report)


def compare(unpatched: Run, patched: Run, moved: Run, console: Console) -> bool:
    """Print a comparison of the runs, and return True if the losses agree."""
    difference = (patched.losses - unpatched.losses).abs().max().item()
    limit = (moved.losses - unpatched.losses).abs().max().item()
    limit += ROUNDINGS_OF_THE_LOSS * torch.finfo(torch.float32).eps * unpatched.losses.abs().max().item()
    agree = difference <= limit  # False for a NaN, too

    table = Table("", "unpatched", "patched")
    table.add_row("final loss", *(f"{run.losses[-1]:.6f}" for run in (unpatched, patched)))
    table.add_row("largest loss difference", "", f"{difference:.1e} (rounding explains {limit:.1e})")
    table.add_row("tokens/s, median step", *(f"{run.speed:,.0f}" for run in (unpatched, patched)))
    if unpatched.memory and patched.memory:
        table.add_row("peak memory", *(f"{run.memory:.2f} GiB" for run in (unpatched, patched)))
    console.print(table)
    if not GPU:
        console.print("No GPU: the kernels ran in Triton's interpreter, which tests their results, not their speed.")
    console.print("The losses agree." if agree else "[bold red]The losses differ by more than rounding explains.")
    return agree


def main(
    size: Annotated[Literal["tiny", "1b"], typer.Option(help="size of the Llama")] = "1b" if GPU else "tiny",
    config: Annotated[Path | None, typer.Option(help="folder with a config.json, instead of --size")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="folder of a tokenizer; default: one token per byte")] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="text file; Python's sources by default")
    ] = None,
    steps: Annotated[int, typer.Option(min=WARM_UP + 1)] = 40 if GPU else 20,
    batch: Annotated[int, typer.Option(min=1)] = 4 if GPU else 2,
    seq: Annotated[int, typer.Option(min=2)] = 1024 if GPU else 32,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option()] = "bf16" if GPU else "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model")] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="recompute activations")] = False,
    lr: Annotated[float, typer.Option(min=0)] = 3e-4 if GPU else 3e-3,
    seed: int = 0,
) -> None:
    """Train a model twice from one seed, unpatched and patched with liger_like, and compare the two."""
    if not GPU and dtype == "bf16":
        raise typer.BadParameter("bf16 needs a GPU: Triton's interpreter computes it wrongly", param_hint="--dtype")
    model_config = AutoConfig.from_pretrained(config) if config else CONFIGS[size]
    batches = make_batches(read_tokens(text, tokenizer, model_config), steps, batch, seq, seed)
    job = Job(model_config, batches, DTYPES[dtype], compile, checkpointing, lr, seed)
    console = Console()
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[state]}"), console=console) as progress:
        unpatched = train("unpatched", job, progress)
        moved = train("unpatched, moved by one rounding", job, progress, moved=True)
        patched = train("patched", job, progress, patched=True)
    print(patched.report)
    if not compare(unpatched, patched, moved, console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
