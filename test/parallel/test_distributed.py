import time

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.multiprocessing import ProcessRaisedException


def fail_alone(rank):
    if rank == 1:
        raise ValueError("rank 1 met this")
    dist.all_reduce(torch.ones(1))


def test_an_error_on_one_rank_ends_the_others():
    start = time.perf_counter()
    with pytest.raises(ProcessRaisedException, match="rank 1 met this"):
        run(fail_alone, 2)
    assert time.perf_counter() - start < 50, "it was the time limit that ended them"
