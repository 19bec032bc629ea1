"""Triton kernel of ``dw_sum.add_products``, for GPUs with TMA; Blackwell uses it."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_like.runtime.launcher import launch
from liger_like.runtime.support import num_programs

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["K"])
def _add_products_kernel(
    a_desc, b_desc, sum_desc, out_desc, exponent_ptr, factor_ptr, M, N, K,
    ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    # flatten: the loads of a tile overlap the end of the tile before
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0), flatten=True):
        row = tile // tiles_n * BLOCK_M
        col = tile % tiles_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            a = a_desc.load([k * BLOCK_K, row])
            b = b_desc.load([k * BLOCK_K, col])
            acc = tl.dot(a.T, b, acc)
        offs_m = row + tl.arange(0, BLOCK_M)
        exponent_ptrs = exponent_ptr + offs_m.to(tl.int64) * tiles_n + tile % tiles_n
        if ACCUMULATE:
            exponent = tl.load(exponent_ptrs, mask=offs_m < M, other=127).to(tl.int32)
            unit = (exponent << 23).to(tl.float32, bitcast=True)
            acc += sum_desc.load([row, col]).to(tl.float32) * unit[:, None]
        if factor_ptr is not None:
            rounded = (acc * tl.load(factor_ptr)).to(tl.bfloat16).to(tl.float16, bitcast=True)
        else:
            # in units of 2^-14 of the row's leading power of two the largest element is in [2^14, 2^15)
            top = tl.max(tl.abs(acc), axis=1).to(tl.int32, bitcast=True) >> 23
            exponent = tl.minimum(tl.maximum(top - 14, 16), 240)
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            rounded = (acc * inverse[:, None]).to(tl.float16)
            tl.store(exponent_ptrs, exponent.to(tl.uint8), mask=offs_m < M)
        out_desc.store([row, col], rounded)


def add_products(
    total: Tensor, out: Tensor, exponents: Tensor, factor: Tensor | None, a: Tensor, b: Tensor, *, accumulate: bool
) -> None:
    """Run ``dw_sum.add_products``, with an exponent for each row and block of ``TILE["BLOCK_N"]`` columns."""
    (K, M), N = a.shape, b.shape[1]
    block_m, block_n, block_k = TILE["BLOCK_M"], TILE["BLOCK_N"], TILE["BLOCK_K"]
    programs = min(num_programs(a.device, 1), -(-M // block_m) * -(-N // block_n))
    descriptors = (
        TensorDescriptor(a, [K, M], [a.stride(0), 1], [block_k, block_m]),
        TensorDescriptor(b, [K, N], [b.stride(0), 1], [block_k, block_n]),
        TensorDescriptor(total, [M, N], [N, 1], [block_m, block_n]),
        TensorDescriptor(out, [M, N], [N, 1], [block_m, block_n]),
    )
    launch(
        _add_products_kernel,
        (programs,),
        (exponents, factor),
        (M, N, K),
        (),
        descriptors,
        ACCUMULATE=accumulate,
        **TILE,
    )
