"""The loss of a head whose words are spread over processes equals that of one process that has all."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run
from tiny_models import batch, results, tiny
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from liger_like import fused_linear_cross_entropy, patch, token_logprobs
from liger_like.ops.losses import vocab_shards
from liger_like.ops.losses.linear_cross_entropy import OUTPUTS
from liger_like.parallel import VocabParallelHead, vocab_parallel_cross_entropy
from liger_like.patches import trl_code, trl_head
from liger_like.testing import SPECS, assert_accurate

B, S, H, V = 2, 12, 16, 37
OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 3.0, "logit_scale": 0.5},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "num_items": 5, "recompute": True},
    {"class_weight": True, "label_smoothing": 0.3, "ignore_index": 3, "bias": True},
    {"reduction": "none", "bias": True, "label_smoothing": 0.2, "class_weight": True},
    {"outputs": OUTPUTS, "softcap": 2.0, "z_loss": 1e-2},
    {"outputs": ("argmax", "correct")},
    {"lora": "A", "num_items": 11},
    {"lora": "u", "reduction": "sum"},
    {"far": True, "bias": True, "label_smoothing": 0.1, "outputs": ("entropy", "logprob")},
]


def draw(options, dtype):
    """The same in all processes: tensors of one process that has all, and the options."""
    g = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=g).to(dtype).requires_grad_()  # noqa: E731
    leaves = {"x": randn(B, S, H), "weight": randn(V, H)}
    target = torch.randint(V, (B, S), generator=g)
    target[0, :5] = options.get("ignore_index", -100)
    options = dict(options)
    if options.pop("bias", False):
        leaves["bias"] = randn(V)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(V, generator=g) + 0.5
    if options.pop("far", False):  # large logits of exact products, so that both losses see the same logits
        leaves = {name: ((t.detach() * 4).round() / 4).requires_grad_() for name, t in leaves.items()}
        leaves["bias"] = (leaves["bias"].detach() + 1e4).requires_grad_()
    if (first := options.pop("lora", None)) is not None:
        leaves |= {first: randn(3, H) if first == "A" else randn(B, S, 3), "B": randn(V, 3)}
    return leaves, target, options


def loss_of(function, x, weight, target, leaves, options, **more):
    lora = {"lora": (leaves["A"], leaves["B"], 0.7)} if "A" in leaves else {}
    lora |= {"lora": (leaves["u"], leaves["B"])} if "u" in leaves else {}
    bias = {"bias": leaves["bias"]} if "bias" in leaves else {}
    return function(x, weight, target, **more, **options, **bias, **lora)


def gradients(result, leaves):
    """Differentiate a sum with a weight per token."""
    parts = [result.loss, result.logprob, result.entropy] if isinstance(result, tuple) else [result]
    parts = [t for t in parts if t is not None and t.requires_grad]
    total = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in parts)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def check(rank, size, options, dtype, sequence_sharded, uneven):
    leaves, target, options = draw(options, dtype)
    expected = loss_of(fused_linear_cross_entropy, leaves["x"], leaves["weight"], target, leaves, options)
    expected_gradients = gradients(expected, leaves)
    start, end = (0, 20, V)[rank : rank + 2] if uneven else (rank * V // size, (rank + 1) * V // size)
    tokens = slice(rank * S // size, (rank + 1) * S // size) if sequence_sharded else slice(None)
    parts = {"x": (slice(None), tokens), "u": (slice(None), tokens), "A": slice(None)}
    part = lambda name, t: t[parts.get(name, slice(start, end))]  # noqa: E731
    own = {name: part(name, t).detach().clone().requires_grad_() for name, t in leaves.items()}
    more = {"vocab_start": start, "vocab_size": V, "sequence_sharded": sequence_sharded, "group": dist.group.WORLD}
    result = loss_of(vocab_parallel_cross_entropy, own["x"], own["weight"], target, own, options, **more)
    tolerance = 4e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for name, got in gradients(result, own).items():
        error, norm = (got - part(name, expected_gradients[name])).norm(), expected_gradients[name].norm()
        assert error <= tolerance * norm, (name, error, norm)


def every_option(rank, size, dtype, which):
    for options in OPTIONS[which]:
        for sequence_sharded in (False, True):
            rows = {} if dtype == torch.float64 else {"chunk_rows": 7}
            check(rank, size, options | rows, dtype, sequence_sharded, uneven=size == 2)


# every case for fp32 on 2 processes; the others only where they differ: tolerance, reference, number of processes
@pytest.mark.parametrize(
    ("dtype", "size", "which"),
    [
        (torch.float32, 2, slice(None)),
        (torch.float64, 2, slice(None)),
        (torch.float16, 2, slice(2, 4)),
        (torch.float32, 4, slice(1, 2)),
    ],
    ids=str,
)
def test_every_option(dtype, size, which):
    run(every_option, size, size, dtype, which)


def counted(monkeypatch):
    """The names of collectives, as they are called."""
    calls = []
    for module, name in ((vocab_shards, "all_gather"), (vocab_shards, "reduce_scatter"), (dist, "all_reduce")):
        true = getattr(module, name)
        call = lambda *args, true=true, name=name, **kwargs: calls.append(name) or true(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(module, name, call)
    return calls


def collectives(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = counted(monkeypatch)
        weight = torch.randn(8, H).requires_grad_()
        for shape, sequence_sharded in (((B, S), False), ((B, S // 2), True)):
            x = torch.randn(*shape, H).requires_grad_()
            target = torch.zeros(B, S, dtype=torch.int64)
            options = {"sequence_sharded": sequence_sharded, "chunk_rows": 12}
            vocab_parallel_cross_entropy(x, weight, target, dist.group.WORLD, **options).backward()
            # each chunk of 12 of the 24 tokens needs one all-gather, and one sum while the next one runs
            once = ["all_gather", "all_reduce"] if not sequence_sharded else ["all_gather"]
            expected = once * 2 if not sequence_sharded else ["all_gather", *once * 2, "reduce_scatter"]
            assert calls == expected, (sequence_sharded, calls)
            calls.clear()


def test_collectives():
    run(collectives, 2)


def compiled(rank):
    """In a compiled graph no process has the logits of all words, however few the tokens."""
    x, target = torch.randn(B, S, H), torch.randint(16, (B, S))
    weight = torch.randn(16, H).chunk(2)[rank].contiguous()
    results = []
    for call in (vocab_parallel_cross_entropy, torch.compile(vocab_parallel_cross_entropy, backend="aot_eager")):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = call(*leaves, target, dist.group.WORLD)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)
    explained = torch._dynamo.explain(vocab_parallel_cross_entropy)(*leaves, target, dist.group.WORLD)
    assert explained.graph_break_count == 0, explained.break_reasons


def test_compiled():
    run(compiled, 2)


def errors(rank):
    x, weight, target = torch.randn(3, H), torch.randn(4, H), torch.zeros(3, dtype=torch.int64)
    wrong = [
        ({"target": target + 8}, "label 8, which is neither in"),
        ({"vocab_start": 5, "vocab_size": 8}, "must lie in a vocabulary of 8 words, got 4 words from 5 on"),
        ({"weight_shard": weight[:0]}, "must lie in a vocabulary of 0 words, got 0 words"),
        ({"sequence_sharded": True}, r"target must have 2 times the tokens of x \[3, 16\], got \[3\]"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(
                **{"x": x, "weight_shard": weight, "target": target, "group": dist.group.WORLD} | changed
            )
    with pytest.raises(TypeError, match="group must be a ProcessGroup unless"):
        vocab_parallel_cross_entropy(x, weight, target)
    for changed, message in (
        ({"group": "tp"}, "group must be a ProcessGroup, got str"),
        ({"target": [1, 2, 3]}, "target must be a Tensor, got list"),
        ({"vocab_start": "a"}, "vocab_start must be an integer, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            vocab_parallel_cross_entropy(
                **{"x": x, "weight_shard": weight, "target": target, "group": dist.group.WORLD} | changed
            )
    mesh = dist.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="must be sharded by its words"):
        vocab_parallel_cross_entropy(x, distribute_tensor(weight, mesh, [Shard(1)]), target)


def test_errors():
    run(errors, 2)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def check_model(model, original):
    inputs = batch()
    expected = results(original, inputs)
    got = results(model, inputs)
    assert model(**inputs).logits is None
    for name, t in expected.items():
        torch.testing.assert_close(whole(got[name]), t, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    labels = inputs["labels"]
    numbers = token_logprobs(model, **inputs, outputs=("logprob", "entropy"))
    logp = original(**{**inputs, "labels": None}).logits[:, :-1].log_softmax(-1)
    counted = labels[:, 1:] != -100
    logprob = logp.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    wanted = counted * logprob, counted * -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(tuple(numbers[:2]), wanted, rtol=1e-4, atol=1e-5)
    check_trl_head(model.lm_head, trl_head.TokenHead(None, model).apply, original.lm_head)
    for m in (model, original):
        m.eval()
    torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits, rtol=1e-4, atol=1e-5)


def check_trl_head(head, apply, original):
    """TRL's head gets hidden states of another dtype; its stand-in gathers no weight."""
    results, target = [], torch.arange(5)
    hidden = torch.linspace(-1, 1, 5 * head.in_features, dtype=torch.float64).view(5, -1)
    for function, this in ((apply, head), (trl_code.apply, original)):
        x = hidden.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(DTensor, "full_tensor", None)
            numbers = function(x, this.weight, this.bias, target, 0.7, 0, None, 1.0, ("entropy",))[:2]
        results.append((*numbers, *torch.autograd.grad(sum(numbers).sum(), [x, this.weight])))
    torch.testing.assert_close([whole(t) for t in results[0]], [*results[1]])


