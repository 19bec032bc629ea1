"""Generation: contestants of a decode step agree, whole generations run and are timed as the docs say, the report."""

from types import SimpleNamespace

import pytest
import torch

from benchmark.common import markdown, measure
from benchmark.generation import generation, generation_report, latents, layers
from benchmark.generation.layers import Shape
from benchmark.training.small import MODELS

SHAPE = Shape(3, 300)
pytestmark = pytest.mark.usefixtures("references")


def test_sizes():
    """The bytes are those of the keys and values that a step reads."""
    assert SHAPE.bytes() == 3 * 300 * 2 * 8 * 128 * layers.DTYPE.itemsize
    assert Shape(2, 5, 576).bytes() == 2 * 5 * 576 * layers.DTYPE.itemsize
    assert Shape(2, 5, features=64).bytes() == 2 * 5 * 2 * 8 * 64 * layers.DTYPE.itemsize
    assert {generation._shape(generation._argument(shape)) for shape in generation.SHAPES} == {*generation.SHAPES}
    assert [setting.text() for setting in generation.SETTINGS[:3]] == [
        "Llama-3.2-1B, 64 x 512 + 128",
        "Llama-3.2-1B, 256 x 128 + 512",
        "Llama-3.2-1B, 16 x 1024 + 512",
    ]


@torch.no_grad()
@pytest.mark.parametrize("shape", [SHAPE, SHAPE._replace(features=64)], ids=Shape.text)
def test_contestants_attend_to_the_same_keys(shape):
    def outputs(*builds):
        for build in builds:
            torch.manual_seed(0)
            out = build(shape)()
            yield (out[0] if isinstance(out, tuple) else out).view(3, layers.H, shape.features)

    paged, *others = outputs(layers.ours, layers.ours_by_slots, layers.transformers_sdpa)
    for out in others:
        torch.testing.assert_close(out, paged)
    torch.testing.assert_close(*outputs(layers.ours_dense, layers.dense_sdpa))
    assert layers.flex_paged(shape)().numel() == paged.numel()


@torch.no_grad()
def test_contestants_expand_the_same_latents(monkeypatch):
    """Queries, latents and maps of ones: each head has the mean of equal values."""
    monkeypatch.setattr(latents, "normal", lambda *shape: torch.ones(shape, dtype=layers.DTYPE, device=latents.DEVICE))
    shape = Shape(2, 300, 576)
    values = {latents.ours: 1.0, latents.expanded_sdpa: 1.0, latents.expanding_sdpa: latents.LATENT**0.5}
    for build, value in values.items():
        out = build(shape)()
        assert out.shape[:-1].numel() == 2 * latents.HEADS
        torch.testing.assert_close(out, torch.full_like(out, value))


def test_times_of_continuous_batching(monkeypatch):
    """The first token is that of the last prompt; steps count until a sequence has all its tokens."""
    times = [[10.0, 11.0, 12.0, 13.0], [11.5, 12.5, 13.75, 20.0]]
    outputs = [SimpleNamespace(generated_tokens=[1] * 4, timestamps=each) for each in times]
    model = SimpleNamespace(
        config=MODELS["tiny"].config, generate_batch=lambda ids, **how: dict(enumerate(outputs[: len(ids)]))
    )
    monkeypatch.setattr(generation.time, "perf_counter", lambda: 8.0)
    generate = generation.by_batch(model, generation.Setting("tiny", 2, 5, 4))
    assert generate(4) == {"first_s": 3.5, "ms": 1000.0}
    with pytest.raises(RuntimeError, match="3 tokens for each of 2 prompts were expected"):
        generate(3)


def test_floor(monkeypatch):
    """A copy reads and writes; the floor reads the weights of the layers and the head, and the keys halfway."""
    monkeypatch.setattr(generation, "times", lambda step, n: [4.0, 2.0, 1.0])
    with torch.device(generation.DEVICE):
        model = generation.AutoModelForCausalLM.from_config(MODELS["tiny"].config, dtype=torch.float32)
    setting, config = generation.Setting("tiny", 3, 20, 6), model.config
    size = generation.COPIED if generation.GPU else 1 << 20
    keys = 3 * 23 * 2 * config.num_hidden_layers * config.num_key_value_heads * 4
    keys *= getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(p.nbytes for p in model.model.layers.parameters()) + model.lm_head.weight.nbytes
    assert generation.floor_ms(model, setting) == pytest.approx(2.0 / (2 * size) * (weights + keys))


@pytest.mark.parametrize("name", generation.CONTESTANTS)
def test_whole_generations(name, monkeypatch):
    """Each new token takes a second; continuous batching tells times of its own."""
    monkeypatch.setattr(generation, "seconds", lambda generate, new: (float(new), generate(new)))
    row = generation.contend(name, generation.QUICK)
    assert {"floor_ms", "cold_s", "tokens", "first_s", "ms"} <= row.keys()
    assert all(figure > 0 for figure in row.values())
    assert row["tokens"] == generation.QUICK.batch
    if "batch" not in name:
        assert (row["first_s"], row["ms"]) == (1, 1000)


@pytest.mark.parametrize("shape", generation.QUICK_SHAPES)
def test_quick_steps(shape, monkeypatch):
    monkeypatch.setattr(generation, "ROUNDS", 1)
    names = [*generation.contestants_of(shape)]
    rows = generation.time_layers(shape, names)
    assert [*rows] == names
    assert all(row["us"] > 0 and row["bytes"] == shape.bytes() for row in rows.values())


RESULT = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0"},
    "parts": {
        "B 1 S 2": {"ours": {"bytes": 4_000_000, "us": 2.0}, "theirs": {"bytes": 4_000_000, "reason": "fails"}},
        "tiny, 1 x 2 + 3": {
            "ours": {"tokens": 1234.4, "ms": 1.25, "gpu_ms": 1.0, "floor_ms": 0.5, "first_s": 0.1, "cold_s": 2.0},
            "theirs": {"reason": "out of memory"},
        },
    },
}


def test_tables():
    text = generation_report.tables(RESULT)
    assert "| B 1 S 2 | ours | 2.0 | 2.00 |\n| B 1 S 2 | theirs | fails | - |" in text
    assert "| tiny, 1 x 2 + 3 | ours | 1,234 | 1.25 | 1.00 | 0.50 | 0.10 | 2.0 | - |" in text
    assert "| tiny, 1 x 2 + 3 | theirs | out of memory |" in text
    text = generation_report.overview(RESULT)
    assert "| decode step of a layer, us | ours | theirs |" in text
    assert "| tiny, 1 x 2 + 3 | 1,234 | out of memory |" in text


def test_report_is_current():
    measured, notes = markdown.results("generation"), markdown.NOTES.read_text()
    assert measured
    assert generation_report.with_tables(notes, measured) == notes, "run python -m benchmark generation --report"
    page = markdown.FIGURES.read_text()
    assert generation_report.with_overview(page, measured) == page
    for result in measured:  # in the order of the benchmark, which merges the rows of later runs
        assert measure.merged({}, result, generation.ORDER) == result
