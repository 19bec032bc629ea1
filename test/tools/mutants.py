"""Plants one bug at a time in a copy of the tree and runs the tests there: each bug must fail one of them.

    python test/tools/mutants.py [WORD ...]      # only the bugs whose file or reason holds one of the words
    python test/tools/mutants.py --cpu           # as where there is no GPU: in as many processes as there are cores
    python test/tools/mutants.py --workers 32 --limit 600    # processes; seconds for the tests of one bug
    python test/tools/mutants.py --rest          # those that MUTANTS.md does not have as caught

Exit code 1: a planted bug survived. A bug that only a GPU shows is planted where there is one. The fate of each goes to
MUTANTS.md as soon as it is known; those of bugs that were not planted now stay there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
from attention_mutants import ATTENTION
from exact_mutants import EXACT
from hopper_mutants import HOPPER, HOPPER_TESTS
from mutants_report import CAUGHT, NEEDS_GPU, SURVIVED, TIMED_OUT, Fate, keep, known
from rich.progress import track

ROOT = Path(__file__).parents[2]
PACKAGE = "liger_like"
FILES = (
    "test/ops/test_glu_linear.py",
    "test/ops/test_chunked_loss.py",
    "test/ops/test_losses.py",
    "test/ops/test_norms_and_rope.py",
    "test/runtime/test_tiles.py",
    "test/attention/test_attention_check.py",
    "test/attention/test_attention_extremes.py",
    "test/attention/test_attention_programs.py",
    "test/attention/test_attention_varlen.py",
    "test/attention/test_attention_spans.py",
    "test/attention/test_attention.py",
    "test/ops/test_ops.py",
    "test/ops/test_errors.py",
    "test/attention/test_attention_hopper_backward.py",
    "test/attention/test_attention_hopper.py",
    "test/ops/test_gpu.py",
)  # the quickest first


class Mutant(NamedTuple):
    """A bug: ``old`` occurs once in ``file``, which is below liger_like/.

    ``gpu_tests``: where only a GPU shows it, pytest's -k for the tests there that it must fail, instead of the file's.
    """

    file: str
    old: str
    new: str
    why: str
    gpu_tests: str = ""

    def tests(self) -> str:
        """pytest's -k for the tests that it must fail."""
        return self.gpu_tests or TESTS[self.file]


