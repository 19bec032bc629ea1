"""Checks of attention's arguments: types, shapes and numbers always; values of tensors, which the host would have to
wait for, only with ``LIGER_LIKE_CHECK=1`` in the environment.
"""

import itertools
import os
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from liger_like.runtime.checks import require, require_integer, require_positive

VALUES = os.environ.get("LIGER_LIKE_CHECK", "0") == "1"


def _require_flag(name: str, value: object, also: tuple[object, ...] = ()) -> None:
    if not isinstance(value, bool) and all(value is not other for other in also):
        choices = " or ".join(map(str, (True, False, *also)))
        raise TypeError(f"{name} must be {choices}, got {value!r}")


def _require_tensor(name: str, value: object, like: Tensor, *dtypes: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes or value.device != like.device:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {names} on {like.device}, got {value.dtype} on {value.device}")


def check_options(
    causal: bool, scale: float | None, window: tuple[int, int], softcap: float | None, deterministic: bool | None,
    return_lse: bool = False,
) -> tuple[float | None, float | None]:  # fmt: skip
    """Return ``scale`` and ``softcap`` as Python floats. Raise TypeError or ValueError if an option does not fit."""
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        _require_flag(name, flag)
    _require_flag("deterministic", deterministic, (None,))
    if not isinstance(window, tuple | list):
        raise TypeError(f"window must be two integers, got {window!r}")
    integers = all(isinstance(side, int | Integral) and not isinstance(side, bool) for side in window)
    if len(window) != 2 or not integers or min(window) < -1:
        raise ValueError(f"window must be two integers, at least -1 (which is no bound), got {window!r}")
    numbers = ("scale", scale), ("softcap", softcap)
    scale, softcap = (number if number is None else require_positive(name, number) for name, number in numbers)
    return scale, softcap


def check_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, dimensions: int) -> None:
    """Raise unless q, k and v have as many ``dimensions`` and fit together, and the sinks fit them."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require(name, tensor, like=q)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.dim() != dimensions:
            raise ValueError(f"{name} must have {dimensions} dimensions, got shape {list(tensor.shape)}")
    (H, D), Hk = q.shape[-2:], k.shape[-2]
    if k.shape[-1] != D or k.shape[:-3] != q.shape[:-3]:
        raise ValueError(f"k must have the batch and the head width of q, {list(q.shape)}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have the shape of k but for the head width, {list(k.shape)}, got {list(v.shape)}")
    if not Hk or H % Hk:
        raise ValueError(f"the heads of k, {Hk}, must divide those of q, {H}")
    if sinks is not None:
        require("sinks", sinks, like=q, shape=(H,))


def check_masks(
    q: Tensor, k: Tensor, bias: Tensor | None, key_padding_mask: Tensor | None, spans: Tensor | None
) -> None:
    """Raise unless the masks of a batch fit q [B, S, H, D] and k [B, Sk, Hk, D]."""
    (B, S, H, _), Sk = q.shape, k.shape[1]
    if bias is not None:
        if Sk or not isinstance(bias, Tensor):
            require("bias", bias[None] if isinstance(bias, Tensor) else bias, like=q)
        if bias.dim() > 4 or any(n not in (1, m) for n, m in zip(bias.shape[::-1], (Sk, S, H, B), strict=False)):
            raise ValueError(f"bias must be broadcastable to {[B, H, S, Sk]}, got {list(bias.shape)}")
    if key_padding_mask is not None:
        _require_tensor("key_padding_mask", key_padding_mask, q, torch.bool)
        if key_padding_mask.shape != (B, Sk):
            raise ValueError(f"key_padding_mask must have shape {[B, Sk]}, got {list(key_padding_mask.shape)}")
    if spans is not None:
        _require_tensor("spans", spans, q, torch.int32)
        if spans.shape != (2, B, S):
            raise ValueError(f"spans must have shape {[2, B, S]}, got {list(spans.shape)}")
        if _readable(spans) and spans.numel() and bool((spans.diff(dim=2) < 0).any()):
            side, b, i = (spans.diff(dim=2) < 0).nonzero()[0].tolist()
            before, after = spans[side, b, i : i + 2].tolist()
            raise ValueError(f"spans must not fall along a row, got {before} before {after} in spans[{side}, {b}]")


def _readable(t: Tensor) -> bool:
    """Return True if the host may read the values of ``t``: not while tracing, nor in a graph under capture."""
    if not VALUES or torch.compiler.is_compiling() or t.is_meta or isinstance(t, FakeTensor):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_offsets(name: str, cu_seqlens: Tensor, like: Tensor, rows: int, longest: int) -> int:
    """Return ``longest`` as a Python int. Raise unless it is an integer and ``cu_seqlens`` [n + 1] are offsets.

    If values are checked, offsets start with 0, do not fall and end within the ``rows``, and no sequence is longer than
    ``longest``.
    """
    _require_tensor(name, cu_seqlens, like, torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f"{name} must have the shape [n + 1], got {list(cu_seqlens.shape)}")
    limit = name.replace("cu_seqlens", "max_seqlen")
    longest = require_integer(limit, longest, 0)
    if not _readable(cu_seqlens):
        return longest
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    if offsets[0]:
        raise ValueError(f"{name} must start with 0, got {offsets[0]}: offsets are needed, not lengths")
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} must not fall, got {offsets[i]} before {offsets[i + 1]} at index {i}")
    if offsets[-1] > rows:
        raise ValueError(f"{name} must not pass the {rows} rows, got {offsets[-1]}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"{limit} must be at least the longest sequence, {max(lengths)}, got {longest}")
    return longest
