"""Dispatcher ops of ``fused_linear_divergence``: the loops of the fused losses, with the teacher's logits beside."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.ops.losses import chunks, slices
from liger_like.ops.losses.chunks import Forward, TokenForward, all_tokens, call_of
from liger_like.ops.losses.divergence_rows import FORWARD, kind_of, launch_divergence
from liger_like.ops.losses.divergence_shards import fill_rows_of_shard
from liger_like.ops.losses.products import pitch, store_logits
from liger_like.ops.losses.row_kernels import launch_fwd
from liger_like.ops.losses.rows import Options
from liger_like.ops.losses.slices import Backward, TokenBackward
from liger_like.ops.losses.units import unit
from liger_like.runtime.registry import op


class Teacher(NamedTuple):
    """Further arguments of the ops, after those of ``Forward`` or ``Backward``: the teacher's head, and ``beta``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    beta: float

    def options(self, ignore_index: int) -> Options:
        """Return the options of the teacher's scores."""
        return Options(ignore_index, 0.0, 0.0, self.softcap, self.logit_scale)


class TeacherRows(NamedTuple):
    """Further results of each token [T]: of the teacher's scores, and ``mean``, the sum of p w for the gradient.

    ``mean``, ``entropy`` and ``argmax`` are empty if they are not computed.
    """

    lse: Tensor
    lse_rest: Tensor
    mean: Tensor
    entropy: Tensor
    argmax: Tensor


TEACHER = (
    "Tensor teacher_x, Tensor teacher_weight, Tensor? teacher_bias, float? teacher_softcap, float teacher_logit_scale,"
    " float beta"
)
TEACHER_ROWS = "Tensor teacher_lse, Tensor teacher_lse_rest, Tensor mean, Tensor teacher_entropy, Tensor teacher_argmax"
WIDE = torch.float32  # dtype of both logits
PART_ROWS = 512  # tokens of a chunk whose teacher's logits exist at a time


def _flops_of_teacher(teacher: Teacher) -> int:
    return 2 * teacher.x.shape[0] * teacher.weight.numel()


def _forward_args(args: tuple[Any, ...]) -> tuple[Forward, Teacher, bool]:
    *own, wants_teacher_entropy = args
    split = len(own) - len(Teacher._fields)
    return call_of(Forward, tuple(own[:split])), Teacher(*own[split:]), wants_teacher_entropy


def _outputs(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], TeacherRows]:
    call, teacher, wants_teacher_entropy = _forward_args(args)
    T = call.x.shape[0]
    of = lambda wanted, dtype=WIDE: call.x.new_empty(T if wanted else 0, dtype=dtype)  # noqa: E731
    wants_mean = kind_of(teacher.beta) != FORWARD
    rows = of(True), of(True), of(wants_mean), of(wants_teacher_entropy), of(call.argmax, torch.int64)
    return chunks._outputs(call, wide=call.x.dtype != WIDE), TeacherRows(*rows)


@op(
    f"linear_divergence({chunks.ARGUMENTS}, {TEACHER}, bool teacher_entropy) -> ({chunks.RESULTS}, {TEACHER_ROWS})",
    lambda *args: tuple(t for results in _outputs(args) for t in results),
    flops=lambda *args: chunks.flops(*args) + _flops_of_teacher(_forward_args(args)[1]),
    in_cuda_graph=all_tokens,
)
def linear_divergence_fwd(*args: Any) -> tuple[Tensor, ...]:
    """Return each token's divergence from the teacher, and the gradients that ``needs`` names.

    The arguments are those of ``Forward`` and ``Teacher``, and whether to compute the teacher's entropy. The results
    are those of ``linear_cross_entropy_fwd``, with the divergence as the loss, and ``TeacherRows``. The gradients are
    for an upstream gradient of ``unit``, divided by ``scale_of(beta)``.
    """
    (call, teacher, _), (outs, results) = _forward_args(args), _outputs(args)
    torch._foreach_zero_(list(results))
    buffers: list[Tensor] = []

    def visit(x_c: Tensor, z: Tensor, dz: Tensor | None, index: Tensor) -> None:
        torch.index_select(call.x, 0, index, out=x_c)
        store_logits(z, x_c, call.weight, call.bias, None if call.u is None else call.u[index], call.b)
        part = len(z) if call.shard else PART_ROWS  # each part of a shard would be an exchange
        if not buffers:  # the first chunk is the largest
            buffers.append(z.new_empty((min(part, len(z)), pitch(z.shape[1]))))
        for first in range(0, len(z), part):
            rows = slice(first, first + part)
            teacher_z = buffers[0][: len(z[rows]), : z.shape[1]]
            store_logits(teacher_z, teacher.x[index[rows]], teacher.weight, teacher.bias, None, None)
            _fill_rows(call, teacher, z[rows], teacher_z, None if dz is None else dz[rows], index[rows], outs, results)

    wide = TokenForward(WIDE, False, False, None, 0, 0)
    chunks.run_chunks(call, outs, wide, chunks._token_results(call, wide), visit=visit)
    return *outs, *results


