"""Drop-in modules over the ops.

Each has the parameter names, shapes and initial values of the Hugging Face or torch module that it replaces.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like import ops
from liger_like.ops.glu import gelu_of
from liger_like.ops.glu_linear import glu_linear
from liger_like.ops.rms_norm import CASTING_MODES
from liger_like.runtime.checks import require, require_choice, require_eps, require_integer, require_number
from liger_like.runtime.support import KERNEL_DTYPES


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        require_integer(name, size, 1)


def _check_weights(name: str, weight: Tensor | None) -> None:
    if weight is not None:
        require(name, weight)


def check_options(function: Callable[..., Any], options: dict[str, Any], *given: str) -> None:
    """Raise TypeError or ValueError unless ``function`` accepts ``options``: it runs once on the meta device.

    ``given`` names the keyword arguments that are not options.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in (*given, "shard")]
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"{', '.join(unknown)} must be one of the options of the loss: {', '.join(names)}")
    dtype = options.get("accum_dtype")
    logits = torch.empty(1, 1, device="meta", dtype=dtype if dtype in KERNEL_DTYPES else torch.float32)
    target = torch.zeros(1, device="meta", dtype=torch.int64)
    operands = [logits] * (2 if function is ops.fused_linear_cross_entropy else 1)
    function(*operands, target, **{name: value for name, value in options.items() if name != "lora"})


class RMSNorm(nn.Module):
    """RMSNorm module over ``liger_like.rms_norm`` with a ``weight`` [hidden_size].

    Maps x [..., hidden_size] to the same shape. The weight starts at 1 - ``offset``, as in the Hugging Face classes.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama") -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size)
        require_choice("casting_mode", casting_mode, CASTING_MODES)
        self.eps, self.offset, self.casting_mode = require_eps(eps), require_number("offset", offset), casting_mode
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size] over its last dimension."""
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset, casting_mode=self.casting_mode)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LayerNorm(nn.Module):
    """LayerNorm module over ``liger_like.layer_norm`` with ``weight`` and, unless ``bias=False``, ``bias``.

    Both parameters are [hidden_size]. Maps x [..., hidden_size] to the same shape.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size)
        require_choice("bias", bias, (False, True))
        self.eps = require_eps(eps)
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size] over its last dimension."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


class SwiGLUMLP(nn.Module):
    """Gated MLP down_proj(silu(gate_proj(x)) * up_proj(x)).

    Maps x [..., hidden_size] to the same shape. The backward recomputes the input of down_proj instead of keeping it.
    """

    act = "silu"

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        require_choice("bias", bias, (False, True))
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to ``x``."""
        return glu_linear(self.act, self.down_proj, self.gate_proj(x), self.up_proj(x))


class GeGLUMLP(SwiGLUMLP):
    """Gated MLP down_proj(gelu(gate_proj(x)) * up_proj(x)).

    GELU uses the tanh approximation, or the exact erf for ``approximate="none"``.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, approximate: str = "tanh") -> None:
        super().__init__(hidden_size, intermediate_size, bias)
        self.act = gelu_of(approximate)


class CrossEntropyLoss(nn.Module):
    """Loss module over ``liger_like.cross_entropy`` with fixed options; ``weight`` (class weights) is a buffer.

    Raises TypeError or ValueError for an option that is unknown or out of range.
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        check_options(ops.cross_entropy, options, "weight", "num_items")
        _check_weights("weight", weight)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(self, logits: Tensor, target: Tensor, num_items: int | Tensor | None = None) -> Tensor:
        """Return the loss of ``logits`` [..., V] and ``target`` [...], reduced as the options say."""
        return ops.cross_entropy(logits, target, weight=self.weight, num_items=num_items, **self.options)

    def extra_repr(self) -> str:
        """Return the options, for ``repr``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class FusedLinearCrossEntropyLoss(nn.Module):
    """Loss module over ``liger_like.fused_linear_cross_entropy`` with fixed options.

    It has no parameters: the head's weight is an argument of the forward.

    Raises TypeError or ValueError for an option that is unknown or out of range.
    """

    class_weight: Tensor | None

    def __init__(self, class_weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        check_options(ops.fused_linear_cross_entropy, options, "class_weight", "num_items")
        _check_weights("class_weight", class_weight)
        self.register_buffer("class_weight", class_weight)
        self.options = options

    def forward(
        self,
        weight: Tensor,
        x: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | ops.LossOutput:
        """Return the loss of the logits ``x weight^T + bias`` and ``target`` [...].

        Shapes: ``weight`` [V, H], ``x`` [..., H], ``bias`` [V].
        """
        return ops.fused_linear_cross_entropy(
            x, weight, target, bias, class_weight=self.class_weight, num_items=num_items, **self.options
        )

    extra_repr = CrossEntropyLoss.extra_repr
