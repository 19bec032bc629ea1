"""The tables in NOTES.md and docs/figures.md of what ``trainers`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, results, summary, table

PREFIX = "trainers"
BEGIN = "<!-- trainers: written by `python -m benchmark trainers --report` -->\n"
END = "<!-- /trainers -->\n"
COLUMNS = ("trainer", "", "step ms", "tokens/s", "peak GiB")


def cells(setting: str, name: str, row: Row) -> list[str]:
    """Return the cells of a row; a reason replaces a missing time."""
    time = row.get("reason") or number(row["ms"], ".1f")
    return [setting, name, time, number(row.get("tokens"), ",.0f"), number(row.get("gib"), ".1f")]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    rows = (cells(text, *pair) for text, several in result["parts"].items() for pair in several.items())
    return "\n".join([*heading(result), table(COLUMNS, rows)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def overview(result: Row) -> str:
    """Return a table of tokens/s and peak GiB, or a reason: a row for each setting, a column for each contestant."""
    found = (
        (text, {name: row.get("reason") or ", ".join(cells(text, name, row)[3:]) for name, row in several.items()})
        for text, several in result["parts"].items()
        if several
    )
    return summary(result, COLUMNS[0], found)


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results(PREFIX)
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
