"""Losses of single tokens: for ``fused_linear_token_loss``, and as the terms of sums in ``liger_like.losses``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_like.runtime.checks import require_number


def checked_epsilons(epsilon: Any, epsilon_high: Any) -> tuple[float, float]:
    """Return how far importance ratios may fall below 1 and rise above it (None: as far). Raise unless valid."""
    low = require_number("epsilon", epsilon, "must be finite and not negative", 0.0)
    if epsilon_high is None:
        return low, low
    return low, require_number("epsilon_high", epsilon_high, "must be finite and not negative", 0.0)


def clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the clipped losses of a policy, and the importance ratios."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage), ratio


def divergence(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Return an unbiased estimate of the divergence of a policy from a reference, from the policy's samples."""
    gap = ref_logprob - logprob
    return torch.expm1(gap) - gap


def weighed_by_probability(logprob: Tensor) -> Tensor:
    """Return -log p weighed by p without gradient."""
    return -logprob.detach().exp() * logprob


def token_policy(
    *, epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0
) -> Callable[..., Tensor]:
    """Return a function of the loss of each token of a policy, as ``fused_linear_token_loss`` takes it.

    It takes (tokens, advantage, old_logprob=None, ref_logprob=None), tensors of equal shapes, with ``tokens.logprob``.
    The options are those of ``grpo``. The losses of ``dapo`` and ``ppo`` are the mean of it over tokens
    (arXiv:2503.14476, arXiv:1707.06347), that of ``grpo`` the mean over tokens of a sequence and then over sequences
    (arXiv:2402.03300).
    """
    low, high = checked_epsilons(epsilon, epsilon_high)
    beta = require_number("beta", beta)

    def loss_fn(
        tokens: Any, advantage: Tensor, old_logprob: Tensor | None = None, ref_logprob: Tensor | None = None
    ) -> Tensor:
        logprob = tokens.logprob
        losses, _ = clipped(logprob - (logprob.detach() if old_logprob is None else old_logprob), advantage, low, high)
        if not beta:
            return losses
        if ref_logprob is None:
            raise ValueError("ref_logprob must be given for a beta that is not 0")
        return losses + beta * divergence(logprob, ref_logprob)

    return loss_fn


def token_dft(tokens: Any) -> Tensor:
    """Return the loss of each token by dynamic fine-tuning, as ``fused_linear_token_loss`` takes it.

    That is -log p weighed by p without gradient, for the ``logprob`` of ``tokens``; ``dft`` is its mean over tokens
    (arXiv:2508.05629).
    """
    return weighed_by_probability(tokens.logprob)
