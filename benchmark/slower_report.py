"""The table in NOTES.md of what is faster than ours, from the files in results/: ``python -m benchmark.report``."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmark.losses_report import GEMMS
from benchmark.markdown import NOTES, Row, between, results, table
from benchmark.ops_report import fused_shape

BEGIN, END = "<!-- slower: written by `python -m benchmark.report` -->\n", "<!-- /slower -->\n"
OURS = "liger_like"
COLUMNS = ("op", "shape", "", "contestant", "ours us", "theirs us", "slower by")
PARTS = {"forward_us": "forward", "us": "forward + backward"}


class Case(NamedTuple):
    """An op and a shape on a GPU, and by contestant the us of its kernels; GEMMs alone are no contestant."""

    gpu: str
    op: str
    shape: str
    times: dict[str, Row]


def cases() -> Iterator[Case]:
    """All that ``benchmark.memory_bound``, ``losses`` and ``attention`` have measured."""
    for result in results("memory-bound"):
        for case in result["ops"]:
            yield Case(result["gpu"], case["op"], case["shape"], {row["name"]: row for row in case["rows"]})
    for result in results("losses"):
        for case in result["fused"]:
            rows = {row["name"]: {"us": in_us(row.get("ms"))} for row in case["rows"] if row["name"] != GEMMS}
            yield Case(result["gpu"], "fused_linear_cross_entropy", fused_shape(case), rows)
        case = result["cross_entropy"]
        rows = {row["name"]: {"us": in_us(row.get("kernel_ms"))} for row in case["rows"]}
        yield Case(result["gpu"], "cross_entropy", f"{case['M']} x {case['V']}", rows)
    for result in results("attention"):
        for case in result["cases"]:
            yield Case(result["gpu"], "attention", case["shape"], {row["name"]: row for row in case["rows"]})


def in_us(ms: float | None) -> float | None:
    return None if ms is None else 1e3 * ms


def slower(case: Case) -> Iterator[list[str]]:
    """A row for each contestant and part of a step in which ours takes longer."""
    ours = case.times[OURS]
    for part, text in PARTS.items():
        for name, theirs in case.times.items():
            us, best = ours.get(part), theirs.get(part)
            if not name.startswith(OURS) and us is not None and best is not None and best < us:
                yield [case.op, case.shape, text, name, f"{us:.1f}", f"{best:.1f}", f"{us / best - 1:.1%}"]


def content(measured: list[Case]) -> str:
    """By GPU, how many shapes there are and the rows of those in which ours is not the fastest."""
    parts = []
    for gpu in dict.fromkeys(case.gpu for case in measured):
        here = [case for case in measured if case.gpu == gpu]
        rows = [[*slower(case)] for case in here]
        count = sum(map(bool, rows))
        parts.append(f"{gpu}: a contestant is faster for {count} of {len(here)} shapes.\n")
        parts += [table(COLUMNS, [row for several in rows for row in several])] * bool(count)
    return "\n".join(parts)


def with_table(notes: str, measured: list[Case]) -> str:
    """``notes`` with the table between its markers."""
    return between(notes, BEGIN, END, content(measured))


def write_report() -> None:
    NOTES.write_text(with_table(NOTES.read_text(), [*cases()]))
