"""Decode steps of multi-head latent attention: queries meet the cached latents, and nothing is expanded."""

import copy
import io
import re

import peft
import pytest
import torch
import transformers
from conftest import DEVICE
from test_generation import SETTINGS, assert_exact, batched, eager, options, outputs, prompts
from test_generation_caches import padded
from tiny_models import ATTENTION, batch, results, rows, tiny
from torch import nn
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.continuous_batching import offloading_manager

from liger_like.patches import attention, generation, latents, paged
from liger_like.patches.attention import Mask, attend
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "DeepseekV2": {},
    "DeepseekV3": {"head_dim": 8, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},  # another scale
    "Glm4MoeLite": {"head_dim": 8, "mlp_layer_types": ["dense"] * 2},
    "LongcatFlash": {
        "head_dim": 8,
        "num_layers": 1,  # of two attentions
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "MiniCPM3": {},
    "AXK1": {"head_dim": 8},
    "Mistral4": {"head_dim": 24, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},  # queries grow behind 16
    "Youtu": {"head_dim": 8},
}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
HYBRID = {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
SKIPPED = {  # families whose latents are expanded as before: their config, and the reason
    "AXK2": (INDEXED | {"head_dim": 8}, "its attention has unsupported arguments: indices"),
    "DeepseekV32": (INDEXED | {"head_dim": 8}, "its attention has unsupported arguments: indices"),
    "Dots3Note": (INDEXED | {"head_dim": 24}, "its attention has unsupported arguments: indices"),
    "GlmMoeDsa": (INDEXED | {"head_dim": 8}, "its attention has unsupported arguments: indices"),
    "HYV4": (INDEXED | {"head_dim": 8}, "its attention has unsupported arguments: indices"),
    "BailingHybrid": (HYBRID, "does not support other attention implementations"),
    "KimiLinear": (HYBRID | {"num_experts": 4}, "does not support other attention implementations"),
}
STEPS = 4


def model_of(family, **more):
    sizes = ATTENTION["DeepseekV3"] | {"v_head_dim": 12, "kv_lora_rank": 16}
    sizes |= {"eos_token_id": None, "attn_implementation": "eager"}
    return tiny(
        family, DEVICE, **sizes | (FAMILIES[family] if family in FAMILIES else SKIPPED[family][0]) | more
    ).eval()


def tokens(model, inputs, **more):
    return model.generate(**inputs, generation_config=options(max_new_tokens=STEPS, **more))


@pytest.fixture
def decoded(monkeypatch):
    """Return the latents that each decode step of a layer attends to."""
    seen, decode = [], latents.decode_seen

    def noted(module, q, held, *args, **scores):
        seen.append(held)
        return decode(module, q, held, *args, **scores)

    monkeypatch.setattr(attention, "decode_seen", noted)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_with_each_cache(family, decoded, monkeypatch):
    model, left = model_of(family), padded()
    whole = {"input_ids": left["input_ids"]}
    expected, cls = [tokens(model, inputs) for inputs in (left, whole)], type(model.model.layers[0].self_attn)
    (row,) = rows(patch(model), "attention")
    assert (row.status, row.variant) == ("patched", "latents")
    argsort, sorted_tokens = torch.Tensor.argsort, []
    monkeypatch.setattr(torch.Tensor, "argsort", lambda t, **how: sorted_tokens.append(t) or argsort(t, **how))
    for cache in ("static", None):
        decoded.clear()
        sorted_tokens.clear()
        made = [tokens(model, inputs, cache_implementation=cache) for inputs in (left, whole)]
        assert all(map(torch.equal, made, expected))
        assert len(decoded) == 2 * 2 * (STEPS - 1)  # inputs, layers, and steps behind the prompt
        assert len(sorted_tokens) == STEPS - 1 if cache is None else 2 * (STEPS - 1)  # once for the layers of a step
    unpatch(model)
    assert type(model.model.layers[0].self_attn) is cls


@pytest.mark.parametrize("family", [name for name in SKIPPED if hasattr(transformers, f"{name}ForCausalLM")])
def test_families_that_keep_their_attention(family, decoded):
    """Their reports give the reason, and patching the rest changes no token."""
    model, inputs = model_of(family), {"input_ids": padded()["input_ids"]}
    expected = tokens(model, inputs)
    found = rows(patch(model), "attention")
    assert {row.status for row in found} == {"skipped"}
    assert any(SKIPPED[family][1] in row.reason for row in found)
    assert torch.equal(tokens(model, inputs), expected)
    assert not decoded


def test_beams_and_assistants(decoded):
    """Beams reorder the cache, assistants crop it; steps of several tokens expand it."""
    model, inputs = model_of("DeepseekV3"), {"input_ids": torch.tensor([[5, 6, 7, 5, 6]], device=DEVICE)}
    choices = [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}]
    expected = [tokens(model, inputs, **choice) for choice in choices]
    patch(model)
    assert [torch.equal(tokens(model, inputs, **c), e) for c, e in zip(choices, expected, strict=True)] == [True, True]
    assert decoded


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4MoeLite"])
def test_continuous_batching(family, monkeypatch):
    """The cache holds a latent and rotated features for each token, and no key."""
    model, ids, caches, decode = model_of(family), prompts(3, 41, 17), [], paged.decode

    def noted(module, q, rotated, latents, *args, **options):
        caches.append((rotated, latents))
        return decode(module, q, rotated, latents, *args, **options)

    monkeypatch.setattr(paged, "decode", noted)
    expected, original, sizes = eager(model, ids), copy.deepcopy(model), vars(model.config).copy()
    patch(model)
    made = outputs(model, ids, {"return_logprobs": True})
    assert [output.generated_tokens for output in made] == expected
    assert_exact(original, ids, made)
    for rotated, held in caches:
        assert (rotated.shape[-1], held.shape[-1]) == (8, 16)
        assert rotated.stride(1) == held.stride(1) == 8 + 16
        assert rotated.data_ptr() - held.data_ptr() == 16 * held.element_size()
    assert {name: vars(model.config)[name] for name in sizes} == sizes
    other, inputs = copy.deepcopy(original), batch(DEVICE, length=20)
    patch(other)
    for each in (model, other):  # a training step, after a rollout and without one
        results(each.train(), inputs)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.sub_(parameter.grad * 0.01)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    unpatch(other)
    assert other.config._attn_implementation == "eager"
    assert batched(model, ids) == eager(other.eval(), ids)


