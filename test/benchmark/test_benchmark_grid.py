"""The grid of attention shapes: what it times, how rounds become ratios, and what the tables say of them."""

from functools import partial
from types import SimpleNamespace

import pytest

from benchmark.common.measure import settle
from benchmark.kernels import attention, attention_grid, attention_grid_report
from liger_like.ops.attention import choice
from liger_like.runtime import replay

OURS, PORTABLE, CUDNN, FLEX, FA4 = "liger_like", "liger_like, portable", *attention_grid.OTHERS


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_cases(seed):
    """The grid has each mask by each width; documents fill their tokens; other seeds draw other sizes."""
    cases = attention_grid.cases(seed)
    found = [(case.shape["D"], case.shape.get("Dv", case.shape["D"])) for case in cases]
    assert found == [*attention_grid.WIDTHS] * len(attention_grid.GRID)
    assert len({case.text() for case in cases}) == len(cases)
    for case in cases:
        assert case.shape["H"] % case.shape["Hk"] == 0
        lengths = case.shape.get("lengths", ())
        assert all(length > 0 and length == keys for length, keys in lengths)
        tokens = sum(length for length, _ in lengths) or case.shape["B"] * case.shape["S"]
        assert f"T {tokens} " in case.text() or f"B {case.shape['B']} S {case.shape['S']} " in case.text()
        assert 2**9 <= tokens <= 2**16
    assert [case.text() for case in attention_grid.cases(seed)] == [case.text() for case in cases]
    assert [case.text() for case in attention_grid.cases(2)] != [case.text() for case in cases]


def test_portable_repeats_no_plan(monkeypatch):
    """Plans would launch the kernels that another contestant chose."""
    found = []
    monkeypatch.setattr(attention, "Setting", lambda *_: SimpleNamespace(forward=None, step=None))
    monkeypatch.setattr(attention, "captured", lambda step: step)
    monkeypatch.setattr(attention, "peak_mib", lambda step: found.append((choice.WIDTHS, dict(replay.PLANS))) or [0.0])
    monkeypatch.setitem(replay.PLANS, "of another contestant", True)
    widths = choice.WIDTHS
    for name in (OURS, PORTABLE):
        attention.gpu_row(name, None, {}, ())
    assert found == [(widths, {}), ((), {})]
    assert "of another contestant" in replay.PLANS


def timer(times):
    several = iter(times)
    return lambda: [next(several)]


def test_ratios_are_of_the_same_round(monkeypatch):
    """A ratio is the median of those by round; the median times of both would give another one."""
    rounds = {
        OURS: ([10.0, 20.0, 40.0], [30.0, 40.0, 100.0]),
        PORTABLE: ([20.0, 40.0, 80.0], [60.0, 80.0, 160.0]),
        FLEX: ([30.0, 10.0, 20.0], [50.0, 50.0, 80.0]),
        FA4: ([5.0, 40.0, 60.0], [25.0, 80.0, 180.0]),
    }
    rows = [
        {"name": name, "mib": 1.0, "forward_us": timer(forward), "us": timer(both)}
        for name, (forward, both) in rounds.items()
    ]
    result = {"shape": "B 1 S 2 H 3 Hk 3 D 4", "flops": 7e7, "rows": [*rows, {"name": CUDNN, "reason": "too wide"}]}
    monkeypatch.setattr(attention_grid, "timed", lambda *_: result)
    monkeypatch.setattr(attention_grid, "chosen", lambda _: {})
    monkeypatch.setattr(attention_grid, "settle", partial(settle, wait=lambda: None))
    case = attention_grid.measure(attention_grid.cases()[0], 3)
    ours, portable, flex, _, cudnn = case["rows"]
    assert (ours["forward_us"], ours["backward_us"], flex["backward_us"]) == (20, 20, 40)
    assert ours["ratios"] == {FLEX: [0.5, 1.0], FA4: [1.5, 2.0]}
    assert portable["ratios"] == {FLEX: [0.25, 0.75]}
    assert "ratios" not in cudnn
    assert cudnn["reason"] == "too wide"
    assert [attention_grid_report.best(case, OURS, part) for part in range(2)] == [(0.5, FLEX), (1.0, FLEX)]
    assert attention_grid_report.cells(case, OURS)[2:] == ["1", FLEX, "0.50", "2", FLEX, "1.00"]
    assert [*attention_grid_report.summaries({"cases": [case]})] == [
        [OURS, "forward", "1", "0 (0%)", "0.50", "0.500"],
        [OURS, "backward", "1", "1 (100%)", "1.00", "1.000"],
        [PORTABLE, "forward", "1", "0 (0%)", "0.25", "0.250"],
        [PORTABLE, "backward", "1", "0 (0%)", "0.75", "0.750"],
    ]
