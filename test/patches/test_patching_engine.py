"""Recognition, reports, and patching that leaves no trace."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from tiny_models import assert_exact, batch, results, rows, tiny
from torch import nn
from transformers.models.llama import modeling_llama

import liger_like.patching
from liger_like.patches import heads, rms_norm, rope
from liger_like.patching import AutoModelForCausalLM, patch, unpatch
from liger_like.trainer import PatchCallback

pytestmark = pytest.mark.usefixtures("references")


def object_graph(model):
    """Class and attributes of every module, and the names in its classes' source modules."""
    modules = {name: (type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()}
    sources = {cls.__module__ for cls, _ in modules.values()}
    return modules, {name: {k: id(v) for k, v in vars(sys.modules[name]).items()} for name in sources}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3", "Qwen3", "Cohere"])
def test_unpatch_restores_everything(family, device):
    model = tiny(family, device)
    inputs = batch(device)
    results(model, inputs)
    model.zero_grad()
    before = object_graph(model)
    for restore in (unpatch, lambda m: patch(m).unpatch()):
        patch(model)
        assert object_graph(model) != before
        assert model(**inputs).logits is None
        restore(model)
        assert object_graph(model) == before
        assert model(**inputs).logits is not None
    with patch(model) as report:
        assert report.patched
    assert object_graph(model) == before
    unpatch(model)
    assert object_graph(model) == before


def test_patching_leaves_the_random_state_alone(device):
    liger_like.patching._confirmed.clear()
    model = tiny("Llama", device)
    state = torch.random.get_rng_state()
    patch(model, verify="numeric")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_patching_again_patches_the_rest(device):
    model = tiny("Llama", device)
    patch(model, mlp=False, loss=False)
    again = patch(model)
    assert {row.pattern: row.status for row in again.patched} == {
        "rms_norm": "already patched",
        "rope": "already patched",
        "glu_mlp": "patched",
        "lm_head": "patched",
        "attention": "already patched",
        "generation": "already patched",
    }
    assert all(row.status == "already patched" for row in patch(model, strict=True).patched)
    before = object_graph(tiny("Llama", device))
    unpatch(model)
    assert {name: cls for name, (cls, _) in object_graph(model)[0].items()} == {
        n: cls for n, (cls, _) in before[0].items()
    }


@pytest.mark.parametrize("off", ["norm", "rope", "mlp", "attention", "loss"])
def test_patterns_can_be_turned_off(off, device):
    pattern = {"norm": "rms_norm", "mlp": "glu_mlp", "loss": "lm_head"}.get(off, off)
    assert not rows(patch(tiny("Llama", device), **{off: False}), pattern)


def test_an_unpatched_model_in_the_same_process_runs_none_of_it(device, monkeypatch):
    calls = []
    for module, name in ((rms_norm, "rms_norm"), (rope, "rope"), (heads, "fused_linear_cross_entropy")):
        original = getattr(module, name)

        def counted(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    patched, other = tiny("Llama", device), tiny("Llama", device)
    patch(patched)
    calls.clear()
    results(other, batch(device))
    assert not calls
    results(patched, batch(device))
    assert {name: calls.count(name) for name in calls} == {"rms_norm": 5, "rope": 2, "fused_linear_cross_entropy": 1}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_patched_and_independent(copied, device):
    model = tiny("Gemma2", device)
    original = copy.deepcopy(model)
    patch(model)
    twin = copied(model)
    assert_exact(twin, original, batch(device))
    assert twin(**batch(device)).logits is None
    unpatch(twin)
    assert type(twin) is type(original)
    assert model(**batch(device)).logits is None


def test_save_and_load(device, tmp_path):
    model = tiny("Llama", device)
    keys = model.state_dict().keys()
    patch(model)
    assert model.state_dict().keys() == keys
    assert "Llama" in repr(model)
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device).train()
    assert type(plain) is transformers.LlamaForCausalLM
    assert plain.config.architectures == ["LlamaForCausalLM"]
    patched = AutoModelForCausalLM.from_pretrained(tmp_path).to(device).train()
    assert isinstance(patched, transformers.LlamaForCausalLM)
    inputs = batch(device)
    assert patched(**inputs).logits is None
    assert_exact(patched, plain, inputs)


@pytest.mark.filterwarnings("error:liger_like")
def test_auto_model_from_config_warns_of_what_was_left_alone():
    config = tiny("Llama").config
    assert AutoModelForCausalLM.from_config(config).train()(**batch()).logits is None
    with pytest.warns(
        UserWarning, match="some modules were left alone:(.|\n)*no kernel for the activation ReLU"
    ) as seen:
        AutoModelForCausalLM.from_config(tiny("Llama", hidden_act="relu").config)
    assert [warning.filename for warning in seen] == [__file__]
    assert AutoModelForCausalLM.from_config(config, loss=False).train()(**batch()).logits is not None
    with pytest.raises(TypeError, match="loss must be True or False, got 'fused'"):
        AutoModelForCausalLM.from_pretrained("never loaded", loss="fused")


def test_report(device):
    report = patch(tiny("Llama", device, hidden_act="relu"), verify="numeric")
    header, *lines = str(report).splitlines()
    assert header.split() == ["pattern", "cls", "variant", "count", "status", "reason", "error"]
    assert len(lines) == len(report.rows) == len(report.to_dict()["rows"])
    (norm,) = rows(report, "rms_norm")
    assert (norm.cls, norm.variant, norm.count, norm.status) == ("LlamaRMSNorm", "llama", 5, "patched")
    assert 0 <= norm.error < 1e-6
    (mlp,) = rows(report, "glu_mlp")
    assert (mlp.count, mlp.status, mlp.error) == (2, "skipped", None)
    assert set(report.patched) | set(report.skipped) == set(report.rows)
    (attention,) = rows(report, "attention")
    assert (attention.variant, attention.count, attention.status) == ("plain", 2, "patched")


def test_strict_raises_and_patches_nothing(device):
    model = tiny("Llama", device, hidden_act="relu")
    before = object_graph(model)
    with pytest.raises(ValueError, match=r"glu_mlp +LlamaMLP"):
        patch(model, strict=True)
    assert object_graph(model) == before


WRONG = {
    "differs by 1.0e-03": lambda y: y * 1.001,
    "differs by nan": lambda y: y * float("nan"),
    "differs by 1.0e+00": lambda y: y.detach() + 0 * y.sum(),
    "gives torch.float64": lambda y: y.double(),
}


@pytest.mark.parametrize("reason", WRONG)
@pytest.mark.parametrize("verify", ["fingerprint", "numeric"])
def test_a_wrong_replacement_is_refused(verify, reason, device, monkeypatch):
    model = tiny("Llama", device)
    if verify == "fingerprint":
        liger_like.patching._confirmed.clear()
    else:
        patch(tiny("Llama", device))  # the miniature ran a kernel that was right
    right = rms_norm.rms_norm
    monkeypatch.setattr(rms_norm, "rms_norm", lambda *args, **kwargs: WRONG[reason](right(*args, **kwargs)))
    report = patch(model, verify=verify)
    (row,) = rows(report, "rms_norm")
    assert row.status == "skipped"
    assert reason in row.reason
    assert type(model.model.norm) is modeling_llama.LlamaRMSNorm


def test_numeric_verification_is_not_fooled_by_dropout(device):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["gate_proj"], r=4, lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(tiny("Llama", device), config)
    patch(model, verify="numeric", strict=True)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["Llama", "Olmo2", "Gemma2", "Phi3"])
