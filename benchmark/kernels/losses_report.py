"""Writes the tables and the picture of what ``losses`` measured into NOTES.md and docs/figures.md."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from benchmark.common import plots
from benchmark.common.markdown import (
    FIGURES,
    FOLDER,
    NOTES,
    RESULTS,
    Row,
    between,
    digest,
    heading,
    number,
    ratio,
    summary,
    table,
)
from benchmark.common.markdown import results as read_results

PICTURE = RESULTS / "losses.png"
BEGIN, END = "<!-- losses: written by `python -m benchmark losses --report` -->\n", "<!-- /losses -->\n"

GEMMS, EAGER = "three GEMMs", "torch"
ERRORS = ("loss", "dx", "dw")
FUSED_COLUMNS = ("", "ms", "of three GEMMs", "TFLOP/s", "peak MiB", *ERRORS, "dw / torch's")
COSTS = ("ms", ".1f", "forward + backward, ms"), ("mib", ",.0f", "peak memory above the inputs, MiB")
PLAIN_COLUMNS = ("", "kernels ms", "GB/s", "eager wall ms", "GB/s")


def fused_table(case: Row) -> str:
    """Return the table of the contestants of one shape, with columns of errors where some were measured."""
    rows = {row["name"]: row for row in case["rows"]}
    floor = rows.get(GEMMS, {}).get("ms")
    one_gemm = rows.get(EAGER, {}).get("errors", {}).get("dw")
    measured = any("errors" in row for row in rows.values())
    teraflop = 6 * case["kept"] * case["H"] * case["V"] / 1e12
    cells = []
    for name, row in rows.items():
        ms, errors = row.get("ms"), row.get("errors", {})
        rate = None if ms is None else teraflop / ms * 1e3
        cells.append([name, row.get("reason") or number(ms, ".1f"), number(ratio(ms, floor), ".2f")])
        cells[-1] += [number(rate, ".0f"), number(row.get("mib"), ".0f")]
        if measured:
            cells[-1] += [number(errors.get(key), ".1e") for key in ERRORS]
            cells[-1].append(number(ratio(errors.get("dw"), one_gemm), ".2f"))
    return table(FUSED_COLUMNS if measured else FUSED_COLUMNS[:5], cells)


def cross_entropy_table(case: Row) -> str:
    """Return the cells of a row; a reason replaces the kernels' time, which some contestants lack."""

    def cells(row: Row) -> list[str]:
        kernel, wall = row.get("kernel_ms"), row.get("wall_ms")
        gigabytes = [None if ms is None else case["bytes"] / ms / 1e6 for ms in (kernel, wall)]
        times = row.get("reason") or number(kernel, ".3f"), number(wall, ".3f")
        return [row["name"], times[0], number(gigabytes[0], ".0f"), times[1], number(gigabytes[1], ".0f")]

    return table(PLAIN_COLUMNS, map(cells, case["rows"]))


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for case in result["fused"]:
        title = f"fused_linear_cross_entropy, T {case['T']}, H {case['H']}, V {case['V']}"
        if case["kept"] < case["T"]:
            title += f", {case['kept']} labels not ignored"
        parts += [f"{title}:\n", fused_table(case)]
    case = result["cross_entropy"]
    parts += [f"cross_entropy, {case['M']} x {case['V']}:\n", cross_entropy_table(case)]
    return "\n".join(parts)


def with_tables(notes: str, results: list[Row]) -> str:
    """Return ``notes`` with the picture and the tables between their markers."""
    picture = [f"![time and peak memory]({PICTURE.relative_to(FOLDER)})\n"] if results else []
    return between(notes, BEGIN, END, "\n".join([*picture, *map(tables, results)]))


def shape(case: Row) -> str:
    kept = "" if case["kept"] == case["T"] else f", {case['kept']} labels not ignored"
    return f"T {case['T']} H {case['H']} V {case['V']}{kept}"


def costs(result: Row) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each shape of the fused loss, and by contestant its time and memory."""
    for case in result["fused"]:
        texts = ((row["name"], number(row.get("ms"), ".1f"), number(row.get("mib"), ".0f")) for row in case["rows"])
        yield shape(case), {name: f"{ms}, {mib}" for name, ms, mib in texts}


def overview(result: Row) -> str:
    """Return the costs at the first shape, with and without ignored labels."""
    first = shape(result["fused"][0])
    rows = [(text, cells) for text, cells in costs(result) if text.startswith(first)]
    return summary(result, "shape", rows)


def with_overview(page: str, results: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, results)))


def draw(figure: Any, result: Row) -> None:
    """Draw time and peak memory of each contestant at the first shape, and of ours at several chunk_rows."""
    case = result["fused"][0]
    rows = {row["name"]: row for row in case["rows"]}
    rows |= {f"{plots.OURS}, chunk_rows {row['name']}": row for row in result["chunk_rows"]["rows"]}
    floor = rows.pop(GEMMS)["ms"]
    names = sorted(rows, key=lambda name: rows[name].get("ms", inf))
    colors = [(plots.color(n), 0.45 if n.startswith(f"{plots.OURS},") else 1) for n in names]  # our others pale
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (key, spec, label) in zip(axes, COSTS, strict=True):
        bars = ax.barh(names, [rows[name].get(key, 0) for name in names], color=colors)
        ax.bar_label(bars, [number(rows[n][key], spec) if key in rows[n] else "failed" for n in names], padding=4)
        ax.set(xlabel=label, xlim=(0, 1.15 * max(row.get(key, 0) for row in rows.values())))
    axes[0].axvline(floor, color="black", linestyle="--")
    axes[0].set_title(f"the line: three GEMMs, {floor:.1f} ms", loc="left", weight="normal")
    axes[0].invert_yaxis()
    text = f"fused_linear_cross_entropy, T {case['T']}, H {case['H']}, V {case['V']}, bf16 (left is better)"
    plots.title(figure, text, result)


def figure(results: list[Row]) -> Any:
    return plots.drawn(draw, results, 5.5)


def write_report() -> None:
    """Write the tables, and the picture."""
    results = read_results("losses")
    NOTES.write_text(with_tables(NOTES.read_text(), results))
    FIGURES.write_text(with_overview(FIGURES.read_text(), results))
    if results:
        plots.save(figure(results), PICTURE, digest("losses"))
