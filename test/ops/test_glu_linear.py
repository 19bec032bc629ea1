"""Linear layers behind a gated unit, which do not keep their input: against the same without that."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_like.ops import glu_linear as glu_linear_module
from liger_like.ops.glu import GLUS, swiglu_ref
from liger_like.ops.glu_linear import glu_linear

FROZEN = [(), ("gate",), ("up",), ("gate", "up"), ("bias",)]


def layer(device, dtype=torch.float32, bias=True):
    return nn.Linear(24, 16, bias, device, dtype)


def gates(device, dtype=torch.float32, packed=False, rows=(3, 5)):
    if packed:
        return [torch.randn(*rows, 48, device=device, dtype=dtype, requires_grad=True)]
    return [torch.randn(*rows, 24, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]


def plain(act, linear, gate, up=None):
    return linear(GLUS[act](gate, up))


def plain_torch(act, linear, gate, up):
    return linear(swiglu_ref(gate, up))


def outcome(fn, act, linear, tensors):
    """The output, and the gradients of what needs them."""
    out = fn(act, linear, *tensors)
    leaves = [t for t in (*tensors, *linear.parameters()) if t.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))]


def kept(fn, *args):
    """Sizes of the tensors that the backward keeps."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        fn(*args)
    return sizes


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the autograd.Function that saves less."""
    calls, apply = [], glu_linear_module._GLULinear.apply
    monkeypatch.setattr(
        glu_linear_module, "_GLULinear", SimpleNamespace(apply=lambda *args: calls.append(1) or apply(*args))
    )
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("act", "packed"), [*itertools.product(GLUS, (False, True))])
def test_gradients_are_those_of_the_two_one_by_one(act, packed, dtype, device, calls):
    linear, tensors = layer(device, dtype), gates(device, dtype, packed)
    got, expected = (outcome(fn, act, linear, tensors) for fn in (glu_linear, plain))
    assert calls == [1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("packed", [False, True])
def test_frozen_parts(frozen, packed, device, calls, poisoned):
    linear, tensors = layer(device, bias="bias" not in frozen), gates(device, packed=packed)
    for name, t in zip(("gate", "up"), tensors, strict=False):
        t.requires_grad_(name not in frozen)
    got, expected = (outcome(fn, "silu", linear, tensors) for fn in (glu_linear, plain))
    assert calls == [1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_of_rows_that_are_one(device):
    """Its memory, which sum().backward() gives with strides of 0, is read and not written."""
    linear, tensors = layer(device), gates(device)
    got, expected = (torch.autograd.grad(fn("silu", linear, *tensors).sum(), tensors) for fn in (glu_linear, plain))
    torch.testing.assert_close(got, expected)


def test_a_single_row(device, calls):
    linear, tensors = layer(device), gates(device, rows=())
    got, expected = (outcome(fn, "silu", linear, tensors) for fn in (glu_linear, plain))
    assert calls == [1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows(device):
    linear, tensors = layer(device), gates(device, rows=(0,))
    out, *gradients = outcome(glu_linear, "silu", linear, tensors)
    assert out.shape == (0, 16)
    assert not gradients[2].any()
    assert [g.shape for g in gradients] == [t.shape for t in (*tensors, *linear.parameters())]


def test_the_input_of_the_layer_is_not_kept(device):
    linear, tensors = layer(device), gates(device, rows=(100,))
    sizes, others = (kept(fn, "silu", linear, *tensors) for fn in (glu_linear, plain))
    assert sizes == [2400, 2400, linear.weight.numel()]
    assert sorted(others) == sorted([*sizes, 2400])


def test_twice_and_in_a_checkpoint(device):
    linear, tensors = layer(device), gates(device)
    out = glu_linear("silu", linear, *tensors)
    first, again = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    out = checkpoint(glu_linear, "silu", linear, *tensors, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), first)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_checkpoint_does_not_compute_the_values_again(checkpointed, device, monkeypatch):
    """Without one, a single node of autograd is enough."""
    values, forward = [], glu_linear_module._glu_linear_fwd
    monkeypatch.setattr(glu_linear_module, "_glu_linear_fwd", lambda *args: values.append(1) or forward(*args))
    linear, tensors = layer(device), gates(device)
    if checkpointed:
        out = checkpoint(glu_linear, "silu", linear, *tensors, use_reentrant=False)
    else:
        out = glu_linear("silu", linear, *tensors)
        assert out.grad_fn.name() == "_GLULinearBackward"
    out.sum().backward()
    assert values == [1]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(linear):
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    return linear


def with_forward(linear):
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    return linear


def of_a_subclass(linear):
    linear.__class__ = Doubled
    return linear


def frozen(linear):
    linear.weight.requires_grad_(False)
    return linear


@pytest.mark.parametrize("change", [with_hook, with_forward, of_a_subclass, frozen])
def test_other_layers_are_called(change, device, calls):
    original, tensors = layer(device), gates(device)
    linear = change(copy.deepcopy(original))
    factor = 1 if change is frozen else 2
    torch.testing.assert_close(glu_linear("silu", linear, *tensors), factor * plain("silu", original, *tensors))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_and_dtypes_without_a_kernel(dtype, device, calls):
    linear, tensors = layer(device, dtype), gates(device, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
        got, expected = (outcome(fn, "silu", linear, tensors) for fn in (glu_linear, plain))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.no_grad():
        glu_linear("silu", layer(device), *gates(device))
    assert not calls


def test_in_one_graph(device):
    linear, tensors = layer(device), gates(device)
    expected = outcome(glu_linear, "silu", linear, tensors)
    compiled = torch.compile(glu_linear, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(compiled, "silu", linear, tensors), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_torch_func_in_a_graph(transform, large, device, monkeypatch):
    """They refuse checkpoints, and the op has no rules for them: its jvp would be zero without a word."""
    monkeypatch.setattr(glu_linear_module, "LARGE", 1 if large else 1 << 60)
    linear, tensors = layer(device), gates(device)

    def transformed(fn, gate, up):
        def loss(gate):
            return fn("silu", linear, gate, up).pow(2).sum()

        if transform == "grad":
            return torch.func.grad(loss)(gate)
        if transform == "jvp":
            return torch.func.jvp(loss, (gate,), (up,))[1]
        return torch.func.vmap(partial(fn, "silu", linear))(gate, up)

    compiled = torch.compile(partial(transformed, glu_linear), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), transformed(plain_torch, *tensors))


def test_no_outputs(device):
    linear, tensors = torch.nn.utils.skip_init(nn.Linear, 24, 0, device=device), gates(device)
    for fn in (glu_linear, torch.compile(glu_linear, fullgraph=True, backend="aot_eager")):
        out, *gradients = outcome(fn, "silu", linear, tensors)
        assert out.shape == (3, 5, 0)
        assert not any(gradient.any() for gradient in gradients)
