"""The ops on DTensors, and models under tensor and sequence parallelism, against one process."""

import functools

import pytest
import torch
from distributed import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import liger_like
from liger_like import nn

# the op, the shapes of its tensors in order, and how many of them are data; the others are parameters
ROWS, HEADS, KEYS, ANGLES = (3, 5, 16), (2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 8)
transposed = {"unsqueeze_dim": 2}
CASES = {
    "rms_norm": (liger_like.rms_norm, [ROWS, (16,)], (0, 1)),
    "weightless": (liger_like.rms_norm, [ROWS], (0, 1)),
    "add_rms_norm": (liger_like.add_rms_norm, [ROWS, ROWS, (16,)], (0, 1)),
    "layer_norm": (liger_like.layer_norm, [ROWS, (16,), (16,)], (0, 1)),
    "swiglu": (liger_like.swiglu, [ROWS, ROWS], (0, 1, 2)),
    "packed": (liger_like.geglu, [ROWS], (0, 1)),
    "rope": (liger_like.rope, [HEADS, KEYS, ANGLES, ANGLES], (0, 1, 2)),
    "rope of one cos": (liger_like.rope, [HEADS, KEYS, (5, 8), (5, 8)], (0, 1, 2)),
    "qk_norm_rope": (liger_like.qk_norm_rope, [HEADS, KEYS, (16,), (16,), ANGLES, ANGLES], (0, 1, 2)),
}


def inputs(shapes):
    """Random tensors; all but angles (cos and sin) need a gradient."""
    return [torch.randn(shape, requires_grad=shape[-1] != 8) for shape in shapes]


def outputs_and_gradients(op, tensors):
    outputs = op(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(y) * 0.3 + y.detach() for y in outputs])
    return *outputs, *(t.grad for t in tensors if t.requires_grad)


def check_op(mesh, name):
    op, shapes, dims = CASES[name]
    for placement in (Replicate(), *map(Shard, dims)):
        tensors = inputs(shapes)
        expected = outputs_and_gradients(op, tensors)
        lead = shapes[0]
        sharded = []
        for t in tensors:
            along = t.dim() == len(lead) or not t.requires_grad
            dim = placement.dim if isinstance(placement, Shard) and t.dim() == len(lead) else None
            mine = Shard(dim) if along and dim is not None else Replicate()
            sharded.append(distribute_tensor(t.detach(), mesh, [mine]).requires_grad_(t.requires_grad))
        with CommDebugMode() as comms:
            results = outputs_and_gradients(op, sharded)
        assert comms.get_total_counts() == 0, (name, placement)
        for got, want in zip(results, expected, strict=True):
            summed = isinstance(placement, Shard) and want.dim() == 1
            assert got.placements == ((Partial() if summed else placement),), (name, placement, got.placements)
            assert got.shape == want.shape
            assert got.stride() == want.stride()
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)


def ops(rank):
    mesh = init_device_mesh("cpu", (2,))
    for name in CASES:
        check_op(mesh, name)


def test_ops():
    run(ops, 2)
