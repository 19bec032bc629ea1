"""The losses of ``liger_like.losses`` equal those of TRL's trainers on the same numbers."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid

import liger_like
from liger_like import losses

B, S = 6, 9
GROUPS = ("chosen", "rejected")


def drawn(shape=(B, S), scale=1.0):
    return (-torch.rand(shape, dtype=torch.float64) * scale - 0.01).requires_grad_()


def masks(rows=B):
    """Masks [rows, S] of completions of different lengths, after prompts."""
    lengths = torch.arange(rows) % (S - 2) + 1
    starts = torch.arange(rows) % 2 + 1
    at = torch.arange(S)
    return (at >= starts[:, None]) & (at < (starts + lengths)[:, None])


def pairs():
    torch.manual_seed(0)
    mask = {"chosen": masks(), "rejected": masks().flip(0)}
    new, ref = ({name: drawn() for name in GROUPS} for _ in range(2))
    return new, {f"ref_{name}": t.detach() for name, t in ref.items()}, {f"{name}_mask": t for name, t in mask.items()}


def summed(logprob, mask):
    return (logprob * mask).sum(1)


def check(found, expected, leaves):
    """The losses and the gradients agree."""
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (found, expected)]
    torch.testing.assert_close(*grads)
    assert all(grad.any() for grad in grads[0])


class Trainer:
    """The attributes of a TRL trainer that its loss reads, without a model."""

    def __init__(self, **settings):
        same = lambda t, *args, **kwargs: t  # noqa: E731
        self.__dict__.update(settings)
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), gather=same, gather_for_metrics=same, reduce=same, num_processes=1
        )
        self._metrics = {"train": defaultdict(list)}
        self._total_train_tokens, self._tp_size = 0, 1
        self.model = SimpleNamespace(training=True)
        self.aux_loss_enabled = False


def fused_output(logprob):
    zeros = torch.zeros_like(logprob)
    fields = {"entropy": zeros, "mean_logits": zeros, "log_sum_sq_probs": zeros, "is_top1": zeros > 0}
    return SimpleNamespace(log_probs=logprob, **fields)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "robust"])
@pytest.mark.parametrize("sums", [False, True])
def test_dpo(kind, sums):
    from trl import DPOTrainer

    new, ref, mask = pairs()
    if sums:
        ref = {name: summed(t, mask[f"{name.removeprefix('ref_')}_mask"]) for name, t in ref.items()}
    wrong = 0.1 if kind == "robust" else 0.0
    found, metrics = losses.dpo(**new, **ref, **mask, beta=0.3, kind=kind, label_smoothing=wrong)
    both = torch.cat(list(mask.values()))
    ids = torch.zeros(2 * B, S + 1, dtype=torch.int64)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids + 1,
        "completion_mask": torch.cat((both[:, :1] & False, both), 1).int(),
    }
    for name in GROUPS:
        logps = ref[f"ref_{name}"]
        inputs[f"ref_{name}_logps"] = logps if sums else summed(logps, mask[f"{name}_mask"])
    trainer = Trainer(
        beta=0.3, loss_types=[kind], loss_weights=[1.0], label_smoothing=wrong, ld_alpha=None, use_weighting=False,
        f_divergence_type="reverse_kl", precompute_ref_logps=True,
    )  # fmt: skip
    model = lambda **kwargs: fused_output(torch.cat(list(new.values())) * both)  # noqa: E731
    check(found, DPOTrainer._compute_loss(trainer, model, inputs, False), list(new.values()))
    trl = trainer._metrics["train"]
    for name, theirs in (
        ("chosen", "chosen"),
        ("rejected", "rejected"),
        ("margin", "margins"),
        ("accuracy", "accuracies"),
    ):
        assert float(metrics[f"reward_{name}"]) == pytest.approx(trl[f"rewards/{theirs}"][0])


@pytest.mark.parametrize("name", ["cpo", "simpo"])
def test_cpo_and_simpo(name):
    from trl.experimental.cpo import CPOTrainer

    new, _, mask = pairs()
    sums = [summed(new[group], mask[f"{group}_mask"]) for group in GROUPS]
    trainer = Trainer(
        beta=0.4, alpha=0.0, label_smoothing=0.0, simpo_gamma=0.7, loss_type="sigmoid" if name == "cpo" else name
    )
    if name == "simpo":
        found, metrics = losses.simpo(**new, **mask, beta=0.4, gamma=0.7)
        sums = [total / mask[f"{group}_mask"].sum(1) for group, total in zip(GROUPS, sums, strict=True)]
    else:
        found, metrics = losses.cpo(**new, **mask, beta=0.4, alpha=0.5)
    expected, chosen, rejected = CPOTrainer.cpo_loss(trainer, *sums)
    expected = expected.mean()
    if name == "cpo":
        expected = expected - 0.5 * new["chosen"][mask["chosen_mask"]].mean()
        torch.testing.assert_close(metrics["nll"], -new["chosen"][mask["chosen_mask"]].mean().detach())
    check(found, expected, list(new.values()))
    torch.testing.assert_close(metrics["reward_margin"], (chosen - rejected).mean())


@pytest.mark.parametrize("whole", [False, True])
def test_orpo(whole):
    from trl.experimental.orpo import ORPOTrainer

    new, _, mask = pairs()
    new = {"chosen": drawn(scale=0.4), "rejected": drawn(scale=4.0)}  # on both sides of log(1 / 2)
    nll_mask = torch.ones(B, S, dtype=torch.bool) if whole else None
    found, metrics = losses.orpo(**new, **mask, beta=0.4, nll_mask=nll_mask)
    means = [summed(new[group], mask[f"{group}_mask"]) / mask[f"{group}_mask"].sum(1) for group in GROUPS]
    log_odds = [m - (1 - m.exp()).log() for m in means]
    nll = -new["chosen"][mask["chosen_mask"] if nll_mask is None else nll_mask].mean()
    check(found, nll - 0.4 * logsigmoid(log_odds[0] - log_odds[1]).mean(), list(new.values()))
    theirs, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(Trainer(beta=0.4), *means)  # in fp32
    assert float(found) == pytest.approx(float(nll - theirs.mean()), rel=1e-6)
    assert float(metrics["reward_margin"]) == pytest.approx(float((chosen - rejected).mean()), rel=1e-5)
    torch.testing.assert_close(metrics["log_odds_ratio"], (log_odds[0] - log_odds[1]).mean().detach())


def test_odds_of_certain_and_of_hopeless_completions():
    """Gradients stay finite where one of the two formulas would not."""
    chosen = torch.tensor([[0.0], [-1e-6], [-800.0]], requires_grad=True)
    mask = torch.ones(3, 1, dtype=torch.bool)
    loss, _ = losses.orpo(chosen, torch.full((3, 1), -1.0), mask, mask)
    (grad,) = torch.autograd.grad(loss, chosen)
    assert loss.isfinite()
    assert grad.isfinite().all()


@pytest.mark.parametrize("kl", [0.3, -0.3, "estimates"])
@pytest.mark.parametrize("number", [0, 2, B])
def test_kto(kl, number):
    from trl import KTOTrainer

    new, ref, mask = drawn(), drawn().detach(), masks()
    desirable = torch.arange(B) < number
    estimates = (
        torch.tensor([0.9, -0.1], dtype=torch.float64) if kl == "estimates" else torch.tensor([kl], dtype=torch.float64)
    )
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    given = estimates if kl == "estimates" else kl
    found, metrics = losses.kto(new, ref, mask, desirable, kl=given, beta=0.2, **weights)
    ids = torch.zeros(B, S + 1, dtype=torch.int64)
    completion = torch.cat((mask[:, :1] & False, mask), 1).int()
    inputs = {"input_ids": ids, "attention_mask": ids + 1, "completion_mask": completion, "label": desirable}
    inputs |= {"ref_logps": summed(ref, mask), "ref_KL_logps": torch.zeros_like(estimates)}
    trainer = Trainer(beta=0.2, loss_type="kto", precompute_ref_logps=True, calculate_KL=True, **weights)
    trainer._compute_kl_logps = lambda *args: estimates
    model = lambda **kwargs: fused_output(new * mask)  # noqa: E731
    check(found, KTOTrainer._compute_loss(trainer, model, inputs, False), [new])
    assert float(metrics["kl"]) == pytest.approx(trainer._metrics["train"]["kl"][0])
    for name, theirs, count in (("desirable", "chosen", number), ("undesirable", "rejected", B - number)):
        if count:
            assert float(metrics[f"reward_{name}"]) == pytest.approx(trainer._metrics["train"][f"rewards/{theirs}"][0])


def policy_inputs():
    torch.manual_seed(5)
    new = drawn()
    old, ref = ((new + 0.4 * torch.randn_like(new)).detach() for _ in range(2))
    return new, torch.randn(B, dtype=torch.float64), masks(), old, ref


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("first", [False, True])
def test_policies(name, beta, first):
    from trl import GRPOTrainer

    new, advantage, mask, old, ref = policy_inputs()
    old = None if first else old
    low, high = (0.02, 0.03) if name == "gspo" else (0.2, 0.28)
    fn = {"dr_grpo": losses.dapo}.get(name) or getattr(losses, name)
    options = {"num_items": B * 20} if name == "dr_grpo" else {}
    found, metrics = fn(new, advantage, mask, old, ref, epsilon=low, epsilon_high=high, beta=beta, **options)
    trainer = Trainer(
        beta=beta, epsilon_low=low, epsilon_high=high, loss_type="grpo" if name == "gspo" else name,
        importance_sampling_level="sequence" if name == "gspo" else "token", top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, max_completion_length=20, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (new, torch.zeros_like(new), None)
    ids = torch.zeros(B, S, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask.int()}
    inputs |= {"advantages": advantage, "ref_per_token_logps": ref, "num_items_in_batch": mask.sum()}
    inputs |= {} if first else {"old_per_token_logps": old}
    check(found, GRPOTrainer._compute_loss(trainer, None, inputs), [new])
    trl = trainer._metrics["train"]
    for ours, theirs in (("clipped_low", "clip_ratio/low_mean"), ("clipped_high", "clip_ratio/high_mean")):
        assert float(metrics[ours]) == pytest.approx(trl[theirs][0])
    assert first or metrics["clipped_low"] + metrics["clipped_high"] > 0
    assert ("kl" in metrics) == bool(beta)
    if beta:
        assert float(metrics["kl"]) == pytest.approx(trl["kl"][0])


def test_advantages_of_tokens():
    new, advantage, mask, old, _ = policy_inputs()
    for fn in (losses.grpo, losses.gspo, losses.dapo):
        spread = advantage[:, None].expand(B, S)
        torch.testing.assert_close(fn(new, spread, mask, old)[0], fn(new, advantage, mask, old)[0])


def test_ppo():
    new, _, mask, old, _ = policy_inputs()
    advantage = torch.randn(B, S, dtype=torch.float64)
    values, old_values, returns = (torch.randn(B, S, dtype=torch.float64).requires_grad_(i == 0) for i in range(3))
    found, metrics = losses.ppo(
        new,
        advantage,
        mask,
        old,
        values=values,
        old_values=old_values,
        returns=returns,
        value_weight=0.3,
        value_epsilon=0.4,
    )
    ratio = (new - old).exp()
    policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))[mask].mean()
    near = torch.minimum(torch.maximum(values, old_values - 0.4), old_values + 0.4)
    value = torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].mean() / 2
    check(found, policy + 0.3 * value, [new, values])
    torch.testing.assert_close(metrics["value_loss"], value.detach())
    alone, _ = losses.ppo(new, advantage, mask, old)
    check(alone, policy, [new])


def test_dft():
    new, mask = drawn(), masks()
    found, metrics = losses.dft(new, mask)
    check(found, -(new.exp().detach() * new)[mask].mean(), [new])
    torch.testing.assert_close(metrics["nll"], -new[mask].mean().detach())


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_bradley_terry(margin, center):
    from trl import RewardTrainer

    chosen, rejected = drawn((B,)), drawn((B,), 3.0)
    inputs = {"attention_mask": torch.ones(2 * B, S)} | (
        {"margin": torch.rand(B, dtype=torch.float64)} if margin else {}
    )
    found, metrics = losses.bradley_terry(chosen, rejected, margin=inputs.get("margin"), center=center)
    trainer = Trainer(args=SimpleNamespace(center_rewards_coefficient=center))
    model = lambda **kwargs: SimpleNamespace(logits=torch.cat((chosen, rejected))[:, None])  # noqa: E731
    check(found, RewardTrainer.compute_loss(trainer, model, inputs), [chosen, rejected])
    assert float(metrics["reward_accuracy"]) == pytest.approx(trainer._metrics["train"]["accuracy"][0])


def calls():
    """Every loss as a function of the rows to take and of num_items, with the leaves, the masks and what it counts."""
    new, ref, mask = pairs()
    logprob, advantage, completion, old, other = policy_inputs()
    desirable = torch.arange(B) < 2
    take = lambda named, i: {name: t[i] for name, t in named.items()}  # noqa: E731
    pair = lambda fn, given: lambda i, n: fn(**take(new | given | mask, i), num_items=n)[0]  # noqa: E731
    policy = lambda fn: lambda i, n: fn(logprob[i], advantage[i], completion[i], old[i], other[i], beta=0.1, num_items=n)[0]  # noqa: E501, E731  # fmt: skip
    tokens = int(completion.sum())
    return {
        "dpo": (pair(losses.dpo, ref), [*new.values()], B),
        "simpo": (pair(losses.simpo, {}), [*new.values()], B),
        "kto": (
            lambda i, n: losses.kto(logprob[i], old[i], completion[i], desirable[i], num_items=n)[0], [logprob], B,
        ),
        "grpo": (policy(losses.grpo), [logprob], B),
        "gspo": (policy(losses.gspo), [logprob], B),
        "dapo": (policy(losses.dapo), [logprob], tokens),
        "ppo": (
            lambda i, n: losses.ppo(
                logprob[i], old[i], completion[i], other[i], values=logprob[i], old_values=old[i], returns=other[i],
                num_items=n,
            )[0],
            [logprob], tokens,
        ),
        "dft": (lambda i, n: losses.dft(logprob[i], completion[i], num_items=n)[0], [logprob], tokens),
        "bradley_terry": (
            lambda i, n: losses.bradley_terry(logprob[i, 0], old[i, 0], num_items=n)[0], [logprob], B,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_batches_add_up_to_a_large_one(name):
    call, leaves, items = calls()[name]
    whole = call(slice(None), None)
    for number in (items, torch.tensor(items), torch.tensor([float(items)])):
        parts = call(slice(0, 2), number) + call(slice(2, None), number)
        torch.testing.assert_close(parts, whole)
        grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (parts, whole)]
        torch.testing.assert_close(*grads)


def test_numbers_are_not_rounded_to_fp32():
    torch.manual_seed(0)
    logprob, mask, desirable = drawn(), masks(), torch.arange(B) < 2
    loss = losses.kto(logprob, logprob.detach(), mask, desirable, desirable_weight=0.1, undesirable_weight=0.3)[0]
    torch.testing.assert_close(loss, loss.new_full((), (0.1 * 2 + 0.3 * 4) / 2 / B), rtol=1e-14, atol=0)
    whole, part = (losses.dft(logprob, mask, num_items=number)[0] for number in (1, 0.3))
    torch.testing.assert_close(part, whole / 0.3, rtol=1e-14, atol=0)


@pytest.mark.gpu
def test_no_loss_waits_for_the_gpu():
    x, mask = torch.rand(B, S, device="cuda").neg(), masks().cuda()
    pair, desirable = (x, x, mask, mask), mask[:, 2]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses.dpo(x, x, x, x, mask, mask, num_items=3)
        for fn in (losses.simpo, losses.cpo, losses.orpo):
            fn(*pair, num_items=3)
        losses.kto(x, x, mask, desirable)
        for fn in (losses.grpo, losses.gspo, losses.dapo):
            fn(x, x, mask, x, x, beta=0.1)
        losses.ppo(x, x, mask, x, values=x, old_values=x, returns=x)
        losses.dft(x, mask, num_items=3)
        losses.bradley_terry(x[0], x[1], margin=x[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_batches_with_equal_numbers_of_tokens_add_up(name):
    """The mean over tokens of a part of the loss is a batch's own."""
    new, _, mask = pairs()
    mask = {key: torch.ones_like(t) for key, t in mask.items()}
    whole = getattr(losses, name)(**new, **mask)[0]
    rows = slice(0, 2), slice(2, None)
    parts = [getattr(losses, name)(**{key: t[i] for key, t in (new | mask).items()}, num_items=B)[0] for i in rows]
    torch.testing.assert_close(sum(parts), whole)


