"""MUTANTS.md: the bugs that ``mutants.py`` has planted, and what became of them."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("MUTANTS.md")
CAUGHT, SURVIVED, TIMED_OUT, NEEDS_GPU = "caught", "SURVIVED", "timed out", "needs a GPU"
HEAD = "| file | bug | fate | by |\n|---|---|---|---|\n"
PIPE = "&#124;"  # a plain pipe would end the table cell
Key = tuple[str, str]


class Fate(NamedTuple):
    """The fate of a bug, and the first test that failed for it."""

    fate: str
    by: str = ""


def written(fates: dict[Key, Fate], keys: list[Key]) -> str:
    """The score, and a row for each of the bugs ``keys`` (file, why) whose fate is known."""
    known = {key: fates[key] for key in keys if key in fates}
    count = Counter(fate.fate for fate in known.values())
    score = f"# {count[CAUGHT]} of {len(known) - count[NEEDS_GPU]} planted bugs caught"
    others = {**count, "not planted yet": len(keys) - len(known)}
    rest = [f"{n} {fate}" for fate, n in others.items() if n and fate != CAUGHT]
    rows = (" | ".join(cell.replace("|", PIPE) for cell in (*key, *fate)) for key, fate in known.items())
    about = "Written by `make mutants`: a bug, and the first test that failed for it.\n"
    return "\n".join([", ".join([score, *rest]) + "\n", about, HEAD + "".join(f"| {row} |\n" for row in rows)])


def read(text: str) -> dict[Key, Fate]:
    """The fates that ``written`` has written."""
    rows = (row[2:-2].split(" | ") for row in text.partition(HEAD)[2].splitlines())
    cells = ([cell.strip().replace(PIPE, "|") for cell in row] for row in rows)
    return {(file, why): Fate(*fate) for file, why, *fate in cells}


def known() -> dict[Key, Fate]:
    """The fates in MUTANTS.md."""
    return read(LIST.read_text()) if LIST.exists() else {}


def keep(key: Key, fate: Fate, keys: list[Key]) -> None:
    """Write a fate down; what a GPU has told stays where there is none."""
    fates = known()
    if fate.fate != NEEDS_GPU or key not in fates:
        fates[key] = fate
    LIST.write_text(written(fates, keys))
