"""What ``patch`` does to every ``*ForCausalLM`` and ``*ForConditionalGeneration`` of the installed transformers.

    python -m benchmark.coverage [--only NAME ...] [--json FILE] [--report]

Each class is built tiny from its default config, never downloaded, and runs unpatched and patched, in fp32 on the CPU, where ops are their
references: what is tested is the patching. Loss, logits and every gradient are compared. Each class has a process and a time of its own.
"""

import argparse
import ast
import concurrent.futures
import functools
import inspect
import json
import multiprocessing
import re
import resource
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import liger_like

SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")
SECONDS, BYTES, PROCESSES = 120, 8 * 2**30, 2
HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, LAYERS, EXPERTS = 128, 4, 2, 32, 96, 128, 2, 4
WORDS = 90  # ids from 3 on are words, those of special tokens come from the end of the vocabulary
# sizes by the name of a field, the first that matches; no field grows
SIZES = {
    r"(num_)?(encoder_|decoder_|audio_)?(num_)?(hidden_)?layers|n_layers?|depth|num_blocks|num_(de|en)coder_layers": LAYERS,
    r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers": 0,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"linear_num_key_heads|index_n_heads": 2,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_head": HEAD,
    r"(\w+_)?heads?|(\w+_)?num_\w*heads": HEADS,
    r"qk_head_dim": 2 * HEAD,
    r"rotary_dim": HEAD // 2,
    r"(\w+_)?head_dim|d_kv|dim_head|d_head|mamba_d_head|mamba_headdim|(kv|q|o)_lora_rank|kv_channels": HEAD,
    r"mamba_d_ssm": 2 * HIDDEN,
    r"\w*(ffn|feed_?forward|intermediate|inner|mlp)\w*(dim|size)\w*|d_ff|n_inner": INNER,
    r"(\w+_)?(hidden_size|hidden_dim|d_model|embed_dim|n_embd|projection_dim|embedding_size|word_embed_proj_dim)|"
    r"hidden_size_\w+|dim|embedding_dim|condition_dim|(vision_)?output_dim|attention_dim|lru_width": HIDDEN,
    r"(\w+_)?vocab(ulary)?_size(_\w+)?|codebook_size|num_embeddings": VOCABULARY,
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
# what no rule by name gives
WIDE = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD}
OVERRIDES: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "FalconH1ForCausalLM": {"mamba_d_head": HEAD, "mlp_multipliers": [0.5, 2.0]},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "Dots3NoteForCausalLM": {"per_layer_config": {2: {"head_dim": 2 * HEAD}}},
    "Mistral4ForCausalLM": {"head_dim": 2 * HEAD},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Mamba2ForCausalLM": {"num_heads": 8},
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
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}

ROUNDING, GRADIENT, FLOOR = 1e-5, 1e-4, 1e-7


