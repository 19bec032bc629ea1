"""Bugs in the backward of ops/attention for ``mutants.py`` to plant, in the form of attention_mutants.py."""

BACKWARD = "ops/attention/portable/backward.py"
DELTA = "ops/attention/portable/delta.py"
OP_BACKWARD = "ops/attention/backward.py"
BIAS = "ops/attention/portable/bias.py"
SUMS = "ops/attention/sums.py"

ATTENTION_BACKWARD = [
    (DELTA, "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr", "the gradient of lse has the wrong sign"),
    (DELTA, 'tl.where(unseen, float("inf"), row_max)', "row_max", "rows without keys have infinite gradients"),
    (DELTA, "-tl.sum(p * delta, 0)", "tl.sum(p * delta, 0)", "the gradient of the sinks has the wrong sign"),
    (BACKWARD, "seen = seen & seen_keys[:, None]", "pass", "hidden keys have a gradient"),
    (
        BACKWARD,
        "dv, p = add_product(dv, p, dout), p * slopes",
        "dv = add_product(dv, p, dout)",
        "dk without softcap's derivative",
    ),
    (BACKWARD, "ds = p * slopes * less_delta(dout", "ds = p * less_delta(dout", "dq without softcap's derivative"),
    (BACKWARD, "scale_parts(dk, scale), D)", "dk, D)", "dk is not scaled"),
    (BACKWARD, "scale_parts(dq, scale), D)", "dq, D)", "dq is not scaled"),
    (BACKWARD, "h = first_head + i", "h = hk * group + i", "the parts of a group do the same heads"),
    (
        BACKWARD,
        "tl.minimum(share, group - tl.program_id(1) * share)",
        "share",
        "the last part of a group does heads of the next",
    ),
    (BACKWARD, "unseen = tl.min(mask.to(tl.int32)) == 0", "pass", "blocks with hidden keys are not masked"),
    (BACKWARD, "b += tl.program_id(1).to(tl.int64) * B", "pass", "the parts of a group overwrite one another"),
    (OP_BACKWARD, "return -(-group // -(-group // splits))", "return splits", "an empty part of a group"),
    (OP_BACKWARD, "max(1, min(group, (2", "max(1, min(group, 1 + (2", "a part of a group more than fill the GPU"),
    (OP_BACKWARD, "(2 if uneven else 1) * num", "num", "uneven blocks have no further parts of a group"),
    (SUMS, "for i in range(0, splits):", "for i in range(0, 1):", "dk and dv of the group's first heads only"),
    (SUMS, "NQ, 1, scale, BLOCK)", "NQ, 1, 1.0, BLOCK)", "the sum of dq is not scaled"),
    (SUMS, "block - blocks_q, NK", "block, NK", "dk of other rows behind dq"),
    (SUMS, "block - blocks_q - blocks_k, NV", "block - blocks_q, NV", "dv of other rows behind dk"),
    (BIAS, "tl.sum(total, 0)[None, :], 0.0)", "total, 0.0)", "a bias for all queries has the gradient of one"),
    (
        BIAS,
        "num_h, num_b = 1 if EACH_H else H",
        "num_h, num_b = 1",
        "a bias for all heads has the gradient of the first",
    ),
    (
        BIAS,
        "tl.where(seen, p, 0.0) * less_delta",
        "p * less_delta",
        "the bias of pairs that do not see one another has a gradient",
    ),
    (BIAS, "(H if EACH_H else 1) + own_h", "H + own_h", "the gradient of a bias for all heads lands beside it"),
    (
        DELTA,
        "- row_max) * LOG2E - log_sum)",
        "- row_max) * LOG2E - log_sum)\n        delta = tl.sum(dout * tl.load(out_ptrs, mask=both, other=0.0), 1)",
        "the gradient of the sinks forgets that of lse",
    ),
    (DELTA, "* MAX_BLOCK + MAX_BLOCK\n", "* MAX_BLOCK\n", "a block at the end of packed rows is read beyond them"),
    (BACKWARD, "seen & mask[None, :], p", "seen, p", "a next sequence's rows are 0 times infinity"),
    (BACKWARD, "p = tl.where(mask[None, :], p, 0.0)", "pass", "hidden keys are 0 times infinity in dq"),
    (
        BACKWARD,
        "HAS_LEFT or HAS_END or mask_ptr is not None or cu_k_ptr is not None",
        "HAS_LEFT or HAS_END or cu_k_ptr is not None",
        "dk and dv do not hide keys if nothing else is masked",
    ),
    (
        BACKWARD,
        "HAS_LEFT or HAS_END or mask_ptr is not None or cu_k_ptr is not None",
        "HAS_LEFT or HAS_END or mask_ptr is not None",
        "queries of the next packed sequence are not masked",
    ),
    (BACKWARD, "end // BLOCK_N * BLOCK_N", "tl.cdiv(end, BLOCK_N) * BLOCK_N", "keys past the end count for dq"),
    (BACKWARD, "edge = APART or (", "edge = MASKED and (", "keys past the end count for dq, in the last block"),
    (
        BACKWARD,
        "tl.load(mask_ptr + b * SK + keys",
        "tl.load(mask_ptr + keys",
        "dk and dv of every batch hide the keys of the first",
    ),
    (BACKWARD, "mask_ptr + b * SK\n", "mask_ptr\n", "dq of every batch hides the keys of the first"),
    (
        BACKWARD,
        "row + BLOCK_N, length_k) - 1",
        "row + BLOCK_N, length_k) - 2",
        "a query at the edge of a window gives nothing to dk",
    ),
    (
        BACKWARD,
        "row + BLOCK_M, length_q) - 1",
        "row + BLOCK_M, length_q) - 2",
        "a key at the edge of a window gives nothing to dq",
    ),
    (
        BACKWARD,
        "right, left, bounds, length_q, 0, 1, HAS_RIGHT, HAS_LEFT",
        "left, right, bounds, length_q, 0, 1, HAS_LEFT, HAS_RIGHT",
        "keys are seen by what a query sees",
    ),
    (DELTA, "partial.sum((0, 2))", "partial[0].sum(1)", "the sinks have the gradient of the first batch"),
    (
        OP_BACKWARD,
        "(k, needs[1]), (v, needs[2])",
        "(k, needs[0]), (v, needs[1])",
        "dk for a trained q, dv for a trained k",
    ),
    (
        BIAS,
        "shift_of(offsets_ptr, b,",
        "shift_of(offsets_ptr, 0,",
        "dbias takes the position of the first batch for all",
    ),
    (BIAS, "b * stride_vb", "b * stride_kb", "dbias reads values with the strides of keys"),
    (BACKWARD, "tl.cast(m, tl.int64)", "m", "queries of a large tensor in 32 bits", "2_31_elements_of_queries"),
    (
        OP_BACKWARD,
        "keys, right=True, out_int32",
        "keys, right=False, out_int32",
        "a key has no gradient of the spans that start there",
    ),
    (DELTA, "tl.where(unseen, 0.0, delta)", "delta", "0 times the upstream gradient of rows without keys"),
    (BACKWARD, "rows = tl.minimum(rows, length_q - 1 - m)", "pass", "0 times the delta of the next sequence"),
]