RUNTIME = ("autograd", "blocks", "checks", "launcher", "layout", "registry", "support")
# file -> pytest's -k for the tests that its bugs must fail
TESTS = {
    **{f"runtime/{file}.py": "test_ops or test_tiles" for file in RUNTIME},
    "runtime/tiles.py": "test_ops or test_tiles",
    "ops/rms_norm.py": "rms_norm or norms",
    "ops/layer_norm.py": "layer_norm or norms",
    "ops/rope.py": "rope",
    "ops/qk_norm_rope.py": "qk_norm_rope",
    "ops/glu.py": "glu",
    "ops/losses/rows.py": "cross_entropy or test_losses or test_errors",
    "ops/losses/cross_entropy.py": "cross_entropy or test_losses",
    "ops/losses/linear_cross_entropy.py": "linear_cross_entropy or test_losses or test_chunked_loss",
    "ops/losses/chunks.py": "test_losses or test_chunked_loss",
    "ops/losses/units.py": "test_losses",
    "ops/losses/dw_sum/__init__.py": "test_chunked_loss",
    **{file: "attention" for file, *_ in ATTENTION},
    "ops/attention/portable/bias.py": "attention and (bias or parts or position)",
    "ops/attention/hopper/buffers.py": "descriptors",
}
MUTANTS = [
    Mutant(
        "runtime/layout.py",
        "return like if like.stride(-1) == 1 else",
        "return like if True else",
        "rotated heads in memory whose last dimension is not contiguous",
    ),
    Mutant(
        "runtime/blocks.py",
        "(offs_n < N)[None, :]\n    return",
        "(offs_n <= N)[None, :]\n    return",
        "loads a column beyond the row",
    ),
    Mutant(
        "runtime/blocks.py",
        "(offs_n < N)[None, :]\n    tl.store",
        "(offs_n < N - 1)[None, :]\n    tl.store",
        "leaves the last column unwritten",
    ),
    Mutant(
        "runtime/blocks.py", "offs_n < N, other=0.0", "offs_n < N - 1, other=0.0", "the last weight is taken for zero"
    ),
    Mutant("runtime/blocks.py", "return y, 1.0 - y * y", "return y, 1.0 - y", "the slope of softcap in half precision"),
    Mutant(
        "runtime/blocks.py",
        "return x.to(dtype).to(tl.float32)",
        "return x",
        "a cast that the reference makes is left out",
    ),
    Mutant("runtime/launcher.py", "OPTIONS | options", "{} | options", "the version of Triton decides what is fused"),
    Mutant("runtime/layout.py", "x.stride(0)\n", "x.shape[-1]\n", "rows of a wider tensor are read as dense"),
    Mutant(
        "runtime/blocks.py",
        "total += load_tile(x_ptr, N, p +",
        "total = load_tile(x_ptr, N, p +",
        "of many partial sums the last ones count",
    ),
    Mutant("runtime/tiles.py", '"EVEN": even', '"EVEN": True', "reads beyond rows that do not fill their block"),
    Mutant("runtime/tiles.py", "if partial is not total:", "if False:", "partial sums are never summed"),
    Mutant("ops/rms_norm.py", "return tl.rsqrt(square / N + eps)", "return tl.rsqrt(square / N)", "eps is missing"),
    Mutant("ops/rms_norm.py", "(wdy - xhat * mean[:, None])", "(wdy + xhat * mean[:, None])", "swapped sign in dx"),
    Mutant(
        "ops/rms_norm.py", "mean = tl.sum(wdy * xhat, axis=1) / N", "mean = tl.sum(wdy * xhat, axis=1)", "no 1/N in dx"
    ),
    Mutant("ops/rms_norm.py", "dw += dy * xhat", "dw = dy * xhat", "dw keeps the last rows only"),
    Mutant(
        "ops/rms_norm.py",
        "block != pid, tl.sum",
        "block > pid + tl.num_programs(0), tl.sum",
        "dw of wide rows starts one round late",
    ),
    Mutant("ops/rms_norm.py", "blocks - 1 - block", "blocks - block", "the first rows have no gradient"),
    Mutant(
        "ops/rms_norm.py", "dx += load_tile(ds_ptr", "dx -= load_tile(ds_ptr", "the residual's gradient is subtracted"
    ),
    Mutant(
        "ops/layer_norm.py",
        "tl.where((offs_n < N)[None, :], centred, 0.0)",
        "tl.where((offs_n < N)[None, :], centred, -mean[:, None])",
        "variance of the padding",
    ),
    Mutant("ops/layer_norm.py", "delta * delta * (n * share)", "delta * delta * n", "Welford's weight dropped"),
    Mutant(
        "ops/layer_norm.py",
        "(wdy - mean_dy[:, None] - xhat * mean_dot[:, None])",
        "(wdy - xhat * mean_dot[:, None])",
        "dx forgets the mean of dy",
    ),
    Mutant("ops/layer_norm.py", "db += dy\n", "db += dy * xhat\n", "db is dw"),
    Mutant("ops/layer_norm.py", "(2 if HAS_DB else 1)", "1", "programs overwrite each other's db"),
    Mutant("ops/rope.py", "x1 * cos - x2 * sin", "x1 * cos + x2 * sin", "rotates the other way"),
    Mutant("ops/rope.py", "sin *= sign", "pass", "the backward rotates forward"),
    Mutant("ops/rope.py", '"COS_STEP": 2 if', '"COS_STEP": 1 if', "repeated cosines read as halves"),
    Mutant(
        "ops/rope.py",
        "tl.store(rows + 2 * HALF + offs, rest, mask=mask_h & (offs < REST))",
        "tl.store(rows + 2 * HALF + offs, rest, mask=mask_h & (offs < REST // 2))",
        "drops part of the features that do not turn",
    ),
    Mutant("ops/rope.py", "b * S + s if COS_BATCHED else s", "s", "every batch turns by the angles of the first"),
    Mutant("ops/rope.py", "for heads in (H, HK))", "for heads in (H, 1))", "one key head for each program only"),
    Mutant(
        "ops/rope.py", "square += sum_of_squares(rest, dtype, CASTING)", "pass", "the norm forgets what does not turn"
    ),
    Mutant("ops/rope.py", "uneven or cos.stride() != sin.stride()", "uneven", "sin is read with the strides of cos"),
    Mutant(
        "ops/qk_norm_rope.py",
        "y1 * cos + y2 * sin, y2 * cos - y1 * sin",
        "y1 * cos - y2 * sin, y2 * cos + y1 * sin",
        "gradients turn forward",
    ),
    Mutant(
        "ops/qk_norm_rope.py", "dot += tl.sum(dn * x, axis=1)", "pass", "the mean forgets the features that do not turn"
    ),
    Mutant("ops/qk_norm_rope.py", "dkw1 + dw1", "dw1", "dw of the last token's keys only"),
    Mutant(
        "ops/qk_norm_rope.py", "dw_ptr + D, dkw1", "dw_ptr, dkw1", "the gradient of k's weight lands on that of q's"
    ),
    Mutant(
        "ops/glu.py",
        "return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))\n    elif",
        "return x * sigmoid, sigmoid\n    elif",
        "SiLU's slope lacks a term",
    ),
    Mutant("ops/glu.py", "0.044715 * x * x * x", "0.044175 * x * x * x", "two digits of GELU's constant swapped"),
    Mutant("ops/glu.py", "0.7107068705", "0.7107086705", "two digits of erf's constant swapped"),
    Mutant("ops/glu.py", "pid % blocks * BLOCK_N", "pid % blocks", "blocks of columns overlap"),
    Mutant("ops/glu.py", "dy * up * slope", "dy * up * slope * 1.01", "one percent too much gradient"),
    Mutant("ops/glu.py", "2 * N if up is None else N", "N", "packed gradient written with the wrong stride"),
    Mutant(
        "ops/glu.py", "N, act * up, EVEN)\n\n\ndef", "N, act, EVEN)\n\n\ndef", "a linear layer's input lacks a factor"
    ),
    Mutant(
        "ops/glu.py", "if up is None and needs[0]:", "if up is None:", "a packed gradient that nobody wants is written"
    ),
    Mutant("ops/glu.py", "nn.Linear or not unhooked(linear)", "nn.Linear", "hooks of a linear layer are passed by"),
    Mutant("ops/glu.py", "weight.dtype == x.dtype and not", "weight.dtype == x.dtype or not", "autocast is passed by"),
    Mutant(
        "ops/losses/cross_entropy.py",
        "tl.where(v_start + offs_v == label, dz - hot, dz)",
        "tl.where(v_start + offs_v == label + 1, dz - hot, dz)",
        "label off by one",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "return row, label, (label != ignore_index) & (label >= 0)",
        "return row, label, (label >= 0)",
        "the ignore mask is dropped",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "slope *= slope_of_tanh",
        "pass",
        "softcap's derivative is dropped",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "dloss * 2.0 * z_loss * lse",
        "dloss * z_loss * lse",
        "derivative of lse^2 lacks its 2",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "total = total * rescale + tl.sum(e, axis=0)",
        "total = total + tl.sum(e, axis=0)",
        "online softmax not rescaled",
    ),
    Mutant(
        "ops/losses/rows.py",
        "num_items.where(num_items != 0, 1)",
        "num_items",
        "a batch with nothing to count gives NaN",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        'return tl.where(offs_v < V, raw, float("-inf"))',
        "return raw",
        "padding counts as logits of 0",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "_load(dloss_ptr, row * stride_dlm, unit)",
        "_load(dloss_ptr, row, unit)",
        "an expanded upstream gradient is read as dense",
    ),
    Mutant(
        "runtime/layout.py", "None else vector.contiguous()", "None else vector", "a strided weight is read as dense"
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "if ctx.inplace_backward and logits.is_contiguous()",
        "if logits.is_contiguous()",
        "the logits are overwritten unasked",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "logits.is_contiguous() and is_last_backward():",
        "logits.is_contiguous():",
        "the logits are overwritten though the graph is kept",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "torch.autograd.graph.increment_version(logits)",
        "pass",
        "who needs the overwritten logits is not told",
    ),
    Mutant(
        "ops/losses/linear_cross_entropy.py",
        "dloss / unit(",
        "dloss * unit(",
        "the unit of the gradients is applied twice",
    ),
    Mutant(
        "ops/losses/linear_cross_entropy.py",
        "factor = (dloss / unit",
        "factor = (dloss.abs() / unit",
        "sign of dloss is lost",
    ),
    Mutant(
        "ops/losses/linear_cross_entropy.py",
        "fits = last_use and dw_sum",
        "fits = dw_sum",
        "dw is scaled in place though the graph is kept",
    ),
    Mutant(
        "ops/losses/linear_cross_entropy.py",
        "scale_rows(dx_sum[:, :H], order,",
        "scale_rows(dx_sum[:, :H], None,",
        "dx in the order of the products",
    ),
    Mutant(
        "ops/losses/linear_cross_entropy.py",
        "scale_rows(dw_sum, None, factor, grad, True)",
        "scale_rows(dw_sum, None, factor, grad, False)",
        "weight.grad is replaced, not added to",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "_addmm(dw, z.t(), x_c, again)",
        "_addmm(dw, z.t(), x_c, False)",
        "dw of the last chunk only",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "_addmm(dw, z.t(), x_c, again)",
        "_addmm(dw, z.t(), x_c, True)",
        "dw adds to memory never filled",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "accum_dtype or torch.float32",
        "accum_dtype or x.dtype",
        "dw accumulated in half precision",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "dbias += z.sum(0, dtype=torch.float32)",
        "dbias.copy_(z.sum(0))",
        "dbias of the last chunk only",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "u_c = None if u is None else u[index]",
        "u_c = None if u is None else u[: end - start]",
        "the first chunk's low-rank term for every chunk",
    ),
    Mutant("ops/losses/chunks.py", "n = count()", "n = count() - 1", "the last token is left out"),
    Mutant(
        "ops/losses/chunks.py",
        "index = order[: int(kept[0])]",
        "index = order[1 : int(kept[0])]",
        "the backward leaves out a token",
    ),
    Mutant("ops/losses/chunks.py", "many=step < T", "many=False", "ignored tokens take part in the products"),
    Mutant(
        "ops/losses/chunks.py",
        "factor, dx.zero_(), False",
        "factor, dx, False",
        "ignored tokens keep a gradient of others",
    ),
    Mutant("ops/losses/chunks.py", "start += size", "start += size - 1", "slices overlap by a word"),
    Mutant(
        "ops/losses/chunks.py", "free = dw[end:]", "free = dw[end - 1 :]", "a slice's logits lie on its last row of dw"
    ),
    Mutant(
        "ops/losses/chunks.py",
        "_addmm(dx[:n], z, w, again)",
        "_addmm(dx[:n], z, w, False)",
        "dx of the last slice only",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "v_start=first_word + start",
        "v_start=first_word",
        "labels of the first slice for every slice",
    ),
    Mutant(
        "ops/losses/chunks.py",
        "scale_rows(product, None, factor,",
        "scale_rows(product, None, torch.ones_like(factor),",
        "the factor of fp16 is forgotten in dw",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "unit = (exponent << 23)",
        "unit = (exponent + 1 << 23)",
        "earlier rounds count twice",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "acc += sum_desc.load([row, col]).to(tl.float32) * unit[:, None]",
        "acc += 0.0 * unit[:, None]",
        "earlier rounds are forgotten",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "tl.maximum(top - 14, 16)",
        "tl.maximum(top - 16, 16)",
        "the largest element overflows",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "tl.max(tl.abs(acc), axis=1)",
        "tl.max(acc, axis=1)",
        "large negative elements overflow",
    ),
    Mutant("ops/losses/dw_sum/__init__.py", "tl.cdiv(K, BLOCK_K)", "K // BLOCK_K", "the last tokens are left out"),
    Mutant("ops/losses/dw_sum/__init__.py", "(acc * tl.load(factor_ptr))", "acc", "the last product is not scaled"),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "TensorDescriptor(out, [M, N]",
        "TensorDescriptor(total, [M, N]",
        "the last product goes to the total",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "row = tl.load(order_ptr + pid).to(tl.int64)",
        "row = pid",
        "the order of the rows is ignored",
    ),
    Mutant(
        "ops/losses/dw_sum/__init__.py",
        "value += tl.load(out_ptrs",
        "value = tl.load(out_ptrs",
        "a sum is replaced by one of its terms",
    ),
    Mutant(
        "ops/losses/cross_entropy.py",
        "z_ptr += tl.program_id(0).to(tl.int64) * stride_zm\n    ENTROPY",
        "z_ptr += tl.program_id(0) * stride_zm\n    ENTROPY",
        "int32 offsets of rows",
        "test_more_than_2_31_elements and cross_entropy",
    ),
    *(Mutant(*bug) for bug in EXACT),
    *(Mutant(*bug) for bug in ATTENTION),
    *(Mutant(file, *bug, HOPPER_TESTS[file]) for file, *bug in HOPPER),
]


