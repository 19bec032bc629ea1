"""Options, errors and edge cases of the norms and RoPE."""

import itertools

import pytest
import torch

from liger_like import nn, ops
from liger_like.testing import SPECS, assert_accurate

ROPE = next(s for s in SPECS if s.name == "rope")


@pytest.mark.parametrize("cos_layout", ["full", "half", "repeat"])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_in_half_out"])
def test_layouts_of_the_tables(layout, cos_layout, device):
    shape = {"B": 2, "H": 3, "Hk": 1, "S": 4, "D": 20, "R": 12, "layout": cos_layout}
    make = lambda: ROPE.inputs(torch.float32, device, **shape)  # noqa: E731
    assert_accurate(ROPE.fn, ROPE.ref, make, {"layout": layout, "cos_layout": cos_layout})


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
@pytest.mark.parametrize("apart", ["cos", "sin"])
@pytest.mark.parametrize("batched", [False, True])
def test_tables_of_different_strides(name, apart, batched, device):
    spec = next(s for s in SPECS if s.name == name)
    shape = {"B": 2, "H": 3, "Hk": 1, "S": 4, "D": 20, "R": 12, "batched": batched, "weights": name != "rope"}
    inputs = spec.inputs(torch.float32, device, **shape)
    expected = spec.fn(**inputs)
    inputs[apart] = torch.cat((inputs[apart], torch.full_like(inputs[apart], torch.nan)), -1)[..., :12]
    assert all(torch.equal(a, b) for a, b in zip(spec.fn(**inputs), expected, strict=True))


def test_heads_behind_the_sequence(device):
    q, k, cos, sin = ROPE.inputs(torch.float32, device, B=2, H=3, Hk=1, S=4, D=20, R=12).values()
    before = ops.rope(q, k, cos, sin)
    after = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for x, a, b in zip((q, k), before, after, strict=True):
        assert torch.equal(a, b.transpose(1, 2))
        assert a.stride() == x.stride()  # attention reads this layout without a copy


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_half_of_the_features_turns_where_that_is_said(name, device):
    """A table of D/2 columns may be for all features or for half of them: it must say which."""
    spec = next(s for s in SPECS if s.name == name)
    shape = {"B": 2, "H": 3, "Hk": 1, "S": 4, "D": 24, "R": 12, "weights": name != "rope"}
    for options in ({"rotary_dim": 12}, {"cos_layout": "half"}, {"cos_layout": "half", "rotary_dim": 24}):
        assert_accurate(spec.fn, spec.ref, lambda: spec.inputs(torch.float32, device, **shape), options)
    with pytest.raises(ValueError, match="pass cos_layout='half' if all features turn, or rotary_dim=12"):
        spec.fn(**spec.inputs(torch.float32, device, **shape))


def test_rotation_keeps_dot_products(device):
    """The definition of a rotary embedding: q(m) . k(n) depends on m - n only."""
    angle = torch.arange(9, device=device)[:, None] * torch.rand(8, device=device)
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    q, k = (torch.randn(1, 1, 1, 16, device=device).expand(1, 1, 9, 16) for _ in range(2))
    q, k = ops.rope(q, k, cos, sin)
    scores = (q @ k.mT)[0, 0]
    for offset in range(-8, 9):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_learned_rotation_gets_its_gradient(device):
    q, k, cos, sin = ROPE.inputs(torch.float32, device, B=1, H=2, Hk=1, S=3, D=8, R=8).values()
    cos.requires_grad_()
    ops.rope(q, k, cos, sin)[0].sum().backward()
    assert cos.grad.abs().sum() > 0


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_dtypes_of_weight_and_input(casting_mode, device):
    kinds = (torch.float32, torch.float16)
    for x_dtype, w_dtype in itertools.product(kinds, kinds):
        x = torch.randn(3, 16, device=device, dtype=x_dtype, requires_grad=True)
        w = torch.randn(16, device=device, dtype=w_dtype, requires_grad=True)
        y = ops.rms_norm(x, w, casting_mode=casting_mode)
        y.sum().backward()
        expected = x_dtype if casting_mode == "gemma" else torch.promote_types(x_dtype, w_dtype)
        assert (y.dtype, x.grad.dtype, w.grad.dtype) == (expected, x_dtype, w_dtype)


