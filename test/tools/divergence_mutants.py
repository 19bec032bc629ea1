"""Bugs, as in mutants.py, in the divergence from a teacher: file, old, new, why."""

ROWS, CHUNKS, SHARDS, OP = (
    f"ops/losses/{name}.py"
    for name in ("divergence_rows", "divergence_chunks", "divergence_shards", "linear_divergence")
)
TOPK, PARALLEL = "_topk_divergence.py", "parallel/vocab_divergence.py"
DIVERGENCE = [
    (ROWS, "FORWARD if beta == 0 else REVERSE", "REVERSE if beta == 0 else FORWARD", "forward and reverse are swapped"),
    (ROWS, "tl.where(of_p, beta, rest)", "tl.where(of_p, rest, beta)", "the mixture has the other weights"),
    (
        ROWS,
        "tl.where(of_p, direct, direct - gap)",
        "direct",
        "the rarer word's ratio to the mixture is the other one's",
    ),
    (ROWS, "(ratio - 1.0 - less) - tl.log(ratio)", "-tl.log(ratio)", "a small beta divides a rounding error"),
    (ROWS, "beta, 1 - beta, unit", "beta, 1 - Tensor([beta]).item(), unit", "a beta near 1 is rounded"),
    (ROWS, "of_p = rest * p >= beta * q", "of_p = p >= q", "the mixture's smaller part cancels"),
    (ROWS, "terms = tl.where(q == 0.0, 0.0, q * gap) + pw", "terms = tl.where(q == 0.0, 0.0, q * gap)", "terms cancel"),
    (ROWS, "pw = tl.where(p == 0.0, 0.0, -p * gap)", "pw = -p * gap", "a word of no probability gives NaN"),
    (
        ROWS,
        "tl.where(terms < 0.0, 0.0, terms)",
        "tl.maximum(terms, 0.0)",
        "a NaN is a divergence of 0",
        "test_divergence and nan_stays",
    ),
    (ROWS, "tl.where(terms < 0.0, 0.0, terms)", "terms", "a divergence is negative by rounding"),
    (ROWS, "pw - p * mean", "pw", "the gradient does not sum to zero"),
    (ROWS, "dz *= upstream * slope", "dz *= upstream", "the softcap has no slope"),
    (ROWS, "return beta * (1 - beta) or 1.0", "return 1.0", "the gradient of a mixture is that of the kernel"),
    (ROWS, "teacher_scale, TEACHER_SOFTCAP)[0]", "teacher_scale, SOFTCAP)[0]", "the teacher has the student's softcap"),
    (
        CHUNKS,
        "teacher.x[index[rows]], teacher.weight",
        "teacher.x[: len(teacher_z)], teacher.weight",
        "the first tokens' teacher",
    ),
    (
        CHUNKS,
        "teacher.x if index is None else teacher.x[index]",
        "teacher.x[: z.shape[0]]",
        "compacted tokens' teacher",
    ),
    (CHUNKS, "teacher.weight[part], bias", "teacher.weight[: z.shape[1]], bias", "the teacher's first slice for all"),
    (CHUNKS, "teacher.x[index[rows]]", "teacher.x[index[: len(teacher_z)]]", "the teacher's first rows for all parts"),
    (CHUNKS, "teacher.bias[part]", "teacher.bias[: z.shape[1]]", "the first slice's bias of the teacher for all"),
    (
        CHUNKS,
        "dtype=WIDE)[:, : z.shape[1]]",
        "dtype=teacher.x.dtype)[:, : z.shape[1]]",
        "logits made again are rounded",
    ),
    (CHUNKS, "order=index, unit=unit(options)", "order=index", "the scale of the logits is not in the unit"),
    (OP, "target == IGNORED if masked else None", "None", "a NaN outside the mask gets into dA"),
    (OP, "dloss.where(target != IGNORED, 0) if dloss.dim() else dloss", "dloss", "an upstream NaN outside the mask"),
    (OP, "dloss = dloss * scale_of(ctx.scores[2])", "pass", "the gradient lacks the factor of beta"),
    (OP, "(frozen_head or not settings.per_token)", "not settings.per_token", "a frozen head makes logits again"),
    (OP, "& (argmax >= 0)", "", "tokens outside the mask agree"),
    (OP, "tempered(teacher_options, temperature)", "teacher_options", "the teacher has no temperature"),
    (SHARDS, "(entropies - self.logp)", "(entropies)", "the entropy among the processes is missing"),
    (
        SHARDS,
        "(teacher, student) if kind == FORWARD",
        "(student, teacher) if kind == FORWARD",
        "the student's share of words",
    ),
    (
        SHARDS,
        "next(parts) + (first.logp - second.logp)",
        "next(parts)",
        "the divergence among the processes is missing",
    ),
    (SHARDS, "(argmax + shard.first_word)", "argmax", "words by their place in the shard"),
    (
        PARALLEL,
        "gathered(teacher_x.detach(), shard.processes())",
        "gathered(teacher_x.detach(), shard.processes()).flip(0)",
        "the teacher of another process's tokens",
    ),
    (TOPK, "q.isneginf() | ~mask[..., None]", "~mask[..., None]", "no word has a probability of the student"),
    (TOPK, ".detach()", "", "the teacher has a gradient"),
    (TOPK, "clamp(min=torch.finfo(logp.dtype).eps)", "clamp(min=0)", "no other word: the logarithm of 0"),
]
