"""The benchmark of sharded training: its tiny form, and its report."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run
from transformers import AutoModelForCausalLM

from benchmark.common import measure
from benchmark.training import plan, sharded, sharded_models, sharded_ops, sharded_report, sharded_settings
from benchmark.training.training import SELECTIVE, nothing
from liger_like.planning import Setting, predict
from liger_like.planning._tracer import rounded

SIZES = sharded.QUICK


@pytest.mark.skipif(sharded.GPU, reason="on GPUs it is nccl, and bf16: --quick")
def test_tiny_form(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # interpreted kernels are slow, and have tests of their own
    run(every_part, 2)


def every_part(rank):
    ours, fp32, bf16 = (row["loss"] for row in sharded_ops.losses(list(sharded_ops.LOSSES), SIZES.loss))
    assert ours == pytest.approx(fp32, rel=1e-6)
    assert ours == pytest.approx(bf16, rel=1e-2)
    for row in sharded_ops.attentions(sharded_ops.METHODS, SIZES.attention):
        assert row["error"] < 1e-5
        assert min(row[key] for key in ("alone_forward_ms", "alone_ms", "forward_ms", "ms", "flops")) > 0
    several = sharded_models.train(SIZES.settings, sharded_models.TRAINED[SELECTIVE], SIZES.config)
    for (batch, seq), row in zip(SIZES.settings, several, strict=True):
        assert row["tokens"] == pytest.approx(2 * batch * seq / row["ms"] * 1e3)
    several = sharded_models.climb(sharded_models.CLIMBING["liger_like"], SIZES.config, SIZES.ladder)
    assert [(row["length"], row["next"]) for row in several] == [(32, 64), (64, None)]
    check_weights(sharded_models.build(nothing, SIZES.config, dist.init_device_mesh("cpu", (2,))))
    names = "transformers", "liger_like", "liger_like, context parallel"
    expected, *others = map(losses_of_training, names)
    assert expected[0] > expected[2]
    assert others == [pytest.approx(expected, rel=1e-5)] * 2


def check_weights(model):
    """Nothing is left of what was in memory before."""
    rotary = AutoModelForCausalLM.from_config(SIZES.config).model.rotary_emb
    for name, buffer in model.model.rotary_emb.named_buffers():
        torch.testing.assert_close(buffer, rotary.get_buffer(name))
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        if "norm" in name:
            assert (whole == 1).all()
        else:
            assert whole.std().item() == pytest.approx(SIZES.config.initializer_range, rel=0.1)
            assert not torch.equal(*whole.chunk(2))


def losses_of_training(name):
    """All processes have the same tokens, as they do where they share a sequence."""
    contestant = sharded_models.CLIMBING[name]
    step = sharded_models.step_of(contestant, SIZES.config)
    tokens = torch.arange(32, device=sharded_models.DEVICE)[None] * 7 % SIZES.config.vocab_size
    losses = [step(tokens) for _ in range(3)]
    if contestant.spread:
        for part in losses:
            dist.all_reduce(part)
    return [loss.item() for loss in losses]


FEW = [*sharded.SETTINGS][: len(sharded_settings.WAYS)]


def planned_steps(rank, folder, names):
    """Train by each setting, and write what the process then has in memory."""
    for name, fields in sharded_settings.fields_of(names, dist.get_world_size(), SIZES.share).items():
        setting = Setting(**fields)
        mesh = sharded_settings.mesh_of(setting, "cpu")
        model, optimizer = sharded_settings.made(setting, sharded.TINY, mesh)
        step = sharded_settings.step_of(setting, sharded.TINY, mesh, model, optimizer)
        losses = [step().item() for _ in range(4)]
        assert losses[0] == pytest.approx(math.log(sharded.TINY.vocab_size), rel=0.02), name
        assert losses[3] < losses[0], name
        assert not setting.staged or losses == sharded_models.worst(*losses), name  # of all rows, on each process
        states = getattr(optimizer, "optim", optimizer).state.values()
        held = {
            "parameters": sum(map(size, [*model.parameters(), *model.buffers()])),
            "optimizer": sum(size(t) for state in states for t in state.values()),
        }
        Path(folder, f"{name} {rank}").write_text(json.dumps(held))


def size(tensor):
    return rounded(getattr(tensor, "_local_tensor", tensor).nbytes)


@pytest.mark.skipif(sharded.GPU, reason="the sizes are those of gloo's processes")
@pytest.mark.usefixtures("references")
@pytest.mark.parametrize(("gpus", "names"), [(2, FEW), (4, FEW[-1:])])
def test_planned_steps_hold_what_their_setting_says(gpus, names, monkeypatch, tmp_path):
    """Parameters and moments of the process with the most are those of the trace, to a byte."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    run(planned_steps, gpus, str(tmp_path), names)
    settings = sharded_settings.fields_of(names, gpus, SIZES.share)
    assert len(settings) == (5 if gpus == 2 else 1)
    for name, fields in settings.items():
        setting = Setting(**fields)
        assert (setting.gpus, setting.batch) == (gpus, 2 * gpus)
        found = predict(sharded.TINY, setting).by_kind
        held = [json.loads((tmp_path / f"{name} {rank}").read_text()) for rank in range(gpus)]
        for kind in held[0]:
            assert found[kind] * 2**30 == max(each[kind] for each in held), (name, kind)


