"""Bad input raises an error that names the argument, and never reaches a kernel."""

import inspect

import numpy as np
import pytest
import torch

from liger_like import nn, ops

X, W = torch.randn(3, 8), torch.randn(8)
Q, COS = torch.randn(1, 2, 5, 8), torch.randn(5, 8)
Y, HEAD = torch.tensor([0, 1, 2]), torch.randn(11, 8)
META = torch.empty(8, device="meta")
ONE = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "x must be floating point", lambda: ops.rms_norm(X.int())),
        (TypeError, "x must be a tensor", lambda: ops.rms_norm([1.0])),
        (ValueError, "x must have a last dimension", lambda: ops.rms_norm(torch.tensor(1.0))),
        (ValueError, "x must have a last dimension", lambda: ops.layer_norm(torch.empty(3, 0))),
        (ValueError, r"weight must have shape \[8\]", lambda: ops.rms_norm(X, W[:7])),
        (ValueError, "weight must be on cpu", lambda: ops.rms_norm(X, META)),
        (ValueError, "eps must not be negative", lambda: ops.rms_norm(X, W, -1e-6)),
        (ValueError, "eps must be finite", lambda: ops.layer_norm(X, eps=float("nan"))),
        (TypeError, "eps must be a number", lambda: ops.rms_norm(X, W, "small")),
        (ValueError, "casting_mode must be one of", lambda: ops.rms_norm(X, casting_mode="bert")),
        (ValueError, "residual must have shape", lambda: ops.add_rms_norm(X, X[:2])),
        (ValueError, "bias must have shape", lambda: ops.layer_norm(X, W, W[:3])),
        (ValueError, "layout must be one of", lambda: ops.rope(Q, Q, COS, COS, layout="neox")),
        (ValueError, "cos_layout must be one of", lambda: ops.rope(Q, Q, COS, COS, cos_layout="twice")),
        (ValueError, "unsqueeze_dim must be one of", lambda: ops.rope(Q, Q, COS, COS, unsqueeze_dim=3)),
        (ValueError, "q must have 4 dimensions", lambda: ops.rope(Q[0], Q, COS, COS)),
        (ValueError, "k must have the shape of q", lambda: ops.rope(Q, Q[..., :4], COS, COS)),
        (ValueError, "sin must have the shape of cos", lambda: ops.rope(Q, Q, COS, COS[:, :4])),
        (ValueError, "cos must be", lambda: ops.rope(Q, Q, COS[:4], COS[:4])),
        (ValueError, r"cos must be \[5, C\] or \[1, 5, C\], got \[4, 8\]", lambda: ops.rope(Q, Q, COS[:4], COS[:4])),
        (ValueError, "rotary width of 16", lambda: ops.rope(Q, Q, COS, COS, cos_layout="half")),
        (ValueError, "rotary width of 7", lambda: ops.rope(Q, Q, COS[:, :7], COS[:, :7])),
        (ValueError, "pass cos_layout='half' if all", lambda: ops.rope(Q, Q, COS[:, :4], COS[:, :4])),
        (ValueError, "or rotary_dim=4", lambda: ops.qk_norm_rope(Q, Q, W, W, COS[:, :4], COS[:, :4])),
        (ValueError, "rotary_dim must be 8", lambda: ops.rope(Q, Q, COS, COS, rotary_dim=4)),
        (ValueError, "sin must have the shape", lambda: ops.qk_norm_rope(Q, Q, W, W, COS, COS[None])),
        (ValueError, "cos must be", lambda: ops.rope(Q, Q, COS.expand(2, 5, 8), COS.expand(2, 5, 8))),
        (ValueError, "gate must be packed", lambda: ops.swiglu(X[:, :7])),
        (ValueError, "up must have shape", lambda: ops.swiglu(X, X[:2])),
        (TypeError, "up must have the dtype of gate", lambda: ops.geglu(X, X.double())),
        (ValueError, "approximate must be one of", lambda: ops.geglu(X, X, approximate="erf")),
        (ValueError, r"weight must have shape \[V, 8\], got \[8\]", lambda: ops.fused_linear_cross_entropy(X, W, Y)),
        (TypeError, "target must be int64 or int32", lambda: ops.cross_entropy(X, Y.float())),
        (ValueError, r"target must have shape \[3\]", lambda: ops.cross_entropy(X, Y[:2])),
        (ValueError, "target must be on cpu", lambda: ops.cross_entropy(X, Y.to("meta"))),
        (ValueError, "reduction must be one of", lambda: ops.cross_entropy(X, Y, reduction="avg")),
        (ValueError, r"weight must have shape \[8\]", lambda: ops.cross_entropy(X, Y, weight=W[:5])),
        (ValueError, "weight must not require", lambda: ops.cross_entropy(X, Y, weight=W.clone().requires_grad_())),
        (ValueError, "label_smoothing must be in", lambda: ops.cross_entropy(X, Y, label_smoothing=1.5)),
        (ValueError, "softcap must be positive", lambda: ops.cross_entropy(X, Y, softcap=float("inf"))),
        (ValueError, "num_items must be a number or", lambda: ops.cross_entropy(X, Y, num_items=torch.tensor([2, 3]))),
        (ValueError, "num_items must be a number or", lambda: ops.cross_entropy(X, Y, num_items=torch.empty(0))),
        (ValueError, "ignore_index must be an integer of 64", lambda: ops.cross_entropy(X, Y, ignore_index=10**30)),
        (ValueError, "num_items must not require", lambda: ops.cross_entropy(X, Y, num_items=ONE)),
        (ValueError, "num_items must be finite", lambda: ops.cross_entropy(X, Y, num_items=-1)),
        (ValueError, "softcap must be positive", lambda: ops.cross_entropy(X, Y, softcap=0.0)),
        (ValueError, "num_items divides", lambda: ops.cross_entropy(X, Y, reduction="sum", num_items=3)),
        (ValueError, "label 8", lambda: ops.cross_entropy(X, Y + 6)),
        (ValueError, r"weight must have shape \[11, 8\]", lambda: ops.fused_linear_cross_entropy(X, HEAD[:, :4], Y)),
        (TypeError, "weight must have the dtype of x", lambda: ops.fused_linear_cross_entropy(X, HEAD.half(), Y)),
        (ValueError, r"bias must have shape \[11\]", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, W)),
        (ValueError, "weight must have at least one row", lambda: ops.fused_linear_cross_entropy(X, HEAD[:0], Y)),
        (ValueError, "accum_dtype must be one of None, torch.float32, got torch.float16", lambda:
            ops.fused_linear_cross_entropy(X, HEAD, Y, accum_dtype=torch.half)),
        (ValueError, "chunk_rows must be at least 1", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, chunk_rows=0)),
        (ValueError, "outputs must be out of", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, outputs=("nll",))),
        (ValueError, r"lora\[1\] must", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, lora=(HEAD, X, 1.0))),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()


