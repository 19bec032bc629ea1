"""Scores in 16 bits, from which probabilities follow about as exactly as from scores in fp32.

A row of scores z is kept as 2^15 exp(z - top) in fp16, where top, in fp32, is the largest score of ``WORDS`` words.
That has a relative error of 2^-12 down to 2^-29 of the largest, where a score in bf16 has an absolute error of 2^-9
|z|. So a row's probabilities still sum to 1, and the rounding of a gradient to bf16 outweighs that of its exponential.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_like.runtime.launcher import launch

WORDS = 256  # that share a largest score: the columns of a tile in ``hopper.py``
LARGEST_EXPONENT = 15  # of an exponential: 2^16 is infinite in fp16
UNIT = tl.constexpr(2.0**-LARGEST_EXPONENT)


@triton.jit
def _load_exponentials(z_ptr, top_ptr, v, offs_v, V, BLOCK_V: tl.constexpr, WORDS: tl.constexpr):
    """Return what is kept of the columns ``offs_v`` from ``v`` on, 0 beyond V, and the largest scores."""
    offs = v // WORDS + tl.arange(0, BLOCK_V // WORDS)
    top = tl.load(top_ptr + offs, mask=offs * WORDS < V, other=0.0)
    return tl.load(z_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32), top


@triton.jit
def load_scores(z_ptr, top_ptr, v, offs_v, V, BLOCK_V: tl.constexpr, WORDS: tl.constexpr):
    """Return the scores of the columns ``offs_v`` [BLOCK_V / WORDS, WORDS] from ``v`` on; -inf beyond V."""
    e, top = _load_exponentials(z_ptr, top_ptr, v, offs_v, V, BLOCK_V, WORDS)
    return tl.where(e == 0.0, float("-inf"), top[:, None] + tl.log(tl.where(e == 0.0, 1.0, e) * UNIT))


@triton.jit
def load_probabilities(z_ptr, top_ptr, v, offs_v, V, lse, lse_rest, BLOCK_V: tl.constexpr, WORDS: tl.constexpr):
    """Return the probabilities of the columns ``offs_v``: one exponential is computed for WORDS of them."""
    e, top = _load_exponentials(z_ptr, top_ptr, v, offs_v, V, BLOCK_V, WORDS)
    return e * (tl.exp((top - lse) - lse_rest) * UNIT)[:, None]


@triton.jit
def _exponentials_kernel(
    z_ptr, out_ptr, top_ptr, stride_zm, stride_om, stride_tm, V, logit_scale,
    BLOCK_P: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_v = offs_p[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    z = tl.load(z_ptr + row * stride_zm + offs_v, mask=offs_v < V, other=0.0).to(tl.float32) * logit_scale
    z = tl.where(offs_v < V, z, float("-inf"))
    top = tl.max(z, axis=1)
    e = tl.exp(z - tl.where(top == float("-inf"), 0.0, top)[:, None]) / UNIT  # logits of -inf are legal: no inf - inf
    tl.store(out_ptr + row * stride_om + offs_v, e.to(tl.float16), mask=offs_v < V)
    tl.store(top_ptr + row * stride_tm + offs_p, top, mask=offs_p * WORDS < V)


def parts_of(V: int) -> int:
    """Return the number of parts of ``V`` words that share a largest score."""
    return -(-V // WORDS)


def store_exponentials(z: Tensor, logit_scale: float, out: Tensor, tops: Tensor) -> None:
    """Fill ``out`` [M, V] in fp16 and ``tops`` [M, parts] with the scores ``logit_scale`` z of logits ``z`` [M, V]."""
    M, V = z.shape
    launch(
        _exponentials_kernel,
        (M, -(-tops.shape[1] // 8)),
        (z, out, tops),
        (z.stride(0), out.stride(0), tops.stride(0), V),
        (logit_scale,),
        BLOCK_P=8,
        WORDS=WORDS,
        num_warps=4,
    )
