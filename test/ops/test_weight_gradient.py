"""The weight's gradient of the fused loss: sums over chunks in 16 bits, rounding under autocast, the last product."""

import itertools

import pytest
import torch

from liger_like import ops
from liger_like.ops.losses import dw_sum
from liger_like.ops.losses.dw_sum import add_products, exponent_block, exponents_like, scale_rows
from liger_like.ops.losses.dw_sum import hopper as dw_sum_hopper
from liger_like.ops.losses.dw_sum import portable as dw_sum_portable
from liger_like.ops.losses.vocab_shards import Shard
from liger_like.runtime import support
from liger_like.testing import SPECS

LINEAR = next(s for s in SPECS if s.name == "fused_linear_cross_entropy")
each_recompute = pytest.mark.parametrize("recompute", [False, True])


@pytest.fixture(params=["portable", pytest.param("hopper", marks=pytest.mark.gpu)])
def kernel(request, monkeypatch, device):
    """Both kernels, with fewer programs than tiles."""
    if request.param == "portable":
        monkeypatch.setattr(dw_sum, "architecture", lambda device: 10)
    elif support.architecture(torch.device(device)) != 9:
        pytest.skip("needs a Hopper GPU")
    for module in (dw_sum_portable, dw_sum_hopper):
        monkeypatch.setattr(module, "num_programs", lambda *args: 3)


def decoded(total, exponents):
    unit = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents.int() - 127)
    return total.double() * unit.repeat_interleave(exponent_block(total.device), 1)[:, : total.shape[1]]


