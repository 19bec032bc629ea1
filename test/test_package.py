"""The package as a user meets it: the installed wheel, what an import costs, and the size of its parts."""

import ast
import json
import re
import shutil
import subprocess
import sys
import venv
from itertools import pairwise
from pathlib import Path

import pytest

import liger_like
from benchmark import report

ROOT = Path(__file__).parents[1]
FOLDERS = ("liger_like", "patches", "benchmark", "examples", "test")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PATCHES = sorted(path.stem for path in (ROOT / "patches").glob("*.py") if path.stem != "__init__")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the built wheel; everything else comes from this one's packages."""
    folder = tmp_path_factory.mktemp("wheel")
    # built from a copy: setuptools would also pack what an earlier build left in the tree's build/
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "tree")
    (wheel,) = folder.glob("liger_like-*.whl")
    venv.create(folder / "venv", with_pip=False)
    site = folder / "venv/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel)
    # below the wheel on the path; a .pth inside those folders is not read, so an editable install of the tree stays out
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "venv/bin/python"


def test_wheel_holds_every_public_name(installed: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, json, liger_like
names = {{name: str(getattr(liger_like, name)) for name in liger_like.__all__}}
for patch in {PATCHES}:
    names[patch] = importlib.import_module("liger_like.patches." + patch).__file__
names["package"] = liger_like.__file__
print(json.dumps(names))
"""
    names = json.loads(run(installed, "-I", "-c", code, cwd=tmp_path))
    site = str(installed.parents[1])
    assert names["package"].startswith(site)
    assert PATCHES
    assert all(names[patch].startswith(site) for patch in PATCHES)


def test_command_line(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, "-I", "-m", "liger_like", "env", cwd=tmp_path)
    assert all(word in shown for word in ("python", "torch", "triton", "transformers", "kernels"))


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


def test_readme_table_is_current() -> None:
    readme = report.README.read_text()
    assert report.with_table(readme) == readme, "run python -m benchmark.report"


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
    assert [name for name, text in texts.items() if private.search(text)] == ["_gluon.py"]


def test_every_target_of_make_has_a_recipe() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = {name for line in lines if line.startswith(".PHONY:") for name in line.split()[1:]}
    recipes = {line.partition(":")[0] for line, then in pairwise(lines) if then.startswith("\t")}
    assert "sanitize" in targets
    assert targets <= recipes
