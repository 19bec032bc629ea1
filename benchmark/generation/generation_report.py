"""The tables in NOTES.md and docs/figures.md of what ``generation`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, ratio, results, summary, table

BEGIN = "<!-- generation: written by `python -m benchmark generation --report` -->\n"
END = "<!-- /generation -->\n"
STEP_COLUMNS = ("decode step of a layer", "", "us", "TB/s")
COLUMNS = ("generation", "", "tokens/s", "step ms", "GPU ms", "floor ms", "first token s", "cold s", "peak GiB")


def _rows(result: Row, whole: bool) -> Iterable[tuple[str, str, Row]]:
    """Yield part, contestant and row, of whole generations or of decode steps."""
    for part, rows in result["parts"].items():
        if part.startswith("B ") != whole:
            yield from ((part, name, row) for name, row in rows.items())


def step_cells(part: str, name: str, row: Row) -> list[str]:
    """Return the cells of a decode step; a reason replaces a missing time."""
    speed = number(ratio(row["bytes"] / 1e6, row.get("us")), ".2f")
    return [part, name, row.get("reason") or number(row["us"], ".1f"), speed]


def cells(part: str, name: str, row: Row) -> list[str]:
    """Return the cells of a whole generation."""
    figures = {"ms": ".2f", "gpu_ms": ".2f", "floor_ms": ".2f", "first_s": ".2f", "cold_s": ".1f", "gib": ".1f"}
    tokens = row.get("reason") or number(row["tokens"], ",.0f")
    return [part, name, tokens, *(number(row.get(key), spec) for key, spec in figures.items())]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for columns, row_cells, whole in ((STEP_COLUMNS, step_cells, False), (COLUMNS, cells, True)):
        if rows := [row_cells(*row) for row in _rows(result, whole)]:
            parts.append(table(columns, rows))
    return "\n".join(parts)


def overview(result: Row) -> str:
    """Return two tables with the contestants side by side: us of decode steps, and tokens/s of generations."""
    texts = []
    for corner, whole in ((STEP_COLUMNS[0] + ", us", False), (COLUMNS[0] + ", tokens/s", True)):
        found: dict[str, dict[str, str]] = {}
        for part, name, row in _rows(result, whole):
            found.setdefault(part, {})[name] = (cells if whole else step_cells)(part, name, row)[2]
        if found:
            texts.append(summary(result, corner, found.items()))
    return "\n".join(texts)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results("generation")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
