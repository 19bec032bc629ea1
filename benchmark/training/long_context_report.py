"""The tables in NOTES.md of what ``long_context`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.common.markdown import NOTES, Row, between, heading, number, ratio, results, table

BEGIN = "<!-- long_context: written by `python -m benchmark long_context --report` -->\n"
END = "<!-- /long_context -->\n"

UNIT = "liger_like"  # the contestant whose time is 1
COLUMNS = ("Llama-3-8B", "", "step ms", "tokens/s", f"time / {UNIT}'s", "GPU GiB", "host GiB", "waited ms")


def cells(setting: str, name: str, row: Row, unit: float | None) -> list[str]:
    """Return the cells of a row; a reason replaces a missing time."""
    time = row.get("reason") or number(row["ms"], ",.0f")
    relative = number(ratio(row.get("ms"), unit), ".3f")
    figures = (("gib", ".1f"), ("host", ".2f"), ("waited", ".1f"))
    rest = [number(row.get(key), spec) for key, spec in figures]
    return [setting, name, time, number(row.get("tokens"), ",.0f"), relative, *rest]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    if copied := result.get("copies"):
        rows = ((name, number(row.get("GB/s"), ".1f"), number(row["TFLOP/s"], ".0f")) for name, row in copied.items())
        parts += ["Copies of 1 GiB, and matrix products beside them:\n"]
        parts += [table(("", "GB/s", "products, TFLOP/s"), rows)]
    rows_of_steps = (
        cells(setting, name, row, several.get(UNIT, {}).get("ms"))
        for setting, several in result["settings"].items()
        for name, row in several.items()
    )
    return "\n".join([*parts, "Training steps:\n", table(COLUMNS, rows_of_steps)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def write_report() -> None:
    NOTES.write_text(with_tables(NOTES.read_text(), results("long-context")))
