"""Cross-entropy with label smoothing (Szegedy et al., arXiv:1512.00567), z-loss (Chowdhery et al., arXiv:2204.02311)
and logit softcap.

logits [..., V] are seen as M rows, a program per row, z = softcap(logit_scale * logits). With lse = logsumexp(z),
class weights w and smoothing e, a row costs (1 - e) w_y (lse - z_y) + e/V sum_c w_c (lse - z_c) + z_loss * lse^2.
The forward reads the logits once (online softmax), the backward reads them once and writes their gradient once, into
a new tensor. Maths and losses in fp32.

A label outside [0, V) is never used as an index. The kernel treats its row as ignored and leaves the label in pinned
host memory, where the next call finds it without waiting for the GPU, and raises.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_like.ops._common import as_rows, op, packed, require, require_choice, use_kernel

REDUCTIONS = ("mean", "sum", "none")
OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale"


class Options(NamedTuple):
    """The scalars of the loss, in the order of the library ops."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float


class RowLosses(NamedTuple):
    """Per-row results of the definition."""

    loss: Tensor
    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor


def check_labels(target: Tensor, V: int, ignore_index: int) -> None:
    """Raise if a label on the CPU is neither in [0, V) nor ``ignore_index``; traced code leaves that to ``gather``."""
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = target[(target != ignore_index) & ((target < 0) | (target >= V))]
        if bad.numel():
            raise ValueError(
                f"target holds label {bad[0].item()}, which is neither in [0, {V}) nor ignore_index = {ignore_index}"
            )


