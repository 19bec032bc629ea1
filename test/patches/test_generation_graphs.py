"""Decode steps of ``generate`` that replay a graph: on a CPU a tape of torch's ops and their numbers."""

import contextlib
import copy
import itertools
import threading
import time
import weakref

import peft
import pytest
import torch
from conftest import DEVICE
from test_generation import model_of, options
from test_generation_caches import padded
from tiny_models import batch, tiny
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import StaticLayer

from liger_like.patches import decode_graphs
from liger_like.patches.generation import CACHES
from liger_like.patches.growing_cache import GrowingLayer
from liger_like.patching import patch, unpatch
from liger_like.runtime import support

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
MIXTRAL = pytest.param("Mixtral", marks=pytest.mark.gpu)  # on a CPU the definition of its experts reads numbers
GRAPHED = ["Llama", "Qwen2", "Qwen3", "Olmo2", "Granite", "SmolLM3", "Phi", "Phi3", "Gemma", "DeepseekV3", MIXTRAL]
STEPS = 40
LONG = {"max_new_tokens": STEPS, "disable_compile": False}


def tokens(model, inputs, **more):
    return model.generate(**inputs, generation_config=options(**LONG | more))


def family(name, **more):
    """Return a model in fp32 whose sequences never end by themselves."""
    if name in ("Mixtral", "Phi", "Gemma2", "GptOss", "Mistral"):
        return model_of(name, **more)
    ends = {"eos_token_id": None, "max_position_embeddings": 128, "attn_implementation": "eager"}
    return tiny(name, DEVICE, **ends | more).eval()


def patched(name="Llama", **more):
    """Return a patched model, and the tokens that it generated before for ``padded`` prompts."""
    model, inputs = family(name, **more), padded()
    expected = tokens(model, inputs)
    patch(model)
    return model, inputs, expected


def same_as_plain(model, inputs, **more):
    """Return the tokens, which are those of plain steps."""
    made = [
        tokens(model, inputs, **{"return_dict_in_generate": True} | more | plain)
        for plain in ({"disable_compile": True}, {})
    ]
    assert torch.equal(made[0].sequences, made[1].sequences)
    return made[1]


@pytest.mark.parametrize("name", GRAPHED)
def test_replayed_steps_give_the_tokens_of_eager_generate(name, graphs):
    """With padding and without; and without a mask, which transformers drops or not."""
    model, inputs = family(name), padded()
    cases = [inputs, {"input_ids": inputs["input_ids"]}, {"input_ids": inputs["input_ids"][:1, :5]}]
    expected = [tokens(model, case) for case in cases]
    patch(model)
    for case, rows in zip(cases, expected, strict=True):
        assert torch.equal(tokens(model, case), rows)
    assert graphs == [STEPS - 3] * 3  # the prompt, and two launched steps


def test_numbers_are_those_of_plain_steps(graphs):
    model, inputs, _ = patched()
    how = {"output_logits": True, "output_scores": True, "output_hidden_states": True, "return_dict_in_generate": True}
    plain, made = tokens(model, inputs, **how, disable_compile=True), tokens(model, inputs, **how)
    assert graphs == [STEPS - 3]
    for name in ("sequences", "logits", "scores", "hidden_states"):
        torch.testing.assert_close(made[name], plain[name])


def test_the_cache_that_is_returned(graphs):
    """It is a dynamic one that holds all tokens, and goes on in another call, whose steps are plain."""
    model, inputs, _ = patched()
    caches = []
    for plain in (True, False):
        made = tokens(model, inputs, return_dict_in_generate=True, disable_compile=plain)
        cache = made.past_key_values
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == 15 + STEPS - 1
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(made.sequences[:, 15:])), 1)
        caches.append([t.clone() for layer in cache.layers for t in (layer.keys, layer.values)])
        more = {"input_ids": made.sequences, "attention_mask": mask, "past_key_values": cache}
        caches[-1].append(tokens(model, more, max_new_tokens=20))
    assert graphs == [STEPS - 3]
    torch.testing.assert_close(*caches)


@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_a_cache_that_grows_takes_another_graph(name, graphs, monkeypatch):
    monkeypatch.setattr(decode_graphs, "ROOM", 8)
    model, inputs = family(name), padded()
    expected = tokens(model, inputs, max_new_tokens=100)
    patch(model)
    assert torch.equal(tokens(model, inputs, max_new_tokens=100), expected)
    first, second = 64 - 15 - 2, 100 - 1 - (64 - 15) - 2  # tokens up to 64, and up to 114; two launched each
    assert graphs == [first, second]


def test_a_step_reads_and_writes_the_same_memory(graphs, monkeypatch):
    model, inputs, expected = patched()
    seen, fill = set(), decode_graphs._Buffers.fill

    def noted(buffers, given):
        fill(buffers, given)
        held = [*buffers.inputs.values(), *(t for x in buffers.cache.layers for t in (x.keys, x.cumulative_length))]
        seen.add(tuple(t.data_ptr() for t in held))

    monkeypatch.setattr(decode_graphs._Buffers, "fill", noted)
    assert torch.equal(tokens(model, inputs), expected)
    assert len(seen) == len(graphs) == 1


