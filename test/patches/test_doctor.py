"""The command ``liger-like doctor``: what it says of a config, what it refuses, and that nothing is downloaded."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

from liger_like import doctor
from liger_like.cli import main
from liger_like.doctor import tiny
from liger_like.patches import attention, rms_norm
from liger_like.runtime import support, versions

ROOT = Path(__file__).parents[2]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 50 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
# sizes of real models: the diagnosis must not depend on them
CONFIGS = {
    "Llama": {"num_hidden_layers": 16, "vocab_size": 128256, "dtype": "bfloat16"},
    "Gemma2": {},
    "Cohere": {},
    "Phi3": {"vocab_size": 32064, "rope_parameters": LONGROPE, "max_position_embeddings": 131072},
    "Mixtral": {},
}


@pytest.fixture(autouse=True)
def _unplanned(monkeypatch):
    """Leave the trace of the real model out: it has tests of its own, in test/planning."""
    monkeypatch.setattr("liger_like.planning._command.line", lambda path: "memory: planned")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No socket is opened, whatever comes of an error; and ops are references: kernels have tests of their own."""
    opened = []

    def refuse(*args, **kwargs):
        opened.append(args)
        raise OSError("no network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(support, "INTERPRET", False)
    monkeypatch.setattr(doctor, "_add_costs", lambda *args: [])
    yield
    assert not opened


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command on a config of these fields: exit code, and what it prints there and there."""

    def run(fields, *options, adapter=None, name=""):
        (tmp_path / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
        if adapter:
            adapter.save_pretrained(tmp_path)
        monkeypatch.setattr(sys, "argv", ["liger-like", "doctor", str(tmp_path / name), *options])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code, *capsys.readouterr()

    return run


def fields_of(family, **changed):
    config = getattr(transformers, f"{family}Config")(**CONFIGS.get(family, {}))
    return config.to_dict() | {"architectures": [f"{family}ForCausalLM"]} | changed


def parsed(text):
    """Return the value as JSON has it, without NaN and infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_that_is_patched_whole_is_sound(run, family):
    # implementations of attention and experts that transformers would download
    code, out, _ = run(fields_of(family, attn_implementation="kernels-community/flash-attn"), "--json")
    found = parsed(out)
    assert (code, found["model"]) == (0, f"{family}ForCausalLM")
    patched = [row for row in found["rows"] if row["status"] == "patched"]
    assert {"lm_head", "attention", "together"} < {row["pattern"] for row in patched}
    assert all(0 < row[way] < 2 for row in patched for way in ("forward", "backward"))
    assert found["warnings"] == []


def test_all_is_shown(run):
    code, out, _ = run(fields_of("BitNet"), name="config.json")
    assert code == 1
    assert re.search(r"^BitNetMLP +skipped *\n  2 x glu_mlp *$", out, re.MULTILINE)
    assert re.search(r"^BitNetRMSNorm +patched +[\d.]+ *\n  9 x rms_norm, llama +[\d.]+ *$", out, re.MULTILINE)
    assert re.search(r"^BitNetForCausalLM +patched +[\d.]+ *\n  1 x together +[\d.]+ *$", out, re.MULTILINE)
    assert "\nglu_mlp, BitNetMLP: no kernel for the activation ReLUSquaredActivation\n" in out
    assert "\nmemory: planned\nkernels: " in out


@pytest.mark.parametrize("family", ["BitNet", "Qwen3Next"])
def test_no_word_is_broken(capsys, monkeypatch, tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(getattr(transformers, f"{family}Config")().to_dict()))
    diagnosis = doctor.examine(tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda path: diagnosis)
    monkeypatch.setattr(sys, "argv", ["liger-like", "doctor", str(tmp_path)])
    words = {word for row in diagnosis.rows for word in f"{row['cls']} {row['variant']} {row['reason']}".split()}
    for measured, columns in ((False, 80), (False, 120), (True, 80), (True, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        for row in diagnosis.rows if measured else ():  # as on a GPU
            row["ms"], row["MiB"] = (12.345, 0.0123), (12345.6, 123.4)
        with pytest.raises(SystemExit):
            main()
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        assert words <= set(out.split())
        assert {f"{row['count']} x {row['pattern']}" for row in diagnosis.rows} <= set(re.findall(r"\d+ x \w+", out))
        assert ("-> 123" in out) == ("12346" in out) == measured


def test_what_is_left_alone_fails(run):
    code, out, _ = run(fields_of("BitNet"), "--json")
    (left,) = [row for row in parsed(out)["rows"] if row["status"] == "skipped"]
    assert (code, left["cls"], left["count"]) == (1, "BitNetMLP", 2)
    assert "forward" not in left


@pytest.mark.parametrize(("family", "rates"), [("GPT2", {}), ("Llama", {"attention_dropout": 0.1})])
def test_attention_that_is_left_alone_for_its_dropout(run, family, rates):
    """The tiny model that is compared has none, but what is said is of the config."""
    fields = fields_of(family, **rates) | {"architectures": None}
    code, out, _ = run(fields, "--json")
    attention = [row for row in parsed(out)["rows"] if row["pattern"] == "attention"]
    assert code == 1
    assert [(row["status"], row["reason"]) for row in attention] == [("skipped", "its attention has dropout, 0.1")]


def test_a_model_that_does_not_run_in_float64(run):
    _, out, _ = run(fields_of("XGLM"), "--json")
    measured = [row for row in parsed(out)["rows"] if "forward" in row]
    assert "together" in {row["pattern"] for row in measured}
    assert all(row["forward"] < 1 and row["backward"] < 1 for row in measured)


def test_nothing_at_all_fails():
    absent = {"pattern": "rope", "status": "absent"}
    assert not doctor.Diagnosis("", (absent,), ()).sound
    assert not doctor.Diagnosis("", (absent, {"pattern": "together", "status": "patched"}), ()).sound
    assert doctor.Diagnosis("", (absent, {"pattern": "lm_head", "status": "patched"}), ()).sound


def test_a_patch_that_is_wrong_by_itself_is_not_used(run, monkeypatch):
    llama = rms_norm.KERNELS["llama"]
    monkeypatch.setitem(rms_norm.KERNELS, "llama", lambda x, weight, bias, eps: 1.001 * llama(x, weight, bias, eps))
    monkeypatch.setattr("liger_like.patching._confirmed", set())
    code, out, _ = run(fields_of("Llama"), "--json")
    assert code == 1
    assert [row["status"] for row in parsed(out)["rows"] if row["pattern"] == "rms_norm"] == ["skipped"]


def test_a_patch_that_is_wrong_in_the_model_differs(run, monkeypatch):
    make = attention.make_mask
    monkeypatch.setattr(attention, "make_mask", lambda *args, attention_mask, **kw: make(*args, **kw))
    code, out, _ = run(fields_of("Llama"), "--json")
    assert code == 1
    wrong = [row for row in parsed(out)["rows"] if row["status"] == "differs"]
    assert [row["pattern"] for row in wrong] == ["attention", "together"]
    assert all(row["forward"] > 1e3 and row["backward"] > 1e3 for row in wrong)


def test_error_ratios():
    exact = {name: torch.randn(8, dtype=torch.float64) for name in ("loss", "logits", "weight", "bias")}
    same = {name: t * (1 + 1e-5) for name, t in exact.items()}
    assert doctor.error_ratios(same, same, exact) == (1, 1)
    assert doctor.error_ratios(exact, exact, exact) == (0, 0)
    assert doctor.error_ratios({**same, "bias": exact["bias"] * 2}, same, exact)[1] > 1e4
    assert doctor.error_ratios({**same, "loss": exact["loss"] * (1 + 3e-5)}, same, exact) == pytest.approx((3, 1))
    assert doctor.error_ratios({**same, "logits": exact["logits"] * (1 + 3e-5)}, same, exact) == pytest.approx((3, 1))
    assert doctor.error_ratios({**same, "logits": exact["logits"] * float("nan")}, same, exact)[0] == doctor.WORST
    # a missing gradient counts as zero; the ratio to an unpatched model without error divides by the floor
    assert doctor.error_ratios({k: same[k] for k in ("loss", "logits", "weight")}, same, exact)[1] > 1e4
    shifted = {name: t * (1 + 5e-6) for name, t in exact.items()}
    assert doctor.error_ratios(shifted, exact, exact) == pytest.approx((5, 5))


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_type": "llama", "auto_map": CODE}, "code of its own"),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "auto_map": CODE}}, "code of its own"),
        ({"model_type": "no_such"}, "has no model_type 'no_such'"),
        ({}, "has no model_type None"),
        ({"model_type": ["llama"]}, "has no model_type ['llama']"),
        ({"model_type": "vit"}, "has no vit model with a language-model head"),
        ({"model_type": "musicgen"}, "has no musicgen model with a language-model head"),  # only of its decoder
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers refuses the config"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "no", "rope_theta": 1.0}}, "no tiny LlamaForC"),
        ("[]", "must hold a JSON object, got list"),
        ("{", "JSONDecodeError"),
    ],
)
def test_refused(run, tmp_path, fields, why):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code, out, error = run(fields, "--json")
    assert (code, out) == (2, "")
    assert error.startswith("liger-like: ")
    assert why in error
    assert not (tmp_path / "ran").exists()


def test_a_family_that_runs_the_class_of_another(run):
    code, out, _ = run(transformers.InternLM3Config().to_dict(), "--json")
    assert (code, parsed(out)["model"]) == (0, "LlamaForCausalLM")
    config = transformers.InternLM3Config()
    assert type(tiny.build(transformers.LlamaForCausalLM, config).config) is type(config)


def test_no_such_file(run):
    code, _, error = run({}, name="other.json")
    assert code == 2
    assert "other.json" in error


def test_a_head_with_an_adapter(run):
    """DoRA is what patching leaves alone."""
    adapter = peft.LoraConfig(target_modules=["lm_head"], use_dora=True, task_type="CAUSAL_LM")
    code, out, _ = run(fields_of("Llama"), "--json", adapter=adapter)
    found = parsed(out)
    assert code == 1
    (warning,) = found["warnings"]
    assert "the loss is not fused with the head (" in warning
    assert "DoraLinearVariant" in warning
    assert "4096 tokens make 2.0 GiB of logits" in warning
    assert "ZeRO-3" in warning


def test_an_adapter_is_trained(run, monkeypatch):
    trained = []
    results = tiny.results

    def seen(model, inputs):
        trained.append({name for name, p in model.named_parameters() if p.requires_grad})
        assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules())  # float64 draws other masks
        return results(model, inputs)

    monkeypatch.setattr(tiny, "results", seen)
    adapter = peft.LoraConfig(target_modules=["q_proj", "down_proj"], lora_dropout=0.5, inference_mode=True)
    adapter.layers_to_transform = [14, 15]
    code, out, _ = run(fields_of("Llama"), "--json", adapter=adapter)
    assert (code, parsed(out)["warnings"]) == (0, [])
    assert all(len(names) == 8 and all("lora_" in name for name in names) for names in trained)


