"""Programs of the one-pass backward for Hopper that draw blocks of keys: which calls have them, and their gradients."""

import pytest
import torch
from test_attention_hopper_backward import (
    AT_ONCE,
    LENGTHS_OF_SEQUENCES,
    MASKS,
    assert_same,
    backward,
    gpu,
    grads_of,
    heads_of,
)

from liger_like import ops
from liger_like.ops.attention import backward as attention_backward
from liger_like.ops.attention import choice, flash_attention_ref, flash_attention_varlen_ref
from liger_like.ops.attention.hopper import backward as hopper_backward
from liger_like.ops.attention.masking import Masking
from liger_like.runtime.support import num_programs
from liger_like.testing import assert_accurate
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs


@pytest.fixture(autouse=True)
def drawing(monkeypatch):
    """Draw blocks with every version of Triton: what is slow must be right, too."""
    monkeypatch.setattr(hopper_backward, "DRAWING", True)


def test_which_calls_draw_blocks_of_keys(monkeypatch, device):
    """Programs draw if a block of keys has few queries, of one head, which is narrow."""
    counters = []
    monkeypatch.setattr(hopper_backward, "launch_over_keys", lambda *args, **_: counters.append(args[-1]))
    monkeypatch.setattr(attention_backward, "round_sums", lambda *_: None)
    monkeypatch.setattr(choice, "INTERPRET", False)
    monkeypatch.setattr(choice, "architecture", lambda device: 9)
    # under a causal mask a key is seen by half of the queries
    for D, H, Hk, S in ((64, 1, 1, 4096), (96, 2, 2, 24), (64, 1, 1, 4104), (64, 2, 1, 24), (128, 2, 2, 24)):
        backward(*heads_of(D, H, Hk, S, device=device))
    assert [t is None for t in counters] == [False, False, True, True, True]
    assert all(t.dtype == torch.int32 and not t.any() for t in counters[:2])


@pytest.mark.parametrize(
    ("window", "sequences", "drawn"),
    [((-1, -1), 0, False), ((-1, 0), 0, False), ((511, 0), 0, True), ((-1, -1), 3, False), ((-1, -1), 4, True)],
)
def test_how_many_queries_see_a_key(window, sequences, drawn, monkeypatch):
    cu = torch.empty(sequences + 1, dtype=torch.int32) if sequences else None
    masking = Masking(None, None, cu, cu, None, None, 8192, 8192, 1.0, None, *window)
    q = torch.empty(1, 8192, 1, 64, device="meta")
    assert hopper_backward._draws(q, q, masking) is drawn
    monkeypatch.setattr(hopper_backward, "DRAWING", False)
    assert not hopper_backward._draws(q, q, masking)


def test_which_heads_are_multiplied_in_turn():
    assert [D for D in (40, 64) if hopper_backward._in_turn(D, 64)] == [40, 64]
    assert [D for D in (80, 81, 96, 97, 128) if hopper_backward._in_turn(D, 128)] == [97, 128]


@gpu
@pytest.mark.parametrize("D", [64, 80, 96])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_of_drawn_blocks(mask, D, launched, poisoned):
    """Compare gradients where programs draw blocks of keys: as many key heads as heads. No query sees some blocks."""
    heads = {"H": 16, "Hk": 16, "D": D, "Dv": D}
    for S, Sk in ((300, 901), (700, 300)):
        make = lambda: attention_inputs(torch.bfloat16, "cuda", B=3, S=S, Sk=Sk, **heads)  # noqa: B023, E731
        options = {**mask, "deterministic": False}
        assert_accurate(ops.flash_attention, flash_attention_ref, make, options, draws=4, k=2)
    grids = [grid for name, grid in launched if name in AT_ONCE]
    assert {*grids} == {(num_programs(torch.device("cuda", 0), 1), 1)}
    lengths = LENGTHS_OF_SEQUENCES[0] * 4
    make = lambda: attention_varlen_inputs(torch.bfloat16, "cuda", lengths, **heads, behind=77)  # noqa: E731
    options |= {"max_seqlen_q": 300, "max_seqlen_k": 300}
    assert_accurate(ops.flash_attention_varlen, flash_attention_varlen_ref, make, options, draws=4, k=2)


@gpu
@pytest.mark.parametrize("D", [64, 80, 96])
def test_drawn_blocks_repeat(D, poisoned):
    for seed in range(50):
        inputs = attention_inputs(torch.bfloat16, "cuda", B=3, S=600 + seed, Sk=600, H=16, Hk=16, D=D, Dv=D)
        options = {"causal": True, "deterministic": False}
        first = grads_of(inputs, options, seed)
        assert_same(grads_of(inputs, options, seed), first, f"in round {seed}")
