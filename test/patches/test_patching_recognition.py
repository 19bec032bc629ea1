"""Code that is recognised, and code that is left alone with the reason."""

import copy
import functools

import pytest
import torch
import transformers
from tiny_models import assert_exact, batch, rows, tiny
from torch import nn
from transformers.models.llama import modeling_llama

from liger_like.patches import UnrecognisedError, glu_mlp, layer_norm, rms_norm, rotary_functions, routers
from liger_like.patches.forms import form_of, match
from liger_like.patching import patch

pytestmark = pytest.mark.usefixtures("references")


class ShiftedNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + 1


class Renamed(nn.Module):
    """A norm of known form under other names."""

    def __init__(self, scale, tiny_number):
        super().__init__()
        self.scale, self.tiny_number = nn.Parameter(scale), tiny_number

    def _unit(self, y):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.tiny_number)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        unit: torch.Tensor = self._unit(y.float())
        return (self.scale * unit).type_as(y)


def test_unknown_norm_is_left_alone_and_reported(device):
    original = tiny("Llama", device)
    original.model.norm.__class__ = ShiftedNorm
    model = copy.deepcopy(original)
    known, unknown = rows(patch(model), "rms_norm")
    assert (known.cls, known.count, known.status) == ("LlamaRMSNorm", 4, "patched")
    assert (unknown.cls, unknown.count, unknown.status) == ("ShiftedNorm", 1, "skipped")
    assert "test_patching_recognition.ShiftedNorm.forward" in unknown.reason
    assert_exact(model, original, batch(device))


def test_known_form_under_other_names_is_patched(device):
    original = nn.Sequential(Renamed(torch.randn(16), 1e-3)).to(device)
    model = copy.deepcopy(original)
    (row,) = rows(patch(model), "rms_norm")
    assert (row.cls, row.variant, row.status) == ("Renamed", "olmo", "patched")
    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(model(x), original(x))
    torch.testing.assert_close(model[0](y=x), original(x))


def test_foreign_patches_are_respected_and_named(device):
    model = tiny("Llama", device)
    mlp = model.model.layers[0].mlp
    mlp.forward = functools.partial(lambda self, x: x, mlp)
    foreign = [row for row in rows(patch(model), "glu_mlp") if row.status == "skipped"]
    assert [row.count for row in foreign] == [1]
    assert "its forward was replaced by" in foreign[0].reason
    assert type(mlp) is modeling_llama.LlamaMLP


def test_foreign_class_patches_are_respected_and_named(device, monkeypatch):
    def theirs(self, x):
        return self.weight * x

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", theirs)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    report = patch(tiny("Llama", device))
    (norm,), (rotary,) = rows(report, "rms_norm"), rows(report, "rope")
    assert norm.status == rotary.status == "skipped"
    assert "test_patching_recognition" in norm.reason
    assert "test_patching_recognition" in rotary.reason


HEADS = {
    "is a test_patching_recognition.Head": lambda model: setattr(model.lm_head, "__class__", Head),
    "forward was replaced by": lambda model: setattr(model.lm_head, "forward", Head.forward.__get__(model.lm_head)),
    "its loss function is test_patching_recognition.": lambda model: setattr(model, "loss_function", lambda **_: None),
}


class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


@pytest.mark.parametrize("reason", HEADS)
def test_heads_and_losses_that_are_not_plain_are_not_fused(reason, device):
    original = tiny("Llama", device)
    HEADS[reason](original)
    (row,) = rows(patch(original), "lm_head")
    assert row.status == "skipped"
    assert reason in row.reason


def test_rope_with_tables_of_unequal_halves_is_left_alone(device, monkeypatch):
    def interleaved(self, x, position_ids):
        angles = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", interleaved)
    (row,) = rows(patch(tiny("Llama", device)), "rope")
    assert row.status == "skipped"
    assert "halves" in row.reason


def test_model_without_head_and_other_modules(device):
    report = patch(transformers.LlamaModel(tiny("Llama").config))
    (head,) = rows(report, "lm_head")
    assert head.status == "absent"
    report = patch(nn.Linear(2, 2))
    assert {row.status for row in report.rows} == {"absent"}