def row_losses_ref(logits: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> RowLosses:
    """The definition of every per-row result, in plain torch."""
    check_labels(target, logits.shape[-1], options.ignore_index)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    argmax = z.argmax(-1)  # before the softcap, which is monotonic but rounds large scores together
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    ignored = target == options.ignore_index
    label = target.masked_fill(ignored, 0).long()
    logp, lse = z.log_softmax(-1), z.logsumexp(-1)
    w = z.new_ones(z.shape[-1]) if weight is None else weight.to(z.dtype)
    logprob = logp.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    loss = -(1 - options.label_smoothing) * w[label] * logprob + options.z_loss * lse.square()
    if options.label_smoothing:
        loss = loss - options.label_smoothing / z.shape[-1] * (logp * w).sum(-1)
    p = logp.exp()
    entropy = -(p * logp.where(p > 0, 0)).sum(-1)
    floats = (t.masked_fill(ignored, 0) for t in (loss, logprob, lse.detach(), entropy))
    return RowLosses(*floats, argmax.masked_fill(ignored, -1))


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
    num_items: int | Tensor | None = None,
) -> Tensor:
    """The definition, in plain torch."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)


@triton.jit
def _load_scores(z_ptr, offs_v, V, logit_scale):
    """Logits times ``logit_scale`` in fp32, -inf beyond V."""
    raw = tl.load(z_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32) * logit_scale
    return tl.where(offs_v < V, raw, float("-inf"))


@triton.jit
def _cap_scores(raw, inside, softcap, logit_scale):
    """The scores under the softcap, -inf where not ``inside``, and their slopes with respect to the logits."""
    z = raw
    slope = tl.full(raw.shape, logit_scale, tl.float32)
    if softcap is not None:
        # e = exp(-2|x|), tanh |x| = (1 - e) / (1 + e), its slope 4e / (1 + e)^2; near 0, where that cancels, the series
        x = raw / softcap
        x2 = x * x
        e = tl.exp(-2.0 * tl.abs(x))
        far = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
        near = -17.0 / 315 + x2 * (62.0 / 2835 - 1382.0 / 155925 * x2)
        near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * near)))
        z = tl.where(inside, tl.where(x2 < 0.1, near, far) * softcap, float("-inf"))
        slope *= 4.0 * e / ((1.0 + e) * (1.0 + e))
    return z, slope


@triton.jit
def _store(ptr, row, value):
    if ptr is not None:
        tl.store(ptr + row, value)


@triton.jit
def _load(ptr, row, default):
    value = default
    if ptr is not None:
        value = tl.load(ptr + row).to(tl.float32)
    return value


@triton.jit
def _cross_entropy_kernel(
    z_ptr, dz_ptr, target_ptr, w_ptr, w_sum_ptr, loss_ptr, logprob_ptr, lse_ptr, entropy_ptr, argmax_ptr,
    dloss_ptr, dlogprob_ptr, dentropy_ptr, bad_label_ptr, stride_zm, stride_dzm, V,
    ignore_index, smoothing, z_loss, softcap, logit_scale, unit,
    STATS: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_zm
    label = tl.load(target_ptr + row).to(tl.int64)
    in_range = (label >= 0) & (label < V)
    if (label == ignore_index) | (in_range == 0):
        tl.store(bad_label_ptr, label, mask=label != ignore_index)
        if STATS:
            _store(loss_ptr, row, 0.0)
            _store(logprob_ptr, row, 0.0)
            _store(lse_ptr, row, 0.0)
            _store(entropy_ptr, row, 0.0)
            _store(argmax_ptr, row, -1)
        if dz_ptr is not None:
            for v in range(0, V, BLOCK_V):
                offs_v = v + tl.arange(0, BLOCK_V)
                tl.store(dz_ptr + row * stride_dzm + offs_v, tl.zeros((BLOCK_V,), tl.float32), mask=offs_v < V)
        return

    w_label = (1.0 - smoothing) * _load(w_ptr, label, 1.0)
    w_sum = _load(w_sum_ptr, 0, V)
    entropy = 0.0
    if STATS:
        top, total, dot, smooth, best, best_raw = float("-inf"), 0.0, 0.0, 0.0, 0, float("-inf")
        for v in range(0, V, BLOCK_V):
            offs_v = v + tl.arange(0, BLOCK_V)
            raw = _load_scores(z_ptr, offs_v, V, logit_scale)
            z, slope = _cap_scores(raw, offs_v < V, softcap, logit_scale)
            if argmax_ptr is not None:
                block_raw = tl.max(raw, axis=0)
                best = tl.where(block_raw > best_raw, v + tl.argmax(raw, axis=0), best)
                best_raw = tl.maximum(best_raw, block_raw)
            new_top = tl.maximum(top, tl.max(z, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # logits of -inf are legal: no inf - inf
            e = tl.exp(z - shift)
            rescale = tl.exp(top - shift)
            if entropy_ptr is not None:  # sum of e (z - top): small where the row is peaked, so that nothing cancels
                moved = tl.where(total > 0.0, top - shift, 0.0) * total
                dot = (dot + moved) * rescale + tl.sum(e * tl.where(e > 0.0, z - shift, 0.0), axis=0)
            total = total * rescale + tl.sum(e, axis=0)
            if SMOOTHING:
                w = tl.full((BLOCK_V,), 1.0, tl.float32)
                if w_ptr is not None:
                    w = tl.load(w_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
                smooth += tl.sum(w * tl.where(offs_v < V, z, 0.0), axis=0)
            top = new_top
        lse = top + tl.log(total)
        raw_label = _load_scores(z_ptr, label + tl.arange(0, 1), V, logit_scale)
        z_label = tl.sum(_cap_scores(raw_label, in_range, softcap, logit_scale)[0], axis=0)
        logprob = (z_label - top) - tl.log(total)  # exact where the label is the top; z_label - lse would cancel
        loss = z_loss * lse * lse - w_label * logprob
        if SMOOTHING:
            loss += smoothing / V * (w_sum * lse - smooth)
        if entropy_ptr is not None:
            entropy = tl.log(total) - dot / total
        _store(loss_ptr, row, loss)
        _store(logprob_ptr, row, logprob)
        _store(lse_ptr, row, lse)
        _store(entropy_ptr, row, entropy)
        _store(argmax_ptr, row, best)
        tl.debug_barrier()  # dz may be z: every read of the first pass comes before any write of the second
    else:
        lse = tl.load(lse_ptr + row)

    if dz_ptr is not None:
        dloss = _load(dloss_ptr, row, unit)
        dlogprob = _load(dlogprob_ptr, row, 0.0)
        hot = dloss * w_label - dlogprob
        spread = dloss * smoothing / V
        slope_p = hot + spread * w_sum + dloss * 2.0 * z_loss * lse
        for v in range(0, V, BLOCK_V):
            offs_v = v + tl.arange(0, BLOCK_V)
            raw = _load_scores(z_ptr, offs_v, V, logit_scale)
            z, slope = _cap_scores(raw, offs_v < V, softcap, logit_scale)
            p = tl.exp(z - lse)
            dz = p * slope_p
            if dentropy_ptr is not None:
                dz += p * tl.where(p > 0.0, lse - entropy - z, 0.0) * tl.load(dentropy_ptr + row)
            if SMOOTHING:
                w = tl.full((BLOCK_V,), 1.0, tl.float32)
                if w_ptr is not None:
                    w = tl.load(w_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
                dz -= spread * w
            dz = tl.where(offs_v == label, dz - hot, dz) * slope
            tl.store(dz_ptr + row * stride_dzm + offs_v, dz, mask=offs_v < V)


@functools.cache
def _bad_label(device_type: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, pin_memory=device_type == "cuda")


def raise_bad_label(device: torch.device) -> None:
    """Raise if a kernel met a label out of range since the last call (0 is always in range, so it stands for none)."""
    flag = _bad_label(device.type)
    label = flag.item()
    if label:
        flag.zero_()
        raise ValueError(f"target held label {label}, which is neither in [0, V) nor ignore_index; its row was ignored")


def launch_cross_entropy(
    z: Tensor,
    dz: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    rows: RowLosses | tuple[Tensor | None, ...],
    upstream: tuple[Tensor | None, ...],
    options: Options,
    *,
    stats: bool,
    unit: float = 1.0,
) -> None:
    """Run the kernel over ``z`` [M, V]: fill ``rows`` (or, not ``stats``, read its lse), and ``dz``, maybe ``z``.

    ``upstream`` holds the gradients [M] of loss (None: ``unit`` for all), logprob and entropy (None: 0); the last
    one needs ``stats``.
    """
    M, V = z.shape
    block_v = min(triton.next_power_of_2(V), 4096)
    weight_sum = None
    if weight is not None and options.label_smoothing:
        weight_sum = weight.sum(dtype=torch.float32)
    _cross_entropy_kernel[(M,)](
        z,
        dz,
        packed(target),
        packed(weight),
        weight_sum,
        *rows,
        *upstream,
        _bad_label(z.device.type),
        z.stride(0),
        0 if dz is None else dz.stride(0),
        V,
        options.ignore_index,
        options.label_smoothing,
        options.z_loss,
        options.softcap,
        options.logit_scale,
        unit,
        STATS=stats,
        SMOOTHING=options.label_smoothing != 0,
        BLOCK_V=block_v,
        num_warps=max(1, block_v // 512),
    )
    if z.device.type == "cpu":
        raise_bad_label(z.device)


def _fwd_outputs(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return loss, torch.empty_like(loss)


@op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, {OPTIONS_SCHEMA}) -> (Tensor loss, Tensor lse)",
    _fwd_outputs,
)
def _cross_entropy_fwd(logits: Tensor, target: Tensor, weight: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor]:
    raise_bad_label(logits.device)
    loss, lse = _fwd_outputs(logits)
    rows = (loss, None, lse, None, None)
    none = (None, None, None)
    launch_cross_entropy(as_rows(logits), None, target.reshape(-1), weight, rows, none, Options(*scalars), stats=True)
    return loss, lse


def _bwd_output(dloss: Tensor, logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@op(
    "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor lse, Tensor target, Tensor? weight,"
    f" {OPTIONS_SCHEMA}) -> Tensor",
    _bwd_output,
)
def _cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, *scalars: Any
) -> Tensor:
    dlogits = _bwd_output(dloss, logits)
    z = as_rows(logits)
    upstream = (packed(dloss.reshape(-1)), None, None)
    rows = (None, None, lse, None, None)
    options = Options(*scalars)
    launch_cross_entropy(z, dlogits.view(z.shape), target.reshape(-1), weight, rows, upstream, options, stats=False)
    return dlogits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, *scalars: Any) -> Tensor:
        loss, lse = _cross_entropy_fwd(logits, target, weight, *scalars)
        ctx.save_for_backward(logits, lse, target, weight)
        ctx.scalars = scalars
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        dlogits = _cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.scalars)
        return dlogits, None, None, *(None for _ in ctx.scalars)


def reduce_loss(
    total: Tensor,
    reduction: str,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    num_items: int | Tensor | None,
) -> Tensor:
    """The sum of the rows' losses, or its mean; a batch without a row to count gives 0, not 0 / 0."""
    if reduction == "sum":
        return total
    if num_items is None:
        counted = target != ignore_index
        num_items = counted.sum() if weight is None else (weight[target.clamp(0, weight.shape[0] - 1)] * counted).sum()
    if not isinstance(num_items, Tensor):
        return total / (num_items or 1)
    num_items = num_items.to(total.device)
    return total / num_items.where(num_items != 0, 1)


