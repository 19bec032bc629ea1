"""Norms of queries and keys fused with their rotary function: where, and where not."""

import copy

import pytest
import torch
from test_patching_engine import object_graph
from tiny_models import assert_exact, batch, results, rows, tiny
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from liger_like.patches import UnrecognisedError, qk_norm_rope
from liger_like.patching import patch, unpatch

FAMILIES = {
    "Qwen3": "llama; half",
    "Gemma3": "gemma; half",
}


def pair(device, family="Qwen3", **config):
    original = tiny(family, device, **config)
    model = copy.deepcopy(original)
    return model, original, patch(model)


@pytest.fixture
def calls(monkeypatch):
    found = []
    true = qk_norm_rope.qk_norm_rope
    monkeypatch.setattr(qk_norm_rope, "qk_norm_rope", lambda *args, **kwargs: found.append(1) or true(*args, **kwargs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family, device, calls):
    model, original, report = pair(device, family)
    fused = rows(report, "qk_norm_rope")
    assert [row.variant for row in fused] == [FAMILIES[family]]
    assert not rows(report, "rope")
    calls.clear()
    inputs = batch(device)
    assert_exact(model, original, inputs)
    assert len(calls) == 2
    before = object_graph(original)[0]
    unpatch(model)
    assert {name: cls for name, (cls, _) in object_graph(model)[0].items()} == {
        n: cls for n, (cls, _) in before.items()
    }
    torch.testing.assert_close(results(model, inputs), results(original, inputs), rtol=0, atol=0)


def hooked(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm.register_forward_hook(lambda module, args, output: output * 1.5)


def of_another_eps(model):
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 1e-2
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 1e-2


def replaced(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(16, device=layer.self_attn.q_proj.weight.device)


@pytest.mark.parametrize("change", [hooked, of_another_eps, replaced])
def test_changes_after_patching_are_heard(change, device, calls):
    model, original, _ = pair(device)
    for m in (model, original):
        change(m.to(device))
    calls.clear()
    ids = batch(device)["input_ids"]
    got, expected = (m(ids).logits for m in (model, original))
    assert got.dtype == expected.dtype
    assert not calls
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("change", [of_another_eps, replaced])
def test_changes_after_compiling_are_heard(change, device):
    """By default torch guards no hooks, so those are not heard in the unpatched model either."""
    model, original, _ = pair(device)
    ids, compiled = batch(device)["input_ids"], torch.compile(model, backend="eager")
    before = compiled(ids).logits
    for m in (model, original):
        change(m)
    got, expected = (m(ids).logits for m in (compiled, original))
    torch.testing.assert_close(got, expected)
    assert (got - before).norm() > 1e-3 * before.norm()


@pytest.mark.parametrize(
    ("weights", "table", "fused"), [("float32", "float16", 0), ("float16", "float32", 0), ("float16", "float16", 1)]
)
def test_dtypes(weights, table, fused, device, calls):
    """Layers whose rounding one kernel would change keep norms and RoPE apart."""
    model, original, _ = pair(device)
    calls.clear()
    attention, same = (m.model.layers[0].self_attn.to(getattr(torch, weights)) for m in (model, original))
    q, k = (torch.randn(2, h, 5, 16, device=device).half() for h in (4, 2))
    angles = torch.randn(2, 5, 8, device=device).repeat(1, 1, 2)
    cos, sin = (t.to(getattr(torch, table)) for t in (angles.cos(), angles.sin()))
    got = qk_norm_rope._norm_and_rotate(apply_rotary_pos_emb)(attention.q_norm, attention.k_norm, q, k, cos, sin)
    expected = apply_rotary_pos_emb(same.q_norm(q), same.k_norm(k), cos, sin)
    assert len(calls) == fused
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        assert (x - y).norm() <= 4 * torch.finfo(torch.float16).eps * y.norm()


def test_switches(device):
    model = tiny("Qwen3", device)
    report = patch(model, norm=False)
    assert rows(report, "rope")[0].status == "patched"
    assert not rows(report, "qk_norm_rope")
    assert rows(patch(model), "rope")[0].status == "already patched"
    unpatch(model)
    patch(model)
    assert rows(patch(model, norm=False), "qk_norm_rope")[0].status == "already patched"
    assert not rows(patch(tiny("Qwen3", device), rope=False), "qk_norm_rope")


def test_compile(device):
    model, original, _ = pair(device)
    inputs = {**batch(device), "use_cache": False}
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    torch.testing.assert_close(loss, original(**inputs).loss)


class Used(modeling_qwen3.Qwen3Attention):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        total = q.sum()
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q + total, k


class Scaled(modeling_qwen3.Qwen3Attention):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q) * 2
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Sometimes(modeling_qwen3.Qwen3Attention):
    def forward(self, q, k, cos, sin):
        q, k = q + 1, k + 1
        if self.training:
            q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Kept(modeling_qwen3.Qwen3Attention):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, cos, sin)
        return q + q_rotated, k_rotated


class Moved(modeling_qwen3.Qwen3Attention):
    def forward(self, q, k, cos, sin):
        q, k = q + 1, k + 1
        q = self.q_norm(q)
        q = q.transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


@pytest.mark.parametrize("cls", [Used, Scaled, Sometimes, Kept])
def test_what_is_more_than_norm_and_rotation_is_not_fused(cls):
    with pytest.raises(
        UnrecognisedError, match=f"{cls.__name__}.forward does not rotate queries and keys right after their norms"
    ):
        qk_norm_rope._sites(cls)


def test_the_code_is_the_original_less_the_norms():
    sites = qk_norm_rope._sites(Moved)
    assert sites.norms == ("q_norm", "k_norm")
    assert sites.code.co_filename == Moved.forward.__code__.co_filename
    assert sites.code.co_firstlineno == Moved.forward.__code__.co_firstlineno


def test_a_graph_guards_no_class_of_a_norm(device):
    """torch.compile skips the guards of an attention at once unless one of them asks the class of its norms."""
    model, original, _ = pair(device)
    guarded = []

    def keep(guards):
        guarded.extend((guard.guard_type, guard.name) for guard in guards)
        return [True] * len(guards)

    inputs = batch(device) | {"use_cache": False}
    model.compile(fullgraph=True, backend="eager", options={"guard_filter_fn": keep})
    got = results(model, inputs)
    for name, t in results(original, inputs).items():
        torch.testing.assert_close(got[name], t)
    assert guarded
    assert not [name for kind, name in guarded if kind == "HASATTR" and name.startswith("type(") and "_norm'" in name]
