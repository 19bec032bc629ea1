"""Common parts of the losses: their options, their definition per row, checks, and the reduction."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils._python_dispatch import _disable_current_modes

from liger_like.runtime import machine
from liger_like.runtime.checks import require, require_choice, require_integer, require_number
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed
from liger_like.runtime.recording import LASTING
from liger_like.runtime.registry import op

SOFTCAP_MAX = 1e30  # logits divided by a larger softcap would underflow in fp32
SOFTCAP_MUST = f"must be positive and at most {SOFTCAP_MAX:g}, or None"
TOP_ROWS = 128  # rows that are ranked at a time
REDUCTIONS = ("mean", "sum", "none")
OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale"


class Options(NamedTuple):
    """Scalar options of the loss, in the order of ``OPTIONS_SCHEMA``."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float


class RowLosses(NamedTuple):
    """Results per row, [...] each, in floating point but for the int64 argmax."""

    loss: Tensor
    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor


def check_labels(target: Tensor, V: int, ignore_index: int, name: str = "target") -> None:
    """Raise if a label on the CPU is neither in [0, V) nor ``ignore_index``; traced code leaves this to ``gather``.

    ``name`` is the caller's argument.
    """
    if target.device.type == "cpu" and machine.current is None and not torch.compiler.is_compiling():
        bad = target[(target != ignore_index) & ((target < 0) | (target >= V))]
        if bad.numel():
            none = "ignore_index" if name == "target" else "no word"
            raise ValueError(
                f"{name} holds label {bad[0].item()}, which is neither in [0, {V}) nor {none} = {ignore_index}"
            )


@functools.cache
def bad_label(device_type: str) -> Tensor:
    """Return the host memory into which kernels write a label that is out of range."""
    with torch.inference_mode(False), _disable_current_modes():  # later calls use it without these modes
        flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device_type == "cuda")
    LASTING.append(flag)
    return flag


def raise_bad_label(device: torch.device) -> None:
    """Raise if a kernel met a label out of range since the last call; 0 means none, since 0 is always in range."""
    if machine.current is not None:
        return
    flag = bad_label(device.type)
    label = flag.item()
    if label:
        flag.zero_()
        raise ValueError(f"target held label {label}, which is neither in [0, V) nor ignore_index; its row was ignored")


