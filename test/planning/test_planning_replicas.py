"""Plans of data parallelism by each stage of ZeRO: the bytes that two processes of torch's own classes have."""

import dataclasses
import gc
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from liger_like.planning import GPUS, Setting, predict, predict_model
from liger_like.planning._clock import Clock
from liger_like.planning._models import layers_of
from liger_like.planning._prediction import changes_of, predicted
from liger_like.planning._replicas import _buckets
from liger_like.planning._stages import options_of
from liger_like.planning._tracer import Tracer

H200 = GPUS["h200"]
MODEL = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
    num_hidden_layers=5,
    attn_implementation="eager",  # the same ops on each device
)
SEQ = 64
OWN = 4096 / 2**30  # GiB of the tokens that the steps of the processes keep
SETTINGS = {
    **{f"zero {zero}": Setting(2, SEQ, accumulation=2, fsdp=2, zero=zero, patched=False) for zero in (0, 1)},
    "sgd": Setting(2, SEQ, fsdp=2, zero=1, optimizer="sgd", patched=False),
    **{f"zero {zero}": Setting(2, SEQ, fsdp=2, zero=zero, dtype="fp32", patched=False) for zero in (2, 3)},
}
pytestmark = pytest.mark.usefixtures("references")


def made(setting):
    return LlamaForCausalLM(MODEL).to(torch.bfloat16 if setting.dtype == "bf16" else torch.float32).train()


def trainer(model, setting):
    """Return ``model`` as torch's class for the stage has it, and its optimizer."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[setting.optimizer]
    if setting.zero >= 2:
        mesh = dist.init_device_mesh("cpu", (2,))
        for unit in (*layers_of(model), model):
            fully_shard(unit, mesh=mesh, **options_of(setting))
        return model, kind(model.parameters(), lr=1e-5, fused=True)
    own = [p for p in model.parameters() if p.requires_grad]
    model = DistributedDataParallel(model)
    if setting.zero == 0:
        return model, kind(own, lr=1e-5, fused=True)
    return model, ZeroRedundancyOptimizer(own, kind, lr=1e-5, fused=True)


def measured(rank, folder):
    """Write the bytes of real steps, of real tensors, by setting."""
    for name, setting in SETTINGS.items():
        tracer = Tracer()
        with tracer.listening():
            inner = made(setting)
            model, optimizer = trainer(inner, setting)
            tracer.know(inner)
            tokens = torch.zeros((setting.micro_batch, SEQ), dtype=torch.int64)
            found = []
            for step in range(5):
                if step >= 2:  # the second one made the buckets anew
                    gc.collect()
                    tracer.restart()
                for _ in range(setting.accumulation):
                    own = tokens.clone()
                    model(input_ids=own, labels=own, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= 2:
                    # gloo's reduce-scatter copies what it sends
                    tracer.events = [event for event in tracer.events if event[0].op != "aten::split"]
                    found.append(predicted(*changes_of(tracer), Clock(H200)))
        least = min(found, key=lambda each: each.gib)  # on a busy machine gloo's threads let go of tensors later
        Path(folder, f"{name} {rank}").write_text(json.dumps([least.gib, least.resting, least.by_kind]))


def test_processes_hold_what_is_planned(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    run(measured, 2, str(tmp_path))

    def planned(setting):
        def make():
            with torch.device("meta"):
                return made(setting)

        return predict_model(make, setting)

    for name, setting in SETTINGS.items():
        found = planned(setting)
        ranks = [json.loads((tmp_path / f"{name} {rank}").read_text()) for rank in range(2)]
        gib, resting, kinds = max(ranks)  # the plan is that of the process that needs the most
        workspace = H200.workspace / 2**30
        assert found.gib - workspace == pytest.approx(gib, abs=OWN), name
        assert found.resting - workspace == pytest.approx(resting, abs=OWN), name
        assert found.by_kind.get("optimizer") == kinds.get("optimizer"), name


def test_what_is_sent():
    """Gradients are summed, all but the part of this GPU there and back; zero 1 sends each parameter once more."""
    with torch.device("meta"):
        size = sum(p.nbytes for p in LlamaForCausalLM(MODEL).to(torch.bfloat16).parameters())
    for zero, times in ((0, 2), (1, 3)):
        setting = Setting(2, SEQ, accumulation=5, fsdp=4, zero=zero)
        found = predict(MODEL, setting)
        assert found.times["network"] * H200.link * 1e9 == pytest.approx(times * 0.75 * size)
        alone = predict(MODEL, dataclasses.replace(setting, fsdp=1))
        share = 0.25 if zero else 1
        assert found.times["optimizer"] == pytest.approx(share * alone.times["optimizer"], rel=0.05)
        saved = alone.times["optimizer"] - found.times["optimizer"]
        assert found.seconds == pytest.approx(alone.seconds + found.times["network"] - saved, rel=1e-3)


def test_buckets_are_those_of_torch():
    """Gradients of more than 25 MiB have a bucket of their own, and the first bucket is small."""
    mib = [torch.empty(size, 2**19, device="meta", dtype=torch.bfloat16) for size in (30, 20, 4, 2, 1)]
    assert [size / 2**20 for size in _buckets(mib)] == [1, 26, 30]
