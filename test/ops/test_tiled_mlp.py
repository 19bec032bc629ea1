"""Gated MLPs a tile of tokens at a time, against the same at once."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from liger_like.ops import tiled_mlp as module
from liger_like.ops.glu import GLUS
from liger_like.ops.glu_linear import glu_linear
from liger_like.ops.tiled_mlp import tiled_mlp
from liger_like.parallel import checkpoint_policy

TILE, T, H, I = 128, 300, 16, 24


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Let tiles be small, and note their tokens."""
    rows, halves = [], module._halves
    monkeypatch.setattr(module, "TILE", TILE)
    monkeypatch.setattr(module, "_halves", lambda x, *args: rows.append(len(x)) or halves(x, *args))
    return rows


def layers(device, dtype=torch.float32, bias=False, packed=False):
    gate = nn.Linear(H, 2 * I if packed else I, bias, device, dtype)
    up = None if packed else nn.Linear(H, I, bias, device, dtype)
    return gate, up, nn.Linear(I, H, bias, device, dtype)


def at_once(gate, up, down, x, act="silu"):
    return glu_linear(act, down, gate(x), *([] if up is None else [up(x)]))


def in_tiles(gate, up, down, x, act="silu"):
    return tiled_mlp(act, gate, up, down, x, functools.partial(at_once, gate, up, down, act=act))


def in_torch(gate, up, down, x, act="silu"):
    return down(GLUS[act](gate(x), *([] if up is None else [up(x)])))


