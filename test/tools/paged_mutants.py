"""Bugs in ops/attention/paged for ``mutants.py`` to plant: file, what occurs once in it, what replaces that, why."""

CHECKS = "ops/attention/paged/checks.py"
FORWARD = "ops/attention/paged/forward.py"
KERNELS = "ops/attention/paged/kernels.py"
PLACES = "ops/attention/paged/places.py"
PUBLIC = "ops/attention/paged/__init__.py"
WRITE = "ops/attention/paged/write.py"

PAGED = [
    (PLACES, "(keys % PAGE).to(tl.int64)", "(keys * 0).to(tl.int64)", "all keys of a page are its first"),
    (PLACES, "tl.where(ids < 0, 0, ids % PAGE)", "ids * 0", "all slots of a page are its first"),
    (PLACES, "tl.where(ids < 0, -1, ids // PAGE)", "ids // PAGE", "slot -1 is written to the first page"),
    (PLACES, "keys // PAGE, mask=mask", "keys // PAGE + 1, mask=mask", "the page behind each key's"),
    (
        PLACES,
        "return tl.maximum(tl.cdiv(length - start, chunk), 1)",
        "return tl.cdiv(length - start, chunk)",
        "a sequence without keys has no program",
    ),
    (PLACES, "tl.cdiv(length - start, chunk), 1)", "(length - start) // chunk, 1)", "the last chunk is not merged"),
    (
        PLACES,
        "start = tl.maximum(length - n - left, 0) // BLOCK_N * BLOCK_N",
        "start = 0",
        "chunks before a window are merged",
    ),
    (PLACES, "(tl.cumsum(counts) <= item)", "(tl.cumsum(counts) < item)", "the first item goes to the one before"),
    (
        PLACES,
        "tl.arange(0, counts.shape[0]) < b",
        "tl.arange(0, counts.shape[0]) <= b",
        "items count from the end of their sequence",
    ),
    (PLACES, "tl.minimum(tl.maximum(length, 0), capacity)", "length", "lengths lead out of the pages"),
    (
        KERNELS,
        "keys < end)  # what nobody sees",
        "keys < end + BLOCK_N)  # what nobody sees",
        "NaN behind the last key spreads",
    ),
    (KERNELS, "mask = (keys >= low) & (keys < end)", "mask = keys < end", "NaN before a window spreads"),
    (KERNELS, "tl.minimum(inner_end, cached))", "inner_end)", "keys that are not in the cache count as zeros"),
    (KERNELS, "end = tl.minimum(end, start + chunk)", "end = end", "a chunk has the keys of the next, too"),
    (
        KERNELS,
        "start = start + rank * chunk",
        "start = rank * chunk",
        "chunks count from the first key, not the window",
    ),
    (
        KERNELS,
        "cached = end if new_k_ptr is None else tl.minimum(end, shift)",
        "cached = end",
        "the cache is read where new keys go",
    ),
    (
        KERNELS,
        "tl.cast(start_q + n - shift, tl.int64)",
        "tl.cast(start_q, tl.int64)",
        "all blocks of new keys are the first",
    ),
    (
        KERNELS,
        "tl.range(tl.maximum(start, shift), end, BLOCK_N)",
        "tl.range(shift, end, BLOCK_N)",
        "new keys count in every chunk",
    ),
    (KERNELS, "heads = hk * GROUP + rows % GROUP", "heads = hk + rows % GROUP * HK", "query heads of other key heads"),
    (KERNELS, "queries = rows // GROUP + shift", "queries = rows + shift", "packed heads have positions of their own"),
    (KERNELS, "shift = length - length_q", "shift = 0 * length", "the first row stands at the first key"),
    (
        KERNELS,
        "ids = load_ids(pages_ptr, b, keys + BLOCK_N, keys + BLOCK_N < cached",
        "ids = load_ids(pages_ptr, b, keys, keys < cached",
        "each block of keys has the page of the one before",
    ),
    (KERNELS, "PAGE % BLOCK_N == 0)", "PAGE >= BLOCK_N)", "a block of keys runs past its page"),
    (
        KERNELS,
        'sink = tl.where(whole, tl.load(sinks_ptr + heads).to(tl.float32), float("-inf"))',
        "sink = tl.load(sinks_ptr + heads).to(tl.float32)",
        "sinks count in every chunk and in the merge",
    ),
    (KERNELS, "end = tl.where(rank == 0, T, 0)", "end = 0", "rows behind the last sequence are not written"),
    (
        KERNELS,
        "part = item if SLOTS else b * splits + rank",
        "part = item if SLOTS else b * splits",
        "chunks overwrite one another",
    ),
    (
        KERNELS,
        "acc = acc * decay + tl.sum(x * weights",
        "acc = acc + tl.sum(x * weights",
        "merged sums are not rescaled",
    ),
    (
        KERNELS,
        "total * decay + tl.sum(weights, 0), new_max",
        "tl.sum(weights, 0), new_max",
        "the merge keeps the last sum",
    ),
    (KERNELS, 'mask=mask, other=float("-inf"))', 'other=float("-inf"))', "chunks that there are not are merged"),
    (
        KERNELS,
        'finite = tl.where(new_max == float("-inf"), 0.0, new_max)',
        "finite = new_max",
        "a first chunk that sees no key makes the row NaN",
    ),
    (KERNELS, "row // ROWS % HK, row // ROWS // HK", "row // ROWS // HK, row // ROWS % HK", "merged rows in disorder"),
    (KERNELS, "tl.load(sinks_ptr + head)", "tl.load(sinks_ptr)", "the merge takes the first head's sink for all"),
    (
        KERNELS,
        "page * stride_p + row * STRIDE, rows,",
        "(page * stride_p + row * STRIDE).to(tl.int32), rows,",
        "a large cache in 32 bits",
    ),
    (
        FORWARD,
        "SLOT_CHUNK if slots else",
        "max(SLOT_CHUNK, keys // 2) if slots else",
        "with slots bits depend on the batch",
    ),
    (FORWARD, "if max_seqlen_q > tokens:", "if max_seqlen_q > 16:", "short prompts have no program"),
    (FORWARD, "left + tokens + few.block_n", "left", "a window has a chunk too few"),
    (
        FORWARD,
        "capacity // chunk + B if where.slots",
        "capacity // chunk if where.slots",
        "the last slots have no program",
    ),
    (FORWARD, "splits = max(1, -(-keys // chunk))", "splits = -(-keys // chunk)", "without pages nothing is written"),
    (FORWARD, "self.pages.shape[1] * page", "self.pages.shape[1]", "a sequence has as many keys as pages"),
    (WRITE, "key = length - n + t - start_q", "key = length - 1", "all rows of a sequence go to its last slot"),
    (WRITE, "inside & (page >= 0) & (page < N)", "inside & (page >= 0)", "slots out of range are written"),
    (WRITE, "inside = (b < B) & (key >= 0)", "inside = b < B", "rows before the first key are written"),
    (
        WRITE,
        "to = v_cache_ptr + page * stride_vp + row * stride_vr",
        "to = v_cache_ptr + page * stride_kp + row * stride_kr",
        "values have the strides of keys",
    ),
    (PUBLIC, "    refuse_gradients(q=q,", "    dict(q=q,", "gradients are silently missing"),
    (PUBLIC, "page.clamp(0, N - 1)", "page", "the reference reads page -1"),
    (
        PUBLIC,
        "& (positions < length[:, None])[..., None]",
        "",
        "the reference's rows behind a sequence keep keys alive",
    ),
    (CHECKS, "if least < 0 or most > capacity", "if least < 0", "lengths beyond the pages pass the check of values"),
    (CHECKS, "if slots.shape != k.shape[:1]", "if slots.dim() != 1", "fewer slots than rows pass"),
]