class Interrupted:
    """Processes of a run that is ended in the third setting."""

    def __init__(self, count, timeout):
        self.count, self.calls = 4, 0

    def run(self, worker, setting, config):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return [{"ms": 100.0, "tokens": 1e5, "gib": 20.0, "reserved": 25.0, "outside": 1.5}]


def test_rows_are_written_at_once_and_can_be_predicted(monkeypatch, tmp_path):
    monkeypatch.setattr(sharded, "Processes", Interrupted)
    monkeypatch.setattr(sharded, "GPU", True)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["sharded", "--parts", "planned", "--settings", "11", "10", "1"])
    with pytest.raises(KeyboardInterrupt):
        sharded.main()
    result = json.loads((tmp_path / "sharded-no-gpu-4x.json").read_text())
    zero, layers = plan.of_sharded(result, "sharded-no-gpu-4x")
    assert zero.text == "Llama-3.2-1B, untied, 16 x 4096"
    assert zero.name == "liger_like, ddp 4, zero 1, rows 4, no checkpointing"
    assert zero.setting == Setting(4, 4096, fsdp=4, zero=1)
    assert layers.setting == Setting(16, 4096, tp=4, dtype="fp32")
    assert layers.config.num_hidden_layers == 8
    for job, least, most in ((zero, 22.7, 23.0), (layers, 28, 34)):
        row = plan.predicted(job)
        assert least < row["predicted"] < most
        assert row["predicted_ms"] > 200
        assert (row["gib"], row["ms"]) == (20.0, 100.0)


def test_next_length():
    ladder = (8, 12, 16, 24, 32)
    assert sharded_models.next_length(ladder, 8, above=1.0, room=3.0) == 24
    assert sharded_models.next_length(ladder, 8, above=1.0, room=2.9) == 16
    assert sharded_models.next_length(ladder, 8, above=3.0, room=3.0) == 12
    assert sharded_models.next_length(ladder, 32, above=1.0, room=9.0) is None
    lengths = sharded.LADDER
    assert (lengths[:4], lengths[-2:]) == ((8192, 12288, 16384, 24576), (3 << 20, 4 << 20))


