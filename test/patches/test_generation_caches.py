"""``generate`` of patched models: static caches need no bias, and only what is filled; dynamic ones are not copied."""

import copy
import pickle

import pytest
import torch
import transformers
from conftest import DEVICE
from test_generation import model_of, options
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import CompileConfig

from liger_like.doctor import tiny
from liger_like.patches import attention
from liger_like.patches.growing_cache import ROOM, GrowingLayer, let_grow
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
FAMILIES = ["Llama", "Gemma2", "GptOss", "Mistral"]


def padded():
    """Return prompts with padding on the left; the last row has a hole, too."""
    ids = torch.randint(3, 101, (3, 15)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[2, :1], mask[2, 4:6] = 0, 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model, inputs, **more):
    return model.generate(**inputs, generation_config=options(**more))


@pytest.fixture
def masks(monkeypatch):
    """Return the masks that attention gets."""
    seen, attend = [], attention.flash_attention

    def noted(*args, **kwargs):
        seen.append(kwargs)
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention, "flash_attention", noted)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_with_each_cache(family, masks):
    model, inputs = model_of(family), padded()
    expected = tokens(model, inputs)
    patch(model)
    for cache in ("static", None):
        masks.clear()
        assert torch.equal(tokens(model, inputs, cache_implementation=cache), expected)
        assert masks
        assert all("bias" not in options for options in masks)


def test_static_caches_read_what_is_filled(masks):
    """Each query sees the keys from the first token of its row up to its own."""
    model, inputs = model_of("Llama"), padded()
    patch(model)
    masks.clear()  # the first patch of a process tries the kernels
    tokens(model, inputs, cache_implementation="static")
    prompt, *steps = masks[::2]  # of two layers
    assert prompt["spans"].tolist() == [[[0] * 15] * 3, [[*range(1, 16)]] * 3]  # the padding says the rest
    assert [s["spans"].tolist() for s in steps] == [[[[6], [0], [1]], [[n]] * 3] for n in range(16, 23)]


def test_static_compiled_in_one_graph():
    model, inputs = model_of("Llama", num_hidden_layers=1), padded()
    expected = tokens(model, inputs, max_new_tokens=4)
    patch(model)
    config = CompileConfig(backend="eager", fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on GPUs alone
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = {"compile_config": config, "disable_compile": False}
    got = tokens(model, inputs, cache_implementation="static", max_new_tokens=4, **compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got, expected)


def test_sequences_of_a_prompt_and_beams():
    model, inputs = model_of("Llama"), padded()
    choices = [{"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2, "length_penalty": 0.5}]
    expected = [tokens(model, inputs, **choice) for choice in choices]
    patch(model)
    assert [torch.equal(tokens(model, inputs, **c), e) for c, e in zip(choices, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_decoder_that_joins_its_masks(cache):
    """Its layers attend to tokens and to the encoder at once."""
    cls = transformers.T5Gemma2ForConditionalGeneration
    model, inputs = tiny.build(cls, cls.config_class()).to(DEVICE).eval(), padded()
    model.generation_config.use_cache = True
    how = {"cache_implementation": cache, "decoder_start_token_id": 1}
    expected = tokens(model, inputs, **how)
    report = [row for row in patch(model).rows if row.pattern == "attention"]
    (row,) = (row for row in report if row.cls == "T5Gemma2MergedAttention")
    assert "T5Gemma2Decoder.forward uses a mask for more than passing it on" in row.reason
    assert torch.equal(tokens(model, inputs, **how), expected)


def test_steps_copy_nothing():
    """The memory of the keys stays the same; the user's own caches keep their layers."""
    model, inputs = model_of("Llama"), padded()
    patch(model)
    made = model.generate(**inputs, generation_config=options(return_dict_in_generate=True)).past_key_values
    layer = made.layers[0]
    assert type(layer) is GrowingLayer
    assert layer.keys.shape[-2] == 15 + 8 - 1
    assert layer.keys.data_ptr() == layer._memory[0].rows.data_ptr()
    assert layer._memory[0].rows.shape[-2] == 15 + ROOM
    own = DynamicCache(config=model.config)
    model.generate(**inputs, past_key_values=own, generation_config=options())
    assert type(own.layers[0]) is DynamicLayer
    unpatch(model)
    again = model.generate(**inputs, generation_config=options(return_dict_in_generate=True)).past_key_values
    assert type(again.layers[0]) is DynamicLayer


def changed(cache, way):
    """Change ``cache`` as transformers' callers do."""
    if way == "crop":
        cache.crop(-3)
    elif way == "reorder":
        cache.reorder_cache(torch.tensor([1, 1]))
    elif way == "repeat":
        cache.batch_repeat_interleave(2)
    elif way == "select":
        cache.batch_select_indices(torch.tensor([-1]))
    elif way == "copy":
        return copy.deepcopy(cache)
    elif way == "pickle":
        return pickle.loads(pickle.dumps(cache))
    return cache


@pytest.mark.parametrize("way", ["append", "crop", "reorder", "repeat", "select", "copy", "pickle"])
def test_a_growing_layer_does_as_the_dynamic_one(way):
    config = model_of("Llama", num_hidden_layers=1).config  # some versions crop no layer without keys
    caches = [DynamicCache(config=config) for _ in range(2)]
    let_grow(caches[1])
    for rows in (4, 1, 1, way, ROOM - 3, 1, way, 1):
        if isinstance(rows, str):
            caches = [changed(cache, rows) for cache in caches]
            continue
        batch = 2 if not caches[0].layers[0].is_initialized else len(caches[0].layers[0].keys)
        keys, values = torch.randn(2, batch, 2, rows, 8)
        with torch.no_grad():
            (k0, v0), (k1, v1) = [cache.update(keys, values, 0) for cache in caches]
        assert torch.equal(k0, k1)
        assert torch.equal(v0, v1)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_gradients_flow_through_a_growing_layer():
    cache = DynamicCache(config=model_of("Llama").config)
    let_grow(cache)
    parts = [torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(2)]
    for part in parts:
        keys, _ = cache.update(part, part, 0)
    keys.sum().backward()
    assert all(torch.equal(part.grad, torch.ones_like(part)) for part in parts)


@torch.no_grad()
@pytest.mark.parametrize("copied", ["layer", "crop", "rows", "inference"])
def test_returned_tensors_never_change(copied):
    """A shallow copy, a crop and a part of the rows go on in memory of their own; so does an inference tensor."""
    cache = DynamicCache(config=model_of("Llama").config)
    let_grow(cache)
    layer = cache.layers[0]
    parts = torch.randn(3, 2, 2, 4, 8)
    with torch.inference_mode() if copied == "inference" else torch.no_grad():  # False enables gradients
        layer.update(parts[0], parts[0])
    before, other = layer.keys, copy.copy(layer)
    saved = before.clone()
    if copied == "crop":
        layer.crop(-2)
    elif copied == "rows":
        layer.keys, layer.values = layer.keys[:1], layer.values[:1]
    held = layer.keys
    mine, _ = layer.update(parts[1][: len(held)], parts[1][: len(held)])
    others, _ = other.update(parts[2], parts[2])
    assert torch.equal(mine, torch.cat((held, parts[1][: len(held)]), 2))
    assert torch.equal(others, torch.cat((saved, parts[2]), 2))
    assert torch.equal(before, saved)
