"""Launch parameters of row kernels: a table for Hopper, written by ``make tune``, and a rule for other GPUs and fp32.

With ``LIGER_LIKE_AUTOTUNE=1`` in the environment the first call for a width, dtype and GPU searches instead. A search
takes seconds and is impossible under CUDA graph capture. The ranks of a job may then sum in different orders.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from liger_like.runtime import machine
from liger_like.runtime.blocks import sum_rows_kernel
from liger_like.runtime.launcher import is_inlined, launch
from liger_like.runtime.support import INTERPRET, architecture, is_explaining, num_programs, refused

AUTOTUNE = os.environ.get("LIGER_LIKE_AUTOTUNE", "0") == "1"


class Tile(NamedTuple):
    """Rows and columns of a program's block, and its launch options.

    ``num_stages`` (blocks of rows in flight) and ``per_sm`` (programs per multiprocessor) apply to loops over rows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    per_sm: int = 4

    def constants(self) -> dict[str, int]:
        """Return the block sizes as constexprs, and the launch options."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Rule(NamedTuple):
    """Elements per program, elements per warp and widest block of a kernel; no GPU spills registers with them.

    ``whole``: the kernel prefers a row in one block. ``loops``: programs loop over rows.
    """

    program: int
    warp: int
    widest: int
    whole: bool = True
    loops: bool = False


RULES = {
    "rms_norm_fwd": Rule(2048, 512, 4096),
    "add_rms_norm_fwd": Rule(2048, 512, 4096),
    "rms_norm_bwd": Rule(512, 256, 4096, loops=True),
    "add_rms_norm_bwd": Rule(512, 256, 4096, loops=True),
    "layer_norm_fwd": Rule(2048, 512, 4096),
    "layer_norm_bwd": Rule(512, 128, 4096, loops=True),
    "rope": Rule(2048, 256, 512),
    "qk_norm_rope": Rule(1024, 128, 512),
    "qk_norm_rope_bwd": Rule(128, 256, 512, loops=True),
    "glu_fwd": Rule(1024, 256, 1024, whole=False),
    "glu_bwd": Rule(512, 128, 1024, whole=False),
    "moe_route_fwd": Rule(1024, 256, 4096),
    "moe_route_bwd": Rule(1024, 256, 4096),
    "load_balancing_fwd": Rule(1024, 256, 4096, loops=True),
    "load_balancing_bwd": Rule(1024, 256, 4096),
}

# Kernel -> widest row -> tile, for elements of two bytes. Measured on an H200, torch 2.11.0, triton 3.6.0, bf16.
HOPPER: dict[str, dict[int, Tile]] = {
    "rms_norm_fwd": {
        64: Tile(16, 64, 2, 1, 4),
        128: Tile(16, 128, 4, 1, 4),
        256: Tile(8, 256, 4, 1, 4),
        512: Tile(4, 512, 2, 1, 4),
        1024: Tile(2, 1024, 2, 1, 4),
        2048: Tile(1, 2048, 4, 1, 4),
        4095: Tile(2, 4096, 4, 1, 4),
        4096: Tile(1, 4096, 8, 1, 4),
        8191: Tile(1, 8192, 4, 1, 4),
        8192: Tile(1, 8192, 16, 1, 4),
        16383: Tile(1, 8192, 8, 1, 4),
        16384: Tile(1, 16384, 16, 1, 4),
        2147483648: Tile(1, 32768, 32, 1, 4),
    },
    "rms_norm_bwd": {
        64: Tile(32, 64, 4, 3, 4),
        128: Tile(8, 128, 2, 3, 8),
        256: Tile(8, 256, 2, 3, 4),
        512: Tile(8, 512, 4, 3, 2),
        1024: Tile(2, 1024, 4, 3, 4),
        2047: Tile(1, 2048, 2, 3, 4),
        2048: Tile(1, 2048, 4, 3, 3),
        4095: Tile(1, 4096, 4, 3, 3),
        4096: Tile(2, 4096, 16, 3, 1),
        8191: Tile(1, 8192, 16, 3, 1),
        8192: Tile(1, 8192, 32, 3, 1),
        16383: Tile(1, 16384, 32, 1, 1),
        16384: Tile(1, 16384, 32, 3, 1),
        2147483648: Tile(4, 2048, 8, 1, 2),
    },
    "add_rms_norm_fwd": {
        64: Tile(16, 64, 4, 1, 4),
        128: Tile(16, 128, 2, 1, 4),
        256: Tile(8, 256, 8, 1, 4),
        512: Tile(4, 512, 4, 1, 4),
        1024: Tile(2, 1024, 4, 1, 4),
        2048: Tile(1, 2048, 8, 1, 4),
        4095: Tile(1, 4096, 8, 1, 4),
        4096: Tile(2, 4096, 32, 1, 4),
        8191: Tile(1, 8192, 16, 1, 4),
        8192: Tile(1, 8192, 32, 1, 4),
        16383: Tile(2, 16384, 32, 1, 4),
        16384: Tile(1, 16384, 16, 1, 4),
        2147483648: Tile(1, 32768, 32, 1, 4),
    },
    "add_rms_norm_bwd": {
        64: Tile(16, 64, 4, 3, 4),
        128: Tile(16, 128, 4, 3, 4),
        256: Tile(4, 256, 2, 3, 4),
        512: Tile(2, 512, 4, 3, 4),
        1024: Tile(8, 1024, 8, 3, 1),
        2048: Tile(1, 2048, 8, 3, 3),
        4095: Tile(1, 4096, 4, 3, 3),
        4096: Tile(2, 4096, 16, 3, 1),
        8191: Tile(1, 8192, 16, 3, 1),
        8192: Tile(1, 8192, 32, 3, 1),
        16383: Tile(1, 16384, 32, 1, 1),
        16384: Tile(1, 16384, 32, 1, 1),
        2147483648: Tile(4, 2048, 8, 1, 2),
    },
    "rope": {
        64: Tile(32, 64, 2, 1, 4),
        128: Tile(32, 128, 4, 1, 4),
        256: Tile(32, 256, 8, 1, 4),
    },
    "qk_norm_rope": {
        64: Tile(32, 64, 2, 1, 4),
        128: Tile(32, 128, 4, 1, 4),
        256: Tile(4, 256, 1, 1, 4),
    },
    "qk_norm_rope_bwd": {
        64: Tile(64, 64, 4, 3, 2),
        128: Tile(32, 128, 4, 3, 2),
        256: Tile(32, 256, 8, 3, 1),
    },
    "glu_fwd": {
        64: Tile(8, 64, 1, 1, 4),
        256: Tile(2, 256, 2, 1, 4),
        2147483648: Tile(1, 512, 1, 1, 4),
    },
    "glu_bwd": {
        64: Tile(8, 64, 4, 1, 4),
        256: Tile(4, 256, 8, 1, 4),
        2147483648: Tile(1, 1024, 4, 1, 4),
    },
    "layer_norm_fwd": {
        64: Tile(32, 64, 2, 1, 4),
        128: Tile(16, 128, 2, 1, 4),
        256: Tile(8, 256, 2, 1, 4),
        512: Tile(4, 512, 2, 1, 4),
        1024: Tile(2, 1024, 4, 1, 4),
        2047: Tile(2, 2048, 4, 1, 4),
        2048: Tile(1, 2048, 4, 1, 4),
        4096: Tile(2, 4096, 8, 1, 4),
        8192: Tile(1, 8192, 8, 1, 4),
        16383: Tile(1, 4096, 8, 1, 4),
        16384: Tile(1, 16384, 16, 1, 4),
        2147483648: Tile(1, 32768, 32, 1, 4),
    },
    "layer_norm_bwd": {
        64: Tile(16, 64, 2, 3, 4),
        128: Tile(16, 128, 4, 3, 4),
        256: Tile(8, 256, 2, 3, 4),
        512: Tile(2, 512, 2, 3, 4),
        1024: Tile(2, 1024, 4, 3, 4),
        2047: Tile(2, 2048, 4, 3, 2),
        2048: Tile(2, 2048, 8, 3, 2),
        4095: Tile(1, 4096, 4, 3, 2),
        4096: Tile(2, 4096, 8, 3, 1),
        8192: Tile(1, 8192, 8, 3, 1),
        16383: Tile(4, 4096, 16, 1, 1),
        16384: Tile(4, 4096, 16, 1, 1),
        2147483648: Tile(4, 4096, 16, 1, 1),
    },
}

# fp16 tiles, where the tile of bf16 spills registers
HOPPER_FP16 = {("rms_norm_bwd", 16383): Tile(1, 8192, 8, 1, 2)}

_CHOSEN: dict[tuple[Any, ...], Tile] = {}


def tiled(kernel: str, x: Tensor, width: int, run: Callable[[Tile], None], unit: int | None = None) -> None:
    """Call ``run`` with the tile of ``kernel`` for rows of ``width`` elements in the dtype and on the GPU of ``x``.

    ``unit`` divides the memory offsets, in elements, at which rows or the separately read parts of rows start.
    """
    key = kernel, width, x.dtype, x.get_device(), unit
    # a tensor without data: nothing can be measured, and a machine that is not there must leave no choice behind
    if machine.current is not None or (AUTOTUNE and key not in _CHOSEN and is_inlined(x)):
        return run(select(kernel, x, width, unit or width))
    if key not in _CHOSEN or (is_explaining() and not AUTOTUNE):
        searched = AUTOTUNE and x.is_cuda
        _CHOSEN[key] = search(kernel, width, run) if searched else select(kernel, x, width, unit or width)
    run(_CHOSEN[key])


def select(kernel: str, x: Tensor, width: int, unit: int) -> Tile:
    """Return the tile of the table, which assumes loads of 16 bytes, or else the tile of the rule."""
    if architecture(x.device) == 9 and x.element_size() == 2 and unit % 8 == 0:
        for widest, tile in HOPPER.get(kernel, {}).items():
            if width <= widest:
                return HOPPER_FP16.get((kernel, widest), tile) if x.dtype == torch.float16 else tile
    refused("a rule chose the tile: the table is for Hopper, 2-byte dtypes and rows aligned to 16 bytes")
    rule = RULES[kernel]
    block_n = min(triton.next_power_of_2(width), rule.widest)
    block_m = min(32, max(1, rule.program // block_n))
    return Tile(block_m, block_n, max(1, block_m * block_n // rule.warp))


def row_constants(tile: Tile, N: int) -> dict[str, Any]:
    """Return the constants and warps of a kernel for rows of N; with a constant N Triton drops columns beyond it."""
    even, one_block = N % tile.block_n == 0, tile.block_n >= N
    return {
        "N": N,
        "EVEN": even,
        "ONE_BLOCK": one_block,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
    }


def partial_sums(total: Tensor, M: int, tile: Tile, *, whole: bool, split: int = 1) -> tuple[int, Tensor]:
    """Return the number of programs for a loop over ``M`` blocks of rows, and a tensor [programs, *total.shape].

    Each program stores a partial sum of ``total`` there, in fp32; ``split`` programs share a block. A few ``whole``
    rows get a single program, which stores into ``total`` itself: nothing is left to sum.
    """
    programs = 1 if whole and M <= 16 else min(num_programs(total.device, tile.per_sm), M) * split
    if programs == 1:
        return 1, total
    return programs, torch.empty((programs, *total.shape), dtype=torch.float32, device=total.device)


def sum_partials(partial: Tensor, total: Tensor) -> None:
    """Store the sum of the partial sums ``partial`` in ``total``, always in the same order."""
    if partial is not total:
        columns, block_n = total.numel(), 1024 if INTERPRET else 16  # the interpreter is faster with few programs
        grid, sizes = (-(-columns // block_n),), (len(partial), columns)
        # up to 512 rows are loaded at once: the latency of loads takes most of the time
        launch(sum_rows_kernel, grid, (partial, total), sizes, BLOCK_P=512, BLOCK_N=block_n, num_warps=8)


def candidates(kernel: str, width: int) -> Iterator[Tile]:
    """Yield the tiles to measure: 4 to 32 elements per thread, rows in one block where a program can hold them."""
    rule, row = RULES[kernel], triton.next_power_of_2(width)
    stages, programs = ((1, 2, 3), (1, 2, 4, 8)) if rule.loops else ((1,), (4,))
    sizes = itertools.product((4, 8, 16, 32), (1, 2, 4, 8, 16, 32), stages, programs)
    for elements, num_warps, num_stages, per_sm in sizes:
        size = elements * 32 * num_warps
        block_n = row if rule.whole and row <= size else min(row, size, 8192)
        too_narrow = rule.whole and block_n < min(row, 4096)
        too_slow = rule.loops and (elements == 4 or not 8 <= num_warps * per_sm <= 48)
        if size <= 64 * block_n and not too_narrow and not too_slow:
            yield Tile(size // block_n, block_n, num_warps, num_stages, per_sm)


def search(kernel: str, width: int, run: Callable[[Tile], None]) -> Tile:
    """Return the fastest candidate that compiles and fits the GPU."""
    times = {}
    for tile in candidates(kernel, width):
        try:
            times[tile] = triton.testing.do_bench(lambda tile=tile: run(tile), warmup=1, rep=5, return_mode="median")
        except (OutOfResources, PTXASError):
            continue
    return min(times, key=times.__getitem__)
