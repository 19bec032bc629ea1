"""The coverage command: every kind of family, what it must not miss, and its tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from benchmark.coverage import coverage, coverage_report
from liger_like.doctor import tiny
from liger_like.patches import attention, rms_norm

# dense, with experts, hybrid, encoder and decoder
FAMILIES = """Afmoe Apertus Cohere Cohere2 DeepseekV3 DeepseekV4 Doge Ernie4_5 FalconH1 Gemma Gemma2 Gemma3 Glm4
GptOss Granite GraniteMoe Helium Llama Llama4 Mistral Mixtral Nemotron Olmo2 Phi3 Phi4Multimodal Qwen2 Qwen3 Qwen3Moe
Qwen3Next Qwen3_5 SmolLM3 StableLm Starcoder2 Zamba2"""
NAMES = [*(f"{family}ForCausalLM" for family in FAMILIES.split()), "T5Gemma2ForConditionalGeneration"]
SEEING = [f"{family}ForConditionalGeneration" for family in ("Cohere2Vision", "Idefics3", "LlavaNext", "Qwen2_5_VL")]
NAMES += SEEING


def test_families(tmp_path):
    """The command itself; the kernels run in other tests, so that here they are references."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmark", "coverage", "--json", file, "--only", *NAMES]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    root = Path(coverage.__file__).parents[2]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert [*rows] == NAMES
    assert {row["status"] for row in rows.values()} == {"exact", "partly"}
    assert [name for name, row in rows.items() if row["images"]] == SEEING
    assert rows["LlamaForCausalLM"]["status"] == "exact"
    assert rows["LlamaForCausalLM"]["patched"] == {
        "rms_norm": 5,
        "rope": 2,
        "glu_mlp": 2,
        "lm_head": 2,
        "attention": 2,
    }
    assert rows["LlamaForCausalLM"]["left"] == []
    assert rows["StableLmForCausalLM"]["status"] == "exact"  # attention does not count
    assert [pattern for pattern, *_ in rows["StableLmForCausalLM"]["left"]] == ["attention"]
    assert coverage_report.tables({"transformers": "", "rows": [*rows.values()]})


def unpadded(monkeypatch):
    make = attention.make_mask
    monkeypatch.setattr(attention, "make_mask", lambda *args, attention_mask, **kw: make(*args, **kw))


def unseen(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden_states: hidden_states * self.weight)
    monkeypatch.setattr(rms_norm.RMSNorm, "looks_like", lambda self, module: False)


def remaining(monkeypatch):
    monkeypatch.setattr(coverage.liger_like.PatchReport, "unpatch", lambda self: None)


def test_bugs_are_wrong(monkeypatch):
    monkeypatch.setattr(tiny, "LAYERS", 1)
    for plant in (unpadded, unseen, remaining):
        plant(monkeypatch)
    row = coverage.examine("LlamaForCausalLM")
    assert row["status"] == "wrong"
    for why in ("logits differs by", "LlamaRMSNorm is not in the report as norm", "unpatching leaves something behind"):
        assert why in row["why"]


def test_a_crash_is_wrong(monkeypatch):
    monkeypatch.setattr(coverage.liger_like, "patch", lambda *args, **kw: 1 / 0)
    row = coverage.examine("LlamaForCausalLM")
    assert row == {"name": "LlamaForCausalLM", "status": "wrong", "why": "ZeroDivisionError: division by zero"}


def test_a_model_that_cannot_run_is_skipped(monkeypatch):
    monkeypatch.setattr(coverage, "build", lambda name: transformers.LlamaForCausalLM(missing=1))
    assert coverage.examine("LlamaForCausalLM")["status"] == "skipped"