SIZES_OF_A_ROW = {"gib": 20.0, "reserved": 25.0, "outside": 1.5}
RESULT = {
    "gpu": "GPU",
    "gpus": 2,
    "date": "2026-01-01",
    "versions": {"torch": "2.0"},
    "parts": {
        "fsdp": {
            "transformers": [
                {"setting": "8 x 2048", "ms": 2000.0, "tokens": 16384.0, "gib": 90.0},
                {"setting": "2 x 16384", "reason": "out of | memory"},
            ],
            "liger_like": [
                {"setting": "8 x 2048", "ms": 1000.0, "tokens": 32768.0, "gib": 60.0},
                {"setting": "2 x 16384", "ms": 4000.0, "tokens": 16384.0, "gib": 70.0},
            ],
        },
        "loss": {"liger_like": [{"ms": 10.0, "mib": 1000.0, "bytes": 2.5, "loss": 11.0}]},
        "context": {
            "ring": [
                {"flops": 7e12, "error": 1e-3}
                | {"alone_forward_ms": 8.0, "forward_ms": 5.0, "alone_ms": 36.0, "ms": 20.0}
            ],
            "ulysses": [{"reason": "ValueError"}],
        },
        "longest": {
            "transformers": [{"length": 8192, "gib": 100.0, "next": 12288, "reason": "out of memory"}],
            "Liger": [{"reason": "out of memory"}],
        },
        "planned": {
            FEW[0]: [{"fields": {"fsdp": 2, "zero": 0}, "ms": 100.0, "tokens": 3e5} | SIZES_OF_A_ROW],
            FEW[1]: [{"fields": {"fsdp": 2, "zero": 1}, "reason": "out of memory"}],
        },
    },
}
TABLES = r"""### 2 x GPU, 2026-01-01

torch 2.0.

Training steps, FSDP2:

| a GPU's batch |  | step ms | tokens/s | peak GiB |
|---|---|---|---|---|
| 8 x 2048 | transformers | 2,000 | 16,384 | 90.0 |
| 8 x 2048 | liger_like | 1,000 | 32,768 | 60.0 |
| 2 x 16384 | transformers | out of \| memory | - | - |
| 2 x 16384 | liger_like | 4,000 | 16,384 | 70.0 |

Vocabulary-parallel loss:

|  | ms | peak MiB | bytes a logit | loss |
|---|---|---|---|---|
| liger_like | 10.0 | 1,000 | 2.50 | 11.0000 |

Context-parallel attention:

|  | forward ms | TFLOP/s a GPU | share of one GPU's rate | both ms | TFLOP/s a GPU | share of one GPU's rate | error |
|---|---|---|---|---|---|---|---|
| ring | 5.0 | 200 | 80.0% | 20.0 | 175 | 90.0% | 1.0e-03 |
| ulysses | ValueError | - | - | - | - | - | - |

The longest sequence that was trained, and the next one tried:

|  | tokens | peak GiB | the next length |
|---|---|---|---|
| transformers | 8,192 | 100.0 | 12,288: out of memory |
| Liger | - | - | out of memory |

Training steps in the terms of `liger-like plan`:

|  | step ms | tokens/s | peak GiB | reserved | outside of torch |
|---|---|---|---|---|---|
| Llama-3.2-1B, untied, DDP | 100 | 300,000 | 20.0 | 25.0 | 1.5 |
| Llama-3.2-1B, untied, ZeRO-1 | out of memory | - | - | - | - |
"""
OVERVIEW = r"""2 x GPU, 2026-01-01.

| tokens/s; peak GiB | transformers | liger_like |
|---|---|---|
| Training steps, FSDP2, 8 x 2048 | 16,384; 90.0 | 32,768; 60.0 |
| Training steps, FSDP2, 2 x 16384 | -; - | 16,384; 70.0 |

| ms; peak MiB | liger_like |
|---|---|
| Vocabulary-parallel loss | 10.0; 1,000 |

| share of one GPU's rate | ring | ulysses |
|---|---|---|
| Context-parallel attention | 90.0% | - |

| tokens; the next length | transformers | Liger |
|---|---|---|
| The longest sequence that was trained, and the next one tried | 8,192; 12,288: out of memory | -; out of memory |
"""


def test_tables():
    parts = RESULT["parts"]
    earlier = {"parts": {**parts, "loss": {"liger_like": []}, "longest": {"Liger": parts["longest"]["Liger"]}}}
    now = {"loss": parts["loss"], "longest": {"transformers": parts["longest"]["transformers"]}}
    assert sharded_report.tables(measure.merged(earlier, RESULT | {"parts": now}, sharded.PARTS)) == TABLES


def test_the_readme_has_the_most_gpus():
    readme = f"before\n{sharded_report.BEGIN}old{sharded_report.END}after\n"
    fewer = RESULT | {"gpus": 1}
    filled = readme.replace("old", OVERVIEW)
    assert sharded_report.with_overview(readme, [fewer, RESULT]) == filled
    assert sharded_report.with_overview(filled, [RESULT, fewer]) == filled
    assert sharded_report.with_overview(filled, []) == readme.replace("old", "")
