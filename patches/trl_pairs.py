"""Run TRL's ORPO and CPO on log-probabilities of tokens: they read the logits only for these and for their mean."""

import hashlib
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch has it

from liger_like.patches import UnrecognisedError
from liger_like.patches.forms import code_of
from liger_like.patches.lm_head import TOKENS

METHOD = "concatenated_forward"
READERS = (METHOD, "get_batch_logps", "get_batch_loss_metrics")  # the methods that see the logits


def known_as(cls: type[Any]) -> str:
    """Return "orpo" or "cpo" if the methods of ``cls`` are those of TRL 1.16, else an empty string.

    Raises UnrecognisedError if they have no source.
    """
    lines = [line for name in READERS for line in code_of(getattr(cls, name, None))]
    return KNOWN.get(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16], "")


def refusal(trainer: Any) -> str:
    """Return why ``concatenated_forward`` of a trainer is left alone; empty if ``methods`` can replace it."""
    try:
        kind = known_as(type(trainer))
    except UnrecognisedError as error:
        return str(error)
    if not kind:
        return f"{METHOD} of {type(trainer).__name__} is not recognised"
    if getattr(trainer, "is_encoder_decoder", False):
        return "the model is an encoder and decoder"
    return "the model has a router's loss" if getattr(trainer, "aux_loss_enabled", False) else ""


def methods(trainer: Any) -> dict[str, Any]:
    """Return the method to set on a trainer for which ``refusal`` is empty."""
    return {METHOD: MethodType(FORWARDS[known_as(type(trainer))], trainer)}


def _orpo(self: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return mean log-probabilities [B] of chosen and rejected, mean logits [B, S - 1], and the chosen's NLL []."""
    _ids, attended, labels, logprob, mean_logit = _numbers(self, model, batch, self.padding_value)
    chosen, counted = len(batch["chosen_labels"]), labels[:, 1:] != -100
    nll = _mean(logprob[:chosen], attended[:chosen, 1:] == 1)
    means = (logprob * counted).sum(-1) / counted.sum(-1)
    return means[:chosen], means[chosen:], mean_logit[:chosen, :-1], mean_logit[chosen:, :-1], nll


def _cpo(self: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return log-probabilities [B] of chosen and rejected, mean logits [B, S] of each, and the chosen's NLL []."""
    ids, _, labels, logprob, mean_logit = _numbers(self, model, batch, self.pad_token_id)
    chosen, counted = len(batch["chosen_labels"]), labels[:, 1:] != -100
    nll = _mean(logprob[:chosen], counted[:chosen]) if self.cpo_alpha else torch.zeros((), device=ids.device)
    sums = (logprob * counted).sum(-1)
    if self.loss_type in ("ipo", "simpo"):
        sums = sums / counted.sum(-1)
    return sums[:chosen], sums[chosen:], mean_logit[:chosen], mean_logit[chosen:], nll


def _mean(logprob: Tensor, counted: Tensor) -> Tensor:
    return -(logprob * counted).sum() / counted.sum()


def _numbers(self: Any, model: Any, batch: dict[str, Any], padding: int) -> tuple[Tensor, ...]:
    """Return ids [2 B, S], attention mask, labels, the log-probabilities [2 B, S - 1] of ids and mean logits [2 B, S].

    TRL's mean of the logits counts all positions, so padding is predicted, too.
    """
    both = self.concatenated_inputs(
        batch, is_encoder_decoder=False, padding_value=padding, device=self.accelerator.device
    )
    ids, attended = both["concatenated_input_ids"], both["concatenated_attention_mask"]
    asked = {"outputs": ("logprob", "mean_logit"), "shifted": True}
    targets = F.pad(ids[:, 1:], (0, 1))
    tokens = model(ids, attention_mask=attended, use_cache=False, labels=targets, **{TOKENS: asked})
    return ids, attended, both["concatenated_labels"], tokens.logprob[:, :-1], tokens.mean_logit


FORWARDS = {"orpo": _orpo, "cpo": _cpo}
# digests of the code of READERS, without comments, annotations of arguments and docstrings
KNOWN = {"3b7874f5cbbf55d2": "orpo", "b2cb0a678c4cca5f": "cpo"}
