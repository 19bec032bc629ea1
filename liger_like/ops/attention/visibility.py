"""Find the rows of a program and the keys that its queries see, for the portable kernels and those for Hopper."""

import triton
import triton.language as tl


@triton.jit
def schedule(pid, blocks, heads, heads_together):
    """Return the block and the head of program ``pid``.

    Blocks of ``heads_together`` heads run at the same time, so that their keys stay in L2. The last blocks come first:
    they have the most to do under a causal mask.
    """
    skipped = pid // (heads_together * blocks) * heads_together
    pid -= skipped * blocks
    size = tl.minimum(heads_together, heads - skipped)
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
    """Return the sequence index of a block of rows, the first row in that sequence, the start and length of the
    sequence, and the start and length of its other side (keys for queries, queries for keys).

    Without ``cu_ptr`` a sequence is a batch of ``total`` rows. With it, one batch holds ``count`` packed sequences, and
    each starts a block. The rows after the last sequence are one more sequence, with length 0 on the other side; a
    block after those rows has length 0. A row counts PACK times.
    """
    zero = tl.full((), 0, tl.int64)
    if cu_ptr is None:
        return b, block * BLOCK, zero, total, zero, total_other
    else:
        offs = tl.arange(0, SEQUENCES)
        starts, ends = start_of(cu_ptr, offs, count, total), start_of(cu_ptr, offs + 1, count, total)
        lengths = tl.maximum(ends - starts, 0)  # decreasing offsets spoil the result, but read nothing outside
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
    """Return the position of the first query minus that of the first key; by default the last ones share a position."""
    if offsets_ptr is None:
        return length_k - length_q
    else:
        # the rows after the packed sequences have no keys, and no offset
        return tl.load(offsets_ptr + index, mask=(length_q > 0) & (length_k > 0), other=0).to(tl.int32)


@triton.jit
def load_spans(ptr, b, B, total, rows):
    """Return the starts and ends of the spans of ``rows`` of a batch of ``total``; later rows get the last span."""
    ptrs = ptr + b * total + tl.minimum(rows, total - 1)
    return tl.load(ptrs), tl.load(ptrs + tl.cast(B, tl.int64) * total)


@triton.jit
def bounds_of_spans(ptr, b, B, total, first, last):
    """Return the least and greatest start, then the least and greatest end of the spans of rows ``first`` to ``last``.

    Spans do not decrease, so two rows decide. The bounds are scalars: the compiler then knows that all threads of a
    program branch alike. Returns None without spans.
    """
    bounds = None
    if ptr is not None:
        least_start, least_end = load_spans(ptr, b, B, total, first)
        greatest_start, greatest_end = load_spans(ptr, b, B, total, last)
        bounds = least_start, greatest_start, least_end, greatest_end
    return bounds


@triton.jit
def visible_range(
    first, last, before, after, bounds, length, part, num_parts, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the start and end of this part's key range, and the inner range that needs no mask.

    Rows ``first`` to ``last`` see the keys from ``before`` positions before to ``after`` positions after their own,
    within ``length`` and the ``bounds`` of their spans, if any. The range is split into ``num_parts`` of whole blocks;
    ``part`` says which one is returned.
    """
    start, end, inner_start, inner_end = 0, length, 0, length
    if HAS_AFTER:
        end = tl.minimum(end, tl.maximum(last + after + 1, 0))
        inner_end = tl.minimum(inner_end, first + after + 1)
    if HAS_BEFORE:
        start = tl.maximum(first - before, 0) // BLOCK * BLOCK
        inner_start = last - before
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
    """Return True where a query sees a key; both are rows of their sequence, and broadcast."""
    seen = keys < length_k
    distance = keys - queries - shift
    if HAS_LEFT:
        seen = seen & (distance >= -left)
    if HAS_RIGHT:
        seen = seen & (distance <= right)
    return seen


@triton.jit
def between(others, rows, shift, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """Return True where ``others`` are from ``before`` positions before to ``after`` positions after ``rows`` shifted
    by ``shift``, within ``length``.

    Each row has a first and a last position, so that a pair needs no more than a comparison with each: fewer registers
    than ``visible`` where a thread holds few rows.
    """
    last = length - 1
    if HAS_AFTER:
        last = tl.minimum(last, rows + shift + after)
    seen = others <= last
    if HAS_BEFORE:
        seen = seen & (others >= rows + shift - before)
    return seen


@triton.jit
def within(seen, spans, others):
    """Return ``seen`` restricted to ``others`` within the spans of the rows that they broadcast with, if there are
    spans.
    """
    if spans is not None:
        seen = seen & (others >= spans[0]) & (others < spans[1])
    return seen
