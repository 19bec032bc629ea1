"""The benchmarks: a report is that of its results, and what they hold for exact, or for a peer, is."""

import itertools
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmark.common import markdown, measure
from benchmark.kernels import (
    attention,
    attention_grid_report,
    attention_report,
    contestants,
    losses,
    losses_report,
    memory_bound,
    memory_bound_report,
    post_training_report,
    slower_report,
)
from benchmark.training import (
    curves,
    sharded_report,
    small_report,
    sweeps_report,
    trainers_report,
    training_report,
)
from liger_like import testing
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy_ref

REPORTS: dict[str, Any] = {
    "losses": losses_report,
    "memory-bound": memory_bound_report,
    "attention": attention_report,
    "grid": attention_grid_report,
    "training": training_report,
    "small": small_report,
    "sweeps": sweeps_report,
    "sharded": sharded_report,
    "curves": curves,
    "post-training": post_training_report,
    "trainers": trainers_report,
}
ERRORS = {"loss": 1e-7, "dx": 2e-3, "dw": 1e-3}
RESULT = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0", "peer": None},
    "fused": [
        {
            "T": 1000,
            "H": 1000,
            "V": 1000,
            "kept": kept,
            "rows": [
                {"name": losses.GEMMS, "ms": 2.0, "mib": 10.0},
                {"name": losses_report.EAGER, "ms": 4.0, "mib": 30.4} | errors,
                {"name": "ours", "ms": 3.0, "mib": 20.0} | ({"errors": ERRORS | {"dw": 5e-4}} if errors else {}),
                {"name": "theirs", "reason": "out of | memory"},
            ],
        }
        for kept, errors in ((1000, {"errors": ERRORS}), (250, {}))
    ],
    "cross_entropy": {
        "M": 10,
        "V": 20,
        "bytes": 6_000_000,
        "rows": [
            {"name": "ours", "kernel_ms": 2.0, "wall_ms": 3.0},
            {"name": "theirs", "wall_ms": 6.0, "reason": "waits"},
        ],
    },
}
TABLES = r"""### One GPU, 2026-01-01

torch 2.0.

Not installed, so not measured: peer.

fused_linear_cross_entropy, T 1000, H 1000, V 1000:

|  | ms | of three GEMMs | TFLOP/s | peak MiB | loss | dx | dw | dw / torch's |
|---|---|---|---|---|---|---|---|---|
| three GEMMs | 2.0 | 1.00 | 3 | 10 | - | - | - | - |
| torch | 4.0 | 2.00 | 2 | 30 | 1.0e-07 | 2.0e-03 | 1.0e-03 | 1.00 |
| ours | 3.0 | 1.50 | 2 | 20 | 1.0e-07 | 2.0e-03 | 5.0e-04 | 0.50 |
| theirs | out of \| memory | - | - | - | - | - | - | - |

fused_linear_cross_entropy, T 1000, H 1000, V 1000, 250 labels not ignored:

|  | ms | of three GEMMs | TFLOP/s | peak MiB |
|---|---|---|---|---|
| three GEMMs | 2.0 | 1.00 | 1 | 10 |
| torch | 4.0 | 2.00 | 0 | 30 |
| ours | 3.0 | 1.50 | 0 | 20 |
| theirs | out of \| memory | - | - | - |

cross_entropy, 10 x 20:

|  | kernels ms | GB/s | eager wall ms | GB/s |
|---|---|---|---|---|
| ours | 2.000 | 3 | 3.000 | 2 |
| theirs | waits | - | 6.000 | 1 |
"""


OVERVIEW = """GPU, 2026-01-01:

| shape | three GEMMs | torch | ours | theirs |
|---|---|---|---|---|
| T 1000 H 1000 V 1000 | 2.0, 10 | 4.0, 30 | 3.0, 20 | -, - |
| T 1000 H 1000 V 1000, 250 labels not ignored | 2.0, 10 | 4.0, 30 | 3.0, 20 | -, - |
"""


def test_tables() -> None:
    assert losses_report.tables(RESULT) == TABLES
    other = RESULT["fused"][0] | {"V": 2000}
    assert losses_report.overview({**RESULT, "fused": [*RESULT["fused"], other]}) == OVERVIEW


