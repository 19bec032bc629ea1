"""The tables in NOTES.md and docs/figures.md of what ``post_training`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, ratio, results, summary, table
from benchmark.kernels.losses_report import GEMMS

PREFIX = "post-training"
BEGIN = "<!-- post-training: written by `python -m benchmark post_training --report` -->\n"
END = "<!-- /post-training -->\n"
ERRORS = ("logprob", "entropy", "loss", "dx")


def part_table(rows: dict[str, Row]) -> str:
    """Return the table of the contestants of one case, with columns for the errors that any of them has."""
    floor = rows.get(GEMMS, {}).get("ms")
    known = [key for key in ERRORS if any(key in row.get("errors", {}) for row in rows.values())]

    def cells(name: str, row: Row) -> list[str]:
        ms, found = row.get("ms"), row.get("errors", {})
        costs = [row.get("reason") or number(ms, ".1f"), number(ratio(ms, floor), ".2f"), number(row.get("mib"), ".0f")]
        return [name, *costs, *(number(found.get(key), ".1e") for key in known)]

    columns = ("", "ms", "of three GEMMs", "peak MiB", *(f"error of {key}" for key in known))
    return table(columns, (cells(*pair) for pair in rows.items()))


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for name, rows in result["parts"].items():
        if rows:
            parts += [f"{name}:\n", part_table(rows)]
    return "\n".join(parts)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def overview(result: Row) -> str:
    """Return a table of ms and MiB, or a reason: a row for each shape and case, a column for each contestant."""
    found = (
        (
            part,
            {name: row.get("reason") or f"{row['ms']:.1f}, {number(row['mib'], '.0f')}" for name, row in rows.items()},
        )
        for part, rows in result["parts"].items()
        if rows
    )
    return summary(result, "shape, case", found, absent="")


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results(PREFIX)
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
