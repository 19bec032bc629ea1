"""Bugs, as in mutants.py, in parallel training: file, old, new, why."""

FILE = "parallel/expert_parallel.py"
PARALLEL = [
    (FILE, "self.gather(index) - self.rank * len(gate_up)", "self.gather(index)", "each process runs the first ids"),
    (FILE, "(ctx.ranks.reduce(grad) * ctx.ranks.size)", "ctx.ranks.reduce(grad)", "the tokens' gradient is a mean"),
    (FILE, "(grad / ctx.ranks.size)", "grad", "the gradient of experts is a sum over the processes"),
    (
        FILE,
        "parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))",
        "parts.sum(0)",
        "a sum rounded in between",
    ),
    (
        FILE,
        "torch._assert_async((counts == T).all(), UNEQUAL)",
        "counts.all()",
        "unequal numbers of tokens go unnoticed",
    ),
    (FILE, "self.tokens < T:", "self.tokens < T - 1:", "a token too many is dropped"),
    (FILE, ", [Shard(0)]), parameter.requires_grad)", ", [Shard(0)]))", "frozen experts are trained"),
    (FILE, "ignore(model, names)", "ignore(model, [])", "DDP averages different experts"),
    (FILE, "for t in (gate_up_bias, down_bias))", "for t in (gate_up_bias, None))", "no bias of down"),
    (FILE, "len(weight) == 0 or len(weight) % processes", "len(weight) < processes", "uneven shards of experts"),
    (FILE, "if isinstance(weight, DTensor):", "if weight.is_sparse:", "experts are sharded twice"),
    (FILE, ' or hasattr(module, "parametrizations")', "", "only gate_up may not be parametrised"),
    (FILE, ' or name.endswith(".base_layer")', "", "adapters of experts are not noticed"),
    (FILE, "_ToOwners.apply(out, self, dtype)", "_ToOwners.apply(out, self, out.dtype)", "rounded under autocast"),
    (FILE, "way.gather(index) - self.rank * E", "way.gather(index)", "by all-to-all each process runs the first ids"),
    (
        FILE,
        "self.T, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)",
        "self.T, *x.shape[1:]",
        "by all-to-all a sum is rounded in between",
    ),
    (FILE, ", S=sum(chosen))", ")", "memory for the choices of all experts"),
    (FILE, "index.shape[1] >= self.size", "index.shape[1] > self.size", "an all-to-all of as many rows"),
]
