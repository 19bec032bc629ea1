"""Writes into paged caches; arguments of both ops that do not fit."""

import pytest
import torch
from test_attention_paged import HEADS, KINDS, MIXED, STEP, paged
from torch.utils.flop_counter import FlopCounterMode

from liger_like import ops
from liger_like.ops.attention import checks
from liger_like.ops.attention.paged import paged_write_ref, write
from liger_like.testing.inputs import paged_inputs

NAMES = "k", "v", "k_cache", "v_cache"


def written(fn, inputs, *slots, **where):
    """Return copies of the caches after a write."""
    k, v, *caches = (inputs[n] for n in NAMES)
    caches = [cache.clone() for cache in caches]
    assert fn(k, v, *caches, *slots, **where) is None
    return caches


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_slots(dtype, device, monkeypatch):
    """Slots that are negative or out of range are skipped; nothing else changes."""
    monkeypatch.setattr(write, "ELEMENTS", 64)  # blocks of few heads
    inputs = paged_inputs(dtype, device, STEP, H=12, Hk=6, D=24, Dv=16, page=4, new=True)
    P, N = 4, len(inputs["k_cache"])
    slots = torch.tensor([9, -1, N * P, N * P - 1, 2], device=device)
    expected = [inputs[f"{n}_cache"].clone() for n in "kv"]
    for cache, name in zip(expected, "kv", strict=True):
        for i, slot in enumerate(slots.tolist()):
            if 0 <= slot < N * P:
                cache[slot // P, slot % P] = inputs[name][i]
    for ids in (slots, slots.int(), torch.stack((slots, slots), 1)[:, 0]):
        assert_same(written(ops.paged_write, inputs, ids), expected)
        assert_same(written(paged_write_ref, inputs, ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_sequences(kind, device):
    full, empty = ((5, 16),), ((1, 0),)  # of one page and of none
    for lengths, behind in ((STEP, 0), (MIXED, 3), ((), 3), (((5, 2),), 0), (full, 3), (empty, 0)):
        inputs = paged_inputs(torch.float32, device, lengths, **HEADS, page=16, kind=kind, new=True, behind=behind)
        where = {n: inputs[n] for n in ("pages", "lengths", "cu_seqlens_q") if n in inputs}
        found = written(ops.paged_write, inputs, **where)
        assert_same(found, written(paged_write_ref, inputs, **where))
        row = 0
        for b, (rows, length) in enumerate(lengths):
            for i in range(rows):
                j, P = length - rows + i, found[0].shape[1]
                if j >= 0:
                    pages = inputs.get("pages")
                    slot = int(pages[int(inputs["lengths"][b]) + j]) if kind == "slots" else 0
                    page = slot // P if kind == "slots" else b if pages is None else int(pages[b, j // P])
                    for cache, name in zip(found, "kv", strict=True):
                        assert torch.equal(cache[page, slot % P if kind == "slots" else j % P], inputs[name][row + i])
            row += rows


def test_views_of_caches(device):
    """Caches of a layer in those of all layers, and heads before tokens."""
    inputs = paged_inputs(torch.float32, device, STEP, **HEADS, page=4, new=True)
    slots = torch.tensor([9, -1, 3, 17, 2], device=device)
    expected = written(ops.paged_write, inputs, slots)
    layers = [torch.stack([inputs[f"{n}_cache"]] * 3, 1) for n in "kv"]
    heads = [inputs[f"{n}_cache"].transpose(1, 2).contiguous() for n in "kv"]
    ops.paged_write(inputs["k"], inputs["v"], *(t[:, 1] for t in layers), slots)
    ops.paged_write(*(inputs[n].mT.contiguous().mT for n in "kv"), *(t.transpose(1, 2) for t in heads), slots)
    assert_same([t[:, 1] for t in layers], expected)
    assert_same([t[:, 2] for t in layers], [inputs[f"{n}_cache"] for n in "kv"])
    assert_same([t.transpose(1, 2) for t in heads], expected)


def test_write_is_an_op(device):
    inputs = paged_inputs(torch.float32, device, STEP, **HEADS, page=4, new=True)
    k, v, *caches = (inputs[n].nan_to_num() for n in NAMES)
    for where in ((torch.tensor([9, -1, 3, 17, 2]).to(device), None, None), (inputs["pages"], inputs["lengths"], None)):
        torch.library.opcheck(torch.ops.liger_like.paged_write.default, (k, v, *caches, *where))

    def step(k, v, k_cache, v_cache, slots):
        ops.paged_write(k, v, k_cache, v_cache, slots)
        return k_cache.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    slots = torch.tensor([9, -1, 3, 17, 2], device=device)
    results = [[t.clone() for t in caches] for _ in range(2)]
    sums = [fn(k, v, *both, slots) for fn, both in zip((step, compiled), results, strict=True)]
    torch.testing.assert_close(*sums)
    assert_same(*results)


def test_flops(device):
    inputs = paged_inputs(torch.float32, device, ((3, 40), (1, 9)), H=4, Hk=2, D=16, Dv=8, page=4)
    with FlopCounterMode(display=False) as counter:
        paged(**inputs)
    assert counter.get_total_flops() == 2 * (3 * 40 + 9) * 4 * (16 + 8)


Q, CACHE = torch.randn(3, 4, 16), torch.randn(5, 4, 2, 16)
K, PAGES, LENGTHS = torch.randn(3, 2, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
CU = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "q must be a tensor, got list", {"q": [1.0]}),
        (ValueError, "q must have 3 dimensions", {"q": Q[None]}),
        (TypeError, "q must be floating point", {"q": Q.int()}),
        (TypeError, "k_cache must have the dtype of the rows, torch.float32", {"k_cache": CACHE.half()}),
        (ValueError, "v_cache must be on cpu, got meta", {"v_cache": CACHE.to("meta")}),
        (ValueError, "v_cache must have 4 dimensions", {"v_cache": CACHE[0]}),
        (ValueError, "k_cache must have heads of 16 features", {"k_cache": CACHE[..., :8]}),
        (ValueError, "v_cache must have the shape of k_cache", {"v_cache": CACHE[:4]}),
        (ValueError, "the heads of k_cache, 2, must divide those of q, 3", {"q": Q[:, :3]}),
        (ValueError, "the heads of k_cache, 0, must divide", {"k_cache": CACHE[:, :, :0]}),
        (TypeError, "pages must be int32 or int64 on cpu, got torch.float32", {"pages": PAGES.float()}),
        (TypeError, "pages must be int32 or int64 on cpu", {"pages": PAGES.to("meta")}),
        (ValueError, r"pages must have shape \[3, M\], or \[sum of lengths\], got \[2, 2\]", {"pages": PAGES[:2]}),
        (ValueError, "without pages the caches must have a page for each of 3 sequences, got 5", {"pages": None}),
        (TypeError, "lengths must be a tensor, got list", {"lengths": [1, 1, 1]}),
        (ValueError, r"lengths must have shape \[3\] or \[4\], got \[2\]", {"lengths": LENGTHS[:2]}),
        (ValueError, r"lengths must have shape \[4\], got \[3\]", {"pages": PAGES[:, 0]}),
        (TypeError, "cu_seqlens_q must be int32 or int64", {"cu_seqlens_q": CU.float()}),
        (ValueError, r"cu_seqlens_q must have the shape \[n \+ 1\]", {"cu_seqlens_q": CU[None]}),
        (TypeError, "max_seqlen_q must be an integer, got float", {"max_seqlen_q": 1.0}),
        (ValueError, "max_seqlen_q must be at least 1, got 0", {"max_seqlen_q": 0}),
        (ValueError, "k and v must both be given", {"k": K}),
        (ValueError, r"k must have shape \[3, 2, 16\], got \[2, 2, 16\]", {"k": K[:2], "v": K}),
        (TypeError, "v must have the dtype of the cache, torch.float32", {"k": K, "v": K.half()}),
        (ValueError, "window must be two integers", {"window": (-2, 0)}),
        (ValueError, "softcap must be positive", {"softcap": 0.0}),
        (ValueError, r"sinks must have shape \[4\]", {"sinks": torch.ones(2)}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
        (RuntimeError, "q requires a gradient, but paged caches are for inference", {"q": Q.clone().requires_grad_()}),
        (RuntimeError, "sinks requires a gradient", {"sinks": torch.ones(4, requires_grad=True)}),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, changed):
    given = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "pages": PAGES, "lengths": LENGTHS} | changed
    with pytest.raises(error, match=message):
        ops.flash_attention_paged(**given)
    if error is RuntimeError:
        with torch.no_grad():
            assert not ops.flash_attention_paged(**given).requires_grad


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "k must be a tensor", {"k": None}),
        (ValueError, r"v must have shape \[3, 2, 16\]", {"v": K[:2]}),
        (ValueError, "k_cache must have dense features", {"k_cache": CACHE.mT.contiguous().mT}),
        (TypeError, "slots must be int32 or int64", {"slots": LENGTHS.float()}),
        (ValueError, r"slots must have shape \[3\], got \[2\]", {"slots": LENGTHS[:2]}),
        (ValueError, "either slots or lengths must be given", {"slots": None}),
        (ValueError, "either slots or lengths must be given", {"lengths": LENGTHS}),
        (ValueError, "pages and cu_seqlens_q must come with lengths", {"pages": PAGES}),
        (ValueError, "pages must have shape", {"slots": None, "lengths": LENGTHS, "pages": PAGES[:2]}),
        (RuntimeError, "v requires a gradient", {"v": K.clone().requires_grad_()}),
    ],
)
def test_error_of_a_write_names_the_argument(error, message, changed):
    given = {"k": K, "v": K, "k_cache": CACHE.clone(), "v_cache": CACHE.clone(), "slots": LENGTHS} | changed
    with pytest.raises(error, match=message):
        ops.paged_write(**given)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("lengths must be at least 0 and at most 8, got 9", {"lengths": torch.tensor([1, 9, 2])}),
        ("lengths must be at least 0 and at most 8, got -1", {"lengths": torch.tensor([0, 4, 3, 5])}),
        ("pages must have a slot for each of 5 keys, got 3", {"lengths": torch.tensor([0, 1, 2, 5]), "pages": CU[:3]}),
        ("max_seqlen_q must be at least the longest sequence, 2", {"cu_seqlens_q": torch.tensor([0, 0, 2, 3])}),
    ],
)
def test_values(message, changed, monkeypatch):
    monkeypatch.setattr(checks, "VALUES", True)
    given = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "pages": PAGES, "lengths": LENGTHS}
    ops.flash_attention_paged(**given)
    with pytest.raises(ValueError, match=message):
        ops.flash_attention_paged(**given | changed)


