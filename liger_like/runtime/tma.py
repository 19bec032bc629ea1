"""Which operands the kernels of products for Hopper take."""

import torch
from torch import Tensor

from liger_like.runtime import machine
from liger_like.runtime.machine import address
from liger_like.runtime.support import INTERPRET, architecture

DTYPES = torch.bfloat16, torch.float16
MOST_ROWS = 2**30  # that a descriptor of ``runtime.hopper`` has
NO_TMA = (
    "TMA moves no tensor that is empty, expanded or of 2^30 rows, nor rows that do not start at multiples of 16 bytes"
)


def on_hopper(x: Tensor, *others: Tensor) -> bool:
    """Return True for half precision on a Hopper GPU, and sizes that are multiples of 8 but for the first."""
    return _is_hopper(x.device) and x.dtype in DTYPES and all(n % 8 == 0 for t in (x, *others) for n in t.shape[1:])


@torch.compiler.assume_constant_result
def _is_hopper(device: torch.device) -> bool:
    return (not INTERPRET or machine.current is not None) and architecture(device) == 9


def moved_by_tma(x: Tensor) -> bool:
    """Return True if TMA can move ``x``: dense rows, strides that are multiples of 16 bytes but not 0, few rows."""
    *strides, dense = x.stride()
    size, starts = x.element_size(), address(x)
    for stride in strides:
        starts |= stride * size
    whole = dense == 1 and x.numel() > 0 and 0 not in strides
    return whole and x.shape[0] < MOST_ROWS and not starts & 15
