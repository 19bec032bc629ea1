"""Linear layers of few rows by one kernel. The interpreter multiplies bf16 wrongly, so it runs them in fp16."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as torch has it
from torch.nn.modules import module as all_modules
from torch.utils.flop_counter import FlopCounterMode

from liger_like.ops import few_rows
from liger_like.ops.glu import GLUS
from liger_like.ops.glu_linear import gated_mlp
from liger_like.runtime.launcher import recorded
from liger_like.runtime.support import architecture

ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
# rows, features, outputs of each layer, bias
SHAPES = [
    (1, 64, (64, 40), False),
    (7, 192, (65, 8), True),
    (17, 128, (200, 64, 1), True),
    (64, 320, (96, 130, 31), False),
]


def half(device):
    return torch.bfloat16 if device == "cuda" else torch.float16


def layers_of(K, sizes, bias, device, dtype=None):
    layers = [nn.Linear(K, N, bias, device=device, dtype=torch.float32) for N in sizes]
    return [layer.to(dtype or half(device)) for layer in layers]


def rows(M, K, device, dtype=None):
    return torch.randn(M, K, device=device).to(dtype or half(device))


def separate(x, layers, act, dtype):
    ys = [F.linear(*(t if t is None else t.to(dtype) for t in (x, layer.weight, layer.bias))) for layer in layers]
    return [ACTS[act](ys[0]) * ys[1]] if act else ys


def require_rule(got, x, layers, act=None):
    expected, exact = (separate(x, layers, act, dtype) for dtype in (x.dtype, torch.float64))
    assert len(got) == len(expected)
    for y, same, true in zip(got, expected, exact, strict=True):
        assert (y.shape, y.dtype, y.is_contiguous()) == (same.shape, same.dtype, True)
        error, allowed = ((t.double() - true).norm() for t in (y, same))
        assert error <= 1.1 * allowed + 1e-6 * true.norm()


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_layers(shape, device):
    M, K, sizes, bias = shape
    x, layers = rows(M, K, device), layers_of(K, sizes, bias, device)
    with recorded() as launches:
        got = few_rows.linears(x, *layers)
    assert [kernel for kernel, *_ in launches] == [few_rows._few_rows_kernel]
    require_rule(got, x, layers)
    wide = torch.cat((x, x), -1)[:, :K]
    batch = few_rows.linears(wide[None, :, None], *layers)
    assert all(torch.equal(a, b[0, :, 0]) for a, b in zip(got, batch, strict=True))


@pytest.mark.parametrize("act", GLUS)
@pytest.mark.parametrize("shape", [(1, 64, 200, False), (33, 192, 96, True), (64, 128, 130, False)])
@torch.no_grad()
def test_gated_units(act, shape, device):
    M, K, N, bias = shape
    x, layers, down = rows(M, K, device), layers_of(K, (N, N), bias, device), nn.Identity()
    with recorded() as launches:
        got = gated_mlp(act, *layers, down, x)
    assert [kernel for kernel, *_ in launches] == [few_rows._few_rows_kernel]
    require_rule([got], x, layers, act)


@torch.no_grad()
def test_a_row_has_the_same_bits_in_every_batch(device):
    x, layers = rows(64, 320, device), layers_of(320, (96, 40), True, device)
    alone, act = few_rows.linears(x[5:6], *layers), few_rows.gated("silu", x[5:6], layers[0], layers[0])
    for M in (6, 17, 64):
        assert all(map(torch.equal, alone, (y[5:6] for y in few_rows.linears(x[:M], *layers))))
        assert torch.equal(act, few_rows.gated("silu", x[:M], layers[0], layers[0])[5:6])


@pytest.mark.parametrize(("several", "launched"), [(1, 0), (4, 1), (5, 2)])
@torch.no_grad()
def test_two_or_three_layers_have_a_kernel(several, launched, device):
    x, layers = rows(2, 64, device), layers_of(64, range(8, 8 + several), False, device)
    with recorded() as launches:
        got = few_rows.linears(x, *layers)
    assert len(launches) == launched
    require_rule(got, x, layers)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(few_rows, "gpu_class", lambda device: "hopper")
    monkeypatch.setattr(few_rows, "num_programs", lambda device, each: 132 * each)


@pytest.mark.parametrize("M", [65, 129, 256])
@pytest.mark.parametrize("tile", few_rows.TILES, ids=str)
@torch.no_grad()
def test_more_rows_on_hopper(tile, M, device, hopper, monkeypatch):
    if device == "cuda" and architecture(torch.device(device)) != 9:
        pytest.skip("needs the shared memory of Hopper")
    monkeypatch.setattr(few_rows, "TILES", (tile,))
    for K, sizes, bias in ((192, (200, 64, 1), True), (128, (130, 31), False)):
        x, layers = rows(M, K, device), layers_of(K, sizes, bias, device)
        with recorded() as launches:
            got = few_rows.linears(x, *layers)
        ((_, grid, *_),) = launches
        assert grid == (-(-M // tile[0]) * sum(-(-N // tile[1]) for N in sizes),)
        require_rule(got, x, layers)
    x, layers = rows(M, 192, device), layers_of(192, (200, 200), True, device)
    require_rule([few_rows.gated("silu", x, *layers)], x, layers, "silu")


@torch.no_grad()
def test_too_many_rows_for_hopper(device, hopper):
    weight = torch.randn(8, 64, device=device).to(half(device))
    for M, applies in ((256, True), (257, False)):
        assert (few_rows.of_few_rows(rows(M, 64, device), [weight], [None]) is not None) == applies


def test_tiles_of_more_rows(hopper, monkeypatch):
    """All programs run at once, by the smallest tile that allows it; else products of torch are faster."""
    for kind, M, sizes, tile in (
        ("hopper", 65, (2048, 512, 512), few_rows.TILES[0]),
        ("hopper", 129, (2048, 512, 512), few_rows.TILES[1]),
        ("hopper", 129, (8192,), few_rows.TILES[2]),
        ("hopper", 129, (14336,), None),
        ("large", 65, (2048, 512, 512), None),
    ):
        monkeypatch.setattr(few_rows, "gpu_class", lambda device, kind=kind: kind)
        assert few_rows._tile(torch.device("cpu"), M, 2048, sizes, gated=False) == tile


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


def hooked(layer):
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    return layer


def shadowed(layer):
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return layer


def doubled(layer):
    layer.__class__ = Doubled
    return layer


def transposed(layer):
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t())
    return layer


def of_subclass(layer):
    class Other(torch.Tensor):
        pass

    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Other))
    return layer


def unbiased(layer):
    layer.bias = None
    return layer


def of_one_bias(layer):
    layer.bias = nn.Parameter(layer.bias[:1].detach())  # torch adds it to each output
    return layer


CASES = {
    "many rows": {"M": 65},
    "no rows": {"M": 0},
    "fp32": {"dtype": torch.float32},
    "features": {"K": 96},
    "gradients": {"context": torch.enable_grad},
    "hook of all modules": {"context": lambda: all_modules.register_module_forward_hook(lambda module, args, y: 2 * y)},
    "forward of the class": {"context": lambda: mock.patch.object(nn.Linear, "forward", Doubled.forward)},
    "autocast": {"context": lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16)},
    **{f.__name__: {"change": f} for f in (hooked, shadowed, doubled, transposed, of_subclass, unbiased, of_one_bias)},
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_other_calls_are_those_of_the_layers(case, device):
    found = {"M": 3, "K": 64, "dtype": half(device), "change": lambda layer: layer, "context": contextlib.nullcontext}
    found |= CASES[case]
    x = rows(found["M"], found["K"], device, found["dtype"])
    first, second, down = layers_of(found["K"], (8, 8, 8), True, device, found["dtype"])
    down.weight.data = down.weight.data[:, :8].contiguous()
    second = found["change"](second)
    with torch.device(device), found["context"](), recorded() as launches:
        got, gated = few_rows.linears(x, first, second), few_rows.gated("silu", x, first, second)
        assert gated is None
        assert all(map(torch.equal, got, (first(x), second(x))))
    assert not launches


@torch.no_grad()
def test_layers_that_do_not_fit_raise_as_they_do(device):
    x, (narrow, wide) = rows(3, 64, device), [layers_of(K, (8,), True, device)[0] for K in (64, 128)]
    for layers in ((narrow, wide), (wide, narrow)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            few_rows.linears(x, *layers)
    (other,) = layers_of(64, (9,), True, device)
    assert few_rows.gated("silu", x, narrow, other) is None


@torch.no_grad()
def test_other_operands_are_left_to_torch(device):
    x, layer = rows(3, 64, device), layers_of(64, (8,), True, device)[0]
    weight, bias = layer.weight, layer.bias
    nested = torch.nested.nested_tensor([x, x[:1]], dtype=x.dtype)
    for name, given in {
        "a number": (x[0, 0], weight, bias),
        "a vector": (x, weight[0], None),
        "a long bias": (x, weight, torch.cat((bias, bias))),
        "a sparse weight": (x, weight.to_sparse(), bias),
        "compressed rows": (x, weight.to_sparse_csr(), bias),
        "a sparse input": (x.to_sparse(), weight, bias),
        "a nested input": (nested, weight, bias),
    }.items():
        assert few_rows.of_few_rows(given[0], [given[1]], [given[2]]) is None, name


@torch.no_grad()
def test_transforms_and_graphs(device):
    x, layers = rows(3, 64, device), layers_of(64, (8, 9), True, device)
    expected = [layer(x) for layer in layers]
    torch.testing.assert_close([*torch.func.vmap(lambda x: tuple(few_rows.linears(x, *layers)))(x)], expected)
    compiled = torch.compile(lambda x: few_rows.linears(x, *layers), fullgraph=True, backend="eager")
    with recorded() as launches:
        assert all(map(torch.equal, compiled(x), expected))
    assert not launches


@torch.no_grad()
def test_flops(device):
    x, layers = rows(3, 64, device), layers_of(64, (8, 9), True, device)
    with FlopCounterMode(display=False) as count:
        few_rows.linears(x, *layers)
    assert count.get_total_flops() == 2 * 3 * 64 * (8 + 9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("M", [1, 3, 16, 20, 64, 100, 256])
@torch.no_grad()
def test_the_rule(dtype, M):
    for K, sizes, bias in (
        (2048, (2048, 512, 512), False),
        (896, (896, 128, 128), True),
        (2880, (4096, 512, 512), True),
    ):
        x, layers = rows(M, K, "cuda", dtype), layers_of(K, sizes, bias, "cuda", dtype)
        require_rule(few_rows.linears(x, *layers), x, layers)
    for K, N in ((2048, 8192), (576, 1536)):
        x, layers = rows(M, K, "cuda", dtype), layers_of(K, (N, N), False, "cuda", dtype)
        require_rule([few_rows.gated("silu", x, *layers)], x, layers, "silu")


@pytest.mark.gpu
@torch.no_grad()
def test_offsets_beyond_int32():
    x = torch.zeros(3, 2**30 + 8, dtype=torch.bfloat16, device="cuda")[:, :64]
    x += rows(3, 64, "cuda")
    layers = layers_of(64, (8, 8), True, "cuda")
    assert all(map(torch.equal, few_rows.linears(x, *layers), few_rows.linears(x.contiguous(), *layers)))
    tall = torch.zeros(2**25 + 2**20, 64, dtype=torch.bfloat16, device="cuda")
    tall[-8:] = layers[0].weight
    (y,) = few_rows.of_few_rows(x[:1], [tall], [None])
    (expected,) = few_rows.of_few_rows(x[:1], [layers[0].weight], [None])
    assert torch.equal(y[:, -8:], expected)
    (y,) = few_rows.of_few_rows(x[:1].expand(64, -1), [tall], [None])
    assert torch.equal(y[-1:, -8:], expected)
