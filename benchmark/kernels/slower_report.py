"""The table in NOTES.md of what was faster than ours in ``bench``: ``python -m benchmark report``."""

from collections.abc import Iterator

from benchmark.common.markdown import NOTES, Row, between, results, table
from benchmark.common.plots import OURS
from benchmark.kernels.bench_report import is_rival

BEGIN, END = "<!-- slower: written by `python -m benchmark report` -->\n", "<!-- /slower -->\n"
COLUMNS = ("op", "shape", "", "the fastest", "its us", "ours us", "slower by")
PARTS = {"forward_us": "forward", "us": "forward + backward", "wall_us": "wall"}
IN_THE_FORWARD = "fused_linear_cross_entropy"  # computes gradients in its forward, so that forwards do not compare
CHANCE = 1.01  # a smaller ratio is noise


def slower(case: Row) -> Iterator[list[str]]:
    """Yield a row for each part of a step in which another contestant is faster than ours."""
    ours = next(row for row in case["rows"] if row["name"] == OURS)
    others = [row for row in case["rows"] if is_rival(row["name"])]
    for part, text in PARTS.items():
        times = [(row[part], row["name"]) for row in others if part in row]
        if part in ours and times and not (part == "forward_us" and case["op"] == IN_THE_FORWARD):
            best, name = min(times)
            if ours[part] > best * CHANCE:
                cells = (f"{best:.1f}", f"{ours[part]:.1f}", f"{ours[part] / best - 1:.0%}")
                yield [case["op"], case["shape"], text, name, *cells]


def content(measured: list[Row]) -> str:
    """Return, by GPU, the number of shapes and the rows in which ours is not the fastest."""
    parts = []
    for result in measured:
        rows = [[*slower(case)] for case in result["cases"]]
        kernels = sum(any(cells[2] != PARTS["wall_us"] for cells in few) for few in rows)
        text = f"{result['gpu']}, {result['date']}: by the time of the kernels a contestant is faster for {kernels} of"
        parts.append(f"{text} {len(rows)} shapes.\n")
        parts += [table(COLUMNS, [row for few in rows for row in few])] * any(rows)
    return "\n".join(parts)


def with_table(notes: str, measured: list[Row]) -> str:
    """Return ``notes`` with the table between its markers."""
    return between(notes, BEGIN, END, content(measured))


def write_report() -> None:
    NOTES.write_text(with_table(NOTES.read_text(), results("bench")))