def check_target(target: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``target`` holds integer labels of the given shape on the device of ``like``."""
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {getattr(target, 'dtype', type(target).__name__)}")
    if target.shape != shape:
        raise ValueError(f"target must have shape {list(shape)}, got {list(target.shape)}")
    if target.device != like.device:
        raise ValueError(f"target must be on {like.device}, got {target.device}")


def check_options(
    options: Options,
    reduction: str,
    num_items: int | Tensor | None,
    name: str,
    weight: Tensor | None,
    like: Tensor,
    V: int,
) -> None:
    """Raise if an option of the loss is out of its range, naming it; ``name`` is what the caller calls the class
    weights.
    """
    require_choice("reduction", reduction, REDUCTIONS)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {options.label_smoothing}")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap must be positive, got {options.softcap}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides the loss of reduction='mean' only, got reduction={reduction!r}")
    if weight is not None:
        require(name, weight, like=like, shape=(V,))
        if weight.requires_grad:
            raise ValueError(f"{name} must not require a gradient: the loss is not differentiated by class weights")


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
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Cross-entropy of ``logits`` [..., V] and ``target`` [...] (int64 or int32); an fp32 scalar, or [...] for
    reduction "none".

    ``weight`` [V]: class weights. Rows with label ``ignore_index`` give zero loss and gradient. ``reduction``:
    "mean" divides the sum by ``num_items`` (int or device tensor) if given, else by the number of rows not ignored
    (with ``weight``, by their summed weights, as torch does); a batch with nothing to count gives 0.
    ``label_smoothing`` in [0, 1]; ``z_loss`` adds z_loss * logsumexp^2 to each row; the logits are first mapped to
    ``logit_scale * z``, or with ``softcap`` to ``softcap * tanh(logit_scale * z / softcap)``. The logits are never
    written. bf16, fp16 and fp32; other dtypes and devices run the plain-torch reference.

    Raises TypeError or ValueError for arguments that do not fit, and for a label outside [0, V): at once on the CPU,
    by the next call on a GPU.
    """
    require("logits", logits)
    V = logits.shape[-1]
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_target(target, logits, logits.shape[:-1])
    check_options(options, reduction, num_items, "weight", weight, logits, V)
    if use_kernel(logits):
        loss = _CrossEntropy.apply(logits, target, weight, *options)
    else:
        loss = row_losses_ref(logits, target, weight, options).loss
    return loss if reduction == "none" else reduce_loss(loss.sum(), reduction, target, weight, ignore_index, num_items)