@pytest.mark.parametrize("name", REPORTS)
def test_report_is_current(name: str) -> None:
    report, notes = REPORTS[name], markdown.NOTES.read_text()
    assert report.with_tables(notes, markdown.results(name)) == notes, f"run {report.__name__}'s --report"
    if overview := getattr(report, "with_overview", None):
        page = (markdown.README if name in ("training", "small") else markdown.FIGURES).read_text()
        assert overview(page, markdown.results(name)) == page
    if picture := getattr(report, "PICTURE", None):
        assert picture.exists() == bool(markdown.results(name))
        assert not picture.exists() or markdown.digest(name).encode() in picture.read_bytes()


def test_exact() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64).requires_grad_() for n in (7, 11))
    target = torch.randint(11, (7,))
    expected = losses.step_of(partial(fused_linear_cross_entropy_ref, x, weight, target), x, weight)()
    for got, true in zip(losses.exact(x, weight, target, rows=3), expected, strict=True):
        torch.testing.assert_close(got, true)


MEMORY_BOUND = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0"},
    "ops": [
        {
            "op": op,
            "shape": shape,
            "forward_bytes": 2_000_000,
            "bytes": 5_000_000,
            "rows": [{"name": "ours", "mib": 64.4, "wall_us": 7.25, "forward_us": 1.0, "us": 4.0}, *others],
        }
        for op, shape, others in (
            ("norm", "8 x 16", [{"name": "theirs", "reason": "no GPU"}]),
            ("norm", "8 x 32", []),
            ("glu", "8 x 16, packed", [{"name": "theirs", "mib": 3.0, "wall_us": 8.0, "reason": "waits"}]),
        )
    ],
    "host": [
        {"op": "norm", "name": "ours", "forward_us": 20.04, "us": 50.06},
        {"op": "norm", "name": memory_bound.EMPTY, "forward_us": 10.0, "us": 40.0},
        {"op": "glu", "name": "theirs", "reason": "no | GPU"},
    ],
}
MEMORY_BOUND_TABLES = r"""### One GPU, 2026-01-01

torch 2.0.

norm:

| shape |  | forward us | GB/s | forward + backward us | GB/s | eager wall us | peak MiB |
|---|---|---|---|---|---|---|---|
| 8 x 16 | ours | 1.0 | 2000 | 4.0 | 1250 | 7.2 | 64 |
| 8 x 16 | theirs | no GPU | - | - | - | - | - |
| 8 x 32 | ours | 1.0 | 2000 | 4.0 | 1250 | 7.2 | 64 |

glu:

| shape |  | forward us | GB/s | forward + backward us | GB/s | eager wall us | peak MiB |
|---|---|---|---|---|---|---|---|
| 8 x 16, packed | ours | 1.0 | 2000 | 4.0 | 1250 | 7.2 | 64 |
| 8 x 16, packed | theirs | waits | - | - | - | 8.0 | 3 |

Time on the host:

| op |  | forward us | forward + backward us | of an empty op |
|---|---|---|---|---|
| norm | ours | 20.0 | 50.1 | 1.25 |
| norm | empty, with the launches of liger_like | 10.0 | 40.0 | 1.00 |
| glu | theirs | no \| GPU | - | - |
"""


MEMORY_BOUND_OVERVIEW = """GPU, 2026-01-01:

| op | ours | theirs |
|---|---|---|
| norm, 8 x 16 | 1250 | - |
"""


def test_memory_bound_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_bound_report.tables(MEMORY_BOUND) == MEMORY_BOUND_TABLES
    monkeypatch.setattr(memory_bound_report, "SHAPES", ("8 x 16",))
    assert memory_bound_report.overview(MEMORY_BOUND) == MEMORY_BOUND_OVERVIEW


