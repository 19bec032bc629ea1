"""Training steps of Llama-3.2-1B's shape: by batch and by sequence, patched in part, as a CUDA graph, and from inside.

    make bench-sweeps                                 measures, writes results/ and from it the report and the pictures
    python -m benchmark sweeps --parts batch          some of it; results/ keeps what it has of the rest
    python -m benchmark sweeps --contestants Liger    the same of the contestants: several processes may share the work
    python -m benchmark sweeps --tokens 4096          and of the shapes that are swept, by their tokens
    python -m benchmark sweeps --quick                tiny shapes, printed only; needs no GPU
    python -m benchmark sweeps --report               the report again, without a GPU

The sweeps are checkpointed, the other parts are not. A contestant that fails, by memory or else, is not tried with what
is larger. What is measured is written at once.
"""

import argparse
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from benchmark.common.markdown import Row
from benchmark.common.measure import attempt, environment, known, merged, present, rounded, settle, update
from benchmark.common.processes import GPU, reset_peak, times
from benchmark.training import traces
from benchmark.training.sweeps_report import INSIDE_SHAPE, tables, write_report
from benchmark.training.training import (
    CONTESTANTS,
    SELECTIVE,
    Preparation,
    build,
    clear,
    nothing,
    row_of,
    tokens_of,
    trainer,
)
from examples.train import CONFIGS
from liger_like import patching

WARMUP, STEPS, ROUNDS = 2, 3, 2
LIGER = "Liger"  # measured last: it changes transformers for the whole process
Shape = tuple[int, int]  # sequences, tokens of each


class Sizes(NamedTuple):
    """The model, the swept sizes, the shape of the graph, and the shape of the other parts."""

    config: PreTrainedConfig
    sweeps: Mapping[str, tuple[Shape, ...]]
    graph: Shape
    inside: Shape


FULL = Sizes(
    CONFIGS["1b"],
    {
        "batch": tuple((batch, 1024) for batch in (1, 4, 8, 16, 32, 64, 96, 112)),
        "sequence": tuple((4, seq) for seq in (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576)),
    },
    (1, 1024),
    INSIDE_SHAPE,
)
QUICK = Sizes(CONFIGS["tiny"], {"batch": ((1, 32), (2, 32)), "sequence": ((2, 16), (2, 48))}, (1, 32), (2, 32))

SWITCHES = "norm", "rope", "mlp", "attention", "loss"  # arguments of patch
VARIANTS: dict[str, Collection[str]] = {
    "none": (),
    **{f"{name} alone": (name,) for name in SWITCHES},
    **{f"all but {name}": {*SWITCHES} - {name} for name in SWITCHES},
    "all": SWITCHES,
}
INSIDE = {name: CONTESTANTS[name] for name in ("transformers", "liger_like")}
WHOLE = {name: prepare for name, prepare in CONTESTANTS.items() if name != SELECTIVE}  # without checkpoints
PARTS: dict[str, Mapping[str, Any]] = {
    "batch": CONTESTANTS,
    "sequence": CONTESTANTS,
    "ablation": VARIANTS,
    "graph": WHOLE,
    "memory": INSIDE,
    "profile": INSIDE,
}


def sweep(prepare: Preparation, config: PreTrainedConfig, shapes: Collection[Shape]) -> Iterator[Row]:
    """Yield a row for each shape of one model until one fails."""
    clear()

    @functools.cache
    def step() -> Callable[..., None]:
        return trainer(build(prepare, config, checkpointing=True))

    def measured(batch: int, seq: int) -> Row:
        clear()
        timed = partial(step(), tokens_of(config, batch, seq))
        times(timed, WARMUP)
        return row_of(timed, batch * seq, STEPS)

    for batch, seq in shapes:
        row = {"batch": batch, "sequence": seq, **attempt(partial(measured, batch, seq))}
        yield row
        if "reason" in row:
            return


def ablate(names: Collection[str], config: PreTrainedConfig, batch: int, seq: int) -> list[Row]:
    """Measure variants of one patched model in turns, so that a difference of 1 % shows."""
    clear()
    model = build(nothing, config, checkpointing=False)
    step = partial(trainer(model), tokens_of(config, batch, seq))

    def timer(name: str) -> list[float]:
        with patching.patch(model, **{switch: switch in VARIANTS[name] for switch in SWITCHES}):
            step()
            reset_peak()
            return times(step, STEPS)

    def peak(name: str) -> Row:
        clear()
        timer(name)
        return {"gib": torch.cuda.max_memory_allocated() / 2**30, "ms": partial(timer, name)}

    rows = [{"name": name, **attempt(partial(peak, name))} for name in names]
    settle(rows, ROUNDS, wait=lambda: None)
    return rows


