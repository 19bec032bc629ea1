"""Models and processes that other libraries have changed: patching never raises, and the report names who did it."""

import copy
import functools
import types

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_models import batch, results, rows, tiny
from transformers.models.granite import modeling_granite

import liger_like.patching
from liger_like.patches import foreign, lm_head
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")


@pytest.fixture
def reporting(monkeypatch):
    """Report exceptions of other libraries' code, as for users."""
    monkeypatch.setattr(liger_like.patching, "raise_errors", False)
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())


def launch_kernel(*args, **kwargs):
    """Stands for a loss that is a Triton kernel, on a CPU."""
    raise RuntimeError("0 active drivers ([]). There should only be one.\nsecond line")


def test_a_loss_of_torch_that_was_replaced_for_the_process_is_reported(reporting, monkeypatch, device):
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", functools.wraps(torch.sum)(launch_kernel))
    report = patch(tiny("SmolLM3", device))
    (head,) = [row for row in report.skipped if row.status == "skipped"]
    assert head.pattern == "lm_head"
    assert head.reason == (
        "trying it raised RuntimeError: 0 active drivers ([]). There should only be one.; "
        "torch.nn.functional.cross_entropy was replaced by test_patching_foreign.launch_kernel"
    )
    assert {row.pattern for row in report.patched} == {"rms_norm", "rope", "glu_mlp", "attention", "generation"}


def test_a_replaced_loss_that_computes_something_else_is_named(reporting, monkeypatch, device):
    true = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *args, **kwargs: 2 * true(*args, **kwargs))
    (head,) = rows(patch(tiny("Llama", device)), "lm_head")
    assert "on a miniature the replacement differs by" in head.reason
    assert "torch.nn.functional.cross_entropy was replaced by test_patching_foreign" in head.reason


def test_nothing_of_torch_is_taken_for_replaced():
    assert foreign.replaced_in_torch() == []


def test_nothing_of_a_model_is_taken_for_replaced(device):
    model = tiny("Granite", device)
    for _ in range(2):
        assert not any(foreign.replaced_in_class(type(module)) for module in model.modules())
        patch(model)


STEPS = {
    "looks_like": "lm_head",
    "variant": "rms_norm",
    "swaps": "lm_head",
    "methods": "glu_mlp",
    "miniature": "rope",
    "trial": "rms_norm",
}


@pytest.mark.parametrize("step", STEPS)
def test_what_any_step_raises_is_reported(step, reporting, monkeypatch, device):
    recogniser = type(liger_like.patching.RECOGNISERS[STEPS[step]])
    monkeypatch.setattr(recogniser, step, launch_kernel)
    (row, *_) = rows(patch(tiny("Llama", device)), STEPS[step])
    assert row.status == "skipped"
    assert "trying it raised RuntimeError: 0 active drivers" in row.reason


@pytest.mark.parametrize("step", ["looks_like", "variant", "trial"])
def test_what_attention_raises_is_reported(step, reporting, monkeypatch, device):
    monkeypatch.setattr(type(liger_like.patching.ATTENTION), step, launch_kernel)
    assert all(row.status == "skipped" for row in rows(patch(tiny("Llama", device)), "attention"))


def test_mistakes_of_this_package_surface_in_its_tests(monkeypatch, device):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", launch_kernel)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        patch(tiny("Llama", device))


def theirs(self, *args, **kwargs):
    return args[0]


def their_rope(q, k, cos, sin):
    return q, k


def test_functions_of_a_family_that_were_replaced_are_named(reporting, monkeypatch, device):
    for cls in ("GraniteRMSNorm", "GraniteAttention", "GraniteMLP"):
        monkeypatch.setattr(getattr(modeling_granite, cls), "forward", theirs)
    report = patch(tiny("Granite", device))
    for pattern, cls in (("rms_norm", "GraniteRMSNorm"), ("attention", "GraniteAttention"), ("glu_mlp", "GraniteMLP")):
        (row,) = rows(report, pattern)
        assert f"{cls}.forward was replaced by test_patching_foreign.theirs" in row.reason
    monkeypatch.undo()
    monkeypatch.setattr(modeling_granite, "apply_rotary_pos_emb", their_rope)
    (row,) = rows(patch(tiny("Granite", device)), "rope")
    assert "modeling_granite.apply_rotary_pos_emb was replaced by test_patching_foreign.their_rope" in row.reason


@pytest.mark.parametrize("part", ["norm", "layers.0.self_attn", "layers.0.mlp"])
def test_an_instance_whose_forward_was_replaced_is_named(part, device):
    """Also where its class is not of a known form, or was patched before."""
    model = tiny("Llama", device, hidden_act="relu")
    patch(model)
    module = model.model.get_submodule(part)
    module.forward = types.MethodType(theirs, module)
    for again in (model, copy.deepcopy(model)):
        found = [
            row for row in patch(again).rows if "forward was replaced by test_patching_foreign.theirs" in row.reason
        ]
        assert found
        assert all(row.status == "skipped" for row in found)
        unpatch(model)


def keep_and_wrap(model):
    """Replace the forward as TRL does: a closure holds the model's former forward."""
    kept = model.forward

    @functools.wraps(type(model).forward)
    def wrapped(self, *args, **kwargs):
        return kept(*args, **kwargs)

    model.forward = types.MethodType(wrapped, model)


def test_after_unpatch_a_kept_forward_runs_the_class(device, monkeypatch):
    model = tiny("Llama", device)
    original, inputs = copy.deepcopy(model), batch(device)
    patch(model)
    keep_and_wrap(model)
    assert model(**inputs).logits is None
    unpatch(model)
    monkeypatch.setattr(lm_head, "LazyLogits", launch_kernel)
    torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits)
    assert results(model, inputs).keys() == results(original, inputs).keys()


def test_a_loss_is_not_reported_as_fused_once_the_forward_was_replaced(device):
    model = tiny("Llama", device)
    patch(model)
    keep_and_wrap(model)
    report = patch(model)
    assert not [row for row in report.patched if row.pattern == "lm_head"]
    (row,) = rows(report, "lm_head")
    assert "forward was replaced by test_patching_foreign.keep_and_wrap" in row.reason


@pytest.mark.parametrize("patch_first", [True, False])
def test_mixed_precision_of_accelerate_keeps_the_fused_loss(patch_first, device):
    """It wraps the model's forward, whose class patch and unpatch change beneath the wrapper."""
    model = tiny("Llama", device)
    inputs = batch(device)
    if patch_first:
        patch(model)
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # the process has one, which an earlier Trainer may have made
    accelerator = Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    accelerator.prepare_model(model)
    report = patch(model)
    assert {row.status for row in rows(report, "lm_head")} == {"already patched" if patch_first else "patched"}
    assert model(**inputs).logits is None
    report.unpatch()
    assert model(**inputs).logits is not None
    assert model._original_forward.__func__ is transformers.LlamaForCausalLM.forward