def test_what_is_faster_than_ours() -> None:
    notes, measured = markdown.NOTES.read_text(), markdown.results("bench")
    assert slower_report.with_table(notes, measured) == notes, "run python -m benchmark report"
    new = {
        "fused_linear_logprobs",
        "fused_linear_token_loss",
        "fused_linear_divergence",
        "moe_experts",
        "moe_experts_lora",
        "moe_route",
        "moe_route_groups",
        "load_balancing_loss",
    }  # since the last whole run
    assert {case["op"] for result in measured for case in result["cases"]} == {*contestants.OPS} - new
    rows = [
        {"name": "liger_like", "forward_us": 2.0, "us": 6.0, "wall_us": 9.0},
        {"name": "liger_like, portable", "forward_us": 1.0, "us": 1.0},
        {"name": "theirs", "forward_us": 1.6, "us": 5.95, "wall_us": 9.1},
        {"name": "others", "forward_us": 2.1, "us": 6.1},
        {"name": "broken", "reason": "no GPU"},
    ]
    case = {"op": "norm", "shape": "8 x 16", "rows": rows}
    assert [*slower_report.slower(case)] == [["norm", "8 x 16", "forward", "theirs", "1.6", "2.0", "25%"]]
    assert [*slower_report.slower({**case, "op": slower_report.IN_THE_FORWARD})] == []
    on_the_wall = {**case, "rows": [*rows[:2], {"name": "theirs", "wall_us": 6.0}]}
    assert [*slower_report.slower(on_the_wall)] == [["norm", "8 x 16", "wall", "theirs", "6.0", "9.0", "50%"]]
    result = {"gpu": "GPU", "date": "2026-01-01", "cases": [case, on_the_wall, {**case, "rows": rows[:2]}]}
    first, _, columns = slower_report.content([result]).splitlines()[:3]
    assert first == "GPU, 2026-01-01: by the time of the kernels a contestant is faster for 1 of 3 shapes."
    assert columns.startswith("| op |")
    assert "|" not in slower_report.content([{**result, "cases": [{**case, "rows": rows[:2]}]}])
    assert slower_report.content([]) == ""


def test_curves() -> None:
    up, down = [1.0] * curves.WINDOW + [2.0] * curves.WINDOW, [1.0] * curves.WINDOW + [1.5] * curves.WINDOW
    result = {"curves": [{"unpatched": up, "patched": up}, {"unpatched": down, "patched": up}]}
    assert curves.cells(result) == [
        ["0", "2.0000", "2.0000", "0.0000", "0.0000"],
        ["1", "1.5000", "2.0000", "0.2500", "0.5000"],
        ["seeds apart", "", "", "0.2500", "0.5000"],
    ]


def test_settle() -> None:
    calls: list[str] = []

    def timer(name: str, *times: float) -> measure.Timer:
        several = iter(times)
        return lambda: calls.append(name) or [next(several)]

    rows = [{"name": "a", "us": timer("a", 5.0, 1.0, 3.0)}, {"name": "b", "reason": "none"}]
    rows[1]["us"] = timer("b", 2.0, 2.0, 9.0)
    measure.settle(rows, 3, wait=lambda: calls.append("wait"))
    assert rows == [{"name": "a", "us": 3.0}, {"name": "b", "reason": "none", "us": 2.0}]
    assert calls[::2] == ["wait"] * 6
    assert all({*calls[i + 1 : i + 4 : 2]} == {"a", "b"} for i in (0, 4, 8))


def test_settle_what_fails() -> None:
    answers = iter(([1.0], RuntimeError("CUDA out of memory"), [3.0]))

    def timer() -> list[float]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def never() -> list[float]:
        raise ValueError("never")

    rows = [{"us": timer}, {"us": never, "mib": 1.0}]
    measure.settle(rows, 3, wait=lambda: None)
    assert rows == [{"us": 2.0, "reason": "out of memory"}, {"mib": 1.0, "reason": "ValueError: never"}]


# READ: what a backward reads beside the upstream gradients. SHARED: gradients that are one tensor with another one
READ = {
    "rms_norm": ("x", "weight"),
    "add_rms_norm": ("out1", "weight"),
    "layer_norm": ("x", "weight"),
    "swiglu": ("gate", "up"),
    "geglu": ("gate", "up"),
    "rope": ("cos", "sin"),
    "qk_norm_rope": ("q", "k", "q_weight", "k_weight", "cos", "sin"),
}
SHARED = ("dresidual",)
CASES = [
    pytest.param(op, shape, id=name + "-packed" * ("packed" in shape))
    for name, op in memory_bound.OPS.items()
    for shape in memory_bound.small_shapes(op.spec)
]


@pytest.mark.parametrize(("op", "shape"), CASES)
def test_bytes(op: contestants.Plain, shape: dict[str, int]) -> None:
    inputs = op.spec.inputs(torch.float32, "cpu", **shape)
    results = testing.run(op.spec.ref, inputs, op.options)
    size = {name: t.nbytes for name, t in (inputs | results).items()}
    outputs = sum(size[name] for name in results if name.startswith("out"))
    gradients = sum(size[name] for name in results if not name.startswith("out") and name not in SHARED)
    forward, backward, _ = op.spec.cost(torch.float32.itemsize, **shape)
    assert forward == sum(size[name] for name in inputs) + outputs
    assert backward == outputs + sum(size.get(name, 0) for name in READ[op.spec.name]) + gradients


