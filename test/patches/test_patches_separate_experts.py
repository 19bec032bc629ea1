"""Mixtures whose experts' weights are not packed: DBRX and JetMoE."""

import copy

import pytest
import torch
import transformers
from test_patches_experts import OTHERS
from tiny_models import assert_exact, batch, results, rows
from torch import nn

import liger_like.patching
from liger_like.doctor import tiny as doctored
from liger_like.patches import separate_experts
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
FAMILIES = {"Dbrx": ("DbrxExperts", "mlp"), "JetMoe": ("JetMoeMoE", "input_linear")}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def build(family, monkeypatch, device="cpu"):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    monkeypatch.setattr(doctored, "LAYERS", 1)
    cls = getattr(transformers, f"{family}ForCausalLM")
    if family == "JetMoe":
        return doctored.build(cls, cls.config_class()).to(device).train()
    experts = {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
    attention = {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 64, "vocab_size": 104}
    return cls(cls.config_class(**sizes, attn_config=attention, ffn_config=experts)).to(device).train()


def experts_of(model, family):
    """The modules that are patched, before and after."""
    return [m for m in model.modules() if FAMILIES[family][0] in [cls.__name__ for cls in type(m).__mro__]]


def test_results_and_unpatch(family, device, defined, monkeypatch):
    original = build(family, monkeypatch, device)
    patched, inputs = copy.deepcopy(original), batch(device)
    found = rows(patch(patched, verify="numeric", **OTHERS), "separate_experts")
    assert {row.status for row in found} == {"patched"}, found
    assert FAMILIES[family][0] in {row.cls for row in found}
    defined.clear()
    assert_exact(patched, original, inputs)
    assert defined
    assert {row.status for row in rows(patch(patched, **OTHERS), "separate_experts")} == {"already patched"}
    unpatch(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in original.modules()]
    torch.testing.assert_close(results(patched, inputs), results(original, inputs), rtol=0, atol=0)


def test_where_no_kernel_can_run_experts_run_as_before(family, references, calls, monkeypatch):
    original = build(family, monkeypatch)
    patched, inputs = copy.deepcopy(original), batch("cpu")
    patch(patched, **OTHERS)
    calls.clear()
    torch.testing.assert_close(results(patched, inputs), results(original, inputs), rtol=0, atol=0)
    assert not calls


def test_the_live_activation_runs(family, defined, monkeypatch):
    original = build(family, monkeypatch)
    patched, inputs = copy.deepcopy(original), batch("cpu")
    patch(patched, **OTHERS)
    for model in (patched, original):
        for part in experts_of(model, family):
            if family == "Dbrx":
                part.mlp.activation_fn = nn.Tanh()
            else:
                part.activation = nn.Tanh()
    defined.clear()
    torch.testing.assert_close(results(patched, inputs), results(original, inputs))
    assert not defined


def squared(self, *args):
    return args[0] * args[0]


def test_parts_of_other_code_are_left_alone(family, monkeypatch):
    model, name = build(family, monkeypatch), FAMILIES[family][1]
    for module in experts_of(model, family):
        part = getattr(module, name)
        part.__class__ = type("Other", (type(part),), {"forward": squared})
    (row,) = rows(patch(model, **OTHERS | {"norm": True}), "separate_experts")
    assert row.status == "skipped"
    assert f"its {name} is a" in row.reason


def test_router_logits_of_jetmoe(defined, monkeypatch):
    original = build("JetMoe", monkeypatch)
    patched, inputs = copy.deepcopy(original), batch("cpu")
    patch(patched, **OTHERS)
    found, expected = (model(**inputs, output_router_logits=True) for model in (patched, original))
    torch.testing.assert_close(found.router_logits, expected.router_logits)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)


def test_dbrx_keeps_no_copy_of_its_weights(defined, monkeypatch):
    model = build("Dbrx", monkeypatch)
    patch(model, **OTHERS)
    experts = experts_of(model, "Dbrx")[0]
    own, kept = {p.data_ptr() for p in experts.parameters()}, []
    x = torch.randn(2, 9, experts.hidden_size, requires_grad=True)
    index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(18)])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, index, torch.rand(18, 2))
    assert not [t for t in kept if t.numel() >= experts.mlp.w1.numel() and t.data_ptr() not in own]


def test_a_wrong_replacement_is_refused(family, references, monkeypatch):
    op, model = separate_experts.moe_experts, build(family, monkeypatch)
    monkeypatch.setattr(separate_experts, "moe_experts", lambda *args, **options: 1.01 * op(*args, **options))
    skipped = rows(patch(model, **OTHERS | {"norm": True}), "separate_experts")
    assert {row.status for row in skipped} == {"skipped"}
    assert all("differs by" in row.reason for row in skipped)
