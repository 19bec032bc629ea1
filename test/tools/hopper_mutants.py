"""Bugs in the kernels for Hopper for ``mutants.py`` to plant, which only such a GPU shows: file, what
occurs once in it, what replaces that, and why. And pytest's -k for the tests that those of a file must fail.
"""

ROWS, PRODUCTS, FORWARD, BACKWARD, BACKWARD_256 = (
    f"ops/attention/hopper/{name}.py" for name in ("rows", "products", "forward", "backward", "backward_256")
)
SHARED = "test_attention_hopper and (documents or leaks or few_key_heads or 4097) and 64-64"
HOPPER_TESTS = {
    ROWS: SHARED,
    PRODUCTS: SHARED,
    FORWARD: "test_attention_hopper and not hopper_backward and (window or documents or leaks or 4097)"
    " and (64 or 96 or 144 or 192) or nan_stays",
    BACKWARD: "hopper_backward and (gradients or few_key_heads or nan or far_below)"
    " and (64-64 or 128-128) and torch.bfloat16",
    BACKWARD_256: "hopper_backward and (gradients or few_key_heads or nan) and 256-256-torch.bfloat16",
}

HOPPER = [
    (
        ROWS,
        "length = gl.maximum(start_of(cu_ptr, index + 1, count, total) - start, 0)",
        "length = start_of(cu_ptr, index + 1, count, total)",
        "a sequence ends with the rows before it",
    ),
    (
        FORWARD,
        "gl.where(factor == 0.0, 0.0, acc * factor)",
        "gl.where(factor > 0.0, acc * factor, 0.0)",
        "NaN becomes 0",
    ),
    (
        FORWARD,
        "first_hidden = row + ROWS + own.length_k",
        "first_hidden = row + own.length_k",
        "a warp group skips keys that it sees",
    ),
    (
        ROWS,
        "gl.num_programs(0) + gl.atomic_add",
        "gl.num_programs(0) + 1 + gl.atomic_add",
        "a tile is not drawn",
    ),
    (
        ROWS,
        "b.to(gl.int64), B, S, row, last)",
        "b.to(gl.int64), B, S, row, row)",
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
        "if (n < own.inner_start) | (n + BLOCK_N > own.inner_end):",
        "if n + BLOCK_N > own.inner_end:",
        "keys before the window are seen",
    ),
    (
        FORWARD,
        "total * decay + gl.sum(p, 1)",
        "total + gl.sum(p, 1)",
        "sums of another unit are added up",
    ),
    (
        FORWARD,
        "acc *= gl.convert_layout(decay, rows_o)[:, None]",
        "acc *= 1.0",
        "values of another unit",
    ),
    (
        FORWARD,
        "(g * out_s.shape[0] + GROUPS - 1) // GROUPS",
        "g * out_s.shape[0] // GROUPS",
        "heads of 192 store a group's output over queries of the other",
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
        "k.slice(first_col, WIDTH, dim=1)",
        "k.slice(0, WIDTH, dim=1)",
        "both halves of dq are the first",
    ),
    (
        BACKWARD,
        "PACKED or HAS_LEFT or spans_ptr is not None",
        "HAS_LEFT or spans_ptr is not None",
        "by bounds it has queries of the next sequence",
    ),
    (
        BACKWARD,
        "PACKED or HAS_LEFT or spans_ptr is not None",
        "PACKED or spans_ptr is not None",
        "by bounds a window does not end",
    ),
    (
        BACKWARD,
        "limits = gl.where(keys < end_k, starts, FAR), ends",
        "limits = starts, ends",
        "keys behind the last have scores",
    ),
    (
        BACKWARD,
        "keys = Sequence(block.batch, block.end_k)",
        "keys = Sequence(block.batch, block.end_k + 1)",
        "a key of the next sequence",
    ),
    (BACKWARD, "gl.minimum(m + offs, block.end_q - 1)", "m + offs", "delta of the next sequence"),
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
        "h = gl.where(m < end, h, h + 1)",
        "h = gl.where(m < end, h, h)",
        "dq for the first head",
    ),
    (BACKWARD, "p *= slopes", "pass", "the slope of a cap is missing"),
    (BACKWARD, "dk * scale, end_k - row", "dk, end_k - row", "dk of keys is not scaled"),
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
    (
        BACKWARD_256,
        "gl.minimum(offs, sequence.end - 1)",
        "offs",
        "of wide heads delta of the next sequence",
    ),
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
