"""Losses of post-training, as plain functions of the log-probabilities of tokens.

``logprob`` and its like are [B, S], as ``fused_linear_logprobs`` returns them; ``mask`` [B, S] is true for the tokens
of the completion, and the other numbers do not matter. Reference log-probabilities of pairs are [B, S] too, or [B] if
they are summed over the completion already. Maths is in fp32, or in float64 for float64 arguments.

Each function returns the loss [] and a dict of metrics [] without gradient. The loss is a sum divided by ``num_items``,
the number of sequences, pairs or tokens that the function names. None stands for the number in the batch. With
accumulation over several batches, pass the number in all of them: then the gradients of the batches add up to the
gradient of one large batch. Where several processes average their gradients, pass that number divided by the number of
processes.

``token_policy`` and ``token_dft`` are losses of single tokens, for ``fused_linear_token_loss``: a loss that is a sum
over tokens then takes one pass over the head.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_like import _token_losses as terms
from liger_like._loss_checks import Items, _checked, _checked_mask, _length, _mean, _summed, _tokens
from liger_like._token_losses import token_dft, token_policy
from liger_like._topk_divergence import topk_divergence
from liger_like.runtime.checks import require, require_choice, require_number, require_positive

__all__ = [
    "bradley_terry",
    "cpo",
    "dapo",
    "dft",
    "dpo",
    "grpo",
    "gspo",
    "kto",
    "orpo",
    "ppo",
    "simpo",
    "token_dft",
    "token_policy",
    "topk_divergence",
]

Result = tuple[Tensor, dict[str, Tensor]]


def _pair(chosen: Any, rejected: Any, chosen_mask: Any, rejected_mask: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed log-probabilities of both completions and their masks."""
    masks = []
    for name, value, mask in (("chosen", chosen, chosen_mask), ("rejected", rejected, rejected_mask)):
        require(name, value)
        masks.append(_checked_mask(f"{name}_mask", mask, tuple(value.shape)))
    if masks[0].shape[0] != masks[1].shape[0]:
        raise ValueError(f"rejected must have {masks[0].shape[0]} sequences as chosen has, got {masks[1].shape[0]}")
    first, second = masks
    return _summed("chosen", chosen, first), _summed("rejected", rejected, second), first, second


