"""Heads that compute the loss in their forward: linear layers, also with PEFT's adapters.

PEFT wraps the linear layer in a module that adds the LoRA term or selects a trained copy, and that passes keyword
arguments on. So every module of a head takes ``loss``, the arguments of ``fused_linear_cross_entropy``, or of another
function that ``loss["op"]`` names, and passes it to the linear layer. The hooks of each module run around its call as
usual.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from liger_like.ops.few_rows import of_few_rows
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_like.ops.losses.vocab_shards import Shard
from liger_like.patches import UnrecognisedError, bare, original, random_parameter, where
from liger_like.patches.foreign import changed, foreign_forward, hook_on
from liger_like.patches.trl_code import operands, token_numbers
from liger_like.runtime.support import LINEAR_FORWARD, use_kernel

LINEAR, LORA, COPIES = "lazy logits", "lazy logits, LoRA", "lazy logits, trained copy"
TENSOR_PARALLEL = "lazy logits, tensor parallel"


def parts_of(head: Any) -> list[tuple[nn.Module, str]]:
    """Return ``head`` and the heads inside it, each with its kind. Raises UnrecognisedError for an unknown head."""
    kind = _kind_of(head)
    inside: dict[str, Callable[[], list[Any]]] = {
        LINEAR: lambda: [],
        TENSOR_PARALLEL: lambda: [],
        LORA: lambda: [head.base_layer],
        COPIES: lambda: [head.original_module, *head.modules_to_save.values()],
    }
    return [(head, kind), *(part for inner in inside[kind]() for part in parts_of(inner))]


def _kind_of(head: Any) -> str:
    foreign = foreign_forward(head)
    if isinstance(head, nn.Linear) and foreign.startswith("transformers.") and foreign.endswith("tp_forward"):
        return TENSOR_PARALLEL
    if foreign:
        raise UnrecognisedError(f"the head's forward was replaced by {foreign}")
    forward, peft = original(type(head)).forward, sys.modules.get("peft")
    known: dict[str, Any] = {LINEAR: nn.Linear}
    if peft is not None:
        known |= {LORA: peft.tuners.lora.Linear, COPIES: peft.utils.ModulesToSaveWrapper}
    kinds = [kind for kind, cls in known.items() if isinstance(head, cls) and forward is cls.forward]
    if not kinds:
        raise UnrecognisedError(f"the head is a {where(type(head))}, not a torch.nn.Linear")
    reason = obstacle(head)
    if not reason and kinds == [LINEAR] and not _is_plain(head.weight):
        reason = f"its weight is a {where(type(head.weight))} of {head.weight.dtype}"
    if reason:
        raise UnrecognisedError(f"the head cannot be fused: {reason}")
    return kinds[0]


def _is_plain(weight: Tensor) -> bool:
    """Return True if kernels can read ``weight``. Some quantised weights claim a floating-point dtype."""
    plain = type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "device_mesh")
    return plain and weight.is_floating_point()


def obstacle(head: Any) -> str:
    """Return why the fused loss cannot compute the current adapters of ``head``; empty if it can."""
    for name in head._modules.get("lora_A") or ():
        variants, b = getattr(head, "lora_variant", None), head.lora_B[name]
        if variants is None:
            return "this version of PEFT does not tell LoRA from its variants"
        if name in variants:  # DoRA, say
            return f"its adapter {name!r} is a {type(variants[name]).__name__}"
        if type(b) is not nn.Linear or b.bias is not None or "forward" in vars(b):
            return f"its adapter {name!r} is more than two matrices"
    return ""


def hook_in(head: nn.Module) -> str:
    """Return the name of a hook or a replaced forward that may read logits or their gradient; empty if there is none.

    It looks at ``head`` and at its parts. The forward that transformers sets for tensor parallelism does not count,
    since ``loss_of`` removes it.
    """
    if nn.Linear.forward is not LINEAR_FORWARD:
        return where(nn.Linear.forward)
    kinds = ((part, getattr(type(part), "_kind", "")) for part in head.modules())
    return next(filter(None, (hook_on(part) if kind == TENSOR_PARALLEL else changed(part) for part, kind in kinds)), "")


def _linear_forward(cls: Any) -> Any:
    def forward(self: Any, x: Tensor, loss: dict[str, Any] | None = None) -> Any:
        """Return the logits, or the result of ``fused_linear_cross_entropy``, or of the op in ``loss``."""
        released = isinstance(self, FSDPModule) and _is_released(self, x, loss)
        if loss is None:
            found = of_few_rows(x, [self.weight], [self.bias]) if cls.forward is LINEAR_FORWARD else None
            return cls.forward(self, x) if found is None else found[0]
        weight, options = self.weight, {"bias": self.bias, **loss}
        if words := options.pop("words", None):  # only the first words of the vocabulary count
            weight = weight[:words]
            options["bias"] = None if options["bias"] is None else options["bias"][:words]
            if "lora" in options:
                options["lora"] = options["lora"][0], options["lora"][1][:words]
        op = options.pop("op", fused_linear_cross_entropy)
        if op is fused_linear_cross_entropy and not hasattr(weight, "device_mesh"):
            options["shard"] = Shard(released=released)
        return of_head(op, x, weight, **options)

    return forward


VOCAB_PARALLEL: dict[Any, str] = {
    fused_linear_cross_entropy: "vocab_parallel_cross_entropy",
    token_numbers: "vocab_parallel_logprobs",
}


def of_head(op: Callable[..., Any], x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
    """Return ``op`` of hidden states and the weight of a head, or its form for words that are sharded over processes.

    ``op`` is a key of ``VOCAB_PARALLEL``. A weight that is still a DTensor within the head's forward is sharded by its
    words: FSDP has gathered its own shards by then.
    """
    if not hasattr(weight, "device_mesh"):
        return op(x, weight, target, **options)
    from liger_like import parallel  # only where it is used: it imports all of torch.distributed.tensor

    if op is token_numbers:
        weight, options["bias"] = operands(x, weight, options["bias"])
    return getattr(parallel, VOCAB_PARALLEL[op])(x, weight, target, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_released(head: Any, x: Tensor, loss: dict[str, Any] | None) -> bool:
    """Return True if FSDP2 will not gather the weight of ``head`` for the backward, and tell FSDP2 so.

    A fused loss computes its gradients in the forward, so its backward does not read the weight. FSDP2 can then skip
    the gather, if the head is an FSDP unit of its own. Once the head has returned another output that needs a backward,
    such as logits, every backward gathers the weight: it is not known which backward will read it.
    """
    if head._get_fsdp_state()._modules != (head,):
        return False
    if torch.is_grad_enabled():
        made_later = loss is None or "op" in loss or loss.get("reduction") == "none" or not use_kernel(x)
        if made_later or hasattr(head.weight, "device_mesh"):
            head._read_later = True
        head.set_unshard_in_backward(head._read_later)
    return not head._read_later


def _low_rank(head: Any, name: str, x: Tensor) -> Tensor:
    a = head.lora_A[name]
    return a(head.lora_dropout[name](head._cast_input_dtype(x, a.weight.dtype))) * head.scaling[name]  # type: ignore[no-any-return]


def _lora_forward(cls: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, loss: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Return the logits, or the loss of the logits with the terms of all active adapters."""
        if loss is None:
            return cls.forward(self, x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()  # the original forward does the same
        off = self.disable_adapters or self.merged
        names = [] if off else [name for name in self.active_adapters if name in self.lora_A]
        if names:
            u = torch.cat([_low_rank(self, name, x) for name in names], -1)
            b = torch.cat([self.lora_B[n].weight for n in names], -1)
            loss = {**loss, "lora": (u.to(x.dtype), b.to(x.dtype))}
        return self.base_layer(x, loss=loss)

    return forward


def loss_of(head: Any, hidden: Tensor, loss: dict[str, Any]) -> Tensor:
    """Return the loss, or the result of ``loss["op"]``, from a call of ``head``, with its hooks.

    transformers' tensor parallelism shadows the head's forward by a function that gathers the logits of all words from
    its output. That function is taken off for the call.
    """
    shadow = vars(head).pop("forward") if type(head)._kind == TENSOR_PARALLEL else None
    try:
        return nn.Module.__call__(head, hidden, loss=loss)  # type: ignore[no-any-return]
    finally:
        if shadow is not None:
            head.forward = shadow


FORWARDS: dict[str, Callable[[Any], Any]] = {
    LINEAR: _linear_forward,
    TENSOR_PARALLEL: _linear_forward,
    LORA: _lora_forward,
    COPIES: lambda cls: cls.forward,
}


def small_head(kind: str, bias: bool) -> Any:
    """Return a head of this kind with 8 features and 11 words, in fp32 on the CPU."""
    weights = {"weight": random_parameter(11, 8), "bias": random_parameter(11) if bias else None}
    linear = bare(nn.Linear, out_features=11, in_features=8, **weights)
    peft: Any = sys.modules.get("peft")
    with torch.device("cpu"):
        if kind == LORA:
            config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
            return peft.inject_adapter_in_model(config, nn.ModuleDict({"head": linear}))["head"]
        return peft.utils.ModulesToSaveWrapper(linear, "default") if kind == COPIES else linear
