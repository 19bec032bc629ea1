"""Patch the models of transformers' Trainer and of TRL's trainers, by a call or by a callback."""

import dataclasses
import functools
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_like._options import check_options
from liger_like.patches.lm_head import fuses_loss
from liger_like.patches.trl_code import fused_forward, stand_in
from liger_like.patches.trl_head import PATTERN
from liger_like.patches.trl_trainers import Plan, plan_of
from liger_like.patching import ABSENT, PATCHED, SKIPPED, PatchReport, Row, _grouped, patch, unpatch
from liger_like.runtime.checks import require_choice, require_integer

MODELS = ("model", "ref_model", "teacher_model")  # the attributes of trainers that hold models
HEAD_OPTIONS = ("keep_logits", "logits_dtype")  # the options of patch_trainer that patch does not have


@dataclass(frozen=True)
class _TrainerReport(PatchReport):
    """Report of what ``patch_trainer`` did to the models of a trainer, of which ``model`` is trained."""

    trainer: Any = dataclasses.field(default=None, repr=False)
    methods: tuple[str, ...] = ()

    def unpatch(self) -> None:
        """Restore the models and the methods of the trainer."""
        for model in _models(self.trainer):
            unpatch(model)
        for name in self.methods:
            vars(self.trainer).pop(name, None)


def _models(trainer: Any) -> list[nn.Module]:
    """Return the models of ``trainer``, each once."""
    found = {id(m): m for name in MODELS if isinstance(m := getattr(trainer, name, None), nn.Module)}
    return [*found.values()]


def patch_trainer(
    trainer: Trainer, *, keep_logits: int = 0, logits_dtype: torch.dtype = torch.float32, **options: Any
) -> PatchReport:
    """Patch the models of ``trainer`` and let TRL's fused head run our op; return the report.

    The models are ``trainer.model`` and, if the trainer has them, ``ref_model`` and ``teacher_model``. ``options`` are
    those of ``patch``. TRL's trainers for SFT, DPO, KTO, GRPO, AsyncGRPO, RLOO and GMPO call a fused head that TRL puts
    on the model: it then runs ``fused_linear_logprobs`` with ``keep_logits`` and ``logits_dtype``, and with
    ``uniform_gradient`` where the loss is the mean over tokens. The trainer for distillation then runs
    ``fused_linear_divergence``. The report's row "trl head" says whether it does. A head with other code, as of another
    version of TRL, is left alone. So are the heads of trainers that read the logits.

    ``report.unpatch()`` restores models and trainer. Call this after the trainer is made; calling it again changes
    ``keep_logits`` and ``logits_dtype``.

    Raises TypeError if ``trainer`` is not a transformers.Trainer, TypeError or ValueError for invalid options, and
    ValueError with ``strict=True`` if something would be left alone; the models are then unpatched.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    _check(keep_logits=keep_logits, logits_dtype=logits_dtype, **options)
    plan = plan_of(trainer)
    loss, strict = options.pop("loss", True), options.pop("strict", False)
    model: Any = trainer.model
    heads = loss and (plan is None or plan.tokens)
    reports = [patch(each, loss=heads, **options) for each in _models(trainer)]
    if plan is not None and plan.tokens and not fuses_loss(model):
        plan = Plan({}, "its model's lm_head is left alone")
    rows = [row for report in reports for row in report.rows]
    methods = {}
    if loss and plan is not None:
        rows.append(_row(trainer, plan))
        methods = plan.methods
    report = _TrainerReport(model, tuple(_grouped(rows)), trainer, tuple(methods))
    if strict and any(row.status == SKIPPED for row in rows):
        report.unpatch()
        raise ValueError(f"strict=True, but modules would be left alone:\n{report}")
    vars(trainer).update(methods)
    functions = [fused_forward(module) for each in _models(trainer) for module in each.modules()]
    for head in filter(None, map(stand_in, functions)):
        head.options = {"keep_logits": keep_logits, "logits_dtype": logits_dtype}
        # the loss of SFT weighs all tokens of a batch the same
        head.options["uniform_gradient"] = getattr(trainer.args, "loss_type", None) == "nll"
    return report


def _row(trainer: Trainer, plan: Plan) -> Row:
    """Return the row of a trainer that does not use TRL's fused head."""
    row = functools.partial(Row, PATTERN, type(trainer).__name__, "", 1)
    model: Any = trainer.model
    if all(getattr(module, "get_output_embeddings", lambda: None)() is None for module in model.modules()):
        return row(ABSENT, "the model has no language-model head")
    return row(SKIPPED, plan.reason) if plan.reason else row(PATCHED)


def _check(keep_logits: Any = 0, logits_dtype: Any = torch.float32, **options: Any) -> None:
    require_integer("keep_logits", keep_logits, 0)
    require_choice("logits_dtype", logits_dtype, (torch.float32, torch.bfloat16, torch.float16))
    check_options(options)


class PatchCallback(TrainerCallback):
    """Callback that calls ``patch_trainer`` when training begins, with the same options, and prints the report.

    Where no Trainer calls it, as in a loop of your own, it calls ``patch`` on ``kwargs["model"]`` without
    ``keep_logits`` and ``logits_dtype``. When training begins the adapters are in place and the model is sharded. The
    models stay patched after training; ``report.unpatch()`` restores them. An evaluation before training runs the
    unpatched model.

    Raises TypeError or ValueError for invalid options.
    """

    def __init__(self, **options: Any) -> None:
        _check(**options)
        self.options = options
        self.report: PatchReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Patch the models of the trainer that calls, else ``model``, and print the report on the main process."""
        trainer = self._trainer()
        if trainer is not None:
            self.report = patch_trainer(trainer, **self.options)
        else:
            options = {name: value for name, value in self.options.items() if name not in HEAD_OPTIONS}
            self.report = patch(kwargs["model"], **options)
        if state.is_world_process_zero:
            print(self.report)

    def _trainer(self) -> Trainer | None:
        """Return the trainer that calls this callback, or None: transformers passes the trained model alone."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
            frame = frame.f_back
        return None
