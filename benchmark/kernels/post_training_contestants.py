"""The contestants of ``post_training``: ours, those of TRL, verl, Liger and CCE, and plain torch, by case.

Each builds a step on ``Data``. A per-token function takes x [T, H], weight [V, H], target [T] and whether the entropy
is asked for, and returns the log-probability and the entropy of each token, 0 for ignored tokens. No library is
imported before its step is built or run.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import liger_like
from benchmark.common.measure import Step
from benchmark.common.processes import GPU
from benchmark.kernels.losses import IGNORED, three_gemms
from benchmark.kernels.losses_report import GEMMS

BETA_KL, EPSILON, BETA_DPO = 0.04, 0.2, 0.1
JSD = 0.5
CHUNK = 1024  # rows
TRL_WORDS = 32768  # columns of TRL's tiles, as its trainers set them
ALL = 2**40  # bytes for logits: more than any shape has
TokenFunction = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
Results = dict[str, Tensor]


class Data(NamedTuple):
    """Operands of one shape; ``per_token`` [T]: old and reference log-probabilities, advantage, weight.

    ``g`` and ``h`` [T] are the upstream gradients of log-probability and entropy.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    sequences: int
    g: Tensor
    h: Tensor
    teacher_x: Tensor
    teacher_weight: Tensor
    per_token: tuple[Tensor, ...] = ()

    def kept(self) -> Tensor:
        return self.target != IGNORED


Contestant = Callable[[Data], Step]


# ------------------------------------------------------------------------------------------------ losses


