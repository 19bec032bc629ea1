"""Attention over paged caches: register the op, and choose chunks of keys and tiles. Lengths stay on the device."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from triton import next_power_of_2

from liger_like.ops.attention.masking import room_for
from liger_like.ops.attention.paged.kernels import _attention_paged_kernel, _attention_paged_merge_kernel
from liger_like.ops.attention.tiles import paged_tile
from liger_like.runtime.blocks import block_of
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import dense, packed
from liger_like.runtime.registry import op
from liger_like.runtime.support import num_programs

CHUNK = 256  # least number of keys in a chunk
TOGETHER = 4  # chunks in a group
GROUPS = 32  # of a sequence that fills its pages
JOINED = 8192  # most products of a program that joins chunks, since it holds them twice
ROWS = 16  # least number of rows of a product
MERGED = 8  # most groups that the merge reads at a time
WARP = 256  # products of a warp of the merge, whose programs are many and short


class Pages(NamedTuple):
    """Where the keys of sequences are, in the order of the library ops' arguments; tensors first.

    ``pages``: [B, M], the pages of each sequence; [sum], the slots of all keys; None: page b belongs to sequence b.
    ``lengths``: [B] keys of each sequence, or [B + 1] the places among all keys at which sequences start; None, for
    writes alone: ``pages`` has the slot of each row. ``cu_seqlens_q`` [B + 1]: the rows at which sequences start; None:
    each has one row.
    """

    pages: Tensor | None
    lengths: Tensor | None
    cu_seqlens_q: Tensor | None

    @classmethod
    def of(cls, pages: Tensor | None, lengths: Tensor | None, cu_seqlens_q: Tensor | None) -> "Pages":
        """Return the tensors with the strides that kernels read."""
        return cls(pages if pages is None else dense(pages), packed(lengths), packed(cu_seqlens_q))

    def sequences(self, rows: int) -> int:
        """Return the number of sequences of ``rows``."""
        return rows if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def slots(self) -> bool:
        """True if each key has a slot of its own, rather than a page with others."""
        return self.pages is not None and self.pages.dim() == 1

    def capacity(self, page: int) -> int:
        """Return the number of keys that a sequence can have, or all together if they have slots."""
        if self.pages is None:
            return page
        return self.pages.shape[0] if self.slots else self.pages.shape[1] * page

    @property
    def stride(self) -> int:
        """Number of pages from sequence to sequence."""
        return 0 if self.pages is None or self.slots else self.pages.stride(0)

    def starts(self, rows: int) -> bool:
        """Return True if ``lengths`` has the places where sequences start."""
        return self.lengths is not None and self.lengths.shape[0] == self.sequences(rows) + 1

    def constants(self, rows: int, page: int) -> dict[str, Any]:
        """Return the constexprs of the kernels that find keys in pages of so many."""
        return {
            "PAGE": 1 if self.pages is None else page,
            "SLOTS": self.slots,
            "STARTS": self.starts(rows),
            "SEQUENCES": room_for(self.sequences(rows)),
        }


PAGES_SCHEMA = "Tensor? pages, Tensor? lengths, Tensor? cu_seqlens_q"


def _outputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    return q.new_empty(T, H, v_cache.shape[-1]), torch.empty((H, T), dtype=torch.float32, device=q.device)


def _flops(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor | None, lengths: Tensor, cu_seqlens_q: Tensor | None,
    k: Tensor | None, v: Tensor | None, qv: Tensor | None, *options: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of the scores and of their product with the values; unknown lengths count as the longest."""
    where, cu = Pages(pages, lengths, cu_seqlens_q), cu_seqlens_q
    if isinstance(lengths, FakeTensor):
        pairs = len(q) * where.capacity(k_cache.shape[1])
    else:
        lengths = lengths.diff() if where.starts(len(q)) else lengths
        pairs = int((lengths.long() * (1 if cu is None else cu.diff())).sum())
    return 2 * pairs * q.shape[1] * (q.shape[2] + v_cache.shape[-1] * (1 if qv is None else 2))


