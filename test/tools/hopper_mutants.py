"""Bugs in the kernels for Hopper for ``mutants.py`` to plant, which only such a GPU shows: file, what
occurs once in it, what replaces that, and why. And pytest's -k for the tests that those of a file must fail.
"""

FOLDER = "ops/attention/hopper"
SHARED = "test_attention_hopper and (documents or leaks or few_key_heads or 4097) and 64-64"
HOPPER_TESTS = {
    f"{FOLDER}/rows.py": SHARED,
    f"{FOLDER}/products.py": SHARED,
    f"{FOLDER}/forward.py": "test_attention_hopper and not hopper_backward and (window or documents or leaks or 4097)"
    " and (64 or 96 or 144 or 192) or nan_stays",
    f"{FOLDER}/backward.py": "hopper_backward and (gradients or few_key_heads or nan or far_below)"
    " and (64-64 or 128-128) and torch.bfloat16",
    f"{FOLDER}/backward_256.py": "hopper_backward and (gradients or few_key_heads or nan) and 256-256-torch.bfloat16",
}

HOPPER = [
    (
        "ops/attention/hopper/rows.py",
        "length = gl.maximum(start_of(cu_ptr, index + 1, count, total) - start, 0)",
        "length = start_of(cu_ptr, index + 1, count, total)",
        "a sequence ends with the rows before it",
    ),
    (
        "ops/attention/hopper/forward.py",
        "gl.where(factor == 0.0, 0.0, acc * factor)",
        "gl.where(factor > 0.0, acc * factor, 0.0)",
        "NaN becomes 0",
    ),
    (
        "ops/attention/hopper/rows.py",
        "gl.num_programs(0) + gl.atomic_add",
        "gl.num_programs(0) + 1 + gl.atomic_add",
        "a tile is not drawn",
    ),
    (
        "ops/attention/hopper/rows.py",
        "b.to(gl.int64), B, S, row, last)",
        "b.to(gl.int64), B, S, row, row)",
        "spans of the first row alone",
    ),
    ("ops/attention/hopper/rows.py", "gl.maximum(starts, spans[0])", "starts", "where spans start is not looked at"),
    ("ops/attention/hopper/rows.py", "gl.where(cols < ends -", "gl.where(cols <= ends -", "a row sees one column more"),
    (
        "ops/attention/hopper/rows.py",
        "first += cols & QUAD",
        "first += 0",
        "all threads of a row mask as the first of them",
    ),
    (
        "ops/attention/hopper/rows.py",
        "skipped = gl.program_id(1) * share",
        "skipped = 0 * share",
        "every split has the first heads",
    ),
    (
        "ops/attention/hopper/products.py",
        "(rows < length) & (cols < D)",
        "(rows < length - 1) & (cols < D)",
        "the last row is not stored",
    ),
    (
        "ops/attention/hopper/forward.py",
        "constexpr = HAS_LEFT or spans_ptr is not None",
        "constexpr = HAS_LEFT",
        "the forward does not look where spans start",
    ),
    (
        "ops/attention/hopper/forward.py",
        "if (n < inner_start) | (n + BLOCK_N > inner_end):",
        "if n + BLOCK_N > inner_end:",
        "keys before the window are seen",
    ),
    (
        "ops/attention/hopper/forward.py",
        "total * decay + gl.sum(p, 1)",
        "total + gl.sum(p, 1)",
        "sums of another unit are added up",
    ),
    (
        "ops/attention/hopper/forward.py",
        "acc *= gl.convert_layout(decay, rows_o)[:, None]",
        "acc *= 1.0",
        "values of another unit",
    ),
    (
        "ops/attention/hopper/forward.py",
        "(g * out_s.shape[0] + GROUPS - 1) // GROUPS",
        "g * out_s.shape[0] // GROUPS",
        "heads of 192 store a group's output over queries of the other",
    ),
    ("ops/attention/hopper/forward.py", "hk = h // (H // HK)", "hk = h % HK", "queries have the keys of another group"),
    (
        "ops/attention/hopper/forward.py",
        "keys = b, start_k + length_k",
        "keys = b, start_k + end",
        "keys and values of the next sequence",
    ),
    (
        "ops/attention/hopper/backward.py",
        "k.slice(first_col, WIDTH, dim=1)",
        "k.slice(0, WIDTH, dim=1)",
        "both halves of dq are the first",
    ),
    (
        "ops/attention/hopper/backward.py",
        "PACKED or HAS_LEFT or spans_ptr is not None",
        "HAS_LEFT or spans_ptr is not None",
        "by bounds it has queries of the next sequence",
    ),
    (
        "ops/attention/hopper/backward.py",
        "PACKED or HAS_LEFT or spans_ptr is not None",
        "PACKED or spans_ptr is not None",
        "by bounds a window does not end",
    ),
    (
        "ops/attention/hopper/backward.py",
        "limits = gl.where(keys < end_k, starts, FAR), ends",
        "limits = starts, ends",
        "keys behind the last have scores",
    ),
    ("ops/attention/hopper/backward.py", "keys = b, end_k", "keys = b, end_k + 1", "a key of the next sequence"),
    ("ops/attention/hopper/backward.py", "gl.minimum(m + offs, end_q - 1)", "m + offs", "delta of the next sequence"),
    (
        "ops/attention/hopper/backward.py",
        "(m < inner_start) | (m + BLOCK_M > inner_end)",
        "m + BLOCK_M > inner_end",
        "queries before the keys have gradients of them",
    ),
    (
        "ops/attention/hopper/backward.py",
        "last_h, last_m = h, m",
        "last_h, last_m = h, start",
        "dq of every block for the first",
    ),
    (
        "ops/attention/hopper/backward.py",
        "h = gl.where(m < end, h, h + 1)",
        "h = gl.where(m < end, h, h)",
        "dq for the first head",
    ),
    ("ops/attention/hopper/backward.py", "p *= slopes", "pass", "the slope of a cap is missing"),
    ("ops/attention/hopper/backward.py", "dk * scale, end_k - row", "dk, end_k - row", "dk of keys is not scaled"),
    (
        "ops/attention/hopper/backward_256.py",
        "store((p * slopes).to(dtype))",
        "store(p.to(dtype))",
        "of wide heads a cap has no slope",
    ),
    (
        "ops/attention/hopper/backward_256.py",
        "dk, length, HK, D, scale",
        "dk, length, HK, D",
        "dk of wide heads is not scaled",
    ),
    (
        "ops/attention/hopper/backward_256.py",
        "gl.minimum(offs, rows[1] - 1)",
        "offs",
        "of wide heads delta of the next sequence",
    ),
    (
        "ops/attention/hopper/backward_256.py",
        "dp -= delta[None, :]",
        "dp -= 0.0",
        "delta is missing in dk of wide heads",
    ),
    (
        "ops/attention/hopper/backward_256.py",
        "rows_of(parts_of(dout_s, zero, 1), g * ROWS)",
        "rows_of(parts_of(dout_s, zero, 1), 0)",
        "the second half of the queries has the first half's gradients",
    ),
]
