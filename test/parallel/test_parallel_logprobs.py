"""Log-probabilities of a head whose words are spread over processes equal those of one process that has all."""

import functools

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_like import fused_linear_cross_entropy, fused_linear_logprobs
from liger_like.ops.losses import chunks, vocab_shards
from liger_like.ops.losses.linear_logprobs import OUTPUTS
from liger_like.parallel import vocab_parallel_cross_entropy, vocab_parallel_logprobs
from liger_like.patches.heads import of_head
from liger_like.patches.trl_code import token_numbers

B, S, H, V = 2, 4, 16, 37
CUT = 22  # words of the first of two processes
BOTH = (False, True)
ALL = {"outputs": OUTPUTS, "ids": 4, "topk": 5, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5}
CASES = {  # "sequence": whether x is sharded by its tokens
    "all": {**ALL, "bias": True, "sequence": BOTH},
    "plain": {"topk": 2},
    "argmax": {"outputs": ("argmax", "correct"), "ids": 2, "logit_scale": -1.0},
    "more words than a shard has": {"topk": 30, "outputs": ("lse",), "equal": True, "sequence": (True,)},
    "far": {"outputs": OUTPUTS, "ids": 3, "topk": 4, "bias": True, "far": True},
    "no words in a shard": {**ALL, "bias": True, "padding": True, "softcap": None},
    "frozen": {
        "train": ("x", "A"),
        "lora": "A",
        "outputs": ("logprob", "entropy"),
        "only": "logprob",
        "sequence": BOTH,
    },
    "frozen, entropy": {"train": ("x", "u"), "lora": "u", "outputs": ("logprob", "entropy"), "sequence": (True,)},
    "uniform": {"uniform_gradient": True, "bias": True, "lora": "u", "uniform": True},
    "not uniform": {"uniform_gradient": True, "ignore_index": 3, "sequence": (True,)},
    "kept": {"keep_logits": 48 * 4 * 4, "outputs": ("logprob", "entropy"), "ids": 2, "lora": "A", "sequence": (True,)},
}
HALF_CASES = {
    "kept": {"keep_logits": 48 * 2 * 4, "outputs": ("logprob", "entropy"), "ids": 2},
    "all kept": {"keep_logits": 2**20, "bias": True, "far": True, "outputs": ("logprob", "entropy")},
    "rounded": {"logits_dtype": torch.float16, "outputs": ("logprob", "mean_logit")},
}


def draw(options, dtype):
    """The same in all processes: tensors of one process that has all, and the options."""
    g = torch.Generator().manual_seed(1)
    options = dict(options)
    randn = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    leaves = {"x": randn(B, S, H), "weight": randn(V, H)}
    target = torch.randint(V, (B, S), generator=g)
    target[0, 1:3] = options.get("ignore_index", -100)
    if options.pop("bias", False):
        leaves["bias"] = randn(V)
    equal, far = options.pop("equal", False), options.pop("far", False)
    if equal or far:  # exact products, so that all processes see the same logits
        leaves = {name: (t * 4).round() / 4 for name, t in leaves.items()}
    if equal:  # words of other shards have equal scores
        leaves["weight"] = leaves["weight"][:1].repeat(V, 1)
    if far:
        leaves["bias"] += 1e4
    if options.pop("padding", False):
        leaves["bias"][CUT:] = -torch.inf
    if count := options.pop("ids", 0):
        options["ids"] = torch.randint(V, (B, S, count), generator=g)
        options["ids"][..., 1] = options["ids"][..., 0]
        options["ids"][1, :, -1] = -1
    if (first := options.pop("lora", None)) is not None:
        leaves |= {first: randn(3, H) if first == "A" else randn(B, S, 3), "B": randn(V, 3)}
    trained = options.pop("train", tuple(leaves))
    return {name: t.requires_grad_(name in trained) for name, t in leaves.items()}, target, options


def results_of(function, leaves, target, options, **more):
    lora = {"lora": (leaves["A"], leaves["B"], 0.7)} if "A" in leaves else {}
    lora |= {"lora": (leaves["u"], leaves["B"])} if "u" in leaves else {}
    bias = {"bias": leaves["bias"]} if "bias" in leaves else {}
    return function(leaves["x"], leaves["weight"], target, **more, **options, **bias, **lora)