def test_numbers_outside_the_mask_do_not_matter():
    """They may be NaN, and get a gradient of 0."""
    logprob, advantage, mask, old, ref = (t.detach() for t in policy_inputs())
    wild = [t.masked_fill(~mask, float("nan")) for t in (logprob, old, ref)]
    wild[0].requires_grad_()
    for fn in (losses.grpo, losses.gspo, losses.dapo):
        found, want = (
            fn(wild[0], advantage, mask, *wild[1:], beta=0.1)[0],
            fn(logprob, advantage, mask, old, ref, beta=0.1)[0],
        )
        torch.testing.assert_close(found, want)
        (grad,) = torch.autograd.grad(found, wild[0])
        assert not grad[~mask].any()
        assert grad.isfinite().all()
    pair = [wild[0], wild[1], wild[2], wild[0].detach(), mask, mask]
    assert losses.dpo(*pair)[0].isfinite()


def test_empty_completions_give_zero():
    none = torch.zeros(2, 3, dtype=torch.bool)
    x = torch.randn(2, 3, requires_grad=True)
    for loss, _ in (losses.grpo(x, x[:, 0].detach(), none), losses.dapo(x, x.detach(), none), losses.dft(x, none)):
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


def test_losses_of_the_op(device):
    """The gradient of a loss goes through the head."""
    x, w = torch.randn(4, 8, 16, device=device, requires_grad=True), torch.randn(40, 16, device=device)
    y = torch.randint(0, 40, (4, 8), device=device).masked_fill(torch.rand(4, 8, device=device) < 0.3, -100)
    logprob = liger_like.fused_linear_logprobs(x, w, y).logprob
    advantage = torch.randn(4, device=device)
    loss, metrics = losses.grpo(logprob, advantage, y != -100)
    logp = torch.nn.functional.linear(x, w).log_softmax(-1).gather(-1, y.clamp(0)[..., None])[..., 0]
    expected, _ = losses.grpo(logp, advantage, y != -100)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))
    assert loss.dtype == torch.float32
    assert not any(metric.requires_grad or metric.dim() for metric in metrics.values())


