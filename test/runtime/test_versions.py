"""The table of tested versions: it agrees with the packaging files, and says what follows from an installed version."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import triton

from liger_like.runtime import versions

ROOT = Path(__file__).parents[2]


def test_the_table_agrees_with_pyproject_and_constraints():
    allowed = dict(re.findall(r"\"(\w+)>=([\d.]+)", (ROOT / "pyproject.toml").read_text()))
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package, (oldest, newest) in versions.TESTED.items():
        assert allowed[package] == oldest
        assert versions.release(oldest) <= versions.release(pinned[package]) <= versions.release(newest)


@pytest.mark.parametrize(
    ("version", "newer", "older", "verdict"),
    [
        ("3.5.1", False, True, "older than allowed: install triton 3.6 or newer"),
        ("3.6.0", False, False, "tested"),
        ("3.9.9+git1234", False, False, "tested"),
        ("3.10.0", True, False, "newer than tested: Gluon kernels that do not compile fall back"),
        ("3.10rc1", True, False, "newer than tested: Gluon kernels that do not compile fall back"),
        ("4.0.0", True, False, "newer than tested: Gluon kernels that do not compile fall back"),
    ],
)
def test_verdict_of_an_installed_version(monkeypatch, version, newer, older, verdict):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    monkeypatch.setitem(versions.TESTED, "triton", ("3.6", "3.9"))
    assert versions.newer_than_tested("triton") is newer
    assert versions.older_than_allowed("triton") is older
    assert versions.verdict("triton").startswith(verdict)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "no_such_package", ("1.0", "2.0"))
    assert versions.installed("no_such_package") is None
    assert not versions.newer_than_tested("no_such_package")
    assert not versions.older_than_allowed("no_such_package")
    assert versions.verdict("no_such_package") == "not installed"


def test_the_imported_module_is_asked():
    assert versions.installed("torch") == torch.__version__
    assert versions.installed("triton") == triton.__version__
    assert versions.installed("peft")  # not imported here, so its metadata is read


def test_every_package_says_what_follows():
    assert versions.NEWER.keys() == versions.TESTED.keys()
