"""The reference of a row in the forward for Hopper: raised for scores far above it, and for no other row's."""

import pytest
import torch

from liger_like import ops
from liger_like.ops.attention import flash_attention_ref
from liger_like.runtime.support import architecture
from liger_like.testing import assert_accurate
from liger_like.testing.inputs import attention_inputs

KEYS = 900  # enough for three warp groups without a mask, with heads of up to 96
SCORES = {
    "far below zero": torch.full((KEYS,), -400.0),
    "rising along the loop": torch.arange(KEYS, 0, -1) / 4,  # it runs from the last key to the first
    "rising far below zero": torch.arange(KEYS, 0, -1) / 4 - 400,
    "rising from far below to far above": torch.arange(KEYS, 0, -1) / 4 - 112,
    "one far above": torch.where(torch.arange(KEYS) == 100, 60.0, 0.0),
}
each_width = pytest.mark.parametrize(
    ("D", "Dv", "options"),
    [
        (64, 64, {}),
        (64, 64, {"causal": True}),
        (80, 80, {}),
        (96, 96, {}),
        (128, 128, {}),
        (128, 128, {"softcap": 70.0}),
        (192, 128, {"causal": True}),
        (256, 256, {}),
    ],
    ids=lambda value: "-".join(value) or "full" if isinstance(value, dict) else None,
)


def inputs_with(scores, D, Dv, dtype):
    """Random inputs, whose scores have the given ones added; every other query sees them halved."""
    if architecture(torch.device("cuda")) != 9:
        pytest.skip("needs a Hopper GPU")
    inputs = attention_inputs(dtype, "cuda", B=1, S=KEYS, Sk=KEYS, H=2, Hk=1, D=D, Dv=Dv)
    inputs = {name: t.detach() for name, t in inputs.items()}
    inputs["q"][..., 0] = 8.0
    inputs["q"][:, ::2, :, 0] = 4.0
    inputs["k"][..., 0] = scores.to("cuda")[None, :, None] / 8
    return inputs


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores_far_from_zero(name, D, Dv, options, dtype, poisoned):
    make = lambda: inputs_with(SCORES[name], D, Dv, dtype)  # noqa: E731
    options = options | {"scale": 1.0, "return_lse": True}
    assert_accurate(ops.flash_attention, flash_attention_ref, make, options, 2, k=2)


@pytest.mark.gpu
@each_width
def test_no_row_changes_the_bits_of_others(D, Dv, options, poisoned):
    """The 16 rows of a warp decide together whether to look for maxima, but each raises its own reference."""
    inputs = inputs_with(SCORES["one far above"] / 10, D, Dv, torch.bfloat16)
    options = options | {"scale": 0.2, "return_lse": True}
    expected = ops.flash_attention(**inputs, **options)
    rows = torch.arange(KEYS, device="cuda") % 16 == 5
    q = torch.where(rows[:, None, None], 30 * inputs["q"], inputs["q"])
    got = ops.flash_attention(**inputs | {"q": q}, **options)
    assert torch.equal(got[0][:, ~rows], expected[0][:, ~rows])
    assert torch.equal(got[1][..., ~rows], expected[1][..., ~rows])
    assert not torch.equal(got[1][..., rows], expected[1][..., rows])
