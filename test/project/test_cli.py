"""The command ``liger-like``: its version, what ``env`` says of the packages, and where ``bench`` runs."""

import sys
import types
from pathlib import Path

import pytest

import liger_like
from liger_like import cli
from liger_like.runtime import versions

ROOT = Path(__file__).parents[2]


def run(monkeypatch, *arguments):
    """Run the command and return its exit code or the message that it exits with."""
    monkeypatch.setattr(sys, "argv", ["liger-like", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "env"]])
def test_version(monkeypatch, capsys, arguments):
    assert not run(monkeypatch, *arguments)
    assert capsys.readouterr().out == f"liger-like {liger_like.__version__}\n"


def test_version_needs_no_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert not run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"liger-like {liger_like.__version__}\n"


def test_env_says_what_follows_from_the_versions(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.10.1+cu130"))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.10.0"))
    monkeypatch.setitem(versions.TESTED, "no_such_package", ("1.0", "1.9"))
    assert run(monkeypatch, "env") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    said = " ".join(shown.replace("│", " ").split())
    assert "torch 2.10.1+cu130: older than allowed: install torch 2.11 or newer (tested range: 2.11 to 2.15)" in said
    newer = "newer than tested: Gluon kernels that do not compile fall back to the portable ones, with a warning"
    assert f"triton 3.10.0: {newer} (tested range: 3.6 to 3.9)" in said
    assert f"transformers {versions.installed('transformers')}: tested (tested range: 5.17 to 5.24)" in said
    assert "no_such_package not installed (tested range: 1.0 to 1.9)" in said


def test_bench_outside_of_a_checkout_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = run(monkeypatch, "bench", "--quick")
    assert (
        message == "liger-like: bench needs a checkout of the repository; in its root, run: python -m benchmark bench"
    )


def test_bench_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch, "bench") == "liger-like: matplotlib is not installed; run: pip install 'liger-like[bench]'"


@pytest.mark.parametrize("lacks", ["checkout", "extra"])
def test_bench_where_it_cannot_run_has_help(lacks, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT if lacks == "extra" else tmp_path)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch, "bench", "--quick", "--help") == 0
    assert "Measure every op against every peer" in capsys.readouterr().out


def test_bench_runs_the_checkouts_benchmark_with_its_arguments(monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert run(monkeypatch, "bench", "--op", "no_such_op") == 2
    assert "python -m benchmark bench: error: no no_such_op; there are rms_norm" in capfd.readouterr().err
    assert run(monkeypatch, "bench", "--help") == 0
    assert "usage: python -m benchmark bench" in capfd.readouterr().out
