"""The first run of a target of make: one line for the installation, then the target's own output."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A fake Python: it copies itself into new environments, and prints a line as pip or a program would.
FAKE = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*" install -qq "*) case "$0" in broken/*) echo "ERROR: no matching distribution" >&2; exit 1 ;; esac ;;
*" install "*) echo "Collecting torch" ;;
*) echo "output of $*" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()

    def make(*arguments):
        command = ["make", "--no-print-directory", f"PYTHON={python}", *arguments]
        # Drop the variables of the make that may run these tests.
        ours = ("MAKE", "VENV", "PYTHON", "ARGS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    return make


def test_the_installation_is_one_line(make):
    first, second = make("demo"), make("demo")
    assert first.stdout.splitlines() == [
        "Installing the tested packages into .venv: this takes minutes, once",
        "output of examples/train.py",
    ]
    assert second.stdout == "output of examples/train.py\n"
    assert first.stderr == second.stderr == ""
    assert make(".cache/triton-3.6.0").stdout == "Installing triton 3.6.0 into .cache/triton-3.6.0\n"


def test_errors_of_the_installation_are_shown(make):
    failed = make("demo", "VENV=broken")
    assert failed.returncode == 2
    assert failed.stdout == "Installing the tested packages into broken: this takes minutes, once\n"
    assert "ERROR: no matching distribution" in failed.stderr
    assert make("demo").returncode == 0
