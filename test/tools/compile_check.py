"""Compiles every kernel, with every tile that an op picks, for GPUs that are not here, and reads off what it costs.

    python test/tools/compile_check.py               for every GPU of TARGETS
    python test/tools/compile_check.py sm_90 gfx942    for some
    python test/tools/compile_check.py --every 3       one in three of each kernel

Nothing lists the kernels: the ops of ``testing.SPECS`` run forward and backward with their launches recorded, not made.
Each launch is then specialised and compiled by Triton as it would be on the target. Exit code 1: a kernel does not
compile, spills registers, or needs more shared memory than the GPU has.
"""

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from compile_calls import (
    DTYPES,
    attention_calls,
    calls,
    experts_calls,
    kept_calls,
    paged_calls,
    run_few_rows,
    run_glu_linear,
    run_paged_write,
    run_router_logits,
    unstored_calls,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from liger_like import testing
from liger_like.ops import few_rows
from liger_like.ops.attention import choice
from liger_like.ops.attention import tiles as attention_tiles
from liger_like.ops.attention.hopper import forward as hopper_forward
from liger_like.ops.experts import tiles as experts_tiles
from liger_like.ops.losses import dw_sum
from liger_like.ops.losses.dw_sum import portable as dw_sum_portable
from liger_like.runtime import support, tiles, tma
from liger_like.runtime.gluon import PINS
from liger_like.testing import inputs as random_inputs

# GPU -> Triton's target, and the most shared memory (LDS) of one program in KiB
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_86": (GPUTarget("cuda", 86, 32), 99),
    "sm_89": (GPUTarget("cuda", 89, 32), 99),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "sm_120": (GPUTarget("cuda", 120, 32), 99),
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 64),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160),
}
TILE_OPTIONS = ("BLOCK", "num_", "STAGES", "EVEN", "ONE_BLOCK", "LONG")
SHARE = 4  # least number of variants compiled per tile
# class of GPUs for which ``ops.attention`` and ``ops.experts`` pick tiles -> its GPUs
CLASSES = {
    "hopper": ("sm_90",),
    "large": ("sm_80", "sm_100", "gfx950"),
    "rtx": ("sm_86", "sm_89", "sm_120"),
    "small": ("gfx90a", "gfx942"),
}
# kernel -> the only GPUs that run it; those in Gluon are for Hopper
ONLY = {dw_sum_portable._add_products_kernel: ("sm_90", "sm_100")}
# (kernel, architecture) -> N: at most one in N instructions of a loop may move a register to memory or back.
# The Hopper backward holds up to 208 sums, products and operands in 240 registers. A softcap, spans and packed
# sequences need further values that are the same in every iteration, and some of these are read again; spans with a
# softcap spill the most. Triton 3.9 keeps more such values in registers than older versions. With heads of 64 it moves
# a register in one of 40 instructions even without these options.
# The portable dk and dv kernel on Hopper holds 192 sums and products in 255 registers, with blocks of 64 queries and
# 128 keys and heads of 128. Packed sequences without a causal mask spill the most. Blocks of 32 queries spill nothing,
# but take 8 % longer for heads of 96 and 17 % longer for heads of 128.
# The kernel for dk and dv of heads of 192 on Hopper holds 208 sums, products and operands in 240 registers. Triton 3.9
# reads up to 14 values again that are the same in every iteration, of 690 instructions; windows and spans most.
# The kernel on paged latents of 512 features holds 176 sums and products in 255 registers, with blocks of 64 keys.
# Triton 3.9 reads two of the values again that are the same in every iteration, of 896 instructions.
MAY_SPILL = {
    ("_attention_bwd_hopper_kernel", 90): 16,
    ("_attention_paged_kernel", 90): 400,
    ("_attention_dkv_192_hopper_kernel", 90): 40,
    ("_attention_dkv_kernel", 90): 7,
}
MOST_MOVES = 8  # from registers of threads to uniform ones, in a loop of products of a warp group
# N for kernels that multiply no matrices: ptxas spills a register or two so that one more program fits on a
# multiprocessor. The norms of width 256 then use 96 of 255 registers, and they are memory-bound anyway.
BOUND_BY_MEMORY = 32
PRODUCT = re.compile(r"(?<![.\w])\w+MMA\b")  # HMMA, HGMMA, UTCHMMA; HFMA2.MMA multiplies no matrices


