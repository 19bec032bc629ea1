"""Tiles of the experts' products, by kind of GPU and dtype. No shape is tuned, or compiled apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_like.runtime import machine
from liger_like.runtime.blocks import block_of
from liger_like.runtime.support import INTERPRET, gpu_class

GROUP = 8  # tiles of rows that are computed together: their operands stay in L2


class Tile(NamedTuple):
    """Rows, columns and depth of a tile, and its launch options.

    A tile of gate_up has ``block_n`` columns of gate and as many of up.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def narrowed(self, M: int | None = None, N: int | None = None) -> "Tile":
        """Return the tile with no more rows and columns than products of M rows and N columns, such as ranks, need."""
        blocks = {"block_m": (self.block_m, M), "block_n": (self.block_n, N)}
        return self._replace(**{n: min(block, block_of(max(16, size))) for n, (block, size) in blocks.items() if size})

    def constants(self) -> dict[str, int]:
        """Return the block sizes as constexprs, and the launch options."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": GROUP}
        return blocks | {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Tiles(NamedTuple):
    """The tiles of the four products; those over rows have the same ``block_m``."""

    gate_up: Tile
    rows_times: Tile
    down_bwd: Tile
    depth: Tile


LARGE = Tiles(Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3))
SMALL = Tiles(Tile(128, 64, 32, 8, 3), Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 8, 3), Tile(128, 128, 32, 8, 3))
TILES = {"hopper": LARGE, "large": LARGE, "rtx": SMALL, "small": SMALL}
# no asynchronous load moves rows whose bytes are no multiple of 16: a tile takes more registers
UNALIGNED = Tiles(Tile(128, 32, 32, 8, 2), Tile(128, 64, 32, 8, 2), Tile(128, 64, 32, 8, 2), Tile(128, 64, 32, 8, 2))
FP32 = Tiles(Tile(64, 32, 32, 4, 2), Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 8, 2), Tile(64, 64, 32, 4, 2))
INTERPRETED = Tiles(Tile(16, 16, 16, 4, 1), Tile(16, 32, 16, 4, 1), Tile(16, 16, 16, 4, 1), Tile(16, 32, 16, 4, 1))


def tiles_for(x: Tensor, *widths: int) -> Tiles:
    """Return the tiles for operands like ``x`` with rows of these widths; small ones in the interpreter."""
    if INTERPRET and machine.current is None:
        return INTERPRETED
    if x.dtype == torch.float32:
        return FP32
    return TILES[gpu_class(x.device)] if all(width % 8 == 0 for width in widths) else UNALIGNED


def tile_rows(dtype: torch.dtype) -> int:
    """Return the rows of a tile. They depend on the dtype only, since all products go through one table of tiles."""
    small = INTERPRET and machine.current is None
    return (INTERPRETED if small else FP32 if dtype == torch.float32 else UNALIGNED).gate_up.block_m
