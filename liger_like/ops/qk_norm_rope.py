"""QK-norm and RoPE in one pass: rope(rms_norm(q), rms_norm(k))   (Dehghani et al., arXiv:2302.05442; Su et al.,
arXiv:2104.09864)

The forward is the kernel of ``rope``, which normalises each head of D features before it rotates the head, and rounds
where the two ops round. The backward rotates the gradients back, recomputes 1 / rms from the saved q and k, and sums
the weights' gradients in fp32 over the tokens and heads of a program.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.rms_norm import CASTING_MODES, rms_norm, rms_norm_ref
from liger_like.ops.rope import (
    Layouts,
    angles,
    check,
    dense,
    empty_dense_like,
    head_blocks,
    heads_and_tokens,
    launch_fwd,
    load_angle,
    load_heads,
    pairs,
    rope,
    rope_ref,
    rstd_of_heads,
    store_heads,
    turn_constants,
)
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import load_vector
from liger_like.runtime.checks import require, require_choice, require_eps, require_number
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed
from liger_like.runtime.registry import LIBRARY, on_shards, op
from liger_like.runtime.support import refused, use_kernel
from liger_like.runtime.tiles import Tile, partial_sums, sum_partials, tiled


def qk_norm_rope_ref(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    **layouts: Any,
) -> tuple[Tensor, Tensor]:
    """Compute ``qk_norm_rope`` in plain torch; this defines the op."""
    q = rms_norm_ref(q, q_weight, eps, offset=offset, casting_mode=casting_mode)
    k = rms_norm_ref(k, k_weight, eps, offset=offset, casting_mode=casting_mode)
    return rope_ref(q, k, cos, sin, **layouts)


@triton.jit
def _turn_heads_back(
    dy_ptr, x_ptr, dx_ptr, w_ptr, stride_dyh, stride_xh, stride_dxh, offs_h, H, cos, sin, eps, offset,
    CASTING: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, IN_INTERLEAVED: tl.constexpr,
    OUT_INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Store the gradients of heads unless ``dx_ptr`` is None; return dw per head, in the parts of ``load_heads``."""
    D: tl.constexpr = 2 * HALF + REST
    x1, x2, x = load_heads(x_ptr, stride_xh, offs_h, H, HALF, REST, IN_INTERLEAVED, BLOCK_D, BLOCK_R)
    y1, y2, dn = load_heads(dy_ptr, stride_dyh, offs_h, H, HALF, REST, OUT_INTERLEAVED, BLOCK_D, BLOCK_R)
    dn1, dn2 = y1 * cos + y2 * sin, y2 * cos - y1 * sin
    rstd = rstd_of_heads(x1, x2, x, eps, x_ptr.dtype.element_ty, CASTING, HALF, REST)[:, None]
    x1, x2, x = x1 * rstd, x2 * rstd, x * rstd
    dw1, dw2, dw = dn1 * x1, dn2 * x2, dn * x
    if dx_ptr is not None:
        offs_1, offs_2 = pairs(HALF, IN_INTERLEAVED, BLOCK_D)
        if w_ptr is not None:
            w1, w2 = load_vector(w_ptr, offs_1, D) + offset, load_vector(w_ptr, offs_2, D) + offset
            dn1, dn2 = dn1 * w1[None, :], dn2 * w2[None, :]
        dot = tl.sum(dn1 * x1 + dn2 * x2, axis=1)
        if REST > 0:
            if w_ptr is not None:
                dn *= (load_vector(w_ptr, 2 * HALF + tl.arange(0, BLOCK_R), D) + offset)[None, :]
            dot += tl.sum(dn * x, axis=1)
        mean = (dot / D)[:, None]
        dx1, dx2, dx = (dn1 - x1 * mean) * rstd, (dn2 - x2 * mean) * rstd, (dn - x * mean) * rstd
        store_heads(dx_ptr, stride_dxh, offs_h, H, dx1, dx2, dx, HALF, REST, IN_INTERLEAVED, BLOCK_D, BLOCK_R)
    return dw1, dw2, dw


