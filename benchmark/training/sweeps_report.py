"""Writes the tables and the pictures of what ``sweeps`` measured into NOTES.md and docs/figures.md."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

BEGIN = "<!-- sweeps: written by `python -m benchmark sweeps --report` -->\n"
END = "<!-- /sweeps -->\n"
ABOUT = """\
Training steps of Llama-3.2-1B's shape (`make bench-sweeps`). First: checkpointed, by batch and by sequence; a cross
marks the next size, which failed. Then, not checkpointed: which phase allocated the memory, and what the time was spent
on.
"""
ABOUT_GRAPH = """\
A small step, here of 1024 tokens, is launch-bound; a [CUDA graph](patching.md#cuda-graphs) removes that:
"""

MODEL, INSIDE_SHAPE = "Llama-3.2-1B", (4, 4096)
INSIDE_TEXT = "{}'s shape, B {} S {}".format(MODEL, *INSIDE_SHAPE)
SWEEPS = "batch", "sequence"
LINES = {"": "-", "compiled": "--", "selective": ":"}
PHASES = {
    "before": "#c8c8c8",
    "forward": plots.COLORS[plots.OURS],
    "backward": plots.COLORS["Liger"],
    "optimizer": "#000000",
}
Rows = Mapping[str, Row]


def sweep_table(contestants: Mapping[str, list[Row]]) -> str:
    """Return a table of tokens/s and peak GiB, or a reason: a column for each contestant, empty if not tried."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for name, rows in contestants.items():
        for row in rows:
            cell = row.get("reason") or f"{row['tokens']:,.0f}, {row['gib']:.1f}"
            found.setdefault((row["batch"], row["sequence"]), {})[name] = cell
    cells = (
        [f"B {batch} S {seq}", *(texts.get(name, "") for name in contestants)]
        for (batch, seq), texts in sorted(found.items())
    )
    return table(("", *contestants), cells)


def ablation_table(rows: Rows) -> str:
    unpatched = rows.get("none", {}).get("ms")
    cells = (
        [
            name,
            row.get("reason") or number(row["ms"], ".1f"),
            number(ratio(row.get("ms"), unpatched), ".3f"),
            number(row.get("gib"), ".1f"),
        ]
        for name, row in rows.items()
    )
    return table(("patched", "step ms", "of none", "peak GiB"), cells)


def graph_table(rows: Rows) -> str:
    cells = (
        [
            name,
            number(row.get("launched_ms"), ".1f"),
            row.get("reason") or number(row["ms"], ".1f"),
            number(row.get("tokens"), ",.0f"),
            number(row.get("gib"), ".1f"),
        ]
        for name, row in rows.items()
    )
    return table(("", "launched ms", "graph ms", "tokens/s", "peak GiB"), cells)


def peak(row: Row) -> dict[str, float]:
    """Return GiB by the phase that allocated them, at the peak."""
    most = max(zip(*row["gib"].values(), strict=True), key=sum)
    return dict(zip(row["gib"], most, strict=True))


def memory_table(rows: Rows) -> str:
    peaks = {name: {} if "reason" in row else peak(row) for name, row in rows.items()}
    phases = list(dict.fromkeys(phase for levels in peaks.values() for phase in levels))
    cells = (
        [
            name,
            rows[name].get("reason") or number(sum(levels.values()), ".1f"),
            *(number(levels.get(p), ".1f") for p in phases),
        ]
        for name, levels in peaks.items()
    )
    return table(("", "peak GiB", *phases), cells)


def profile_table(rows: Rows) -> str:
    found = {name: row.get("groups", {}) for name, row in rows.items()}
    names = list(dict.fromkeys(group for groups in found.values() for group in groups))
    cells = [[name, *(number(groups.get(name), ".1f") for groups in found.values())] for name in names]
    cells.append(["all of these", *(number(sum(groups.values()), ".1f") for groups in found.values())])
    cells.append(["the step", *(row.get("reason") or number(row["ms"], ".1f") for row in rows.values())])
    return table(("", *rows), cells)


class Part(NamedTuple):
    title: str
    table: Callable[[Rows], str]


PARTS = {
    "ablation": Part("Patched in part, in turns", ablation_table),
    "graph": Part("A small step, its kernels launched one by one, and as one CUDA graph", graph_table),
    "memory": Part("Memory in a step by when it was allocated, at its peak", memory_table),
    "profile": Part("Time in a step by what it was for, ms", profile_table),
}


def only(contestants: Mapping[str, list[Row]]) -> Rows:
    """Return the row of each contestant, for parts that are no sweeps."""
    return {name: row for name, (row,) in contestants.items()}


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for part in SWEEPS:
        if contestants := result["parts"].get(part):
            parts += [f"By {part}, checkpointed: tokens/s and peak GiB:\n", sweep_table(contestants)]
    for part, (title, in_markdown) in PARTS.items():
        if contestants := result["parts"].get(part):
            parts += [f"{title}:\n", in_markdown(only(contestants))]
    return "\n".join(parts)


def draw_sweeps(figure: Any, result: Row) -> None:
    """Draw throughput above memory, by batch and by sequence; a cross where the next shape failed."""
    grid = figure.subplots(2, len(SWEEPS), sharex="col", sharey="row")
    ends: dict[Any, list[tuple[str, float]]] = {ax: [] for ax in grid.flat}
    for part, column in zip(SWEEPS, grid.T, strict=True):
        for name, rows in result["parts"].get(part, {}).items():
            done = [row for row in rows if "ms" in row]
            style = {"color": plots.color(name), "linestyle": LINES[name.partition(", ")[2]]}
            for ax, key, unit in zip(column, ("tokens", "gib"), (1e3, 1), strict=True):
                x, y = [row[part] for row in done], [row[key] / unit for row in done]
                ax.plot(x, y, marker=".", label=name, **style)
                if len(done) < len(rows):
                    ax.plot(x[-1:], y[-1:], "x", color=style["color"], markersize=10)
                ends[ax] += [(name, last) for last in y[-1:]]
        shapes = [row for rows in result["parts"].get(part, {}).values() for row in rows]
        other = next(p for p in SWEEPS if p != part)
        fixed = ", ".join(f"{other} {size}" for size in sorted({row[other] for row in shapes}))
        ticks = sorted({row[part] for row in shapes})
        column[0].set(title=fixed, xscale="log")
        column[1].set_xlabel(f"{part}, {'sequences' if part == 'batch' else 'tokens'}")
        told = [
            tick for tick in ticks if tick.bit_count() == 1 or tick == ticks[-1]
        ]  # all would not fit: powers of two, and the last
        column[1].set_xticks(told, [str(tick) if tick < 1024 else f"{tick // 1024}k" for tick in told])
        column[1].minorticks_off()
    for row, label in zip(grid, ("throughput, 1000 tokens/s", "peak memory, GiB"), strict=True):
        row[0].set(ylabel=label, ylim=(0, None))
        for ax in row:
            ax.grid(axis="y")
            plots.label_ends(ax, ends[ax], 0.065)
    text = f"Training steps of {MODEL}'s shape, all layers checkpointed; a cross where the next larger shape failed"
    plots.title(figure, text, result)


def draw_memory(figure: Any, result: Row) -> None:
    """Draw what is allocated, by the phase that allocated it; lines part the phases."""
    rows: Rows = {name: row for name, (row,) in result["parts"]["memory"].items() if "gib" in row}
    axes = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    most = max(sum(peak(row).values()) for row in rows.values())
    for ax, (name, row) in zip(axes, rows.items(), strict=True):
        count = len(row["gib"]["before"])
        x = [100 * (i + 0.5) / count for i in range(count)]
        levels = {phase: gib for phase, gib in row["gib"].items() if any(gib)}
        ax.stackplot(x, *levels.values(), colors=[PHASES[phase] for phase in levels], labels=levels)
        total, when = max(zip(map(sum, zip(*levels.values(), strict=True)), x, strict=True))
        ax.annotate(f"peak {total:.1f} GiB", (when, total), (14, 4), textcoords="offset points", weight="bold")
        for phase, end in row["ends"].items():
            if end < 1:
                ax.axvline(100 * end, color=plots.QUIET, linewidth=0.8)
                ax.annotate(f"{phase} ends", (100 * end, 1.2 * most), (-4, 0), textcoords="offset points", ha="right")
        ax.set(title=name, xlabel="% of the step's allocations and frees", xlim=(0, 100))
    axes[0].set(ylabel="GiB, by the phase that allocated them", ylim=(0, 1.3 * most))
    plots.title(figure, f"Memory in a training step of {INSIDE_TEXT}, nothing checkpointed", result, axes[:1])


def draw_profile(figure: Any, result: Row) -> None:
    """Draw a bar for each group of kernels and contestant, and one for the whole step."""
    rows: Rows = {name: row for name, (row,) in result["parts"]["profile"].items() if "groups" in row}
    ax = figure.subplots()
    height = 0.8 / len(rows)
    for i, (name, row) in enumerate(rows.items()):
        times = {"the step": row["ms"], "its kernels": sum(row["groups"].values()), **row["groups"]}
        places = [place + i * height for place in range(len(times))]
        bars = ax.barh(places, times.values(), height, color=plots.color(name), label=name)
        texts = [f"{ms:.1f}" for ms in times.values()]
        ax.bar_label(bars, [f"{name}: {texts[0]} ms", *texts[1:]], padding=4, color=plots.color(name))
        ax.set_yticks([place + 0.4 - height / 2 for place in range(len(times))], times)
    ax.set(xlabel="ms", xlim=(0, 1.25 * max(row["ms"] for row in rows.values())))
    ax.invert_yaxis()
    plots.title(figure, f"Time in a training step of {INSIDE_TEXT}, nothing checkpointed, by what it was for", result)


class Picture(NamedTuple):
    parts: tuple[str, ...]
    text: str
    height: float
    draw: Callable[[Any, Row], None]

    def of(self, measured: Collection[Row]) -> list[Row]:
        """Return the results that the picture shows."""
        return [result for result in measured if any(result["parts"].get(part) for part in self.parts)]

    def figure(self, shown: list[Row]) -> Any:
        return plots.drawn(self.draw, shown, self.height)


PICTURES = {
    "sweeps": Picture(SWEEPS, "tokens/s and memory by batch and by sequence", 7.5, draw_sweeps),
    "memory": Picture(("memory",), "memory in a training step", 4.8, draw_memory),
    "profile": Picture(("profile",), "time in a training step by what it was for", 5.5, draw_profile),
}


def file_of(name: str) -> Path:
    return RESULTS / f"{name}.png"


def links(page: Path, measured: Collection[Row]) -> list[str]:
    """Return the pictures that results exist for."""
    return [
        f"![{picture.text}]({os.path.relpath(file_of(name), page.parent)})\n"
        for name, picture in PICTURES.items()
        if picture.of(measured)
    ]


def with_tables(notes: str, measured: Collection[Row]) -> str:
    """Return ``notes`` with the pictures and the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join([*links(NOTES, measured), *map(tables, measured)]))


def with_overview(page: str, measured: Collection[Row]) -> str:
    """Return ``page`` with the pictures, and what a graph changes, between the markers."""
    pictures = links(FIGURES, measured)
    graphs = [result["parts"]["graph"] for result in measured if result["parts"].get("graph")]
    content = [ABOUT, *pictures] if pictures else []
    if graphs:
        content += [ABOUT_GRAPH, *(graph_table(only(contestants)) for contestants in graphs)]
    return between(page, BEGIN, END, "\n".join(content))


def write_report() -> None:
    measured = results("sweeps")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
    for name, picture in PICTURES.items():
        if shown := picture.of(measured):
            plots.save(picture.figure(shown), file_of(name), digest("sweeps"))
