import time
from multiprocessing.forkserver import _forkserver

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.multiprocessing import ProcessRaisedException
from triton.runtime.interpreter import InterpretedFunction

from liger_like.ops.rms_norm import _rms_norm_fwd_kernel
from liger_like.runtime import support


def fail_alone(rank):
    if rank == 1:
        raise ValueError("rank 1 met this")
    dist.all_reduce(torch.ones(1))


def test_an_error_on_one_rank_ends_the_others():
    start = time.perf_counter()
    with pytest.raises(ProcessRaisedException, match="rank 1 met this"):
        run(fail_alone, 2)
    assert time.perf_counter() - start < 50, "it was the time limit that ended them"


def kernels_are_interpreted(rank, expected):
    assert isinstance(_rms_norm_fwd_kernel, InterpretedFunction) == expected


def test_kernels_of_processes_are_decorated_as_here(monkeypatch):
    """The fork server may be started by a test that pretends otherwise, and serves the tests after it."""
    _forkserver._stop()
    interpreted = support.INTERPRET
    monkeypatch.setattr(support, "INTERPRET", not interpreted)
    run(kernels_are_interpreted, 1, interpreted)