def heads_of_models(rank, path):
    """One that ``parallelize_module`` makes, with uneven words and a bias, and that of transformers' own plan."""
    mesh = dist.init_device_mesh("cpu", (2,))
    original = tiny("Phi")
    original.lm_head.out_features -= 1
    original.config.vocab_size -= 1
    for name, parameter in original.lm_head.named_parameters():
        setattr(original.lm_head, name, torch.nn.Parameter(parameter.detach()[:-1].clone()))
    model = parallelize_module(copy.deepcopy(original), mesh, {"lm_head": VocabParallelHead()})
    patch(model, strict=True)
    check_model(model, original)
    original = LlamaForCausalLM.from_pretrained(path).train()
    plan = DistributedConfig(tp_size=2)
    model = LlamaForCausalLM.from_pretrained(path, distributed_config=plan).train()
    report = patch(model, strict=True)
    forward = model.lm_head.forward
    check_model(model, original)
    assert model.lm_head.forward is forward
    report.unpatch()
    assert model.train()(**batch()).logits is not None


def test_heads_of_models(tmp_path):
    tiny("Llama", vocab_size=102).save_pretrained(tmp_path)  # transformers 5.17 shards evenly only
    run(heads_of_models, 2, str(tmp_path))


def on_gpus(rank):
    """In bf16, by the comparison rule, with dw summed in 16 bits and a chunk left for the backward."""
    spec = next(s for s in SPECS if s.name == "fused_linear_cross_entropy")
    words = slice(rank * 4000, (rank + 1) * 4000)

    def sharded(x, weight, target, **options):
        weight = vocab_shards.summed_gradient(weight, vocab_shards.Shard(dist.group.WORLD.group_name))  # over all words
        return vocab_parallel_cross_entropy(x, weight[words], target, dist.group.WORLD, **options)

    def inputs():
        torch.manual_seed(0)
        return spec.inputs(torch.bfloat16, "cuda", lead=(5000,), H=512, V=8000)

    for options in ({}, {"recompute": True}, {"label_smoothing": 0.1, "softcap": 5.0}, {"reduction": "none"}):
        assert_accurate(sharded, spec.ref, inputs, options, k=spec.k)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus():
    run(on_gpus, 2, backend="nccl")