def _fill_rows(
    call: Forward, teacher: Teacher, z: Tensor, teacher_z: Tensor, dz: Tensor | None, index: Tensor,
    outs: tuple[Tensor, ...], results: TeacherRows,
) -> None:  # fmt: skip
    """Fill the rows of the tokens ``index``, and ``dz`` unless it is None, from both models' scores."""
    loss, _, lse, entropy, argmax, lse_rest = (t if t.numel() else None for t in outs[:6])
    _, _, mean, teacher_entropy, teacher_argmax = (t if t.numel() else None for t in results)
    rows = (
        (None, None, lse, entropy, argmax, lse_rest),
        (None, None, results.lse, teacher_entropy, teacher_argmax, results.lse_rest),
    )
    options, teacher_options = call.options, teacher.options(call.options.ignore_index)
    if call.shard:
        fill_rows_of_shard(
            (z, teacher_z), call.target, rows, loss, mean, teacher.beta, (options, teacher_options), index, call.shard
        )
        if dz is None:
            return
        loss = None
    else:
        launch_fwd(z, call.target, None, rows[0], options, index)
        launch_fwd(teacher_z, call.target, None, rows[1], teacher_options, index)
    launch_divergence(
        z, teacher_z, dz, call.target, (outs[2], outs[5], results.lse, results.lse_rest), loss, mean, teacher.beta,
        options, teacher_options, order=index, unit=unit(options),
    )  # fmt: skip


def _backward_args(args: tuple[Any, ...]) -> tuple[Backward, Teacher, tuple[Tensor, ...]]:
    split = len(args) - len(Teacher._fields) - 3
    return call_of(Backward, args[:split]), Teacher(*args[split:-3]), args[-3:]


@op(
    f"linear_divergence_bwd({slices.ARGUMENTS}, {TEACHER}, Tensor teacher_lse, Tensor teacher_lse_rest, Tensor mean)"
    f" -> ({slices.RESULTS})",
    lambda *args: slices._bwd_outputs(_backward_args(args)[0]),
    flops=lambda *args: chunks.flops(*args) + _flops_of_teacher(_backward_args(args)[1]),
)
def linear_divergence_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients for upstream gradients [T] of the divergence, from both models' logits, made again.

    The arguments are those of ``Backward`` and ``Teacher``, and the first three of ``TeacherRows``. The results are
    those of ``linear_cross_entropy_bwd``, divided by ``scale_of(beta)``.
    """
    call, teacher, (teacher_lse, teacher_lse_rest, mean) = _backward_args(args)
    stats = call.lse, call.lse_rest, teacher_lse, teacher_lse_rest
    options = call.options, teacher.options(call.options.ignore_index)
    gathered: list[Tensor] = []

    def visit(z: Tensor, dz: Tensor, dloss: Tensor, index: Tensor | None, part: slice) -> None:
        if not gathered:
            gathered.append(teacher.x if index is None else teacher.x[index])
        teacher_z = z.new_empty((z.shape[0], pitch(z.shape[1])), dtype=WIDE)[:, : z.shape[1]]
        bias = None if teacher.bias is None else teacher.bias[part]
        store_logits(teacher_z, gathered[0], teacher.weight[part], bias, None, None)
        launch_divergence(
            z, teacher_z, dz, call.target, stats, None, mean if mean.numel() else None, teacher.beta, *options,
            order=index, dloss=dloss,
        )  # fmt: skip

    return slices._gradients(call, TokenBackward(WIDE, None, None, None, None), visit)