def operand(*shape, dtype, device):
    """Random, with rows that start at multiples of 16 bytes."""
    return torch.randn(shape[0], -(-shape[1] // 8) * 8, device=device).to(dtype)[:, : shape[1]]


class Sum:
    """Return the sum of ``add_products`` in memory that held garbage."""

    def __init__(self, M, N, device):
        self.total = torch.full((M, N), float("nan"), dtype=torch.float16, device=device)
        blocks = exponents_like(self.total).shape
        self.memory = torch.full((blocks.numel() + 64,), 255, dtype=torch.uint8, device=device)
        self.exponents = self.memory[:-64].view(blocks)
        self.rounds = 0

    def add(self, a, b):
        add_products(self.total, self.exponents, a, b, accumulate=self.rounds > 0)
        self.rounds += 1
        assert self.memory[-64:].eq(255).all()
        return decoded(self.total, self.exponents)


def relative_error(got, exact):
    return ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).max()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(("K", "M", "N"), [(33, 500, 8), (70, 140, 264)])
def test_sum_of_products(kernel, K, M, N, dtype, device):
    summed, exact = Sum(M, N, device), 0
    for rounds in range(1, 17):
        a, b = operand(K, M, dtype=dtype, device=device), operand(K, N, dtype=dtype, device=device)
        got, exact = summed.add(a, b), exact + a.double().T @ b.double()
        assert relative_error(got.flatten(), exact.flatten()) <= 2.2e-4 * rounds**0.5
    bf16, best = ((t.bfloat16().double() - exact).norm() for t in (got, exact))
    assert bf16 <= 1.1 * best

    a, b = operand(K, M, dtype=dtype, device=device), operand(K, N, dtype=dtype, device=device)
    factor, before = torch.tensor([-0.3], device=device), summed.total.clone()
    out, exact = torch.full_like(before, float("nan"), dtype=torch.bfloat16), -0.3 * (exact + a.double().T @ b.double())
    for target in (out, summed.total.view(torch.bfloat16)):  # in other memory, and in the memory of the sum
        assert torch.equal(summed.total, before)
        add_products(summed.total, summed.exponents, a, b, accumulate=True, out=target, factor=factor)
        best = (exact.bfloat16().double() - exact).norm()
        assert (target.double() - exact).norm() <= best * (1.1 if device == "cuda" else 2.2)  # interpreter truncates


def test_rows_of_a_sum_do_not_touch(kernel, device):
    """Rows from 1e-20 to 1e20, one of zeros, one with a huge element; and then inf and NaN in two more."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = operand(40, 136, dtype=dtype, device=device), operand(40, 200, dtype=dtype, device=device)
    a *= torch.logspace(-20, 20, 136, device=device)
    a[:, 100] = a[0] = b[0] = 0
    a[0, 7] = b[0, 3] = a[:, 7].abs().max() ** 0.5 * 1e3
    summed, exact = Sum(136, 200, device), a.double().T @ b.double()
    for rounds in (1, 2):
        got = summed.add(a, b)
        rows = torch.arange(136, device=device) != 100
        assert relative_error(got[rows], rounds * exact[rows]) <= 4e-4
        others = torch.arange(200, device=device) != 3
        assert relative_error(got[7, others], rounds * exact[7, others]) <= 4e-4
        assert got[100].eq(0).all()
    broken = a.clone()
    broken[2, 5], broken[2, 130] = float("inf"), float("nan")
    got, want = summed.add(broken, b), 3 * exact
    finite = got.isfinite().all(1)
    assert (~finite).nonzero().flatten().tolist() == [5, 130]
    assert not got[~finite].isfinite().any()
    assert relative_error(got[finite & rows], want[finite & rows]) <= 4e-4


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_scale_rows(ordered, add, device):
    src, factor = torch.randn(37, 208, device=device)[:, :200], torch.tensor([0.3], device=device)
    order = torch.randperm(37, device=device) if ordered else None
    for dtype in (torch.float32, torch.float16):
        out = torch.randn(37, 203, device=device).to(dtype)[:, 1:201]
        want = out.float() * add
        want[slice(None) if order is None else order] += src * factor
        scale_rows(src, order, factor, out, add)
        torch.testing.assert_close(out, want.to(dtype), rtol=0, atol=1e-6)


def test_scale_rows_in_their_own_memory(device):
    pairs = [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
    pairs = pairs if device == "cuda" else pairs[:2]
    for (src_dtype, dtype), number in itertools.product(pairs, (0.3, 1.0)):
        factor = torch.tensor([number], device=device)
        src = torch.randn(3, 9000, device=device).to(src_dtype)  # a row spans several blocks
        want = (src * factor).to(dtype)
        out = src.view(dtype)[:, :9000]
        scale_rows(src, None, factor, out, False)
        assert torch.equal(out, want)


@each_recompute
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_autocast_never_rounds_the_gradient_of_an_fp32_weight(recompute, dtype, device):
    """Gradients of 1e-10, which are 0 in fp16; and sums of them to which bf16 would add nothing."""
    inputs = LINEAR.inputs(torch.float32, device, lead=(37,), H=16, V=40)
    w = inputs["weight"]
    half = {n: t.detach().to(dtype).double() if t.is_floating_point() else t for n, t in inputs.items()}
    half["weight"].requires_grad_()
    exact = torch.autograd.grad(LINEAR.ref(**half), half["weight"])[0]
    for rounds in range(1, 5):
        with torch.autocast(device, dtype=dtype):
            loss = ops.fused_linear_cross_entropy(**inputs, recompute=recompute, accumulate_grad=True, chunk_rows=16)
        (loss * 1e-10).backward()
        assert relative_error(w.grad.double().flatten(), rounds * 1e-10 * exact.flatten()) <= torch.finfo(dtype).eps
    assert w.grad.ne(w.grad.to(torch.bfloat16)).float().mean() > 0.9


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_to_another_dtype_than_that_of_the_weight(recompute, bias, kernel, device):
    """Autocast casts a bf16 weight to fp16, as it does for a linear layer; its gradient is rounded to bf16."""
    x, w, b = (torch.randn(shape, device=device) for shape in ((50, 64), (72, 64), (72,)))
    leaves = [
        t.to(dtype).requires_grad_() for t, dtype in ((x, torch.float32), (w, torch.bfloat16), (b, torch.bfloat16))
    ]
    leaves = leaves if bias else leaves[:2]
    y = torch.randint(0, 72, (50,), device=device)
    with torch.autocast(device, torch.float16):
        loss = ops.fused_linear_cross_entropy(leaves[0], leaves[1], y, *leaves[2:], chunk_rows=16, recompute=recompute)
        logits = torch.nn.functional.linear(*leaves)
    assert logits.dtype == torch.float16
    expected = torch.nn.functional.cross_entropy(logits.float(), y)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for leaf, (got, want) in zip(leaves, pairs, strict=True):
        assert got.dtype == leaf.dtype
        assert relative_error(got.double().flatten(), want.double().flatten()) <= 8e-3


@pytest.mark.gpu
@each_recompute
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_autocast_dtype_with_every_weight_dtype(dtype, weight_dtype, recompute, device):
    """The products are large enough for cuBLAS to store them in the dtype of the gradient."""
    x = torch.randn(4096, 512, device=device, requires_grad=True)
    w = (torch.randn(16384, 512, device=device) / 16).to(weight_dtype).requires_grad_()
    y = torch.randint(0, 16384, (4096,), device=device)
    with torch.autocast(device, dtype):
        loss = ops.fused_linear_cross_entropy(x, w, y, recompute=recompute)
        expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w).float(), y)
    pairs = zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True)
    assert all(relative_error(a.double().flatten(), b.double().flatten()) <= 2e-2 for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_weight_may_be_gone_in_the_backward(dtype, x_needs_grad, kernel, device):
    x, w = (torch.randn(n, 64, device=device).to(dtype) for n in (50, 72))
    y = torch.randint(0, 72, (50,), device=device)
    y[::5] = -100
    results = []
    for released in (False, True):
        leaf, weight = x.clone().requires_grad_(x_needs_grad), w.clone().requires_grad_()
        options = {"chunk_rows": 16, "shard": Shard(released=released)}
        loss = ops.fused_linear_cross_entropy(leaf, weight, y, **options)
        if released:
            weight.untyped_storage().resize_(0)
        loss.backward()
        results.append((loss, leaf.grad, weight.grad))
    for t, other in zip(*results, strict=True):
        assert t is other or torch.equal(t, other)
