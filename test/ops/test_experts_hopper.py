"""The experts' kernels for Hopper, and the order of rows that they want."""

import types

import pytest
import torch
from conftest import DEVICE

from liger_like import moe_experts
from liger_like.ops import experts
from liger_like.ops.experts import choice
from liger_like.runtime import tma
from liger_like.runtime.launcher import recorded
from liger_like.runtime.support import architecture
from liger_like.testing import SPECS, assert_accurate, run
from liger_like.testing.inputs import experts_inputs

SPEC = next(spec for spec in SPECS if spec.name == "moe_experts")
KERNELS = {"_experts_rows_hopper_kernel", "_experts_depth_hopper_kernel", "_experts_down_bwd_hopper_kernel"}
NAMES = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias")
each_option = pytest.mark.parametrize("options", SPEC.options, ids=str)


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or architecture(torch.device("cuda", 0)) != 9:
        pytest.skip("needs a Hopper GPU")


def inputs(device="cuda", dtype=torch.bfloat16, **sizes):
    return experts_inputs(dtype, device, **{"lead": (300,), "H": 200, "I": 136, "E": 5, "K": 2} | sizes)


def kernels(given, options=None):
    with recorded() as launches:
        run(SPEC.fn, given, options or {})
    return {kernel.__name__ for kernel, *_ in launches} & KERNELS


@each_option
def test_sorted_rows_give_the_same_bits(options, device, monkeypatch, poisoned):
    """The portable kernels take both orders, for a Hopper GPU whose kernels do not compile."""
    given = inputs(device, torch.float32, lead=(30,), H=32, I=16, bias=True, elsewhere=1, rank=3)
    expected = run(SPEC.fn, given, options)
    monkeypatch.setattr(experts, "sorts_rows", lambda *_: True)
    for name, got in run(SPEC.fn, given, options).items():
        assert torch.equal(got, expected[name]), name


def test_what_tma_moves():
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    assert tma.moved_by_tma(make(2**30 - 1, 8))
    assert tma.moved_by_tma(make(3, 5, 16)[..., :8])
    for wrong in (
        make(2**30, 8),
        make(0, 8),
        make(5, 12),
        make(5, 8).expand(3, 5, 8),
        make(8, 5).t(),
        make(5, 16)[:, ::2],
    ):
        assert not tma.moved_by_tma(wrong)


@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_come_in_the_layout_of_the_matrices(transposed, monkeypatch):
    """TMA moves the factors that Hopper's kernels get, and B of experts [E, out, in] is read where it is."""
    sizes = {"lead": (30,), "H": 32, "I": 24, "E": 3, "K": 2, "rank": 16}
    given, seen = inputs(DEVICE, torch.float16, **sizes), []
    loras = {name: (given[f"{name}_a"], given[f"{name}_b"], 0.5) for name in ("gate_up_lora", "down_lora")}
    matrices = (given[name].mT.contiguous() if transposed else given[name] for name in ("gate_up", "down"))

    def noted(matrix, factor):
        return lambda *args: seen.append((args[matrix], args[factor]))

    products = {"gate_up": noted(1, 4), "rows_times": noted(1, 4), "down_bwd": noted(1, 3)}
    monkeypatch.setattr(tma, "_is_hopper", lambda device: True)
    fake = types.SimpleNamespace(COLUMNS=24, depth_product=lambda *args: None, **products)
    monkeypatch.setattr(choice, "gluon_module", lambda name: fake)
    out = moe_experts(given["x"], *matrices, given["index"], given["weights"], **loras, transposed=transposed)
    out.backward(torch.ones_like(out))
    assert len(seen) == 4
    for matrix, factor in seen:
        assert tma.moved_by_tma(factor)
        depth = 1 if matrix.shape[1] != factor.shape[1] else 2
        assert [*factor.shape] == [16 if i == depth else n for i, n in enumerate(matrix.shape)]
    if not transposed:
        given = {factor.data_ptr() for *lora, _ in loras.values() for factor in lora}
        assert {factor.data_ptr() for _, factor in seen} == given


