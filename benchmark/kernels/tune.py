"""Finds the tiles of ``liger_like/runtime/tiles.py`` on the GPU at hand, in bf16, and writes them into that file.

    make tune                    every op
    make tune OP=rms_norm,rope   some

The shapes are large: tiles matter where the GPU, not the host, is the limit. A width stands for those up to the next
one; 1536, 2304, 5120 and 12288 for those that leave a part of their block empty, 32768 and 14336 for those beyond.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from liger_like import testing
from liger_like.runtime import tiles

FILE = Path(tiles.__file__)
TABLE = re.compile(r"HOPPER: dict\[str, dict\[int, Tile\]\] = \{.*?\n?\}\n", re.DOTALL)
ELEMENTS = 2**26
UP_TO = {1536: 2047, 2304: 4095, 5120: 8191, 12288: 16383, 14336: 2**31, 32768: 2**31}
NORM_WIDTHS = (64, 128, 256, 512, 1024, 1536, 2048, 2304, 4096, 5120, 8192, 12288, 16384, 32768)
GLU_WIDTHS = (64, 256, 1024, 4096, 14336)
HEAD_WIDTHS = (64, 128, 256)


def shapes(spec: testing.OpSpec) -> Iterator[dict[str, Any]]:
    """Return shapes like the first one of the benchmark, of every width worth a tile."""
    shape = spec.bench_shapes[0]
    if "D" in shape:
        for D in HEAD_WIDTHS:
            yield shape | {"D": D, "R": D}
    else:
        for N in NORM_WIDTHS if "weight" in shape else GLU_WIDTHS:
            yield shape | {"N": N, "lead": (ELEMENTS // N,)}


def tune(spec: testing.OpSpec) -> None:
    """Search at every shape; ``tiles`` keeps what it finds."""
    for shape in shapes(spec):
        inputs = spec.inputs(torch.bfloat16, "cuda", **shape)
        outputs = spec.fn(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
        print(spec.name, shape, flush=True)


def table(chosen: dict[str, dict[int, tiles.Tile]]) -> str:
    """Return the table as source text."""
    lines = ["HOPPER: dict[str, dict[int, Tile]] = {"]
    for kernel, by_width in chosen.items():
        lines.append(f'    "{kernel}": {{')
        lines += [f"        {width}: Tile({', '.join(map(str, tile))})," for width, tile in sorted(by_width.items())]
        lines.append("    },")
    return "\n".join([*lines, "}\n"])


def main() -> None:
    tunable = {spec.name: spec for spec in testing.SPECS if {"N", "R"} & spec.bench_shapes[0].keys()}
    parser = argparse.ArgumentParser(prog="python -m benchmark tune")
    parser.add_argument("ops", nargs="?", default=",".join(tunable), help="names, separated by commas")
    names = parser.parse_args().ops.split(",")
    if unknown := set(names) - set(tunable):
        parser.error(f"no tiles for {', '.join(sorted(unknown))}; there are {', '.join(tunable)}")
    tiles.AUTOTUNE = True
    for name in names:
        tune(tunable[name])
    chosen = dict(tiles.HOPPER)
    for (kernel, width, *_), tile in tiles._CHOSEN.items():
        chosen[kernel] = chosen.get(kernel, {}) | {UP_TO.get(width, width): tile}
    FILE.write_text(TABLE.sub(table(chosen), FILE.read_text()))
