"""Linear layer and cross-entropy in one, over chunks of tokens: the logits [T, V] never exist at once.

x [T, H], weight [V, H], bias [V]. A chunk's logits are one GEMM into a reused buffer, the cross-entropy kernel
overwrites them by their gradient, and two more GEMMs turn that into dx and its share of dw, accumulated in fp32.
Losses that end in a scalar have one unknown upstream factor, so their gradients are made in the forward pass,
unscaled, and multiplied by it in the backward (1/N never meets the fp16 logits gradient, where it would underflow).
Per-token upstream gradients (reduction "none", "logprob", "entropy") are known only in the backward, which
recomputes the chunks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from liger_like.ops._common import op, packed, require, use_kernel
from liger_like.ops.cross_entropy import (
    OPTIONS_SCHEMA,
    Options,
    RowLosses,
    check_options,
    check_target,
    launch_cross_entropy,
    raise_bad_label,
    reduce_loss,
    row_losses_ref,
)

OUTPUTS = ("logprob", "lse", "entropy", "argmax", "correct")
LOGITS_BYTES = 512 * 2**20  # memory of a chunk of logits: large enough for the GEMMs to run at full speed

Lora = tuple[Tensor, Tensor, float]


class LossOutput(NamedTuple):
    """The loss and the per-token results asked for by ``outputs``, shaped like the target; None where not asked for.

    Ignored tokens hold 0 (argmax -1, correct False).
    """

    loss: Tensor
    logprob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    correct: Tensor | None = None


def fused_linear_cross_entropy_ref(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    lora: Lora | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    outputs: tuple[str, ...] = (),
) -> Tensor | LossOutput:
    """The definition, in plain torch; ``accum_dtype`` and ``chunk_rows`` do not change it."""
    x = x.reshape(-1, x.shape[-1])
    logits = linear(x, weight, bias)
    if lora is not None:
        logits = torch.addmm(logits, linear(x, lora[0]) * lora[2], lora[1].t())
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = row_losses_ref(logits, target.reshape(-1), class_weight, options)
    return _finish(rows, reduction, target, class_weight, ignore_index, num_items, outputs)


def _finish(
    rows: RowLosses,
    reduction: str,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    num_items: int | Tensor | None,
    outputs: tuple[str, ...],
) -> Tensor | LossOutput:
    if reduction == "none":
        loss = rows.loss.view(target.shape)
    else:
        loss = reduce_loss(rows.loss.sum(), reduction, target, class_weight, ignore_index, num_items)
    if not outputs:
        return loss
    results = rows._asdict()
    if "correct" in outputs:
        results["correct"] = rows.argmax == target.reshape(-1)
    return LossOutput(loss, **{name: results[name].view(target.shape) for name in outputs})


def _addmm(out: Tensor, a: Tensor, b: Tensor, again: bool) -> None:
    """``out`` = a @ b, plus ``out`` if ``again``; accumulated and stored in the dtype of ``out``."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(again), out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(again), out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(again), out=out)


def _outputs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    u: Tensor | None,
    b: Tensor | None,
    class_weight: Tensor | None,
    dloss: Tensor | None,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    needs: list[bool],
    entropy: bool,
    argmax: bool,
    chunk_rows: int | None,
    accum_dtype: torch.dtype,
    *scalars: Any,
) -> tuple[Tensor, ...]:
    T = x.shape[0]
    loss, logprob, lse = (x.new_empty(T, dtype=torch.float32) for _ in range(3))
    optional = x.new_empty(T if entropy else 0, dtype=torch.float32), x.new_empty(T if argmax else 0, dtype=torch.int64)
    # dx is rounded once, after the upstream factor; dbias is a sum over tokens, as dw is
    dtypes = torch.float32, accum_dtype, torch.float32, torch.float32, accum_dtype
    inputs = x, weight, bias, u, b
    grads = (
        t.new_empty(t.shape, dtype=dtype) if t is not None and needed else x.new_empty(0, dtype=dtype)
        for t, dtype, needed in zip(inputs, dtypes, needs, strict=True)
    )
    return loss, logprob, lse, *optional, *grads


