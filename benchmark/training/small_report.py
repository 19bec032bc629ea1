"""The tables in NOTES.md and the README of what ``small`` measured, from the files in results/."""

from collections.abc import Collection, Iterable

from benchmark.common.markdown import NOTES, README, Row, between, heading, number, results, summary, table

BEGIN = "<!-- small: written by `python -m benchmark small --report` -->\n"
END = "<!-- /small -->\n"
ABOUT = """\
Small steps, which are launch-bound: ms and peak GiB (`make bench-small`; as above). "LoRA" has rank 16 on all linear
layers; "graph" is [`GraphedStep`](docs/patching.md#cuda-graphs).
"""

COLUMNS = ("setting", "", "step ms", "tokens/s", "peak GiB", "host us")
IN_README = "B 1 S 512", "B 1 S 1024, LoRA"  # ends of the names of settings


def cells(setting: str, name: str, row: Row) -> list[str]:
    """Return the cells of a row; a reason replaces a missing time."""
    return [
        setting,
        name + " (alone)" * row.get("alone", False),
        row.get("reason") or number(row["ms"], ".2f"),
        number(row.get("tokens"), ",.0f"),
        number(row.get("gib"), ".1f"),
        number(row.get("host_us"), ",.0f"),
    ]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    rows = (cells(text, *pair) for text, several in result["parts"].items() for pair in several.items())
    return "\n".join([*heading(result), table(COLUMNS, rows)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def overview(result: Row) -> str:
    """Return a table of ms and peak GiB, or a reason: a row for each setting, a column for each contestant."""
    found = (
        (text, {name: row.get("reason") or f"{row['ms']:.1f}, {row['gib']:.1f}" for name, row in several.items()})
        for text, several in result["parts"].items()
        if several and text.endswith(IN_README)
    )
    return summary(result, COLUMNS[0], found)


def with_overview(readme: str, measured: Collection[Row]) -> str:
    """Return ``readme`` with the overviews between the markers, or nothing if there are no results."""
    about = [ABOUT] if measured else []
    return between(readme, BEGIN, END, "\n".join([*about, *map(overview, measured)]))


def write_report() -> None:
    measured = results("small")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    README.write_text(with_overview(README.read_text(), measured))
