"""Triton kernels for training LLMs: plain functions, drop-in modules, and one-line patching of Hugging Face models."""

from typing import TYPE_CHECKING, Any

from liger_like import losses, nn
from liger_like._explain import Explanation, explain
from liger_like.graphs import GraphedStep
from liger_like.ops import (
    DivergenceOutput,
    LossOutput,
    TokenOutputs,
    add_rms_norm,
    cross_entropy,
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    fused_linear_cross_entropy,
    fused_linear_divergence,
    fused_linear_logprobs,
    fused_linear_token_loss,
    geglu,
    layer_norm,
    load_balancing_loss,
    moe_experts,
    moe_route,
    paged_write,
    qk_norm_rope,
    rms_norm,
    rope,
    swiglu,
)

if TYPE_CHECKING:
    from liger_like.patching import AutoModelForCausalLM, PatchReport, patch, unpatch
    from liger_like.tokens import token_logprobs

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "DivergenceOutput",
    "Explanation",
    "GraphedStep",
    "LossOutput",
    "PatchReport",
    "TokenOutputs",
    "add_rms_norm",
    "cross_entropy",
    "explain",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_varlen",
    "fused_linear_cross_entropy",
    "fused_linear_divergence",
    "fused_linear_logprobs",
    "fused_linear_token_loss",
    "geglu",
    "layer_norm",
    "load_balancing_loss",
    "losses",
    "moe_experts",
    "moe_route",
    "nn",
    "paged_write",
    "patch",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "swiglu",
    "token_logprobs",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    # only patching needs transformers, so it is imported when first asked for
    if name in __all__:
        from liger_like import patching, tokens

        return getattr(tokens if name == "token_logprobs" else patching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
