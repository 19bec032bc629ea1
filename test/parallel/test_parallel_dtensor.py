"""The ops on DTensors, and models under tensor and sequence parallelism, against one process."""

import copy
import functools
import itertools

import pytest
import torch
from distributed import run
from tiny_models import batch, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger_like
import liger_like.parallel

# op, shapes of its tensors, dimensions along which the first ones may be sharded; 3 and 5 shard unevenly
ROWS, HEADS, KEYS, ANGLES = (3, 5, 16), (2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 8)
half = functools.partial(liger_like.rope, rotary_dim=8)
transposed = functools.partial(half, unsqueeze_dim=2)
normalised = functools.partial(liger_like.qk_norm_rope, rotary_dim=8)
weights_of = lambda logits: liger_like.moe_route(logits, 3, groups=(4, 2, "top2"))[0]  # noqa: E731
CASES = {
    "rms_norm": (liger_like.rms_norm, [ROWS, (16,)], (0, 1)),
    "weightless": (liger_like.rms_norm, [ROWS], (0, 1)),
    "add_rms_norm": (liger_like.add_rms_norm, [ROWS, ROWS, (16,)], (0, 1)),
    "layer_norm": (liger_like.layer_norm, [ROWS, (16,), (16,)], (0, 1)),
    "moe_route": (weights_of, [ROWS], (0, 1)),
    "swiglu": (liger_like.swiglu, [ROWS, ROWS], (0, 1, 2)),
    "packed": (liger_like.geglu, [ROWS], (0, 1)),
    "rope": (half, [HEADS, KEYS, ANGLES, ANGLES], (0, 1, 2)),
    "rope of one cos": (half, [HEADS, KEYS, (5, 8), (5, 8)], (0, 1, 2)),
    "rope of [B, S, H, D]": (transposed, [(2, 5, 4, 16), (2, 5, 2, 16), ANGLES, ANGLES], (0, 1, 2)),
    "qk_norm_rope": (
        functools.partial(liger_like.qk_norm_rope, rotary_dim=8),
        [HEADS, KEYS, (16,), (16,), ANGLES, ANGLES],
        (0, 1, 2),
    ),
}


def inputs(shapes):
    """Random tensors; all but angles (cos and sin) need a gradient."""
    return [torch.randn(shape, requires_grad=shape[-1] != 8) for shape in shapes]


def outputs_and_gradients(op, tensors):
    outputs = op(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [t for t in tensors if t.requires_grad]  # torch 2.11 would gather .grad of uneven shards
    return outputs, torch.autograd.grad(outputs, leaves, [torch.ones_like(y) * 0.3 + y.detach() for y in outputs])


def check_op(mesh, name):
    op, shapes, dims = CASES[name]
    tensors = inputs(shapes)
    expected = outputs_and_gradients(op, tensors)
    for placement in (Replicate(), *map(Shard, dims)):
        sharded = []
        for t in tensors:  # parameters and angles are replicated
            own = placement if t.dim() == len(shapes[0]) else Replicate()
            sharded.append(distribute_tensor(t.detach(), mesh, [own]).requires_grad_(t.requires_grad))
        with CommDebugMode() as comms:
            results = outputs_and_gradients(op, sharded)
        assert comms.get_total_counts() == 0, (name, placement)
        assert [y.stride() for y in results[0]] == [y.stride() for y in expected[0]]
        for got, want in zip(itertools.chain(*results), itertools.chain(*expected), strict=True):
            summed = isinstance(placement, Shard) and want.dim() == 1
            assert got.placements == ((Partial() if summed else placement),), (name, placement, got.placements)
            assert got.shape == want.shape
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)


def check_router(mesh):
    """The index has the placements of the logits; the bias is replicated."""
    logits, bias = torch.randn(ROWS), torch.randn(16)
    expected = liger_like.moe_route(logits, 3, bias=bias)
    sharded = distribute_tensor(logits, mesh, [Shard(1)]), distribute_tensor(bias, mesh, [Replicate()])
    for got, want in zip(liger_like.moe_route(sharded[0], 3, bias=sharded[1]), expected, strict=True):
        assert got.placements == (Shard(1),)
        assert torch.equal(got.full_tensor(), want)


