"""The tables in NOTES.md of what ``benchmark.training`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.markdown import NOTES, Row, between, heading, number, results, table

BEGIN = "<!-- training: written by `python -m benchmark.training --report` -->\n"
END = "<!-- /training -->\n"

COLUMNS = ("model", "", "step ms", "tokens/s", "peak GiB")


def cells(setting: str, row: Row) -> list[str]:
    """A reason stands in the place of a time that is missing."""
    time = row.get("reason") or number(row["ms"], ".1f")
    return [setting, row["name"], time, number(row.get("tokens"), ",.0f"), number(row.get("gib"), ".1f")]


def tables(result: Row) -> str:
    """One file of results in Markdown."""
    rows = (cells(setting, row) for setting, several in result["settings"].items() for row in several)
    forms = (
        (text, row["name"], number(row["ms"], ".2f")) for text, several in result["forms"].items() for row in several
    )
    what = "What one model may fuse, in turns:\n"
    return "\n".join([*heading(result), table(COLUMNS, rows), what, table(COLUMNS[:3], forms)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def write_report() -> None:
    NOTES.write_text(with_tables(NOTES.read_text(), results("training")))
