"""Causal attention over sequences that are sharded over processes; each process has chunks of every sequence.

Queries stay in their process, and keys come to them all at once (all-gather; Llama 3, arXiv:2407.21783) or from process
to process (ring; Liu et al., arXiv:2310.01889), or tokens are exchanged for heads (Ulysses; arXiv:2309.14509). With two
chunks per process, one from the front and one from the back, all processes have the same work.

Among the keys present, a chunk of queries sees no keys, all keys, the keys of a causal mask that ends at the last key,
or, with windows and documents, a span of keys per query. Each case that sees keys is one call of the kernels, a piece.
The outputs of several pieces are merged by their sums. The backward of a piece takes the sums and delta over all keys.
The sums of a row are two fp32 numbers, as in ``attention_fwd``: a reference score, and the log2 of the sum of
exp(score - reference).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.attention import _deterministic, _use_kernel, _window, flash_attention, flash_attention_ref
from liger_like.ops.attention.backward import attention_bwd
from liger_like.ops.attention.forward import attention_fwd
from liger_like.ops.attention.masking import Masking
from liger_like.ops.attention.portable.delta import attention_delta
from liger_like.ops.losses.vocab_shards import all_gather, reduce_scatter
from liger_like.runtime.autograd import once_differentiable

Use = Callable[[list[int], Tensor], Tensor | None]


@dataclass(frozen=True)
class Shards:
    """Assignment of the chunks of a sequence to the processes of a group."""

    group: Any
    rank: int
    size: int
    zigzag: bool

    def chunks(self, rank: int | None = None) -> list[int]:
        """Return the chunks of a process (None: this one), in the order of the sequence."""
        rank = self.rank if rank is None else rank
        return [rank, 2 * self.size - 1 - rank] if self.zigzag else [rank]

    @property
    def order(self) -> list[int]:
        """Return the chunks of all processes, concatenated in the order of the ranks."""
        return [chunk for rank in range(self.size) for chunk in self.chunks(rank)]

    def own(self, x: Tensor) -> Tensor:
        """Return this process's part of ``x`` [B, S, ...]."""
        parts = x.chunk(len(self.order), 1)
        return torch.cat([parts[chunk] for chunk in self.chunks()], 1)

    def join(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] from the parts ``x`` [processes, B, s, ...] of all processes."""
        parts = x.transpose(0, 1).flatten(1, 2).chunk(len(self.order), 1)
        return torch.cat([parts[self.order.index(chunk)] for chunk in range(len(parts))], 1)

    def part(self, x: Tensor) -> Tensor:
        """Return the contiguous parts [processes, B, s, ...] of ``x`` [B, S, ...]."""
        parts = x.chunk(len(self.order), 1)
        return torch.stack([torch.cat([parts[i] for i in self.chunks(rank)], 1) for rank in range(self.size)])

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Send ``x`` to the next process; return a function that waits for the previous process's tensor."""
        arriving, peers = torch.empty_like(x), [(self.rank + step) % self.size for step in (1, -1)]
        to, source = (dist.get_global_rank(self.group, peer) for peer in peers)
        transfers = [dist.P2POp(dist.isend, x, to, self.group), dist.P2POp(dist.irecv, arriving, source, self.group)]
        works = dist.batch_isend_irecv(transfers)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            transfers.clear()
            return arriving

        return wait


class _Piece(NamedTuple):
    """Arguments of one kernel call: this process's chunk number ``at`` of queries, and a slice of the keys present.

    ``own``: the queries' own keys are in the slice.
    """

    at: int
    keys: slice
    left: int
    right: int
    spans: Tensor | None
    own: bool


def _pieces(mine: list[int], held: list[int], q: Tensor, left: int, starts: Tensor | None) -> Iterator[_Piece]:
    """Yield the kernel calls for queries ``q`` of the chunks ``mine`` and keys of the chunks ``held``.

    A query sees ``left`` keys before its own (-1: all), but none before its document starts (``starts`` [B, s]).
    """
    length = q.shape[1] // len(mine)
    for at, chunk in enumerate(mine):
        oldest = 0 if left < 0 else max(0, chunk * length - left) // length
        seen = [i for i, other in enumerate(held) if oldest <= other <= chunk]
        if not seen:
            continue
        others = held[seen[0] : seen[-1] + 1]
        keys, own = slice(seen[0] * length, (seen[-1] + 1) * length), others[-1] == chunk
        together = others[-1] - others[0] == len(others) - 1
        if starts is None and own and (together or left < 0):
            yield _Piece(at, keys, left, 0, None, own)
        elif starts is None and left < 0:
            yield _Piece(at, keys, -1, -1, None, own)
        else:
            first = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device) if starts is None else starts
            spans = _spans(first.chunk(len(mine), 1)[at], chunk, others, left)
            yield _Piece(at, keys, -1, -1, spans, own)


