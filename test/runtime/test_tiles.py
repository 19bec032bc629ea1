"""Tiles of kernels, and launches: each runs the kernel that Triton would run."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_ops import small
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmark.kernels import tune
from liger_like.ops.losses import dw_sum
from liger_like.runtime import launcher, replay, support, tiles
from liger_like.runtime.launcher import launch
from liger_like.runtime.tiles import HOPPER, RULES, Tile, candidates, select, tiled
from liger_like.testing import SPECS, assert_accurate, run

NORMS = [s for s in SPECS if s.name in ("rms_norm", "add_rms_norm", "layer_norm")]
TILED = [s for s in SPECS if {"N", "R"} & s.bench_shapes[0].keys()]
WIDE = (12288, 16384, 20000, 65536, 131080)
each_norm = pytest.mark.parametrize("spec", NORMS, ids=lambda spec: spec.name)
each_tiled = pytest.mark.parametrize("spec", TILED, ids=lambda spec: spec.name)
half = torch.empty(1, dtype=torch.float16)


@pytest.mark.parametrize("kernel", RULES)
def test_rule(kernel):
    for width in (1, 3, 64, 4096, 4097, 70000):
        tile = select(kernel, half, width, width)
        assert tile.block_n <= RULES[kernel].widest
        assert tile.block_m * tile.block_n <= RULES[kernel].program or tile.block_m == 1
        assert 1 <= tile.num_warps <= 32


def test_table(monkeypatch):
    monkeypatch.setattr(tiles, "architecture", lambda device: 9)
    monkeypatch.setitem(HOPPER, "rms_norm_fwd", {64: Tile(7, 64, 1), 104: Tile(5, 128, 2)})
    get = partial(select, "rms_norm_fwd")
    assert get(half, 8, 8) == get(half, 64, 64) == Tile(7, 64, 1)
    assert get(half, 72, 72) == get(half, 104, 8) == Tile(5, 128, 2)
    by_rule = [get(half, 112, 112), get(half.float(), 8, 8), get(half, 64, 4)]
    monkeypatch.setattr(tiles, "architecture", lambda device: 8)
    assert by_rule == [get(half, 112, 112), get(half, 8, 8), get(half, 64, 64)]
    assert Tile(7, 64, 1) not in by_rule


def test_shipped_table_is_sorted_and_known():
    by_rule_alone = {f"{op}_{way}" for op in ("moe_route", "load_balancing") for way in ("fwd", "bwd")}
    assert set(HOPPER) == set(RULES) - by_rule_alone
    for by_width in HOPPER.values():
        assert list(by_width) == sorted(by_width)


@pytest.mark.parametrize("kernel", RULES)
def test_candidates(kernel):
    for width in (64, 4096, 14336, 70000):
        found = list(candidates(kernel, width))
        assert len(set(found)) == len(found) > 5
        if RULES[kernel].whole and width <= 4096:
            assert all(tile.block_n >= width for tile in found)


@each_tiled
def test_results_do_not_depend_on_the_tile(spec, device, monkeypatch):
    """The same numbers from other tiles, up to the order of sums: blocks that are too narrow, too wide, too many."""
    shape = (
        {"B": 1, "H": 5, "Hk": 3, "S": 19, "D": 16, "R": 16}
        if "D" in spec.bench_shapes[0]
        else {"lead": (37,), "N": 48}
    )
    shape = spec.bench_shapes[0] | shape
    draw = random.Random(0)
    inputs = spec.inputs(torch.float32, device, **shape)
    for _ in range(4):
        chosen = {}

        def other(kernel, x, width, unit, chosen=chosen):
            wide = 16 if "rope" in kernel else draw.choice((16, 32, 64))
            tile = Tile(draw.choice((1, 2, 4)), wide, draw.choice((1, 2)), draw.choice((1, 3)), 1)
            return chosen.setdefault(kernel, tile)

        monkeypatch.setattr(tiles, "select", other)
        monkeypatch.setattr(tiles, "_CHOSEN", {})
        monkeypatch.setattr(replay, "PLANS", {})
        assert_accurate(spec.fn, spec.ref, lambda: inputs, {})
        assert chosen


def test_sum_of_many_partial_sums(device):
    """Sum as many partial sums as a large GPU has programs."""
    partial, total = torch.randn(528, 70, device=device), torch.empty(70, device=device)
    tiles.sum_partials(partial, total)
    torch.testing.assert_close(total, partial.double().sum(0).float())


def test_tuned_table_is_read_back():
    chosen = {"a": {64: Tile(1, 2, 3, 4, 5), 16: Tile(5, 4, 3, 2, 1)}, "b": {2**31: Tile(1, 1, 1, 1, 1)}}
    source = tune.FILE.read_text()
    assert len(tune.TABLE.findall(source)) == 1
    names = {"Tile": Tile, "dict": dict, "str": str, "int": int}
    exec(tune.TABLE.search(tune.TABLE.sub(tune.table(chosen), source))[0], names)
    assert names["HOPPER"] == chosen
    assert list(names["HOPPER"]["a"]) == [16, 64]


@pytest.mark.gpu
@each_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wide_rows(spec, dtype):
    flags = {n: True for n in ("weight", "residual", "bias") if n in spec.test_shapes[0]}
    for N in WIDE:
        assert_accurate(spec.fn, spec.ref, lambda: spec.inputs(dtype, "cuda", lead=(300,), N=N, **flags), {})  # noqa: B023


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_tiled
def test_weights_of_a_million_rows(spec, dtype):
    shape = spec.bench_shapes[0]
    if "weight" in shape:
        shape = shape | {"lead": (10**6,), "N": 64}
    elif "weights" in shape:
        shape = shape | {"B": 1, "H": 4, "Hk": 4, "S": 250_000, "D": 64, "R": 64}
    else:
        pytest.skip("has no weights")
    assert_accurate(spec.fn, spec.ref, lambda: spec.inputs(dtype, "cuda", **shape), {})


@pytest.mark.gpu
@each_tiled
def test_autotune(spec, monkeypatch):
    chosen = {}
    monkeypatch.setattr(tiles, "AUTOTUNE", True)
    monkeypatch.setattr(tiles, "_CHOSEN", chosen)
    monkeypatch.setattr(tiles, "candidates", lambda kernel, width: list(candidates(kernel, width))[::9])
    assert_accurate(spec.fn, spec.ref, lambda: spec.inputs(torch.bfloat16, "cuda", **small(spec)), {}, draws=4)
    assert all(tile in list(candidates(kernel, width)) for (kernel, width, *_), tile in chosen.items())
    assert chosen
    monkeypatch.setattr(replay, "PLANS", {})
    monkeypatch.setattr(tiles, "candidates", None)  # a second call does not search
    run(spec.fn, spec.inputs(torch.bfloat16, "cuda", **small(spec)), {})


@triton.jit(do_not_specialize=["M"])
def _scale_kernel(x_ptr, y_ptr, z_ptr, M, N, scale, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < M * N)
    tl.store(y_ptr + offs, x * scale * FACTOR, mask=offs < M * N)
    if z_ptr is not None:
        tl.store(z_ptr + offs, x, mask=offs < M * N)


@pytest.mark.gpu
def test_launch(monkeypatch):
    """Every combination of what Triton specialises on, twice: compiled, and run again from memory.

    A thread has several elements, so that it loads aligned ones at once.
    """
    monkeypatch.setattr(launcher, "_COMPILED", known := {})
    data = torch.randn(4, 64, device="cuda")
    for dtype, shift, N, factor, with_z in (
        (dtype, shift, N, factor, with_z)
        for dtype in (torch.float32, torch.float16)
        for shift in (0, 1)
        for N in (1, 16, 7)
        for factor in (2, 3)
        for with_z in (False, True)
    ):
        for M, scale in ((3, 0.5), (2, 4.0)):
            x = data.to(dtype).flatten()[shift:]
            y, z = torch.zeros_like(x), torch.zeros_like(x)
            launch(_scale_kernel, (2,), (x, y, z if with_z else None), (M, N), (scale,), FACTOR=factor, BLOCK=512)
            torch.testing.assert_close(y[: M * N], x[: M * N] * scale * factor)
            assert not y[M * N :].any()
            assert torch.equal(z[: M * N], x[: M * N]) == with_z
    assert len(known) >= 2 * 2 * 3 * 2 * 2


class Compiler:
    """Stands in for a kernel where there is no GPU: specialises as Triton does, and records what it runs."""

    pre_run_hooks = ()

    def __init__(self, sizes, floats, *constants):
        self.params = [SimpleNamespace(name=name) for name in ("x", *"m" * sizes, *"f" * floats, *constants)]
        self.ran = None

    def __getitem__(self, grid):
        def compile_and_run(x, *numbers, **options):
            compiled = specialised(numbers)

            def run(*given):
                numbers = given[10 : 10 + len(compiled)]
                assert specialised(numbers) == compiled
                self.ran = numbers, *[(name, type(value), value) for name, value in options.items()]

            run(*[None] * 10, *numbers)
            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        return compile_and_run


def specialised(numbers):
    return [native_specialize_impl(CUDABackend, number, False, True, True) for number in numbers]


INTS = (0, 1, True, False, 2, 3, 15, 16, 32, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**33, np.int64(1), np.int32(16))
FLOATS = (0, 1, 2, True, 0.0, 1.0, 0.5, -1, 16, np.float32(1.0), np.float64(0.5), np.int64(1), torch.tensor(1.0))


def test_launch_runs_what_triton_would_compile(monkeypatch):
    """For any types of numbers, and any earlier calls, a kernel runs with arguments of its own kind."""
    monkeypatch.setattr(support, "INTERPRET", False)
    for name, value in {"DIRECT": True, "OPTIONS": {}}.items():
        monkeypatch.setattr(launcher, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    for order in (1, -1):
        monkeypatch.setattr(launcher, "_COMPILED", {})
        sized, mixed = Compiler(2, 0, "C"), Compiler(1, 1)

        def check(kernel, sizes, floats=(), **options):
            launch(kernel, (1, 2), (torch.empty(0),), sizes, floats, **options)
            numbers = *map(int, sizes), *map(float, floats)
            assert kernel.ran == (numbers, *((name, type(value), value) for name, value in options.items()))

        for size, number in itertools.product(INTS[::order], FLOATS[::order]):
            check(mixed, (size,), (number,))
        for sizes in itertools.product(INTS[::order], repeat=2):
            check(sized, sizes, C=None)
        for constant in (1, 1.0, True, 0, 0.0, False, "1", None)[::order]:
            check(sized, (3, 3), C=constant, num_warps=4)
        for option in ("num_stages", "num_warps")[::order]:
            check(sized, (3, 3), C=1, **{option: 2})
        for fused in (True, False)[::order]:
            monkeypatch.setattr(launcher, "OPTIONS", {"enable_fp_fusion": fused})
            launch(sized, (1, 2), (torch.empty(0),), (3, 3), C=1)
            assert sized.ran == ((3, 3), ("enable_fp_fusion", bool, fused), ("C", int, 1))
        monkeypatch.setattr(launcher, "OPTIONS", {})


@pytest.mark.gpu
def test_launch_hooks():
    """Profilers see every launch."""
    seen = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    x = torch.randn(64, device="cuda")
    call = lambda: launch(_scale_kernel, (1,), (x, x, None), (1, 64), (1.0,), FACTOR=1, BLOCK=64)  # noqa: E731
    call()
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        call()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    call()
    assert seen == ["_scale_kernel"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launch_on_each_gpu():
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(64, device=device)
        y = torch.empty_like(x)
        with torch.cuda.device(x.device):
            launch(_scale_kernel, (1,), (x, y, None), (1, 64), (2.0,), FACTOR=1, BLOCK=64)
        torch.testing.assert_close(y, 2 * x)


def test_tiled_asks_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tiles, "_CHOSEN", {})
    monkeypatch.setattr(tiles, "select", lambda *args: asked.append(args) or Tile(1, 1, 1))
    for x, width in ((half, 8), (half, 8), (half, 9), (half.float(), 8)):
        tiled("rms_norm_fwd", x, width, lambda tile: None)
    assert [(x.dtype, width) for _, x, width, _ in asked] == [
        (torch.float16, 8),
        (torch.float16, 9),
        (torch.float32, 8),
    ]


def test_every_launch_says_whether_to_fuse(device, monkeypatch):
    """Else the version of Triton decides how often a result is rounded."""
    said = {}

    def note(kernel, *args, grid, warmup, **options):
        said[kernel.fn.__name__] = options.get("enable_fp_fusion")

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", note)
    monkeypatch.setattr(launcher, "DIRECT", False)
    for spec in SPECS:
        run(spec.fn, spec.inputs(torch.float32, device, **small(spec)), spec.options[0])
    a, b = (torch.empty(32, columns, dtype=torch.bfloat16, device=device) for columns in (128, 64))
    total = torch.empty(128, 64, dtype=torch.float16, device=device)
    for architecture in (9, 10):
        monkeypatch.setattr(dw_sum, "architecture", lambda device, it=architecture: it)
        dw_sum.add_products(total, dw_sum.exponents_like(total), a, b, accumulate=False)
    dw_sum.scale_rows(b, None, torch.ones(1, device=device), b, False)
    assert {"_add_products_kernel", "_add_products_hopper_kernel", "_scale_rows_kernel"} < said.keys()
    assert [name for name, fused in said.items() if fused is not True] == []
