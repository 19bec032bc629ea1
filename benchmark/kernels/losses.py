"""Times the losses on a GPU against bare products, torch and two other libraries, with their memory and their errors.

    make bench-losses                      measures, writes results/ and from it the report
    python -m benchmark losses --quick     the smallest shape, printed only
    python -m benchmark losses --report    the report again, without a GPU

Libraries that are not installed are left out; the report names them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmark.common.markdown import Row
from benchmark.common.measure import (
    WARMUP,
    Build,
    Inputs,
    Step,
    attempt,
    captured,
    environment,
    gpu_times,
    peak_mib,
    rounded,
    save,
    settle,
)
from benchmark.kernels.contestants import OPS, libraries, named
from benchmark.kernels.losses_report import ERRORS, GEMMS, tables, write_report
from liger_like import fused_linear_cross_entropy

SHAPES = ((8192, 4096, 128256), (16384, 2048, 128256), (8192, 2304, 256000), (16384, 4096, 32000))  # T, H, V
SMALLEST = SHAPES[-1]
CHUNK_ROWS = (512, 1024, 2048, 4096, 8192)
IGNORED = -100
REPEATS, ROUNDS, QUICK_ROUNDS = 3, 7, 1


def step_of(forward: Step, *leaves: Tensor) -> Step:
    """Run one forward and backward; return the loss and the gradients."""

    def step() -> tuple[Tensor, ...]:
        value = forward()
        return value.detach(), *torch.autograd.grad(value, leaves)

    return step


def trained(build: Build) -> Build:
    """Return a build whose forward is a whole step."""
    return lambda inputs: step_of(build(inputs), *(t for t in inputs.values() if t.requires_grad))


def three_gemms(inputs: Inputs, rows: int = 2048) -> Step:
    """Compute the products that every exact loss needs, for the tokens that count, a chunk of rows at a time.

    Every chunk takes the logits' gradient of the first one, and dw is that of the last one: this is a floor, no loss.
    """
    kept = inputs["target"] != IGNORED
    x, weight, target = inputs["x"].detach()[kept], inputs["weight"].detach(), inputs["target"][kept]
    dz = (x[:rows] @ weight.t()).softmax(-1, dtype=torch.float32)
    dz[torch.arange(len(dz), device=x.device), target[:rows]] -= 1
    dz = dz.to(x.dtype)

    def step() -> tuple[Tensor, ...]:
        z, dx, dw = torch.empty_like(dz), torch.empty_like(x), torch.empty_like(weight)
        for x_c, dx_c in zip(x.split(rows), dx.split(rows), strict=True):
            dz_c = dz[: len(x_c)]
            torch.mm(x_c, weight.t(), out=z[: len(x_c)])
            torch.mm(dz_c, weight, out=dx_c)
            torch.mm(dz_c.t(), x_c, out=dw)
        return ()

    return step


FUSED, PLAIN = OPS["fused_linear_cross_entropy"], OPS["cross_entropy"]
CHUNKED: dict[str, Build] = {
    str(rows): trained(named(fused_linear_cross_entropy, chunk_rows=rows)) for rows in CHUNK_ROWS
}


def exact(x: Tensor, weight: Tensor, target: Tensor, rows: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean loss, dx and dw in float64, computed a chunk of tokens at a time; every token counts."""
    w = weight.detach().double()
    dx, dw, loss = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(w), w.new_zeros(())
    for x_c, y_c, dx_c in zip(x.detach().split(rows), target.split(rows), dx.split(rows), strict=True):
        x_c, at_label = x_c.double(), (torch.arange(len(x_c), device=x.device), y_c)
        logprob = (x_c @ w.t()).log_softmax(-1)
        loss -= logprob[at_label].sum() / len(x)
        dz = logprob.exp_()
        dz[at_label] -= 1
        dz /= len(x)
        torch.mm(dz, w, out=dx_c)
        dw.addmm_(dz.t(), x_c)
    return loss, dx, dw


