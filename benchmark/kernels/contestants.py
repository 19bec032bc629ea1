"""The table of contestants: for each op ours, torch's, torch.compile's, and those of the libraries that are installed.

They build a forward without arguments of the inputs that ``testing.SPECS`` makes. Until then no library is imported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmark.common.measure import Build, Inputs, Step, present
from benchmark.kernels import experts
from liger_like import testing

SPECS = {spec.name: spec for spec in testing.SPECS if spec.differentiable}
EPS = 1e-6
LIGER, FLA_NORM, UNSLOTH = "liger_kernel.transformers.functional:", "fla.modules.norm.layernorm:", "unsloth.kernels."
MATH = "torch, math"  # stores all scores
BACKENDS = {
    MATH: SDPBackend.MATH,
    "torch, flash": SDPBackend.FLASH_ATTENTION,
    "torch, cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch_rms_norm(s, weight), s


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def torch_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up


def torch_geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.gelu(gate, approximate=approximate) * up


def torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in the dtype of q and k, as the models of transformers do."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    return rotate(q), rotate(k)


def torch_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch_cross_entropy(F.linear(x, weight), target)


def torch_linear_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return log-probabilities of whole logits in the dtype of x, as models return them; 0 for ignored tokens."""
    return -F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")


def torch_linear_token_loss(x: Tensor, weight: Tensor, target: Tensor, advantage: Tensor, value: Tensor) -> Tensor:
    """Return the sum over tokens of the loss of ``testing``, from whole logits in the dtype of x."""
    logprob = torch_linear_logprobs(x, weight, target)
    return (advantage * (logprob - value).square()).where(target >= 0, 0).sum()


def torch_linear_divergence(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """Return the mean over tokens of KL(teacher || student), from whole logits in the dtype of x."""
    logp, logq = (
        F.linear(states, head).float().log_softmax(-1) for states, head in ((x, weight), (teacher_x, teacher_weight))
    )
    return F.kl_div(logp, logq, reduction="batchmean", log_target=True)


def torch_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def torch_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalise as Qwen3 in transformers does, in fp32 and rounded before the weight, then rotate."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    return torch_rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def torch_moe_route(logits: Tensor, top_k: int) -> Tensor:
    """Return the weights of Qwen3-MoE's router in transformers, in fp32."""
    weights = F.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1).values
    return weights / weights.sum(-1, keepdim=True)


def torch_moe_route_groups(
    logits: Tensor, top_k: int, score: str, groups: tuple[int, int, str], scale: float, eps: float
) -> Tensor:
    """Return the weights of DeepSeek-V3's router in transformers."""
    scores = logits.float().sigmoid()
    by_group = scores.unflatten(-1, (groups[0], -1))
    chosen = by_group.topk(2, -1).values.sum(-1).topk(groups[1], -1, sorted=False).indices
    mask = torch.zeros_like(by_group[..., 0]).scatter_(-1, chosen, 1).unsqueeze(-1).bool()
    index = by_group.masked_fill(~mask, -torch.inf).flatten(-2).topk(top_k, -1, sorted=False).indices
    weights = scores.gather(-1, index)
    return weights / (weights.sum(-1, keepdim=True) + eps) * scale


def torch_load_balancing_loss(logits: Tensor, top_k: int) -> Tensor:
    """Compute the loss as transformers does, with the probabilities in fp32."""
    rows, experts = logits.shape
    probabilities = F.softmax(logits, -1, dtype=torch.float32)
    index = probabilities.topk(top_k, -1).indices.flatten()
    counts = probabilities.new_zeros(experts).scatter_add_(0, index, probabilities.new_ones(rows * top_k))
    return (counts / rows * (probabilities.sum(0) / rows)).sum() * experts


def first_result(op: testing.OpSpec) -> testing.OpSpec:
    """Return ``op`` with its first result alone: ``moe_route`` without its index, which has no gradient."""
    fn, ref = ((lambda *args, it=it, **kwargs: it(*args, **kwargs)[0]) for it in (op.fn, op.ref))
    return replace(op, fn=fn, ref=ref)


def named(function: Callable[..., Any] | str, **more: Any) -> Build:
    """Calls a function, or what a name stands for, with the inputs by their names."""
    return lambda inputs: partial(resolve_name(function) if isinstance(function, str) else function, **inputs, **more)


