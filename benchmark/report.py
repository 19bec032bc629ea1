"""Writes the README's table of ops from ``testing.SPECS``: ``python -m benchmark.report``."""

from pathlib import Path

from liger_like import testing

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- ops: written by `python -m benchmark.report` -->\n", "<!-- /ops -->\n"


def op_table() -> str:
    """The ops in Markdown: name, formula, paper."""
    lines = ["| op | what it computes | paper |", "|---|---|---|"]
    for spec in testing.SPECS:
        formula = spec.formula.replace("|", "\\|")
        lines.append(
            f"| `{spec.name}` | `{formula}` | [{spec.paper}](https://arxiv.org/abs/{spec.paper.partition(':')[2]}) |"
        )
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """``readme`` with the table of today between its markers."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + op_table() + END + tail


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
