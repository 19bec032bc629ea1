"""Trains a model on a GPU from several seeds, unpatched and patched, and compares the curves of the loss.

    make bench-curves                       measures, writes results/ and from it the report and the picture
    python -m benchmark curves --report     the report again, without a GPU

The model has Llama-3.2-1B's shape and random weights, the text is that of Python's standard library, in bytes. A seed
gives the weights and the order of the text; patched and unpatched models of a seed see the same.
"""

import argparse
from typing import Any

import torch
from rich.progress import Progress

from benchmark.common import plots
from benchmark.common.markdown import NOTES, RESULTS, Row, between, digest, heading, results, table
from benchmark.common.measure import environment, rounded, save
from examples.train import CONFIGS, Job, make_batches, read_tokens, train

MODEL = "Llama-3.2-1B"
SEEDS, STEPS, BATCH, SEQ = 3, 500, 4, 512
WINDOW = 20  # steps in the compared mean
PICTURE = RESULTS / "curves.png"
BEGIN, END = "<!-- curves: written by `python -m benchmark curves --report` -->\n", "<!-- /curves -->\n"


def measure() -> Row:
    """Return the losses of both models by seed."""
    config = CONFIGS["1b"]
    tokens = read_tokens(None, None, config)
    curves: list[Row] = []
    with Progress() as progress:
        for seed in range(SEEDS):
            batches = make_batches(tokens, STEPS, BATCH, SEQ, seed)
            job = Job(config, batches, torch.bfloat16, compile=False, checkpointing=False, lr=3e-4, seed=seed)
            runs = {name: train(name, job, progress, patched=name == "patched") for name in ("unpatched", "patched")}
            curves.append({name: run.losses.tolist() for name, run in runs.items()})
    return {**environment("transformers"), "curves": curves}


def smoothed(curve: list[float]) -> torch.Tensor:
    """Return means of WINDOW steps."""
    return torch.tensor(curve, dtype=torch.float64).unfold(0, WINDOW, WINDOW).mean(1)


def cells(result: Row) -> list[list[str]]:
    """Return, by seed, the last losses of both models and their distance; the last row compares the seeds."""
    pairs = [{name: smoothed(curve) for name, curve in both.items()} for both in result["curves"]]
    rows = []
    for seed, both in enumerate(pairs):
        apart = (both["patched"] - both["unpatched"]).abs()
        ends = (f"{both[name][-1]:.4f}" for name in ("unpatched", "patched"))
        rows.append([str(seed), *ends, f"{apart.mean():.4f}", f"{apart.max():.4f}"])
    seeds = torch.stack([both["unpatched"] for both in pairs])
    spread = seeds.amax(0) - seeds.amin(0)
    return [*rows, ["seeds apart", "", "", f"{spread.mean():.4f}", f"{spread.max():.4f}"]]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    columns = ("seed", "unpatched", "patched", "mean difference", "largest difference")
    last = f"Losses as means of {WINDOW} of {STEPS} steps: the last ones, and how far patched and unpatched part.\n"
    return "\n".join([*heading(result), last, table(columns, cells(result))])


def with_tables(notes: str, measured: list[Row]) -> str:
    """Return ``notes`` with the picture and the tables between their markers."""
    picture = [f"![loss curves](results/{PICTURE.name})\n"] if measured else []
    return between(notes, BEGIN, END, "\n".join([*picture, *map(tables, measured)]))


def draw(figure: Any, result: Row) -> None:
    """Draw the curves of both models, and below how far they part, beside how far the seeds do."""
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    theirs, ours = ([smoothed(both[name]) for both in result["curves"]] for name in ("unpatched", "patched"))
    steps = WINDOW * (torch.arange(len(theirs[0])) + 0.5)
    spread = torch.stack(theirs).amax(0) - torch.stack(theirs).amin(0)
    differences.plot(steps, spread, color=plots.COLORS["transformers"], linewidth=4)
    apart = [(patched - unpatched).abs() for patched, unpatched in zip(ours, theirs, strict=True)]
    for unpatched, patched, difference in zip(theirs, ours, apart, strict=True):
        losses.plot(steps, unpatched, color=plots.COLORS["transformers"], linewidth=4, label="unpatched")
        losses.plot(steps, patched, color=plots.COLORS[plots.OURS], linewidth=1.5, label=f"patched by {plots.OURS}")
        differences.plot(steps, difference, color=plots.COLORS[plots.OURS], linewidth=1.5)
    losses.set(ylabel=f"loss, mean of {WINDOW} steps")
    differences.set(xlabel="step", ylabel="difference of the loss", ylim=(0, None))
    text = "grey: between the seeds, unpatched; blue: between patched and unpatched, of each seed"
    differences.set_title(text, weight="normal", size="medium")
    plots.title(figure, f"Training loss of {MODEL}'s shape, B {BATCH} S {SEQ}, {len(ours)} seeds", result, [losses])


def figure(measured: list[Row]) -> Any:
    return plots.drawn(draw, measured, 6)


def write_report() -> None:
    measured = results("curves")
    NOTES.write_text(with_tables(NOTES.read_text(), measured))
    if measured:
        plots.save(figure(measured), PICTURE, digest("curves"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark curves")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    if not parser.parse_args().report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        result = rounded(measure())
        print(tables(result))
        save(result, "curves")
    write_report()
