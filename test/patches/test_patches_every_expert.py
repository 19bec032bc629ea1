"""Every class of experts in transformers: patched, with the results and gradients that it had, or reported."""

import copy

import pytest
import torch
from classes_of_transformers import Config, classes_in
from test_patches_experts import OTHERS
from tiny_models import rows
from torch import nn

import liger_like.patching
from liger_like.patching import patch, unpatch

FIELDS = {  # of a config: pattern of its name -> value
    r".*(num|n_routed|local)\w*experts": 5,
    r".*act(ivation)?|mlp_hidden_act": "silu",
    r".*limit": 0.3,
    r".*(intermediate|ffn|expert_dim)\w*": 24,
    r".*(hidden_size|d_model|hidden_dim|latent_size)": 16,
    r".*alpha": 1.7,
    r".*softcap|.*eps": 1e-5,
}
SKIPPED = {  # class: its reason
    "Inkling2Experts": "_apply_gate matches no known form",
    "Inkling2LoopExperts": "_apply_gate matches no known form",
    "MuseSparkExperts": "it normalises the outputs of its experts",
    "NemotronHExperts": "has no gate",
}


def mentions(text):
    return "def _apply_gate" in text or "use_experts_implementation" in text


CLASSES = {cls.__name__: cls for cls in classes_in(mentions) if hasattr(cls, "_apply_gate")}


def build(name, device, **attributes):
    """Experts with random weights."""
    torch.manual_seed(0)
    module = CLASSES[name](Config(FIELDS, experts_implementation="batched_mm"), **attributes)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(device)


def everything(module, device):
    """The output for 9 tokens with 2 experts each, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    x, weights, upstream = (torch.randn(9, n, generator=generator).to(device) for n in (16, 2, 16))
    index = torch.rand(9, 5, generator=generator).topk(2).indices.to(device)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *module.parameters()]
    out = module(x, index, weights)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("name", CLASSES)
def test_experts(name, device, defined, monkeypatch):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    original = build(name, device)
    model = nn.Sequential(copy.deepcopy(original), nn.LayerNorm(16, device=device))
    (row,) = rows(patch(model, **OTHERS | {"norm": True}, verify="numeric"), "experts")
    if name in SKIPPED:
        assert row.status in ("skipped", "absent")
        assert SKIPPED[name] in row.reason
        return
    assert (row.status, row.reason) == ("patched", "")
    defined.clear()
    torch.testing.assert_close(everything(model[0], device), everything(original, device), rtol=1e-4, atol=1e-5)
    assert len(defined) == 1
    unpatch(model)
    assert type(model[0]) is type(original)
    torch.testing.assert_close(everything(model[0], device), everything(original, device), rtol=0, atol=0)
    assert len(defined) == 1


def test_there_are_many():
    assert len(CLASSES) > 50
    assert "Step3p7Experts" in CLASSES


def test_limits_behind_the_activation_are_left_alone(device, defined):
    """So are they where the limit, the gate or the activation has changed since."""
    model = nn.Sequential(build("Step3p7Experts", device, swiglu_limit=0.4), nn.LayerNorm(16, device=device))
    (row,) = rows(patch(model, **OTHERS | {"norm": True}), "experts")
    assert (row.status, row.reason) == ("skipped", "its gate is not known, or has a limit behind its activation")
    original = build("Step3p7Experts", device)
    model = nn.Sequential(copy.deepcopy(original), nn.LayerNorm(16, device=device))
    patch(model, **OTHERS | {"norm": True})
    for module in (model[0], original):
        module.limit = 0.4
    defined.clear()
    torch.testing.assert_close(everything(model[0], device), everything(original, device), rtol=0, atol=0)
    for module in (model[0], original):
        module.limit, module._apply_gate = float("inf"), lambda z: z.chunk(2, -1)[0]
    torch.testing.assert_close(everything(model[0], device), everything(original, device), rtol=0, atol=0)
    for module in (model[0], original):
        del module._apply_gate
        module.act_fn = nn.Tanh()
    torch.testing.assert_close(everything(model[0], device), everything(original, device), rtol=0, atol=0)
    assert not defined
