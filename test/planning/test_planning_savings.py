"""Plans whose settings save memory: checkpoints on the host, tiled MLPs, optimizers with fewer states, adapters."""

import dataclasses
import json

import pytest
import torch
from test_planning_command import H200, prediction
from transformers import LlamaConfig

from examples.train import CONFIGS
from liger_like.doctor import NotExaminedError
from liger_like.patches import lora
from liger_like.planning import Setting, _models, plan, predict, predict_model
from liger_like.planning._optimizers import AdamW8bit
from liger_like.planning._report import start
from liger_like.planning._search import Candidate, searched

MIB = 2**20
TINY = CONFIGS["tiny"]
LAYERS = 6
SIZES = {"hidden_size": 64, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = LlamaConfig(**SIZES, vocab_size=256, num_hidden_layers=LAYERS)
TOKENS = 2**14  # whose hidden states take 2 MiB
LEFT = LAYERS - 1  # the input of the last layer stays
pytestmark = pytest.mark.usefixtures("references")


def bytes_of(found, kind):
    return found.by_kind[kind] * 2**30


def test_checkpoints_on_the_host():
    # no gradients pile up in the backward, so memory rises by the inputs alone
    full = Setting(1, TOKENS, checkpoint="full", step_in_backward=True, optimizer="sgd")
    here, there = (predict(MODEL, dataclasses.replace(full, checkpoint_on_host=on)) for on in (False, True))
    assert (here.host_gib, there.host_gib) == (0, 1)  # memory is pinned in slabs of 1 GiB
    assert there.times["copies"] * H200.pcie * 1e9 == pytest.approx(2 * LEFT * 2 * MIB)  # there and back
    # one input has been copied back while the layer before is computed
    assert (here.gib - there.gib) * 1024 == pytest.approx(2 * (LEFT - 1), abs=0.1)
    wide = LlamaConfig(**SIZES | {"hidden_size": 512}, vocab_size=256, num_hidden_layers=LAYERS)
    long = Setting(1, 50 * TOKENS, checkpoint="full", checkpoint_on_host=True)
    assert predict(wide, long).host_gib == 4  # 5 layers of 800 MiB are 3.9 GiB


def test_tiled_mlps():
    whole, tiled = (predict(MODEL, Setting(1, TOKENS, tiled_mlp=on)) for on in (False, True))
    # a whole one keeps gate and up for the backward
    assert (whole.gib - tiled.gib) * 2**30 > LAYERS * TOKENS * 2 * 1024 * 2


def test_states_of_optimizers():
    adamw, sgd, eight = (predict(TINY, Setting(2, 64, optimizer=name)) for name in ("adamw", "sgd", "adamw8bit"))
    assert "optimizer" not in sgd.by_kind
    assert sgd.resting < eight.resting < adamw.resting
    with torch.device("meta"):
        sizes = [p.numel() for p in _models.model_class(TINY)[1](TINY).parameters()]
    moments = [4 * n if n < 4096 else n for n in sizes]
    scales = [4 * -(-n // 256) for n in sizes if n >= 4096]
    rounded = [-(-size // 512) * 512 for size in (*moments, *scales, 4 * 256)]
    assert bytes_of(eight, "optimizer") == 2 * sum(rounded)


def test_eight_bits_are_those_of_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes").optim
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (4095, 4096, 5000)]
    real, ours = optim.AdamW8bit(parameters), AdamW8bit(parameters, 1e-5)
    for i, parameter in enumerate(parameters):
        real.init_state(real.param_groups[0], parameter, 0, i)
        state = {name: t for name, t in real.state[parameter].items() if torch.is_tensor(t)}
        mine = ours._moments(parameter)
        assert {n: (t.shape, t.dtype) for n, t in state.items()} == {n: (t.shape, t.dtype) for n, t in mine.items()}


def test_adapters_are_what_is_trained():
    rank = 4
    found = predict(TINY, Setting(2, 64, lora=rank))
    with torch.device("meta"):
        model = _models.model_class(TINY)[1](TINY)
    linear = [m for name, m in model.named_modules() if type(m) is torch.nn.Linear and name != "lm_head"]
    each = [4 * rank * size for m in linear for size in (m.in_features, m.out_features)]  # PEFT keeps them in fp32
    rounded = [-(-size // 512) * 512 for size in each]
    assert bytes_of(found, "optimizer") == 2 * sum(rounded) + 512 * len(each)  # and AdamW's counts of steps
    assert found.resting < predict(TINY, Setting(2, 64)).resting


def test_adapters_of_a_folder(tmp_path):
    """They are on the modules that the file names, of its ranks."""
    peft = pytest.importorskip("peft")
    targets = {"r": 4, "target_modules": ["q_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 8}}
    peft.LoraConfig(**targets, inference_mode=True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    found = predict(tmp_path, Setting(2, 64))
    sizes = [4 * rank * 64 for rank in (8, 4) for _ in "AB"]
    steps = 512 * len(sizes)
    assert bytes_of(found, "optimizer") == 2 * sum(sizes) + steps
    rows = plan(tmp_path, batch=2, seq=64, fix={"checkpoint": "none"}).rows
    assert [(row.setting.lora, row.prediction.gib) for row in rows] == [(4, found.gib)]
    with pytest.raises(ValueError, match=r"lora must be 4, the r of adapter_config.json, got 8"):
        predict(tmp_path, Setting(2, 64, lora=8))
    for fields, message in (
        ({"peft_type": "IA3"}, "peft_type of .* must be LORA, got 'IA3'"),
        ({"peft_type": "LORA", "r": 4, "target_modules": ["none_such"]}, "target_modules of adapter_config.json: "),
        ({"peft_type": "LORA", "r": "4"}, r"r of .*adapter_config.json must be an integer, got str"),
        ({"peft_type": "LORA", "r": 0}, r"r of .*adapter_config.json must be at least 1, got 0"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
        with pytest.raises((NotExaminedError, TypeError, ValueError), match=message):
            predict(tmp_path, Setting(2, 64))


@pytest.mark.parametrize(("checkpoint", "fused"), [("none", True), ("selective", False)])
def test_adapted_layers_run_as_on_a_gpu(monkeypatch, checkpoint, fused):
    """The trace's own mode changes nothing; that of a selective checkpoint leaves the layers to PEFT."""
    peft = pytest.importorskip("peft")
    setting = Setting(2, 64, lora=4, checkpoint=checkpoint)

    def in_bf16(model, config):
        return get_peft_model(model, config, autocast_adapter_dtype=False)

    get_peft_model, calls = peft.get_peft_model, []
    monkeypatch.setattr(peft, "get_peft_model", in_bf16)
    model = _models.build(*_models.model_class(TINY), setting)
    monkeypatch.setattr(lora._AdaptedLinear, "apply", spied(lora._AdaptedLinear.apply, calls))
    predict_model(lambda: model, setting)
    assert bool(calls) is fused


def spied(function, calls):
    def run(*args):
        calls.append(args)
        return function(*args)

    return run


def rough(setting):
    """Return a model: rows take 20 GiB, 12 with tiled MLPs, 4 on the host, which then holds 100."""
    gib = 40 * setting.micro_batch
    gib = gib * (0.3 if setting.checkpoint_on_host else 1) * (0.6 if setting.tiled_mlp else 1)
    found = prediction(gib, 1.0 + setting.checkpoint_on_host)
    return dataclasses.replace(found, host_gib=100 * setting.checkpoint_on_host)


def test_savings_are_tried_where_nothing_fits_without():
    def rows(gib, host=None, **fix):
        return searched(rough, dataclasses.replace(H200, memory=gib << 30), 1, 1, 2048, fix, host)

    assert not any(row.setting.tiled_mlp or row.setting.checkpoint_on_host for row in rows(50))
    assert rows(30)[0].setting == Setting(checkpoint="full", tiled_mlp=True)
    assert rows(15)[0].setting == Setting(checkpoint="full", checkpoint_on_host=True)
    assert rows(15)[0].host_gib == 100
    assert not rows(15, host=99)[0].fits
    assert rows(15, host=100)[0].fits
    assert {row.setting.checkpoint for row in rows(50, checkpoint_on_host=True)} == {"attention", "full"}
    assert not any(row.setting.tiled_mlp for row in rows(1, patched=False))
    assert {row.setting.optimizer for row in rows(1, optimizer="sgd")} == {"sgd"}


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, "products 60 %"), (1.5, "copies 100 %")])
def test_copies_limit_a_step_only_where_the_gpu_waits(seconds, limit):
    copies = 0.9 if seconds == 1.0 else seconds  # more than any group of the GPU
    times = {"products": 0.6, "attention": 0.4, "host": 0.8, "copies": copies}
    assert dataclasses.replace(prediction(1.0, seconds), times=times).limited_by == limit


def test_words_that_start_them():
    def started(**fields):
        return start(Candidate(Setting(**fields), prediction(1.0, 1.0), 1.0, True))

    assert "patch(model, mlp='tiled')" in started(tiled_mlp=True)
    assert "offload_checkpoints()" in started(checkpoint="full", checkpoint_on_host=True)
    assert "LoraConfig(r=8" in started(lora=8)
    assert "bitsandbytes.optim.AdamW8bit" in started(optimizer="adamw8bit")
    assert "examples.parallel" not in started(fsdp=2, dtype="fp32", optimizer="sgd")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"checkpoint_on_host": True},
            "checkpoint_on_host must be false unless checkpoint is attention or full, it is none",
        ),
        ({"tiled_mlp": True, "patched": False}, "tiled_mlp must be false unless patched"),
        ({"optimizer": "lion"}, "optimizer must be out of adamw, adamw8bit, sgd, got 'lion'"),
        ({"optimizer": "adamw8bit", "dtype": "fp32"}, "optimizer must be adamw or sgd with dtype fp32"),
        ({"lora": 2, "dtype": "fp32"}, "lora must be 0 with dtype fp32, got 2"),
        ({"lora": -1}, "lora must be at least 0, got -1"),
        ({"checkpoint_layers": 2}, "checkpoint_layers must be 1 with checkpoint none, got 2"),
        ({"step_in_backward": True, "accumulation": 2}, "accumulation must be 1 with step_in_backward, got 2"),
        ({"fsdp": 2, "zero": 4}, "zero must be at most 3, got 4"),
        ({"fsdp": 2, "zero": 0, "dtype": "fp32"}, "dtype must be bf16 on 2 GPUs with zero 0, got fp32"),
        ({"fsdp": 2, "zero": 2}, "dtype must be fp32 on 2 GPUs with zero 2, got bf16"),
        ({"fsdp": 2, "zero": 1, "tp": 2}, "tp must be 1 with zero 1, got 2"),
        ({"fsdp": 2, "zero": 0, "step_in_backward": True}, "step_in_backward must be false with zero 0"),
        ({"fsdp": 2, "zero": 1, "optimizer": "adamw8bit"}, "optimizer must be adamw or sgd with zero 1"),
        ({"seq": 2**20, "micro_batch": 3}, "seq must be at most 699050 with micro_batch 3 and cp 1, got 1048576"),
    ],
)
def test_settings_that_contradict(fields, message):
    with pytest.raises(ValueError, match=message):
        Setting(**fields)
