"""The loss of a head whose words are spread over processes equals that of one process that has all."""

import pytest
import torch
import torch.distributed as dist
from distributed import run

from liger_like import fused_linear_cross_entropy
from liger_like.ops.linear_cross_entropy import OUTPUTS
from liger_like.parallel import vocab_parallel_cross_entropy

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
    if (first := options.pop("lora", None)) is not None:
        leaves |= {first: randn(3, H) if first == "A" else randn(B, S, 3), "B": randn(V, 3)}
    return leaves, target, options


def loss_of(function, x, weight, target, leaves, options, **more):
    lora = {"lora": (leaves["A"], leaves["B"], 0.7)} if "A" in leaves else {}
    lora |= {"lora": (leaves["u"], leaves["B"])} if "u" in leaves else {}
    bias = {"bias": leaves["bias"]} if "bias" in leaves else {}
    return function(x, weight, target, **more, **options, **bias, **lora)


def gradients(result, leaves):
    """Of a sum with weights that differ from token to token."""
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


# all in one process group, the others where they differ: their own tolerance, the reference, more processes
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
