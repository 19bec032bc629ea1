"""FLOPs that torch's FlopCounterMode counts for ops whose products it does not see."""

import pytest
import torch
from tiny_models import batch, tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import liger_like


def flops(call, *leaves):
    """Return the FLOPs of a forward, and of its backward."""
    for leaf in leaves:
        leaf.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = call()
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), leaves)
    return forward.get_total_flops(), backward.get_total_flops()


def test_attention_counts_what_torchs_does(device):
    q, k, v = (torch.randn(2, s, h, d, device=device) for s, h, d in ((20, 4, 16), (28, 2, 16), (28, 2, 8)))
    shapes = (2, 4, 20, 16), (2, 4, 28, 16), (2, 4, 28, 8)
    call = lambda: liger_like.flash_attention(q, k, v, causal=True)  # noqa: E731
    assert flops(call, q, k, v) == (sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, 20, 8), *shapes))
    score = 2 * 2 * 4 * 20 * 28
    for leaves, each in (((v,), 16 + 8), ((q,), 16 + 8 + 16), ((k, v), 16 + 8 + 16 + 8)):
        for t in (q, k, v):
            t.requires_grad_(False)
        assert flops(call, *leaves)[1] == score * each


def test_packed_sequences_count_by_themselves(device):
    q, k, v = (torch.randn(60, h, 16, device=device) for h in (4, 2, 2))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((0, 20, 50), (0, 10, 60)))
    call = lambda: liger_like.flash_attention_varlen(q, k, v, cu_q, cu_k, 30, 50)  # noqa: E731
    scores = 2 * 4 * (20 * 10 + 30 * 50)
    assert flops(call, q, k, v) == (scores * 32, scores * 5 * 16)


def test_packed_sequences_of_unknown_lengths(device):
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, v = (torch.randn(60, h, 16, device=device) for h in (4, 2, 2))
        cu = torch.empty(3, dtype=torch.int32, device=device)
        liger_like.flash_attention_varlen(q, k, v, cu, cu, 30, 50)
    assert counter.get_total_flops() == 2 * 4 * 2 * 30 * 50 * 32


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trained", ["x", "weight", "x weight", "u b", "x u"])
def test_the_loss_counts_the_products_of_a_plain_one(trained, recompute, device):
    """One made again is one more; those of a gradient count where they are made."""
    sizes = {"x": (12, 64), "weight": (96, 64), "u": (12, 8), "b": (96, 8)}
    given = {name: torch.randn(size, device=device) for name, size in sizes.items()}
    target = torch.randint(96, (12,), device=device)
    lora = (given["u"], given["b"]) if "u" in trained else None

    def plain():
        z = nn.functional.linear(given["x"], given["weight"])
        return nn.functional.cross_entropy(z if lora is None else z + lora[0] @ lora[1].t(), target)

    def ours():
        return liger_like.fused_linear_cross_entropy(
            given["x"], given["weight"], target, lora=lora, recompute=recompute
        )

    leaves = [given[name] for name in trained.split()]
    logits, gradients = flops(plain, *leaves)
    assert flops(ours, *leaves) == ((logits, logits + gradients) if recompute else (logits + gradients, 0))


@pytest.mark.parametrize(
    ("trained", "options", "forward", "backward"),
    [
        ("x weight", {}, 1, 3),
        ("x", {}, 2, 0),
        ("x weight", {"keep_logits": 2**20}, 1, 2),
        ("x weight", {"keep_logits": 4 * 96 * 3}, 1, 2.75),
        ("x weight", {"uniform_gradient": True}, 3, 0),
    ],
    ids=str,
)
def test_log_probabilities_count_the_products_of_their_route(trained, options, forward, backward, device):
    given = {"x": torch.randn(12, 64, device=device), "weight": torch.randn(96, 64, device=device)}
    target = torch.randint(96, (12,), device=device)
    call = lambda: liger_like.fused_linear_logprobs(**given, target=target, **options).logprob  # noqa: E731
    product = 2 * 12 * 64 * 96
    assert flops(call, *(given[name] for name in trained.split())) == (forward * product, backward * product)


def test_a_patched_model_counts_what_it_did(device):
    """But for the scores, which the backward of attention makes again."""
    counts = []
    inputs = batch(device)
    for patched in (False, True):
        model = tiny("Llama", device, attn_implementation="eager")
        if patched:
            liger_like.patch(model, strict=True)
        with FlopCounterMode(display=False) as counter:
            model(**inputs).loss.backward()
        counts.append(counter.get_total_flops())
    config, (B, S) = model.config, inputs["input_ids"].shape
    scores = 2 * B * config.num_attention_heads * S * S * config.head_dim * config.num_hidden_layers
    assert counts[1] - counts[0] == scores