def _preferences(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of rewards [B] of both completions."""
    chosen, rejected = chosen.detach(), rejected.detach()
    accuracy = (chosen > rejected).to(chosen.dtype)
    values = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": accuracy}
    return {f"reward_{name}": value.mean() for name, value in values.items()}


def _nll(chosen: Any, mask: Tensor, nll_mask: Any, num_items: Items) -> Tensor:
    """Return the mean negative log-probability of the tokens of ``nll_mask``, of those of ``mask`` for None.

    Each batch weighs as its pairs do, so ``num_items``, a number of pairs, scales the mean.
    """
    mask = mask if nll_mask is None else _checked_mask("nll_mask", nll_mask, tuple(mask.shape))
    nll = -_tokens("chosen", chosen, mask).sum() / mask.sum().clamp(min=1)
    return nll if num_items is None else _mean(nll * mask.shape[0], num_items, 0)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    num_items: Items = None,
) -> Result:
    """Return the loss of direct preference optimisation, per pair (Rafailov et al., arXiv:2305.18290).

    ``kind``: "sigmoid"; "hinge" (SLiC, arXiv:2305.10425); "ipo" (arXiv:2310.12036), of log-ratios per token; "robust"
    (arXiv:2403.00409), for labels of which the share ``label_smoothing``, below 0.5, is wrong.
    """
    beta = require_positive("beta", beta)
    require_choice("kind", kind, ("sigmoid", "hinge", "ipo", "robust"))
    wrong = require_number("label_smoothing", label_smoothing, "must be in [0, 0.5)", 0.0, math.nextafter(0.5, 0.0))
    if wrong and kind != "robust":
        raise ValueError(f"label_smoothing is for kind='robust' only, got kind={kind!r}")
    chosen, rejected, chosen_mask, rejected_mask = _pair(chosen, rejected, chosen_mask, rejected_mask)
    chosen_ratio = chosen - _summed("ref_chosen", ref_chosen, chosen_mask)
    rejected_ratio = rejected - _summed("ref_rejected", ref_rejected, rejected_mask)
    gap = beta * (chosen_ratio - rejected_ratio)
    if kind == "sigmoid":
        losses = -logsigmoid(gap)
    elif kind == "hinge":
        losses = (1 - gap).relu()
    elif kind == "ipo":
        per_token = chosen_ratio / _length(chosen_mask) - rejected_ratio / _length(rejected_mask)
        losses = (per_token - 1 / (2 * beta)).square()
    else:
        losses = (wrong * logsigmoid(-gap) - (1 - wrong) * logsigmoid(gap)) / (1 - 2 * wrong)
    return _mean(losses, num_items, len(losses)), _preferences(beta * chosen_ratio, beta * rejected_ratio)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    num_items: Items = None,
) -> Result:
    """Return the SimPO loss, per pair, of mean log-probabilities and a margin ``gamma`` (arXiv:2405.14734)."""
    beta, gamma = require_positive("beta", beta), require_number("gamma", gamma)
    chosen, rejected, chosen_mask, rejected_mask = _pair(chosen, rejected, chosen_mask, rejected_mask)
    rewards = beta * chosen / _length(chosen_mask), beta * rejected / _length(rejected_mask)
    losses = -logsigmoid(rewards[0] - rewards[1] - gamma)
    return _mean(losses, num_items, len(losses)), _preferences(*rewards)


def cpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    nll_mask: Tensor | None = None,
    num_items: Items = None,
) -> Result:
    """Return the loss of contrastive preference optimisation, per pair (Xu et al., arXiv:2401.08417).

    ``alpha`` weighs the mean negative log-probability of the tokens of ``nll_mask`` [B, S] in ``chosen``, or of those
    of ``chosen_mask``; a mask that holds the prompt needs its log-probabilities in ``chosen``.
    """
    beta, alpha = require_positive("beta", beta), require_number("alpha", alpha)
    total, rejected, chosen_mask, rejected_mask = _pair(chosen, rejected, chosen_mask, rejected_mask)
    losses = -logsigmoid(beta * (total - rejected))
    nll = _nll(chosen, chosen_mask, nll_mask, num_items)
    metrics = _preferences(beta * total, beta * rejected) | {"nll": nll.detach()}
    return _mean(losses, num_items, len(losses)) + alpha * nll, metrics


def _log_odds(mean: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of mean log-probabilities, accurate near 0 and far below; finite for p = 1."""
    # both branches are differentiated, so each gets numbers of its own range only
    split, most = -math.log(2), -torch.finfo(mean.dtype).tiny
    close, far = mean.clamp(split, most), mean.clamp(max=split)
    return mean - torch.where(mean > split, (-torch.expm1(close)).log(), torch.log1p(-far.exp()))


def orpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float = 0.1,
    nll_mask: Tensor | None = None,
    num_items: Items = None,
) -> Result:
    """Return the loss of odds-ratio preference optimisation, per pair (Hong et al., arXiv:2403.07691).

    This is the mean negative log-probability of the tokens of ``nll_mask`` [B, S] in ``chosen``, or of those of
    ``chosen_mask``, and ``beta`` times the odds-ratio loss of mean log-probabilities.
    """
    beta = require_number("beta", beta)
    total, rejected, chosen_mask, rejected_mask = _pair(chosen, rejected, chosen_mask, rejected_mask)
    means = total / _length(chosen_mask), rejected / _length(rejected_mask)
    log_odds = _log_odds(means[0]) - _log_odds(means[1])
    nll = _nll(chosen, chosen_mask, nll_mask, num_items)
    metrics = _preferences(beta * means[0], beta * means[1])
    metrics |= {"nll": nll.detach(), "log_odds_ratio": log_odds.detach().mean()}
    return nll - beta * _mean(logsigmoid(log_odds), num_items, len(log_odds)), metrics