@triton.jit
def _store_dw(
    dw_ptr, dw1, dw2, dw, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_1, offs_2 = pairs(HALF, INTERLEAVED, BLOCK_D)
    mask = tl.arange(0, BLOCK_D) < HALF
    tl.store(dw_ptr + offs_1, tl.sum(dw1, axis=0), mask=mask)
    tl.store(dw_ptr + offs_2, tl.sum(dw2, axis=0), mask=mask)
    if REST > 0:
        offs = tl.arange(0, BLOCK_R)
        tl.store(dw_ptr + 2 * HALF + offs, tl.sum(dw, axis=0), mask=offs < REST)


@triton.jit(do_not_specialize=["T", "S"])
def _qk_norm_rope_bwd_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, dq_ptr, dk_ptr, dw_ptr,
    stride_dqob, stride_dqoh, stride_dqos, stride_dkob, stride_dkoh, stride_dkos,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_cs,
    stride_dqb, stride_dqh, stride_dqs, stride_dkb, stride_dkh, stride_dks, T, S, H, HK, eps, offset,
    CASTING: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, COS_STEP: tl.constexpr, COS_BATCHED: tl.constexpr,
    IN_INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, STAGES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)  # Inductor passes floats in fp64
    D: tl.constexpr = 2 * HALF + REST
    offs_q = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_k = tl.program_id(1) * BLOCK_HK + tl.arange(0, BLOCK_HK)
    # persistent: each program owns fp32 rows of partial dweights, so no atomics and repeatable sums
    REST_D: tl.constexpr = BLOCK_R if REST > 0 else BLOCK_D
    dqw1, dqw2 = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    dkw1, dkw2 = tl.zeros((BLOCK_HK, BLOCK_D), tl.float32), tl.zeros((BLOCK_HK, BLOCK_D), tl.float32)
    dqw, dkw = tl.zeros((BLOCK_H, REST_D), tl.float32), tl.zeros((BLOCK_HK, REST_D), tl.float32)
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
        offs = (b * S + s if COS_BATCHED else s) * stride_cs
        cos, sin = load_angle(cos_ptr + offs, sin_ptr + offs, tl.arange(0, BLOCK_D), HALF, COS_STEP)
        dw1, dw2, dw = _turn_heads_back(
            dq_out_ptr + b * stride_dqob + s * stride_dqos, q_ptr + b * stride_qb + s * stride_qs,
            None if dq_ptr is None else dq_ptr + b * stride_dqb + s * stride_dqs, qw_ptr, stride_dqoh, stride_qh,
            stride_dqh, offs_q, H, cos, sin, eps, offset, CASTING, HALF, REST, IN_INTERLEAVED, OUT_INTERLEAVED,
            BLOCK_D, BLOCK_R,
        )  # fmt: skip
        dqw1, dqw2, dqw = dqw1 + dw1, dqw2 + dw2, dqw + dw
        dw1, dw2, dw = _turn_heads_back(
            dk_out_ptr + b * stride_dkob + s * stride_dkos, k_ptr + b * stride_kb + s * stride_ks,
            None if dk_ptr is None else dk_ptr + b * stride_dkb + s * stride_dks, kw_ptr, stride_dkoh, stride_kh,
            stride_dkh, offs_k, HK, cos, sin, eps, offset, CASTING, HALF, REST, IN_INTERLEAVED, OUT_INTERLEAVED,
            BLOCK_D, BLOCK_R,
        )  # fmt: skip
        dkw1, dkw2, dkw = dkw1 + dw1, dkw2 + dw2, dkw + dw
    dw_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * 2 * D
    _store_dw(dw_ptr, dqw1, dqw2, dqw, HALF, REST, IN_INTERLEAVED, BLOCK_D, BLOCK_R)
    _store_dw(dw_ptr + D, dkw1, dkw2, dkw, HALF, REST, IN_INTERLEAVED, BLOCK_D, BLOCK_R)


