"""Recogniser for gated MLPs, down(act(gate(x)) * up(x)), with SiLU or GELU.

Gate and up are two projections or one packed projection. The projections stay modules and are called as such, so
biases, adapters and sharding hooks work as before.
"""

import ast
import copy
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as transformers has it

from liger_like.ops.glu import GLUS
from liger_like.ops.glu_linear import gated_mlp, glu_linear
from liger_like.ops.tiled_mlp import are_tileable, tiled_mlp
from liger_like.patches import (
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    bare,
    random_like,
    random_parameter,
)
from liger_like.patches.foreign import changed
from liger_like.patches.forms import definition_of, form_of, match


def split(self: Any, x: Tensor) -> Any:
    """Match two projections."""
    return self.down(self.act(self.gate(x)) * self.up(x))


def split_silu(self: Any, x: Tensor) -> Any:
    """Match two projections whose activation is a function, not an attribute."""
    return self.down(F.silu(self.gate(x)) * self.up(x))


def split_float(self: Any, x: Tensor) -> Any:
    """Match two projections with fp32 between them and the last."""
    gate = self.gate(x)
    return self.down((self.act(gate.float()) * self.up(x).float()).to(gate.dtype))


def split_inner(self: Any, x: Tensor) -> Any:
    """Match a norm or dropout before the last projection."""
    return self.down(self.inner(self.act(self.gate(x)) * self.up(x)))


def split_dropout(self: Any, x: Tensor) -> Any:
    """Match dropout at the end."""
    return nn.functional.dropout(self.down(self.act(self.gate(x)) * self.up(x)), p=self.dropout, training=self.training)


def split_scaled(self: Any, x: Tensor) -> Any:
    """Match a factor at the end."""
    return self.down(self.act(self.gate(x)) * self.up(x)) * self.scale


def split_scaled_gate(self: Any, x: Tensor) -> Any:
    """Match a factor for the gate and a factor at the end."""
    return self.down(self.act(self.gate(x) * self.gate_scale) * self.up(x)) * self.scale


def packed(self: Any, x: Tensor) -> Any:
    """Match one projection to [gate | up]."""
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(up * self.act(gate))


def packed_up_gate(self: Any, x: Tensor) -> Any:
    """Match one projection to [up | gate]."""
    up, gate = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def packed_inner(self: Any, x: Tensor) -> Any:
    """Match one projection to [gate | up], with a norm or dropout before the last projection."""
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.inner(self.act(gate) * up))


# pattern -> its computation with the kernel of ``act``; ``p`` holds the module's attributes by role
FORWARDS: dict[Callable[..., Any], Callable[[dict[str, Any], Tensor, str], Any]] = {
    split: lambda p, x, act: gated_mlp(act, p["gate"], p["up"], p["down"], x),
    split_silu: lambda p, x, act: gated_mlp(act, p["gate"], p["up"], p["down"], x),
    split_float: lambda p, x, act: gated_mlp(act, p["gate"], p["up"], p["down"], x),
    split_inner: lambda p, x, act: p["down"](p["inner"](GLUS[act](p["gate"](x), p["up"](x)))),
    split_dropout: lambda p, x, act: F.dropout(
        gated_mlp(act, p["gate"], p["up"], p["down"], x), p=p["dropout"], training=p["training"]
    ),
    split_scaled: lambda p, x, act: gated_mlp(act, p["gate"], p["up"], p["down"], x) * p["scale"],
    split_scaled_gate: lambda p, x, act: (
        glu_linear(act, p["down"], p["gate"](x) * p["gate_scale"], p["up"](x)) * p["scale"]
    ),
    packed: lambda p, x, act: glu_linear(act, p["down"], p["gate_up"](x)),
    packed_up_gate: lambda p, x, act: glu_linear(act, p["down"], *p["gate_up"](x).chunk(2, dim=-1)[::-1]),
    packed_inner: lambda p, x, act: p["down"](p["inner"](GLUS[act](p["gate_up"](x)))),
}
PATTERNS = tuple(FORWARDS)
TILED = ", tiled"  # the end of the variants that run a tile of tokens at a time
TILEABLE = {pattern.__name__ for pattern in (split, split_silu, split_float, packed)}
BY_NAME = {pattern.__name__: forward for pattern, forward in FORWARDS.items()}
KERNELS = {"swiglu": "silu", "geglu tanh": "gelu_tanh", "geglu erf": "gelu"}
# name of the live activation, or of its class -> kernel; the trial runs that activation, so a namesake fails
ACTIVATIONS = (
    dict.fromkeys(("SiLU", "SiLUActivation", "silu"), "swiglu")
    | dict.fromkeys(("GELUTanh", "NewGELUActivation", "AccurateGELUActivation", "FastGELUActivation"), "geglu tanh")
    | dict.fromkeys(("GELUActivation", "gelu"), "geglu erf")
)
SIZES = {"gate": (4, 6), "up": (4, 6), "gate_up": (4, 12), "down": (6, 4)}


def kernel_of(activation: Any) -> str:
    """Return the name of the kernel for ``activation``. Raises UnrecognisedError if there is none."""
    if found := _changed(activation):
        raise UnrecognisedError(f"its activation has a hook or a replaced forward: {found}")
    kernel = _kernel_of(activation)
    if kernel is None:
        raise UnrecognisedError(f"no kernel for the activation {_name_of(activation)}")
    return kernel


def runs(variant: str, activation: Any) -> bool:
    """Return True if the kernel ``variant`` still computes ``activation``, which may have changed since patching."""
    return _kernel_of(activation) == variant and not _changed(activation)


