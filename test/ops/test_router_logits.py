"""Logits of routers in fp32, from operands in bf16.

The interpreter multiplies bf16 wrongly. So the kernel is tested in fp16 there, and the whole op on a GPU.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from liger_like.ops import router_logits as op
from liger_like.runtime.launcher import recorded

SHAPES = [(7, 70, 8), (130, 96, 200), (3, 5, 1), (65, 200, 129), (0, 16, 4)]  # rows, features, experts


def error(a, exact):
    return float((a.double() - exact).norm())


def operands(rows, features, experts, device, dtype=torch.bfloat16):
    return torch.randn(rows, features, device=device).to(dtype), torch.randn(experts, features, device=device).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, device):
    x, weight = operands(*shape, device, torch.bfloat16 if device == "cuda" else torch.float16)
    got, expected = op._router_logits_fwd(x, weight), op.router_logits_ref(x, weight)
    exact = op.router_logits_ref(x.double(), weight.double())
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape) == (torch.float32, (shape[0], shape[2]))
    assert error(got, exact) <= 1.1 * error(expected, exact) + 1e-6 * exact.norm()
    wide = torch.randn(2, shape[0], 2 * shape[1], device=device).to(x.dtype)[..., : shape[1]]
    tall = weight.t().contiguous().t()
    assert torch.equal(op._router_logits_fwd(wide, tall), op._router_logits_fwd(wide.contiguous(), weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, device):
    x, weight = operands(*shape, device)
    dlogits = torch.randn(shape[0], shape[2], device=device)

    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(op.router_logits_ref(*leaves), leaves, dlogits)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(op.router_logits_ref(*leaves), leaves, dlogits.double())
    got = op._router_logits_bwd(dlogits, x, weight, True, True)
    for a, b, c in zip(got, expected, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, c) <= 1.1 * error(b, c) + 1e-6 * c.norm()
    for needs in ((True, False), (False, True)):
        alone = op._router_logits_bwd(dlogits, x, weight, *needs)
        for one, both, needed in zip(alone, got, needs, strict=True):
            assert torch.equal(one, both) if needed else not one.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 7168, 256), (17, 7168, 384)])
def test_the_rule(shape):
    x, weight = (t.requires_grad_() for t in operands(*shape, "cuda"))
    doubles = [t.detach().double().requires_grad_() for t in (x, weight)]
    dlogits = torch.randn(shape[0], shape[2], device="cuda")
    found = []
    for function, leaves in (
        (op.router_logits, (x, weight)),
        (op.router_logits_ref, (x, weight)),
        (op.router_logits_ref, doubles),
    ):
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, dlogits.to(out.dtype))])
    for name, a, b, c in zip(("logits", "dx", "dweight"), *found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, c) <= 1.1 * error(b, c) + 1e-6 * c.norm(), name


@pytest.mark.gpu
def test_more_rows_than_int32_offsets():
    x = torch.zeros(2**20 + 64, 2048, dtype=torch.bfloat16, device="cuda")
    x[-64:], weight = (t for t in operands(64, 2048, 8, "cuda"))
    assert torch.equal(op.router_logits(x, weight)[-64:], op.router_logits(x[-64:], weight))


def test_kept_and_flops(device):
    """Nothing in fp32 is kept for the backward, which may need one gradient alone."""
    x, weight = operands(6, 32, 4, device)
    weight.requires_grad_()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        FlopCounterMode(display=False) as flops,
    ):
        out = op.router_logits(x, weight)
        out.sum().backward()
    assert {(t.dtype, t.shape) for t in kept} == {(x.dtype, x.shape), (weight.dtype, weight.shape)}
    assert flops.get_total_flops() == 2 * 2 * 6 * 32 * 4
    assert weight.grad.dtype == torch.bfloat16


def test_no_second_derivative(device):
    x, weight = (t.requires_grad_() for t in operands(4, 16, 4, device))
    (dx,) = torch.autograd.grad(op.router_logits(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_other_dtypes_are_cast(dtypes, device):
    x, weight = (t.to(dtype) for t, dtype in zip(operands(6, 32, 4, device), dtypes, strict=True))
    with recorded() as launches:
        torch.testing.assert_close(op.router_logits(x, weight), op.router_logits_ref(x, weight), rtol=0, atol=0)
    assert not launches


def test_compiled(device):
    x, weight = (t.requires_grad_() for t in operands(6, 32, 4, device))
    torch._dynamo.reset()
    compiled = torch.compile(op.router_logits, fullgraph=True, backend="aot_eager")
    for rows in (6, 4, 3):
        got, expected = (
            [out := function(x[:rows], weight), *torch.autograd.grad(out.sum(), (x, weight))]
            for function in (compiled, op.router_logits)
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
