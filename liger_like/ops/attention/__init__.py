"""Flash attention: o_i = sum_j p_ij v_j with p_ij = exp(s_ij - lse_i), s_ij = softcap(scale q_i . k_j) + bias_ij, and
lse_i = log(sum_j exp(s_ij) + exp(sink))   (Dao et al., arXiv:2205.14135, arXiv:2307.08691)

q [B, S, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], o [B, S, H, Dv] in the dtype of q; lse [B, H, S] in fp32, natural
log. Query head h attends with key head h // (H / Hk). Query i has position i + Sk - S and sees the keys of its window.
The scores never exist as a whole, neither forward nor backward. Products take the dtype of the input, all other maths
are in fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_like.ops.attention.backward import attention_bwd
from liger_like.ops.attention.checks import VALUES, check_heads, check_masks, check_offsets, check_options
from liger_like.ops.attention.forward import attention_fwd
from liger_like.ops.attention.masking import TENSORS, Masking
from liger_like.ops.attention.portable.delta import attention_delta
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.layout import packed
from liger_like.runtime.registry import LIBRARY, refuses_dtensors, together
from liger_like.runtime.support import refused, use_kernel

MAX_HEAD_WIDTH = 256
Result = Tensor | tuple[Tensor, Tensor]


def _window(causal: bool, window: tuple[int, int]) -> dict[str, int]:
    """Return how many keys a query sees to its ``left`` and ``right``; -1: all. Sums of them fit into 32 bits."""
    left, right = (min(int(side), 1 << 30) for side in window)
    return {"left": left, "right": 0 if causal else right}


def _attend_ref(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and lse; ``seen`` (broadcast to [B, H, S, Sk]) is True for the keys that a query sees."""
    acc = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    # not by repeat_interleave: a trace of torch.jit would hold the number of repeats as a tensor on the CPU
    k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
    s = (q @ k.transpose(-1, -2)).to(acc) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(acc)
    s = s.masked_fill(~seen, -torch.inf)
    unseen = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(unseen, 0)  # the softmax of a row of -inf has no gradient
    if sinks is not None:
        s = torch.cat((s, sinks.to(acc)[:, None, None].expand(*s.shape[:-1], 1)), -1)
    p = s.softmax(-1).masked_fill(unseen, 0)[..., : k.shape[2]].to(v.dtype)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    return (p @ v).transpose(1, 2), lse.masked_fill(unseen.squeeze(-1), -torch.inf)


def _in_window(queries: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """Return [S, Sk]: True where the query at a position sees the key at a position."""
    distance = keys[None, :] - queries[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left < 0 else seen & (distance >= -left)
    return seen if right < 0 else seen & (distance <= right)


def flash_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float | None = None, sinks: Tensor | None = None,
    bias: Tensor | None = None, key_padding_mask: Tensor | None = None, spans: Tensor | None = None,
    deterministic: bool | None = None, return_lse: bool = False,
) -> Result:  # fmt: skip
    """Compute the op in plain torch; this defines it."""
    S, Sk = q.shape[1], k.shape[1]
    queries, keys = (torch.arange(n, device=q.device) for n in (S, Sk))
    seen = _in_window(queries + Sk - S, keys, **_window(causal, window))
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None, :]
        k, v = (t.masked_fill(~key_padding_mask[:, :, None, None], 0) for t in (k, v))  # padding may hold NaN
    if spans is not None:
        starts, ends = spans[:, :, None, :, None]
        seen = seen & (keys >= starts) & (keys < ends)
    out, lse = _attend_ref(q, k, v, seen, scale, softcap, sinks, bias)
    return (out, lse) if return_lse else out


def _packed(out: Tensor, lse: Tensor, return_lse: bool) -> Result:
    """Return the results of packed sequences as views of the batch; the gradient of ``out[0]`` would fill zeros."""
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def flash_attention_varlen_ref(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None, window: tuple[int, int] = (-1, -1),
    softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool | None = None,
    return_lse: bool = False,
) -> Result:  # fmt: skip
    """Compute the op in plain torch; this defines it."""
    last = len(cu_seqlens_q) - 2  # rows after the last sequence belong to none
    sides = []
    for t, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k)):
        rows = torch.arange(len(t), device=q.device)
        sequence = torch.bucketize(rows, cu, right=True) - 1
        sides.append((sequence, rows - cu[(sequence + 1).clamp(max=last + 1)]))  # positions count from a sequence's end
    (of_q, queries), (of_k, keys) = sides
    seen = _in_window(queries, keys, **_window(causal, window)) & (of_q[:, None] == of_k) & (of_q <= last)[:, None]
    k, v = (t.masked_fill((of_k > last)[:, None, None], 0) for t in (k, v))
    out, lse = _attend_ref(*(t.unsqueeze(0) for t in (q, k, v)), seen, scale, softcap, sinks, None)
    return _packed(out, lse, return_lse)


