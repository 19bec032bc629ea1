"""Times training that is spread over all GPUs of a machine, against transformers, torch and Liger.

    make bench-sharded                                measures, writes results/ and from it the report
    python -m benchmark sharded --parts fsdp loss     some of it; results/ keeps what it has of the rest
    python -m benchmark sharded --contestants Liger   the same of the contestants
    python -m benchmark sharded --parts planned --settings 0 4    some of the steps that `plan` predicts
    python -m benchmark sharded --quick               tiny shapes, printed only; without GPUs in two processes
    python -m benchmark sharded --report              the report again, without a GPU

Every contestant trains in processes of its own, and one that runs out of memory or time has a row that says so. What is
measured is written at once.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, PreTrainedConfig

from benchmark.common.markdown import Row
from benchmark.common.measure import environment, merged, present, rounded, update
from benchmark.common.processes import GPU, Processes
from benchmark.training.sharded_models import CLIMBING, LADDER, TRAINED, climb, train
from benchmark.training.sharded_ops import LOSSES, METHODS, attentions, losses
from benchmark.training.sharded_report import tables, write_report
from benchmark.training.sharded_settings import MODELS, SETTINGS, fields_of, measured
from examples.parallel import LARGER
from examples.parallel import MODELS as UNTIED
from examples.train import CONFIGS
from liger_like.planning import Setting

TIMEOUT = 900
# heads for as many GPUs as the large models have
TINY = LlamaConfig(**UNTIED["tiny"].to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 8})


class Sizes(NamedTuple):
    """The models and shapes of each part."""

    config: PreTrainedConfig
    settings: tuple[tuple[int, int], ...]  # rows of a process, tokens of a row
    ladder: tuple[int, ...]
    loss: Mapping[str, int]
    attention: Mapping[str, int]
    planned: Mapping[str, PreTrainedConfig]
    share: tuple[int, int]  # rows for each GPU in a planned step, tokens of a row


FULL = Sizes(
    LARGER["8b"],
    ((8, 2048), (2, 16384)),
    LADDER,
    {"T": 8192, "H": 4096, "V": 128256},
    {"B": 1, "S": 131072, "Sk": 131072, "H": 32, "Hk": 8, "D": 128},
    MODELS,
    (4, 4096),
)
QUICK = Sizes(
    CONFIGS["tiny"],
    ((2, 32), (1, 48)),
    (32, 48, 64),
    {"T": 24, "H": 32, "V": 96},
    {"B": 1, "S": 64, "Sk": 64, "H": 8, "Hk": 8, "D": 16},
    dict.fromkeys([*MODELS][:1], TINY),
    (2, 32),
)
PARTS: dict[str, Mapping[str, Any]] = {
    "fsdp": TRAINED,
    "loss": LOSSES,
    "context": dict.fromkeys(METHODS),
    "longest": CLIMBING,
    "planned": SETTINGS,
}


def measure(part: str, names: Collection[str], sizes: Sizes, processes: Processes) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each contestant of a part."""
    names = [name for name in present(PARTS[part]) if name in names]
    if part == "fsdp":
        texts = [f"{batch} x {seq}" for batch, seq in sizes.settings]
        for name in names:
            rows = processes.run_all(train, sizes.settings, TRAINED[name], sizes.config)
            yield name, [{"setting": text, **row} for text, row in zip(texts, rows, strict=True)]
    elif part == "longest":
        for name in names:
            rows = processes.run(climb, CLIMBING[name], sizes.config, sizes.ladder)
            yield name, [{key: value for row in rows for key, value in row.items()}]  # the longest, and why it ended
    elif part == "planned":
        for name, fields in fields_of(names, processes.count, sizes.share).items():
            if config := sizes.planned.get(SETTINGS[name][0]):
                yield name, [{"fields": fields, **processes.run(measured, Setting(**fields), config)[0]}]
    else:
        worker, shape = (losses, sizes.loss) if part == "loss" else (attentions, sizes.attention)
        rows = processes.run_all(worker, names, shape)
        yield from ((name, [row]) for name, row in zip(names, rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark sharded")
    contestants = list(dict.fromkeys(name for part in PARTS.values() for name in part if part is not SETTINGS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contestants", nargs="+", choices=contestants, default=contestants)
    numbers = range(len(SETTINGS))
    listed = "of the part planned: " + "; ".join(f"{i}: {name}" for i, name in enumerate(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=listed)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of a contestant's processes")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not GPU and not options.quick:
            parser.error("needs GPUs (all but --quick and --report)")
        processes = Processes(torch.cuda.device_count() if GPU else 2, options.timeout)
        result = environment("transformers", "Liger") | {"gpus": processes.count, "parts": {}}
        chosen = [*options.contestants, *([*SETTINGS][i] for i in options.settings)]
        for part in options.parts:
            for name, rows in measure(part, chosen, QUICK if options.quick else FULL, processes):
                print(f"{part}, {name}: {rows}", flush=True)
                result["parts"].setdefault(part, {})[name] = rows
                if not options.quick:
                    update(rounded(result), "sharded", PARTS)
        print(tables(merged({}, rounded(result), PARTS)))
        if options.quick:
            return
    write_report()