def plant(mutant: Mutant | None, folder: Path) -> None:
    """Copy the tree to ``folder`` with the bug in it."""
    shutil.copytree(
        ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    )
    if mutant is None:
        return
    path = folder / PACKAGE / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        sys.exit(f"{mutant.file}: {mutant.old!r} occurs {source.count(mutant.old)} times, not once")
    path.write_text(source.replace(mutant.old, mutant.new))


def first_failure(tree: Path, words: str, limit: float, cpu: bool) -> str:
    """Run the tests that pytest's -k finds by ``words``, and return the first that fails, or nothing.

    ``cpu``: without a GPU, so that kernels are interpreted; what is written goes beside the tree, where no other tests
    write. On a GPU one bug follows the other, and what the compilers keep serves the next.
    """
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *FILES, "-k", words]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if cpu:
        own = {"TMPDIR": str(tree.parent), "TRITON_CACHE_DIR": str(tree.parent / "triton")}
        env |= own | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit)
    if run.returncode < 0:
        return "the process crashed"
    if run.returncode > 1:
        sys.exit(f"pytest could not run\n{run.stdout}{run.stderr}")
    return next(
        (line.split("::")[1].split(" - ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED")), ""
    )


def hunt(mutant: Mutant | None, words: str, limit: float, cpu: bool) -> Fate:
    """The fate of a bug; without one, of the tests themselves."""
    if mutant and mutant.gpu_tests and cpu:
        return Fate(NEEDS_GPU)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        plant(mutant, tree)
        try:
            test = first_failure(tree, words, limit, cpu)
        except subprocess.TimeoutExpired:
            return Fate(TIMED_OUT)
    return Fate(CAUGHT, test) if test else Fate(SURVIVED)