# public op or module -> valid arguments
CALLS = {
    ops.rms_norm: {"x": X, "weight": W},
    ops.add_rms_norm: {"x": X, "residual": X, "weight": W},
    ops.layer_norm: {"x": X, "weight": W, "bias": W},
    ops.rope: {"q": Q, "k": Q, "cos": COS, "sin": COS},
    ops.qk_norm_rope: {"q": Q, "k": Q, "q_weight": W, "k_weight": W, "cos": COS, "sin": COS},
    ops.swiglu: {"gate": X, "up": X},
    ops.geglu: {"gate": X, "up": X},
    ops.cross_entropy: {"logits": X, "target": Y, "weight": W},
    ops.fused_linear_cross_entropy: {"x": X, "weight": HEAD, "target": Y},
    ops.fused_linear_logprobs: {"x": X, "weight": HEAD, "target": Y},
    ops.fused_linear_divergence: {"x": X, "weight": HEAD, "teacher_x": X, "teacher_weight": HEAD, "mask": X[:, 0] > 0},
    ops.fused_linear_token_loss: {"x": X, "weight": HEAD, "target": Y, "loss_fn": lambda tokens: tokens.logprob},
    ops.moe_route: {"logits": X, "top_k": 2, "bias": W},
    ops.load_balancing_loss: {"logits": X, "top_k": 2, "mask": X[:, 0]},
    nn.Router: {"hidden_size": 8, "num_experts": 4, "top_k": 2},
    nn.Experts: {"num_experts": 4, "hidden_size": 8, "intermediate_size": 16},
    nn.MoE: {"gate": nn.Router(8, 4, 2), "experts": nn.Experts(4, 8, 16)},
    nn.RMSNorm: {"hidden_size": 8},
    nn.LayerNorm: {"hidden_size": 8},
    nn.SwiGLUMLP: {"hidden_size": 8, "intermediate_size": 16},
    nn.GeGLUMLP: {"hidden_size": 8, "intermediate_size": 16},
    nn.CrossEntropyLoss: {},
    nn.FusedLinearCrossEntropyLoss: {},
}
# module -> the op whose options the module takes, and the arguments of the op that are not such options
OPTIONS_OF = {
    nn.CrossEntropyLoss: (ops.cross_entropy, ("weight", "num_items")),
    nn.FusedLinearCrossEntropyLoss: (ops.fused_linear_cross_entropy, ("class_weight", "num_items", "lora", "shard")),
}
NUMBERS = (
    "eps",
    "offset",
    "z_loss",
    "logit_scale",
    "softcap",
    "num_items",
    "scale",
    "limit",
    "alpha",
    "temperature",
    "teacher_softcap",
    "teacher_logit_scale",
)  # 2.5 is valid
WRONG = (
    None, "a", 2.5, float("nan"), [1], [[1.0]], (X,), torch.tensor([1, 2]), torch.tensor(1.0), torch.tensor([True]),
    torch.int64, object(),
)  # fmt: skip


