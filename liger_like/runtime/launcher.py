"""Launch a Triton kernel in less host time than Triton does."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import wrap_triton

from liger_like.runtime import machine, support
from liger_like.runtime.fallback import start

# the versions of Triton whose launcher ``launch`` calls as Triton itself does
DIRECT = torch.version.hip is None and triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
# Options of every launch unless it passes its own. Without this one the version of Triton would decide whether a
# product and a sum are rounded once or twice: fused up to 3.9, not fused from 3.10 on.
OPTIONS = {"enable_fp_fusion": True}
_RUNTIME = triton.knobs.runtime
_recorded: list[tuple[Any, tuple[int, ...], dict[str, Any]]] | None = None  # while ``recorded`` is entered
_COMPILED: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class _Told(threading.local):
    recording: Any = None


_told = _Told()


@contextlib.contextmanager
def told(recording: Any) -> Iterator[None]:
    """Tell ``recording`` of every launch of this thread within the context; a launch by Triton makes it refuse."""
    _told.recording = recording
    try:
        yield
    finally:
        _told.recording = None


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[int, ...], dict[str, Any]]]]:
    """Collect (kernel, grid, options) of every launch within the context, in order; not for several threads at once."""
    global _recorded
    _recorded = launches = []
    try:
        yield launches
    finally:
        _recorded = None


def is_recorded() -> bool:
    """Return True within ``told``."""
    return _told.recording is not None


def is_inlined(x: Any) -> bool:
    """Return True while a compiled graph inlines an op of ``x``: each launch then becomes a node of the graph."""
    return type(x) is FunctionalTensor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    floats: tuple[float, ...] = (),
    descriptors: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Run ``kernel[grid](*descriptors, *tensors, *sizes, *floats, **options)`` in less host time.

    ``options`` holds the kernel's constants and Triton's launch options. The dtype and the block of a descriptor
    determine its layout.

    Triton inspects all arguments at every call to find the compiled kernel. This function looks it up by a key of
    everything that Triton specialises on, and runs it the way Triton does. Sizes and floats are converted first, since
    Triton would compile another kernel for an int where a float is meant. Triton itself launches in the interpreter,
    under hooks, with tensors that are not aligned to 16 bytes, on AMD (which also specialises on tensor sizes), and in
    versions that ``DIRECT`` does not list. Nothing is launched where a trace of tensors without data pretends a GPU.
    """
    if machine.current is not None:
        return
    if is_inlined(tensors[0]):
        wrap_triton(kernel)[grid](*descriptors, *tensors, *sizes, *floats, **options)
        return
    sizes, floats = (*map(int, sizes),), (*map(float, floats),)
    values = options.values()
    device = tensors[0].get_device()  # type: ignore[union-attr]
    # with types: 1, 1.0 and True are equal, but not to a kernel
    key = [device, id(kernel), *OPTIONS.values(), *options, *values, *map(type, values)]
    pointers, bits = [], 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            key.append(None)
        else:
            pointer = tensor.data_ptr()
            bits |= pointer
            pointers.append(pointer)
            key.append(tensor.dtype)
    for descriptor in descriptors:
        key += (None,) if descriptor is None else (descriptor.base.dtype, *descriptor.block_shape)
    key += [size if size < 2 else 16 | size & 15 | size >> 31 << 5 for size in sizes]
    known = tuple(key)
    hooked = _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls or kernel.pre_run_hooks
    by_triton = bits & 15 or hooked or _recorded is not None or support.INTERPRET or not DIRECT
    found = None if by_triton else _COMPILED.get(known)
    if found:
        run, function, metadata, constants = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        grid += (1,) * (3 - len(grid))
        if _told.recording is not None:
            _told.recording.add(kernel, found, grid, descriptors, tensors, (*sizes, *floats))
        run(*grid, stream, function, metadata, None, None, None, *descriptors, *pointers, *sizes, *floats, *constants)
        return
    if _told.recording is not None:
        _told.recording.refuse()
    options = OPTIONS | options
    given = *descriptors, *tensors, *sizes, *floats
    compiled = start(kernel, grid, given, options)
    if _recorded is not None:
        _recorded.append((kernel, grid, options))
    if not by_triton:
        constants = [options[param.name] for param in kernel.params[len(given) :]]
        _COMPILED[known] = compiled.run, compiled.function, compiled.packed_metadata, constants