def test_continuous_batching_shares_and_copies_pages(monkeypatch):
    """Sequences of one prompt copy its last page; padded batches read no slot that nobody wrote."""
    model, ids, make = model_of("DeepseekV3"), prompts(37, 5), generation._with_our_cache
    expected = eager(model, ids)
    patch(model)

    def poisoned(*args):
        processor = make(*args)
        for layer in range(2):
            for cache in paged._layer_of(processor.cache, layer).caches:
                cache.fill_(torch.nan)
        return processor

    monkeypatch.setattr(generation, "_with_our_cache", poisoned)
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # without a GPU compiled steps are padded
    settings = {"q_padding_interval_size": 16, "kv_padding_interval_size": 32, "varlen_compile_config": CompileConfig()}
    assert batched(model, ids, settings | {"use_async_batching": False}) == expected
    twice, made = options(), []
    twice.num_return_sequences = 2  # transformers refuses it for greedy decoding, in the constructor alone
    start = {"generation_config": twice, "continuous_batching_config": ContinuousBatchingConfig(**SETTINGS)}
    with model.continuous_batching_context_manager(**start, warmup=False) as manager:
        manager.add_requests(ids, max_new_tokens=8)
        while len(made) < 2 * len(ids):
            made.append(manager.get_result(timeout=60).generated_tokens)
    assert sorted(made) == sorted(expected * 2)


def test_continuous_batching_moves_pages_to_the_host(monkeypatch):
    """Where few pages are free, the cache of a sequence goes to the host and comes back."""
    torch.manual_seed(1)
    model, ids, empty, moved = model_of("DeepseekV3"), prompts(3, 41, 17, 33), torch.empty, []
    expected = eager(model, ids, max_new_tokens=20)
    patch(model)
    restore = offloading_manager.OffloadingManager.restore_scheduled_requests

    def noted(self, requests):
        moved.extend(each.state.request_id for each in requests if each.state.is_cpu_offloaded)
        return restore(self, requests)

    def unpinned(*shape, pin_memory=False, **options):
        return empty(*shape, pin_memory=pin_memory and DEVICE == "cuda", **options)

    monkeypatch.setattr(offloading_manager.OffloadingManager, "restore_scheduled_requests", noted)
    monkeypatch.setattr(torch, "empty", unpinned)
    settings = {"num_blocks": 10, "cpu_offload_space": 0.01}
    assert batched(model, ids, settings, options(max_new_tokens=20)) == expected
    assert moved


