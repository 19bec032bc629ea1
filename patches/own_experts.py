"""Recogniser for mixtures whose experts run by code of their own: Llama 4, LongCat-Flash and Step-3.7.

Llama 4 runs all tokens through all experts, times scores that are zero for all but the chosen ones. LongCat's experts
from ``num_routed_experts`` on return their input. Step-3.7 limits the gate behind its activation, in some layers, which
no kernel does: these are left alone. Their forwards have no form, so they are compared word for word.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as transformers has it

from liger_like.ops.experts import moe_experts
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, original, random_like, random_parameter
from liger_like.patches.experts import PACKED, adapters, check_weights, factored, is_run_by_transformers
from liger_like.patches.foreign import changed
from liger_like.patches.forms import code_of
from liger_like.patches.glu_mlp import KERNELS, is_experts, kernel_of, runs
from liger_like.runtime.support import use_kernel


def scored_block(self: Any, hidden_states: Tensor) -> Any:
    """Match the block of Llama 4."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(hidden_states)
    routed_in = hidden_states.repeat(router_scores.shape[1], 1)
    routed_in = routed_in * router_scores.transpose(0, 1).reshape(-1, 1)
    routed_out = self.experts(routed_in)
    out = self.shared_expert(hidden_states)
    out.add_(routed_out.reshape(router_scores.shape[1], -1, routed_out.shape[-1]).sum(dim=0))
    return out, router_logits


def scored_router(self: Any, hidden_states: Tensor) -> Any:
    """Match its router: an expert that is not chosen has the score 0."""
    router_logits = super().forward(hidden_states)  # type: ignore[misc]
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=1)
    router_scores = torch.full_like(router_logits, float("-inf")).scatter_(1, router_indices, router_top_value)
    router_scores = torch.nn.functional.sigmoid(router_scores.float()).to(router_scores.dtype)
    return router_scores, router_logits


def scored_experts(self: Any, hidden_states: Tensor) -> Any:
    """Match its experts: each has all tokens."""
    hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
    gate_up = torch.bmm(hidden_states, self.gate_up_proj)
    gate, up = gate_up.chunk(2, dim=-1)
    next_states = torch.bmm((up * self.act_fn(gate)), self.down_proj)
    next_states = next_states.view(-1, self.hidden_size)
    return next_states


def with_identities(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Match LongCat's experts, of which some return their input."""
    final_hidden_states = torch.zeros_like(hidden_states)
    if top_k_index.numel() == 0:
        return final_hidden_states

    expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.total_experts).permute(2, 1, 0)

    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False)
    for expert_idx_tensor in expert_hit:
        expert_idx = int(expert_idx_tensor.item())
        selection_idx, token_idx = torch.where(expert_mask[expert_idx].squeeze(0))
        if token_idx.numel() == 0:
            continue
        current_state = hidden_states[token_idx]

        if expert_idx >= self.num_routed_experts or self.gate_up_proj is None:
            current_hidden_states = self.identity_expert(current_state)
        else:
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = self.act_fn(gate) * up
            current_hidden_states = F.linear(current_hidden_states, self.down_proj[expert_idx])

        current_hidden_states = current_hidden_states * top_k_weights[token_idx, selection_idx, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(hidden_states.dtype))
    return final_hidden_states


