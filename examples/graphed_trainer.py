"""Trains a small Llama with transformers' Trainer, each step as one CUDA graph, and prints what the Trainer logs.

    python -m examples.graphed_trainer

Copy ``GraphedTrainer`` for a causal language model on one GPU. Its optimizer must be capturable. Batches of few lengths
are replayed; a batch of another length is an ordinary step. Without a GPU all steps are ordinary.
"""

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import liger_like

BATCH, ACCUMULATED, STEPS, LENGTH = 4, 2, 8, 64


class GraphedTrainer(Trainer):
    """Trainer whose training step also clips and updates; the Trainer then finds no gradients to update with."""

    graphed: liger_like.GraphedStep | None = None

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch, the last of which updates; ``num_items_in_batch`` scales the loss for accumulation."""
        model.train()
        if self.graphed is None:
            optimizer = self.optimizer.optimizer  # within accelerate's
            self.graphed = liger_like.GraphedStep(model, optimizer, max_norm=self.args.max_grad_norm or None)
        run = self.graphed if self.accelerator.sync_gradients else self.graphed.accumulate
        return run(**self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the norm of the gradients before they were clipped."""
        if "grad_norm" in logs and self.graphed is not None and self.graphed.grad_norm is not None:
            logs["grad_norm"] = self.graphed.grad_norm.item()
        super().log(logs, *args, **kwargs)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    print(liger_like.patch(model, strict=True))
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: STEPS * ACCUMULATED * BATCH * LENGTH].long()
    data = [{"input_ids": row, "labels": row} for row in tokens.view(-1, LENGTH)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        adamw = {"lr": 1e-3, "fused": True, "capturable": torch.cuda.is_available()}
        GraphedTrainer(
            model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(torch.optim.AdamW, adamw)
        ).train()


if __name__ == "__main__":
    main()
