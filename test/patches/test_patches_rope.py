"""Rotary functions of every kind: those of transformers against what replaces them, and models that call them."""

import copy
import importlib

import pytest
import torch
from tiny_models import assert_exact, batch, rows, tiny
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

from liger_like.patches import rope
from liger_like.patches.rotary_functions import KINDS
from liger_like.patching import patch, unpatch

# pattern: a family that has it, and what its function's name ends with
FUNCTIONS = {
    "half": ("llama", ""),
    "half_single": ("gemma3n", ""),
    "half_back": ("nanochat", ""),
    "half_cast": ("olmo2", ""),
    "half_float": ("modernbert", ""),
    "half_all_float": ("hunyuan_vl", ""),
    "half_vision": ("qwen2_5_vl", "_vision"),
    "half_partial": ("phi3", ""),
    "half_narrow": ("gpt_oss", ""),
    "interleaved": ("blt", ""),
    "interleaved_float": ("cohere", ""),
    "interleaved_late_float": ("ernie4_5_vl_moe", ""),
    "interleaved_partial": ("glm4v", ""),
    "first_interleaved": ("helium", ""),
    "first_interleaved_float": ("ernie4_5", ""),
    "first_interleaved_partial": ("glm4", ""),
    "first_interleaved_parted": ("deepseek_v3", "_interleave"),
    "narrow_interleaved_single": ("gptj", ""),
    "complex_heads_last": ("llama4", "complex"),
    "complex_heads_first": ("deepseek_v2", "complex"),
}


def function(pattern):
    family, suffix = FUNCTIONS[pattern]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, "apply_rotary_emb" if suffix == "complex" else f"apply_rotary_pos_emb{suffix}")


def counted(monkeypatch):
    calls = []
    true = rope.rope
    monkeypatch.setattr(rope, "rope", lambda *args, **kwargs: calls.append(1) or true(*args, **kwargs))
    return calls


def outcome(function, heads, names, tables):
    """The heads, turned together or one by one, and their gradients."""
    heads = [x.detach().requires_grad_() for x in heads]
    given = {names[role]: table for role, table in tables.items()}
    if "k" in names:
        turned = function(**{names["q"]: heads[0], names["k"]: heads[1]}, **given)
    else:
        turned = [function(**{names["q"]: x}, **given) for x in heads]
    upstream = [torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y) for y in turned]
    return [*turned, *torch.autograd.grad(turned, heads, upstream)]


def test_every_kind_has_a_family():
    assert {pattern.__name__ for pattern in KINDS} == FUNCTIONS.keys()


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(("heads", "table"), [(FULL, FULL), (HALF, FULL), (FULL, HALF), (HALF, HALF)])
@pytest.mark.parametrize("pattern", FUNCTIONS)
def test_functions_are_what_they_were(pattern, heads, table, device, monkeypatch):
    original = function(pattern)
    variant, names = rope.match(original, None, rope.PATTERNS)
    assert variant == pattern
    kind, calls = rope.BY_NAME[pattern], counted(monkeypatch)
    tables = rope.tables_of(kind, 4 if kind.partial else 8, torch.empty(0, dtype=table, device=device))
    tables = {
        role: t.expand(2, -1, -1) * (1 + torch.arange(2, device=device)[:, None, None]) for role, t in tables.items()
    }
    q, k = (torch.randn((2, h, 5, 8) if kind.dim == 1 else (2, 5, h, 8), device=device).to(heads) for h in (4, 2))
    got, expected = (outcome(f, (q, k), names, tables) for f in (rope.replacement(original), original))
    assert calls
    eps = max(torch.finfo(dtype).eps for dtype in (heads, table))
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        assert (x - y).norm() <= 4 * eps * y.norm()


