"""The divergence from a teacher's most likely words."""

import pytest
import torch

import liger_like
from liger_like.losses import topk_divergence

B, S, V, K = 2, 5, 12, 4
MASK = torch.arange(S).expand(B, S) > 1
each_beta = pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 1.0])


def scores():
    return (torch.randn(B, S, V, dtype=torch.float64) * 2 for _ in range(2))


def divergence(p, q, beta):
    """Return the divergence of distributions [..., K] by its definition."""
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@each_beta
def test_equals_the_definition(beta):
    """Compare the words and the rest, as one word, with the definition; the whole divergence is no smaller."""
    z, teacher = scores()
    p, q = z.softmax(-1), teacher.softmax(-1)
    ids = q.topk(K).indices
    merged = [torch.cat((t.gather(-1, ids), 1 - t.gather(-1, ids).sum(-1, keepdim=True)), -1) for t in (p, q)]
    rows = divergence(*merged, beta)[MASK]
    loss, metrics = topk_divergence(p.gather(-1, ids).log(), q.gather(-1, ids).log(), MASK, beta=beta)
    torch.testing.assert_close(loss, rows.mean())
    torch.testing.assert_close(metrics["teacher_mass"], merged[1][..., :-1].sum(-1)[MASK].mean())
    assert (rows <= divergence(p, q, beta)[MASK]).all()
    counted, _ = topk_divergence(p.gather(-1, ids).log(), q.gather(-1, ids).log(), MASK, beta=beta, num_items=7)
    torch.testing.assert_close(counted, rows.sum() / 7)


@each_beta
def test_gradient(beta):
    """Compare with numerical gradients; a word of -inf is no word, and the teacher has no gradient."""
    z, teacher = scores()
    ids, teacher_logp = teacher.topk(K).indices, teacher.log_softmax(-1)
    logp_of = teacher_logp.gather(-1, ids)
    logp_of[..., -1] = -torch.inf  # no word
    given = lambda z: topk_divergence(z.log_softmax(-1).gather(-1, ids), logp_of, MASK, beta=beta)[0]  # noqa: E731
    assert torch.autograd.gradcheck(given, z.requires_grad_())
    fewer = topk_divergence(z.log_softmax(-1).gather(-1, ids)[..., :-1], logp_of[..., :-1], MASK, beta=beta)[0]
    torch.testing.assert_close(given(z), fewer)
    logp_of.requires_grad_()
    assert torch.autograd.grad(given(z), logp_of, allow_unused=True) == (None,)


@each_beta
def test_all_words_give_the_whole_divergence(beta, references):
    """With the words in another order, through the head; NaN outside the mask does not matter."""
    x, weight, teacher_x, teacher_weight = (torch.randn(*shape, 6) for shape in ((B, S), (V,), (B, S), (V,)))
    x.requires_grad_()
    want = liger_like.fused_linear_divergence(x, weight, teacher_x, teacher_weight, MASK, beta=beta)
    teacher_logp = (teacher_x @ teacher_weight.T).log_softmax(-1)
    ids = teacher_logp.topk(V).indices
    target = torch.zeros(B, S, dtype=torch.int64)
    at = liger_like.fused_linear_logprobs(x, weight, target, ids=ids).logprob_at
    loss, _ = topk_divergence(
        at.masked_fill(~MASK[..., None], torch.nan),
        teacher_logp.gather(-1, ids).masked_fill(~MASK[..., None], torch.nan),
        MASK,
        beta=beta,
    )
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(want, x), rtol=1e-4, atol=1e-5)


def test_error_names_the_argument():
    logp = torch.zeros(B, S, K)
    for message, given in (
        (r"teacher_logprob must have shape \[2, 5, 4\]", (logp, logp[..., 1:], MASK)),
        (
            r"mask must have the shape \[B, S\] of the log-probabilities, \[2, 5\], got \[2, 4\]",
            (logp, logp, MASK[:, 1:]),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            topk_divergence(*given)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got -1"):
        topk_divergence(logp, logp, MASK, beta=-1)
    assert not topk_divergence(logp, logp, MASK & False)[0].any()
