"""Logits whose words are spread over processes: what these tell each other about a chunk of tokens.

Each process finds, with the kernel for a whole vocabulary, what its own words come to in each row: their lse, and the
log-probability of the label if it is one of them. From those of all processes, in one all-gather of a few numbers a
row, each makes the results over all words; its own logits' gradient then needs only the lse of all.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_like.ops.losses.cross_entropy import launch_fwd
from liger_like.ops.losses.rows import Options
from liger_like.runtime.autograd import once_differentiable

SHARD_SCHEMA = "str group, SymInt first_word, SymInt words, bool reduce_dx, bool released"
IGNORED = -(2**62)  # no label
# torch 2.13 renamed them
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shard(NamedTuple):
    """The words of a vocabulary that a process has: those from ``first_word`` on, of ``words`` over the group.

    ``reduce_dx``: the gradient of x is summed over the processes, all of which have the same x. ``released``: the
    weight may be gone when the backward comes, that of a scalar loss, which then does not read it.
    """

    group: str = ""
    first_word: int = 0
    words: int = 0
    reduce_dx: bool = False
    released: bool = False

    def __bool__(self) -> bool:
        return bool(self.group)

    def processes(self) -> dist.ProcessGroup:
        """The group of that name."""
        return torch.distributed.distributed_c10d._resolve_process_group(self.group)


WHOLE = Shard()


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of all processes, [R, *x.shape]."""
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
    """``x``, which all processes have; its gradient is the sum of theirs."""
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


def all_words(logits: Tensor, shard: Shard) -> Tensor:
    """The logits [..., words] of all processes; each makes the same loss of them, so that its own gradient is whole."""
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
    """``launch_fwd`` over the words of all processes, of which ``class_weight`` [words] has all."""
    M, V = z.shape
    label = target[order].long()
    counts = (label != options.ignore_index) & (label >= 0) & (label < shard.words)
    own = label - shard.first_word
    is_own = counts & (own >= 0) & (own < V)
    # a label of another process gets a result that is not used; one that is out of range is seen to be so
    own = torch.where(counts, own.clamp(0, V - 1), label.masked_fill(label == options.ignore_index, IGNORED))
    weights = None if class_weight is None else class_weight[shard.first_word : shard.first_word + V]
    loss, logprob, lse, entropy, lse_rest = z.new_empty((5, M), dtype=torch.float32)
    best = z.new_empty(M, dtype=torch.int64)
    wanted = (loss, logprob, lse, None if rows[3] is None else entropy, None if rows[4] is None else best, lse_rest)
    # smoothed altogether, a row's loss is the mean of w (lse - score) over its words
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
    """Return loss, log-probability of the label, lse, entropy, best word and lse_rest [M] from the ``stats`` [R, M] of
    all processes.
    """
    lses, lse_rests, logprobs, is_own, *more = stats
    top = lses.amax(0)
    shift = top.masked_fill(top == -torch.inf, 0)
    log_total = (lses - shift + lse_rests).exp().sum(0).log()
    lse = shift + log_total
    lse_rest = _rounding_error(shift, log_total, lse)
    logp = (lses - lse) + (lse_rests - lse_rest)  # of each process's words
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
    """Return a + b - ``total``, for their rounded sum ``total``; 0 where that is infinite."""
    b_part = total - a
    return ((a - (total - b_part)) + (b - b_part)).masked_fill(total.isinf(), 0)
