"""Checks of the arguments of the ops on paged caches. No value of a tensor is read, but with ``LIGER_LIKE_CHECK=1``."""

import torch
from torch import Tensor

from liger_like.ops.attention.checks import _readable, _require_tensor, check_offsets
from liger_like.ops.attention.paged.forward import Pages
from liger_like.runtime.checks import require

INTEGERS = torch.int32, torch.int64


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Raise RuntimeError in grad mode if a tensor requires a gradient, which the op does not have."""
    if torch.is_grad_enabled():
        for name, t in tensors.items():
            if t is not None and t.requires_grad:
                raise RuntimeError(
                    f"{name} requires a gradient, but paged caches are for inference: use torch.no_grad()"
                )


def check_queries(q: Tensor, k_cache: Tensor, sinks: Tensor | None) -> None:
    """Raise unless q is [T, H, D], the heads of the cache divide its heads, and the sinks fit it."""
    require("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must have 3 dimensions, got shape {list(q.shape)}")
    H = q.shape[1]
    if isinstance(k_cache, Tensor) and k_cache.dim() == 4 and (not k_cache.shape[2] or H % k_cache.shape[2]):
        raise ValueError(f"the heads of k_cache, {k_cache.shape[2]}, must divide those of q, {H}")
    if sinks is not None:
        require("sinks", sinks, like=q, shape=(H,))


def check_caches(like: Tensor, k_cache: Tensor, v_cache: Tensor, D: int) -> None:
    """Raise unless the caches fit together, and have keys of D features, the dtype and the device of ``like``."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(name, cache, like=like)
        if cache.dtype != like.dtype:
            raise TypeError(f"{name} must have the dtype of the rows, {like.dtype}, got {cache.dtype}")
        if cache.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {list(cache.shape)}")
    if k_cache.shape[-1] != D:
        raise ValueError(f"k_cache must have heads of {D} features, got shape {list(k_cache.shape)}")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            f"v_cache must have the shape of k_cache but for the head width, {list(k_cache.shape)},"
            f" got {list(v_cache.shape)}"
        )


def check_rows(name: str, rows: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``rows`` have this ``shape``, and the dtype and the device of ``like``."""
    require(name, rows, like=like)
    if rows.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of the cache, {like.dtype}, got {rows.dtype}")
    if rows.shape != shape:
        raise ValueError(f"{name} must have shape {[*shape]}, got {list(rows.shape)}")


def check_slots(slots: Tensor, k: Tensor) -> None:
    """Raise unless there is a slot for each row of ``k``."""
    _require_tensor("slots", slots, k, *INTEGERS)
    if slots.shape != k.shape[:1]:
        raise ValueError(f"slots must have shape {[*k.shape[:1]]}, got {list(slots.shape)}")


def check_pages(where: Pages, cache: Tensor, rows: int, longest: int) -> None:
    """Raise unless pages and lengths fit a cache [N, P, Hk, D] and so many rows, at most ``longest`` of a sequence."""
    pages, lengths, cu = where
    if cu is not None:
        check_offsets("cu_seqlens_q", cu, cache, rows, longest)
    B = where.sequences(rows)
    _require_tensor("lengths", lengths, cache, *INTEGERS)
    by_slots = False
    if pages is not None:
        _require_tensor("pages", pages, cache, *INTEGERS)
        by_slots = pages.dim() == 1
        if not by_slots and (pages.dim() != 2 or pages.shape[0] != B):
            raise ValueError(f"pages must have shape [{B}, M], or [sum of lengths], got {list(pages.shape)}")
    elif cache.shape[0] != B:
        raise ValueError(f"without pages the caches must have a page for each of {B} sequences, got {cache.shape[0]}")
    shapes = [(B + 1,)] if by_slots else [(B,), (B + 1,)]
    if lengths.shape not in shapes:
        expected = " or ".join(str([*shape]) for shape in shapes)
        raise ValueError(f"lengths must have shape {expected}, got {list(lengths.shape)}")
    if _readable(lengths):
        _check_values(where, cache, rows)


def _check_values(where: Pages, cache: Tensor, rows: int) -> None:
    """Raise unless the lengths fit into the pages."""
    lengths, capacity = where.lengths, where.capacity(cache.shape[1])
    assert lengths is not None
    if where.starts(rows):
        total = int(lengths[-1])
        if where.slots and total > capacity:
            raise ValueError(f"pages must have a slot for each of {total} keys, got {capacity}")
        lengths = lengths.diff()
    least, most = (int(n) for n in lengths.aminmax()) if lengths.numel() else (0, 0)
    if least < 0 or most > capacity:
        raise ValueError(f"lengths must be at least 0 and at most {capacity}, got {least if least < 0 else most}")


def check_places(where: Pages, cache: Tensor, rows: int, left: int, new: bool) -> None:
    """Raise if a key that a row sees has a page that is not in ``cache`` [N, P, Hk, D], where values are checked.

    ``left``: keys before a row that it sees, -1: all. ``new``: the rows bring their own keys.
    """
    pages, lengths, cu = where
    if pages is None or lengths is None or not _readable(lengths):
        return
    N, P = cache.shape[:2]
    starts, lengths = (lengths[:-1], lengths.diff()) if where.starts(rows) else (lengths * 0, lengths)
    count = torch.ones_like(lengths) if cu is None else cu.diff()
    first = (lengths - count - left).clamp(min=0) if left >= 0 else lengths * 0
    end = (lengths - count if new else lengths).masked_fill(count == 0, 0)
    if where.slots:
        at = torch.arange(len(pages), device=pages.device)[:, None]
        seen = ((at >= starts + first) & (at < starts + end)).any(1)
    else:
        at = torch.arange(pages.shape[1], device=pages.device) * P
        seen = (at + P > first[:, None]) & (at < end[:, None]) & (first < end)[:, None]
    highest = N * P if where.slots else N
    if (wrong := pages[seen & ((pages < 0) | (pages >= highest))]).numel():
        raise ValueError(f"pages must be at least 0 and less than {highest} where a row sees keys, got {int(wrong[0])}")
