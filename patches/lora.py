"""Recogniser for linear layers with PEFT's low-rank adapters: y = x W^T + s (x A^T) B^T, with a frozen W.

PEFT computes the two terms, the factor and the sum one by one. Here the second term is added within its product, and so
is its gradient of x: 3 kernels in the forward for 5, and 5 in the backward for 7. The sums are rounded once less.
Paper: LoRA: Low-Rank Adaptation of Large Language Models (https://arxiv.org/abs/2106.09685)
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch has it

from liger_like.patches import (
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    bare,
    original,
    random_like,
    random_parameter,
)
from liger_like.patches.foreign import replaced_in_class
from liger_like.patches.lm_head import LMHead
from liger_like.runtime.autograd import is_untransformed, once_differentiable
from liger_like.runtime.machine import is_watched
from liger_like.runtime.support import autocast_dtype, is_local, unhooked


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        if a.dtype != x.dtype:  # under autocast; autograd casts the gradients back
            a, b = a.to(x.dtype), b.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        u = F.linear(rows, a)
        y = F.linear(rows, w, bias).addmm_(u, b.t(), alpha=scale)
        needs_dx, _, _, needs_da, needs_db, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            rows if needs_da else None,
            w if needs_dx else None,
            a if needs_dx else None,
            b if needs_dx or needs_da else None,
            u if needs_db else None,
        )
        ctx.scale = scale
        # what is a view here could not be changed in place by the caller
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(w)))  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_autocast_enabled(dy.device.type):  # the dtypes are those of the forward
            with torch.autocast(dy.device.type, enabled=False):
                return _gradients(ctx, dy)
        return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, w, a, b, u = ctx.saved_tensors
    needs_dx, _, _, needs_da, needs_db, _ = ctx.needs_input_grad
    sizes, dy = dy.shape[:-1], dy.reshape(-1, dy.shape[-1])
    # with the factor, which keeps small gradients in fp16
    du: Any = _scaled(dy, b, ctx.scale) if needs_dx or needs_da else None
    dx = dy.mm(w).addmm_(du, a).view(*sizes, w.shape[1]) if needs_dx else None
    da = du.t().mm(rows) if needs_da else None
    db = _scaled(dy.t(), u, ctx.scale) if needs_db else None
    return dx, None, None, da, db, None


def _scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return ``scale`` times x y by one kernel: with beta=0 the first argument is not read."""
    return torch.addmm(x.new_empty(len(x), y.shape[1]), x, y, beta=0, alpha=scale)


def obstacle(layer: Any, name: str) -> str:
    """Return why PEFT's own forward must compute the adapter ``name`` of ``layer``; empty if this file computes it."""
    variants, parts = getattr(layer, "lora_variant", None), layer._modules
    if variants is None:
        return "this version of PEFT does not tell LoRA from its variants"
    if name in variants:  # DoRA, say
        return f"its adapter {name!r} is a {type(variants[name]).__name__}"
    dropout: Any = parts["lora_dropout"]._modules[name]
    if type(dropout) is not nn.Identity or not unhooked(dropout):
        return f"its adapter {name!r} has dropout"
    for part in (parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]):
        if type(part) is not nn.Linear or part._parameters.get("bias") is not None:
            return f"its adapter {name!r} is more than two matrices"
    base = parts["base_layer"]
    return "" if type(base) is nn.Linear else f"its base layer is a {type(base).__name__}"


def operands(layer: Any, x: Tensor) -> tuple[Any, ...] | None:
    """Return weight, bias, A, B and scale of the one active adapter; None where PEFT's own forward must run.

    A compiled graph holds PEFT's forward, whose factor and sum Inductor fuses. Under a dispatch mode PEFT's forward
    runs, too: a checkpoint that keeps products raises if they change in place.
    """
    if layer._disable_adapters or layer.merged_adapters or torch.compiler.is_compiling():
        return None
    if is_watched() or not is_local(x) or x.layout is not torch.strided or x.is_nested:
        return None
    parts = layer._modules  # attributes of a module that are no modules or parameters cost 0.1 us, others 1.5 us
    names = [name for name in layer.active_adapters if name in parts["lora_A"]._modules]
    if len(names) != 1 or obstacle(layer, names[0]):
        return None
    base, a, b = (parts["base_layer"], *(parts[part]._modules[names[0]] for part in ("lora_A", "lora_B")))
    if not (unhooked(base) and unhooked(a) and unhooked(b) and is_untransformed()):
        return None
    w, bias, scale = base._parameters.get("weight"), base._parameters.get("bias"), layer.scaling[names[0]]
    a, b, cast = a._parameters.get("weight"), b._parameters.get("weight"), autocast_dtype(x)
    if not (is_local(w) and is_local(a) and is_local(b)):  # None in a replica of DataParallel
        return None
    if w.requires_grad or (bias is not None and bias.requires_grad) or not isinstance(scale, float | int):
        return None
    if x.dtype != w.dtype or a.dtype != b.dtype or a.dtype not in (x.dtype, torch.float32 if cast else None):
        return None
    return (w, bias, a, b, scale) if cast in (None, x.dtype) else None


class LoRA(Recogniser):
    """Recogniser for PEFT's linear layer with an adapter of two matrices."""

    pattern = "lora"
    options = ("lora",)

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for PEFT's linear layers."""
        peft: Any = sys.modules.get("peft")
        return peft is not None and original(type(module)).forward is peft.tuners.lora.Linear.forward

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return "linear". Raises NothingToDoError or UnrecognisedError."""
        layer: Any = module
        if not self.looks_like(module):
            raise NothingToDoError("has no adapter")
        if replaced_in_class(type(module)):
            raise UnrecognisedError("its forward matches no known form")
        owner: Any = next(filter(LMHead().looks_like, model.modules()), None)
        if owner is not None and module in owner.get_output_embeddings().modules():
            raise NothingToDoError("the head's adapter belongs to its loss")
        if all(reasons := [obstacle(layer, name) for name in layer.lora_A]):
            raise NothingToDoError("; ".join(reasons))
        return "linear"

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which runs PEFT's own one wherever ``operands`` finds none."""

        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = None if args or kwargs else operands(self, x)
            if found is None:
                return cls.forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
            return _AdaptedLinear.apply(x, *found)  # type: ignore[no-any-return,no-untyped-call]

        return {"forward": forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a layer of 4 features and 6 outputs with an adapter of rank 2, in fp32 on the CPU."""
        peft: Any = sys.modules["peft"]
        weights = {"weight": random_parameter(6, 4), "bias": random_parameter(6)}
        linear = bare(nn.Linear, in_features=4, out_features=6, **weights)
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["layer"], init_lora_weights=False)
        with torch.device("cpu"):
            return peft.inject_adapter_in_model(config, nn.ModuleDict({"layer": linear}))["layer"]  # type: ignore[no-any-return]

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with six rows."""
        layer: Any = module
        x = random_like(layer.weight, 2, 3, layer.in_features)
        replaced = methods["forward"].__get__(module)
        return Trial(type(module).forward.__get__(module), replaced, (x,), tuple(module.parameters()))
