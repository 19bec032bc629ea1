"""Choose the tiles of the attention kernels: measured ones for Hopper, others by the shared memory of the GPU.

Four kernels spill registers in a loop: ``MAY_SPILL`` in test/tools/compile_check.py names them.
"""

import functools
from typing import NamedTuple

from torch import Tensor

from liger_like.ops.attention.masking import Masking
from liger_like.runtime.support import gpu_class
from liger_like.runtime.tiles import Tile

LONG = 8192  # keys, from which causal rows are long: measured on an H100, where short ones lose
# kernel -> widest head -> tile, and the one for scores with a softcap or a bias
Tiles = dict[str, dict[int, tuple[Tile, Tile]]]
TILES: dict[str, Tiles] = {
    "hopper": {
        "fwd": {
            64: (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
            128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
            192: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
            256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        },
        "few": {
            64: (Tile(16, 64, 2, 3), Tile(16, 64, 2, 3)),
            128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
            256: (Tile(16, 64, 4, 3), Tile(16, 64, 4, 3)),
        },
        "dkv": {
            64: (Tile(64, 64, 4, 3), Tile(32, 128, 8, 1)),
            96: (Tile(64, 64, 4, 3), Tile(32, 128, 8, 1)),
            128: (Tile(64, 128, 8, 3), Tile(32, 128, 8, 1)),
            192: (Tile(16, 64, 4, 3), Tile(32, 64, 8, 1)),
            256: (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
        },
        "dq": {
            64: (Tile(64, 64, 4, 3), Tile(128, 64, 8, 2)),
            96: (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
            128: (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3)),
            192: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 1)),
            256: (Tile(128, 64, 8, 1), Tile(64, 32, 8, 2)),
        },
        "dbias": {256: (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1))},
        "paged": {
            64: (Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
            128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
            256: (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3)),
        },
        "paged_rows": {
            64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
            128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
            256: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        },
        "latent": {256: (Tile(64, 64, 8, 3),) * 2, 512: (Tile(64, 64, 8, 2),) * 2},
        "latent_rows": {256: (Tile(64, 64, 8, 3),) * 2, 512: (Tile(64, 32, 8, 4),) * 2},
    },
    "large": {
        "fwd": {
            64: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2)),
            128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 1)),
            192: (Tile(128, 64, 8, 3), Tile(32, 32, 4, 1)),
            256: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        },
        "few": {
            64: (Tile(16, 64, 2, 3), Tile(16, 64, 2, 3)),
            128: (Tile(16, 64, 4, 3), Tile(16, 32, 4, 4)),
            256: (Tile(16, 32, 4, 4), Tile(16, 32, 4, 4)),
        },
        "dkv": {
            64: (Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
            96: (Tile(16, 64, 4, 2), Tile(16, 32, 4, 1)),
            128: (Tile(16, 128, 8, 1), Tile(16, 32, 4, 1)),
            192: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
            256: (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
        },
        "dq": {
            64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 1)),
            96: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
            128: (Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
            256: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        },
        "dbias": {
            64: (Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
            192: (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1)),
            256: (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
        },
        "paged": {
            128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
            256: (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3)),
        },
        "paged_rows": {
            128: (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)),
            256: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        },
        "latent": {256: (Tile(32, 32, 8, 2),) * 2, 512: (Tile(32, 16, 8, 3),) * 2},
        "latent_rows": {256: (Tile(32, 32, 8, 2),) * 2, 512: (Tile(32, 16, 8, 3),) * 2},
    },
    "small": {
        "fwd": {
            128: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
            256: (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
        },
        "few": {
            64: (Tile(16, 64, 2, 3), Tile(16, 64, 2, 3)),
            128: (Tile(16, 32, 2, 2), Tile(16, 32, 2, 2)),
            256: (Tile(16, 16, 2, 2), Tile(16, 16, 2, 2)),
        },
        "dkv": {
            64: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
            96: (Tile(16, 64, 4, 2), Tile(16, 16, 4, 1)),
            128: (Tile(16, 128, 8, 1), Tile(16, 16, 4, 1)),
            256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        },
        "dq": {
            128: (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
            256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        },
        "dbias": {256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
        "paged": {
            128: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
            256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 2)),
        },
        "paged_rows": {
            128: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
            256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        },
        "latent": {256: (Tile(32, 16, 8, 2),) * 2, 512: (Tile(32, 16, 8, 2),) * 2},
        "latent_rows": {256: (Tile(32, 16, 8, 2),) * 2, 512: (Tile(32, 16, 8, 2),) * 2},
    },
}
TILES["rtx"] = TILES["small"] | {
    "few": TILES["small"]["few"]
    | {128: (Tile(16, 64, 2, 2), Tile(16, 64, 2, 2)), 256: (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2))},
    "dkv": TILES["small"]["dkv"] | {64: (Tile(32, 64, 4, 2), Tile(32, 32, 4, 1))},
    "dq": {
        96: (Tile(64, 32, 4, 2), Tile(32, 16, 4, 1)),
        128: (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
        192: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        256: (Tile(32, 32, 4, 2), Tile(16, 16, 4, 1)),
    },
}
FP32: Tiles = {
    "fwd": {64: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), 256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    "dkv": {256: (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1))},
    "dq": {256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    "dbias": {256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    "paged": {64: (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)), 256: (Tile(64, 16, 4, 1), Tile(64, 16, 4, 1))},
    "paged_rows": {64: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), 256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
}
FP32["few"] = FP32["fwd"]


