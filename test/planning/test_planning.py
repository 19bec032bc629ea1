"""The trace of a step without data: what it counts, what it leaves behind, and what it says of steps that read data."""

import gc
import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from examples.train import CONFIGS
from liger_like import patch
from liger_like.ops import tiled_mlp
from liger_like.ops.losses.rows import bad_label
from liger_like.planning import GPUS, NotTracedError, Setting, predict, predict_model, traced
from liger_like.planning._layers import trace_step
from liger_like.planning._machine import gpu_of
from liger_like.planning._models import build, model_class
from liger_like.planning._tracer import Tracer
from liger_like.runtime import machine, support, tiles

MIB = 2**20
TINY = CONFIGS["tiny"]
pytestmark = pytest.mark.usefixtures("references")  # patch tries replacements on small modules


class Reader(nn.Module):
    def forward(self, x):
        return x[x > 0]


def state():
    """Return what a trace changes while it runs."""
    hooks = [*nn.modules.module._global_forward_hooks, *nn.modules.module._global_forward_pre_hooks]
    steps = [*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks]
    functions = torch.nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_
    modes = machine.current, machine.own_modes, _len_torch_dispatch_stack()
    return modes, gc.get_freeze_count(), hooks, steps, functions, dict(tiles._CHOSEN)


def test_a_step_that_reads_data_is_named_and_leaves_nothing():
    before = state()
    model = nn.Sequential()
    model.add_module("inner", Reader())

    def trace():
        with traced("h100") as t:
            t.know(model)
            model(torch.ones(3))

    with pytest.raises(NotTracedError, match=r"cannot be traced: aten::index.*, inner: "):
        trace()
    assert state() == before


def test_torch_does_not_log_what_is_raised(monkeypatch):
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    monkeypatch.setattr(logger, "handle", records.append)
    with pytest.raises(NotTracedError, match="cannot be traced: aten::expand"), traced():
        torch.ones(3).expand(2, 4)
    assert not records


def test_errors_of_the_step_itself_pass():
    before = state()
    with pytest.raises(KeyError, match="mine"), traced():
        raise KeyError("mine")
    assert state() == before


def steps_of_a_layer(fake):
    """Return the changes of memory of two steps of a plain model."""
    torch.manual_seed(0)
    tracer = Tracer()
    with FakeTensorMode() if fake else torch.device("cpu"), tracer.listening():
        model = nn.Sequential(nn.Embedding(7, 64), nn.LayerNorm(64), nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 7))
        tracer.know(model)
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(40, dtype=torch.int64)
        for _ in range(2):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            adamw.step()
            adamw.zero_grad()
    return [(entry.kind, entry.module, size) for entry, size, _ in tracer.events]


def test_tensors_without_data_count_as_those_with_data():
    assert steps_of_a_layer(fake=True) == steps_of_a_layer(fake=False)


def test_the_peak_of_a_step_of_ones_own():
    with traced("h200") as t:
        weight = nn.Parameter(torch.empty(MIB))  # 4 MiB
        y = weight * 2  # 4 MiB, which the backward does not need
        z = y.exp()  # 4 MiB, saved
        del y
        z.sum().backward()  # the gradient of z is expanded: 4 MiB for that of y, 4 MiB for that of the weight
    workspace = GPUS["h200"].workspace / MIB
    assert t.gib * 1024 == pytest.approx(workspace + 16, abs=0.01)
    assert t.by_kind["workspace"] * 1024 == workspace
    assert sum(t.by_kind.values()) == pytest.approx(t.gib)


def test_kinds_layers_and_modules_add_up():
    found = predict(TINY, Setting(2, 64))
    for parts in (found.by_kind, found.by_layer, found.by_module):
        assert sum(parts.values()) == pytest.approx(found.gib)
    other = predict(TINY, Setting(2, 64), gpu=80)  # 80 GiB are an H200 with less memory
    assert (other.gib, other.curve, other.seconds) == (found.gib, found.curve, found.seconds)
    assert found.calibrated
    assert not other.calibrated
    assert max(map(sum, found.curve)) == pytest.approx(found.gib)
    assert [*found.by_layer] == [-1, 0, 1]


