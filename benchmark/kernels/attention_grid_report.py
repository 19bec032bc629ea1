"""The map and the tables in NOTES.md and docs/figures.md of what ``attention_grid`` measured, from results/."""

import re
from collections.abc import Iterable, Iterator
from statistics import geometric_mean
from typing import Any

from benchmark.common import plots
from benchmark.common.markdown import (
    FIGURES,
    NOTES,
    RESULTS,
    Row,
    between,
    digest,
    heading,
    number,
    ratio,
    results,
    table,
)

BEGIN, END = (
    "<!-- attention_grid: written by `python -m benchmark attention_grid --report` -->\n",
    "<!-- /attention_grid -->\n",
)
PICTURE = RESULTS / "grid.png"
# contestant of ours: the peers that it is compared with
BASES = {
    "liger_like": ("torch, cuDNN", "flash-attn-4", "flex_attention"),
    "liger_like, portable": ("flex_attention",),
}
PASSES = {"forward": 2, "backward": 5}  # products of each
COLUMNS = ("shape", "", *(f"{name} {unit}" for name in PASSES for unit in ("TFLOP/s", "best other", "its time / ours")))
COLUMN_COUNT = 6  # widths of the grid
WIDTH = re.compile(r" (D \d+(?: Dv \d+)?)")  # in the text of a shape
LIMITS = 0.6, 1.7  # ratios of the darkest colours


def best(case: Row, base: str, part: int) -> tuple[float, str] | None:
    """Return the least ratio of a peer's time to that of ``base``, and the peer; None if one of both is missing."""
    ratios = next((row.get("ratios", {}) for row in case["rows"] if row["name"] == base), {})
    return min(((several[part], name) for name, several in ratios.items()), default=None)


def cells(case: Row, base: str) -> list[str]:
    """Return a row of the table: our speed and the best peer, for both passes."""
    ours = next(row for row in case["rows"] if row["name"] == base)
    texts = [case["shape"], base]
    for part, (name, products) in enumerate(PASSES.items()):
        speed = ratio(case["flops"] * products / 7 / 1e6, ours.get(f"{name}_us"))
        value, other = best(case, base, part) or (None, ours.get("reason", "-"))
        texts += [number(speed, ".0f"), other, number(value, ".2f")]
    return texts


def summaries(result: Row) -> Iterator[list[str]]:
    """Yield for ours and each pass: shapes, how many of them are at least as fast, worst and mean ratio."""
    for base in BASES:
        for part, name in enumerate(PASSES):
            found = [pair[0] for case in result["cases"] if (pair := best(case, base, part))]
            if found:
                first = sum(value >= 1 for value in found)
                mean = f"{geometric_mean(found):.3f}"
                yield [base, name, str(len(found)), f"{first} ({first / len(found):.0%})", f"{min(found):.2f}", mean]


def summary(result: Row) -> str:
    """Return the summary of a file of results as a table."""
    columns = ("", "pass", "shapes", "at least as fast as every peer", "least ratio", "geometric mean")
    return "\n".join([*heading(result), table(columns, summaries(result))])


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    rows = (cells(case, base) for case in result["cases"] for base in BASES)
    return "\n".join([summary(result), table(COLUMNS, rows)])


def draw(figure: Any, result: Row) -> None:
    """Draw a map for each pass: a cell for each shape, coloured by the ratio of the best peer's time to ours."""
    from matplotlib.colors import LogNorm

    plots.title(figure, "Attention, the best peer's time / ours: above 1 (blue) ours is faster", result)
    lines = [result["cases"][i : i + COLUMN_COUNT] for i in range(0, len(result["cases"]), COLUMN_COUNT)]
    widths = [WIDTH.search(case["shape"])[1] for case in lines[0]]
    for part, (ax, name) in enumerate(zip(figure.subplots(1, 2), PASSES, strict=True)):
        ratios = [[(best(case, plots.OURS, part) or (float("nan"), ""))[0] for case in line] for line in lines]
        ax.imshow(ratios, cmap="RdBu", norm=LogNorm(*LIMITS), alpha=0.7, aspect="auto")
        ax.set(title=name, xticks=range(COLUMN_COUNT), xticklabels=widths, yticks=[])
        for y, line in enumerate(lines):
            for x, case in enumerate(line):
                ax.text(x, y, label(case["shape"], ratios[y][x]), ha="center", va="center", fontsize=7)


def label(shape: str, value: float) -> str:
    """Return the text of a cell in a few short lines: the shape without its width, and the ratio."""
    return "\n".join((*WIDTH.sub("", shape).replace(" H ", ", H ").split(", "), f"{value:.2f}"))


def figure(measured: list[Row]) -> Any:
    return plots.drawn(draw, measured, 10)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the map and the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join((f"![Map](results/{PICTURE.name})\n", *map(tables, measured))))


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the map and the summaries between the markers."""
    picture = f"![Map](../benchmark/results/{PICTURE.name})\n"
    return between(page, BEGIN, END, "\n".join((picture, *map(summary, measured))))


def write_report() -> None:
    measured = results("grid")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
    if measured:
        plots.save(figure(measured), PICTURE, digest("grid"))
