"""Decide whether a kernel may run, by dtype and device, and collect the reasons why not for ``explain``."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from liger_like.runtime import machine

INTERPRET: bool = triton.knobs.runtime.interpret  # read once: the decorators of the kernels read it once, too
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_reasons: list[str] | None = None  # while ``collected_reasons`` is entered
_as_in_graph = False  # within ``as_in_graph``
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_forward: Any = torch.nn.Linear.forward
# torch's own; where it was replaced before, no layer is known
LINEAR_FORWARD = _forward if getattr(_forward, "__globals__", None) is vars(torch.nn.modules.linear) else None
HOOKS_OF_ALL = tuple(getattr(torch.nn.modules.module, f"_global{kind}") for kind in HOOKS)


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
    """Return True if a Triton kernel can run on ``x``; otherwise the plain-torch reference runs."""
    return (
        (x.dtype in KERNEL_DTYPES or refused("kernels take float32, float16 and bfloat16"))
        and (
            x.is_cuda
            or machine.current is not None
            or (INTERPRET and x.device.type == "cpu")
            or refused("kernels run on GPUs, and interpreted on a CPU where TRITON_INTERPRET=1")
        )
        and (not torch.jit.is_tracing() or refused("torch.jit.trace records torch's own operations alone"))
    )


def use_row_kernel(x: Tensor) -> bool:
    """Return True if the Triton kernel of a norm or a gated unit can run on ``x``, outside of a compiled graph.

    Inductor fuses the reference with the additions and casts around it, and launches the result itself. A library op
    would stay apart, and call Python between two of Inductor's kernels.
    """
    return not torch.compiler.is_compiling() and use_kernel(x)


def has_known_size(x: Tensor) -> bool:
    """Return True unless torch.compile keeps a size of ``x`` as a symbol, which a choice by the size would limit."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # this import takes a third of a second

    return has_static_value(x.numel())


@contextlib.contextmanager
def as_in_graph() -> Iterator[None]:
    """Let ops do within the context what they do in a graph under capture; not for several threads at once."""
    global _as_in_graph
    before, _as_in_graph = _as_in_graph, True
    try:
        yield
    finally:
        _as_in_graph = before


def in_graph(t: Tensor) -> bool:
    """Return True if the host must not read ``t``: in a graph under capture, within ``as_in_graph``, without data."""
    return _as_in_graph or isinstance(t, FakeTensor) or (t.is_cuda and torch.cuda.is_current_stream_capturing())


def architecture(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU, else 0."""
    return _architecture(device) if machine.current is None else machine.current.architecture


@functools.cache
def _architecture(device: torch.device) -> int:
    on_nvidia = device.type == "cuda" and not torch.version.hip
    return torch.cuda.get_device_capability(device)[0] if on_nvidia else 0


def gpu_class(device: torch.device) -> str:
    """Return which tiles products take: "hopper", else by the shared memory of a program "large", or of less "rtx" on
    NVIDIA (99 KiB) and "small" (64 KiB).
    """
    if architecture(device) == 9:
        return "hopper"
    memory = _shared_memory(device) if machine.current is None else machine.current.shared_memory
    return "large" if memory >= 160 << 10 else "rtx" if architecture(device) else "small"


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def num_programs(device: torch.device, each: int = 4) -> int:
    """Return the programs of a persistent kernel: ``each`` per multiprocessor, 3 without a GPU, which runs them in
    turn.
    """
    return _num_programs(device, each) if machine.current is None else each * machine.current.multiprocessors


@functools.cache
def _num_programs(device: torch.device, each: int) -> int:
    return each * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs(device: torch.device, tiles: int) -> tuple[int]:
    """Return the grid of a kernel that loops over at most ``tiles`` tiles: a program per multiprocessor."""
    return (min(num_programs(device, 1), tiles),)


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache; 0 without a GPU."""
    if machine.current is not None:
        return machine.current.l2
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def is_local(t: Tensor) -> bool:
    """Return True for a tensor or parameter of no subclass; the tensors of a trace have the one without data."""
    return type(t) in (Tensor, torch.nn.Parameter) or (machine.current is not None and isinstance(t, FakeTensor))


def unhooked(module: torch.nn.Module) -> bool:
    """Return True if a call of ``module`` runs the forward of its class and no hook, of all modules neither.

    The library's own hooks of all modules only look on. Nothing is known where another forward is set on nn.Linear.
    """
    replaced = "forward" in module.__dict__ or torch.nn.Linear.forward is not LINEAR_FORWARD
    if replaced or any(getattr(module, hooks) for hooks in HOOKS):
        return False
    return not any(HOOKS_OF_ALL) or all(
        hook.__module__.startswith("liger_like.") for hooks in HOOKS_OF_ALL for hook in hooks.values()
    )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts ``x`` to; None where it is off, as always on "meta", and for float64."""
    kind = x.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else None