LOST = torch.tensor([[0, 5, -1], [-1, 4, 2]], dtype=torch.int32)
LENGTHS_OF_LOST = torch.tensor([3, 11])


@pytest.mark.parametrize(
    ("got", "changed"),
    [
        (None, {"window": (6, 0)}),  # of 11 keys the last 7
        (-1, {"window": (7, 0)}),
        (-1, {}),
        (5, {"lengths": torch.tensor([5, 3])}),
        (None, {"lengths": torch.tensor([5, 11]), "window": (6, 0), "k": K[:2], "v": K[:2]}),  # its key is new
        (5, {"lengths": torch.tensor([6, 11]), "window": (6, 0), "k": K[:2], "v": K[:2]}),
        (None, {"lengths": torch.tensor([3, 0])}),
        (None, {"lengths": torch.tensor([9, 4]), "cu_seqlens_q": torch.tensor([0, 0, 0])}),  # no row
        (-1, {"pages": torch.tensor([3, -1, 19, 20]), "lengths": torch.tensor([0, 2, 3])}),
        (20, {"pages": torch.tensor([3, 7, 19, 20]), "lengths": torch.tensor([0, 2, 4])}),
        (None, {"pages": torch.tensor([-1, 7, 19, 20]), "lengths": torch.tensor([0, 2, 3]), "window": (0, 0)}),
        (None, {"pages": torch.tensor([1, 7, 19, -1]), "lengths": torch.tensor([0, 2, 4]), "k": K[:2], "v": K[:2]}),
    ],
)
def test_pages_of_keys_that_are_seen(got, changed, monkeypatch):
    """Pages behind the length, before the window and where new keys go may be anything; others are in the cache."""
    monkeypatch.setattr(checks, "VALUES", True)
    given = {"q": Q[:2], "k_cache": CACHE, "v_cache": CACHE, "pages": LOST, "lengths": LENGTHS_OF_LOST} | changed
    if got is None:
        ops.flash_attention_paged(**given)
        return
    with pytest.raises(ValueError, match=rf"pages must be at least 0 and less than \d+ .*, got {got}$"):
        ops.flash_attention_paged(**given)


