"""Recogniser for experts that transformers' interface of experts runs, with the function that runs their kernels.

The function is registered with transformers as ``liger_like``; a config with that name makes its experts call it.
"""

import copy
import inspect
import math
import sys
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # as transformers has it

from liger_like.ops.experts import moe_experts
from liger_like.ops.experts.lora import Lora
from liger_like.patches import (
    NAME,
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    bare,
    random_like,
    random_parameter,
    where,
)
from liger_like.patches.foreign import foreign_forward
from liger_like.patches.forms import code_of, match
from liger_like.patches.glu_mlp import KERNELS, is_experts, kernel_of, runs
from liger_like.runtime.support import KERNEL_DTYPES, use_kernel


def plain(self: Any, x: Tensor) -> Any:
    """Match the gate of [gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    return self.act(gate) * up


def plain_float(self: Any, x: Tensor) -> Any:
    """Match the gate of [gate | up], computed in fp32."""
    gate, up = x.chunk(2, dim=-1)
    return (self.act(gate.float()) * up.float()).to(gate.dtype)


def clamped(self: Any, x: Tensor) -> Any:
    """Match the gate of [gate | up], both clamped before."""
    gate, up = x.chunk(2, dim=-1)
    return self.act(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


def clamped_silu(self: Any, x: Tensor) -> Any:
    """Match the same with a function as the activation."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(min=None, max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


def scaled(self: Any, x: Tensor) -> Any:
    """Match MiniMax-M3's unit of [gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1.0) * (gate * torch.sigmoid(gate * self.alpha))


def scaled_halves(self: Any, x: Tensor) -> Any:
    """Match GPT-OSS' unit of [gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def scaled_interleaved(self: Any, x: Tensor) -> Any:
    """Match GPT-OSS' unit, where gate and up take turns."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def folded(self: Any, W: Tensor) -> Any:  # as PEFT has it
    """Match PEFT's sum of packed weights and an adapter, whose factors its module holds."""
    with torch.autocast(device_type=W.device.type, enabled=False):
        return torch.baddbmm(W, self.lhs, self.rhs, alpha=self.scaling)


PATTERNS = (plain, plain_float, clamped, clamped_silu, scaled, scaled_halves, scaled_interleaved)
PACKED = ("gate_up_proj", "down_proj")
DTYPES = (*KERNEL_DTYPES, torch.float64)  # any other dtype is that of quantised weights
NAMES = {"clamped": "clamped {}", "scaled": "clamped {}, up + 1"}  # first word of a pattern: its variant


class Gate(NamedTuple):
    """Gate of experts: its kernel, the attributes that hold its activation and numbers, and the order of its inputs."""

    kernel: str
    act: str | None
    limit: str | None
    alpha: str | None
    interleaved: bool

    def numbers(self, module: Any) -> dict[str, Any]:
        """Return the numbers of ``module`` by role."""
        return {role: getattr(module, name) for role, name in (("limit", self.limit), ("alpha", self.alpha)) if name}


