"""The small steps: what each contestant is, who runs beside whom, what is timed, and the report."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmark.common import markdown, measure
from benchmark.training import small, small_report, training
from benchmark.training.training import Setting
from liger_like import GraphedStep, patching
from liger_like.runtime import support

TINY = Setting("tiny", 2, 8)
REDUCED = "reduce-overhead"
# contestant: whether the model is patched, and how it is compiled
PREPARED = {
    "transformers": (False, None),
    "transformers, compiled": (False, "default"),
    "transformers, reduce-overhead": (False, REDUCED),
    "liger_like": (True, None),
    "liger_like, compiled": (True, "default"),
    "liger_like, reduce-overhead": (True, REDUCED),
    "liger_like, graph": (True, None),
}


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """It is quicker, and the kernels have tests of their own."""
    monkeypatch.setattr(support, "INTERPRET", False)


@pytest.fixture
def model_of(monkeypatch):
    """Return the model and the step of a contestant in a setting."""

    def model_of(name, setting):
        monkeypatch.setattr(small, "build", lambda *args: built.append(training.build(*args)) or built[-1])
        built = []
        step = small.step_of(small.CONTESTANTS[name], setting)
        return built[0], step

    return model_of


def test_settings():
    assert len({setting.text() for setting in small.SETTINGS}) == len(small.SETTINGS) == 21
    trained = [setting for setting in small.SETTINGS if not setting.lora]
    assert {(s.batch, s.seq) for s in trained} == {(1, 128), (1, 512), (1, 1024), (4, 512)}
    assert {s.model for s in trained} == {"Llama-3.2-1B", "Qwen3-0.6B", "SmolLM2-135M"}
    assert {s.model for s in small.SETTINGS if s.lora} == {"Llama-3.2-1B", "Llama-3-8B"}
    assert [(s.batch, s.seq, s.lora) for s in small.SETTINGS if s.checkpointing] == [(4, 512, False)] * 3


@pytest.mark.parametrize(
    ("model", "millions"),
    [("Llama-3.2-1B", 1236), ("Qwen3-0.6B", 596), ("SmolLM2-135M", 135), ("Llama-3-8B", 8030)],
)
def test_sizes_of_the_models(model, millions):
    """The published models have as many parameters."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(small.MODELS[model].config).parameters()
    assert round(sum(p.numel() for p in parameters) / 1e6) == millions


def is_patched(model):
    return model.config._attn_implementation == patching.NAME


@pytest.mark.parametrize("name", PREPARED)
def test_contestants(name, model_of, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda model, **options: compiled.append((is_patched(model), options))
    )
    model, _ = model_of(name, TINY)
    patched, mode = PREPARED[name]
    assert is_patched(model) == patched
    assert compiled == [(patched, {"dynamic": False, "mode": mode})] * bool(mode)
    assert [*small.CONTESTANTS] == [*PREPARED, "Liger"]


