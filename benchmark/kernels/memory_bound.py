"""Times the memory-bound ops on a GPU against torch, torch.compile and two other libraries, with memory and host time.

    make bench-ops                                     measures, writes results/ and from it the report
    python -m benchmark memory_bound --quick           one shape of each op, printed only
    python -m benchmark memory_bound --only rope,swiglu    those ops, printed only
    python -m benchmark memory_bound --host            the time on the host, printed only; without a GPU ours alone, and
                                                       what Triton does to launch a kernel is left out
    python -m benchmark memory_bound --report          the report again, without a GPU

Shapes, inputs and counts of bytes are those of ``testing.SPECS``, in bf16 and under random upstream gradients, which
have the strides of the inputs. All contestants of a shape are measured in the same rounds, in random order.

* kernels: the replay of a CUDA graph of 5 forwards, or of 5 forwards and backwards, divided by 5.
* eager wall: 20 eager forwards and backwards between two waits for the GPU, divided by 20.
* host: 50 eager forwards, or forwards and backwards, of small inputs, issued to an idle GPU and not waited for,
  divided by 50.

Liger overwrites: its RMSNorm, alone and with the residual, writes dx over dy, its GLUs write the gradients over gate
and up, its RoPE rotates q, k, dq and dk where they are. So every contestant has its own inputs and upstream gradients,
and before each replay and each 20 eager steps they are filled anew, untimed, for every contestant alike, the upstream
gradients last. In between the data is overwritten up to 20 times: RoPE keeps its size, that of a GLU shrinks and that
of an RMSNorm grows where the weight is large, by less than bf16 can hold. The small inputs of the host time are not
filled anew: it does not depend on the values.

No cache is flushed: each tensor that grows with the rows has 64 MiB or more (rope's k 32), and what a filling leaves
in the L2 cache is a part of the upstream gradients, which the forward displaces before the backward reads them.

Libraries that are not installed are left out; the report names them.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmark.common.markdown import Row
from benchmark.common.measure import (
    Build,
    Inputs,
    Repeats,
    Setting,
    Step,
    attempt,
    environment,
    gpu_row,
    microseconds,
    rounded,
    save,
    settle,
    upstream_of,
)
from benchmark.kernels import contestants as table
from benchmark.kernels.contestants import SPECS, named, torch_rms_norm
from benchmark.kernels.memory_bound_report import EMPTY, tables, write_report
from liger_like import testing
from liger_like.runtime import support
from liger_like.runtime.launcher import launch, recorded

Contest = tuple[testing.OpSpec, str, Mapping[str, Build]]

REPEATS = Repeats(graph=5, replays=4, eager=20)
HOST_STEPS = 50
ROUNDS, QUICK_ROUNDS = 7, 1
HOST_SIZES = {"lead": (16,), "N": 1024, "B": 1, "H": 8, "Hk": 2, "S": 16, "D": 64, "R": 64}
OPS = {name: op for name, op in table.OPS.items() if {"N", "R"} & op.spec.bench_shapes[0].keys()}


@triton.jit
def _empty_kernel(x_ptr, y_ptr, z_ptr, M, N, BLOCK: tl.constexpr):
    pass


class _Empty(torch.autograd.Function):
    """Computes nothing: what every op that is written in Python, and its launches, cost the host."""

    @staticmethod
    def forward(ctx: Any, held: tuple[list[Tensor], list[Tensor | None], int, int], *inputs: Tensor) -> Any:
        ctx.held = held
        results, _, launches, _ = held
        return _launched(launches, results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        _, gradients, _, launches = ctx.held
        return None, *_launched(launches, gradients)


def _launched(launches: int, results: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return ``results`` after so many launches of an empty kernel."""
    x = next(t for t in results if t is not None)
    for _ in range(launches):
        launch(_empty_kernel, (1,), (x, x, x), (1, 16), BLOCK=16)
    return tuple(results)


def empty(inputs: Inputs) -> Step:
    x, weight = (t.detach().clone() for t in inputs.values())
    return partial(_Empty.apply, ([x.clone()], [x, weight], 0, 0), *inputs.values())


def empty_of(fn: Callable[..., Any], inputs: Inputs) -> Step:
    """Return an empty function with the inputs, results and launches of ``fn``."""
    with recorded() as forward:
        outputs = fn(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [t for t in inputs.values() if t.requires_grad]
    with recorded() as backward:
        found = iter(torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs]))
    gradients = [next(found) if t.requires_grad else None for t in inputs.values()]
    results = [t.detach() for t in outputs]
    return partial(_Empty.apply, (results, gradients, len(forward), len(backward)), *inputs.values())


FLOOR: dict[str, Build] = {"empty autograd.Function": empty, "torch's rms_norm": named(torch_rms_norm)}


