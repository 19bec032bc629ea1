"""The experts of a mixture: routing, rows without an expert, frozen parts, checkpoints, dtypes, and errors."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_like import moe_experts
from liger_like.ops.experts import choice, moe_experts_ref, tiles
from liger_like.ops.experts.routing import BINS, BLOCK, Routing, moe_rows
from liger_like.runtime import tma
from liger_like.runtime.support import use_kernel
from liger_like.testing import SPECS, assert_accurate, run
from liger_like.testing.inputs import experts_inputs

SPEC = next(spec for spec in SPECS if spec.name == "moe_experts")
SIZES = {"lead": (30,), "H": 32, "I": 16, "E": 4, "K": 2}
LORA = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")
PARAMETERS = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias", *LORA)
GPT_OSS = {"alpha": 1.702, "limit": 1.5, "transposed": True, "interleaved": True}


def inputs(device, dtype=torch.float32, **sizes):
    return experts_inputs(dtype, device, **SIZES | sizes)


def close(got, expected, **tolerances):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t, msg=lambda m, name=name: f"{name}: {m}", **tolerances)


class Ops(TorchDispatchMode):
    """Count the calls of the library's ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_like":
            self.calls.append(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


# routing


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("E", [1, BINS - 1, BINS, 2 * BINS + 3])
@pytest.mark.parametrize("T", [0, 1, 43, BLOCK])
@pytest.mark.parametrize("known", [False, True])
def test_rows_are_sorted_stably_and_cut_into_tiles(known, T, E, dtype, device, poisoned):
    index = torch.randint(-1, E + 2, (T, 3), device=device, dtype=dtype)
    flat = torch.where((index < 0) | (index >= E), E, index).flatten()
    counts = torch.bincount(flat.long(), minlength=E + 1)
    order = torch.argsort(flat, stable=True)
    routing = Routing(*moe_rows(index, E, 16, S := int(counts[:-1].sum()) if known else 3 * T))
    assert routing.row.tolist() == order[:S].tolist()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(3 * T, device=device))
    assert routing.pos.flatten().tolist() == place.masked_fill(flat == E, -1).tolist()
    starts = (counts.cumsum(0) - counts).tolist()
    table = [[e, starts[e] + i] for e in range(E) for i in range(0, int(counts[e]), 16)]
    assert routing.offsets.tolist() == [*starts, len(table)]
    assert routing.tiles.tolist()[: len(table)] == table
    assert all(e == E for e, _ in routing.tiles.tolist()[len(table) :])


