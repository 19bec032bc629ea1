"""Times the head of post-training on a GPU: log-probabilities, entropies, GRPO, DPO and distillation, beside peers.

    make bench-post-training                                         measures, writes results/ and from it the report
    python -m benchmark post_training --shapes S1 --cases logprob    some of the shapes and cases
    python -m benchmark post_training --contestants liger_like TRL   some of the contestants; results/ keeps the others
    python -m benchmark post_training --quick                        tiny shapes, printed only; needs no GPU
    python -m benchmark post_training --report                       the report again, without a GPU

A step is forward and backward. All contestants of a case take turns, each round in another order; the time is the
median, the memory the peak above the inputs. The errors are those of the same operands in float64: the largest of a
log-probability or an entropy, the relative one of a loss, and the relative one of rows of dx, of which some are
compared. "S1-25" ignores the first three quarters of each sequence, as prompts are. What is measured is written at
once.
"""

import argparse
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.common.markdown import Row
from benchmark.common.measure import Step, attempt, environment, merged, peak_mib, present, rounded, settle, update
from benchmark.common.processes import DEVICE, GPU, times
from benchmark.kernels.losses import IGNORED
from benchmark.kernels.post_training_contestants import CASES, JSD, Contestant, Data, Results, divergence, dpo, grpo
from benchmark.kernels.post_training_report import PREFIX, tables, write_report

ROUNDS, REPEATS = 5, 2
WEIGHT_STD, NOISE = 0.04, 0.1
SAMPLE = 64  # rows of dx
EXACT_ROWS = 512  # of a chunk in float64
BETAS = {"forward KL": 0.0, "JSD": JSD}


class Shape(NamedTuple):
    """Tokens, hidden size, words, sequences and the share of the labels that count."""

    T: int
    H: int
    V: int
    sequences: int
    share: float = 1.0

    def text(self) -> str:
        return f"T {self.T} H {self.H} V {self.V}" + f", {self.share:.0%} of the labels" * (self.share < 1)


SHAPES = {
    "S1": Shape(8192, 4096, 151936, 8),
    "S2": Shape(16384, 2048, 248320, 16),
    "S3": Shape(32768, 2880, 201088, 32),
    "S4": Shape(8192, 4096, 128256, 8),
    "S1-25": Shape(8192, 4096, 151936, 8, 0.25),
}
QUICK = {"tiny": Shape(64, 32, 208, 4), "tiny-25": Shape(64, 32, 208, 4, 0.25)}


def name_of(shape: Shape, case: str) -> str:
    return f"{shape.text()}, {case}"


ORDER = {name_of(shape, case): CASES[case] for shape in (SHAPES | QUICK).values() for case in CASES}


def exact_scores(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.t()).log_softmax(-1)


