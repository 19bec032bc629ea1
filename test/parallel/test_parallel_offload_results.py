"""Attention's results on the host: read back in the recomputation, or computed again where the host is full."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint as of_torch
from test_parallel_checkpoint import Count
from test_parallel_offload import GIB, Late, copy_late, same
from tiny_models import batch, results, tiny

from liger_like.parallel import checkpoint_policy, offload_checkpoints

PAGE, SLAB, LAYERS = 512, 4096, 4
SIZE = 2 * 12 * 32 * 4  # bytes of a layer's input, as of attention's output: 3072, six pages


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    copy_late(monkeypatch, PAGE, SLAB)


HOST = checkpoint_policy((), host=("attention",))
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # torch's, as ours has tests of its own


def checkpointed(model, policy=None):
    model.gradient_checkpointing_enable({"use_reentrant": False} | ({} if policy is None else {"context_fn": policy}))
    return model


@pytest.fixture
def model():
    return checkpointed(tiny("Llama", num_hidden_layers=LAYERS, attn_implementation="sdpa"))


@pytest.mark.parametrize(("pages", "kept"), [(1000, 4), (36, 4), (30, 3), (18, 2), (0, 1)])
def test_kept_or_computed_again(model, pages, kept):
    """The last layer's result is on the GPU, and those of the first layers are on the host as long as there is room."""
    inputs = batch()
    expected = results(model, inputs)
    checkpointed(model, HOST)
    with Count() as count, offload_checkpoints(host_gib=(pages * PAGE + 1) / GIB) as host:
        got = results(model, inputs)
    same(got, expected)
    assert count.counts[ATTENTION] == 2 * LAYERS - kept
    assert host.out == host.back
    assert host.out == min(pages // 6, 2 * (LAYERS - 1)) * SIZE


def test_without_the_context(model):
    """Nothing is kept."""
    inputs = batch()
    expected = results(model, inputs)
    with Count() as count:
        same(results(checkpointed(model, HOST), inputs), expected)
    assert count.counts[ATTENTION] == 2 * LAYERS


@pytest.mark.parametrize("backwards", [1, 2])
def test_other_ops(backwards):
    """Results of a single tensor, with a policy that saves others, and in a second backward of the graph."""
    save = (torch.ops.aten.tanh.default,) if backwards == 1 else ()  # torch gives out what it saved once
    policy = checkpoint_policy(save, host=(torch.ops.aten.mm.default,))
    x, weight = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def block(h):
        return (h @ weight).tanh().square()

    with Count() as count, offload_checkpoints() as host:
        y = x
        for _ in range(3):
            y = of_torch.checkpoint(block, y, use_reentrant=False, context_fn=policy)
        for _ in range(backwards):
            got = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    assert count.counts["matmul"] == 3 + backwards * 6  # no product of the forward again
    assert host.back == backwards * host.out == backwards * 2 * 2 * 16 * 16 * 4
    same(got, torch.autograd.grad(block(block(block(x))).sum(), (x, weight)))


def test_random_results_are_computed_again():
    """A mask that came from the host would leave other random numbers to the next op, which is computed again."""
    policy = checkpoint_policy((), host=(torch.ops.aten.native_dropout.default,))
    x = torch.randn(3, 16, 16, requires_grad=True)

    def block(h):
        kept = torch.native_dropout(h.sin(), 0.5, True)[0].cos()
        return kept * torch.rand_like(kept)

    found = []
    for host in (None, offload_checkpoints()):
        torch.manual_seed(0)
        with host or contextlib.nullcontext():
            y = x
            for _ in range(3):
                options = {} if host is None else {"context_fn": policy}
                y = of_torch.checkpoint(block, y, use_reentrant=False, **options)
            found.append(torch.autograd.grad(y.sum(), x))
    same(*found)


def test_a_result_that_is_modified():
    """Raises: its recomputation would take the changed values. The results that are given out have no history."""
    policy = checkpoint_policy((), host=(torch.ops.aten.mm.default,))
    x = torch.randn(16, 16, requires_grad=True)
    with offload_checkpoints():
        y = of_torch.checkpoint(lambda h: (h @ h).mul_(2).sin(), x * 1, use_reentrant=False, context_fn=policy)
        with pytest.raises(RuntimeError, match="was modified in place after it was saved"):
            y.sum().backward()


def test_the_order_of_copies(model):
    """Input and result of a layer leave together while the next one runs, and come back a layer ahead."""
    checkpointed(model, HOST)
    with offload_checkpoints():
        loss = model(**batch()).loss
        assert Late.log == ["start", "start", *["wait", "wait", "start", "start"] * 2]
        Late.log.clear()
        loss.backward()
    assert Late.log == ["wait", "wait", "start", "start", *["wait", "start", "start", "wait"] * 2, "wait", "wait"]


def test_names():
    with pytest.raises(ValueError, match=r"host must be out of matmul, .* got \['attn'\]"):
        checkpoint_policy((), host=("attn",))
    with pytest.raises(ValueError, match=r"host must hold ops that return new tensors alone, got aten.add_.Tensor"):
        checkpoint_policy((), host=(torch.ops.aten.add_.Tensor,))
    with pytest.raises(ValueError, match=r"save and host must have no op in common, got .*attention_fwd"):
        checkpoint_policy(("attention",), host=("attention",))
    with pytest.raises(TypeError, match="host must be a tuple of groups or ops, got str"):
        checkpoint_policy((), host="attention")
