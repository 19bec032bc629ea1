"""The sweeps of training steps: what is measured when, what torch recorded as it is reduced, and the report."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Kernel
from torch.profiler import ProfilerActivity

from benchmark.common import markdown, measure
from benchmark.training import sweeps, sweeps_report, traces, training
from liger_like import patching
from liger_like.runtime import support

CONFIG = sweeps.QUICK.config
on_the_host = pytest.mark.skipif(sweeps.GPU, reason="on a GPU it is what the GPU does: --quick")


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """It is quicker, and the kernels have tests of their own."""
    monkeypatch.setattr(support, "INTERPRET", False)
    monkeypatch.setattr(sweeps, "clear", lambda: None)  # as above


def test_what_is_larger_than_what_failed_is_not_tried(monkeypatch):
    built, tried = [], []

    def trainer(model):
        built.append(model)

        def step(tokens):
            tried.append(tuple(tokens.shape))
            if tokens.numel() > 20:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

        return step

    monkeypatch.setattr(sweeps, "trainer", trainer)
    rows = list(sweeps.sweep(training.nothing, CONFIG, [(1, 8), (2, 8), (4, 8), (8, 8)]))
    assert [(row["batch"], row["sequence"]) for row in rows] == [(1, 8), (2, 8), (4, 8)]
    assert rows[-1] == {"batch": 4, "sequence": 8, "reason": "out of memory"}
    assert [row["tokens"] * row["ms"] for row in rows[:2]] == [pytest.approx(8e3), pytest.approx(16e3)]
    assert len(built) == 1
    assert built[0].is_gradient_checkpointing
    each = sweeps.WARMUP + sweeps.STEPS
    assert tried == [(1, 8)] * each + [(2, 8)] * each + [(4, 8)]


def test_small_shapes_alone(results):
    rows = [{"batch": batch, "sequence": 8, "ms": 1.0} for batch in (1, 2, 4)]
    found = {"gpu": "this", "parts": {"batch": {"Liger": rows}, "ablation": {"all": [{"ms": 2.0}]}}}
    measure.save(found, "sweeps")
    assert sweeps.large(measure.known({"gpu": "this"}, "sweeps"), 16) == {("batch", "Liger"): rows[2:]}
    assert sweeps.large(measure.known({"gpu": "a new one"}, "sweeps"), 16) == {}
    assert sweeps.small(sweeps.QUICK, 48).sweeps == {"batch": ((1, 32),), "sequence": ((2, 16),)}


def test_a_contestant_that_cannot_prepare_has_a_row(monkeypatch):
    def refuse(model):
        raise ValueError("no")

    assert list(sweeps.sweep(refuse, CONFIG, [(1, 8), (2, 8)])) == [
        {"batch": 1, "sequence": 8, "reason": "ValueError: no"}
    ]


def switches_of(variant):
    if variant.endswith(" alone"):
        return {variant.removesuffix(" alone")}
    return {*sweeps.SWITCHES} - {variant.removeprefix("all but ")} if variant != "none" else set()


def test_variants(monkeypatch):
    """Each is timed with what its name says, and nothing of it is left for the next one."""
    seen = []

    def trainer(model):
        def step(tokens):
            origins = (getattr(type(module), "_liger_like", None) for module in model.modules())
            patched = {patching.RECOGNISERS[origin.pattern].options[0] for origin in origins if origin}
            if model.model.layers[0].self_attn.config._attn_implementation == patching.NAME:
                patched.add("attention")
            seen.append(patched)

        return step

    monkeypatch.setattr(sweeps, "trainer", trainer)
    rows = sweeps.ablate(list(sweeps.VARIANTS), CONFIG, 2, 8)
    steps = (1 + sweeps.ROUNDS) * (1 + sweeps.STEPS)
    assert len(rows) == 12
    assert len(seen) == steps * len(rows)
    for row in rows:
        assert seen.count(switches_of(row["name"])) == steps
        assert row["ms"] >= 0


def events(*actions):
    return [{"action": action, "addr": addr, "size": size << 30} for action, addr, size in actions]


PHASES = {
    "forward": events(("alloc", 1, 4), ("segment_alloc", 9, 99), ("alloc", 2, 2), ("free_requested", 2, 2)),
    "backward": events(("free_completed", 2, 2), ("alloc", 2, 3), ("free_requested", 1, 4), ("alloc", 3, 1)),
    "optimizer": events(("free_requested", 2, 3), ("free_requested", 3, 1), ("free_requested", 7, 5)),
}


def test_levels():
    row = traces.levels(10 << 30, PHASES)
    assert row == {
        "gib": {
            "before": [10.0] * 9 + [5.0],
            "forward": [0.0, 4.0, 6.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            "backward": [0.0] * 4 + [3.0, 3.0, 4.0, 1.0, 0.0, 0.0],
            "optimizer": [0.0] * 10,
        },
        "ends": {"forward": 0.4, "backward": 0.7, "optimizer": 1.0},
    }


def test_levels_keep_the_peak(monkeypatch):
    monkeypatch.setattr(traces, "POINTS", 3)
    row = traces.levels(10 << 30, PHASES)
    assert [*zip(*row["gib"].values(), strict=True)] == [(10, 6, 0, 0), (10, 4, 3, 0), (10, 0, 4, 0)]
    assert sweeps_report.peak(row) == {"before": 10.0, "forward": 4.0, "backward": 3.0, "optimizer": 0.0}


def test_memory(monkeypatch):
    """The phases are those of a step."""
    log = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], [*log]]})

    def record(enabled="all", context="all", clear_history=False):
        log.append((enabled, context, clear_history))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)

    def step(ended):
        log.clear()
        for phase, several in PHASES.items():
            log.extend(several)
            ended(phase)

    assert traces.memory(step) == traces.levels(10 << 30, PHASES)
    assert log[-1] == (None, "all", False)


ATEN = {
    "embedding": ["other"],
    "embedding_dense_backward": ["other"],
    "rsqrt": ["norms"],
    "silu": ["GLU"],
    "silu_backward": ["GLU"],
    "mm": ["matrix products"],
    "cos": ["RoPE"],
    "_fused_adamw_": ["optimizer"],
}
UNPATCHED = ATEN | {
    "neg": ["RoPE"],
    "pow": ["norms"],
    "_scaled_dot_product_flash_attention_for_cpu": ["attention"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": ["attention"],
    "_log_softmax": ["loss"],
    "_log_softmax_backward_data": ["loss"],
}
PATCHED = ATEN | {"neg": ["RoPE", "loss"], "_softmax": ["attention"], "logsumexp": ["attention", "loss"]}


def counted(events, name, monkeypatch):
    """How often ``name`` was called, by group."""
    monkeypatch.setattr(traces, "_work", lambda event: [(name, 1e3)] * (event.name == f"aten::{name}"))
    return {group: count for group, count in traces.times_of(events).items() if count}


def events_of(step):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return profiler.events()


@on_the_host
@pytest.mark.parametrize(("prepare", "expected"), [(training.nothing, UNPATCHED), (training.patch, PATCHED)])
def test_groups_of_a_step(prepare, expected, monkeypatch):
    model = training.build(prepare, CONFIG, checkpointing=False)
    step, tokens = training.trainer(model), training.tokens_of(CONFIG, 2, 8)
    with traces.grouped(model):
        several = events_of(lambda: step(tokens))
    assert {name: [*counted(several, name, monkeypatch)] for name in expected} == expected
    assert not any(event.name.startswith(traces.PREFIX) for event in events_of(lambda: step(tokens)))


def test_sums_that_the_engine_makes(monkeypatch):
    """Where a gradient is summed since a weight was spread, that is the weight's, where two gradients are, no one's.

    What has no backward, under the number of the norm, is not what the norm's backward belongs to.
    """
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    functions = {"norms": torch.mul, "GLU": torch.tanh, "loss": torch.add, "RoPE": torch.cos}
    norm, glu, both, rope = (traces._recorded(group, function) for group, function in functions.items())

    def step():
        y = x.clone()
        rope(torch.ones(4))
        both(norm(y, w), glu(y)).backward(torch.ones(4, 8))

    several = events_of(step)
    assert counted(several, "sum", monkeypatch) == {"norms": 1}
    assert counted(several, "add", monkeypatch) == {"loss": 1}
    assert counted(several, "add_", monkeypatch) == {"other": 1}
    assert counted(several, "tanh_backward", monkeypatch) == {"GLU": 1}


def test_kernels(monkeypatch):
    """A range on the GPU is no kernel, and the kernel that adds products counts as a matrix product."""
    monkeypatch.setattr(traces, "GPU", True)

    def event(name, parent=None, *kernels, device_type=DeviceType.CPU):
        several = [Kernel(kernel, 0, us) for kernel, us in kernels]
        numbers = {"sequence_nr": -1, "scope": 0, "time_range": SimpleNamespace(start=0)}
        return SimpleNamespace(name=name, cpu_parent=parent, kernels=several, device_type=device_type, **numbers)

    loss = event("benchmark: loss", None, ("benchmark: loss", 1e6))
    op = event("liger_like::loss", loss, ("_cross_entropy_fwd_kernel", 2e3), ("_add_products_hopper_kernel", 3e3))
    step = event("Optimizer.step#AdamW.step")
    adamw = event("aten::_fused_adamw_", step, ("adam", 5e3), (step.name, 1e6))
    whole = event("ProfilerStep#1", None, ("ProfilerStep#1", 1e6))
    several = [whole, loss, op, event("aten::mm", loss, ("nvjet", 4e3)), step, adamw]
    launch = event("cudaLaunchKernel", several[-1])
    several += [launch, *[event("Command Buffer Full", launch, ("adam", 5e3))] * 3]
    several.append(event("aten::copy_", None, ("Memcpy DtoD", 6e3)))
    on_gpu = [event(kernel.name, device_type=DeviceType.CUDA) for one in several for kernel in one.kernels]
    times = traces.times_of([*several, *on_gpu])
    assert [*times] == [*traces.GROUPS]
    assert {group: ms for group, ms in times.items() if ms} == {
        "matrix products": 7.0,
        "loss": 2.0,
        "optimizer": 5.0,
        "other": 6.0,
    }


def test_the_second_step_counts(monkeypatch):
    monkeypatch.setattr(traces, "_work", lambda event: [("work", 1e3)] * (event.name == "aten::tanh"))
    times = iter((3, 1))
    totals = traces.profile(lambda: [torch.ones(4).tanh() for _ in range(next(times))])
    assert totals["other"] == 1


def test_phases():
    model = training.build(training.nothing, CONFIG, checkpointing=False)
    weight, tokens = model.lm_head.weight, training.tokens_of(CONFIG, 2, 8)
    before, told = weight.detach().clone(), []
    training.trainer(model)(
        tokens, lambda phase: told.append((phase, weight.grad is not None, torch.equal(weight, before)))
    )
    assert told == [("forward", False, True), ("backward", True, True), ("optimizer", False, False)]


def test_processes_that_share_the_work(results, monkeypatch):
    """Neither loses what the other one wrote meanwhile, and what was measured again is new."""
    save = measure.save

    def slowly(result, prefix):
        time.sleep(0.05)
        save(result, prefix)

    monkeypatch.setattr(measure, "save", slowly)
    order = {"batch": "abc", "profile": "a"}

    def write(part, name, ms):
        measure.update({"gpu": "GPU", "parts": {part: {name: [{"ms": ms}]}}}, "sweeps", order)

    write("batch", "c", 0)
    writes = [("batch", "b", 1), ("batch", "c", 2), ("batch", "a", 3), ("profile", "a", 4)]
    threads = [threading.Thread(target=write, args=args) for args in writes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (result,) = markdown.results("sweeps")
    assert result["parts"] == {
        "batch": {"a": [{"ms": 3}], "b": [{"ms": 1}], "c": [{"ms": 2}]},
        "profile": {"a": [{"ms": 4}]},
    }
    assert [*result["parts"]["batch"]] == ["a", "b", "c"]


@on_the_host
def test_quick(results, monkeypatch, capsys):
    monkeypatch.setattr(sweeps, "clear", training.clear)
    parts = ["batch", "ablation", "graph", "memory", "profile"]
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--parts", *parts, "--contestants", "transformers", "none"])
    sweeps.main()
    shown = capsys.readouterr().out
    for line in ("| B 2 S 32 |", "| none |", "| transformers | needs a GPU |", "| matrix products |"):
        assert line in shown
    assert not results.exists()  # --quick writes nothing


def test_the_graph_has_a_shape_of_its_own(monkeypatch):
    monkeypatch.setattr(sweeps, "replayed", lambda *args: {"graph of": args})
    monkeypatch.setattr(sweeps, "inside", lambda *args: {"inside": args})
    prepare, config = training.CONTESTANTS["liger_like"], sweeps.FULL.config
    for part, row in (
        ("graph", {"graph of": (prepare, config, 1, 1024)}),
        ("memory", {"inside": ("memory", prepare, config, 4, 4096)}),
    ):
        assert dict(sweeps.measure(part, ["liger_like"], sweeps.FULL)) == {"liger_like": [row]}


def test_liger_comes_last(results, monkeypatch):
    """Liger runs last, since it changes transformers for the whole process."""
    order = []

    def measured(part, names, sizes):
        order.extend((part, name) for name in names)
        yield from ((name, [{"reason": "no"}]) for name in names)

    monkeypatch.setattr(measure, "version", lambda package: "1.0")
    monkeypatch.setattr(sweeps, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["", "--quick"])
    monkeypatch.setattr(sweeps, "tables", lambda result: "")
    sweeps.main()
    assert order[-3:] == [(part, "Liger") for part in ("batch", "sequence", "graph")]
    assert sorted(order) == sorted((part, name) for part, names in sweeps.PARTS.items() for name in names)
