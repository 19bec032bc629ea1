"""Rotary embeddings of the half layout: attention whose forward calls a module-level function on (q, k, cos, sin).

The attention class gets a copy of its own forward that sees another function under that name. The module keeps its
function, so that nothing but the patched model changes, and a recomputed checkpoint finds the same forward.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.rope import rope
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, where
from liger_like.patches.forms import match


def rotate_half(x: Tensor) -> Tensor:
    """(first, second) -> (-second, first)."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates every feature."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * c + rotate_half(q) * s, k * c + rotate_half(k) * s


def half_cast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates every feature, in the dtype of cos if that is wider, and rounds to the dtypes of q and k."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * c + rotate_half(q) * s).to(q.dtype), (k * c + rotate_half(k) * s).to(k.dtype)


def half_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates as many features as cos has and passes the rest."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    r = c.shape[-1]
    q_rotated = q[..., :r] * c + rotate_half(q[..., :r]) * s
    k_rotated = k[..., :r] * c + rotate_half(k[..., :r]) * s
    return torch.cat([q_rotated, q[..., r:]], dim=-1), torch.cat([k_rotated, k[..., r:]], dim=-1)


PATTERNS = (half, half_cast, half_partial)


class Rope(Recogniser):
    """Attention modules that call one rotary function of the form of one of PATTERNS."""

    pattern = "rope"
    option = "rope"

    def looks_like(self, module: nn.Module) -> bool:
        """Any module whose forward calls a rotary function."""
        return bool(_rotary_functions(type(module)))

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """The name of the rotary function's pattern."""
        _, function = _rotary_function(type(module))
        variant, _ = match(function, None, PATTERNS)
        if hasattr(type(module).forward, "__wrapped__"):
            raise UnrecognisedError(f"{where(type(module).forward)} is decorated")
        _require_equal_halves(model)
        return variant

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """The forward of ``cls`` with its rotary function replaced."""
        name, original = _rotary_function(cls)
        forward = cls.forward
        namespace = {**forward.__globals__, name: functools.partial(_rotate, original, variant == "half_cast")}
        # torch.compile would look these names up in the module of this name, where the function is still the original
        del namespace["__name__"]
        clone = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
        functools.update_wrapper(clone, forward)
        clone.__kwdefaults__ = forward.__kwdefaults__
        del clone.__dict__["__wrapped__"]
        return {"forward": clone}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Heads of 8 features."""
        return bare(type(module), head_dim=8, weight=nn.Parameter(torch.empty(0, device="cpu", dtype=torch.float32)))

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Three heads and two, five positions, the functions alone."""
        _, original = _rotary_function(type(module))
        parameter, d = next(module.parameters()), getattr(module, "head_dim", 16)
        r = d // 4 * 2 if variant == "half_partial" else d
        angles = torch.arange(5, device="cpu")[None, :, None] / 10 ** torch.linspace(0, 2, r // 2, device="cpu")
        cos, sin = (f(torch.cat((angles, angles), dim=-1)).to(parameter) for f in (torch.cos, torch.sin))
        replacement = functools.partial(_rotate, original, variant == "half_cast")
        inputs = random_like(parameter, 2, 3, 5, d), random_like(parameter, 2, 2, 5, d)
        return Trial(
            functools.partial(original, cos=cos, sin=sin), functools.partial(replacement, cos=cos, sin=sin), inputs
        )


def _rotary_functions(cls: type[Any]) -> dict[str, Callable[..., Any]]:
    """The global functions about rotary embeddings that the forward of ``cls`` calls, by name."""
    forward = inspect.unwrap(cls.forward)
    if not isinstance(forward, FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if "rotary" in name or "rope" in name]
    return {name: forward.__globals__[name] for name in names if callable(forward.__globals__.get(name))}


def _rotary_function(cls: type[Any]) -> tuple[str, Callable[..., Any]]:
    functions = _rotary_functions(cls)
    if len(functions) != 1:
        raise UnrecognisedError(f"calls {len(functions)} rotary functions")
    return functions.popitem()


def _require_equal_halves(model: nn.Module) -> None:
    """Raise UnrecognisedError unless the model's rotary embeddings give (cos, sin) of two equal halves.

    They are built anew from the config, because the live ones may be on the meta device and may change as they run.
    """
    configs = {type(module): module.config for module in model.modules() if _is_rotary_embedding(module)}
    if not configs:
        raise UnrecognisedError("no rotary embedding is built from a config and called on (x, position_ids)")
    for cls, config in configs.items():
        with torch.device("cpu"):
            cos, sin = cls(config)(torch.zeros(1), torch.arange(3)[None])
        if not all(torch.equal(*table.chunk(2, dim=-1)) for table in (cos, sin)):
            raise UnrecognisedError(f"the halves of {cls.__name__}'s cos or sin differ")


def _is_rotary_embedding(module: nn.Module) -> bool:
    cls = type(module)
    if not cls.__name__.endswith("RotaryEmbedding"):
        return False
    called, built = ([*inspect.signature(function).parameters] for function in (cls.forward, cls.__init__))
    return called == ["self", "x", "position_ids"] and "config" in built


def _rotate(
    original: Callable[..., tuple[Tensor, Tensor]],
    rounds: bool,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """``rope`` for batches of heads, in the dtype that ``original`` returns; ``original`` for anything else."""
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and unsqueeze_dim in (1, 2)):
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    if not rounds:
        q, k = (x.to(torch.promote_types(x.dtype, cos.dtype)) for x in (q, k))
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
