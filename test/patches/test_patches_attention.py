"""Attention through transformers' interface: what patched models compute, and that nothing else changes."""

import copy
import pickle

import pytest
import torch
import transformers
from tiny_models import ATTENTION, assert_exact, batch, results, rows, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import liger_like.patching
from liger_like.patches import attention
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
OTHERS = {"norm": False, "rope": False, "mlp": False, "loss": False}


@pytest.fixture(autouse=True)
def _finite_masks(monkeypatch):
    """In float64, eager attention hides keys by a number that its softmax in fp32 takes for -inf: then a query that
    sees no key gives NaN."""

    def eager_mask(**options):
        return masking_utils.eager_mask(**options | {"dtype": torch.float32})

    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, "eager", eager_mask)


def pair(family, device, **config):
    """A model whose attention is patched, and its eager twin."""
    original = tiny(family, device, **ATTENTION[family] | {"attn_implementation": "eager"} | config)
    patched = copy.deepcopy(original)
    patch(patched, strict=True, **OTHERS)
    return patched, original


def masked(inputs, columns):
    """Return a batch with these columns of the first row as padding."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, columns] = 0
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def packed(inputs, *lengths):
    """Return a batch of documents of these lengths."""
    positions = torch.cat([torch.arange(n) for n in lengths]).to(inputs["input_ids"].device)
    return {**inputs, "position_ids": positions.expand(len(inputs["input_ids"]), -1), "use_cache": False}


def first_row(inputs):
    return {name: t[:1] for name, t in inputs.items()}


def with_lengths(inputs, *lengths):
    """The keywords that say what the positions also tell."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(inputs["input_ids"].device)
    lengths = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return inputs | {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens} | lengths


BATCHES = {
    "no mask": lambda inputs: inputs,
    "right padding": lambda inputs: masked(inputs, slice(9, None)),
    "left padding": lambda inputs: masked(inputs, slice(3)),
    "packed": lambda inputs: packed(first_row(inputs), 8, 4),
    "cu_seq_lens": lambda inputs: with_lengths(packed(first_row(inputs), 8, 4), 8, 4),
}


# transformers finds no documents in the positions of GPT-OSS: it must be told where they start
PAIRS = [(family, given) for family in ATTENTION for given in BATCHES if (family, given) != ("GptOss", "cu_seq_lens")]


@pytest.mark.parametrize(("family", "given"), PAIRS)
def test_loss_logits_and_gradients_are_those_of_eager_attention(family, given, device):
    patched, original = pair(family, device)
    inputs = BATCHES[given](batch(device))
    assert_exact(patched, original, inputs, k=2)
    with torch.no_grad():
        got, same, exact = (m(**inputs).logits for m in (patched, original, copy.deepcopy(original).double()))
    if "attention_mask" in inputs:  # the outputs of padding are not defined
        got, same, exact = (t[inputs["attention_mask"].bool()] for t in (got, same, exact))
    assert (got - exact).norm() <= 2 * (same - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("family", "say", "rows"),
    [("Mistral", packed, 2), ("Mistral", with_lengths, 2), ("GptOss", with_lengths, 1)],
)
def test_documents_do_not_see_one_another(family, say, rows, device):
    patched, _ = pair(family, device)
    ids = batch(device, rows)["input_ids"]
    given = packed({"input_ids": ids}, 7, 5)
    if say is with_lengths:  # transformers reads the positions only without a cache
        given = with_lengths(given, *[7, 5] * rows) | {"use_cache": True}
    with torch.no_grad():
        logits = patched(**given).logits
        torch.testing.assert_close(logits[:, :7], patched(ids[:, :7]).logits)
        torch.testing.assert_close(logits[:, 7:], patched(ids[:, 7:]).logits)


@pytest.mark.parametrize("family", ATTENTION)
def test_every_attention_is_patched_beside_the_rest(family, device):
    model = tiny(family, device)
    found = rows(patch(model), "attention")
    assert [row.status for row in found] == ["patched"] * len(found)
    assert sum(row.count for row in found) == 2
    assert {row.status for row in rows(patch(model), "attention")} == {"already patched"}
    inputs = masked(batch(device), slice(9, None))
    assert_exact(model, tiny_twin(model), inputs, k=2)


