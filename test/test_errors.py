"""Bad input raises an error that names the argument, and never reaches a kernel."""

import pytest
import torch

from liger_like import ops

X, W = torch.randn(3, 8), torch.randn(8)
Q, COS = torch.randn(1, 2, 5, 8), torch.randn(5, 8)
Y, HEAD = torch.tensor([0, 1, 2]), torch.randn(11, 8)
META = torch.empty(8, device="meta")


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
        (ValueError, "eps must not be negative", lambda: ops.layer_norm(X, eps=float("nan"))),
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
        (ValueError, "rotary width of 16", lambda: ops.rope(Q, Q, COS, COS, cos_layout="half")),
        (ValueError, "rotary width of 7", lambda: ops.rope(Q, Q, COS[:, :7], COS[:, :7])),
        (ValueError, "gate must be packed", lambda: ops.swiglu(X[:, :7])),
        (ValueError, "up must have shape", lambda: ops.swiglu(X, X[:2])),
        (TypeError, "up must have the dtype of gate", lambda: ops.geglu(X, X.double())),
        (ValueError, "approximate must be one of", lambda: ops.geglu(X, X, approximate="erf")),
        (TypeError, "target must be int64 or int32", lambda: ops.cross_entropy(X, Y.float())),
        (ValueError, r"target must have shape \[3\]", lambda: ops.cross_entropy(X, Y[:2])),
        (ValueError, "target must be on cpu", lambda: ops.cross_entropy(X, Y.to("meta"))),
        (ValueError, "reduction must be one of", lambda: ops.cross_entropy(X, Y, reduction="avg")),
        (ValueError, r"weight must have shape \[8\]", lambda: ops.cross_entropy(X, Y, weight=W[:5])),
        (ValueError, "weight must not require", lambda: ops.cross_entropy(X, Y, weight=W.clone().requires_grad_())),
        (ValueError, "label_smoothing must be in", lambda: ops.cross_entropy(X, Y, label_smoothing=1.5)),
        (ValueError, "softcap must be positive", lambda: ops.cross_entropy(X, Y, softcap=0.0)),
        (ValueError, "num_items divides", lambda: ops.cross_entropy(X, Y, reduction="sum", num_items=3)),
        (ValueError, "label 8", lambda: ops.cross_entropy(X, Y + 6)),
        (ValueError, r"weight must have shape \[11, 8\]", lambda: ops.fused_linear_cross_entropy(X, HEAD[:, :4], Y)),
        (TypeError, "weight must have the dtype of x", lambda: ops.fused_linear_cross_entropy(X, HEAD.half(), Y)),
        (ValueError, r"bias must have shape \[11\]", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, W)),
        (ValueError, "chunk_rows must be positive", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, chunk_rows=0)),
        (ValueError, "outputs must be out of", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, outputs=("nll",))),
        (ValueError, r"lora\[1\] must", lambda: ops.fused_linear_cross_entropy(X, HEAD, Y, lora=(HEAD, X, 1.0))),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