class Quantised(nn.Linear):
    """Stand-in for a quantised layer: its weight is not the map."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 2)


def hook(model):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out * 2)
    return model


def quantise(model):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Quantised
    return model


def adapt(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False))


def bias(model):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_parameter("bias", nn.Parameter(torch.zeros(4 * (16 + 12))))
    return model


GOT = {
    hook: "an nn.Linear with hooks, or a forward of its own",
    quantise: "test_generation_latents.Quantised",
    adapt: "peft.tuners.lora.layer.Linear",  # its own name is that of nn.Linear
    bias: "an nn.Linear with a bias",
}


@pytest.mark.parametrize("change", GOT)
def test_a_weight_that_is_not_the_whole_map(change, decoded):
    model, inputs = change(model_of("DeepseekV3")), padded()
    expected = tokens(model, inputs)
    (row,) = rows(patch(model), "attention")
    assert row.variant == "expanded latents"
    assert torch.equal(tokens(model, inputs), expected)
    assert not decoded
    got = rf"layers\.0\.self_attn\.kv_b_proj must be an .*; got {re.escape(GOT[change])}$"
    with pytest.raises(ValueError, match=got):
        batched(model, prompts(3))
    assert model.config._attn_implementation == "liger_like"


def test_windows_of_a_cache_without_windows_of_attention(decoded):
    """transformers' own loop keeps as many tokens as ``sliding_window`` says; batches would forget more."""
    model, inputs = model_of("DeepseekV3", sliding_window=4), padded()
    expected = tokens(model, inputs)
    patch(model)
    assert torch.equal(tokens(model, inputs), expected)
    assert decoded
    with pytest.raises(ValueError, match=r"config must have full attention .* layer_types None and sliding_window 4$"):
        batched(model, prompts(3))
    assert model.config._attn_implementation == "liger_like"


def test_calls_that_need_keys(decoded):
    """Attention weights, a mask of the user's and gradients need them; so does another attention than ours."""
    model, inputs = model_of("DeepseekV3"), padded()
    ids = inputs["input_ids"]
    patch(model)
    visible = torch.ones(3, 1, 1, 15, dtype=torch.bool, device=DEVICE)
    visible[:, ..., 3:5] = False
    calls = [({}, True), ({"output_attentions": True}, False), ({"attention_mask": visible}, False)]
    for more, absorbed in calls:
        decoded.clear()
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            model(ids[:, -1:], past_key_values=cache, **more)
        assert bool(decoded) == absorbed
    decoded.clear()
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    model(ids[:, -1:], past_key_values=cache).logits.sum().backward()
    expected = tokens(model, inputs)
    model.set_attn_implementation("eager")
    assert len(decoded) == 2 * (STEPS - 1)
    assert torch.equal(tokens(model, inputs), expected)
    assert len(decoded) == 2 * (STEPS - 1)


def layer():
    """Return a patched attention, and random latents and queries of three sequences of 21 tokens."""
    model = nn.Module()
    model.attention = module = model_of("DeepseekV3").model.layers[0].self_attn
    patch(model)
    held = latents.Latents(*(torch.randn(3, 1, 26, width, device=DEVICE) for width in (16, 8)))
    return module, held, torch.randn(3, 4, 1, 24, device=DEVICE)


