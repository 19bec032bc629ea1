"""TRL's trainers on data with completions that are empty or have one token, unpatched and patched."""

import pytest
import torch
import trl_trainers
from test_trl import LOSS_AND_NORMS, assert_learnt, head_rows, learnt, made, ran  # noqa: F401  # fixtures

from liger_like.patches import trl_code
from liger_like.patches import trl_trainers as plans
from liger_like.trainer import patch_trainer

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["SFT", "Distillation"])
def test_trainers_patched_in_another_mode(kind, mode, dtype, made):  # noqa: F811
    """A trial of TRL's functions takes gradients in fp32, whatever is set outside of it."""
    trainer = made(kind)
    for module in (trl_code, plans):
        module._refusal.cache_clear()
    with mode():
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            report = patch_trainer(trainer, **LOSS_AND_NORMS)
        finally:
            torch.set_default_dtype(default)
    assert {row.status for row in head_rows(report)} == {"patched"}
