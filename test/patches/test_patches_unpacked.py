"""Patched models do not search positions that they count themselves for packed sequences."""

import copy
import functools
import pickle
import types

import pytest
import torch
import transformers
from test_patches_attention import pair
from tiny_models import batch, results
from torch.nn.modules import module as module_code
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import liger_like
from liger_like.patches import NAME, attention, unpacked
from liger_like.patches.attention_source import only_makes_masks
from liger_like.patches.unpacked import UNPACKED, before_forward, unhook


@pytest.fixture
def searches(monkeypatch):
    """Positions that transformers searches."""
    found, search = [], masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids):
        found.append(position_ids)
        return search(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find_packed_sequence_indices)
    return found


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3"])
def test_no_search_for_positions_that_the_model_counts(family, use_cache, embedded, searches, device):
    patched, original = pair(family, device)
    inputs = batch(device) | {"use_cache": use_cache}
    if embedded:
        inputs |= {"inputs_embeds": original.get_input_embeddings()(inputs.pop("input_ids")).detach()}
    expected = results(original, inputs)
    searches.clear()
    got = results(patched, inputs)
    assert not searches
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_given_positions_are_searched(family, searches, device):
    patched, original = pair(family, device)
    inputs = batch(device) | {"use_cache": False}
    whole = results(original, inputs)
    rows, tokens = inputs["input_ids"].shape
    inputs["position_ids"] = (torch.arange(tokens, device=device) % 5).expand(rows, -1)
    expected = results(original, inputs)
    assert any(not torch.allclose(expected[name], t) for name, t in whole.items())
    searches.clear()
    got = results(patched, inputs)
    assert searches
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t)


def test_another_implementation_gets_no_placeholder(searches, device):
    patched, original = pair("Llama", device)
    inputs = batch(device) | {"use_cache": False}
    expected = results(original, inputs)
    patched.set_attn_implementation("eager")
    searches.clear()
    for name, t in results(patched, inputs).items():
        torch.testing.assert_close(t, expected[name])
    assert searches


def test_the_hook_comes_once_is_copied_and_goes(searches, device):
    patched, _ = pair("Llama", device)
    patched.set_attn_implementation("sdpa")
    liger_like.patch(patched)  # selects ours again
    assert hooks(patched) == [before_forward]
    for model in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        model(**batch(device), use_cache=False)
        assert hooks(model) == [before_forward]
    assert not searches
    liger_like.unpatch(patched)
    assert not hooks(patched)
    patched(**batch(device), use_cache=False)
    assert searches


def test_a_model_whose_forward_was_replaced_has_no_hook(device):
    _, original = pair("Llama", device)
    forward = original.model.forward
    original.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    liger_like.patch(original)
    assert not hooks(original)


