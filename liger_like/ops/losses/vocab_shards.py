"""Loss over logits whose words (columns of the vocabulary) are sharded over processes.

Each process runs the kernel for a whole vocabulary on its own words. This gives each row's lse over these words, and
the log-probability of the label if it is among them. One all-gather of a few numbers per row then lets every process
compute the results over all words. The gradient of a process's own logits needs only the lse over all words.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.losses.row_kernels import launch_fwd
from liger_like.ops.losses.rows import Options
from liger_like.runtime.autograd import once_differentiable

SHARD_SCHEMA = "str group, SymInt first_word, SymInt words, bool reduce_dx, bool released"
IGNORED = -(2**62)  # the ignore_index within a shard: never a label
# torch 2.13 renamed these functions
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shard(NamedTuple):
    """Vocabulary shard of a process: its words start at ``first_word``, of ``words`` in the whole group.

    ``reduce_dx``: all processes have the same x, so its gradient is summed over them. ``released``: FSDP may free the
    weight before the backward, so a scalar loss's backward must not read it.
    """

    group: str = ""
    first_word: int = 0
    words: int = 0
    reduce_dx: bool = False
    released: bool = False

    def __bool__(self) -> bool:
        return bool(self.group)

    def processes(self) -> dist.ProcessGroup:
        """Return the process group named ``group``."""
        return torch.distributed.distributed_c10d._resolve_process_group(self.group)


WHOLE = Shard()


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x`` of all R processes, [R, *x.shape]."""
    out = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather(out.flatten(0, 1), x.contiguous(), group=group)
    return out


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        dx = dx.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx, group=ctx.shard.processes())
        return dx, None


def summed_gradient(x: Tensor, shard: Shard) -> Tensor:
    """Return ``x``, which is the same in all processes; its gradient is summed over them."""
    out: Tensor = _SummedGradient.apply(x, shard)
    return out


class _AllWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.own = slice(shard.first_word, shard.first_word + logits.shape[-1])
        whole = logits.new_zeros((*logits.shape[:-1], shard.words))
        whole[..., ctx.own] = logits
        dist.all_reduce(whole, group=shard.processes())
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> Any:
        return dlogits[..., ctx.own], None


def all_vocab_logits(logits: Tensor, shard: Shard) -> Tensor:
    """Return the logits [..., words] of all processes.

    All processes compute the same loss from them, so each has the complete gradient of its own words.
    """
    out: Tensor = _AllWords.apply(logits, shard)
    return out


def launch_fwd_of_shard(
    z: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    rows: list[Tensor | None],
    options: Options,
    order: Tensor,
    shard: Shard,
) -> None:
    """Fill ``rows`` as ``launch_fwd`` does, over the words of all processes; ``class_weight`` [words] is whole."""
    M, V = z.shape
    label = target[order].long()
    counts = (label != options.ignore_index) & (label >= 0) & (label < shard.words)
    own = label - shard.first_word
    is_own = counts & (own >= 0) & (own < V)
    # clamp another process's label, whose result is not used; keep a label out of range for the kernel to report
    own = torch.where(counts, own.clamp(0, V - 1), label.masked_fill(label == options.ignore_index, IGNORED))
    weights = None if class_weight is None else class_weight[shard.first_word : shard.first_word + V]
    loss, logprob, lse, entropy, lse_rest = z.new_empty((5, M), dtype=torch.float32)
    best = z.new_empty(M, dtype=torch.int64)
    wanted = (loss, logprob, lse, None if rows[3] is None else entropy, None if rows[4] is None else best, lse_rest)
    # with label smoothing 1 the kernel's loss is the mean of w (lse - score) over its words
    launch_fwd(z, own, weights, wanted, Options(IGNORED, float(options.label_smoothing > 0), 0.0, *options[3:]))
    stats = [lse, lse_rest, logprob, is_own.float()]
    if options.label_smoothing:
        stats += [V * loss, torch.full_like(lse, V) if weights is None else weights.float().sum().expand(M)]
    if rows[3] is not None:
        stats.append(entropy)
    if rows[4] is not None:
        score = z.gather(1, best.clamp(min=0)[:, None])[:, 0].float() * options.logit_scale
        stats += [score, (best + shard.first_word).int().view(torch.float32)]
    results = _merged(gathered(torch.stack(stats), shard.processes()).unbind(1), label, class_weight, options, shard)
    for row, result in zip(rows, results, strict=False):
        if row is not None:
            row[order] = result.where(counts, -1 if row.dtype == torch.int64 else 0)


def _merged(
    stats: tuple[Tensor, ...], label: Tensor, class_weight: Tensor | None, options: Options, shard: Shard
) -> list[Tensor]:
    """Return loss, logprob, lse, entropy, argmax and lse_rest [M] from the ``stats`` [R, M] of all processes."""
    lses, lse_rests, logprobs, is_own, *more = stats
    top = lses.amax(0)
    shift = top.masked_fill(top == -torch.inf, 0)
    log_total = (lses - shift + lse_rests).exp().sum(0).log()
    lse = shift + log_total
    lse_rest = _rounding_error(shift, log_total, lse)
    logp = (lses - lse) + (lse_rests - lse_rest)  # log-probability of each process's words together
    logprob = (logprobs + logp).where(is_own > 0, 0).sum(0)
    hot = 1 - options.label_smoothing
    if class_weight is not None:
        hot = hot * class_weight[label.clamp(0, shard.words - 1)].float()
    loss = options.z_loss * lse.square() - hot * logprob
    if options.label_smoothing:
        costs, weights, *more = more
        loss += options.label_smoothing / shard.words * (costs - weights * logp).sum(0)
    entropy = best = lse
    if len(more) % 2:
        p = logp.exp()
        entropy = (p * (more[0] - logp)).where(p > 0, 0).sum(0)
    if len(more) > 1:
        scores, words = more[-2:]
        best = words.contiguous().view(torch.int32).gather(0, scores.argmax(0, keepdim=True))[0].long()
    return [loss, logprob, lse, entropy, best, lse_rest]


def _rounding_error(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return a + b - ``total`` for the rounded sum ``total`` of a and b; 0 where ``total`` is infinite."""
    b_part = total - a
    return ((a - (total - b_part)) + (b - b_part)).masked_fill(total.isinf(), 0)