def kto(
    logprob: Tensor,
    ref_logprob: Tensor,
    mask: Tensor,
    desirable: Tensor,
    *,
    kl: float | Tensor = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_items: Items = None,
) -> Result:
    """Return the loss of Kahneman-Tversky optimisation, per sequence (Ethayarajh et al., arXiv:2402.01306).

    ``desirable`` [B] holds bools. ``kl``: the reference point, a number or a tensor of estimates such as log-ratios of
    mismatched completions; their mean is used, without gradient, and 0 for a negative one.
    """
    beta = require_positive("beta", beta)
    weights = (
        require_number("desirable_weight", desirable_weight),
        require_number("undesirable_weight", undesirable_weight),
    )
    require("logprob", logprob)
    mask = _checked_mask("mask", mask, tuple(logprob.shape))
    if not isinstance(desirable, Tensor) or desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool, got {getattr(desirable, 'dtype', type(desirable).__name__)}")
    if desirable.shape != mask.shape[:1]:
        raise ValueError(f"desirable must have shape {[mask.shape[0]]}, got {list(desirable.shape)}")
    ratio = _summed("logprob", logprob, mask) - _summed("ref_logprob", ref_logprob, mask)
    if not isinstance(kl, Tensor):
        kl = ratio.new_full((), require_number("kl", kl))  # new_tensor waits for the GPU
    point = kl.detach().to(ratio).mean().clamp(min=0)
    sign = torch.where(desirable, 1.0, -1.0).to(ratio)
    weight = torch.full_like(ratio, weights[0]).where(desirable, weights[1])
    losses = weight * (1 - (beta * sign * (ratio - point)).sigmoid())
    reward = beta * ratio.detach()
    metrics = {"kl": point}
    for name, which in (("desirable", desirable), ("undesirable", ~desirable)):
        metrics[f"reward_{name}"] = (reward * which).sum() / which.sum().clamp(min=1)
    return _mean(losses, num_items, len(losses)), metrics


