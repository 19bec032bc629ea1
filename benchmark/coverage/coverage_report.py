"""The tables in COVERAGE.md and the sentence in the README of what ``coverage`` found."""

import json
import textwrap
from collections import Counter

from benchmark.common.markdown import FOLDER, RESULTS, Row, between, table

COVERAGE, README = FOLDER / "coverage/COVERAGE.md", FOLDER.parent / "README.md"
BEGIN, END = "<!-- coverage: written by `python -m benchmark coverage --report` -->\n", "<!-- /coverage -->\n"
STATUSES = ("exact", "partly", "wrong", "skipped")
KINDS = {"ForCausalLM": "causal", "ForConditionalGeneration": "conditional generation"}
# words of pattern names: the column, first match
COLUMNS = {
    "loss": ("lm_head",),
    "RoPE": ("rope",),
    "norm": ("norm",),
    "MLP": ("mlp", "expert"),
    "router": ("router",),
    "attention": ("attention",),
}


def column_of(pattern: str) -> str:
    return next(column for column, words in COLUMNS.items() if any(word in pattern for word in words))


def counts(rows: list[Row], suffix: str) -> Counter[str]:
    return Counter(row["status"] for row in rows if row["name"].endswith(suffix))


def cells(row: Row, suffix: str) -> list[str]:
    patched: Counter[str] = Counter()
    for pattern, count in row.get("patched", {}).items():
        patched[column_of(pattern)] += count
    left = [f"{cls} ({count}): {reason}" for _, cls, count, reason in row.get("left", [])]
    why = "; ".join(filter(None, [row["why"], *left])).replace("transformers.models.", "")
    status = row["status"] + ", with images" * row.get("images", False)
    return [row["name"].removesuffix(suffix), status, *(str(patched[c] or "-") for c in COLUMNS), why]


def tables(result: Row) -> str:
    parts = []
    for suffix, kind in KINDS.items():
        rows = [cells(row, suffix) for row in result["rows"] if row["name"].endswith(suffix)]
        heads = (suffix, "", *COLUMNS, "left alone, and why")
        parts += [f"## {kind.capitalize()}, transformers {result['transformers']}\n", table(heads, rows)]
    return "\n".join(parts)


def sentence(result: Row) -> str:
    """Return one sentence with the counts."""
    causal, others = (counts(result["rows"], suffix) for suffix in KINDS)
    run = [count.total() - count["skipped"] for count in (causal, others)]
    seeing = sum(row.get("images", False) for row in result["rows"] if row["name"].endswith([*KINDS][1]))
    text = (
        f"transformers {result['transformers']} has {causal.total()} causal language models. {run[0]} of them can be "
        f"built tiny from their default config and run: {causal['exact']} are exact with loss, norms, RoPE and MLP "
        f"patched wherever they have them, {causal['partly']} are exact with some of these left alone and reported. "
        f"It has {others.total()} classes for conditional generation. {run[1]} of them run, {seeing} with images and "
        f"most others on text alone: {others['exact']} and {others['partly']} are exact in these two ways. "
        f"{causal['wrong'] + others['wrong']} are wrong."
    )
    return textwrap.fill(text, 120) + "\n"


def with_tables(text: str, result: Row) -> str:
    return between(text, BEGIN, END, tables(result))


def with_sentence(readme: str, result: Row) -> str:
    return between(readme, BEGIN, END, sentence(result))


def read() -> Row:
    """Return the result of the last run of all classes."""
    return json.loads((RESULTS / "coverage.json").read_text())  # type: ignore[no-any-return]


def write_report() -> None:
    result = read()
    COVERAGE.write_text(with_tables(COVERAGE.read_text(), result))
    README.write_text(with_sentence(README.read_text(), result))