def test_residual_in_fp32(device):
    x = torch.randn(3, 16, device=device, dtype=torch.float16, requires_grad=True)
    residual = torch.randn(3, 16, device=device, requires_grad=True)
    normed, s = ops.add_rms_norm(x, residual, casting_mode="gemma")
    (normed.sum() + s.square().sum()).backward()
    assert torch.equal(s, x + residual)
    assert s.dtype == residual.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float16


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_unused(used, device):
    inputs = [torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2)]
    weight = torch.randn(16, device=device, requires_grad=True)
    upstream = torch.randn(3, 16, device=device)
    s = inputs[0] + inputs[1]
    expected = s if used else ops.rms_norm(s, weight)
    got = ops.add_rms_norm(*inputs, weight)[used]
    leaves = inputs if used else [*inputs, weight]
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and the reference
def test_layer_norm_is_contiguous(dtype, device):
    """The output is contiguous, as torch's: some image models, whose patches were channels, call view on it."""
    assert ops.layer_norm(torch.randn(2, 8, 6, device=device, dtype=dtype).mT).is_contiguous()


def test_nan_stays_in_its_row(device):
    x = torch.randn(5, 32, device=device)
    x[2, 7] = float("nan")
    x[4, 0] = float("inf")
    for y in (ops.rms_norm(x), ops.layer_norm(x)):
        assert y.isnan().any(-1).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("op", [ops.rms_norm, ops.layer_norm])
def test_rows_do_not_depend_on_the_batch(op, device):
    x = torch.randn(65, 128, device=device)
    for rows in (1, 7, 64):
        assert torch.equal(op(x[:rows]), op(x)[:rows])


def test_far_from_zero(device):
    """A variance by E[x^2] - E[x]^2 would be all rounding here."""
    x = torch.randn(4, 9000, device=device) + 1000
    torch.testing.assert_close(
        ops.layer_norm(x), torch.nn.functional.layer_norm(x.double(), (9000,)).float(), rtol=1e-3, atol=1e-3
    )


def test_modules_have_the_state_of_what_they_replace(device):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    pairs = (
        (nn.RMSNorm(16), LlamaRMSNorm(16)),
        (nn.LayerNorm(16), torch.nn.LayerNorm(16)),
        (nn.LayerNorm(16, bias=False), torch.nn.LayerNorm(16, bias=False)),
        (nn.SwiGLUMLP(16, 24), LlamaMLP(config)),
    )
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())
        ours, theirs = ours.to(device), theirs.to(device)
        x = torch.randn(3, 16, device=device)
        torch.testing.assert_close(ours(x), theirs(x))
    x = torch.randn(3, 16, device=device)
    gemma = nn.RMSNorm(16, offset=1.0, casting_mode="gemma").to(device)
    torch.testing.assert_close(gemma(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-6))
    mlp = nn.GeGLUMLP(16, 24, approximate="none").to(device)
    torch.testing.assert_close(mlp(x), mlp.down_proj(torch.nn.functional.gelu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_loss_modules(device):
    x, head = torch.randn(5, 16, device=device), torch.randn(30, 16, device=device)
    y, weight = torch.randint(0, 30, (5,), device=device), torch.rand(30, device=device)
    plain = nn.CrossEntropyLoss(weight, label_smoothing=0.1).to(device)
    fused = nn.FusedLinearCrossEntropyLoss(weight, label_smoothing=0.1).to(device)
    expected = torch.nn.functional.cross_entropy(x @ head.T, y, weight, label_smoothing=0.1)
    torch.testing.assert_close(plain(x @ head.T, y), expected)
    torch.testing.assert_close(fused(head, x, y), expected)
    assert set(fused.state_dict()) == {"class_weight"}
