"""Rotary functions of Hugging Face models, each with the options with which ``liger_like.rope`` computes the same.

Each takes tensors of heads and tables of cos and sin. They differ in which features pair up, in which columns of the
tables they read, and in where they round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """Options of ``rope`` that reproduce a rotary function.

    ``layout``: as in ``rope``. ``tables``: "full" or "repeat" as ``rope``'s cos_layout, and the tables are checked to
    have this layout; "first" if only the first half of a full table is read; "half"; "complex", as wide as "half".
    ``rounds``: the result has the dtype of each tensor ("own"), of the first tensor ("first"), or the wider dtype of
    tensor and table (None). ``partial``: the tables may be narrower than the heads. ``sign``: sign of sin.
    ``dim``: where the tables are unsqueezed, unless a parameter gives it.
    """

    layout: str = "half"
    tables: str = "full"
    rounds: str | None = None
    partial: bool = False
    sign: int = 1
    dim: int = 1


def _halves(x: Tensor) -> Tensor:
    """Map (first, second) to (-second, first)."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _halves_back(x: Tensor) -> Tensor:
    """Map (first, second) to (second, -first)."""
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((second, -first), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    """Map neighbours (even, odd) to (-odd, even)."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def _first(table: Tensor) -> Tensor:
    """Return each column of the first half twice, as neighbours."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Llama: halves."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * c + _halves(q) * s, k * c + _halves(k) * s


def half_single(q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Gemma 3n: halves of one tensor."""
    return q * cos.unsqueeze(unsqueeze_dim) + _halves(q) * sin.unsqueeze(unsqueeze_dim)


def half_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match NanoChat: halves, turned backwards."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * c + _halves_back(q) * s, k * c + _halves_back(k) * s


def half_cast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Olmo: halves, each cast to its own dtype."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * c + _halves(q) * s).to(q.dtype), (k * c + _halves(k) * s).to(k.dtype)


def half_float(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match ModernBERT: halves, heads in fp32."""
    c, s, qf, kf = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), q.float(), k.float()
    return (qf * c + _halves(qf) * s).to(q.dtype), (kf * c + _halves(kf) * s).to(q.dtype)


def half_all_float(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match HunYuan's vision-language models: halves, heads and tables in fp32."""
    c, s = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    qf, kf = q.float(), k.float()
    return (qf * c + _halves(qf) * s).to(q.dtype), (kf * c + _halves(kf) * s).to(q.dtype)


def half_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Match the vision encoder of Qwen2-VL: halves of heads [S, H, D]."""
    c, s, qf, kf = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float(), q.float(), k.float()
    return (qf * c + _halves(qf) * s).to(q.dtype), (kf * c + _halves(kf) * s).to(k.dtype)


def half_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Phi 3: halves of the first features, as many as the tables have columns."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    r = c.shape[-1]
    q_rotated = q[..., :r] * c + _halves(q[..., :r]) * s
    k_rotated = k[..., :r] * c + _halves(k[..., :r]) * s
    return torch.cat([q_rotated, q[..., r:]], dim=-1), torch.cat([k_rotated, k[..., r:]], dim=-1)


def _turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def half_narrow(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match GPT-OSS: halves, with tables of half the width."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turned(q, c, s), _turned(k, c, s)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match BLT: neighbours."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * c + _pairs(q) * s, k * c + _pairs(k) * s


def interleaved_float(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Cohere: neighbours, heads in fp32."""
    c, s, qf, kf = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), q.float(), k.float()
    return (qf * c + _pairs(qf) * s).to(q.dtype), (kf * c + _pairs(kf) * s).to(q.dtype)


def interleaved_late_float(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Ernie 4.5's vision-language models: neighbours, paired before the cast to fp32."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_rotated = (q.float() * c + _pairs(q).float() * s).to(q.dtype)
    return q_rotated, (k.float() * c + _pairs(k).float() * s).to(q.dtype)


def interleaved_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match GLM-4V: neighbours among the first features, as many as the tables have columns."""
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    r = c.shape[-1]
    q_rotated = q[..., :r] * c + _pairs(q[..., :r]) * s
    k_rotated = k[..., :r] * c + _pairs(k[..., :r]) * s
    return torch.cat([q_rotated, q[..., r:]], dim=-1), torch.cat([k_rotated, k[..., r:]], dim=-1)


def first_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Helium: neighbours, with the first half of the tables."""
    c, s = _first(cos.unsqueeze(unsqueeze_dim)), _first(sin.unsqueeze(unsqueeze_dim))
    return q * c + _pairs(q) * s, k * c + _pairs(k) * s


def first_interleaved_float(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match Ernie 4.5: neighbours, with the first half of the tables, heads in fp32."""
    c, s = _first(cos.unsqueeze(unsqueeze_dim)), _first(sin.unsqueeze(unsqueeze_dim))
    q_rotated = (q.float() * c + _pairs(q).float() * s).to(q.dtype)
    return q_rotated, (k.float() * c + _pairs(k).float() * s).to(q.dtype)


def first_interleaved_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match GLM: neighbours among the first features, as many as the tables have columns."""
    c, s = _first(cos.unsqueeze(unsqueeze_dim)), _first(sin.unsqueeze(unsqueeze_dim))
    r = c.shape[-1]
    q_rotated = q[..., :r] * c + _pairs(q[..., :r]) * s
    k_rotated = k[..., :r] * c + _pairs(k[..., :r]) * s
    return torch.cat([q_rotated, q[..., r:]], dim=-1), torch.cat([k_rotated, k[..., r:]], dim=-1)


def _parted(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even * c - odd * s, even * s + odd * c], dim=-1)


def first_interleaved_parted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Match DeepSeek V3: reads neighbours, writes halves."""
    c = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    s = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    return _parted(q, c, s), _parted(k, c, s)


def narrow_interleaved_single(q: Tensor, sin: Tensor, cos: Tensor) -> Any:
    """Match GPT-J: neighbours of heads [B, S, H, D], with tables of half the width."""
    s = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    c = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return q * c + torch.stack((-q[:, :, :, 1::2], q[:, :, :, ::2]), dim=-1).flatten(-2) * s


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def complex_heads_last(q: Tensor, k: Tensor, angles: Tensor) -> Any:
    """Match Llama 4: complex heads [B, S, H, D]."""
    q_rotated = torch.view_as_real(_complex(q) * angles[:, :, None, :]).flatten(3)
    return q_rotated.to(q.dtype), torch.view_as_real(_complex(k) * angles[:, :, None, :]).flatten(3).to(k.dtype)


def complex_heads_first(q: Tensor, k: Tensor, angles: Tensor) -> Any:
    """Match DeepSeek V2: complex heads [B, H, S, D]."""
    a, qc = angles.unsqueeze(1).to(_complex(q).device), _complex(q)
    q_rotated = torch.view_as_real(qc * a).flatten(3).to(q.dtype)
    return q_rotated, torch.view_as_real(_complex(k) * a).flatten(3).to(k.dtype)


KINDS: dict[Callable[..., Any], Kind] = {
    half: Kind(),
    half_single: Kind(),
    half_back: Kind(sign=-1),
    half_cast: Kind(rounds="own"),
    half_float: Kind(rounds="first"),
    half_all_float: Kind(rounds="first"),
    half_vision: Kind(rounds="own", dim=-2),
    half_partial: Kind(partial=True),
    half_narrow: Kind(tables="half"),
    interleaved: Kind("interleaved", "repeat"),
    interleaved_float: Kind("interleaved", "repeat", "first"),
    interleaved_late_float: Kind("interleaved", "repeat", "first"),
    interleaved_partial: Kind("interleaved", "repeat", partial=True),
    first_interleaved: Kind("interleaved", "first"),
    first_interleaved_float: Kind("interleaved", "first", "first"),
    first_interleaved_partial: Kind("interleaved", "first", partial=True),
    first_interleaved_parted: Kind("interleaved_in_half_out", "first"),
    narrow_interleaved_single: Kind("interleaved", "half", dim=2),
    complex_heads_last: Kind("interleaved", "complex", "own", dim=2),
    complex_heads_first: Kind("interleaved", "complex", "own"),
}
PATTERNS = tuple(KINDS)
