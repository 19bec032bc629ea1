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


def test_compiled_whole(family, device, calls, monkeypatch):
    """One graph, although the forward looks whether its parts still have the known code."""
    original = build(family, monkeypatch, device)
    patched, inputs = copy.deepcopy(original), {**batch(device, rows=1, length=10), "use_cache": False}
    patch(patched, **OTHERS)
    torch._dynamo.reset()
    calls.clear()
    loss = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs).loss
    loss.backward()
    assert calls
    expected = results(original, inputs)
    torch.testing.assert_close(loss, expected.pop("loss"))
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_dbrx(reentrant, device, defined, monkeypatch):
    original = build("Dbrx", monkeypatch, device)
    patched = copy.deepcopy(original)
    patch(patched, **OTHERS)
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    defined.clear()
    assert_exact(patched, original, batch(device))
    assert defined


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(family, dtype, device, defined, monkeypatch):
    """Beside the model in float64: DBRX of transformers raises under autocast, since its sums have another dtype."""
    original = build(family, monkeypatch, device)
    patched, inputs = copy.deepcopy(original), {**batch(device), "use_cache": False}
    patch(patched, **OTHERS)
    defined.clear()
    with torch.autocast(device, dtype):
        got = results(patched, inputs)
    assert defined
    exact = results(original.double(), inputs)
    assert {t.dtype for t in got.values()} == {torch.float32}
    for name, t in exact.items():
        assert (got[name] - t).norm() <= 32 * torch.finfo(dtype).eps * t.norm(), name


def test_generate(family, device, defined, monkeypatch):
    """Few rows of DBRX run as before: the op would copy all weights."""
    original = build(family, monkeypatch, device).eval()
    patched, ids = copy.deepcopy(original), batch(device, length=7)["input_ids"]
    patch(patched, **OTHERS)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    defined.clear()
    got = patched.generate(ids, attention_mask=torch.ones_like(ids), **options)
    blocks = len([m for m in experts_of(patched, family) if hasattr(m, FAMILIES[family][1])])
    assert len(defined) == blocks * (1 if family == "Dbrx" else 4)
    expected = original.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits)


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
    storage = lambda t: t.untyped_storage()  # noqa: E731  # the definition of the op keeps parts of a copy
    own, kept = {storage(p).data_ptr() for p in experts.parameters()}, []
    x = torch.randn(2, 9, experts.hidden_size, requires_grad=True)
    index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(18)])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, index, torch.rand(18, 2))
    least = storage(experts.mlp.w1).nbytes()
    assert not [t for t in kept if storage(t).nbytes() >= least and storage(t).data_ptr() not in own]


def test_a_wrong_replacement_is_refused(family, references, monkeypatch):
    op, model = separate_experts.moe_experts, build(family, monkeypatch)
    monkeypatch.setattr(separate_experts, "moe_experts", lambda *args, **options: 1.01 * op(*args, **options))
    skipped = rows(patch(model, **OTHERS | {"norm": True}), "separate_experts")
    assert {row.status for row in skipped} == {"skipped"}
    assert all("differs by" in row.reason for row in skipped)