@pytest.mark.parametrize(("op", "shape"), CASES)
def test_peers_in_torch(op: contestants.Plain, shape: dict[str, int]) -> None:
    torch.manual_seed(0)
    inputs = op.spec.inputs(torch.float32, "cpu", **shape)
    upstream = measure.upstream_of(op.spec.fn, inputs)
    builds = op.contestants()
    ours, theirs = (measure.Setting(builds[name], inputs, upstream) for name in ("liger_like", "torch"))
    torch.testing.assert_close(ours.forward(), theirs.forward())
    torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)


def test_refill() -> None:
    spec = memory_bound.OPS["rope"].spec
    inputs = spec.inputs(torch.float32, "cpu", **memory_bound.small_shapes(spec)[0])
    upstream = measure.upstream_of(spec.fn, inputs)
    for like, gradient in zip((inputs["q"], inputs["k"]), upstream, strict=True):
        assert (like.shape, like.stride()) == (gradient.shape, gradient.stride())
    setting = measure.Setting(contestants.named(spec.fn), inputs, upstream)
    expected = setting.step()
    for tensor in setting.filled:
        tensor.fill_(float("nan"))
    assert all(t.isfinite().all() for t in (*inputs.values(), *upstream))
    setting.refill()
    torch.testing.assert_close(setting.step(), expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures peers, too, where there is a GPU")
def test_time_on_a_host_without_gpu(monkeypatch):
    """The clock counts the calls of Python functions, since a real one also runs while other processes do."""
    ticks = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(memory_bound, "ROUNDS", 1)
    monkeypatch.setattr(memory_bound, "HOST_STEPS", 4)
    sys.setprofile(lambda *_: next(ticks))
    try:
        rows = memory_bound.host_alone(["rms_norm"])["host"]
    finally:
        sys.setprofile(None)
    assert [row["name"] for row in rows] == ["empty autograd.Function", "liger_like", memory_bound.EMPTY]
    assert all(0 < row["forward_us"] < row["us"] for row in rows)


@pytest.fixture
def attention_cases(monkeypatch, tmp_path):
    """Their names; each is "measured" but for the third one, at which the run is cut off."""
    names = [case.text() for case in attention.cases()]

    def measured(case, rounds):
        if case.text() == names[2] and rounds == attention.ROUNDS:
            raise KeyboardInterrupt
        return {"shape": case.text(), "flops": 1, "rows": [{"name": "now", "mib": 1 / 3, "reason": "no time"}]}

    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(attention, "environment", lambda *_: {"gpu": "GPU", "date": "today", "versions": {}})
    monkeypatch.setattr(attention, "measure", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return names


def test_attention_that_is_cut_off(attention_cases, monkeypatch):
    """Earlier measurements are kept, also those of an earlier run, in the order of the table."""
    first, second, _, fourth = attention_cases[:4]
    earlier = [{"shape": text, "rows": []} for text in (first, second, fourth)]
    measure.save({"gpu": "GPU", "cases": earlier}, "attention")
    monkeypatch.setattr(sys, "argv", ["", "--cases", "1", "2", "0"])
    with pytest.raises(KeyboardInterrupt):
        attention.main()
    cases = measure.known({"gpu": "GPU"}, "attention")["cases"]
    assert [(case["shape"], case["rows"]) for case in cases] == [
        (first, []),
        (second, [{"name": "now", "mib": 0.3333, "reason": "no time"}]),
        (fourth, []),
    ]


def test_quick_attention_is_printed_only(attention_cases, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--quick"])
    attention.main()
    shown = capsys.readouterr().out
    assert [name for name in attention_cases if f"| {name} | now |" in shown] == attention_cases[:3]
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("flash_attention", {"B": 2, "S": 40, "Sk": 40}, {"causal": True, "window": (9, 0)}),
        ("flash_attention_varlen", {"lengths": ((20, 20), (30, 30))}, {"causal": True}),
        ("flash_attention_varlen", {"lengths": ((20, 20), (30, 30))}, {}),
    ],
)
def test_attention_and_flex_see_the_same_keys(name, shape, options):
    op = contestants.Attention(contestants.SPECS[name], options)
    inputs = {name: t.detach() for name, t in op.spec.inputs(torch.float32, "cpu", **shape, H=2, Hk=2, D=16).items()}
    ours = op.contestants()["liger_like"](inputs)()
    theirs = partial(flex_attention, block_mask=contestants.block_mask(inputs, **options))
    torch.testing.assert_close(ours, contestants.heads_first(theirs, inputs))
