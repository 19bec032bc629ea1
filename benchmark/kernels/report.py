"""Writes what ``testing.SPECS`` and results/ say of the ops into README, docs/ops.md and NOTES.md:
``python -m benchmark report``.
"""

from benchmark.common.markdown import README, between, table
from benchmark.kernels import ops_report, slower_report
from liger_like import testing

BEGIN, END = "<!-- ops: written by `python -m benchmark report` -->\n", "<!-- /ops -->\n"


def op_table() -> str:
    """The ops in Markdown: name, formula, paper."""
    rows = ((f"`{spec.name}`", f"`{spec.formula}`", ops_report.paper(spec)) for spec in testing.SPECS)
    return table(("op", "what it computes", "paper"), rows)


def with_table(readme: str) -> str:
    """``readme`` with the table of today between its markers."""
    return between(readme, BEGIN, END, op_table())


def main() -> None:
    README.write_text(with_table(README.read_text()))
    ops_report.PAGE.write_text(ops_report.with_ops(ops_report.PAGE.read_text()))
    slower_report.write_report()
