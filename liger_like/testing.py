"""The table of ops and the one comparison rule; tests, benchmarks and the README are driven by them.

The rule: for every output and gradient, with random upstream gradients, ``||kernel - fp64|| <= k ||torch in the same
dtype - fp64|| + 1e-6 ||fp64||``, k = 1.1 for norms, activations, RoPE and losses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_like import ops
from liger_like.ops.cross_entropy import cross_entropy_ref
from liger_like.ops.glu import geglu_ref, swiglu_ref
from liger_like.ops.layer_norm import layer_norm_ref
from liger_like.ops.linear_cross_entropy import OUTPUTS, fused_linear_cross_entropy_ref
from liger_like.ops.qk_norm_rope import qk_norm_rope_ref
from liger_like.ops.rms_norm import add_rms_norm_ref, rms_norm_ref
from liger_like.ops.rope import rope_ref

Inputs = dict[str, Tensor]
Cost = tuple[int, int, int]


@dataclass(frozen=True)
class OpSpec:
    """One row of the table. ``inputs(dtype, device, **shape)`` makes random arguments; those to differentiate require a
    gradient.

    ``cost(itemsize, **shape)`` gives the bytes that the forward must move, those that the backward must (each input
    read once, each output written once) and the FLOPs of the matrix products of both.
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


@dataclass(frozen=True)
class Comparison:
    """Error norms of one output or gradient against float64, and the norm of the float64 result."""

    name: str
    kernel: float
    torch: float
    norm: float

    def passes(self, k: float = 1.1) -> bool:
        """Whether the rule holds (never for a NaN)."""
        return self.kernel <= k * self.torch + 1e-6 * self.norm


def run(fn: Callable[..., Any], inputs: Mapping[str, Tensor], options: Mapping[str, Any], seed: int = 0) -> Inputs:
    """Outputs of ``fn`` and the gradients of its inputs, named, for upstream gradients drawn from ``seed``."""
    leaves = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    result = fn(**leaves, **options)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    pairs = [(t, g) for t, g in zip(outputs, upstream, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    grads = {f"d{name}": t.grad for name, t in leaves.items() if t.requires_grad and t.grad is not None}
    return {f"out{i}": t.detach() for i, t in enumerate(outputs)} | grads


def _error(a: Tensor, b: Tensor) -> float:
    """Squared norm of the difference; the number of differences for integers."""
    return float((a.double() - b).square().sum() if b.is_floating_point() else (a != b).sum())


def compare(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    options: Mapping[str, Any],
    draws: int = 1,
) -> list[Comparison]:
    """Errors of ``fn`` and of ``ref`` in the dtype of the inputs, against ``ref`` in float64.

    The norms run over ``draws`` independent inputs and upstream gradients: on small tensors one draw says more about
    luck in rounding than about the kernel.
    """
    sums: dict[str, list[float]] = {}
    for seed in range(draws):
        inputs = make_inputs()
        double = {
            name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for name, t in inputs.items()
        }
        got, same, exact = (run(f, i, options, seed) for f, i in ((fn, inputs), (ref, inputs), (ref, double)))
        if {n: (t.shape, t.dtype) for n, t in got.items()} != {n: (t.shape, t.dtype) for n, t in same.items()}:
            raise AssertionError(f"shapes and dtypes differ: {got} against {same}")
        for name, t in exact.items():
            new = _error(got[name], t), _error(same[name], t), _error(t, torch.zeros_like(t))
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), new, strict=True)]
    return [Comparison(name, *(s**0.5 for s in three)) for name, three in sums.items()]


def assert_accurate(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    options: Mapping[str, Any],
    draws: int = 1,
    k: float = 1.1,
) -> None:
    """Raise AssertionError if an output or gradient breaks the rule."""
    failures = [c for c in compare(fn, ref, make_inputs, options, draws) if not c.passes(k)]
    assert not failures, "\n".join(
        f"{c.name}: {c.kernel:.3e}, torch {c.torch:.3e}, norm {c.norm:.3e}" for c in failures
    )


def _randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0, grad: bool = True) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_(grad)


def _labels(lead: tuple[int, ...], V: int, device: str, ignored: float = 0.2) -> Tensor:
    labels = torch.randint(0, V, lead, device=device)
    return labels.masked_fill(torch.rand(lead, device=device) < ignored, -100)