def _policy(
    logprob: Any, advantage: Any, mask: Any, old_logprob: Any, ref_logprob: Any, epsilon: tuple[Any, Any], beta: Any,
    by_sequence: bool,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the clipped losses [B, S] of a policy, 0 outside the mask, the mask, and metrics."""
    low, high = terms.checked_epsilons(*epsilon)
    beta = require_number("beta", beta)
    require("logprob", logprob)
    mask = _checked_mask("mask", mask, tuple(logprob.shape))
    logprob = _tokens("logprob", logprob, mask)
    if isinstance(advantage, Tensor) and advantage.dim() == 1:
        advantage = _checked("advantage", advantage, tuple(mask.shape[:1])).unsqueeze(1)
    else:
        advantage = _tokens("advantage", advantage, mask)
    log_ratio = logprob - (logprob.detach() if old_logprob is None else _tokens("old_logprob", old_logprob, mask))
    if by_sequence:
        log_ratio = (log_ratio.sum(1) / _length(mask)).unsqueeze(1)
    losses, ratio = terms.clipped(log_ratio, advantage, low, high)
    outside = {"low": (ratio < 1 - low) & (advantage < 0), "high": (ratio > 1 + high) & (advantage > 0)}
    counted = mask if losses.shape == mask.shape else torch.ones_like(mask[:, :1])
    metrics = {
        f"clipped_{name}": _mean(share.to(ratio) * counted, None, counted.sum()) for name, share in outside.items()
    }
    if beta:
        if ref_logprob is None:
            raise ValueError("ref_logprob must be given for a beta that is not 0")
        kl = terms.divergence(logprob, _tokens("ref_logprob", ref_logprob, mask))
        metrics["kl"] = _mean(kl.detach(), None, mask.sum())
        losses = losses + beta * kl
    return losses.expand(mask.shape).masked_fill(~mask, 0), mask, metrics


def grpo(
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    old_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    num_items: Items = None,
) -> Result:
    """Return the loss of group-relative policy optimisation: the mean over tokens, per sequence (arXiv:2402.03300).

    ``advantage`` is [B] or [B, S]. ``old_logprob`` None stands for the values of ``logprob``, as in the first step
    after sampling. Importance ratios are clipped to [1 - ``epsilon``, 1 + ``epsilon_high``] (None: ``epsilon``).
    ``beta`` weighs an estimate of the divergence from the reference.
    """
    losses, mask, metrics = _policy(
        logprob, advantage, mask, old_logprob, ref_logprob, (epsilon, epsilon_high), beta, by_sequence=False
    )
    return _mean(losses.sum(1) / _length(mask), num_items, len(mask)), metrics


def gspo(
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    old_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    beta: float = 0.0,
    num_items: Items = None,
) -> Result:
    """Return the loss of group sequence policy optimisation, per sequence (arXiv:2507.18071).

    As ``grpo``, but with one importance ratio for each sequence, the geometric mean of its tokens' ratios.
    """
    losses, mask, metrics = _policy(
        logprob, advantage, mask, old_logprob, ref_logprob, (epsilon, epsilon_high), beta, by_sequence=True
    )
    return _mean(losses.sum(1) / _length(mask), num_items, len(mask)), metrics


def dapo(
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    old_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.28,
    beta: float = 0.0,
    num_items: Items = None,
) -> Result:
    """Return the DAPO loss, per token: that of ``grpo``, whose tokens all weigh the same (arXiv:2503.14476).

    With ``num_items`` of B times a constant length, and equal epsilons, this is Dr. GRPO's loss (arXiv:2503.20783).
    """
    losses, mask, metrics = _policy(
        logprob, advantage, mask, old_logprob, ref_logprob, (epsilon, epsilon_high), beta, by_sequence=False
    )
    return _mean(losses, num_items, mask.sum()), metrics


def ppo(
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    old_logprob: Tensor,
    *,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    epsilon: float = 0.2,
    value_epsilon: float = 0.2,
    value_weight: float = 0.5,
    num_items: Items = None,
) -> Result:
    """Return the clipped loss of proximal policy optimisation, per token (Schulman et al., arXiv:1707.06347).

    ``values``, ``old_values`` and ``returns``, [B, S] each, add ``value_weight`` times half the squared error of the
    values, or of values that differ from the old ones by at most ``value_epsilon``, if that is larger.
    """
    weight = require_number("value_weight", value_weight)
    reach = require_number("value_epsilon", value_epsilon, "must be finite and not negative", 0.0)
    losses, mask, metrics = _policy(
        logprob, advantage, mask, old_logprob, None, (epsilon, None), 0.0, by_sequence=False
    )
    loss = _mean(losses, num_items, mask.sum())
    if values is None:
        return loss, metrics
    new, old, goal = (
        _tokens(name, value, mask)
        for name, value in (("values", values), ("old_values", old_values), ("returns", returns))
    )
    near = old + (new - old).clamp(-reach, reach)
    error = _mean(torch.maximum((new - goal).square(), (near - goal).square()) / 2, num_items, mask.sum())
    return loss + weight * error, metrics | {"policy_loss": loss.detach(), "value_loss": error.detach()}


def dft(logprob: Tensor, mask: Tensor, *, num_items: Items = None) -> Result:
    """Return the loss of dynamic fine-tuning, per token: -log p weighed by p without gradient (arXiv:2508.05629)."""
    require("logprob", logprob)
    mask = _checked_mask("mask", mask, tuple(logprob.shape))
    logprob = _tokens("logprob", logprob, mask)
    losses, count = terms.weighed_by_probability(logprob), mask.sum()
    return _mean(losses, num_items, count), {"nll": _mean(-logprob.detach(), None, count)}


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None = None,
    center: float = 0.0,
    num_items: Items = None,
) -> Result:
    """Return the loss of a reward model, per pair, of rewards [B]: -log sigmoid(chosen - rejected - margin).

    ``margin`` [B] is that of Llama 2 (arXiv:2307.09288); ``center`` weighs the squared sum of both rewards
    (arXiv:2312.09244).
    """
    center = require_number("center", center)
    require("chosen", chosen)
    if chosen.dim() != 1:
        raise ValueError(f"chosen must have shape [B], got {list(chosen.shape)}")
    shape = tuple(chosen.shape)
    chosen, rejected = _checked("chosen", chosen, shape), _checked("rejected", rejected, shape)
    gap = chosen - rejected if margin is None else chosen - rejected - _checked("margin", margin, shape)
    losses = -logsigmoid(gap) + center * (chosen + rejected).square()
    return _mean(losses, num_items, len(losses)), _preferences(chosen, rejected)
