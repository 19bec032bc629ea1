"""Random inputs and costs of the ops, for the table in ``liger_like.testing``.

A cost is (forward bytes, backward bytes, FLOPs): the bytes that an op must move, and the FLOPs of its matrix products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Cost = tuple[int, int, int]


def _randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0, grad: bool = True) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_(grad)


def _labels(lead: tuple[int, ...], V: int, device: str, ignored: float = 0.2) -> Tensor:
    labels = torch.randint(0, V, lead, device=device)
    return labels.masked_fill(torch.rand(lead, device=device) < ignored, -100)


def norm_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    N: int,
    residual: bool = False,
    weight: bool = False,
    bias: bool = False,
) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    names = ["x"] + [n for n, asked in (("residual", residual), ("weight", weight), ("bias", bias)) if asked]
    return {n: randn(*(lead if n in ("x", "residual") else ()), N) for n in names}


def rope_inputs(
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


def glu_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], N: int, packed: bool = False) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device, scale=2.0)
    return {"gate": randn(*lead, 2 * N)} if packed else {n: randn(*lead, N) for n in ("gate", "up")}


def loss_inputs(
    dtype: torch.dtype, device: str, lead: tuple[int, ...], V: int, weighted: bool = False, int32: bool = False
) -> Inputs:
    inputs = {"logits": _randn(*lead, V, dtype=dtype, device=device, scale=3.0), "target": _labels(lead, V, device)}
    if int32:
        inputs["target"] = inputs["target"].int()
    return inputs | ({"weight": torch.rand(V, device=device)} if weighted else {})


def linear_loss_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    V: int,
    bias: bool = False,
    weighted: bool = False,
    rank: int = 0,
    ids: int = 0,
) -> Inputs:
    """Return random arguments of a fused linear loss, for ``ids`` words of each token, -1 among them."""
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"x": randn(*lead, H), "weight": randn(V, H, scale=2 * H**-0.5)}
    inputs["target"] = _labels(lead, V, device)
    if bias:
        inputs["bias"] = randn(V)
    if weighted:
        inputs["class_weight"] = torch.rand(V, device=device)
    if rank:
        inputs |= {"lora_a": randn(rank, H, scale=H**-0.5), "lora_b": randn(V, rank)}
    if ids:
        inputs["ids"] = torch.randint(-1, V, (*lead, ids), device=device)
    return inputs


def with_lora(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        for name, scale in (("lora", 0.5), ("gate_up_lora", 0.7), ("down_lora", 1.2)):
            if f"{name}_a" in kwargs:
                kwargs[name] = kwargs.pop(f"{name}_a"), kwargs.pop(f"{name}_b"), scale
        return fn(**kwargs)

    return call


def attention_inputs(
    dtype: torch.dtype,
    device: str,
    B: int,
    S: int,
    Sk: int,
    H: int,
    Hk: int,
    D: int,
    Dv: int | None = None,
    sinks: bool = False,
    bias: str | None = None,
    padded: bool = False,
    spans: bool = False,
) -> Inputs:
    """Return random arguments of ``flash_attention``.

    ``bias``: the letters of "bhsk" for the axes along which the bias is not broadcast. ``padded``: random keys are
    hidden, but not the first. ``spans``: random spans, some of them empty.
    """
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"q": randn(B, S, H, D), "k": randn(B, Sk, Hk, D), "v": randn(B, Sk, Hk, Dv or D)}
    if sinks:
        inputs["sinks"] = randn(H)
    if bias is not None:
        inputs["bias"] = randn(*(n if axis in bias else 1 for axis, n in zip("bhsk", (B, H, S, Sk), strict=True)))
    if padded:
        inputs["key_padding_mask"] = torch.rand(B, Sk, device=device) < 0.7
        inputs["key_padding_mask"][:, :1] = True
    if spans:
        ends = torch.randint(Sk + 1, (2, B, S), device=device, dtype=torch.int32).sort(-1).values
        inputs["spans"] = torch.stack((ends[0] * 2 // 3, ends[1]))
    return inputs


def attention_varlen_inputs(
    dtype: torch.dtype,
    device: str,
    lengths: tuple[tuple[int, int], ...],
    H: int,
    Hk: int,
    D: int,
    Dv: int | None = None,
    sinks: bool = False,
    behind: int = 0,
) -> Inputs:
    """Return random arguments of ``flash_attention_varlen``.

    ``lengths``: (queries, keys) of each sequence. ``behind``: rows after the last sequence.
    """
    cu = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    T, Tk = (cu[-1] + behind).tolist()
    batch = attention_inputs(dtype, device, 1, T, Tk, H, Hk, D, Dv, sinks)
    rows = {n: batch[n].detach()[0].requires_grad_() for n in ("q", "k", "v")}
    return {**batch, **rows, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu.T.contiguous().to(device), strict=True))}


def with_longest(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with default ``max_seqlen_q`` and ``max_seqlen_k``: the number of rows, an upper bound."""

    def call(q: Tensor, k: Tensor, **kwargs: Any) -> Any:
        return fn(**{"q": q, "k": k, "max_seqlen_q": len(q), "max_seqlen_k": len(k), **kwargs})

    return call


