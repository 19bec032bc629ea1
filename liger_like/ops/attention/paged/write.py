"""Write new keys and values into paged caches, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.attention.paged.forward import PAGES_SCHEMA, Pages
from liger_like.ops.attention.paged.places import keys_of, load_ids, place_of, rows_of
from liger_like.ops.attention.visibility import start_of
from liger_like.runtime.blocks import block_of
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import dense
from liger_like.runtime.registry import op

ELEMENTS = 4096  # of a block


@triton.jit
def _copy_heads(from_ptr, to_ptr, heads, stride_h, stride_ch, mask, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the ``heads`` of a row."""
    cols = tl.arange(0, BLOCK)
    mask = mask[:, None] & (cols < D)[None, :]
    x = tl.load(from_ptr + heads[:, None] * stride_h + cols[None, :], mask=mask)
    tl.store(to_ptr + heads[:, None] * stride_ch + cols[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["B", "T", "N", "capacity"])
def _paged_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, pages_ptr, lengths_ptr, cu_ptr, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kp, stride_kr, stride_kch, stride_vp, stride_vr, stride_vch, stride_pb, B, T, N, capacity,
    HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr, STARTS: tl.constexpr,
    SEQUENCES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copy a row of keys and values to its slot. Without lengths ``pages_ptr`` has the slot of each row."""
    t = tl.program_id(0)
    if lengths_ptr is None:
        key, ids, inside = t, tl.load(pages_ptr + t), True
    else:
        b = t
        if cu_ptr is not None:
            index = tl.arange(0, SEQUENCES)
            b = tl.sum(((start_of(cu_ptr, index + 1, B, T) <= t) & (index < B)).to(tl.int32))
        start_q, n = rows_of(cu_ptr, b, B, T)
        start_k, length = keys_of(lengths_ptr, b, B, capacity, STARTS, SLOTS)
        key = length - n + t - start_q
        inside = (b < B) & (key >= 0)
        key = tl.where(inside, key, 0)
        ids = load_ids(pages_ptr, b, start_k, stride_pb, key, inside, PAGE, SLOTS)
    page, row = place_of(ids, key, pages_ptr is not None, PAGE, SLOTS)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    mask = (heads < HK) & inside & (page >= 0) & (page < N)
    token = t.to(tl.int64)
    to = k_cache_ptr + page * stride_kp + row * stride_kr
    _copy_heads(k_ptr + token * stride_kt, to, heads, stride_kh, stride_kch, mask, D, BLOCK_D)
    to = v_cache_ptr + page * stride_vp + row * stride_vr
    _copy_heads(v_ptr + token * stride_vt, to, heads, stride_vh, stride_vch, mask, DV, BLOCK_DV)


@op(
    f"paged_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, {PAGES_SCHEMA}) -> ()",
    lambda *args: None,
    replayed=True,
)
def paged_write_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor | None, lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:  # fmt: skip
    """Write k [T, Hk, D] and v [T, Hk, Dv] into caches whose features are dense: as the last keys of the sequences, or
    without ``lengths`` to the slots that ``pages`` [T] names.
    """
    (T, HK, D), (N, P, _, DV) = k.shape, v_cache.shape
    if not (T and N * P):
        return
    k, v, where = dense(k), dense(v), Pages.of(pages, lengths, cu_seqlens_q)
    block_d, block_dv = block_of(D), block_of(DV)
    block_h = min(block_of(HK), max(1, ELEMENTS // max(block_d, block_dv)))
    launch(
        _paged_write_kernel,
        (T, -(-HK // block_h)),
        (k, v, k_cache, v_cache, *where),
        (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], where.stride,
         where.sequences(T), T, N, where.capacity(P)),
        HK=HK,
        D=D,
        DV=DV,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        **where.constants(T, P),
    )  # fmt: skip
