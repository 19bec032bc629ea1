"""Copies of functions in which some names have other values."""

import copy

import pytest
import torch
from tiny_models import batch, rows, tiny
from transformers.utils.deprecation import deprecate_kwarg

from liger_like import patching
from liger_like.patches import add_rms_norm
from liger_like.patches.rewriting import plain_forward, with_names
from liger_like.patching import patch

OTHER = 1


def made(offset):
    def wrapped(): ...

    def function(x, *, factor=2):
        return [factor * x + offset + OTHER + added(y) for y in (0,)]

    function.__wrapped__ = wrapped
    return function


def added(y):
    return y + 100


def test_names_are_changed_and_the_module_stays_alive(monkeypatch):
    function = made(10)
    copy = with_names(function, {"added": lambda y: y})
    assert (function(3), copy(3), copy(3, factor=0)) == ([117], [17], [11])
    monkeypatch.setitem(globals(), "OTHER", 5)
    assert (function(3), copy(3)) == ([121], [21])
    monkeypatch.setitem(globals(), "added", lambda y: 1000)
    assert (function(3), copy(3)) == ([1021], [21])
    assert copy.__code__.co_firstlineno == function.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("pattern", "family", "path"),
    [("rope", "Llama", "self_attn"), ("qk_norm_rope", "Qwen3", "self_attn"), ("add_rms_norm", "Llama", "")],
)
def test_an_argument_keeps_its_old_name(pattern, family, path, device, monkeypatch):
    """transformers decorates a forward whose argument has a new name; it is patched, and takes both names."""
    monkeypatch.setitem(patching.RECOGNISERS, "add_rms_norm", add_rms_norm.AddRMSNorm())
    model, found = tiny(family, device), {}
    for layer in model.model.layers:
        part = layer.get_submodule(path)
        cls, renamed = type(part), deprecate_kwarg("before", "99", new_name="hidden_states")
        part.__class__ = type(cls)("Renamed", (cls,), {"forward": renamed(plain_forward(cls))})
    original = copy.deepcopy(model)
    (row,) = rows(patch(model), pattern)
    assert (row.count, row.status) == (2, "patched")
    ids = batch(device)["input_ids"]
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    for each in (original, model):
        layer = each.model.layers[0].get_submodule(path)
        x = torch.ones(1, 3, 32, device=device)
        given = {"position_embeddings": each.model.rotary_emb(x, torch.arange(3, device=device)[None])}
        with pytest.warns(FutureWarning, match="`before` is deprecated"):
            out = layer(before=x, attention_mask=None, **given)
        found[each] = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(found[model], found[original])
