"""Mixtures whose experts run by code of their own: Llama 4 and LongCat-Flash."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from test_patches_experts import OTHERS
from test_patches_experts_lora import are_split
from test_patches_mlp import CHANGES
from tiny_models import assert_exact, batch, results, rows, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard

import liger_like.patching
from liger_like.doctor import tiny as doctored
from liger_like.patches import own_experts
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
LLAMA = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
TARGETS = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]


def llama(device, **config):
    layers = config.get("num_hidden_layers", 2)
    config |= {"moe_layers": [*range(layers)], "layer_types": ["chunked_attention", "full_attention"][:layers]}
    return tiny("Llama4", device, **LLAMA | config).train()


def longcat(device, monkeypatch, layers=1):
    monkeypatch.setattr(doctored, "LAYERS", layers)
    cls = transformers.LongcatFlashForCausalLM
    config = cls.config_class(zero_expert_num=3)
    return doctored.build(cls, config).to(device).train()


def pair(device, monkeypatch, family, **config):
    original = llama(device, **config) if family == "Llama4" else longcat(device, monkeypatch)
    patched = copy.deepcopy(original)
    patch(patched, **OTHERS)
    return patched, original


def blocks_of(model):
    return [module for module in model.modules() if hasattr(module, "router")]


FAMILIES = ["Llama4", "LongcatFlash"]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels(family, device, calls, monkeypatch):
    """The model's kernels, interpreted on a CPU; ``defined`` leaves them out below."""
    patched, original = pair(device, monkeypatch, family, num_hidden_layers=1)
    calls.clear()
    assert_exact(patched, original, batch(device, rows=1, length=10))
    assert len(calls) == len(blocks_of(original))


@pytest.mark.parametrize("k", [1, 2])
def test_llama4(k, device, defined, monkeypatch):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    original = llama(device, num_experts_per_tok=k)
    patched, inputs = copy.deepcopy(original), batch(device)
    found = rows(patch(patched, strict=True, verify="numeric", **OTHERS), "experts")
    assert {(row.cls, row.variant, row.count, row.status) for row in found} == {
        ("Llama4TextMoe", "swiglu", 2, "patched"),
        ("Llama4TextExperts", "swiglu", 2, "patched"),
    }
    defined.clear()
    assert_exact(patched, original, inputs)
    assert len(defined) == 2
    x = torch.randn(2, 5, original.config.hidden_size, device=device)
    for block, twin in zip(blocks_of(patched), blocks_of(original), strict=True):
        torch.testing.assert_close(block(x), twin(x))
        torch.testing.assert_close(block(x[:0]), twin(x[:0]))
    assert {row.status for row in rows(patch(patched, **OTHERS), "experts")} == {"already patched"}
    unpatch(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in original.modules()]
    torch.testing.assert_close(results(patched, inputs), results(original, inputs), rtol=0, atol=0)


def test_longcat(device, defined, monkeypatch):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    original = longcat(device, monkeypatch, layers=2)
    patched, inputs = copy.deepcopy(original), batch(device)
    (row,) = rows(patch(patched, verify="numeric", **OTHERS), "experts")
    assert (row.cls, row.variant, row.status) == ("LongcatFlashExperts", "swiglu", "patched")
    defined.clear()
    assert_exact(patched, original, inputs)
    assert len(defined) == row.count > 0
    unpatch(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in original.modules()]


def test_longcat_runs_identities(device, defined, monkeypatch):
    patched, original = ((blocks_of(model)[0].experts) for model in pair(device, monkeypatch, "LongcatFlash"))
    total, H = original.total_experts, original.hidden_size
    x = torch.randn(7, H, device=device, dtype=torch.float16)
    index = torch.stack([torch.randperm(total, device=device)[:3] for _ in range(7)])
    index[0], index[1] = torch.arange(3), total - 1 - torch.arange(3)  # none, and nothing else
    weights = torch.rand(7, 3, device=device)
    found = [experts.half()(x, index, weights) for experts in (patched, original)]
    assert {t.dtype for t in found} == {torch.float16}
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_no_kernel_can_run_experts_run_as_before(family, references, calls, monkeypatch):
    patched, original = pair("cpu", monkeypatch, family)
    inputs = batch("cpu")
    calls.clear()
    torch.testing.assert_close(results(patched, inputs), results(original, inputs), rtol=0, atol=0)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_live_activation_runs(change, family, device, defined, monkeypatch):
    models = pair(device, monkeypatch, family)
    for model in models:
        for block in blocks_of(model):
            CHANGES[change](block.experts, "act_fn")
    inputs = batch(device)
    defined.clear()
    torch.testing.assert_close(*(results(model, inputs) for model in models))
    assert not defined


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device, defined, monkeypatch):
    patched, original = pair(device, monkeypatch, "Llama4")
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    assert_exact(patched, original, batch(device))
    assert defined


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_whole(family, device, calls, monkeypatch):
    patched, original = pair(device, monkeypatch, family, num_hidden_layers=1)
    inputs = {**batch(device, rows=1, length=10), "use_cache": False}
    torch._dynamo.reset()
    calls.clear()
    loss = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs).loss
    loss.backward()
    assert calls
    expected = results(original, inputs)
    torch.testing.assert_close(loss, expected.pop("loss"))
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(family, dtype, device, defined, monkeypatch):
    patched, original = pair(device, monkeypatch, family)
    inputs = {**batch(device), "use_cache": False}
    with torch.autocast(device, dtype):
        got, expected = results(patched, inputs), results(original, inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in expected.items()}
    exact = results(copy.deepcopy(original).double(), inputs)
    for name, t in expected.items():  # gradients of a router cancel: the unpatched model's may be off by a quarter
        assert (got[name] - t).norm() <= 16 * torch.finfo(dtype).eps * t.norm() + 2 * (t - exact[name]).norm(), name