X, M = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            r"chosen_mask must have the shape .* \[2, 3\], got \[2, 2\]",
            lambda: losses.simpo(X, X, M[:, :2], M),
        ),
        (ValueError, "rejected must have 2 sequences as chosen has, got 1", lambda: losses.cpo(X, X[:1], M, M[:1])),
        (ValueError, r"ref_chosen must have shape \[2\], got \[3\]", lambda: losses.dpo(X, X, X[0], X, M, M)),
        (ValueError, r"ref_rejected must have shape \[2, 3\]", lambda: losses.dpo(X, X, X, X[:, :2], M, M)),
        (ValueError, "kind must be one of", lambda: losses.dpo(X, X, X, X, M, M, kind="dpo")),
        (ValueError, "label_smoothing is for kind='robust'", lambda: losses.dpo(X, X, X, X, M, M, label_smoothing=0.1)),
        (
            ValueError,
            r"label_smoothing must be in \[0, 0.5\)",
            lambda: losses.dpo(X, X, X, X, M, M, label_smoothing=0.5),
        ),
        (ValueError, "beta must be positive", lambda: losses.simpo(X, X, M, M, beta=0.0)),
        (ValueError, "nll_mask must have the shape", lambda: losses.orpo(X, X, M, M, nll_mask=M[0])),
        (TypeError, "desirable must be bool", lambda: losses.kto(X, X, M, M[:, 0].int())),
        (ValueError, r"desirable must have shape \[2\], got \[3\]", lambda: losses.kto(X, X, M, M[0])),
        (TypeError, "mask must be a tensor", lambda: losses.grpo(X, X, None)),
        (TypeError, "logprob must be floating point", lambda: losses.grpo(M, X, M)),
        (ValueError, r"advantage must have shape \[2\], got \[3\]", lambda: losses.grpo(X, X[0], M)),
        (ValueError, r"old_logprob must have shape \[2, 3\]", lambda: losses.gspo(X, X, M, X[:1])),
        (ValueError, "ref_logprob must be given", lambda: losses.dapo(X, X, M, beta=0.1)),
        (ValueError, "epsilon must be finite and not", lambda: losses.grpo(X, X, M, epsilon=-0.1)),
        (ValueError, "epsilon_high must be finite", lambda: losses.grpo(X, X, M, epsilon_high=float("inf"))),
        (TypeError, "old_values must be a tensor", lambda: losses.ppo(X, X, M, X, values=X)),
        (ValueError, r"num_items must be a number or", lambda: losses.dft(X, M, num_items=X[0])),
        (ValueError, "num_items must be finite and not", lambda: losses.dft(X, M, num_items=-1)),
        (ValueError, r"mask must have the shape \[B, S\]", lambda: losses.dft(X[0], M[0])),
        (ValueError, r"chosen must have shape \[B\], got \[2, 3\]", lambda: losses.bradley_terry(X, X)),
        (ValueError, r"margin must have shape \[3\]", lambda: losses.bradley_terry(X[0], X[0], margin=X)),
    ],
)
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
