"""Attention backward: dv_j = sum_i p_ij do_i and, with ds_ij = p_ij (do_i . v_j - delta_i), delta_i = do_i . o_i,
dq_i = scale sum_j ds_ij k_j and dk_j = scale sum_i ds_ij q_i; p is computed again from q, k and lse.

This file registers the op and chooses its kernels. All of them sum in registers and repeat bit for bit, but for
``hopper.backward``: it computes dq, dk and dv in one pass and adds dq up in global memory.
"""

from typing import Any

import torch
from torch import Tensor

from liger_like.ops.attention.choice import BACKWARD, BACKWARD_192, BACKWARD_256, hopper_kernels, is_small
from liger_like.ops.attention.flops import backward_flops
from liger_like.ops.attention.masking import MASKING_SCHEMA, Masking
from liger_like.ops.attention.portable import backward as portable
from liger_like.ops.attention.portable.bias import attention_dbias
from liger_like.ops.attention.sums import round_sums
from liger_like.ops.attention.tiles import tile_for
from liger_like.runtime.layout import dense
from liger_like.runtime.registry import op
from liger_like.runtime.support import num_programs


def _group_splits(programs: int, group: int, uneven: bool, device: torch.device) -> int:
    """Return the number of programs that share the query heads of a key head, so that few key heads fill the GPU.

    Uneven blocks get two programs for each multiprocessor, not one: a short program then follows each long one.
    """
    splits = max(1, min(group, (2 if uneven else 1) * num_programs(device, 1) // max(1, programs)))
    return -(-group // -(-group // splits))  # none of them is empty


def _spans_of_keys(spans: Tensor | None, SK: int) -> Tensor | None:
    """Return the span of queries that see each key [2, B, Sk], from the ``spans`` [2, B, S] of keys that each query
    sees.

    A key is seen by the queries from the first whose span ends after the key to the last whose span starts at or before
    it.
    """
    if spans is None:
        return None
    keys = torch.arange(SK, dtype=torch.int32, device=spans.device).repeat(*spans.shape[:2], 1)
    return torch.searchsorted(spans.flip(0), keys, right=True, out_int32=True)


def _grads(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, key_spans: Tensor | None, bias: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *_, (needs_q, needs_k, needs_v, needs_bias) = args
    dq, dk, dv = (x.new_empty(x.shape if need else 0) for x, need in ((q, needs_q), (k, needs_k), (v, needs_v)))
    return dq, dk, dv, q.new_empty(0) if bias is None or not needs_bias else bias.new_empty(bias.shape)


def _empty(x: Tensor, parts: int = 1) -> Tensor:
    """Return contiguous memory for the gradient of ``x``, or for its parts in fp32 if there are several."""
    if parts == 1:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty((parts, *x.shape), dtype=torch.float32, device=x.device)


@op(
    f"attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor stats, Tensor? key_spans, {MASKING_SCHEMA},"
    " bool deterministic, bool[4] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    _grads,
    flops=backward_flops,
    inlined=lambda dout, q, k, v, stats, key_spans, *args: is_small(q, k, v, *args),
    replayed=True,
)
def _attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, key_spans: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, deterministic, needs = args
    if not (q.numel() and k.numel()):
        empty = _grads(dout, q, k, v, stats, key_spans, options[0], needs)
        return tuple(t.zero_() for t in empty)  # type: ignore[return-value]
    masking = Masking(*options)
    dout, q, k, v = map(dense, (dout, q, k, v))
    tensors = dout, q, k, v, stats
    dq = dk = dv = dbias = dq_sum = None
    wants_all = needs[0] and (needs[1] or needs[2]) and not deterministic
    at_once = wants_all and hopper_kernels(BACKWARD, masking, q, k, v, dout)
    hopper = at_once or hopper_kernels(BACKWARD_256, masking, q, k, v, dout)
    apart = hopper or portable
    if needs[1] or needs[2]:
        of_keys = masking if key_spans is None else masking._replace(spans=key_spans)
        # a softcap takes registers
        of_192 = hopper and masking.softcap is None and hopper_kernels(BACKWARD_192, masking, q, k, v, dout)
        block_n = (of_192 or hopper).BLOCK_N if hopper else tile_for("dkv", q, v, masking).block_n
        B, (SK, HK), group = q.shape[0], k.shape[1:3], q.shape[2] // k.shape[2]
        splits = _group_splits(masking.num_blocks(SK, block_n) * B * HK, group, masking.uneven, q.device)
        parts = [_empty(x, splits) for x in (k, v)]
        if at_once:
            dq_sum, dq = at_once.add_gradients(*tensors, of_keys, splits, *parts), _empty(q)
        else:
            (of_192 or apart).fill_dkv(*tensors, of_keys, splits, *parts)
        if splits > 1:
            dk, dv = (_empty(x) if need else None for x, need in ((k, needs[1]), (v, needs[2])))
        if at_once or splits > 1:
            round_sums(dq_sum, dq, *parts, dk, dv, splits, masking.scale)
        if splits == 1:
            dk, dv = parts
    if needs[0] and not at_once:
        dq = apart.make_dq(*tensors, masking)
    if needs[3] and masking.bias is not None:
        dbias = attention_dbias(dout, q, k, v, stats, masking)
    grads = zip((dq, dk, dv, dbias), needs, strict=True)
    return tuple(grad if need and grad is not None else q.new_empty(0) for grad, need in grads)  # type: ignore[return-value]


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the bias from the ``stats`` of ``attention_delta``.

    k and v may be a part of the keys that the stats are about. The spans of keys are computed outside of the op, so
    that torch.compile computes them once for all layers of a model.
    """
    *options, _, needs = args
    key_spans = _spans_of_keys(Masking(*options).spans, k.shape[1]) if needs[1] or needs[2] else None
    return _attention_bwd(dout, q, k, v, stats, key_spans, *args)
