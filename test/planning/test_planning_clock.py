"""The clock of a plan: seconds of single ops by their FLOPs, bytes and rates."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint, noop_context_fn

from liger_like.ops import flash_attention
from liger_like.parallel import checkpoint_policy
from liger_like.planning import GPUS, traced
from liger_like.planning._clock import DTENSOR, LAUNCH, MASKED, MODE, OP, OURS, RISE, STEP, TORCHS, TURN, Clock, risen
from liger_like.planning._models import processes
from liger_like.planning._optimizers import optimizer_of
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


def test_steps_of_optimizers_take_the_host_s_time():
    """An optimizer for each parameter has as many steps, as ``step_in_backward`` makes them."""
    with traced("h200") as t:
        parameters = [torch.nn.Parameter(torch.empty(8)) for _ in range(3)]
        for p in parameters:
            p.grad = torch.empty(8)
        optimizers = [torch.optim.AdamW([p], fused=True) for p in parameters]
        for optimizer in (torch.optim.AdamW(parameters, fused=True), *optimizers):
            optimizer.step()
    assert t.parts[1].ops.count((STEP, 0.0)) == 1 + 3


def test_moments_in_8_bits_make_the_gpu_wait_for_each_parameter():
    def seconds(count):
        with traced("h200") as t:
            parameters = [torch.nn.Parameter(torch.empty(2**20 // count)) for _ in range(count)]
            for p in parameters:
                p.grad = torch.empty_like(p)
            optimizer_of("adamw8bit", parameters).step()
        return t.times["optimizer"]

    assert seconds(8) - seconds(2) == pytest.approx(6 * TURN, rel=0.01)  # maps of values are read each time


def test_ops_of_dtensors_take_the_host_s_time():
    """Ops on their local tensors count beside."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes(2))
        mesh = init_device_mesh("cpu", (2,))  # it reads data
        ops = stack.enter_context(traced("h200")).parts[1].ops
        x = DTensor.from_local(torch.empty(4, 4), mesh, [Replicate()])
        before, given = ops.count((DTENSOR, 0.0)), len(ops)
        x.sin().cos()
        assert ops.count((DTENSOR, 0.0)) - before == 2
        assert len(ops) - given == 2 * 2
        x.to_local().sin()
        assert ops.count((DTENSOR, 0.0)) - before == 2


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


@pytest.mark.parametrize(("rows", "keys", "seen"), [(512, 512, 1 / 2), (256, 512, 3 / 4), (512, 256, 1 / 4)])
def test_the_last_query_of_causal_attention_sees_the_last_key(rows, keys, seen):
    with traced("h200") as t:
        q, k = (torch.empty(8, n, 8, 128, dtype=torch.bfloat16) for n in (rows, keys))
        flash_attention(q, k, k, causal=True)
    flops = 4 * 8 * 8 * rows * keys * 128 * seen
    rate = OURS[128][0] * 1e12 * risen(keys * seen, backward=False)
    assert t.times["attention"] == pytest.approx(flops / rate + LAUNCH)


def test_attention_is_slower_where_queries_see_few_keys():
    for backward, keys in enumerate(RISE):
        assert risen(keys, bool(backward)) == 1 / 2
        assert risen(1000 * keys, bool(backward)) == pytest.approx(1, abs=1e-3)


def test_workspace_of_attentions_backward():
    """dq in fp32 of rows padded to 128 and heads to 32, and dk and dv of all heads that share keys."""
    name = "aten::_scaled_dot_product_flash_attention_backward"
    q, k, shared = empty(1, 4, 130, 40), empty(1, 4, 130, 40), empty(1, 2, 130, 40)
    assert workspace_of(name, (q, q, k)) == 4 * 4 * 256 * 65
    assert workspace_of(name, (q, q, shared)) == 4 * 4 * 256 * 65 + 2 * 4 * 130 * 40 * 2
    assert workspace_of("aten::mm", (q, q, k)) == 0