def _spans(starts: Tensor, chunk: int, held: list[int], left: int) -> Tensor:
    """Return the spans [2, B, length] of the keys that a chunk of queries sees, as rows of the chunks ``held``.

    ``starts`` [B, length] is the first token of each query's document.
    """
    length = starts.shape[1]
    place = torch.arange(chunk * length, (chunk + 1) * length, device=starts.device)[None]
    first = starts if left < 0 else torch.maximum(starts, place - left)
    ends = torch.stack((first, (place + 1).expand_as(first)))
    return torch.stack([(ends - other * length).clamp(0, length) for other in held]).sum(0).int()


def _gathered(shards: Shards, kv: Tensor, use: Use) -> Tensor | None:
    """Call ``use`` once with the keys and values of all processes; return their reduce-scattered gradients, if any."""
    everything = kv.new_empty(shards.size, *kv.shape)
    all_gather(everything.flatten(0, 1), kv, group=shards.group)
    dkv = use(list(range(len(shards.order))), shards.join(everything))
    if dkv is None:
        return None
    home = dkv.new_empty(kv.shape)
    reduce_scatter(home, shards.part(dkv).flatten(0, 1), group=shards.group)
    return home


def _around_ring(shards: Shards, kv: Tensor, use: Use) -> Tensor | None:
    """Call ``use`` with the keys and values of one process after the other.

    The next keys and the present keys' gradients arrive meanwhile. After one round each process has its own gradients.
    """
    wait = None
    for step in range(shards.size):
        arriving = shards.pass_on(kv) if step + 1 < shards.size else None
        dkv = use(shards.chunks((shards.rank - step) % shards.size), kv)
        if dkv is not None:
            wait = shards.pass_on(dkv if wait is None else dkv.add_(wait()))
        kv = kv if arriving is None else arriving()
    return None if wait is None else wait()


def _masking(q: Tensor, k: Tensor, piece: _Piece, scale: float, softcap: float | None) -> Masking:
    """Return the masks of a piece for the kernels: no bias, padding, packing or offsets."""
    return Masking(
        bias=None,
        key_padding_mask=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        offsets=None,
        spans=piece.spans,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        scale=scale,
        softcap=softcap,
        left=piece.left,
        right=piece.right,
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, piece: _Piece, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, S, H, Dv] and the sums [2, B, H, S] of a piece."""
    sums = q.new_empty(0)
    if _use_kernel(q, v):
        out, lse, sums = attention_fwd(q, k, v, sinks, *_masking(q, k, piece, scale, softcap))
    else:
        out, lse = _reference(q, k, v, sinks, piece, scale, softcap)
    return out, sums if sums.numel() else torch.stack((lse, torch.zeros_like(lse)))


def _reference(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, piece: _Piece, scale: float, softcap: float | None
) -> Any:
    options: dict[str, Any] = {"window": (piece.left, piece.right), "spans": piece.spans, "return_lse": True}
    return flash_attention_ref(q, k, v, sinks=sinks, scale=scale, softcap=softcap, **options)


def _merge(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp32 output [B, S, H, Dv] and sums [2, B, H, S] over two sets of keys, from the results of each."""
    row_max = torch.maximum(sums[0], other_sums[0])  # finite: the first set has the query's own key
    parts = [torch.exp2((part[0] - row_max) / math.log(2) + part[1]) for part in (sums, other_sums)]
    total = parts[0] + parts[1]
    a, b = (x * (part / total).transpose(1, 2).unsqueeze(-1) for x, part in zip((out, other), parts, strict=True))
    return a.add_(b), torch.stack((row_max, torch.log2(total)))


def _sums_and_delta(q: Tensor, sinks: Tensor | None, dout: Tensor, out: Tensor, sums: Tensor) -> Any:
    """Return the sums and delta of rows over all their keys, as the backward takes them, and the sinks' gradient."""
    lse = sums[0] + sums[1] * math.log(2)
    if _use_kernel(q, out):
        apart = sums.contiguous() if q.dtype == torch.float32 else None
        return attention_delta(dout, out.contiguous(), lse, apart, None, sinks)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    dsinks = None if sinks is None else -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
    return torch.stack((lse, delta)), dsinks


