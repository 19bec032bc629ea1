"""Bugs, as in mutants.py, in projections of few rows: file, old, new, why."""

OP, PATCH, HEAD, MLP = "ops/few_rows.py", "patches/projections.py", "patches/heads.py", "ops/glu_linear.py"

PROJECTIONS = [
    (
        OP,
        "tile -= tl.cdiv(N0, BLOCK_N)\n",
        "tile -= N0 // BLOCK_N\n",
        "the second layer begins in a block of the first",
    ),
    (OP, "w_ptr, y_ptr, N = w2_ptr, y2_ptr, N2", "w_ptr, y_ptr, N = w1_ptr, y2_ptr, N2", "a weight is used twice"),
    (OP, "b_ptr = b1_ptr\n", "b_ptr = b0_ptr\n", "a bias is used twice"),
    (OP, "up += tl.load(b1_ptr", "up += tl.load(b_ptr", "up gets the bias of gate"),
    (OP, "tl.int64)[None, :] * stride_xm", "tl.int64)[None, :] * K", "rows of a wider tensor are read as dense"),
    (OP, "mask=inside & (offs_n < N)", "mask=inside & (offs_n < N - 1)", "the last output is not written"),
    (OP, "max(16, triton.next_power_of_2(M))", "16", "only 16 rows are computed"),
    (OP, "BLOCK_K=128 if is_wide else 64", "BLOCK_K=128", "features past the last"),
    (OP, "offs_m.to(tl.int64)[None, :]", "offs_m[None, :]", "int32 offsets of rows", "test_offsets_beyond_int32"),
    (OP, "N - 1).to(tl.int64)", "N - 1)", "int32 offsets of weights", "test_offsets_beyond_int32"),
    (OP, "len(given) in (0, len(weights))", "True", "a layer without bias gets another's"),
    (OP, "0 < x.numel() <= MOST_ROWS * K", "0 < x.numel()", "any number of rows"),
    (OP, "K % 64 == 0", "True", "features that fill no block"),
    (OP, "t.is_contiguous() for t in (*weights, *given)", "True for t in ()", "a transposed weight is read as dense"),
    (OP, "is_local(t) and t.dtype", "t.dtype", "subclasses of tensors are passed by"),
    (OP, "and not autocast_dtype(x)", "", "autocast is passed by"),
    (OP, "and is_untransformed()", "", "vmap is passed by"),
    (OP, "or torch.compiler.is_compiling() or", "or", "a compiled graph gets the op"),
    (OP, "weights[0].shape == weights[1].shape", "True", "gate and up of other widths"),
    (OP, "is nn.Linear and unhooked(layer)", "is nn.Linear", "hooks are passed by"),
    (OP, "type(layer) is nn.Linear and", "isinstance(layer, nn.Linear) and", "another forward is passed by"),
    (
        PATCH,
        "len(run) == len(names) > 1",
        "len(run) > 1 and len(names) > 0",
        "a part that is called twice is called once",
    ),
    (PATCH, "or len(calls) != 1 or any", "or len(calls) != 1 or not any", "no projection is computed at once"),
    (PATCH, "UNSURE = ast.IfExp | ", "UNSURE = ", "a call that a condition skips is made"),
    (PATCH, "return call if len(uses) == 1 else None", "return call", "an input that is changed in between"),
    (
        PATCH,
        '"pop", ast.Load()), [ast.Constant(0)], [])',
        '"__getitem__", ast.Load()), [ast.Constant(0)], [])',
        "one result for all",
    ),
    (HEAD, "of_few_rows(x, [self.weight], [self.bias])", "None", "a head of few rows waits for cuBLAS"),
    (MLP, "y = gated(act, x, gate, up)", "y = None", "gated units of few rows are apart"),
]
