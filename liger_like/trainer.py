"""Callback that patches a model in transformers' Trainer and in the trainers of TRL."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_like._options import check_options
from liger_like.patching import PatchReport, patch


class PatchCallback(TrainerCallback):
    """Callback that patches the model when training begins and prints the report; takes the options of ``patch``.

    At that time the adapters are in place and the model is sharded. The model stays patched after training;
    ``report.unpatch()`` restores it. An evaluation before training runs the unpatched model.

    Raises TypeError or ValueError for invalid options of ``patch``.
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        self.options = options
        self.report: PatchReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch ``kwargs["model"]`` and print the report on the main process."""
        model: nn.Module = kwargs["model"]
        self.report = patch(model, **self.options)
        if state.is_world_process_zero:
            print(self.report)
