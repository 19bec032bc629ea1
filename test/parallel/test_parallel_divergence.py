"""The divergence of heads whose words are spread over processes equals that of one process that has all words."""

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.distributed.tensor import Shard, distribute_tensor

from liger_like import fused_linear_divergence
from liger_like.ops.losses import divergence_chunks, vocab_shards
from liger_like.ops.losses.linear_divergence import OUTPUTS
from liger_like.parallel import vocab_parallel_divergence

B, S, H, HT, V = 2, 12, 16, 8, 37
SPLIT = 0, 22, V  # words of two processes
OPTIONS = [
    {"outputs": OUTPUTS},
    {"beta": 0.3, "outputs": OUTPUTS, "temperature": 0.7, "bias": True},
    {"beta": 1.0, "reduction": "none", "softcap": 4.0, "teacher_softcap": 3.0, "bias": True},
    {"beta": 1e-3, "reduction": "none", "lora": "A"},
    {"beta": 1.0, "reduction": "sum", "lora": "u", "bias": True, "padded": True},
]


def draw(options, dtype):
    """The same in all processes: tensors of one process that has all, and the options."""
    g = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    leaves = {"x": randn(B, S, H), "weight": randn(V, H)}
    fixed = {"teacher_x": randn(B, S, HT), "teacher_weight": randn(V, HT)}
    mask = torch.rand(B, S, generator=g) < 0.8
    options = dict(options)
    if options.pop("bias", False):
        leaves["bias"], fixed["teacher_bias"] = randn(V), randn(V)
    if options.pop("padded", False):  # the second process has no word of any probability
        leaves["bias"][SPLIT[1] :] = fixed["teacher_bias"][SPLIT[1] :] = -torch.inf
    if (first := options.pop("lora", None)) is not None:
        leaves |= {first: randn(3, H) if first == "A" else randn(B, S, 3), "B": randn(V, 3)}
    return {name: t.requires_grad_() for name, t in leaves.items()}, fixed, mask, options


def results(function, leaves, fixed, mask, options, **more):
    """The loss and other results of ``function``, and gradients of a sum with a weight per token."""
    lora = {"lora": (leaves["A"], leaves["B"], 0.7)} if "A" in leaves else {}
    lora |= {"lora": (leaves["u"], leaves["B"])} if "u" in leaves else {}
    biases = {name: t for name, t in (*leaves.items(), *fixed.items()) if "bias" in name}
    heads = leaves["x"], leaves["weight"], fixed["teacher_x"], fixed["teacher_weight"]
    result = function(*heads, mask, **more, **options, **biases, **lora)
    loss = result.loss if isinstance(result, tuple) else result
    total = (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum()
    return result, dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def check(rank, options, dtype, sequence_sharded):
    leaves, fixed, mask, options = draw(options, dtype)
    expected, gradients = results(fused_linear_divergence, leaves, fixed, mask, options)
    words, half = slice(*SPLIT[rank : rank + 2]), S // 2
    tokens = slice(rank * half, (rank + 1) * half) if sequence_sharded else slice(None)
    parts = {
        "x": (slice(None), tokens),
        "u": (slice(None), tokens),
        "A": slice(None),
        "teacher_x": (slice(None), tokens),
    }
    part = lambda name, t: t[parts.get(name, words)]  # noqa: E731
    own = {name: part(name, t).detach().clone().requires_grad_() for name, t in leaves.items()}
    own_fixed = {name: part(name, t) for name, t in fixed.items()}
    more = {"group": dist.group.WORLD, "vocab_start": words.start, "vocab_size": V, "chunk_rows": 7}
    more["sequence_sharded"] = sequence_sharded
    got, own_gradients = results(vocab_parallel_divergence, own, own_fixed, mask, options, **more)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for name, found in own_gradients.items():
        want = part(name, gradients[name])
        assert (found - want).norm() <= 1e-5 * gradients[name].norm(), (options, name)


def every_option(rank):
    for i, options in enumerate(OPTIONS):
        check(rank, options, torch.float32, sequence_sharded=i % 2 == 1)
    check(rank, OPTIONS[-1], torch.float32, sequence_sharded=True)
    check(rank, OPTIONS[1], torch.float64, sequence_sharded=True)
    collectives()
    errors(rank)


def collectives():
    """Each chunk needs one all-gather, or two between 0 and 1, and one sum while the next chunk runs."""
    leaves, fixed, *_ = draw({}, torch.float32)
    heads = leaves["x"], leaves["weight"][:8], fixed["teacher_x"], fixed["teacher_weight"][:8]
    calls = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(divergence_chunks, "PART_ROWS", 5)  # for one process
        for module, name in ((vocab_shards, "all_gather"), (dist, "all_reduce")):
            true = getattr(module, name)
            call = lambda *args, true=true, name=name, **kwargs: calls.append(name) or true(*args, **kwargs)  # noqa: E731
            monkeypatch.setattr(module, name, call)
        for beta, gathers in ((0.0, 1), (1.0, 1), (0.5, 2)):
            vocab_parallel_divergence(*heads, group=dist.group.WORLD, beta=beta, chunk_rows=12).backward()
            assert calls == ["all_gather"] * gathers + ["all_reduce"] + ["all_gather"] * gathers + ["all_reduce"]
            calls.clear()


def errors(rank):
    leaves, fixed, mask, _ = draw({}, torch.float32)
    heads = leaves["x"], leaves["weight"], fixed["teacher_x"], fixed["teacher_weight"]
    for changed, message in (
        ({"vocab_start": 5, "vocab_size": 38}, "must lie in a vocabulary of 38 words, got 37 words from 5 on"),
        ({"sequence_sharded": True}, r"mask must have 2 times the tokens of x \[2, 12, 16\], got \[2, 12\]"),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_parallel_divergence(*heads, mask, dist.group.WORLD, **changed)
    with pytest.raises(TypeError, match="group must be a ProcessGroup unless"):
        vocab_parallel_divergence(*heads, mask)
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = [distribute_tensor(heads[i].detach(), mesh, [Shard(0)]) for i in (1, 3)]
    got = vocab_parallel_divergence(heads[0], sharded[0], heads[2], sharded[1], mask)
    torch.testing.assert_close(got, fused_linear_divergence(*heads, mask))
    with pytest.raises(TypeError, match="vocab_parallel_divergence"):
        fused_linear_divergence(heads[0], sharded[0], *heads[2:])


def test_two_processes():
    run(every_option, 2)
