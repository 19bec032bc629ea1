"""Few layers that are replayed for all: the same to the byte as the whole trace, or not used."""

import pytest
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig

from liger_like import planning
from liger_like.planning import Setting, predict
from liger_like.planning import _layers as layers
from liger_like.planning._models import build, layers_of, model_class

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=7)
LONG = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=10)
SHORT = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=5)
GEMMA = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, num_hidden_layers=8)
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK = DeepseekV3Config(
    **SIZES, **LATENT, **EXPERTS, num_key_value_heads=4, first_k_dense_replace=2, num_hidden_layers=6
)
pytestmark = pytest.mark.usefixtures("references")


def made(config, setting):
    return build(*model_class(config), setting)


@pytest.mark.parametrize(
    ("config", "setting", "kept"),
    [
        (SHORT, Setting(2, 64, accumulation=4), 4),
        (LLAMA, Setting(2, 64, fsdp=2, cp=2, checkpoint="full", dtype="fp32"), 6),
        (GEMMA, Setting(2, 64, patched=False), 6),
        (DEEPSEEK, Setting(2, 64), 5),
        (LONG, Setting(1, 2**14, accumulation=3, checkpoint="full", checkpoint_on_host=True), 8),
        (SHORT, Setting(2, 64, lora=4), 4),
        (LONG, Setting(2, 64, checkpoint="full", checkpoint_layers=2, step_in_backward=True), 8),
        (LONG, Setting(2, 64, accumulation=2, fsdp=2, zero=2, dtype="fp32"), 6),
        (SHORT, Setting(2, 64, accumulation=2, fsdp=2, zero=1), 4),
    ],
    ids=[
        *("accumulated", "sharded", "two kinds of layers", "dense first layers", "on the host", "LoRA", "grouped"),
        *("gathered once", "states shared"),
    ],
)
def test_replayed_layers_are_the_whole_trace(monkeypatch, config, setting, kept):
    model = made(config, setting)
    cuts = layers.cuts_of(model.config, layers_of(model), setting)
    assert cuts.kept == kept
    few = layers.replayed(model, cuts, setting, "h200")
    monkeypatch.setattr(layers, "PASSES", setting.accumulation)  # each of them is traced
    whole = layers.whole(made(config, setting), setting, "h200")
    for name in ("gib", "resting", "by_kind", "by_layer", "by_module", "by_layer_and_kind", "host_gib"):
        assert getattr(few, name) == getattr(whole, name), name
    assert few.times == pytest.approx(whole.times, rel=1e-3)
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)


def test_passes_between_the_first_and_the_last_are_alike(monkeypatch):
    """Three are traced, also of a model whose layers do not repeat."""
    setting = Setting(2, 64, accumulation=9)
    few = layers.whole(made(SHORT, setting), setting, "h200")
    monkeypatch.setattr(layers, "PASSES", 9)
    each = layers.whole(made(SHORT, setting), setting, "h200")
    assert (few.gib, few.resting) == (each.gib, each.resting)
    assert few.times == pytest.approx(each.times)
    assert few.seconds == pytest.approx(each.seconds)


def test_the_optimizer_s_step_is_that_of_all_layers():
    """It takes the GPU three times as long for three times as many parameters, and the host no longer."""
    end = layers._scaled(layers.Segment([], [(1.0, 2.0)], {"optimizer": 2.0, "memory": 0.0, "sent": 0}), 3.0)
    assert (end.ops, end.times["optimizer"]) == ([(1.0, 6.0)], 6.0)


def test_moments_in_8_bits_take_turns_for_all_layers(monkeypatch):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=1, vocab_size=4096, num_hidden_layers=16
    )
    few = predict(config, Setting(1, 64, optimizer="adamw8bit"))
    monkeypatch.setattr(planning, "cuts_of", lambda *_: None)
    each = predict(config, Setting(1, 64, optimizer="adamw8bit"))
    assert few.times["optimizer"] == pytest.approx(each.times["optimizer"], rel=0.01)
    assert few.times["host"] == pytest.approx(each.times["host"], rel=0.01)


def test_layers_that_do_not_repeat_are_traced_whole(monkeypatch):
    outline = layers.Segment.outline
    sizes = iter(range(10**6))
    with monkeypatch.context() as m:
        m.setattr(layers.Segment, "outline", lambda segment: (next(sizes), outline(segment)))
        model = made(SHORT, Setting(2, 64))
        cuts = layers.cuts_of(model.config, layers_of(model), Setting(2, 64))
        assert layers.replayed(model, cuts, Setting(2, 64), "h200") is None
        assert (
            predict(SHORT, Setting(2, 64)).gib == layers.whole(made(SHORT, Setting(2, 64)), Setting(2, 64), "h200").gib
        )
    short = LlamaConfig(**SIZES, num_hidden_layers=3)
    model = made(short, Setting())
    assert layers.cuts_of(model.config, layers_of(model), Setting()) is None
    assert [*predict(short, Setting(2, 64)).by_layer] == [-1, 0, 1, 2]
