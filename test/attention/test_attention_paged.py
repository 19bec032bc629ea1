"""Attention over paged caches: accuracy, bits, slots that nobody sees, lengths on the device."""

import pytest
import torch
from conftest import DEVICE
from test_attention import DTYPES, each, finite, pairwise

from liger_like import ops
from liger_like.ops.attention import flash_attention_ref
from liger_like.ops.attention.paged import flash_attention_paged_ref, forward
from liger_like.testing import assert_accurate
from liger_like.testing.inputs import paged_inputs, with_pages

paged, paged_ref = with_pages(ops.flash_attention_paged), with_pages(flash_attention_paged_ref)
KINDS = ("pages", "slots", "static")
HEADS, ONE = {"H": 4, "Hk": 2, "D": 16}, {"H": 2, "Hk": 1, "D": 16}
# one row each; rows of several sequences in one block of rows; chunks that end with a sequence, and one key later
STEP = ((1, 5), (1, 0), (1, 64), (1, 65), (1, 140))
MIXED = ((3, 40), (0, 9), (1, 0), (1, 140), (17, 30))


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Let sequences of few keys have several chunks."""
    monkeypatch.setattr(forward, "CHUNK", 64)
    monkeypatch.setattr(forward, "MERGED", 2)


def keys_of(inputs, name, b, start, rows, length):
    """Return the keys or values of sequence ``b``, one after the other, out of pages, slots or new rows."""
    cache, pages, new = inputs[f"{name}_cache"], inputs.get("pages"), inputs.get(name)
    P, first = cache.shape[1], int(inputs["lengths"][b])
    keys = []
    for j in range(length):
        if new is not None and j >= length - rows:
            keys.append(new[start + j - (length - rows)])
        elif pages is None:
            keys.append(cache[b, j])
        elif pages.dim() == 1:
            slot = int(pages[first + j])
            keys.append(cache[slot // P, slot % P])
        else:
            keys.append(cache[pages[b, j // P], j % P])
    return torch.stack(keys) if keys else cache.new_empty(0, *cache.shape[2:])


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_attends_within_each_sequence(kind, new):
    for lengths, behind in ((STEP[:4], 0), (MIXED, 2)):
        shape = {"lengths": lengths, "H": 4, "Hk": 2, "D": 8, "Dv": 6, "page": 4}
        inputs = paged_inputs(torch.float64, "cpu", **shape, kind=kind, new=new, sinks=True, behind=behind)
        if kind == "pages":
            inputs["pages"].masked_fill_(inputs["pages"] < 0, 10**6)  # what stands behind the length is not read
        options = {"window": (30, 0), "softcap": 2.0, "scale": 0.4, "return_lse": True}
        out, lse = paged(**inputs, **options)
        start = 0
        for b, (rows, length) in enumerate(lengths):
            k, v = (keys_of(inputs, name, b, start, rows, length)[None] for name in ("k", "v"))
            q = inputs["q"][None, start : start + rows]
            expected = flash_attention_ref(q, k, v, causal=True, sinks=inputs["sinks"], **options)
            torch.testing.assert_close(out[start : start + rows], expected[0][0])
            torch.testing.assert_close(lse[:, start : start + rows], expected[1][0])
            start += rows
        assert out[start:].eq(0).all()
        assert lse[:, start:].eq(-torch.inf).all()


ROWS = pairwise(
    each("kind", *KINDS),
    each("page", 1, 48, 64),
    each("lengths", STEP, MIXED),
    [{"new": True, "behind": 3}, {}],
    [{"H": 2, "Hk": 2}, {"H": 6, "Hk": 2}, {"H": 17, "Hk": 1}],
    [{"D": 16}, {"D": 80}, {"D": 16, "Dv": 24}],
    each("sinks", False, True),
    each("window", (-1, -1), (37, 0), (0, 5)),
    each("softcap", None, 3.0),
    DTYPES,
)
if DEVICE == "cuda":
    ROWS += pairwise(
        each("kind", *KINDS),
        each("page", 16, 64, 128),
        each("lengths", STEP, MIXED),
        [{"new": True}, {"behind": 70}],
        [{"H": 8, "Hk": 8}, {"H": 8, "Hk": 1}],
        [{"D": 64}, {"D": 128}, {"D": 192, "Dv": 128}, {"D": 256}],
        each("sinks", False, True),
        each("window", (-1, -1), (100, 0)),
        each("softcap", None, 3.0),
        [torch.float16, torch.bfloat16],
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(v) for part in row[:-1] for v in part.values()))
def test_accuracy(row, device, poisoned):
    *shape, window, softcap, dtype = row
    shape = {key: value for part in shape for key, value in part.items()}
    fns = (finite(fn) for fn in (paged, paged_ref))
    make = lambda: paged_inputs(dtype, device, **shape)  # noqa: E731
    assert_accurate(*fns, make, window | softcap, 8 if DEVICE == "cuda" else 1 if dtype == torch.float32 else 2, k=2)


def alone(inputs, b, lengths):
    """Return the inputs of sequence ``b`` alone, in the same caches."""
    start, (rows, length) = sum(n for n, _ in lengths[:b]), lengths[b]
    own = {**inputs, **{n: inputs[n][start : start + rows].clone() for n in ("q", "qv", "k", "v") if n in inputs}}
    first = sum(keys for _, keys in lengths[:b])
    at = inputs["lengths"].new_tensor
    if "pages" not in inputs:
        own |= {n: inputs[n][b : b + 1] for n in ("k_cache", "v_cache")}
    elif inputs["pages"].dim() == 1:
        own["pages"] = inputs["pages"][first : first + length].clone()
    else:
        own["pages"] = inputs["pages"][b : b + 1]
    own["lengths"] = at([0, length]) if len(inputs["lengths"]) > len(lengths) else at([length])
    return own | {"cu_seqlens_q": at([0, rows])}


@pytest.mark.parametrize(("kind", "new"), [("pages", False), ("slots", True), ("static", True)])
def test_bits_do_not_depend_on_the_batch(kind, new, device, poisoned, monkeypatch):
    """A row gives the same bits alone and in a batch, whatever the longest number of rows.

    The kernels are the same, too: with other constexprs, or without a tensor, the compiler may fuse other products.
    """
    kernels = []

    def record(kernel, grid, tensors, *values, **constants):
        kernels.append((kernel.__name__, [t is None for t in tensors], constants))
        launch(kernel, grid, tensors, *values, **constants)

    launch = forward.launch
    monkeypatch.setattr(forward, "launch", record)
    lengths, options = (*MIXED, (4, 90)), {"return_lse": True, "window": (100, 0)}
    inputs = paged_inputs(torch.float16, device, lengths, **ONE, page=16, kind=kind, new=new, sinks=True, behind=2)
    with monkeypatch.context() as patched:  # a batch may need no merge, where a sequence alone has few programs
        patched.setattr(forward, "num_programs", lambda *_: 10**9)
        paged(**inputs, **options)
    out, lse = paged(**inputs, **options)
    of_batch = kernels.copy()
    start = 0
    for b, (rows, _) in enumerate(lengths):
        if rows:
            found = paged(**alone(inputs, b, lengths), **options, max_seqlen_q=rows)
            assert torch.equal(found[0], out[start : start + rows]), b
            assert torch.equal(found[1], lse[:, start : start + rows]), b
        start += rows
    assert all(kernel in of_batch for kernel in kernels)


# D 80: heads in two parts; H 40: blocks of more rows than products need; new keys of two chunks
GROUPED = pairwise(
    each("kind", *KINDS),
    [{"H": 2, "Hk": 1, "D": 16}, {"H": 4, "Hk": 4, "D": 80}, {"H": 40, "Hk": 1, "D": 16}],
    [{"new": True, "behind": 2}, {}],
    each("sinks", False, True),
    each("window", (-1, -1), (250, 0)),
    each("softcap", None, 3.0),
    [torch.float32, torch.float16],
)


@pytest.mark.parametrize("row", GROUPED, ids=lambda row: "-".join(str(v) for part in row[:-1] for v in part.values()))
def test_bits_do_not_depend_on_who_joins_chunks(row, device, poisoned, monkeypatch):
    """The merge joins the chunks of a group as a program does that takes the whole group."""
    *shape, window, softcap, dtype = row
    shape = {key: value for part in shape for key, value in part.items()}
    lengths, found, owns = ((3, 66), (1, 64), (1, 0), (2, 257), (1, 300), (4, 520), (1, 700)), [], []
    inputs = paged_inputs(dtype, device, lengths, **shape, page=16)

    def record(kernel, grid, tensors, sizes, *values, **constants):
        owns.append(dict(zip(kernel.arg_names[len(tensors) :], sizes, strict=False))["own"])
        launch(kernel, grid, tensors, sizes, *values, **constants)

    launch = forward.launch
    monkeypatch.setattr(forward, "launch", record)
    for programs in (0, 10**9):  # groups are enough, or never
        monkeypatch.setattr(forward, "num_programs", lambda *_, programs=programs: programs)
        found.append(paged(**inputs, **window, **softcap, max_seqlen_q=4, return_lse=True))
    assert {*owns} == {64, 256}
    for of_groups, of_chunks in zip(*found, strict=True):
        assert torch.equal(of_groups, of_chunks)


def test_groups_where_they_are_enough(device, monkeypatch):
    """A group for each program, if these are half as many as the multiprocessors or more; else a chunk."""
    grids, launch = [], forward.launch
    monkeypatch.setattr(forward, "launch", lambda *args, **how: grids.append(args[1]) or launch(*args, **how))
    inputs = paged_inputs(torch.float32, device, ((1, 512),) * 2, H=2, Hk=2, D=16, page=16)
    for multiprocessors, splits in ((16, 2), (17, 8)):
        monkeypatch.setattr(forward, "num_programs", lambda *_, n=multiprocessors: n)
        grids.clear()
        paged(**inputs)
        assert grids[0] == (4, splits)


def test_bits_of_decode_steps_do_not_depend_on_the_batch(device, poisoned):
    """Rows given one by one, as rows of sequences, in another order, and beside rows that fill up a graph."""
    lengths = tuple((1, n) for n in (5, 64, 130, 65, 0, 1))
    inputs = paged_inputs(torch.float32, device, lengths, **ONE, page=16, sinks=True)
    out, lse = paged(**inputs, return_lse=True)
    order = torch.randperm(len(lengths), device=device)
    permuted = {**inputs, **{n: inputs[n][order] for n in ("q", "pages", "lengths")}}
    assert torch.equal(paged(**permuted), out[order])
    cu = torch.arange(7, dtype=torch.int32, device=device)
    assert torch.equal(paged(**inputs, cu_seqlens_q=cu, max_seqlen_q=1), out)
    filled = {n: torch.cat((inputs[n], inputs[n][:2])) for n in ("q", "pages", "lengths")}
    more = torch.cat((cu, cu[-1:], cu[-1:]))
    padded, of_padded = paged(**{**inputs, **filled}, cu_seqlens_q=more, max_seqlen_q=1, return_lse=True)
    assert torch.equal(padded[:6], out)
    assert torch.equal(of_padded[:, :6], lse)
    assert padded[6:].eq(0).all()
    assert of_padded[:, 6:].eq(-torch.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_before_the_window_may_be_gone(kind, device, poisoned):
    """Their slots hold NaN, and their pages and slots are -1."""
    lengths, left = ((1, 200), (5, 150), (30, 100)), 40
    inputs = paged_inputs(torch.float32, device, lengths, **ONE, page=16, kind=kind)
    expected = paged(**inputs, window=(left, 0))
    start = 0
    for b, (rows, length) in enumerate(lengths):
        gone = length - rows - left
        if kind == "slots":
            inputs["pages"][start : start + gone] = -1
        elif kind == "static":
            for name in ("k_cache", "v_cache"):
                inputs[name][b, :gone] = torch.nan
        else:
            for j in range(gone):
                page = int(inputs["pages"][b, j // 16])
                inputs["k_cache"][page, j % 16] = inputs["v_cache"][page, j % 16] = torch.nan
        start += length
    if kind == "pages":
        for b, (rows, length) in enumerate(lengths):
            inputs["pages"][b, : (length - rows - left) // 16] = -1
    assert torch.equal(paged(**inputs, window=(left, 0)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_may_be_written_or_not(kind, device, poisoned):
    """The last sequence has several blocks of new keys."""
    inputs = paged_inputs(torch.float32, device, (*MIXED[:3], (1, 70), (40, 45)), **ONE, page=16, kind=kind, new=True)
    expected = paged(**inputs)
    assert expected.isfinite().all()
    names = "k", "v", "k_cache", "v_cache"
    where = {n: inputs[n] for n in ("pages", "lengths", "cu_seqlens_q") if n in inputs}
    ops.paged_write(*(inputs[n] for n in names), **where)
    assert torch.equal(paged(**inputs), expected)
    read = {n: t for n, t in inputs.items() if n not in ("k", "v")}
    torch.testing.assert_close(paged(**read), expected)


def test_any_layout_gives_the_same_bits(device, poisoned):
    """Caches of a layer that are views of all layers, heads before tokens, queries with heads before rows."""
    inputs = paged_inputs(torch.float16, device, ((1, 100), (9, 20)), **HEADS, page=16, new=True)
    expected = paged(**inputs)
    layers = {n: torch.stack([inputs[n]] * 3, 1)[:, 1] for n in ("k_cache", "v_cache")}
    heads = {n: t.transpose(-3, -2).contiguous().transpose(-3, -2) for n, t in inputs.items() if t.dim() > 2}
    wide = {n: torch.nn.functional.pad(t, (3, 5))[..., 3:-5] for n, t in inputs.items() if t.dim() > 2}
    longs = {n: t.long() for n, t in inputs.items() if not t.is_floating_point()}
    for views in (layers, heads, wide, longs):
        assert torch.equal(paged(**{**inputs, **views}), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend(kind, device, poisoned):
    for lengths, behind in (((), 3), ((), 0), (((0, 0), (0, 7)), 2), (((1, 0),) * 2, 0), (((40, 0),), 0)):
        inputs = paged_inputs(torch.float32, device, lengths, **ONE, page=16, kind=kind, sinks=True, behind=behind)
        out, lse = paged(**inputs, return_lse=True)
        T = sum(n for n, _ in lengths) + behind
        assert out.shape == (T, 2, 16)
        assert lse.shape == (2, T)
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_past_the_end_of_a_sequence_of_several_chunks(kind, device, poisoned):
    """Programs of a sequence share them, those of later chunks, too."""
    inputs = paged_inputs(torch.float32, device, ((1, 200),), **ONE, page=16, kind=kind, behind=9)
    out, lse = paged(**inputs, return_lse=True)
    assert out[1:].eq(0).all()
    assert lse[:, 1:].eq(-torch.inf).all()


def test_scores_of_minus_infinity_in_the_first_chunks(device, poisoned):
    inputs = paged_inputs(torch.float32, device, ((1, 200),), **ONE, page=200, kind="static")
    inputs["q"].abs_()
    inputs["k_cache"][:, :150] = -torch.inf
    torch.testing.assert_close(paged(**inputs), paged_ref(**inputs))


@pytest.mark.parametrize("P", [16, 32])
def test_more_than_2_31_elements(P, device):
    """Memory that is not touched costs nothing on a CPU."""
    Hk, D = 2, 16
    N = (1 << 31) // (P * Hk * D) + 40
    cache = torch.empty(N, P, Hk, D, dtype=torch.float16, device=device)
    few = paged_inputs(torch.float16, device, ((1, 40), (20, 45)), H=2, Hk=Hk, D=D, page=P)
    order = torch.randperm(len(few["k_cache"]), device=device)
    for scale, name in ((1, "k_cache"), (2, "v_cache")):
        few[name] = few["k_cache"] * scale
    cache[N - len(order) + order] = few["k_cache"]
    far = torch.where(few["pages"] < 0, -1, N - len(order) + order[few["pages"]]).int()
    found = paged(**{**few, "k_cache": cache, "v_cache": cache, "pages": far})
    torch.testing.assert_close(found * 2, paged(**few), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_serves_all_lengths(kind, device):
    """Lengths, pages and rows change in place between replays; nothing waits for the GPU."""
    shape = {"kind": kind, "page": 16, "H": 8, "Hk": 2, "D": 64, "new": True}
    first, second = ((1, 900), (40, 300), (1, 5), (6, 6)), ((7, 47), (1, 250), (39, 900), (1, 14))  # as many in all
    torch.cuda.set_sync_debug_mode("default")
    static, other = (paged_inputs(torch.bfloat16, device, lengths, **shape) for lengths in (first, second))
    call = lambda inputs: paged(**inputs, max_seqlen_q=48, return_lse=True)  # noqa: E731
    call(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(static)
        with torch.cuda.graph(graph):
            results = call(static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for inputs in (other, {name: t.clone() for name, t in static.items()}):
        for name, t in static.items():
            t.copy_(inputs[name])
        graph.replay()
        for found, expected in zip(results, call(static), strict=True):
            assert torch.equal(found, expected)
