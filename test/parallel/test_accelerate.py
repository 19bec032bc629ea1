"""The examples for accelerate, as one process and as two."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from distributed import as_accelerate_launches, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/accelerate"


def losses(config, *options):
    """Return the losses of each step. Without a GPU the patched model runs plain torch, not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", FOLDER / config]
    port = ["--main_process_port", "0"]
    result = subprocess.run(
        [*launch, *port, *options, FOLDER / "train.py"],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return losses_in(result.stdout)


def losses_in(text):
    found = re.findall(r"step \d+ loss (\S+)", text)
    assert len(found) == 8
    return torch.tensor([float(loss) for loss in found])


def train(rank, path, config, *options):
    """The example; saved are its losses without mixed precision, and as the file asks for it."""
    PartialState.destroy_process_group = lambda *_: None  # the test ends it
    results = []
    for precision in (["--mixed_precision", "no"], []):
        AcceleratorState._reset_state(reset_partial_state=True)
        as_accelerate_launches(FOLDER / config, *options, *precision)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
        assert AcceleratorState().is_fsdp2 == ("fsdp" in config)
        if rank == 0:
            results.append(losses_in(output.getvalue()))
    torch.save(results, f"{path}/{rank}")


def test_two_processes_train_as_one(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run(train, 1, tmp_path, "single.yaml", "--cpu")
    one, in_bf16 = torch.load(tmp_path / "0")
    assert one[-1] < one[0] - 0.5
    run(train, 2, tmp_path, "fsdp2.yaml")
    sharded, sharded_in_bf16 = torch.load(tmp_path / "0")
    for got in (losses("ddp_cpu.yaml"), sharded):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
    for got in (in_bf16, sharded_in_bf16):
        torch.testing.assert_close(got, one, rtol=0.02, atol=0.0)
        assert not torch.equal(got, one)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one():
    one = losses("single.yaml")
    for config in ("ddp.yaml", "fsdp2.yaml"):
        torch.testing.assert_close(losses(config), one, rtol=0.02, atol=0.0)