def in_order(function: str, **more: Any) -> Build:
    """Calls what a name stands for with the inputs in their order."""
    return lambda inputs: partial(resolve_name(function), *inputs.values(), **more)


def glu(function: str, packed: str = "") -> Build:
    """Calls a function of gate and up, for packed inputs one of both, if there is one, else that of their halves."""

    def build(inputs: Inputs) -> Step:
        gate_up = tuple(inputs.values())
        if len(gate_up) == 2 or packed:
            return partial(resolve_name(function if len(gate_up) == 2 else packed), *gate_up)
        halves = resolve_name(function)
        return lambda: halves(*gate_up[0].chunk(2, -1))

    return build


def liger_qk_norm_rope(inputs: Inputs) -> Step:
    """Normalise [B, S, H, D] before the heads are transposed, as in a patched Qwen3."""
    norm, rope = resolve_name(LIGER + "liger_rms_norm"), resolve_name(LIGER + "liger_rope")
    q, k, q_weight, k_weight, cos, sin = inputs.values()

    def forward() -> Any:
        pairs = (q, q_weight), (k, k_weight)
        return rope(*(norm(x.transpose(1, 2), weight, EPS).transpose(1, 2) for x, weight in pairs), cos, sin)

    return forward


def rope_of_each(function: str) -> Build:
    """Rotate [B, S, H, D], with cos and sin [S, R / 2] that all sequences share."""

    def build(inputs: Inputs) -> Step:
        rotary = resolve_name(function)
        q, k, *angles = inputs.values()
        cos, sin = (t[0].chunk(2, -1)[0].contiguous() for t in angles)
        return lambda: tuple(rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

    return build


def unsloth_rms_norm(inputs: Inputs) -> Step:
    return partial(resolve_name(UNSLOTH + "rms_layernorm:Fast_RMS_Layernorm.apply"), *inputs.values(), EPS)


def unsloth_rope(inputs: Inputs) -> Step:
    """Call with cos and sin [S, R] that all sequences share."""
    q, k, cos, sin = inputs.values()
    return partial(resolve_name(UNSLOTH + "rope_embedding:fast_rope_embedding"), q, k, cos[0], sin[0])


def unsloth_cross_entropy(inputs: Inputs) -> Step:
    """Return the arguments of a batch."""
    loss = resolve_name(UNSLOTH + "cross_entropy_loss:fast_cross_entropy_loss")
    return lambda: loss(*(t.unsqueeze(0) for t in inputs.values()))


@dataclass(frozen=True)
class Plain:
    """A row of ``testing.SPECS`` whose peers are a function in plain torch, which is compiled, too, and libraries.

    ``ours``: options of more of ours. ``others``: more in torch, of which no graph is compiled.
    """

    spec: testing.OpSpec
    torch: Callable[..., Any]
    libraries: Mapping[str, Build]
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: Mapping[str, Build] = field(default_factory=dict)

    def contestants(self) -> dict[str, Build]:
        ours = {
            name: named(self.spec.fn, **self.options, **more) for name, more in {"liger_like": {}, **self.ours}.items()
        }
        compiled = torch.compile(self.torch, dynamic=False, fullgraph=True)
        functions = {"torch": self.torch, "torch.compile": compiled}
        in_torch = {name: named(fn, **self.options) for name, fn in functions.items()} | {**self.others}
        return ours | in_torch | present(self.libraries)


def heads_first(fn: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    """Call ``fn`` on [B, H, S, D] views."""
    q, k, v = ((t if t.dim() == 4 else t.unsqueeze(0)).transpose(1, 2) for t in (inputs[name] for name in "qkv"))
    out: Tensor = fn(q, k, v, enable_gqa=True)
    return out.transpose(1, 2).reshape(*inputs["q"].shape[:-1], v.shape[-1])


def block_mask(inputs: Inputs, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> BlockMask | None:
    """Return the mask in the form that flex_attention takes. A window needs ``causal``."""
    device, S = inputs["q"].device, inputs["q"].shape[-3]
    left, documents = window[0] if window[0] >= 0 else S, None
    if "cu_seqlens_q" in inputs:
        documents = torch.bucketize(torch.arange(S, device=device), inputs["cu_seqlens_q"], right=True)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = (i >= j) & (i - j <= left) if causal else i == i
        return mask if documents is None else mask & (documents[i] == documents[j])

    return create_block_mask(seen, None, None, S, S, device=device) if causal or documents is not None else None


def packed(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments that functions of packed sequences take."""
    cu = {name: t for name, t in inputs.items() if name.startswith("cu_")}
    return {**cu, **{f"max_seqlen_{name[-1]}": int(t.diff().max()) for name, t in cu.items()}}


@dataclass(frozen=True)
class Attention:
    """A row of ``testing.SPECS`` whose peers compute what ``options``, a mask, says."""

    spec: testing.OpSpec
    options: Mapping[str, Any] = field(default_factory=lambda: {"causal": True})

    def contestants(self) -> dict[str, Build]:
        builds = {
            name: partial(self._ours, name != "liger_like") for name in ("liger_like", "liger_like, deterministic")
        }
        if self.spec.name == "flash_attention" and "window" not in self.options:
            builds |= {name: partial(self._sdpa, backend) for name, backend in BACKENDS.items()}
        return builds | {"flex_attention": self._flex} | present(self.libraries)

    @property
    def libraries(self) -> Mapping[str, Build]:
        return {"flash-attn-4": self._flash_attn_4}

    def _ours(self, deterministic: bool, inputs: Inputs) -> Step:
        return partial(self.spec.fn, **inputs | packed(inputs), deterministic=deterministic, **self.options)

    def _sdpa(self, backend: SDPBackend, inputs: Inputs) -> Step:
        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return heads_first(partial(F.scaled_dot_product_attention, is_causal=bool(self.options)), inputs)

        return forward

    def _flex(self, inputs: Inputs) -> Step:
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return partial(heads_first, partial(compiled, block_mask=block_mask(inputs, **self.options)), inputs)

    def _flash_attn_4(self, inputs: Inputs) -> Step:
        name = "flash_attn_varlen_func" if "cu_seqlens_q" in inputs else "flash_attn_func"
        options = {"causal": "causal" in self.options, "window_size": self.options.get("window", (None, None))}
        attend = partial(resolve_name("flash_attn.cute:" + name), **inputs | packed(inputs), **options)

        def forward() -> Tensor:
            out = attend()
            first: Tensor = out[0] if isinstance(out, tuple) else out  # some versions also return lse
            return first

        return forward


OPS: dict[str, Plain | Attention] = {
    "rms_norm": Plain(
        SPECS["rms_norm"],
        torch_rms_norm,
        {
            "Liger": in_order(LIGER + "liger_rms_norm", eps=EPS),
            "fla": named(FLA_NORM + "rms_norm", bias=None, eps=EPS),
            "quack": named("quack:rmsnorm", eps=EPS),
            "Unsloth": unsloth_rms_norm,
        },
    ),
    "add_rms_norm": Plain(
        SPECS["add_rms_norm"],
        torch_add_rms_norm,
        {
            "Liger": in_order(LIGER + "liger_fused_add_rms_norm", eps=EPS),
            "fla": named(FLA_NORM + "rms_norm", bias=None, eps=EPS, prenorm=True),
            "quack": named("quack:rmsnorm", eps=EPS, prenorm=True),
        },
    ),
    "layer_norm": Plain(
        SPECS["layer_norm"],
        torch_layer_norm,
        {"Liger": in_order(LIGER + "liger_layer_norm", eps=1e-5), "fla": named(FLA_NORM + "layer_norm")},
    ),
    "swiglu": Plain(
        SPECS["swiglu"],
        torch_swiglu,
        {
            "Liger": glu(LIGER + "liger_swiglu", packed="liger_kernel.ops:LigerFusedGateUpSiLUMulFunction.apply"),
            "fla": glu("fla.modules.activations:swiglu"),
        },
    ),
    "geglu": Plain(SPECS["geglu"], torch_geglu, {"Liger": glu(LIGER + "liger_geglu")}),
    "geglu_exact": Plain(SPECS["geglu"], torch_geglu, {}, {"approximate": "none"}),
    "rope": Plain(
        SPECS["rope"],
        torch_rope,
        {
            "Liger": in_order(LIGER + "liger_rope"),
            "fla": rope_of_each("fla.modules.rotary.ops:rotary_embedding"),
            "quack": rope_of_each("quack.rotary:apply_rotary_emb"),
            "Unsloth": unsloth_rope,
        },
    ),
    "qk_norm_rope": Plain(SPECS["qk_norm_rope"], torch_qk_norm_rope, {"Liger": liger_qk_norm_rope}),
    "cross_entropy": Plain(
        SPECS["cross_entropy"],
        torch_cross_entropy,
        {
            "Liger": in_order(LIGER + "liger_cross_entropy"),
            "quack": in_order("quack:cross_entropy"),
            "Unsloth": unsloth_cross_entropy,
        },
    ),
    "fused_linear_cross_entropy": Plain(
        SPECS["fused_linear_cross_entropy"],
        torch_linear_cross_entropy,
        {
            "Liger": in_order(LIGER + "liger_fused_linear_cross_entropy"),
            "Liger, dw in fp32": in_order(LIGER + "liger_fused_linear_cross_entropy", accum_dtype=torch.float32),
            "CCE": in_order("cut_cross_entropy:linear_cross_entropy", impl="cce"),
            "CCE, exact": in_order("cut_cross_entropy:linear_cross_entropy", impl="cce", filter_eps=None),
            "quack": in_order("quack.linear_cross_entropy:chunked_linear_cross_entropy"),
        },
        ours={
            "liger_like, recompute": {"recompute": True},
            "liger_like, dw in fp32": {"accum_dtype": torch.float32},
        },
    ),
    "fused_linear_logprobs": Plain(
        first_result(SPECS["fused_linear_logprobs"]),
        torch_linear_logprobs,
        {},
        ours={"liger_like, logits kept": {"keep_logits": 2**40}},
    ),
    "fused_linear_token_loss": Plain(SPECS["fused_linear_token_loss"], torch_linear_token_loss, {}),
    "fused_linear_divergence": Plain(SPECS["fused_linear_divergence"], torch_linear_divergence, {}),
    "moe_experts": Plain(
        SPECS["moe_experts"],
        experts.torch_experts,
        {"transformers": experts.transformers_experts, "Liger": experts.liger_experts},
        others={"torch, loop": named(experts.torch_experts_loop), experts.BOUND: experts.equal_experts},
    ),
    "moe_experts_lora": Plain(
        replace(
            SPECS["moe_experts"],
            inputs=experts.adapted_inputs,
            cost=experts.adapted_cost,
            bench_shapes=tuple({**shape, "rank": 16} for shape in SPECS["moe_experts"].bench_shapes),
        ),
        experts.torch_adapted_experts,
        {"transformers": experts.transformers_adapted_experts},
    ),
    "moe_route": Plain(first_result(SPECS["moe_route"]), torch_moe_route, {}, {"top_k": 8}),
    "moe_route_groups": Plain(
        first_result(SPECS["moe_route"]),
        torch_moe_route_groups,
        {},
        {"top_k": 8, "score": "sigmoid", "groups": (8, 4, "top2"), "scale": 2.5, "eps": 1e-20},
    ),
    "load_balancing_loss": Plain(SPECS["load_balancing_loss"], torch_load_balancing_loss, {}, {"top_k": 8}),
    "flash_attention": Attention(SPECS["flash_attention"]),
    "flash_attention_varlen": Attention(SPECS["flash_attention_varlen"]),
}


def libraries(ops: Iterable[Plain | Attention]) -> list[str]:
    """Return the names of all that compute one of ``ops``, installed or not."""
    return [*dict.fromkeys(name.partition(",")[0] for op in ops for name in op.libraries)]


def shape_text(shape: Mapping[str, Any]) -> str:
    """Return the text of a shape in reports: tokens, then sizes by their names."""
    sizes = {"T": shape["lead"][0]} if "lead" in shape else {}
    sizes |= {key: shape[key] for key in ("B", "S", "H", "Hk", "D", "Dv", "I", "E", "K", "N", "V") if key in shape}
    options = [f"{len(shape['lengths'])} documents"] if "lengths" in shape else []
    options += [f"rank {shape['rank']}"] if "rank" in shape else []
    options += [f"an expert has {shape['busy']:.1%} of the rows"] if "busy" in shape else []
    return ", ".join((" ".join(f"{key} {n}" for key, n in sizes.items()), *options))
