"""Choose the kernels for Hopper: the calls that they accept, and the modules that hold them.

A module is imported at the first call that it accepts, since a Triton newer than the tested ones may fail to import it.
"""

from typing import Any

import torch
from torch import Tensor

from liger_like.ops.attention.flops import forward_flops
from liger_like.ops.attention.masking import FIELDS, Masking
from liger_like.runtime import machine
from liger_like.runtime.fallback import BROKEN, gluon_module
from liger_like.runtime.launcher import is_inlined
from liger_like.runtime.machine import address
from liger_like.runtime.support import INTERPRET, architecture, refused

DTYPES = torch.bfloat16, torch.float16
# of the buffers for queries and keys, and for values; TMA fills up with zeros what narrower heads leave
WIDTHS = (64, 64), (128, 128), (192, 128), (256, 256)
FORWARD, BACKWARD, BACKWARD_192, BACKWARD_256 = (
    f"liger_like.ops.attention.hopper.{name}" for name in ("forward", "backward", "backward_192", "backward_256")
)
MODULES = {FORWARD: WIDTHS, BACKWARD: WIDTHS[:2], BACKWARD_192: WIDTHS[2:3], BACKWARD_256: WIDTHS[2:]}
NO_WIDTHS = "the attention kernels for Hopper have no tile for heads of these widths:"
NO_MASKS = "the attention kernels for Hopper know no bias, key_padding_mask or parts of a longer sequence"
SMALL = 2**34  # FLOPs of two products that take less time on a GPU than the host needs to call an op
NO_TMA = "a tensor is empty or expanded, or its rows do not start at multiples of 16 bytes, as TMA wants them to"


def widths_of(D: int, Dv: int) -> tuple[int, int]:
    """Return the widths of the buffers for heads of D features with values of Dv; zeros if there are none.

    D is at least five eighths of its width, and Dv half.
    """
    fit = (pair for pair in WIDTHS if pair[0] * 5 <= D * 8 <= pair[0] * 8 and pair[1] <= Dv * 2 <= pair[1] * 2)
    return next(fit, (0, 0))


def is_small(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> bool:
    """Return True if a compiled graph should hold the launches of the portable kernels, not an op that calls Python.

    Sizes that torch.compile keeps as symbols do not qualify: the choice would fix them. Nor do packed sequences: torch
    takes what a kernel sums up cumulatively, here their boundaries, for an output of the kernel.
    """
    masking = Masking(*options[:FIELDS])
    sizes = *q.shape, *k.shape, *v.shape, masking.max_seqlen_q, masking.max_seqlen_k
    fixed = masking.cu_seqlens_q is None and all(type(n) is int for n in sizes)
    return fixed and forward_flops(q, k, v, None, *options) < SMALL


def hopper_kernels(name: str, masking: Masking, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
    """Return the module ``name`` of MODULES, or False if its kernels do not accept tensors [B, S, H, D] like these.

    k has the width of q, the others that of v; all have the dtype and the device of q.
    """
    if is_inlined(q):
        return False
    widths = widths_of(q.shape[-1], v.shape[-1])
    masked = masking.bias is not None or masking.key_padding_mask is not None or masking.offsets is not None
    return (
        (any(widths) or refused(f"{NO_WIDTHS} q {q.shape[-1]}, v {v.shape[-1]}"))
        and widths in MODULES[name]
        and (
            not INTERPRET
            or machine.current is not None
            or refused("the attention kernels for Hopper are not interpreted")
        )
        and (architecture(q.device) == 9 or refused("the fastest attention kernels are for Hopper GPUs"))
        and (q.dtype in DTYPES or refused("the attention kernels for Hopper take bfloat16 and float16"))
        and (not masked or refused(NO_MASKS))
        and (all(map(_moved_by_tma, (q, k, v, *others))) or refused(NO_TMA))
        and (name not in BROKEN or refused(f"{name} {BROKEN[name]}"))
        and gluon_module(name)
    )


def _moved_by_tma(x: Tensor) -> bool:
    """Return True if TMA can move ``x``, and a new tensor of its shape.

    The features must be dense, all other strides multiples of 16 bytes, and no dimension expanded.
    """
    stride_b, stride_s, stride_h, dense = x.stride()
    steps = stride_b | stride_s | stride_h | x.shape[3]
    whole = stride_b > 0 and stride_s > 0 and stride_h > 0 and dense == 1 and x.numel() > 0
    return whole and not (steps * x.element_size() | address(x)) & 15
