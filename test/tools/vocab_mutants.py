"""Bugs, as in mutants.py, in losses of a head whose words are sharded over processes: file, old, new, why."""

SHARDS, FORMS = "ops/losses/vocab_shards.py", "parallel/vocab_parallel.py"
CHUNKS, OP = "ops/losses/chunks.py", "ops/losses/linear_logprobs.py"

VOCAB = [
    (
        SHARDS,
        ".where(p != 0, 0)",
        "",
        "a process without probable words gives NaN",
    ),
    (SHARDS, ".where(p != 0, 0)", ".where(p > 0, 0)", "the entropy of a row of NaN is 0"),
    (SHARDS, "(own >= 0) & (own < V), MISSING", "own < V, MISSING", "words before a shard count as its first one"),
    (
        SHARDS,
        "(found + logp).masked_fill(nowhere, -torch.inf)",
        "(found + logp)",
        "impossible words of a shard are NaN",
    ),
    (SHARDS, "2 * logp).masked_fill(nowhere, -torch.inf)", "2 * logp)", "squares of an impossible shard are NaN"),
    (SHARDS, 'parts["squares"] + 2 * logp', 'parts["squares"] + logp', "squares of a shard are rescaled once"),
    (SHARDS, "V * mean", "mean", "the mean of the scores lacks the width of its shard"),
    (SHARDS, ".sort(dim=1)\n", ".sort(dim=1, descending=True)\n", "of equal scores the last word comes first"),
    (SHARDS, "value=-torch.inf)", "value=torch.inf)", "what fills up a small shard is among the best words"),
    (SHARDS, "float() * options.logit_scale", "float()", "candidates are ranked by their logits"),
    (SHARDS, "options._replace(logit_scale=1.0)", "options", "the scores of candidates are scaled twice"),
    (SHARDS, "(z.gather(1, order) - lse) - lse_rest", "z.gather(1, order) - lse", "the best words lack lse_rest"),
    (
        SHARDS,
        "launch_fwd(kept, near",
        "launch_fwd(z[: len(kept)], near",
        "shards keep the lse of logits before rounding",
    ),
    (SHARDS, "kept_rows[:, order[:k]]", "kept_rows[:, :k]", "numbers of kept rows in the order of the tokens"),
    (SHARDS, "counts[:, None], -1)", "counts[:, None], 0)", "the best word of ignored tokens is word 0"),
    (CHUNKS, "call.shard.width or call.weight.shape[0]", "call.weight.shape[0]", "uneven shards take different chunks"),
    (
        "ops/losses/divergence_chunks.py",
        "len(z) if call.shard else PART_ROWS",
        "PART_ROWS",
        "shards exchange numbers of parts of a chunk",
    ),
    (OP, "pitch(shard.width or weight.shape[0])", "pitch(weight.shape[0])", "uneven shards keep different tokens"),
    (OP, "uniform = on_all(uniform, ctx.shard)", "pass", "processes take different branches"),
    (
        OP,
        "summed_gradient(x, shard) if shard.reduce_dx else x",
        "x",
        "the reference does not sum dx over the processes",
    ),
    (FORMS, "[t.movedim(last, 0) for t in parts]", "[t.movedim(0, 0) for t in parts]", "labels of other tokens"),
    (FORMS, "result.movedim(0, last)", "result.movedim(0, 0)", "results in the order of the processes"),
]
