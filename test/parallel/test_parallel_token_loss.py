"""Losses of tokens summed over a head whose words are spread over processes equal those of one process that has all."""

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_parallel_logprobs import ALL, BOTH, CUT, B, H, S, V, counted, draw

from liger_like import fused_linear_token_loss
from liger_like.losses import token_policy
from liger_like.parallel import vocab_parallel_token_loss

POLICY = token_policy(beta=0.1)


def of_all(tokens, scale, value):
    """A function of everything that a loss can be differentiated by, and of the other results."""
    loss = scale * (tokens.logprob + 0.1 * tokens.lse).square() + 0.3 * tokens.entropy * value[:, 0]
    return loss + (tokens.logprob_at * value).sum(-1) + tokens.correct * value[:, 2]


CASES = {  # "sequence": whether x is sharded by its tokens
    "policy": {"loss": "policy", "lora": "A", "sequence": BOTH},
    "all": {**ALL, "ids": 3, "loss": "all", "bias": True, "lora": "u", "sequence": BOTH},
    "frozen": {"loss": "policy", "train": ("x",), "sequence": (False,)},
}


def inputs_of(options, dtype):
    options = dict(options)
    loss, sequence = options.pop("loss"), options.pop("sequence")
    leaves, target, options = draw(options, dtype)
    g = torch.Generator().manual_seed(2)
    advantage, old, reference = (torch.randn(B, S, generator=g) for _ in range(3))
    value = torch.randn(B, S, 3, generator=g).requires_grad_()
    per_token = (advantage, value) if loss == "all" else (advantage, old - 8, reference - 12)
    return leaves, target, options, of_all if loss == "all" else POLICY, per_token, sequence


def total_and_gradients(function, leaves, target, loss_fn, per_token, options, **more):
    operands = {name: leaves[name] for name in ("bias",) if name in leaves}
    if "A" in leaves:
        operands["lora"] = leaves["A"], leaves["B"], 0.7
    if "u" in leaves:
        operands["lora"] = leaves["u"], leaves["B"]
    out = function(leaves["x"], leaves["weight"], target, loss_fn, *per_token, **operands, **options, **more)
    total, results = out if isinstance(out, tuple) else (out, ())
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    trained |= {f"per_token {i}": t for i, t in enumerate(per_token) if t.requires_grad}
    grads = torch.autograd.grad(total * 0.3, [*trained.values()])
    return total.detach(), results, dict(zip(trained, grads, strict=True))


def every_case(rank, dtype):
    tolerance = 4e-3 if dtype == torch.float16 else 1e-5
    start, end = (0, CUT, V)[rank : rank + 2]
    for case, options in CASES.items():
        leaves, target, options, loss_fn, per_token, sequence = inputs_of(options, dtype)
        if dtype != torch.float64:
            options["chunk_rows"] = 3
        total, results, grads = total_and_gradients(
            fused_linear_token_loss, leaves, target, loss_fn, per_token, options
        )
        for sharded in sequence:
            tokens = slice(rank * S // 2, (rank + 1) * S // 2) if sharded else slice(None)
            parts = {"x": (slice(None), tokens), "u": (slice(None), tokens), "A": slice(None)}
            part = lambda name, t, parts=parts: t if "per_token" in name else t[parts.get(name, slice(start, end))]  # noqa: E731  # fmt: skip
            own = {n: part(n, t).detach().clone().requires_grad_(t.requires_grad) for n, t in leaves.items()}
            words = {"group": dist.group.WORLD, "vocab_start": start, "vocab_size": V, "sequence_sharded": sharded}
            got = total_and_gradients(vocab_parallel_token_loss, own, target, loss_fn, per_token, options, **words)
            near = {"rtol": tolerance, "atol": tolerance, "msg": lambda m, case=case: f"{case}: {m}"}
            torch.testing.assert_close(got[0], total, **near)
            torch.testing.assert_close(got[1], results, **near)
            for name, grad in got[2].items():
                error, norm = (grad - part(name, grads[name])).norm(), grads[name].norm()
                assert error <= tolerance * norm, (case, sharded, name, error, norm)


def collectives(rank):
    """Two chunks of 4 tokens need an exchange and a sum of dx each, and the backward none."""
    x, weight = torch.randn(B, S, H, requires_grad=True), torch.randn(8, H, requires_grad=True)
    target = torch.randint(16, (B, S))
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        loss = vocab_parallel_token_loss(
            x, weight, target, lambda tokens: -tokens.logprob, group=dist.group.WORLD, chunk_rows=4
        )
        assert calls == [("all_gather", 4 * 3), ("all_reduce", 4 * H)] * 2, calls
        loss.backward()
        assert len(calls) == 4


def errors(rank):
    x, weight, target = torch.randn(3, H), torch.randn(4, H), torch.zeros(6, dtype=torch.int64)
    options = {"group": dist.group.WORLD, "sequence_sharded": True}
    with pytest.raises(ValueError, match=r"per_token\[1\] must have 2 times the tokens of x \[3, 16\], got \[3\]"):
        vocab_parallel_token_loss(x, weight, target, POLICY, target.float(), target[:3].float(), **options)
    with pytest.raises(TypeError, match=r"per_token\[0\] must be a Tensor, got float"):
        vocab_parallel_token_loss(x, weight, target, POLICY, 1.0, **options)
    with pytest.raises(TypeError, match="loss_fn must be a function, got str"):
        vocab_parallel_token_loss(x, weight, target[:3], "grpo", group=dist.group.WORLD)


def every_check(rank):
    every_case(rank, torch.float32)
    every_case(rank, torch.float16)
    every_case(rank, torch.float64)
    collectives(rank)
    errors(rank)


def test_token_loss():
    """In one process group, since starting processes takes longer than the cases."""
    run(every_check, 2)
