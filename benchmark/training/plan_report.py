"""The table in NOTES.md and the picture of what ``plan`` predicts, from results/plan.json."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.common import plots
from benchmark.common.markdown import NOTES, RESULTS, Row, between, digest_of, number, table

PATH, PICTURE = RESULTS / "plan.json", RESULTS / "plan.png"
FILES = "training", "sweeps", "small", "sharded", "long-context", "planned"
BEGIN = "<!-- plan: written by `python -m benchmark plan --report` -->\n"
END = "<!-- /plan -->\n"
COLUMNS = "results", "setting", "", "GiB", "predicted", "error", "ms", "predicted", "error"
BOUND = 1.3  # a step waits for the GPU, not for the host, if the GPU's time is so many times the host's


def error(row: Row, measured: str, predicted: str) -> float | None:
    return row[predicted] / row[measured] - 1 if measured in row else None


def is_bound(row: Row) -> bool:
    """Return True if the time of a row is the GPU's."""
    return "ms" in row and row["predicted_ms"] >= BOUND * row["host_ms"]


def cells(row: Row) -> list[str]:
    wait = " (host)" * ("ms" in row and not is_bound(row))
    return [
        row["file"],
        row["text"],
        row["name"],
        number(row["gib"], ".4g"),
        number(row["predicted"], ".2f"),
        number(error(row, "gib", "predicted"), "+.2%"),
        number(row.get("ms"), ",.4g"),
        number(row.get("predicted_ms"), ",.0f") + wait,
        number(error(row, "ms", "predicted_ms"), "+.1%"),
    ]


def wrong_pairs(rows: Sequence[Row]) -> tuple[int, int]:
    """Return of how many pairs of rows, whose times differ by more than 5 %, the order is predicted wrongly.

    The pairs are contestants of the same setting and file.
    """
    pairs = [
        (a, b)
        for i, a in enumerate(rows)
        for b in rows[:i]
        if (a["file"], a["text"]) == (b["file"], b["text"]) and max(a["ms"], b["ms"]) > 1.05 * min(a["ms"], b["ms"])
    ]
    wrong = [(a, b) for a, b in pairs if (a["ms"] < b["ms"]) != (a["predicted_ms"] < b["predicted_ms"])]
    return len(wrong), len(pairs)


def gist(rows: Sequence[Row]) -> list[str]:
    """Return what the rows say together, a line for each kind of figure."""
    lines = []
    for what, several in (
        ("one GPU", [row for row in rows if "sharded" not in row["file"]]),
        ("sharded", [row for row in rows if "sharded" in row["file"]]),
    ):
        if several:
            errors = [abs(row["predicted"] / row["gib"] - 1) for row in several]
            median, worst = statistics.median(errors), max(errors)
            lines.append(f"* peak, {what}: {len(several)} rows, median error {median:.2%}, worst {worst:.2%}")
    held = [abs(row["predicted_reserved"] / row["reserved"] - 1) for row in rows if "reserved" in row]
    if held:
        lines.append(f"* reserved: {len(held)} rows, median error {statistics.median(held):.2%}, worst {max(held):.2%}")
    timed = [row for row in rows if "ms" in row]
    for what, several in (
        ("steps that wait for the GPU", [row for row in timed if is_bound(row)]),
        ("all steps", timed),
    ):
        if several:
            each = [abs(row["predicted_ms"] / row["ms"] - 1) for row in several]
            wrong, pairs = wrong_pairs(several)
            errors = f"median error {statistics.median(each):.1%}, worst {max(each):.1%}"
            order = f"of {pairs} pairs that differ by more than 5 %, {wrong} in the wrong order"
            lines.append(f"* time, {what}: {len(several)} rows, {errors}; {order}")
    return lines


def tables(result: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = result["rows"]
    return "\n".join([f"Traced on a CPU, {versions}:\n", *gist(rows), "", table(COLUMNS, map(cells, rows))])


def with_tables(notes: str, result: Row) -> str:
    return between(notes, BEGIN, END, tables(result))


def draw(figure: Any, result: Row) -> None:
    """Draw predicted against measured peaks, and times, on logarithmic axes."""
    rows = result["rows"]
    axes = figure.subplots(1, 2)
    timed = [row for row in rows if "ms" in row]
    for ax, several, (x, y), unit in (
        (axes[0], rows, ("gib", "predicted"), "peak GiB"),
        (axes[1], timed, ("ms", "predicted_ms"), "ms of a step"),
    ):
        ends = [min(row[x] for row in several) * 0.8, max(row[x] for row in several) * 1.25]
        ax.plot(ends, ends, color=plots.GRID, zorder=1)
        for name in ("transformers", "liger_like"):
            own = [row for row in several if row["name"].partition(",")[0] == name]
            for shape, part in (("o", "one GPU"), ("^", "sharded")):
                found = [row for row in own if ("sharded" in row["file"]) == (part == "sharded")]
                points = [row[x] for row in found], [row[y] for row in found]
                style = {"color": plots.color(name), "markersize": 6, "markeredgecolor": "white", "zorder": 3}
                ax.plot(*points, shape, label=f"{name}, {part}", **style)
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
        ax.grid(True)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, title="Predicted without a GPU, against measured", loc="outside upper center", ncols=4)


def write_picture(path: Path = PICTURE) -> None:
    plots.save(plots.drawn(draw, [json.loads(PATH.read_text())], 5.0), path, digest_of([PATH]))


def write_report() -> None:
    NOTES.write_text(with_tables(NOTES.read_text(), json.loads(PATH.read_text())))
    write_picture()