@pytest.mark.parametrize("name", ["transformers", "liger_like, graph"])
def test_a_step_trains(name, model_of, monkeypatch):
    calls, call = [], GraphedStep.__call__
    monkeypatch.setattr(GraphedStep, "__call__", lambda step, **batch: calls.append(batch) or call(step, **batch))
    model, step = model_of(name, TINY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= {*changed}
    assert all(p.grad is None for p in model.parameters())
    assert [(batch["input_ids"].shape, batch["use_cache"]) for batch in calls] == [((2, 8), False)] * (
        name != "transformers"
    )


@pytest.mark.parametrize("name", ["transformers", "liger_like"])
def test_lora_trains_adapters_alone(name, model_of):
    model, step = model_of(name, TINY._replace(lora=True))
    linears = "qkvo"
    adapted = {name.removesuffix(".lora_A.default") for name, _ in model.named_modules() if name.endswith("A.default")}
    assert adapted == {
        f"model.layers.{i}.{part}_proj"
        for i in range(2)
        for part in (*(f"self_attn.{x}" for x in linears), "mlp.gate", "mlp.up", "mlp.down")
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    parameters = dict(model.named_parameters())
    adapters = {name for name in parameters if ".lora_" in name}
    assert {name for name, p in parameters.items() if p.requires_grad} == adapters
    changed = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    assert {name for name in adapters if "lora_B" in name} <= changed <= adapters
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert {min(parameters[name].shape) for name in adapters} == {16}
    assert is_patched(model) == (name == "liger_like")


def test_checkpoints(model_of):
    setting = TINY._replace(checkpointing=True)
    for name, kept in (("liger_like", True), ("liger_like, graph", False)):
        model, _ = model_of(name, setting)
        functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
        assert [function.keywords.get("preserve_rng_state", True) for function in functions] == [kept] * 2
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model, _ = model_of("liger_like, graph", TINY)
    assert not model.model.layers[0].gradient_checkpointing


def test_times_are_those_of_warm_steps(monkeypatch):
    """Each turn has one more step, and the peak of memory includes the first steps."""
    log = []
    monkeypatch.setattr(small, "step_of", lambda *_: lambda: log.append("step"))
    monkeypatch.setattr(small, "wait", lambda: log.append("wait"))
    monkeypatch.setattr(small, "times", lambda step, repeats: [step() or 1.5 for _ in range(repeats)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.count("step") << 30)
    row = small.contend("transformers", TINY)
    assert row["gib"] == 1 + small.WARMUP
    assert log == ["step"] * (1 + small.WARMUP) + ["wait", "empty"]
    log.clear()
    assert row["ms"]() == [1.5] * small.STEPS
    assert log == ["step"] * (1 + small.STEPS) + ["wait", "empty"]
    log.clear()
    assert len(row["host_us"]()) == small.STEPS
    assert log == ["step", *["wait", "step"] * small.STEPS, "wait", "empty"]


class FakeRemote:
    """Contestant that fails beside others if its name says so; ``log`` has who is started, timed and ended."""

    log: list[str]

    def __init__(self, build, name, setting, *, timeout):
        self.name = name
        assert (build, setting, timeout) == (small.contend, TINY, 7.0)
        self.log.append(f"start {name}")

    def row(self):
        if "broken" in self.name or ("large" in self.name and self.running() > 1):
            raise RuntimeError("CUDA out of memory")
        return {"gib": 1.0, "ms": lambda: self.log.append(f"time {self.name}") or [4.0]}

    def running(self):
        return sum(line.startswith("start") - line.startswith("end") for line in self.log)

    def end(self):
        self.log.append(f"end {self.name}")


@pytest.fixture
def log(monkeypatch):
    FakeRemote.log = []
    monkeypatch.setattr(small, "Remote", FakeRemote)
    return FakeRemote.log


def test_turns(log):
    rows = small.in_turns(["a", "broken", "b"], TINY, 7.0)
    row = {"gib": 1.0, "ms": 4.0, "tokens": 4000.0}
    assert rows == {"a": row, "broken": {"reason": "out of memory"}, "b": row}
    assert log[:3] == ["start a", "start broken", "start b"]
    turns = log[3:-3]
    assert [sorted(turns[i : i + 2]) for i in range(0, len(turns), 2)] == [["time a", "time b"]] * small.ROUNDS
    assert log[-3:] == ["end a", "end broken", "end b"]


def test_a_contestant_that_fails_beside_others_is_measured_alone(log, monkeypatch):
    monkeypatch.setattr(small, "together", lambda setting: 3)
    rows = small.measure(["a", "large", "b", "broken"], TINY, 7.0)
    assert [*rows] == ["a", "large", "b", "broken"]
    row = {"gib": 1.0, "ms": 4.0, "tokens": 4000.0}
    assert rows == {
        "a": row,
        "large": row | {"alone": True},
        "b": row,
        "broken": {"reason": "out of memory", "alone": True},
    }
    started = [line.removeprefix("start ") for line in log if line.startswith("start")]
    assert started == ["a", "b", "large", "broken", "large", "broken"]


def test_who_is_alone_is_not_measured_twice(log, monkeypatch):
    monkeypatch.setattr(small, "together", lambda setting: 1)
    assert small.measure(["a", "broken"], TINY, 7.0)["broken"] == {"reason": "out of memory"}
    assert [line for line in log if line.startswith("start")] == ["start a", "start broken"]


def test_as_many_as_fit(monkeypatch):
    monkeypatch.setattr(small, "GPU", True)
    memory = {"total_memory": 80 << 30}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Properties", (), memory))
    setting = small.Setting("Llama-3.2-1B", 1, 512)  # 1.24 billion parameters
    assert small.needed(setting) == pytest.approx((9.2 + 1.25 + 1.5) * 2**30, rel=0.01)
    assert small.together(setting) == 6
    assert small.together(setting._replace(batch=4)) == 5
    assert small.together(setting._replace(lora=True)) == 15
    assert small.together(setting._replace(batch=64)) == 1


FIRST, SECOND, LORA = (small.SETTINGS[i].text() for i in (0, 1, 16))
MEASURED = {"gib": 3.0, "ms": 2.5, "host_us": 1234.0, "tokens": 204800.0}
TABLES = """### One GPU, 2026-01-01

torch 2.0.

| setting |  | step ms | tokens/s | peak GiB | host us |
|---|---|---|---|---|---|
| Llama-3.2-1B, B 1 S 128 | transformers | 2.50 | 204,800 | 3.0 | 1,234 |
| Llama-3.2-1B, B 1 S 512 | transformers | 2.50 | 204,800 | 3.0 | 1,234 |
| Llama-3.2-1B, B 1 S 512 | Liger (alone) | out of memory | - | - | - |
| Llama-3.2-1B, B 1 S 1024, LoRA | Liger | 2.50 | 204,800 | 3.0 | 1,234 |
"""
OVERVIEW = """
GPU, 2026-01-01:

| setting | transformers | Liger |
|---|---|---|
| Llama-3.2-1B, B 1 S 512 | 2.5, 3.0 | out of memory |
| Llama-3.2-1B, B 1 S 1024, LoRA | - | 2.5, 3.0 |
"""


@pytest.fixture
def pages(results, monkeypatch, tmp_path):
    """Return the texts of NOTES.md and the README, which are temporary."""
    paths = [tmp_path / name for name in ("notes.md", "readme.md")]
    for name, path in zip(("NOTES", "README"), paths, strict=True):
        path.write_text(f"before\n{small_report.BEGIN}old\n{small_report.END}after\n")
        monkeypatch.setattr(small_report, name, path)
    return lambda: [path.read_text() for path in paths]


def test_runs_that_share_the_work(pages, monkeypatch):
    """Settings and contestants of several runs meet in one file, in order; without results the report is empty."""

    def between(content):
        return f"before\n{small_report.BEGIN}{content}{small_report.END}after\n"

    small_report.write_report()
    assert pages() == [between("")] * 2
    head = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.0"}}
    monkeypatch.setattr(small, "environment", lambda *_: {**head})
    monkeypatch.setattr(small, "GPU", True)
    monkeypatch.setattr(measure, "version", lambda package: "1.0")
    answers = {(SECOND, "Liger"): {"reason": "out of memory", "alone": True}}

    def measured(names, setting, timeout):
        assert timeout == small.TIMEOUT
        return {name: answers.get((setting.text(), name), MEASURED) for name in names}

    monkeypatch.setattr(small, "measure", measured)
    for arguments in ("16 --contestants Liger", "1 --contestants Liger", "0 1 --contestants transformers"):
        monkeypatch.setattr(sys, "argv", ["", "--settings", *arguments.split()])
        small.main()
    (result,) = markdown.results("small")
    assert {text: [*rows] for text, rows in result["parts"].items() if rows} == {
        FIRST: ["transformers"],
        SECOND: ["transformers", "Liger"],
        LORA: ["Liger"],
    }
    assert small_report.tables(result) == TABLES
    assert pages() == [between(TABLES), between(small_report.ABOUT + OVERVIEW)]


@pytest.mark.skipif(small.GPU, reason="on a GPU it is what the GPU does: --quick")
def test_quick(pages, results, monkeypatch, capsys):
    """Real processes train a model."""
    before = pages()
    monkeypatch.setattr(small, "QUICK", small.QUICK[-1:])
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--contestants", "transformers", "liger_like, graph"])
    small.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert [row[:2] for row in rows] == [
        ["| tiny, B 1 S 32, LoRA", name] for name in ("transformers", "liger_like, graph")
    ]
    for ms, tokens, _, us in (row[2:] for row in rows):
        assert float(ms) > 0
        assert float(tokens.replace(",", "")) * float(ms) == pytest.approx(32e3, rel=0.02)
        assert float(us.removesuffix(" |").replace(",", "")) > 0
    assert not results.exists()
    assert pages() == before