def outcome(fn, several, x, **options):
    """The output, and the gradients of what needs them."""
    x = x.detach().requires_grad_(x.requires_grad)
    out = fn(*several, x, **options)
    parameters = [p for layer in several if layer is not None for p in layer.parameters()]
    leaves = [t for t in (x, *parameters) if t.requires_grad]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def tokens(device, dtype=torch.float32, shape=(3, T // 3)):
    return torch.randn(*shape, H, device=device, dtype=dtype, requires_grad=True)


def assert_exact(got, several, x, **options):
    """The comparison rule against torch in the same dtype and in float64."""
    wide = [None if layer is None else layer.double() for layer in copy.deepcopy(several)]
    expected, exact = (
        outcome(in_torch, several, x, **options),
        outcome(in_torch, wide, x.double().detach().requires_grad_(x.requires_grad), **options),
    )
    for a, b, c in zip(got, expected, exact, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        norm = c.norm()
        assert (a - c).norm() <= 1.1 * (b - c).norm() + 1e-6 * norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("act", "bias", "packed"), [("silu", False, False), ("gelu", True, True), ("gelu_tanh", True, False)]
)
def test_outputs_and_gradients(act, bias, packed, dtype, device, calls, poisoned):
    several, x = layers(device, dtype, bias, packed), tokens(device, dtype)
    got = outcome(in_tiles, several, x, act=act)
    assert calls == [128, 128, 44] * 2
    assert_exact(got, several, x, act=act)


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_what_is_kept_and_made_again(in_checkpoint, device, calls):
    """x and the weights; a checkpoint's recomputation makes no product."""
    several, x, sizes = layers(device), tokens(device), []
    call = functools.partial(in_tiles, *several)
    if in_checkpoint:
        call = functools.partial(checkpoint, call, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        out = call(x)
    sizes = [size for size in sizes if size]  # torch 2.11's checkpoint saves an empty tensor, too
    assert sizes[:1] == [T * H]
    assert set(sizes[1:]) <= {H * I, I * H}
    assert calls == [128, 128, 44]
    out.sum().backward()
    assert calls == [128, 128, 44] * 2


@pytest.mark.parametrize(("behind", "save", "again"), [(None, "matmul", 0), (H, "matmul", 1), (H, "glu_linear", 0)])
def test_in_a_policy(behind, save, again, device, calls):
    """Products are not saved; the result is made again where a norm follows, unless the policy saves it."""
    several, x = layers(device), tokens(device)
    norm = nn.LayerNorm(behind, device=device) if behind else nn.Identity()
    policy = checkpoint_policy((save,))
    out = checkpoint(lambda t: norm(in_tiles(*several, t)), x, use_reentrant=False, context_fn=policy)
    out.sum().backward()
    assert calls == [128, 128, 44] * (2 + again)


@pytest.mark.parametrize("frozen", [("x",), ("gate", "up"), ("down",), ("x", "gate", "up")])
def test_frozen_parts(frozen, device, poisoned):
    several, x = layers(device, bias=True), tokens(device)
    x.requires_grad_("x" not in frozen)
    for name, layer in zip(("gate", "up", "down"), several, strict=True):
        layer.requires_grad_(name not in frozen)
    assert_exact(outcome(in_tiles, several, x), several, x)


def test_each_weight_gets_one_gradient(device):
    several, seen = layers(device), []
    for layer in several:
        layer.weight.register_hook(lambda grad: seen.append(grad.shape))
    in_tiles(*several, tokens(device)).sum().backward()
    assert len(seen) == 3


def test_sums_over_many_tiles_are_rounded_once(device):
    """16 sums in fp16 would be several times as wrong as one product."""
    several, x = layers(device, torch.float16), tokens(device, torch.float16, (16 * TILE,))
    assert_exact(outcome(in_tiles, several, x), several, x)


def test_twice(device):
    several, x = layers(device), tokens(device)
    out = in_tiles(*several, x)
    first, again = (torch.autograd.grad(out.sum(), x, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(129,), (2, 97), (1, 257), (3, 1, 131)])
def test_shapes_and_strides(shape, device, poisoned):
    """x is part of larger memory, and transposed."""
    several = layers(device, bias=True)
    for x in (tokens(device, shape=(*shape, 2))[..., 1, :], tokens(device, shape=shape[::-1]).transpose(0, -2)):
        assert_exact(outcome(in_tiles, several, x), several, x)


def test_shared_weights(device):
    several, x = layers(device), tokens(device)
    several[1].weight = several[0].weight
    assert_exact(outcome(in_tiles, several, x), several, x)


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_second_derivative_is_refused(in_checkpoint, device):
    several, x = layers(device), tokens(device)
    call = functools.partial(in_tiles, *several)
    out = checkpoint(call, x, use_reentrant=False) if in_checkpoint else call(x)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        dx.sum().backward()


def test_a_forward_derivative_is_refused_without_gradients(device):
    """An op without a rule would lose the tangent."""
    several, x = layers(device), tokens(device).detach()
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        in_tiles(*several, forward_ad.make_dual(x, x))


@pytest.mark.parametrize("change", ["few tokens", "dtype", "hook", "compiled"])
def test_at_once(change, device, calls):
    several, x, hooked = layers(device), tokens(device), []
    if change == "few tokens":
        x = tokens(device, shape=(TILE,))
    if change == "dtype":
        several, x = layers(device, torch.float64), tokens(device, torch.float64)
    if change == "hook":
        several[0].register_forward_hook(lambda *_: hooked.append(1))
    fn = torch.compile(in_tiles, backend="eager") if change == "compiled" else in_tiles
    out = fn(*several, x)
    assert hooked == [1] * (change == "hook")
    torch.testing.assert_close(out, at_once(*several, x))
    assert not calls


def test_without_gradients(device, calls):
    several, x = layers(device), tokens(device)
    with torch.no_grad():
        torch.testing.assert_close(in_tiles(*several, x), at_once(*several, x))
    assert calls == [128, 128, 44]


class Adapted(nn.Module):
    """A frozen layer with an adapter, whose dropout is random."""

    def __init__(self, layer, dropout=0.0):
        super().__init__()
        self.base, self.dropout = layer.requires_grad_(False), nn.Dropout(dropout)
        out, size = layer.weight.shape
        self.a, self.b = (
            nn.Parameter(torch.randn(*shape, device=layer.weight.device) / 4) for shape in ((2, size), (out, 2))
        )

    def forward(self, x):
        return self.base(x) + self.dropout(x.to(self.a.dtype)) @ self.a.t() @ self.b.t()


def test_adapters(device, calls, monkeypatch):
    """Each tile is a checkpoint that calls the modules."""
    used = []
    monkeypatch.setattr(
        module, "checkpoint", lambda fn, x, **kwargs: used.append(len(x)) or checkpoint(fn, x, **kwargs)
    )
    several, x = tuple(Adapted(layer) for layer in layers(device)), tokens(device)
    got, expected = (outcome(fn, several, x) for fn in (in_tiles, at_once))
    assert used == [128, 128, 44]
    torch.testing.assert_close(got, expected)
    for adapter in several:
        adapter.dropout.p = 0.5
    assert all(t.isfinite().all() for t in outcome(in_tiles, several, x))
    used.clear()
    for adapter in several:
        adapter.to(torch.float16)  # whose sums over tiles would be rounded to 11 bits
    outcome(in_tiles, several, x.to(torch.float16))
    assert not used


def test_autocast(device):
    """Weights and gradients in fp32, products in the dtype of autocast, as torch has it."""
    several, x = layers(device, bias=True), tokens(device)
    with torch.autocast(device, torch.float16):
        got, expected = (outcome(fn, several, x) for fn in (in_tiles, in_torch))
    exact = outcome(in_torch, several, x)
    for a, b, c in zip(got, expected, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - c).norm() <= 1.1 * (b - c).norm() + 1e-6 * c.norm()
