"""Calls of ``generate`` whose steps replay no graph: each of them generates as before."""

import itertools
import threading

import accelerate
import peft
import pytest
import torch
import tqdm
import transformers
from conftest import DEVICE
from test_generation import options
from test_generation_caches import padded
from test_generation_graphs import LONG, STEPS, family, patched, same_as_plain, tokens
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput

from liger_like.patches import decode_graphs
from liger_like.patches.growing_cache import let_grow
from liger_like.patching import patch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]


class Own(transformers.LlamaForCausalLM):
    """A class whose code is not known."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def accelerated(model):
    accelerate.dispatch_model(model, {"": DEVICE}, force_hooks=True)


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def replaced(model):
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: forward(x) * 2


def compiled(model):
    model.compile(backend="eager")


def training(model):
    model.train()


def chosen(model):
    model.set_attn_implementation("sdpa")


CHANGED = {change.__name__: change for change in (accelerated, hooked, replaced, compiled, training, chosen)}
CALLS = {
    "disable_compile": {"disable_compile": True},
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "few steps": {"max_new_tokens": decode_graphs.MIN_STEPS},
    "attention weights": {"output_attentions": True, "return_dict_in_generate": True},
    "no cache": {"use_cache": False},
}


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


WAYS = {
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "counter": lambda: FlopCounterMode(display=False),
    "dispatch": Dispatched,
    "function": BaseTorchFunctionMode,
}


@pytest.mark.parametrize("change", CHANGED)
def test_models_that_keep_plain_steps(change, graphs):
    model, inputs, _ = patched()
    CHANGED[change](model)
    same_as_plain(model, inputs)
    assert not graphs


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_keep_plain_steps(call, graphs):
    model, inputs, _ = patched()
    inputs = {name: t[:1] for name, t in inputs.items()}  # prompt lookup takes one
    made = same_as_plain(model, inputs, **CALLS[call])
    assert not graphs
    if call == "attention weights":
        assert made.attentions[-1][0].shape[-1] == made.sequences.shape[1] - 1


INPUTS = {
    "none": {},
    "positions": {"position_ids": torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)},
    "another tensor": {"token_type_ids": torch.ones(1, 1, device=DEVICE)},
    "masks of layers": {"attention_mask": {"full_attention": None}},
    "a bias": {"attention_mask": torch.ones(1, 1, 1, 4, device=DEVICE)},
    "another device": {"attention_mask": torch.ones(1, 4, device="meta")},
    "a list": {"logits_to_keep": [1]},
}


@torch.no_grad()
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_a_graph_can_hold(name):
    model, ids = family("Llama"), torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    patch(model)
    fit = decode_graphs.is_fit(model, {"input_ids": ids, "use_cache": True, **INPUTS[name]})
    assert fit == (name in ("none", "positions"))


def test_adapters_of_packed_experts_keep_plain_steps():
    targets = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
    model = peft.get_peft_model(family("Mixtral"), peft.LoraConfig(**targets)).eval()
    patch(model)
    unknown = {type(m).__name__ for m in model.base_model.model.modules() if not decode_graphs._is_known(m)}
    assert unknown == {"ParamWrapper"}


@pytest.mark.parametrize("mode", GenerationMode)
def test_modes_that_may_replay(mode):
    """An assistant takes tokens back, and beams change rows."""
    cache = DynamicCache(config=family("Llama").config)
    let_grow(cache)
    step = decode_graphs.step_for(options(**LONG), mode, cache)
    assert (step is not None) == (mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE))


@pytest.mark.parametrize("way", WAYS)
def test_contexts_that_keep_plain_steps(way, graphs):
    model, inputs, _ = patched()
    with WAYS[way]():
        same_as_plain(model, inputs)
    assert not graphs


def test_a_step_with_other_arguments_is_plain(graphs):
    """The first of them sets hooks for hidden states, which stay: the next replay is dropped, and none follows."""
    model, inputs, expected = patched()
    prepare, update = model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation
    calls, found = itertools.count(), []

    def prepared(*args, **kwargs):
        return prepare(*args, **kwargs) | ({"output_hidden_states": True} if next(calls) % 10 == 9 else {})

    def noted(outputs, *args, **kwargs):
        found.append(outputs.hidden_states is not None)
        return update(outputs, *args, **kwargs)

    model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation = prepared, noted
    assert torch.equal(tokens(model, inputs), expected)
    assert found == [i % 10 == 9 for i in range(STEPS)]
    assert graphs == [7]


def noting(look):
    """Return a capture that holds no weights: each replay returns the captured results, and calls ``look``."""

    def capture(work, device):
        results = {name: t.clone() for name, t in work().items() if isinstance(t, torch.Tensor)}
        return lambda: look() or ModelOutput(**results)

    return capture


@pytest.mark.parametrize(("fit", "replays", "until"), [(True, 6, 10), (False, 0, 8)])
def test_weights_live_until_a_change_is_seen(fit, replays, until, graphs, monkeypatch):
    """A replay that begins before finds the old weights. Later steps, and those of other models, do not hold them."""
    model, inputs, _ = patched()
    norm, calls, alive, held = model.model.norm, itertools.count(1), [], []
    old = StorageWeakRef(norm.weight.untyped_storage())
    if not fit:
        model.model.layers[0].mlp.register_forward_hook(lambda *args: None)

    def replace(input_ids, scores):
        if next(calls) == 8:
            norm.weight.data = norm.weight.data.clone()
        held.append(not old.expired())
        return scores

    monkeypatch.setattr(decode_graphs, "capture", noting(lambda: alive.append(not old.expired())))
    model.generate(**inputs, generation_config=options(**LONG), logits_processor=[replace])
    assert alive == [True] * replays
    assert held == [step < until for step in range(1, STEPS + 1)]


def test_freed_weights_are_not_read(graphs, monkeypatch):
    model, inputs, _ = patched()
    norm, calls, sizes = model.model.norm, itertools.count(1), []
    storage = norm.weight.untyped_storage()

    def free(input_ids, scores):
        if next(calls) == 8:
            norm.weight.data = norm.weight.data.clone()
            storage.resize_(0)
        return scores

    monkeypatch.setattr(decode_graphs, "capture", noting(lambda: sizes.append(storage.nbytes())))
    model.generate(**inputs, generation_config=options(**LONG), logits_processor=[free])
    assert len(sizes) == 5
    assert all(sizes)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Mistral", "Llama4"])
def test_windows_keep_plain_steps(name, graphs):
    model, inputs, expected = patched(name)
    assert torch.equal(tokens(model, inputs), expected)
    assert not graphs


def test_a_class_of_the_user_keeps_plain_steps(graphs):
    model = family("Llama")
    model.__class__ = Own
    patch(model)
    same_as_plain(model, padded())
    assert not graphs


def test_a_gpu_without_memory_keeps_plain_steps(graphs, monkeypatch):
    model, inputs, expected = patched()
    monkeypatch.setattr(decode_graphs, "free_memory", lambda device: (100 << 20, 1 << 30))
    assert torch.equal(tokens(model, inputs), expected)
    assert not graphs


def test_a_cache_of_the_user_keeps_plain_steps(graphs):
    model, inputs, expected = patched()
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        config = options(**LONG | {"disable_compile": isinstance(cache, StaticCache)})
        assert torch.equal(model.generate(**inputs, past_key_values=cache, generation_config=config), expected)
    assert not graphs


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_reads_its_tensors_keeps_plain_steps(mode, graphs, monkeypatch):
    """This RoPE takes other frequencies when the sequence gets long: the host compares positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    model, inputs, expected = patched(rope_parameters=rope)
    seen, launch = [], decode_graphs.DecodeStep._launch

    def noted(step, *args):
        results = launch(step, *args)
        seen.append(step._is_fit)
        return results

    monkeypatch.setattr(decode_graphs.DecodeStep, "_launch", noted)
    with mode():
        assert torch.equal(tokens(model, inputs), expected)
    assert seen == [False]
    assert not graphs


