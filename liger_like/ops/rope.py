"""RoPE: (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair of features   (Su et al., arXiv:2104.09864)

q [B, H, S, D] and k [B, Hk, S, D] are rotated in one launch, a program per token, cos and sin [B or 1, S, C] read
once per token. Features beyond the rotary width R are copied. Which features pair up is the ``layout``; the rotation
is orthogonal, so the backward is the same kernel with sin negated and the input and output layouts exchanged. Maths
in fp32, one rounding to the input dtype.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_like.ops._common import op, require, require_choice, use_kernel
from liger_like.ops.rms_norm import rms_norm, rms_norm_ref

LAYOUTS = ("half", "interleaved", "interleaved_in_half_out")
COS_LAYOUTS = ("full", "half", "repeat")


def _half_width(cos: Tensor, cos_layout: str) -> Tensor:
    """The R / 2 distinct columns of ``cos`` [..., C]."""
    if cos_layout == "half":
        return cos
    return cos[..., ::2] if cos_layout == "repeat" else cos[..., : cos.shape[-1] // 2]


def rope_ref(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "half",
    cos_layout: str = "full",
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """The definition, in plain torch."""

    def rotate(x: Tensor) -> Tensor:
        acc = torch.promote_types(x.dtype, torch.float32)
        c, s = (_half_width(t.unsqueeze(0) if t.dim() == 2 else t, cos_layout) for t in (cos, sin))
        c, s = c.to(acc).unsqueeze(unsqueeze_dim), s.to(acc).unsqueeze(unsqueeze_dim)
        half = c.shape[-1]
        rotary, rest = x.to(acc).split((2 * half, x.shape[-1] - 2 * half), -1)
        x1, x2 = rotary.chunk(2, -1) if layout == "half" else (rotary[..., ::2], rotary[..., 1::2])
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        y = torch.stack((y1, y2), -1).flatten(-2) if layout == "interleaved" else torch.cat((y1, y2), -1)
        return torch.cat((y, rest), -1).to(x.dtype)

    return rotate(q), rotate(k)


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, stride_xh, stride_yh, cos, sin, H, HALF, REST,
    IN_INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, BLOCK_D)
    in1, in2 = (2 * offs_d, 2 * offs_d + 1) if IN_INTERLEAVED else (offs_d, HALF + offs_d)
    out1, out2 = (2 * offs_d, 2 * offs_d + 1) if OUT_INTERLEAVED else (offs_d, HALF + offs_d)
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H).to(tl.int64)
        x_rows, y_rows = x_ptr + (offs_h * stride_xh)[:, None], y_ptr + (offs_h * stride_yh)[:, None]
        mask = (offs_h < H)[:, None] & (offs_d < HALF)[None, :]
        x1 = tl.load(x_rows + in1[None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_rows + in2[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y_rows + out1[None, :], x1 * cos - x2 * sin, mask=mask)
        tl.store(y_rows + out2[None, :], x2 * cos + x1 * sin, mask=mask)
        if REST > 0:
            offs_r = 2 * HALF + tl.arange(0, BLOCK_R)
            mask_r = (offs_h < H)[:, None] & (offs_r < 2 * HALF + REST)[None, :]
            tl.store(y_rows + offs_r[None, :], tl.load(x_rows + offs_r[None, :], mask=mask_r), mask=mask_r)


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_cb, stride_cs, stride_sb, stride_ss,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos, S, H, HK, HALF, REST, sign,
    COS_STEP: tl.constexpr, IN_INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    b, s = pid // S, pid % S
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HALF
    cos = tl.load(cos_ptr + b * stride_cb + s * stride_cs + offs_d * COS_STEP, mask=mask_d, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * stride_sb + s * stride_ss + offs_d * COS_STEP, mask=mask_d, other=0.0).to(tl.float32)
    cos, sin = cos[None, :], sign * sin[None, :]
    _rotate_heads(
        q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos, stride_qh, stride_qoh,
        cos, sin, H, HALF, REST, IN_INTERLEAVED, OUT_INTERLEAVED, BLOCK_H, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos, stride_kh, stride_koh,
        cos, sin, HK, HALF, REST, IN_INTERLEAVED, OUT_INTERLEAVED, BLOCK_H, BLOCK_D, BLOCK_R,
    )  # fmt: skip


def _outputs(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)  # dense views, such as transposed heads, keep their strides


@op(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout, str cos_layout, int unsqueeze_dim, bool inverse)"
    " -> (Tensor, Tensor)",
    _outputs,
)
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str, cos_layout: str, unsqueeze_dim: int, inverse: bool
) -> tuple[Tensor, Tensor]:
    outs = _outputs(q, k)
    q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
    # [B, H, S, D] views of everything
    heads = [t.transpose(1, 2) if unsqueeze_dim == 2 else t for t in (q, k, *outs)]
    B, H, S, D = heads[0].shape
    cos, sin = (t.expand(B, S, t.shape[-1]) for t in (cos, sin))
    half = cos.shape[-1] if cos_layout == "half" else cos.shape[-1] // 2
    block_d, block_r = triton.next_power_of_2(half), triton.next_power_of_2(max(1, D - 2 * half))
    _rope_kernel[(B * S,)](
        heads[0],
        heads[1],
        cos,
        sin,
        heads[2],
        heads[3],
        *heads[0].stride()[:3],
        *heads[1].stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        *heads[2].stride()[:3],
        *heads[3].stride()[:3],
        S,
        H,
        heads[1].shape[1],
        half,
        D - 2 * half,
        -1.0 if inverse else 1.0,
        COS_STEP=2 if cos_layout == "repeat" else 1,
        IN_INTERLEAVED=layout == "interleaved" or (layout == "interleaved_in_half_out" and not inverse),
        OUT_INTERLEAVED=layout == "interleaved" or (layout == "interleaved_in_half_out" and inverse),
        BLOCK_H=min(32, max(1, 1024 // max(block_d, block_r))),
        BLOCK_D=block_d,
        BLOCK_R=block_r,
    )
    return outs


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str, cos_layout: str, unsqueeze_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.options = layout, cos_layout, unsqueeze_dim
        return _rope(q, k, cos, sin, layout, cos_layout, unsqueeze_dim, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        dq, dk = _rope(dq, dk, cos, sin, *ctx.options, True)
        return dq, dk, None, None, None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str, cos_layout: str, unsqueeze_dim: int) -> None:
    require_choice("layout", layout, LAYOUTS)
    require_choice("cos_layout", cos_layout, COS_LAYOUTS)
    require_choice("unsqueeze_dim", unsqueeze_dim, (1, 2))
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        require(name, tensor, like=q)
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions, got shape {list(q.shape)}")
    heads, tokens = (1, 2) if unsqueeze_dim == 1 else (2, 1)
    expected = list(q.shape)
    if k.dim() == 4:
        expected[heads] = k.shape[heads]
    if list(k.shape) != expected:
        raise ValueError(f"k must have the shape of q but for the heads, {expected}, got {list(k.shape)}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin must have the shape of cos, {list(cos.shape)}, got {list(sin.shape)}")
    batch, width = q.shape[0], cos.shape[-1]
    if (
        cos.dim() not in (2, 3)
        or cos.shape[-2] != q.shape[tokens]
        or (cos.dim() == 3 and cos.shape[0] not in (1, batch))
    ):
        raise ValueError(
            f"cos must be [{q.shape[tokens]}, C] or [1 or {batch}, {q.shape[tokens]}, C], got {list(cos.shape)}"
        )
    rotary = 2 * width if cos_layout == "half" else width
    if rotary % 2 or rotary > q.shape[-1]:
        raise ValueError(f"cos gives a rotary width of {rotary}; it must be even and at most D = {q.shape[-1]}")


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "half",
    cos_layout: str = "full",
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotate ``q`` [B, H, S, D] and ``k`` [B, Hk, S, D] by ``cos`` and ``sin`` [B or 1, S, C] or [S, C]; returns both,
    rotated.

    ``layout``: "half" pairs feature i with i + R/2 (rotate_half), "interleaved" pairs 2i with 2i + 1,
    "interleaved_in_half_out" reads the latter and writes the former. ``cos_layout``: "full" has C = R with two equal
    halves, "half" has C = R/2, "repeat" has C = R with each value twice in a row. R <= D; the features beyond R are
    copied. ``unsqueeze_dim=2`` takes q and k as [B, S, H, D]. Any strides; out of place; results take the dtypes of
    q and k. Learned rotations (cos or sin requiring a gradient), and dtypes other than bf16, fp16 and fp32, run the
    plain-torch reference.

    Raises TypeError for tensors that are not floating point, ValueError for shapes, devices or layouts that do not
    fit. See Su et al., arXiv:2104.09864.
    """
    _check(q, k, cos, sin, layout, cos_layout, unsqueeze_dim)
    if cos.requires_grad or sin.requires_grad or not (use_kernel(q) and use_kernel(k)):
        return rope_ref(q, k, cos, sin, layout=layout, cos_layout=cos_layout, unsqueeze_dim=unsqueeze_dim)
    return _RoPE.apply(q, k, cos, sin, layout, cos_layout, unsqueeze_dim)


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
    """The definition, in plain torch."""
    q = rms_norm_ref(q, q_weight, eps, offset=offset, casting_mode=casting_mode)
    k = rms_norm_ref(k, k_weight, eps, offset=offset, casting_mode=casting_mode)
    return rope_ref(q, k, cos, sin, **layouts)


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
) -> tuple[Tensor, Tensor]:
    """RMS-normalise the head dimension of ``q`` and ``k`` by ``q_weight`` and ``k_weight`` [D], then rotate them.

    ``rope(rms_norm(q), rms_norm(k))``; arguments, results and errors are those of ``rms_norm`` and ``rope``.
    """
    q = rms_norm(q, q_weight, eps, offset=offset, casting_mode=casting_mode)
    k = rms_norm(k, k_weight, eps, offset=offset, casting_mode=casting_mode)
    return rope(q, k, cos, sin, layout=layout, cos_layout=cos_layout, unsqueeze_dim=unsqueeze_dim)
