"""Attention at the edge: scores far from zero, the least bias, NaN, infinity, large softcaps, wide windows."""

import numpy as np
import pytest
import torch
from conftest import DEVICE
from test_attention import DTYPES, both_ways, check

from liger_like import ops
from liger_like.ops.attention import flash_attention_ref
from liger_like.testing import assert_accurate, run
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs

# (dtype, head size); a GPU adds the pairs that the Hopper kernels take
HEADS = [(torch.float32, 72)]
if DEVICE == "cuda":
    HEADS += [(dtype, D) for dtype in (torch.float16, torch.bfloat16) for D in (64, 128, 192, 256)]


def coarse(*shape, device):
    """Return random numbers of few bits, whose products in attention are exact."""
    return torch.randint(-8, 9, shape, device=device) / 8


@pytest.mark.parametrize("more", [{}, {"sinks": True, "bias": "hsk"}], ids=str)
@pytest.mark.parametrize(("S", "Sk"), [(20, 80), (2, 80), (2, 321 if DEVICE == "cpu" else 4993)])  # last: split keys
@pytest.mark.parametrize("common", [-1000, 1000])
def test_scores_far_from_zero(common, S, Sk, more, device, poisoned):
    """In fp32 no output or gradient depends on a number added to all scores of a row."""

    def make():
        inputs = attention_inputs(torch.float32, device, B=1, S=S, Sk=Sk, H=2, Hk=1, D=16, **more)
        q, k = coarse(1, S, 2, 16, device=device), coarse(1, Sk, 1, 16, device=device)
        q[..., 0], k[..., 0] = 8, k[..., 0] + common
        inputs |= {"q": q.requires_grad_(), "k": k.requires_grad_()}
        for name in ("sinks", "bias"):  # they join the scores, so they must be exact, too
            if name in inputs:
                inputs[name] = coarse(*inputs[name].shape, device=device) + (common * 2 if name == "sinks" else 0)
                inputs[name].requires_grad_()
        return inputs

    check(make, {}, draws=2)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("S", [9, 1])
def test_rows_with_the_least_bias(S, dtype, deterministic, device, poisoned):
    """Scores that are all alike give the mean of v, however low they are."""

    def make():
        inputs = attention_inputs(dtype, device, B=1, S=S, Sk=70, H=2, Hk=1, D=16)
        bias = torch.randn(1, 2, S, 70, device=device)
        bias[:, :, S // 2] = torch.finfo(torch.float32).min
        bias[:, 1, S // 2, 1::2] = 2.0  # in this head the even keys are hidden, as by a mask
        return inputs | {"bias": bias.requires_grad_()}

    check(make, {"deterministic": deterministic}, lse="returned", draws=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [1e3, 1e5, 1e6, 1e30])
def test_softcaps_far_above_the_scores(softcap, dtype, device, poisoned):
    shapes = [{"S": 40, "D": 16}, *([{"S": 200, "D": D} for D in (64, 256)] if device == "cuda" else [])]
    for shape in shapes:
        check(lambda: attention_inputs(dtype, device, B=1, Sk=70, H=2, Hk=1, **shape), {"softcap": softcap}, draws=2)  # noqa: B023


@both_ways
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("held", [torch.nan, torch.inf])
def test_upstream_gradients_of_rows_without_keys(held, sinks, deterministic, device, poisoned):
    inputs = attention_inputs(torch.float32, device, B=1, S=40, Sk=5, H=2, Hk=1, D=16, sinks=sinks)
    leaves = [t for t in inputs.values() if t.requires_grad]
    options = {"causal": True, "return_lse": True, "deterministic": deterministic}
    results = []
    for value in (0.0, held):
        out, lse = ops.flash_attention(**inputs, **options)
        upstream = torch.ones_like(lse)
        upstream[:, :, :35] = value
        results.append(torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), upstream)))
    for clean, grad in zip(*results, strict=True):
        assert torch.equal(clean, grad)


@both_ways
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("spoiled", ["qkv", "v"])
@pytest.mark.parametrize(("dtype", "D"), HEADS, ids=str)
def test_nan_of_another_document(dtype, D, spoiled, bad, deterministic, device, poisoned):
    lengths = ((20, 20), (30, 30))
    inputs = attention_varlen_inputs(dtype, device, lengths, H=2, Hk=1, D=D)
    options = {"causal": True, "max_seqlen_q": 30, "max_seqlen_k": 30, "deterministic": deterministic}
    results = [run(ops.flash_attention_varlen, inputs, options)]
    held, clean = (slice(20), slice(20, None)) if bad == 0 else (slice(20, None), slice(20))
    for name in spoiled:
        inputs[name] = inputs[name].detach().clone()
        inputs[name][held] = torch.nan
        inputs[name].requires_grad_()
    results.append(run(ops.flash_attention_varlen, inputs, options))
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name][clean], t[clean], rtol=1e-2 if D > 72 else 0, atol=1e-3 * (D > 72))
        assert results[1][name][held].isnan().any() or (name, spoiled) == ("dv", "v"), name


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize(("dtype", "D"), HEADS, ids=str)
def test_nan_stays_nan(name, dtype, D, device, poisoned):
    S = 40 if device == "cpu" else 300
    inputs = attention_inputs(dtype, device, B=1, S=S, Sk=S, H=2, Hk=2, D=D)
    inputs = {n: t.detach().clone() for n, t in inputs.items()}
    inputs[name][0, 20, 1] = torch.nan
    out, lse = ops.flash_attention(**inputs, causal=True, return_lse=True)
    spoiled = torch.zeros(S, dtype=torch.bool, device=device)
    spoiled[20 : 21 if name == "q" else None] = True
    for rows in (out[0, :, 1].T, lse[0, 1][None]):
        assert rows[:, spoiled].isnan().all()
        assert rows[:, ~spoiled].isfinite().all()
    assert out[0, :, 0].isfinite().all()


@pytest.mark.parametrize("side", [1 << 31, np.int64(1 << 31), (1 << 31) - 30])
def test_windows_as_wide_as_integers(side, device, poisoned):
    """Positions plus a side would pass 32 bits."""
    make = lambda: attention_inputs(torch.float32, device, B=1, S=20, Sk=40, H=1, Hk=1, D=16)  # noqa: E731
    assert_accurate(
        lambda **inputs: ops.flash_attention(**inputs, window=(side, side)), flash_attention_ref, make, {}, k=2
    )