@pytest.mark.parametrize(
    ("heads", "table", "dim", "runs"),
    [
        ((2, 5, 3, 8), (2, 5, 8), 2, True),
        ((2, 3, 5, 8), (5, 8), 0, True),
        ((5, 3, 8), (5, 8), 1, True),
        ((2, 3, 5, 8), (1, 5, 8), 1, True),
        ((2, 5, 5, 8), (5, 8), 1, False),
        ((2, 5, 8), (5, 8), 0, False),
        ((2, 3, 5, 8), (2, 1, 8), 1, False),
        ((2, 3, 5, 8), (2, 5, 1), 1, False),
    ],
)
def test_places_of_heads(heads, table, dim, runs, device, monkeypatch):
    calls, original = counted(monkeypatch), modeling_llama.apply_rotary_pos_emb
    q, k, angles = (torch.randn(*shape, device=device) for shape in (heads, heads, table))
    angles = angles[..., : (table[-1] + 1) // 2].repeat(*[1] * (len(table) - 1), min(2, table[-1]))
    cos, sin = angles.cos(), angles.sin()
    got, expected = (f(q, k, cos, sin, dim) for f in (rope.replacement(original), original))
    assert len(calls) == runs
    torch.testing.assert_close(got, expected)


class WithoutGrad(modeling_llama.LlamaAttention):
    @torch.no_grad()
    def forward(self, q, k, cos, sin):
        return self, apply_rotary_pos_emb(q, k, cos, sin)


class Renamed(modeling_llama.LlamaAttention):
    @torch.no_grad()
    @deprecate_kwarg("heads", "99", new_name="q")
    def forward(self, q, k, cos, sin):
        return self, apply_rotary_pos_emb(q, k, cos, sin)


class Decorated(modeling_llama.LlamaAttention):
    @torch.enable_grad()
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("cls", [WithoutGrad, Renamed])
def test_a_forward_without_gradients_stays_so(cls, device, monkeypatch):
    model = tiny("Llama", device)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.__class__, second.__class__ = cls, Decorated
    found = {row.cls: row for row in rows(patch(model, verify="numeric"), "rope")}
    assert found[cls.__name__].status == "patched"
    assert found["Decorated"].reason.endswith("Decorated.forward is decorated")
    calls = counted(monkeypatch)
    q, k = (torch.randn(2, h, 5, 8, device=device, requires_grad=True) for h in (4, 2))
    cos, sin = rope.tables_of(rope.Kind(), 8, q).values()
    _, turned = first(q, k, cos, sin)
    torch.testing.assert_close(turned, apply_rotary_pos_emb(q, k, cos, sin))
    assert calls
    assert not any(x.requires_grad for x in turned)
    if cls is Renamed:
        with pytest.warns(FutureWarning, match="`heads` is deprecated"):
            first(heads=q, k=k, cos=cos, sin=sin)


def test_tables_of_unequal_neighbours_are_left_alone(device, monkeypatch):
    model = tiny("Cohere", device)
    cls = type(model.model.rotary_emb)

    def halves(self, x, position_ids):
        angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(cls, "forward", halves)
    (row,) = rows(patch(model), "rope")
    assert row.status == "skipped"
    assert "neighbours" in row.reason


def test_an_embedding_that_does_not_run_is_reported(device, monkeypatch):
    """A config whose sections do not fit its heads: the model itself does not run."""
    model = tiny("Llama", device)

    def torn(self, x, position_ids):
        return x.split([2, 3])

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", torn)
    (row,) = rows(patch(model), "rope")
    assert row.status == "skipped"
    assert "LlamaRotaryEmbedding raises RuntimeError: split_with_sizes" in row.reason


def test_the_nearest_embedding_counts(device):
    """A rotary embedding of another part of the model says nothing of this one."""
    model = tiny("Llama", device)
    other = torch.nn.Module()
    other.OtherRotaryEmbedding = type("OtherRotaryEmbedding", (torch.nn.Module,), {})()
    wrapper = torch.nn.ModuleDict({"text": model, "vision": other})
    (row,) = rows(patch(wrapper), "rope")
    assert row.status == "patched"
    unpatch(model)
    model.model.rotary_emb.__class__ = type(other.OtherRotaryEmbedding)
    (row,) = rows(patch(wrapper), "rope")
    assert row.status == "skipped"
    assert "OtherRotaryEmbedding is not built from a config" in row.reason


# one family for each kind of tables; test_coverage.py has more
FAMILIES = {"Cohere2": {"sliding_window": 5}, "Gemma3": {}, "GptOss": {}, "Llama4": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family, device, monkeypatch):
    original = tiny(family, device, **FAMILIES[family])
    model = copy.deepcopy(original)
    report = patch(model, norm=False, mlp=False, attention=False, loss=False, strict=True)
    assert {row.status for row in report.rows} == {"patched"}
    calls = counted(monkeypatch)
    assert_exact(model, original, batch(device))
    assert calls