@pytest.mark.parametrize("name", ["loss", "logits", "weight"])
@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_differences(name, error):
    expected = {name: torch.randn(8) for name in ("loss", "logits", "weight", "bias")}
    assert not coverage.differences({key: t * (1 + 1e-6) for key, t in expected.items()}, expected)
    (found,) = coverage.differences(expected | {name: expected[name] * (1 + error)}, expected)
    assert found.startswith(f"{name} differs by")
    assert coverage.differences({"loss": expected["loss"]}, expected)


def test_the_first_layer_of_each_kind_is_kept():
    kinds, sizes = ["a", "a", "b", "a", "a", "b"], [9, 9, 9, 9, 8, 9]
    fields = {"num_hidden_layers": 6, "layer_types": kinds, "sizes": sizes, "eos_token_id": [7, 8], "hidden_size": 4096}
    assert tiny.shrunk(fields, {}, {}) == {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "a"],
        "sizes": [9, 9, 8],
        "eos_token_id": 2,
        "hidden_size": 128,
    }
    assert tiny.shrunk({"num_hidden_layers": 6, "layer_types": ["a"] * 6}, {}, {})["layer_types"] == ["a"] * 2
    assert tiny.shrunk({"per_layer_config": {"3": {"head_dim": 9}}, "n_layer": 6}, {}, {}) == {
        "per_layer_config": {1: {"head_dim": 9}},
        "n_layer": 2,
    }


def test_a_hang_costs_one_row(monkeypatch):
    monkeypatch.setattr(coverage, "SECONDS", 0)
    assert coverage.apart("LlamaForCausalLM")["why"] == "took more than 0 s"


def test_names_are_those_of_the_auto_models():
    assert {"LlamaForCausalLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"} < {*coverage.names()}


ROWS = [
    {
        "name": "AForCausalLM",
        "status": "exact",
        "why": "",
        "patched": {"rms_norm": 3, "layer_norm": 2, "router": 4},
        "left": [],
    },
    {
        "name": "BForCausalLM",
        "status": "partly",
        "why": "",
        "patched": {"lm_head": 2},
        "left": [["rope", "BAttention", 2, "un|known"], ["attention", "BAttention", 2, "none"]],
    },
    {"name": "CForConditionalGeneration", "status": "skipped", "why": "OSError: no"},
    {"name": "DForConditionalGeneration", "status": "exact", "why": "", "images": True, "patched": {}, "left": []},
]
TABLES = r"""## Causal, transformers 5.0

| ForCausalLM |  | loss | RoPE | norm | MLP | router | attention | left alone, and why |
|---|---|---|---|---|---|---|---|---|
| A | exact | - | - | 5 | - | 4 | - |  |
| B | partly | 2 | - | - | - | - | - | BAttention (2): un\|known; BAttention (2): none |

## Conditional generation, transformers 5.0

| ForConditionalGeneration |  | loss | RoPE | norm | MLP | router | attention | left alone, and why |
|---|---|---|---|---|---|---|---|---|
| C | skipped | - | - | - | - | - | - | OSError: no |
| D | exact, with images | - | - | - | - | - | - |  |
"""


SENTENCE = """\
transformers 5.0 has 2 causal language models. 2 of them can be built tiny from their default config and run: 1 are
exact with loss, norms, RoPE and MLP patched wherever they have them, 1 are exact with some of these left alone and
reported. It has 2 classes for conditional generation. 1 of them run, 1 with images and most others on text alone: 1 and
0 are exact in these two ways. 0 are wrong.
"""


def test_tables():
    result = {"transformers": "5.0", "rows": ROWS}
    assert coverage_report.tables(result) == TABLES
    assert coverage_report.sentence(result) == SENTENCE


def test_report_is_current():
    result = coverage_report.read()
    assert not [row for row in result["rows"] if row["status"] == "wrong"]
    for file, write in (
        (coverage_report.COVERAGE, coverage_report.with_tables),
        (coverage_report.README, coverage_report.with_sentence),
    ):
        text = file.read_text()
        assert write(text, result) == text, "run python -m benchmark coverage --report"