def compute(module: Any, gate: Gate, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run ``moe_experts``, or what ``expert_parallel`` has put in its place, with the values of ``module``."""
    biases = {}
    if module.has_bias:
        biases = {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    numbers = gate.numbers(module)
    form = {"transposed": module.is_transposed, "interleaved": gate.interleaved}
    act = KERNELS[gate.kernel]
    if sharded := vars(module).get("_liger_like_op"):
        out: Tensor = sharded(
            x, module.gate_up_proj, module.down_proj, index, weights, **biases, act=act, **numbers, **form
        )
        return out
    (gate_up, lora), (down, down_lora) = (factored(module, name, module.is_transposed) for name in PACKED)
    loras: dict[str, Any] = {"gate_up_lora": lora, "down_lora": down_lora}
    return moe_experts(x, gate_up, down, index, weights, **biases, **loras, act=act, **numbers, **form)


def factored(module: Any, name: str, transposed: bool) -> tuple[Tensor, Lora | None]:
    """Return packed weights and PEFT's adapter of them, or their sum if PEFT does not keep the adapter's factors."""
    if name not in getattr(module, "parametrizations", ()):
        return getattr(module, name), None
    added = module.parametrizations[name]
    last: Any = added[-1]
    if len(added) > 1 or not is_folded(type(last).forward):
        return getattr(module, name), None
    lhs, rhs, scale = last.lhs, last.rhs, last.scaling
    # PEFT permutes B; only in the layout that the op reads can it repeat its launches
    return added.original, (lhs.mT, rhs.contiguous().mT, scale) if transposed else (rhs, lhs.contiguous(), scale)


def is_folded(forward: Any) -> bool:
    """Return True if ``forward`` is that of PEFT's adapter that holds its factors, word for word."""
    try:
        return code_of(forward) == code_of(folded)
    except UnrecognisedError:
        return False


def fits(role: str, number: Any) -> bool:
    """Return True if ``moe_experts`` takes ``number`` as the limit or alpha of a gate."""
    return isinstance(number, int | float) and (number > 0 if role == "limit" else math.isfinite(number))


def check_weights(*weights: Any) -> None:
    """Raise UnrecognisedError if kernels cannot read the weights of experts, such as quantised ones."""
    for weight in weights:
        if type(weight) not in (Tensor, nn.Parameter, DTensor) or weight.dtype not in DTYPES:
            raise UnrecognisedError(f"its weight is a {where(type(weight))} of {weight.dtype}")
    if len(dtypes := {str(weight.dtype): None for weight in weights}) > 1:
        raise UnrecognisedError(f"its weights are of {' and '.join(dtypes)}")


def adapters(module: Any, model: nn.Module) -> str:
    """Return how the report names PEFT's adapters of the packed weights of ``module``; empty without."""
    packed: list[Any] = [m for m in model.modules() if getattr(m, "parameter_name", None) in PACKED]
    wrappers = [m for m in packed if m.get_base_layer() is module]
    active = [[a for a in m.active_adapters if a in m.lora_A] for m in wrappers]
    layer = sys.modules.get("peft.tuners.lora.layer")
    proxy = getattr(layer, "_LoraFactorsProxy", None)  # older versions of PEFT have none, and none is for one expert
    others = {*PACKED} & {*getattr(module, "parametrizations", ())}  # PEFT's are there within its forward only
    several = all(m.num_experts > 1 for m in wrappers)
    split = not others and several and is_folded(getattr(proxy, "forward", None))
    return "" if not any(active) else ", LoRA" if split and all(len(a) < 2 for a in active) else ", LoRA added in full"


def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of ``hidden_states`` [T, H]: the registered function.

    The config's own implementation runs where no kernel can, and transformers' batched_mm where few rows are decoded:
    it copies the weights of each row, so there may be no more rows than experts. Experts of ``expert_parallel`` have no
    other implementation. Raises RuntimeError if their gate has changed.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    gate, sharded = getattr(module, "_liger_like_gate", None), "_liger_like_op" in vars(module)
    if (
        gate is None
        or "_apply_gate" in vars(module)
        or not (sharded or use_kernel(hidden_states))
        or (gate.act and not runs(gate.kernel, getattr(module, gate.act)))
        or not all(fits(role, number) for role, number in gate.numbers(module).items())
    ):
        if sharded:
            raise RuntimeError("the gate of experts must not change after expert_parallel")
        name = getattr(module.config, "_liger_like_original", module.config)._experts_implementation
        name = "grouped_mm" if name == NAME else name
    elif sharded or torch.is_grad_enabled() or top_k_index.numel() > module.num_experts:
        return compute(module, gate, hidden_states, top_k_index, top_k_weights)
    else:
        name = "batched_mm"
    function = ALL_EXPERTS_FUNCTIONS.get_interface(name, _eager(type(module)))
    return function(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _eager(cls: Any) -> Any:
    """Return the forward that a family wrote for its experts."""
    return cls.forward.__wrapped__


def register() -> None:
    """Register ``run`` with transformers as NAME; repeated calls are harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, run)


def is_run_by_transformers(cls: Any) -> bool:
    """Return True if transformers' decorator made the forward of ``cls``, with the interface of unquantised experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    held = inspect.getclosurevars(cls.forward).nonlocals if isinstance(cls.forward, FunctionType) else {}
    return held.get("experts_interface") is ALL_EXPERTS_FUNCTIONS


class Experts(Recogniser):
    """Recogniser for experts whose gate has the form of one of PATTERNS, with an activation that has a kernel."""

    pattern = "experts"
    options = ("mlp",)
    implementation = "_experts_implementation_internal"
    state = ("_liger_like_gate",)

    def depends_on(self, module: nn.Module, model: nn.Module) -> list[nn.Module]:
        """Return the module, unless expert parallelism of transformers wraps its forward: it runs the interface."""
        return [] if foreign_forward(module).startswith("transformers.") else [module]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for experts with a gate of their own or of transformers, which its interface runs."""
        return is_experts(module) and is_run_by_transformers(type(module))

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the name of the kernel for the gate. Raises UnrecognisedError."""
        cls: Any = type(module)
        if not hasattr(getattr(module, "config", None), self.implementation):
            raise UnrecognisedError("it has no transformers config")
        if not module.has_gate:
            raise NothingToDoError("has no gate")
        if "_apply_gate" in vars(module):
            raise UnrecognisedError("its gate was replaced on the instance")
        if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has none
            raise UnrecognisedError("it normalises the outputs of its experts")
        if "float32" in _eager(cls).__code__.co_names and getattr(module.config, self.implementation) == "eager":
            raise UnrecognisedError("its experts are run in fp32 by eager")
        pattern, part = match(cls._apply_gate, cls, PATTERNS)
        biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else ()
        check_weights(module.gate_up_proj, module.down_proj, *biases)
        for role in part.keys() - {"act"}:
            if not fits(role, number := getattr(module, part[role])):
                raise UnrecognisedError(f"the number {part[role]} of its gate is {number}")
        kernel = kernel_of(getattr(module, part["act"])) if "act" in part else "swiglu"
        return NAMES.get(pattern.split("_")[0], "{}").format(kernel) + adapters(module, model)

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the gate, for the instance: ``run`` reads it."""
        pattern, part = match(cls._apply_gate, cls, PATTERNS)
        kernel = next(kernel for kernel in KERNELS if kernel in variant)
        roles = {role: part.get(role) for role in ("act", "limit", "alpha")}
        return {"_liger_like_gate": Gate(kernel, **roles, interleaved=pattern == scaled_interleaved.__name__)}

    def miniature(self, module: Any, variant: str) -> nn.Module:
        """Return 4 experts of 8 features, 6 inside, with a limit that clamps and the other attributes of ``module``."""
        _, part = match(type(module)._apply_gate, type(module), PATTERNS)
        own = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
        own |= {"num_experts": 4} | ({part["limit"]: 1.0} if "limit" in part else {})
        own |= {part["act"]: copy.deepcopy(getattr(module, part["act"]))} if "act" in part else {}
        shapes = {"gate_up_proj": (8, 12), "down_proj": (6, 8)}
        if not module.is_transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        biases = {"gate_up_proj_bias": (12,), "down_proj_bias": (8,)} if module.has_bias else {}
        parameters = {name: random_parameter(4, *shape) for name, shape in (shapes | biases).items()}
        return bare(type(module), **own, **parameters)

    def trial(self, module: Any, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of 6 rows with 2 experts each, against the loop that the family wrote."""
        (gate,), eager = methods.values(), _eager(type(module))
        parameters, (E, *shape) = tuple(module.parameters()), module.down_proj.shape
        x = random_like(parameters[0], 6, shape[module.is_transposed])
        weights = random_like(parameters[0], 6, min(2, E)).abs()
        token, k = (torch.arange(n, device=x.device) for n in (6, min(2, E)))
        index = (token[:, None] + k) % E

        def original(x: Tensor, weights: Tensor) -> Tensor:
            return eager(module, x, index, weights)  # type: ignore[no-any-return]

        def replacement(x: Tensor, weights: Tensor) -> Tensor:
            return compute(module, gate, x, index, weights)

        # the gradient of x is that of three products, one after the other
        return Trial(original, replacement, (x, weights), parameters, depth=3 * max(shape))
