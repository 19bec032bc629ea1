"""The tables in NOTES.md of what ``long_context`` measured, from the files in results/."""

from collections.abc import Iterable, Mapping

from benchmark.common.markdown import NOTES, Row, between, heading, number, ratio, results, table

BEGIN = "<!-- long_context: written by `python -m benchmark long_context --report` -->\n"
END = "<!-- /long_context -->\n"

UNIT = "liger_like"  # the contestant whose time is 1
OFFLOADED = ", offloaded"  # in the name of a contestant; the same without it is its own unit
COLUMNS = (
    "Llama-3-8B",
    "",
    "step ms",
    "tokens/s",
    "of floor",
    f"time / {UNIT}'s",
    "by offloading",
    "GPU GiB",
    "host GiB",
    "waited ms",
)


def cells(setting: str, name: str, several: Mapping[str, Row]) -> list[str]:
    """Return the cells of a row; a reason replaces a missing time."""
    row = several[name]
    ms = row.get("ms")
    unit, resident = (several.get(each, {}).get("ms") for each in (UNIT, name.replace(OFFLOADED, "")))
    added = ratio(ms, resident if OFFLOADED in name else None)
    return [
        setting,
        name,
        row.get("reason") or number(ms, ",.0f"),
        number(row.get("tokens"), ",.0f"),
        number(ratio(row.get("floor"), ms), ".0%"),
        number(ratio(ms, unit), ".3f"),
        number(None if added is None else added - 1, "+.1%"),
        *(number(row.get(key), spec) for key, spec in (("gib", ".1f"), ("host", ".2f"), ("waited", ".1f"))),
    ]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    if copied := result.get("copies"):
        rows = ((name, number(row.get("GB/s"), ".1f"), number(row["TFLOP/s"], ".0f")) for name, row in copied.items())
        parts += ["Copies of 1 GiB, and matrix products beside them:\n"]
        parts += [table(("", "GB/s", "products, TFLOP/s"), rows)]
    rows_of_steps = (
        cells(setting, name, several) for setting, several in result["settings"].items() for name in several
    )
    return "\n".join([*parts, "Training steps:\n", table(COLUMNS, rows_of_steps)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def write_report() -> None:
    NOTES.write_text(with_tables(NOTES.read_text(), results("long-context")))
