"""Gluon kernel of ``dw_sum.add_products`` for Hopper, as fast as a plain product of cuBLAS.

One program per multiprocessor loops over tiles of [128, 256]. One warp loads by TMA: the operands into a ring of STAGES
buffers, and after a tile's last operands the tile's stored sum. Two warp groups multiply 64 rows each, add the stored
sum and store the new sum. Each buffer has a barrier "full" and a barrier "empty". Filling number ``use`` goes into
buffer use % STAGES, and the parity of use // STAGES is the phase of its barriers.
"""

import torch
from torch import Tensor

from liger_like.runtime.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from liger_like.runtime.launcher import launch
from liger_like.runtime.support import num_programs

HALF_M, BLOCK_N, BLOCK_K, STAGES = 64, 256, 64, 3
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _load(
    a_desc, b_desc, sum_desc, M, N, K, a_bufs, b_bufs, sum_bufs, full, empty, sum_full, sum_empty,
    ACCUMULATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[0]
    HALF_M: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[1]
    tiles_n = gl.cdiv(N, BLOCK_N)
    use = 0
    sum_use = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, 2 * HALF_M) * tiles_n, gl.num_programs(0)):
        row = tile // tiles_n * (2 * HALF_M)
        col = tile % tiles_n * BLOCK_N
        for k in range(0, K, BLOCK_K):
            i = use % STAGES
            mbarrier.wait(empty.index(i), (use // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(i), 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [k, row], full.index(i), a_bufs.index(2 * i))
            tma_load(a_desc, [k, row + HALF_M], full.index(i), a_bufs.index(2 * i + 1))
            tma_load(b_desc, [k, col], full.index(i), b_bufs.index(i))
            use += 1
        if ACCUMULATE:
            for half in gl.static_range(2):
                mbarrier.wait(sum_empty.index(half), sum_use & 1 ^ 1)
                mbarrier.expect(sum_full.index(half), sum_desc.block_type.nbytes)
                tma_load(sum_desc, [row + half * HALF_M, col], sum_full.index(half), sum_bufs.index(half))
            sum_use += 1


@gluon.jit
def _multiply(
    half: gl.constexpr, a_desc, b_desc, out_desc, exponent_ptr, factor_ptr, M, N, K,
    a_bufs, b_bufs, sum_bufs, full, empty, sum_full, sum_empty, ACCUMULATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[0]
    HALF_M: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    tiles_n = gl.cdiv(N, BLOCK_N)
    sum_buf = sum_bufs.index(half)
    use = 0
    sum_use = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, 2 * HALF_M) * tiles_n, gl.num_programs(0)):
        row = tile // tiles_n * (2 * HALF_M) + half * HALF_M
        offs_m = row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
        exponent_ptrs = exponent_ptr + offs_m.to(gl.int64) * tiles_n + tile % tiles_n
        if ACCUMULATE:
            exponent = gl.load(exponent_ptrs, mask=offs_m < M, other=127).to(gl.int32)
            unit = (exponent << 23).to(gl.float32, bitcast=True)
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout=layout)
        for k in range(0, K, BLOCK_K):
            i = use % STAGES
            mbarrier.wait(full.index(i), use // STAGES & 1)
            acc = warpgroup_mma(a_bufs.index(2 * i + half).permute((1, 0)), b_bufs.index(i), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous product is done, so its buffer is free
            mbarrier.arrive(empty.index((use + STAGES - 1) % STAGES), count=1, pred=k > 0)
            if k == 0:  # the last tile's sum is stored by now, so this wait is short and frees its buffer
                tma_store_wait(0)
                if ACCUMULATE:
                    mbarrier.arrive(sum_empty.index(half), count=1, pred=sum_use > 0)
            use += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((use + STAGES - 1) % STAGES), count=1)
        if ACCUMULATE:
            mbarrier.wait(sum_full.index(half), sum_use & 1)
            acc += sum_buf.load(layout).to(gl.float32) * unit[:, None]
            sum_use += 1
        if factor_ptr is not None:
            sum_buf.store((acc * gl.load(factor_ptr)).to(gl.bfloat16).to(gl.float16, bitcast=True))
        else:
            top = gl.max(gl.abs(acc), axis=1).to(gl.int32, bitcast=True) >> 23
            exponent = gl.minimum(gl.maximum(top - 14, 16), 240)
            inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
            sum_buf.store((acc * inverse[:, None]).to(gl.float16))
            gl.store(exponent_ptrs, exponent.to(gl.uint8), mask=offs_m < M)
        fence_async_shared()
        tma_store(out_desc, [row, tile % tiles_n * BLOCK_N], sum_buf)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["K"])
def _add_products_hopper_kernel(
    a_desc, b_desc, sum_desc, out_desc, exponent_ptr, factor_ptr, M, N, K,
    ACCUMULATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[0]
    HALF_M: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, BLOCK_K, HALF_M], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    sum_bufs = gl.allocate_shared_memory(sum_desc.dtype, [2, HALF_M, BLOCK_N], sum_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both warp groups read a buffer
    for half in gl.static_range(2):
        mbarrier.init(sum_full.index(half), count=1)
        mbarrier.init(sum_empty.index(half), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, a_desc, b_desc, out_desc, exponent_ptr, factor_ptr, M, N, K, a_bufs, b_bufs, sum_bufs,
                         full, empty, sum_full, sum_empty, ACCUMULATE, STAGES)),
            (_multiply, (1, a_desc, b_desc, out_desc, exponent_ptr, factor_ptr, M, N, K, a_bufs, b_bufs, sum_bufs,
                         full, empty, sum_full, sum_empty, ACCUMULATE, STAGES)),
            (_load, (a_desc, b_desc, sum_desc, M, N, K, a_bufs, b_bufs, sum_bufs, full, empty, sum_full, sum_empty,
                     ACCUMULATE, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def _descriptor(t: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[t.dtype])
    return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block, layout)


def add_products(
    total: Tensor, out: Tensor, exponents: Tensor, factor: Tensor | None, a: Tensor, b: Tensor, *, accumulate: bool
) -> None:
    """Run ``dw_sum.add_products``, with an exponent for each row and block of ``BLOCK_N`` columns."""
    (K, M), N = a.shape, b.shape[1]
    tiles = -(-M // (2 * HALF_M)) * -(-N // BLOCK_N)
    descriptors = (
        _descriptor(a, [BLOCK_K, HALF_M]),
        _descriptor(b, [BLOCK_K, BLOCK_N]),
        _descriptor(total, [HALF_M, BLOCK_N]),
        _descriptor(out, [HALF_M, BLOCK_N]),
    )
    launch(
        _add_products_hopper_kernel,
        (min(num_programs(a.device, 1), tiles),),
        (exponents, factor),
        (M, N, K),
        (),
        descriptors,
        ACCUMULATE=accumulate,
        STAGES=STAGES,
        num_warps=4,
    )
