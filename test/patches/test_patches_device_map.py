"""Models whose weights accelerate places, by hooks around the forward of each module."""

import copy

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import remove_hook_from_module
from tiny_models import batch, results, rows, tiny

from liger_like.patches import heads, qk_norm_rope, rms_norm
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
PLACED = {
    "device_map": lambda model, device, folder: accelerate.dispatch_model(model, {"": device}, force_hooks=True),
    "cpu_offload": lambda model, device, folder: accelerate.cpu_offload(model, execution_device=device),
    "disk_offload": lambda model, device, folder: accelerate.disk_offload(model, folder, execution_device=device),
}


def pair(how, device, folder, order="after"):
    """A model that was placed and patched, and one that was neither."""
    original = tiny("Qwen3", device, num_hidden_layers=1)
    model = copy.deepcopy(original)
    if order == "before":
        patch(model, strict=True)
    PLACED[how](model, device, folder)
    if order == "after":
        patch(model, strict=True)
    return model, original


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", PLACED)
def test_placed(how, order, device, tmp_path, monkeypatch):
    model, original = pair(how, device, tmp_path, order)
    inputs, calls = batch(device, length=6), []
    for module, name in ((rms_norm, "rms_norm"), (heads, "fused_linear_cross_entropy")):
        run = getattr(module, name)

        def counted(*args, run=run, name=name, **kwargs):
            calls.append(name)
            return run(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    output = model(**inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, original(**inputs).loss)
    # RoPE does not fuse the norms of heads here: hooks bring their weights
    assert [calls.count(name) for name in ("rms_norm", "fused_linear_cross_entropy")] == [5, 1]
    if how == "device_map":  # offloaded weights get no gradients
        torch.testing.assert_close(results(model, inputs), results(original, inputs))
    calls.clear()
    unpatch(model)
    output = model(**inputs)
    torch.testing.assert_close(output.logits, original(**inputs).logits)
    assert not calls


@pytest.mark.parametrize("restore_first", [True, False])
def test_hooks_are_removed(restore_first, device, tmp_path):
    model, original = pair("device_map", device, tmp_path)
    inputs = batch(device, length=6)
    first, second = (unpatch, lambda m: remove_hook_from_module(m, recurse=True))[:: 1 if restore_first else -1]
    first(model)
    assert (model(**inputs).logits is None) != restore_first
    second(model)
    torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits)
    patch(model, strict=True)
    assert model(**inputs).logits is None
    torch.testing.assert_close(results(model, inputs), results(original, inputs))


def test_verified_numerically(device, tmp_path):
    original = tiny("Llama", device, num_hidden_layers=1)
    model = PLACED["device_map"](copy.deepcopy(original), device, tmp_path)
    report = patch(model, verify="numeric", strict=True)
    assert all(row.error is not None for row in report.patched if row.pattern != "generation")
    offloaded = PLACED["cpu_offload"](original, device, tmp_path)
    with pytest.warns(UserWarning, match="no module of LlamaForCausalLM runs a kernel"):
        report = patch(offloaded, verify="numeric")
    (norm,) = rows(report, "rms_norm")
    assert "needs floating-point weights, neither sharded nor on meta" in norm.reason


@pytest.mark.parametrize("kernel", [rms_norm, qk_norm_rope], ids=lambda module: module.__name__.split(".")[-1])
def test_what_is_verified_is_the_replacement(kernel, device, tmp_path, monkeypatch):
    """Not the original, which the hooks hold."""
    patch(tiny("Qwen3", device, num_hidden_layers=1), strict=True)  # miniatures run a right kernel
    model = PLACED["device_map"](tiny("Qwen3", device, num_hidden_layers=1), device, tmp_path)
    name = kernel.__name__.split(".")[-1]
    right = getattr(kernel, name)

    def wrong(*args, **kwargs):
        got = right(*args, **kwargs)
        return tuple(1.001 * x for x in got) if isinstance(got, tuple) else 1.001 * got

    monkeypatch.setattr(kernel, name, wrong)
    assert name not in {row.pattern for row in patch(model, verify="numeric").patched}


def test_copies_are_patched_and_independent(device, tmp_path):
    model, original = pair("device_map", device, tmp_path)
    inputs = batch(device, length=6)
    twin = copy.deepcopy(model)
    unpatch(model)
    torch.testing.assert_close(results(twin, inputs), results(original, inputs))
    assert twin(**inputs).logits is None
    assert model(**inputs).logits is not None


def test_loaded_by_device_map(device, tmp_path):
    original = tiny("Llama", device, num_hidden_layers=1)
    original.save_pretrained(tmp_path)
    places = {"model.embed_tokens": device, "model.norm": device, "model.rotary_emb": device, "lm_head": "disk"}
    places["model.layers"] = device
    folder = tmp_path / "offloaded"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=folder)
    assert model.lm_head.weight.is_meta
    patch(model.train(), strict=True)
    inputs = batch(device, length=6)
    output = model(**inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, original(**inputs).loss)


def test_another_forward_is_not_taken_for_a_hook(device):
    model = tiny("Llama", device, num_hidden_layers=1)
    norm = model.model.norm
    norm._old_forward = norm.forward
    norm.forward = lambda x: 2 * norm._old_forward(x)
    skipped = [row for row in rows(patch(model), "rms_norm") if row.status == "skipped"]
    assert [row.count for row in skipped] == [1]
    assert "its forward was replaced by" in skipped[0].reason