def grpo(logprob: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of each token: clipped policy gradient and the k3 estimate of the divergence."""
    ratio, gap = (logprob - old).exp(), reference - logprob
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    return (policy + BETA_KL * (gap.exp() - gap - 1)) * weight


def dpo(logprob: Tensor, sequences: int) -> Tensor:
    """Return the mean loss of pairs, the chosen sequences before the rejected ones, without a reference model."""
    chosen, rejected = logprob.view(sequences, -1).sum(-1).chunk(2)
    return -F.logsigmoid(BETA_DPO * (chosen - rejected)).mean()


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of log-probabilities: forward KL for beta 0, else generalised JSD."""
    if not beta:
        return (teacher.exp() * (teacher - student)).sum(-1)
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    of_student = (student.exp() * (student - mixture)).sum(-1)
    return (1 - beta) * of_student + beta * (teacher.exp() * (teacher - mixture)).sum(-1)


# ---------------------------------------------------------------------------------- per-token functions


def ours(keep_logits: int = 0, rounded: bool = False) -> TokenFunction:
    """Return our function, with logits in fp32 or rounded to the dtype of x."""

    def call(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        outputs = ("logprob", "entropy")[: 1 + entropy]
        options = {"keep_logits": keep_logits, "logits_dtype": x.dtype if rounded else torch.float32}
        tokens = liger_like.fused_linear_logprobs(x, weight, target, outputs=outputs, **options)
        return tokens.logprob, tokens.entropy

    return call


def of_kept(function: TokenFunction) -> TokenFunction:
    """Return ``function`` on the rows that count, for functions that know no ignored labels."""

    def call(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        kept = target != IGNORED
        if kept.all():
            return function(x, weight, target, entropy)
        results = function(x[kept], weight, target[kept], entropy)
        logprob, entropies = (None if t is None else t.new_zeros(len(x)).masked_scatter(kept, t) for t in results)
        return logprob, entropies  # type: ignore[return-value]

    return call


def trl(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ("entropy",) if entropy else ()
    logprob, entropies, *_ = ChunkedLogProbFunction.apply(x, weight, None, target, 1.0, TRL_WORDS, None, 1.0, outputs)
    return logprob, entropies


def verl(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Call verl's kernels, which always compute the entropy and its gradient."""
    logprob, entropies = verl_function()(x, weight, target)
    return logprob, entropies


@functools.cache
def verl_function() -> Any:
    """Return verl's function without a run of verl's packages, which import Ray and much else: the wheel suffices."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations  # type: ignore[union-attr, misc]
    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        sys.modules.setdefault(name, package)
    return importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy


def liger(name: str) -> TokenFunction:
    """Return Liger's function for post-training, by its kernels or by its fallback in torch."""

    def call(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

        options = (1,) if name == "LigerFusedLinearScaledCrossEntropyFunction" else ()
        out = getattr(module, name).apply(x, weight, target, 1.0, IGNORED, *options, entropy)
        nll, entropies = out if entropy else (out, None)
        return -nll, entropies

    return call


def liger_selective(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, None]:
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return _ChunkedSelectiveLogProbFunction.apply(x, weight, target, None, 1.0, 4096), None


def cce(**options: Any) -> TokenFunction:
    def call(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, None]:
        from cut_cross_entropy import linear_cross_entropy

        return -linear_cross_entropy(x, weight, target, reduction="none", **options), None

    return call


def whole_logits(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Compute all logits in the dtype of x, and their softmax in fp32."""
    logp = F.linear(x, weight).float().log_softmax(-1)
    logprob = logp.gather(-1, target[:, None])[:, 0]
    return logprob, -(logp.exp() * logp).sum(-1) if entropy else None


def in_chunks(function: TokenFunction) -> TokenFunction:
    """Return ``function`` of one chunk of rows at a time, which the backward runs again."""

    def call(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        rows = zip(x.split(CHUNK), target.split(CHUNK), strict=True)
        parts = [checkpoint(function, a, weight, b, entropy, use_reentrant=False) for a, b in rows]
        logprob, entropies = ([t for t in several if t is not None] for several in zip(*parts, strict=True))
        return torch.cat(logprob), torch.cat(entropies) if entropies else None

    return call


def torch_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, None]:
    nll: Tensor = F.linear_cross_entropy(
        x, weight, target, reduction="none", options=torch.nn.LinearCrossEntropyOptions()
    )
    return -nll, None


# ------------------------------------------------------------------------------------------------- steps


def finished(loss: Tensor, leaves: tuple[Tensor, ...], **outputs: Tensor | None) -> Results:
    """Run the backward; return loss, outputs and gradients."""
    gradients = zip(("dx", "dw"), torch.autograd.grad(loss, leaves), strict=False)
    return {"loss": loss.detach(), **{n: t.detach() for n, t in outputs.items() if t is not None}, **dict(gradients)}


def per_token(function: TokenFunction, entropy: bool = False, frozen: bool = False) -> Contestant:
    """Return a contestant that sends random gradients to the log-probabilities, and to the entropies if asked for."""

    def build(data: Data) -> Step:
        weight, leaves = (data.weight.detach(), (data.x,)) if frozen else (data.weight, (data.x, data.weight))

        def step() -> Results:
            logprob, entropies = function(data.x, weight, data.target, entropy)
            loss = (logprob.float() * data.g).sum()
            if entropies is not None:
                loss = loss + (entropies.float() * data.h).sum()
            return finished(loss, leaves, logprob=logprob, entropy=entropies)

        return step

    return build


def loss_of(compute: Callable[[Data], Tensor]) -> Contestant:
    """Return a contestant whose step computes a loss and its gradients."""
    return lambda data: lambda: finished(compute(data), (data.x, data.weight))


def grpo_by(function: TokenFunction) -> Contestant:
    return loss_of(lambda d: grpo(function(d.x, d.weight, d.target, False)[0].float(), *d.per_token).sum())


def dpo_by(function: TokenFunction) -> Contestant:
    return loss_of(lambda d: dpo(function(d.x, d.weight, d.target, False)[0].float(), d.sequences))


def our_token_loss(data: Data) -> Tensor:
    def loss_fn(tokens: liger_like.TokenOutputs, *numbers: Tensor) -> Tensor:
        assert tokens.logprob is not None
        return grpo(tokens.logprob, *numbers)

    op: Any = liger_like.fused_linear_token_loss  # type: ignore[attr-defined]
    loss: Tensor = op(data.x, data.weight, data.target, loss_fn, *data.per_token)
    return loss


def liger_grpo(data: Data) -> Tensor:
    """Call Liger's loss of a batch; it divides by the number of tokens that count, as the weights of ours do."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=BETA_KL, compiled=GPU, use_ref_model=True, loss_type="dapo")
    old, reference, advantage, _ = (t.view(data.sequences, -1) for t in data.per_token)
    x = data.x.view(data.sequences, -1, data.x.shape[-1])
    target, mask = (t.view(data.sequences, -1) for t in (data.target.clamp(min=0), data.kept().long()))
    options = {"ref_per_token_logps": reference, "old_per_token_logps": old}
    return loss(x, data.weight, target, mask, advantage[:, 0], **options)[0]  # type: ignore[no-any-return]


def liger_dpo(data: Data) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=BETA_DPO, compiled=GPU, use_ref_model=False)
    x, target = (t.view(data.sequences, -1, *t.shape[1:]) for t in (data.x, data.target))
    return loss(data.weight, x, target)[0]  # type: ignore[no-any-return]


def our_divergence(data: Data, beta: float) -> Tensor:
    mask = None if data.kept().all() else data.kept()
    op: Any = liger_like.fused_linear_divergence  # type: ignore[attr-defined]
    loss: Tensor = op(data.x, data.weight, data.teacher_x, data.teacher_weight, mask, beta=beta)
    return loss


def rows_of(data: Data) -> tuple[Tensor, Tensor]:
    """Return the rows of student and teacher that count."""
    kept = data.kept()
    return (data.x, data.teacher_x) if kept.all() else (data.x[kept], data.teacher_x[kept])


def trl_divergence(data: Data, beta: float) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    student, teacher = rows_of(data)
    heads = (student, data.weight, None, teacher, data.teacher_weight, None)
    return ChunkedDivergenceFunction.apply(*heads, beta, 1.0, 1.0, None, 1.0, None)[0].mean()  # type: ignore[no-any-return]


def liger_jsd(data: Data, beta: float) -> Tensor:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    labels = None if data.kept().all() else data.target
    loss = LigerFusedLinearJSD(jsd_beta=beta)
    return loss(data.x, data.weight, data.teacher_x, data.teacher_weight, labels)  # type: ignore[no-any-return]


def torch_divergence(data: Data, beta: float) -> Tensor:
    """Compute the logits of one chunk of rows at a time, and again in the backward."""

    def of_chunk(x: Tensor, teacher_x: Tensor) -> Tensor:
        pairs = (x, data.weight), (teacher_x, data.teacher_weight)
        return divergence(*(F.linear(rows, head).float().log_softmax(-1) for rows, head in pairs), beta)

    rows = zip(*(t.split(CHUNK) for t in rows_of(data)), strict=True)
    return torch.cat([checkpoint(of_chunk, a, b, use_reentrant=False) for a, b in rows]).mean()


# ------------------------------------------------------------------------------------------------- cases

compiled = torch.compile(whole_logits, dynamic=False)
KEEP = "liger_like, logits kept"
WITH_ENTROPY: dict[str, TokenFunction] = {
    "liger_like": ours(),
    "liger_like, logits in 16 bits": ours(rounded=True),
    "TRL": of_kept(trl),
    "verl": of_kept(verl),
    "Liger": liger("LigerFusedLinearScaledCrossEntropyFunction"),
    "Liger, torch": liger("_FusedLinearPPOFallbackFunction"),
    "torch, chunks": of_kept(in_chunks(whole_logits)),
    "torch.compile, chunks": of_kept(in_chunks(compiled)),
}
PER_TOKEN: dict[str, TokenFunction] = {
    **WITH_ENTROPY,
    "Liger, GRPO": of_kept(liger_selective),
    "CCE": cce(filter_eps="auto"),
    "CCE, exact": cce(filter_eps=None),
    **(
        {"torch, linear_cross_entropy": of_kept(torch_linear_cross_entropy)}
        if hasattr(F, "linear_cross_entropy")
        else {}
    ),
}
KEPT: dict[str, TokenFunction] = {
    "liger_like": ours(keep_logits=ALL),
    "torch, whole logits": of_kept(whole_logits),
    "torch.compile, whole logits": of_kept(compiled),
}
LOSSES: dict[str, TokenFunction] = {name: PER_TOKEN[name] for name in ("TRL", "torch.compile, chunks")}
DIVERGENCES = {
    "liger_like": our_divergence,
    "TRL": trl_divergence,
    "Liger": liger_jsd,
    "torch, chunks": torch_divergence,
}


def floor(data: Data) -> Step:
    return three_gemms({"x": data.x, "weight": data.weight, "target": data.target}, rows=min(2 * CHUNK, len(data.x)))


def distilled(beta: float) -> dict[str, Contestant]:
    return {name: loss_of(partial(function, beta=beta)) for name, function in DIVERGENCES.items()}


CASES: dict[str, Mapping[str, Contestant]] = {
    "logprob": {name: per_token(f) for name, f in PER_TOKEN.items()},
    "logprob + entropy": {name: per_token(f, entropy=True) for name, f in WITH_ENTROPY.items()},
    "logits kept": {name: per_token(f) for name, f in KEPT.items()},
    "frozen head": {
        name: per_token(PER_TOKEN[name], frozen=True)
        for name in ("liger_like", "TRL", "Liger, torch", "Liger, GRPO", "CCE", "torch, chunks")
    },
    "GRPO step": {
        "liger_like": loss_of(our_token_loss),
        "liger_like, composed": grpo_by(ours()),
        **{name: grpo_by(f) for name, f in LOSSES.items()},
        "Liger": loss_of(liger_grpo),
    },
    "DPO step": {
        "liger_like": dpo_by(ours()),
        KEEP: dpo_by(ours(keep_logits=ALL)),
        **{name: dpo_by(f) for name, f in LOSSES.items()},
        "Liger": loss_of(liger_dpo),
    },
    "forward KL": distilled(0.0),
    "JSD": distilled(JSD),
}
CASES = {case: {GEMMS: floor, **contestants} for case, contestants in CASES.items()}
