"""A NaN in the states of tokens that do not count gets into no gradient of the fused losses: 0 times NaN is NaN."""

import pytest
import torch

from liger_like import ops
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy_ref
from liger_like.ops.losses.linear_divergence import fused_linear_divergence_ref
from liger_like.ops.losses.linear_logprobs import fused_linear_logprobs_ref
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss_ref
from liger_like.runtime import support

T, H, V, RANK = 24, 8, 40, 3
TEACHER = torch.randn(T, 4), torch.randn(V, 4)


def square(tokens):
    return tokens.logprob.square()


def logprobs(fn):
    return lambda x, w, y, **options: fn(x, w, y, **options).logprob.sum()


def divergence(fn):
    return lambda x, w, y, **options: fn(x, w, TEACHER[0].to(x), TEACHER[1].to(x), y != -100, **options).sum()


LOGPROBS = logprobs(ops.fused_linear_logprobs), logprobs(fused_linear_logprobs_ref)
LOSSES = ops.fused_linear_cross_entropy, fused_linear_cross_entropy_ref
TOKEN_LOSSES = ops.fused_linear_token_loss, fused_linear_token_loss_ref
DIVERGENCES = divergence(ops.fused_linear_divergence), divergence(fused_linear_divergence_ref)
CASES = {
    "loss": (LOSSES, {}),
    "loss, made again": (LOSSES, {"recompute": True}),
    "logprobs": (LOGPROBS, {}),
    "logprobs, kept": (LOGPROBS, {"keep_logits": 2**20}),
    "logprobs, uniform": (LOGPROBS, {"uniform_gradient": True}),
    "token loss": (TOKEN_LOSSES, {"loss_fn": square}),
    "divergence": (DIVERGENCES, {}),
    "divergence, none": (DIVERGENCES, {"reduction": "none"}),
}


@pytest.mark.parametrize("case", CASES)
def test_nan_of_ignored_tokens(case, device):
    """Of many tokens and of few, in chunks and at once, in a graph under capture, and by the definitions."""
    (fn, ref), options = CASES[case]
    for kept, chunk_rows, in_graph in ((20, 8, False), (20, None, False), (3, 8, False), (20, 8, True)):
        rank_first = (RANK, H) if chunk_rows is None or in_graph else (T, RANK)  # A, or u
        shapes = (T, H), (V, H), rank_first, (V, RANK)
        x, w, a, b = leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        lora = (a, b, 0.5) if len(a) == RANK else (a, b)
        y = torch.randint(0, V, (T,), device=device)
        ignored = torch.randperm(T, device=device)[kept:]
        y[ignored] = -100
        results = []
        for value, function in ((0.0, fn), (torch.nan, fn), (torch.nan, ref)):
            for rows in (x, a) if len(a) == T else (x,):
                rows.data[ignored] = value
            support._as_in_graph = in_graph
            loss = function(x, w, y, lora=lora, chunk_rows=chunk_rows, **options)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
            support._as_in_graph = False
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-4)
