"""Writes what ``testing.SPECS`` and results/ say of the ops into docs/ops.md and NOTES.md:
``python -m benchmark report``.
"""

from benchmark.common.markdown import between, table
from benchmark.kernels import ops_report, slower_report
from liger_like import testing

BEGIN, END = "<!-- ops: written by `python -m benchmark report` -->\n", "<!-- /ops -->\n"


def op_table() -> str:
    """Return the ops in Markdown: name, formula, paper."""
    rows = ((f"`{spec.name}`", f"`{spec.formula}`", ops_report.paper(spec)) for spec in testing.SPECS)
    return table(("op", "what it computes", "paper"), rows)


def with_table(page: str) -> str:
    """Return ``page`` with the table of ops between its markers."""
    return between(page, BEGIN, END, op_table())


def main() -> None:
    ops_report.PAGE.write_text(ops_report.with_ops(with_table(ops_report.PAGE.read_text())))
    slower_report.write_report()