def _piece_grads(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, piece: _Piece, scale: float, softcap: float | None,
    deterministic: bool,
) -> Any:  # fmt: skip
    """Return a piece's contributions to the gradients of q, k and v."""
    if _use_kernel(q, v):
        needs = [True, True, True, False]
        return attention_bwd(dout, q, k, v, rows, *_masking(q, k, piece, scale, softcap), deterministic, needs)[:3]
    q, k, v = leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        out, lse = _reference(q, k, v, None, piece, scale, softcap)
    share = torch.exp(lse.detach() - rows[0])  # share of these keys in the softmax over all keys
    dout = dout * share.transpose(1, 2).unsqueeze(-1)
    dlse = (dout * out.detach()).sum(-1).transpose(1, 2) - share * rows[1]
    return torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, shards: Shards,
        travel: Callable[..., Any], left: int, scale: float, softcap: float | None, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        mine = shards.chunks()
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def use(held: list[int], kv: Tensor) -> None:
            for piece in _pieces(mine, held, q, left, starts):
                k, v = kv[:, piece.keys].split_with_sizes(widths, -1)
                queries, own_sinks = q.chunk(len(mine), 1)[piece.at], sinks if piece.own else None
                new = _attend(queries, k, v, own_sinks, piece, scale, softcap)
                found[piece.at] = _merge(*found[piece.at], *new) if piece.at in found else new

        widths = [k.shape[-1], v.shape[-1]]
        travel(shards, torch.cat((k, v), -1), use)
        out = torch.cat([found[at][0].to(q.dtype) for at in range(len(mine))], 1)
        sums = torch.cat([found[at][1] for at in range(len(mine))], 3)
        ctx.save_for_backward(q, k, v, sinks, starts, out, sums)
        ctx.options = shards, travel, left, scale, softcap, deterministic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, sinks, starts, out, sums = ctx.saved_tensors
        shards, travel, left, *scores = ctx.options  # scale, softcap, deterministic
        mine = shards.chunks()
        queries, douts, outs = (t.chunk(len(mine), 1) for t in (q, dout, out))
        parts = zip(queries, douts, outs, sums.chunk(len(mine), 3), strict=True)
        rows = [_sums_and_delta(queries, sinks, *others) for queries, *others in parts]
        dq = torch.zeros_like(q, dtype=sums.dtype)
        widths = [k.shape[-1], v.shape[-1]]

        def use(held: list[int], kv: Tensor) -> Tensor:
            dkv = torch.zeros_like(kv, dtype=sums.dtype)
            for piece in _pieces(mine, held, q, left, starts):
                at = piece.at
                k, v = kv[:, piece.keys].split_with_sizes(widths, -1)
                grads = _piece_grads(douts[at], queries[at], k, v, rows[at][0], piece, *scores)
                into_all = dq.chunk(len(mine), 1)[at], *dkv[:, piece.keys].split_with_sizes(widths, -1)
                for into, grad in zip(into_all, grads, strict=True):
                    into.add_(grad)
            return dkv

        dk, dv = travel(shards, torch.cat((k, v), -1), use).to(k.dtype).split_with_sizes(widths, -1)
        dsinks = None if sinks is None else torch.stack([of_rows[1] for of_rows in rows]).sum(0)
        return dq.to(q.dtype), dk, dv, dsinks, *(None,) * 7


def _with_travelling_keys(
    travel: Callable[..., Any], shards: Shards, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    starts: Tensor | None, left: int, scale: float | None, softcap: float | None, deterministic: bool | None,
) -> Tensor:  # fmt: skip
    spread: Callable[..., Tensor] = _Spread.apply
    starts = starts if starts is None else shards.own(starts)
    left, scale = _window(True, (left, 0))["left"], q.shape[-1] ** -0.5 if scale is None else scale
    return spread(q, k, v, sinks, starts, shards, travel, left, scale, softcap, _deterministic(deterministic))


class _Exchange(torch.autograd.Function):
    """All-to-all: part i of ``x`` [processes, ...] goes to process i; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange: Callable[..., Tensor] = _Exchange.apply
        return exchange(grad, ctx.group), None


def attend_to_own(
    _: Shards, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, left: int,
    scale: float | None, softcap: float | None, deterministic: bool | None,
) -> Tensor:  # fmt: skip
    """Return attention over the tokens of this process, which has all tokens of these heads."""
    out: Any = flash_attention(
        q,
        k,
        v,
        causal=True,
        window=(left, -1),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        spans=None if starts is None else torch.stack((starts, torch.full_like(starts, q.shape[1]))).int(),
        deterministic=deterministic,
    )
    return out  # type: ignore[no-any-return]


def _with_exchanged_heads(
    shards: Shards, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, left: int,
    scale: float | None, softcap: float | None, deterministic: bool | None,
) -> Tensor:  # fmt: skip
    n, (B, s, H, D), (Hk, Dv) = shards.size, q.shape, v.shape[2:]
    exchange: Callable[..., Tensor] = _Exchange.apply
    if Hk % n:
        raise ValueError(f"method 'ulysses' needs a number of processes that divides the {Hk} key heads, got {n}")
    heads = torch.cat([t.reshape(B, s, n, -1) for t in (q, k, v)], -1)
    whole = shards.join(exchange(heads.movedim(2, 0), shards.group))
    parts = whole.split_with_sizes([H // n * D, Hk // n * D, Hk // n * Dv], -1)
    q, k, v = (t.view(B, n * s, -1, width) for t, width in zip(parts, (D, D, Dv), strict=True))
    sinks = None if sinks is None else sinks.chunk(n)[shards.rank]
    out = attend_to_own(shards, q, k, v, sinks, starts, left, scale, softcap, deterministic)
    return exchange(shards.part(out), shards.group).movedim(0, 2).flatten(2, 3)


METHODS: dict[str, Callable[..., Tensor]] = {
    "allgather": partial(_with_travelling_keys, _gathered),
    "ring": partial(_with_travelling_keys, _around_ring),
    "ulysses": _with_exchanged_heads,
}
