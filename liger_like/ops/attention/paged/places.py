"""Find the rows and the keys of a sequence, and the places of its keys in paged caches, for the Triton kernels."""

import triton
import triton.language as tl

from liger_like.ops.attention.visibility import start_of


@triton.jit
def rows_of(cu_ptr, b, B, T):
    """Return the first row of sequence ``b``, and the number of its rows: row b alone without ``cu_ptr``."""
    if cu_ptr is None:
        return b, b * 0 + 1
    else:
        start = start_of(cu_ptr, b, B, T)
        return start, tl.maximum(start_of(cu_ptr, b + 1, B, T) - start, 0)


@triton.jit
def keys_of(lengths_ptr, b, B, capacity, STARTS: tl.constexpr, SLOTS: tl.constexpr):
    """Return the place of the first key of sequence ``b`` among all keys, and the number of its keys.

    STARTS: ``lengths_ptr`` has the places where sequences start. A sequence has at most ``capacity`` keys; with SLOTS
    all sequences together.
    """
    if STARTS:
        total = capacity if SLOTS else 2147483647
        start = start_of(lengths_ptr, b, B, total)
        length = start_of(lengths_ptr, b + 1, B, total) - start
    else:
        start = b * 0
        length = tl.load(lengths_ptr + b, mask=b < B, other=0).to(tl.int32)
    return start, tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def load_ids(pages_ptr, b, start, stride_pb, keys, mask, PAGE: tl.constexpr, SLOTS: tl.constexpr):
    """Load the page of each key of sequence ``b``, or with SLOTS its slot, where ``start`` is the place of the first;
    without pages that is ``b``.
    """
    if pages_ptr is None:
        return b
    elif SLOTS:
        return tl.load(pages_ptr + start + keys, mask=mask, other=0)
    else:
        return tl.load(pages_ptr + tl.cast(b, tl.int64) * stride_pb + keys // PAGE, mask=mask, other=0)


@triton.jit
def place_of(ids, keys, HAS_PAGES: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr):
    """Return the page of each key, and its row in that page, both int64; negative ids stay negative pages."""
    if SLOTS:
        ids = ids.to(tl.int64)
        return tl.where(ids < 0, -1, ids // PAGE), tl.where(ids < 0, 0, ids % PAGE)
    elif HAS_PAGES:
        return ids.to(tl.int64), (keys % PAGE).to(tl.int64)
    else:
        return tl.cast(ids, tl.int64), tl.cast(keys, tl.int64)


@triton.jit
def count_chunks(n, length, left, chunk, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of chunks of the keys that the last ``n`` rows of a sequence see, at least one."""
    start = 0
    if HAS_LEFT:
        start = tl.maximum(length - n - left, 0) // BLOCK_N * BLOCK_N
    return tl.maximum(tl.cdiv(length - start, chunk), 1)


@triton.jit
def count_items(
    cu_ptr, lengths_ptr, B, T, capacity, left, chunk, GROUP: tl.constexpr, TOKENS: tl.constexpr, FEW: tl.constexpr,
    HAS_LEFT: tl.constexpr, STARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Return the number of programs that each sequence takes: with FEW a chunk of keys each, for sequences of at most
    TOKENS rows, else a block of rows each, for the others. Items past those of the last sequence have no meaning.
    """
    index = tl.arange(0, SEQUENCES)
    _, n = rows_of(cu_ptr, index, B, T)
    if FEW:
        _, length = keys_of(lengths_ptr, index, B, capacity, STARTS, SLOTS)
        count = count_chunks(n, length, left, chunk, HAS_LEFT, BLOCK_N)
        mine = n <= TOKENS
    else:
        count = tl.cdiv(n * GROUP, BLOCK_M)
        mine = n > TOKENS
    return tl.where(mine, count, 0)


@triton.jit
def find_item(item, counts):
    """Return the sequence of an ``item``, and its rank there; a sequence past the last one if there is no such item."""
    index = tl.sum((tl.cumsum(counts) <= item).to(tl.int32))
    return index, item - items_before(index, counts)


@triton.jit
def items_before(b, counts):
    """Return the number of items of the sequences before ``b``."""
    return tl.sum(tl.where(tl.arange(0, counts.shape[0]) < b, counts, 0))