def test_wrong_values_stay_within_the_tensors(device, poisoned):
    """Pages out of range, lengths beyond the pages, offsets that fall: results are wrong, but finite where keys are."""
    caches = torch.ones(5, 4, 2, 16, device=device), torch.ones(5, 4, 2, 16, device=device)
    q = Q.to(device)
    for pages, lengths, cu in (
        ([[9, -7], [1 << 30, 4], [-1, 2]], [9999, 8, 5], None),
        ([9, -1, 1 << 30, 3], [0, 4, 2, 99], None),
        ([[0, 1], [2, 3], [4, 0]], [5, -3, 8], [0, 3, 1, 99]),
    ):
        pages, lengths = (torch.tensor(t, dtype=torch.int32, device=device) for t in (pages, lengths))
        cu = cu if cu is None else torch.tensor(cu, device=device)
        options = {"cu_seqlens_q": cu, "max_seqlen_q": 3, "return_lse": True}
        out, lse = ops.flash_attention_paged(q, *caches, pages, lengths, **options)
        if cu is None and pages.dim() == 2:  # no more keys than the pages hold
            assert torch.equal(lse, ops.flash_attention_paged(q, *caches, pages, lengths.clamp(max=8), **options)[1])
        assert (out.eq(0) | (out - 1).abs().lt(1e-5) | out.isnan()).all()
