"""``explain`` names the kernels that ran, and the reasons against the others."""

import pytest
import torch
from test_ops import small

import liger_like
from liger_like import explain
from liger_like.ops.attention import choice
from liger_like.runtime import support, tiles
from liger_like.testing import SPECS

NORM = {"lead": (9,), "N": 64, "weight": True}
HEADS = {"B": 1, "S": 100, "Sk": 100, "H": 2, "Hk": 1, "D": 64}  # more rows than one block holds


def test_kernels_and_tiles(device):
    found = explain("rms_norm", NORM, dtype=torch.float16)
    assert found.implementation == ("Triton" if device == "cuda" else "interpreted Triton")
    assert [launch.kernel for launch in found.launches][:2] == ["_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel"]
    x = torch.empty(9, 64, dtype=torch.float16, device=device)
    for launch, kernel in zip(found.launches, ("rms_norm_fwd", "rms_norm_bwd"), strict=False):
        tile = tiles.select(kernel, x, 64, 64)
        assert (launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]) == (tile.block_m, tile.block_n)
    assert found.launches[0].programs == [-(-9 // found.launches[0].constants["BLOCK_M"])]
    assert f"BLOCK_M {found.launches[0].constants['BLOCK_M']}, BLOCK_N 64" in str(found)
    assert explain(liger_like.rms_norm, NORM, dtype=torch.float16) == found
    by_rule = any("a rule chose" in reason for reason in found.reasons)
    assert by_rule == (device == "cpu" or support.architecture(x.device) != 9)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_op(spec, device):
    shape = small(spec)
    found = explain(spec.name, shape, dtype=torch.float32)
    assert found.launches
    assert found.implementation.endswith("Triton")
    found = explain(spec.name, shape, dtype=torch.float64)
    assert found == (spec.name, "plain torch", [], ["kernels take float32, float16 and bfloat16"])
    assert not support.is_explaining()


def test_chunks_of_the_loss():
    found = explain("fused_linear_cross_entropy", {"lead": (60,), "H": 16, "V": 32}, dtype=torch.float32, chunk_rows=16)
    *whole, last = next(launch for launch in found.launches if "fwd" in launch.kernel).programs
    assert set(whole) == {16}
    assert 0 < last <= 16


def test_why_plain_torch(device, monkeypatch):
    found = explain("flash_attention", HEADS | {"D": 264}, dtype=torch.float16)
    assert found[1:] == ("plain torch", [], ["kernels take heads of up to 256 features"])
    q, angle = torch.randn(1, 2, 3, 8, device=device), torch.rand(3, 8, device=device).requires_grad_()
    found = explain("rope", {"q": q, "k": q, "cos": angle, "sin": angle}, unsqueeze_dim=1)
    assert found[1:] == ("plain torch", [], ["kernels have no gradient of cos and sin"])
    monkeypatch.setattr(support, "INTERPRET", False)
    (reason,) = explain("rms_norm", NORM, device="cpu").reasons
    assert str(explain("rms_norm", NORM, device="cpu")) == f"rms_norm: plain torch\n  because {reason}"
    assert "TRITON_INTERPRET=1" in reason


def tensors(device, expanded=False, **sizes):
    sizes = HEADS | sizes
    q = torch.randn(1, sizes["S"], sizes["H"], sizes["D"], device=device).half()
    k = torch.randn(1, 1 if expanded else sizes["Sk"], sizes["Hk"], sizes["D"], device=device).half()
    k = k.expand(-1, sizes["Sk"], -1, -1)
    return {"q": q.requires_grad_(), "k": k, "v": k}


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ({}, {"bias": torch.zeros(1, 2, 100, 100)}, "no bias"),
        ({"D": 16}, {}, "q 16, v 16"),
        ({"expanded": True}, {}, "expanded"),
        ({"S": 1}, {}, "split among programs"),
    ],
)
def test_why_not_the_kernels_for_hopper(sizes, options, reason, device, monkeypatch):
    monkeypatch.setattr(choice, "architecture", lambda device: 9)
    monkeypatch.setattr(choice, "INTERPRET", False)
    options = {name: t.to(device) for name, t in options.items()}
    found = explain("flash_attention", tensors(device, **sizes) | options)
    assert found.implementation.endswith("Triton")
    assert any(reason in found for found in found.reasons), found


def test_why_not_the_kernels_for_hopper_elsewhere(monkeypatch):
    monkeypatch.setattr(choice, "architecture", lambda device: 8)
    monkeypatch.setattr(choice, "INTERPRET", False)
    found = explain("flash_attention", HEADS | {"S": 9}, dtype=torch.float16)
    assert "the fastest attention kernels are for Hopper GPUs" in found.reasons


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper")
def test_on_hopper():
    for _ in range(2):  # the second call finds the kernels compiled
        found = explain("flash_attention", HEADS, causal=True)
        assert "Gluon for Hopper" in found.implementation
        assert found.launches[0].kernel == "_attention_fwd_hopper_kernel"
        assert not found.reasons
    assert "Gluon" not in explain("flash_attention", HEADS, dtype=torch.float32).implementation


def test_no_rows():
    assert explain("rms_norm", NORM | {"lead": (0,)}).implementation == "nothing to compute"


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"op must be one of 'rms_norm', .*, got 'softmax'", lambda: explain("softmax", {})),
        (ValueError, r"op must be one of 'rms_norm', .*, got 3", lambda: explain(3, {})),
        (TypeError, "shape must be a dict of sizes or tensors, got list", lambda: explain("rms_norm", [9, 64])),
        (
            TypeError,
            "shape must be out of lead, N, residual, weight, bias, got n, M",
            lambda: explain("rms_norm", {"lead": (9,), "n": 64, "M": 3}),
        ),
        (TypeError, "shape must have lead, N for rms_norm, got weight", lambda: explain("rms_norm", {"weight": True})),
        (
            TypeError,
            r"shape\['lead'\] must be a tuple of integers, got 2",
            lambda: explain("rms_norm", NORM | {"lead": 2}),
        ),
        (TypeError, "dtype must be a dtype, got str", lambda: explain("rms_norm", NORM, dtype="bf16")),
        (TypeError, "shape must be out of x, weight, .*, got y", lambda: explain("rms_norm", {"y": torch.ones(2)})),
        (TypeError, "options must be out of .*eps.*, got epsilon", lambda: explain("rms_norm", NORM, epsilon=1e-6)),
        (TypeError, "options must be out of .*causal.*, got mask", lambda: explain("flash_attention", HEADS, mask=1)),
        (
            TypeError,
            "options must be out of .*, got x",
            lambda: explain("rms_norm", {"x": torch.ones(2)}, x=torch.ones(2)),
        ),
    ],
)
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