def only(kernel: JITFunction[Any]) -> tuple[str, ...]:
    """Return the only GPUs that run a kernel; none if all do."""
    return ("sm_90",) if kernel.is_gluon() else ONLY.get(kernel, ())


@functools.cache
def binder(kernel: JITFunction[Any], target: GPUTarget) -> Any:
    """Return the function that Triton's launcher calls with the arguments of ``kernel``."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(target))


class Launch(NamedTuple):
    """A kernel, what it was called with, and the GPUs that it may be called on like that."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    gpus: tuple[str, ...]

    def bind(self, target: GPUTarget) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
        """The arguments, what Triton specialises on of each, and the options: what it tells kernels apart by."""
        return binder(self.kernel, target)(*self.args, **self.options, debug=False)

    def specialise(self, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
        """The source and options that Triton's launcher would compile on ``target``."""
        bound, specialization, options = self.bind(target)
        options, *source = self.kernel._pack_args(make_backend(target), options, bound, specialization, options)
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, *source), options.__dict__


class Cost(NamedTuple):
    """Registers per thread, bytes of registers spilled to memory, KiB of shared memory.

    Of a kernel that multiplies matrices the loops decide: what is kept for after them costs nothing in memory.
    """

    registers: int
    spilled: int
    shared: float


@functools.lru_cache(2)  # both dumps of the last kernel: the SASS may be read twice
def dump(kernel: Any, option: str) -> str:
    """Return cuobjdump's output for a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = triton.knobs.nvidia.cuobjdump.path, option, file.name
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cost(kernel: Any) -> Cost:
    """Read the cost of a compiled kernel off its machine code."""
    shared = kernel.metadata.shared / 1024
    if "amdgcn" in kernel.asm:
        vgprs, scratch = (
            int(re.search(rf"\.{field}:\s+(\d+)", kernel.asm["amdgcn"])[1])
            for field in ("vgpr_count", "private_segment_fixed_size")
        )
        return Cost(vgprs, scratch, shared)
    usage = dump(kernel, "--dump-resource-usage")
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    # The size of the stack frame does not give the spills (alignment, other uses), so count the moves in the code.
    one_in = MAY_SPILL.get((kernel.metadata.name, kernel.metadata.target.arch), sys.maxsize)
    return Cost(registers, stack if stack and spills(dump(kernel, "-sass"), one_in) else 0, shared)


def instructions(sass: str) -> list[tuple[int, str]]:
    """Return address and text of each instruction."""
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]


def inner_loops(sass: str) -> list[range]:
    """Return the addresses of each loop that is not around another one, and multiplies where warps have their parts."""
    code = instructions(sass)
    jumps = ((at, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for at, text in code)
    loops = [range(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    if "USETMAXREG" in sass:
        ends = [at for at, text in code if re.search(r"\bEXIT\b", text)]  # loops after EXIT only retry waits
        products = [at for at, text in code if PRODUCT.search(text)]
        loops = [loop for loop in loops if any(at in loop for at in products) and not any(at in loop for at in ends)]
    around = [a for a, b in itertools.permutations(loops, 2) if b[0] in a and b[-1] in a]
    return [loop for loop in loops if loop not in around]


def spills(sass: str, one_in: int) -> bool:
    """Return True if too many instructions move a register to memory or back.

    They may be one in ``BOUND_BY_MEMORY``, but of code that multiplies matrices one in ``one_in``, in each loop that is
    not around another one.

    Where warps have parts of their own, what the parts share is kept from the start, and the one with the fewest
    registers has no room for it: there, of a loop that multiplies.
    """
    code = instructions(sass)
    moves = [at for at, text in code if re.search(r"\b(STL|LDL)\b", text)]
    if not any(PRODUCT.search(text) for _, text in code):
        return len(moves) > len(code) // BOUND_BY_MEMORY
    inner = inner_loops(sass)
    return any(sum(at in loop for at in moves) > sum(at in loop for at, _ in code) // one_in for loop in inner)


def unfilled(*shape: int, dtype: torch.dtype, grad: bool = True, **_: Any) -> Tensor:
    """Return unfilled memory in place of random numbers."""
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def differentiate(
    spec: testing.OpSpec, dtype: torch.dtype, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Run an op forward and backward, on tensors that start where tensors of their own do."""
    inputs = {name: t if t.requires_grad else t.clone() for name, t in spec.inputs(dtype, "cpu", **shape).items()}
    result = spec.fn(**inputs, **options)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None and t.requires_grad]
    torch.autograd.backward(outputs, [t.new_empty(t.shape) for t in outputs])


