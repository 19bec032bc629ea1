"""Selective activation checkpointing: which results of a checkpointed region are saved, and which are recomputed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import liger_like.ops  # noqa: F401  # registers the ops

_aten, _ours = torch.ops.aten, torch.ops.liger_like
OPS: dict[str, tuple[OpOverload, ...]] = {
    "matmul": (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _ours.moe_gate_up.default,
    ),
    "attention": (
        _ours.attention_fwd.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
    "loss": (_ours.linear_cross_entropy.default, _ours.cross_entropy_fwd.default),
    "norm": (_ours.rms_norm_fwd.default, _ours.add_rms_norm_fwd.default, _ours.layer_norm_fwd.default),
    "glu": (_ours.glu_fwd.default,),
    "glu_linear": (_ours.glu_linear_fwd.default,),
    "rope": (_ours.rope.default, _ours.qk_norm_rope_fwd.default),
}


def _contexts(save: tuple[str | OpOverload, ...]) -> tuple[Any, Any]:
    ops = [op for name in save for op in ((name,) if isinstance(name, OpOverload) else OPS[name])]
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(ops)  # type: ignore[no-untyped-call]
    return contexts


def checkpoint_policy(
    save: tuple[str | OpOverload, ...] = ("matmul", "attention", "loss"),
) -> Callable[[], tuple[Any, Any]]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint.checkpoint`` that saves only the results named by ``save``.

    The checkpoint must have ``use_reentrant=False``; its backward recomputes all other results. ``save`` is a tuple of
    groups, out of "matmul", "attention", "loss", "norm", "glu", "glu_linear" and "rope", and of single ops such as
    ``torch.ops.aten.mm.default``. "matmul" includes the first product of ``moe_experts``; the second is not recomputed
    unless another op needs it. "attention" includes torch's attention. Norms, activations and RoPE cost little time to
    recompute and much memory to save. "glu_linear" is the last product of a patched gated MLP. It is recomputed
    only if another op needs it, such as the norm after it in Gemma 2 and OLMo 2; save it for these models.
    ``("attention", "loss")`` saves little, for long sequences. ``()`` recomputes everything, as a checkpoint without a
    policy does. Under torch.compile "norm", "glu" and "glu_linear" change nothing: norms and gated units are plain
    torch there, and are recomputed.

    For Hugging Face models: ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    checkpoint_policy()})``. Do not put it into TrainingArguments, which some reports write as JSON.

    Raises TypeError if ``save`` is not a tuple or list, ValueError for an unknown group. See Chen et al.,
    arXiv:1604.06174, and for selective recomputation Korthikanti et al., arXiv:2205.05198.
    """
    if not isinstance(save, tuple | list):
        raise TypeError(f"save must be a tuple of groups or ops, got {type(save).__name__}")
    unknown = [name for name in save if not isinstance(name, OpOverload) and name not in OPS]
    if unknown:
        raise ValueError(f"save must be out of {', '.join(OPS)}, or ops, got {unknown}")
    return functools.partial(_contexts, tuple(save))  # a partial can be pickled and be a constant of a graph
