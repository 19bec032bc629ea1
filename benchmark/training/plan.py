"""Predicts by ``liger_like.planning`` every training step in results/ that can be traced, and compares the two.

    make bench-plan                            traces, writes results/plan.json and from it the report and the picture
    python -m benchmark plan --files sharded   rows of some files; results/plan.json keeps what it has of the others
    python -m benchmark plan --report          the report again

It needs no GPU, but transformers as it was when the rows were measured: newer ones run other attention for some models.
Compiled steps and other libraries are left out: the trace knows neither.
"""

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers

from benchmark.common.markdown import RESULTS, Row, result_files
from benchmark.training import long_context, planned
from benchmark.training.plan_report import FILES, tables, write_report
from benchmark.training.sharded import FULL as SHARDED
from benchmark.training.sharded_settings import SETTINGS as SHARDED_SETTINGS
from benchmark.training.small import MODELS as SMALL_MODELS
from benchmark.training.sweeps import FULL, SWITCHES, VARIANTS
from benchmark.training.training import MODELS, SELECTIVE, SETTINGS
from liger_like import patching
from liger_like.planning import Setting, predict, predict_model
from liger_like.planning._models import build, model_class

PATH = RESULTS / "plan.json"
KEPT = "liger_like, attention kept"
EXPANDABLE = "sharded", "long-context"  # results with expandable segments, of which nothing is left over
NAMES: dict[str, dict[str, Any]] = {
    "transformers": {"patched": False},
    "liger_like": {},
    SELECTIVE: {"checkpoint": "selective"},
    KEPT: {"checkpoint": "attention"},
    "liger_like, context parallel": {"cp_method": "ring"},
}


class Job(NamedTuple):
    """A measured row, and how to predict it; ``switches``: what is patched, None: all."""

    file: str
    text: str
    name: str
    config: Any
    setting: Setting
    measured: Row
    switches: frozenset[str] | None = None

    def key(self) -> tuple[str, str, str]:
        return self.file, self.text, self.name


def fields(name: str, checkpointed: bool) -> dict[str, Any]:
    return ({"checkpoint": "full"} if checkpointed else {}) | NAMES[name]


def of_training(result: Row, file: str) -> Iterator[Job]:
    for setting in SETTINGS:
        for row in result["settings"].get(setting.text(), ()):
            if row["name"] in NAMES and "gib" in row:
                how = Setting(setting.batch, setting.seq, **fields(row["name"], setting.checkpointing))
                yield Job(file, setting.text(), row["name"], MODELS[setting.model], how, row)


def of_sweeps(result: Row, file: str) -> Iterator[Job]:
    for part in ("batch", "sequence"):
        for name in NAMES:
            for row in result["parts"][part].get(name, ()):
                if "gib" in row:
                    how = Setting(row["batch"], row["sequence"], **fields(name, True))
                    text = f"{part}: B {row['batch']} S {row['sequence']}, checkpointed"
                    yield Job(file, text, name, FULL.config, how, row)
    for name, (row,) in result["parts"]["ablation"].items():
        how, on = Setting(*FULL.inside), frozenset(VARIANTS[name])
        yield Job(file, f"ablation: {name}", "liger_like", FULL.config, how, row, on)


def of_sharded(result: Row, file: str) -> Iterator[Job]:
    gpus = result["gpus"]
    for name, rows in result["parts"]["fsdp"].items():
        for row in rows:
            if name in NAMES and "gib" in row:
                batch, seq = map(int, row["setting"].split(" x "))
                how = Setting(batch, seq, fsdp=gpus, dtype="fp32", **fields(name, True))
                yield Job(file, f"{gpus} x {row['setting']}", name, SHARDED.config, how, row)
    for name, (row,) in result["parts"]["longest"].items():
        if name in NAMES:
            spread = "context" in name
            mesh = {"fsdp": 1, "cp": gpus} if spread else {"fsdp": gpus}
            how = Setting(1, row["length"], dtype="fp32", **mesh, **fields(name, True))
            yield Job(file, f"{gpus} x 1 x {row['length']}", name, SHARDED.config, how, row)
    for name, (row,) in result["parts"].get("planned", {}).items():
        if "gib" in row:
            how, model = Setting(**row["fields"]), SHARDED_SETTINGS[name][0]
            text = f"{model}, {how.batch} x {how.seq}"
            yield Job(file, text, f"liger_like, {how.text()}", SHARDED.planned[model], how, row)