def _norm_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], N: int, **flags: bool) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    names = ["x"] + [n for n in ("residual", "weight", "bias") if flags.get(n)]
    return {n: randn(*(lead if n in ("x", "residual") else ()), N) for n in names}


def _rope_inputs(
    dtype: torch.dtype,
    device: str,
    B: int,
    H: int,
    Hk: int,
    S: int,
    D: int,
    R: int,
    layout: str = "full",
    batched: bool = True,
    weights: bool = False,
) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    q, k = (randn(B, S, heads, D).detach().transpose(1, 2).requires_grad_() for heads in (H, Hk))
    angle = torch.rand(*((B,) if batched else ()), S, R // 2, device=device) * 6.3
    angle = {"full": torch.cat((angle, angle), -1), "half": angle, "repeat": angle.repeat_interleave(2, -1)}[layout]
    norms = {n: randn(D) for n in ("q_weight", "k_weight")} if weights else {}
    return {"q": q, "k": k, **norms, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def _glu_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], N: int, packed: bool = False) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device, scale=2.0)
    return {"gate": randn(*lead, 2 * N)} if packed else {n: randn(*lead, N) for n in ("gate", "up")}


def _loss_inputs(
    dtype: torch.dtype, device: str, lead: tuple[int, ...], V: int, weighted: bool = False, int32: bool = False
) -> Inputs:
    inputs = {"logits": _randn(*lead, V, dtype=dtype, device=device, scale=3.0), "target": _labels(lead, V, device)}
    if int32:
        inputs["target"] = inputs["target"].int()
    return inputs | ({"weight": torch.rand(V, device=device)} if weighted else {})


def _linear_loss_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    V: int,
    bias: bool = False,
    weighted: bool = False,
    rank: int = 0,
) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"x": randn(*lead, H), "weight": randn(V, H, scale=2 * H**-0.5)}
    inputs["target"] = _labels(lead, V, device)
    if bias:
        inputs["bias"] = randn(V)
    if weighted:
        inputs["class_weight"] = torch.rand(V, device=device)
    if rank:
        inputs |= {"lora_a": randn(rank, H, scale=H**-0.5), "lora_b": randn(V, rank)}
    return inputs


def _with_lora(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        if "lora_a" in kwargs:
            kwargs["lora"] = kwargs.pop("lora_a"), kwargs.pop("lora_b"), 0.5
        return fn(**kwargs)

    return call


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
_GLU_SHAPES = _product((*_ROWS, {"lead": (3,)}), ({"N": 63}, {"N": 1025}), ({}, {"packed": True}))
_GLU_BENCH = _product(({"lead": (16384,), "N": 14336},), ({}, {"packed": True}))
_LOSS_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "z_loss": 1e-2},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 1.1},
    {"num_items": 11, "reduction": "mean"},
)


