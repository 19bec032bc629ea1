"""The tables in NOTES.md and the README, and the picture, of what ``benchmark.losses`` measured: from results/."""

from collections.abc import Iterable, Iterator
from typing import Any

from benchmark.markdown import (
    FOLDER,
    NOTES,
    README,
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
from benchmark.markdown import results as read_results

PICTURE = RESULTS / "losses.png"
BEGIN, END = "<!-- losses: written by `python -m benchmark.losses --report` -->\n", "<!-- /losses -->\n"

GEMMS, EAGER = "three GEMMs", "torch"
ERRORS = ("loss", "dx", "dw")
FUSED_COLUMNS = ("", "ms", "of three GEMMs", "TFLOP/s", "peak MiB", *ERRORS, "dw / torch's")
PLAIN_COLUMNS = ("", "kernels ms", "GB/s", "eager wall ms", "GB/s")
# where a name stands beside its point, in points: (right, up)
OFFSETS = {
    "liger_like": (-58, -4),
    "liger_like, dw in fp32": (-110, 10),
    "torch.compile": (-72, -16),
    "CCE, exact": (7, -10),
}


def fused_table(case: Row) -> str:
    """Contestants of one shape; without the columns of errors where none were measured."""
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
    """A reason stands in the place of the kernels' time: that is what some contestants do not have."""

    def cells(row: Row) -> list[str]:
        kernel, wall = row.get("kernel_ms"), row.get("wall_ms")
        gigabytes = [None if ms is None else case["bytes"] / ms / 1e6 for ms in (kernel, wall)]
        times = row.get("reason") or number(kernel, ".3f"), number(wall, ".3f")
        return [row["name"], times[0], number(gigabytes[0], ".0f"), times[1], number(gigabytes[1], ".0f")]

    return table(PLAIN_COLUMNS, map(cells, case["rows"]))


def tables(result: Row) -> str:
    """One file of results in Markdown."""
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
    """``notes`` with the picture and the tables between their markers."""
    picture = [f"![time against peak memory]({PICTURE.relative_to(FOLDER)})\n"] if results else []
    return between(notes, BEGIN, END, "\n".join([*picture, *map(tables, results)]))


def shape(case: Row) -> str:
    kept = "" if case["kept"] == case["T"] else f", {case['kept']} labels not ignored"
    return f"T {case['T']} H {case['H']} V {case['V']}{kept}"


def costs(result: Row) -> Iterator[tuple[str, dict[str, str]]]:
    """Each shape of the fused loss, and by contestant its time and memory."""
    for case in result["fused"]:
        texts = ((row["name"], number(row.get("ms"), ".1f"), number(row.get("mib"), ".0f")) for row in case["rows"])
        yield shape(case), {name: f"{ms}, {mib}" for name, ms, mib in texts}


def overview(result: Row) -> str:
    """The costs at the first shape, with and without labels that are ignored."""
    first = shape(result["fused"][0])
    rows = [(text, cells) for text, cells in costs(result) if text.startswith(first)]
    return summary(result, "shape", rows)


def with_overview(readme: str, results: Iterable[Row]) -> str:
    """``readme`` with the overviews between the markers."""
    return between(readme, BEGIN, END, "\n".join(map(overview, results)))


def draw(ax: Any, result: Row, zoom: bool) -> None:
    """Time against memory for the first shape: all contestants, or those near the line of chunk sizes.

    Each panel names what the other one does not.
    """
    case, chunks = result["fused"][0], result["chunk_rows"]["rows"]
    points = {row["name"]: (row["mib"], row["ms"]) for row in case["rows"] if "ms" in row}
    _, floor = points.pop(GEMMS)
    line = [(row["mib"], row["ms"]) for row in chunks if "ms" in row]
    x_max, y_max = 1.15 * max(x for x, _ in line), max(1.8 * floor, 1.1 * max(y for _, y in line))
    ax.axhline(floor, color="black", linestyle="--", linewidth=1)
    ax.plot(*zip(*line, strict=True), "o-", color="tab:blue", markersize=4)
    for name, (x, y) in points.items():
        ours = name.startswith("liger_like")
        ax.plot(x, y, "s" if ours else "o", color="tab:blue" if ours else "tab:red", markersize=6)
        if (x < x_max and y < y_max) == zoom:
            ax.annotate(name, (x, y), OFFSETS.get(name, (7, 4)), textcoords="offset points")
    if zoom:
        ax.set(xlim=(0, x_max), ylim=(0.9 * floor, y_max), title="the same, near the lower left corner")
        ax.annotate(GEMMS, (0.02 * x_max, floor), (0, -13), textcoords="offset points")
        for row in chunks:
            if "ms" in row:
                ax.annotate(row["name"], (row["mib"], row["ms"]), (4, 5), textcoords="offset points")
    else:
        ax.set(xlim=(0, 1.2 * max(x for x, _ in points.values())), ylim=(0, 1.1 * max(y for _, y in points.values())))
        ax.set_title(f"{result['gpu']}: T {case['T']}, H {case['H']}, V {case['V']}")
    ax.set(xlabel="peak memory above the inputs, MiB", ylabel="forward + backward, ms")


def write_report() -> None:
    """Write the tables, and the picture with a row of two panels for each file of results."""
    results = read_results("losses")
    NOTES.write_text(with_tables(NOTES.read_text(), results))
    README.write_text(with_overview(README.read_text(), results))
    if not results:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5 * len(results)), layout="constrained")
    for result, axes in zip(results, figure.subplots(len(results), 2, squeeze=False), strict=True):
        for ax, zoom in zip(axes, (False, True), strict=True):
            draw(ax, result, zoom)
    figure.savefig(PICTURE, dpi=120, metadata={"Comment": digest("losses")})
