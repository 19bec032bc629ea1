"""Plans of tensor and pipeline parallelism: a GPU has the bytes that a process of examples/parallel.py has."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_planning_command import prediction
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
)

import liger_like
from examples import parallel
from liger_like.parallel.stages import spread
from liger_like.planning import Setting, predict
from liger_like.planning import _layers as layers
from liger_like.planning import _stages as stages
from liger_like.planning._clock import DTENSOR
from liger_like.planning._models import build, model_class
from liger_like.planning._prediction import of_pipeline
from liger_like.planning._tracer import rounded

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 256}
MODEL = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=3, tie_word_embeddings=False)
SEQ = 64
MESHES = {
    "tp": Setting(2, SEQ, tp=2, dtype="fp32"),
    "pp": Setting(1, SEQ, pp=2, accumulation=4, dtype="fp32"),
    "both": Setting(1, SEQ, tp=2, pp=2, accumulation=4, dtype="fp32"),
}
pytestmark = pytest.mark.usefixtures("references")


def local(t):
    return rounded(getattr(t, "_local_tensor", t).nbytes)


def held(rank, folder):
    """Write the bytes of parameters, gradients and moments after a real step of each mesh of so many processes."""
    for name, setting in MESHES.items():
        if setting.gpus != dist.get_world_size():
            continue
        sizes = {each: getattr(setting, each) for each in ("pp", "fsdp", "cp", "tp")}
        mesh = dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = LlamaForCausalLM(MODEL).train()
        liger_like.patch(model)
        stage = spread(model, mesh)
        optimizer = torch.optim.AdamW(stage.parameters())
        rows = torch.zeros(setting.batch, SEQ, dtype=torch.int64)
        parallel.step_of(stage, mesh, setting.accumulation, rows.numel())(rows)
        optimizer.step()
        own = [*stage.parameters()]
        found = {
            "parameters": sum(map(local, [*own, *stage.buffers()])),
            "gradients": sum(local(p.grad) for p in own),
            "optimizer": sum(local(t) for state in optimizer.state.values() for t in state.values()),
        }
        Path(folder, f"{name}{rank}").write_text(json.dumps(found))


def test_a_process_holds_what_the_trace_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for processes in (2, 4):
        run(held, processes, str(tmp_path))
    places = ("tp", 0, (0, 1)), ("pp", 0, (0,)), ("pp", 1, (1,)), ("both", 0, (0, 1)), ("both", 1, (2, 3))
    for name, index, ranks in places:
        setting = MESHES[name]
        start, changes, clock, _ = layers.trace_step(made(setting), setting, "h200", index=index)
        sums = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for change in start:
            if change.part.kind in sums:
                sums[change.part.kind] += change.size
        sums["gradients"] += sum(c.size for c in changes if c.part.kind == "gradients" and c.size > 0)
        assert setting.tp == 1 or clock.groups["network"] > 0
        for rank in ranks:
            assert sums == json.loads((tmp_path / f"{name}{rank}").read_text()), (name, rank)


def made(setting, config=MODEL):
    return build(*model_class(config), setting)


@pytest.mark.parametrize(("index", "flying"), [(0, 2), (1, 1)])
def test_micro_batches_in_flight(index, flying):
    """Stages keep as many micro-batches as stages follow, and one: by what a product of their first layer saves.

    Layers of each stage have the numbers of the model.
    """
    setting = Setting(1, SEQ, pp=2, accumulation=4, dtype="fp32")
    _, changes, *_ = layers.trace_step(made(setting), setting, "h200", index=index)
    assert {change.part.layer for change in changes} - {None} == [{0}, {1, 2}][index]
    level = peak = 0
    for change in changes:
        if change.part == ("activations", index, "mlp.gate_proj"):
            level += change.size
            peak = max(peak, level)
    assert peak == flying * SEQ * SIZES["intermediate_size"] * 2


def test_the_time_of_a_pipeline():
    slow, large = prediction(1.0, 2.0), prediction(3.0, 1.0)
    found = of_pipeline([slow, large], 4)
    assert (found.gib, found.seconds, found.times["bubble"]) == (3.0, 2.5, 0.5)
    assert of_pipeline([slow], 4) is slow
    waiting = of_pipeline([replace(slow, times={"products": 0.5, "host": 2.0}), large], 4)
    assert waiting.limited_by == "host 80 %"


def test_errors_later_are_not_those_of_a_rank():
    hook = sys.excepthook
    predict(MODEL, Setting(1, SEQ, fsdp=2, dtype="fp32"))
    assert sys.excepthook is hook


def test_stage_2_of_zero_keeps_the_gathered_parameters():
    settings = [replace(MESHES["tp"], fsdp=2, zero=zero) for zero in (2, 3)]
    assert [stages.options_of(setting).get("reshard_after_forward", True) for setting in settings] == [False, True]


def test_norms_without_weights():
    config = OlmoConfig(**SIZES, pad_token_id=None, num_key_value_heads=2, num_hidden_layers=2)
    assert predict(config, Setting(1, SEQ, pp=2, accumulation=4, dtype="fp32")).times["bubble"] > 0


def test_collectives_send_all_but_the_part_of_this_gpu():
    """FSDP2 gathers parameters in bf16, except once for each layer and its backward, and scatters gradients in fp32."""
    setting = Setting(1, SEQ, fsdp=4, dtype="fp32")
    model = made(setting)
    words = model.model.embed_tokens.weight.numel()
    total = sum(p.numel() for p in model.parameters())
    layers_alone = total - 2 * words - SIZES["hidden_size"]
    *_, clock, _ = layers.trace_step(model, setting, "h200")
    gathered = 2 * (total + layers_alone)  # layers again in the backward
    assert clock.groups["network"] * clock.link == pytest.approx(0.75 * (gathered + 4 * total), rel=1e-2)


def test_tensor_parallel_layers_send_their_tokens_eight_times():
    """In bf16, to all other GPUs. The host runs ops of DTensors for gradients alone: one for each parameter."""
    setting, found = Setting(2, SEQ, tp=2, dtype="fp32"), []
    for layer_count in (1, 3):
        config = LlamaConfig(**{**MODEL.to_dict(), "num_hidden_layers": layer_count})
        *_, clock, _ = layers.trace_step(made(setting, config), setting, "h200")
        found.append((clock.groups["network"] * clock.link, clock.ops.count((DTENSOR, 0.0))))
    (sent, ops), (more_sent, more_ops) = found
    assert (more_sent - sent) / 2 == pytest.approx(8 * setting.micro_batch * SEQ * SIZES["hidden_size"] * 2 / 2)
    assert (more_ops - ops) / 2 == len([*LlamaForCausalLM(MODEL).model.layers[0].parameters()])


TIED = LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)
WINDOWS = MistralConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=2, sliding_window=16)
NORMS = Qwen3Config(**SIZES, head_dim=32, num_key_value_heads=2, num_hidden_layers=2)
DROPOUT = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=2, attention_dropout=0.1)
SLIDING = Qwen2Config(**SIZES, num_key_value_heads=2, num_hidden_layers=2, use_sliding_window=True, max_window_layers=0)
LATENTS = DeepseekV3Config(
    **SIZES, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
    v_head_dim=16, first_k_dense_replace=2, num_hidden_layers=2,
)  # fmt: skip
SCALED = GraniteConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=2, embedding_multiplier=12.0)
MIXED = Glm4MoeConfig(
    **SIZES, num_key_value_heads=2, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
GROUPED = {"checkpoint": "full", "checkpoint_layers": 2}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (TIED, {"tp": 2}, "model must have a head of its own to be spread, got LlamaForCausalLM with tie_word"),
        (MODEL, {"tp": 4}, "tp must divide num_key_value_heads, 2, got 4"),
        (MODEL, {"tp": 2, "seq": 63}, "seq must be a multiple of tp x cp, 2, got 63"),
        (MODEL, {"pp": 4}, "pp must be at most the model's 3 layers, got 4"),
        (SLIDING, {"pp": 2}, "windows or other kinds in Qwen2"),
        (WINDOWS, {"tp": 2}, "windows or other kinds in Mistral"),
        (
            SCALED,
            {"pp": 2},
            "must not scale embeddings or logits to be spread, got GraniteForCausalLM with embedding_mul",
        ),
        (MIXED, {"pp": 2}, "model must have the layers of a Llama to be spread, got Glm4Moe"),
        (LATENTS, {"pp": 2}, "model must have the layers of a Llama to be spread, got DeepseekV3"),
        (
            NORMS,
            {"tp": 2},
            "tp must be 1 for Qwen3ForCausalLM, got 2: its self_attn.k_norm would see some of the heads or features",
        ),
        (DROPOUT, {"pp": 2}, "model must have patched attention to be spread, got 'sdpa' in Llama"),
        (MODEL, {"tp": 2, "patched": False}, "tp must be 1 unless patched"),
        (MODEL, {"pp": 2, "tiled_mlp": True}, "pp must be 1 with tiled_mlp, got 2"),
        (MODEL, {"tp": 2} | GROUPED, "tp must be 1 with checkpoint_layers, got 2"),
        (MODEL, GROUPED | {"checkpoint_layers": 99}, "checkpoint_layers must be at most the model's 3, got 99"),
    ],
)
def test_what_cannot_be_spread_is_named(config, fields, message):
    with pytest.raises(ValueError, match=message):
        predict(config, Setting(**{"seq": SEQ, "dtype": "fp32"} | fields))
