"""Bugs, as in mutants.py, in the routers of experts, their loss and the modules: file, old, new, why."""

_ROUTER = [
    ("bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF", "bits, 0x7FFFFFFF", "negative scores in reverse order"),
    ("& 0x7FFFFFFF), 0x7FFFFFFF)", "& 0x7FFFFFFF), 0)", "NaN counts as 0"),
    ("(x + 0.0).to(", "x.to(", "-0 is less than 0"),
    ("tl.where(exists[None, :], order, LEAST)", "order", "padding takes part in the choice"),
    (
        "tl.min(tl.where(order == best[:, None], columns, N)",
        "tl.max(tl.where(order == best[:, None], columns, 0)",
        "the last of equal scores comes first",
    ),
    ("for _ in range(CHOSEN)", "for _ in range(CHOSEN + 1)", "a group too many"),
    ("_number_of(score) + _number_of(second)", "_number_of(score)", "the score of a group lacks its second best"),
    ("(member < SIZE), group * SIZE", "(member < SIZE), group * BLOCK_S", "groups start at powers of 2"),
    ("column // BLOCK_S * SIZE + column % BLOCK_S", "column", "the padding of groups counts in the index"),
    ("rank += tl.load(bias_ptr", "rank -= tl.load(bias_ptr", "the bias is subtracted"),
    (
        "weights /= tl.sum(weights, axis=1)[:, None] + eps",
        "weights /= tl.sum(weights, axis=1)[:, None]",
        "eps is missing",
    ),
    ("tl.store(weights_ptr + offs, weights * scale", "tl.store(weights_ptr + offs, weights", "the scale is missing"),
    ("dp = scale * load_tile", "dp = load_tile", "the gradient lacks the scale"),
    ("(stride_dm, stride_m, M)", "(settings.top_k, stride_m, M)", "upstream rows are read as dense"),
    ("dp -= most", "most = 0.0", "equal gradients cancel but for rounding"),
    ("+ most * share) / total", ") / total", "with eps the largest gradient is missing in the others"),
    ("dp = (dp - common + most * share) / total", "dp = dp / total", "the gradient of the sum is missing"),
    ("(common + most * (1.0 - share)) * share", "0.0", "with eps the sum of the weights is taken for constant"),
    ("dp *= p / (1.0 + tl.exp(z))", "dp *= p", "the slope of the sigmoid lacks a factor"),
    ("dz, dp = -common * dz, dp * p", "dz, dp = common * dz, dp * p", "the softmax's common term has a wrong sign"),
    ("dp = (dp - common) * p", "dp = dp * p", "the softmax of the top has no common term"),
    ("dz += tl.where(offs_n", "dz = tl.where(offs_n", "only the last expert has a gradient"),
    ('settings.score == "softmax" and not settings.eps', 'settings.score == "softmax"', "eps is ignored"),
    ("if bias is not None or top2 else", "if top2 else", "the bias is added to logits in place of scores"),
    ("return (n, chosen, groups[2]) if n > 1 else", "return (n, n, groups[2]) if n > 1 else", "all groups are chosen"),
]
_LOSS = [
    ("for _ in range(K)", "for _ in range(1, K)", "an expert too few counts"),
    ("tl.where(order == LEAST, weight, 0.0)", "tl.where(order == LEAST, 1.0, 0.0)", "padding counts"),
    ("softmax_of_rows(z) * weight", "softmax_of_rows(z)", "probabilities of padding"),
    ("layer > 0, tl.sum(counts", "layer > 1, tl.sum(counts", "the first layer's counts are overwritten"),
    ("layer > 0, tl.sum(prob", "layer < 0, tl.sum(prob", "the last layer's probabilities alone"),
    ("rows = tl.sum(count, axis=0) / K", "rows = tl.sum(count, axis=0)", "a row counts K times"),
    ("rows = tl.where(rows == 0.0, 1.0, rows)", "pass", "0 / 0 without rows"),
    ("(E / rows)", "(1.0 / rows)", "the factor E is missing"),
    ("counts += load_tile(", "counts = load_tile(", "counts of the last programs alone"),
    ("slope - tl.sum(p * slope, axis=1)[:, None]", "slope", "the gradient of the softmax's sum is missing"),
    ("offs_m, M) * tl.load(dloss_ptr)", "offs_m, M)", "the upstream gradient is ignored"),
    ("[:, None]) * weight\n    store", "[:, None]) * tl.load(dloss_ptr)\n    store", "padding has a gradient"),
    ("float(M * len(layers))", "float(M)", "the rows of one layer only"),
]
_MODULES = [
    ("bias=self.e_score_correction_bias, **self", "bias=None, **self", "a router ignores its correction"),
    ("torch.float32 if self.fp32 else self.weight.dtype", "self.weight.dtype", "fp32 logits are forgotten"),
    ("torch.sigmoid(self.shared_expert_gate(x))", "self.shared_expert_gate(x)", "no sigmoid of the shared gate"),
    ("(E, H, I), fan_in=I", "(E, H, I), fan_in=H", "initial values of another fan-in"),
]
ROUTERS = [
    *(("ops/router.py", *bug) for bug in _ROUTER),
    *(("ops/load_balancing.py", *bug) for bug in _LOSS),
    *(("nn.py", *bug) for bug in _MODULES),
]
