"""Load the operands of the experts' kernels on Hopper: rows of tokens, and matrices of experts."""

from torch import Tensor

from liger_like.runtime.blocks import grouped
from liger_like.runtime.gluon import gl, gluon
from liger_like.runtime.hopper import FAR, Descriptor, block
from liger_like.runtime.hopper_products import HALF, STEP, load_step, rows_of_all, weights_of


def factors_of(
    a: Tensor, w: Tensor, transposed: bool, u: Tensor | None, v: Tensor | None
) -> tuple[tuple[Descriptor | None, ...], int]:
    """Return the descriptors of ``a`` and ``w``, then of u [S, R] and v, which is in the layout of w, and R.

    The product with u and v is more depth. Without u these descriptors are None, and R is 0.
    """
    first = rows_of_all(a), weights_of(w, transposed)
    if u is None or v is None:
        return (*first, None, None), 0
    return (*first, rows_of_all(u), weights_of(v, transposed)), u.shape[1]


def rows_of_one(a: Tensor, cols: int, parts: int = 1) -> Descriptor:
    """Return a descriptor of ``a`` [S, parts N] in blocks of 64 rows of a part, which ends where ``within`` says."""
    far, stride, N = FAR.value, a.stride(0), a.shape[1] // parts
    shape, strides = [far + 1, far + 1, parts, far, N], [2**34 - stride, stride, N, stride, 1]
    return Descriptor(a, shape, strides, *block(64, cols, a.element_size(), 5))


@gluon.jit
def within(end, part, row, col):
    """Return the coordinates of a row and a column of a part, where the rows end at ``end``."""
    return FAR, end, part, FAR - end + row, col


@gluon.jit
def steps_of(K, R):
    """Return the number of steps of a depth of K, and of R more."""
    return gl.cdiv(K, STEP) + gl.cdiv(R, STEP)


@gluon.jit
def _load_depth(
    a_desc, w_desc, row, expert, left, right, K, ring, use, STAGES: gl.constexpr
):  # fmt: skip
    """Load rows and a matrix over a depth of K, and return the next use."""
    for k in range(0, K, STEP):
        if w_desc.block_type.shape[-1] == STEP:
            load_step(a_desc, [row, k], w_desc, [expert, left, k], [expert, right, k], ring, use, STAGES)
        else:
            load_step(a_desc, [row, k], w_desc, [expert, k, left], [expert, k, right], ring, use, STAGES)
        use += 1
    return use


@gluon.jit
def load_tiles(
    a_desc, w_desc, u_desc, v_desc, offsets_ptr, tiles_ptr, E, N, K, R, ring, GLU: gl.constexpr,
    INTERLEAVED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of all tiles of a program: rows, and the matrices [N, K] or [K, N] of their experts.

    The rows of u and the matrices of v follow, if there are any, over a depth of R. With GLU N counts the columns of
    gate; unless INTERLEAVED, those of up lie N further.
    """
    SPLIT: gl.constexpr = GLU and not INTERLEAVED  # gate on the left, up on the right
    tiles_n = gl.cdiv(N, HALF if GLU else 2 * HALF)
    tiles_m = gl.load(offsets_ptr + E + 1)
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        expert = gl.load(tiles_ptr + 2 * m)
        row = gl.load(tiles_ptr + 2 * m + 1)
        left = n * HALF if SPLIT else n * 2 * HALF
        right = N + left if SPLIT else HALF + left
        use = _load_depth(a_desc, w_desc, row, expert, left, right, K, ring, use, STAGES)
        if u_desc is not None:
            use = _load_depth(u_desc, v_desc, row, expert, left, right, R, ring, use, STAGES)