def test_an_adapter_that_does_not_fit(run):
    code, _, error = run(fields_of("Llama"), adapter=peft.LoraConfig(target_modules=["no_such"]))
    assert code == 2
    assert "the adapter does not fit" in error


def test_warnings(run, monkeypatch):
    monkeypatch.setitem(versions.TESTED, "torch", ("1.0", "1.9"))
    monkeypatch.setitem(versions.TESTED, "triton", ("100.0", "100.1"))
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    code, out, _ = run(fields_of("Llama", quantization_config=quantised), "--json")
    of_torch, of_triton, of_weights = parsed(out)["warnings"]
    assert code == 0
    assert re.fullmatch(r"the installed torch \d\S+ is newer than tested: .+", of_torch)
    assert re.fullmatch(r"the installed triton \d\S+ is older than allowed: install triton 100\.0 or newer", of_triton)
    assert "quantised" in of_weights


def test_layers_that_the_tiny_model_has_not(run):
    _, out, _ = run(transformers.MllamaConfig().to_dict(), "--json")
    assert "MllamaTextCrossAttention" in " ".join(parsed(out)["warnings"])


def test_a_model_that_needs_images(run):
    _, out, _ = run(transformers.Kosmos2Config().to_dict(), "--json")
    found = parsed(out)
    assert "the tiny model does not run" in " ".join(found["warnings"])
    assert not any("forward" in row for row in found["rows"])
    assert any(row["error"] is not None for row in found["rows"] if row["status"] == "patched")


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_without_transformers_it_says_what_to_install(tmp_path, package):
    fields, adapter = {"model_type": "llama"}, peft.LoraConfig(target_modules=["q_proj"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    adapter.save_pretrained(tmp_path)
    code = f"import sys; sys.modules[{package!r}] = None; from liger_like.cli import main; main()"
    command = [sys.executable, "-c", code, "doctor", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"{package} is not installed; run: pip install 'liger-like[hf]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_real_sizes_with_few_layers():
    fields = {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "b"], "hidden_size": 4096}
    small = {"num_hidden_layers": 2, "layer_types": ["a", "b"], "hidden_size": 4096}
    assert tiny.with_few_layers({"text_config": fields, "id": 7}) == {"text_config": small, "id": 7}


def test_tables_are_small():
    tables = {
        "vocab_size_per_layer_input": 500,
        "encoder_hash_byte_group_vocab": 500,
        "vocab": 500,
        "vocab_offset": 500,
    }
    assert [*tiny.shrunk(tables, {}, {}).values()] == [128, 128, 128, 500]


@pytest.mark.gpu
def test_costs(monkeypatch, tmp_path):
    monkeypatch.undo()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.Qwen3Config(**sizes, head_dim=128, vocab_size=32000, num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    diagnosis = doctor.examine(tmp_path)
    assert diagnosis.warnings == ()
    timed = {row["pattern"]: row for row in diagnosis.rows if "ms" in row}
    assert timed.keys() == {"rms_norm", "qk_norm_rope", "glu_mlp", "lm_head", "attention", "together"}
    for name in ("rms_norm", "qk_norm_rope"):  # an unpatched model runs many kernels for each
        assert timed[name]["ms"][1] < timed[name]["ms"][0]
    assert timed["lm_head"]["MiB"][1] < timed["lm_head"]["MiB"][0] - 4 * 4096 * 32000 / 2**20
