"""Divergence from a teacher that is known by its most likely words only."""

import torch
from torch import Tensor

from liger_like._loss_checks import Items, _checked, _checked_mask, _mean
from liger_like.runtime.checks import require, require_number


def _with_rest(logp: Tensor) -> Tensor:
    """Return ``logp`` [B, S, K] and, as a last column, the log-probability of all other words together."""
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logp.dtype).eps)
    return torch.cat((logp, rest.log()), -1)


def topk_divergence(
    logprob_at: Tensor, teacher_logprob: Tensor, mask: Tensor, *, beta: float = 0.0, num_items: Items = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence of a student from a teacher whose K most likely words are known, per token.

    ``teacher_logprob`` [B, S, K] holds the log-probabilities of words, -inf for no word, and ``logprob_at`` [B, S, K]
    the student's of the same words, which ``fused_linear_logprobs`` returns for their ``ids``. All other words count as
    one, of the probability that is left, at least 10^-7 in fp32. So the divergence is a lower bound of the one over the
    whole vocabulary. ``beta`` is that of ``fused_linear_divergence`` (arXiv:2306.13649). ``num_items`` counts tokens.
    The metric "teacher_mass" is the mean probability of the teacher's words.
    """
    beta = require_number("beta", beta, "must be in [0, 1]", 0.0, 1.0)
    require("logprob_at", logprob_at)
    mask = _checked_mask("mask", mask, tuple(logprob_at.shape[:-1]))
    shape = tuple(logprob_at.shape)
    p, q = _checked("logprob_at", logprob_at, shape), _checked("teacher_logprob", teacher_logprob, shape).detach()
    no_word = q.isneginf() | ~mask[..., None]
    p, q = (_with_rest(t.masked_fill(no_word, -torch.inf)) for t in (p, q))
    if 0 < beta < 1:
        m = ((1 - beta) * p.exp() + beta * q.exp()).log()
        losses = beta * _expected(q, q - m) + (1 - beta) * _expected(p, p - m)
    else:
        losses = _expected(p, p - q) if beta else _expected(q, q - p)
    count, mass = mask.sum(), (q[..., :-1].exp().sum(-1)).masked_fill(~mask, 0)
    return _mean(losses.masked_fill(~mask, 0), num_items, count), {"teacher_mass": _mean(mass, None, count)}


def _expected(logp: Tensor, values: Tensor) -> Tensor:
    """Return the sum of the probabilities of ``logp`` times ``values``, over words that have a probability."""
    return (logp.exp() * values.masked_fill(logp.isneginf(), 0)).sum(-1)
