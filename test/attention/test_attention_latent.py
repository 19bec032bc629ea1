"""Attention over cached latents: values that are keys, too, and are read once for all heads."""

import pytest
import torch
from conftest import DEVICE
from test_attention import each, finite, pairwise
from test_attention_paged import KINDS, MIXED, STEP, alone, paged, paged_ref

from liger_like import ops
from liger_like.ops.attention.paged import forward
from liger_like.testing import assert_accurate
from liger_like.testing.inputs import paged_inputs

SMALL = {"D": 16, "Dv": 32, "Hk": 1, "page": 16, "latent": True}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Let sequences of few keys have several chunks."""
    monkeypatch.setattr(forward, "CHUNK", 16)  # 64 where chunks are not joined
    monkeypatch.setattr(forward, "MERGED", 2)


def test_reference_attends_to_keys_that_end_with_the_values():
    inputs = paged_inputs(torch.float64, "cpu", MIXED, H=4, **SMALL, sinks=True, behind=2)
    options = {"window": (30, 0), "softcap": 2.0, "return_lse": True}
    found = paged(**inputs, **options)
    inputs["q"] = torch.cat((inputs["q"], inputs.pop("qv")), -1)
    inputs["k_cache"] = torch.cat((inputs["k_cache"], inputs["v_cache"]), -1)
    expected = paged_ref(**inputs, **options)
    for each_found, each_expected in zip(found, expected, strict=True):
        torch.testing.assert_close(each_found, each_expected)


# heads that are less than a block of rows, or more; sequences of one row each, and of several
ROWS = pairwise(
    each("kind", *KINDS),
    each("page", 8, 64),
    each("lengths", STEP, MIXED),
    [{"H": 6, "Hk": 2}, {"H": 20, "Hk": 1}, {"H": 66, "Hk": 2}],
    [{"D": 16, "Dv": 32}, {"D": 8, "Dv": 40}],
    each("sinks", False, True),
    each("window", (-1, -1), (37, 0)),
    each("softcap", None, 3.0),
    [torch.float16],
)
if DEVICE == "cuda":
    ROWS += pairwise(
        each("kind", *KINDS),
        each("page", 16, 256),
        each("lengths", STEP, MIXED),
        [{"H": 128, "Hk": 1}, {"H": 16, "Hk": 1}, {"H": 160, "Hk": 2}],
        [{"D": 64, "Dv": 512}, {"D": 32, "Dv": 256}],
        each("sinks", False, True),
        each("window", (-1, -1)),
        each("softcap", None),
        [torch.float16, torch.bfloat16],
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(v) for part in row[:-1] for v in part.values()))
def test_accuracy(row, device, poisoned):
    *shape, window, softcap, dtype = row
    shape = {key: value for part in shape for key, value in part.items()}
    fns = (finite(fn) for fn in (paged, paged_ref))
    make = lambda: paged_inputs(dtype, device, **shape, latent=True)  # noqa: E731
    assert_accurate(*fns, make, window | softcap, 8 if DEVICE == "cuda" else 1, k=2)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_batch(kind, device, poisoned):
    """Slots of no key hold NaN, which no row shows."""
    inputs = paged_inputs(torch.float16, device, MIXED, H=20, **SMALL, kind=kind, behind=2)
    out, lse = paged(**inputs, return_lse=True)
    assert out.isfinite().all()
    start = 0
    for b, (rows, _) in enumerate(MIXED):
        if rows:
            found = paged(**alone(inputs, b, MIXED), return_lse=True, max_seqlen_q=rows)
            assert torch.equal(found[0], out[start : start + rows]), b
            assert torch.equal(found[1], lse[:, start : start + rows]), b
        start += rows
    assert out[start:].eq(0).all()
    assert lse[:, start:].eq(-torch.inf).all()


def test_views_of_one_tensor_give_the_same_bits(device, poisoned):
    inputs = paged_inputs(torch.float16, device, ((1, 100), (9, 20)), H=20, **SMALL)
    whole = torch.cat((inputs["v_cache"], inputs["k_cache"]), -1)
    views = {"v_cache": whole[..., :32], "k_cache": whole[..., 32:]}
    assert torch.equal(paged(**{**inputs, **views}), paged(**inputs))


def test_the_kernel_reads_the_latents_once(device, monkeypatch):
    """One launch computes a step of few keys; wide latents and fp32 run the reference."""
    kernels, launch = [], forward.launch

    def record(kernel, *args, **constants):
        kernels.append((kernel.__name__, constants.get("FEW")))
        launch(kernel, *args, **constants)

    monkeypatch.setattr(forward, "launch", record)
    for dtype, D, Dv in ((torch.float32, 16, 32), (torch.float16, 80, 32), (torch.float16, 16, 528)):
        shape = SMALL | {"D": D, "Dv": Dv}
        paged(**paged_inputs(dtype, device, ((1, 5),), H=2, **shape))
    assert not kernels
    paged(**paged_inputs(torch.float16, device, ((1, 5), (1, 30)), H=2, **SMALL))
    assert kernels == [("_attention_paged_kernel", True)]


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, r"qv must have shape \[1, 2, 32\], got \[1, 2, 16\]", {"qv": torch.ones(1, 2, 16)}),
        (TypeError, "qv must have the dtype of the cache, torch.float32", {"qv": torch.ones(1, 2, 32).half()}),
        (ValueError, "with qv the keys", {"k": torch.ones(1, 1, 16), "v": torch.ones(1, 1, 32)}),
        (RuntimeError, "qv requires a gradient", {"qv": torch.ones(1, 2, 32, requires_grad=True)}),
    ],
)
def test_error_names_the_argument(error, message, changed):
    inputs = paged_inputs(torch.float32, "cpu", ((1, 5),), H=2, **SMALL)
    with pytest.raises(error, match=message):
        ops.flash_attention_paged(**inputs | changed)
