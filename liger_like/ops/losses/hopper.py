"""Products with the head whose logits are never stored, for Hopper: sums for lse, and the gradient of the logits.

Two warp groups multiply 64 rows each of a tile of [128, 256] logits, and reduce or
differentiate their sums in registers. Logits in memory would take three passes of 4 bytes.
"""

from collections.abc import Sequence

from torch import Tensor

from liger_like.ops.losses.exponentials import LARGEST_EXPONENT
from liger_like.ops.losses.rows import Options
from liger_like.runtime.blocks import grouped
from liger_like.runtime.gluon import fence_async_shared, gl, gluon, tma_store_wait
from liger_like.runtime.hopper import ROWS, Descriptor, block, buffers, sum_layout
from liger_like.runtime.hopper_products import (
    HALF,
    STEP,
    halves_of,
    load_step,
    multiply_steps,
    operands,
    rows_of_all,
    start_store,
    weights_of,
)
from liger_like.runtime.launcher import launch
from liger_like.runtime.layout import packed
from liger_like.runtime.support import programs

FORWARD_STAGES, STAGES, PARTS = 4, 3, gl.constexpr(1)  # a kernel that stores holds a tile of results, too
WIDTH = gl.constexpr(2 * HALF.value)  # columns of a tile
LARGEST = gl.constexpr(2.0**LARGEST_EXPONENT)
GROUP = 16  # tiles of rows that share their operands in L2: 8, 16 and 32 take equally long


@gluon.jit
def _load(x_desc, w_desc, M, V, K, ring, GROUP: gl.constexpr, STAGES: gl.constexpr):
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(V, WIDTH)
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        for k in range(0, K, STEP):
            left, right = [0, n * WIDTH, k], [0, n * WIDTH + HALF, k]
            load_step(x_desc, [m * 2 * ROWS, k], w_desc, left, right, ring, use, STAGES)
            use += 1


@gluon.jit
def _labels(order_ptr, target_ptr, m, half: gl.constexpr, M):
    """Return the rows of a warp group, their tokens and their labels."""
    rows = m * 2 * ROWS + half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, sum_layout(WIDTH)))
    tokens = rows
    if order_ptr is not None:
        tokens = gl.load(order_ptr + rows, mask=rows < M, other=0).to(gl.int32)
    return rows, tokens, gl.load(target_ptr + tokens, mask=rows < M, other=-1)


@gluon.jit
def _start_store_of_tile(out_desc, m, n, half: gl.constexpr, out_s, x):
    """Start to store the rows of a warp group, once those of the tile before have left."""
    left, right = halves_of((x,))
    tma_store_wait(0)
    row = m * 2 * ROWS + half * ROWS
    start_store(out_desc, [row, n * WIDTH], out_s.index(2 * half), left)
    start_store(out_desc, [row, n * WIDTH + HALF], out_s.index(2 * half + 1), right)


@gluon.jit
def _start_store_of_wide_tile(out_desc, m, n, half: gl.constexpr, out_s, x):
    """Start to store the rows of a warp group in fp32, half of the columns after the other in the same memory."""
    left, right = halves_of((x,))
    row = m * 2 * ROWS + half * ROWS
    tma_store_wait(0)
    start_store(out_desc, [row, n * WIDTH], out_s.index(half), left)
    tma_store_wait(0)
    start_store(out_desc, [row, n * WIDTH + HALF], out_s.index(half), right)