def replayed(prepare: Preparation, config: PreTrainedConfig, batch: int, seq: int) -> Row:
    """Time a small step as the host launches it, and as one CUDA graph, without checkpoints."""
    if not GPU:
        return {"reason": "needs a GPU"}
    clear()
    step = partial(trainer(build(prepare, config, checkpointing=False)), tokens_of(config, batch, seq))
    stream = torch.cuda.Stream()  # autograd uses the forward's stream: warm up and capture on one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        times(step, WARMUP)
        launched = {"launched_ms": row_of(step, batch * seq, STEPS)["ms"]}

    def replay() -> Row:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return row_of(graph.replay, batch * seq, STEPS)

    return launched | attempt(replay)


def inside(part: str, prepare: Preparation, config: PreTrainedConfig, batch: int, seq: int) -> Row:
    """Return the memory of one warm step, or the time of each group of its work."""
    if part == "memory" and not GPU:
        return {"reason": "needs a GPU"}
    clear()
    model, tokens = build(prepare, config, checkpointing=False), tokens_of(config, batch, seq)
    step = trainer(model)
    timed = partial(step, tokens)
    times(timed, WARMUP)
    if part == "memory":
        return traces.memory(partial(step, tokens))
    row = row_of(timed, batch * seq, STEPS)
    with traces.grouped(model):
        return row | {"groups": traces.profile(timed)}


def small(sizes: Sizes, tokens: float) -> Sizes:
    """Return the swept sizes up to ``tokens``; such steps are launch-bound, and other processes may share the host."""
    sweeps = {part: tuple(shape for shape in shapes if prod(shape) <= tokens) for part, shapes in sizes.sweeps.items()}
    return sizes._replace(sweeps=sweeps)


def large(result: Row, tokens: float) -> dict[tuple[str, str], list[Row]]:
    """Return, by part and contestant, the rows of ``result`` with more tokens."""
    parts = result.get("parts", {})
    swept = [(part, name, rows) for part in FULL.sweeps for name, rows in parts.get(part, {}).items()]
    return {(p, name): [row for row in rows if row["batch"] * row["sequence"] > tokens] for p, name, rows in swept}


def measure(part: str, names: Collection[str], sizes: Sizes) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each contestant of a part; a sweep yields all its rows again with each new one."""
    if part in sizes.sweeps:
        for name in names:
            rows: list[Row] = []
            for row in sweep(CONTESTANTS[name], sizes.config, sizes.sweeps[part]):
                rows.append(row)
                yield name, rows
    elif part == "ablation" and names:
        yield from ((row.pop("name"), [row]) for row in ablate(names, sizes.config, *sizes.inside))
    else:
        one, shape = (replayed, sizes.graph) if part == "graph" else (partial(inside, part), sizes.inside)
        for name in names:
            yield name, [attempt(partial(one, PARTS[part][name], sizes.config, *shape))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark sweeps")
    contestants = list(dict.fromkeys(name for part in PARTS.values() for name in part))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contestants", nargs="+", choices=contestants, default=contestants)
    parser.add_argument(
        "--tokens", type=int, default=inf, help="of the sweeps the shapes up to so many; results/ keeps the larger"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not GPU and not options.quick:
            parser.error("needs a GPU (all but --quick and --report)")
        result = environment("transformers", "Liger") | {"parts": {}}
        sizes = small(QUICK if options.quick else FULL, options.tokens)
        kept = large({} if options.quick else known(result, "sweeps"), options.tokens)
        for last in (False, True):
            for part in options.parts:
                names = [n for n in present(PARTS[part]) if n in options.contestants and (n == LIGER) == last]
                for name, rows in measure(part, names, sizes):
                    print(f"{part}, {name}: {rows[-1]}", flush=True)
                    result["parts"].setdefault(part, {})[name] = rows + kept.get((part, name), [])
                    if not options.quick:
                        update(rounded(result), "sweeps", PARTS)
        print(tables(merged({}, rounded(result), PARTS)))
        if options.quick:
            return
    write_report()