def test_a_rope_that_changes_on_the_device(graphs):
    """The same for long contexts. Some versions of transformers compare on the device; all then drop the cache."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model, inputs, _ = patched("Phi3", rope_parameters=rope, original_max_position_embeddings=32)
    same_as_plain(model, inputs)


READING = {
    "item": lambda t: t.sum().item(),
    "branch": lambda t: bool(t.sum() > 0),
    "nonzero": lambda t: t.nonzero(),
    "places": lambda t: t[t > 0],
    "written places": lambda t: t.clone().__setitem__(t > 0, t[:2] * 1),
    "equal": lambda t: torch.equal(t, t),
    "unique": lambda t: t.unique(),
    "repeats": lambda t: t.repeat_interleave(t.long()),
}
HOST = {
    "list": lambda t: t.tolist(),
    "copy": lambda t: t.cpu(),
    "moved": lambda t: torch.ones(2).cuda(),
    "copied": lambda t: t.copy_(torch.ones(2)),
    "places": lambda t: t[torch.zeros(2, dtype=torch.int64)],
}
NUMBERS = {
    "tensor": lambda t: torch.tensor([1.0], device=t.device),
    "scalar": lambda t: torch.tensor(1.0, device=t.device),
    "as_tensor": lambda t: torch.as_tensor([1.0], device=t.device),
    "asarray": lambda t: torch.asarray([1.0], device=t.device),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "new": lambda t: t.new([1.0]),
}
NOT_READING = {
    "rows": lambda t: t[torch.zeros(2, dtype=torch.int64, device=DEVICE)],
    "masked": lambda t: t.clone().masked_fill_(t > 0, 1.0),
    "product": lambda t: t * 2 + t.shape[0],
    "top": lambda t: t.topk(1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*READING, *NOT_READING])
def test_reads_are_noted(name, inference):
    t = torch.tensor([1.0, 2.0, 0.0], device=DEVICE)
    with torch.inference_mode(inference), decode_graphs._Watch() as watch:
        (READING | NOT_READING)[name](t)
    assert watch.reads == (name in READING)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("name", "device"),
    [("copied", "meta"), ("places", "meta"), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in HOST)],
)
def test_copies_between_devices_are_noted(name, device, inference):
    t = torch.ones(2, device=device)
    with torch.inference_mode(inference), decode_graphs._Watch() as watch:
        HOST[name](t)
    assert watch.reads


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "meta", "cpu"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_host_are_noted(name, device):
    """They are copied where no dispatch mode sees it; a tensor of the CPU needs no copy."""
    t = torch.ones(2, device=device)
    with decode_graphs._Numbers() as numbers:
        t.sum() * 2 + t.new_zeros(2)
        assert not numbers.made
        NUMBERS[name](t)
    assert numbers.made == (device != "cpu")


def test_a_model_that_makes_tensors_of_numbers_keeps_plain_steps(graphs, monkeypatch):
    model, inputs, expected = patched()
    monkeypatch.setattr(decode_graphs._Numbers, "made", True)
    assert torch.equal(tokens(model, inputs), expected)
    assert not graphs


@pytest.mark.parametrize("other", [threading.Thread(), tqdm.TMonitor])
def test_threads_that_may_draw_numbers(other, graphs, monkeypatch):
    """Before version 2.13 of torch a random number in another thread is an error during a capture."""
    model, inputs, expected = patched()
    others = [object.__new__(other)] if isinstance(other, type) else [other]
    monkeypatch.setattr(decode_graphs, "DRAWS_APART", False)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *others])
    assert torch.equal(tokens(model, inputs), expected)
    assert graphs == [STEPS - 3] * isinstance(other, type)


def test_a_thread_that_comes_before_the_capture(graphs, monkeypatch):
    model, inputs, expected = patched()
    others, launch = [], decode_graphs.DecodeStep._launch

    def noted(step, *args):
        results = launch(step, *args)
        others[:] = [threading.Thread()] if step._launched < 5 else []
        return results

    monkeypatch.setattr(decode_graphs, "DRAWS_APART", False)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *others])
    monkeypatch.setattr(decode_graphs.DecodeStep, "_launch", noted)
    assert torch.equal(tokens(model, inputs), expected)
    assert graphs == [STEPS - 1 - 5]
