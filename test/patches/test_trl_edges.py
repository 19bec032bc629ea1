"""TRL's trainers on data with completions that are empty or have one token, unpatched and patched."""

import pytest
import torch
import trl_trainers
from test_trl import assert_learnt, learnt, made, ran  # noqa: F401  # fixtures

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
PAIRS = [
    {"prompt": "w3 w4", "chosen": " w5", "rejected": " w8"},
    {"prompt": "w9", "chosen": "", "rejected": ""},
]
LABELLED = [{"prompt": "w3 w4", "completion": "", "label": True}, {"prompt": "w9", "completion": " w1", "label": False}]
DATA = {
    "SFT": [{"prompt": "w3 w4", "completion": ""}] * 2,  # only the end of the text counts
    "DPO": PAIRS,
    "KTO": LABELLED,
    "ORPO": PAIRS,
    "CPO": PAIRS,
}


@pytest.mark.parametrize("kind", DATA)
def test_completions_without_tokens(kind, made, ran, monkeypatch):  # noqa: F811
    _, settings, takes = trl_trainers.KINDS[kind]
    monkeypatch.setitem(trl_trainers.KINDS, kind, (DATA[kind], settings, takes))
    expected = learnt(made(kind))
    ran.theirs = 0
    assert_learnt(made(kind, "callback"), expected)
    assert ran.ours
    assert not ran.theirs


def test_labels_that_are_all_ignored(made):  # noqa: F811
    """TRL's fused head and ours give zeros, and gradients of zero."""
    for how in ("unpatched", "patch_trainer"):
        model = made("SFT", how).model
        ids = torch.randint(3, 101, (2, 9), device=model.device)
        numbers = model(input_ids=ids, labels=ids.new_full(ids.shape, -100), fused_lm_head=True).log_probs
        assert not numbers.any()
        numbers.sum().backward()
        assert not model.lm_head.weight.grad.any()