def route_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], E: int, bias: bool = False) -> Inputs:
    inputs = {"logits": _randn(*lead, E, dtype=dtype, device=device, scale=2.0)}
    return inputs | ({"bias": torch.randn(E, device=device) * 0.1} if bias else {})


def balance_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], E: int, mask: bool = False) -> Inputs:
    """Return random arguments of ``load_balancing_loss``; one expert is in favour."""
    favour = torch.zeros(E, device=device)
    favour[0] = 3
    logits = (torch.randn(*lead, E, device=device) + favour).to(dtype).requires_grad_()
    return {"logits": logits} | ({"mask": torch.rand(lead, device=device) < 0.7} if mask else {})


def with_top_k(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with a default ``top_k``."""

    def call(*args: Any, top_k: int = 2, **kwargs: Any) -> Any:
        return fn(*args, top_k=top_k, **kwargs)

    return call


def experts_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    I: int,
    E: int,
    K: int,
    bias: bool = False,
    elsewhere: int = 0,
    rank: int = 0,
    busy: float = 0.0,
) -> Inputs:
    """Return random arguments of ``moe_experts``, and with ``rank`` of its adapters.

    ``elsewhere``: how many of the ids drawn from are no experts here. ``busy``: the share of the rows that the first
    expert has, at most 1 / K; 0 stands for as many as the others have.
    """
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"x": randn(*lead, H), "gate_up": randn(E, 2 * I, H, scale=H**-0.5)}
    inputs["down"] = randn(E, H, I, scale=I**-0.5)
    scores = torch.rand(*lead, E + elsewhere, device=device)
    if busy:
        scores[..., 0] = torch.rand(lead, device=device).lt(busy * K) * 3.0 - 1  # the largest score or the least
    inputs["index"] = scores.topk(K).indices
    inputs["weights"] = torch.rand(*lead, K, device=device).to(dtype).requires_grad_()
    if bias:
        inputs |= {"gate_up_bias": randn(E, 2 * I), "down_bias": randn(E, H)}
    if rank:
        for name, wide, depth in (("gate_up_lora", 2 * I, H), ("down_lora", H, I)):
            inputs[f"{name}_a"] = randn(E, rank, depth, scale=depth**-0.5)
            inputs[f"{name}_b"] = randn(E, wide, rank, scale=rank**-0.5)
    return inputs


def with_transposed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` for experts [E, 2I, H] and [E, H, I], whether its option ``transposed`` is set or not."""

    def call(gate_up: Tensor, down: Tensor, **kwargs: Any) -> Any:
        gate_up, down = (gate_up.mT, down.mT) if kwargs.get("transposed") else (gate_up, down)
        return fn(gate_up=gate_up, down=down, **kwargs)

    return call


def norm_cost(vectors: int, residual: int = 0) -> Callable[..., Cost]:
    """Return the cost of a norm with ``vectors`` parameters; the backward reads the weight only, not the bias.

    A residual adds two tensors to the forward and one to the backward, since dx is also the residual's gradient.
    """

    def cost(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
        M, row = torch.Size(lead).numel(), N * itemsize
        return ((2 + 2 * residual) * M + vectors) * row, ((3 + residual) * M + 1 + vectors) * row, 0

    return cost


def rope_cost(itemsize: int, B: int, H: int, Hk: int, S: int, D: int, R: int, weights: bool = False, **_: Any) -> Cost:
    """Return the cost of rope, or with ``weights`` of qk_norm_rope, whose backward also reads q and k."""
    heads, tables, vectors = B * S * (H + Hk) * D, 2 * B * S * R, 2 * D * weights
    return (2 * heads + tables + vectors) * itemsize, ((2 + weights) * heads + tables + 2 * vectors) * itemsize, 0


def glu_cost(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * N * itemsize
    return 3 * size, 5 * size, 0


def loss_cost(itemsize: int, lead: tuple[int, ...], V: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * V * itemsize
    return size, 2 * size, 0


def linear_loss_cost(itemsize: int, lead: tuple[int, ...], H: int, V: int, **_: Any) -> Cost:
    """Return the cost of the fused loss: the forward reads x and the weight, the backward writes their gradients."""
    T = torch.Size(lead).numel()
    return (T + V) * H * itemsize, (T + V) * H * itemsize, 6 * T * H * V


def experts_cost(itemsize: int, lead: tuple[int, ...], H: int, I: int, E: int, K: int, **_: Any) -> Cost:
    """Return the cost of the experts, without the rows that the kernels keep between their products."""
    T = torch.Size(lead).numel()
    experts, rows = 3 * E * H * I * itemsize, T * H * itemsize
    return experts + 2 * rows, 2 * experts + 3 * rows, 18 * T * K * H * I


def _attention_flops(S: int, Sk: int, H: int, D: int, Dv: int, causal: bool, window: tuple[int, int]) -> int:
    """Return the FLOPs of the forward's two products and the backward's five, over the keys that queries see."""
    left, right = (Sk + S if side < 0 else side for side in (window[0], 0 if causal else window[1]))
    queries = torch.arange(Sk - S, Sk)
    seen = int(((queries + right + 1).clamp(0, Sk) - (queries - left).clamp(0, Sk)).sum())
    return 2 * seen * H * (4 * D + 3 * Dv)


def _attention_bytes(itemsize: int, T: int, Tk: int, H: int, Hk: int, D: int, Dv: int) -> tuple[int, int]:
    """Return the bytes of q, k, v, the output and lse, and of all these with the gradients."""
    inputs, output, lse = (T * H * D + Tk * Hk * (D + Dv)) * itemsize, T * H * Dv * itemsize, 4 * T * H
    return inputs + output + lse, 2 * (inputs + output) + lse


def attention_cost(
    itemsize: int, B: int, S: int, Sk: int, H: int, Hk: int, D: int, causal: bool = False,
    window: tuple[int, int] = (-1, -1), Dv: int | None = None, **_: Any,
) -> Cost:  # fmt: skip
    Dv = Dv or D
    moved = _attention_bytes(itemsize, B * S, B * Sk, H, Hk, D, Dv)
    return *moved, B * _attention_flops(S, Sk, H, D, Dv, causal, window)


def attention_varlen_cost(
    itemsize: int, lengths: tuple[tuple[int, int], ...], H: int, Hk: int, D: int, causal: bool = False,
    window: tuple[int, int] = (-1, -1), Dv: int | None = None, **_: Any,
) -> Cost:  # fmt: skip
    Dv = Dv or D
    T, Tk = map(sum, zip(*lengths, strict=True))
    moved = _attention_bytes(itemsize, T, Tk, H, Hk, D, Dv)
    return *moved, sum(_attention_flops(S, Sk, H, D, Dv, causal, window) for S, Sk in lengths)


def route_cost(itemsize: int, lead: tuple[int, ...], E: int, top_k: int = 2, **_: Any) -> Cost:
    """Return the cost of ``moe_route``; the backward reads the logits of the chosen experts."""
    M = torch.Size(lead).numel()
    return M * (E * itemsize + 12 * top_k), M * (E * itemsize + (12 + itemsize) * top_k), 0


def balance_cost(itemsize: int, lead: tuple[int, ...], E: int, mask: bool = False, **_: Any) -> Cost:
    M = torch.Size(lead).numel()
    return M * (E * itemsize + mask), M * (2 * E * itemsize + mask), 0