@op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? u, Tensor? b,"
    " Tensor? class_weight, Tensor? dloss, Tensor? dlogprob, Tensor? dentropy, bool[5] needs, bool entropy,"
    f" bool argmax, SymInt? chunk_rows, ScalarType accum_dtype, {OPTIONS_SCHEMA})"
    " -> (Tensor loss, Tensor logprob, Tensor lse, Tensor entropy, Tensor argmax,"
    " Tensor dx, Tensor dw, Tensor dbias, Tensor du, Tensor db)",
    _outputs,
)
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    u: Tensor | None,
    b: Tensor | None,
    class_weight: Tensor | None,
    dloss: Tensor | None,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    needs: list[bool],
    entropy: bool,
    argmax: bool,
    chunk_rows: int | None,
    accum_dtype: torch.dtype,
    *scalars: Any,
) -> tuple[Tensor, ...]:
    """Per-token results of logits = x weight^T + bias + u b^T, and the gradients that ``needs`` names.

    They are for the upstream gradients given, and without ``dloss`` for ``_unit`` in its place.
    """
    raise_bad_label(x.device)
    upstream = [packed(g) for g in (dloss, dlogprob, dentropy)]
    T, V = x.shape[0], weight.shape[0]
    outs = _outputs(
        x, weight, target, bias, u, b, class_weight, *upstream, needs, entropy, argmax, chunk_rows, accum_dtype
    )
    rows, (dx, dw, dbias, du, db) = outs[:5], outs[5:]
    rows = tuple(t if t.numel() else None for t in rows)
    needs_dx, needs_dw, needs_dbias, needs_du, needs_db = needs
    for grad in (dw, dbias, db) if T == 0 or needs_dbias else ():
        grad.zero_()
    options = Options(*scalars)
    unit = _unit(options)
    step = chunk_rows or _chunk_rows(T, V * x.element_size())
    logits = x.new_empty((min(step, T), V))
    for start in range(0, T, step):
        chunk = slice(start, start + step)
        x_c, again = x[chunk], start > 0
        z = logits[: x_c.shape[0]]
        torch.mm(x_c, weight.t(), out=z) if bias is None else torch.addmm(bias, x_c, weight.t(), out=z)
        if u is not None:
            z.addmm_(u[chunk], b.t())
        rows_c = [None if t is None else t[chunk] for t in rows]
        upstream_c = [None if t is None else t[chunk] for t in upstream]
        dz = z if any(needs) else None
        launch_cross_entropy(z, dz, target[chunk], class_weight, rows_c, upstream_c, options, stats=True, unit=unit)
        if needs_dx:
            _addmm(dx[chunk], z, weight, False)
        if needs_du:
            _addmm(du[chunk], z, b, False)
        if needs_dw:
            _addmm(dw, z.t(), x_c, again)
        if needs_db:
            _addmm(db, z.t(), u[chunk], again)
        if needs_dbias:
            dbias += z.sum(0, dtype=torch.float32)
    return outs


def _unit(options: Options) -> float:
    """The upstream gradient under which the logits' gradient is p - 1 at the label, near a number that every dtype has.

    Under 1 it would be near -(1 - label_smoothing) * logit_scale, rounded the same way in every row.
    """
    return 1 / (abs((1 - options.label_smoothing) * options.logit_scale) or 1)


