"""Divergence of scores whose words are sharded over processes, from a few numbers per row.

Each process finds both models' lse over its own words. One all-gather gives every process the lse over all words, and
the probabilities P and Q of each process's words together. A Kullback-Leibler divergence follows from those over the
processes' own words by the chain rule: KL(q || p) = sum over processes of Q (KL(own q || own p) + log(Q / P)). The
divergences from the mixture need the lse over all words first, so a second all-gather sums their parts.
"""

import torch
from torch import Tensor

from liger_like.ops.losses.divergence_rows import FORWARD, MIXTURE, kind_of, launch_divergence
from liger_like.ops.losses.row_kernels import launch_fwd
from liger_like.ops.losses.rows import Options
from liger_like.ops.losses.vocab_shards import Shard, gathered, mean_over, total_lse

Rows = tuple[Tensor | None, ...]
COUNTED, IGNORED = 0, -100


class _Merged:
    """Results of one model's scores over the words of all processes, from ``stats`` [R, M] of each.

    ``logp`` [R, M]: log-probability of each process's words together.
    """

    def __init__(self, lses: Tensor, lse_rests: Tensor, entropies: Tensor | None, best: tuple[Tensor, ...]) -> None:
        self.lse, self.lse_rest, self.logp = total_lse(lses, lse_rests)
        self.entropy = None if entropies is None else self.mean(entropies - self.logp)
        self.argmax = None
        if best:
            scores, words = best
            first = scores.argmax(0, keepdim=True)
            self.argmax = words.contiguous().view(torch.int32).gather(0, first)[0].long()

    def mean(self, values: Tensor) -> Tensor:
        """Return the sum over processes of their ``values`` [R, M], weighted by the probabilities of their words."""
        return mean_over(self.logp, values)


def fill_rows_of_shard(
    scores: tuple[Tensor, Tensor], target: Tensor, rows: tuple[Rows, Rows], loss: Tensor, mean: Tensor | None,
    beta: float, options: tuple[Options, Options], order: Tensor, shard: Shard,
) -> None:  # fmt: skip
    """Fill ``rows``, those of ``launch_fwd`` for student and teacher, ``loss`` and ``mean`` over all words.

    ``scores`` holds both models' logits [M, V] of this process's words, of the tokens ``order``.
    """
    z, _ = scores
    M, kind = z.shape[0], kind_of(beta)
    labels = target[order]
    counts = labels == COUNTED
    stats: list[Tensor] = []
    local: list[Tensor] = []
    for logits, row, option in zip(scores, rows, options, strict=True):
        lse, lse_rest, entropy = z.new_empty((3, M), dtype=torch.float32)
        argmax = None if row[4] is None else z.new_empty(M, dtype=torch.int64)
        launch_fwd(
            logits, labels, None, (None, None, lse, None if row[3] is None else entropy, argmax, lse_rest), option
        )
        local += [lse, lse_rest]
        stats += [lse, lse_rest]
        if row[3] is not None:
            stats.append(entropy)
        if argmax is not None:
            best = logits.gather(1, argmax.clamp(min=0)[:, None])[:, 0].float() * option.logit_scale
            stats += [best, (argmax + shard.first_word).int().view(torch.float32)]
    own_loss, own_mean = z.new_empty((2, M), dtype=torch.float32)
    if kind != MIXTURE:
        launch_divergence(*scores, None, labels, tuple(local), own_loss, own_mean, beta, *options)
        stats.append(own_loss)
    parts = iter(gathered(torch.stack(stats), shard.processes()).unbind(1))
    merged = []
    for row in rows:
        lses, lse_rests = next(parts), next(parts)
        entropies = None if row[3] is None else next(parts)
        merged.append(_Merged(lses, lse_rests, entropies, () if row[4] is None else (next(parts), next(parts))))
    student, teacher = merged
    if kind == MIXTURE:
        whole = student.lse, student.lse_rest, teacher.lse, teacher.lse_rest
        launch_divergence(*scores, None, labels, whole, own_loss, own_mean, beta, *options)
        total, total_mean = gathered(torch.stack((own_loss, own_mean)), shard.processes()).sum(0)
    else:
        first, second = (teacher, student) if kind == FORWARD else (student, teacher)
        total = total_mean = first.mean(next(parts) + (first.logp - second.logp)).clamp(min=0)
    results = [(loss, total), (mean, total_mean)]
    for row, found in zip(rows, merged, strict=True):
        results += zip(row[2:], (found.lse, found.entropy, found.argmax, found.lse_rest), strict=True)
    for out, result in results:
        if out is not None:
            out[order] = result.where(counts, -1 if out.dtype == torch.int64 else 0)
