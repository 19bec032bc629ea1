"""Norms of every kind, one at a time: the classes of transformers and torch, in their dtypes, against themselves."""

import copy

import pytest
import torch
from tiny_models import assert_exact, batch, rows, tiny
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_like import patching
from liger_like.patches import layer_norm, rms_norm
from liger_like.patching import patch, unpatch

N = 24
NORMS = {
    "layer_norm torch_nn": nn.LayerNorm(N),
    "layer_norm torch_nn, no bias": nn.LayerNorm(N, bias=False),
    "layer_norm torch_nn, no weight, no bias": nn.LayerNorm(N, elementwise_affine=False),
    "layer_norm cohere": CohereLayerNorm(N),
    "layer_norm olmo": OlmoLayerNorm(N),
    "rms_norm t5": T5LayerNorm(N),
    "rms_norm helium": HeliumRMSNorm(N),
    "rms_norm gemma3n": Gemma3nRMSNorm(N),
    "rms_norm gemma3n, no weight": Gemma3nRMSNorm(N, with_scale=False),
    "rms_norm weightless": Llama4TextL2Norm(1e-5),
    "rms_norm gated": Qwen3NextRMSNormGated(N),
    "rms_norm gated_once": KimiLinearRMSNormGated(N),
    "rms_norm grouped": Zamba2RMSNormGated(N, 8),
}
NORMS["rms_norm gated_once"].activation = "silu"


def norm(name, device, dtype):
    module = copy.deepcopy(NORMS[name]).to(device, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def outcome(module, inputs):
    """The output and every gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = module(*inputs)
    leaves = [*inputs, *module.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y))]


HALF, FULL = torch.float16, torch.float32
CASES = [(name, dtype, dtype) for name in NORMS for dtype in (FULL, HALF)]
CASES += [(name, *dtypes) for name in NORMS for dtypes in ((HALF, FULL), (FULL, HALF)) if "torch_nn" not in name]
if not torch.cuda.is_available():  # torch has no CPU kernel for two dtypes
    CASES += [(name, HALF, FULL) for name in NORMS if "torch_nn" in name]


@pytest.mark.parametrize(("name", "data", "weights"), CASES)
def test_norms_are_what_they_were(name, data, weights, device, monkeypatch):
    original = norm(name, device, weights)
    calls = []
    for module, op in ((rms_norm, "rms_norm"), (layer_norm, "layer_norm")):
        true = getattr(module, op)
        monkeypatch.setattr(module, op, lambda *args, true=true, **kwargs: calls.append(1) or true(*args, **kwargs))
    model = nn.Sequential(copy.deepcopy(original))
    report = patch(model, strict=True, verify="numeric")
    pattern, variant = name.split(" ", 1)
    (row,) = rows(report, pattern)
    assert (row.variant, row.status) == (variant, "patched")
    assert {row.pattern for row in report.patched} == {pattern}
    calls.clear()
    inputs = [
        torch.randn(2, 5, N, device=device).to(data) * 3 + 1
        for _ in range(1 + (variant in ("gated", "gated_once", "grouped")))
    ]
    got, expected = outcome(model[0], inputs), outcome(original, inputs)
    assert calls
    eps = max(torch.finfo(dtype).eps for dtype in (data, weights))
    for y, exact in zip(got, expected, strict=True):
        assert y.dtype == exact.dtype
        assert (y - exact).norm() <= 4 * eps * exact.norm()
    unpatch(model)
    assert type(model[0]) is type(original)


@pytest.mark.parametrize("enabled", [True, False])
def test_layer_norm_under_autocast(enabled, device):
    original = norm("layer_norm torch_nn", device, torch.float32)
    model = nn.Sequential(copy.deepcopy(original))
    patch(model)
    x = torch.randn(2, N, device=device, dtype=HALF if enabled else FULL)
    with torch.autocast(device, torch.float16, enabled=enabled):
        got, expected = model(x), original(x)
    assert got.dtype == expected.dtype
    assert (got - expected).norm() <= 4 * torch.finfo(expected.dtype).eps * expected.norm()


gelu_gated = Qwen3NextRMSNormGated(N)
gelu_gated.activation = "gelu"
LEFT = {
    "its weight must have one dimension, got shape [4, 24]": CohereLayerNorm((4, N)),
    "normalises 2 dimensions, not one": nn.LayerNorm((4, N), elementwise_affine=False),
    "no kernel for the activation gelu": gelu_gated,
}


@pytest.mark.parametrize("reason", LEFT)
def test_norms_that_are_left_alone(reason):
    (row,) = (row for row in patch(nn.Sequential(LEFT[reason])).rows if row.status == "skipped")
    assert (row.cls, row.reason) == (type(LEFT[reason]).__name__, reason)


WEIGHT_NORM = nn.utils.parametrizations.weight_norm(nn.Linear(N, N)).parametrizations.weight[0]


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, N), nn.BatchNorm1d(N), nn.InstanceNorm2d(N), WEIGHT_NORM])
def test_norms_of_other_dimensions_are_nothing_to_patch(norm):
    (row,) = (row for row in patch(nn.Sequential(norm), strict=True).rows if row.cls)
    assert (row.cls, row.status, row.reason) == (type(norm).__name__, "absent", "does not normalise the last dimension")


def test_a_gate_may_be_missing_or_named(device):
    original = norm("rms_norm grouped", device, torch.float32)
    model = nn.Sequential(copy.deepcopy(original))
    patch(model)
    x, gate = torch.randn(2, 5, N, device=device), torch.randn(2, 5, N, device=device)
    for given in ({}, {"gate": gate}, {"gate": None}):
        torch.testing.assert_close(model[0](x, **given), original(x, **given))


def test_a_norm_is_named_once():
    """A norm is recognised by its code, not its name."""
    (row,) = (row for row in patch(nn.Sequential(T5LayerNorm(N))).rows if row.cls)
    assert row.pattern == "rms_norm"


@pytest.mark.parametrize("family", ["Llama", "Olmo"])  # Olmo's norms have no weights to show a device
def test_patching_under_another_default_device(family, device, monkeypatch):
    model = tiny(family, device)
    patch(copy.deepcopy(model))
    expected = patch(copy.deepcopy(model), verify="numeric")  # its errors are those of classes that are known
    monkeypatch.setattr(patching, "_confirmed", set())
    original = copy.deepcopy(model)
    with torch.device("meta"):
        assert patch(model, verify="numeric").to_dict() == expected.to_dict()
    assert_exact(model, original, batch(device))
