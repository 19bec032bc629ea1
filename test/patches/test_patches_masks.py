"""The masks of patched models, eager and compiled: those of eager attention, and made only where they must be."""

import copy
import inspect

import pytest
import torch
import transformers
from test_patches_attention import BATCHES, masked, pair
from tiny_models import assert_exact, batch, results
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import masking_utils

from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.patches import attention
from liger_like.runtime import registry, support

pytestmark = pytest.mark.filterwarnings("error:liger_like")


def block(b, h, q, k):
    return (q < 4) & (k < 4)


MASKS = {
    "causal": (masking_utils.create_causal_mask, {}),
    "window": (masking_utils.create_sliding_window_causal_mask, {}),
    "bidirectional": (masking_utils.create_bidirectional_mask, {}),
    "whole causal": (masking_utils.create_causal_mask, {"allow_is_causal_skip": False}),
    "whole bidirectional": (masking_utils.create_bidirectional_mask, {"allow_is_bidirectional_skip": False}),
    "bidirectional window": (masking_utils.create_bidirectional_sliding_window_mask, {}),
    "chunked": (masking_utils.create_chunked_causal_mask, {}),
    "or": (masking_utils.create_causal_mask, {"or_mask_function": block}),
    "and": (masking_utils.create_sliding_window_causal_mask, {"and_mask_function": block}),
    "two windows": (
        masking_utils.create_sliding_window_causal_mask,
        {"and_mask_function": masking_utils.sliding_window_overlay(2)},
    ),
    "blocks": (
        masking_utils.create_causal_mask,
        {"block_sequence_ids": torch.tensor([[0, 0, 0, -1, -1, 1, 1, 1, 1]] * 2)},
    ),
}
NEVER_MADE = ("causal", "window", "bidirectional", "bidirectional window", "chunked")


PADDING = {"none": None, "left": slice(2), "right": slice(6, None), "between": slice(3, 5), "all": slice(None)}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_eager_attention(name, padding, device):
    attention.register()
    create, options = MASKS[name]
    options = {key: t.to(device) if torch.is_tensor(t) else t for key, t in options.items()}
    mask = None
    if padding != "none":
        mask = torch.ones(2, 9, device=device)
        mask[0, PADDING[padding]] = 0
    made = []
    for implementation in ("liger_like", "eager"):
        config = transformers.LlamaConfig(sliding_window=3, attention_chunk_size=4, attn_implementation=implementation)
        made.append(create(config, torch.zeros(2, 9, 4, device=device), mask, past_key_values=None, **options))
    got, expected = made
    if expected is None:  # without a mask every query sees every key
        expected = torch.zeros(2, 1, 9, 9, device=device)
    assert isinstance(got, attention.Mask) == (name in NEVER_MADE)
    if isinstance(got, attention.Mask):
        assert (got.padding is None) == (mask is None)
        assert got.in_spans == (padding in ("left", "right"))
        q = torch.zeros(2, 1, 9, 4, device=device)
        got = got.bias(q, q, -torch.inf)
    assert torch.equal((got == 0).expand_as(expected), expected == 0)


def assert_traced(found, by, device):
    """Check the launches of a compiled graph: on a GPU each trace of it launches, on a CPU the run alone."""
    traces = len(found) // len(by) if device == "cuda" else 1
    assert found
    assert found == by * traces


@pytest.fixture
def masked_by(monkeypatch):
    """For every forward kernel that is launched, by what it is masked beside a window."""
    tensors = []

    def launch(kernel, grid, given, *args, true=portable_forward.launch, **options):
        named = dict(zip(inspect.signature(kernel.fn).parameters, given, strict=False))
        tensors.append({name for name in ("bias", "mask", "spans") if named[f"{name}_ptr"] is not None})
        true(kernel, grid, given, *args, **options)

    monkeypatch.setattr(portable_forward, "launch", launch)
    monkeypatch.setattr(registry, "signature", lambda args: None)  # repeated launches would be missed
    return tensors