def row(build: Build, inputs: Inputs, upstream: Sequence[Tensor]) -> Row:
    return gpu_row(Setting(build, inputs, upstream), REPEATS)


def host_row(build: Build, inputs: Inputs, upstream: Sequence[Tensor]) -> Row:
    setting = Setting(build, inputs, upstream)
    setting.step()
    steps = {"forward_us": setting.forward, "us": setting.step}
    return {key: partial(microseconds, step, HOST_STEPS) for key, step in steps.items()}


def shape_text(shape: Mapping[str, Any]) -> str:
    if "lead" in shape:
        return " x ".join(map(str, (*shape["lead"], shape["N"]))) + (", packed" if shape.get("packed") else "")
    return " ".join(f"{key} {shape[key]}" for key in ("B", "S", "H", "Hk", "D"))


def time_shape(name: str, shape: Mapping[str, Any], rounds: int) -> Row:
    """Measure every contestant on random data of one shape."""
    op = OPS[name]
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.cuda.empty_cache()
    inputs = op.spec.inputs(torch.bfloat16, "cuda", **shape)
    upstream = upstream_of(op.spec.fn, inputs)
    rows = [
        {"name": contestant} | attempt(partial(row, build, inputs, upstream))
        for contestant, build in op.contestants().items()
    ]
    settle(rows, rounds)
    print(f"{name}, {shape_text(shape)}: measured", flush=True)
    forward, backward, _ = op.spec.cost(torch.bfloat16.itemsize, **shape)
    case = {"op": name, "shape": shape_text(shape), "forward_bytes": forward, "bytes": forward + backward}
    return case | {"rows": rows}


def small_shapes(spec: testing.OpSpec) -> list[dict[str, Any]]:
    shapes = [{key: HOST_SIZES.get(key, value) for key, value in shape.items()} for shape in spec.bench_shapes]
    return [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]


def contests(names: Iterable[str]) -> list[Contest]:
    """Return the rows of these ops, after the cost of an empty op; each op has a row of what an empty one costs."""
    rows = [(OPS[n].spec, n, {**OPS[n].contestants(), EMPTY: partial(empty_of, OPS[n].spec.fn)}) for n in names]
    return [(SPECS["rms_norm"], "floor", FLOOR), *rows]


def time_host(
    contests: Iterable[Contest], rounds: int, device: str = "cuda", wait: Step = torch.cuda.synchronize
) -> list[Row]:
    """Measure every contestant on small inputs."""
    torch.manual_seed(0)
    torch.compiler.reset()
    rows = []
    for spec, title, contestants in contests:
        for shape in small_shapes(spec):
            inputs = spec.inputs(torch.bfloat16, device, **shape)
            upstream = upstream_of(spec.fn, inputs)
            op = title + (", packed" if shape.get("packed") else "")
            rows += [
                {"op": op, "name": name} | attempt(partial(host_row, build, inputs, upstream))
                for name, build in contestants.items()
            ]
    settle(rows, rounds, wait)
    return rows


def host_alone(names: Iterable[str]) -> Row:
    """Return the host times of a file in results/."""
    if torch.cuda.is_available():
        host = time_host(contests(names), ROUNDS)
    else:
        ours = [
            (
                spec,
                title,
                {name: build for i, (name, build) in enumerate(contestants.items()) if not i or name == EMPTY},
            )
            for spec, title, contestants in contests(names)
        ]
        nothing = patch.object(JITFunction, "run", lambda *_, **__: None)
        with patch.object(support, "INTERPRET", True), nothing:  # without it, CPU tensors launch nothing
            host = time_host(ours, ROUNDS, "cpu", lambda: None)
    return {**environment(*table.libraries(OPS.values())), "ops": [], "host": host}


def measure_all(names: Iterable[str], quick: bool) -> Row:
    """Return the content of a file in results/."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cases = [(name, shape) for name in names for shape in OPS[name].spec.bench_shapes[: 1 if quick else None]]
    return {
        **environment(*table.libraries(OPS.values())),
        "ops": [time_shape(name, shape, rounds) for name, shape in cases],
        "host": time_host(contests(names), rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark memory_bound")
    parser.add_argument("--quick", action="store_true", help="one shape of each op, printed only")
    parser.add_argument("--only", metavar="OP,...", help=f"these ops, printed only, out of {', '.join(OPS)}")
    parser.add_argument("--host", action="store_true", help="the time on the host alone, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*OPS]
    if unknown := {*names} - {*OPS}:
        parser.error(f"--only: no op is called {', '.join(sorted(unknown))}")
    if options.host:
        print(tables(rounded(host_alone(names))))
        return
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --host and --report)")
        result = rounded(measure_all(names, options.quick))
        if options.quick or options.only:
            print(tables(result))
            return
        save(result, "memory-bound")
    write_report()