def names() -> list[str]:
    """The classes of the auto-model mappings."""
    mappings = [mapping for name, mapping in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found = [cls for mapping in mappings for cls in mapping.values()]
    flat = {name for cls in found for name in ((cls,) if isinstance(cls, str) else cls)}
    return sorted(name for name in flat if name.endswith(SUFFIXES))


def shrunk(fields: dict[str, Any], tokens: dict[str, int], outer: dict[str, Any] = {}) -> dict[str, Any]:
    """A config's fields with small sizes, no dropout and special tokens within the vocabulary."""
    known = outer | {name: value for name, value in fields.items() if isinstance(value, int)}
    layers = next((fields[name] for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    kept = [] if layers is None else kept_layers(fields, layers)
    small = {name: shrunk_field(name, value, known, tokens) for name, value in fields.items()}
    for name, value in fields.items():
        if kept and name in LAYER_COUNTS:
            small[name] = len(kept)
        elif kept and isinstance(value, list) and len(value) == layers:
            small[name] = [value[i] for i in kept]
        elif kept and name == "per_layer_config" and value:
            small[name] = {kept.index(int(i)): small[name][i] for i in value if int(i) in kept}
    return small


def kept_layers(fields: dict[str, Any], layers: int) -> list[int]:
    """The first layer of each kind, LAYERS or more in all."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == layers]
    special = fields.get("per_layer_config") or {}
    kinds = [str([*[values[i] for values in lists], special.get(i, special.get(str(i)))]) for i in range(layers)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:4]
    return sorted({*first, *[i for i in range(layers) if i not in first][: max(0, LAYERS - len(first))]})


def shrunk_field(name: str, value: Any, known: dict[str, Any], tokens: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return value if name in ("id2label", "label2id") else shrunk(value, tokens, known)
    if value is None:
        return MISSING.get(name)
    if name == "mrope_section":
        head = known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]
        rotary = sum(value) * HEAD // head
        return [rotary - rotary // 3 * 2, rotary // 3, rotary // 3]
    if name == "eos_token_id":
        return 2
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if re.search("dropout|drop$|drop_rate|drop_path|layerdrop|jitter|pdrop", name):
        return type(value)(0)
    if name in ("pad_token_id", "bos_token_id"):
        return ("pad_token_id", "bos_token_id").index(name)
    if re.search("token_(id|index)$", name):
        return tokens.setdefault(name, VOCABULARY - 1 - len(tokens))
    if re.fullmatch(r"(\w+_)?(num_key_value_heads|kv_heads|num_kv_heads)", name):
        heads = next((n for k, n in known.items() if re.fullmatch(r"(num_attention_|num_|n_)heads?", k)), value)
        return HEADS if value == heads else min(KV_HEADS, value)
    if value == 1 and isinstance(value, float) and re.search("multiplier|logits?_scal", name):
        return 0.5
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
    return value if size is None or not isinstance(value, int) else min(value, size)


def merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """``fields``, with ``others`` in place of those of their names, part by part."""
    parts = {name: merged(fields.get(name) or {}, part) for name, part in others.items() if isinstance(part, dict)}
    return fields | others | parts


def build(name: str) -> nn.Module:
    """A tiny model in training mode, without dropout; weights of norms and biases are random, too."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class.from_dict(merged(shrunk(cls.config_class().to_dict(), {}), OVERRIDES.get(name, {})))
    config.use_cache = False
    model = cls._from_config(config, attn_implementation="eager").float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Two rows of words, the second padded."""
    torch.manual_seed(1)
    ids = torch.randint(3, WORDS, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :2] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.roll(1, dims=1)
    taken = inspect.signature(model.forward).parameters
    if "pixel_values" in taken and taken["pixel_values"].default is inspect.Parameter.empty:
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32)
    return inputs


def results(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and logits, the latter of a call without labels, and every gradient."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**inputs).loss
    loss.backward()
    torch.manual_seed(2)
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    if logits.shape[:2] == inputs["attention_mask"].shape:  # what padding gives is of no meaning
        logits = logits[inputs["attention_mask"].bool()]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What differs by more than rounding."""
    if got.keys() != expected.keys():
        return [f"gradients of {sorted(got.keys() ^ expected.keys())} in one of the two"]
    everything = torch.stack([g.norm() for name, g in expected.items() if name not in ("loss", "logits")]).norm()
    found = []
    for name, value in expected.items():
        error, norm = float((got[name] - value).norm()), float(value.norm())
        allowed = ROUNDING * norm if name in ("loss", "logits") else GRADIENT * norm + FLOOR * float(everything)
        if not error <= allowed:
            found.append(f"{name} by {error / norm:.1e}")
    return found


def silent(model: nn.Module, report: liger_like.PatchReport) -> list[str]:
    """What is there to patch, by looks that the recognisers do not share, and is not in the report."""
    listed = {(row.pattern, row.cls) for row in report.rows}
    found = set()
    for module in model.modules():
        cls, parts = type(module), [*module.children()]
        code = forward_of(cls)
        linear = sum(isinstance(part, nn.Linear) for part in parts)
        kinds = {
            "rms_norm": "norm" in cls.__name__.lower() and not parts and any(True for _ in module.parameters()),
            "rope": re.search(r"(?<![.\w])\w*(rotary|rotate|rope)\w*\(", code),
            "glu_mlp": len(parts) - 1 <= linear >= 2 and re.search(r"act\w*\([^*]*\) \*|\* self\.act\w*\(", code),
        }
        found |= {(pattern, cls.__name__) for pattern, there in kinds.items() if there} - listed
    if model.get_output_embeddings() is not None and ("lm_head", type(model).__name__) not in listed:
        found.add(("lm_head", type(model).__name__))
    return [f"{cls} is not in the report as {pattern}" for pattern, cls in sorted(found)]


@functools.cache
def forward_of(cls: type[nn.Module]) -> str:
    """The forward of the class that transformers or torch wrote, in one spelling."""
    forward = next(inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c) and not hasattr(c, "_liger_like"))
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(forward))))


def examine(name: str) -> dict[str, Any]:
    """The row of a class."""
    row: dict[str, Any] = {"name": name}
    try:
        model = build(name)
        inputs = inputs_of(model)
        expected = results(model, inputs)
    except Exception as error:
        return row | {"status": "skipped", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    try:
        report = liger_like.patch(model, verify="numeric")
        found = differences(results(model, inputs), expected) + silent(model, report)
    except Exception as error:
        return row | {"status": "wrong", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    left = [[r.pattern, r.cls, r.count, r.reason] for r in report.rows if r.status == "skipped"]
    patched: dict[str, int] = {}
    for r in report.patched:
        patched[r.pattern] = patched.get(r.pattern, 0) + r.count
    row |= {"patched": patched, "left": left}
    status = "wrong" if found else "partly" if left else "exact"
    return row | {"status": status, "why": "; ".join(found)}


def _child(name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(examine(name))


def apart(name: str) -> dict[str, Any]:
    """``examine`` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.modeling_utils", "liger_like.patching"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, send))
    process.start()
    send.close()
    try:
        if not receive.poll(SECONDS):
            return {"name": name, "status": "wrong", "why": f"took more than {SECONDS} s"}
        return receive.recv()
    except EOFError:
        process.join()
        return {"name": name, "status": "wrong", "why": f"crashed with {process.exitcode}"}
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=names())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        rows = []
        for row in pool.map(apart, arguments.only):
            print(row["name"], row["status"], row.get("why", "")[:150], flush=True)
            rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
