"""Loss over logits whose words (columns of the vocabulary) are sharded over processes.

Each process runs the kernel for a whole vocabulary on its own words. This gives each row's lse over these words, and
the log-probability of the label if it is among them. One all-gather of a few numbers per row then lets every process
compute the results over all words. The gradient of a process's own logits needs only the lse over all words.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from liger_like.ops.losses.row_kernels import NOTHING, launch_fwd
from liger_like.ops.losses.rows import Options, scores_ref, top_words
from liger_like.runtime.autograd import once_differentiable

SHARD_SCHEMA = "str group, SymInt first_word, SymInt words, bool reduce_dx, bool released, SymInt width"
IGNORED = -(2**62)  # the ignore_index within a shard: never a label
MISSING = torch.inf  # log-probability of a word of another process: no word's own
RESULTS = ("loss", "logprob", "lse", "entropy", "argmax", "lse_rest", "mean", "squares")
KEPT = "kept "  # prefix of numbers of the logits that are kept
# torch 2.13 renamed these functions
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shard(NamedTuple):
    """Vocabulary shard of a process: its words start at ``first_word``, of ``words`` in the whole group.

    ``reduce_dx``: all processes have the same x, so its gradient is summed over them. ``released``: FSDP may free the
    weight before the backward, so a scalar loss's backward must not read it. ``width``: words of a process on average,
    rounded up, from which all processes choose the same chunks.
    """

    group: str = ""
    first_word: int = 0
    words: int = 0
    reduce_dx: bool = False
    released: bool = False
    width: int = 0

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


def on_all(flag: Tensor, shard: Shard) -> Tensor:
    """Return whether the bool ``flag`` [] is True in all processes, which then take the same branch."""
    count = flag.to(torch.int32)
    dist.all_reduce(count, dist.ReduceOp.MIN, group=shard.processes())
    return count


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
    rows: Sequence[Tensor | None],
    options: Options,
    order: Tensor,
    shard: Shard,
    more: Sequence[Tensor | None] = NOTHING,
    topk: int = 0,
    kept: Tensor | None = None,
    kept_rows: Tensor | None = None,
) -> None:
    """Fill ``rows`` and ``more`` as ``launch_fwd`` does, over the words of all processes, from one all-gather.

    ``class_weight`` [words] is whole. The last ``topk`` of the words in ``more`` are filled, too, with those of the
    largest scores. ``kept``: the first rows of ``z`` as they are kept; their lse, lse_rest and entropy go to
    ``kept_rows`` [3, T].
    """
    M, V = z.shape
    label = target[order].long()
    counts = (label != options.ignore_index) & (label >= 0) & (label < shard.words)
    own = label - shard.first_word
    # clamp another process's label, whose result is not used; keep a label out of range for the kernel to report
    near = torch.where(counts, own.clamp(0, V - 1), label.masked_fill(label == options.ignore_index, IGNORED))
    mean, squares, words, logprob_at = more
    ids = label.new_empty((M, 0)) if words is None else words[order, : words.shape[1] - topk] - shard.first_word
    weights = None if class_weight is None else class_weight[shard.first_word : shard.first_word + V]
    # with label smoothing 1 the kernel's loss is the mean of w (lse - score) over its words
    local = Options(IGNORED, float(options.label_smoothing > 0), 0.0, *options[3:])
    results = dict(zip(RESULTS, (*rows, mean, squares), strict=True))
    wanted = {name for name, row in results.items() if row is not None}
    stats = _stats(z, near, torch.cat([own[:, None], ids], 1), weights, local, wanted, shard, topk)
    if kept is not None:
        rounded = dict(zip(("lse", "lse_rest", "entropy"), z.new_zeros((3, M), dtype=torch.float32), strict=True))
        lse, lse_rest, entropy = rounded.values()
        launch_fwd(kept, near, None, (None, None, lse, entropy, None, lse_rest), local)
        stats |= {KEPT + name: row for name, row in rounded.items() if name in stats}
    parts = _exchanged(stats, shard)
    merged = _merged(parts, label, class_weight, options, shard)
    for name in wanted:
        row = results[name]
        row[order] = merged[name][:, 0].where(counts, -1 if row.dtype == torch.int64 else 0)
    if kept is not None:
        k = len(kept)
        kept_rows[:, order[:k]] = torch.cat(_total(parts, KEPT)[:3], 1)[:k].where(counts[:k, None], 0).t()
    if words is None:
        return
    at = [merged["at"]]
    if topk:
        words[order, -topk:] = merged["words"].where(counts[:, None], -1)
        at.append(merged["best"])
    logprob_at[order] = torch.cat(at, 1).where(counts[:, None], 0)


def _stats(
    z: Tensor,
    label: Tensor,
    own: Tensor,
    weights: Tensor | None,
    options: Options,
    wanted: set[str],
    shard: Shard,
    topk: int,
) -> dict[str, Tensor]:
    """Return the numbers [M] or [M, K] of this process's words that the other processes need.

    ``own`` [M, 1 + K] holds the labels and the ids as columns of ``z`` [M, V]; those outside it are other processes'.
    """
    M, V = z.shape
    loss, logprob, lse, entropy, lse_rest, mean, squares = z.new_empty((7, M), dtype=torch.float32)
    best, ids = z.new_empty(M, dtype=torch.int64), own[:, 1:].contiguous()
    at = torch.empty_like(ids, dtype=torch.float32)
    asked = {"entropy": entropy, "argmax": best, "mean": mean, "squares": squares}
    entropy_row, best_row, *more = (row if name in wanted else None for name, row in asked.items())
    more += [ids, at] if ids.numel() else [None, None]
    launch_fwd(z, label, weights, (loss, logprob, lse, entropy_row, best_row, lse_rest), options, None, more)
    found = torch.cat([logprob[:, None], at], 1)
    stats = {"lse": lse, "lse_rest": lse_rest, "logprob": found.where((own >= 0) & (own < V), MISSING)}
    if options.label_smoothing:
        stats["cost"] = V * loss
        stats["weight"] = torch.full_like(lse, V) if weights is None else weights.float().sum().expand(M)
    stats |= {name: asked[name] for name in ("entropy", "squares") if name in wanted}
    if "mean" in wanted:
        stats["sum"] = V * mean
    if topk or "argmax" in wanted:
        few = min(topk, V)
        top = top_words(z, few, options.logit_scale) if topk else best.clamp(min=0)[:, None]
        score = z.gather(1, top).float() * options.logit_scale
        stats["score"] = pad(score, (0, topk - few), value=-torch.inf)
        stats["word"] = pad((top + shard.first_word).int(), (0, topk - few), value=shard.words).view(torch.float32)
    return stats


def _exchanged(stats: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """Return the ``stats`` [M] or [M, K] of all processes, [R, M, 1] or [R, M, K]."""
    columns = [t if t.dim() == 2 else t[:, None] for t in stats.values()]
    parts = gathered(torch.cat(columns, 1), shard.processes()).split([t.shape[1] for t in columns], -1)
    return dict(zip(stats, parts, strict=True))


def total_lse(lses: Tensor, lse_rests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse and lse_rest over the words of all R processes, and each process's log-probability, [R, ...].

    ``lses`` and ``lse_rests`` [R, ...] are those of each process's own words.
    """
    top = lses.amax(0)
    shift = top.masked_fill(top == -torch.inf, 0)
    log_total = (lses - shift + lse_rests).exp().sum(0).log()
    lse = shift + log_total
    lse_rest = _rounding_error(shift, log_total, lse)
    return lse, lse_rest, (lses - lse) + (lse_rests - lse_rest)


