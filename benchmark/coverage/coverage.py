"""What ``patch`` does to every ``*ForCausalLM`` and ``*ForConditionalGeneration`` of the installed transformers.

    python -m benchmark coverage                                    # all, into results/ and the tables
    python -m benchmark coverage --only LlamaForCausalLM --json FILE

Each class is built tiny from its default config, never downloaded, and runs in fp32 on the CPU, unpatched and patched
with verify="numeric"; there ops are their references, which have tests of their own, and experts run as before: this is
a test of the patching. It is given images in the first layout that it takes of ``doctor.images``, and else words alone,
or what its forward asks for.
Of each class the row says

* exact: loss, logits and all gradients are equal, and all that the report lists of norms, RoPE, gated MLPs, experts and
  the head with its loss is patched; attention that was left alone is listed, too, but does not count;
* partly: they are equal, and some of it was left alone, with the reason;
* wrong: they differ, or the patched model crashes, or something was left alone silently, or unpatching leaves traces;
* skipped: it could not be built, or does not run unpatched on these inputs.

Equal is: the norm of the difference is at most EQUAL of the norm; of gradients, EQUAL_GRADIENT of theirs and FLOOR of
that of all of them. In fp32 a sum of a few hundred terms rounds by 1e-6 of its norm; gradients cancel, and some, as
that of a bias of keys, are zero but for rounding. A wrong formula, or a wrong mask, differs by 1e-2 and more.
"""

import argparse
import ast
import concurrent.futures
import functools
import inspect
import json
import multiprocessing
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import liger_like
from benchmark.common.markdown import RESULTS, Row
from benchmark.coverage.coverage_report import KINDS, STATUSES, counts, write_report
from liger_like.doctor import tiny
from liger_like.doctor.tiny import first_that_run, results

EQUAL, EQUAL_GRADIENT, FLOOR = 1e-5, 1e-4, 1e-7
SECONDS, PROCESSES = 120, 2
RESULT = RESULTS / "coverage.json"
# what an unpatched class contains if it rotates or gates
ROTARY_CALL = re.compile(r"(?<![.\w])(?!rotary_emb\()\w*(rotary|rotate|rope)\w*\(")
GATE = re.compile(r"act\w*\([^*]*\) \*|\* self\.act\w*\(")