@gluon.jit
def _reduce(
    half: gl.constexpr, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring,
    out_s, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = sum_layout(WIDTH)
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(V, WIDTH)
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        rows, _, label = _labels(order_ptr, target_ptr, m, half, M)
        column = gl.where((label >= n * WIDTH) & (label < V), label - n * WIDTH, -1).to(gl.int32)
        acc, use = multiply_steps(half, ring, use, gl.cdiv(K, STEP), PARTS, STAGES)
        if out_desc is not None and out_desc.dtype == gl.float32:
            _start_store_of_wide_tile(out_desc, m, n, half, out_s, acc[0])
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        z = gl.where((cols < V - n * WIDTH)[None, :], acc[0] * scale, float("-inf"))
        at = gl.max(gl.where(cols[None, :] == column[:, None], z, float("-inf")), 1)
        top = gl.max(z, 1)
        z = z - gl.where(top == float("-inf"), 0.0, top)[:, None]  # logits of -inf are legal: no inf - inf
        e = gl.exp(z)
        inside = rows < M
        place = rows.to(gl.int64) * tiles_n + n
        gl.store(top_ptr + place, top, mask=inside)
        gl.store(total_ptr + place, gl.sum(e, 1), mask=inside)
        if dot_ptr is not None:
            gl.store(dot_ptr + place, gl.sum(e * gl.where(e > 0.0, z, 0.0), 1), mask=inside)
        gl.store(at_ptr + rows, at, mask=inside & (column >= 0) & (column < WIDTH))
        if out_desc is not None and out_desc.dtype == gl.float16:
            _start_store_of_tile(out_desc, m, n, half, out_s, e * LARGEST)
    if out_desc is not None:
        tma_store_wait(0)


@gluon.jit
def _reduce_all(
    x_desc, w_desc, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring, out_s,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_reduce, (0, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring,
                       out_s, GROUP, STAGES)),
            (_reduce, (1, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring,
                       out_s, GROUP, STAGES)),
            (_load, (x_desc, w_desc, M, V, K, ring, GROUP, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


@gluon.jit
def _linear_rows_hopper_kernel(
    x_desc, w_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store for each row and tile the largest score, the sums of an online softmax, and for each row its label's."""
    ring = operands(x_desc, w_desc, STAGES)
    _reduce_all(
        x_desc, w_desc, None, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring, None,
        GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def _linear_stored_rows_hopper_kernel(
    x_desc, w_desc, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store what ``_linear_rows_hopper_kernel`` does, and logits in fp32, or in fp16 their exponentials."""
    ring = operands(x_desc, w_desc, STAGES)
    _reduce_all(
        x_desc, w_desc, out_desc, target_ptr, order_ptr, top_ptr, total_ptr, dot_ptr, at_ptr, M, V, K, scale, ring,
        buffers(out_desc, 2 if out_desc.dtype == gl.float32 else 4), GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def _differentiate(
    half: gl.constexpr, out_desc, target_ptr, order_ptr, lse_ptr, rest_ptr, entropy_ptr, dloss_ptr, dlogprob_ptr,
    dentropy_ptr, M, V, K, v_start, vocabulary, ignore_index, scale, ring, out_s, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = sum_layout(WIDTH)
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(V, WIDTH)
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = grouped(tile, tiles_m, tiles_n, GROUP)
        rows, tokens, label = _labels(order_ptr, target_ptr, m, half, M)
        counts = (rows < M) & (label != ignore_index) & (label >= 0) & (label < vocabulary)
        lse = gl.load(lse_ptr + tokens, mask=counts, other=0.0)
        rest = gl.load(rest_ptr + tokens, mask=counts, other=0.0)
        slope = gl.load(dloss_ptr + tokens, mask=counts, other=0.0)
        if dlogprob_ptr is not None:
            slope -= gl.load(dlogprob_ptr + tokens, mask=counts, other=0.0)
        slope *= scale
        column = gl.where(counts, label - v_start - n * WIDTH, -1).to(gl.int32)
        acc, use = multiply_steps(half, ring, use, gl.cdiv(K, STEP), PARTS, STAGES)
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        logp = (acc[0] * scale - lse[:, None]) - rest[:, None]
        p = gl.exp(logp)
        dz = p * slope[:, None]
        if dentropy_ptr is not None:
            entropy = gl.load(entropy_ptr + tokens, mask=counts, other=0.0)
            steep = gl.load(dentropy_ptr + tokens, mask=counts, other=0.0) * scale
            dz -= p * gl.where(p > 0.0, logp + entropy[:, None], 0.0) * steep[:, None]
        dz = gl.where(cols[None, :] == column[:, None], dz - slope[:, None], dz)
        _start_store_of_tile(out_desc, m, n, half, out_s, gl.where(counts[:, None], dz, 0.0))
    tma_store_wait(0)


@gluon.jit
def _linear_dlogits_hopper_kernel(
    x_desc, w_desc, out_desc, target_ptr, order_ptr, lse_ptr, rest_ptr, entropy_ptr, dloss_ptr, dlogprob_ptr,
    dentropy_ptr, M, V, K, v_start, vocabulary, ignore_index, scale, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store the gradient of the logits of V words from ``v_start`` on, as ``_cross_entropy_bwd_kernel`` does."""
    ring = operands(x_desc, w_desc, STAGES)
    out_s = buffers(out_desc, 4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (0, out_desc, target_ptr, order_ptr, lse_ptr, rest_ptr, entropy_ptr, dloss_ptr,
                              dlogprob_ptr, dentropy_ptr, M, V, K, v_start, vocabulary, ignore_index, scale, ring,
                              out_s, GROUP, STAGES)),
            (_differentiate, (1, out_desc, target_ptr, order_ptr, lse_ptr, rest_ptr, entropy_ptr, dloss_ptr,
                              dlogprob_ptr, dentropy_ptr, M, V, K, v_start, vocabulary, ignore_index, scale, ring,
                              out_s, GROUP, STAGES)),
            (_load, (x_desc, w_desc, M, V, K, ring, GROUP, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip


def reduce_logits(
    x: Tensor, w: Tensor, order: Tensor | None, target: Tensor, scale: float, parts: Tensor, at: Tensor,
    stored: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill ``parts`` [2 or 3, M, tiles] and ``at`` [M] for the rows ``x`` [M, H] of the tokens ``order`` and ``w``.

    ``parts`` holds for each WIDTH columns the largest of the scores ``scale`` x w^T, the sum of exp(score - largest)
    and, if it has three, the sum of exp(score - largest) (score - largest). ``at`` holds the scores of the labels.
    ``stored`` [M, V] gets in fp32 the logits x w^T, in fp16 exp(score - largest) times 2^LARGEST_EXPONENT.
    """
    M, H = x.shape
    top, total, *dot = parts
    moved = [rows_of_all(x), weights_of(w[None], False)]
    launch(
        _linear_rows_hopper_kernel if stored is None else _linear_stored_rows_hopper_kernel,
        programs(x.device, -(-M // 128) * parts.shape[2]),
        (packed(target), order, top, total, dot[0] if dot else None, at),
        (M, len(w), H),
        (scale,),
        (*moved, *(() if stored is None else (_tiles_of(stored),))),
        GROUP=GROUP,
        STAGES=FORWARD_STAGES if stored is None else STAGES,
        num_warps=4,
    )


def _tiles_of(out: Tensor) -> Descriptor:
    """Return a descriptor of ``out`` [M, V] in the blocks that a warp group stores."""
    return Descriptor(out, list(out.shape), list(out.stride()), *block(ROWS.value, HALF.value, out.element_size(), 2))


def differentiate_logits(
    x: Tensor, w: Tensor, order: Tensor | None, target: Tensor, lse: tuple[Tensor, Tensor], entropy: Tensor | None,
    upstream: Sequence[Tensor | None], options: Options, v_start: int, vocabulary: int, dz: Tensor,
) -> None:  # fmt: skip
    """Fill ``dz`` [M, V], the gradient of the logits x w^T; the other arguments are those of ``launch_bwd``."""
    (M, H), V = x.shape, len(w)
    dloss, dlogprob, dentropy = upstream
    launch(
        _linear_dlogits_hopper_kernel,
        programs(x.device, -(-M // 128) * -(-V // WIDTH.value)),
        (packed(target), order, *lse, None if dentropy is None else entropy, dloss, dlogprob, dentropy),
        (M, V, H, v_start, vocabulary, options.ignore_index),
        (options.logit_scale,),
        (rows_of_all(x), weights_of(w[None], False), _tiles_of(dz)),
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=4,
    )
