"""A plan as a table, as a dictionary and as a picture."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_like.planning._machine import GIB
from liger_like.planning._settings import DEFAULTS, MESH, WHOLE
from liger_like.planning._tracer import KINDS

if TYPE_CHECKING:
    from liger_like.planning._search import Candidate, Plan

STATES = "parameters", "gradients", "optimizer"
KEPT = ("activations",)
# what examples/parallel.py leaves as it is
SAVINGS = "checkpoint_on_host", "checkpoint_layers", "tiled_mlp", "step_in_backward", "optimizer", "lora"
OPTIMIZERS = {"adamw": "torch.optim.AdamW", "adamw8bit": "bitsandbytes.optim.AdamW8bit", "sgd": "torch.optim.SGD"}
# by the stage of ZeRO
SHARDED = {
    0: "DistributedDataParallel over {} GPUs",
    1: "DistributedDataParallel and ZeroRedundancyOptimizer over {} GPUs",
    2: "FSDP2 over {} GPUs with reshard_after_forward=False",
    3: "FSDP2 over {} GPUs",
}
KEEPS = '("attention", "loss")', '(), host=("attention",)'  # of a checkpoint, by whether it is on the host
COLORS = ("#0050d0", "#6fcfc0", "#5b8def", "#a0a0a0", "#e69f00", "#b0559c", "#d79bc8", "#585858", "#a5703f")
LEGEND = (
    "rows: sequences that a GPU computes at a time, x passes before an optimizer step; checkpointing: activations are",
    "  computed again in the backward, so that fewer are kept; - before a setting: does not fit",
    "needs: GiB that a GPU must have: the peak, and an assumed margin for what torch does not count",
    "peak: GiB of all tensors at their most = states (parameters, gradients, optimizer) + kept (activations) + rest",
    "host: GiB of CPU memory, for all GPUs; limited by: what takes most of the time, and its share",
)
GUESS = "~: a guess, since the rates of this GPU were not measured"
HEADINGS = "", "setting", "needs", "peak", "states", "kept", "rest", "host", "s/step", "tokens/s", "limited by"


def table(plan: "Plan") -> str:
    """Return the rows of ``plan`` as text, with what comes nearest if none fits."""
    gpu = f"{plan.gpu.name}" + " (uncalibrated)" * (not plan.gpu.calibrated)
    lines = [
        f"{plan.model} ({plan.parameters / 1e9:.2f}e9 parameters), {plan.gpus} x {gpu}, {plan.batch} rows of {plan.seq}"
        f" tokens a step; GiB of each GPU, which has {plan.gpu.memory / GIB:.1f}"
    ]
    rows = [HEADINGS, *(_cells(i, row) for i, row in enumerate(plan.rows, 1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (c.ljust(w) if i in (1, 10) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    lines += ["", *LEGEND, *[GUESS] * (not plan.gpu.calibrated), ""]
    best = plan.rows[0]
    if plan.best is None:
        lack = best.needs - plan.gpu.memory / GIB
        lacks = f"{lack:.1f} GiB" if lack > 0 else f"memory of the host: it takes {best.host_gib} GiB"
        lines.append(f"nothing fits: the nearest, {best.setting.text()}, lacks {lacks}")
    else:
        lines.append(f"start 1, with this model: {start(best)}")
    return "\n".join(lines)


def peak(plan: "Plan") -> str:
    """Return the peak of the first row of ``plan`` by layer and kind; layers with the same memory share a line."""
    found = plan.rows[0].prediction
    kinds = [*found.by_kind]
    groups: list[tuple[int, int, list[str]]] = []  # the first and the last layer, and the memory of each
    for layer, sizes in found.by_layer_and_kind.items():
        cells = [f"{sizes.get(kind, 0.0):.2f}" for kind in kinds] + [f"{found.by_layer[layer]:.2f}"]
        if groups and groups[-1][0] >= 0 and groups[-1][2] == cells:
            groups[-1] = groups[-1][0], layer, cells
        else:
            groups.append((layer, layer, cells))
    lines = [["peak of 1 in GiB", *kinds, "sum"], *([_layers(first, last), *cells] for first, last, cells in groups)]
    lines.append(["sum", *(f"{found.by_kind[kind]:.2f}" for kind in kinds), f"{found.gib:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = (
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))] for line in lines
    )
    return "\n".join("  ".join(row) for row in rows)


def _layers(first: int, last: int) -> str:
    if first < 0:
        return "outside of layers"
    return f"layer {first}" if first == last else f"layers {first}-{last}, each"


def _cells(index: int, row: "Candidate") -> tuple[str, ...]:
    kinds, found = row.prediction.by_kind, row.prediction
    states, kept = (sum(kinds.get(kind, 0.0) for kind in names) for names in (STATES, KEPT))
    seconds = f"{found.seconds:.3g}" if found.calibrated else f"~{found.seconds:.1g}"
    tokens = f"{row.tokens_per_second:,.0f}" if found.calibrated else f"~{row.tokens_per_second:.0e}"
    gib = (f"{x:.1f}" for x in (row.needs, found.gib, states, kept, found.gib - states - kept))
    host = str(row.host_gib) if row.host_gib else "-"
    return (str(index) if row.fits else "-", row.setting.text(), *gib, host, seconds, tokens, found.limited_by)


def start(row: "Candidate") -> str:
    """Return the command that starts a setting, or the arguments of a trainer that do."""
    s = row.setting
    plain = all(getattr(s, name) == DEFAULTS[name] for name in SAVINGS)
    known = (
        s.patched
        and s.accumulation == (2 * s.pp if s.pp > 1 else 1)
        and s.checkpoint != "attention"
        and s.cp_method == "allgather"
        and s.zero not in WHOLE
    )
    if s.gpus > 1 and plain and known:
        sizes = " ".join(f"--{name} {getattr(s, name)}" for name in MESH if getattr(s, name) > 1)
        sizes += f" --zero {s.zero}" * (s.zero != DEFAULTS["zero"])
        shape = f"--batch {s.batch} --seq {s.seq} --checkpointing {s.checkpoint}"
        return f"torchrun --nproc-per-node {s.gpus} -m examples.parallel {sizes} {shape}"
    keeps = {
        "selective": " context_fn=checkpoint_policy()",
        "attention": f" context_fn=checkpoint_policy({KEEPS[s.checkpoint_on_host]})",
    }
    parts = [f"peft.LoraConfig(r={s.lora}, target_modules='all-linear')"] * (s.lora > 0)
    parts += [f"liger_like.patch(model{', mlp=' + repr('tiled') if s.tiled_mlp else ''})"] * s.patched
    parts += [SHARDED[s.zero].format(s.fsdp)] * (s.fsdp > 1)
    parts += [f"context_parallel over {s.cp}"] * (s.cp > 1)
    parts += [f"liger_like.parallel.stages.spread over {s.tp} x {s.pp} (tp x pp)"] * s.staged
    if s.checkpoint != "none":
        parts.append(f"gradient_checkpointing_enable with use_reentrant=False{keeps.get(s.checkpoint, '')}")
    parts += [f"group_checkpoints(model, {s.checkpoint_layers})"] * (s.checkpoint_layers > 1)
    parts += ["offload_checkpoints() around the step"] * s.checkpoint_on_host
    kind = OPTIMIZERS[s.optimizer]
    parts += [f"step_in_backward with {kind}"] if s.step_in_backward else [kind] * (s.optimizer != "adamw")
    return ", ".join([*parts, f"micro-batch {s.micro_batch}, accumulation {s.accumulation}"])


def to_dict(plan: "Plan") -> dict[str, Any]:
    """Return ``plan`` as JSON has it; the curves are left out."""
    rows = []
    for row in plan.rows:
        found = dataclasses.asdict(row.prediction)
        found.pop("curve")
        more = {"needs": row.needs, "fits": row.fits, "tokens_per_second": row.tokens_per_second, "start": start(row)}
        rows.append(
            {"setting": dataclasses.asdict(row.setting)} | more | found | {"limited_by": row.prediction.limited_by}
        )
    head = {name: getattr(plan, name) for name in ("model", "parameters", "gpus", "batch", "seq")}
    return head | {"gpu": plan.gpu.name, "gib": plan.gpu.memory / GIB, "calibrated": plan.gpu.calibrated, "rows": rows}


def picture(plan: "Plan", path: str | Path) -> None:
    """Write a picture of ``plan``: left a bar for each row by kind, right the memory over the step of the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.6 * len(plan.rows) + 3.4), dpi=100, layout="constrained")
    bars, over = figure.subplots(1, 2)
    names = [f"{row.setting.text()}\n{row.tokens_per_second:,.0f} tokens/s" for row in plan.rows]
    left = [0.0] * len(plan.rows)
    for kind, color in zip(KINDS, COLORS, strict=True):
        sizes = [row.prediction.by_kind.get(kind, 0.0) for row in plan.rows]
        bars.barh(names, sizes, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    bars.axvline(plan.gpu.memory / GIB, color="black", linestyle="--")
    bars.invert_yaxis()
    bars.set(
        xlabel="GiB of a GPU at the peak", title=f"{plan.gpus} x {plan.gpu.name}, {plan.batch} x {plan.seq} tokens"
    )
    first = plan.rows[0].prediction
    over.stackplot(range(len(first.curve)), *zip(*first.curve, strict=True), colors=COLORS)
    over.axhline(first.gib, color="black", linewidth=0.8)
    over.set(xticks=[], xlabel="a step, by what is allocated", ylabel="GiB", title=plan.rows[0].setting.text())
    lines, labels = bars.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(KINDS), fontsize="small")
    figure.savefig(path, metadata={"Software": None})
