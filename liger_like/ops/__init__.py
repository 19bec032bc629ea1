"""Kernels as plain functions on one device, differentiable, in the shapes and dtypes that their docstrings state."""

from liger_like.ops.attention import flash_attention, flash_attention_varlen
from liger_like.ops.attention.paged import flash_attention_paged, paged_write
from liger_like.ops.experts import moe_experts
from liger_like.ops.glu import geglu, swiglu
from liger_like.ops.layer_norm import layer_norm
from liger_like.ops.load_balancing import load_balancing_loss
from liger_like.ops.losses.cross_entropy import cross_entropy
from liger_like.ops.losses.linear_cross_entropy import LossOutput, fused_linear_cross_entropy
from liger_like.ops.losses.linear_divergence import DivergenceOutput, fused_linear_divergence
from liger_like.ops.losses.linear_logprobs import TokenOutputs, fused_linear_logprobs
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss
from liger_like.ops.qk_norm_rope import qk_norm_rope
from liger_like.ops.rms_norm import add_rms_norm, rms_norm
from liger_like.ops.rope import rope
from liger_like.ops.router import moe_route

__all__ = [
    "DivergenceOutput",
    "LossOutput",
    "TokenOutputs",
    "add_rms_norm",
    "cross_entropy",
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
    "moe_experts",
    "moe_route",
    "paged_write",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "swiglu",
]
