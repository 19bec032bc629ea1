"""Processes of a test that talk over torch.distributed."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import triton
from interpreter import quicken
from torch.multiprocessing import start_processes

from liger_like.runtime import support

# Imports take longer than most workers' own work: one process imports these modules, and workers are its forks.
PRELOADED = ("liger_like", "transformers.models.llama.modeling_llama", "accelerate", "torch.distributed.fsdp")
INTERPRETED = support.INTERPRET  # before a test pretends another value: the fork server outlives that test


def run(worker, world_size, *args, backend="gloo"):
    """Call ``worker(rank, *args)``, a function of a module, in ``world_size`` processes of one process group.

    What one of them raises ends all of them, and is raised here with its traceback. Over gloo alone they see no GPU,
    which FSDP and accelerate would choose, and are copies of one process.
    """
    on_gpus = "nccl" in backend
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        if not on_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        args = worker, world_size, args, backend, f"{folder}/store", dict(os.environ)
        os.environ["TRITON_INTERPRET"] = str(int(INTERPRETED))  # one import decorates kernels for all workers
        multiprocessing.set_forkserver_preload([*PRELOADED])
        start_processes(_work, args, nprocs=world_size, start_method="spawn" if on_gpus else "forkserver")


def _work(rank, worker, world_size, args, backend, store, environment):
    os.environ.clear()  # drop the variables of the fork server
    os.environ.update(environment)
    support.INTERPRET = triton.knobs.runtime.interpret  # the fork server's import may have read another value
    if support.INTERPRET:
        quicken()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    options = {"store": dist.FileStore(store, world_size), "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, world_size=world_size, rank=rank, **options)
    worker(rank, *args)
    dist.barrier()
    if "nccl" in backend:
        dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a normal shutdown of Python


def as_torchrun_does():
    """Variables that some libraries look for, though the process group is there."""
    rank, processes = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def as_accelerate_launches(config, *options):
    """What ``accelerate launch`` tells each process of the file ``config``; where there are several, the CPU passes for
    an accelerator, as it leaves FSDP out where there is none.
    """
    from accelerate import DistributedType, PartialState
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = ["--config_file", str(config), "--main_process_port", "0", *options, "script"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if dist.get_world_size() == 1:
        os.environ |= prepare_simple_launcher_cmd_env(arguments)[1]
        return
    as_torchrun_does()
    os.environ |= prepare_multi_gpu_env(arguments) | {"ACCELERATE_TORCH_DEVICE": "cpu"}
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
