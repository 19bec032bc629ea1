"""Names of the Gluon functions that the Hopper kernels use, the same for every version of Triton.

Gluon is experimental: new versions of Triton rename its functions. No other file of the package imports
``triton.experimental`` or ``triton._C``, so only this file depends on the version.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "FREE_BARRIER",
    "TensorDescriptor",
    "arrive_at",
    "cp_async",
    "cp_async_arrive",
    "fence_async_shared",
    "gl",
    "gluon",
    "group_barrier",
    "here",
    "mbarrier",
    "reinterpret",
    "sync_at",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

FREE_BARRIER = gl.constexpr(5)  # the first of 16 named barriers that Triton leaves free beside four partitions

tma_store_wait = tma.store_wait
cp_async_arrive = async_copy.mbarrier_arrive

group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the warps of a partition

if hasattr(tma, "async_load"):  # from Triton 3.8 on
    tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
    cp_async = async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    cp_async = async_copy.async_copy_global_to_shared

    @builtin
    def tma_add(desc, coord, src, _semantic=None):
        """Add the buffer ``src`` to global memory by TMA; these versions have the instruction but no function."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Return a view of a shared-memory buffer in another dtype, shape and layout of the same size in bytes."""
    public = hasattr(buffer, "reinterpret")  # from Triton 3.9 on
    view = buffer.reinterpret if public else buffer._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def arrive_at(barrier, THREADS: gl.constexpr):
    """Count the calling warps at a named barrier for THREADS threads, without a wait (PTX ISA, bar.arrive).

    Unlike ``mbarrier.arrive``, which one thread makes for all, it needs no barrier among the warps before.
    """
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sync_at(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have arrived, the calling ones included (PTX ISA, bar.sync)."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


PINS = hasattr(gl.shared_memory_descriptor, "reinterpret")  # from Triton 3.9 on

if PINS:

    @gluon.jit
    def here(x):
        """Return the int32 ``x``. Code that needs the result stays behind the calls before.

        LLVM else moves the addresses of later products to the first one, where they exceed the uniform registers of a
        warp. Each address then takes an instruction more and registers of all threads.
        """
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)

else:

    @gluon.jit
    def here(x):
        """Return ``x``: these versions compute addresses before the product that needs them."""
        return x