@together
def _gradients(
    dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor, dlse: Tensor | None, sinks: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, sinks and bias that the last argument names, else None."""
    q, k, v, *options, needs = args
    stats, dsinks = attention_delta(dout, out, lse, sums, dlse, sinks)
    dq, dk, dv, dbias = attention_bwd(dout, q, k, v, stats, *options, [*needs[:3], needs[4]])
    return tuple(grad if need else None for grad, need in zip((dq, dk, dv, dsinks, dbias), needs, strict=True))


class _Attention(torch.autograd.Function):
    launch = staticmethod(attention_fwd)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, (out, lse, sums) = args
        _save(ctx, inputs, (out, lse, sums))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dsums: None = None) -> Any:
        q, k, v, sinks, *masks, out, lse, sums = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        dout = torch.zeros_like(out) if dout is None else dout
        needs = ctx.needs_input_grad
        grads = _gradients(dout, out, lse, sums, dlse, sinks, q, k, v, *masks, *ctx.scalars, [*needs[:5]])
        return *grads, *(None,) * (len(needs) - 5)


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    tensors = 4 + TENSORS
    ctx.save_for_backward(*inputs[:tensors], *output)
    ctx.scalars = inputs[tensors:]  # the last of them is ``deterministic``
    ctx.set_materialize_grads(False)


_OP = torch.ops.liger_like.attention_fwd.default
torch.library.register_autograd(_OP, _Attention.backward, setup_context=_save, lib=LIBRARY)


def _use_kernel(q: Tensor, v: Tensor) -> bool:
    narrow = max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_WIDTH
    return use_kernel(q) and (narrow or refused(f"kernels take heads of up to {MAX_HEAD_WIDTH} features"))


def _scale(width: int, scale: float | None) -> float:
    return width**-0.5 if scale is None else float(scale)


def _deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


@refuses_dtensors("liger_like.parallel.context_parallel", replayed=not VALUES)
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float | None = None, sinks: Tensor | None = None,
    bias: Tensor | None = None, key_padding_mask: Tensor | None = None, spans: Tensor | None = None,
    deterministic: bool | None = None, return_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention of ``q`` [B, S, H, D] over ``k`` [B, Sk, Hk, D] and ``v`` [B, Sk, Hk, Dv]: [B, S, H, Dv].

    ``causal`` and ``window=(left, right)`` (keys that a query sees beside its own position; -1: all) count positions
    from the end: the last query has the position of the last key. ``scale`` multiplies the products q.k (None:
    D**-0.5). With ``softcap`` the scores are ``softcap * tanh(scale q.k / softcap)``. ``sinks`` [H]: a learned score
    per head that joins the softmax's denominator. ``bias``, broadcastable to [B, H, S, Sk], is added to the scores.
    ``key_padding_mask`` [B, Sk], bool: False hides a key from all queries, whatever it holds. ``spans`` [2, B, S],
    int32: the first key that a query may see, and the key after the last, neither decreasing along S; for packed
    documents or chunks, and keys outside a span cost nothing. All masks hold at once. ``return_lse`` also returns the
    log of the denominator [B, H, S] in fp32, differentiable. A row that sees no key returns 0, and an lse of -inf.

    q, k, v, sinks and bias are differentiable; the scores are never in memory. ``deterministic``: the backward repeats
    bit for bit (None: as ``torch.use_deterministic_algorithms`` says). Strides are free, but features must be dense.
    Kernels take bf16, fp16 and fp32 with D and Dv up to 256; other inputs and devices run the plain-torch reference.

    Raises TypeError or ValueError for arguments that do not fit. See Dao, arXiv:2307.08691.
    """
    scale, softcap = check_options(causal, scale, window, softcap, deterministic, return_lse)
    check_heads(q, k, v, sinks, 4)
    check_masks(q, k, bias, key_padding_mask, spans)
    if not _use_kernel(q, v):
        options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        options |= {"bias": bias, "key_padding_mask": key_padding_mask, "spans": spans, "return_lse": return_lse}
        return flash_attention_ref(q, k, v, **options)
    masking = Masking(
        bias=bias if bias is None else bias[(None,) * (4 - bias.dim())],
        key_padding_mask=packed(key_padding_mask),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        offsets=None,
        spans=packed(spans),
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        scale=_scale(q.shape[-1], scale),
        softcap=softcap,
        **_window(causal, window),
    )
    out, lse, *_ = apply(_Attention, q, k, v, sinks, *masking, _deterministic(deterministic), op=_OP)
    return (out, lse) if return_lse else out


@refuses_dtensors("liger_like.parallel.context_parallel")
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None, window: tuple[int, int] = (-1, -1),
    softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool | None = None,
    return_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention within packed sequences: ``q`` [T, H, D] over ``k`` [Tk, Hk, D] and ``v`` [Tk, Hk, Dv]: [T, H, Dv].

    Sequence i has the rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of q, and of k and v the rows that
    ``cu_seqlens_k`` gives alike. Both are int32 or int64 [n + 1], start with 0 and do not decrease; a sequence may be
    empty. ``max_seqlen_q`` and ``max_seqlen_k``: integers, at least the longest lengths. Rows after the last sequence
    see nothing. lse is [H, T]. The other arguments are those of ``flash_attention``. Only pairs of rows that see one
    another cost time.

    Offsets that break these rules give wrong results, but read and write nothing outside the tensors. With
    ``LIGER_LIKE_CHECK=1`` in the environment they raise ValueError, at the cost of waiting for the GPU.

    Raises TypeError or ValueError for arguments that do not fit.
    """
    scale, softcap = check_options(causal, scale, window, softcap, deterministic, return_lse)
    check_heads(q, k, v, sinks, 3)
    max_seqlen_q = check_offsets("cu_seqlens_q", cu_seqlens_q, q, q.shape[0], max_seqlen_q)
    max_seqlen_k = check_offsets("cu_seqlens_k", cu_seqlens_k, q, k.shape[0], max_seqlen_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q, {list(cu_seqlens_q.shape)},"
            f" got {list(cu_seqlens_k.shape)}"
        )
    if not _use_kernel(q, v):
        options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return flash_attention_varlen_ref(q, k, v, *lengths, **options, return_lse=return_lse)
    masking = Masking(
        bias=None,
        key_padding_mask=None,
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        cu_seqlens_k=cu_seqlens_k.contiguous(),
        offsets=None,
        spans=None,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=_scale(q.shape[-1], scale),
        softcap=softcap,
        **_window(causal, window),
    )
    batch = (x.unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = apply(_Attention, *batch, sinks, *masking, _deterministic(deterministic), op=_OP)
    return _packed(out, lse, return_lse)
