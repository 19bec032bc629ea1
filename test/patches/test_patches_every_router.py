"""Every class of routers in transformers whose forward has a known form: patched, with the outputs that it had."""

import copy
import inspect
import re

import pytest
import torch
from classes_of_transformers import Config, classes_in
from tiny_models import rows
from torch import nn

import liger_like.patching
from liger_like.patches import UnrecognisedError, routers
from liger_like.patching import patch

FIELDS = {  # of a config: pattern of its name -> value
    r".*experts_per_tok\w*|.*top_?k(_experts)?|moe_k|num_selected_experts|topk_group|n_groups?": 2,
    r".*(num|n_routed|local)\w*experts|num_total_experts": 8,
    r".*norm_topk_prob|use_expert_bias": True,
    r".*scaling_factor|.*scale": 2.5,
    r".*(hidden_size|d_model|hidden_dim|input_size)": 16,
    r".*topk_method": "group_limited_greedy",
    r".*eps|.*min": 1e-6,
    r".*bias": False,
}


def is_known(cls):
    try:
        return bool(routers._known(cls))
    except UnrecognisedError:
        return False


def mentions(text):
    return re.search(r"class \w*(Router|Gate|Gating)\(", text) and "topk" in text


NAMED = (cls for cls in classes_in(mentions) if re.search("(Router|Gate|Gating)$", cls.__name__))
CLASSES = {cls.__name__: cls for cls in NAMED if is_known(cls)}


def by_expert(outputs):
    """Logits, and the weights of all experts: a router lists the chosen ones in any order, and the logits anywhere."""
    index, weights, logits = sorted(outputs, key=lambda t: (t.is_floating_point(), t.shape[-1]))
    return logits, weights.new_zeros(logits.shape).scatter(-1, index, weights)


@pytest.mark.parametrize("name", CLASSES)
def test_routers(name, device, references, monkeypatch):
    made, op = [], routers.moe_route
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    monkeypatch.setattr(routers, "use_kernel", lambda x: True)
    monkeypatch.setattr(routers, "moe_route", lambda *args, **options: made.append(args) or op(*args, **options))
    torch.manual_seed(0)
    original = CLASSES[name](Config(FIELDS))
    for t in (*original.parameters(), *original.buffers()):
        nn.init.normal_(t)
    patched = copy.deepcopy(original.to(device))
    (row,) = rows(patch(nn.Sequential(patched), strict=True, verify="numeric"), "router")
    assert row.status == "patched"
    made.clear()
    x = torch.randn(60, 16, device=device)
    correction = [torch.randn(8, device=device)] if len(inspect.signature(original.forward).parameters) == 2 else []
    got, expected = patched(x, *correction), original(x, *correction)
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in expected]
    torch.testing.assert_close(by_expert(got), by_expert(expected), rtol=1e-4, atol=1e-5)
    assert len(made) == 1


def test_there_are_many():
    assert len(CLASSES) >= 40
