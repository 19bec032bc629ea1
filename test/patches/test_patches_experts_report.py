"""Experts that ``patch`` leaves alone, and the reasons in its report."""

import pytest
import torch
import transformers
from test_patches_experts import OTHERS, experts_of, model_of, pair
from tiny_models import batch, rows
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import liger_like.patching
from liger_like.patches import experts
from liger_like.patching import patch

WRONG = {
    "limit": {"limit": 1.01},
    "no limit": {"limit": None},  # also where the model's own limit is too high to show it
    "alpha": {"alpha": 1.6},
    "interleaved": {"interleaved": False},
    "down_bias": {"down_bias": None},
    "NaN": {},
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_replacement_is_refused(mistake, device, references, monkeypatch):
    op, factor = experts.moe_experts, float("nan") if mistake == "NaN" else 1.0
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    monkeypatch.setattr(experts, "moe_experts", lambda *args, **options: factor * op(*args, **options | WRONG[mistake]))
    (row,) = rows(patch(model_of("GptOss", device, swiglu_limit=100.0), **OTHERS | {"norm": True}), "experts")
    assert row.status == "skipped"
    assert "differs by" in row.reason


CONFIG = transformers.MixtralConfig(
    hidden_size=8, intermediate_size=8, num_local_experts=2, experts_implementation="grouped_mm"
)


def alone(change=lambda module: None, cls=MixtralExperts):
    """A model of experts that ``change`` has changed."""
    module = cls(CONFIG)
    change(module)
    return nn.Sequential(module, nn.LayerNorm(8))


def squared(self, x):
    gate, up = x.chunk(2, dim=-1)
    return self.act_fn(gate) * up * up


class Int8Tensor(torch.Tensor):
    """Quantised weights that name the dtype of their values, as torchao's do."""


def packed(module):
    module.down_proj = nn.Parameter(module.down_proj.data.as_subclass(Int8Tensor))


def quantised(module):
    module.down_proj = nn.Parameter(module.down_proj.data.to(torch.float8_e4m3fn), requires_grad=False)


def in_two_dtypes(module):
    module.down_proj.data = module.down_proj.data.half()


def in_bytes(module):
    module.down_proj = nn.Parameter(module.down_proj.data.byte(), requires_grad=False)


def with_limit(limit):
    """Give experts the gate of DeepSeek-V4."""

    def change(module):
        module.__class__ = type("Experts", (MixtralExperts,), {"_apply_gate": experts.clamped})
        module.act, module.limit = module.act_fn, limit

    return lambda: alone(change)


REASONS = {
    "unknown gate": (
        lambda: alone(cls=type("Experts", (MixtralExperts,), {"_apply_gate": squared})),
        "matches no known form",
    ),
    "own code": (
        lambda: alone(cls=type("Experts", (MixtralExperts,), {"forward": MixtralExperts.forward.__wrapped__})),
        "its experts are not run by transformers' ALL_EXPERTS_FUNCTIONS",
    ),
    "no config": (lambda: alone(lambda module: delattr(module, "config")), "it has no transformers config"),
    "quantised": (lambda: alone(quantised), "its weight is a torch.nn.parameter.Parameter of torch.float8_e4m3fn"),
    "bytes": (lambda: alone(in_bytes), "its weight is a torch.nn.parameter.Parameter of torch.uint8"),
    "packed": (lambda: alone(packed), "its weight is a test_patches_experts_report.Int8Tensor of torch.float32"),
    "two dtypes": (lambda: alone(in_two_dtypes), "its weights are of torch.float32 and torch.float16"),
    "no limit": (with_limit(None), "the number limit of its gate is None"),
    "limit of zero": (with_limit(0.0), "the number limit of its gate is 0.0"),
    "limit of NaN": (with_limit(float("nan")), "the number limit of its gate is nan"),
    "hook": (lambda: alone(lambda m: m.act_fn.register_forward_hook(squared)), "its activation has a hook"),
    "activation": (lambda: alone(lambda m: setattr(m, "act_fn", nn.ReLU())), "no kernel for the activation ReLU"),
    "forward": (lambda: alone(lambda m: setattr(m, "forward", squared)), "its forward was replaced by test_patches_ex"),
    "gate of the instance": (
        lambda: alone(lambda m: setattr(m, "_apply_gate", squared.__get__(m))),
        "its gate was replaced on the instance",
    ),
    "norm": (
        lambda: alone(lambda m: setattr(m, "has_post_expert_norm", True)),
        "it normalises the outputs of its experts",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_experts_that_are_left_alone_and_why(case, device):
    make, reason = REASONS[case]
    model = make().to(device)
    before = getattr(model[0], "config", None)
    (row,) = rows(patch(model), "experts")
    assert row.status == "skipped"
    assert reason in row.reason
    assert getattr(model[0], "config", None) is before
    assert "_liger_like_gate" not in vars(model[0])


def test_experts_without_a_gate_are_nothing_to_patch(device):
    model = alone(lambda module: setattr(module, "has_gate", False)).to(device)
    (row,) = rows(patch(model, strict=True), "experts")
    assert (row.status, row.reason) == ("absent", "has no gate")


def test_experts_of_one_config_are_patched_together_or_not_at_all(device):
    model = model_of("Mixtral", device)
    experts_of(model)[1].act_fn = nn.ReLU()
    first, second = rows(patch(model), "experts")
    assert first.status == second.status == "skipped"
    assert first.reason == "shares its config with MixtralExperts"
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("gateless", [0, 1])
def test_a_config_is_named_for_those_of_its_experts_that_have_a_gate(gateless, device):
    model = model_of("Mixtral", device)
    experts_of(model)[gateless].has_gate = False
    patch(model)
    assert {module.config._experts_implementation for module in experts_of(model)} == {"liger_like"}


def test_a_gate_that_is_replaced_later_runs(device):
    model, x = alone().to(device), torch.randn(6, 8, device=device)
    module, index, weights = (
        model[0],
        torch.zeros(6, 1, dtype=torch.int64, device=device),
        torch.ones(6, 1, device=device),
    )
    for weight in module.parameters():
        nn.init.normal_(weight)
    module._apply_gate = squared.__get__(module)
    expected = module(x, index, weights)
    del module._apply_gate
    patch(model, strict=True)
    module._apply_gate = squared.__get__(module)
    torch.testing.assert_close(module(x, index, weights), expected)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_set_later(limit, device, defined):
    """Without a number that the op takes, the experts run as before."""
    model, original = pair("GptOss", device)
    for module in (*experts_of(model), *experts_of(original)):
        module.limit = limit
    ids = batch(device)["input_ids"]
    defined.clear()
    torch.testing.assert_close(model(ids).logits, original(ids).logits, equal_nan=True)
    assert bool(defined) == (limit == float("inf"))


def test_biases_of_another_dtype_are_left_alone(device):
    model = model_of("GptOss", device)
    for module in experts_of(model):
        module.down_proj_bias.data = module.down_proj_bias.data.half()
    (row,) = rows(patch(model), "experts")
    assert (row.status, row.reason) == ("skipped", "its weights are of torch.float32 and torch.float16")


def test_a_config_without_an_implementation_of_experts(device):
    model = model_of("Mixtral", device)
    for module in model.modules():
        vars(getattr(module, "config", model.config)).pop("_experts_implementation_internal", None)
    patch(model)
    view = experts_of(model)[0].config
    assert not hasattr(view, "_experts_implementation_internal")


def test_experts_that_a_family_runs_in_fp32_stay_so(device):
    module = pytest.importorskip("transformers.models.openai_privacy_filter.modeling_openai_privacy_filter")
    config = transformers.OpenAIPrivacyFilterConfig(hidden_size=8, intermediate_size=8, num_local_experts=4)
    for implementation, status in (("eager", "skipped"), ("grouped_mm", "patched")):
        config._experts_implementation = implementation
        model = nn.Sequential(module.OpenAIPrivacyFilterExperts(config), nn.LayerNorm(8))
        (row,) = rows(patch(model), "experts")
        assert row.status == status
        assert row.reason == ("its experts are run in fp32 by eager" if status == "skipped" else "")
