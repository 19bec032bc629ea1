"""Training steps of whole models: settings and contestants chosen, runs that share the work, and the report."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmark.training import training, training_report
from benchmark.training.training import Setting

HEAD = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.0"}}
MIXTURES = training.SETTINGS[-3:]
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_hidden_layers": 2,
}


TRAINING_TABLES = """### One GPU, 2026-01-01

torch 2.0.

| model |  | step ms | tokens/s | peak GiB |
|---|---|---|---|---|
| Llama-3.2-1B, B 4 S 1024 | liger_like | 2.5 | 1,600,000 | 3.0 |
| Llama-3.2-1B, B 2 S 8192 | transformers | out of memory | - | - |

What one model may fuse, in turns:

| model |  | step ms |
|---|---|---|
| Llama-3.2-1B, B 4 S 1024 | neither | 2.00 |
"""


TRAINING_OVERVIEW = """\
GPU, 2026-01-01:

| model | liger_like | transformers |
|---|---|---|
| Llama-3.2-1B, B 4 S 1024 | 1,600,000, 3.0 |  |
| Llama-3.2-1B, B 2 S 8192 |  | out of memory |
"""


def test_tables():
    first, second = (setting.text() for setting in training.SETTINGS[:2])
    ours, theirs = (
        {"name": "liger_like", "ms": 2.5, "tokens": 1.6e6, "gib": 3.0},
        {"name": "transformers", "reason": "out of memory"},
    )
    earlier = {"settings": {second: [theirs], first: []}, "forms": {first: [{"name": "neither", "ms": 2.0}]}}
    now = {**HEAD, "forms": {}}
    result = training.merged(earlier, {**now, "settings": {first: [ours]}})
    assert training_report.tables(result) == TRAINING_TABLES
    assert training_report.overview(result) == TRAINING_OVERVIEW


def test_runs_that_share_the_work():
    """Rows of other contestants stay, in the order of the contestants."""
    text = training.SETTINGS[0].text()
    earlier = {"settings": {text: [{"name": "liger_like", "ms": 2.0}, {"name": "transformers", "ms": 4.0}]}}
    now = {"settings": {text: [{"name": "Liger", "ms": 3.0}, {"name": "transformers", "ms": 5.0}]}, "forms": {}}
    rows = training.merged(earlier, now)["settings"][text]
    assert [(row["name"], row["ms"]) for row in rows] == [("transformers", 5.0), ("liger_like", 2.0), ("Liger", 3.0)]


@pytest.mark.parametrize(("setting", "millions"), [*zip(MIXTURES, (4361, 4451, 5245), strict=True)])
def test_sizes_of_the_mixtures(setting, millions):
    """Weights, gradients and the optimizer's state fit into 80 GB, and a step has 8192 tokens."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(training.MODELS[setting.model]).parameters()
    assert round(sum(p.numel() for p in parameters) / 1e6) == millions
    assert setting.batch * setting.seq == 8192


@pytest.mark.usefixtures("references")
def test_mixtures_train(monkeypatch):
    """Real steps of narrow models, for the contestants asked for."""
    configs = {setting.model: training.MODELS[setting.model].to_dict() for setting in MIXTURES}
    for name, config in configs.items():
        narrow = {key: value for key, value in NARROW.items() if key in config}
        layers = {"layer_types": config["layer_types"][:2]} if config.get("layer_types") else {}
        monkeypatch.setitem(training.MODELS, name, type(training.MODELS[name])(**{**config, **narrow, **layers}))
    monkeypatch.setattr(training, "STEPS", 1)
    monkeypatch.setattr(training, "WARMUP", 0)
    settings = [Setting(name, 1, 8) for name in configs]
    measured = training.measure(settings, ["liger_like", "transformers"])
    assert [*measured] == [setting.text() for setting in settings]
    for rows in measured.values():
        assert [row["name"] for row in rows] == ["transformers", "liger_like"]
        assert all(row["tokens"] == pytest.approx(8e3 / row["ms"]) for row in rows), rows
