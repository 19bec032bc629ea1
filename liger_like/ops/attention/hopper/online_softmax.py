"""Compute the softmax of blocks of scores in the registers of a warp group, relative to a reference of each row.

The output and the sum of a row are relative to the same reference, so it may be lower than the greatest score. A block
with a score that exceeds it by more than SLACK raises it to the greatest score so far. In a warp without such a row the
threads that share a row exchange nothing, and no sum is rescaled.

To look for such a row, a thread takes the maximum of 0 and its scores, read as integers: one instruction compares three
integers, and two floats. Floats from 0 on have the order of their integers, and floats below 0 are integers below 0.
That bound is too high for a row whose reference is below -SLACK. There the least of the integers without a sign counts:
it is the greatest score if all are below 0. Exact maxima follow only where a row exceeds its reference.

Numbers of such rows are tensors [ROWS, 4]: each of the four threads that share a row has its own. Assembly holds all
this, since only there a warp can branch on its own, without a barrier among the four warps of its group.
"""

import triton

from liger_like.ops.attention.hopper.products import times_rows
from liger_like.runtime.gluon import gl, gluon
from liger_like.runtime.hopper import ROWS

SLACK = gl.constexpr(8.0)  # p is at most 2^SLACK


@gluon.jit
def _in_threads(x):
    """Return a sum [ROWS, N] as [ROWS, N // 8, 4, 2]: the third index is a thread's among those that share a row."""
    return x.reshape([ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def _halved(parts):
    """Split tensors [ROWS, N] into tensors [ROWS, 4]."""
    if parts[0].shape[1] == 4:
        return parts
    else:
        halves = ()
        for i in gl.static_range(len(parts)):
            halves += parts[i].reshape([ROWS, 2, parts[i].shape[1] // 2]).permute((0, 2, 1)).split()
        return _halved(halves)


@gluon.jit
def sum_in_threads(p):
    """Return the sums [ROWS, 4] over the columns of each thread."""
    return gl.sum(gl.sum(_in_threads(p), 3), 1)


@gluon.jit
def _across(x, like):
    """Return the number of each row and thread for all of its elements of ``like``, a sum."""
    parts = _in_threads(like)
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout)))
    x, _ = gl.broadcast(x.expand_dims(1).expand_dims(3), parts)
    return gl.convert_layout(x.reshape(like.shape), like.type.layout)


@triton.constexpr_function
def _raise_in_assembly(count, first):
    """Return assembly and constraints of ``_raise`` for ``count`` scores of each of a thread's two rows.

    Outputs: references, sums, factors, flags. Inputs: references, sums, scores, unit. Each has an operand per row.
    """
    unit = f"${12 + 2 * count}"
    rows = [(m, least, i, [f"${12 + 2 * n + i}" for n in range(count)]) for i, (m, least) in enumerate(("mu", "nv"))]

    def fold(kind, m, values):
        return "".join(f"{kind} {m}, {a}, {b};" for a, b in zip([values[0]] + [m] * count, values[1:], strict=False))

    def test(i, m, holds):
        """Say whether the score ``m`` exceeds the reference of a row by more than SLACK."""
        return f"neg.f32 x, ${i}; fma.rn.f32 x, {m}, {unit}, x; setp.{holds}, x, {SLACK.value:f}"

    vote = f"{test(0, 'm', 'gt.f32 high')}; {test(1, 'n', 'gt.or.f32 high')}, high; vote.sync.any.pred high, high, -1;"
    leave = "@!high bra DONE;"
    bounds = [fold("max.s32", m, [*scores, "0"]) for m, _, _, scores in rows]
    below = [
        f"{fold('min.u32', least, scores)} setp.lt.f32 own, ${i}, {-SLACK.value:f}; selp.b32 {m}, {least}, {m}, own;"
        for m, least, i, scores in rows
    ]
    search = ["mov.b32 $6, 0; mov.b32 $7, 0;", *bounds, vote, leave, *below, vote, leave]
    maxima = [fold("max.f32", m, scores) for m, *_, scores in rows]
    maxima += [f"shfl.sync.bfly.b32 x, {m}, {by}, 31, -1; max.f32 {m}, {m}, x;" for by in (1, 2) for m, *_ in rows]
    raised = [
        f"{test(i, m, 'gt.f32 own')}; mul.f32 {m}, {m}, {unit}; selp.f32 {m}, {m}, ${i}, own; sub.f32 x, ${i}, {m};"
        f"mov.b32 ${i}, {m}; ex2.approx.ftz.f32 x, x; selp.f32 ${4 + i}, x, 1.0, own;"
        f"mul.f32 ${2 + i}, ${2 + i}, ${4 + i}; mov.b32 ${6 + i}, 1;"
        for m, _, i, _ in rows
    ]
    lines = ["{ .reg .pred high, own; .reg .b32 m, n, u, v, x;", *([] if first else search), *maxima, *raised]
    return " ".join([*lines, "DONE: }"]), ",".join(["=&r"] * 8 + [*"0123"] + ["r"] * (2 * count + 2))


@gluon.jit
def _raise(s, references, total, unit, FIRST: gl.constexpr):
    """Return the references and sums of rows once they suffice for the scores ``s``, the factors of former sums, and
    whether the warp has any but 1. The first scores of all rows need no search.
    """
    pairs = _in_threads(s).split()
    scores = _halved((pairs[0].reshape([ROWS, s.shape[1] // 2]), pairs[1].reshape([ROWS, s.shape[1] // 2])))
    ASSEMBLY: gl.constexpr = _raise_in_assembly(len(scores), FIRST)
    layout: gl.constexpr = scores[0].type.layout
    former = gl.convert_layout(references, layout), gl.convert_layout(total, layout)
    references, raised, factors, flags = gl.inline_asm_elementwise(
        ASSEMBLY[0], ASSEMBLY[1], former + scores + (unit + gl.zeros_like(scores[0]),),
        dtype=(gl.float32, gl.float32, gl.float32, gl.int32), is_pure=True, pack=2,
    )  # fmt: skip
    same: gl.constexpr = total.type.layout
    return gl.convert_layout(references, same), gl.convert_layout(raised, same), factors, flags


@triton.constexpr_function
def _times_in_assembly(count):
    """Return assembly and constraints that multiply the ``count`` sums of a thread: two of its first row, two of its
    second row, and so on.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + (i & 2)};" for i in range(count))
    assembly = f"{{ .reg .pred some; setp.ne.b32 some, ${3 * count}, 0; @!some bra DONE; {products} DONE: }}"
    return assembly, ",".join(["=f"] * count + [*map(str, range(count))] + ["f"] * count + ["r"] * count)


@gluon.jit
def _times(x, factors, flags):
    ASSEMBLY: gl.constexpr = _times_in_assembly(x.shape[1] // 2)
    return gl.inline_asm_elementwise(
        ASSEMBLY[0], ASSEMBLY[1], (x, _across(factors, x), _across(flags, x)),
        dtype=gl.float32, is_pure=True, pack=x.shape[1] // 2,
    )  # fmt: skip


@gluon.jit
def softmax(s, references, total, acc, unit, dtype: gl.constexpr):
    """Return p of a block of scores, the references and sums with it, and ``acc``, in parts, for these references.

    References [ROWS, 4] are seldom raised, as above. References [ROWS] are the greatest scores so far.
    """
    if len(references.shape) == 2:
        references, total, factors, flags = _raise(s, references, total, unit, len(acc) == 0)
        raised = ()
        for i in gl.static_range(len(acc)):
            raised += (_times(acc[i], factors, flags),)
        finite = gl.where(references == float("-inf"), 0.0, references)
        p = gl.exp2(s * unit - _across(finite, s))
        return p.to(dtype), references, total + sum_in_threads(p), raised
    else:
        new_max = gl.maximum(references, gl.max(s, 1) * unit)
        finite = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s * unit - finite[:, None])
        decay = gl.exp2(references - finite)
        total = times_rows((total,), decay)[0] + sum_in_threads(p)
        return p.to(dtype), new_max, total, times_rows(acc, decay)