def test_sampling_draws_the_same_tokens(graphs):
    model, inputs, _ = patched()
    how = {"do_sample": True, "num_return_sequences": 2, "temperature": 2.0}
    config, drawn = options(**LONG), []
    config.update(**how)
    for plain in (True, False):
        config.disable_compile = plain
        torch.manual_seed(1)
        drawn.append(model.generate(**inputs, generation_config=config))
    assert torch.equal(*drawn)
    assert graphs == [STEPS - 3]


@pytest.mark.parametrize(("size", "first"), [(4, 0), (7, 1)])
def test_prompts_in_chunks(size, first, graphs):
    """A last chunk of one token is a step like others."""
    model, inputs, _ = patched()
    same_as_plain(model, inputs, prefill_chunk_size=size)
    assert graphs == [STEPS - 3 + first]


def test_prompts_of_embeddings(graphs):
    """The limit on tokens does not count them, so it does not tell how many steps there are."""
    model, inputs, _ = patched()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    same_as_plain(model, given)
    assert graphs == [STEPS - 3]


@pytest.mark.parametrize("how", ["in place", "other memory", "training"])
def test_weights_that_change_between_calls(how, graphs):
    model, inputs, expected = patched()
    tokens(model, inputs)
    if how == "training":
        optimizer = torch.optim.SGD(model.train().parameters(), lr=1.0)
        model(**batch(DEVICE)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    else:
        for p in model.parameters():
            new = p.detach() + torch.randn_like(p) * 0.1
            p.data = p.data.copy_(new) if how == "in place" else new
    made = tokens(model, inputs)
    assert torch.equal(made, tokens(model, inputs, disable_compile=True))
    assert not torch.equal(made, expected)
    assert graphs == [STEPS - 3] * 2


def test_adapters_that_are_switched(graphs):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(family("Llama"), config).eval()
    model.add_adapter("other", config)
    model.eval()
    inputs, made = padded(), []
    for plain in (True, False):
        if not plain:
            patch(model)
        for name in ("default", "other"):
            model.set_adapter(name)
            made.append(tokens(model, inputs))
        with model.disable_adapter():
            made.append(tokens(model, inputs))
        model.merge_adapter()
        made.append(tokens(model, inputs))
        model.unmerge_adapter()
    assert all(torch.equal(a, b) for a, b in zip(made[:4], made[4:], strict=True))
    assert not torch.equal(made[0], made[1])
    assert graphs == [STEPS - 3] * 4


def test_modes_without_gradients_may_alternate(graphs):
    model, inputs, expected = patched()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(tokens(model, inputs), expected)
    assert graphs == [STEPS - 3] * 3


def test_nothing_is_kept_after_a_call(graphs, monkeypatch):
    model, inputs, _ = patched()
    steps = []
    step_for = decode_graphs.step_for

    def noted(*args):
        step = step_for(*args)
        steps.append(weakref.ref(step))
        return step

    monkeypatch.setattr(decode_graphs, "step_for", noted)
    tokens(model, inputs)
    assert [step() for step in steps] == [None]
    assert model.generation_config.compile_config is None
    unpatch(model)
    tokens(model, inputs)
    assert len(steps) == len(graphs) == 1


def test_threads_generate_at_once(graphs, monkeypatch):
    """Each has a graph of its own, and they launch and capture one after the other."""
    model, inputs, expected = patched()
    made, within, together = [None] * 3, [], []

    @contextlib.contextmanager
    def noted():
        within.append(threading.get_ident())
        time.sleep(0.02)  # until another thread would come
        together.append(len(within))
        with support.as_in_graph():
            yield
        within.pop()

    def work(place):
        made[place] = tokens(model, inputs)

    monkeypatch.setattr(decode_graphs, "as_in_graph", noted)
    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(t, expected) for t in made)
    assert graphs == [STEPS - 3] * 3 * decode_graphs.DRAWS_APART
    assert together == [1] * 3 * decode_graphs.LAUNCHES * decode_graphs.DRAWS_APART
    assert not support._as_in_graph


class Changing(LogitsProcessor):
    """Processor that changes the model after so many steps, and back 10 steps later."""

    def __init__(self, model, way, steps):
        self.model, self.way, self.steps, self.calls = model, way, steps, 0
        self.weight = model.model.norm.weight.data

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls in (self.steps, self.steps + 10):
            self.change(self.calls == self.steps)
        return scores

    def change(self, there):
        norm = self.model.model.norm
        if self.way == "hook" and there:
            self.handle = norm.register_forward_hook(lambda module, args, output: -output)
        elif self.way == "hook of all" and there:
            self.handle = register_module_forward_hook(lambda each, args, output: -output if each is norm else None)
        elif "hook" in self.way:
            self.handle.remove()
        elif self.way == "weight":
            norm.weight.data = -self.weight if there else self.weight
        elif self.way == "in place":
            self.weight.mul_(-1)
        elif self.way == "module":
            self.model.model.norm = (norm := copy.deepcopy(self.model.model.norm))
            norm.weight.data *= -1


