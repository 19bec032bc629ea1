"""Table of the ops; tests, benchmarks and the docs use it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from liger_like import ops
from liger_like.ops.attention import flash_attention_ref, flash_attention_varlen_ref
from liger_like.ops.attention.paged import flash_attention_paged_ref
from liger_like.ops.experts import moe_experts_ref
from liger_like.ops.glu import geglu_ref, swiglu_ref
from liger_like.ops.layer_norm import layer_norm_ref
from liger_like.ops.load_balancing import load_balancing_loss_ref
from liger_like.ops.losses.cross_entropy import cross_entropy_ref
from liger_like.ops.losses.linear_cross_entropy import OUTPUTS, fused_linear_cross_entropy_ref
from liger_like.ops.losses.linear_divergence import OUTPUTS as DIVERGENCE_OUTPUTS
from liger_like.ops.losses.linear_divergence import fused_linear_divergence_ref
from liger_like.ops.losses.linear_logprobs import OUTPUTS as TOKEN_OUTPUTS
from liger_like.ops.losses.linear_logprobs import fused_linear_logprobs_ref
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss_ref
from liger_like.ops.qk_norm_rope import qk_norm_rope_ref
from liger_like.ops.rms_norm import add_rms_norm_ref, rms_norm_ref
from liger_like.ops.rope import rope_ref
from liger_like.ops.router import moe_route_ref
from liger_like.testing import costs
from liger_like.testing.costs import Cost
from liger_like.testing.inputs import (
    Inputs,
    attention_inputs,
    attention_varlen_inputs,
    balance_inputs,
    divergence_inputs,
    experts_inputs,
    glu_inputs,
    linear_loss_inputs,
    loss_inputs,
    norm_inputs,
    paged_inputs,
    rope_inputs,
    route_inputs,
    with_longest,
    with_lora,
    with_loss_of_tokens,
    with_pages,
    with_top_k,
    with_transposed,
)


@dataclass(frozen=True)
class OpSpec:
    """Row of the table: an op, its definition ``ref``, test and benchmark shapes, and its cost.

    ``inputs(dtype, device, **shape)`` returns random arguments; differentiable ones require a gradient.
    ``cost(itemsize, **shape, **options)`` returns the bytes that the forward must move, the bytes that the backward
    must move (each input read once, each output written once) and the FLOPs of the matrix products of both. ``k`` is
    the factor of the comparison rule. An op that is not ``differentiable`` is for inference.
    """

    name: str
    formula: str
    fn: Callable[..., Any]
    ref: Callable[..., Any]
    inputs: Callable[..., Inputs]
    options: tuple[dict[str, Any], ...]
    test_shapes: tuple[dict[str, Any], ...]
    bench_shapes: tuple[dict[str, Any], ...]
    cost: Callable[..., Cost]
    paper: str
    k: float = 1.1
    differentiable: bool = True


def _product(axes: Iterable[dict[str, Any]], *more: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    rest = _product(*more) if more else ({},)
    return tuple(a | b for a in axes for b in rest)


# 0 and 1 rows, a prime, several leading dimensions; widths around the tiles' 4096 columns
_ROWS = ({"lead": (0,)}, {"lead": (1,)}, {"lead": (2, 3, 5)}, {"lead": (37,)})
_NORM_SHAPES = (
    *_product(_ROWS, ({"N": 97}, {"N": 128})),
    *({"lead": (5,), "N": n} for n in (8, 4095, 4096, 4097, 9001)),
)
_NORM_BENCH = tuple(
    {"lead": (m,), "N": n} for m, n in ((16384, 2048), (16384, 4096), (8192, 8192), (8192, 16384), (262144, 128))
)
_CASTING: tuple[dict[str, Any], ...] = (
    {},
    {"casting_mode": "gemma", "offset": 1.0, "eps": 1e-5},
    {"casting_mode": "none", "offset": 0.5},
)
_WEIGHT = {"weight": True}
_HEADS = {"B": 2, "H": 6, "Hk": 2, "S": 7, "D": 24}
_HF_HEADS = {"B": 4, "H": 32, "Hk": 8, "S": 4096, "D": 128, "R": 128}
_GLU_SHAPES = (
    *_product((*_ROWS, {"lead": (3,)}), ({"N": 63},), ({}, {"packed": True})),
    *_product(({"lead": (1,)}, {"lead": (3,)}), ({"N": 1025},), ({}, {"packed": True})),  # more than a block
)
_GLU_BENCH = _product(({"lead": (16384,), "N": 14336},), ({}, {"packed": True}))
_LOSS_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "z_loss": 1e-2},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 1.1},
    {"num_items": 11, "reduction": "mean"},
)
_MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True, "return_lse": True},
    {"window": (9, 4), "softcap": 3.0, "scale": 0.3},
)
_FEW = {"H": 2, "Hk": 1, "D": 48, "Dv": 16}
_GROUPS = {"H": 32, "Hk": 8}
_ROUTES: tuple[dict[str, Any], ...] = (
    {"top_k": 2},
    {"top_k": 3, "score": "softmax_of_top", "scale": 0.5},
    {"top_k": 4, "normalize": False, "groups": (4, 2, "max"), "scale": 16.0},
    {"top_k": 4, "score": "softmax", "eps": 0.3, "groups": (2, 1, "top2")},
    {"top_k": 4, "score": "sigmoid", "eps": 1e-20, "groups": (4, 2, "top2"), "scale": 2.5},
)
_DOCUMENTS = (5000, 137, 3000, 1024, 2911, 64, 3500, 748)  # 16384 tokens


SPECS = (
    OpSpec(
        "rms_norm",
        "x * rsqrt(mean(x^2) + eps) * (w + offset)",
        ops.rms_norm,
        rms_norm_ref,
        norm_inputs,
        _CASTING,
        (*_product(_NORM_SHAPES, (_WEIGHT,)), {"lead": (7,), "N": 64}),
        _product(_NORM_BENCH, (_WEIGHT,)),
        costs.norm(1),
        "arXiv:1910.07467",
    ),
    OpSpec(
        "add_rms_norm",
        "s = x + residual; rms_norm(s), s",
        ops.add_rms_norm,
        add_rms_norm_ref,
        norm_inputs,
        _CASTING,
        _product(_NORM_SHAPES, ({"weight": True, "residual": True},)),
        _product(_NORM_BENCH[1:3], ({"weight": True, "residual": True},)),
        costs.norm(1, residual=1),
        "arXiv:1910.07467",
    ),
    OpSpec(
        "layer_norm",
        "(x - mean(x)) * rsqrt(var(x) + eps) * w + b",
        ops.layer_norm,
        layer_norm_ref,
        norm_inputs,
        ({}, {"eps": 1e-3}),
        (
            *_product(_NORM_SHAPES, ({"weight": True, "bias": True},)),
            {"lead": (7,), "N": 64, "weight": True},
            {"lead": (7,), "N": 64},
        ),
        _product(_NORM_BENCH[1:3], ({"weight": True, "bias": True},)),
        costs.norm(2),
        "arXiv:1607.06450",
    ),
    OpSpec(
        "rope",
        "x * cos + rotate(x) * sin, for q and k",
        ops.rope,
        rope_ref,
        rope_inputs,
        ({}, {"layout": "interleaved"}, {"layout": "interleaved_in_half_out"}),
        (
            *_product((_HEADS,), ({"R": 24}, {"R": 10, "batched": False})),
            {"B": 1, "H": 33, "Hk": 1, "S": 1, "D": 64, "R": 64},
            {"B": 0, "H": 2, "Hk": 1, "S": 3, "D": 8, "R": 8},
        ),
        (_HF_HEADS,),
        costs.rope,
        "arXiv:2104.09864",
    ),
    OpSpec(
        "qk_norm_rope",
        "rope(rms_norm(q), rms_norm(k))",
        ops.qk_norm_rope,
        qk_norm_rope_ref,
        rope_inputs,
        ({}, {"casting_mode": "gemma", "offset": 1.0, "layout": "interleaved"}),
        (
            {**_HEADS, "R": 24, "weights": True},
            {**_HEADS, "R": 10, "weights": True},
            {"B": 1, "H": 2, "Hk": 1, "S": 3, "D": 264, "R": 128, "weights": True},
        ),
        ({**_HF_HEADS, "weights": True},),
        costs.rope,
        "arXiv:2302.05442",
    ),
    OpSpec(
        "swiglu",
        "silu(gate) * up",
        ops.swiglu,
        swiglu_ref,
        glu_inputs,
        ({},),
        _GLU_SHAPES,
        _GLU_BENCH,
        costs.glu,
        "arXiv:2002.05202",
    ),
    OpSpec(
        "geglu",
        "gelu(gate) * up",
        ops.geglu,
        geglu_ref,
        glu_inputs,
        ({}, {"approximate": "none"}),
        _GLU_SHAPES,
        _GLU_BENCH,
        costs.glu,
        "arXiv:2002.05202",
    ),
    OpSpec(
        "cross_entropy",
        "logsumexp(z) - z[target], with smoothing, z-loss, softcap, class weights",
        ops.cross_entropy,
        cross_entropy_ref,
        loss_inputs,
        _LOSS_OPTIONS,
        (
            *_product(_ROWS, ({"V": 53}, {"V": 128, "weighted": True, "int32": True})),
            *({"lead": (3,), "V": v} for v in (4095, 4096, 4097, 9001)),
        ),
        ({"lead": (8192,), "V": 32000}, {"lead": (8192,), "V": 128256}, {"lead": (4096,), "V": 256000}),
        costs.loss,
        "arXiv:1512.00567",
    ),
    OpSpec(
        "fused_linear_cross_entropy",
        "cross_entropy(x W^T + b), in chunks of tokens",
        with_lora(ops.fused_linear_cross_entropy),
        with_lora(fused_linear_cross_entropy_ref),
        linear_loss_inputs,
        (
            {},
            *({"chunk_rows": 16, **options} for options in _LOSS_OPTIONS),
            {"chunk_rows": 8, "outputs": OUTPUTS, "label_smoothing": 0.1, "softcap": 8.0},
            {"chunk_rows": 16, "recompute": True, "label_smoothing": 0.1, "z_loss": 1e-3},
            {"chunk_rows": 16, "outputs": ("lse", "correct")},
        ),
        (
            *_product(_ROWS, ({"H": 32, "V": 101},)),
            {"lead": (4, 9), "H": 24, "V": 128, "bias": True, "weighted": True},
            {"lead": (41,), "H": 24, "V": 97, "bias": True, "rank": 4},
            {"lead": (5,), "H": 16, "V": 4097},
        ),
        tuple(
            {"lead": (t,), "H": h, "V": v}
            for t, h, v in ((8192, 4096, 128256), (16384, 2048, 128256), (8192, 2304, 256000), (16384, 4096, 32000))
        ),
        costs.linear_loss,
        "arXiv:2410.10989",
    ),
    OpSpec(
        "fused_linear_logprobs",
        "log softmax(x W^T + b) at the target, entropy and others, in chunks of tokens",
        with_lora(ops.fused_linear_logprobs),
        with_lora(fused_linear_logprobs_ref),
        linear_loss_inputs,
        (
            {},
            {"chunk_rows": 16, "outputs": ("logprob", "entropy"), "temperature": 0.7},
            {"chunk_rows": 16, "outputs": TOKEN_OUTPUTS, "softcap": 8.0, "logit_scale": 1.1},
            {"chunk_rows": 16, "topk": 2, "uniform_gradient": True, "temperature": 1.3},
        ),
        (
            *_product(_ROWS, ({"H": 32, "V": 101},)),
            {"lead": (4, 9), "H": 24, "V": 128, "bias": True, "ids": 3},
            {"lead": (41,), "H": 24, "V": 97, "bias": True, "rank": 4, "ids": 5},
            {"lead": (5,), "H": 16, "V": 4097, "ids": 1},
        ),
        tuple(
            {"lead": (t,), "H": h, "V": v}
            for t, h, v in ((8192, 4096, 128256), (8192, 4096, 151936), (16384, 2048, 248320))
        ),
        costs.linear_loss,
        "arXiv:2410.10989",
    ),
    OpSpec(
        "fused_linear_divergence",
        "KL(q || p), KL(p || q) or Jensen-Shannon of p = softmax(x W^T + b) and a teacher's q, in chunks of tokens",
        with_lora(ops.fused_linear_divergence),
        with_lora(fused_linear_divergence_ref),
        divergence_inputs,
        (
            {},
            {"chunk_rows": 16, "beta": 0.5, "temperature": 0.7, "outputs": DIVERGENCE_OUTPUTS},
            {"chunk_rows": 16, "beta": 1.0, "reduction": "none", "softcap": 8.0, "teacher_softcap": 6.0},
        ),
        (
            *({"lead": (t,), "H": 32, "Ht": 24, "V": 101} for t in (0, 37)),
            {"lead": (4, 9), "H": 24, "Ht": 40, "V": 400, "mask": True, "bias": True, "rank": 4},
            {"lead": (5,), "H": 16, "Ht": 16, "V": 4097},
        ),
        ({"lead": (8192,), "H": 4096, "Ht": 4096, "V": 151936},),
        costs.divergence,
        "arXiv:2306.13649",
    ),
    OpSpec(
        "fused_linear_token_loss",
        "sum over tokens of a function of their log-probabilities, in chunks of tokens",
        with_lora(with_loss_of_tokens(ops.fused_linear_token_loss)),
        with_lora(with_loss_of_tokens(fused_linear_token_loss_ref)),
        linear_loss_inputs,
        ({}, {"chunk_rows": 16, "outputs": ("entropy", "correct"), "topk": 2, "softcap": 8.0, "temperature": 0.7}),
        (
            {"lead": (0,), "H": 32, "V": 101, "per_token": True},
            {"lead": (2, 3, 5), "H": 32, "V": 101, "per_token": True},
            {"lead": (41,), "H": 24, "V": 97, "bias": True, "rank": 4, "ids": 5, "per_token": True},
        ),
        tuple(
            {"lead": (t,), "H": h, "V": v, "per_token": True}
            for t, h, v in ((8192, 4096, 151936), (16384, 2048, 248320))
        ),
        costs.linear_loss,
        "arXiv:2402.03300",
    ),
    OpSpec(
        "moe_experts",
        "sum over k of w_k (act(x W_gate) * (x W_up)) W_down, for the K experts of each token",
        with_lora(with_transposed(ops.moe_experts)),
        with_lora(with_transposed(moe_experts_ref)),
        experts_inputs,
        (
            {},
            {"act": "gelu_tanh", "limit": 2.0, "transposed": True},
            {"alpha": 1.702, "limit": 1.5, "transposed": True, "interleaved": True},
            {"act": "gelu", "interleaved": True},
        ),
        (
            *({"lead": (t,), "H": 32, "I": 16, "E": 4, "K": 2} for t in (0, 37)),
            {"lead": (2, 3, 5), "H": 48, "I": 20, "E": 3, "K": 1},
            {"lead": (9,), "H": 25, "I": 16, "E": 65, "K": 4},
            {"lead": (35,), "H": 32, "I": 24, "E": 4, "K": 3, "elsewhere": 3},
            {"lead": (4, 5), "H": 40, "I": 24, "E": 4, "K": 3, "bias": True},
        ),
        tuple(
            {"lead": (t,), "H": h, "I": i, "E": e, "K": k}
            for t, h, i, e, k in (
                (8192, 4096, 14336, 8, 2),
                (16384, 2048, 768, 128, 8),
                (4096, 7168, 2048, 32, 8),
                (16384, 2880, 2880, 32, 4),
                (16384, 2048, 1024, 64, 8),
            )
        ),
        costs.experts,
        "arXiv:2512.14080",
    ),
    OpSpec(
        "flash_attention",
        "softmax(softcap(scale q k^T) + bias) v, with causal mask, window, sinks, padding",
        ops.flash_attention,
        flash_attention_ref,
        attention_inputs,
        ({}, *_MASKS),
        (
            {"B": 2, "S": 12, "Sk": 40, **_FEW, "sinks": True, "bias": "hk", "padded": True},
            {"B": 1, "S": 70, "Sk": 70, "H": 1, "Hk": 1, "D": 32},
            {"B": 0, "S": 5, "Sk": 5, "H": 2, "Hk": 1, "D": 16},
        ),
        (
            *_product(({"B": 4, "S": 4096, "Sk": 4096, **_GROUPS},), ({"D": d} for d in (128, 64, 96))),
            {"B": 4, "S": 4096, "Sk": 4096, "H": 16, "Hk": 8, "D": 256},
            {"B": 4, "S": 4096, "Sk": 4096, "H": 16, "Hk": 16, "D": 192, "Dv": 128},
            {"B": 1, "S": 16384, "Sk": 16384, **_GROUPS, "D": 128},
            {"B": 16, "S": 1024, "Sk": 1024, **_GROUPS, "D": 128},
        ),
        costs.attention,
        "arXiv:2307.08691",
        k=2,
    ),
    OpSpec(
        "flash_attention_varlen",
        "flash_attention within each of the packed sequences",
        with_longest(ops.flash_attention_varlen),
        with_longest(flash_attention_varlen_ref),
        attention_varlen_inputs,
        ({}, *_MASKS),
        (
            {"lengths": ((14, 40), (0, 7), (3, 9)), **_FEW, "sinks": True},
            {"lengths": ((17, 17), (38, 38)), "H": 2, "Hk": 2, "D": 32},
        ),
        ({"lengths": tuple((n, n) for n in _DOCUMENTS), **_GROUPS, "D": 128},),
        costs.attention_varlen,
        "arXiv:2307.08691",
        k=2,
    ),
    OpSpec(
        "flash_attention_paged",
        "flash_attention of the last rows of each sequence over keys in pages",
        with_pages(ops.flash_attention_paged),
        with_pages(flash_attention_paged_ref),
        paged_inputs,
        ({}, {"return_lse": True, "window": (50, 0), "softcap": 3.0, "scale": 0.3}),
        (
            {"lengths": ((1, 70), (1, 3), (1, 600)), **_FEW, "page": 16, "sinks": True},
            {"lengths": ((3, 40), (0, 7), (30, 90)), **_FEW, "page": 8, "kind": "slots", "new": True},
            {"lengths": ((1, 9), (1, 20)), "H": 4, "Hk": 4, "D": 24, "page": 1, "kind": "static"},
            {"lengths": ((1, 70), (1, 3)), "H": 20, "Hk": 1, "D": 16, "Dv": 32, "page": 16, "latent": True},
        ),
        tuple({"lengths": ((1, 8192),) * b, **_GROUPS, "D": 128, "page": 256} for b in (1, 16, 64)),
        costs.paged,
        "arXiv:2309.06180",
        k=2,
        differentiable=False,
    ),
    OpSpec(
        "moe_route",
        "w_k = s_k / (sum_k s_k + eps), for the top k of s = softmax(z) or sigmoid(z), with a bias and groups",
        with_top_k(ops.moe_route),
        with_top_k(moe_route_ref),
        route_inputs,
        _ROUTES,
        (*_product(_ROWS, ({"E": 60}, {"E": 128, "bias": True})), *({"lead": (5,), "E": e} for e in (8, 96, 512))),
        tuple({"lead": (16384,), "E": e} for e in (64, 128, 256)),
        costs.route,
        "arXiv:1701.06538",
    ),
    OpSpec(
        "load_balancing_loss",
        "E sum_e f_e P_e, for the shares f of rows that choose an expert and the mean probabilities P",
        with_top_k(ops.load_balancing_loss),
        with_top_k(load_balancing_loss_ref),
        balance_inputs,
        ({}, {"top_k": 6}),
        (*_product(_ROWS, ({"E": 60}, {"E": 128, "mask": True})), {"lead": (5,), "E": 512}),
        tuple({"lead": (16384,), "E": e} for e in (64, 128)),
        costs.balance,
        "arXiv:2101.03961",
    ),
)
