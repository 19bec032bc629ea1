"""Where a kernel may run: dtypes, devices, and the reasons why not."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

INTERPRET: bool = triton.knobs.runtime.interpret  # read once, as the decorators of the kernels read it
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_reasons: list[str] | None = None  # while ``collected_reasons`` is entered
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def collected_reasons() -> Iterator[list[str]]:
    """Collect what ``refused`` records within the context; not for several threads at once."""
    global _reasons
    _reasons = reasons = []
    try:
        yield reasons
    finally:
        _reasons = None


def is_explaining() -> bool:
    """Return True within ``collected_reasons``, where a cached choice must be made again to record its reasons."""
    return _reasons is not None


def refused(reason: str) -> bool:
    """Record why an implementation cannot run, for ``explain``, and return False."""
    if _reasons is not None:
        _reasons.append(reason)
    return False


def use_kernel(x: Tensor) -> bool:
    """Whether the Triton kernel takes ``x``; the plain-torch reference runs otherwise."""
    return (x.dtype in KERNEL_DTYPES or refused("kernels take float32, float16 and bfloat16")) and (
        x.is_cuda
        or (INTERPRET and x.device.type == "cpu")
        or refused("kernels run on GPUs, and interpreted on a CPU where TRITON_INTERPRET=1")
    )


@functools.cache
def architecture(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU, else 0."""
    on_nvidia = device.type == "cuda" and not torch.version.hip
    return torch.cuda.get_device_capability(device)[0] if on_nvidia else 0


@functools.cache
def num_programs(device: torch.device, each: int = 4) -> int:
    """Programs of a persistent kernel: ``each`` per multiprocessor; few in the interpreter, which runs them in turn."""
    return each * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def unhooked(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` comes to the forward of its class, and to nothing else."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on ``device``; None where it is off, as it always is on "meta"."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
