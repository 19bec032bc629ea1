"""Trains a small Llama on the sources of Python's standard library, with accelerate, and prints the loss of each step.

    accelerate launch --config_file examples/accelerate/single.yaml examples/accelerate/train.py
    accelerate launch --config_file examples/accelerate/ddp.yaml examples/accelerate/train.py
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/accelerate/train.py

The model is patched before accelerate prepares it. ``ddp_cpu.yaml`` is for machines without GPUs, where the patched
model runs plain torch. The global batch is 8 sequences however many processes share it, so the losses are the same.
"""

import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import liger_like

STEPS, BATCH, LENGTH = 8, 8, 32


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config).train()
    accelerator.print(liger_like.patch(model, strict=True))

    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: STEPS * BATCH * LENGTH].long().view(-1, LENGTH)
    batches = DataLoader(ids, batch_size=BATCH // accelerator.num_processes)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    for step, batch in enumerate(batches):
        output = model(input_ids=batch, labels=batch, use_cache=False)
        assert output.logits is None  # the loss is fused
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        loss = accelerator.reduce(output.loss.detach(), reduction="mean")
        accelerator.print(f"step {step} loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
