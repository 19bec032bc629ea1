"""The shapes of ``bench``: those that models have, and sweeps of one size around Llama-3-8B's."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmark.kernels.contestants import SPECS

Shape = Mapping[str, Any]

TOKENS, BATCH = 16384, 4
ELEMENTS = 2**26  # of a norm's input at every width: too many for a cache


def shapes(hidden: int, intermediate: int, heads: int, kv_heads: int, head: int, vocab: int) -> dict[str, Shape]:
    """Return the shapes of every op in a layer or a head of these sizes."""
    lead, S, per_head = {"lead": (TOKENS,)}, TOKENS // BATCH, {"H": heads, "Hk": kv_heads, "D": head}
    rope, glu = {"B": BATCH, "S": S, **per_head, "R": head}, {**lead, "N": intermediate}
    norm = {**lead, "N": hidden, "weight": True}
    return {
        "rms_norm": norm,
        "add_rms_norm": {**norm, "residual": True},
        "layer_norm": {**norm, "bias": True},
        "swiglu": glu,
        "geglu": glu,
        "geglu_exact": glu,
        "rope": rope,
        "qk_norm_rope": {**rope, "weights": True},
        "cross_entropy": {"lead": (TOKENS // 4,), "V": vocab},
        "fused_linear_cross_entropy": {"lead": (TOKENS // 2,), "H": hidden, "V": vocab},
        "fused_linear_logprobs": {"lead": (TOKENS // 2,), "H": hidden, "V": vocab},
        "fused_linear_token_loss": {"lead": (TOKENS // 2,), "H": hidden, "V": vocab, "per_token": True},
        "fused_linear_divergence": {"lead": (TOKENS // 2,), "H": hidden, "Ht": hidden, "V": vocab},
        "moe_experts": {**lead, "H": hidden, "I": intermediate, "E": 8, "K": 2},
        "flash_attention": {"B": BATCH, "S": S, "Sk": S, **per_head},
        "flash_attention_varlen": {**SPECS["flash_attention_varlen"].bench_shapes[0], **per_head},
    }


def only(of: Mapping[str, Shape], *names: str) -> dict[str, list[Shape]]:
    return {name: [of[name]] for name in names}


def mixture(experts: Shape) -> dict[str, list[Shape]]:
    """Return the shapes of a mixture of ``experts``, and of its router if it chooses 8, as the routers measured do."""
    router = {"lead": experts["lead"], "E": experts["E"]}
    names = ("moe_route", "load_balancing_loss") if experts["K"] == 8 else ()
    return only({"moe_experts": experts, **dict.fromkeys(names, router)}, "moe_experts", *names)


def sweep(names: Iterable[str], sizes: Iterable[Shape]) -> dict[str, list[Shape]]:
    """Return the shapes of Llama-3-8B with other sizes, as far as an op has those."""
    return {
        name: [{**EIGHT_B[name], **{k: n for k, n in s.items() if k in EIGHT_B[name]}} for s in sizes] for name in names
    }


EIGHT_B = shapes(4096, 14336, 32, 8, 128, 128256)
# DeepSeek-V3: an eighth of its heads; RoPE on the rotated parts of q and k; one expert
DEEPSEEK = shapes(7168, 2048, 16, 16, 192, 129280)
DEEPSEEK["rope"] = {**DEEPSEEK["rope"], "Hk": 1, "D": 64, "R": 64}
DEEPSEEK["flash_attention"] = {**DEEPSEEK["flash_attention"], "Dv": 128}

MIXTURES = dict(
    zip(
        ("Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3", "GPT-OSS-20B", "OLMoE"),
        SPECS["moe_experts"].bench_shapes,
        strict=True,
    )
)
DEEPSEEK["moe_experts"] = MIXTURES.pop("DeepSeek-V3")  # 32 of its 256 experts
DEEPSEEK["moe_route_groups"] = {"lead": (TOKENS,), "E": 256}

LOSSES = (
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_logprobs",
    "fused_linear_token_loss",
    "fused_linear_divergence",
)
ALL = "rms_norm", "add_rms_norm", *LOSSES, "flash_attention"
PACKED = "flash_attention_varlen"
SHAPES: dict[str, dict[str, list[Shape]]] = {
    "Llama-3.2-1B": only(shapes(2048, 8192, 32, 8, 64, 128256), *ALL, PACKED, "swiglu", "rope"),
    "Llama-3-8B": only(EIGHT_B, *ALL, PACKED, "swiglu", "rope"),
    "Qwen3-8B": only(shapes(4096, 12288, 32, 8, 128, 151936), *ALL, "swiglu", "qk_norm_rope"),
    "Gemma-2-9B": only(shapes(3584, 14336, 16, 8, 256, 256000), *ALL, "geglu", "rope"),
    "DeepSeek-V3": only(DEEPSEEK, *ALL, "swiglu", "rope", "moe_experts", "moe_route_groups"),
    **{name: mixture(shape) for name, shape in MIXTURES.items()},
    "rows": sweep(("rms_norm", "swiglu", "geglu_exact"), [{"lead": (m,)} for m in (1024, 4096, 16384, 65536)]),
    "hidden": sweep(
        ("rms_norm", "add_rms_norm", "layer_norm"),
        [{"lead": (ELEMENTS // n,), "N": n} for n in (1024, 2048, 4096, 8192, 16384)],
    ),
    "vocabulary": sweep(LOSSES, [{"V": v} for v in (32000, 64000, 128256, 256000)]),
    "few rows": {
        "moe_experts": [
            {**MIXTURES[name], "lead": (t,)} for name in ("Qwen3-30B-A3B", "Mixtral-8x7B") for t in (2048, 512)
        ]
    },
    # for K 8 an eighth of the rows is the most that an expert can have
    "skewed routing": {
        "moe_experts": [
            {**MIXTURES[name], "busy": share} for name, share in (("Qwen3-30B-A3B", 0.125), ("Mixtral-8x7B", 0.3))
        ]
    },
    "adapters": {
        "moe_experts_lora": [
            {**MIXTURES[name], "rank": 16} for name in ("Qwen3-30B-A3B", "GPT-OSS-20B", "Mixtral-8x7B")
        ]
    },
    "sequence": sweep(
        ("rope", "flash_attention"), [{"B": TOKENS // s, "S": s, "Sk": s} for s in (1024, 2048, 4096, 8192, 16384)]
    ),
}


class Case(NamedTuple):
    """An op, a shape, and which models and sweeps have it."""

    op: str
    shape: Shape
    of: list[str]


def cases(ops: Iterable[str], names: Iterable[str]) -> list[Case]:
    """Return every shape of these ops in these models and sweeps, once."""
    found: dict[str, Case] = {}
    for op in ops:
        for name, shapes in SHAPES.items():
            for shape in shapes.get(op, ()):
                found.setdefault(f"{op} {sorted(shape.items())}", Case(op, shape, [])).of.append(name)
    return [case for case in found.values() if {*case.of} & {*names}]
