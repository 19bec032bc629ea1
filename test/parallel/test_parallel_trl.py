"""TRL's trainers under FSDP2: patched before or after the models are sharded, they log and learn the same as unpatched
ones, and our ops run in the place of TRL's.
"""

import pytest
import torch
import trl_trainers
from distributed import as_accelerate_launches, run
from test_accelerate import FOLDER
from test_parallel_fsdp import full
from test_trl import HEAD, assert_same_run
from test_trl import learnt as learnt_by_shards
from tiny_models import tiny
from torch.distributed.fsdp import FSDPModule

from liger_like import patch
from liger_like.trainer import PatchCallback

# Several forwards of both models for each step; generation by the sharded model; a method of the trainer.
CASES = [
    ("DPO", {}, 6),
    ("KTO", {}, 12),
    ("GRPO", {"gradient_checkpointing": True}, 5),
    ("Distillation", {}, 3),
    ("ORPO", {}, 3),
]


def made(kind, how, folder, **arguments):
    """Return the same trainer at every call, patched or not."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(tiny("Llama", num_hidden_layers=1))
        if how == "before":
            patch(models[-1], strict=True)
    callbacks = [PatchCallback(strict=True)] if how == "callback" else []
    torch.manual_seed(3)
    return trl_trainers.make(kind, models[0], folder, models[1], callbacks, use_cpu=False, **arguments)


def learnt(trainer):
    """Return the results of each step, and the whole weights at the end."""
    logs, weights = learnt_by_shards(trainer)
    reference = getattr(trainer, "ref_model", None)
    assert all(isinstance(model, FSDPModule) for model in (trainer.model, reference) if model is not None)
    assert any(entry["grad_norm"] > 0 for entry in logs)
    return logs, {name: full(p) for name, p in weights.items()}


def compare(rank, folder):
    as_accelerate_launches(FOLDER / "fsdp2.yaml", "--mixed_precision", "no")
    ran = trl_trainers.spy(pytest.MonkeyPatch())
    for kind, arguments, calls in CASES:
        expected = learnt(made(kind, "unpatched", folder, **arguments))
        assert bool(ran.theirs) == (kind != "ORPO")  # it reads the logits
        assert not ran.ours
        for how in ("callback", "before")[: 2 if kind in HEAD else 1]:  # a method of a trainer is not of the model
            ran.theirs, ran.ours[:] = 0, []
            assert_same_run(learnt(made(kind, how, folder, **arguments)), expected)
            assert len(ran.ours) == calls
            assert not ran.theirs
        ran.ours.clear()


def test_fsdp(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long
    run(compare, 2, tmp_path)
