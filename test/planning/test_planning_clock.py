"""The clock of a plan: seconds of single ops by their FLOPs, bytes and rates."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from liger_like.parallel import checkpoint_policy
from liger_like.planning import GPUS, traced
from liger_like.planning._clock import LAUNCH, MASKED, MODE, OP, TORCHS, Clock
from liger_like.planning._stand_ins import workspace_of

aten = torch.ops.aten
H200 = GPUS["h200"]


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def multiplied(rows):
    """Return the clock after a product [rows, 4096] x [4096, 4096], and its FLOPs and bytes."""
    clock = Clock(H200)
    a, b, out = empty(rows, 4096), empty(4096, 4096), empty(rows, 4096)
    clock(aten.mm.default, (a, b), {}, out)
    return clock, 2 * rows * 4096**2, sum(t.nbytes for t in (a, b, out))


def test_products_take_the_time_of_flops_or_bytes():
    clock, flops, _ = multiplied(8192)
    assert clock.flops == flops
    assert clock.groups["products"] == pytest.approx(flops / 690e12 + LAUNCH)
    clock, _, size = multiplied(1)
    assert clock.groups["products"] == pytest.approx(size / 4.18e12 + LAUNCH)


def test_a_step_takes_the_longest_of_gpu_host_and_copies():
    clock, *_ = multiplied(8192)
    products = clock.groups["products"]
    assert clock.seconds == pytest.approx(OP + products)  # the GPU waits for its first op
    assert (clock.host, clock.gpu) == (OP, products)
    clock.ops += [(1.0, 0.0)]
    assert clock.seconds == pytest.approx(OP + 1.0)
    clock.ops += [(0.0, 0.5)]  # given last: the host has nothing to do beside it
    assert clock.seconds == pytest.approx(OP + 1.5)
    clock.sent = 55_000_000_000
    assert clock.seconds == 2.0  # there and back


def test_modes_of_selective_checkpoints_take_the_host_s_time():
    """They see each op, in the forward and, even if they leave it out, in the recomputation."""

    def listened(context):
        with traced("h200") as t:
            x = torch.empty(4, 4, requires_grad=True)
            checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=context).sum().backward()
        return t.parts[1].ops.count((MODE, 0.0))

    assert listened(noop_context_fn) == 0
    assert listened(checkpoint_policy(())) >= 2 * 2 - 1  # the recomputation ends before its last op
    assert listened(checkpoint_policy((), host=("attention",))) == 2 * listened(checkpoint_policy(()))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_torch(causal):
    """The kernel of a mask is another one: it computes all pairs."""
    name = "flash" if causal else "efficient"
    q, k = empty(1, 8, 1024, 128), empty(1, 8, 2048, 128)
    clock = Clock(H200)
    clock(getattr(aten, f"_scaled_dot_product_{name}_attention").default, (q, k, k), {}, q)
    backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
    clock(backward, (q, q, k, k), {}, (q, k, k))
    forward_rate, backward_rate = (rate * 1e12 * (1 if causal else MASKED) for rate in TORCHS[128])
    flops = 4 * 8 * 1024 * 2048 * 128 * (0.5 if causal else 1)
    assert clock.groups["attention"] == pytest.approx(flops / forward_rate + 2.5 * flops / backward_rate + 2 * LAUNCH)


def test_workspace_of_attentions_backward():
    """dq in fp32 of rows padded to 128 and heads to 32, and dk and dv of all heads that share keys."""
    name = "aten::_scaled_dot_product_flash_attention_backward"
    q, k, shared = empty(1, 4, 130, 40), empty(1, 4, 130, 40), empty(1, 2, 130, 40)
    assert workspace_of(name, (q, q, k)) == 4 * 4 * 256 * 65
    assert workspace_of(name, (q, q, shared)) == 4 * 4 * 256 * 65 + 2 * 4 * 130 * 40 * 2
    assert workspace_of("aten::mm", (q, q, k)) == 0
