"""Bugs, as in mutants.py, in what keeps losses exact and in what refuses bad arguments: (file, old, new, why)."""

EXACT = [
    ("cross_entropy.py", "(z - lse) - lse_rest", "z - lse", "the gradient takes lse as one rounded number"),
    ("cross_entropy.py", "rest = (a - (total - b_part)) + (b - b_part)", "rest = a - total", "a wrong rest of lse"),
    ("cross_entropy.py", "seen * log_total - smooth", "V * log_total - smooth", "smoothing forgets class weights"),
    ("cross_entropy.py", "smooth += moved * seen +", "smooth +=", "smoothing forgets that the top has moved"),
    ("_chunked_loss.py", "factor=weight_unit", "factor=None", "gradients are not of the unit that is divided out"),
    (
        "_chunked_loss.py",
        "of_label = size[target.clamp(0, size.shape[0] - 1)]",
        "of_label = size.amax()",
        "class weights without a label make the gradients of others vanish",
    ),
    (
        "_chunked_loss.py",
        "None else dloss * size, *others",
        "None else dloss, *others",
        "weights left out of fp16's unit",
    ),
    ("_chunked_loss.py", "20 * abs(options.z_loss)) or 1", "0) or 1", "a large z-loss overflows in fp16"),
    (
        "_chunked_loss.py",
        "dx[start:end].view(z.dtype)",
        "dx[start:end].view(weight.dtype)",
        "autocast's x is read in the dtype of the weight",
    ),
    (
        "linear_cross_entropy.py",
        "factor if weight_unit is None else factor / weight_unit",
        "factor",
        "the unit of class weights stays in the gradients",
    ),
    ("_common.py", "else g.detach().requires_grad_() for g", "else g for g", "constants hide a second backward"),
    ("rope.py", "rotary_dim is None and 2 * width == D", "False", "a table for half of the features passes as whole"),
    ("_loss.py", "num_items.numel() != 1", "False", "of several num_items the first is taken"),
    ("_loss.py", "total += tl.load(loss_ptr", "total = tl.load(loss_ptr", "the sum of the last rows alone"),
    ("_loss.py", "(rows < M) & (label != ignore_index)", "rows < M", "ignored labels count in the mean"),
    ("_loss.py", "items = tl.where(items == 0.0, 1.0, items)", "pass", "the mean of no label is NaN"),
    ("_loss.py", "tl.store(factor_ptr, 1.0 / items)", "tl.store(factor_ptr, 1.0)", "the gradient of the sum"),
]
