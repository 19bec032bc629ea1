"""Which rows and keys a program has, and which keys a query sees; for the portable kernels and those for Hopper."""

import triton
import triton.language as tl


@triton.jit
def schedule(pid, blocks, heads, section):
    """Block and head of a program.

    ``section`` heads at a time, so that their keys stay in L2, and of these the last blocks, which have the most to do
    under a causal mask, first.
    """
    skipped = pid // (section * blocks) * section
    pid -= skipped * blocks
    size = tl.minimum(section, heads - skipped)
    return blocks - 1 - pid // size, skipped + pid % size


@triton.jit
def start_of(cu_ptr, index, count, total):
    """Return the row at which a packed sequence starts: 0 for the first, ``total`` past the last of ``count``.

    Offsets outside of ``total`` rows are clamped, so that wrong ones cannot lead out of the tensor.
    """
    start = tl.load(cu_ptr + index, mask=(index > 0) & (index <= count), other=0)
    start = tl.minimum(tl.maximum(start, 0), total).to(tl.int32)
    return tl.where(index > count, total, start)


@triton.jit
def find_rows(
    b, block, cu_ptr, cu_other_ptr, count, total, total_other, BLOCK: tl.constexpr, PACK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Where the given block of rows lies: index of the sequence, the first row in it, where the sequence starts, its
    length, and where the other side of it starts and its length.

    Without ``cu_ptr`` a sequence is a batch of ``total`` rows. With it there are ``count`` in one batch, each of which
    starts a block; what follows the last one is one more, with nothing on the other side, and the length is 0 for a
    block beyond that. A row counts ``PACK`` times.
    """
    zero = tl.full((), 0, tl.int64)
    if cu_ptr is None:
        return b, block * BLOCK, zero, total, zero, total_other
    else:
        offs = tl.arange(0, SEQUENCES)
        starts, ends = start_of(cu_ptr, offs, count, total), start_of(cu_ptr, offs + 1, count, total)
        lengths = tl.maximum(ends - starts, 0)  # offsets that fall are wrong, and so is the result, but nothing else
        blocks = tl.cdiv(lengths * PACK, BLOCK)
        index = tl.sum((tl.cumsum(blocks) <= block).to(tl.int32))
        here = offs == index
        row = (block - tl.sum(tl.where(offs < index, blocks, 0))) * BLOCK
        start = tl.sum(tl.where(here, starts, 0)).to(tl.int64)
        length = tl.sum(tl.where(here & (row >= 0), lengths, 0))
        start_other = start_of(cu_other_ptr, index, count, total_other)
        length_other = tl.maximum(start_of(cu_other_ptr, index + 1, count, total_other) - start_other, 0)
        return index, row, start, length, start_other.to(tl.int64), tl.where(index < count, length_other, 0)


@triton.jit
def shift_of(offsets_ptr, index, length_q, length_k):
    """Position of the first query minus that of the first key; last query and last key stand together by default."""
    if offsets_ptr is None:
        return length_k - length_q
    else:
        # what follows packed sequences has no keys, and no offset
        return tl.load(offsets_ptr + index, mask=(length_q > 0) & (length_k > 0), other=0).to(tl.int32)


@triton.jit
def load_spans(ptr, b, B, total, rows):
    """Where the spans of ``rows`` start and end, in a batch of ``total``; those behind have the span of the last."""
    ptrs = ptr + b * total + tl.minimum(rows, total - 1)
    return tl.load(ptrs), tl.load(ptrs + tl.cast(B, tl.int64) * total)


@triton.jit
def bounds_of_spans(ptr, b, B, total, first, last):
    """Of rows ``first`` to ``last``, whose spans do not fall, the least and the greatest start, and the same of their
    ends: scalars, by which the compiler knows that all threads take the same way. None without spans.
    """
    bounds = None
    if ptr is not None:
        least_start, least_end = load_spans(ptr, b, B, total, first)
        greatest_start, greatest_end = load_spans(ptr, b, B, total, last)
        bounds = least_start, greatest_start, least_end, greatest_end
    return bounds


@triton.jit
def zones(
    first, last, behind, ahead, bounds, length, part, num_parts, HAS_BEHIND: tl.constexpr, HAS_AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``last`` see from ``behind`` before themselves to ``ahead`` after, in spans of these
    ``bounds``, if there are any, and out of ``length``: where the ``part`` of ``num_parts`` of what they see starts and
    ends, and from where to where all see all.
    """
    start, end, inner_start, inner_end = 0, length, 0, length
    if HAS_AHEAD:
        end = tl.minimum(end, tl.maximum(last + ahead + 1, 0))
        inner_end = tl.minimum(inner_end, first + ahead + 1)
    if HAS_BEHIND:
        start = tl.maximum(first - behind, 0) // BLOCK * BLOCK
        inner_start = last - behind
    if bounds is not None:
        least_start, greatest_start, least_end, greatest_end = bounds
        start, end = tl.maximum(start, least_start // BLOCK * BLOCK), tl.minimum(end, greatest_end)
        inner_start, inner_end = tl.maximum(inner_start, greatest_start), tl.minimum(inner_end, least_end)
    start = tl.minimum(start, end)
    share = tl.cdiv(tl.cdiv(end - start, BLOCK), num_parts) * BLOCK
    start = tl.minimum(start + part * share, end)
    return start, tl.minimum(start + share, end), inner_start, inner_end


@triton.jit
def visible(queries, keys, shift, length_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the keys a query sees; both in rows of their sequence."""
    seen = keys < length_k
    distance = keys - queries - shift
    if HAS_LEFT:
        seen = seen & (distance >= -left)
    if HAS_RIGHT:
        seen = seen & (distance <= right)
    return seen


@triton.jit
def within(seen, spans, others):
    """``seen``, but for ``others`` outside the spans, if there are any, of the rows with which they broadcast."""
    if spans is not None:
        seen = seen & (others >= spans[0]) & (others < spans[1])
    return seen
