"""The tables in NOTES.md and docs/figures.md of what ``attention`` measured, from the files in results/."""

from collections.abc import Iterable, Iterator

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, ratio, results, summary, table

BEGIN = "<!-- attention: written by `python -m benchmark attention --report` -->\n"
END = "<!-- /attention -->\n"

COLUMNS = ("shape", "", "forward us", "TFLOP/s", "backward us", "TFLOP/s", "both TFLOP/s", "peak MiB")


def cells(case: Row, row: Row) -> list[str]:
    """Return the cells of a row: the backward is both passes less the forward; a reason replaces missing times."""
    forward, both = row.get("forward_us"), row.get("us")
    if both is None:
        return [case["shape"], row["name"], row["reason"], *"-----"]
    texts = []
    for us, products in ((forward, 2), (both - forward, 5), (both, 7)):
        texts += [number(us, ".1f"), number(ratio(case["flops"] * products / 7 / 1e6, us), ".0f")]
    return [case["shape"], row["name"], *texts[:4], texts[5], number(row["mib"], ".0f")]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    rows = (cells(case, row) for case in result["cases"] for row in case["rows"])
    return "\n".join([*heading(result), table(COLUMNS, rows)])


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def speeds(result: Row) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each shape, and by contestant the TFLOP/s of the forward and of the backward."""
    for case in result["cases"]:
        texts = (cells(case, row) for row in case["rows"])
        yield case["shape"], {name: f"{forward}, {backward}" for _, name, _, forward, _, backward, *_ in texts}


def overview(result: Row) -> str:
    """Return the speeds under a causal mask."""
    causal = (row for row in speeds(result) if "causal" in row[0])
    return summary(result, COLUMNS[0], causal)


def with_overview(page: str, measured: Iterable[Row]) -> str:
    """Return ``page`` with the overviews between the markers."""
    return between(page, BEGIN, END, "\n".join(map(overview, measured)))


def write_report() -> None:
    measured = results("attention")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
