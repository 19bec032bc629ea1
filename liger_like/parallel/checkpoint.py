"""Selective activation checkpointing: which results of a checkpointed region are saved, and which are recomputed."""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import liger_like.ops.tiled_mlp  # noqa: F401  # registers the ops
from liger_like.parallel import offload
from liger_like.parallel.offload import Kept, Stays

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
    "glu_linear": (_ours.glu_linear_fwd.default, _ours.tiled_mlp_fwd.default),
    "rope": (_ours.rope.default, _ours.qk_norm_rope_fwd.default),
}


Names = tuple[str | OpOverload, ...]
# an op and how often it ran before: what returns its results, or None if they were lost
Given = dict[tuple[OpOverload, int], Callable[[], Any]]


def _kept(results: Any, host: offload.CheckpointOffload) -> Callable[[], Any]:
    """Give the tensors of ``results`` to ``host``, and return a function that returns all of them again, or None."""
    leaves, structure = tree_flatten(results)
    # below autograd a detached tensor has a version of its own, unless this key is there, as torch has it, too
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        kept = [host.keep(t.detach(), needed=False) if isinstance(t, Tensor) else t for t in leaves]

    def again() -> Any:
        if any(isinstance(t, Kept) and t.lost for t in kept):
            return None
        # detached, since autograd gives the tensor that it gets a history
        loaded = [t.load().detach() if isinstance(t, Kept | Stays) else t for t in kept]
        return tree_unflatten(loaded, structure)

    return again


def _aliases(op: OpOverload) -> bool:
    """Return True if ``op`` modifies an argument, or returns memory of one."""
    return any(value.alias_info for value in (*op._schema.arguments, *op._schema.returns))


def _draws(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return True if the call draws random numbers, as its recomputation then must for the sake of later ones."""
    names = [argument.name for argument in op._schema.arguments]
    probability = (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0)
    return torch.Tag.nondeterministic_seeded in op.tags and ("dropout_p" not in names or probability > 0)


class Outwards(TorchDispatchMode):
    """Mode of a checkpoint's forward that gives the results of ``ops`` to the active ``offload_checkpoints``."""

    def __init__(self, ops: list[OpOverload], given: Given) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.given = ops, given
        self.calls: Counter[OpOverload] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        if op in self.ops:
            call = op, self.calls[op]
            self.calls[op] += 1
            if offload.ACTIVE and not _draws(op, args, kwargs or {}):
                with _disable_current_modes():
                    self.given[call] = _kept(results, offload.ACTIVE[-1])
        return results


class Homewards(TorchDispatchMode):
    """Mode of the recomputation that takes results back, and computes those that were lost."""

    def __init__(self, ops: list[OpOverload], given: Given) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.given = ops, given

    def __enter__(self) -> Any:
        self.calls: Counter[OpOverload] = Counter()  # anew for each backward
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in self.ops:
            call = op, self.calls[op]
            self.calls[op] += 1
            with _disable_current_modes():
                results = self.given[call]() if call in self.given else None
            if results is not None:
                return results
        return op(*args, **(kwargs or {}))


class _Both:
    """Two contexts as one, which can be entered again."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        self.outer.__exit__(*exception)


def _ops(names: Names) -> list[OpOverload]:
    return [op for name in names for op in ((name,) if isinstance(name, OpOverload) else OPS[name])]


def _contexts(save: Names, host: Names) -> tuple[Any, Any]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_ops(save))  # type: ignore[no-untyped-call]
    if not host or torch.compiler.is_compiling():
        return contexts
    given: Given = {}
    modes = (mode(_ops(host), given) for mode in (Outwards, Homewards))
    return tuple(_Both(*pair) for pair in zip(contexts, modes, strict=True))  # type: ignore[return-value]


def checkpoint_policy(
    save: Names = ("matmul", "attention", "loss"), *, host: Names = ()
) -> Callable[[], tuple[Any, Any]]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint.checkpoint`` that saves only the results named by ``save``.

    The checkpoint must have ``use_reentrant=False``; its backward recomputes all other results. ``save`` is a tuple of
    groups, out of "matmul", "attention", "loss", "norm", "glu", "glu_linear" and "rope", and of single ops such as
    ``torch.ops.aten.mm.default``. "matmul" includes the first product of ``moe_experts``; the second is not recomputed
    unless another op needs it. "attention" includes torch's attention. Norms, activations and RoPE cost little time to
    recompute and much memory to save. "glu_linear" is the last product of a patched gated MLP, or the result of a
    tiled one. It is recomputed only if another op needs it, such as the norm after it in Gemma 2 and OLMo 2; save it
    for these models.
    ``("attention", "loss")`` saves little, for long sequences. ``()`` recomputes everything, as a checkpoint without a
    policy does. Under torch.compile "norm" and "glu" change nothing, nor does "glu_linear" unless gates have 64 MiB or
    more: norms and smaller gated units are plain torch there, and are recomputed.

    ``host`` names results that are kept in the host's memory instead, within ``offload_checkpoints``:
    ``checkpoint_policy((), host=("attention",))``. Only results of the last layers stay on the GPU. Where the host's
    memory is full, without that context, under torch.compile and with dropout, these results are recomputed.

    For Hugging Face models: ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    checkpoint_policy()})``. Do not put it into TrainingArguments, which some reports write as JSON.

    Raises TypeError if ``save`` or ``host`` is not a tuple or list, ValueError for an unknown group, an op in both, or
    an op of ``host`` that modifies or returns a view of its arguments.
    See Chen et al., arXiv:1604.06174, and for selective recomputation Korthikanti et al., arXiv:2205.05198.
    """
    for argument, names in (("save", save), ("host", host)):
        if not isinstance(names, tuple | list):
            raise TypeError(f"{argument} must be a tuple of groups or ops, got {type(names).__name__}")
        unknown = [name for name in names if not isinstance(name, OpOverload) and name not in OPS]
        if unknown:
            raise ValueError(f"{argument} must be out of {', '.join(OPS)}, or ops, got {unknown}")
    if mixed := [op for op in _ops(tuple(host)) if _aliases(op)]:
        raise ValueError(f"host must hold ops that return new tensors alone, got {', '.join(map(str, mixed))}")
    if both := {*_ops(tuple(save))} & {*_ops(tuple(host))}:
        raise ValueError(f"save and host must have no op in common, got {', '.join(sorted(map(str, both)))}")
    return functools.partial(_contexts, tuple(save), tuple(host))  # a partial can be pickled, or be a graph's constant
