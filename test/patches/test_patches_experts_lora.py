"""LoRA of packed experts, by PEFT's ``target_parameters``: the op gets factors, not their sum with the weights."""

import copy
import sys

import peft
import pytest
import torch
from test_patches_experts import OTHERS, TARGETS, experts_of, model_of
from tiny_models import assert_exact, batch, results, rows
from torch.utils._python_dispatch import TorchDispatchMode

from liger_like.patches import experts
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
LAYER = sys.modules["peft.tuners.lora.layer"]


def adapted(model, **options):
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": TARGETS} | options
    return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))


def pair(family, device, config=None, **options):
    """A model with adapters whose experts are patched, and its twin."""
    original = model_of(family, device, **config or {})
    patched = copy.deepcopy(original)
    patch(patched, strict=True, **OTHERS)
    return adapted(patched, **options), adapted(original, **options)


def variant_of(model):
    (row,) = rows(patch(model, **OTHERS), "experts")
    return row.variant


def are_split(made):
    """Whether each call of the op got the factors of both matrices, or of neither."""
    return {(options["gate_up_lora"] is not None, options["down_lora"] is not None) for options in made}


@pytest.mark.parametrize(
    "options",
    [
        {"r": 16, "lora_alpha": 5, "use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 7}},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_the_factors_go_to_the_op(family, options, device, defined):
    models = pair(family, device, **options)
    assert variant_of(models[0]).endswith("LoRA")
    defined.clear()
    assert_exact(*models, batch(device))
    assert len(defined) == 2
    assert are_split(defined) == {(True, True)}
    unpatch(models[0])
    inputs = batch(device)
    torch.testing.assert_close(results(models[0], inputs), results(models[1], inputs), rtol=0, atol=0)


def test_kernels(device, calls):
    models = pair("GptOss", device, {"num_hidden_layers": 1})
    calls.clear()
    assert_exact(*models, batch(device, rows=1, length=10))
    assert are_split(calls) == {(True, True)}


@pytest.mark.parametrize("target", TARGETS)
def test_one_matrix(target, device, defined):
    models = pair("Qwen3Moe", device, target_parameters=[target])
    defined.clear()
    assert_exact(*models, batch(device))
    assert are_split(defined) == {(target == TARGETS[0], target == TARGETS[1])}


class Sizes(TorchDispatchMode):
    """Notes the sizes of the tensors that ops return in memory of their own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage().data_ptr() for t in leaves}
        made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.seen += [t.numel() for t in made if t.untyped_storage().data_ptr() not in given]
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_of_the_size_of_the_experts_is_made(checkpointing, device, defined):
    """Nor does torch make their sum to check the parametrisation that PEFT registers, until the model is unpatched."""
    # wide enough for an adapter, whose rank is padded to 16 on a GPU, to be less than the experts
    sizes = {"num_experts": 64, "num_local_experts": 64, "num_hidden_layers": 1, "hidden_size": 64}
    model = pair("Qwen3Moe", device, sizes, r=2)[0]
    least = min(module.down_proj.numel() for module in experts_of(model))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def largest():
        with Sizes() as mode:
            model(**batch(device, rows=1, length=5)).loss.backward()
        return max(mode.seen)

    assert largest() >= least  # these adapters are newer than the patch
    patch(model, **OTHERS)
    assert largest() < least
    assert largest() < least
    unpatch(model)
    assert largest() >= least
    assert not any("_activate_lora" in vars(module) for module in model.modules())


def test_parametrisations_of_other_code_are_checked(device, defined, monkeypatch):
    model, _ = pair("Qwen3Moe", device, {"num_hidden_layers": 1})
    patch(model, **OTHERS)
    monkeypatch.setattr(LAYER, "_LoraFactorsProxy", Scaled)
    checked, check = [], torch.nn.utils.parametrize.register_parametrization
    register = lambda *args, unsafe: checked.append(not unsafe) or check(*args, unsafe=unsafe)  # noqa: E731
    monkeypatch.setattr(torch.nn.utils.parametrize, "register_parametrization", register)
    model(**batch(device))
    assert checked == [True, True]


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_factors_have_the_layout_that_the_op_reads(family, device, defined):
    """A copy in the op would keep it from repeating its launches."""
    model, _ = pair(family, device, {"num_hidden_layers": 1})
    model(**batch(device))
    for name in ("gate_up_lora", "down_lora"):
        a, b, _ = defined[-1][name]
        assert a.is_contiguous()
        assert (b.mT if defined[-1]["transposed"] else b).is_contiguous()


CHANGES = ("second", "both", "disabled", "merged", "unmerged", "unloaded", "merged and unloaded")


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_are_the_active_ones(change, device, defined):
    changed = []
    models = pair("Qwen3Moe", device)
    for model in models:
        torch.manual_seed(4)
        config = peft.LoraConfig(r=3, lora_alpha=2, target_parameters=TARGETS, init_lora_weights=False)
        if change in ("second", "both"):
            model.add_adapter("second", config)
        if change == "second":
            model.set_adapter("second")
        elif change == "both":
            model.base_model.set_adapter(["default", "second"])
        elif change == "disabled":
            model.base_model.disable_adapter_layers()
        elif "merged" in change and "unloaded" not in change:
            model.merge_adapter()
        if change == "unmerged":
            model.unmerge_adapter()
        model.requires_grad_()
        if "unloaded" in change:
            model = model.merge_and_unload() if "merged" in change else model.unload()
        changed.append(model)
    defined.clear()
    assert_exact(*changed, batch(device))
    split = change in ("second", "unmerged")
    assert are_split(defined) == {(split, split)}
    assert ("in full" in variant_of(changed[0])) == (change == "both")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device, defined):
    models = pair("Qwen3Moe", device)
    models[0].gradient_checkpointing_enable({"use_reentrant": reentrant})
    models[0].enable_input_require_grads()
    defined.clear()
    assert_exact(*models, batch(device))
    assert len(defined) == 4
    assert are_split(defined) == {(True, True)}


@pytest.mark.parametrize("trained", [False, True])
def test_forwards_before_the_backward(trained, device, defined):
    """PEFT sets a weight to itself in each forward, which no backward of an earlier forward may take for a change."""
    models, first, second = pair("Qwen3Moe", device), batch(device), batch(device, rows=1)
    patch(models[0], **OTHERS)
    gradients = []
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad or (trained and "experts" in name))
        loss = model(**first).loss
        with torch.no_grad():
            model(**second)
        (loss + model(**second).loss).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_weights_that_count_no_changes(device, defined):
    with torch.inference_mode():
        models = [model.eval() for model in pair("Qwen3Moe", device)]
        patch(models[0], **OTHERS)
        inputs = batch(device)
        torch.testing.assert_close(*(model(**inputs).loss for model in models), rtol=1e-4, atol=1e-5)


def test_factors_of_a_wider_dtype(device, defined):
    """Adapters as PEFT makes them for 16-bit models, compared with the same model in float64."""
    models = pair("Qwen3Moe", device)
    for model in models:
        model.to(torch.float16)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    inputs = batch(device)
    defined.clear()
    got, same = (results(model, inputs) for model in models)
    assert are_split(defined) == {(True, True)}
    exact = results(copy.deepcopy(models[1]).double(), inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in same.items()}
    for name, t in exact.items():
        error, allowed = (float((x[name] - t).double().norm() / t.double().norm()) for x in (got, same))
        assert error <= 1.1 * allowed + torch.finfo(torch.float16).eps, name


class Scaled(torch.nn.Module):
    """An adapter of PEFT to come."""

    def __init__(self, lhs, rhs, scaling):
        super().__init__()
        self.lhs, self.rhs, self.scaling = lhs, rhs, scaling

    def forward(self, weight):
        return torch.baddbmm(weight * 1.5, self.lhs, self.rhs, alpha=self.scaling)


class Summed(torch.nn.Module):
    """PEFT's adapter before it kept factors."""

    def __init__(self, lhs, rhs, scaling):
        super().__init__()
        self.delta = scaling * (lhs @ rhs)

    def forward(self, weight):
        return weight + self.delta


@pytest.mark.parametrize("proxy", [Scaled, Summed])
def test_adapters_of_unknown_code_are_added_in_full(proxy, device, defined, monkeypatch):
    monkeypatch.setattr(LAYER, "_LoraFactorsProxy", proxy)
    models = pair("Qwen3Moe", device)
    assert variant_of(models[0]) == "swiglu, LoRA added in full"
    defined.clear()
    assert_exact(*models, batch(device))
    assert are_split(defined) == {(False, False)}


def test_peft_keeps_no_factors_of_a_single_expert(device, defined):
    sizes = {"num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    models = pair("Qwen3Moe", device, sizes)
    assert variant_of(models[0]) == "swiglu, LoRA added in full"
    defined.clear()
    assert_exact(*models, batch(device))
    assert are_split(defined) == {(False, False)}


def test_peft_that_keeps_no_factors(device, defined, monkeypatch):
    model, _ = pair("Qwen3Moe", device)
    monkeypatch.delattr(LAYER, "_LoraFactorsProxy")
    assert variant_of(model) == "swiglu, LoRA added in full"


def test_other_parametrisations_stay(device, defined):
    """A parametrisation of someone else beside PEFT's, or alone, is computed by its own code."""

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    models = pair("Qwen3Moe", device, {"num_hidden_layers": 1})
    for model in models:
        for module in experts_of(model):
            torch.nn.utils.parametrize.register_parametrization(module, "gate_up_proj", Doubled())
    inputs = batch(device)
    defined.clear()
    torch.testing.assert_close(*(model(**inputs).loss for model in models))
    assert are_split(defined) == {(False, True)}
    assert variant_of(models[0]) == "swiglu, LoRA added in full"


class Dequantised(torch.nn.Module):
    """Weights that are stored in 8 bits and made in each forward, as bitsandbytes does."""

    def forward(self, stored):
        return (stored.float() - 128) / 300


def test_weights_that_are_made_in_each_forward(device, defined):
    original = model_of("Qwen3Moe", device, num_hidden_layers=1)
    for module in experts_of(original):
        for name in experts.PACKED:
            weight = getattr(module, name)
            setattr(module, name, torch.nn.Parameter((weight * 300 + 128).clamp(0, 255).byte(), requires_grad=False))
            torch.nn.utils.parametrize.register_parametrization(module, name, Dequantised(), unsafe=True)
    patched = copy.deepcopy(original)
    patch(patched, **OTHERS)
    inputs = batch(device)
    defined.clear()
    torch.testing.assert_close(results(patched, inputs), results(original, inputs))
    assert are_split(defined) == {(False, False)}


def test_peft_is_as_the_pattern_knows_it():
    assert experts.is_folded(LAYER._LoraFactorsProxy.forward)