def main() -> None:
    """Plant every bug that the command line names, and exit with 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--workers", type=int)
    parser.add_argument("--limit", type=float, default=1800, help="seconds")
    parser.add_argument("--rest", action="store_true", help="those that MUTANTS.md does not have as caught")
    args = parser.parse_args()
    caught = {key for key, fate in known().items() if args.rest and fate.fate == CAUGHT}
    mutants = [m for m in MUTANTS if any(word in m.file or word in m.why for word in args.words)]
    mutants = [m for m in mutants if (m.file, m.why) not in caught]
    tests = {m.tests(): None for m in mutants if not (m.gpu_tests and args.cpu)}
    workers = args.workers or (os.cpu_count() if args.cpu else 1)
    fates = []
    with ThreadPoolExecutor(workers) as pool:
        whole = {pool.submit(hunt, None, words, args.limit, args.cpu): words for words in tests}
        slowest_first = reversed(mutants)
        hunts = {pool.submit(hunt, m, m.tests(), args.limit, args.cpu): m for m in slowest_first}
        try:
            for future in track(as_completed([*whole, *hunts]), "planting", len(whole) + len(hunts)):
                fate = future.result()
                if mutant := hunts.get(future):
                    keep((mutant.file, mutant.why), fate, [(m.file, m.why) for m in MUTANTS])
                    fates.append(fate.fate)
                    print(mutant.file, mutant.why, *fate, sep=", ", flush=True)
                elif fate.fate == CAUGHT:
                    sys.exit(f"{fate.by} fails without a planted bug")
        finally:
            pool.shutdown(cancel_futures=True)
    print(*(f"{fates.count(fate)} {fate}" for fate in sorted({*fates})), sep=", ")
    sys.exit(SURVIVED in fates)


if __name__ == "__main__":
    main()
