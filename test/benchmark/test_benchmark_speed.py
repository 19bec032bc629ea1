"""``pytest benchmark``: every step runs on a CPU, where nothing is timed; a GPU gives the times of the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.kernels.bench import GPU
from benchmark.kernels.contestants import OPS

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """Run it in a process that does not interpret the kernels and is no worker of a parallel run."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "benchmark", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(GPU, reason="a GPU takes the large shapes")
def test_every_step_runs_without_a_gpu():
    done = run("--benchmark-disable")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{4 * len(OPS)} passed" in done.stdout


@pytest.mark.skipif(GPU, reason="says what it needs where there is none")
def test_without_a_gpu_it_says_what_it_needs():
    done = run()
    assert done.returncode == 2
    said = [line for line in done.stdout.splitlines() if "needs a GPU" in line]
    assert len(said) == 1
    assert "--benchmark-disable runs every step once on a CPU" in said[0]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.gpu
def test_times_are_those_of_the_kernels(tmp_path):
    done = run("-k", "rms_norm and not add and not qk", f"--benchmark-json={tmp_path / 'times.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "times.json").read_text())["benchmarks"]
    assert {row["group"] for row in rows} == {"rms_norm, forward", "rms_norm, backward"}
    seconds = {(row["group"], row["params"]["contestant"]): row["stats"]["median"] for row in rows}
    read_and_written = 2 * 16384 * 4096 * 2  # bytes of the forward
    assert 2**38 < read_and_written / seconds["rms_norm, forward", "liger_like"] < 2**44
    assert seconds["rms_norm, backward", "liger_like"] > seconds["rms_norm, forward", "liger_like"] > 0
