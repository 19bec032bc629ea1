"""The tables in NOTES.md of what ``benchmark.sharded`` measured, from the files in results/."""

from collections.abc import Iterable

from benchmark.markdown import NOTES, Row, between, heading, number, ratio, results, table

BEGIN = "<!-- sharded: written by `python -m benchmark.sharded --report` -->\n"
END = "<!-- /sharded -->\n"

TITLES = {
    "fsdp": "Training steps, FSDP2",
    "loss": "The loss of a head whose words are spread",
    "context": "Attention of a sequence that is spread",
    "longest": "The longest sequence of a training step",
}
COLUMNS = {
    "fsdp": ("a GPU's batch", "", "step ms", "tokens/s", "peak GiB"),
    "loss": ("", "ms", "peak MiB", "bytes a logit", "loss"),
    "context": ("", "forward ms", "TFLOP/s a GPU", "of one GPU's", "both ms", "TFLOP/s a GPU", "of one GPU's", "error"),
    "longest": ("", "tokens", "peak GiB", "the next length"),
}


def fsdp_cells(name: str, row: Row, gpus: int) -> list[str]:
    time = row.get("reason") or number(row["ms"], ",.0f")
    return [row["setting"], name, time, number(row.get("tokens"), ",.0f"), number(row.get("gib"), ".1f")]


def loss_cells(name: str, row: Row, gpus: int) -> list[str]:
    time = row.get("reason") or number(row["ms"], ".1f")
    return [name, time, number(row.get("mib"), ",.0f"), number(row.get("bytes"), ".2f"), number(row.get("loss"), ".4f")]


def context_cells(name: str, row: Row, gpus: int) -> list[str]:
    """The share is that of what as many GPUs would do if each worked alone."""
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


CELLS = {"fsdp": fsdp_cells, "loss": loss_cells, "context": context_cells, "longest": longest_cells}


def tables(result: Row) -> str:
    """One file of results in Markdown."""
    parts = heading(result)
    for part, title in TITLES.items():
        if contestants := result["parts"].get(part):
            settings = zip(*contestants.values(), strict=True)
            rows = (pair for several in settings for pair in zip(contestants, several, strict=True))
            parts += [f"{title}:\n", table(COLUMNS[part], (CELLS[part](*pair, result["gpus"]) for pair in rows))]
    return "\n".join(parts)


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """``notes`` with the tables between their markers."""
    return between(notes, BEGIN, END, "\n".join(map(tables, measured)))


def write_report() -> None:
    NOTES.write_text(with_tables(NOTES.read_text(), results("sharded")))