@torch.no_grad()
def exact_tokens(data: Data) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each token in float64, 0 for ignored tokens."""
    weight, ignored = data.weight.double(), data.target == IGNORED
    results: list[tuple[Tensor, Tensor]] = []
    for x, target in zip(data.x.split(EXACT_ROWS), data.target.clamp(min=0).split(EXACT_ROWS), strict=True):
        logp = exact_scores(x, weight)
        results.append((logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
    logprob, entropy = (torch.cat(parts).masked_fill(ignored, 0) for parts in zip(*results, strict=True))
    return logprob, entropy


def make_data(shape: Shape, dtype: torch.dtype) -> Data:
    """Return random operands, without ``per_token``."""
    torch.manual_seed(0)
    T, H, V, sequences, share = shape
    x, teacher_x = (torch.randn(T, H, dtype=dtype, device=DEVICE) for _ in range(2))
    weight, teacher_weight = (torch.randn(V, H, dtype=dtype, device=DEVICE) * WEIGHT_STD for _ in range(2))
    target = torch.randint(V, (sequences, T // sequences), device=DEVICE)
    target[:, : int(T // sequences * (1 - share))] = IGNORED
    g, h = torch.randn(2, T, device=DEVICE).unbind()
    leaves = x.requires_grad_(), weight.requires_grad_()
    return Data(*leaves, target.flatten(), sequences, g, h, teacher_x, teacher_weight)


class Truth:
    """Results in float64 of the operands of one shape.

    ``data`` has old and reference log-probabilities that lie around the exact ones.
    """

    def __init__(self, data: Data) -> None:
        self.logprob, self.entropy = exact_tokens(data)
        kept, (T, S) = data.kept(), (len(data.x), data.sequences)
        rows = kept.nonzero()[:, 0]
        self.rows = rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]
        near = (self.logprob.float() + NOISE * torch.randn(T, device=DEVICE) for _ in range(2))
        advantage = torch.randn(S, device=DEVICE).repeat_interleave(T // S)
        self.data = data._replace(per_token=(*near, advantage, kept / kept.sum()))

    def of(self, case: str) -> Results:
        """Return what the steps of ``case`` return, with some rows of dx."""
        if case in BETAS:
            return self._of_divergence(BETAS[case])
        data, ignored = self.data, ~self.data.kept()
        logprob = self.logprob.clone().requires_grad_()
        if case == "GRPO step":
            loss = grpo(logprob, *(t.double() for t in data.per_token)).sum()
        elif case == "DPO step":
            loss = dpo(logprob, data.sequences)
        else:
            entropy = {"entropy": self.entropy} if case == "logprob + entropy" else {}
            dx = self._dx(data.g.double(), data.h.double() if entropy else None)
            return {"logprob": self.logprob, **entropy, "dx": dx}
        (g,) = torch.autograd.grad(loss, logprob)
        return {"loss": loss.detach(), "dx": self._dx(g.masked_fill(ignored, 0), None)}

    def _dx(self, g: Tensor, h: Tensor | None) -> Tensor:
        """Return rows of dx for the gradients of log-probability and entropy."""
        logp, weight = self._scores(self.data.x, self.data.weight)
        p, rows = logp.exp(), self.rows
        dz = -g[rows, None] * p
        dz[torch.arange(len(rows)), self.data.target[rows]] += g[rows]
        if h is not None:
            dz -= h[rows, None] * p * (logp + self.entropy[rows, None])
        return dz @ weight

    @torch.no_grad()
    def _scores(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.double()
        return exact_scores(x[self.rows], weight), weight

    def _of_divergence(self, beta: float) -> Results:
        data = self.data
        student, weight = self._scores(data.x, data.weight)
        teacher, _ = self._scores(data.teacher_x, data.teacher_weight)
        z = student.requires_grad_()  # log-probabilities are scores, too: a softmax does not change them
        total = divergence(z.log_softmax(-1), teacher, beta).sum() / data.kept().sum()
        return {"dx": torch.autograd.grad(total, z)[0] @ weight}


def errors(results: Results, truth: Results, rows: Tensor) -> dict[str, float]:
    """Return the errors of what a step returned."""
    found = {}
    for name, exact in truth.items():
        if name in results:
            got = results[name].double()
            difference = (got[rows] if name == "dx" else got) - exact
            relative = name in ("loss", "dx")
            found[name] = float(difference.norm() / exact.norm() if relative else difference.abs().amax())
    return found


def warm_times(step: Step) -> list[float]:
    step()
    return times(step, REPEATS)


def row_of(contestant: Contestant, data: Data, truth: Results, rows: Tensor) -> Row:
    """Return peak memory and errors of a contestant, and a timer."""
    step = contestant(data)
    mib, results = peak_mib(step) if GPU else (None, step())
    found = errors(results, truth, rows) if results else {}
    return {"mib": mib, "errors": found, "ms": partial(warm_times, step)}


def measure(contestants: Mapping[str, Contestant], data: Data, truth: Results, rows: Tensor) -> dict[str, Row]:
    """Return the row of each contestant of a case."""
    measured = {
        name: attempt(partial(row_of, contestant, data, truth, rows)) for name, contestant in contestants.items()
    }
    settle(measured.values(), ROUNDS, torch.cuda.synchronize if GPU else lambda: None)
    if GPU:
        torch.cuda.empty_cache()
    return measured


def measure_all(shapes: Mapping[str, Shape], cases: Collection[str], names: Collection[str], result: Row) -> None:
    """Measure all cases of one shape after the other; ``result`` gets what was measured, and results/ unless tiny."""
    for shape in shapes.values():
        torch.compiler.reset()
        truth = Truth(make_data(shape, torch.bfloat16 if GPU else torch.float32))
        for case in cases:
            contestants = {name: c for name, c in present(CASES[case]).items() if name in names}
            part = result["parts"][name_of(shape, case)] = measure(contestants, truth.data, truth.of(case), truth.rows)
            print(f"{name_of(shape, case)}: {part}", flush=True)
            if shape in SHAPES.values():
                update(rounded(result), PREFIX, ORDER)


def main() -> None:
    names = dict.fromkeys(name for contestants in CASES.values() for name in contestants)
    parser = argparse.ArgumentParser(prog="python -m benchmark post_training")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=[], metavar="NAME", help=f"{', '.join(names)}; else all"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if missing := {*options.contestants} - {*present(names)}:
        parser.error(f"the packages of these contestants are not installed: {', '.join(sorted(missing))}")
    if not options.report:
        if not GPU and not options.quick:
            parser.error("needs a GPU (all but --quick and --report)")
        result = environment("TRL", "verl", "Liger", "CCE") | {"parts": {}}
        shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shapes}
        measure_all(shapes, options.cases, options.contestants or names, result)
        print(tables(merged({}, rounded(result), ORDER)))
        if options.quick:
            return
    write_report()
