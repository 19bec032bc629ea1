"""Files of results, and their way into Markdown."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FOLDER = Path(__file__).parents[1]
README, FIGURES = FOLDER.parent / "README.md", FOLDER.parent / "docs/figures.md"
NOTES, RESULTS = FOLDER / "NOTES.md", FOLDER / "results"


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def ratio(value: float | None, unit: float | None) -> float | None:
    return None if value is None or unit is None else value / unit


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]]) + "\n"


def side_by_side(corner: str, rows: Iterable[tuple[str, Mapping[str, str]]], absent: str) -> str:
    """Return a table with a row for each shape or setting, and a column for each contestant that any of them has."""
    rows = [*rows]
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    return table((corner, *names), ([what, *(cells.get(name, absent) for name in names)] for what, cells in rows))


def summary(result: Row, corner: str, rows: Iterable[tuple[str, Mapping[str, str]]], absent: str = "-") -> str:
    """Return the table of a file of results, contestants side by side."""
    return f"{result['gpu']}, {result['date']}:\n\n" + side_by_side(corner, rows, absent)


def heading(result: Row) -> list[str]:
    """Return the GPU, the date and the versions of a file of results."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    absent = [name for name, version in result["versions"].items() if version is None]
    count = f"{result['gpus']} x" if "gpus" in result else "One"
    parts = [f"### {count} {result['gpu']}, {result['date']}\n", f"{versions}.\n"]
    if state := result.get("state"):  # the GPU's clocks and power limit
        parts.append(f"{', '.join(f'{name} {value}' for name, value in state.items())}.\n")
    if absent:
        parts.append(f"Not installed, so not measured: {', '.join(absent)}.\n")
    return parts


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return ``text`` with ``content`` between the markers."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + content + end + tail


def result_files(prefix: str) -> list[Path]:
    return sorted(RESULTS.glob(f"{prefix}-*.json"))


def results(prefix: str) -> list[Row]:
    return [json.loads(path.read_text()) for path in result_files(prefix)]


def digest(prefix: str) -> str:
    """Return the digest of the files that a picture was drawn from; the picture carries it as its comment."""
    return digest_of(result_files(prefix))


def digest_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
