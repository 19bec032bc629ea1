"""Drop-in modules over the ops.

Each has the parameter names, shapes and initial values of the Hugging Face or torch module that it replaces.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_like import ops
from liger_like.ops.experts.checks import checked_gate
from liger_like.ops.glu import gelu_of
from liger_like.ops.glu_linear import gated_mlp
from liger_like.ops.rms_norm import CASTING_MODES
from liger_like.ops.router import checked_settings
from liger_like.runtime.checks import (
    require,
    require_choice,
    require_eps,
    require_integer,
    require_number,
    require_type,
)
from liger_like.runtime.support import KERNEL_DTYPES


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        require_integer(name, size, 1)


def _check_weights(name: str, weight: Tensor | None) -> None:
    if weight is not None:
        require(name, weight)


def _parameter(*shape: int, fan_in: int) -> nn.Parameter:
    """Return a parameter with the initial values that ``nn.Linear`` gives a layer of ``fan_in`` inputs."""
    return nn.Parameter(torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))


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
        return gated_mlp(self.act, self.gate_proj, self.up_proj, self.down_proj, x)


class GeGLUMLP(SwiGLUMLP):
    """Gated MLP down_proj(gelu(gate_proj(x)) * up_proj(x)).

    GELU uses the tanh approximation, or the exact erf for ``approximate="none"``.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, approximate: str = "tanh") -> None:
        super().__init__(hidden_size, intermediate_size, bias)
        self.act = gelu_of(approximate)


class Router(nn.Module):
    """Router over ``liger_like.moe_route`` with a ``weight`` [num_experts, hidden_size].

    Maps x [..., hidden_size] to the logits [..., num_experts], and to the weights and index [..., top_k] of
    ``moe_route``. ``score``, ``normalize``, ``eps``, ``scale`` and ``groups`` are the options of that op. ``bias=True``
    adds a ``bias`` [num_experts] to the logits. ``correction=True`` adds the buffer ``e_score_correction_bias``
    [num_experts] to the scores, for the choice only. The buffer starts at 0; keep it in fp32 if you cast the module.
    x is cast to the dtype of the weight, which is that of the logits unless autocast is on. ``fp32=True`` computes the
    logits in fp32, also under autocast, as DeepSeek-V3 does.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        eps: float = 0.0,
        scale: float = 1.0,
        groups: tuple[int, int, str] | None = None,
        bias: bool = False,
        correction: bool = False,
        fp32: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size, num_experts=num_experts)
        for name, flag in (("bias", bias), ("correction", correction), ("fp32", fp32)):
            require_choice(name, flag, (False, True))
        settings = checked_settings(num_experts, top_k, score, normalize, eps, scale, groups)
        self.top_k, self.fp32 = settings.top_k, fp32
        self.options: dict[str, Any] = {
            "score": score, "normalize": normalize, "eps": settings.eps, "scale": settings.scale, "groups": groups
        }  # fmt: skip
        self.weight = _parameter(num_experts, hidden_size, fan_in=hidden_size)
        self.bias = _parameter(num_experts, fan_in=hidden_size) if bias else None
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts) if correction else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and index of ``x`` [..., hidden_size], in the order of transformers' routers."""
        dtype = torch.float32 if self.fp32 else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False) if self.fp32 else nullcontext():
            logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)
        weights, index = ops.moe_route(logits, self.top_k, bias=self.e_score_correction_bias, **self.options)
        return logits, weights, index

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{tuple(self.weight.shape)}, top_k={self.top_k}, {options}"


class Experts(nn.Module):
    """Experts over ``liger_like.moe_experts``: ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I].

    E is ``num_experts``, H ``hidden_size`` and I ``intermediate_size``. ``bias=True`` adds ``gate_up_proj_bias``
    [E, 2I] and ``down_proj_bias`` [E, H]. The options are those of the op; ``transposed=True`` stores [E, H, 2I] and
    [E, I, H]. The experts of GPT-OSS are ``bias=True, limit=7.0, alpha=1.702, transposed=True, interleaved=True``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        require_choice("bias", bias, (False, True))
        self.options: dict[str, Any] = checked_gate(act, limit, alpha, transposed, interleaved)._asdict()
        E, H, I = num_experts, hidden_size, intermediate_size
        self.gate_up_proj = _parameter(*(E, H, 2 * I) if transposed else (E, 2 * I, H), fan_in=H)
        self.down_proj = _parameter(*(E, I, H) if transposed else (E, H, I), fan_in=I)
        self.gate_up_proj_bias = _parameter(E, 2 * I, fan_in=H) if bias else None
        self.down_proj_bias = _parameter(E, H, fan_in=I) if bias else None

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums [..., H] of the experts ``index`` [..., K] of ``x`` [..., H]."""
        out: Tensor = vars(self).get("_liger_like_op", ops.moe_experts)(
            x, self.gate_up_proj, self.down_proj, index, weights,
            gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias, **self.options,
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{tuple(self.gate_up_proj.shape)}, bias={self.down_proj_bias is not None}, {options}"


class MoE(nn.Module):
    """Mixture of experts: the ``experts`` that the router ``gate`` chooses, plus an optional shared expert.

    Maps x [..., hidden_size] to the same shape. The modules keep the names that they have as arguments:
    ``shared_experts`` is added as it is (DeepSeek), ``shared_expert`` times sigmoid(``shared_expert_gate``(x)) (Qwen).
    The shared expert runs first, so that a checkpoint that recomputes this module skips the experts' second product.
    The logits, for ``load_balancing_loss``, are the first output of ``gate``: take them by a forward hook.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        shared_experts: nn.Module | None = None,
        shared_expert: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        require_type("gate", gate, Router)
        require_type("experts", experts, Experts)
        shared = {
            "shared_experts": shared_experts,
            "shared_expert": shared_expert,
            "shared_expert_gate": shared_expert_gate,
        }
        for name, module in shared.items():
            if module is not None:
                require_type(name, module, nn.Module)
        if (shared_expert is None) != (shared_expert_gate is None):
            raise ValueError("shared_expert and shared_expert_gate come together; shared_experts needs no gate")
        if len(gate.weight) != len(experts.gate_up_proj):
            counts = f"{len(gate.weight)} and {len(experts.gate_up_proj)}"
            raise ValueError(f"gate and experts must have the same number of experts, got {counts}")
        self.gate, self.experts = gate, experts
        self.shared_experts, self.shared_expert = shared_experts, shared_expert
        self.shared_expert_gate = shared_expert_gate

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum [..., hidden_size] of the experts of ``x`` [..., hidden_size]."""
        shared = [] if self.shared_experts is None else [self.shared_experts(x)]
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared.append(torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x))
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(x, index, weights)
        return sum(shared, out)


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