def _chunk_rows(T: int, row_bytes: int) -> int:
    """Tokens per chunk: as few equal chunks as the budget allows, in multiples of 128 so that the GEMMs fill their
    tiles.
    """
    chunks = -(-T * row_bytes // LOGITS_BYTES)
    return max(1, -(-T // max(1, chunks) // 128)) * 128


@op(
    "scale(Tensor x, Tensor factor, ScalarType dtype) -> Tensor",
    lambda x, factor, dtype: torch.empty_like(x, dtype=dtype),
)
def _scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to ``dtype``, without a temporary of the size of a weight."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        grads_now: bool,
        wants_entropy: bool,
        wants_argmax: bool,
        *options: Any,
    ) -> Any:
        inputs = x, weight, target, bias, u, b, class_weight
        needs = [grads_now and needed for needed in ctx.needs_input_grad[:5]]
        outs = _linear_cross_entropy(*inputs, None, None, None, needs, wants_entropy, wants_argmax, *options)
        loss, logprob, lse, entropy, argmax = outs[:5]
        entropy, argmax = entropy if wants_entropy else None, argmax if wants_argmax else None
        ctx.grads_now, ctx.options = grads_now, options
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, u, b)]
        ctx.set_materialize_grads(False)
        constant = (logprob, lse, entropy, argmax) if grads_now else (lse, argmax)
        ctx.mark_non_differentiable(*(t for t in constant if t is not None))
        ctx.save_for_backward(*(outs[5:] if grads_now else inputs))
        return loss.sum() if grads_now else loss, logprob, lse, entropy, argmax

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, dlogprob: Tensor | None, _lse: None, dentropy: Tensor | None, _argmax: None
    ) -> Any:
        needs = list(ctx.needs_input_grad[:5])
        given = [g for g in (dloss, dlogprob, dentropy) if g is not None]
        if not given:
            return (None,) * (10 + len(ctx.options))
        if ctx.grads_now:
            factor, grads = dloss / _unit(Options(*ctx.options[2:])), ctx.saved_tensors
        else:
            # unit-sized upstream gradients: the fp16 logits gradient does not underflow, and a NaN stays in its row
            floor = given[0].new_full((1,), torch.finfo(torch.float32).tiny)
            factor = torch.cat([*given, floor]).nan_to_num(0.0, 0.0, 0.0).abs().amax()
            dloss = floor.expand(len(given[0])) * 0 if dloss is None else dloss
            upstream = [None if g is None else g / factor for g in (dloss, dlogprob, dentropy)]
            wants = dentropy is not None, False
            grads = _linear_cross_entropy(*ctx.saved_tensors, *upstream, needs, *wants, *ctx.options)[5:]
        scaled = (
            _scale(grad, factor, dtype) if needed else None
            for grad, dtype, needed in zip(grads, ctx.dtypes, needs, strict=True)
        )
        return *scaled, *(None,) * (5 + len(ctx.options))


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora: Lora | None, chunk_rows: int | None, outputs: tuple[str, ...]
) -> None:
    H, V = x.shape[-1], weight.shape[0]
    shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [("weight", weight, (V, H))]
    if bias is not None:
        shapes.append(("bias", bias, (V,)))
    if lora is not None:
        rank = lora[0].shape[0]
        shapes += [("lora[0]", lora[0], (rank, H)), ("lora[1]", lora[1], (V, rank))]
    for name, tensor, shape in shapes:
        require(name, tensor, like=x, shape=shape)
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
    if chunk_rows is not None and not chunk_rows > 0:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"outputs must be out of {OUTPUTS}, got {unknown}")


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    lora: Lora | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    outputs: tuple[str, ...] = (),
) -> Tensor | LossOutput:
    """Cross-entropy of ``x weight^T + bias`` and ``target``, for ``x`` [..., H], ``weight`` [V, H], ``bias`` [V] and
    ``target`` [...].

    The loss options are those of ``cross_entropy`` (``class_weight`` [V] is its ``weight``); the loss is in fp32.
    The logits exist only for ``chunk_rows`` tokens at a time (None: as many as 512 MiB hold). ``lora=(A, B,
    scaling)`` with A [r, H] and B [V, r] adds ``scaling * x A^T B^T`` to the logits. ``accum_dtype``: dtype in which
    the gradients of ``weight`` and B are accumulated over chunks (None: fp32). ``outputs``, a tuple out of
    "logprob", "lse", "entropy", "argmax", "correct", asks for per-token results [...] and returns a ``LossOutput``;
    "logprob" and "entropy" are differentiable. Those two and ``reduction="none"`` recompute the logits in the
    backward; otherwise the gradients are made in the forward, and only those that some input needs. Under autocast
    the operands are cast to its dtype. bf16, fp16 and fp32; other dtypes and devices run the plain-torch reference,
    which does hold all logits.

    Raises TypeError or ValueError for arguments that do not fit (all operands share a dtype), and for a label
    outside [0, V): at once on the CPU, by the next call on a GPU.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        require(name, tensor)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        lora = None if lora is None else (lora[0].to(dtype), lora[1].to(dtype), lora[2])
    _check(x, weight, bias, lora, chunk_rows, outputs)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_target(target, x, x.shape[:-1])
    check_options(options, reduction, num_items, "class_weight", class_weight, x, weight.shape[0])
    if not use_kernel(x):
        return fused_linear_cross_entropy_ref(
            x,
            weight,
            target,
            bias,
            **options._asdict(),
            reduction=reduction,
            class_weight=class_weight,
            num_items=num_items,
            lora=lora,
            outputs=outputs,
        )
    x = x.reshape(-1, x.shape[-1])
    u, b = (None, None) if lora is None else (linear(x, lora[0]) * lora[2], lora[1])
    per_token = reduction == "none" or "logprob" in outputs or "entropy" in outputs
    rows = _FusedLinearCrossEntropy.apply(
        x,
        weight,
        bias,
        u,
        b,
        target.reshape(-1),
        class_weight,
        torch.is_grad_enabled() and not per_token,
        "entropy" in outputs,
        "argmax" in outputs or "correct" in outputs,
        chunk_rows,
        accum_dtype or torch.float32,
        *options,
    )
    return _finish(RowLosses(*rows), reduction, target, class_weight, ignore_index, num_items, outputs)
