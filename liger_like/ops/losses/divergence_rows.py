"""Kernel of the divergences: one program per row of the student's and of the teacher's scores, read in blocks.

With p = softmax(z) of the student, q of the teacher and m = (1 - beta) p + beta q the divergence is KL(q || p) for beta
0, KL(p || q) for beta 1, else beta KL(q || m) + (1 - beta) KL(p || m). Each is a sum over the vocabulary whose terms
are not negative in this form: q log(q / p) + p - q, likewise for beta 1, and beta q log(q / m) + (1 - beta) p log(p /
m). So the sum has no cancellation, and is 0 for equal models. The gradient of z is p - q for beta 0, else p (w - sum p
w) with w = log(p / q) for beta 1, and w = (1 - beta) log(p / m) between. The kernel divides the last one by
beta (1 - beta), so that it has the size of the others for any beta.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_like.ops.losses.row_kernels import _cap_scores, _load, _load_scores, _store, _tile, _token
from liger_like.ops.losses.rows import Options
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed

FORWARD, REVERSE, MIXTURE = range(3)  # beta 0, beta 1, between
IS_FORWARD, IS_REVERSE = tl.constexpr(FORWARD), tl.constexpr(REVERSE)


def kind_of(beta: float) -> int:
    """Return which of the three formulas ``beta`` selects."""
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXTURE


def scale_of(beta: float) -> float:
    """Return the factor that the gradients of the kernel lack: that of the divergence for small beta or 1 - beta."""
    return beta * (1 - beta) or 1.0


@triton.jit
def _compare(z, t, lse, lse_rest, teacher_lse, teacher_lse_rest, beta, rest, KIND: tl.constexpr):
    """Return p, p w (for beta 0: p - q) and the terms of the divergence, of scores ``z`` and the teacher's ``t``.

    ``rest`` is 1 - beta, which a beta near 1 in fp32 would not give.
    """
    p, q = tl.exp((z - lse) - lse_rest), tl.exp((t - teacher_lse) - teacher_lse_rest)
    gap = (t - z) - ((teacher_lse - lse) + (teacher_lse_rest - lse_rest))  # log(q / p)
    # a word of probability 0 has no log-ratio, but a NaN stays
    if KIND == IS_FORWARD:
        pw = p - q
        terms = tl.where(q == 0.0, 0.0, q * gap) + pw
    elif KIND == IS_REVERSE:
        pw = tl.where(p == 0.0, 0.0, -p * gap)
        terms = pw + (q - p)
    else:
        # log(p / m) and log(q / m): compute that of the larger part of m, which has no cancellation and no overflow
        of_p = rest * p >= beta * q
        less = tl.where(of_p, beta, rest) * (tl.exp(tl.where(of_p, gap, -gap)) - 1.0)
        ratio = 1.0 + less
        direct = (ratio - 1.0 - less) - tl.log(ratio)  # with the rounding error of ratio: a small beta divides it
        pw = tl.where(p == 0.0, 0.0, p * tl.where(of_p, direct, direct - gap) / beta)
        terms = tl.where(q == 0.0, 0.0, q * tl.where(of_p, direct + gap, direct))
        terms = beta * (terms + rest * pw)
    return p, pw, tl.where(terms < 0.0, 0.0, terms)  # below 0 by rounding


@triton.jit
def _visit_block(
    z_ptr, t_ptr, dz_ptr, v, V, logit_scale, teacher_scale, lse, lse_rest, teacher_lse, teacher_lse_rest, beta, rest,
    loss, mean, upstream, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, KIND: tl.constexpr, LOSS: tl.constexpr,
    GRADIENT: tl.constexpr, MASKED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add a block's part to ``loss``, and store its gradient or add its part to ``mean``."""
    offs_v = v + tl.arange(0, BLOCK_V)
    inside = offs_v < V
    z, slope = _cap_scores(_load_scores(z_ptr, offs_v, V, logit_scale, MASKED), inside, logit_scale, SOFTCAP)
    raw = _load_scores(t_ptr, offs_v, V, teacher_scale, MASKED)
    t = _cap_scores(raw, inside, teacher_scale, TEACHER_SOFTCAP)[0]
    p, pw, terms = _compare(z, t, lse, lse_rest, teacher_lse, teacher_lse_rest, beta, rest, KIND)
    if LOSS:
        loss += tl.sum(terms, axis=0)
    if not GRADIENT:
        mean += tl.sum(pw, axis=0)
    else:
        dz = pw if KIND == IS_FORWARD else pw - p * mean
        dz *= upstream * slope
        if z_ptr.dtype.element_ty != dz_ptr.dtype.element_ty:
            tl.debug_barrier()  # dz may lie in the memory of z, in that of blocks which all threads have read now
        if MASKED:
            tl.store(dz_ptr + offs_v, dz, mask=inside)
        else:
            tl.store(dz_ptr + offs_v, dz)
    return loss, mean


