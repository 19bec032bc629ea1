"""Sums of matrix products over chunks, stored in 16 bits at nearly the accuracy of fp32, and scaled at the end.

A weight's gradient over chunks of tokens is a sum of products a^T b. A sum in bf16 would be rounded to 8 bits after
every chunk; a sum in fp32 would take twice the memory of the result. Here each block of a row (``exponent_block``
columns) is stored in fp16, with an 11-bit significand, in units of one power of two that is chosen for the block's
largest element. 16 chunks then add less error than the single rounding to bf16 at the end. The last product does that
rounding, in the same memory. The products run on the tensor cores and accumulate in fp32: on Hopper in Gluon
(``hopper``), on Blackwell in Triton (``portable``).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from liger_like.ops.losses.dw_sum import portable
from liger_like.runtime.blocks import block_of
from liger_like.runtime.fallback import BROKEN, NotCompiledError, gluon_module
from liger_like.runtime.launcher import launch
from liger_like.runtime.machine import address
from liger_like.runtime.registry import op
from liger_like.runtime.support import architecture, refused
from liger_like.runtime.versions import newer_than_tested

HOPPER = "liger_like.ops.losses.dw_sum.hopper"
MAX_ROUNDS = 16


@triton.jit
def _scale_rows_kernel(
    src_ptr, out_ptr, order_ptr, factor_ptr, stride_sm, stride_om, stride_f, N, ADD: tl.constexpr,
    IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row = pid
    if order_ptr is not None:
        row = tl.load(order_ptr + pid).to(tl.int64)
    factor = tl.load(factor_ptr + row * stride_f).to(tl.float32)
    if IN_PLACE:  # noqa: SIM102  # a constant
        if factor == 1.0:
            return
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        value = tl.load(src_ptr + pid * stride_sm + offs_n, mask=mask, other=0.0).to(tl.float32)
        value *= factor
        out_ptrs = out_ptr + row * stride_om + offs_n
        if ADD:
            value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # out may lie in the memory of src
        tl.store(out_ptrs, value, mask=mask)


def has_products(device: torch.device) -> bool:
    """True if ``add_products`` is fast on ``device``: older GPUs lack TMA, smaller GPUs shared memory for a tile."""
    on_device = architecture(device) in (9, 10)
    return on_device or refused("dw is summed in fp32: sums in 16 bits need a data center GPU, Hopper or Blackwell")


def _hopper_kernel(device: torch.device) -> Any:
    """Return the module of the Hopper kernel, or False on other GPUs and if the kernel does not compile."""
    if architecture(device) != 9:
        return False
    if newer_than_tested("triton"):
        _try_hopper_kernel(device)
    return (HOPPER not in BROKEN or refused(f"{HOPPER} {BROKEN[HOPPER]}")) and gluon_module(HOPPER)


@functools.cache
def _try_hopper_kernel(device: torch.device) -> None:
    """Fall back now if the Hopper kernel does not compile, since the layout of ``exponents_like`` depends on it."""
    with _disable_current_modes():  # torch.compile calls this under a mode of fake tensors
        a, factor = (torch.zeros(64, n, dtype=torch.bfloat16, device=device) for n in (64, 1))
        total, exponents = torch.zeros_like(a, dtype=torch.float16), torch.zeros_like(a, dtype=torch.uint8)
        try:
            for last in (None, factor[0].float()):
                gluon_module(HOPPER).add_products(total, total, exponents, last, a, a, accumulate=True)
        except NotCompiledError as error:
            error.fall_back()


def exponent_block(device: torch.device) -> int:
    """Return the number of columns that share an exponent, the columns of a tile."""
    hopper = _hopper_kernel(device)
    return hopper.BLOCK_N if hopper else portable.TILE["BLOCK_N"]


def exponents_like(total: Tensor) -> Tensor:
    """Return an uninitialised uint8 tensor [M, blocks] for the exponents of ``total`` [M, N]."""
    return total.new_empty((total.shape[0], -(-total.shape[1] // exponent_block(total.device))), dtype=torch.uint8)


def add_products(
    total: Tensor,
    exponents: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    accumulate: bool,
    out: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Store a^T b in ``total``, or add it to ``total`` if ``accumulate``, for ``a`` [K, M] and ``b`` [K, N].

    ``total`` [M, N] is fp16 in the units of ``exponents``. With ``factor`` [1] this is the last product: the new total
    times ``factor`` goes to ``out`` [M, N] in bf16, which may share the memory of ``total``. ``a`` and ``b`` are bf16
    or fp16, and all rows start at multiples of 16 bytes.
    """
    out = total if out is None else out.view(torch.float16)
    module = _hopper_kernel(a.device) or portable
    module.add_products(total, out, exponents, factor, a, b, accumulate=accumulate)


@op("scale_rows(Tensor src, Tensor? order, Tensor factor, Tensor(a!) out, bool add) -> ()", lambda *args: None)
def scale_rows(src: Tensor, order: Tensor | None, factor: Tensor, out: Tensor, add: bool) -> None:
    """Store row i of ``src`` [M, N] times ``factor`` in row ``order[i]`` (None: i) of ``out``, or ``add`` it.

    ``factor`` is [1], or has a number for each row of ``out``. The result is rounded once. ``out`` may share the memory
    of ``src`` in a dtype of equal or smaller size, if their rows start at the same addresses.
    """
    M, N = src.shape
    block_n = min(block_of(N), 4096)
    if M:
        sizes = src.stride(0), out.stride(0), int(factor.numel() > 1), N
        in_place = src.dtype == out.dtype and address(src) == address(out) and order is None and not add
        options = {"ADD": add, "IN_PLACE": in_place, "BLOCK_N": block_n, "num_warps": max(1, block_n // 512)}
        launch(_scale_rows_kernel, (M,), (src, out, order, factor), sizes, **options)