def stand_in(arg: Any) -> Any:
    """Return a short tensor for a tensor: of its dtype, and as aligned. A launch that keeps it keeps no memory."""
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty(16, dtype=arg.dtype)[arg.data_ptr() % 16 // arg.element_size() :]


def record() -> list[Launch]:
    """Run the ops over dtypes, options and widths; return their launches, each specialisation once."""
    launches: dict[tuple[Any, ...], Launch] = {}
    made: list[Launch] = []
    gpus: tuple[str, ...] = tuple(TARGETS)

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append(Launch(kernel, tuple(map(stand_in, args)), options, only(kernel) or gpus))
        launches.setdefault((kernel, *map(str, made[-1].bind(TARGETS["sm_90"][0])[1:])), made[-1])

    # INTERPRET makes the ops launch kernels on CPU tensors. No kernel runs, so the tensors need no values.
    with (
        patch.object(JITFunction, "run", run),
        patch.object(support, "INTERPRET", True),
        patch.object(random_inputs, "_randn", unfilled),
    ):
        for spec, dtype, shape, options in (*calls(), *kept_calls(), *experts_calls(DTYPES[:1])):
            made.clear()
            differentiate(spec, dtype, shape, options)
            if not made:
                sys.exit(f"{spec.name} launched no kernel for {dtype}, {shape}, {options}")
        run_glu_linear(DTYPES)
        run_router_logits()
        run_paged_write()
        gpus = ("sm_90",)
        with patch.object(tiles, "architecture", lambda device: 9), patch.dict(tiles._CHOSEN, clear=True):
            for spec, dtype, shape, options in calls():
                if dtype != torch.float32 and "V" not in shape:
                    differentiate(spec, dtype, shape, options)
            run_glu_linear(choice.DTYPES)
        for name, gpus in CLASSES.items():  # noqa: B007  # ``run`` reads them
            with contextlib.ExitStack() as stack:
                for module in (attention_tiles, experts_tiles, few_rows):
                    stack.enter_context(patch.object(module, "gpu_class", lambda device, name=name: name))
                run_few_rows()
                for call in (*attention_calls(), *paged_calls(), *experts_calls(choice.DTYPES)):
                    differentiate(*call)
        gpus = ("sm_90",)
        with patch.multiple(attention_tiles, gpu_class=lambda device: "hopper", LONG=1):
            for call in attention_calls([(80, 80), (96, 96), (128, 128)], choice.DTYPES):
                differentiate(*call)
        with (
            patch.object(attention_tiles, "gpu_class", lambda device: "hopper"),
            patch.multiple(choice, architecture=lambda device: 9, INTERPRET=False),
        ):
            whole = attention_calls(choice.WIDTHS, choice.DTYPES)
            sliced = attention_calls([(80, 80), (96, 96), (160, 80)], [torch.bfloat16])
            # as many key heads as heads: the backward draws blocks of keys
            drawn = attention_calls([(64, 64), (80, 80), (96, 96)], [torch.bfloat16], Hk=4)
            # one block of keys: programs share the query heads of a key head, and each sums dk and dv in fp32
            spec = next(spec for spec in testing.SPECS if spec.name == "flash_attention")
            few = {"B": 1, "S": 100, "Sk": 100, "H": 4, "Hk": 2}
            options = {"causal": True, "deterministic": False}
            shared = [(spec, torch.bfloat16, few | {"D": D, "Dv": Dv}, options) for D, Dv in choice.WIDTHS]
            calls_for_hopper = (*whole, *sliced, *drawn, *shared)
            forward = attention_tiles.HOPPER_FORWARD
            for least in (-math.inf, math.inf):  # three warp groups wherever there are three, then two
                with patch.dict(forward, {widths: (*options, least) for widths, (*options, _) in forward.items()}):
                    for call in calls_for_hopper:
                        differentiate(*call)
                    # as many programs as tiles, which need no counter
                    with patch.object(hopper_forward, "num_programs", lambda device, each: math.inf):
                        for call in shared:
                            differentiate(*call)
        with (
            patch.object(experts_tiles, "gpu_class", lambda device: "hopper"),
            patch.object(Tensor, "new_empty", Tensor.new_zeros),  # rows are indices
            patch.multiple(tma, architecture=lambda device: 9, INTERPRET=False),
        ):
            for spec, dtype, shape, options in (*experts_calls(choice.DTYPES), *unstored_calls()):
                differentiate(spec, dtype, shape, options)
        # The ops leave these products to torch on a CPU, so launch them here, with M and N divisible by 16 and not.
        flags, factors = (False, True), (None, torch.ones(1))
        for architecture, accumulate, factor, M, N in itertools.product((9, 10), flags, factors, (128, 136), (64, 72)):
            a, b = (torch.empty(32, columns, dtype=torch.bfloat16) for columns in (M, N))
            total = torch.empty(M, N, dtype=torch.float16)
            with patch.object(dw_sum, "architecture", lambda device, it=architecture: it):
                exponents = dw_sum.exponents_like(total)
                dw_sum.add_products(total, exponents, a, b, accumulate=accumulate, factor=factor)
    return list(launches.values())


def compile_for(index: int, gpu: str) -> Cost:
    """Compile launch ``index`` in a worker."""
    source, options = LAUNCHES[index].specialise(TARGETS[gpu][0])
    kernel = triton.compile(source, target=TARGETS[gpu][0], options=options)
    if LAUNCHES[index].kernel.is_gluon():  # one warp loads by TMA, the others multiply
        missing = [part for part in ("cp.async.bulk.tensor", "wgmma", "setmaxnreg") if part not in kernel.asm["ptx"]]
        if missing:
            raise RuntimeError(f"no {', '.join(missing)}")
        sass = dump(kernel, "-sass")
        products = re.findall(r"\bHGMMA\b.*?;", sass)
        if 2 * sum("gsb0" in product for product in products) > len(products):  # for example, too few registers
            raise RuntimeError("each product waits for the one before it")
        moves = [at for at, text in instructions(sass) if PINS and "R2UR" in text]
        if any(sum(at in loop for at in moves) > MOST_MOVES for loop in inner_loops(sass)):
            raise RuntimeError("addresses of products exceed the uniform registers of a warp")
        steps = re.findall(r"wgmma\.wait_group|\bbar\.(?:warp\.)?sync|mbarrier\.arrive\.shared", kernel.asm["ptx"])
        if ("wgmma.wait_group", "mbarrier.arrive.shared") in itertools.pairwise(steps):
            raise RuntimeError("a warp says for its group that a buffer is empty, while products of the others read it")
    return cost(kernel)


def verdict(gpu: str, future: Future[Cost]) -> tuple[Cost | None, str]:
    """The cost, and what is wrong with it."""
    if error := future.exception():
        if isinstance(error, BrokenProcessPool):
            return None, "not compiled: the compiler crashed on this launch or on another one"
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    result = future.result()
    if result.spilled:
        return result, f"spills {result.spilled} bytes"
    if result.shared > TARGETS[gpu][1]:
        return result, f"needs {result.shared:.0f} KiB of shared memory, {gpu} has {TARGETS[gpu][1]}"
    return result, ""


def variant(launch: Launch) -> str:
    """Return a key that distinguishes the launches of a kernel, but not bf16 from fp16."""
    return str(launch.bind(TARGETS["sm_90"][0])[1:]).replace("bf16", "fp16")


def plan() -> list[tuple[int, str]]:
    """Launches and GPUs to compile: every tile for every GPU that may get it.

    The variants of a tile (dtypes, options, alignments) are spread over the GPUs: all for all would take an hour. Of
    kernels for few GPUs, which were chosen with care, each variant is compiled, for bf16 and fp16 in turn: registers
    and shared memory were the same for both. Every set of missing tensors is compiled for some GPU, with slots and
    without: each has code of its own.
    """
    variants_of = defaultdict(list)
    for index, launch in enumerate(LAUNCHES):
        tile = {key: value for key, value in launch.options.items() if key.startswith(TILE_OPTIONS)}
        variants_of[launch.kernel, str(tile), variant(launch) if only(launch.kernel) else launch.gpus].append(index)
    jobs = []
    for turn, variants in enumerate(variants_of.values()):
        gpus = LAUNCHES[variants[0]].gpus
        if only(LAUNCHES[variants[0]].kernel):
            jobs += [(variants[turn % len(variants)], gpu) for gpu in gpus]
            continue
        if LAUNCHES[variants[0]].kernel.__name__.startswith("_attention"):
            gpus = (gpus[turn % len(gpus)],)  # each compilation takes seconds: one GPU of the class in turn
        turns = max(len(gpus), min(len(variants), SHARE))
        jobs += [(variants[i * len(variants) // turns], gpus[i % len(gpus)]) for i in range(turns)]
    forms = [(launch.kernel, [arg is None for arg in launch.args], launch.options.get("SLOTS")) for launch in LAUNCHES]
    seen = [forms[index] for index, _ in jobs]
    for index, (form, launch) in enumerate(zip(forms, LAUNCHES, strict=True)):
        if form not in seen:
            seen.append(form)
            jobs.append((index, launch.gpus[index % len(launch.gpus)]))
    return jobs


def sampled(jobs: list[tuple[int, str]], every: int) -> list[tuple[int, str]]:
    """Return one in ``every`` jobs of each kernel and GPU, at least one; other ones for each version of Triton."""
    jobs_of = defaultdict(list)
    for index, gpu in jobs:
        jobs_of[LAUNCHES[index].kernel, gpu].append((index, gpu))
    version = int(triton.__version__.split(".")[1])
    return [job for own in jobs_of.values() for job in own[version % min(every, len(own)) :: every]]


def main() -> None:
    """Compile what ``plan`` says, print a table of the costs, and exit with 1 if a kernel fails."""
    parser = argparse.ArgumentParser(prog="compile_check.py")
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"some of {', '.join(TARGETS)}; else all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compile one in N of each kernel")
    arguments = parser.parse_args()
    if unknown := {*arguments.gpus} - TARGETS.keys():
        parser.error(f"no GPUs to compile for: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    jobs = sampled([job for job in plan() if job[1] in (arguments.gpus or TARGETS)], arguments.every)
    fork = multiprocessing.get_context("fork")  # the launches cannot be pickled
    with ProcessPoolExecutor(os.cpu_count(), fork) as pool:
        futures = [pool.submit(compile_for, *job) for job in jobs]
        for future in track(futures, "compiling"):
            future.exception()

    costs, failures = defaultdict(list), []
    for (index, gpu), future in zip(jobs, futures, strict=True):
        kernel = LAUNCHES[index].kernel.__name__
        result, fault = verdict(gpu, future)
        if result:
            costs[kernel, gpu].append(result)
        if fault:
            failures.append(f"{kernel} {LAUNCHES[index].options} on {gpu}: {fault}")

    console = Console(width=160)
    table = Table(
        "kernel", "variants", *TARGETS, title=f"Triton {triton.__version__}: most registers / KiB of shared memory"
    )
    for kernel in dict.fromkeys(launch.kernel.__name__ for launch in LAUNCHES):
        cells = [costs[kernel, gpu] for gpu in TARGETS]
        most = [
            f"{max(c.registers for c in cell)} / {max(c.shared for c in cell):.1f}" if cell else "-" for cell in cells
        ]
        table.add_row(kernel, str(sum(launch.kernel.__name__ == kernel for launch in LAUNCHES)), *most)
    console.print(table)
    console.print(*failures, sep="\n", markup=False, soft_wrap=True)
    console.print(f"{len(jobs)} compiled, {len(failures)} failed or spilled or too large")
    sys.exit(bool(failures))


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive the fork of the workers
    LAUNCHES = record()
    main()
