"""The source distribution, the wheel that is built from it, and what users run where the wheel is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

import liger_like

ROOT = Path(__file__).parents[2]
FOLDERS = ("liger_like", "patches", "benchmark", "docs", "examples", "test")
PATCHES = sorted(path.stem for path in (ROOT / "patches").glob("*.py"))
USE = """
import importlib, json, sys, torch, liger_like
for patch in {patches}:
    importlib.import_module("liger_like.patches." + patch)
x = torch.randn(3, 8, requires_grad=True)
liger_like.rms_norm(x, torch.ones(8)).sum().backward()
modules = {{name: module.__file__ for name, module in sys.modules.items() if name.startswith("liger_like")}}
names = [str(getattr(liger_like, name)) for name in liger_like.__all__]
print(json.dumps([modules, names, x.grad.isfinite().all().item()]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run ``command`` in ``cwd`` as a user would, without the environment of the tests, and return its output."""
    ours = ("PYTHONPATH", "TRITON_INTERPRET", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Built(NamedTuple):
    """The unpacked source distribution, the wheel, and the Python of the environment in which the wheel is."""

    source: Path
    wheel: Path
    python: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build and install without a network; all other packages are those of the Python that runs the tests."""
    folder = tmp_path_factory.mktemp("built")
    # Build from a copy: setuptools would also pack the leftovers of an earlier build in the tree.
    ignored = shutil.ignore_patterns(".?*cache*", ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored)
    backend = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", backend, folder, cwd=folder / "tree")
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    site = folder / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    # The wheel comes first on the path. Python reads no .pth file in these folders, so it skips an editable install.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return Built(source, wheel, python)


def files_of(folder: Path) -> set[str]:
    """Return the files of the project below ``folder``, also those behind symlinks; hidden ones only from .ci."""
    found = {path for name in FOLDERS for path in (folder / name).rglob("*")}
    found |= {*folder.glob("[!.]*"), *(folder / "liger_like/patches").iterdir(), *(folder / ".ci").iterdir()}
    kept = {path for path in found if path.is_file() and "__pycache__" not in path.parts}
    return {str(path.relative_to(folder)) for path in kept} - {"PKG-INFO", "setup.cfg"}


def test_the_source_distribution_holds_the_whole_project(built: Built) -> None:
    assert files_of(built.source) == files_of(ROOT)


def test_the_source_distribution_passes_tests(built: Built) -> None:
    run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test/runtime/test_versions.py", cwd=built.source)


def test_the_wheel_is_the_package_alone(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        (licence,) = [name for name in names if name.endswith("licenses/LICENSE")]
        assert archive.read(licence).decode() == (ROOT / "LICENSE").read_text()
    packed = {name for name in names if ".dist-info/" not in name}
    folder = ROOT / "liger_like"
    expected = {
        path.relative_to(ROOT) for path in (*folder.rglob("*.py"), *folder.glob("patches/*.py"), folder / "py.typed")
    }
    assert packed == {str(path) for path in expected}


def test_the_package_page_has_no_link_that_leads_nowhere(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        page = Parser().parsestr(archive.read(name).decode())
    assert page["License-Expression"] == "BSD-2-Clause"
    assert page["Version"] == liger_like.__version__
    text = page.get_payload()
    assert text == (ROOT / "PACKAGE.md").read_text()
    links = re.findall(r"\]\(\s*([^)]+)\)|\]:\s*(\S+)|(?:src|href)=[\"']?([^\"' >]+)", text)
    assert [link for found in links for link in found if link and not re.match("https://|#", link)] == []


def test_the_installed_wheel(built: Built, tmp_path: Path) -> None:
    code = USE.format(patches=[name for name in PATCHES if name != "__init__"])
    modules, names, finite = json.loads(run(built.python, "-I", "-c", code, cwd=tmp_path))
    assert {f"liger_like.patches.{name}" for name in PATCHES} - modules.keys() == {"liger_like.patches.__init__"}
    assert {file.startswith(str(built.python.parents[1])) for file in modules.values()} == {True}
    assert len(names) == len(liger_like.__all__)
    assert finite


def test_the_installed_command(built: Built, tmp_path: Path) -> None:
    command = built.python.with_name("liger-like")
    version = f"liger-like {liger_like.__version__}\n"
    assert run(built.python, "-I", "-m", "liger_like", "--version", cwd=tmp_path) == version
    shown = run(command, "env", cwd=tmp_path)
    assert all(f"│ {word} " in shown for word in ("python", "liger_like", "torch", "triton", "transformers", "kernels"))
    (tmp_path / "config.json").write_text(json.dumps(transformers.LlamaConfig().to_dict()))
    assert "1 x lm_head, fused loss" in run(command, "doctor", tmp_path, cwd=tmp_path)


def test_the_changelog_begins_with_what_is_not_released() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(liger_like.__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
