"""The tables in NOTES.md and docs/figures.md of what ``memory_bound`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, ratio, results, summary, table

BEGIN = "<!-- memory-bound: written by `python -m benchmark memory_bound --report` -->\n"
END = "<!-- /memory-bound -->\n"

COLUMNS = ("shape", "", "forward us", "GB/s", "forward + backward us", "GB/s", "eager wall us", "peak MiB")
HOST_COLUMNS = ("op", "", "forward us", "forward + backward us", "of an empty op")
EMPTY = "empty, with the launches of liger_like"  # the name of the row
SHAPES = "16384 x 4096", "16384 x 14336", "B 4 S 4096 H 32 Hk 8 D 128"  # of Llama-3-8B


def cells(case: Row, row: Row) -> list[str]:
    """Return the cells of a row; a reason replaces the first missing time."""
    times = [row.get(key) for key in ("forward_us", "us")]
    texts = []
    for us, moved in zip(times, (case["forward_bytes"], case["bytes"]), strict=True):
        texts += [number(us, ".1f"), number(ratio(moved / 1e3, us), ".0f")]
    if times[0] is None:
        texts[0] = row["reason"]
    wall = number(row.get("wall_us"), ".1f"), number(row.get("mib"), ".0f")
    return [case["shape"], row["name"], *texts, *wall]


def host_cells(row: Row, rows: Iterable[Row]) -> list[str]:
    """Return the cells of a row, with its time over that of an empty op with as many inputs and launches."""
    times = [number(row.get(key), ".1f") for key in ("forward_us", "us")]
    empty = next((other.get("us") for other in rows if other["op"] == row["op"] and other["name"] == EMPTY), None)
    return [row["op"], row["name"], row.get("reason", times[0]), times[1], number(ratio(row.get("us"), empty), ".2f")]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for op in dict.fromkeys(case["op"] for case in result["ops"]):
        rows: Iterable[list[str]] = (
            cells(case, row) for case in result["ops"] if case["op"] == op for row in case["rows"]
        )
        parts += [f"{op}:\n", table(COLUMNS, rows)]
    parts += ["Time on the host:\n", table(HOST_COLUMNS, (host_cells(row, result["host"]) for row in result["host"]))]
    return "\n".join(parts)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def overview(result: Row) -> str:
    """Return a table of GB/s of forward and backward: a row for each op at one shape, a column for each contestant."""
    rows = (
        (f"{case['op']}, {case['shape']}", {row["name"]: cells(case, row)[5] for row in case["rows"]})
        for case in result["ops"]
        if case["shape"] in SHAPES
    )
    return summary(result, "op", rows)


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results("memory-bound")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
