"""What the attention kernels for Hopper share: which calls they take, tensors as TMA moves them, and packed rows."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from liger_like.ops._common import INTERPRET, architecture
from liger_like.ops.attention._setup import Masking

DTYPES = torch.bfloat16, torch.float16
WIDTHS = 64, 128, 256


def on_hopper(masking: Masking, q: Tensor, *others: Tensor) -> bool:
    """Whether the kernels for Hopper take a call with tensors [B, S, H, D] of these dtypes, widths, layouts and masks.

    The others have the dtype and the device of q.
    """
    return (
        not INTERPRET
        and architecture(q.device) == 9
        and q.dtype in DTYPES
        and q.shape[-1] in WIDTHS
        and all(x.shape[-1] == q.shape[-1] for x in others)
        and all(t is None for t in (masking.bias, masking.key_padding_mask, masking.offsets))
        and all(map(_moved_by_tma, (q, *others)))
    )


def _moved_by_tma(x: Tensor) -> bool:
    """Whether features are dense and all else starts at a multiple of 16 bytes; TMA knows no expanded tensors."""
    *strides, dense = x.stride()
    each = 16 // x.element_size()
    whole = x.numel() > 0 and dense == 1 and x.data_ptr() % 16 == 0
    return whole and all(stride > 0 and stride % each == 0 for stride in strides)


class _Descriptor(TensorDescriptor):
    """Of a tensor that ``on_hopper`` has looked at: what is checked for every other one takes longer than the rest."""

    def __post_init__(self) -> None: ...


def descriptor(x: Tensor, rows: int, width: int | None = None) -> TensorDescriptor:
    """``x`` [B, S, H, D] as [B, H, S, D], of which TMA moves ``rows`` rows of ``width`` features (None: all)."""
    (B, S, H, D), (stride_b, stride_s, stride_h, _) = x.shape, x.stride()
    block = [1, 1, rows, width or D]
    return _Descriptor(x, [B, H, S, D], [stride_b, stride_h, stride_s, 1], block, _layout(x.element_size()))


@functools.cache
def _layout(itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=4)


@gluon.jit
def find_rows(block, cu_ptr, cu_other_ptr, count, total, BLOCK: gl.constexpr, SEQUENCES: gl.constexpr):
    """Where a block of rows of packed sequences lies: its first row, where its sequence starts, the length of that, and
    where the other side of it starts and its length.

    A sequence has a block for each multiple of BLOCK in it, and one more; those that it does not need have no length on
    the other side. What follows the last sequence is one more, with nothing on the other side.
    """
    offs = gl.arange(0, SEQUENCES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    starts = gl.load(cu_ptr + offs, mask=offs <= count, other=0).to(gl.int32)
    index = gl.sum(((offs <= count) & (starts // BLOCK + offs <= block)).to(gl.int32), 0) - 1
    start = gl.load(cu_ptr + index).to(gl.int32)
    end = gl.load(cu_ptr + index + 1, mask=index < count, other=total).to(gl.int32)
    start_other = gl.load(cu_other_ptr + index, mask=index < count, other=0).to(gl.int32)
    end_other = gl.load(cu_other_ptr + index + 1, mask=index < count, other=0).to(gl.int32)
    row = (block - start // BLOCK - index) * BLOCK
    return row, start, end - start, start_other, gl.where(row < end - start, end_other - start_other, 0)


@gluon.jit
def clear_rows(buf, first):
    """Zero the rows of a buffer [rows, D] from ``first`` on, which are of another sequence and may hold NaN.

    For one warp group; the others may multiply by the buffer behind a barrier where this one arrives afterwards.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, buf.shape[0], gl.SliceLayout(1, layout))
    x = buf.load(layout)
    buf.store(gl.where((rows < first)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