def mean_over(logp: Tensor, values: Tensor) -> Tensor:
    """Return the sum over processes of ``values`` [R, ...], weighted by their probabilities: a NaN stays."""
    p = logp.exp()
    return (p * values).where(p != 0, 0).sum(0)


def _total(parts: dict[str, Tensor], kind: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lse, lse_rest and entropy [M, 1], and the log-probability [R, M, 1] of each process's words together."""
    lse, lse_rest, logp = total_lse(parts[kind + "lse"], parts[kind + "lse_rest"])
    entropies = parts.get(kind + "entropy")
    return lse, lse_rest, lse if entropies is None else mean_over(logp, entropies - logp), logp


def _merged(
    parts: dict[str, Tensor], label: Tensor, class_weight: Tensor | None, options: Options, shard: Shard
) -> dict[str, Tensor]:
    """Return the ``RESULTS`` [M, 1] that ``parts`` allow, log-probabilities "at" ids, and the best words with theirs.

    ``parts`` [R, M, K] are the numbers of all processes.
    """
    lse, lse_rest, entropy, logp = _total(parts)
    results = {"lse": lse, "lse_rest": lse_rest, "entropy": entropy}
    nowhere = logp == -torch.inf  # all words of a process have the score -inf, so its own lse says nothing
    found = parts["logprob"]
    found = (found + logp).masked_fill(nowhere, -torch.inf).where(found != MISSING, 0).sum(0)
    results["logprob"], results["at"] = found.tensor_split([1], 1)
    hot = 1 - options.label_smoothing
    if class_weight is not None:
        hot = hot * class_weight[label.clamp(0, shard.words - 1)].float()[:, None]
    results["loss"] = options.z_loss * lse.square() - hot * results["logprob"]
    if options.label_smoothing:
        costs = (parts["cost"] - parts["weight"] * logp).sum(0)
        results["loss"] += options.label_smoothing / shard.words * costs
    if "sum" in parts:
        results["mean"] = parts["sum"].sum(0) / shard.words
    if "squares" in parts:
        results["squares"] = (parts["squares"] + 2 * logp).masked_fill(nowhere, -torch.inf).logsumexp(0)
    if "score" in parts:
        # in the order of their words, the first of equal scores has the lowest word
        words, by_word = parts["word"].contiguous().view(torch.int32).movedim(0, 1).flatten(1).sort(dim=1)
        scores = parts["score"].movedim(0, 1).flatten(1).gather(1, by_word)
        raw, z = scores_ref(scores, options._replace(logit_scale=1.0))
        order = raw.sort(dim=1, descending=True, stable=True).indices[:, : parts["score"].shape[2]]
        results["words"] = words.gather(1, order).long()
        results["argmax"] = results["words"][:, :1]
        results["best"] = (z.gather(1, order) - lse) - lse_rest
    return results


def _rounding_error(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return a + b - ``total`` for the rounded sum ``total`` of a and b; 0 where ``total`` is infinite."""
    b_part = total - a
    return ((a - (total - b_part)) + (b - b_part)).masked_fill(total.isinf(), 0)
