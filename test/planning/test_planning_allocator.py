"""torch's allocator as a plan models it: segments, splitting, merging, and the memory of later steps."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from liger_like.planning import Setting, predict, traced
from liger_like.planning._allocator import MIB, Allocator, Change, Part, held

GIVEN = {kind: Part(kind, 0, "x") for kind in ("activations", "gradients", "optimizer")}


def reserved(*sizes):
    """Return the MiB that ``sizes`` in MiB reserve together."""
    allocator = Allocator()
    for size in sizes:
        allocator.allocate(int(size * MIB))
    return allocator.reserved / MIB


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.5), 2),  # small tensors share segments of 2 MiB
        ((1, 1, 0.5), 4),
        ((1.5, 9, 9), 20),  # larger ones those of 20 MiB
        ((10, 10.5), 10 + 12),  # and from 10 MiB on each has its own, a multiple of 2 MiB
        ((19, 1, 1.5), 20 + 2 + 20),  # 1 MiB is not split off a large block: nothing is left for the third
    ],
)
def test_segments(sizes, expected):
    assert reserved(*sizes) == expected


def test_blocks_count_with_what_they_leave():
    allocator = Allocator()
    block = allocator.allocate(int(11.5 * MIB))  # of a segment of 12 MiB
    assert allocator.allocated == 12 * MIB
    allocator.release(block)
    assert allocator.allocated == 0
    assert allocator.peak == 12 * MIB
    small = allocator.allocate(512)
    assert (allocator.allocated, allocator.reserved) == (512, 14 * MIB)
    allocator.release(small)


def test_the_smallest_block_that_is_large_enough_is_taken_and_neighbours_merge():
    allocator = Allocator()
    large, other = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(other)
    parts = [allocator.allocate(10 * MIB) for _ in range(3)]  # all of the 30 MiB
    assert allocator.allocate(40 * MIB).address == large.address
    for i in (0, 2, 1):
        allocator.release(parts[i])
    assert allocator.allocate(30 * MIB).address == other.address
    assert allocator.reserved == 70 * MIB


def change(size, kind="activations", counts=True):
    return Change(GIVEN[kind], int(size * MIB), counts)


def test_states_are_made_in_what_activations_left():
    """The first step's activation of 30 MiB makes room for two moments of 15, so later ones need 30 MiB more."""
    start = [change(15, "optimizer"), change(15, "optimizer")]
    found = held(start, [change(30), change(-30)])
    assert (found.allocated / MIB, found.reserved / MIB) == (60, 60)
    gradients = [change(12, "gradients"), change(-12, "gradients")]  # in segments of their own
    assert held(start, [change(30), *gradients[:1], change(-30), *gradients[1:]]).reserved == (30 + 12 + 30) * MIB
    assert held([], [change(30), change(-30)]).reserved == 30 * MIB


def test_a_sum_in_place_takes_the_block_of_its_term():
    steps = [change(30), change(30), change(30, counts=False), change(-30), change(-30), change(-30)]
    assert held([], steps).allocated == 60 * MIB


def test_a_step_that_makes_its_model_happens_once():
    assert held([], [change(30), change(30), change(-30)]) == (60 * MIB, 60 * MIB)


def test_torch_counts_at_least_the_tensors():
    """Attention's backward in torch has a workspace, which is most of this model's peak."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        head_dim=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    found = predict(config, Setting(1, 4096, checkpoint="full", patched=False))
    assert found.gib <= found.allocated <= found.reserved
    with traced() as own:
        layer = nn.Linear(1024, 1024)
        layer(torch.empty(4096, 1024)).sum().backward()
    assert own.gib <= own.allocated <= 1.01 * own.gib
