"""The speed-ups of Triton's interpreter keep its checks."""

import pytest
import torch
import triton
import triton.language as tl
from conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled where there is a GPU")


@triton.jit
def _step(x, STEP: tl.constexpr):
    return tl.maximum(x + STEP, x) - x


@triton.jit
def _arithmetic_kernel(x_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(
        x_ptr + offs, x + x if OP == "add" else (-x - 2) - x if OP == "sub" else x * x if OP == "mul" else _step(x, 3)
    )


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_integers_that_overflow_are_an_error(op):
    for dtype in (torch.int32, torch.int16):
        _arithmetic_kernel[(1,)](torch.tensor([1, 7], dtype=dtype), op, 2)
        largest = torch.tensor([1, torch.iinfo(dtype).max], dtype=dtype)
        with pytest.raises(Exception, match=f"int{dtype.itemsize * 8} overflow detected for operation {op}"):
            _arithmetic_kernel[(1,)](largest, op, 2)


def test_language_is_as_it_was_after_a_launch():
    before = tl.load, tl.sum, tl.tensor.__add__
    x = torch.tensor([1, 7])
    for _ in range(2):
        _arithmetic_kernel[(1,)](x, "step", 2)
        assert x.tolist() == [3, 3]
        assert (tl.load, tl.sum, tl.tensor.__add__) == before


@triton.jit
def _types_kernel(x_ptr, n_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, n = tl.load(x_ptr + offs), tl.load(n_ptr + offs)
    tl.static_assert((x + x).dtype == tl.float16)
    tl.static_assert((3 * x).dtype == tl.float16)
    tl.static_assert((x / x).dtype == tl.float32)
    tl.static_assert((x / 3).dtype == tl.float32)
    tl.static_assert((n - 1).dtype == tl.int32)
    tl.static_assert((n * 2.5).dtype == tl.float32)
    tl.static_assert((n < 1).dtype == tl.int1)
    out = n[:, None] * 2.5 + (x[None, :] - 1)
    tl.static_assert(out.dtype == tl.float32)
    tl.store(out_ptr + offs[:, None] * BLOCK + offs[None, :], out)


def test_types_and_shapes_of_operands_are_those_of_triton():
    x, n = torch.tensor([1.5, -7.0], dtype=torch.float16), torch.tensor([3, -1], dtype=torch.int32)
    for _ in range(2):  # the second launch finds types and constants made
        out = torch.empty(2, 2)
        _types_kernel[(1,)](x, n, out, 2)
        torch.testing.assert_close(out, n[:, None] * 2.5 + (x.float() - 1), rtol=0, atol=0)
    with pytest.raises(Exception, match="power of 2"):
        _types_kernel[(1,)](x, n, out, 3)
