"""Residual additions fused with the norms that follow them; no part of ``patch`` by default."""

import copy

import pytest
import torch
from test_patching_engine import object_graph
from tiny_models import assert_exact, batch, results, rows, tiny
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from liger_like import patching
from liger_like.patches import UnrecognisedError, add_rms_norm
from liger_like.patching import patch, unpatch

# family: the norms of a layer that are fused
FAMILIES = {
    "Llama": ["post_attention_layernorm"],
    "Gemma2": ["pre_feedforward_layernorm"],
}


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setitem(patching.RECOGNISERS, "add_rms_norm", add_rms_norm.AddRMSNorm())
    found, true = [], add_rms_norm.add_rms_norm
    monkeypatch.setattr(add_rms_norm, "add_rms_norm", lambda *args, **kwargs: found.append(1) or true(*args, **kwargs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family, device, calls):
    original = tiny(family, device)
    model = copy.deepcopy(original)
    (row,) = rows(patch(model, verify="numeric", strict=True), "add_rms_norm")
    assert (row.count, row.status) == (2, "patched")
    assert [*add_rms_norm._sites(type(original.model.layers[0])).norms] == FAMILIES[family]
    calls.clear()
    inputs = batch(device)
    assert_exact(model, original, inputs)
    assert len(calls) == 2
    before = object_graph(original)[0]
    unpatch(model)
    assert {n: cls for n, (cls, _) in object_graph(model)[0].items()} == {n: cls for n, (cls, _) in before.items()}


def test_it_is_off_by_default(device):
    model = tiny("Llama", device)
    patch(model)
    assert type(model.model.layers[0]) is LlamaDecoderLayer


def test_gradient_checkpointing(device, calls):
    original = tiny("Llama", device)
    model = copy.deepcopy(original)
    patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    calls.clear()
    assert_exact(model, original, batch(device))
    assert len(calls) == 4  # checkpointing calls them again in the backward


def test_hooks_and_other_dtypes_are_heard(device, calls):
    original = tiny("Llama", device)
    model = copy.deepcopy(original)
    patch(model)
    for m in (model, original):
        m.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, output: output * 1.5)
        m.model.layers[1].self_attn.register_forward_hook(lambda module, args, out: (out[0].double(), *out[1:]))
        m.model.layers[1].mlp.double()
        m.model.layers[1].register_forward_hook(lambda module, args, out: out.float())
    calls.clear()
    ids = batch(device)["input_ids"]
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    assert not calls


def test_compile(device, calls):
    original = tiny("Llama", device)
    model = copy.deepcopy(original)
    patch(model)
    inputs = {**batch(device), "use_cache": False}
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    torch.testing.assert_close(loss, results(original, inputs)["loss"])


class Unkept(LlamaDecoderLayer):
    def forward(self, x, residual):
        x = residual + x
        kept = residual
        x = self.input_layernorm(x)
        return x + kept


def test_sums_that_are_not_kept_are_not_fused():
    with pytest.raises(UnrecognisedError, match=r"Unkept\.forward does not normalise a residual sum that it keeps"):
        add_rms_norm._sites(Unkept)