def measure_fused(step: Step, truth: tuple[Tensor, ...]) -> Row:
    """Return the peak memory above what was allocated, the errors if there is a ``truth``, and a timer."""
    mib, results = peak_mib(step)
    row: Row = {"mib": mib, "ms": partial(warm_times, step)}
    if truth and results:
        pairs = zip(ERRORS, results, truth, strict=True)
        row["errors"] = {name: float((got.double() - true).norm() / true.norm()) for name, got, true in pairs}
    return row


def warm_times(step: Step) -> list[float]:
    step()
    return gpu_times(step, REPEATS)


def time_fused(
    contestants: Mapping[str, Build],
    shape: tuple[int, int, int],
    rounds: int,
    *,
    ignored: float = 0.0,
    errors: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Row:
    """Measure every contestant on random data of one shape; a share of the labels is ignored."""
    T, H, V = shape
    torch.manual_seed(0)
    torch.compiler.reset()
    x = torch.randn(T, H, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(V, H, dtype=dtype, device=device) * 0.02).requires_grad_()
    target = torch.randint(V, (T,), device=device)
    target[torch.randperm(T, device=device)[: int(T * ignored)]] = IGNORED
    inputs = {"x": x, "weight": weight, "target": target}
    truth = exact(x, weight, target) if errors else ()
    rows = [
        {"name": name} | attempt(partial(measure_fused, build(inputs), truth)) for name, build in contestants.items()
    ]
    settle(rows, rounds)
    print(f"{shape}, {ignored:.0%} ignored: measured", flush=True)
    return {"T": T, "H": H, "V": V, "kept": int((target != IGNORED).sum()), "rows": rows}


def wall_ms(step: Step, refill: Callable[[], Any], repeats: int) -> Row:
    """Return the median time of one eager step as the host sees it; it waits for the GPU before and after."""

    def one() -> float:
        refill()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    return {"wall_ms": statistics.median([one() for _ in range(WARMUP + repeats)][WARMUP:])}


def kernel_ms(step: Step, refill: Callable[[], Any], repeats: int) -> Row:
    """Return the median time of the kernels alone: the replay of a CUDA graph."""
    graph = captured(step)
    gpu_times(graph.replay, WARMUP, refill)
    return {"kernel_ms": statistics.median(gpu_times(graph.replay, repeats, refill))}


def time_cross_entropy(
    contestants: Mapping[str, Build],
    shape: tuple[int, int],
    repeats: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Row:
    """Measure every contestant on random logits. One overwrites them: they are refilled, untimed, before each step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    source = torch.randn(shape, dtype=dtype, device=device)
    logits = source.clone().requires_grad_()
    target = torch.randint(shape[1], shape[:1], device=device)
    rows = []
    for name, build in contestants.items():
        step, refill = build({"logits": logits, "target": target}), partial(logits.data.copy_, source)
        row = {"name": name} | attempt(partial(wall_ms, step, refill, repeats))
        rows.append(row | attempt(partial(kernel_ms, step, refill, repeats)))
        torch.cuda.empty_cache()
    return {"M": shape[0], "V": shape[1], "bytes": 3 * source.nbytes, "rows": rows}


def measure_all(quick: bool) -> Row:
    """Return the content of a file in results/."""
    shapes, rounds = ((SMALLEST,), QUICK_ROUNDS) if quick else (SHAPES, ROUNDS)
    fused = {GEMMS: three_gemms, **{name: trained(build) for name, build in FUSED.contestants().items()}}
    plain = {name: trained(build) for name, build in PLAIN.contestants().items()}
    return {
        **environment(*libraries((FUSED, PLAIN))),
        "fused": [
            *(time_fused(fused, shape, rounds, errors=True) for shape in shapes),
            time_fused(fused, shapes[0], rounds, ignored=0.75),
        ],
        "chunk_rows": time_fused(CHUNKED, shapes[0], rounds),
        "cross_entropy": time_cross_entropy(plain, (8192, 128256), REPEATS * rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark losses")
    parser.add_argument("--quick", action="store_true", help="the smallest shape, printed only")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        result = rounded(measure_all(options.quick))
        if options.quick:
            print(tables(result))
            return
        save(result, "losses")
    write_report()