def test_a_graph_gets_the_placeholder(device):
    """It is smaller: nothing searches the positions."""
    patched, original = pair("Llama", device)
    inputs, sizes = batch(device) | {"use_cache": False}, []

    def count(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    patched.compile(fullgraph=True, backend=count)
    got = results(patched, inputs)
    for name, t in results(original, inputs).items():
        torch.testing.assert_close(got[name], t)
    unhook(patched.model)
    patched(**inputs)
    assert sizes[0] < sizes[-1]


def packs(module, args, kwargs):
    """Give a model positions of two documents: a hook before its forward."""
    tokens = kwargs["input_ids"]
    documents = torch.arange(tokens.shape[1], device=tokens.device) % 7
    return args, kwargs | {"position_ids": documents.expand(len(tokens), -1)}


def pads(module, args, kwargs):
    """Hide the last three tokens in the mask; make a mask if none is given."""
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(kwargs["input_ids"]) if mask is None else mask.clone()
    mask[:, -3:] = 0
    return args, kwargs | {"attention_mask": mask}


def reads(module, args, kwargs, output):
    """Do something with the mask after a forward."""
    assert kwargs.get("attention_mask") is None


def change(module, hook):
    """Replace the forward of ``module`` by another that changes its arguments."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **hook(module, args, kwargs)[1])


def changed(forward, hook):
    """The forward of a class, which changes its arguments."""
    return functools.wraps(forward)(lambda self, *args, **kwargs: forward(self, *args, **hook(self, args, kwargs)[1]))


CHANGES = {
    "hook": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    "forward": change,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("hook", [packs, pads])
@pytest.mark.parametrize("how", CHANGES)
def test_other_code_does_not_see_the_placeholder(how, hook, compiled, device):
    patched, original = pair("Mistral", device)
    inputs = batch(device) | {"use_cache": False}
    whole = results(original, inputs)
    for model in (patched, original):
        CHANGES[how](model.model, hook)
    if compiled:
        patched.compile(backend="eager")
    expected, got = results(original, inputs), results(patched, inputs)
    assert not torch.allclose(expected["loss"], whole["loss"])
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t)


@pytest.mark.parametrize("hook", [packs, pads])
@pytest.mark.parametrize("late", [False, True])
def test_a_decorated_class_does_not_see_the_placeholder(late, hook, monkeypatch, device):
    cls = transformers.MistralModel
    patched, original = pair("Mistral", device)
    if not late:
        liger_like.unpatch(patched)
    monkeypatch.setattr(cls, "forward", changed(cls.forward, hook))
    liger_like.patch(patched)
    inputs = batch(device) | {"use_cache": False}
    expected, got = results(original, inputs), results(patched, inputs)
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t)


def test_a_hook_after_the_forward_does_not_see_the_placeholder(searches, device):
    patched, _ = pair("Llama", device)
    handle = patched.model.register_forward_hook(reads, with_kwargs=True)
    patched(**batch(device), use_cache=False)
    assert searches
    handle.remove()
    searches.clear()
    patched(**batch(device), use_cache=False)
    assert not searches


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_no_hook_after_a_forward_gets_the_placeholder(everywhere, compiled, device):
    patched, _ = pair("Llama", device)
    seen = []

    def note(module, args, kwargs, output):
        seen.append(kwargs.get("attention_mask") is UNPACKED)

    register = module_code.register_module_forward_hook if everywhere else patched.model.register_forward_hook
    handle = register(note, with_kwargs=True)
    try:
        if compiled:
            patched.compile(backend="eager")
        patched(**batch(device), use_cache=False)
    finally:
        handle.remove()
    assert seen
    assert not any(seen)


def test_without_our_attention_there_is_no_hook(device):
    _, original = pair("Llama", device)
    liger_like.patch(original, attention=False)
    assert not hooks(original)
    unpacked.hook(original.model)
    assert not hooks(original)


@pytest.mark.gpu
def test_a_forward_does_not_wait_for_the_gpu():
    patched, _ = pair("Mistral", "cuda")
    tokens = batch("cuda")["input_ids"]
    patched(input_ids=tokens, use_cache=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        patched(input_ids=tokens, use_cache=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Whole:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class Together:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        create = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        if not isinstance(masks := attention_mask, dict):
            kwargs = {"attention_mask": attention_mask, "position_ids": position_ids}
            masks = {"full": create(**kwargs)}
        return masks


class Reads:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        if attention_mask is not None:
            x = x * attention_mask
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class HandsOn:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        kwargs = {"attention_mask": attention_mask, "position_ids": position_ids}
        return create_causal_mask(**kwargs), self.other(**kwargs)


class Changes:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        kwargs = {"attention_mask": attention_mask, "position_ids": position_ids}
        kwargs["attention_mask"].sum()
        return create_causal_mask(**kwargs)


class Overlays:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids, block_sequence_ids=x)


class OverlaysTogether:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        kwargs = {"attention_mask": attention_mask, "position_ids": position_ids, "block_sequence_ids": x}
        return create_causal_mask(**kwargs)


class Counts:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = self.positions_of(torch.arange(3))
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class CountsTwice:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3) // 2
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class CountsByTwo:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(0, 6, 2)
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class First:
    def forward(self, attention_mask, position_ids=None, x=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class Renames:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        kwargs = {"mask": attention_mask}
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids), self.other(**kwargs)


class Copies:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        kwargs = {"attention_mask": attention_mask, "position_ids": position_ids}
        others = {**kwargs}
        return create_causal_mask(**kwargs), self.other(**others)


class Keeps:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        self.kwargs = {"attention_mask": attention_mask}
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


class Aliases:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        if not isinstance(masks := attention_mask, dict):
            x = create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)
        return x, masks


class Asks:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        if isinstance(masks := attention_mask, dict) and x:
            masks = create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)
        return masks


class Other:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(self.config.other, attention_mask=attention_mask, position_ids=position_ids)


class OtherByName:
    def forward(self, x, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(config=self.config.other, attention_mask=attention_mask, position_ids=position_ids)


# fmt: off
class Lambda:
    forward = (None,
               lambda self, x, attention_mask=None, position_ids=None: attention_mask)[1]
# fmt: on


class NoSource:
    exec("def forward(self, x, attention_mask=None, position_ids=None): pass")


class Shadows:
    def forward(self, x, attention_mask=None, position_ids=None, create_causal_mask=None):
        if position_ids is None:
            position_ids = torch.arange(3)
        return create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)


LOOK = [Reads, HandsOn, Changes, Overlays, OverlaysTogether, Counts, CountsTwice, CountsByTwo, First, Renames, Copies]
LOOK += [Keeps, Aliases, Asks, Other, OtherByName, Lambda, NoSource, Shadows]


@pytest.mark.parametrize(("cls", "only"), [(Whole, True), (Together, True)] + [(cls, False) for cls in LOOK])
def test_forwards_that_look_into_the_mask_are_left_alone(cls, only):
    assert only_makes_masks(cls.forward) is only


def other(**kwargs):
    """Make a mask as transformers does."""
    return create_causal_mask(**kwargs)


def test_functions_with_the_names_of_transformers_are_not_taken_for_those(monkeypatch):
    assert only_makes_masks(Whole.forward)
    decorated = functools.wraps(create_causal_mask)(types.FunctionType(other.__code__, globals()))
    for function in (other, decorated):
        with monkeypatch.context() as patch:
            patch.setitem(Whole.forward.__globals__, "create_causal_mask", function)
            assert not only_makes_masks(Whole.forward)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_masks_of_graphs_are_those_of_eager_code(name, is_causal, device):
    attention.register()
    config = transformers.MistralConfig(sliding_window=4, attn_implementation=NAME)
    config.is_causal = is_causal
    x = torch.zeros(2, 9, 4, device=device)

    def seen():
        mask = getattr(masking_utils, name)(config, x, UNPACKED, None)
        return mask.seen(9, 9, x.device).expand(2, 1, 9, 9), torch.tensor(mask.spans is None)

    seen_in_graph, _ = torch.compile(seen, fullgraph=True, backend="eager")()
    in_eager_code, plain = seen()
    assert plain
    assert torch.equal(seen_in_graph, in_eager_code)
    above = in_eager_code.triu(1)
    assert above.any() != is_causal