def arguments():
    found = []
    for function in CALLS:
        parameters = inspect.signature(function).parameters.values()
        parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if function in OPTIONS_OF:
            op, others = OPTIONS_OF[function]
            options = inspect.signature(op).parameters.values()
            parameters += [p for p in options if p.kind is p.KEYWORD_ONLY and p.name not in others]
        for parameter in parameters:
            found.append(pytest.param(function, parameter, id=f"{function.__name__}-{parameter.name}"))
    return found


def fits(parameter, value):
    if value is None:
        return parameter.default is None
    if isinstance(value, float):
        return value == 2.5 and parameter.name in NUMBERS
    if isinstance(value, tuple):
        return parameter.name == "logits" and "Sequence" in str(parameter.annotation)
    return parameter.name == "num_items" and isinstance(value, torch.Tensor) and value.dim() == 0


@pytest.mark.parametrize(("function", "parameter"), arguments())
def test_wrong_types_of_every_argument(function, parameter):
    for value in WRONG:
        call = lambda: function(**CALLS[function] | {parameter.name: value})  # noqa: B023, E731
        if fits(parameter, value):
            call()
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{parameter.name}\b"):
            call()


@pytest.mark.parametrize("module", OPTIONS_OF, ids=lambda module: module.__name__)
def test_unknown_option_of_a_module(module):
    with pytest.raises(TypeError, match=r"zloss must be one of the options of the loss: .*z_loss"):
        module(zloss=1.0)


@pytest.mark.parametrize("kind", [int, bool, np.float32, np.int64])
def test_numbers_of_other_types(kind):
    """They give what the float gives, in any order of calls."""
    one, y = kind(1), Y % 3
    for call in (
        lambda v: ops.rms_norm(X, W, v, offset=v),
        lambda v: ops.layer_norm(X, W, W, v),
        lambda v: ops.cross_entropy(X, y, z_loss=v, softcap=v, logit_scale=v, label_smoothing=v, num_items=v),
        lambda v: ops.fused_linear_cross_entropy(X, HEAD, y, z_loss=v, lora=(HEAD[:2], HEAD[:, :2], v)),
        lambda v: ops.qk_norm_rope(Q, Q, W, W, COS, COS, v, offset=v)[0],
        lambda v: ops.moe_route(X, 2, eps=v, scale=v)[0],
    ):
        assert torch.equal(call(one), call(1.0))
