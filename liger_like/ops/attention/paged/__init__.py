"""Attention of new rows over keys in paged caches, for generation: o_i = sum_j p_ij v_j as in ``flash_attention``,
where key j of sequence b is row j mod P of page ``pages[b, j // P]``   (Kwon et al., arXiv:2309.06180)

q [T, H, D], caches [N, P, Hk, D] and [N, P, Hk, Dv], o [T, H, Dv] in the dtype of q; lse [H, T] in fp32, natural log.
Row i of the last n rows of a sequence of L keys has position L - n + i, and sees the keys up to its own. Pages, lengths
and the rows of sequences are on the device, and the host reads none of them.
"""

import torch
from torch import Tensor

from liger_like.ops.attention import Result, _attend_ref, _scale, _use_kernel, _window
from liger_like.ops.attention.checks import VALUES, check_options
from liger_like.ops.attention.paged.checks import (
    check_caches,
    check_pages,
    check_places,
    check_queries,
    check_rows,
    check_slots,
    refuse_gradients,
)
from liger_like.ops.attention.paged.forward import Pages, paged_attention_fwd
from liger_like.ops.attention.paged.write import paged_write_rows
from liger_like.runtime.checks import require, require_integer
from liger_like.runtime.registry import refuses_dtensors
from liger_like.runtime.support import refused, use_kernel

MAX_LATENT = 512, 64  # features of values that are keys, and of the rest of the keys


def _use_latent_kernel(q: Tensor, v_cache: Tensor) -> bool:
    latent, rotated = MAX_LATENT
    narrow = v_cache.shape[-1] <= latent and q.shape[-1] <= rotated and q.dtype != torch.float32
    return use_kernel(q) and (
        narrow or refused(f"kernels take latents of up to {latent} + {rotated} features, in 16 bits")
    )