def tiny_twin(model):
    twin = copy.deepcopy(model)
    unpatch(twin)
    twin.set_attn_implementation("eager")
    return twin


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_generate(family, cache, device):
    patched, original = pair(family, device)
    given = masked(batch(device, length=7), slice(2))
    del given["labels"]
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    got, expected = (model.eval().generate(**given, **options) for model in (patched, original))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits)


def test_continuing_from_a_cache(device):
    """Several queries behind a past, of which the window has dropped a part."""
    for family in ("Llama", "Mistral"):
        patched, original = (model.eval() for model in pair(family, device))
        ids = batch(device)["input_ids"]
        logits = []
        for model in (patched, original):
            past = model(ids[:, :8], use_cache=True).past_key_values
            logits.append(model(ids[:, 8:], past_key_values=past).logits)
        torch.testing.assert_close(*logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    patched, original = pair("Mistral", device)
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    assert_exact(patched, original, masked(batch(device), slice(3)), k=2)


def test_autocast(device):
    """The norms of queries and keys leave them in fp32, beside values in fp16."""
    patched, original = pair("Qwen3", device)
    inputs = {**batch(device), "use_cache": False}
    with torch.autocast(device, torch.float16):
        got, expected = results(patched, inputs), results(original, inputs)
    for name, t in expected.items():
        assert (got[name] - t).norm() <= 8 * torch.finfo(torch.float16).eps * t.norm(), name


def test_masks_that_are_given_are_used(device):
    """Masks of 4 dimensions, bool or additive."""
    patched, original = pair("Llama", device)
    inputs = batch(device)
    seen = torch.ones(2, 1, 12, 12, dtype=torch.bool, device=device).tril()
    seen[:, :, 8:, 2:5] = False
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, -1e9)
    with torch.no_grad():
        expected = original(**inputs, attention_mask=added).logits
        assert not torch.allclose(expected, original(**inputs).logits)
        for mask in (seen, added):
            torch.testing.assert_close(patched(**inputs, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("change", ["attention weights", "dropout"])
@pytest.mark.parametrize("given", ["left padding", "cu_seq_lens"])
def test_what_the_kernels_lack_is_computed_by_eager_attention(given, change, device):
    patched, original = pair("Mistral", device)
    inputs = BATCHES[given](batch(device))
    outputs = []
    for model in (patched, original):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5 if change == "dropout" else 0.0
        torch.manual_seed(1)
        outputs.append(model(**inputs, output_attentions=change == "attention weights"))
    for name in ("loss", "attentions"):
        torch.testing.assert_close(*(output.get(name) for output in outputs))


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float16)])
def test_a_mask_in_a_narrower_dtype_than_the_queries(dtypes, device):
    """The family's eager function gets finite numbers in both dtypes, and a row that sees no key gets no NaN."""
    module = tiny("Llama", device).model.layers[0].self_attn
    q, k, v = torch.randn(3, 2, 4, 5, 16, dtype=dtypes[0], device=device)
    mask = torch.zeros(2, 1, 5, 5, dtype=dtypes[1], device=device)
    mask[0, :, 1], mask[1, ..., 3:] = -torch.inf, -torch.inf
    module.num_key_value_groups = 1
    out, weights = attention.attend(module, q, k, v, mask, scaling=0.25, output_attentions=True)
    assert not out.isnan().any()
    assert (weights[1, ..., 3:] == 0).all()
    same = attention.attend(module, q, k, v, mask, scaling=0.25)[0]  # its dtype, too
    torch.testing.assert_close(out[:, [0, 2, 3, 4]], same[:, [0, 2, 3, 4]])


def refuse(family, reason, device, **config):
    """The report of a model whose attention is left alone."""
    model = tiny(family, device, **config)
    before = model.config
    with pytest.warns(UserWarning, match="runs (a|no) kernel"):
        report = patch(model, **OTHERS)
    (row,) = rows(report, "attention")
    assert (row.status, model.config is before) == ("skipped", True)
    assert reason in row.reason