def test_ids_that_pass_32_bits_belong_to_nobody(device):
    given = inputs(device)
    expected = moe_experts(**given | {"index": torch.full_like(given["index"], -1)})
    assert not expected.any()
    assert torch.equal(moe_experts(**given | {"index": given["index"] + 2**32}), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", tiles.TILES)
@pytest.mark.parametrize("width", [64, 60])
def test_all_products_take_tiles_of_the_same_rows(kind, dtype, width, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(tiles, "gpu_class", lambda device: kind)
    found = tiles.tiles_for(torch.empty(1, dtype=dtype), 64, width)
    rows = {tile.block_m for tile in (found.gate_up, found.rows_times, found.down_bwd)}
    assert rows == {tiles.tile_rows(dtype)}


@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=str)
def test_the_experts_of_two_ranks_add_up(options, device):
    """Each rank has half of the experts, and the ids of the others are outside of its own."""
    given = inputs(device, bias=True, rank=3)
    whole = run(SPEC.fn, given, options)
    parts = []
    for first in (0, 2):
        own = {n: given[n][first : first + 2].detach().requires_grad_() for n in PARAMETERS[1:3] + PARAMETERS[4:]}
        parts.append(run(SPEC.fn, given | own | {"index": given["index"] - first}, options))
    for name in whole:
        joined = torch.cat if name.removeprefix("d") in PARAMETERS[1:3] + PARAMETERS[4:] else sum
        torch.testing.assert_close(joined([part[name] for part in parts]), whole[name])


# no result depends on memory that nothing wrote, or on another expert's rows


@pytest.mark.parametrize("options", SPEC.options, ids=str)
def test_a_token_without_experts_touches_nothing(options, device, poisoned):
    given = inputs(device, bias=True, rank=3)
    away = torch.zeros(30, dtype=torch.bool, device=device)
    away[[0, 7, 29]] = True
    given["index"][away] = torch.tensor([9, -1], device=device)
    given["index"][1, 0] = 4
    expected = run(SPEC.fn, given, options)
    for name, value in (("x", torch.nan), ("weights", torch.inf)):
        given[name].data[away] = value
    given["weights"].data[1, 0] = torch.nan
    got = run(SPEC.fn, given, options)
    close(got, expected, rtol=0, atol=0)
    for t in (got["out0"], got["dx"], got["dweights"]):
        assert not t[away].any()
    assert got["dweights"][1, 0] == 0


def test_nan_stays_with_its_expert(device):
    """Token 0, whose rows fill up the tiles of others, goes to expert 1 only."""
    given = inputs(device, K=1, rank=3)
    given["index"][given["index"] == 1] = 2
    given["index"][0] = 1
    given["x"].data[0] = torch.nan
    got = run(SPEC.fn, given, {"limit": 3.0})
    for name in ("dgate_up", "ddown", *(f"d{name}" for name in LORA)):
        assert [bool(t.isfinite().all()) for t in got[name]] == [True, False, True, True], name
    for name in ("out0", "dweights"):
        assert [bool(t.isfinite().all()) for t in got[name]] == [False] + [True] * 29, name
    assert got["dx"][1:].isfinite().all()


def test_many_experts_without_tokens(device, poisoned):
    given = inputs(device, lead=(3,), E=40, rank=3)
    got = run(SPEC.fn, given, {})
    used = set(given["index"].flatten().tolist())
    for name in ("dgate_up", "ddown", *(f"d{name}" for name in LORA)):
        assert [bool(t.any()) for t in got[name]] == [e in used for e in range(40)]


# the backward computes what is asked for


@pytest.mark.parametrize(
    ("trained", "calls"),
    [
        (("x",), {"moe_down_bwd", "moe_low_rank", "moe_rows_times", "moe_combine"}),
        (("gate_up",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (("down",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (("weights",), {"moe_down_bwd", "moe_low_rank"}),
        (("gate_up_bias",), {"moe_down_bwd", "moe_low_rank", "moe_sum_rows"}),
        (("down_bias",), {"moe_sum_rows"}),
        (("gate_up_lora_a",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (("gate_up_lora_b",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (("down_lora_a",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (("down_lora_b",), {"moe_down_bwd", "moe_low_rank", "moe_depth_product"}),
        (
            PARAMETERS,
            {"moe_down_bwd", "moe_low_rank", "moe_rows_times", "moe_combine", "moe_depth_product", "moe_sum_rows"},
        ),
    ],
    ids=lambda names: "-".join(names) if isinstance(names, tuple) else "",
)
def test_frozen_parts_cost_nothing(trained, calls, device, poisoned):
    given = inputs(device, bias=True, rank=3)
    full = run(SPEC.fn, given, GPT_OSS)
    given = {n: t.detach().requires_grad_(n in trained) for n, t in given.items()}
    out = SPEC.fn(**given, **GPT_OSS)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    with Ops() as mode:
        out.backward(upstream)
    assert set(mode.calls) == calls
    assert mode.calls.count("moe_depth_product") == len({"gate_up", "down", *LORA} & {*trained})
    for name in trained:
        assert torch.equal(given[name].grad, full[f"d{name}"]), name


def test_frozen_experts_ask_for_no_gradients_of_theirs(device):
    given = inputs(device)
    given = {n: t.detach().requires_grad_(n in ("x", "weights")) for n, t in given.items()}
    with Ops() as mode:
        moe_experts(**given).sum().backward()
    assert "moe_depth_product" not in mode.calls


def test_without_a_gradient_z_is_not_kept(device):
    given, seen = inputs(device), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.name() == "liger_like::moe_gate_up":
                seen.append(result[0].numel())
            return result

    with Sizes():
        moe_experts(**given)
        moe_experts(**{n: t.detach() for n, t in given.items()})
        with torch.no_grad():
            moe_experts(**given)
    assert seen == [60 * 32, 0, 0]


def test_what_the_backward_keeps(device):
    """Beside the arguments: z, the order of the rows, and their tiles."""
    given, kept = inputs(device), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        moe_experts(**given)
    own = {t.data_ptr() for t in given.values()}
    z, *routing = sorted((t for at, t in kept.items() if at not in own), key=lambda t: -t.numel() * t.element_size())
    assert z.shape == (60, 32)
    assert all(t.dtype == torch.int32 and t.numel() <= 60 for t in routing)


def test_a_checkpoint_computes_the_product_with_down_once(device):
    given = inputs(device)
    expected = run(moe_experts, given, {})
    with Ops() as mode:
        got = run(lambda **kwargs: checkpoint(moe_experts, use_reentrant=False, **kwargs), given, {})
    close(got, expected, rtol=0, atol=0)
    assert [mode.calls.count(name) for name in ("moe_gate_up", "moe_rows_times", "moe_combine")] == [2, 2, 2]


def test_flops(device):
    given, unit = inputs(device), 2 * 60 * 32 * 16
    with FlopCounterMode(display=False) as forward:
        out = moe_experts(**given)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (3 * unit, 6 * unit)


# dtypes and devices


def test_x_takes_the_dtype_of_the_experts(device):
    given = inputs(device, torch.float16)
    wide = given["x"].detach().float().requires_grad_()
    got, expected = (run(moe_experts, given | {"x": x}, {}) for x in (wide, given["x"]))
    assert got["out0"].dtype == got["dx"].dtype == torch.float32
    close({n: t.half() for n, t in got.items()}, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_another_dtype(dtype, device):
    given = inputs(device, torch.float16)
    other = given["weights"].detach().to(dtype).requires_grad_()
    got, expected = (run(moe_experts, given | {"weights": w}, {}) for w in (other, given["weights"]))
    assert got["dweights"].dtype == dtype
    assert got["out0"].dtype == torch.float16
    close(got | {"dweights": got["dweights"].half()}, expected, rtol=0, atol=0)


def test_autocast(device):
    given = inputs(device, bias=True)
    with torch.autocast(device, dtype=torch.float16):
        got = run(moe_experts, given, {})
    assert all(t.dtype == torch.float32 for t in got.values())
    half = {n: t.detach().half().requires_grad_() if n in PARAMETERS else t for n, t in given.items()}
    half["weights"] = given["weights"]
    expected = run(moe_experts, half, {})
    close({n: t.half() for n, t in got.items()}, {n: t.half() for n, t in expected.items()}, rtol=0, atol=0)


def test_autocast_leaves_float64(device):
    given = inputs(device, torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = moe_experts(**given)
    close({"out": got}, {"out": moe_experts(**given)}, rtol=0, atol=0)


def test_without_kernels(device, references):
    given = inputs("cpu", bias=True, rank=2)
    assert not use_kernel(given["x"])
    close(run(SPEC.fn, given, GPT_OSS), run(SPEC.ref, given, GPT_OSS), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [{"K": 1}, {"E": 1, "K": 1}, {"E": 5, "K": 5}], ids=str)
def test_one_token(sizes, device, poisoned):
    make = lambda: inputs(device, lead=(1,), **sizes)  # noqa: E731
    assert_accurate(moe_experts, moe_experts_ref, make, {}, draws=40)


def test_leading_dimensions(device):
    given = inputs(device, lead=(2, 3, 5))
    flat = {n: t.detach().flatten(0, -2) if n in ("x", "index", "weights") else t.detach() for n, t in given.items()}
    assert torch.equal(moe_experts(**given).flatten(0, -2), moe_experts(**flat))
    one = {n: t[4] if n in ("x", "index", "weights") else t for n, t in flat.items()}
    assert moe_experts(**one).shape == (32,)


@pytest.mark.parametrize("rank", [0, 4])
def test_lengths_do_not_recompile(rank, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SPEC.fn, fullgraph=True, backend=counter)
    for rows in (20, 21, 24, 32):
        given = inputs(device, lead=(rows,), rank=rank)
        close(run(compiled, given, {}), run(SPEC.fn, given, {}), rtol=0, atol=0)
    assert counter.frame_count <= 2


# tensors over several devices


def test_shards_of_tokens(mesh):
    given = inputs("cpu")
    tokens = {n: Shard(0) if n in ("x", "index", "weights") else Replicate() for n in given}
    given = {n: t.detach().requires_grad_(t.requires_grad) for n, t in given.items()}
    sharded = {n: distribute_tensor(t, mesh, [tokens[n]]) for n, t in given.items()}
    out = moe_experts(**sharded)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(0),)
    names = [n for n, t in given.items() if t.requires_grad]
    grads = torch.autograd.grad(out.to_local().sum(), [sharded[n] for n in names])
    expected = torch.autograd.grad(moe_experts(**given).sum(), [given[n] for n in names])
    for name, got, want in zip(names, grads, expected, strict=True):
        assert got.placements == ((Shard(0) if tokens[name] == Shard(0) else Partial()),), name
        assert torch.equal(got.to_local(), want)


def test_shards_of_experts_are_refused(mesh):
    sharded = {n: distribute_tensor(t.detach(), mesh, [Replicate()]) for n, t in inputs("cpu").items()}
    sharded["gate_up"] = sharded["gate_up"].redistribute(placements=[Shard(0)])
    sharded["x"] = sharded["x"].to_local()  # as code does that shards experts by itself
    with pytest.raises(
        ValueError, match=r"takes whole experts, got gate_up as .*Shard.*use .*parallel\.expert_parallel"
    ):
        moe_experts(**sharded)


# errors

X, W1, W2 = torch.randn(3, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
A1, B1 = torch.randn(4, 2, 8), torch.randn(4, 12, 2)
INDEX, WEIGHTS = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
GIVEN = {"x": X, "gate_up": W1, "down": W2, "index": INDEX, "weights": WEIGHTS}


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "x must be floating point", {"x": X.int()}),
        (ValueError, r"gate_up must have shape \[E, 2I, 7\]", {"x": X[:, :7]}),
        (ValueError, r"gate_up must have shape \[E, 2I, 8\].*got \[4, 11, 8\]", {"gate_up": W1[:, :11]}),
        (ValueError, r"gate_up must have shape .*E and I of at least 1, got \[0, 12, 8\]", {"gate_up": W1[:0]}),
        (ValueError, r"gate_up must have shape .*got \[4, 0, 8\]", {"gate_up": W1[:, :0]}),
        (ValueError, r"gate_up must have shape .*got \[12, 8\]", {"gate_up": W1[0]}),
        (ValueError, r"gate_up must have shape \[E, 8, 2I\]", {"transposed": True}),
        (ValueError, r"down must have shape \[4, 8, 6\]", {"down": W2[:, :, :5]}),
        (ValueError, r"down must have shape \[4, 6, 8\]", {"gate_up": W1.mT, "transposed": True}),
        (TypeError, "down must have the dtype of gate_up", {"down": W2.double()}),
        (ValueError, r"gate_up_bias must have shape \[4, 12\]", {"gate_up_bias": W1[:, :6, 0]}),
        (ValueError, r"down_bias must have shape \[4, 8\]", {"down_bias": W1[:, :, 0]}),
        (TypeError, "down_bias must have the dtype of gate_up", {"down_bias": W2[:, :, 0].double()}),
        (TypeError, "index must be int32 or int64", {"index": WEIGHTS}),
        (TypeError, "index must be a tensor", {"index": [[0, 1]]}),
        (
            ValueError,
            r"index must have less than 2\^31 numbers, got shape \[1, 2147483648\]",
            {"x": X[:1], "index": INDEX[:1, :1].expand(1, 2**31), "weights": WEIGHTS[:1, :1].expand(1, 2**31)},
        ),
        (ValueError, r"index must have shape \[3, K\]", {"index": INDEX[:2]}),
        (ValueError, "index must have shape .*K of at least 1", {"index": INDEX[:, :0], "weights": WEIGHTS[:, :0]}),
        (ValueError, "index must be on cpu", {"index": INDEX.to("meta")}),
        (ValueError, r"weights must have shape \[3, 2\]", {"weights": WEIGHTS[:, :1]}),
        (TypeError, "weights must be floating point", {"weights": INDEX}),
        (ValueError, "down must be on cpu", {"down": W2.to("meta")}),
        (TypeError, r"gate_up_lora must be \(A, B, scale\), got Tensor", {"gate_up_lora": W1}),
        (TypeError, r"down_lora must be \(A, B, scale\), got tuple", {"down_lora": (W1, W2)}),
        (TypeError, "A of down_lora must be a tensor, got NoneType", {"down_lora": (None, W2, 1.0)}),
        (ValueError, r"A of gate_up_lora must have shape \[4, R, 8\].*\[4, 12, 2\]", {"gate_up_lora": (B1, B1, 1.0)}),
        (ValueError, r"A of gate_up_lora must have shape .*got \[4, 0, 8\]", {"gate_up_lora": (A1[:, :0], B1, 1.0)}),
        (ValueError, r"B of gate_up_lora must have shape \[4, 12, 2\]", {"gate_up_lora": (A1, A1, 1.0)}),
        (ValueError, r"A of down_lora must have shape \[4, R, 6\]", {"down_lora": (A1, B1, 1.0)}),
        (TypeError, "scale of gate_up_lora must be a number", {"gate_up_lora": (A1, B1, A1)}),
        (ValueError, "act must be one of", {"act": "relu"}),
        (ValueError, "limit must be positive", {"limit": 0}),
        (ValueError, "limit must be positive", {"limit": float("nan")}),
        (TypeError, "limit must be a number", {"limit": "7"}),
        (ValueError, "alpha must be finite", {"alpha": float("nan")}),
        (ValueError, "alpha needs act='silu', got act='gelu'", {"alpha": 1.0, "act": "gelu"}),
        (ValueError, "interleaved must be one of", {"interleaved": 1}),
        (ValueError, "transposed must be one of", {"transposed": None}),
    ],
)
def test_bad_arguments(error, message, changed):
    with pytest.raises(error, match=message):
        moe_experts(**GIVEN | changed)


def test_an_infinite_limit_is_none():
    assert torch.equal(moe_experts(**GIVEN, limit=float("inf")), moe_experts(**GIVEN))


# only on a GPU: its tiles


@pytest.mark.parametrize(("I", "modules"), [(16, [choice.ROWS] * 2), (12, [])])
def test_hopper_kernels_take_aligned_rows(I, modules, device, monkeypatch):
    """Rows of gate and up may be aligned where those of h are not."""
    asked = []
    monkeypatch.setattr(tma, "_is_hopper", lambda device: True)
    monkeypatch.setattr(choice, "gluon_module", asked.append)
    SPEC.fn(**inputs(device, torch.float16, I=I))
    assert asked == modules


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", SPEC.options, ids=str)
@pytest.mark.parametrize(("H", "I"), [(512, 256), (456, 328), (456, 332), (100, 75)])
def test_several_tiles_of_each_expert(H, I, options, dtype, poisoned):
    make = lambda: inputs("cuda", dtype, lead=(1500,), H=H, I=I, E=5, K=3, bias=True, elsewhere=1)  # noqa: E731
    assert_accurate(SPEC.fn, SPEC.ref, make, options)


@pytest.mark.gpu
def test_a_graph_takes_another_routing():
    given = inputs("cuda", torch.bfloat16, lead=(600,), H=128, I=64, E=8)
    leaves = [t for t in given.values() if t.requires_grad]
    upstream = torch.randn(600, 128, device="cuda", dtype=torch.bfloat16)

    def both():
        out = moe_experts(**given)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = both()
    for experts in (8, 2, 1):
        given["index"].copy_(torch.rand(600, 8, device="cuda").topk(2).indices % experts)
        graph.replay()
        for got, want in zip(captured, both(), strict=True):
            assert torch.equal(got, want)
