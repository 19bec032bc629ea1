"""Processes of a test that talk over torch.distributed."""

import os
import tempfile
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn


def run(worker, world_size, *args, backend="gloo"):
    """Call ``worker(rank, *args)``, a function of a module, in ``world_size`` processes of one process group.

    What one of them raises ends all of them, and is raised here with its traceback. Those of gloo see no GPU.
    """
    without_gpus = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if backend == "gloo" else {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, without_gpus):
        spawn(_work, (worker, world_size, args, backend, f"{folder}/store"), nprocs=world_size)


def _work(rank, worker, world_size, args, backend, store):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    options = {"store": dist.FileStore(store, world_size), "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, world_size=world_size, rank=rank, **options)
    worker(rank, *args)
    dist.barrier()
    if backend == "nccl":
        dist.destroy_process_group()
    os._exit(0)  # the threads of gloo may abort an interpreter that ends around them