def test_states_are_those_of_the_formula():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TINY)
    bytes_of = sum(-(-2 * p.numel() // 512) * 512 for p in model.parameters())
    found = predict(TINY, Setting(2, 64))
    steps = 512 * len([*model.parameters()])  # AdamW's counts of steps
    rotary = sum(-(-4 * b.numel() // 512) * 512 for b in model.buffers())
    assert found.by_kind["optimizer"] * 2**30 == 2 * bytes_of + steps
    assert found.by_kind["parameters"] * 2**30 == bytes_of + rotary  # buffers, too
    assert found.resting * 2**30 == 3 * bytes_of + steps + rotary + GPUS["h200"].workspace


def test_moments_belong_to_the_layer_of_their_parameters():
    setting = Setting(2, 64)
    model = build(*model_class(TINY), setting)
    sizes = [-(-2 * p.numel() // 512) * 512 for p in model.model.layers[0].parameters()]
    start, *_ = trace_step(model, setting, "h200")
    found = sum(change.size for change in start if (change.part.kind, change.part.layer) == ("optimizer", 0))
    assert found == sum(2 * size + 512 for size in sizes)  # and AdamW's counts of steps


def test_order_of_checkpoints_batches_and_sequences():
    def gib(**fields):
        return predict(TINY, Setting(**{"micro_batch": 4, "seq": 256} | fields)).gib

    sizes = [gib(checkpoint=name) for name in ("full", "attention", "selective", "none")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert sizes[-1] < gib(micro_batch=5)
    assert sizes[-1] < gib(accumulation=2)  # the gradients of the first pass are there in the second
    assert sizes[-1] < gib(patched=False)


def test_a_mixture_is_traced():
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, vocab_size=256)
    patched, plain = (predict(config, Setting(2, 64, patched=patched)) for patched in (True, False))
    assert "mlp.experts" in patched.by_module
    assert patched.gib < plain.gib


def test_tiled_mlps_are_traced(monkeypatch):
    """Their products in fp32 have a time, and their tensors exist for a tile."""
    monkeypatch.setattr(tiled_mlp, "TILE", 128)
    setting = Setting(seq=4096, checkpoint="full")

    def tiled():
        model = build(*model_class(TINY), Setting(seq=4096, checkpoint="full", patched=False))
        patch(model, mlp="tiled")
        return model

    assert predict_model(tiled, setting).gib < predict(TINY, setting).gib


def test_the_machine_answers_for_the_gpu():
    cpu, gpu = torch.device("cpu"), GPUS["h100"]
    before = support.architecture(cpu), support.num_programs(cpu), support.gpu_class(cpu), support.l2_bytes(cpu)
    with machine.pretended(gpu):
        assert (support.architecture(cpu), support.num_programs(cpu, 2)) == (9, 264)
        assert (support.gpu_class(cpu), support.l2_bytes(cpu)) == ("hopper", gpu.l2)
        assert bad_label("cpu").item() == 0
    assert (
        support.architecture(cpu),
        support.num_programs(cpu),
        support.gpu_class(cpu),
        support.l2_bytes(cpu),
    ) == before
    assert gpu_of("H200") is GPUS["h200"]
    assert not gpu_of(24).calibrated


@pytest.mark.parametrize(
    ("architecture", "kib", "kind"),
    [(9, 227, "hopper"), (8, 163, "large"), (0, 160, "large"), (8, 99, "rtx"), (12, 99, "rtx"), (0, 64, "small")],
)
def test_class_of_a_gpu(architecture, kib, kind):
    gpu = machine.Machine("a GPU", architecture, multiprocessors=100, l2=1, shared_memory=kib << 10, memory=1)
    with machine.pretended(gpu):
        assert support.gpu_class(torch.device("cpu")) == kind


@pytest.mark.parametrize("gpu", ["no_such", "-1", 0, None])
def test_unknown_gpus(gpu):
    with pytest.raises(ValueError, match="gpu must be out of h200"):
        gpu_of(gpu)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"seq": 0}, ValueError, "seq must be at least 1, got 0"),
        ({"fsdp": 2.0}, TypeError, "fsdp must be an integer, got float"),
        ({"checkpoint": "half"}, ValueError, "checkpoint must be out of none, attention, selective, full, got 'half'"),
        ({"fsdp": 2}, ValueError, "dtype must be fp32 on 2 GPUs"),
        ({"cp": 2, "patched": False, "dtype": "fp32"}, ValueError, "cp must be 1 unless patched"),
    ],
)
def test_settings_name_their_fields(fields, error, message):
    with pytest.raises(error, match=message):
        Setting(**fields)