def _norm_cost(vectors: int, residual: int = 0) -> Callable[..., Cost]:
    """The backward reads the weight alone of the ``vectors``; dx is the gradient of a residual, too."""

    def cost(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
        M, row = torch.Size(lead).numel(), N * itemsize
        return ((2 + 2 * residual) * M + vectors) * row, ((3 + residual) * M + 1 + vectors) * row, 0

    return cost


def _rope_cost(itemsize: int, B: int, H: int, Hk: int, S: int, D: int, R: int, weights: bool = False, **_: Any) -> Cost:
    """A rotation is undone without its inputs, a norm is not."""
    heads, tables, vectors = B * S * (H + Hk) * D, 2 * B * S * R, 2 * D * weights
    return (2 * heads + tables + vectors) * itemsize, ((2 + weights) * heads + tables + 2 * vectors) * itemsize, 0


def _glu_cost(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * N * itemsize
    return 3 * size, 5 * size, 0


def _loss_cost(itemsize: int, lead: tuple[int, ...], V: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * V * itemsize
    return size, 2 * size, 0


def _linear_loss_cost(itemsize: int, lead: tuple[int, ...], H: int, V: int, **_: Any) -> Cost:
    """The gradients come from the forward's reading of x and the weight."""
    T = torch.Size(lead).numel()
    return (T + V) * H * itemsize, (T + V) * H * itemsize, 6 * T * H * V


SPECS = (
    OpSpec(
        "rms_norm",
        "x * rsqrt(mean(x^2) + eps) * (w + offset)",
        ops.rms_norm,
        rms_norm_ref,
        _norm_inputs,
        _CASTING,
        (*_product(_NORM_SHAPES, (_WEIGHT,)), {"lead": (7,), "N": 64}),
        _product(_NORM_BENCH, (_WEIGHT,)),
        _norm_cost(1),
        "arXiv:1910.07467",
    ),
    OpSpec(
        "add_rms_norm",
        "s = x + residual; rms_norm(s), s",
        ops.add_rms_norm,
        add_rms_norm_ref,
        _norm_inputs,
        _CASTING,
        _product(_NORM_SHAPES, ({"weight": True, "residual": True},)),
        _product(_NORM_BENCH[1:3], ({"weight": True, "residual": True},)),
        _norm_cost(1, residual=1),
        "arXiv:1910.07467",
    ),
    OpSpec(
        "layer_norm",
        "(x - mean(x)) * rsqrt(var(x) + eps) * w + b",
        ops.layer_norm,
        layer_norm_ref,
        _norm_inputs,
        ({}, {"eps": 1e-3}),
        (
            *_product(_NORM_SHAPES, ({"weight": True, "bias": True},)),
            {"lead": (7,), "N": 64, "weight": True},
            {"lead": (7,), "N": 64},
        ),
        _product(_NORM_BENCH[1:3], ({"weight": True, "bias": True},)),
        _norm_cost(2),
        "arXiv:1607.06450",
    ),
    OpSpec(
        "rope",
        "x * cos + rotate(x) * sin, for q and k",
        ops.rope,
        rope_ref,
        _rope_inputs,
        ({}, {"layout": "interleaved"}, {"layout": "interleaved_in_half_out"}),
        (
            *_product((_HEADS,), ({"R": 24}, {"R": 10, "batched": False})),
            {"B": 1, "H": 33, "Hk": 1, "S": 1, "D": 64, "R": 64},
            {"B": 0, "H": 2, "Hk": 1, "S": 3, "D": 8, "R": 8},
        ),
        (_HF_HEADS,),
        _rope_cost,
        "arXiv:2104.09864",
    ),
    OpSpec(
        "qk_norm_rope",
        "rope(rms_norm(q), rms_norm(k))",
        ops.qk_norm_rope,
        qk_norm_rope_ref,
        _rope_inputs,
        ({}, {"casting_mode": "gemma", "offset": 1.0, "layout": "interleaved"}),
        (
            {**_HEADS, "R": 24, "weights": True},
            {**_HEADS, "R": 10, "weights": True},
            {"B": 1, "H": 2, "Hk": 1, "S": 3, "D": 264, "R": 128, "weights": True},
        ),
        ({**_HF_HEADS, "weights": True},),
        _rope_cost,
        "arXiv:2302.05442",
    ),
    OpSpec(
        "swiglu",
        "silu(gate) * up",
        ops.swiglu,
        swiglu_ref,
        _glu_inputs,
        ({},),
        _GLU_SHAPES,
        _GLU_BENCH,
        _glu_cost,
        "arXiv:2002.05202",
    ),
    OpSpec(
        "geglu",
        "gelu(gate) * up",
        ops.geglu,
        geglu_ref,
        _glu_inputs,
        ({}, {"approximate": "none"}),
        _GLU_SHAPES,
        _GLU_BENCH,
        _glu_cost,
        "arXiv:2002.05202",
    ),
    OpSpec(
        "cross_entropy",
        "logsumexp(z) - z[target], with smoothing, z-loss, softcap, class weights",
        ops.cross_entropy,
        cross_entropy_ref,
        _loss_inputs,
        _LOSS_OPTIONS,
        (
            *_product(_ROWS, ({"V": 53}, {"V": 128, "weighted": True, "int32": True})),
            *({"lead": (3,), "V": v} for v in (4095, 4096, 4097, 9001)),
        ),
        ({"lead": (8192,), "V": 32000}, {"lead": (8192,), "V": 128256}, {"lead": (4096,), "V": 256000}),
        _loss_cost,
        "arXiv:1512.00567",
    ),
    OpSpec(
        "fused_linear_cross_entropy",
        "cross_entropy(x W^T + b), in chunks of tokens",
        _with_lora(ops.fused_linear_cross_entropy),
        _with_lora(fused_linear_cross_entropy_ref),
        _linear_loss_inputs,
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
        _linear_loss_cost,
        "arXiv:2410.10989",
    ),
)
