"""Patch the models of transformers' Trainer and of TRL's trainers, by a call or by a callback."""

import dataclasses
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_like._options import check_options
from liger_like.patches.trl_code import fused_forward, stand_in
from liger_like.patches.trl_head import PATTERN
from liger_like.patches.trl_trainers import reason_unfused
from liger_like.patching import ABSENT, SKIPPED, PatchReport, Row, grouped, patch, refuse, unpatch
from liger_like.runtime.checks import require_choice, require_integer

MODELS = ("model", "ref_model", "teacher_model")  # the attributes of trainers that hold models


@dataclass(frozen=True)
class _TrainerReport(PatchReport):
    """Report of what ``patch_trainer`` did to the models of a trainer, of which ``model`` is trained."""

    models: tuple[nn.Module, ...] = dataclasses.field(default=(), repr=False)

    def unpatch(self) -> None:
        """Restore all models."""
        for model in self.models:
            unpatch(model)


def patch_trainer(
    trainer: Trainer, *, keep_logits: int = 0, logits_dtype: torch.dtype = torch.float32, **options: Any
) -> PatchReport:
    """Patch the models of ``trainer`` and let TRL's fused head run our op; return the report.

    The models are ``trainer.model`` and, if the trainer has them, ``ref_model`` and ``teacher_model``. ``options`` are
    those of ``patch``. TRL's trainers for SFT, DPO, KTO, GRPO, RLOO and GMPO call a fused head that TRL puts on the
    model: it then runs ``fused_linear_logprobs`` with ``keep_logits`` and ``logits_dtype``, and with
    ``uniform_gradient`` where the loss is the mean over tokens. The report's row "trl head" says whether it does. A
    head with other code, as of another version of TRL, is left alone. So are the heads of trainers that read the logits.

    ``report.unpatch()`` restores all models. Call this after the trainer is made; calling it again changes
    ``keep_logits`` and ``logits_dtype``.

    Raises TypeError if ``trainer`` is not a transformers.Trainer, TypeError or ValueError for invalid options, and
    ValueError with ``strict=True`` if something would be left alone; the models are then unpatched.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    _check(keep_logits=keep_logits, logits_dtype=logits_dtype, **options)
    reason = reason_unfused(type(trainer))
    loss, strict = options.pop("loss", True), options.pop("strict", False)
    models = {id(m): m for name in MODELS if isinstance(m := getattr(trainer, name, None), nn.Module)}
    reports = [patch(model, loss=loss and not reason, **options) for model in models.values()]
    rows = [row for report in reports for row in report.rows]
    if loss and reason:
        rows.append(_unfused(trainer, reason))
    report = _TrainerReport(trainer.model, tuple(grouped(rows)), tuple(models.values()))
    if strict and any(row.status == SKIPPED for row in report.rows):
        report.unpatch()
        refuse(report)
    heads = [stand_in(fused_forward(module)) for model in models.values() for module in model.modules()]
    for head in filter(None, heads):
        head.options = {"keep_logits": keep_logits, "logits_dtype": logits_dtype}
        # the loss of SFT weighs all tokens of a batch the same
        head.options["uniform_gradient"] = getattr(trainer.args, "loss_type", None) == "nll"
    return report


def _unfused(trainer: Trainer, reason: str) -> Row:
    """Return the row of a trainer whose head runs no op of ours."""
    model: Any = trainer.model
    if all(getattr(module, "get_output_embeddings", lambda: None)() is None for module in model.modules()):
        return Row(PATTERN, type(trainer).__name__, "", 1, ABSENT, "the model has no language-model head")
    return Row(PATTERN, type(trainer).__name__, "", 1, SKIPPED, reason)


def _check(keep_logits: Any = 0, logits_dtype: Any = torch.float32, **options: Any) -> None:
    require_integer("keep_logits", keep_logits, 0)
    require_choice("logits_dtype", logits_dtype, (torch.float32, torch.bfloat16, torch.float16))
    check_options(options)


class PatchCallback(TrainerCallback):
    """Callback that calls ``patch_trainer`` when training begins, with the same options, and prints the report.

    At that time the adapters are in place and the model is sharded. The models stay patched after training;
    ``report.unpatch()`` restores them. An evaluation before training runs the unpatched model.

    Raises TypeError or ValueError for invalid options.
    """

    def __init__(self, **options: Any) -> None:
        _check(**options)
        self.options = options
        self.report: PatchReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch the models of the trainer that calls, and print the report on the main process."""
        self.report = patch_trainer(self._trainer(), **self.options)
        if state.is_world_process_zero:
            print(self.report)

    def _trainer(self) -> Trainer:
        """Return the trainer that calls this callback: transformers passes the trained model alone."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
            frame = frame.f_back
        raise RuntimeError("PatchCallback must be called by a transformers.Trainer that has it among its callbacks")