@triton.jit
def _divergence_kernel(
    z_ptr, t_ptr, dz_ptr, order_ptr, target_ptr, lse_ptr, lse_rest_ptr, teacher_lse_ptr, teacher_lse_rest_ptr,
    loss_ptr, mean_ptr, dloss_ptr, stride_zm, stride_tm, stride_dzm, stride_dlm, V, ignore_index, logit_scale,
    teacher_scale, beta, rest, unit, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, KIND: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    z_ptr, t_ptr = z_ptr + pid * stride_zm, t_ptr + pid * stride_tm
    GRADIENT: tl.constexpr = dz_ptr is not None
    LOSS: tl.constexpr = loss_ptr is not None
    IN_ONE_PASS: tl.constexpr = GRADIENT and KIND == IS_FORWARD  # its gradient needs no sum
    if GRADIENT:
        dz_ptr += pid * stride_dzm
    row, _, counts = _token(order_ptr, target_ptr, ignore_index, V)
    if counts == 0:
        if LOSS:
            tl.store(loss_ptr + row, 0.0)
            _store(mean_ptr, row, 0.0)
        if GRADIENT:
            for v in range(0, V, BLOCK_V):
                offs_v = v + tl.arange(0, BLOCK_V)
                tl.store(dz_ptr + offs_v, tl.zeros((BLOCK_V,), tl.float32), mask=offs_v < V)
        return

    lse, lse_rest = tl.load(lse_ptr + row), tl.load(lse_rest_ptr + row)
    teacher_lse, teacher_lse_rest = tl.load(teacher_lse_ptr + row), tl.load(teacher_lse_rest_ptr + row)
    upstream = _load(dloss_ptr, row * stride_dlm, unit)
    loss, mean = 0.0, 0.0
    whole = V // BLOCK_V * BLOCK_V
    if LOSS and not IN_ONE_PASS:
        for v in range(0, whole, BLOCK_V):
            loss, mean = _visit_block(
                z_ptr, t_ptr, dz_ptr, v, V, logit_scale, teacher_scale, lse, lse_rest, teacher_lse, teacher_lse_rest,
                beta, rest, loss, mean, upstream, SOFTCAP, TEACHER_SOFTCAP, KIND, True, False, False, BLOCK_V,
            )  # fmt: skip
        for v in range(whole, V, BLOCK_V):
            loss, mean = _visit_block(
                z_ptr, t_ptr, dz_ptr, v, V, logit_scale, teacher_scale, lse, lse_rest, teacher_lse, teacher_lse_rest,
                beta, rest, loss, mean, upstream, SOFTCAP, TEACHER_SOFTCAP, KIND, True, False, True, BLOCK_V,
            )  # fmt: skip
        _store(mean_ptr, row, mean)
    elif not IN_ONE_PASS:
        mean = tl.load(mean_ptr + row)
    if GRADIENT:
        for v in range(0, whole, BLOCK_V):
            loss, mean = _visit_block(
                z_ptr, t_ptr, dz_ptr, v, V, logit_scale, teacher_scale, lse, lse_rest, teacher_lse, teacher_lse_rest,
                beta, rest, loss, mean, upstream, SOFTCAP, TEACHER_SOFTCAP, KIND, IN_ONE_PASS and LOSS, True, False,
                BLOCK_V,
            )  # fmt: skip
        for v in range(whole, V, BLOCK_V):
            loss, mean = _visit_block(
                z_ptr, t_ptr, dz_ptr, v, V, logit_scale, teacher_scale, lse, lse_rest, teacher_lse, teacher_lse_rest,
                beta, rest, loss, mean, upstream, SOFTCAP, TEACHER_SOFTCAP, KIND, IN_ONE_PASS and LOSS, True, True,
                BLOCK_V,
            )  # fmt: skip
    _store(loss_ptr, row, loss)


def launch_divergence(
    z: Tensor,
    teacher_z: Tensor,
    dz: Tensor | None,
    target: Tensor,
    stats: tuple[Tensor, ...],
    loss: Tensor | None,
    mean: Tensor | None,
    beta: float,
    options: Options,
    teacher_options: Options,
    *,
    order: Tensor | None = None,
    dloss: Tensor | None = None,
    unit: float = 1.0,
) -> None:
    """Fill ``loss`` and ``mean`` [T] from ``z`` and ``teacher_z`` [M, V], and ``dz`` with the gradient of ``z``.

    Row i belongs to token ``order[i]`` (None: i) of the others. ``stats`` holds lse and lse_rest of the student and of
    the teacher. ``mean`` is the sum of p w; without ``loss`` it is read. ``dz`` may share the memory of ``z``, as in
    ``launch_bwd``. It is the gradient for an upstream gradient of ``dloss`` [T], or of ``unit`` for None, divided by
    ``scale_of(beta)``.
    """
    strides = (
        z.stride(0),
        teacher_z.stride(0),
        0 if dz is None else dz.stride(0),
        0 if dloss is None else dloss.stride(0),
    )
    launch(
        _divergence_kernel,
        (z.shape[0],),
        (z, teacher_z, dz, order, packed(target), *stats, loss, mean, dloss),
        (*strides, z.shape[1], options.ignore_index),
        (options.logit_scale, teacher_options.logit_scale, beta, 1 - beta, unit),
        SOFTCAP=options.softcap,
        TEACHER_SOFTCAP=teacher_options.softcap,
        KIND=kind_of(beta),
        **_tile(z.shape[1], 2048, 512),
    )
