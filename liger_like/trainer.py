"""Patching by transformers' Trainer, and by those of TRL that are made from it."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_like._options import check_options
from liger_like.patching import PatchReport, patch


class PatchCallback(TrainerCallback):
    """Patch the model when training begins and print the report; ``options`` are those of ``patch``.

    By then adapters are on the model and it is sharded. It stays patched after training: ``report.unpatch()`` restores
    it. An evaluation before training runs the unpatched model.

    Raises TypeError or ValueError for options that ``patch`` does not take.
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        self.options = options
        self.report: PatchReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch ``kwargs["model"]``."""
        model: nn.Module = kwargs["model"]
        self.report = patch(model, **self.options)
        if state.is_world_process_zero:
            print(self.report)
