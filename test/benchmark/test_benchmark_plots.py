"""The pictures of the reports: they show what was measured, say where, and can be read."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from benchmark.common import markdown, plots
from benchmark.kernels import attention_grid_report, bench_report, contestants, losses_report
from benchmark.training import curves, sweeps_report, training

MOST_BYTES, MOST_PIXELS = 200_000, 1200  # limits of a file and of a picture's width
# maps linear RGB to what a reader without green cones sees (Machado et al. 2009)
NO_GREEN = torch.tensor(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
DISTANCE = 0.1  # least distance of two colours; black and white are 1.7 apart


def bench_marks(result):
    """Return the shares in percent by op, contestant and shape."""
    return {
        (case["op"], row["name"], case["shape"], 100 * row["share"])
        for case in result["cases"]
        for row in case["rows"]
        if "share" in row
    }


def marks_of_bench(figure):
    found = set()
    for ax in figure.axes:
        shapes = [label.get_text().rpartition("   ")[2] for label in ax.get_yticklabels()]
        for line in ax.get_legend_handles_labels()[0]:
            found |= {
                (ax.get_title("left"), line.get_label(), shapes[int(y)], x) for x, y in line.get_xydata().tolist()
            }
    return found


def losses_bars(result):
    rows = {row["name"]: row for row in result["fused"][0]["rows"] if row["name"] != losses_report.GEMMS}
    rows |= {f"liger_like, chunk_rows {row['name']}": row for row in result["chunk_rows"]["rows"]}
    return {(name, row["ms"], row["mib"]) for name, row in rows.items()}


def bars_of_losses(figure):
    times, memory = ([bar.get_width() for bar in ax.patches] for ax in figure.axes)
    return {*zip((label.get_text() for label in figure.axes[0].get_yticklabels()), times, memory, strict=True)}


def sweeps_points(result):
    return {
        (key, name, row[part], row[key] / unit)
        for part in sweeps_report.SWEEPS
        for name, rows in result["parts"][part].items()
        for row in rows
        for key, unit in (("tokens", 1e3), ("gib", 1))
        if key in row
    }


def points_of_sweeps(figure):
    found = set()
    for ax, key in zip(figure.axes, ("tokens", "tokens", "gib", "gib"), strict=True):
        lines = [line for line in ax.lines if line.get_label() in {text.get_text() for text in ax.texts}]
        found |= {(key, line.get_label(), x, y) for line in lines for x, y in line.get_xydata().tolist()}
    return found


def memory_peaks(result):
    rows = {name: row for name, (row,) in result["parts"]["memory"].items()}
    return {(name, f"peak {sum(sweeps_report.peak(row).values()):.1f} GiB") for name, row in rows.items()}


def peaks_of_memory(figure):
    return {(ax.get_title(), text.get_text()) for ax in figure.axes for text in ax.texts if "peak" in text.get_text()}


def profile_bars(result):
    rows = {name: row for name, (row,) in result["parts"]["profile"].items()}
    return {
        (name, what, ms)
        for name, row in rows.items()
        for what, ms in {"the step": row["ms"], "its kernels": sum(row["groups"].values()), **row["groups"]}.items()
    }


def bars_of_profile(figure):
    (ax,) = figure.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    return {
        (bars.get_label(), what, bar.get_width())
        for bars in ax.containers
        for what, bar in zip(names, bars, strict=True)
    }


def curves_lines(result):
    names = {"unpatched": "unpatched", "patched": "patched by liger_like"}
    return {
        (names[name], *curves.smoothed(curve).tolist()) for both in result["curves"] for name, curve in both.items()
    }


def lines_of_curves(figure):
    return {(line.get_label(), *line.get_ydata().tolist()) for line in figure.axes[0].lines}


def grid_cells(result):
    """Return the sizes, mask and ratio of each cell by pass and width, from the times of the results."""
    cells = set()
    for case in result["cases"]:
        rows = {row["name"]: row for row in case["rows"] if "reason" not in row}
        size, width, mask = re.fullmatch(r"(.*) (D .*?)((?:, .*)?)", case["shape"]).groups()
        for name in ("forward", "backward"):
            ratios = rows[plots.OURS]["ratios"] if plots.OURS in rows else {}
            value = min((several[name == "backward"] for several in ratios.values()), default=math.nan)
            cells.add((name, width, size.replace(" H ", ", H ") + mask + f", {value:.2f}"))
    return cells


def cells_of_grid(figure):
    return {
        (ax.get_title(), ax.get_xticklabels()[text.get_position()[0]].get_text(), text.get_text().replace("\n", ", "))
        for ax in figure.axes
        for text in ax.texts
    }


class Picture(NamedTuple):
    """A committed picture: its results, how they are drawn, what they hold, and what is found in a figure."""

    results: list[markdown.Row]
    figure: Callable[[list[markdown.Row]], Any]
    held: Callable[[markdown.Row], set[Any]]
    found: Callable[[Any], set[Any]]


def pictures() -> Iterator[tuple[Path, Picture]]:
    for path in markdown.result_files("bench"):
        result = json.loads(path.read_text())
        for name, part in bench_report.pictures(result).items():
            file = path.with_name(bench_report.picture_name(result, name))
            yield file, Picture([part], lambda parts: bench_report.figure(*parts), bench_marks, marks_of_bench)
    losses, curve = markdown.results("losses"), markdown.results("curves")
    yield losses_report.PICTURE, Picture(losses, losses_report.figure, losses_bars, bars_of_losses)
    grid = markdown.results("grid")
    yield attention_grid_report.PICTURE, Picture(grid, attention_grid_report.figure, grid_cells, cells_of_grid)
    yield curves.PICTURE, Picture(curve, curves.figure, curves_lines, lines_of_curves)
    facts = {
        "sweeps": (sweeps_points, points_of_sweeps),
        "memory": (memory_peaks, peaks_of_memory),
        "profile": (profile_bars, bars_of_profile),
    }
    for name, picture in sweeps_report.PICTURES.items():
        yield sweeps_report.file_of(name), Picture(picture.of(markdown.results("sweeps")), picture.figure, *facts[name])


PICTURES = {path.stem: (path, picture) for path, picture in pictures() if picture.results}


def check(picture: Picture, result: markdown.Row, figure: Any) -> None:
    """Assert that FIGURE shows RESULT, all of it, and where it was measured."""
    assert picture.found(figure) == picture.held(result)
    (legend,) = figure.subfigs[0].legends
    heading = legend.get_title().get_text()
    versions = [f"{name} {result['versions'][name]}" for name in ("torch", "triton")]
    assert all(text in heading for text in (result["gpu"], *versions, result["date"]))


def contestants_of(result):
    """Every place where RESULT has rows by contestant: a list of rows with names, or a dict by name."""
    yield from (case["rows"] for key in ("cases", "fused") for case in result.get(key, ()))
    yield from result.get("parts", {}).values()


def without_ours(result):
    """...or of the curves, which are of two models each, without a seed."""
    for rows in contestants_of(result):
        if isinstance(rows, dict):
            rows.pop(plots.OURS, None)
        else:
            rows[:] = [row for row in rows if row["name"] != plots.OURS]
    del result.get("curves", [])[-1:]


def with_names_swapped(result):
    for rows in (*contestants_of(result), *result.get("curves", ())):
        if isinstance(rows, dict):
            names = [*rows]
            rows.update(zip(names, [*rows.values()][::-1], strict=True))
        else:
            rows[0]["name"], rows[1]["name"] = rows[1]["name"], rows[0]["name"]


def without(key):
    return lambda result: result.update({key: ""})


def without_triton(result):
    result["versions"]["triton"] = None


FAULTS = {
    "contestant": without_ours,
    "series": with_names_swapped,
    "gpu": without("gpu"),
    "date": without("date"),
    "version": without_triton,
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_shows_its_results(name):
    path, picture = PICTURES[name]
    for result in picture.results:
        figure = picture.figure([result])
        check(picture, result, figure)
        assert_readable(figure)
    assert path.stat().st_size < MOST_BYTES
    with Image.open(path) as image:
        assert image.width < MOST_PIXELS
        assert image.size == tuple(int(size) for size in picture.figure(picture.results).bbox.size)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", PICTURES)
def test_wrong_picture_is_noticed(name, fault):
    """A figure drawn from changed results is not taken for a figure of the results."""
    _, picture = PICTURES[name]
    result = picture.results[0]
    changed = copy.deepcopy(result)
    FAULTS[fault](changed)
    with pytest.raises(AssertionError):
        check(picture, result, picture.figure([changed]))


def assert_readable(figure):
    """Assert that no text is cut, and that none lies on another one."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda text, *_: texts.append(text))
        figure.draw_without_rendering()
    boxes = {text: text.get_window_extent() for text in texts if text.get_text() and text.get_visible()}
    cut = [
        text.get_text()
        for text, box in boxes.items()
        if not figure.bbox.contains(*box.min) or not figure.bbox.contains(*box.max)
    ]
    assert not cut
    assert not [(a.get_text(), b.get_text()) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]


