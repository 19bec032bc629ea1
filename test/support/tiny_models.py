"""Tiny models of every family that patching must get exactly right, and the comparison of patched with unpatched."""

import copy

import torch
import transformers

CONFIG = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
        "attn_implementation": "eager",  # SDPA, the default of some versions, ignores the softcap
    },
    "Phi3": {"rope_parameters": PARTIAL},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
}
# Families that test the patches of attention.
ATTENTION = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {**FAMILIES["Gemma2"], "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "Gemma3": {
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3": {"head_dim": 16},
    "GptOss": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "experts_implementation": "eager",
    },
    "Llama4": {
        "attention_chunk_size": 5,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 4,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "DeepseekV3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
}


def tiny(family, device="cpu", dtype=torch.float32, **config):
    """A model in training mode with random weights, norms and biases included."""
    cls = getattr(transformers, f"{family}ForCausalLM")
    return random(
        cls(cls.config_class(**CONFIG | FAMILIES.get(family, ATTENTION.get(family, {})) | config)), device, dtype
    )


def random(model, device="cpu", dtype=torch.float32):
    """``model`` in training mode, none of whose parameters is what it is by default."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(device, dtype).train()


class Mean(torch.nn.Module):
    """A model that returns a loss [] by itself."""

    def __init__(self, device="cpu", dropout=0.0):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4, device=device), torch.nn.Linear(4, 1, device=device)
        self.dropout = torch.nn.Dropout(dropout)
        self.unused = torch.nn.Parameter(torch.ones(3, device=device))

    def forward(self, x, times=1):
        return self.second(self.dropout(self.first(x)).relu()).square().mean() * times


def batch(device="cpu", rows=2, length=12):
    """Token ids and labels, of which some are ignored."""
    ids = torch.randint(3, CONFIG["vocab_size"], (rows, length), device=device)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def results(model, inputs):
    """The loss and every gradient, by name; a second call starts afresh."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def errors(patched, original, inputs):
    """Error norms against the unpatched model in float64, relative to its norms: by name, (patched, unpatched)."""
    got, same = results(patched, inputs), results(original, inputs)
    exact = results(copy.deepcopy(original).double(), inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in same.items()}
    assert got.keys() == exact.keys()
    return {
        name: tuple(float((x[name] - t).double().norm() / t.double().norm()) for x in (got, same))
        for name, t in exact.items()
    }


def assert_exact(patched, original, inputs, k=1.1):
    """The comparison rule for the loss and every gradient, against the unpatched model in float64."""
    for name, (error, allowed) in errors(patched, original, inputs).items():
        assert error <= k * allowed + 1e-6, f"{name}: {error:.2e}, unpatched {allowed:.2e}"


def rows(report, pattern):
    """The rows of one pattern."""
    return [row for row in report.rows if row.pattern == pattern]
