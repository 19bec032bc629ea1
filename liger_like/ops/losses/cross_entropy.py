"""Cross-entropy with label smoothing (Szegedy et al., arXiv:1512.00567), z-loss (Chowdhery et al., arXiv:2204.02311)
and logit softcap.

logits [..., V] are read as M rows, with z = softcap(logit_scale * logits). For lse = logsumexp(z), class weights w and
smoothing e, a row's loss is (1 - e) w_y (lse - z_y) + e/V sum_c w_c (lse - z_c) + z_loss * lse^2. The forward reads the
logits once (online softmax); the backward reads them once and writes their gradient once (``row_kernels``). Maths and
losses are in fp32.

A label outside [0, V) is never used as an index. The kernel treats its row as ignored and writes the label to pinned
host memory. The next call reads that memory without waiting for the GPU, and raises.
"""

from typing import Any

import torch
from torch import Tensor

from liger_like.ops.losses.row_kernels import launch_bwd, launch_fwd
from liger_like.ops.losses.rows import (
    OPTIONS_SCHEMA,
    Options,
    check_class_weight,
    check_target,
    checked_num_items,
    checked_options,
    raise_bad_label,
    reduce_loss,
    reduce_rows,
    row_losses_ref,
)
from liger_like.runtime.autograd import apply, is_last_backward, once_differentiable
from liger_like.runtime.checks import require, require_choice
from liger_like.runtime.layout import as_rows
from liger_like.runtime.registry import op, refuses_dtensors
from liger_like.runtime.support import use_kernel


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Compute ``cross_entropy`` in plain torch; this defines the op."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)


def _fwd_outputs(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, {OPTIONS_SCHEMA})"
    " -> (Tensor loss, Tensor lse, Tensor lse_rest)",
    _fwd_outputs,
)
def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, *scalars: Any
) -> tuple[Tensor, Tensor, Tensor]:
    raise_bad_label(logits.device)
    loss, lse, lse_rest = _fwd_outputs(logits)
    rows = loss, None, lse, None, None, lse_rest
    launch_fwd(as_rows(logits), target.reshape(-1), weight, rows, Options(*scalars))
    return loss, lse, lse_rest


@op(
    "cross_entropy_bwd(Tensor dloss, Tensor? factor, Tensor logits, Tensor lse, Tensor lse_rest, Tensor target,"
    f" Tensor? weight, Tensor(a!) dlogits, {OPTIONS_SCHEMA}) -> ()",
    lambda *args: None,
)
def _cross_entropy_bwd(
    dloss: Tensor, factor: Tensor | None, logits: Tensor, lse: Tensor, lse_rest: Tensor, target: Tensor,
    weight: Tensor | None, dlogits: Tensor, *scalars: Any,
) -> None:  # fmt: skip
    """Fill ``dlogits``, which is contiguous and may share the memory of ``logits``."""
    z, dz, labels = as_rows(logits), dlogits.view(-1, logits.shape[-1]), target.reshape(-1)
    upstream = (dloss.reshape(-1) if dloss.dim() else dloss, None, None)
    launch_bwd(z, dz, labels, weight, (lse, lse_rest), None, upstream, Options(*scalars), factor=factor)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        inplace_backward: bool,
        reduction: str,
        num_items: float | Tensor | None,
        *scalars: Any,
    ) -> Tensor:
        loss, *lse = _cross_entropy_fwd(logits, target, weight, *scalars)
        factor = None
        if reduction != "none":
            loss, factor = reduce_rows(loss, reduction, target, weight, scalars[0], num_items)
        ctx.save_for_backward(logits, *lse, target, weight, factor)
        ctx.inplace_backward, ctx.scalars = inplace_backward, scalars
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, *lse, target, weight, factor = ctx.saved_tensors  # raises if the logits were changed in place
        if ctx.inplace_backward and logits.is_contiguous() and is_last_backward():
            dlogits = logits.detach()
            torch.autograd.graph.increment_version(logits)  # another backward that saved the logits will raise
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _cross_entropy_bwd(dloss, factor, logits, *lse, target, weight, dlogits, *ctx.scalars)
        return dlogits, *(None for _ in range(5 + len(ctx.scalars)))


@refuses_dtensors("liger_like.parallel.vocab_parallel_cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_items: float | Tensor | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Return the cross-entropy of ``logits`` [..., V] and integer ``target`` [...] in fp32: [], or [...] for "none".

    ``weight`` [V]: class weights. Rows with label ``ignore_index`` give zero loss and gradient. ``reduction``: "mean"
    divides the sum by ``num_items`` (a number, or a tensor of one element) if given, else by the number of rows not
    ignored (with ``weight``, by their summed weights, as torch does); if that is 0, the loss is 0.
    ``label_smoothing`` is in [0, 1]; ``z_loss`` adds z_loss * logsumexp^2 to each row. The logits z are first mapped to
    ``logit_scale * z``, or with ``softcap`` to ``softcap * tanh(logit_scale * z / softcap)``. ``inplace_backward``: the
    backward overwrites the logits with their gradient, if they are contiguous and no retain_graph is given; autograd
    raises if another function needs their values afterwards. The kernel takes bf16, fp16 and fp32; other dtypes and
    devices run the plain-torch reference.

    Raises TypeError or ValueError for invalid arguments, ValueError also for a label outside [0, V): at once on the
    CPU, in the next call on a GPU.
    """
    require("logits", logits)
    options = checked_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    num_items = checked_num_items(num_items, reduction)
    check_target(target, logits, logits.shape[:-1])
    check_class_weight("weight", weight, logits, logits.shape[-1])
    require_choice("inplace_backward", inplace_backward, (False, True))
    if use_kernel(logits):
        return apply(_CrossEntropy, logits, target, weight, inplace_backward, reduction, num_items, *options)
    loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)