def test_unreadable_picture_is_noticed(monkeypatch):
    _, picture = PICTURES["sweeps"]
    monkeypatch.setattr(plots, "apart", lambda places, gap: places)
    with pytest.raises(AssertionError):
        assert_readable(picture.figure(picture.results))
    monkeypatch.undo()
    monkeypatch.setattr(plots, "WIDTH", 5)
    with pytest.raises(AssertionError):
        assert_readable(picture.figure(picture.results))


def test_results_of_a_host_without_gpu():
    """A remark names contestants with wall time, unless every time is wall time."""
    case = {
        "rows": [{"name": "torch", "share": 0.1}, {"name": "Liger", "reason": "wrong"}, {"name": "CCE", "reason": "x"}]
    }
    assert bench_report.notes([case]) == "Liger: too inexact; CCE: failed"
    timed = {"rows": [{"name": "torch", "share": 0.1, "us": 2.0}, {"name": "Liger", "share": 0.1}]}
    assert bench_report.notes([timed]) == "Liger: wall time"
    assert (
        bench_report.notes([case, timed])
        == "torch: wall time at 1 of 2; Liger: too inexact at 1 of 2; CCE: failed at 1 of 2; Liger: wall time at 1 of 2"
    )


def test_apart():
    assert plots.apart([5.0, 1.0, 1.0], 2.0) == [5.0, 0.0, 2.0]
    assert plots.apart([], 1.0) == []


def test_contestants_differ():
    """Each picture tells contestants apart by marker or colour, libraries by colours that colour-blind readers
    distinguish.
    """
    for name, (_, picture) in PICTURES.items():
        if name.startswith("bench"):
            lines = [line for ax in picture.figure(picture.results).axes for line in ax.lines]
            looks = {
                line.get_label(): (line.get_color(), line.get_marker()) for line in lines if line.get_marker() != "None"
            }
            assert len({*looks.values()}) == len(looks)
            for (first, (one, _)), (second, (other, _)) in combinations(looks.items(), 2):
                if first.partition(",")[0] != second.partition(",")[0]:
                    seen = [NO_GREEN @ torch.tensor(to_rgb(color)) ** 2.2 for color in (one, other)]
                    assert torch.dist(*seen) > DISTANCE, (first, second)


def test_every_op_has_a_picture_and_every_contestant_a_look():
    assert sorted(op for ops in bench_report.PICTURES.values() for op in ops) == sorted(contestants.OPS)
    for op in contestants.OPS.values():
        assert {*op.contestants(), *op.libraries} <= plots.MARKERS.keys()
    assert all(map(plots.color, (*plots.MARKERS, *training.CONTESTANTS)))
