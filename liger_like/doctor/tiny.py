"""Build tiny models of any transformers class from the names of its config's fields, and inputs for them."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.doctor.images import images_for

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, LAYERS, EXPERTS = 128, 4, 2, 32, 96, 128, 2, 4
WORDS = 90  # words have the ids 3 to 89; special tokens have ids at the end of the vocabulary
# pattern of a field's name -> its size; the first match applies, and no field grows
SIZES = {
    r"(num_)?(encoder_|decoder_|audio_)?(num_)?(hidden_)?layers|n_layers?|depth|num_blocks": LAYERS,
    r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers": 0,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"linear_num_key_heads|index_n_heads": 2,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_head": HEAD,
    r"(\w+_)?heads?|(\w+_)?num_\w*heads": HEADS,
    r"qk_head_dim": 2 * HEAD,
    r"rotary_dim": HEAD // 2,
    r"(\w+_)?head_dim|d_kv|dim_head|d_head|mamba_headdim|(kv|q|o)_lora_rank|kv_channels": HEAD,
    r"mamba_d_ssm": 2 * HIDDEN,
    r"\w*(ffn|feed_?forward|intermediate|inner|mlp)\w*(dim|size)\w*|d_ff|n_inner": INNER,
    r"(\w+_)?(hidden_size|hidden_dim|d_model|embed_dim|n_embd|projection_dim|embedding_size|word_embed_proj_dim)|"
    r"hidden_size_\w+|dim|embedding_dim|condition_dim|(vision_)?output_dim|attention_dim|lru_width": HIDDEN,
    r"(\w+_)?vocab(ulary)?(_size(_\w+)?)?|codebook_size|num_embeddings": VOCABULARY,
    r"\w*experts_per_tok\w*|moe_topk?|moe_k|top_?k_experts|num_selected_experts|num_experts_per_\w+": 2,
    r"n_shared_experts|\w*num_shared_experts": 1,
    r"(\w+_)?experts|moe_num_experts|num_local_experts": EXPERTS,
    r"n_groups?|num_expert_group": 2,
    r"topk_group": 1,
    r"max_position_embeddings|n_positions|max_(source|target)_positions|max_sequence_length": 64,
    r"(\w+_)?sliding_window(_size)?|attention_chunk_size|local_attention_window": 5,
    r"(\w+_)?(chunk_size|block_size)": 16,
    r"(\w+_)?(state_size|d_state|time_step_rank|dt_rank|num_mel_bins|laurel_rank)": 16,
    r"image_size": 32,
    r"patch_size": 8,
    r"num_position_embeddings": 16,
    r"index_topk": 4,
}  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer")
MISSING = {
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
}
# values that no rule by name gives; the code that reads mrope's sections, and some ids, has defaults of its own
WIDE = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
MROPE = {"text_config": {"rope_parameters": {"mrope_section": [6, 5, 5]}}}
COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
HALVES = {"image_grid_pinpoints": [[32, 64]]}
SIDES = {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        "image_token_offset": VOCABULARY,
        "audio_token_offset": 2 * VOCABULARY,
        "text_config": {"vocab_size": 3 * VOCABULARY},
        "audio_config": {"codebook_dim": HIDDEN},
    },
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {16: 4}},
    "CohereCompassForCausalLM": COMPASS,
    "CohereCompassForConditionalGeneration": {"text_config": COMPASS},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "DoryForCausalLM": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Dots3NoteForCausalLM": {"head_dim": 2 * HEAD},
    "FalconH1ForCausalLM": {"mamba_d_head": HEAD, "mlp_multipliers": [0.5, 2.0]},
    "Florence2ForConditionalGeneration": {"vision_config": {"depths": [1, 1, 1, 1]}},  # depth amplifies rounding
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
    "Gemma4ForConditionalGeneration": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        }
    },
    "Glm46VForConditionalGeneration": MROPE,
    "Glm4vForConditionalGeneration": MROPE,
    "Glm4vMoeForConditionalGeneration": {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
    "GlmOcrForConditionalGeneration": MROPE,
    "InternVLForConditionalGeneration": SIDES,
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 120},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2VlForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Llama4ForConditionalGeneration": {
        "vision_config": {
            "intermediate_size": 4 * HIDDEN,
            "projector_input_dim": HIDDEN,
            "projector_output_dim": HIDDEN,
            "vision_output_dim": HIDDEN,
        }
    },
    "LlavaNextForConditionalGeneration": HALVES,
    "LlavaNextVideoForConditionalGeneration": HALVES,
    "LlavaOnevisionForConditionalGeneration": HALVES,
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Mistral4ForCausalLM": {"head_dim": 2 * HEAD},
    "PaddleOCRVLForConditionalGeneration": MROPE,
    "QianfanOCRForConditionalGeneration": SIDES,
    "Qwen2VLForConditionalGeneration": MROPE,
    "Qwen2_5OmniThinkerForConditionalGeneration": {**MROPE, "vision_start_token_id": 100},
    "Qwen2_5_VLForConditionalGeneration": MROPE,
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 100},
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXER},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {
        **WIDE,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "Zamba2ForCausalLM": {
        **WIDE,
        "mamba_headdim": 2 * HEAD,
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
    },
}


DROPOUT = "dropout|drop$|drop_rate|drop_path|layerdrop|jitter|pdrop"


def shrunk(fields: dict[str, Any], tokens: dict[str, int], outer: dict[str, Any]) -> dict[str, Any]:
    """Return a config's fields with small sizes, no dropout and special tokens inside the small vocabulary.

    ``tokens`` collects the ids of the special tokens. ``outer``: the integer fields of the enclosing config.
    """
    known = outer | {name: value for name, value in fields.items() if isinstance(value, int)}
    small = {name: shrunk_field(name, value, known, tokens) for name, value in fields.items()}
    few = few_layers(fields)
    special = {i: shrunk(part, tokens, known) for i, part in few.get("per_layer_config", {}).items()}
    return small | few | ({"per_layer_config": special} if special else {})


def few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields that list or count the layers, cut to the layers of ``kept_layers``."""
    layers = next((name for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    if layers is None:
        return {}
    kept = kept_layers(fields, fields[layers])
    few: dict[str, Any] = {layers: len(kept)}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == fields[layers]:
            few[name] = [value[i] for i in kept]
        elif name == "per_layer_config" and value:
            few[name] = {kept.index(int(i)): value[i] for i in value if int(i) in kept}
    return few


def with_few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return all fields of a config and its sub-configs in real size, with the first layer of each kind."""
    parts = {name: with_few_layers(part) for name, part in fields.items() if isinstance(part, dict)}
    return fields | parts | few_layers(fields)


def kept_layers(fields: dict[str, Any], layers: int) -> list[int]:
    """Return the indices of the first layer of each kind, at most 4 kinds, and of others up to LAYERS in total."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == layers]
    special = {int(i): value for i, value in (fields.get("per_layer_config") or {}).items()}
    kinds = [str([special.get(i), *(values[i] for values in lists)]) for i in range(layers)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:4]
    others = [i for i in range(layers) if i not in first]
    return sorted([*first, *others[: max(0, LAYERS - len(first))]])


def shrunk_field(name: str, value: Any, known: dict[str, Any], tokens: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return shrunk(value, tokens, known) if all(isinstance(key, str) for key in value) else value
    if value is None:
        return MISSING.get(name)
    if name == "eos_token_id":
        return 2
    if name in ("mrope_section", "short_factor", "long_factor"):  # lists whose length or sum depends on the head size
        head = known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]
        if name != "mrope_section":
            return value[: len(value) * HEAD // head]
        rotary = sum(value) * HEAD // head
        return [rotary - rotary // 3 * 2, rotary // 3, rotary // 3]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if re.search(DROPOUT, name):
        return type(value)(0)
    if name in ("pad_token_id", "bos_token_id"):
        return ("pad_token_id", "bos_token_id").index(name)
    if re.search("token_(id|index)$", name):
        return tokens.setdefault(name, VOCABULARY - 1 - len(tokens))
    if re.fullmatch(r"(\w+_)?(num_key_value_heads|kv_heads|num_kv_heads)", name):
        heads = next((n for key, n in known.items() if re.fullmatch("(num_attention_|num_|n_)heads?", key)), value)
        return HEADS if value == heads else min(KV_HEADS, value)
    if value == 1 and isinstance(value, float) and re.search("multiplier|logits?_scal", name):
        return 0.5  # a factor of 1 would hide a patch that leaves the factor out
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
    return value if size is None or isinstance(value, float) else min(value, size)


def merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` updated by ``others``, recursively."""
    parts = {name: merged(fields.get(name) or {}, part) for name, part in others.items() if isinstance(part, dict)}
    return fields | others | parts


def dropouts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the dropout rates of a config and its sub-configs."""
    parts = {name: dropouts(part) for name, part in fields.items() if isinstance(part, dict)}
    rates = {name: rate for name, rate in fields.items() if isinstance(rate, float) and re.search(DROPOUT, name)}
    return rates | {name: part for name, part in parts.items() if part}


def build(cls: Any, config: Any, dropout: bool = False) -> nn.Module:
    """Return a tiny fp32 model of class ``cls`` in training mode, with random parameters.

    It uses eager attention, which a patched model reproduces; SDPA ignores options that it lacks, such as softcap.
    ``dropout``: keep the config's dropout rates.
    """
    torch.manual_seed(0)
    fields = merged(shrunk(config.to_dict(), {}, {}), OVERRIDES.get(cls.__name__, {}))
    fields = merged(fields, dropouts(config.to_dict())) if dropout else fields
    small = type(config).from_dict(fields)
    small.use_cache = False
    model: nn.Module = cls._from_config(small, attn_implementation="eager").float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model if dropout else without_dropout(model)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set the rate of each Dropout module of ``model`` to 0, in place, and return ``model``."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of two rows of words: first with each image layout that ``model`` may take, last without.

    The last inputs have images or sounds if the forward requires them. Padding sits in the middle of the second row: at
    the start some queries would see no key, and at the end no token would see the padding.
    """
    torch.manual_seed(1)
    ids = torch.randint(3, WORDS, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 2:4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :2] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.roll(1, dims=1)
    taken = inspect.signature(model.forward).parameters
    for images, words in images_for(model):
        yield {**with_words(inputs, words, model.config, {*taken}), **images}
    if "pixel_values" in taken and taken["pixel_values"].default is inspect.Parameter.empty:
        inputs["pixel_values"] = torch.randn(2, 3, SIZES["image_size"], SIZES["image_size"])
    if model.config.model_type == "whisper" and "input_features" in taken:
        config = model.config
        inputs["input_features"] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        del inputs["input_ids"], inputs["attention_mask"]
    yield inputs


def with_words(inputs: dict[str, Tensor], count: int, config: Any, taken: set[str]) -> dict[str, Tensor]:
    """Return ``inputs`` with ``count`` image tokens inserted into each row."""
    fill = {"input_ids": config.image_token_id, "attention_mask": 1, "labels": -100, "is_image": 1}
    decoded = {"labels", "decoder_input_ids"} if config.is_encoder_decoder else set()
    parts = {**inputs, "is_image": torch.zeros_like(inputs["input_ids"])}
    longer = {
        name: t if name in decoded else torch.cat((t[:, :5], t.new_full((len(t), count), fill[name]), t[:, 5:]), dim=1)
        for name, t in parts.items()
    }
    kinds = longer.pop("is_image")
    return longer | {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in taken}


def results(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss, the logits of a call without labels, and every gradient by parameter name."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**inputs).loss
    loss.backward()
    torch.manual_seed(2)
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


def first_that_run(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the first inputs with which ``model`` runs, and its results. Raises as the model does on the last ones."""
    *others, last = ({name: t.to(model.device) for name, t in inputs.items()} for inputs in inputs_of(model))
    for inputs in others:
        try:
            return inputs, results(model, inputs)
        except Exception:  # the model expects another image layout
            continue
    return last, results(model, last)
