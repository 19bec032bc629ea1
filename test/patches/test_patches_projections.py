"""Projections of few rows at once, in models of half precision: where, with which numbers, and where not."""

import copy
import weakref

import pytest
import torch
from tiny_models import batch, tiny
from torch import nn

from liger_like.ops import few_rows
from liger_like.patches.forms import definition_of
from liger_like.patches.projections import NAMES, together
from liger_like.patches.rewriting import with_names
from liger_like.patching import patch, unpatch
from liger_like.runtime.launcher import recorded

WIDE = {"hidden_size": 64, "intermediate_size": 128}
# family -> launches of a layer; MLPs with packed or without gates, and experts, have none
FAMILIES = {
    "Llama": 2,
    "Mistral": 2,
    "Qwen2": 2,
    "Qwen3": 2,
    "Gemma": 2,
    "Gemma2": 2,
    "Granite": 2,
    "GptOss": 1,
    "Phi3": 0,
}


def pair(family, device, **config):
    """Unpatched models in half precision and in float64, and the patched one."""
    original = tiny(family, device, **WIDE, **config).eval().to(torch.bfloat16 if device == "cuda" else torch.float16)
    model = copy.deepcopy(original)
    patch(model)
    return model, original, copy.deepcopy(original).double()


def logits(model, inputs):
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"], use_cache=False).logits


def launches(model, inputs):
    with recorded() as found:
        result = logits(model, inputs)
    return result, sum(kernel is few_rows._few_rows_kernel for kernel, *_ in found)


def require_logits(model, original, exact, inputs, count):
    got, found = launches(model, inputs)
    assert found == count
    expected, true = logits(original, inputs), logits(exact, inputs)
    assert (got - true).norm() <= 1.1 * (expected - true).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family, device):
    models, inputs = pair(family, device), batch(device)
    require_logits(*models, inputs, 2 * FAMILIES[family] + 1)  # and the head
    assert launches(models[0], batch(device, rows=24))[1] == 0  # 288 rows
    with torch.enable_grad(), recorded() as found:
        models[0](**inputs).loss.backward()
    assert found
    assert not any(kernel is few_rows._few_rows_kernel for kernel, *_ in found)
    unpatch(models[0])
    assert torch.equal(logits(models[0], inputs), logits(models[1], inputs))


def hook(model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, y: y * 2)


def other_weight(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(2)
        model.model.layers[1].mlp.up_proj.weight.mul_(2)


def other_layer(model):
    layer = model.model.layers[0].mlp
    layer.gate_proj = torch.nn.Sequential(layer.gate_proj, torch.nn.Hardtanh())


@pytest.mark.parametrize(("change", "count"), [(hook, 4), (other_weight, 5), (other_layer, 4)])
def test_changes_after_patching(change, count, device):
    models = pair("Llama", device)
    for model in models:
        change(model)
    require_logits(*models, batch(device), count)


def test_a_forward_that_is_set_on_all_linear_layers(device, monkeypatch):
    models = pair("Llama", device)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, 0.5 * self.weight, self.bias))
    require_logits(*models, batch(device), 0)


def test_adapters(device):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    original = tiny("Llama", device, **WIDE).eval()
    wrapped = get_peft_model(copy.deepcopy(original), config)
    model = copy.deepcopy(wrapped).half()
    patch(model)
    require_logits(model, copy.deepcopy(wrapped).half(), wrapped.double(), batch(device), 1)


class Part:
    """Attention whose projections are functions."""

    v_proj = None

    def plain(self, x, y):
        q = self.q_proj(x) + 1
        k, rest = self.k_proj(x) * 2, y
        g = self.g_proj(y)
        return q, k, rest, g

    def conditional(self, x, y):
        q = self.q_proj(x)
        v = self.v_proj(x) if self.v_proj is not None else q
        k = self.k_proj(x)
        return q, v, k

    def changed(self, x, y):
        q = self.q_proj(x)
        x = self.k_proj(x)
        g = self.g_proj(x)
        return q, x, g

    def used(self, x, y):
        q = self.q_proj(x) + x
        k = self.k_proj(x) * x.add_(1)
        return q, k

    def twice(self, x, y):
        a = self.q_proj(x)
        b = self.q_proj(x)
        return a, b

    def nested(self, x, y):
        if y is not None:
            q = self.q_proj(x)
            k = self.k_proj(x)
            g = self.g_proj(x)
        else:
            q, k, g = x, x, x
        return q, k, g


def test_a_result_is_freed_as_before():
    class Holder:
        def forward(self, x):
            q = self.q_proj(x)
            k = self.k_proj(x)
            made = weakref.ref(q)
            q = q + 1
            return made(), q, k

    code = together(Holder.forward, definition_of(Holder.forward))
    part = Holder()
    part.q_proj = part.k_proj = torch.nn.Linear(2, 2)
    made, *_ = with_names(Holder.forward, NAMES, code)(part, torch.ones(2))
    assert made is None


GROUPS = {"plain": [2], "conditional": [], "changed": [], "used": [], "twice": [], "nested": [3]}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name):
    groups, function = [], getattr(Part, name)

    def linears(x, *layers):
        groups.append(len(layers))
        return [layer(x) for layer in layers]

    (called,) = NAMES
    rewritten = with_names(function, {called: linears}, together(function, definition_of(function)))
    part = Part()
    part.q_proj, part.k_proj, part.g_proj = (lambda x, f=f: x * f for f in (3, 5, 7))
    x, y = torch.ones(2), torch.full((2,), 2.0)
    results = [f(part, x.clone(), y) for f in (function, rewritten)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert groups == GROUPS[name]
