"""RoPE: (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair of features   (Su et al., arXiv:2104.09864)

One launch rotates q [B, H, S, D] and k [B, Hk, S, D]. One program or a few handle all heads of a token, so cos and sin
[B or 1, S, C] are read once for many heads. Features beyond the rotary width R are copied. ``layout`` says which
features form a pair. The rotation is orthogonal, so the backward runs the same kernel with sin negated and the input
and output layouts exchanged. The maths are in fp32 and are rounded once, to the input dtype. The kernel can normalise
the heads first: see ``qk_norm_rope``.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from liger_like.ops.rms_norm import normalise, rsqrt_of_mean, sum_of_squares
from liger_like.runtime.autograd import apply, once_differentiable
from liger_like.runtime.blocks import load_weight, round_to
from liger_like.runtime.checks import require, require_choice, require_integer
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import dense, empty_dense_like, packed
from liger_like.runtime.registry import LIBRARY, on_shards, op
from liger_like.runtime.support import refused, use_kernel
from liger_like.runtime.tiles import Tile, tiled

LAYOUTS = ("half", "interleaved", "interleaved_in_half_out")
COS_LAYOUTS = ("full", "half", "repeat")


def _half_width(cos: Tensor, cos_layout: str) -> Tensor:
    """Return the R / 2 distinct columns of ``cos`` [..., C]."""
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
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``rope`` in plain torch; this defines the op. R follows from ``cos`` alone, not from ``rotary_dim``."""

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
def pairs(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the positions of the first and of the second feature of each pair."""
    offs = tl.arange(0, BLOCK_D)
    return (2 * offs, 2 * offs + 1) if INTERLEAVED else (offs, HALF + offs)


@triton.jit
def load_heads(
    ptr, stride_h, offs_h, H, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the first and second features of the pairs [heads, HALF] and the unrotated features, in fp32."""
    rows, mask_h = ptr + (offs_h.to(tl.int64) * stride_h)[:, None], (offs_h < H)[:, None]
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_D)[None, :]
        pairs = tl.load(rows + offs, mask=mask_h & (offs < 2 * HALF), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(pairs, (pairs.shape[0], BLOCK_D, 2)))
    else:
        offs = tl.arange(0, BLOCK_D)[None, :]
        mask = mask_h & (offs < HALF)
        x1 = tl.load(rows + offs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(rows + HALF + offs, mask=mask, other=0.0).to(tl.float32)
    rest = x1
    if REST > 0:
        offs = tl.arange(0, BLOCK_R)[None, :]
        rest = tl.load(rows + 2 * HALF + offs, mask=mask_h & (offs < REST), other=0.0).to(tl.float32)
    return x1, x2, rest


@triton.jit
def store_heads(
    ptr, stride_h, offs_h, H, x1, x2, rest, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Store heads given in the three parts that ``load_heads`` returns."""
    rows, mask_h = ptr + (offs_h.to(tl.int64) * stride_h)[:, None], (offs_h < H)[:, None]
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_D)[None, :]
        tl.store(rows + offs, tl.interleave(x1, x2), mask=mask_h & (offs < 2 * HALF))
    else:
        offs = tl.arange(0, BLOCK_D)[None, :]
        mask = mask_h & (offs < HALF)
        tl.store(rows + offs, x1, mask=mask)
        tl.store(rows + HALF + offs, x2, mask=mask)
    if REST > 0:
        offs = tl.arange(0, BLOCK_R)[None, :]
        tl.store(rows + 2 * HALF + offs, rest, mask=mask_h & (offs < REST))


@triton.jit
def load_angle(cos_ptr, sin_ptr, offs, HALF: tl.constexpr, COS_STEP: tl.constexpr):
    """Return a token's cos and sin [1, HALF] in fp32."""
    cos = tl.load(cos_ptr + offs * COS_STEP, mask=offs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offs * COS_STEP, mask=offs < HALF, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def rstd_of_heads(
    x1, x2, rest, eps, dtype: tl.constexpr, CASTING: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    """Return 1 / rms of heads given in the three parts that ``load_heads`` returns."""
    square = sum_of_squares(x1, dtype, CASTING) + sum_of_squares(x2, dtype, CASTING)
    if REST > 0:
        square += sum_of_squares(rest, dtype, CASTING)
    return rsqrt_of_mean(square, 2 * HALF + REST, eps, dtype, CASTING)


@triton.jit
def _turn_heads(
    x_ptr, y_ptr, w_ptr, stride_xh, stride_yh, offs_h, H, cos, sin, eps, offset, CASTING: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, IN_INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load heads, normalise them unless ``CASTING`` is None, rotate and store them."""
    x1, x2, rest = load_heads(x_ptr, stride_xh, offs_h, H, HALF, REST, IN_INTERLEAVED, BLOCK_D, BLOCK_R)
    if CASTING is not None:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        out_dtype: tl.constexpr = y_ptr.dtype.element_ty
        rstd = rstd_of_heads(x1, x2, rest, eps, dtype, CASTING, HALF, REST)
        D: tl.constexpr = 2 * HALF + REST
        offs_1, offs_2 = pairs(HALF, IN_INTERLEAVED, BLOCK_D)
        x1 = round_to(normalise(x1, rstd, load_weight(w_ptr, offs_1, D), offset, dtype, CASTING), out_dtype)
        x2 = round_to(normalise(x2, rstd, load_weight(w_ptr, offs_2, D), offset, dtype, CASTING), out_dtype)
        if REST > 0:
            w = load_weight(w_ptr, 2 * HALF + tl.arange(0, BLOCK_R), D)
            rest = normalise(rest, rstd, w, offset, dtype, CASTING)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    store_heads(y_ptr, stride_yh, offs_h, H, y1, y2, rest, HALF, REST, OUT_INTERLEAVED, BLOCK_D, BLOCK_R)


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_cs,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos, S, H, HK, eps, offset, sign,
    CASTING: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, COS_STEP: tl.constexpr, COS_BATCHED: tl.constexpr,
    IN_INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)  # Inductor passes floats in fp64
    pid = tl.program_id(0)
    b, s = (pid // S).to(tl.int64), (pid % S).to(tl.int64)
    offs = (b * S + s if COS_BATCHED else s) * stride_cs
    cos, sin = load_angle(cos_ptr + offs, sin_ptr + offs, tl.arange(0, BLOCK_D), HALF, COS_STEP)
    sin *= tl.cast(sign, tl.float32)
    _turn_heads(
        q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos, qw_ptr, stride_qh,
        stride_qoh, tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), H, cos, sin, eps, offset, CASTING, HALF, REST,
        IN_INTERLEAVED, OUT_INTERLEAVED, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    _turn_heads(
        k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos, kw_ptr, stride_kh,
        stride_koh, tl.program_id(1) * BLOCK_HK + tl.arange(0, BLOCK_HK), HK, cos, sin, eps, offset, CASTING, HALF,
        REST, IN_INTERLEAVED, OUT_INTERLEAVED, BLOCK_D, BLOCK_R,
    )  # fmt: skip


class Layouts(NamedTuple):
    """Layout options of ``rope``: the pairing of features, the columns of cos, and the dimension of heads."""

    layout: str
    cos_layout: str
    unsqueeze_dim: int

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Return the strides of batch, heads and tokens."""
        b, h, s, _ = x.stride()
        return (b, h, s) if self.unsqueeze_dim == 1 else (b, s, h)

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
        """Return the sizes B, S, H and Hk; a graph with dynamic shapes is specialised to its numbers of heads."""
        heads = self.unsqueeze_dim
        return q.shape[0], q.shape[3 - heads], int(q.shape[heads]), int(k.shape[heads])


@functools.cache
def turn_constants(layouts: Layouts, D: int, C: int, inverse: bool) -> dict[str, Any]:
    """Return the constants of a kernel that rotates heads of D features by cos [..., C], or by its ``inverse``."""
    half = C if layouts.cos_layout == "half" else C // 2
    mixed, interleaved = layouts.layout == "interleaved_in_half_out", layouts.layout == "interleaved"
    return {
        "HALF": half,
        "REST": D - 2 * half,
        "COS_STEP": 2 if layouts.cos_layout == "repeat" else 1,
        "IN_INTERLEAVED": interleaved or (mixed and not inverse),
        "OUT_INTERLEAVED": interleaved or (mixed and inverse),
        "BLOCK_D": next_power_of_2(half),
        "BLOCK_R": next_power_of_2(max(1, D - 2 * half)),
    }


@functools.cache
def head_blocks(tile: Tile, H: int, HK: int) -> tuple[int, dict[str, int]]:
    """Return how many programs share a token, and their blocks of heads and warps; few heads take fewer warps."""
    split = max(1, -(-H // tile.block_m))
    block_h, block_hk = (next_power_of_2(max(1, -(-heads // split))) for heads in (H, HK))
    num_warps = max(1, tile.num_warps * block_h // tile.block_m)
    return split, {"BLOCK_H": block_h, "BLOCK_HK": block_hk, "num_warps": num_warps}


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return cos and sin with contiguous columns and one stride over all rows, and True if each batch has its own."""
    batched = cos.dim() == 3 and cos.shape[0] > 1 and cos.stride(0) != 0
    uneven = batched and cos.stride(0) != cos.shape[1] * cos.stride(1)
    if uneven or cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
        batched = cos.dim() == 3 and cos.shape[0] > 1
    return cos, sin, batched


def launch_fwd(
    q: Tensor, k: Tensor, weights: tuple[Tensor | None, Tensor | None], cos: Tensor, sin: Tensor,
    outs: tuple[Tensor, Tensor], layouts: Layouts, eps: float, offset: float, casting: str | None, inverse: bool,
) -> None:  # fmt: skip
    """Rotate q and k, or rotate them back if ``inverse``, into ``outs``; normalise first unless ``casting`` is None."""
    q, k = dense(q), dense(k)
    cos, sin, batched = angles(cos, sin)
    B, S, H, HK = layouts.sizes(q, k)
    D = int(q.shape[-1])
    strides = [layouts.strides(t) for t in (q, k, *outs)]
    constants = turn_constants(layouts, D, int(cos.shape[-1]), inverse)

    def run(tile: Tile) -> None:
        split, blocks = head_blocks(tile, H, HK)
        launch(
            _rope_kernel,
            (B * S, split),
            (q, k, cos, sin, *map(packed, weights), *outs),
            (*strides[0], *strides[1], cos.stride(-2), *strides[2], *strides[3], S, H, HK),
            (eps, offset, -1.0 if inverse else 1.0),
            CASTING=casting,
            COS_BATCHED=batched,
            **constants,
            **blocks,
        )

    if q.numel() or k.numel():
        tiled("rope" if casting is None else "qk_norm_rope", q, D, run, constants["HALF"])


def _outputs(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return empty_dense_like(q), empty_dense_like(k)


@op(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout, str cos_layout, int unsqueeze_dim, bool inverse)"
    " -> (Tensor, Tensor)",
    _outputs,
    inlined=True,
    replayed=True,
)
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str, cos_layout: str, unsqueeze_dim: int, inverse: bool
) -> tuple[Tensor, Tensor]:
    outs = _outputs(q, k)
    layouts = Layouts(layout, cos_layout, unsqueeze_dim)
    launch_fwd(q, k, (None, None), cos, sin, outs, layouts, 0.0, 0.0, None, inverse)
    return outs


class _RoPE(torch.autograd.Function):
    launch = staticmethod(_rope)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, outs = args
        _save(ctx, inputs, outs)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        *layouts, inverse = ctx.options
        dq, dk = _rope(dq, dk, cos, sin, *layouts, not inverse)
        return dq, dk, *(None,) * (len(ctx.needs_input_grad) - 2)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    _, _, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


_OP = torch.ops.liger_like.rope.default
torch.library.register_autograd(_OP, _RoPE.backward, setup_context=_save, lib=LIBRARY)


def check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str, cos_layout: str, unsqueeze_dim: int,
    rotary_dim: int | None,
) -> None:  # fmt: skip
    """Raise unless the arguments of ``rope`` are valid together."""
    require_choice("layout", layout, LAYOUTS)
    require_choice("cos_layout", cos_layout, COS_LAYOUTS)
    require_choice("unsqueeze_dim", require_integer("unsqueeze_dim", unsqueeze_dim), (1, 2))
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        require(name, tensor, like=q)
    q_shape, k_shape, cos_shape = q.shape, k.shape, cos.shape
    if len(q_shape) != 4:
        raise ValueError(f"q must have 4 dimensions, got shape {list(q_shape)}")
    heads, tokens = (1, 2) if unsqueeze_dim == 1 else (2, 1)
    expected = list(q_shape)
    if len(k_shape) == 4:
        expected[heads] = k_shape[heads]
    if list(k_shape) != expected:
        raise ValueError(f"k must have the shape of q but for the heads, {expected}, got {list(k_shape)}")
    if cos_shape != sin.shape:
        raise ValueError(f"sin must have the shape of cos, {list(cos_shape)}, got {list(sin.shape)}")
    batch, rows, width = q_shape[0], q_shape[tokens], cos_shape[-1]
    batched = len(cos_shape) == 3
    if not (batched or len(cos_shape) == 2) or cos_shape[-2] != rows or (batched and cos_shape[0] not in (1, batch)):
        batches = "1" if batch == 1 else f"1 or {batch}"
        raise ValueError(f"cos must be [{rows}, C] or [{batches}, {rows}, C], got {list(cos_shape)}")
    rotary, D = 2 * width if cos_layout == "half" else width, q_shape[-1]
    if rotary % 2 or rotary > D:
        raise ValueError(f"cos gives a rotary width of {rotary}; it must be even and at most D = {D}")
    if rotary_dim is not None and require_integer("rotary_dim", rotary_dim) != rotary:
        raise ValueError(f"rotary_dim must be {rotary}, the rotary width that cos gives, got {rotary_dim}")
    if rotary_dim is None and 2 * width == D and cos_layout != "half":
        raise ValueError(
            f"cos has {width} columns for heads of {D} features: pass cos_layout='half' if all features turn, or"
            f" rotary_dim={width} if only the first {width} do"
        )


def heads_and_tokens(cos: Tensor, unsqueeze_dim: int = 1, **kwargs: Any) -> dict[str, dict[int, int]]:
    """Return the dimensions that may be sharded: batch, heads and tokens.

    cos and sin are sharded with the tokens, and with the batch if they have more than one.
    """
    heads = {dim: dim for dim in range(3)}
    tokens = {3 - unsqueeze_dim: cos.dim() - 2}
    if cos.dim() == 3 and cos.shape[0] > 1:
        tokens[0] = 0
    return {"q": heads, "k": heads, "cos": tokens, "sin": tokens}


@on_shards(heads_and_tokens, replayed=True)
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "half",
    cos_layout: str = "full",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``q`` [B, H, S, D] and ``k`` [B, Hk, S, D] rotated by ``cos`` and ``sin`` [B or 1, S, C] or [S, C].

    ``layout``: "half" pairs feature i with i + R/2 (rotate_half), "interleaved" pairs 2i with 2i + 1,
    "interleaved_in_half_out" reads interleaved pairs and writes halves. ``cos_layout``: "full" has C = R with two equal
    halves, "half" has C = R/2, "repeat" has C = R with each value twice in a row. R <= D; features beyond R are copied.
    ``rotary_dim`` states R. It is required for R = D/2 unless ``cos_layout`` is "half", since D/2 columns may also be
    the "half" layout of R = D. ``unsqueeze_dim=2`` takes q and k as [B, S, H, D]. The op takes any strides, works out
    of place and returns the dtypes of q and k. Learned rotations (cos or sin requires a gradient), and dtypes other
    than bf16, fp16 and fp32, run the plain-torch reference.

    Raises TypeError if a tensor is not floating point, ValueError if shapes, devices or layouts do not match. See Su et
    al., arXiv:2104.09864.
    """
    check(q, k, cos, sin, layout, cos_layout, unsqueeze_dim, rotary_dim)
    learned = (cos.requires_grad or sin.requires_grad) and not refused("kernels have no gradient of cos and sin")
    if learned or not (use_kernel(q) and use_kernel(k)):
        return rope_ref(q, k, cos, sin, layout=layout, cos_layout=cos_layout, unsqueeze_dim=unsqueeze_dim)
    return apply(_RoPE, q, k, cos, sin, layout, cos_layout, unsqueeze_dim, False, op=_OP)
