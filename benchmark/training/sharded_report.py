"""The tables in NOTES.md, and their gist in docs/figures.md, of what ``sharded`` measured: from results/."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from benchmark.common.markdown import FIGURES, NOTES, Row, between, heading, number, ratio, results, side_by_side, table

BEGIN = "<!-- sharded: written by `python -m benchmark sharded --report` -->\n"
END = "<!-- /sharded -->\n"

SHARE = "share of one GPU's rate"
TITLES = {
    "fsdp": "Training steps, FSDP2",
    "loss": "Vocabulary-parallel loss",
    "context": "Context-parallel attention",
    "longest": "The longest sequence that was trained, and the next one tried",
    "planned": "Training steps in the terms of `liger-like plan`",
}
COLUMNS = {
    "fsdp": ("a GPU's batch", "", "step ms", "tokens/s", "peak GiB"),
    "loss": ("", "ms", "peak MiB", "bytes a logit", "loss"),
    "context": ("", "forward ms", "TFLOP/s a GPU", SHARE, "both ms", "TFLOP/s a GPU", SHARE, "error"),
    "longest": ("", "tokens", "peak GiB", "the next length"),
    "planned": ("", "step ms", "tokens/s", "peak GiB", "reserved", "outside of torch"),
}
GIST = {"fsdp": (3, 4), "loss": (1, 2), "context": (6,), "longest": (1, 3)}  # the columns of the short table


def fsdp_cells(name: str, row: Row, gpus: int) -> list[str]:
    time = row.get("reason") or number(row["ms"], ",.0f")
    return [row["setting"], name, time, number(row.get("tokens"), ",.0f"), number(row.get("gib"), ".1f")]


def loss_cells(name: str, row: Row, gpus: int) -> list[str]:
    time = row.get("reason") or number(row["ms"], ".1f")
    return [name, time, number(row.get("mib"), ",.0f"), number(row.get("bytes"), ".2f"), number(row.get("loss"), ".4f")]


def context_cells(name: str, row: Row, gpus: int) -> list[str]:
    """Return the cells of a row. The share compares with as many GPUs that each work alone."""
    if "reason" in row:
        return [name, row["reason"], *"------"]
    cells = [name]
    for prefix, products in (("forward_ms", 2), ("ms", 7)):
        ms, alone = row[prefix], row[f"alone_{prefix}"]
        rate = row["flops"] * products / 7 / ms / gpus / 1e9
        cells += [number(ms, ".1f"), number(rate, ".0f"), number(ratio(alone / gpus, ms), ".1%")]
    return [*cells, number(row["error"], ".1e")]


def longest_cells(name: str, row: Row, gpus: int) -> list[str]:
    further = row.get("reason", "not tried")
    if row.get("next"):
        further = f"{row['next']:,}: {further}"
    return [name, number(row.get("length"), ",d"), number(row.get("gib"), ".1f"), further]


def planned_cells(name: str, row: Row, gpus: int) -> list[str]:
    sizes = (number(row.get(key), ".1f") for key in ("gib", "reserved", "outside"))
    return [name, row.get("reason") or number(row["ms"], ",.0f"), number(row.get("tokens"), ",.0f"), *sizes]


CELLS = {
    "fsdp": fsdp_cells,
    "loss": loss_cells,
    "context": context_cells,
    "longest": longest_cells,
    "planned": planned_cells,
}


def by_setting(contestants: Mapping[str, Iterable[Row]]) -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield each setting, and the row of each contestant there."""
    for rows in zip(*contestants.values(), strict=True):
        yield rows[0].get("setting", ""), dict(zip(contestants, rows, strict=True))


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = heading(result)
    for part, title in TITLES.items():
        if contestants := result["parts"].get(part):
            rows = (pair for _, several in by_setting(contestants) for pair in several.items())
            parts += [f"{title}:\n", table(COLUMNS[part], (CELLS[part](*pair, result["gpus"]) for pair in rows))]
    return "\n".join(parts)


def gist(part: str, cells: Sequence[str]) -> str:
    return "; ".join(cells[column] for column in GIST[part])


def overview(result: Row) -> str:
    """Return the main figures of each part, with contestants side by side."""
    parts = [f"{result['gpus']} x {result['gpu']}, {result['date']}.\n"]
    for part in GIST:
        title, rows = TITLES[part], []
        for setting, several in by_setting(result["parts"].get(part, {})):
            cells = {name: gist(part, CELLS[part](name, row, result["gpus"])) for name, row in several.items()}
            rows.append((f"{title}, {setting}" if setting else title, cells))
        if rows:
            parts.append(side_by_side(gist(part, COLUMNS[part]), rows, "-"))
    return "\n".join(parts)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def with_overview(page: str, measured: Collection[Row]) -> str:
    """Return ``page`` with the overview of the most GPUs between the markers."""
    most = sorted(measured, key=lambda result: result["gpus"])[-1:]
    return between(page, BEGIN, END, "".join(map(overview, most)))


def write_report() -> None:
    measured = results("sharded")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    FIGURES.write_text(with_overview(FIGURES.read_text(), measured))