def refusals(mesh):
    """Placements that the ops refuse, and a word of each message."""

    def whole(*shape):
        return distribute_tensor(torch.randn(shape), mesh, [Replicate()])

    def sharded(dim, *shape):
        return distribute_tensor(torch.randn(shape), mesh, [Shard(dim)])

    partial = DTensor.from_local(torch.randn(4, 6), mesh, [Partial()])
    labels = torch.zeros(4, dtype=torch.int64)
    x, weight, local, heads = sharded(1, 4, 6), whole(6), torch.randn(6), sharded(2, 1, 4, 2, 8)
    norm, loss = liger_like.rms_norm, "liger_like.parallel.vocab_parallel_cross_entropy"
    fused = liger_like.fused_linear_cross_entropy
    return [
        (norm, (x, weight), ValueError, r"rms_norm takes x as Replicate\(\) or Shard\(0\), got S.*redistribute"),
        (norm, (partial, weight), ValueError, r"rms_norm takes x as .* got P.*to_local"),
        (norm, (sharded(0, 4, 6), sharded(0, 6)), ValueError, "rms_norm takes weight as"),
        (liger_like.swiglu, (x, sharded(0, 4, 6)), ValueError, "swiglu takes up as"),
        (liger_like.swiglu, (x,), ValueError, r"swiglu takes gate as Replicate\(\) or Shard\(0\)"),
        (norm, (x, local), TypeError, "weight as a plain tensor: distribute it"),
        (norm, (local.expand(4, 6), weight), TypeError, "x as a plain tensor"),
        (liger_like.cross_entropy, (x, labels), TypeError, f"^cross_entropy takes no DTensors: use {loss}"),
        (
            fused,
            (local.expand(4, 6), x, labels),
            TypeError,
            f"^fused_linear_cross_entropy takes no DTensors: use {loss}",
        ),
        (liger_like.flash_attention, (heads, heads, heads), TypeError, "liger_like.parallel.context_parallel"),
        (liger_like.moe_route, (x, 2), ValueError, r"moe_route takes logits as Replicate\(\) or Shard\(0\)"),
        (liger_like.load_balancing_loss, (x, 2), TypeError, r"takes no DTensors: use full_tensor\(\), or give local"),
        (liger_like.load_balancing_loss, ([x, x], 2), TypeError, "load_balancing_loss takes no DTensors"),
    ]


def check_refusals(mesh):
    for op, args, error, message in refusals(mesh):
        with pytest.raises(error, match=message):
            op(*args)


def check_compiled(mesh):
    """One graph, with the gradients of the op."""

    def op(x, weight):
        return liger_like.swiglu(liger_like.rms_norm(x * 2, weight), x)

    x, weight = torch.randn(4, 5, 16), torch.randn(16)
    results = []
    for call in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        leaves = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()])
        results.append(
            [
                t.full_tensor()
                for t in itertools.chain(*outputs_and_gradients(call, [t.requires_grad_() for t in leaves]))
            ]
        )
    torch.testing.assert_close(*results)  # the graph has plain torch, which rounds elsewhere than the kernels


PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
LAYER = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"mlp.{name}_proj": ColwiseParallel(use_local_output=False) for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def parallel(model, mesh):
    """``model`` under tensor parallelism, its residual stream sharded along the sequence."""
    parallelize_module(model, mesh, PLAN)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER)
    return model


def step(model, inputs):
    """Loss, gradients, their norm and the parameters after a step, of whole tensors; and what was communicated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # eps keeps steps as exact as gradients
    with CommDebugMode() as passes:
        loss = model(**inputs).loss
        loss.backward()
    with CommDebugMode() as final:
        liger_like.parallel.finalize_partial_grads(model)
    assert not any(p.is_partial() for t in model.parameters() if isinstance(t, DTensor) for p in t.grad.placements)
    results = {"loss": loss.detach(), "norm": torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)}
    results |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    optimizer.step()
    results |= {name: p.detach() for name, p in model.named_parameters()}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in results.items()}
    return whole, passes.get_comm_counts(), final.get_total_counts()


def check_model(mesh):
    """A patched model is that of one process, and sends no more than the unpatched one."""
    model, inputs = tiny("Llama", num_hidden_layers=1), batch(rows=1, length=8)
    expected, _, _ = step(copy.deepcopy(model), inputs)
    _, unpatched, _ = step(parallel(copy.deepcopy(model), mesh), inputs)
    patched = parallel(copy.deepcopy(model), mesh)
    report = liger_like.patch(patched, loss=False)
    assert {row.pattern for row in report.patched} >= {"rms_norm", "glu_mlp"}, report
    got, communicated, reductions = step(patched, inputs)
    assert communicated == unpatched
    assert reductions == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def check(rank):
    mesh = init_device_mesh("cpu", (2,))
    for name in CASES:
        check_op(mesh, name)
    check_router(mesh)
    check_refusals(mesh)
    check_compiled(mesh)
    check_model(mesh)


def test_two_processes():
    run(check, 2)