class HopperForward(NamedTuple):
    """Warp groups of 64 queries, keys in a block, buffers for those, whether the groups multiply in turn, whether p
    times the values overlaps with the scores of the next block, which takes registers, how many parts of the queries
    stay in registers, and whether rows are rescaled only where their scores grow far.
    """

    groups: int
    block_n: int
    stages: int
    turns: bool = False
    overlap: bool = True
    loaded: int = 0
    lazy: bool = False

    def constants(self) -> dict[str, int]:
        """Return the constexprs and launch options of the kernel."""
        return {
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "GROUPS": self.groups,
            "TURNS": self.turns,
            "OVERLAP": self.overlap,
            "LOADED": self.loaded,
            "LAZY": self.lazy,
            "num_warps": 4,
        }


TWO = HopperForward(2, 128, 2)
LAZY = TWO._replace(lazy=True)
THREE = HopperForward(3, 128, 2, turns=True, overlap=False, lazy=True)
OVERLAPPED = THREE._replace(overlap=True)
SHORT = OVERLAPPED._replace(block_n=64, stages=4)
WITH_QUERIES = LAZY._replace(loaded=1)
WIDE = HopperForward(2, 64, 2, turns=True, loaded=1, lazy=True)
# widest head -> options of two warp groups, of three, and instead of two for windows; the keys from which three pay
HOPPER_FORWARD = {
    (64, 64): (TWO, OVERLAPPED, SHORT._replace(turns=False), 512),
    (96, 96): (TWO, THREE, SHORT, 512),
    (128, 128): (LAZY, THREE, LAZY, 1024),
    (192, 128): (WITH_QUERIES, WITH_QUERIES, WITH_QUERIES, 0),
    (256, 256): (WIDE, WIDE, WIDE, 0),
}


def hopper_forward(D: int, Dv: int, masking: Masking, S: int, SK: int) -> HopperForward:
    """Return the options for heads of D features, with values of Dv, and S queries and SK keys of a batch, or of all
    packed sequences.

    Three warp groups share each block of keys. They pay if a query sees many keys on average, and if there are queries
    for more than two groups; a softcap needs their registers, and those for queries, and takes no turns.
    """
    rows = HOPPER_FORWARD.items()
    two, three, window, least = next(row for (width, width_v), row in rows if width >= D and width_v >= Dv)
    if masking.softcap is not None:
        return two._replace(loaded=0, turns=False)
    if masking.max_seqlen_q <= 128:
        return two
    documents = max(1, masking.sequences / 2)  # most tokens are in documents longer than the average
    seen = SK / documents
    if masking.right >= 0 or masking.spans is not None:
        seen -= S / documents / 2 + 96  # a tile of three groups also computes what few of its rows see
    if masking.left >= 0 and masking.right >= 0 and (shown := masking.left + masking.right + 1 - 96) < seen:
        two, seen = window, shown
    return three if seen >= least else two


def is_long(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> bool:
    """Return True if dq of these heads takes less time with a loop of its own for the keys that need no mask.

    That holds on Hopper for causal rows of at least ``LONG`` keys with heads of 65 to 128 features. Wider heads leave
    no registers for two loops.
    """
    causal = masking.left < 0 <= masking.right and masking.softcap is None
    plain = causal and all(tensor is None for tensor in masking.pointers()) and q.element_size() == 2
    width = max(q.shape[-1], v.shape[-1])
    return plain and 64 < width <= 128 and k.shape[1] >= LONG and gpu_class(q.device) == "hopper"


def tile_for(kernel: str, q: Tensor, v: Tensor, masking: Masking) -> Tile:
    """Return the tile of a kernel for the heads of q and v on their GPU.

    "few" is the forward of decode steps, whose rows are the heads of a group: no more of them than its tile has.
    """
    rich = masking.softcap is not None or masking.bias is not None
    return _tile(kernel, gpu_class(q.device), max(q.shape[-1], v.shape[-1]), q.element_size(), rich)


def paged_tile(kernel: str, q: Tensor, v: Tensor, softcap: float | None) -> Tile:
    """Return the tile of a kernel for heads like those of q and v in paged caches.

    "paged" is for few rows: its tile has the most rows of a program, and the op takes no more than there are.
    "paged_rows" is for blocks of rows. "latent" and "latent_rows" are the same where values are keys, too.
    """
    return _tile(kernel, gpu_class(q.device), max(q.shape[-1], v.shape[-1]), q.element_size(), softcap is not None)


@functools.cache
def _tile(kernel: str, gpu: str, width: int, itemsize: int, rich: bool) -> Tile:
    table = FP32[kernel] if itemsize == 4 else TILES[gpu][kernel]
    plain, with_more = next(tiles for widest, tiles in table.items() if width <= widest)
    return with_more if rich else plain