@pytest.mark.gpu
def test_which_calls_run_them(hopper):
    assert kernels(inputs()) == KERNELS
    assert kernels(inputs(dtype=torch.float16), SPEC.options[-1]) == KERNELS
    assert not kernels(inputs(dtype=torch.float32))
    assert not kernels(inputs(H=196))
    given = inputs()
    given["gate_up"] = given["gate_up"].detach().mT.contiguous().mT.requires_grad_()
    assert kernels(given) == {"_experts_depth_hopper_kernel", *KERNELS}
    assert kernels(inputs(rank=4)) == KERNELS
    with recorded() as launches:
        run(SPEC.fn, inputs(rank=4), {})
    names = [kernel.__name__ for kernel, *_ in launches]
    assert not {"_gate_up_kernel", "_rows_times_kernel", "_down_bwd_kernel"} & {*names}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed, hopper, poisoned):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *choices: choices[int(torch.randint(len(choices), (), generator=generator))]  # noqa: E731
    E = draw(1, 3, 8, 70)
    sizes = {"lead": (draw(129, 500, 1111),), "E": E, "K": min(E, draw(1, 2, 8))}
    sizes |= {
        "H": 8 * draw(1, 9, 33, 64),
        "I": 8 * draw(1, 7, 32, 41),
        "bias": draw(False, True),
        "elsewhere": draw(0, 1),
    }
    dtype, options = draw(torch.bfloat16, torch.float16), draw(*SPEC.options)
    assert_accurate(SPEC.fn, SPEC.ref, lambda: inputs(dtype=dtype, **sizes), options)


@pytest.mark.gpu
@each_option
def test_a_part_of_the_gradients_has_the_same_bits(options, hopper, poisoned):
    given = inputs(bias=True)
    whole = run(SPEC.fn, given, options)
    for names in (*((name,) for name in NAMES), ("gate_up", "weights"), ("down", "x")):
        for name in NAMES:
            given[name].requires_grad_(name in names)
        got = run(SPEC.fn, given, options)
        assert got.keys() == {"out0", *(f"d{name}" for name in names)}
        for name, t in got.items():
            assert torch.equal(t, whole[name]), (names, name)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_nan_stays_with_its_expert(transposed, rank, hopper):
    """Rows of an expert end within a tile, and its weights within the depth of a product's step."""
    given = inputs(H=72, I=40, K=1, rank=rank)
    given["index"][given["index"] == 1] = 2
    given["index"][0] = 1
    given["x"].data[0] = torch.nan
    experts = [name for name in given if name not in ("x", "index", "weights")]
    for name in experts:
        given[name].data[1] = torch.nan
    got = run(SPEC.fn, given, {"transposed": transposed})
    for name in (f"d{name}" for name in experts):
        assert [bool(t.isfinite().all()) for t in got[name]] == [True, False, True, True, True], name
    for name in ("out0", "dx", "dweights"):
        assert [bool(t.isfinite().all()) for t in got[name]] == [False] + [True] * 299, name


@pytest.mark.gpu
def test_experts_without_rows_and_rows_without_experts(hopper, poisoned):
    given = inputs(E=40, lead=(20,), K=2)
    given["index"][3] = torch.tensor([-1, 40], device="cuda")
    used = set(given["index"].flatten().tolist())
    got = run(SPEC.fn, given, {})
    for name in ("dgate_up", "ddown"):
        assert [bool(t.any()) for t in got[name]] == [e in used for e in range(40)]
    for name in ("out0", "dx", "dweights"):
        assert not got[name][3].any()
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.gpu
def test_more_than_2_31_elements(hopper):
    """z has rows beyond 2^31 elements; the last tokens have the results that they have alone."""
    T, H, I = 2**18 + 700, 64, 4096
    given = inputs(lead=(T,), H=H, I=I, E=1, K=1)
    for name in ("gate_up", "down"):
        given[name].requires_grad_(False)
    got = run(moe_experts, given, {})
    last = {name: t if name in ("gate_up", "down") else t.detach()[-700:] for name, t in given.items()}
    last |= {name: last[name].requires_grad_() for name in ("x", "weights")}
    out = moe_experts(**last)
    torch.testing.assert_close(got["out0"][-700:], out)
    assert got["dx"][-700:].any(1).all()
    assert got["dx"].isfinite().all()
