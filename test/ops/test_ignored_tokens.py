"""Tokens that do not count in the fused losses: a NaN in their states gets into no gradient (0 times NaN is NaN), and
CUDA graphs compute them too.
"""

import pytest
import torch
from test_gpu import LINEAR, capture, forward_backward, redraw

from liger_like import ops
from liger_like.ops.losses import chunks, dw_sum, linear_cross_entropy, linear_divergence, linear_logprobs
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy_ref
from liger_like.ops.losses.linear_divergence import fused_linear_divergence_ref
from liger_like.ops.losses.linear_logprobs import fused_linear_logprobs_ref
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss_ref
from liger_like.ops.losses.vocab_shards import Shard
from liger_like.runtime import support
from liger_like.testing import SPECS

DIVERGENCE = next(spec for spec in SPECS if spec.name == "fused_linear_divergence")
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


def without_counts(monkeypatch):
    """Let the ops read no count, as in graphs of torch.compile that become CUDA graphs."""
    for module in (linear_cross_entropy, linear_logprobs, linear_divergence):
        name = f"{module.__name__.rpartition('.')[2]}_fwd"
        fwd = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, fwd=fwd: fwd(*chunks.all_tokens(args)))


UNCOUNTED = {
    "loss": (LOSSES, {"class_weight": torch.rand(V), "label_smoothing": 0.1}),
    "loss, made again": (LOSSES, {"recompute": True, "softcap": 2.0}),
    "logprobs, all kept": (LOGPROBS, {"keep_logits": 2**20}),
    "logprobs, some kept": (LOGPROBS, {"keep_logits": 10 * 48 * 4}),
    "logprobs, frozen": (LOGPROBS, {"frozen": True}),
    "divergence": (DIVERGENCES, {"beta": 0.5}),
    "divergence, made again": (DIVERGENCES, {"reduction": "none"}),
    "divergence, frozen": (DIVERGENCES, {"reduction": "none", "frozen": True}),
}


@pytest.mark.parametrize("case", UNCOUNTED)
def test_no_count_is_read(case, device, monkeypatch):
    """All tokens in chunks, of which ignored ones hold NaN, against those that count."""
    (fn, _), options = UNCOUNTED[case]
    options = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    frozen = options.pop("frozen", False)
    shapes = (T, H), (T, RANK), (V, H), (V, RANK)
    x, u, w, b = (torch.randn(shape, device=device) for shape in shapes)
    y = torch.randint(0, V, (T,), device=device)
    for chunk_rows, ignored in ((8, [0, 9, 17, 23]), (8, range(T)), (100, range(8))):
        results = []
        labels = y.clone()
        labels[list(ignored)] = -100
        for value in (0.0, torch.nan):
            leaves = [t.clone().requires_grad_(i < 2 or not frozen) for i, t in enumerate((x, u, w, b))]
            for rows in leaves[:2]:
                rows.data[list(ignored)] = value
            before = [t.detach().clone() for t in leaves]
            with monkeypatch.context() as patches:
                if value:
                    without_counts(patches)
                loss = fn(
                    *(leaves[0], leaves[2], labels), lora=(leaves[1], leaves[3]), chunk_rows=chunk_rows, **options
                )
                grads = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
            torch.testing.assert_close(leaves, before, rtol=0, atol=0, equal_nan=True)
            results.append((loss.detach(), *grads))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_no_count_is_read_for_a_gradient_in_16_bits(wide, released, device, monkeypatch):
    """The backward finds the last chunk itself; with logits in fp32, whose gradient takes half of their memory."""
    monkeypatch.setattr(dw_sum, "architecture", lambda device: 10)
    shard = Shard(released=released)
    for tokens, trains_x in ((T, True), (T, False), (3, True), (0, True)):
        x, w = torch.randn(tokens, H, device=device), torch.randn(V, H, device=device, dtype=torch.bfloat16)
        y = torch.randint(0, V, (tokens,), device=device)
        y[2::7] = -100
        results = []
        for value, counted in ((0.0, True), (0.0, False), (torch.nan, False)):
            leaf, weight = x.clone().requires_grad_(trains_x), w.clone().requires_grad_()
            leaf.data[y == -100] = value
            with monkeypatch.context() as patches, torch.autocast(device, torch.float16):
                if not counted:
                    without_counts(patches)
                if wide:  # the loss has no fp32 logits
                    operands = leaf, weight, x.roll(1, -1), w, y != -100
                    loss = ops.fused_linear_divergence(*operands, chunk_rows=8, shard=shard)
                else:
                    loss = ops.fused_linear_cross_entropy(leaf, weight, y, chunk_rows=8, shard=shard)
            if released:
                weight.untyped_storage().resize_(0)
            loss.backward()
            results.append([loss.detach(), weight.grad, *([leaf.grad] if trains_x else [])])
        torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, {"reduction": "none"}, {"beta": 0.5}, {"beta": 1.0, "reduction": "none"}],
    ids=str,
)
def test_cuda_graph_with_ignored_tokens(options):
    spec = DIVERGENCE if "beta" in options else LINEAR
    shape = {"Ht": 48, "mask": True} if spec is DIVERGENCE else {}
    inputs = spec.inputs(torch.bfloat16, "cuda", lead=(300,), H=64, V=1000, **shape)
    options = {**options, "chunk_rows": 64}
    labels = None if spec is DIVERGENCE else inputs["target"].clamp(min=0)
    graph, captured, upstream = capture(spec, inputs, options)
    for share in (0.0, 0.5, 0.9, 1.0):  # each replay ignores another share
        redraw(spec, inputs, upstream)
        ignored = torch.rand(300, device="cuda") < share
        if labels is None:
            inputs["mask"].copy_(~ignored)
        else:
            inputs["target"].copy_(labels.masked_fill(ignored, -100))
        graph.replay()
        eager, _ = forward_backward(spec, inputs, options, upstream)
        with support.as_in_graph():
            same, _ = forward_backward(spec, inputs, options, upstream)
        for a, b, c in zip(captured, eager, same, strict=True):
            assert (a - b).norm() <= 5e-3 * b.norm()
            assert torch.equal(a, c)
