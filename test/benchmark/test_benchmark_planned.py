"""The benchmark of steps that `plan` predicts: each setting trains as it says."""

import pytest
import torch
from torch import Tensor

from benchmark.training import planned
from examples.train import CONFIGS
from liger_like.planning import Setting

STEPPING = Setting(2, 32, step_in_backward=True)


@pytest.mark.parametrize("setting", [*planned.QUICK, STEPPING], ids=planned.text_of)
def test_steps_have_their_passes_and_parameters(setting, references, monkeypatch):
    """Each step has the passes of the setting; with an adapter its parameters train alone, else all."""
    passes, models = [], []
    backward, build = Tensor.backward, planned.build

    def built(*args):
        models.append(build(*args))
        return models[-1]

    monkeypatch.setattr(Tensor, "backward", lambda loss: passes.append(loss) or backward(loss))
    monkeypatch.setattr(planned, "build", built)
    torch.manual_seed(0)
    row = planned.measured(CONFIGS["tiny"], setting)
    assert len(passes) == (planned.WARMUPS + planned.STEPS) * setting.accumulation
    assert setting.lora or passes[-1] != passes[0]  # steps of 1e-5 move no weight of an adapter in bf16
    assert row["tokens"] == pytest.approx(setting.batch * 32 / row["ms"] * 1e3)
    assert all(p.requires_grad == (not setting.lora or "lora" in name) for name, p in models[0].named_parameters())