def _rows_and_keys(where: Pages, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first row and the number of rows of each sequence, the place of its first key, and its length."""
    lengths, cu = where.lengths, where.cu_seqlens_q
    assert lengths is not None
    starts = torch.arange(T, device=lengths.device) if cu is None else cu[:-1].long()
    rows = torch.ones_like(starts) if cu is None else cu.diff()
    if where.starts(T):
        return starts, rows, lengths[:-1].long(), lengths.diff().long()
    return starts, rows, torch.zeros_like(starts), lengths.long()


def _places(where: Pages, first: Tensor, keys: Tensor, P: int) -> tuple[Tensor, Tensor]:
    """Return the page of each of the ``keys`` [B, n], and its row there."""
    pages = where.pages
    if pages is None:
        return torch.arange(len(keys), device=keys.device)[:, None].expand_as(keys), keys
    if where.slots:
        slots = pages[(first[:, None] + keys).clamp(max=max(0, len(pages) - 1))] if len(pages) else keys * 0 - 1
        return slots.long().div(P, rounding_mode="floor"), slots.long() % P
    return pages.gather(1, keys.div(P, rounding_mode="floor")).long(), keys % P


def flash_attention_paged_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor | None, lengths: Tensor, *,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = 1, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, scale: float | None = None, window: tuple[int, int] = (-1, -1),
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: bool = False,
) -> Result:  # fmt: skip
    """Compute the op in plain torch; this defines it."""
    where, T, (N, P) = Pages(pages, lengths, cu_seqlens_q), len(q), k_cache.shape[:2]
    B, capacity, left = where.sequences(T), where.capacity(P), _window(True, window)["left"]
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[-1]), q.new_full((q.shape[1], T), -torch.inf)
    lse = lse.to(torch.promote_types(q.dtype, torch.float32))
    if T and B and N and capacity:
        starts, rows, first, length = _rows_and_keys(where, T)
        positions = length[:, None] - rows[:, None] + torch.arange(max_seqlen_q, device=q.device)  # [B, S]
        keys = torch.arange(capacity, device=q.device)
        distance = keys - positions[..., None]
        seen = (distance <= 0) & (positions < length[:, None])[..., None]
        seen = seen if left < 0 else seen & (distance >= -left)
        page, row = _places(where, first, keys.expand(B, -1), P)
        sides = []
        for cache, new in ((k_cache, k), (v_cache, v)):
            side = cache[page.clamp(0, N - 1), row.clamp(0, P - 1)]
            if new is not None:
                behind = keys - (length - rows)[:, None]
                fresh = new[(starts[:, None] + behind).clamp(0, T - 1)]
                side = torch.where((behind >= 0)[..., None, None], fresh, side)
            sides.append(side.masked_fill(~seen.any(1)[..., None, None], 0))  # what nobody sees may be NaN
        rows_of_q = q if qv is None else torch.cat((q, qv), -1)
        if qv is not None:
            sides[0] = torch.cat(sides, -1)
        padded = rows_of_q[(starts[:, None] + torch.arange(max_seqlen_q, device=q.device)).clamp(max=T - 1)]
        results = _attend_ref(padded, *sides, seen[:, None], scale, softcap, sinks, None)
        t = torch.arange(T, device=q.device)
        b = t if cu_seqlens_q is None else torch.bucketize(t, cu_seqlens_q[1:].contiguous(), right=True)
        behind_all, b = b >= B, b.clamp(0, B - 1)
        place = (t - starts[b]).clamp(0, max_seqlen_q - 1)
        out = results[0][b, place].masked_fill(behind_all[:, None, None], 0)
        lse = results[1][b, :, place].T.masked_fill(behind_all, -torch.inf)
    return (out, lse) if return_lse else out


def paged_write_ref(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor | None = None, *, pages: Tensor | None = None,
    lengths: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
) -> None:  # fmt: skip
    """Write in plain torch; this defines the op."""
    (N, P), T = k_cache.shape[:2], len(k)
    t = torch.arange(T, device=k.device)
    if slots is not None:
        page, row, known = slots.long().div(P, rounding_mode="floor"), slots.long() % P, t >= 0
    else:
        where = Pages(pages, lengths, cu_seqlens_q)
        if not (where.sequences(T) and where.capacity(P)):
            return
        starts, rows, first, length = _rows_and_keys(where, T)
        b = t if cu_seqlens_q is None else torch.bucketize(t, cu_seqlens_q[1:].contiguous(), right=True)
        known, b = b < len(starts), b.clamp(max=len(starts) - 1)
        key = (length - rows - starts)[b] + t
        known = known & (key >= 0)
        of_rows = where if pages is None or where.slots else Pages(pages[b], lengths, None)
        key = key.clamp(0, where.capacity(P) - 1)  # rows after the last sequence may have a key behind all pages
        page, row = (x[:, 0] for x in _places(of_rows, first[b], key[:, None], P))
        page = b if pages is None else page
    known = known & (page >= 0) & (page < N)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[page[known], row[known]] = new[known]


@refuses_dtensors("full_tensor()", replayed=not VALUES)
def flash_attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor | None, lengths: Tensor, *,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = 1, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, scale: float | None = None, window: tuple[int, int] = (-1, -1),
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention of new rows ``q`` [T, H, D] over ``k_cache`` [N, P, Hk, D] and ``v_cache`` [N, P, Hk, Dv]: [T, H, Dv].

    The caches hold N pages of P tokens. ``pages`` [B, M]: the pages of each sequence; key j is row j % P of page
    ``pages[b, j // P]``, and what stands behind the length, such as -1, is not read. ``pages`` [sum of lengths]: the
    slot of each key, page * P + row. None: page b belongs to sequence b, as in a static cache. ``lengths`` [B]: keys of
    each sequence, its rows of q included; or [B + 1]: where sequences start among all keys, as slots need.

    Each sequence has one row of q, or with ``cu_seqlens_q`` [B + 1] the rows ``cu_seqlens_q[b]`` to
    ``cu_seqlens_q[b + 1]``, at most ``max_seqlen_q``. They are its last tokens, and each sees the tokens up to its own
    position, with ``window=(left, right)`` no more than ``left`` before it. ``k`` [T, Hk, D] and ``v`` [T, Hk, Dv]:
    keys and values of these rows; the cache then gives only the keys before them, whether they are written there or
    not. A row of a sequence without keys, and a row after the last sequence, returns 0, and an lse of -inf.

    ``qv`` [T, H, Dv]: queries of the values, which are then part of the keys: the products q.k + qv.v are scaled, by
    (D + Dv)**-0.5 if ``scale`` is None. So the latents of multi-head latent attention are read once: ``v_cache`` holds
    latents and ``k_cache`` their rotated features, perhaps both views of one tensor (DeepSeek-AI, arXiv:2405.04434).
    Then the rows' own keys must be in the caches, and ``k`` and ``v`` None.

    ``scale``, ``softcap`` and ``sinks`` [H] are those of ``flash_attention``. ``return_lse`` also returns the log of
    the denominator [H, T] in fp32. Integers are int32 or int64, and all tensors on one device. The host reads no
    length, so that a CUDA graph of the call serves all lengths and pages. The bits of a row depend on its q, its keys,
    its length, the number of rows of its sequence and M * P alone, not on other sequences. Strides are free, but
    features must be dense. Kernels take bf16, fp16 and fp32 with D and Dv up to 256, and with ``qv`` bf16 and fp16 with
    D up to 64 and Dv up to 512; other inputs and devices run the plain-torch reference. Inference only.

    Pages out of range and lengths beyond M * P give wrong results, but read nothing outside the caches; with
    ``LIGER_LIKE_CHECK=1`` they raise ValueError.

    Raises TypeError or ValueError for arguments that do not fit, and RuntimeError if one requires a gradient in grad
    mode. See Kwon et al., arXiv:2309.06180.
    """
    scale, softcap = check_options(False, scale, window, softcap, None, return_lse)
    check_queries(q, k_cache, sinks)
    check_caches(q, k_cache, v_cache, q.shape[-1])
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or neither")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new is not None:
            check_rows(name, new, q, (q.shape[0], *cache.shape[2:]))
    if qv is not None:
        check_rows("qv", qv, q, (*q.shape[:2], v_cache.shape[-1]))
        if k is not None:
            raise ValueError("with qv the keys of the rows must be in the caches: k and v must be None")
    max_seqlen_q = require_integer("max_seqlen_q", max_seqlen_q, 1)
    where, left = Pages(pages, lengths, cu_seqlens_q), _window(True, window)["left"]
    check_pages(where, k_cache, q.shape[0], max_seqlen_q)
    check_places(where, k_cache, q.shape[0], left, k is not None)
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, sinks=sinks)
    if not (_use_kernel(q, v_cache) if qv is None else _use_latent_kernel(q, v_cache)):
        options = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "k": k, "v": v, "qv": qv, "scale": scale}
        options |= {"window": window, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
        return flash_attention_paged_ref(q, k_cache, v_cache, pages, lengths, **options)
    tensors = q, k_cache, v_cache, pages, lengths, cu_seqlens_q, k, v, qv, sinks
    width = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    out, lse = paged_attention_fwd(*tensors, max_seqlen_q, _scale(width, scale), softcap, left)
    return (out, lse) if return_lse else out


@refuses_dtensors("full_tensor()", replayed=not VALUES)
def paged_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor | None = None, *, pages: Tensor | None = None,
    lengths: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``k`` [T, Hk, D] and ``v`` [T, Hk, Dv] into ``k_cache`` [N, P, Hk, D] and ``v_cache`` [N, P, Hk, Dv].

    ``slots`` [T]: the slot of each row, page * P + row in that page; a row whose slot is negative or out of range is
    skipped. Slots must differ. Or ``lengths`` with ``pages`` and ``cu_seqlens_q`` of ``flash_attention_paged``: the
    rows become the last keys of their sequences. Integers are int32 or int64. Strides are free, but the features of the
    caches must be dense. The host reads no tensor, and nothing else in the caches changes.

    Raises TypeError or ValueError for arguments that do not fit, and RuntimeError if one requires a gradient in grad
    mode.
    """
    require("k", k)
    check_caches(k, k_cache, v_cache, k.shape[-1])
    check_rows("k", k, k, (k.shape[0], *k_cache.shape[2:]))
    check_rows("v", v, k, (k.shape[0], *v_cache.shape[2:]))
    if (slots is None) == (lengths is None):
        raise ValueError("either slots or lengths must be given")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name} must have dense features, got strides {[*cache.stride()]}")
    if slots is None:
        check_pages(Pages(pages, lengths, cu_seqlens_q), k_cache, k.shape[0], k.shape[0])
    else:
        if pages is not None or cu_seqlens_q is not None:
            raise ValueError("pages and cu_seqlens_q must come with lengths, not with slots")
        check_slots(slots, k)
    refuse_gradients(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if use_kernel(k):
        paged_write_rows(k, v, k_cache, v_cache, pages if slots is None else slots, lengths, cu_seqlens_q)
    else:
        paged_write_ref(k, v, k_cache, v_cache, slots, pages=pages, lengths=lengths, cu_seqlens_q=cu_seqlens_q)