@pytest.mark.parametrize("steps", [2, 10])
@pytest.mark.parametrize("way", ["hook", "hook of all", "weight", "in place", "module"])
def test_a_model_that_changes_within_a_call(way, steps, graphs):
    """Where a graph would not see it, the results of the replay that has begun are dropped, and later steps are plain.

    After 2 steps there is no graph yet.
    """
    model, inputs, expected = patched()
    made = []
    for plain in (True, False):
        config, changing = options(**LONG | {"disable_compile": plain}), Changing(model, way, steps)
        made.append(model.generate(**inputs, generation_config=config, logits_processor=[changing]))
    assert torch.equal(*made)
    assert not torch.equal(made[0], expected)
    assert graphs == ([STEPS - 3] if way == "in place" else [] if steps == 2 else [8])


@pytest.mark.parametrize("steps", [49, 50, 51])
def test_a_model_that_changes_where_the_cache_is_full(steps, graphs, monkeypatch):
    """After 50 steps. The hook reads how many keys there are: the memory of a graph has room for more."""
    monkeypatch.setattr(decode_graphs, "ROOM", 8)
    model, inputs, _ = patched()

    def hook(module, args, kwargs, output):
        (cache,) = (kwargs[name] for name in CACHES if name in kwargs)
        return output[0] * (-1) ** cache.layers[0].keys.shape[2], *output[1:]

    made = []
    for plain in (True, False):
        calls, handles = itertools.count(1), []

        def change(input_ids, scores, calls=calls, handles=handles):
            if next(calls) == steps:
                handles.append(model.model.layers[0].self_attn.register_forward_hook(hook, with_kwargs=True))
            return scores

        config = options(**LONG | {"max_new_tokens": 80, "disable_compile": plain})
        made.append(model.generate(**inputs, generation_config=config, logits_processor=[change]))
        handles[0].remove()
    assert torch.equal(*made)


def test_an_embedding_that_grows_within_a_call(graphs):
    """A replay would index rows that its embedding does not have."""
    original, inputs, _ = patched()
    made = []
    for plain in (True, False):
        model = copy.deepcopy(original)
        calls, words = itertools.count(1), model.config.vocab_size

        def grow(input_ids, scores, model=model, calls=calls, words=words):
            if next(calls) != 10:
                return scores
            torch.manual_seed(0)
            model.resize_token_embeddings(words + 20, mean_resizing=False)
            return torch.eye(words + 20, device=scores.device)[-1:].expand(len(scores), -1)  # the last of the new words

        config = options(**LONG | {"disable_compile": plain})
        made.append(model.generate(**inputs, generation_config=config, logits_processor=[grow]))
        assert (made[-1] == words + 19).any()
    assert torch.equal(*made)
    assert graphs == [7]


@torch.no_grad()
def test_reserved_memory_holds_the_same():
    layer = GrowingLayer()
    keys, values = torch.randn(2, 3, 2, 5, 8)
    held = layer.update(keys, values)
    for size in (20, 80):
        rows = layer.reserve(size)
        assert layer.is_in(rows)
        for t, made, new in zip((keys, values), rows, (layer.keys, layer.values), strict=True):
            assert torch.equal(made[:, :, :5], t)
            assert not made[:, :, 5:].any()
            assert torch.equal(new, t)
    assert rows[0].shape[2] == 80
    layer.extend()
    assert layer.get_seq_length() == 6
    assert torch.equal(held[0], keys)
    layer.crop(-1)
    assert not layer.is_in(rows)


@torch.no_grad()
def test_a_fixed_layer_does_as_the_static_one():
    rows = torch.zeros(2, 3, 2, 9, 8)
    layers = [StaticLayer(9), decode_graphs.FixedLayer(tuple(rows), torch.zeros((), dtype=torch.int64))]
    for _ in range(3):
        keys, values = torch.randn(2, 3, 2, 1, 8)
        made = [layer.update(keys, values) for layer in layers]
        torch.testing.assert_close(*made, rtol=0, atol=0)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
        assert layers[0].get_mask_sizes(1) == layers[1].get_mask_sizes(1)


@pytest.mark.gpu
def test_memory_of_graphs_does_not_add_up(graphs):
    model, inputs, _ = patched()
    reserved = []
    for _ in range(4):
        tokens(model, inputs)
        reserved.append(torch.cuda.memory_reserved())
    assert len(graphs) == 4
    assert max(reserved[1:]) == min(reserved[1:])
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= reserved[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_bf16_takes_the_captured_kernels(name, graphs):
    """Logits agree up to rounding until a token differs, which a tie may do."""
    model, inputs = family(name).bfloat16(), padded()
    patch(model)
    how = {"output_logits": True, "return_dict_in_generate": True}
    plain, made = tokens(model, inputs, **how, disable_compile=True), tokens(model, inputs, **how)
    assert graphs == [STEPS - 3]
    same = (made.sequences == plain.sequences).all(0)[15:].tolist()
    agreed = same.index(False) + 1 if False in same else STEPS
    assert agreed > 3
    torch.testing.assert_close(made.logits[:agreed], plain.logits[:agreed], rtol=0.05, atol=0.05)
