"""The tables and the pictures, in NOTES.md and the README, of what ``benchmark.sweeps`` measured: from results/."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.markdown import NOTES, README, RESULTS, Row, between, digest, heading, number, ratio, results, table

BEGIN = "<!-- sweeps: written by `python -m benchmark.sweeps --report` -->\n"
END = "<!-- /sweeps -->\n"
ABOUT = """\
Steps of Llama-3.2-1B's shape (`make bench-sweeps`): checkpointed, by batch and by sequence, a cross where the next one
failed; and, of one that is not checkpointed, what is allocated when, and what its kernels are for.
"""
ABOUT_GRAPH = """\
A small step, here of 1024 tokens, waits for the host, but not as one [CUDA graph](docs/patching.md#cuda-graphs):
"""

SWEEPS = "batch", "sequence"
COLORS = {"transformers": "tab:red", "Liger": "tab:green", "liger_like": "tab:blue"}
STYLES = {"": "-", "compiled": "--", "selective": ":"}
Rows = Mapping[str, Row]


def sweep_table(contestants: Mapping[str, list[Row]]) -> str:
    """Tokens/s and peak GiB, or a reason: a column for each contestant; what was not tried is empty."""
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
    """GiB by when they were allocated, at the time when most were."""
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
    """Of parts that are no sweeps: the row of each."""
    return {name: row for name, (row,) in contestants.items()}


def tables(result: Row) -> str:
    """One file of results in Markdown."""
    parts = heading(result)
    for part in SWEEPS:
        if contestants := result["parts"].get(part):
            parts += [f"By {part}, checkpointed: tokens/s and peak GiB:\n", sweep_table(contestants)]
    for part, (title, in_markdown) in PARTS.items():
        if contestants := result["parts"].get(part):
            parts += [f"{title}:\n", in_markdown(only(contestants))]
    return "\n".join(parts)


def draw_sweeps(figure: Any, result: Row) -> None:
    """Throughput above memory, over batch and over sequence; a cross where the next shape failed."""
    grid = figure.subplots(2, len(SWEEPS), sharex="col", sharey="row")
    for part, column in zip(SWEEPS, grid.T, strict=True):
        for name, rows in result["parts"].get(part, {}).items():
            peer, _, form = name.partition(", ")
            done = [row for row in rows if "ms" in row]
            options = {"color": COLORS[peer], "linestyle": STYLES[form], "label": name}
            for ax, key, unit in zip(column, ("tokens", "gib"), (1e3, 1), strict=True):
                x, y = [row[part] for row in done], [row[key] / unit for row in done]
                ax.plot(x, y, marker=".", **options)
                if len(done) < len(rows):
                    ax.plot(x[-1:], y[-1:], "x", color=COLORS[peer], markersize=9)
        shapes = [row for rows in result["parts"].get(part, {}).values() for row in rows]
        other = next(p for p in SWEEPS if p != part)
        fixed = ", ".join(f"{other} {size}" for size in sorted({row[other] for row in shapes}))
        column[0].set(title=f"{result['gpu']}: {fixed}", xscale="log")
        ticks = sorted({row[part] for row in shapes})
        column[1].set(xlabel=part)
        column[1].set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
        column[1].minorticks_off()
    for ax, label in zip(grid[:, 0], ("1000 tokens/s", "peak GiB"), strict=True):
        ax.set(ylabel=label, ylim=(0, None))
    grid[0, 0].legend()


def draw_memory(figure: Any, result: Row) -> None:
    """What is allocated, by when it was; the phases end at the lines."""
    rows: Rows = {name: row for name, (row,) in result["parts"]["memory"].items() if "gib" in row}
    axes = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for ax, (name, row) in zip(axes, rows.items(), strict=True):
        count = len(row["gib"]["before"])
        ax.stackplot([(i + 0.5) / count for i in range(count)], *row["gib"].values(), labels=[*row["gib"]])
        for phase, end in row["ends"].items():
            ax.axvline(end, color="black", linewidth=0.8)
            ax.annotate(phase, (end, 1), (-12, -60), ("data", "axes fraction"), "offset points", rotation=90)
        title = f"{result['gpu']}, {name}: peak {sum(peak(row).values()):.1f} GiB"
        ax.set(title=title, xlabel="allocations and frees of a step", xlim=(0, 1))
    most = max(sum(peak(row).values()) for row in rows.values())
    axes[0].set(ylabel="GiB, by when they were allocated", ylim=(0, 1.3 * most))  # room for names above
    axes[0].legend(loc="upper left")


def draw_profile(figure: Any, result: Row) -> None:
    """A bar for each contestant, in it the groups."""
    rows: Rows = {name: row for name, (row,) in result["parts"]["profile"].items() if "groups" in row}
    ax = figure.subplots()
    left = dict.fromkeys(rows, 0.0)
    for i, group in enumerate(next(iter(rows.values()))["groups"]):
        widths = [row["groups"][group] for row in rows.values()]
        bars = ax.barh([*rows], widths, left=[*left.values()], color=f"C{i}", label=group)
        wide = 0.03 * max(sum(row["groups"].values()) for row in rows.values())
        ax.bar_label(bars, [f"{width:.0f}" if width > wide else "" for width in widths], label_type="center")
        left = {name: left[name] + width for name, width in zip(rows, widths, strict=True)}
    ax.set(title=result["gpu"], xlabel="ms of kernels in a step")
    ax.invert_yaxis()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


class Picture(NamedTuple):
    parts: tuple[str, ...]
    text: str
    size: tuple[float, float]
    draw: Callable[[Any, Row], None]

    def of(self, measured: Collection[Row]) -> list[Row]:
        """Those results that it shows."""
        return [result for result in measured if any(result["parts"].get(part) for part in self.parts)]


PICTURES = {
    "sweeps": Picture(SWEEPS, "tokens/s and memory by batch and by sequence", (12, 8), draw_sweeps),
    "memory": Picture(("memory",), "memory in a training step", (12, 4.5), draw_memory),
    "profile": Picture(("profile",), "time in a training step by what it was for", (12, 3), draw_profile),
}


def file_of(name: str) -> Path:
    return RESULTS / f"{name}.png"


def links(page: Path, measured: Collection[Row]) -> list[str]:
    """The pictures that there are."""
    return [
        f"![{picture.text}]({file_of(name).relative_to(page.parent)})\n"
        for name, picture in PICTURES.items()
        if picture.of(measured)
    ]


def with_tables(notes: str, measured: Collection[Row]) -> str:
    """``notes`` with the pictures and the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join([*links(NOTES, measured), *map(tables, measured)]))


def with_overview(readme: str, measured: Collection[Row]) -> str:
    """``readme`` with the pictures, and what a graph changes, between the markers."""
    pictures = links(README, measured)
    graphs = [result["parts"]["graph"] for result in measured if result["parts"].get("graph")]
    content = [ABOUT, *pictures] if pictures else []
    if graphs:
        content += [ABOUT_GRAPH, *(graph_table(only(contestants)) for contestants in graphs)]
    return between(readme, BEGIN, END, "\n".join(content))


def write_report() -> None:
    measured = results("sweeps")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    README.write_text(with_overview(README.read_text(), measured))
    for name, picture in PICTURES.items():
        if shown := picture.of(measured):
            from matplotlib.figure import Figure

            figure = Figure(figsize=(picture.size[0], picture.size[1] * len(shown)), layout="constrained")
            for part, result in zip(figure.subfigures(len(shown), squeeze=False).flat, shown, strict=True):
                picture.draw(part, result)
            figure.savefig(file_of(name), dpi=120, metadata={"Comment": digest("sweeps")})
