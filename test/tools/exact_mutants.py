"""Bugs, as in mutants.py, in launches, in what keeps losses exact and in what refuses bad arguments.

Each is (file, old, new, why), and -k for the GPU tests that it must fail if only a GPU shows it.
"""

CAST = "    scale = tl.cast(scale, tl.float32)  # Inductor passes floats in fp64\n"
CHOICE = "ops/attention/choice.py"
PORTABLE = "ops/attention/portable"

EXACT = [
    ("cli.py", 'if needs and "--help" in context.args', "if False", "a bench that cannot run has no help"),
    ("runtime/launcher.py", "16 | size & 15", "16", "a kernel for strides divisible by 16 is run with others"),
    (
        "runtime/launcher.py",
        "bits & 15 or hooked",
        "hooked",
        "a kernel for aligned memory is run with memory that is not",
        "test_launch",
    ),
    ("runtime/launcher.py", ", (*map(float, floats),)", ", floats", "a kernel for the int 1 is run with other floats"),
    ("runtime/launcher.py", "(*map(int, sizes),),", "sizes,", "a kernel for the size 1 is run with True"),
    ("runtime/launcher.py", ", *map(type, values)]", "]", "a kernel for the constant 1 is run for 1.0"),
    (
        "runtime/launcher.py",
        "*OPTIONS.values(), *options, *values",
        "*OPTIONS.values(), *values",
        "a kernel of two stages is run for two warps",
    ),
    ("runtime/launcher.py", "*OPTIONS.values(), ", "", "a kernel with fused products is run for one without"),
    ("runtime/autograd.py", "arg.view_as(arg) if again else arg", "arg", "torch.compile sees a tensor in two places"),
    (
        "ops/rope.py",
        "    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)  # Inductor passes floats in fp64\n",
        "",
        "a compiled graph turns and norms in fp64",
    ),
    ("ops/rope.py", "sin *= tl.cast(sign, tl.float32)", "sin *= sign", "a compiled graph turns in fp64"),
    (
        "ops/qk_norm_rope.py",
        "    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)  # Inductor passes floats in fp64\n",
        "",
        "the backward of a compiled graph is in fp64",
    ),
    (
        "ops/losses/operands.py",
        " <= FEW_TOKENS",
        " < FEW_TOKENS",
        "1024 tokens of a compiled graph are a library op",
    ),
    (
        "ops/losses/operands.py",
        "has_known_size(target) and ",
        "",
        "a graph of any number of tokens is compiled twice",
    ),
    (
        "ops/losses/linear_cross_entropy.py",
        "chunk_rows is None and not shard",
        "not shard",
        "a compiled graph ignores chunk_rows",
    ),
    (
        "ops/losses/gradients.py",
        "    torch.autograd.graph.increment_version(grad)  # kernels change no version\n",
        "",
        "nothing tells that kernels have changed a gradient",
    ),
    (
        "ops/glu_linear.py",
        "is_grad_enabled() and not exporting",
        "is_grad_enabled()",
        "a gated unit cannot be exported",
    ),
    (
        "ops/glu_linear.py",
        "(not compiling or (is_untransformed() and _is_large(gate)))",
        "not compiling",
        "no compiled graph has kernels of GLUs",
    ),
    (
        "ops/glu_linear.py",
        "if torch.compiler.is_compiling():  # exports, too: they hold an op with its gradients",
        "if compiling:",
        "an export has no gradients of its gated units",
    ),
    ("ops/glu_linear.py", "compiling and is_untransformed()  #", "compiling  #", "a transform meets a checkpoint"),
    ("ops/glu_linear.py", "gate.shape[:-1].numel(), w", "-1, w", "a layer without outputs has no backward"),
    ("runtime/autograd.py", "if _is_differentiated():", "if False:", "a graph loses derivatives of torch.func"),
    ("ops/glu_linear.py", "has_known_size(gate) and ", "", "a graph of any number of tokens is for large ones alone"),
    ("ops/glu_linear.py", " >= LARGE", " > LARGE", "LARGE bytes are not large"),
    ("runtime/registry.py", " or free_unbacked_symbols(tensors)", "", "a compiled graph needs sizes of the GPU"),
    (
        CHOICE,
        "masking.cu_seqlens_q is None and all",
        "all",
        "a compiled graph takes the boundaries of packed sequences for outputs",
    ),
    (CHOICE, "all(type(n) is int for n in sizes)", "True", "symbolic sizes are fixed by the choice of a kernel"),
    (CHOICE, "*options) < SMALL", "*options) < 64 * SMALL", "long attention in a compiled graph is not Hopper's"),
    (f"{PORTABLE}/forward.py", CAST, "", "a compiled graph attends in fp64"),
    (f"{PORTABLE}/bias.py", CAST, "", "a bias's gradient in a compiled graph in fp64"),
    *(
        (f"{PORTABLE}/backward.py", f"{CAST}    block, head = schedule({of}", f"    block, head = schedule({of}", why)
        for of, why in (
            ("tl.program_id(0), blocks, B * HK,", "dk and dv of a compiled graph in fp64"),
            ("tl.program_id(0), blocks, B * H,", "dq of a compiled graph in fp64"),
        )
    ),
    ("ops/losses/row_kernels.py", "(z - lse) - lse_rest", "z - lse", "the gradient takes lse as one rounded number"),
    (
        "ops/losses/row_kernels.py",
        "rest = (a - (total - b_part)) + (b - b_part)",
        "rest = a - total",
        "a wrong rest of lse",
    ),
    (
        "ops/losses/row_kernels.py",
        "seen * log_total - smooth",
        "V * log_total - smooth",
        "smoothing forgets class weights",
    ),
    (
        "ops/losses/row_kernels.py",
        "smooth += moved * seen +",
        "smooth +=",
        "smoothing forgets that the top has moved",
    ),
    (
        "ops/losses/steps.py",
        "factor=weight_unit",
        "factor=None",
        "gradients are not of the unit that is divided out",
    ),
    (
        "ops/losses/units.py",
        "of_label = size[target.clamp(0, size.shape[0] - 1)]",
        "of_label = size.amax()",
        "class weights without a label make the gradients of others vanish",
    ),
    (
        "ops/losses/units.py",
        "None else dloss * size)",
        "None else dloss)",
        "weights left out of fp16's unit",
    ),
    (
        "ops/losses/units.py",
        "math.frexp(SLOPE * abs(options.z_loss) / label)[1]",
        "0",
        "a large z-loss overflows in fp16",
    ),
    (
        "ops/losses/last_chunk.py",
        "dx[start:end].view(z.dtype)",
        "dx[start:end].view(weight.dtype)",
        "autocast's x is read in the dtype of the weight",
    ),
    (
        "ops/losses/gradients.py",
        "factor if weight_unit is None else factor / weight_unit",
        "factor",
        "the unit of class weights stays in the gradients",
    ),
    ("runtime/autograd.py", "*(given or [", "*([", "a second derivative by the inputs alone is zero"),
    (
        "runtime/autograd.py",
        "(given or [made[0].new_empty(0, requires_grad=True)])",
        "given",
        "a linear op hides a second backward",
    ),
    (
        "runtime/autograd.py",
        "not torch._C._are_functorch_transforms_active() and ",
        "",
        "without gradients an op forgets a transform",
    ),
    ("runtime/autograd.py", " and forward_ad._current_level < 0", "", "without gradients an op forgets a tangent"),
    ("runtime/autograd.py", 'getattr(ctx, "grads_now", False)', "False", "the fused loss hides a second backward"),
    (
        "ops/rope.py",
        "rotary_dim is None and 2 * width == D",
        "False",
        "a table for half of the features passes as whole",
    ),
    ("ops/losses/rows.py", 'device="cpu", pin', "pin", "the default device chooses where a bad label is written"),
    ("ops/losses/products.py", ", device=order.device", "", "a loss needs its tensors on the default device"),
    (
        "ops/losses/chunks.py",
        'int64, device="cpu") if',
        "int64) if",
        "the bounds of chunks are on the default device",
    ),
    (
        "ops/losses/chunks.py",
        '[n, start, end], device="cpu"',
        "[n, start, end]",
        "bounds are copied from the default device",
    ),
    ("ops/losses/rows.py", "num_items.numel() != 1", "False", "of several num_items the first is taken"),
    ("ops/losses/rows.py", "total += tl.load(loss_ptr", "total = tl.load(loss_ptr", "the sum of the last rows alone"),
    ("ops/losses/rows.py", "(rows < M) & (label != ignore_index)", "rows < M", "ignored labels count in the mean"),
    ("ops/losses/rows.py", "items = tl.where(items == 0.0, 1.0, items)", "pass", "the mean of no label is NaN"),
    ("ops/losses/rows.py", "tl.store(factor_ptr, 1.0 / items)", "tl.store(factor_ptr, 1.0)", "the gradient of the sum"),
]