def _norm_outputs(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    casting_mode: str, *args: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_out, k_out = (
        empty_dense_like(x, x.dtype if casting_mode == "gemma" else torch.promote_types(x.dtype, w.dtype))
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return q_out, k_out


@op(
    "qk_norm_rope_fwd(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps,"
    " float offset, str casting_mode, str layout, str cos_layout, int unsqueeze_dim) -> (Tensor, Tensor)",
    _norm_outputs,
    inlined=True,
    replayed=True,
)
def _qk_norm_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    casting_mode: str, *layouts: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outs = _norm_outputs(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode)
    weights = q_weight, k_weight
    launch_fwd(q, k, weights, cos, sin, outs, Layouts(*layouts), eps, offset, casting_mode, False)
    return outs


def _norm_grads(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk = (empty_dense_like(t) if args[-1][0] else t.new_empty(0) for t in (q, k))
    dtype = torch.promote_types(q_weight.dtype, k_weight.dtype)
    return dq, dk, torch.empty((2, q.shape[-1]), dtype=dtype, device=q_weight.device)


@op(
    "qk_norm_rope_bwd(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos,"
    " Tensor sin, float eps, float offset, str casting_mode, str layout, str cos_layout, int unsqueeze_dim,"
    " bool[2] needs) -> (Tensor dq, Tensor dk, Tensor dweights)",
    _norm_grads,
    inlined=True,
    replayed=True,
)
def _qk_norm_rope_bwd(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, casting_mode: str, layout: str, cos_layout: str, unsqueeze_dim: int, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dw = _norm_grads(dq_out, dk_out, q, k, q_weight, k_weight, needs)
    layouts = Layouts(layout, cos_layout, unsqueeze_dim)
    dq_out, dk_out, q, k = map(dense, (dq_out, dk_out, q, k))
    cos, sin, batched = angles(cos, sin)
    B, S, H, HK = layouts.sizes(q, k)
    D = int(q.shape[-1])
    grads = (dq, dk) if needs[0] else (None, None)
    inputs = dq_out, dk_out, q, k, cos, sin, packed(q_weight), packed(k_weight)
    strides_in = [layouts.strides(t) for t in (dq_out, dk_out, q, k)]
    strides_out = [layouts.strides(t) for t in ((dq, dk) if needs[0] else (q, k))]
    sizes = *chain(*strides_in), cos.stride(-2), *chain(*strides_out), B * S, S, H, HK
    constants = turn_constants(layouts, D, int(cos.shape[-1]), False)

    def run(tile: Tile) -> None:
        split, blocks = head_blocks(tile, H, HK)
        programs, partial = partial_sums(dw, B * S, tile, whole=split == 1, split=split)
        launch(
            _qk_norm_rope_bwd_kernel,
            (programs // split, split),
            (*inputs, *grads, partial),
            sizes,
            (eps, offset),
            CASTING=casting_mode,
            COS_BATCHED=batched,
            STAGES=tile.num_stages,
            **constants,
            **blocks,
        )
        if needs[1]:
            sum_partials(partial, dw)

    if q.numel() or k.numel():
        tiled("qk_norm_rope_bwd", q, D, run, constants["HALF"])
        return dq, dk, dw
    return dq, dk, dw.zero_()


class _QKNormRoPE(torch.autograd.Function):
    launch = staticmethod(_qk_norm_rope_fwd)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, outs = args
        _save(ctx, inputs, outs)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: a checkpoint returns them only once
        _, _, q_weight, k_weight, _, _ = saved
        needs_q, needs_k, needs_qw, needs_kw = ctx.needs_input_grad[:4]
        needs = [needs_q or needs_k, needs_qw or needs_kw]
        dq, dk, dw = _qk_norm_rope_bwd(dq, dk, *saved, *ctx.options, needs)
        return (
            dq if needs_q else None,
            dk if needs_k else None,
            dw[0].to(q_weight.dtype) if needs_qw else None,
            dw[1].to(k_weight.dtype) if needs_kw else None,
            *(None,) * (len(ctx.needs_input_grad) - 4),
        )


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


_OP = torch.ops.liger_like.qk_norm_rope_fwd.default
torch.library.register_autograd(_OP, _QKNormRoPE.backward, setup_context=_save, lib=LIBRARY)


@on_shards(heads_and_tokens, replayed=True)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    layout: str = "half",
    cos_layout: str = "full",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalise the head dimension of ``q`` and ``k`` by ``q_weight`` and ``k_weight`` [D], then rotate them.

    This is ``rope(rms_norm(q), rms_norm(k))`` in one pass; arguments, results and errors are those of ``rms_norm`` and
    ``rope``. The forward saves only its arguments for the backward, no normalised heads. Heads of more than 256
    features run the two ops one after the other.
    """
    check(q, k, cos, sin, layout, cos_layout, unsqueeze_dim, rotary_dim)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        require(name, weight, like=q, shape=q.shape[-1:])
    eps, offset = require_eps(eps), require_number("offset", offset)
    require_choice("casting_mode", casting_mode, CASTING_MODES)
    layouts = layout, cos_layout, unsqueeze_dim
    learned = (cos.requires_grad or sin.requires_grad) and not refused("kernels have no gradient of cos and sin")
    if learned or not (use_kernel(q) and use_kernel(k)):
        return qk_norm_rope_ref(
            q, k, q_weight, k_weight, cos, sin, eps, offset=offset, casting_mode=casting_mode,
            layout=layout, cos_layout=cos_layout, unsqueeze_dim=unsqueeze_dim,
        )  # fmt: skip
    if q.shape[-1] > 256 and not refused("heads of more than 256 features would spill registers: two ops run instead"):
        q, k = (
            rms_norm(x, weight, eps, offset=offset, casting_mode=casting_mode)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        options = {"layout": layout, "cos_layout": cos_layout, "unsqueeze_dim": unsqueeze_dim}
        return rope(q, k, cos, sin, **options, rotary_dim=rotary_dim)
    return apply(_QKNormRoPE, q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, *layouts, op=_OP)
