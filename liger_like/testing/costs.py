"""Costs of the ops, for the table in ``liger_like.testing``.

A cost is (forward bytes, backward bytes, FLOPs): the bytes that an op must move, and the FLOPs of its matrix products.
"""

from collections.abc import Callable
from typing import Any

import torch

Cost = tuple[int, int, int]


def norm(vectors: int, residual: int = 0) -> Callable[..., Cost]:
    """Return the cost of a norm with ``vectors`` parameters; the backward reads the weight only, not the bias.

    A residual adds two tensors to the forward and one to the backward, since dx is also the residual's gradient.
    """

    def cost(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
        M, row = torch.Size(lead).numel(), N * itemsize
        return ((2 + 2 * residual) * M + vectors) * row, ((3 + residual) * M + 1 + vectors) * row, 0

    return cost


def rope(itemsize: int, B: int, H: int, Hk: int, S: int, D: int, R: int, weights: bool = False, **_: Any) -> Cost:
    """Return the cost of rope, or with ``weights`` of qk_norm_rope, whose backward also reads q and k."""
    heads, tables, vectors = B * S * (H + Hk) * D, 2 * B * S * R, 2 * D * weights
    return (2 * heads + tables + vectors) * itemsize, ((2 + weights) * heads + tables + 2 * vectors) * itemsize, 0


def glu(itemsize: int, lead: tuple[int, ...], N: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * N * itemsize
    return 3 * size, 5 * size, 0


def loss(itemsize: int, lead: tuple[int, ...], V: int, **_: Any) -> Cost:
    size = torch.Size(lead).numel() * V * itemsize
    return size, 2 * size, 0


def linear_loss(itemsize: int, lead: tuple[int, ...], H: int, V: int, **_: Any) -> Cost:
    """Return the cost of the fused loss: the forward reads x and the weight, the backward writes their gradients."""
    T = torch.Size(lead).numel()
    return (T + V) * H * itemsize, (T + V) * H * itemsize, 6 * T * H * V


def divergence(itemsize: int, lead: tuple[int, ...], H: int, Ht: int, V: int, **_: Any) -> Cost:
    """Return the cost of the divergence: that of the fused loss, and to read the teacher's operands."""
    T = torch.Size(lead).numel()
    read, written, flops = linear_loss(itemsize, lead, H, V)
    return read + (T + V) * Ht * itemsize, written, flops + 2 * T * Ht * V


def experts(itemsize: int, lead: tuple[int, ...], H: int, I: int, E: int, K: int, **_: Any) -> Cost:
    """Return the cost of the experts, without the rows that the kernels keep between their products."""
    T = torch.Size(lead).numel()
    experts, rows = 3 * E * H * I * itemsize, T * H * itemsize
    return experts + 2 * rows, 2 * experts + 3 * rows, 18 * T * K * H * I


def _pairs(S: int, Sk: int, causal: bool, window: tuple[int, int]) -> int:
    """Return the number of pairs of a query and a key that it sees."""
    left, right = (Sk + S if side < 0 else side for side in (window[0], 0 if causal else window[1]))
    queries = torch.arange(Sk - S, Sk)
    return int(((queries + right + 1).clamp(0, Sk) - (queries - left).clamp(0, Sk)).sum())


def _attention_flops(S: int, Sk: int, H: int, D: int, Dv: int, causal: bool, window: tuple[int, int]) -> int:
    """Return the FLOPs of the forward's two products and the backward's five, over the keys that queries see."""
    return 2 * _pairs(S, Sk, causal, window) * H * (4 * D + 3 * Dv)


def _attention_bytes(itemsize: int, T: int, Tk: int, H: int, Hk: int, D: int, Dv: int) -> tuple[int, int]:
    """Return the bytes of q, k, v, the output and lse, and of all these with the gradients."""
    inputs, output, lse = (T * H * D + Tk * Hk * (D + Dv)) * itemsize, T * H * Dv * itemsize, 4 * T * H
    return inputs + output + lse, 2 * (inputs + output) + lse


def attention(
    itemsize: int, B: int, S: int, Sk: int, H: int, Hk: int, D: int, causal: bool = False,
    window: tuple[int, int] = (-1, -1), Dv: int | None = None, **_: Any,
) -> Cost:  # fmt: skip
    Dv = Dv or D
    moved = _attention_bytes(itemsize, B * S, B * Sk, H, Hk, D, Dv)
    return *moved, B * _attention_flops(S, Sk, H, D, Dv, causal, window)


def attention_varlen(
    itemsize: int, lengths: tuple[tuple[int, int], ...], H: int, Hk: int, D: int, causal: bool = False,
    window: tuple[int, int] = (-1, -1), Dv: int | None = None, **_: Any,
) -> Cost:  # fmt: skip
    Dv = Dv or D
    T, Tk = map(sum, zip(*lengths, strict=True))
    moved = _attention_bytes(itemsize, T, Tk, H, Hk, D, Dv)
    return *moved, sum(_attention_flops(S, Sk, H, D, Dv, causal, window) for S, Sk in lengths)


def paged(
    itemsize: int, lengths: tuple[tuple[int, int], ...], H: int, Hk: int, D: int, window: tuple[int, int] = (-1, -1),
    Dv: int | None = None, latent: bool = False, **_: Any,
) -> Cost:  # fmt: skip
    """Return the cost of attention over pages, which has no backward."""
    Dv = Dv or D
    T, Tk = (sum(n) for n in zip(*lengths, strict=True))
    pairs = sum(_pairs(n, keys, True, window) for n, keys in lengths)
    moved = _attention_bytes(itemsize, T, Tk, H, Hk, D, Dv)[0] + latent * itemsize * T * H * Dv
    return moved, 0, 2 * pairs * H * (D + Dv * (1 + latent))


def route(itemsize: int, lead: tuple[int, ...], E: int, top_k: int = 2, **_: Any) -> Cost:
    """Return the cost of ``moe_route``; the backward reads the logits of the chosen experts."""
    M = torch.Size(lead).numel()
    return M * (E * itemsize + 12 * top_k), M * (E * itemsize + (12 + itemsize) * top_k), 0


def balance(itemsize: int, lead: tuple[int, ...], E: int, mask: bool = False, **_: Any) -> Cost:
    M = torch.Size(lead).numel()
    return M * (E * itemsize + mask), M * (2 * E * itemsize + mask), 0
