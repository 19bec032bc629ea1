"""Times what torch.compile makes of the ops on a GPU: host time per op, the fused losses in CUDA graphs, and memory.

    python -m benchmark compiled                       all parts, printed only
    python -m benchmark compiled --parts host          some of the parts
    python -m benchmark compiled --only rope,swiglu    some of the ops, for the part "host"

* host: a compiled graph runs an op on each of 8 inputs, forward and backward; a second graph on one. The difference is
  the host time of 7 ops. The inputs are small and the GPU is not waited for. "torch" is the op's definition, compiled.
  Launched: kernels that Inductor launches for each op. Library ops: calls of ours that Inductor knows nothing of.
* losses: a forward and backward of ``fused_linear_cross_entropy``, by the share of ignored labels: compiled, where the
  host reads the number of labels that count, and with mode="reduce-overhead", where it does not.
* memory: the peak of three training steps of a model of Llama-3.2-1B's shape with checkpointed layers, B 8 S 4096.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from benchmark.common.measure import attempt, environment, gpu_times, microseconds, rounded, settle
from benchmark.training.training import (
    MODELS,
    Preparation,
    Setting,
    compile_it,
    nothing,
    patch,
    patch_and_compile,
    train,
)
from liger_like.ops import fused_linear_cross_entropy
from liger_like.testing import SPECS, OpSpec

PARTS = "host", "losses", "memory"
COPIES, STEPS, ROUNDS = 8, 20, 7
SIZES = {"lead": (16,), "N": 1024, "B": 1, "H": 8, "Hk": 2, "S": 16, "Sk": 16, "D": 64, "Dv": 64, "R": 64, "E": 8}
OF_PRODUCTS = {"lead": (2048,), "H": 256, "Ht": 256, "I": 512, "V": 4096}  # of ops that multiply by weights
NOT_ALONE = {"flash_attention_varlen", "flash_attention_paged", "fused_linear_token_loss"}
IGNORED = (0.0, 0.5, 0.9)
TOKENS, HIDDEN, VOCABULARY = 16384, 2048, 128256  # of Llama-3.2-1B


def shape_of(spec: OpSpec) -> dict[str, Any]:
    """Return the first shape of the benchmarks with small sizes."""
    shape = spec.bench_shapes[0]
    sizes = SIZES | OF_PRODUCTS if "lead" in shape and "H" in shape else SIZES
    return {key: sizes.get(key, value) for key, value in shape.items()}


def step_of(fn: Callable[..., Any], several: Sequence[dict[str, Any]], options: dict[str, Any]) -> Callable[[], Any]:
    """Return a step of one compiled graph that runs ``fn`` on each of ``several`` inputs, forward and backward."""
    leaves = [t for inputs in several for t in inputs.values() if isinstance(t, Tensor) and t.requires_grad]

    @torch.compile(fullgraph=True, dynamic=False)
    def forward() -> list[Tensor]:
        found = [fn(**inputs, **options) for inputs in several]
        outputs = [t for result in found for t in (result if isinstance(result, tuple) else (result,))]
        return [t for t in outputs if t is not None and t.requires_grad]

    upstream = [torch.ones_like(t) for t in forward()]
    return lambda: torch.autograd.grad(forward(), leaves, upstream)


def host_row(spec: OpSpec, fn: Callable[..., Any]) -> dict[str, Any]:
    """Return timers of graphs of many copies and of one, and the launches that each copy adds."""
    torch.compiler.reset()
    torch.manual_seed(0)
    row: dict[str, Any] = {}
    counts = []
    for name, copies in (("many", COPIES), ("one", 1)):
        several = [spec.inputs(torch.bfloat16, "cuda", **shape_of(spec)) for _ in range(copies)]
        step, codes = run_and_get_code(partial(warm, step_of(fn, several, spec.options[0])))
        row[name] = partial(microseconds, step, STEPS)
        text = "\n".join(codes)
        counts.append([len(re.findall(r"\.run\(", text)), len(re.findall(r"= torch\.ops\.liger_like", text))])
    launched, library = ((many - one) / (COPIES - 1) for many, one in zip(*counts, strict=True))
    return row | {"launched": launched, "library": library}


def warm(step: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(3):
        step()
    return step


def host(only: Iterable[str]) -> Table:
    """Measure the host time of each op in a compiled graph."""
    table = Table(
        "op", "", "host us", "launched", "library ops", title="host: forward and backward in a compiled graph"
    )
    for spec in (spec for spec in SPECS if spec.name in only):
        rows = [
            {"name": name, **attempt(partial(host_row, spec, fn))}
            for name, fn in (("liger_like", spec.fn), ("torch", spec.ref))
        ]
        settle(rows, ROUNDS)
        for row in rows:
            if "reason" in row:
                table.add_row(spec.name, row["name"], row["reason"])
            else:
                us = (row["many"] - row["one"]) / (COPIES - 1)
                table.add_row(spec.name, row["name"], f"{us:.0f}", f"{row['launched']:.1f}", f"{row['library']:.1f}")
    return table


def losses() -> Table:
    """Measure the fused loss, forward and backward, by the share of ignored labels."""
    columns = "eager", "compiled", "reduce-overhead"
    table = Table("ignored", *(f"{name} ms" for name in columns), title=f"losses: T {TOKENS} H {HIDDEN} V {VOCABULARY}")
    x, weight = (torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in (TOKENS, VOCABULARY))
    leaves = x.requires_grad_(), (weight / math.sqrt(HIDDEN)).requires_grad_()
    torch.compiler.reset()
    forms = (
        fused_linear_cross_entropy,
        torch.compile(fused_linear_cross_entropy, fullgraph=True, dynamic=False),
        torch.compile(fused_linear_cross_entropy, fullgraph=True, dynamic=False, mode="reduce-overhead"),
    )
    for share in IGNORED:
        target = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
        target[torch.rand(TOKENS, device="cuda") < share] = -100

        def step(form: Callable[..., Any], target: Tensor = target) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return torch.autograd.grad(form(*leaves, target), leaves)

        steps = [warm(partial(step, form)) for form in forms]
        row: dict[str, Any] = {name: partial(gpu_times, step, 3) for name, step in zip(columns, steps, strict=True)}
        settle([row], 5)
        table.add_row(f"{share:.0%}", *(f"{row[name]:.2f}" for name in columns))
    return table


def memory(layers: int) -> Table:
    """Measure the peak memory of training steps with checkpointed layers."""
    setting = Setting("Llama-3.2-1B", 8, 4096, checkpointing=True)
    config = MODELS[setting.model]
    table = Table("", "peak GiB", "ms", title=f"memory: {setting.text()}, {layers} layers")
    whole, config.num_hidden_layers = config.num_hidden_layers, layers
    prepared: dict[str, Preparation] = {
        "transformers": nothing,
        "transformers, compiled": compile_it,
        "liger_like": patch,
        "liger_like, compiled": patch_and_compile,
    }
    try:
        for name, prepare in prepared.items():
            row = rounded(attempt(partial(train, prepare, setting)))
            table.add_row(name, *(str(row.get(key, row.get("reason"))) for key in ("gib", "ms")))
    finally:
        config.num_hidden_layers = whole
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", default="", help="names of ops, with commas between them")
    parser.add_argument("--layers", type=int, default=MODELS["Llama-3.2-1B"].num_hidden_layers, help="of the model")
    options = parser.parse_args()
    names = [spec.name for spec in SPECS if spec.name not in NOT_ALONE]
    only = options.only.split(",") if options.only else names
    if unknown := {*only} - {*names}:
        parser.error(f"--only takes names of ops, got {', '.join(sorted(unknown))}")
    parts: dict[str, Callable[[], Table]] = {
        "host": partial(host, only),
        "losses": losses,
        "memory": partial(memory, options.layers),
    }
    console = Console(width=120)
    console.print(environment())
    for part in options.parts:
        console.print(parts[part]())