@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("hidden", ["nothing", "left", "holes", "all of one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16])
def test_the_kernel(dtype, hidden, room):
    """The comparison rule, with a cache that has ``room`` before the tokens of each sequence.

    A sequence that sees no token returns zeros, in 16 bits and in float64.
    """
    module, held, query = layer()
    held = [t if room else t[:, :, :21] for t in held]
    keep = torch.ones(3, 21, dtype=torch.bool, device=DEVICE)
    if hidden != "nothing":
        keep[0, :6], keep[2, :1] = False, False
    if hidden == "holes":
        keep[1, 4:7] = False
    if hidden == "all of one":
        keep[1] = False
    mask = Mask(right=0, padding=None if hidden == "nothing" else keep)

    def of(last, expanded):
        q = query.to(dtype).to(last)
        cache = latents.Latents(*(t.to(dtype).to(last).contiguous()[:, :, room:] for t in held))
        cast = copy.deepcopy(module).to(dtype).to(last)
        key, value = cache.expanded(cast) if expanded else (cache, None)
        return attend(cast, q, key, value, mask, scaling=module.scaling)[0].double()

    with torch.no_grad():
        exact, same, got = of(torch.float64, True), of(dtype, True), of(dtype, False)
    assert exact.isfinite().all()
    if hidden == "all of one":
        assert exact[1].eq(0).all()
        assert got[1].eq(0).all()
    assert (got - exact).norm() <= 2 * (same - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("part", ["padding", "spans"])
def test_a_mask_that_changes_in_place(part, mode):
    """A layer that gets a mask again, and another layer that gets it changed, read its tensors again."""
    (module, held, query), other = layer(), layer()[0]
    held = latents.Latents(*(t[:, :, :21] for t in held))
    with mode():
        keep = torch.ones(3, 21, dtype=torch.bool, device=DEVICE)
        spans = torch.tensor([0, 21], dtype=torch.int32, device=DEVICE)[:, None, None].repeat(1, 3, 1)
        mask = Mask(padding=keep) if part == "padding" else Mask(spans=spans)
        for change, each in enumerate((module, module, other)):
            keep[:, :change] = False
            spans[0] = change
            if mode is torch.inference_mode and each is other:  # these tensors have no version
                mask = mask._replace(**{part: getattr(mask, part).clone()})
            key, value = held.expanded(each)
            expected = attend(each, query, key, value, mask, scaling=module.scaling)[0]
            torch.testing.assert_close(attend(each, query, held, None, mask, scaling=module.scaling)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["DeepseekV3", "Mistral4"])
def test_logits_with_padding_on_the_left(family):
    """The comparison rule in 16 bits; exact are the logits of each prompt alone, which no padding makes NaN."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    model, inputs = model_of(family).to(dtype), padded()
    ids, keep = inputs["input_ids"], inputs["attention_mask"]
    exact, patched, places = copy.deepcopy(model).double(), copy.deepcopy(model), (keep.cumsum(-1) - 1).clamp(min=0)
    patch(patched)

    def step(model):
        before = {"attention_mask": keep[:, :-1], "position_ids": places[:, :-1]}
        last = {"attention_mask": keep, "position_ids": places[:, -1:]}
        cache = model(ids[:, :-1], **before, use_cache=True).past_key_values
        return model(ids[:, -1:], **last, past_key_values=cache).logits[:, -1].double()

    alone = torch.cat([exact(row[seen.bool()][None]).logits[:, -1] for row, seen in zip(ids, keep, strict=True)])
    same, got = step(model), step(patched)
    assert (got - alone).norm() <= 2 * (same - alone).norm() + 1e-6 * alone.norm()


@torch.no_grad()
@pytest.mark.parametrize(("rows", "rooms"), [(1, (26, 40)), (3, (26, 40)), (3, (30, 30))])
def test_rooms_of_caches(rows, rooms):
    """Caches of one sequence, and those whose latents and rotated features have other strides, are read as they are."""
    module, held, query = layer()
    held = latents.Latents(*(nn.functional.pad(t[:rows], (0, 0, 0, n - 26)) for t, n in zip(held, rooms, strict=True)))
    held = latents.Latents(*(t[:, :, :26] for t in held))
    keep = torch.ones(rows, 26, dtype=torch.bool, device=DEVICE)
    keep[0, :4] = False
    mask, key, value = Mask(right=0, padding=keep), *held.expanded(module)
    expected = attend(module, query[:rows], key, value, mask, scaling=module.scaling)[0]
    torch.testing.assert_close(attend(module, query[:rows], held, None, mask, scaling=module.scaling)[0], expected)


@torch.no_grad()
def test_compiled_in_one_graph(decoded, monkeypatch):
    """A static cache: its padding is known on the device alone, and its strides may be others when Inductor runs."""
    (module, held, query), codes = layer(), []
    keep, ends = torch.ones(3, 26, dtype=torch.bool, device=DEVICE), torch.full((3, 1), 21, device=DEVICE)
    keep[1, :4] = False
    mask = Mask(spans=torch.stack((ends * 0, ends)).int(), padding=keep)

    def step(query, *held):
        return attend(module, query, *module.expand_kv(*held), mask, scaling=module.scaling)[0]

    def noted(graph, inputs):
        codes.append(graph.code)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(step, backend=noted, fullgraph=True)
    assert torch.equal(compiled(query, *held), step(query, *held))
    assert len(decoded) == 2
    assert "as_strided" not in codes[0]
    monkeypatch.setattr(attention, "decode_seen", latents.decode_seen)  # the list that grows would compile again
    compiled(query, *held)
    step(query, *held)
    with torch._dynamo.config.patch(error_on_recompile=True):  # an eager step keeps what it saw
        compiled(query, *held)


def test_copies_pickles_and_later_patches(decoded):
    model, inputs, file = model_of("DeepseekV3"), padded(), io.BytesIO()
    cls = type(model.model.layers[0].self_attn)
    patch(model, rope=False)
    expected = tokens(model, inputs)
    torch.save(model, file)
    file.seek(0)
    patch(model)
    for other in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        decoded.clear()
        assert torch.equal(tokens(other, inputs), expected)
        assert decoded
        unpatch(other)
        assert type(other.model.layers[0].self_attn) is cls