def names() -> list[str]:
    """Return the classes of the auto-model mappings."""
    mappings = [mapping for name, mapping in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found = [cls for mapping in mappings for cls in mapping.values()]
    flat = {name for cls in found for name in ((cls,) if isinstance(cls, str) else cls)}
    return sorted(name for name in flat if name.endswith(tuple(KINDS)))


def build(name: str) -> nn.Module:
    """Return a tiny model of the default config."""
    cls = getattr(transformers, name)
    return tiny.build(cls, cls.config_class())


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of results that are not equal."""
    if got.keys() != expected.keys():
        return [f"{', '.join(sorted(got.keys() ^ expected.keys()))} in one of the two"]
    gradients = [value.norm() for name, value in expected.items() if name not in ("loss", "logits")]
    floor, found = FLOOR * float(torch.stack(gradients).norm()), []
    for name, value in expected.items():
        error, norm = float((got[name] - value).norm()), float(value.norm())
        allowed = EQUAL * norm if name in ("loss", "logits") else EQUAL_GRADIENT * norm + floor
        if not error <= allowed:  # also true for NaN
            found.append(f"{name} differs by {error / norm:.1e}")
    return found


@functools.cache
def forward_of(cls: type[nn.Module]) -> str:
    """Return the code of the forward that transformers or torch wrote."""
    written = [c for c in cls.__mro__ if "forward" in vars(c) and not hasattr(c, "_liger_like")]
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(vars(written[0])["forward"])))))


def silent(model: nn.Module, rows: tuple[Any, ...]) -> list[str]:
    """Return modules that look patchable, by criteria of its own, and are in no row of the report."""
    found = set()
    if model.get_output_embeddings() is not None:
        found.add(("lm_head", type(model).__name__))
    for module in model.modules():
        cls, parts = type(module), [*module.children()]
        linear = sum(isinstance(part, nn.Linear) for part in parts)
        if "norm" in cls.__name__.lower() and not parts and any(True for _ in module.parameters()):
            found.add(("norm", cls.__name__))
        if ROTARY_CALL.search(forward_of(cls)):
            found.add(("rope", cls.__name__))
        if len(parts) - 1 <= linear >= 2 and GATE.search(forward_of(cls)):
            found.add(("mlp", cls.__name__))
    listed = [(row.pattern, row.cls) for row in rows if (row.status, row.reason) != ("absent", "has no gate")]
    missing = [(kind, cls) for kind, cls in sorted(found) if not any(kind in p and cls == c for p, c in listed)]
    return [f"{cls} is not in the report as {kind}" for kind, cls in missing]


def examine(name: str) -> Row:
    """Return the row of a class."""
    try:
        model = build(name)
        inputs, expected = first_that_run(model)
    except Exception as error:
        return {"name": name, "status": "skipped", "why": reason(error)}
    before = state(model)
    try:
        report = liger_like.patch(model, verify="numeric")
        wrong = differences(results(model, inputs), expected) + silent(model, report.rows)
        if ("lm_head", type(model).__name__) in heads(report) and model(**inputs).logits is not None:
            wrong.append("the loss is not fused, though the report says so")
        report.unpatch()
    except Exception as error:
        return {"name": name, "status": "wrong", "why": reason(error)}
    if state(model) != before:
        wrong.append("unpatching leaves something behind")
    trained = [row for row in report.rows if row.pattern != "generation"]  # nothing generates here
    left = [[row.pattern, row.cls, row.count, row.reason] for row in trained if row.status == "skipped"]
    patched: dict[str, int] = {}
    for row in (row for row in trained if row.status == "patched"):
        patched[row.pattern] = patched.get(row.pattern, 0) + row.count
    partly = any(pattern != "attention" for pattern, *_ in left)
    status = "wrong" if wrong else "partly" if partly else "exact"
    return {
        "name": name,
        "status": status,
        "why": "; ".join(wrong),
        "images": "pixel_values" in inputs,
        "patched": patched,
        "left": left,
    }


def heads(report: liger_like.PatchReport) -> set[tuple[str, str]]:
    return {(row.pattern, row.cls) for row in report.patched}


def reason(error: Exception) -> str:
    first, *more = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join([first, *(line.strip() for line in more[:1])])}"[:200]


def state(model: nn.Module) -> list[Any]:
    """Return class and attributes of every module, without tensors that a forward leaves there."""
    attributes = [
        {name: id(value) for name, value in vars(module).items() if not isinstance(value, Tensor | None)}
        for module in model.modules()
    ]
    return [*map(type, model.modules()), attributes]


def child(name: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(examine(name))


def apart(name: str) -> Row:
    """Run ``examine`` in a process of its own, so that a crash or a hang costs one row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.modeling_utils", "liger_like.patching"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, send))
    process.start()
    send.close()
    try:
        if receive.poll(SECONDS):
            return receive.recv()  # type: ignore[no-any-return]
        return {"name": name, "status": "wrong", "why": f"took more than {SECONDS} s"}
    except EOFError:
        process.join()
        return {"name": name, "status": "wrong", "why": f"the process died: exit code {process.exitcode}"}
    finally:
        process.kill()


def summary(rows: list[Row]) -> Table:
    table = Table("", *KINDS.values(), title=f"transformers {transformers.__version__}")
    for status in STATUSES:
        table.add_row(status, *(str(counts(rows, suffix)[status]) for suffix in KINDS))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark coverage")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these classes, printed only")
    parser.add_argument("--json", type=Path, help="the file that the rows are written to")
    parser.add_argument("--report", action="store_true", help="only write the tables of results/coverage.json")
    options = parser.parse_args()
    if options.report:
        write_report()
        return
    console = Console()
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        rows = []
        for row in pool.map(apart, options.only or names()):
            rows.append(row)
            console.print(row["name"], row["status"], row["why"], style="red" if row["status"] == "wrong" else None)
    console.print(summary(rows))
    file = options.json or (None if options.only else RESULT)
    if file:
        lines = ",\n".join(map(json.dumps, rows))
        file.write_text(f'{{"transformers": "{transformers.__version__}", "rows": [\n{lines}\n]}}\n')
    if file == RESULT:
        write_report()
    sys.exit(any(row["status"] == "wrong" for row in rows))
