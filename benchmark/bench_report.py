"""Files of what ``benchmark.bench`` measured: csv, Markdown and a picture of each, and their overview in NOTES.md."""

import csv
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmark.markdown import NOTES, RESULTS, Row, between, digest_of, heading, number, result_files, table
from benchmark.measure import slug

BEGIN, END = "<!-- bench: written by `liger-like bench --report` -->\n", "<!-- /bench -->\n"

OURS = "liger_like"
TIMES = ("forward_us", "backward_us", "us", "wall_us", "host_us")
FIELDS = ("op", "shape", "of", "name", *TIMES, "mib", "rate", "unit", "share", "error", "reason")
COLUMNS = (
    "shape", "of", "", "forward us", "backward us", "both us", "wall us", "host us", "rate", "of the ceiling",
    "peak MiB", "error / torch's",
)  # fmt: skip
OVERVIEW = ("op", "shapes", "of the ceiling", "best other's time", "least", "by")


def stem(result: Row) -> str:
    """What the files of ``result`` are called."""
    return f"{'quick' if result['quick'] else 'bench'}-{slug(result['gpu'])}-{result['date']}"


def cells(case: Row, row: Row) -> list[str]:
    """A reason stands in the place of the first time that is missing."""
    times = [number(row.get(key), ".1f") for key in TIMES]
    if "reason" in row and "-" in times:
        times[times.index("-")] = row["reason"]
    rate = f"{row['rate']:.4g} {case['unit']}" if "rate" in row else "-"
    share, mib, error = (
        number(row.get(key), spec) for key, spec in (("share", ".0%"), ("mib", ".0f"), ("error", ".2f"))
    )
    return [case["shape"], case["of"], row["name"], *times, rate, share, mib, error]


def by_op(result: Row) -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {}
    for case in result["cases"]:
        rows.setdefault(case["op"], []).extend(cells(case, row) for row in case["rows"])
    return rows


def head(result: Row) -> list[str]:
    ceilings = " and ".join(f"{value:.4g} {unit}" for unit, value in result["ceilings"].items())
    return [*heading(result), f"Ceilings, of a copy and of a product of matrices: {ceilings}.\n"]


def tables(result: Row) -> str:
    """One file of results in Markdown."""
    parts = head(result)
    for op, rows in by_op(result).items():
        parts += [f"{op}:\n", table(COLUMNS, rows)]
    return "\n".join(parts)


def times(case: Row) -> dict[str, float]:
    """By contestant: of the kernels, or on the wall where they have none of their own."""
    found = {row["name"]: row.get("us", row.get("wall_us")) for row in case["rows"]}
    return {name: us for name, us in found.items() if us is not None}


def overview(result: Row) -> Iterator[list[str]]:
    """By op the shares that ours reach, and the times of the best of the others in units of ours: median, least."""
    for op in by_op(result):
        cases = [case for case in result["cases"] if case["op"] == op]
        shares = [row["share"] for case in cases for row in case["rows"] if row["name"] == OURS and "share" in row]
        best = []
        for case in cases:
            us = times(case)
            others = [(time, name) for name, time in us.items() if not name.startswith(OURS)]
            if OURS in us and others:
                time, name = min(others)
                best.append((time / us[OURS], f"{name}, {case['shape']}"))
        of_ceiling = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"
        ratios = (
            [f"{statistics.median(ratio for ratio, _ in best):.2f}", f"{min(best)[0]:.2f}", min(best)[1]]
            if best
            else [*"---"]
        )
        yield [op, str(len(shares)), of_ceiling, *ratios]


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """``notes`` with an overview of each file of results between their markers."""
    parts = []
    for result in measured:
        files = f"{RESULTS.name}/{stem(result)}"
        parts += [*head(result), table(OVERVIEW, overview(result))]
        parts += [f"All rows: [Markdown]({files}.md), [csv]({files}.csv).\n", f"![share of the ceiling]({files}.png)\n"]
    return between(notes, BEGIN, END, "\n".join(parts))


def draw(result: Row, path: Path, comment: str) -> None:
    """By op a panel, by contestant a line: the share of the ceiling over the shapes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    ops = [*dict.fromkeys(case["op"] for case in result["cases"])]
    columns = min(3, len(ops))
    lines = -(-len(ops) // columns)
    figure = Figure(figsize=(7 * columns, 5 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    names = [*dict.fromkeys(row["name"] for case in result["cases"] for row in case["rows"])]
    for op, ax in zip(ops, axes, strict=False):
        shapes = [case for case in result["cases"] if case["op"] == op]
        for color, name in enumerate(names):
            shares = [{row["name"]: row for row in case["rows"]}.get(name, {}).get("share") for case in shapes]
            if any(share is not None for share in shares):
                y = [float("nan") if share is None else 100 * share for share in shares]
                ax.plot(y, "o-" if name == OURS else "o:", color=colormaps["tab20"](color), label=name, markersize=4)
        ax.set_xticks(range(len(shapes)), [case["shape"] for case in shapes], rotation=60, ha="right", fontsize=7)
        ax.set(title=op, ylabel=f"% of the ceiling in {shapes[0]['unit']}", ylim=(0, None))
        ax.legend(fontsize=7)
    for ax in axes:
        ax.set_axis_off()
    figure.savefig(path, dpi=70, metadata={"Comment": comment})


def write_beside(path: Path) -> None:
    """Of a file of results, the same as csv, Markdown and picture."""
    result = json.loads(path.read_text())
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for case in result["cases"]:
            of_case = {key: case[key] for key in ("op", "shape", "of", "unit")}
            writer.writerows(of_case | row for row in case["rows"])
    path.with_suffix(".md").write_text(tables(result))
    draw(result, path.with_suffix(".png"), digest_of([path]))


def write_report() -> None:
    """Of all files in results/."""
    files = result_files("bench")
    for path in files:
        write_beside(path)
    NOTES.write_text(with_tables(NOTES.read_text(), [json.loads(path.read_text()) for path in files]))