def _kernel_of(activation: Any) -> str | None:
    if isinstance(activation, nn.GELU):
        return "geglu tanh" if activation.approximate == "tanh" else "geglu erf"
    if isinstance(activation, nn.Module):
        return _kernel_of_class(type(activation))  # type: ignore[no-any-return]
    return ACTIVATIONS.get(_name_of(activation))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernel_of_class(cls: type[Any]) -> str | None:
    """Return the kernel for modules of ``cls``: a graph that read its name would guard each layer part by part."""
    return ACTIVATIONS.get(cls.__name__)


def _name_of(activation: Any) -> str:
    named = type(activation) if isinstance(activation, nn.Module) else activation
    return getattr(named, "__name__", type(activation).__name__)


def _changed(activation: Any) -> str:
    return changed(activation) if isinstance(activation, nn.Module) else ""


class GLUMLP(Recogniser):
    """Recogniser for MLPs whose forward has the form of one of PATTERNS, with an activation of ACTIVATIONS."""

    pattern = "glu_mlp"
    options = ("mlp",)

    def __init__(self, *, tiled: bool = False) -> None:
        self.tiled = tiled

    def with_option(self, value: bool | str) -> "GLUMLP":
        """Return the recogniser that ``mlp=value`` asks for."""
        return GLUMLP(tiled=value == "tiled")

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for innermost modules named like an MLP or experts, and for linear layers with a gate."""
        cls: Any = type(module)
        parts = [*module.children()]
        if _is_mlp(module):
            return not any(_is_mlp(part) or is_experts(part) for part in parts)
        linear = sum(isinstance(part, nn.Linear) for part in parts)
        return len(parts) - 1 <= linear >= 2 and _has_gate(cls)

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the name of the kernel for the activation of ``module``. Raises UnrecognisedError."""
        cls: Any = type(module)
        try:
            pattern, part = match(cls.forward, cls, PATTERNS)
        except UnrecognisedError:
            if _has_no_product(cls):
                raise NothingToDoError("has no gate") from None
            raise
        kernel = kernel_of(getattr(module, part["act"]) if "act" in part else F.silu)
        layers = [getattr(module, part[role]) for role in SIZES if role in part]
        tileable = all(type(layer) is nn.Linear for layer in layers) or are_tileable(layers)
        return kernel + TILED if self.tiled and pattern in TILEABLE and tileable else kernel

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which runs the original if the activation has changed since patching."""
        pattern, part = match(cls.forward, cls, PATTERNS)
        kernel = variant.removesuffix(TILED)
        compute, act = BY_NAME[pattern], KERNELS[kernel]

        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
            if "act" in part and not runs(kernel, getattr(self, part["act"])):
                return cls.forward(self, *args, **kwargs)  # type: ignore[no-any-return]
            (x,) = (*args, *kwargs.values())  # the parameter's name differs between families
            parts = {role: getattr(self, name) for role, name in part.items()}
            if variant == kernel:
                return compute(parts, x, act)  # type: ignore[no-any-return]
            gate: Any = parts.get("gate", parts.get("gate_up"))
            return tiled_mlp(act, gate, parts.get("up"), parts["down"], x, lambda t: compute(parts, t, act))

        return {"forward": forward}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return an MLP of 4 features, 6 inside, with the other attributes of ``module``.

        It is in eval mode, since dropout is random in training.
        """
        _, part = match(type(module).forward, type(module), PATTERNS)
        live = {name: getattr(module, name) for role, name in part.items() if role not in SIZES}
        own = {
            name: random_parameter(*value.shape) if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in live.items()
        }
        own |= {part["inner"]: nn.Identity()} if "inner" in part else {}
        layers = {
            part[role]: nn.Linear(*size, device="cpu", dtype=torch.float32)
            for role, size in SIZES.items()
            if role in part
        }
        return bare(type(module), **own, **layers).eval()

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with six rows."""
        _, part = match(type(module).forward, type(module), PATTERNS)
        first = getattr(module, part.get("gate", part.get("gate_up", "")))
        parameters = tuple(module.parameters())
        size = next(p.shape[-1] for p in first.parameters() if p.ndim == 2)  # ``first`` may wrap a linear layer
        x = random_like(parameters[0], 2, 3, size)
        original, replacement = type(module).forward.__get__(module), methods["forward"].__get__(module)
        return Trial(original, replacement, (x,), parameters)


def _is_mlp(module: nn.Module) -> bool:
    named = re.search("(mlp|feed_?forward|ffn|experts|moe|moe_?block)$", type(module).__name__, re.IGNORECASE)
    return named is not None and not is_experts(module)


def _has_no_product(cls: Any) -> bool:
    try:
        code = form_of(cls.forward, cls).text
    except UnrecognisedError:
        code = _body(cls)
    return code != "" and " * " not in code


def _body(cls: Any) -> str:
    try:
        return "\n".join(map(ast.unparse, definition_of(inspect.unwrap(cls.forward)).body))
    except UnrecognisedError:
        return ""


@functools.cache
def _has_gate(cls: type[Any]) -> bool:
    """Return True if the forward of ``cls`` multiplies by the result of an activation."""
    products = [
        node
        for node in ast.walk(ast.parse(_body(cls)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    ]
    factors = [factor for product in products for factor in (product.left, product.right)]
    return any(isinstance(factor, ast.Call) and "act" in ast.unparse(factor.func) for factor in factors)


def is_experts(module: nn.Module) -> bool:
    """Return True for experts that transformers' implementations can run."""
    return hasattr(type(module), "_apply_gate")
