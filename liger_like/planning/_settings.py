"""Settings of a step: one way to train, and the errors that name its fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

CHECKPOINTS = "none", "attention", "selective", "full"
DTYPES = "bf16", "fp32"
METHODS = "allgather", "ring", "ulysses"
OPTIMIZERS = "adamw", "adamw8bit", "sgd"
SWITCH = False, True
CHOICES = {
    "checkpoint": CHECKPOINTS,
    "dtype": DTYPES,
    "cp_method": METHODS,
    "patched": SWITCH,
    "checkpoint_on_host": SWITCH,
    "tiled_mlp": SWITCH,
    "step_in_backward": SWITCH,
    "optimizer": OPTIMIZERS,
}
FROM_ZERO = "lora", "zero"
WHOLE = 0, 1  # stages of ZeRO with whole parameters and gradients
STAGES = {"bf16": WHOLE, "fp32": (2, 3)}  # of ZeRO, by the dtype; the last needs the least memory
TOKENS = 2**21  # of a GPU in one pass: a trace takes a second for 100,000 of them
MESH = "fsdp", "tp", "cp", "pp"  # fields whose product is the number of GPUs


@dataclass(frozen=True)
class Setting:
    """One way to train a model, in the terms of ``examples/parallel.py``.

    ``micro_batch``: rows that a GPU computes at a time, ``accumulation``: how many times before an optimizer step.
    ``seq``: tokens of a row. ``checkpoint``: what a checkpointed layer keeps: "none" (no checkpoints), "attention" (the
    results of attention), "selective" (those of products, too) or "full" (the layer's input). ``fsdp``: GPUs with rows
    of their own, which share the parameters by a stage of ZeRO. ``zero``: 3 is FSDP2, and 2 is FSDP2 with
    ``reshard_after_forward=False``; 0 is torch's DistributedDataParallel in bf16, whose GPUs have all parameters, and 1
    has its ZeroRedundancyOptimizer, too. ``tp``: GPUs that split each layer's products and the tokens of the residual
    stream. ``cp``: GPUs that share each row, by ``cp_method``. ``pp``: stages of layers; the micro-batches of
    ``accumulation`` follow 1F1B. ``dtype``: of parameters, gradients and AdamW's moments; "fp32" computes in bf16 all
    the same, by FSDP2's mixed precision.
    ``patched``: by ``liger_like.patch``, with ``mlp="tiled"`` if ``tiled_mlp``. ``checkpoint_on_host``: the inputs of
    checkpointed layers, and with "attention" the results of attention, are on the host
    (``liger_like.parallel.offload_checkpoints``). ``checkpoint_layers``: layers that share a checkpoint
    (``group_checkpoints``). ``step_in_backward``: each parameter is updated in the backward, and its gradient freed.
    ``optimizer``: "adamw" and "sgd" (without momentum) are torch's, "adamw8bit" is that of bitsandbytes. ``lora``: rank
    of PEFT's LoRA on all linear modules but the head, or 0: the whole model is trained.

    Raises TypeError or ValueError for a field that is not valid.
    """

    micro_batch: int = 1
    seq: int = 2048
    accumulation: int = 1
    checkpoint: str = "none"
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    cp_method: str = "allgather"
    dtype: str = "bf16"
    zero: int = 3
    patched: bool = True
    checkpoint_on_host: bool = False
    checkpoint_layers: int = 1
    tiled_mlp: bool = False
    step_in_backward: bool = False
    optimizer: str = "adamw"
    lora: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name in CHOICES:
                if value not in CHOICES[field.name]:
                    raise ValueError(
                        f"{field.name} must be out of {', '.join(map(str, CHOICES[field.name]))}, got {value!r}"
                    )
            elif isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name} must be an integer, got {type(value).__name__}")
            elif value < (least := int(field.name not in FROM_ZERO)):
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        if self.zero > 3:
            raise ValueError(f"zero must be at most 3, got {self.zero}")
        if self.gpus > 1 and self.zero not in STAGES[self.dtype]:
            other = "bf16" if self.zero in WHOLE else "fp32"
            raise ValueError(
                f"dtype must be {other} on {self.gpus} GPUs with zero {self.zero}, got {self.dtype}: FSDP2 keeps fp32"
                " and computes in bf16, DistributedDataParallel is planned in bf16"
            )
        if self.seq * self.micro_batch > TOKENS * self.cp:
            raise ValueError(
                f"seq must be at most {TOKENS * self.cp // self.micro_batch} with micro_batch {self.micro_batch} and cp"
                f" {self.cp}, got {self.seq}: longer passes are not traced"
            )
        for name in ("cp", "tp", "pp"):
            if getattr(self, name) > 1 and not self.patched:
                raise ValueError(
                    f"{name} must be 1 unless patched, got {getattr(self, name)}: only patched models spread"
                )
        if told := contradiction(vars(self)):
            raise ValueError(told)
        if self.dtype == "fp32" and self.optimizer == "adamw8bit":
            raise ValueError("optimizer must be adamw or sgd with dtype fp32: sharded states in 8 bits are not traced")
        if self.dtype == "fp32" and self.lora:
            raise ValueError(f"lora must be 0 with dtype fp32, got {self.lora}: sharded adapters are not traced")

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return math.prod(getattr(self, name) for name in MESH)

    @property
    def replicas(self) -> int:
        """Return the number of GPUs that have whole parameters and share their gradients."""
        return self.fsdp if self.zero in WHOLE else 1

    @property
    def staged(self) -> bool:
        """Return True if a GPU has a part of each layer, or some of the layers."""
        return self.tp * self.pp > 1

    @property
    def batch(self) -> int:
        """Return the rows of all GPUs in one optimizer step."""
        return self.micro_batch * self.accumulation * self.fsdp

    def text(self) -> str:
        """Return the setting in words, without its sizes."""
        parts = [f"{name} {getattr(self, name)}" for name in MESH if getattr(self, name) > 1]
        parts = [f"ddp {self.fsdp}"] if self.replicas > 1 else parts
        parts += [f"zero {self.zero}"] * (self.fsdp > 1 and self.zero in (1, 2))
        parts += ["transformers"] * (not self.patched)
        parts += [f"rows {self.micro_batch}" + f" x {self.accumulation}" * (self.accumulation > 1)]
        parts += ["no checkpointing" if self.checkpoint == "none" else f"{self.checkpoint} checkpointing"]
        parts += [f"{self.checkpoint_layers} layers each"] * (self.checkpoint_layers > 1)
        parts += ["on the host"] * self.checkpoint_on_host + ["tiled MLP"] * self.tiled_mlp
        parts += ["step in backward"] * self.step_in_backward
        parts += [f"LoRA {self.lora}"] * (self.lora > 0) + [self.optimizer] * (self.optimizer != "adamw")
        return ", ".join(parts)


def contradiction(of: Mapping[str, Any]) -> str:
    """Return why the savings of a setting, ``of`` its fields, rule each other out, or "" if they do not."""
    if of["checkpoint_on_host"] and of["checkpoint"] not in ("attention", "full"):
        return f"checkpoint_on_host must be false unless checkpoint is attention or full, it is {of['checkpoint']}"
    if of["checkpoint_layers"] > 1 and of["checkpoint"] == "none":
        return f"checkpoint_layers must be 1 with checkpoint none, got {of['checkpoint_layers']}"
    for name in ("tp", "pp"):
        for saving in ("checkpoint_on_host", "checkpoint_layers", "tiled_mlp", "step_in_backward"):
            if of[name] > 1 and of[saving] > 1 - (saving != "checkpoint_layers"):
                return f"{name} must be 1 with {saving}, got {of[name]}: these are not traced together"
    if of["tiled_mlp"] and not of["patched"]:
        return "tiled_mlp must be false unless patched"
    if of["step_in_backward"] and of["accumulation"] > 1:
        return f"accumulation must be 1 with step_in_backward, got {of['accumulation']}"
    return _of_replicas(of) if of["zero"] in WHOLE and math.prod(of[name] for name in MESH) > 1 else ""


def _of_replicas(of: Mapping[str, Any]) -> str:
    """Return why GPUs with whole parameters rule out what else a setting has, or ""."""
    for name in ("cp", "tp", "pp"):
        if of[name] > 1:
            return f"{name} must be 1 with zero {of['zero']}, got {of[name]}: these are not planned together"
    if of["step_in_backward"]:
        return f"step_in_backward must be false with zero {of['zero']}: gradients are summed behind the backward"
    if of["zero"] and of["optimizer"] == "adamw8bit":
        return "optimizer must be adamw or sgd with zero 1: shared states in 8 bits are not planned"
    return ""


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Setting)}