@pytest.mark.parametrize("order", ["before", "after"])
def test_fully_sharded(order, defined):
    original = llama("cpu")
    model = copy.deepcopy(original)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if order == "before":
            patch(model, strict=True, **OTHERS)
        for module in (*(block.experts for block in blocks_of(model)), model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        patch(model, strict=True, **OTHERS)
        inputs = batch("cpu")
        defined.clear()
        got, expected = results(model, inputs), results(original, inputs)
        assert len(defined) == 2
        for name, t in expected.items():
            torch.testing.assert_close(got[name].full_tensor() if name != "loss" else got[name], t)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(order, device, defined, monkeypatch):
    original = llama(device)
    patched = copy.deepcopy(original)
    if order == "before":
        patch(patched, strict=True, **OTHERS)
    models = []
    for model in (patched, original):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=TARGETS, init_lora_weights=False)
        models.append(peft.get_peft_model(model, config))
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    found = rows(patch(models[0], verify="numeric", **OTHERS), "experts")
    assert {row.status for row in found} == {{"before": "already patched", "after": "patched"}[order]}
    if order == "after":
        assert {row.variant for row in found} == {"swiglu, LoRA"}
    defined.clear()
    assert_exact(*models, batch(device))
    assert are_split(defined) == {(True, True)}


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_of_longcat(order, device, defined, monkeypatch):
    """The op gets the factors of the experts that multiply, in place of sums of all weights."""
    original = longcat(device, monkeypatch)
    patched, models = copy.deepcopy(original), []
    if order == "before":
        patch(patched, **OTHERS)
    for model in (patched, original):
        torch.manual_seed(1)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=4, target_modules=["q_a_proj"], target_parameters=targets, init_lora_weights=False)
        models.append(peft.get_peft_model(model, config))
    (row,) = rows(patch(models[0], **OTHERS), "experts")
    assert row.status == {"before": "already patched", "after": "patched"}[order]
    if order == "after":
        assert row.variant == "swiglu, LoRA"
    defined.clear()
    assert_exact(*models, batch(device))
    assert are_split(defined) == {(True, True)}
    unpatch(models[0])
    assert [type(m) for m in models[0].modules()] == [type(m) for m in models[1].modules()]


def squared(self, hidden_states):
    return hidden_states * hidden_states


def replace(**attributes):
    """Give the block, or a part of it, another forward."""

    def change(block):
        for name, value in attributes.items():
            part = block.get_submodule(name)
            part.__class__ = type(type(part).__name__, (type(part),), {"forward": value})

    return change


def quantised(block):
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.data.to(torch.float8_e4m3fn), requires_grad=False)


CASES = {
    "block": (replace(**{"": squared}), "matches no known form"),
    "router": (replace(router=squared), "its router is a"),
    "experts": (replace(experts=squared), "its experts are a"),
    "weights": (quantised, "of torch.float8_e4m3fn"),
    "activation": (lambda block: setattr(block.experts, "act_fn", nn.ReLU()), "no kernel for the activation ReLU"),
    "hook": (lambda block: setattr(block.router, "forward", squared), "its forward was replaced by"),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_that_are_left_alone_and_why(case, device):
    change, reason = CASES[case]
    model = llama(device, num_hidden_layers=1)
    (block,) = blocks_of(model)
    change(block)
    report = patch(model, **OTHERS)
    skipped = [row for row in report.rows if row.status == "skipped"]
    assert any(reason in row.reason for row in skipped), report
    assert not any(hasattr(type(part), "_liger_like") for part in (block, block.experts))


def test_longcat_whose_other_experts_change_their_input(device, monkeypatch):
    model = longcat(device, monkeypatch)
    for block in blocks_of(model):
        block.experts.identity_expert = nn.ReLU()
    (row,) = rows(patch(model, **OTHERS), "experts")
    assert (row.status, row.reason) == ("skipped", "it has no routed experts, or its others do not return their input")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_replacement_is_refused(family, device, references, monkeypatch):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    op = own_experts.moe_experts
    monkeypatch.setattr(own_experts, "moe_experts", lambda *args, **options: 1.01 * op(*args, **options))
    model = llama(device) if family == "Llama4" else longcat(device, monkeypatch)
    skipped = rows(patch(model, **OTHERS | {"norm": True}), "experts")
    assert {row.status for row in skipped} == {"skipped"}
    assert all("differs by" in row.reason for row in skipped)
