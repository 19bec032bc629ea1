"""The tables in NOTES.md and the README of what ``training`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import NOTES, README, Row, between, heading, number, results, summary, table

BEGIN = "<!-- training: written by `python -m benchmark training --report` -->\n"
END = "<!-- /training -->\n"

COLUMNS = ("model", "", "step ms", "tokens/s", "peak GiB")


def cells(setting: str, row: Row) -> list[str]:
    """Return the cells of a row; a reason replaces a missing time."""
    time = row.get("reason") or number(row["ms"], ".1f")
    return [setting, row["name"], time, number(row.get("tokens"), ",.0f"), number(row.get("gib"), ".1f")]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    rows = (cells(setting, row) for setting, several in result["settings"].items() for row in several)
    forms = (
        (text, row["name"], number(row["ms"], ".2f")) for text, several in result["forms"].items() for row in several
    )
    what = "What one model may fuse, in turns:\n"
    return "\n".join([*heading(result), table(COLUMNS, rows), what, table(COLUMNS[:3], forms)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def overview(result: Row) -> str:
    """Return a table of tokens/s and peak GiB, or a reason: a row for each setting, a column for each contestant."""
    found = (
        (setting, {row["name"]: row.get("reason") or ", ".join(cells(setting, row)[3:]) for row in several})
        for setting, several in result["settings"].items()
    )
    return summary(result, COLUMNS[0], found, absent="")


def with_overview(readme: str, measured: Iterable[Row]) -> str:
    """Return ``readme`` with the overviews between the markers."""
    return between(readme, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results("training")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    README.write_text(with_overview(README.read_text(), measured))
