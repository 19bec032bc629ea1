"""The package: what an import costs, the names it has, and the size of its parts."""

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import liger_like
from benchmark.kernels import ops_report, report

ROOT = Path(__file__).parents[2]
FOLDERS = ("liger_like", "patches", "benchmark", "examples", "test")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_command_line_without_its_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from liger_like.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'liger-like[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_import_is_lean() -> None:
    code = "import sys, torch, liger_like; print('transformers' in sys.modules, torch.cuda.is_initialized())"
    assert run(sys.executable, "-c", code).split() == ["False", "False"]


def test_names_that_are_not_there_raise() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        liger_like.no_such_name  # noqa: B018
    assert set(liger_like.__all__) <= set(dir(liger_like))


def test_table_of_ops_is_current() -> None:
    page = ops_report.PAGE.read_text()
    assert report.with_table(page) == page, "run python -m benchmark report"


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 450
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (120 if is_kernel(node) else 80), f"{node.name} has {lines} lines"


def test_one_file_knows_what_triton_may_rename() -> None:
    folders = (ROOT / "liger_like", ROOT / "patches")
    texts = {path.name: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    private = re.compile(r"triton\.(experimental|_C)\b")
    assert [name for name, text in texts.items() if private.search(text)] == ["gluon.py"]


def test_every_target_of_make_has_a_recipe() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = {name for line in lines if line.startswith(".PHONY:") for name in line.split()[1:]}
    recipes = {line.partition(":")[0] for line, then in pairwise(lines) if then.startswith("\t")}
    assert "sanitize" in targets
    assert targets <= recipes