def _chunk(keys: int, slots: bool, block_n: int, together: int) -> int:
    """Return the size of a chunk for sequences of at most so many ``keys``; bits of rows depend on it.

    It must not depend on the batch. The keys of all ``slots`` do, so there a group has always the same size.
    """
    least = CHUNK * TOGETHER // together
    return -(-max(least, 0 if slots else -(-keys // (GROUPS * together))) // block_n) * block_n


@op(
    f"paged_attention_fwd(Tensor q, Tensor k_cache, Tensor v_cache, {PAGES_SCHEMA}, Tensor? k, Tensor? v,"
    " Tensor? qv, Tensor? sinks, SymInt max_seqlen_q, float scale, float? softcap, int left) -> (Tensor, Tensor)",
    _outputs,
    flops=_flops,
    replayed=True,
)
def paged_attention_fwd(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor | None, lengths: Tensor, cu_seqlens_q: Tensor | None,
    k: Tensor | None, v: Tensor | None, qv: Tensor | None, sinks: Tensor | None, max_seqlen_q: int, scale: float,
    softcap: float | None, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute output [T, H, Dv] and lse [H, T] of q [T, H, D] over caches [N, P, Hk, D] and [N, P, Hk, Dv]."""
    out, lse = _outputs(q, k_cache, v_cache)
    where = Pages.of(pages, lengths, cu_seqlens_q)
    (T, H, D), (N, P, HK, DV) = q.shape, v_cache.shape
    B, group = where.sequences(T), H // HK
    if not (T and B and N * P):
        return out.zero_(), lse.fill_(-torch.inf)
    q, k_cache, v_cache = map(dense, (q, k_cache, v_cache))
    k, v, qv = (rows if rows is None else dense(rows) for rows in (k, v, qv))
    capacity, tokens = where.capacity(P), max(1, ROWS // group)
    kind = "paged" if qv is None else "latent"
    few, many = (paged_tile(kernel, q, v_cache, softcap) for kernel in (kind, f"{kind}_rows"))
    few = few._replace(block_m=min(few.block_m, max(ROWS, block_of(group))))
    blocks = -(-tokens * group // few.block_m)
    keys = min(capacity, left + tokens + few.block_n) if left >= 0 else capacity  # at most, of a sequence of few rows
    together = TOGETHER if few.block_m * block_of(DV) <= JOINED else 1
    chunk = _chunk(keys, where.slots, few.block_n, together)
    for own in (chunk * together, chunk):  # keys of a program: few groups would leave multiprocessors idle
        splits = max(1, -(-keys // own))
        items = capacity // own + B if where.slots else B  # with slots at most as many programs, else sequences
        grid = items * HK * blocks, 1 if where.slots else splits
        if 2 * math.prod(grid) >= num_programs(q.device, 1):
            break
    height = min(max(1, max_seqlen_q), tokens) * group
    programs = 0 if splits == 1 else items if where.slots else B * splits
    parts = tuple(lse.new_empty(programs, HK, height, width) for width in (DV, 2))
    # what depends on the batch is no constexpr, and no tensor is None for some batches: two kernels may round otherwise
    shared = {"HK": HK, "GROUP": group, "DV": DV, "SOFTCAP": softcap, "HAS_LEFT": left >= 0, "TOKENS": tokens}
    shared |= where.constants(T, P)
    strides = q.stride(1), k_cache.stride(0), k_cache.stride(2), v_cache.stride(0), v_cache.stride(2)
    steps = {"STRIDE_Q": q.stride(0), "STRIDE_K": k_cache.stride(1), "STRIDE_V": v_cache.stride(1)}
    for name, rows in (("STRIDE_NK", k), ("STRIDE_NV", v), ("STRIDE_QV", qv)):
        steps[name], stride = (0, 0) if rows is None else rows.stride()[:2]
        strides += (stride,)
    launches = [(few, grid)]
    if max_seqlen_q > tokens:  # a sequence of more rows takes blocks of them, whatever else there is
        launches.append((many, ((T * group // many.block_m + B) * HK, 1)))
    for tile, grid in launches:
        launch(
            _attention_paged_kernel,
            grid,
            (q, k_cache, v_cache, k, v, qv, *where, packed(sinks), out, lse, *parts),
            (*strides, where.stride, B, T, N, capacity, chunk, own, splits, height, left),
            (scale,),
            FEW=tile is few,
            JOIN=tile is few and together > 1,
            D=D,
            **steps,
            **shared,
            **tile.constants(),
        )
    if splits > 1:
        merged = MERGED if where.slots else min(MERGED, next_power_of_2(-(-keys // (chunk * together))))
        launch(
            _attention_paged_merge_kernel,
            (B * HK * height,),
            (*parts, packed(sinks), *where[1:], out, lse),
            (B, T, capacity, programs, own, chunk * together // own, splits, height, left),
            (scale,),
            TOGETHER=together,
            BLOCK_N=few.block_n,
            BLOCK_C=merged,
            BLOCK_D=block_of(DV),
            num_warps=min(4, max(1, merged * block_of(DV) // WARP)),
            **shared,
        )
    return out, lse