@pytest.mark.parametrize(
    ("family", "given", "by"),
    [
        ("Mistral", "no mask", [set(), set()]),
        ("Mistral", "right padding", [{"spans", "mask"}, {"spans", "mask"}]),
        ("Gemma3", "packed", [{"spans"}, {"spans"}]),
        ("Llama4", "left padding", [{"spans", "mask"}, {"mask"}]),
    ],
)
def test_compile_without_graph_breaks(family, given, by, masked_by, device):
    patched, original = pair(family, device)
    masked_by.clear()
    inputs = {**BATCHES[given](batch(device)), "use_cache": False}
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    got, expected = results(compiled, inputs), results(original, inputs)
    for name, t in expected.items():
        torch.testing.assert_close(got[name.removeprefix("_orig_mod.")] if name in got else got["_orig_mod." + name], t)
    assert_traced(masked_by, by, device)


@pytest.mark.parametrize(("padding", "by"), [("left", {"spans"}), ("right", {"spans"}), ("between", {"mask"})])
def test_padding_at_an_end_comes_to_spans(padding, by, masked_by, device):
    patched, original = pair("Llama", device)
    inputs = masked(batch(device), PADDING[padding])
    masked_by.clear()
    got, expected = results(patched, inputs), results(original, inputs)
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t)
    assert masked_by == [by] * 2
    masked_by.clear()
    with support.as_in_graph():  # where the host must not read which padding it is
        torch.testing.assert_close(results(patched, inputs), got)
    assert masked_by == [{"mask"}] * 2


def test_documents_under_compile_that_transformers_does_not_look_for(masked_by, device):
    patched, _ = pair("Mistral", device)
    inputs = BATCHES["cu_seq_lens"](batch(device)) | {"use_cache": True}
    with torch.no_grad():
        expected = patched(**inputs).logits
        masked_by.clear()
        got = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(got, expected)
    assert_traced(masked_by, [{"spans"}] * 2, device)


def test_one_graph_makes_the_spans_of_all_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def spans(documents):
        parts = masking_utils.packed_sequence_mask_function(documents), masking_utils.sliding_window_overlay(70)
        size = documents.shape[1]
        function = masking_utils.and_masks(*parts, masking_utils.causal_mask_function)
        return attention.make_mask(2, size, size, mask_function=function).spans

    compiled = torch.compile(spans, fullgraph=True, backend=counter)
    for size in (200, 201, 99):
        documents = torch.stack((torch.arange(size) // 150, torch.arange(size) // 90))
        rows = torch.arange(size)
        starts = torch.maximum(torch.stack((rows // 150 * 150, rows // 90 * 90)), rows - 69)
        expected = torch.stack((starts, (rows + 1).expand(2, size))).int()
        assert torch.equal(compiled(documents), expected)
    assert counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("overlay", [masking_utils.sliding_window_overlay(5), lambda b, h, q, k: k > q - 5])
def test_masks_of_documents_do_not_wait_for_the_gpu(overlay):
    """Read from the functions, and, where those say nothing, searched for."""
    documents = torch.arange(24, device="cuda").view(2, 12) // 5
    parts = masking_utils.packed_sequence_mask_function(documents), overlay, masking_utils.causal_mask_function
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = attention.make_mask(2, 12, 12, mask_function=masking_utils.and_masks(*parts), device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mask.spans is not None


def test_rows_that_see_no_key_are_those_of_sdpa(device):
    """The last row of padding on the left predicts the first token: eager attention gives it the mean of all values."""
    patched, eager = pair("Llama", device, attn_implementation="eager")
    sdpa = copy.deepcopy(eager)
    sdpa.set_attn_implementation("sdpa")
    inputs = batch(device)
    inputs["attention_mask"] = (inputs["labels"] != -100).long()
    assert_exact(patched, sdpa, inputs)
    assert abs(patched(**inputs).loss - eager(**inputs).loss) > 1e-4
