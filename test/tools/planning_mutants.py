"""Bugs, as in mutants.py, in the plans of a step and in the stages that they name: file, old, new, why."""

_PLAN = "planning/_{}.py".format
CLOCK, LAYERS, PREDICTION, REPORT, SEARCH, SETTINGS, STAGES, STAND_INS, TRACER = map(
    _PLAN, ("clock", "layers", "prediction", "report", "search", "settings", "stages", "stand_ins", "tracer")
)
SPREAD = "parallel/stages.py"

PLANNING = [
    (TRACER, "return -(-size // ROUND) * ROUND", "return size", "bytes are not rounded as the allocator rounds"),
    (TRACER, "        self.grow(entry, -entry.size)\n", "", "memory that was freed counts"),
    (TRACER, "[self.start[0], *((", "[*((", "the workspace is forgotten at a restart"),
    (TRACER, "for value in state.values():", "for value in ():", "moments are of no layer"),
    (STAND_INS, "rows = 128 * math.ceil(S / 128)", "rows = S", "rows of attention's backward are not padded"),
    (
        STAND_INS,
        "size if k.shape[1] == H else size + ",
        "size + 0 * ",
        "shared keys need no workspace",
    ),
    (CLOCK, "self.host, self.copies)", "self.copies)", "the host takes no time"),
    (CLOCK, "return 2 * self.sent / self.pcie", "return self.sent / self.pcie", "copies do not come back"),
    (CLOCK, "* (0.5 if causal else 1)\n", "\n", "torch's causal attention computes all pairs"),
    (CLOCK, "max(flops / rate, bytes_moved / self.copy)", "flops / rate", "thin products move no bytes"),
    (CLOCK, "(sizes[1] - sizes[0]) / self.link", "sizes[1] / self.link", "a GPU sends to itself"),
    (LAYERS, "return self.kept - 1 - behind", "return self.kept - 1", "all layers near the end are the last"),
    (LAYERS, "one.outline() != other.outline()", "False", "periods may differ"),
    (LAYERS, 'end.times["optimizer"] *= trained', "pass", "the optimizer updates the traced layers alone"),
    (LAYERS, "passes[1:2] * (setting.accumulation - len(passes))", "[]", "passes are left out"),
    (LAYERS, "margin, shared = 2 if", "margin, shared = 1 if", "copies lag one layer"),
    (PREDICTION, "(len(stages) - 1) / passes", "(len(stages) - 1) / len(stages)", "the bubble is of no micro-batches"),
    (PREDICTION, "largest = max(stages", "largest = min(stages", "the memory is that of the smallest stage"),
    (PREDICTION, " or t > gpu}", "}", "no step waits for the host"),
    (SEARCH, "low, best = middle, tried", "low = middle", "the best of the bisection is lost"),
    (SEARCH, "room and needs <=", "needs <=", "the host has any memory"),
    (SEARCH, "CONTEXT + GROUP * groups", "CONTEXT", "groups of GPUs need no buffers"),
    (REPORT, 'str(index) if row.fits else "-"', "str(index)", "rows that do not fit look as if they did"),
    (REPORT, "s.gpus > 1 and plain and known", "s.gpus > 1 and known", "the example is to do what it cannot"),
    (SETTINGS, 'if self.dtype == "fp32" and self.lora:', "if False:", "sharded adapters are guessed"),
    (STAGES, "if len(flying) == setting.pp - index:", "if len(flying) == setting.pp:", "each stage is the first"),
    (SPREAD, "if config.tie_word_embeddings:", "if False:", "a tied head is spread"),
    (SPREAD, 'if {*kinds} != {"full_attention"}:', "if False:", "windows are lost"),
    (SPREAD, "if tp > 1 and (more :=", "if False and (more :=", "norms of heads are spread"),
    (SPREAD, "if config._attn_implementation != NAME:", "if False:", "attention that is not patched is spread"),
    (
        SPREAD,
        "{str(i): layers[i] for i in range(*cuts)}",
        "{str(i - cuts[0]): layers[i] for i in range(*cuts)}",
        "layers of later stages have other numbers",
    ),
]
