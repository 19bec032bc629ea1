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
from liger_like.ops.losses.unstored import loads_operands, reduce_rows, takes_no_logits, unstored_kernels
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
    fill = _fill_unstored if _fuses_rows(call, teacher) else _fill
    nothing, buffers = outs[0][:0], list[Tensor]()
    rows = nothing, nothing, *outs[2:6]
    teacher_rows = nothing, nothing, results.lse, results.entropy, results.argmax, results.lse_rest
    teacher_head = teacher.weight, teacher.bias, None, None

    def visit(x_c: Tensor, z: Tensor, dz: Tensor | None, index: Tensor) -> None:
        torch.index_select(call.x, 0, index, out=x_c)
        head = call.weight, call.bias, None if call.u is None else call.u[index], call.b
        fill(call, z, x_c, head, rows, call.options, index)
        part = len(z) if call.shard else PART_ROWS  # each part of a shard would be an exchange
        if not buffers:  # the first chunk is the largest
            buffers.append(z.new_empty((min(part, len(z)), pitch(z.shape[1]))))
        for first in range(0, len(z), part):
            few = index[first : first + part]
            teacher_z = buffers[0][: len(few), : z.shape[1]]
            options = teacher.options(call.options.ignore_index)
            fill(call, teacher_z, teacher.x[few], teacher_head, teacher_rows, options, few)
            here = slice(first, first + part)
            _compare(call, teacher, z[here], teacher_z, None if dz is None else dz[here], few, outs, results)

    wide = TokenForward(WIDE, False, False, None, 0, 0)
    chunks.run_chunks(call, outs, wide, chunks._token_results(call, wide), visit=visit)
    return *outs, *results


def _fuses_rows(call: Forward, teacher: Teacher) -> bool:
    """Return True if the products of both heads compute the results of the rows of their logits."""
    further = call.bias, call.u, teacher.bias, teacher.softcap, call.argmax or None, call.shard or None
    return (
        takes_no_logits(call.x, call.weight, WIDE, call.options, *further)
        and takes_no_logits(teacher.x, teacher.weight, WIDE, call.options)
        and loads_operands(teacher.x, teacher.weight)
        and bool(unstored_kernels(call.x, call.weight))
    )


def _fill(
    call: Forward, z: Tensor, x: Tensor, head: tuple[Tensor | None, ...], rows: tuple[Tensor, ...], options: Options,
    index: Tensor,
) -> None:  # fmt: skip
    """Fill the logits ``z`` of the rows ``x``, tokens ``index``, and unless words are sharded the results ``rows``."""
    store_logits(z, x, *head)
    if not call.shard:
        launch_fwd(z, call.target, None, [t if t.numel() else None for t in rows], options, index)


def _fill_unstored(
    call: Forward, z: Tensor, x: Tensor, head: tuple[Tensor | None, ...], rows: tuple[Tensor, ...], options: Options,
    index: Tensor,
) -> None:  # fmt: skip
    """Do what ``_fill`` does, by a product that reduces its logits while it has them."""
    reduce_rows(x, head[0], call.target, rows, index, options, z)


def _compare(
    call: Forward, teacher: Teacher, z: Tensor, teacher_z: Tensor, dz: Tensor | None, index: Tensor,
    outs: tuple[Tensor, ...], results: TeacherRows,
) -> None:  # fmt: skip
    """Fill the divergence of the tokens ``index``, and ``dz`` unless it is None, from both models' scores."""
    loss: Tensor | None = outs[0]
    mean = results.mean if results.mean.numel() else None
    options, teacher_options = call.options, teacher.options(call.options.ignore_index)
    if call.shard:
        both = outs[2:6], (results.lse, results.entropy, results.argmax, results.lse_rest)
        rows = tuple((None, None, *(t if t.numel() else None for t in of)) for of in both)
        fill_rows_of_shard(
            (z, teacher_z), call.target, rows, loss, mean, teacher.beta, (options, teacher_options), index, call.shard
        )
        if dz is None:
            return
        loss = None
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
