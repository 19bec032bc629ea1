"""Bugs, as in mutants.py, in ``fused_linear_logprobs`` and in the losses of post-training: file, old, new, why."""

CHECKS = "_loss_checks.py"
KERNELS, CHUNKS, SLICES = (f"ops/losses/{name}.py" for name in ("row_kernels", "chunks", "slices"))
OP, ROWS, PRODUCTS, LOSSES = (
    "ops/losses/linear_logprobs.py",
    "ops/losses/rows.py",
    "ops/losses/products.py",
    "losses.py",
)

LOGPROBS = [
    (KERNELS, "squares * rescale * rescale +", "squares * rescale +", "squared probabilities are rescaled once"),
    (KERNELS, "tl.where(known, logprob_at, 0.0)", "logprob_at", "the id of no word has a log-probability"),
    (KERNELS, "            slope_p -= dlogprob\n", "", "words that have no id get no gradient from ids"),
    (KERNELS, "d_at += tl.where(", "d_at = tl.where(", "of an id that occurs twice one gradient counts"),
    (KERNELS, "(dz + d_at) * slope", "dz + d_at * slope", "the softcap's derivative is missing at ids"),
    (KERNELS, "tl.where(ids + v_start == word", "tl.where(ids == word", "ids of the first slice for every slice"),
    (CHUNKS, "dtype=more.logits_dtype) if wide", "dtype=x.dtype) if wide", "logits are rounded to the dtype of x"),
    (CHUNKS, "top_words(z, more.topk, options.logit_scale)", "z.topk(more.topk).indices", "equal scores in any order"),
    (CHUNKS, "of_kept[others] = row[others]", "pass", "logits that are not kept have no lse"),
    (
        CHUNKS,
        "launch_fwd(kept, call.target",
        "launch_fwd(z[: len(kept)], call.target",
        "the lse of logits before rounding",
    ),
    (SLICES, "or kept is not None else None", "else None", "kept logits in the order of the tokens"),
    (SLICES, "z[:k] = kept[:k, part]", "z[:k] = kept[:k, : end - start]", "the first kept words for every slice"),
    (SLICES, "None if d_at is None else d_at / factor", "d_at", "gradients of ids lack the factor of fp16"),
    (
        OP,
        "logit_scale=options.logit_scale / temperature",
        "logit_scale=options.logit_scale",
        "the temperature is dropped",
    ),
    (OP, "options.softcap / temperature", "options.softcap", "the temperature changes the softcap"),
    (OP, "dlogprob = dlogprob.where(counted, 0)", "pass", "a NaN of an ignored token gets into dx"),
    (OP, "((dlogprob == first) | ~counted)", "((dlogprob >= first) | ~counted)", "larger gradients count as equal"),
    (
        OP,
        "dlogprob[counted.to(torch.int8).argmax(0, keepdim=True)]",
        "dlogprob[:1]",
        "behind an ignored prompt no gradient is uniform",
    ),
    (
        OP,
        "in_forward and dentropy is None and d_at is None",
        "in_forward and dentropy is None",
        "a frozen head drops the gradient of ids",
    ),
    (
        OP,
        "if kept_logits.numel() and not is_last_backward():",
        "if False:",
        "a second backward reads overwritten logits",
    ),
    (OP, "if kept_rows.numel():", "if False:", "rows of rounded logits do not sum to zero"),
    (ROWS, "first.where(~(part < least), 0)", "0", "of equal scores the last ones are no words"),
    (ROWS, " & (argmax >= 0)", "", "ignored tokens of label -1 are correct"),
    (PRODUCTS, "out.copy_(bias.expand_as(out))", "out", "the bias is missing from logits in fp32"),
    (CHECKS, "value.to(torch", "value.abs().to(torch", "losses take absolute numbers"),
    (CHECKS, ".masked_fill(~mask, 0)\n\n\ndef _summed", "\n\n\ndef _summed", "tokens outside the mask count"),
    (CHECKS, "items.where(items != 0, 1)", "items", "a batch without tokens gives NaN"),
    (LOSSES, "chosen_ratio / _length(chosen_mask) - rejected", "chosen_ratio - rejected", "IPO sums the tokens"),
    (LOSSES, "(1 - 2 * wrong)", "(1 - wrong)", "robust DPO is biased"),
    (LOSSES, "mean().clamp(min=0)", "mean()", "the reference point of KTO is negative"),
    (
        LOSSES,
        "close, far = mean.clamp(split, most), mean.clamp(max=split)",
        "close = far = mean",
        "odds have NaN gradients",
    ),
    (LOSSES, "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - low, 1 + low)", "epsilon_high is ignored"),
    (LOSSES, "torch.expm1(gap) - gap", "torch.expm1(-gap) + gap", "the divergence of the reference from the policy"),
    (LOSSES, "log_ratio.sum(1) / _length(mask)", "log_ratio.sum(1)", "the ratio of a sequence is the product"),
    (LOSSES, "-logprob.detach().exp() * logprob", "-logprob.exp() * logprob", "the weight of DFT has a gradient"),
    (LOSSES, "torch.maximum((new - goal)", "torch.minimum((new - goal)", "clipping makes the value loss smaller"),
]