def test_model_inside_a_wrapper(device):
    original = tiny("Llama", device)
    wrapper = nn.ModuleDict({"student": copy.deepcopy(original)})
    patch(wrapper, strict=True)
    assert_exact(wrapper["student"], original, batch(device))


def add_then_scale(self, x):
    y = x + self.b
    return self.a * y


def scale_by_sum(self, value):
    """The same, spelt otherwise."""
    return (self.shift + value) * self.factor


def scale_by_difference(self, x):
    return (self.b - x) * self.a


def branching(self, x):
    if x.any():
        return x
    return self.a * x


def starred(self, x):
    *rows, n = x.shape
    first, second, *_ = x.split(n)
    return first.view(*rows, n) + second


def spelt_out(self, x):
    return x.split(x.shape[-1])[0].view(*x.shape[0:-1], x.shape[-1]) + x.split(x.shape[-1])[1]


def attribute(self, x):
    self.a, y = x
    return y


def conditional(self, x, unread=None):
    y = x + self.b
    z = x
    if self.scaled:
        z = [y, x][0]
        z = z * self.a
    return torch.cat([z, x])


def conditional_spelt_otherwise(me, value):
    total = value + me.shift
    return torch.cat(([total, value][0] * me.factor if me.flag else value, value))


def in_place(self, x):
    x.add_(self.b)
    return self.a * x


def in_place_later(self, x):
    x = x.view(-1)
    x /= self.a
    return x


def in_place_by_two_names(self, x):
    y = x + self.a
    z = y
    y /= self.b
    return z


def changed(self, x):
    y = x + self.a
    y /= y.sum()
    y.clamp_(0)
    if self.flag:
        z = y
    return y * z


def changed_spelt_otherwise(self, x):
    result = self.shift + x
    result /= result.sum()
    result.clamp_(0)
    if self.scaled:
        other = result
    return other * result


def not_changed(self, x):
    y = x + self.a
    y = y / y.sum()
    y = y.clamp(0)
    if self.flag:
        z = y
    return y * z


def always_set(self, x):
    y = x + self.a
    y /= y.sum()
    y.clamp_(0)
    z = y if self.flag else 0
    return y * z


def scoped(self, x):
    return sum(y * self.a for y in x)


def squared(self, x):
    return x / x.float().square().sum() + self.a


def squared_spelt_otherwise(self, x):
    return self.shift + x / x.to(torch.float32).pow(2).sum()


def test_forms():
    class Owner:
        pass

    assert match(scale_by_sum, Owner, (scale_by_difference, add_then_scale)) == (
        "add_then_scale",
        {"b": "shift", "a": "factor"},
    )
    assert match(conditional, Owner, (conditional_spelt_otherwise,))[1] == {
        "shift": "b",
        "factor": "a",
        "flag": "scaled",
    }
    with pytest.raises(UnrecognisedError, match="matches no known form"):
        match(scale_by_difference, Owner, (add_then_scale,))
    assert match(changed_spelt_otherwise, Owner, (not_changed, always_set, changed)) == (
        "changed",
        {"a": "shift", "flag": "scaled"},
    )
    assert match(starred, Owner, (spelt_out,))[0] == "spelt_out"
    assert match(squared, Owner, (squared_spelt_otherwise,))[1] == {"shift": "a"}
    for function in (
        branching,
        attribute,
        in_place,
        in_place_later,
        in_place_by_two_names,
        scoped,
        functools.wraps(branching)(lambda *args: branching(*args)),
        len,
    ):
        with pytest.raises(UnrecognisedError):
            form_of(function, Owner)


def test_patterns_are_told_apart():
    kinds = rms_norm, layer_norm, glu_mlp, routers, rotary_functions
    for patterns in (kind.PATTERNS for kind in kinds):
        owner = None if patterns is rotary_functions.PATTERNS else object
        assert [match(pattern, owner, patterns)[0] for pattern in patterns] == [
            pattern.__name__ for pattern in patterns
        ]