def looped(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Match Step-3.7's experts."""
    final = torch.zeros_like(hidden_states)
    with torch.no_grad():
        mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(mask[expert_idx])
        current = self._apply_gate(F.linear(hidden_states[token_idx], self.gate_up_proj[expert_idx]))
        current = F.linear(current, self.down_proj[expert_idx]) * top_k_weights[token_idx, top_k_pos, None]
        final.index_add_(0, token_idx, current.to(final.dtype))
    return final


def looped_all(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """Match the same in transformers 5.17, which has no id for nobody."""
    final = torch.zeros_like(hidden_states)
    with torch.no_grad():
        mask = F.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(mask[expert_idx])
        current = self._apply_gate(F.linear(hidden_states[token_idx], self.gate_up_proj[expert_idx]))
        current = F.linear(current, self.down_proj[expert_idx]) * top_k_weights[token_idx, top_k_pos, None]
        final.index_add_(0, token_idx, current.to(final.dtype))
    return final


def limited_behind(self: Any, gate_up: Tensor) -> Any:
    """Match the gate of Step-3.7's experts."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = self.act_fn(gate).clamp(max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return gate * up


def matches(module: Any, pattern: Callable[..., Any]) -> bool:
    """Return True if the forward of ``module`` is word for word that of ``pattern``."""
    return bool(is_code(original(type(module)).forward, pattern))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_code(function: Any, pattern: Callable[..., Any]) -> bool:
    """Return True if ``function`` is word for word ``pattern``; torch.compile cannot trace how Python finds code."""
    try:
        return code_of(function) == code_of(pattern)
    except UnrecognisedError:
        return False


def is_unlimited(module: Any) -> bool:
    """Return True if the gate of Step-3.7's experts is known, and has no limit."""
    known = "_apply_gate" not in vars(module) and is_code(original(type(module))._apply_gate, limited_behind)
    return bool(known and module.limit == math.inf)


def experts_of(module: Any) -> Any:
    """Return the experts of a block, without PEFT's wrappers around them; experts themselves are returned."""
    experts = module.experts if matches(module, scored_block) else module
    return experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts


def block_forward(self: Any, hidden_states: Tensor, experts: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Compute Llama 4's block, with ``experts`` that run each token's rows."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(x)
    scores, index = router_scores.topk(self.top_k, dim=1)
    out = self.shared_expert(x)
    rows = experts((x[:, None] * scores[..., None]).flatten(0, 1), index.reshape(-1, 1))
    out.add_(rows.view(-1, self.top_k, self.hidden_dim).sum(1))
    return out, router_logits


def rows_forward(self: Any, x: Tensor, index: Tensor, kernel: str) -> Tensor:
    """Compute Llama 4's experts for rows that have an expert each."""
    (gate_up, gate_up_lora), (down, down_lora) = (factored(self, name, transposed=True) for name in PACKED)
    loras: dict[str, Any] = {"gate_up_lora": gate_up_lora, "down_lora": down_lora}
    weights = torch.ones_like(index, dtype=x.dtype)
    return moe_experts(x, gate_up, down, index, weights, act=KERNELS[kernel], transposed=True, **loras)


def identities_forward(self: Any, x: Tensor, index: Tensor, weights: Tensor, kernel: str) -> Tensor:
    """Compute LongCat's experts; ``gate_up_proj`` also has rows for those that return their input."""
    E = self.num_routed_experts
    (gate_up, lora), (down, down_lora) = (factored(self, name, transposed=False) for name in PACKED)
    if lora is not None:
        a, b, scale = lora
        lora = a[:E], b[:E], scale
    loras: dict[str, Any] = {"gate_up_lora": lora, "down_lora": down_lora}
    out = moe_experts(x, gate_up[:E], down, index, weights, act=KERNELS[kernel], **loras)
    identity = weights.masked_fill(index < E, 0.0).sum(-1, keepdim=True)
    return (out + x * identity).to(x.dtype)


def looped_forward(self: Any, x: Tensor, index: Tensor, weights: Tensor, kernel: str) -> Tensor:
    """Compute Step-3.7's experts without a limit."""
    (gate_up, lora), (down, down_lora) = (factored(self, name, transposed=False) for name in PACKED)
    loras: dict[str, Any] = {"gate_up_lora": lora, "down_lora": down_lora}
    return moe_experts(x, gate_up, down, index, weights, act=KERNELS[kernel], **loras)


class OwnExperts(Recogniser):
    """Recogniser for the block of Llama 4, and for the experts of LongCat and Step-3.7.

    It also reports all other experts with a gate that transformers' interface of experts does not run.
    """

    pattern = "experts"
    options = ("mlp",)

    def depends_on(self, module: nn.Module, model: nn.Module) -> list[nn.Module]:
        """Return the module, its experts and their router."""
        return [module, experts_of(module), getattr(module, "router", module)]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for known code, and for experts with a gate but without the interface."""
        own = is_experts(module) and not is_run_by_transformers(type(module))
        return own or matches(module, scored_block) or matches(module, with_identities)

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the name of the kernel for the activation. Raises UnrecognisedError."""
        if not self.looks_like(module):
            raise UnrecognisedError("its code is not known")
        experts: Any = experts_of(module)
        if is_experts(module):
            if not (matches(module, looped) or matches(module, looped_all)):
                raise UnrecognisedError("its experts are not run by transformers' ALL_EXPERTS_FUNCTIONS")
            if not is_unlimited(module):
                raise UnrecognisedError("its gate is not known, or has a limit behind its activation")
        if experts is not module and not (matches(module.router, scored_router) and matches(experts, scored_experts)):
            raise UnrecognisedError(f"its router is a {type(module.router)}, its experts are a {type(experts)}")
        if matches(module, with_identities) and (
            type(module.identity_expert) is not nn.Identity or module.num_routed_experts == 0
        ):
            raise UnrecognisedError("it has no routed experts, or its others do not return their input")
        check_weights(experts.gate_up_proj, experts.down_proj)
        return kernel_of(experts.act_fn) + adapters(experts, model)

    def swaps(self, module: nn.Module, variant: str) -> list[tuple[nn.Module, str]]:
        """Return the module and its experts."""
        return [(part, variant) for part in dict.fromkeys((module, experts_of(module)))]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which runs the original where no kernel can, or if a part has changed or has hooks."""
        kernel = next(kernel for kernel in KERNELS if kernel in variant)
        code = code_of(original(cls).forward)

        def of_block(self: Any, hidden_states: Tensor) -> Any:
            experts = self.experts.get_base_layer() if hasattr(self.experts, "get_base_layer") else self.experts
            ours = hasattr(type(experts), "_liger_like") and runs(kernel, experts.act_fn) and use_kernel(hidden_states)
            ours = ours and not any(map(changed, (self.router, self.experts, experts)))
            return block_forward(self, hidden_states, self.experts) if ours else cls.forward(self, hidden_states)

        def of_rows(self: Any, hidden_states: Tensor, index: Tensor | None = None) -> Any:
            if index is None:
                return cls.forward(self, hidden_states)
            return rows_forward(self, hidden_states, index, kernel)

        def of_identities(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            if not (runs(kernel, self.act_fn) and use_kernel(hidden_states)) or changed(self.identity_expert):
                return cls.forward(self, hidden_states, top_k_index, top_k_weights)
            return identities_forward(self, hidden_states, top_k_index, top_k_weights, kernel)

        def of_loop(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            if not (is_unlimited(self) and runs(kernel, self.act_fn) and use_kernel(hidden_states)):
                return cls.forward(self, hidden_states, top_k_index, top_k_weights)
            return looped_forward(self, hidden_states, top_k_index, top_k_weights, kernel)

        forwards = {scored_block: of_block, scored_experts: of_rows, with_identities: of_identities}
        forwards |= {looped: of_loop, looped_all: of_loop}
        return {"forward": next(forward for pattern, forward in forwards.items() if code == code_of(pattern))}

    def miniature(self, module: Any, variant: str) -> nn.Module:
        """Return 4 experts of 8 features, 6 inside, alone, in a block or with 2 identities."""
        experts = experts_of(module)
        own = {"act_fn": copy.deepcopy(experts.act_fn), "hidden_size": 8}
        if is_experts(module):
            weights = {"gate_up_proj": random_parameter(4, 12, 8), "down_proj": random_parameter(4, 8, 6)}
            return bare(type(module), **own, num_experts=4, limit=module.limit, **weights)
        if experts is module:
            weights = {"gate_up_proj": random_parameter(6, 12, 8), "down_proj": random_parameter(4, 8, 6)}
            own |= {"identity_expert": nn.Identity(), "num_routed_experts": 4, "total_experts": 6}
            return bare(type(module), **own, **weights)
        weights = {"gate_up_proj": random_parameter(4, 8, 12), "down_proj": random_parameter(4, 6, 8)}
        top_k = min(4, module.top_k)
        parts = {
            "experts": bare(type(experts), **own, **weights),
            "router": bare(type(module.router), weight=random_parameter(4, 8), bias=None, top_k=top_k),
            "shared_expert": nn.Linear(8, 8, device="cpu", dtype=torch.float32),
        }
        return bare(type(module), hidden_dim=8, top_k=top_k, **parts)

    def trial(self, module: Any, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of 6 rows. LongCat's have 2 experts each, one of the last of which some return their input."""
        experts, kernel = experts_of(module), next(kernel for kernel in KERNELS if kernel in variant)
        width = experts.hidden_size if experts is not module else experts.down_proj.shape[1]
        x, forward = random_like(experts.down_proj, 6, width), type(module).forward
        parameters, depth = tuple(module.parameters()), 3 * max(experts.down_proj.shape[1:])
        if experts is module:
            own = looped_forward if is_experts(module) else identities_forward
            row, total = torch.arange(6, device=x.device), len(module.gate_up_proj)
            index = torch.stack((row % total, total - 1 - row % total), 1)
            weights = random_like(x, 6, 2).abs()
            return Trial(
                lambda x, weights: forward(module, x, index, weights),
                lambda x, weights: own(module, x, index, weights, kernel),
                (x, weights),
                parameters,
                depth,
            )

        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            experts.forward = functools.partial(rows_forward, experts, kernel=kernel)  # PEFT's wrappers call it
            try:
                return block_forward(module, x, module.experts)
            finally:
                del experts.forward

        return Trial(lambda x: forward(module, x), block, (x,), parameters, depth)