def of_small(result: Row, file: str) -> Iterator[Job]:
    for text, rows in result["parts"].items():
        model, _, rest = text.partition(", B ")
        for name, row in rows.items():
            if name in NAMES and "gib" in row and "LoRA" not in text:
                batch, _, seq = rest.partition(",")[0].partition(" S ")
                how = Setting(int(batch), int(seq), **fields(name, "checkpointed" in text))
                yield Job(file, text, name, SMALL_MODELS[model].config, how, row)


def of_long_context(result: Row, file: str) -> Iterator[Job]:
    for setting in long_context.SETTINGS:
        config = copy.deepcopy(SHARDED.config)
        config.num_hidden_layers = setting.layers
        for name, row in result["settings"].get(setting.text(), {}).items():
            contestant = long_context.CONTESTANTS[name]
            if "gib" in row and name != "Liger":
                how = Setting(
                    seq=setting.tokens,
                    patched=contestant.patch is not None,
                    checkpoint="attention" if contestant.host else "full",
                    checkpoint_on_host=contestant.offload,
                    tiled_mlp=bool(contestant.patch),
                    checkpoint_layers=contestant.group,
                    optimizer=setting.optimizer,
                    step_in_backward=True,
                )
                yield Job(file, setting.text(), name, config, how, row)


def of_planned(result: Row, file: str) -> Iterator[Job]:
    for setting in planned.SETTINGS:
        text = planned.text_of(setting)
        row = result["parts"][planned.MODEL].get(text, {})
        if "gib" in row:
            yield Job(file, text, "liger_like" if setting.patched else "transformers", planned.CONFIG, setting, row)


READERS = {
    "training": of_training,
    "sweeps": of_sweeps,
    "sharded": of_sharded,
    "small": of_small,
    "long-context": of_long_context,
    "planned": of_planned,
}


def jobs(prefixes: list[str]) -> Iterator[Job]:
    """Yield every row that can be traced."""
    for prefix in prefixes:
        for path in result_files(prefix):
            yield from READERS[prefix](json.loads(path.read_text()), path.stem)


def gpu_of(file: str) -> str:
    return "h100" if "h100" in file else "h200"


def patched_in_part(job: Job) -> Any:
    model = build(*model_class(job.config), dataclasses.replace(job.setting, patched=False))
    patching.patch(model, **{switch: switch in (job.switches or ()) for switch in SWITCHES})
    return model


def predicted(job: Job) -> Row:
    """Return the measured and the predicted figures of a row, and the seconds of CPU that the trace took."""
    start = time.process_time()
    if job.switches is None:
        found = predict(job.config, job.setting, gpu_of(job.file))
    else:
        found = predict_model(lambda: patched_in_part(job), job.setting, gpu_of(job.file))
    whole = job.file.startswith(EXPANDABLE)
    row = {"file": job.file, "text": job.text, "name": job.name, "gib": job.measured["gib"]}
    row |= {"predicted": found.gib if whole else found.allocated}
    if "reserved" in job.measured and not whole:
        row |= {"reserved": job.measured["reserved"], "predicted_reserved": found.reserved}
    if "ms" in job.measured:
        row |= {"ms": job.measured["ms"], "predicted_ms": 1e3 * found.seconds, "host_ms": 1e3 * found.times["host"]}
    row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    return row | {"cpu_s": round(time.process_time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark plan")
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--report", action="store_true", help="only write the report of results/plan.json")
    options = parser.parse_args()
    if not options.report:
        before = json.loads(PATH.read_text())["rows"] if PATH.exists() else []
        known = {(row["file"], row["text"], row["name"]): row for row in before}
        for job in jobs(options.files):
            known[job.key()] = predicted(job)
            print(*known[job.key()].values(), flush=True)
            ordered = [known[each.key()] for each in jobs(list(FILES)) if each.key() in known]
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            PATH.write_text(json.dumps({"versions": versions, "rows": ordered}, indent=1) + "\n")
        print(tables(json.loads(PATH.read_text())))
    write_report()
