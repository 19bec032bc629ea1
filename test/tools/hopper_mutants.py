"""Bugs in the kernels for Hopper for ``mutants.py`` to plant, which only such a GPU shows: file, what
occurs once in it, what replaces that, and why. And pytest's -k for the tests that those of a file must fail.
"""

ROWS, BUFFERS, KEY_BLOCKS, PRODUCTS, FORWARD, BACKWARD, BACKWARD_192, BACKWARD_256 = (
    f"ops/attention/hopper/{name}.py"
    for name in ("rows", "buffers", "key_blocks", "products", "forward", "backward", "backward_192", "backward_256")
)
SOFTMAX = "ops/attention/hopper/online_softmax.py"
LOADS = "ops/attention/hopper/backward_loads.py"
WIDE = "hopper_backward and (gradients or few_key_heads or nan) and"
EXPERTS_PRODUCTS, EXPERTS_ROWS, EXPERTS_DOWN_BWD, EXPERTS_DEPTH = (
    f"ops/experts/hopper/{name}.py" for name in ("products", "rows", "down_bwd", "depth")
)
LOGITS = "ops/losses/hopper.py"
SHARED_PRODUCTS = "runtime/hopper_products.py"
SHARED = "test_attention_hopper and (documents or leaks or few_key_heads or 4097) and 64-64"
# heads of which products take slices
SLICED = "(number_of_warp_groups or narrower_heads) and (80 or 96)"
HOPPER_TESTS = {
    **dict.fromkeys((EXPERTS_ROWS, EXPERTS_DOWN_BWD, EXPERTS_DEPTH), "test_experts_hopper"),
    EXPERTS_PRODUCTS: "test_experts_hopper or several_tiles",
    SHARED_PRODUCTS: "test_experts_hopper or several_tiles",
    LOGITS: "test_unstored_logits and kernels",
    ROWS: SHARED,
    BUFFERS: f"{SLICED} or {WIDE} 192-128-torch.bfloat16",
    KEY_BLOCKS: f"{WIDE} torch.bfloat16 and (192-128 or 256-256) or hopper_drawn and 64",
    PRODUCTS: f"{SHARED} or {SLICED}",
    FORWARD: "test_attention_hopper and not hopper_backward and (window or documents or leaks or 4097)"
    " and (64 or 96 or 144 or 192 or 256) or nan_stays",
    SOFTMAX: "test_attention_hopper_softmax and (64-64 or 96-96)",
    **dict.fromkeys(
        (BACKWARD, LOADS),
        "hopper_backward and (gradients or few_key_heads or nan or far_below) and (64-64 or 128-128) and torch.bfloat16"
        " or narrower_heads and (80 or 96) or hopper_drawn",
    ),
    BACKWARD_192: f"{WIDE} 192-128-torch.bfloat16",
    BACKWARD_256: f"{WIDE} 256-256-torch.bfloat16",
}

