"""Steps of TRL's trainers: real ones of a tiny model, and the report."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmark.training import trainers, trainers_report

ROW = {"ms": 2.5, "tokens": 1.6e6, "gib": 3.0}
SHOWN = [setting.text() for setting in trainers.SETTINGS[:2]]
TABLES = f"""### One GPU, 2026-01-01

torch 2.0.

| trainer |  | step ms | tokens/s | peak GiB |
|---|---|---|---|---|
| {SHOWN[0]} | TRL | 2.5 | 1,600,000 | 3.0 |
| {SHOWN[1]} | liger_like | out of memory | - | - |
"""
OVERVIEW = f"""GPU, 2026-01-01:

| trainer | TRL | liger_like |
|---|---|---|
| {SHOWN[0]} | 1,600,000, 3.0 | - |
| {SHOWN[1]} | - | out of memory |
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(trainers.GPU, reason="on a GPU it is what the GPU does: --quick")
@pytest.mark.parametrize("setting", [trainers.QUICK[i] for i in (0, 3, 4)], ids=lambda setting: setting.text())
def test_steps(setting, monkeypatch):
    """They train the model or its adapters, on as many tokens as the text says; nothing is generated."""
    made, clocks = [], []

    def never(*_, **__):
        raise AssertionError

    def noted():
        clocks.append(clock())
        return clocks[-1]

    def prepare(trainer):
        made.append((trainer, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))

    clock = trainers.Clock
    monkeypatch.setattr(PreTrainedModel, "generate", never, raising=False)
    monkeypatch.setattr(trainers, "Clock", noted)
    monkeypatch.setattr(trainers, "STEPS", 1)
    monkeypatch.setattr(trainers, "WARMUP", 1)
    row = trainers.train(prepare, setting)
    size = setting.size
    assert row["tokens"] * row["ms"] == pytest.approx(1e3 * size.sequences * (size.prompt + size.completion))
    ((trainer, before),) = made
    assert len(clocks[0].ends) == 2
    assert len(clocks[0].times()) == 1
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed) == setting.lora
    assert {p.dtype for name, p in trainer.model.named_parameters() if "lora_" not in name} == {torch.bfloat16}


def test_settings():
    assert len({*trainers.ORDER}) == 12
    assert [(s.kind, s.lora) for s in trainers.SETTINGS] == [
        (kind, lora) for kind in ("SFT", "DPO", "GRPO") for lora in (False, True)
    ]
    assert SHOWN[1] == "SFT, Llama-3.2-1B, B 8 S 1024, LoRA"


def test_report():
    parts = {SHOWN[0]: {"TRL": ROW}, SHOWN[1]: {"liger_like": {"reason": "out of memory"}}}
    result = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.0"}, "parts": parts}
    assert trainers_report.tables(result) == TABLES
    assert trainers_report.overview(result) == OVERVIEW