def gradients(out, leaves, uniform, only):
    """Differentiate a sum with a weight per number, or with the same weight."""
    parts = [t for name, t in out._asdict().items() if t is not None and t.requires_grad and name in (only or name)]
    weights = [torch.full(t.shape, -0.3) if uniform else torch.arange(1.0, t.numel() + 1).view(t.shape) for t in parts]
    total = sum((t * w).where(t.isfinite(), 0).sum() for t, w in zip(parts, weights, strict=True))
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    return dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True)) if parts else {}


def check(rank, size, options, dtype):
    uniform, only, sequence = (options.get(name) for name in ("uniform", "only", "sequence"))
    leaves, target, options = draw(
        {n: v for n, v in options.items() if n not in ("uniform", "only", "sequence")}, dtype
    )
    expected = results_of(fused_linear_logprobs, leaves, target, options)
    expected_gradients = gradients(expected, leaves, uniform, only)
    start, end = (0, CUT, V)[rank : rank + 2] if size == 2 else (rank * V // size, (rank + 1) * V // size)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    if "keep_logits" in options:  # the same tokens: of half as many words
        options["keep_logits"] = options["keep_logits"] * 32 // 48
    for sequence_sharded in sequence or (False,):
        tokens = slice(rank * S // size, (rank + 1) * S // size) if sequence_sharded else slice(None)
        parts = {"x": (slice(None), tokens), "u": (slice(None), tokens), "A": slice(None)}
        part = lambda name, t, parts=parts: t[parts.get(name, slice(start, end))]  # noqa: E731
        own = {name: part(name, t).detach().clone().requires_grad_(t.requires_grad) for name, t in leaves.items()}
        more = {"vocab_start": start, "vocab_size": V, "sequence_sharded": sequence_sharded, "group": dist.group.WORLD}
        out = results_of(vocab_parallel_logprobs, own, target, options, **more)
        for (name, got), want in zip(out._asdict().items(), expected, strict=True):
            torch.testing.assert_close(got, want, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        for name, got in gradients(out, own, uniform, only).items():
            want = expected_gradients[name]
            error, norm = (got - part(name, want)).norm(), want.norm()
            assert error <= tolerance["rtol"] * norm, (name, error, norm)


def every_case(rank, size, cases, dtype):
    for name, options in cases.items():
        try:
            check(rank, size, options | ({} if dtype == torch.float64 else {"chunk_rows": 3}), dtype)
        except BaseException as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize(
    ("size", "cases", "dtype"),
    [
        (2, CASES, torch.float32),
        (2, HALF_CASES, torch.float16),
        (2, {"all": CASES["all"], "kept": CASES["kept"]}, torch.float64),
        (4, {"all": {**ALL, "sequence": (True,)}}, torch.float32),
    ],
    ids=["2-fp32", "2-fp16", "2-fp64", "4-fp32"],
)
def test_every_case(size, cases, dtype):
    run(every_case, size, size, cases, dtype)


def counted(patch):
    """Names of collectives with the numbers that each process gives, as they are called."""
    calls = []
    for module, name, i in (
        (vocab_shards, "all_gather", 1),
        (vocab_shards, "reduce_scatter", 1),
        (dist, "all_reduce", 0),
    ):
        true = getattr(module, name)

        def call(*args, true=true, name=name, i=i, **kwargs):
            calls.append((name, args[i].numel()))
            return true(*args, **kwargs)

        patch.setattr(module, name, call)
    return calls


def collectives(rank):
    """Each of two chunks of 4 tokens needs one all-gather; gradients need what those of the loss need."""
    target = torch.randint(16, (B, S))
    ids, half = target[..., None].repeat(1, 1, 5), {"keep_logits": 5 * 16 * 2, "logits_dtype": torch.float32}
    gather, rows, summed = lambda width: [("all_gather", 4 * width)], ("all_reduce", 4 * H), ("all_reduce", B * S * H)
    cases = [  # options, trained, collectives of the forward and of the backward
        ({}, "xw", gather(3) * 2, [summed]),
        ({"outputs": OUTPUTS}, "", gather(3 + 1 + 2 + 1 + 1) * 2, []),
        ({"ids": ids, "topk": 4}, "xw", gather(3 + 5 + 2 * 4) * 2, [summed]),
        ({"keep_logits": 5 * 16 * 4}, "xw", gather(3) * 2, [summed]),
        ({**half}, "xw", gather(3 + 2) * 2, [summed]),
        ({**half, "outputs": ("logprob", "entropy")}, "xw", gather(4 + 3) * 2, [summed]),
        ({}, "x", [*gather(3), rows] * 2, []),
        ({"logits_dtype": torch.float32}, "x", [*gather(3), rows] * 2, []),  # no parts of a chunk
        ({"uniform_gradient": True}, "xw", [*gather(3), rows] * 2, [("all_reduce", 1)]),
        ({"uniform_gradient": True}, "w", gather(3) * 2, [("all_reduce", 1)]),
        (
            {"sequence_sharded": True},
            "xw",
            [("all_gather", B * S // 2 * H), *gather(3) * 2],
            [("reduce_scatter", B * S * H)],
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        for options, trained, forward, backward in cases:
            dtype = torch.float16 if "logits_dtype" in options else torch.float32
            x = torch.randn(B, S // 2 if "sequence_sharded" in options else S, H, dtype=dtype)
            leaves = x.requires_grad_("x" in trained), torch.randn(8, H, dtype=dtype).requires_grad_("w" in trained)
            out = vocab_parallel_logprobs(*leaves, target, dist.group.WORLD, chunk_rows=4, **options)
            assert calls == forward, (options, trained, calls)
            calls.clear()
            if trained:
                out.logprob.sum().backward()
            assert calls == backward, (options, trained, calls)
            calls.clear()


def one_process_disagrees(rank):
    """If one process finds unequal upstream gradients, all processes compute the logits again."""
    leaves, target, _ = draw({}, torch.float32)
    upstream = torch.ones(B, S)
    want = torch.autograd.grad(fused_linear_logprobs(*leaves.values(), target).logprob, [*leaves.values()], upstream)
    if rank == 1:
        upstream[0, 0] += 1e-6
    start, end = (0, CUT, V)[rank : rank + 2]
    own = leaves["x"], leaves["weight"][start:end].detach().requires_grad_()
    words = {"vocab_start": start, "vocab_size": V}
    out = vocab_parallel_logprobs(*own, target, dist.group.WORLD, **words, uniform_gradient=True)
    got = torch.autograd.grad(out.logprob, own, upstream)
    torch.testing.assert_close(got, (want[0], want[1][start:end]), rtol=1e-5, atol=1e-5)


def chunks_of_uneven_shards(rank):
    """Processes of 9 and 7 words take the same tokens at a time, if the vocabulary decides how many these are."""
    leaves, target, _ = draw({}, torch.float32)
    x, weight = leaves["x"].detach(), leaves["weight"].detach()[:16]
    words, own = {"vocab_start": 9 * rank, "vocab_size": 16}, weight[:9] if rank == 0 else weight[9:]
    target = target.clamp(max=15)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_ROWS", 2)
        patch.setattr(chunks, "CHUNK_BYTES", 7 * 9 * 4)
        calls = counted(patch)
        loss = vocab_parallel_cross_entropy(x, own, target, dist.group.WORLD, **words)
        out = vocab_parallel_logprobs(x, own, target, dist.group.WORLD, **words)
        assert calls[0] == ("all_gather", 3 * 7), calls
    torch.testing.assert_close(loss, fused_linear_cross_entropy(x, weight, target))
    torch.testing.assert_close(out, fused_linear_logprobs(x, weight, target))


def shards_in_another_order(rank):
    """Expect the lowest word first among equal scores, whichever process has it."""
    x, weight, target = torch.ones(3, H), torch.ones(4, H), torch.zeros(3, dtype=torch.int64)
    words = {"vocab_start": 4 * (1 - rank), "vocab_size": 8, "group": dist.group.WORLD}
    out = vocab_parallel_logprobs(x, weight, target, outputs=("argmax", "correct"), topk=6, **words)
    assert torch.equal(out.topk_ids, torch.arange(6).expand(3, 6))
    assert torch.equal(out.argmax, target)
    assert out.correct.all()
    loss = vocab_parallel_cross_entropy(x, weight, target, outputs=("argmax",), **words)
    assert torch.equal(loss.argmax, target)


def dtensors(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    leaves, target, options = draw({**ALL, "bias": True}, torch.float32)
    want = results_of(fused_linear_logprobs, leaves, target, options)
    own = {n: distribute_tensor(leaves[n].detach(), mesh, [Shard(0)]).requires_grad_() for n in ("weight", "bias")}
    for placement in (Replicate(), Shard(1)):
        x = distribute_tensor(leaves["x"].detach(), mesh, [placement])
        for function in (vocab_parallel_logprobs, functools.partial(of_head, token_numbers)):
            out = results_of(function, {"x": x, **own}, target, options)
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results_of(function, leaves, target, options), want)  # a weight that is not sharded
    out.logprob.sum().backward()
    (dweight,) = torch.autograd.grad(want.logprob.sum(), leaves["weight"])
    assert isinstance(own["weight"].grad, DTensor)
    torch.testing.assert_close(own["weight"].grad.full_tensor(), dweight, rtol=1e-5, atol=1e-5)


def compiled(rank):
    """In a compiled graph no process has the logits of all words, however few the tokens."""
    x, target = torch.randn(B, S, H), torch.randint(16, (B, S))
    weight = torch.randn(16, H).chunk(2)[rank].contiguous()
    options = {"outputs": ("logprob", "entropy", "correct"), "ids": target[..., None], "topk": 2}
    results = []
    fullgraph = torch.compile(vocab_parallel_logprobs, backend="aot_eager", fullgraph=True)
    for call in (vocab_parallel_logprobs, fullgraph):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = call(*leaves, target, dist.group.WORLD, **options)
        (out.logprob + out.entropy + out.logprob_at[..., 0]).sum().backward()
        results.append([*(t.detach() for t in out if t is not None), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def nan_stays_in_its_row(rank):
    x, weight, target = torch.randn(5, H), torch.randn(4, H), torch.arange(5)
    x[2] = float("nan")
    out = vocab_parallel_logprobs(x, weight, target, dist.group.WORLD, outputs=("logprob", "entropy", "lse"))
    for rows in (out.logprob, out.entropy, out.lse):
        assert rows.isnan().nonzero().flatten().tolist() == [2]


def errors(rank):
    x, weight, target = torch.randn(3, H), torch.randn(4, H), torch.zeros(3, dtype=torch.int64)
    valid = {"x": x, "weight_shard": weight, "target": target, "group": dist.group.WORLD}
    for error, message, changed in (
        (ValueError, "label 8, which is neither in", {"target": target + 8}),
        (ValueError, "must lie in a vocabulary of 8 words, got 4 words from 5", {"vocab_start": 5, "vocab_size": 8}),
        (ValueError, r"target must have 2 times the tokens of x \[3, 16\], got \[3\]", {"sequence_sharded": True}),
        (
            ValueError,
            r"ids must have 2 times the tokens of x \[3, 16\], got \[3, 1\]",
            {"sequence_sharded": True, "target": target.repeat(2), "ids": target[:, None]},
        ),
        (ValueError, r"ids holds label 9, which is neither in \[0, 8\)", {"ids": target[:, None] + 9}),
        (ValueError, r"ids must have shape \[3, 'K'\]", {"ids": target}),
        (ValueError, "topk must be at most 8, got 9", {"topk": 9}),
        (TypeError, "ids must be a Tensor, got list", {"ids": [1, 2, 3]}),
        (TypeError, "group must be a ProcessGroup unless", {"group": None}),
        (TypeError, "x must be a tensor, got list", {"x": [1.0], "sequence_sharded": True}),
    ):
        with pytest.raises(error, match=message):
            vocab_parallel_logprobs(**valid | changed)
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.randn(8, H), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"use liger_like\.parallel\.vocab_parallel_logprobs, or"):
        fused_linear_logprobs(x, sharded, target)


SPECIAL = (
    collectives,
    one_process_disagrees,
    chunks_of_uneven_shards,
    shards_in_another_order,
    dtensors,
    compiled,
    nan_stays_in_its_row,
    errors,
)


def every_special(rank):
    for test in SPECIAL:
        torch.manual_seed(0)
        try:
            test(rank)
        except BaseException as error:
            error.add_note(test.__name__)
            raise


def test_special_cases():
    """In one process group, since starting processes takes longer than the cases."""
    run(every_special, 2)
