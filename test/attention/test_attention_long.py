"""Long causal rows on Hopper: the portable dq visits the keys that need no mask in a loop of their own."""

from functools import partial

import pytest
import torch
from test_attention import check

from liger_like.ops.attention import tiles
from liger_like.ops.attention.masking import Masking
from liger_like.testing.inputs import attention_inputs

CAUSAL = {"max_seqlen_q": 9000, "max_seqlen_k": 9000, "scale": 1.0, "left": -1, "right": 0}
SPANS = torch.zeros(2, 1, 1, dtype=torch.int32)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(tiles, "gpu_class", lambda device: "hopper")


@pytest.mark.parametrize(("S", "Sk"), [(131, 131), (70, 150), (150, 70)])
def test_keys_before_the_edge_and_at_it(S, Sk, on_hopper, monkeypatch, device, poisoned):
    """The first queries see all keys of a block, some, or none: theirs are before the first key."""
    monkeypatch.setattr(tiles, "LONG", 1)
    check(partial(attention_inputs, torch.float16, device, B=1, S=S, Sk=Sk, H=2, Hk=1, D=72), {"causal": True})


@pytest.mark.parametrize(
    ("sizes", "options", "long"),
    [
        ({}, {}, True),
        ({"D": 72, "S": 1}, {}, True),
        ({"Sk": 8191}, {}, False),
        ({"D": 64}, {}, False),
        ({"D": 136}, {}, False),
        ({"dtype": torch.float32}, {}, False),
        ({}, {"right": -1}, False),
        ({}, {"left": 500}, False),
        ({}, {"softcap": 3.0}, False),
        ({}, {"spans": SPANS}, False),
    ],
)
def test_rows_that_are_long(sizes, options, long, on_hopper):
    S, Sk, D, dtype = ({"S": 9000, "Sk": 9000, "D": 128, "dtype": torch.float16} | sizes).values()
    q, k = (torch.empty(1, n, 2, D, dtype=dtype, device="meta") for n in (S, Sk))
    assert tiles.is_long(q, k, k, Masking(**dict.fromkeys(Masking._fields) | CAUSAL | options)) is long


def test_other_gpus_keep_one_loop(monkeypatch):
    monkeypatch.setattr(tiles, "gpu_class", lambda device: "large")
    x = torch.empty(1, 9000, 2, 128, dtype=torch.float16, device="meta")
    assert not tiles.is_long(x, x, x, Masking(**dict.fromkeys(Masking._fields) | CAUSAL))
