"""The docs say what is so: their Python runs, their figures are those of results/, the messages they quote exist."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from benchmark.kernels import ops_report
from liger_like import testing
from liger_like.runtime import support
from liger_like.runtime.versions import TESTED

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "PACKAGE.md", ROOT / "CONTRIBUTING.md", *DOCS]
SOURCES = [path for folder in ("liger_like", "patches") for path in (ROOT / folder).rglob("*.py")]
BLOCK = re.compile(r"```python( fragment)?\n(.*?)```", re.DOTALL)
MAKERS = {"UserWarning": "warn", "RuntimeWarning": "warn"}  # warning -> the function that issues it
by_path = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def check_names(block):
    """The imports of ``block`` exist, and functions of this package take the arguments of its calls."""
    tree, names = ast.parse(block), {}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if re.fullmatch(r"[\w.]+", called) and called.partition(".")[0] in names:
            function, keywords = eval(called, names), {k.arg: k.value for k in call.keywords if k.arg}
            if function.__module__.startswith("liger_like"):
                inspect.signature(function).bind(*call.args, **keywords)


@by_path
def test_python(page, monkeypatch):
    """Run the blocks of a page in order, as a reader without a GPU would; of a fragment, check the names."""
    monkeypatch.setattr(support, "INTERPRET", False)
    names = {}
    for fragment, block in BLOCK.findall(page.read_text()):
        code = compile(block, page.name, "exec")
        if fragment:
            check_names(block)
        else:
            exec(code, names)


@pytest.mark.parametrize(
    "block",
    ["from liger_like import no", "import liger_like\nliger_like.no(x)", "from liger_like import rope\nrope(n=1)"],
)
def test_names_that_are_not_there_are_found(block):
    with pytest.raises((ImportError, AttributeError, TypeError)):
        check_names(block)


@by_path
def test_links_and_commands(page):
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE):
        assert target in targets
    for module in re.findall(r"python3? -m ((?:benchmark|examples|liger_like)[\w.]*)", text):
        assert importlib.util.find_spec(module), module


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert all(f"]({page.name})" in index for page in DOCS if page.stem != "README")


def test_the_newest_versions_are_those_that_are_tested():
    text = " ".join((ROOT / "docs/install.md").read_text().split())
    assert f"torch {TESTED['torch'][1]} with Triton {TESTED['triton'][1]}" in text


def test_every_op_has_its_section():
    text = ops_report.PAGE.read_text()
    assert ops_report.with_ops(text) == text, "run python -m benchmark report"
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for spec in testing.SPECS:
        assert ops_report.BEGIN.format(spec.name) in sections[spec.name]
        assert any(f"liger_like.{spec.name}(" in block for _, block in BLOCK.findall(sections[spec.name]))


OUT_OF_MEMORY = {"name": "theirs", "reason": "out of memory"}
OURS = {"name": "ours", "forward_us": 10.0, "us": 60.0, "mib": 7.0, "ms": 3.0}
MEASURED = {
    "ops": [
        {"op": op, "shape": "3 x 4", "forward_bytes": 1, "bytes": 3, "rows": [OURS, OUT_OF_MEMORY]}
        for op in ("geglu", "geglu_exact", "swiglu")
    ],
    "fused": [{"T": 9, "H": 2, "V": 3, "kept": kept, "rows": [OURS, OUT_OF_MEMORY]} for kept in (9, 4)],
    "cross_entropy": {
        "M": 3,
        "V": 4,
        "rows": [{"name": "ours", "kernel_ms": 1.0, "wall_ms": 2.0}, {"name": "theirs", "wall_ms": 3.0}],
    },
    "cases": [{"shape": shape, "flops": 7e9, "rows": [OURS, OUT_OF_MEMORY]} for shape in ("S 8", "8 documents")],
}


@pytest.mark.parametrize(
    ("op", "rows"),
    [
        ("geglu", ["3 x 4 | 60.0, 7 | -, -", "3 x 4, exact | 60.0, 7 | -, -"]),
        ("cross_entropy", ["3 x 4 | 1.00, 2.00 | -, 3.00"]),
        (
            "fused_linear_cross_entropy",
            ["T 9 H 2 V 3 | 3.0, 7 | -, -", "T 9 H 2 V 3, 4 labels not ignored | 3.0, 7 | -, -"],
        ),
        ("flash_attention", ["S 8 | 200, 100 | -, -"]),
        ("flash_attention_varlen", ["8 documents | 200, 100 | -, -"]),
    ],
)
def test_figures(op, rows):
    figures = ops_report.FIGURES.get(op, ops_report.MEMORY_BOUND)
    result = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.0", "peer": None}, **MEASURED}
    _, where, *table = ops_report.in_markdown(op, figures, result).splitlines()
    assert where.startswith("One GPU, 2026-01-01, bf16; torch 2.0. In")
    assert table == ["", "| shape | ours | theirs |", "|---|---|---|", *(f"| {row} |" for row in rows)]


def test_an_op_that_was_not_measured_has_no_table():
    assert ops_report.in_markdown("rope", ops_report.MEMORY_BOUND, MEASURED) == ""


def said(node, by=""):
    """The strings of ``node``, what is filled in as None, each with the name of what is called with it."""
    if isinstance(node, ast.JoinedStr):
        yield by, [part.value if isinstance(part, ast.Constant) else None for part in node.values]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield by, [node.value]
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # skip docstrings
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        for child in ast.iter_child_nodes(node):
            yield from said(child, called)


def pattern(parts):
    """Return a pattern for the first line of the text made of ``parts``."""
    return re.compile("".join(".+" if part is None else re.escape(part) for part in parts).partition("\\\n")[0])


def is_made(line, patterns):
    """Return True if the sources make ``line``, for the error or warning that it begins with, if any."""
    error, message = re.fullmatch(r"(?:(\w+(?:Error|Warning)): )?(.*)", line).groups()
    makers = {by for by, known in patterns if known.fullmatch(message)}
    return bool(makers if error is None else makers & {MAKERS.get(error, error), ""})


def test_messages_are_those_of_the_sources():
    messages = [(by, parts) for path in SOURCES for by, parts in said(ast.parse(path.read_text()))]
    patterns = [(by, pattern(parts)) for by, parts in messages if sum(len(part or "") for part in parts) >= 12]
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs/troubleshooting.md").read_text(), re.DOTALL)
    quoted = [line for block in blocks for line in block.splitlines()]
    assert len(quoted) > 40
    assert [line for line in quoted if not is_made(line, patterns)] == []
    assert is_made("ValueError: eps must not be negative, got -1", patterns)
    assert not is_made("TypeError: eps must not be negative, got -1", patterns)
    assert not is_made("ValueError: eps must be positive, got -1", patterns)