HOPPER = [
    (LOGITS, "label - v_start - n * WIDTH", "label - n * WIDTH", "labels count from the first word of a slice"),
    (LOGITS, "(cols < V - n * WIDTH)[None, :]", "(cols < V)[None, :]", "words past the end have a score of 0"),
    (LOGITS, "        slope *= scale\n", "", "the gradient lacks the scale of the logits"),
    (
        LOGITS,
        "dentropy_ptr + tokens, mask=counts, other=0.0) * scale",
        "dentropy_ptr + tokens, mask=counts, other=0.0)",
        "the gradient of an entropy lacks the scale of the logits",
    ),
    (LOGITS, "out_s.index(2 * half), left)", "out_s.index(0), left)", "two warp groups store by one buffer"),
    (LOGITS, "out_s, e * LARGEST)", "out_s, e)", "exponentials in another unit"),
    (
        LOGITS,
        "tma_store_wait(0)\n    start_store(out_desc, [row, n * WIDTH + HALF]",
        "start_store(out_desc, [row, n * WIDTH + HALF]",
        "half a tile in fp32 overwrites the other before it has left",
    ),
    (LOGITS, "out_s.index(half), left)", "out_s.index(0), left)", "two warp groups store fp32 by one buffer"),
    (LOGITS, "n * WIDTH + HALF, k]", "n * WIDTH, k]", "both halves of a tile have the same words"),
    (EXPERTS_PRODUCTS, "FAR - end + row, col", "FAR - end + row + 1, col", "an expert ends a row later"),
    (
        SHARED_PRODUCTS,
        "*block(rows, cols, w.element_size(), 3))",
        "*block(cols, rows, w.element_size(), 3))",
        "blocks of weights are turned",
    ),
    (
        EXPERTS_PRODUCTS,
        "left = n * HALF if SPLIT else n * 2 * HALF",
        "left = n * 2 * HALF",
        "gate has the columns of the next tile",
    ),
    (
        EXPERTS_PRODUCTS,
        "(*first, rows_of_all(u), weights",
        "(*first, rows_of_all(a), weights",
        "an adapter is multiplied with rows of x",
    ),
    (
        EXPERTS_ROWS,
        "second = N + first if SPLIT else HALF + first",
        "second = HALF + first",
        "the bias of up is that of gate",
    ),
    (
        EXPERTS_ROWS,
        "tma_store_wait(0)  # z has left",
        "tma_store_wait(2)  # z has left",
        "h overwrites z before it has left",
    ),
    (
        EXPERTS_ROWS,
        "tma_store_wait(COUNT - 1)",
        "tma_store_wait(COUNT)",
        "up overwrites gate before it has left",
    ),
    (EXPERTS_ROWS, "h_s.slice(i * HALF // 2,", "h_s.slice(0 * HALF // 2,", "both halves of h are the second"),
    (EXPERTS_DOWN_BWD, "gated_and_grads(g, u, dh * w,", "gated_and_grads(g, u, dh,", "dz without the weight"),
    (EXPERTS_DOWN_BWD, "tl.load(weights_ptr + row)", "tl.load(weights_ptr + 0 * row)", "all rows have one weight"),
    (EXPERTS_DOWN_BWD, "(h * w).to(dtype)", "h.to(dtype)", "dW2 without the weight"),
    (
        EXPERTS_DOWN_BWD,
        "place * tiles_n + n, gl.sum",
        "place * tiles_n, gl.sum",
        "a tile's part of dw overwrites another's",
    ),
    (
        EXPERTS_DOWN_BWD,
        "dh_s.index(half).slice(chunk, CHUNK)",
        "dh_s.index(half).slice(0, CHUNK)",
        "all rows have dh of the first",
    ),
    (
        EXPERTS_DEPTH,
        "right = within(end, 0, k, n * 2 * HALF + HALF)",
        "right = within(end, 0, k, n * 2 * HALF)",
        "both halves of a tile are the left one",
    ),
    (
        ROWS,
        "length = gl.maximum(start_of(cu_ptr, index + 1, count, total) - start, 0)",
        "length = start_of(cu_ptr, index + 1, count, total)",
        "a sequence ends with the rows before it",
    ),
    (
        FORWARD,
        "gl.where(f == 0.0, 0.0, acc[i] * f)",
        "gl.where(f > 0.0, acc[i] * f, 0.0)",
        "NaN becomes 0",
    ),
    (
        FORWARD,
        "seen_end = gl.where(row < length_q, seen_end, 0)",
        "seen_end = gl.where(row < length_q, seen_end - ROWS, 0)",
        "a warp group skips keys that it sees",
    ),
    (
        FORWARD,
        "start = gl.minimum(start + gl.maximum(seen_start - start, 0)",
        "start = gl.minimum(start + gl.maximum(seen_start + BLOCK_N - start, 0)",
        "a warp group skips the first keys of its window",
    ),
    (
        FORWARD,
        "problem, batch, row, length_q",
        "problem, batch, row - g * ROWS, length_q",
        "all warp groups see the keys of the first",
    ),
    (
        ROWS,
        "return programs + gl.atomic_add",
        "return programs + 1 + gl.atomic_add",
        "a tile is not drawn",
    ),
    (
        ROWS,
        "programs - 1 - gl.program_id(0)",
        "programs - gl.program_id(0)",
        "the last tile of a round that turns back is left out",
    ),
    (
        ROWS,
        "gl.where(index == i, fields[i], tile)",
        "gl.where(index == i, fields[0], tile)",
        "all of a tile is its first row",
    ),
    (
        ROWS,
        "problem.B, problem.S, row, last)",
        "problem.B, problem.S, row, row)",
        "spans of the first row alone",
    ),
    (ROWS, "gl.maximum(starts, spans[0])", "starts", "where spans start is not looked at"),
    (ROWS, "gl.where(cols < ends -", "gl.where(cols <= ends -", "a row sees one column more"),
    (
        ROWS,
        "first += cols & QUAD",
        "first += 0",
        "all threads of a row mask as the first of them",
    ),
    (
        ROWS,
        "skipped = gl.program_id(1) * share",
        "skipped = 0 * share",
        "every split has the first heads",
    ),
    (
        PRODUCTS,
        "(rows < length) & (cols < D)",
        "(rows < length - 1) & (cols < D)",
        "the last row is not stored",
    ),
    (
        FORWARD,
        "constexpr = HAS_LEFT or problem.spans_ptr is not None",
        "constexpr = HAS_LEFT",
        "the forward does not look where spans start",
    ),
    (
        FORWARD,
        "if n < inner_start:",
        "if n + s.shape[1] < inner_start:",
        "keys before the window are seen",
    ),
    (SOFTMAX, "mul.f32 ${2 + i}, ${2 + i}, ${4 + i};", "", "sums of another reference are added up"),
    (SOFTMAX, '[*scores, "0"]', "scores", "the bound of scores below zero is the least of them"),
    (SOFTMAX, "*bounds, vote, leave", '*bounds, vote, "bra DONE;"', "no reference is raised"),
    (SOFTMAX, "*below, vote, leave", '*below, vote, "bra DONE;"', "no reference is raised after a second look"),
    (SOFTMAX, "min.u32", "min.s32", "the bound of scores of both signs is the greatest below zero"),
    (
        SOFTMAX,
        "{-SLACK.value:f}; selp",
        "{SLACK.value:f}; selp",
        "the least score above zero counts for low references",
    ),
    (SOFTMAX, "mov.b32 ${6 + i}, 1;", "", "the output stays relative to another reference"),
    (SOFTMAX, "selp.f32 {m}, {m}, ${i}, own;", "max.f32 {m}, {m}, ${i};", "a reference moves without its sums"),
    (SOFTMAX, "for by in (1, 2)", "for by in (1,)", "two of four threads share a maximum"),
    (
        FORWARD,
        "gl.convert_layout(gl.sum(total, 1), rows_s)",
        "gl.convert_layout(gl.max(total, 1), rows_s)",
        "a row has the sum of one thread",
    ),
    (
        FORWARD,
        "LOADED, layout_s) + q_parts[LOADED:]",
        "LOADED, layout_s) + q_parts[: len(q_parts) - LOADED]",
        "the first features of wide queries stand for the others",
    ),
    (
        SOFTMAX,
        "times_rows((total,), decay)[0] + sum_in_threads(p)",
        "total + sum_in_threads(p)",
        "sums of another greatest score are added up",
    ),
    (SOFTMAX, "total, times_rows(acc, decay)", "total, acc", "values of another greatest score"),
    (SOFTMAX, "2 * count + (i & 2)", "2 * count", "all rows of a thread have the factor of the first"),
    (SOFTMAX, "raised += (_times(acc[i], factors, flags),)", "raised += (acc[i],)", "values of another reference"),
    (
        FORWARD,
        "parts_of(v, last % STAGES, STAGES), WIDTHS_V))\n                mbarrier",
        "parts_of(v, use % STAGES, STAGES), WIDTHS_V))\n                mbarrier",
        "without overlap p meets the values of the next block",
    ),
    (
        BUFFERS,
        "slice(sum_of(WIDTHS, j), WIDTHS[j], dim=1)",
        "slice(0, WIDTHS[j], dim=1)",
        "every slice is of the first columns",
    ),
    (
        PRODUCTS,
        "acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, is_async=True)",
        "acc = warpgroup_mma(a[i], b[i].permute((1, 0)), acc, use_acc=False, is_async=True)",
        "scores of the last slice alone",
    ),
    (
        PRODUCTS,
        "parts += (acc[i] * gl.convert_layout(factors",
        "parts += (acc[i] if i > 0 else acc[i] * gl.convert_layout(factors",
        "later slices of the output keep another unit",
    ),
    (
        PRODUCTS,
        "HEADS, D, i * x[0].shape[1])",
        "HEADS, D, 0)",
        "later slices of dk and dv in the columns of the first",
    ),
    (BACKWARD, "gl.where(odd, left, right)", "right", "odd rows of dq have half of the columns twice"),
    (
        FORWARD,
        "col = i * out_s.shape[-1]",
        "col = 0 * out_s.shape[-1]",
        "both halves of a wide output are stored as the left one",
    ),
    (
        FORWARD,
        "if acc[0].shape[1] > WIDTH:",
        "if len(acc) == 1:",
        "narrow values of wide heads are split",
    ),
    (
        FORWARD,
        "slice(i * acc[0].shape[1], acc[i]",
        "slice(0, acc[i]",
        "every slice of the output goes into the first columns",
    ),
    (FORWARD, "hk = own.head // (H // HK)", "hk = own.head % HK", "queries have the keys of another group"),
    (
        FORWARD,
        "keys = Sequence(own.batch, own.start_k + own.length_k)",
        "keys = Sequence(own.batch, own.start_k + own.end)",
        "keys and values of the next sequence",
    ),
    (
        BACKWARD,
        "gl.constexpr = 0 if WHOLE else g * _widths_of_groups(WIDTHS)[0]",
        "gl.constexpr = 0",
        "both halves of dq are the first",
    ),
    (
        BACKWARD,
        "else g * _widths_of_groups(WIDTHS)[0]",
        "else g * _widths_of_groups(WIDTHS)[1]",
        "the second part of dq has the columns behind as many as it has",
    ),
    (
        BACKWARD,
        "k_loaded = load_first(k_first, K_LOADED, layout_s)",
        "k_loaded = load_first(_rows_of_group(bufs.k, 0, 0, WIDTHS), K_LOADED, layout_s)",
        "both groups have the first keys in registers",
    ),
    (
        BACKWARD,
        "load_first(_rows_of_group(bufs.v, 0, g, WIDTHS_V)",
        "load_first(_rows_of_group(bufs.k, 0, g, WIDTHS_V)",
        "keys for the values in registers",
    ),
    (
        BACKWARD,
        "k = k_loaded + _rows_of_group(bufs.k, zero, g, WIDTHS)",
        "k = k_loaded + _rows_of_group(bufs.k, zero, 0, WIDTHS)",
        "both groups have the first keys, where shared memory holds them",
    ),
    (
        BACKWARD,
        "v = v_loaded + _rows_of_group(bufs.v, zero, g, WIDTHS_V)",
        "v = v_loaded + _rows_of_group(bufs.k, zero, g, WIDTHS_V)",
        "keys for the values in shared memory",
    ),
    (
        BACKWARD,
        "sums[: len(dv)], sums[len(dv) :]",
        "sums[len(dk) :], sums[: len(dk)]",
        "the sums of keys and values change places",
    ),
    (
        BACKWARD,
        "problem.cu_k_ptr is not None or HAS_LEFT or",
        "HAS_LEFT or",
        "by bounds it has queries of the next sequence",
    ),
    (
        BACKWARD,
        "is not None or HAS_LEFT or",
        "is not None or",
        "by bounds a window does not end",
    ),
    (
        BACKWARD,
        "return gl.where(keys < block.end_k, starts, FAR), ends",
        "return starts, ends",
        "keys behind the last have scores",
    ),
    (
        LOADS,
        "keys = Sequence(block.batch, block.end_k)",
        "keys = Sequence(block.batch, block.end_k + 1)",
        "a key of the next sequence",
    ),
    (LOADS, "gl.minimum(m + offs, block.end_q - 1)", "m + offs", "delta of the next sequence"),
    (LOADS, "mbarrier.wait(bars.kv_empty, count & 1 ^ 1)", "pass", "keys are loaded over those of the block before"),
    (BACKWARD, "own[8], own[9], own[1], 1", "own[8], own[7], own[1], 1", "drawn blocks have no mask at their end"),
    (KEY_BLOCKS, "programs = min(programs, num_programs(q.device, 1))", "pass", "each block has a program that draws"),
    (
        BACKWARD,
        "(m < block.inner_start) | (m + BLOCK_M > inner_end)",
        "m + BLOCK_M > inner_end",
        "queries before the keys have gradients of them",
    ),
    (
        BACKWARD,
        "last_h, last_m = h, m",
        "last_h, last_m = h, start",
        "dq of every block for the first",
    ),
    (
        BACKWARD,
        "h = gl.where(m < block.end, h, h + 1)",
        "h = gl.where(m < block.end, h, h)",
        "dq for the first head",
    ),
    (BACKWARD, "p *= slopes", "pass", "the slope of a cap is missing"),
    (BACKWARD, "dk, block.end_k - row, HK, D, scale)", "dk, block.end_k - row, HK, D)", "dk of keys is not scaled"),
    (BACKWARD_192, "zeros - shared.delta", "zeros + shared.delta", "delta is added to dp of heads of 192"),
    (BACKWARD_192, "dk, block.end_k - row, HK, D, scale", "dk, block.end_k - row, HK, D", "dk of 192 is not scaled"),
    (
        BACKWARD_192,
        "rows_of(parts_of(shared.v, zero, 1), g * ROWS)",
        "rows_of(parts_of(shared.v, zero, 1), 0)",
        "the second half of the keys has the first half's values",
    ),
    (BUFFERS, "PARTS * COLS), full, bufs[1]", "0), full, bufs[1]", "the last 64 of 192 features are the first"),
    (
        BACKWARD_256,
        "store((p * slopes).to(dtype))",
        "store(p.to(dtype))",
        "of wide heads a cap has no slope",
    ),
    (
        BACKWARD_256,
        "dk, length, HK, D, scale",
        "dk, length, HK, D",
        "dk of wide heads is not scaled",
    ),
    (KEY_BLOCKS, "gl.minimum(offs, sequence.end - 1)", "offs", "of wide heads delta of the next sequence"),
    (
        BACKWARD_256,
        "dp -= delta[None, :]",
        "dp -= 0.0",
        "delta is missing in dk of wide heads",
    ),
    (
        BACKWARD_256,
        "rows_of(parts_of(shared.dout, zero, 1), g * ROWS)",
        "rows_of(parts_of(shared.dout, zero, 1), 0)",
        "the second half of the queries has the first half's gradients",
    ),
]
