"""Runs the kernels on small inputs under compute-sanitizer, that looks for accesses out of bounds, reads of memory that
was never written, races in shared memory, and barriers that not all threads reach.

    python test/tools/sanitize.py [memcheck initcheck racecheck synccheck]

Needs a GPU and compute-sanitizer on the path. Exit code 1: a tool reports an error.

initcheck does not see what TMA writes, and racecheck not that barriers in shared memory order what TMA, cp.async and
parts of a program with warps of their own do. Both report the kernels for Hopper for that, so they run the others, and
initcheck in fp32, since cuBLAS writes products in bf16 by TMA, too.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from liger_like import testing
from liger_like.ops.attention import choice
from liger_like.ops.losses import dw_sum

HOPPER, PORTABLE = "hopper", "portable"
# tool -> the kernels and the dtype that it checks
TOOLS = {
    "memcheck": (HOPPER, "bfloat16"),
    "initcheck": (PORTABLE, "float32"),
    "racecheck": (PORTABLE, "bfloat16"),
    "synccheck": (HOPPER, "bfloat16"),
}
# Head sizes of the Hopper kernels, rows that do not fill their blocks, and more tiles than programs run at once.
HEADS: list[dict[str, Any]] = [{"H": 4, "Hk": 2, "D": D, "Dv": Dv, "sinks": True} for D, Dv in choice.WIDTHS]
ATTENTION = {
    "flash_attention": [
        *({"B": 1, "S": 200, "Sk": 300, **heads} for heads in HEADS),
        {"B": 20, "S": 200, "Sk": 130, **HEADS[0]},
    ],
    "flash_attention_varlen": [{"lengths": ((70, 70), (0, 0), (129, 130)), "behind": 9, **heads} for heads in HEADS],
}


def cases() -> Iterator[tuple[testing.OpSpec, dict[str, Any], dict[str, Any]]]:
    """Op, shape and options."""
    for spec in testing.SPECS:
        for shape, options in itertools.product(spec.test_shapes[::4], spec.options[:2]):
            yield spec, shape, options
        for shape, options in itertools.product(ATTENTION.get(spec.name, ()), spec.options):
            yield spec, shape, options | {"deterministic": False}


def main() -> None:
    """Run the cases, or, under a tool each, a process that does."""
    if sys.argv[1:2] in ([HOPPER], [PORTABLE]):
        if sys.argv[1] == PORTABLE:
            for module in (dw_sum, choice):
                module.architecture = lambda device: 8  # type: ignore[attr-defined]
        for number, (spec, shape, options) in enumerate(cases()):
            print(number, spec.name, shape, options, flush=True)
            testing.run(spec.fn, spec.inputs(getattr(torch, sys.argv[2]), "cuda", **shape), options)
            torch.cuda.synchronize()
        return
    # Each tensor gets its own allocation, so that the padding of memcheck follows each tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = False
    for tool in sys.argv[1:] or TOOLS:
        options = ["--padding", "512"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "1", "--print-limit", "20"]
        command += [sys.executable, __file__, *TOOLS[tool]]
        result = subprocess.run(command, env=environment, check=False)
        print(tool, "found errors" if result.returncode else "found nothing", flush=True)
        failed |= bool(result.returncode)
    sys.exit(failed)


if __name__ == "__main__":
    main()
