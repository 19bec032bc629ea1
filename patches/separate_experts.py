"""Recogniser for mixtures whose experts' weights are not packed: DBRX and JetMoE.

DBRX keeps gate and up apart, with the experts' rows one below another. JetMoE sorts the tokens of each expert in its
router, which waits for the GPU for their numbers. Their forwards have no form, so they are compared word for word.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # as transformers has it
from torch.utils.checkpoint import checkpoint

from liger_like.ops.experts import moe_experts
from liger_like.ops.router import moe_route
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, random_parameter
from liger_like.patches.experts import check_weights
from liger_like.patches.foreign import changed
from liger_like.patches.glu_mlp import KERNELS, kernel_of, runs
from liger_like.patches.own_experts import matches
from liger_like.runtime.support import use_kernel


def stacked_unit(self: Any, x: Tensor, expert_w1: Tensor, expert_v1: Tensor, expert_w2: Tensor) -> Any:
    """Match the unit of one of DBRX's experts."""
    gate_proj = x.matmul(expert_w1.T)
    up_proj = x.matmul(expert_v1.T)
    gate_proj = self.activation_fn(gate_proj)
    intermediate_states = gate_proj * up_proj
    down_proj = intermediate_states.matmul(expert_w2)
    return down_proj


def stacked(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Match DBRX's experts."""
    batch_size = hidden_states.shape[0]
    hidden_states = hidden_states.reshape(-1, self.hidden_size)

    next_states = torch.zeros_like(hidden_states, dtype=hidden_states.dtype, device=hidden_states.device)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()

    split_expert_shape = (-1, self.ffn_hidden_size, self.hidden_size)
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        with torch.no_grad():
            idx, token_idx = torch.where(expert_mask[expert_idx])
        v1 = self.mlp.v1.view(split_expert_shape)[expert_idx]
        w1 = self.mlp.w1.view(split_expert_shape)[expert_idx]
        w2 = self.mlp.w2.view(split_expert_shape)[expert_idx]
        states = self.mlp(hidden_states[token_idx], w1, v1, w2)
        states = states.view(-1, self.hidden_size) * top_k_weights[token_idx, idx, None]
        next_states.index_add_(0, token_idx, states)

    next_states = next_states.view(batch_size, -1, self.hidden_size)
    return next_states


def stacked_all(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Match the same in transformers 5.17, which has no id for nobody."""
    batch_size = hidden_states.shape[0]
    hidden_states = hidden_states.reshape(-1, self.hidden_size)

    next_states = torch.zeros_like(hidden_states, dtype=hidden_states.dtype, device=hidden_states.device)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()

    split_expert_shape = (-1, self.ffn_hidden_size, self.hidden_size)
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        with torch.no_grad():
            idx, token_idx = torch.where(expert_mask[expert_idx])
        v1 = self.mlp.v1.view(split_expert_shape)[expert_idx]
        w1 = self.mlp.w1.view(split_expert_shape)[expert_idx]
        w2 = self.mlp.w2.view(split_expert_shape)[expert_idx]
        states = self.mlp(hidden_states[token_idx], w1, v1, w2)
        states = states.view(-1, self.hidden_size) * top_k_weights[token_idx, idx, None]
        next_states.index_add_(0, token_idx, states)

    next_states = next_states.view(batch_size, -1, self.hidden_size)
    return next_states


def sorting_router(self: Any, hidden_states: Any) -> Any:
    """Match JetMoE's router, which sorts the tokens by expert."""
    logits = self.layer(hidden_states).float()
    top_k_logits, top_k_indices = logits.topk(self.top_k, dim=1)
    top_k_gates = torch.softmax(top_k_logits, dim=1).type_as(hidden_states)
    zeros = torch.zeros([top_k_gates.size(0), self.num_experts], dtype=top_k_gates.dtype, device=top_k_gates.device)
    gates = zeros.scatter(1, top_k_indices, 1)
    expert_size = gates.long().sum(0)
    expert_size = expert_size.tolist()  # type: ignore[assignment]
    top_k_experts = top_k_indices.flatten()
    _, index_sorted_experts = top_k_experts.sort(0)
    batch_index = index_sorted_experts.div(self.top_k, rounding_mode="trunc")
    top_k_gates = top_k_gates.flatten()
    batch_gates = top_k_gates[index_sorted_experts]
    return index_sorted_experts, batch_index, batch_gates, expert_size, logits


def sorted_linear(self: Any, inputs: Any, expert_size: Any) -> Any:
    """Match one of JetMoE's products of sorted rows."""
    input_list = inputs.split(expert_size, dim=0)
    output_list = []
    for i in range(self.num_experts):
        output_list.append(F.linear(input_list[i], self.weight[i]))
    results = torch.cat(output_list, dim=0)
    return results


def sorted_block(self: Any, layer_input: Tensor) -> Any:
    """Match the block of JetMoE."""
    bsz, length, emb_size = layer_input.size()
    layer_input = layer_input.reshape(-1, emb_size)
    _, batch_index, batch_gates, expert_size, router_logits = self.router(layer_input)  # noqa: RUF059  # as transformers has it
    expert_inputs = layer_input[batch_index]
    hidden_states = self.input_linear(expert_inputs, expert_size)
    chunked_hidden_states = hidden_states.chunk(2, dim=-1)
    hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
    expert_outputs = self.output_linear(hidden_states, expert_size)
    expert_outputs = expert_outputs * batch_gates[:, None]
    zeros = torch.zeros((bsz * length, self.input_size), dtype=expert_outputs.dtype, device=expert_outputs.device)
    layer_output = zeros.index_add(0, batch_index, expert_outputs)
    layer_output = layer_output.view(bsz, length, self.input_size)
    layer_output = layer_output + self.bias
    return layer_output


# the forward of experts or of a block: the code of its parts, and the names of its weights and of its activation
PARTS: dict[Callable[..., Any], tuple[dict[str, Callable[..., Any]], tuple[str, ...], str]] = {
    stacked: ({"mlp": stacked_unit}, ("mlp.w1", "mlp.v1", "mlp.w2"), "mlp.activation_fn"),
    sorted_block: (
        {"router": sorting_router, "input_linear": sorted_linear, "output_linear": sorted_linear},
        ("input_linear.weight", "output_linear.weight"),
        "activation",
    ),
}
PARTS[stacked_all] = PARTS[stacked]


def pattern_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the pattern of the forward of ``module``, None if it has another."""
    return next((pattern for pattern in PARTS if matches(module, pattern)), None)


def attribute(module: Any, path: str) -> Any:
    """Return the attribute of ``module`` at a dotted path."""
    return functools.reduce(getattr, path.split("."), module)


def stacked_forward(self: Any, hidden_states: Tensor, index: Tensor, weights: Tensor, kernel: str) -> Tensor:
    """Compute DBRX's experts. The copy of gate and up is made again in the backward, as is what experts keep."""

    def experts(x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        w1, v1, w2 = (w.view(-1, self.ffn_hidden_size, self.hidden_size) for w in (w1, v1, w2))
        gate_up = torch.cat((w1.mT, v1.mT), 2)
        return moe_experts(x, gate_up, w2, index, weights, act=KERNELS[kernel], transposed=True)

    given = hidden_states.reshape(-1, self.hidden_size), self.mlp.w1, self.mlp.v1, self.mlp.w2, weights
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        out: Any = checkpoint(experts, *given, use_reentrant=False, preserve_rng_state=False)
    else:
        out = experts(*given)
    result: Tensor = out.view(len(hidden_states), -1, self.hidden_size)
    return result


def unsorted(router: Any, x: Tensor) -> tuple[Any, ...]:
    """Return index and weights [T, K] of JetMoE's router in place of sorted tokens; the logits stay the last output."""
    logits = router.layer(x).float()
    weights, index = moe_route(logits, router.top_k, score="softmax_of_top")
    return index, None, weights.type_as(x), None, logits


def unsorted_forward(self: Any, layer_input: Tensor, router: Callable[[Tensor], Any], kernel: str) -> Tensor:
    """Compute JetMoE's block with ``router``, which returns what ``unsorted`` does."""
    x = layer_input.reshape(-1, self.input_size)
    index, _, weights, _, _ = router(x)
    out = moe_experts(x, self.input_linear.weight, self.output_linear.weight, index, weights, act=KERNELS[kernel])
    shifted: Tensor = out.view(layer_input.shape) + self.bias
    return shifted


class SeparateExperts(Recogniser):
    """Recogniser for the experts of DBRX and for the block of JetMoE."""

    pattern = "separate_experts"
    options = ("mlp",)

    def depends_on(self, module: nn.Module, model: nn.Module) -> list[nn.Module]:
        """Return the module and its parts."""
        pattern = pattern_of(module)
        return [module, *(getattr(module, name) for name in (PARTS[pattern][0] if pattern else ()))]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for known code."""
        return pattern_of(module) is not None

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the name of the kernel for the activation. Raises UnrecognisedError."""
        pattern = pattern_of(module)
        if pattern is None:
            raise UnrecognisedError("its code is not known")
        parts, weights, act = PARTS[pattern]
        for name, code in parts.items():
            if not matches(part := getattr(module, name), code):
                raise UnrecognisedError(f"its {name} is a {type(part)}")
        check_weights(*(attribute(module, path) for path in weights))
        return kernel_of(attribute(module, act))

    def swaps(self, module: Any, variant: str) -> list[tuple[nn.Module, str]]:
        """Return the module, and the router of a block."""
        return [(module, variant), *((module.router, variant) for _ in [0] if pattern_of(module) is sorted_block)]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which runs the original where no kernel can, or if a part has changed or has hooks.

        DBRX's also does so where few rows are decoded, since it copies all weights.
        """

        def runs_kernel(self: Any, pattern: Callable[..., Any], x: Tensor) -> bool:
            parts, weights, act = PARTS[pattern]
            named = ((getattr(self, name), code) for name, code in parts.items())
            known = all(matches(part, code) and not changed(part) for part, code in named)
            return (
                known
                and use_kernel(x)
                and runs(variant, attribute(self, act))
                and not any(isinstance(attribute(self, path), DTensor) for path in weights)
            )

        def of_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            many = torch.is_grad_enabled() or top_k_index.numel() > self.num_experts
            if not (many and runs_kernel(self, stacked, hidden_states)):
                return cls.forward(self, hidden_states, top_k_index, top_k_weights)
            return stacked_forward(self, hidden_states, top_k_index, top_k_weights, variant)

        def of_block(self: Any, layer_input: Tensor) -> Any:
            if not runs_kernel(self, sorted_block, layer_input):
                return cls.forward(self, layer_input)
            return unsorted_forward(self, layer_input, functools.partial(self.router, by_expert=False), variant)

        def of_router(self: Any, hidden_states: Tensor, by_expert: bool = True) -> Any:
            return cls.forward(self, hidden_states) if by_expert else unsorted(self, hidden_states)

        forwards: dict[Callable[..., Any], Any] = {
            stacked: of_experts,
            stacked_all: of_experts,
            sorted_block: of_block,
            sorting_router: of_router,
        }
        (forward,) = (forward for pattern, forward in forwards.items() if matches(bare(cls), pattern))
        return {"forward": forward}

    def miniature(self, module: Any, variant: str) -> nn.Module:
        """Return 4 experts of 8 features, 6 inside."""
        pattern = pattern_of(module)
        if pattern is not sorted_block:
            names = "w1", "v1", "w2"
            weights = {name: random_parameter(4 * 6, 8) for name in names}
            unit = bare(type(module.mlp), activation_fn=copy.deepcopy(module.mlp.activation_fn), **weights)
            return bare(type(module), mlp=unit, hidden_size=8, ffn_hidden_size=6, num_experts=4)
        layer = nn.Linear(8, 4, bias=False, device="cpu", dtype=torch.float32)
        top_k = min(4, module.router.top_k)
        return bare(
            type(module),
            router=bare(type(module.router), layer=layer, num_experts=4, top_k=top_k),
            input_linear=bare(type(module.input_linear), weight=random_parameter(4, 12, 8), num_experts=4),
            output_linear=bare(type(module.output_linear), weight=random_parameter(4, 8, 6), num_experts=4),
            activation=copy.deepcopy(module.activation),
            bias=random_parameter(8),
            input_size=8,
        )

    def trial(self, module: Any, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of 6 rows, with 2 experts each for DBRX."""
        forward, parameters = type(module).forward, tuple(module.parameters())
        if pattern_of(module) is sorted_block:
            x, depth = random_like(module.bias, 2, 3, module.input_size), max(module.input_linear.weight.shape[1:])
            router = functools.partial(unsorted, module.router)
            new = functools.partial(unsorted_forward, module, router=router, kernel=variant)
            return Trial(lambda x: forward(module, x), new, (x,), parameters, 3 * depth)
        x = random_like(module.mlp.w1, 2, 3, module.hidden_size)
        token, E = torch.arange(6, device=x.device), module.num_experts
        index = torch.stack([(token + k) % E for k in range(min(2, E))], 1)
        weights = random_like(x, *index.shape).abs()
        return Trial(
            lambda x, weights: forward(module, x, index, weights),
            lambda x, weights: stacked_forward(module, x, index, weights, variant),
            (x, weights),
            parameters,
            3 * max(module.ffn_hidden_size, module.hidden_size),
        )
