"""Times attention over a grid of head widths, masks and sizes, and maps where it is first.

    make bench-attention-grid                     measures, writes results/ and from it the report
    python -m benchmark attention_grid --cases 0  some of the shapes; results/ keeps what it has of the others
    python -m benchmark attention_grid --seed 7   as many shapes drawn at random, printed only
    python -m benchmark attention_grid --report   the report again, without a GPU

Times are those of ``attention``: kernels alone, in bf16, all contestants of a shape in turns. A ratio compares
two times of the same round, and the median of all rounds counts.
"""

import argparse
import random
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmark.common.markdown import Row
from benchmark.common.measure import Build, environment, rounded, settle
from benchmark.kernels.attention import ROUNDS, Case, contestants, measure_all, timed
from benchmark.kernels.attention_grid_report import BASES, tables, write_report
from benchmark.kernels.contestants import OPS, SPECS, libraries

OTHERS = "torch, cuDNN", "flex_attention", "flash-attn-4"
TIMES = "forward_us", "backward_us"
WIDTHS = (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)  # of queries and keys, of values


class Sizes(NamedTuple):
    """``B`` sequences of ``S`` tokens; with packed sequences, ``B`` documents of ``S`` tokens together."""

    B: int
    S: int
    H: int
    Hk: int


class Mask(NamedTuple):
    """A row of the grid: options of the op, whether sequences are packed, and sizes for each of WIDTHS."""

    options: dict[str, Any]
    packed: bool
    sizes: tuple[Sizes, ...]


CAUSAL, WINDOW = {"causal": True}, {"causal": True, "window": (511, 0)}
GRID = {
    name: Mask(options, packed, tuple(Sizes(*sizes) for sizes in several))
    for name, options, packed, several in (
        ("causal", CAUSAL, False, (
            (2, 8192, 24, 8), (4, 3000, 12, 12), (2, 4096, 32, 32), (2, 6000, 40, 8), (2, 4096, 16, 16),
            (2, 4096, 8, 4),
        )),
        ("causal, long", CAUSAL, False, (
            (1, 65536, 8, 1), (1, 16384, 32, 32), (1, 20000, 32, 8), (1, 32768, 24, 8), (1, 16384, 16, 16),
            (1, 30001, 8, 1),
        )),
        ("causal, short", CAUSAL, False, (
            (32, 512, 32, 8), (16, 1000, 32, 32), (8, 1024, 32, 32), (1, 2048, 16, 16), (4, 1000, 32, 32),
            (8, 700, 16, 8),
        )),
        ("full", {}, False, (
            (8, 2048, 16, 16), (2, 5000, 32, 32), (4, 4096, 16, 4), (2, 8192, 16, 16), (1, 4096, 32, 32),
            (4, 2500, 8, 4),
        )),
        ("full, short", {}, False, (
            (4, 1500, 12, 12), (32, 577, 16, 16), (16, 512, 16, 16), (32, 512, 32, 8), (8, 1111, 16, 16),
            (16, 1024, 16, 1),
        )),
        ("window 512", WINDOW, False, (
            (2, 8192, 64, 8), (4, 5000, 32, 32), (1, 16384, 32, 8), (1, 32768, 32, 8), (2, 8000, 16, 16),
            (4, 4096, 8, 4),
        )),
        ("packed", CAUSAL, True, (
            (8, 16384, 32, 8), (6, 12000, 32, 32), (10, 16384, 32, 32), (8, 16384, 32, 8), (5, 10000, 16, 16),
            (7, 16384, 8, 4),
        )),
        ("packed, full", {}, True, (
            (40, 16000, 16, 16), (30, 16384, 16, 16), (12, 9000, 32, 8), (90, 30000, 64, 8), (20, 16384, 16, 16),
            (16, 8192, 16, 1),
        )),
    )
}  # fmt: skip


def drawn(mask: Mask, rng: random.Random) -> Sizes:
    """Return random sizes: up to 2^14 tokens, up to 32 sequences or 64 documents, 8 to 40 heads, grouped or not."""
    S, H = int(2 ** rng.uniform(9, 14)), 8 * rng.randint(1, 5)
    B = rng.randint(1, 64 if mask.packed else min(32, 2**14 // S))
    return Sizes(B, S, H, H // rng.choice((1, 1, 4, 8, H)))


def case_of(mask: Mask, widths: tuple[int, int], sizes: Sizes) -> Case:
    """Return a case of ``attention``. Documents are uneven: their boundaries are drawn at random."""
    D, Dv = widths
    shape: dict[str, Any] = {"H": sizes.H, "Hk": sizes.Hk, "D": D} | ({"Dv": Dv} if Dv != D else {})
    if not mask.packed:
        return Case(SPECS["flash_attention"], {"B": sizes.B, "S": sizes.S, "Sk": sizes.S, **shape}, mask.options)
    cuts = sorted(random.Random(sizes.S).sample(range(1, sizes.S), sizes.B - 1))
    lengths = tuple((end - start,) * 2 for start, end in zip((0, *cuts), (*cuts, sizes.S), strict=True))
    return Case(SPECS["flash_attention_varlen"], {"lengths": lengths, **shape}, mask.options)


def cases(seed: int | None = None) -> list[Case]:
    """Return the grid row by row, or one of the same masks and widths with sizes drawn from ``seed``."""
    rng = random.Random(seed)
    return [
        case_of(mask, widths, sizes if seed is None else drawn(mask, rng))
        for mask in GRID.values()
        for widths, sizes in zip(WIDTHS, mask.sizes, strict=True)
    ]


def chosen(case: Case) -> dict[str, Build]:
    """Return ours, with its portable kernels, too, and the peers that are compared."""
    return {name: build for name, build in contestants(case).items() if name in (*BASES, *OTHERS)}


def medians(row: Row, rows: list[Row]) -> Row:
    """Return ``row`` with medians in place of times by round.

    A row of ours also gets the ratios of each peer's time to its own, for forward and backward.
    """
    if "reason" in row:
        return {"name": row["name"], "reason": row["reason"]}
    peers = [peer for peer in rows if peer["name"] in BASES.get(row["name"], ()) and "reason" not in peer]
    ratios = {
        peer["name"]: [median(a / b for a, b in zip(peer[key], row[key], strict=True)) for key in TIMES]
        for peer in peers
    }
    return {"name": row["name"], "mib": row["mib"], **{key: median(row[key]) for key in TIMES}, "ratios": ratios}


def measure(case: Case, rounds: int) -> Row:
    """Measure the chosen contestants of a case, and their ratios."""
    result = timed(case, chosen(case))
    rows = result["rows"]
    settle(rows, rounds, reduce=list)
    for row in rows:
        if "reason" not in row:
            row["backward_us"] = [both - forward for both, forward in zip(row["us"], row["forward_us"], strict=True)]
    return {**result, "rows": [medians(row, rows) for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark attention_grid")
    several = cases()
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(several)), help="their numbers; else all")
    parser.add_argument("--seed", type=int, help="sizes are drawn at random; printed only")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        numbers = options.cases or range(len(several))
        if options.seed is not None:
            random_cases = cases(options.seed)
            rows = [measure(random_cases[i], ROUNDS) for i in numbers]
            print(tables(rounded({**environment(*libraries([OPS["flash_attention"]])), "cases": rows})))
            return
        print(tables(measure_all("grid", several, numbers, measure)))
    write_report()