def test_attention_that_the_kernels_cannot_be_is_left_alone_and_reported(device):
    refuse("Llama", "its attention has dropout, 0.1", device, attention_dropout=0.1)
    refuse("Llama", "asks for attention weights", device, attn_implementation="eager", output_attentions=True)
    refuse("Bloom", "BloomAttention.forward has no eager_attention_forward", device, n_head=4, hidden_dropout=0.0)


def test_attention_with_a_bias_of_its_family_is_left_alone_and_reported(device):
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 11,
        "dropout_rate": 0.0,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).to(device)
    found = rows(patch(model), "attention")
    assert {row.status for row in found} == {"skipped"}
    assert "position_bias" in found[0].reason


def test_modules_of_one_config_are_patched_together_or_not_at_all(device):
    model = tiny("Llama", device)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.warns(UserWarning, match="its attention has dropout"):
        report = patch(model)
    first, second = rows(report, "attention")
    assert first.status == second.status == "skipped"
    assert first.reason == "shares its config with LlamaAttention"
    assert model.config._attn_implementation == "sdpa"


def wrong(change):
    """attend, with a change of its arguments."""
    right = attention.attend
    return lambda *args, **options: right(*args[:4], *change(options, *args[4:]), **options)


WRONG = {
    "scale": lambda options, mask: (options.update(scaling=options["scaling"] * 1.01), mask)[1:],
    "softcap": lambda options, mask: (options.pop("softcap"), mask)[1:],
    "sinks": lambda options, mask: (options.pop("s_aux"), mask)[1:],
    "window": lambda options, mask: (mask._replace(left=mask.left + 1),),
    "padding": lambda options, mask: (mask._replace(padding=None),),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_replacement_is_refused(mistake, device, monkeypatch):
    model = tiny({"softcap": "Gemma2", "sinks": "GptOss"}.get(mistake, "Llama"), device)
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    monkeypatch.setattr(attention, "attend", wrong(WRONG[mistake]))
    (row,) = rows(patch(model), "attention")
    assert row.status == "skipped"
    assert "differs by" in row.reason


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_numeric_verification(family, device):
    model = tiny(family, device, **ATTENTION[family])
    (row,) = rows(patch(model, verify="numeric", **OTHERS), "attention")
    assert 0 < row.error < 1e-6


def test_a_config_that_models_share_stays_as_it_is(device):
    teacher = tiny("Llama", device)
    config, before = teacher.config, dict(vars(teacher.config))
    student = transformers.LlamaForCausalLM(config).to(device)
    patch(student, strict=True)
    assert vars(config) == before
    assert teacher.config is config
    assert (student.config._attn_implementation, config._attn_implementation) == ("liger_like", "sdpa")
    student.config.use_cache = False  # a change of either config still reaches the other
    assert config.use_cache is False
    assert isinstance(student.config, transformers.LlamaConfig)
    unpatch(student)
    assert all(module.config is config for module in student.modules() if hasattr(module, "config"))
    assert vars(config) == before | {"use_cache": False}


def test_a_user_may_choose_another_implementation_and_come_back(device):
    model = tiny("Llama", device)
    config = model.config
    patch(model)
    model.set_attn_implementation("eager")
    assert (model.config._attn_implementation, config._attn_implementation) == ("eager", "eager")
    assert rows(patch(model), "attention")[0].status == "patched"
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"liger_like"}
    unpatch(model)
    assert (model.config, config._attn_implementation) == (config, "eager")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_patched_model(copied, device):
    model = tiny("Llama", device)
    patch(model)
    twin = copied(model)
    assert twin.config is twin.model.layers[0].self_attn.config
    assert twin.config._attn_implementation == "liger_like"
    twin.config.use_cache = False
    unpatch(twin)
    assert (twin.config._attn_implementation, twin.config.use_cache) == ("sdpa", False)
    assert type(twin.config) is transformers.LlamaConfig
    assert (model.config._attn_implementation, model.config.use_cache) == ("liger_like", True)


def llava(device):
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=tiny("Llama").config.to_dict(),
        vision_config={**vision, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"},
        image_token_index=99,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).to(device)


