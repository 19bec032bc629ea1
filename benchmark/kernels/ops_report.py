"""What docs/ops.md says of each op: formula and paper from ``testing.SPECS``, figures from the files in results/."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from benchmark.common.markdown import FOLDER, Row, between, number, results, side_by_side
from benchmark.kernels import attention_report, losses_report, memory_bound_report
from liger_like import testing

PAGE = FOLDER.parent / "docs/ops.md"
BEGIN, END = "<!-- {0}: written by `python -m benchmark report` -->\n", "<!-- /{0} -->\n"
Case = tuple[str, dict[str, str]]


class Figures(NamedTuple):
    """The files of results, the names of their numbers, and a function of an op that returns shape and numbers by
    contestant.
    """

    prefix: str
    numbers: str
    cases: Callable[[Row, str], Iterable[Case]]


def paper(spec: testing.OpSpec) -> str:
    return f"[{spec.paper}](https://arxiv.org/abs/{spec.paper.partition(':')[2]})"


def memory_bound(result: Row, op: str) -> Iterator[Case]:
    """Return the name of the op there: the exact GELU has its own."""
    for case in result["ops"]:
        if case["op"].removesuffix("_exact") == op:
            exact = case["op"].removeprefix(op).replace("_", ", ")
            cells = (memory_bound_report.cells(case, row) for row in case["rows"])
            yield case["shape"] + exact, {name: f"{us}, {mib}" for _, name, _, _, us, _, _, mib in cells}


def cross_entropy(result: Row, op: str) -> Iterator[Case]:
    case = result[op]
    times = {
        row["name"]: f"{number(row.get('kernel_ms'), '.2f')}, {number(row.get('wall_ms'), '.2f')}"
        for row in case["rows"]
    }
    yield f"{case['M']} x {case['V']}", times


def fused_loss(result: Row, _: str) -> Iterable[Case]:
    return losses_report.costs(result)


def attention(result: Row, op: str) -> Iterator[Case]:
    """Return the shapes of the op; those of packed sequences are the other op's."""
    packed = op == "flash_attention_varlen"
    return (case for case in attention_report.speeds(result) if ("documents" in case[0]) == packed)


MEMORY_BOUND = Figures(
    "memory-bound", "us of the kernels of forward and backward, peak MiB above the inputs", memory_bound
)
ATTENTION = Figures("attention", "TFLOP/s of the forward's kernels, of the backward's", attention)
FIGURES = {
    "cross_entropy": Figures("losses", "ms of forward and backward, of their kernels and on the wall", cross_entropy),
    "fused_linear_cross_entropy": Figures(
        "losses", "ms of forward and backward, peak MiB above the inputs", fused_loss
    ),
    "flash_attention": ATTENTION,
    "flash_attention_varlen": ATTENTION,
}


def in_markdown(op: str, figures: Figures, result: Row) -> str:
    """Return a table: a row for each shape, a column for each contestant; nothing if the op was not measured."""
    cases = [*figures.cases(result, op)]
    if not cases:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    where = f"One {result['gpu']}, {result['date']}, bf16; {versions}. In each cell: {figures.numbers}."
    return f"\n{where}\n\n{side_by_side('shape', cases, '-')}"


def with_ops(page: str) -> str:
    """Return ``page`` with what is said of each op between its markers."""
    for spec in testing.SPECS:
        figures = FIGURES.get(spec.name, MEMORY_BOUND)
        measured = (in_markdown(spec.name, figures, result) for result in results(figures.prefix))
        said = f"`{spec.formula}` ({paper(spec)})\n{''.join(measured)}"
        page = between(page, BEGIN.format(spec.name), END.format(spec.name), said)
    return page