def scores_ref(logits: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the scaled logits before and after the softcap, in at least fp32.

    The softcap is monotonic but rounds large scores together, so ranks are those of the logits before it.
    """
    raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_scale != 1:  # Inductor divides a scaled softmax into more kernels
        raw = raw * options.logit_scale
    return raw, raw if options.softcap is None else options.softcap * torch.tanh(raw / options.softcap)


def row_losses_ref(logits: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> RowLosses:
    """Compute every per-row result in plain torch; this defines the losses."""
    check_labels(target, logits.shape[-1], options.ignore_index)
    raw, z = scores_ref(logits, options)
    argmax = raw.argmax(-1)
    ignored = target == options.ignore_index
    logp, lse = z.log_softmax(-1), z.logsumexp(-1)
    # not gather, in whose backward Inductor stores zeros [..., V] and adds to them
    rows, labels = logp.reshape(-1, logp.shape[-1]), target.reshape(-1).long()
    logprob = -nll_loss(rows, labels, ignore_index=options.ignore_index, reduction="none").view(target.shape)
    loss = (options.label_smoothing - 1) * logprob
    if weight is not None:
        weight = weight.to(z.dtype)
        loss = loss * weight[target.masked_fill(ignored, 0)]
    if options.z_loss:  # lse costs a graph another pass over the logits
        loss = loss + options.z_loss * lse.square()
    if options.label_smoothing:
        words = logp if weight is None else logp * weight
        loss = loss - options.label_smoothing / z.shape[-1] * words.sum(-1)
    p = logp.exp()
    entropy = -(p * logp.where(p > 0, 0)).sum(-1)
    floats = (t.masked_fill(ignored, 0) for t in (loss, logprob, lse.detach(), entropy))
    return RowLosses(*floats, argmax.masked_fill(ignored, -1))


def is_correct(argmax: Tensor, target: Tensor) -> Tensor:
    """Return whether each label is ``argmax`` [T]; False for ignored tokens, whose label may be -1 as their argmax."""
    return (argmax == target.reshape(-1)) & (argmax >= 0)


def top_words(z: Tensor, k: int, logit_scale: float) -> Tensor:
    """Return the ``k`` words [M, k] of the largest scores of each row of ``z`` [M, V], equal ones in ascending order.

    ``torch.topk`` may return any of equal scores. Here it finds the k-th largest score, and then the first of those
    words that reach it, in pieces of few rows, since ranks take the memory of logits.
    """
    z = z if logit_scale > 0 else z * logit_scale
    V = z.shape[1]
    first = torch.arange(V, 0, -1, dtype=torch.int32, device=z.device)
    found = []
    for part in z.split(TOP_ROWS):
        least = part.topk(k).values[:, -1:]
        rank = torch.where(part > least, first + V, first.where(~(part < least), 0))  # not less: a NaN has a rank, too
        words = V - (rank.topk(k).values.long() - 1) % V - 1
        order = part.gather(1, words).sort(dim=1, descending=True, stable=True).indices
        found.append(words.gather(1, order))
    return torch.cat(found)


def reduce_loss(
    total: Tensor,
    reduction: str,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
) -> Tensor:
    """Return ``total``, the sum of the rows' losses, or its mean: 0, not 0 / 0, if no row counts."""
    if reduction == "sum":
        return total
    if num_items is None:
        counted = target != ignore_index
        num_items = counted.sum() if weight is None else (weight[target.clamp(0, weight.shape[0] - 1)] * counted).sum()
    if not isinstance(num_items, Tensor):
        return total / (num_items or 1)
    num_items = num_items.to(total.device)
    return total / num_items.where(num_items != 0, 1)


@triton.jit(do_not_specialize=["M"])
def _reduce_rows_kernel(
    loss_ptr, target_ptr, w_ptr, items_ptr, out_ptr, factor_ptr, M, V, ignore_index, divisor,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    total, counted = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for m in range(0, M, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M).to(tl.int64)
        total += tl.load(loss_ptr + rows, mask=rows < M, other=0.0)
        if COUNT:
            label = tl.load(target_ptr + rows, mask=rows < M, other=0).to(tl.int64)
            counts = (rows < M) & (label != ignore_index)
            if w_ptr is None:
                counted += counts.to(tl.float32)
            else:
                label = tl.minimum(tl.maximum(label, 0), V - 1)
                counted += tl.load(w_ptr + label, mask=counts, other=0.0).to(tl.float32)
    items = divisor
    if COUNT:
        items = tl.sum(counted, axis=0)
    if items_ptr is not None:
        items = tl.load(items_ptr).to(tl.float32)
    items = tl.where(items == 0.0, 1.0, items)
    tl.store(out_ptr, tl.sum(total, axis=0) / items)
    tl.store(factor_ptr, 1.0 / items)


@op(
    "reduce_rows(Tensor loss, Tensor target, Tensor? weight, Tensor? items, int ignore_index, float divisor,"
    " bool count) -> (Tensor out, Tensor factor)",
    lambda loss, *args: (loss.new_empty(()), loss.new_empty(())),
)
def _reduce_rows(
    loss: Tensor, target: Tensor, weight: Tensor | None, items: Tensor | None, ignore_index: int, divisor: float,
    count: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return sum(loss) / n and 1 / n.

    n is ``items`` if given, else with ``count`` the (weighted) number of rows not ignored, else ``divisor``; 1 for 0.
    """
    out, factor = loss.new_empty(()), loss.new_empty(())
    tensors = loss, packed(target.reshape(-1)), packed(weight), items, out, factor
    sizes = loss.numel(), 0 if weight is None else weight.numel(), ignore_index
    launch(_reduce_rows_kernel, (1,), tensors, sizes, (divisor,), COUNT=count, BLOCK_M=4096, num_warps=16)
    return out, factor


def reduce_rows(
    loss: Tensor,
    reduction: str,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``reduce_loss`` of all rows' losses and the factor that it multiplies each loss by, in one kernel."""
    items = num_items.to(loss.device) if isinstance(num_items, Tensor) else None
    divisor = 1 if num_items is None or items is not None else num_items
    count = reduction == "mean" and num_items is None
    return _reduce_rows(loss, target, weight, items, ignore_index, float(divisor), count)


def check_target(target: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``target`` holds integer labels of the given shape on the device of ``like``."""
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {getattr(target, 'dtype', type(target).__name__)}")
    if target.shape != shape:
        raise ValueError(f"target must have shape {list(shape)}, got {list(target.shape)}")
    if target.device != like.device:
        raise ValueError(f"target must be on {like.device}, got {target.device}")


def checked_options(ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any) -> Options:
    """Return the options as Python numbers. Raise if an option is not a number or is out of range."""
    if softcap is not None:
        softcap = require_number("softcap", softcap, SOFTCAP_MUST, 1 / SOFTCAP_MAX, SOFTCAP_MAX)
    return Options(
        require_integer("ignore_index", ignore_index),
        require_number("label_smoothing", label_smoothing, "must be in [0, 1]", 0.0, 1.0),
        require_number("z_loss", z_loss),
        softcap,
        require_number("logit_scale", logit_scale),
    )


def checked_num_items(num_items: Any, reduction: str) -> float | Tensor | None:
    """Return ``num_items`` as a Python number or a tensor []. Raise unless it is valid and fits ``reduction``."""
    require_choice("reduction", reduction, REDUCTIONS)
    if num_items is None:
        return None
    if reduction != "mean":
        raise ValueError(f"num_items divides the loss of reduction='mean' only, got reduction={reduction!r}")
    if not isinstance(num_items, Tensor):
        return require_number("num_items", num_items, "must be finite and not negative", 0.0)
    if num_items.numel() != 1 or num_items.dtype == torch.bool or num_items.is_complex():
        got = f"{num_items.dtype} of shape {list(num_items.shape)}"
        raise ValueError(f"num_items must be a number or a tensor of one number, got a tensor of {got}")
    if num_items.requires_grad:
        raise ValueError("num_items must not require a gradient: the loss is not differentiated by it")
    return num_items.reshape(())


def check_class_weight(name: str, weight: Tensor | None, like: Tensor, V: int) -> None:
    """Raise unless the class weights, the caller's argument ``name``, are [``V``] and require no gradient."""
    if weight is not None:
        require(name, weight, like=like, shape=(V,))
        if weight.requires_grad:
            raise ValueError(f"{name} must not require a gradient: the loss is not differentiated by class weights")