def test_numeric_verification_accepts_what_is_right(family, device):
    original = tiny(family, device)
    model = copy.deepcopy(original)
    report = patch(model, verify="numeric", strict=True)
    assert all(row.error is not None for row in report.patched if row.pattern != "generation")
    assert all(p.grad is None for p in model.parameters())
    assert_exact(model, original, batch(device))


def test_numeric_verification_needs_weights():
    config = tiny("Llama").config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert all(
        "neither sharded nor on meta" in row.reason
        for row in patch(model, verify="numeric").rows
        if row.status == "skipped" and row.pattern != "generation"
    )
    assert {row.status for row in patch(model).patched} == {"patched"}


def test_patched_on_the_meta_device_then_materialised(device):
    original = tiny("Llama", device)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(original.config)
    patch(model, strict=True)
    model = model.to_empty(device=device).train()
    model.load_state_dict(original.state_dict())
    model.model.rotary_emb = copy.deepcopy(original.model.rotary_emb)
    assert_exact(model, original, batch(device))


@pytest.mark.parametrize("wrong", [None, "llama", dict])
def test_what_is_no_module_is_refused(wrong):
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
            function(wrong)


@pytest.mark.parametrize("make", [functools.partial(patch, nn.Linear(2, 2)), PatchCallback])
def test_options_that_patch_does_not_take_are_refused(make):
    with pytest.raises(ValueError, match="verify must be 'fingerprint' or 'numeric', got 'yes'"):
        make(verify="yes")
    for name in ("norm", "rope", "mlp", "attention", "loss", "lora", "strict"):
        values = "True, 'tiled' or False" if name == "mlp" else "True or False"
        with pytest.raises(TypeError, match=f"{name} must be {values}, got 'fused'"):
            make(**{name: "fused"})
    message = (
        "patch takes no option 'losses': its options are norm, rope, mlp, attention, loss, lora, strict and verify"
    )
    with pytest.raises(TypeError, match=message):
        make(losses=True)


def test_a_model_without_kernels_is_warned_of():
    with pytest.warns(UserWarning, match="liger_like: no module of Linear runs a kernel") as seen:
        patch(nn.Linear(2, 2))
    assert [warning.filename for warning in seen] == [__file__]


def test_attention_left_alone_for_dropout_is_warned_of_once(device):
    with pytest.warns(UserWarning, match=r"LlamaAttention runs no kernel: its attention has dropout, 0\.1") as seen:
        patch(tiny("Llama", device, attention_dropout=0.1))
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.filterwarnings("error:liger_like")
def test_a_patched_model_is_not_warned_of(device):
    for _ in range(2):
        patch(tiny("Llama", device))


@pytest.mark.parametrize("chosen", ["eager", "flex_attention"])
def test_unpatch_keeps_the_attention_that_the_user_chose_last(chosen, device):
    """While the model was patched, and before it was patched again; of parts of a config, too."""
    for again in (False, True):
        model = tiny("Llama", device)
        patch(model)
        model.set_attn_implementation(chosen)
        assert model.config._attn_implementation == chosen
        if again:
            patch(model)
            assert model.config._attn_implementation == "liger_like"
        unpatch(model)
        assert model.config._attn_implementation == chosen
        assert vars(model.config)["_attn_implementation_internal"] == chosen


def test_choosing_no_other_attention_leaves_no_trace(device):
    model = tiny("Llama", device)
    before = model.config._attn_implementation
    patch(model)
    model.set_attn_implementation("liger_like")
    unpatch(model)
    assert model.config._attn_implementation == before


def test_unpatch_refuses_under_a_foreign_class(device):
    model = tiny("Llama", device)
    patch(model)
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.raises(RuntimeError, match="Sharded was put on top of a patched class"):
        unpatch(model)


def test_importing_patching_imports_no_transformers():
    code = "import sys, liger_like.patching; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