def test_parts_of_a_config_have_their_own_implementation(device, tmp_path):
    model = llava(device)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    original, config, written = copy.deepcopy(model), model.config, model.config.to_json_string()
    assert [row.count for row in rows(patch(model), "attention")] == [1, 2]
    assert model.config.to_json_string() == written
    parts = (model.config, model.config.text_config, model.config.vision_config, model.config.get_text_config())
    assert {part._attn_implementation for part in parts} == {"liger_like"}
    inputs = {"input_ids": torch.tensor([[5, 99, 99, 99, 99, 6, 7]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    inputs = {name: t.to(device) for name, t in inputs.items()}
    torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits)
    model.save_pretrained(tmp_path)
    assert "liger_like" not in (tmp_path / "config.json").read_text()
    unpatch(model)
    assert model.config is config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == ("eager", "sdpa")


def test_paged_caches_are_refused(device):
    """A cache of pages adds itself to the keywords of attention."""
    module = tiny("Llama", device).model.layers[0].self_attn
    with pytest.raises(TypeError, match="takes no cache: unpatch"):
        attention.attend(module, *torch.randn(3, 1, 4, 3, 8, device=device), cache=object())


def test_padding_comes_before_documents(device):
    patched, _ = pair("Llama", device)
    inputs = masked(batch(device), slice(3))
    with torch.no_grad():
        got, expected = (patched(**given).logits for given in (with_lengths(inputs, *[6] * 4), inputs))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}], ids=str)
def test_queries_that_see_no_key(options, device):
    module = tiny("Llama", device).model.layers[0].self_attn
    q, k, v = (torch.randn(2, h, 6, 8, device=device) for h in (4, 2, 2))
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril(-1)[None, None]
    out, weights = attention.attend(module, q, k, v, mask, scaling=0.3, **options)
    expected, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=0.3)
    torch.testing.assert_close(out[:, 1:], expected[:, 1:])
    assert out.isfinite().all()
    assert (weights is not None) == bool(options)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("queries", [1, 4])
def test_without_a_mask_attention_is_that_of_sdpa(queries, is_causal, device):
    module = tiny("Llama", device).model.layers[0].self_attn
    q, k, v = (torch.randn(2, h, n, 8, device=device) for h, n in ((4, queries), (2, 6), (2, 6)))
    got, expected = (
        function(module, q, k, v, None, scaling=0.3, is_causal=is_causal)[0]
        for function in (attention.attend, sdpa_attention_forward)
    )
    torch.testing.assert_close(got, expected)


HYBRIDS = {
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8, "lru_width": 32},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_generation_of_a_left_padded_batch_by_a_hybrid_model(family, device):
    """Its first layer has no keys. Without a cache, the unpatched model has no wrong length to make its mask of."""
    original = tiny(family, device, **HYBRIDS[family]).eval()
    model = copy.deepcopy(original)
    assert rows(patch(model), "attention")[-1].status == "patched"
    ids = batch(device, length=7)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    got, expected = (m.generate(ids, max_new_tokens=6, use_cache=m is model, **options) for m in (model, original))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)


class Kernels(TorchDispatchMode):
    """Names of the ops that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("B", "kernels"), [(1, 5), (2, 8)])
def test_spans_of_documents(B, kernels, dtype):
    """Every layer makes them again, so of few kernels. The last two rows belong to no document and see no key."""
    S, Sk = 10 // B, 14 // B
    offsets_q, offsets_k = [0, 3, 3, 5, 8], [0, 4, 6, 7, 12]
    cu_q, cu_k = (torch.tensor(offsets, dtype=dtype) for offsets in (offsets_q, offsets_k))
    query, key = torch.empty(B, 1, S, 8), torch.empty(B, 1, Sk, 8)
    with Kernels() as counted:
        starts, ends = attention._within_documents(None, query, key, cu_q, cu_k)
    assert starts.dtype == ends.dtype == torch.int32
    assert starts.shape == ends.shape == (B, S)
    assert (torch.stack((starts, ends)).diff() >= 0).all()
    assert len(counted.names) <= kernels, counted.names
    for row, (start, end) in enumerate(zip(starts.flatten().tolist(), ends.flatten().tolist(), strict=True)):
        first = row // S * Sk
        found = [i for i in range(4) if offsets_q[i] <= row < offsets_q[i + 1]]
        seen = [j - first for i in found for j in range(offsets_k[i], offsets_k[i + 1])]
        assert list(range(start, end)) == seen
