"""Attention over packed sequences, and over parts of keys and queries that are merged by lse."""

import itertools

import pytest
import torch
from conftest import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from test_attention import DTYPES, HEADS, both_ways, finite, run_far_below_zero, windows
from torch._dynamo.testing import CompileCounterWithBackend

from liger_like import ops
from liger_like.ops.attention import (
    _attend_ref,
    _Attention,
    attention_bwd,
    attention_delta,
    attention_fwd,
    flash_attention_ref,
    flash_attention_varlen_ref,
)
from liger_like.ops.attention.masking import Masking
from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.runtime.autograd import apply
from liger_like.testing import assert_accurate, run
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs, with_longest

varlen, varlen_ref = map(with_longest, (ops.flash_attention_varlen, flash_attention_varlen_ref))


def check(make_inputs, options, draws=1):
    assert_accurate(finite(varlen), finite(varlen_ref), make_inputs, options, draws, k=2)


PACKINGS = {
    "one": ((66, 40),),
    "same": ((33, 33), (40, 40)),
    "more keys": ((5, 60), (0, 9), (12, 44)),
    "fewer keys": ((40, 20), (33, 0)),
    "decoding": ((1, 150), (0, 0), (2, 70)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_packings(name, dtype, device, poisoned):
    shape = {"lengths": PACKINGS[name], "H": 2, "Hk": 1, "D": 16, "sinks": True, "behind": 2}
    draws = 1 if dtype == torch.float32 else 3 if DEVICE == "cpu" else 32
    options = {"causal": True, "softcap": 4.0, "deterministic": dtype == torch.float16}
    check(lambda: attention_varlen_inputs(dtype, device, **shape), options, draws)


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.int32), (32, torch.int32), (40, torch.int64)], ids=str)
def test_any_number_of_sequences(count, dtype, device, poisoned):
    def make():
        lengths = [(i % 3, 2 + i % 2) for i in range(count)]
        inputs = attention_varlen_inputs(torch.float32, device, lengths, H=1, Hk=1, D=16, sinks=True, behind=1)
        return inputs | {n: t.to(dtype) for n, t in inputs.items() if n.startswith("cu")}

    check(make, {})


def test_reference_attends_in_each_sequence_as_if_it_were_alone():
    lengths = ((5, 9), (0, 2), (7, 3), (4, 0))
    inputs = attention_varlen_inputs(torch.float64, "cpu", lengths, H=2, Hk=1, D=8, sinks=True, behind=2)
    options = {"causal": True, "window": (4, -1), "softcap": 2.0, "scale": 0.5, "return_lse": True}
    with torch.no_grad():
        out, lse = varlen_ref(**inputs, **options)
        start_q = start_k = 0
        for n, m in lengths:
            rows, keys = slice(start_q, start_q := start_q + n), slice(start_k, start_k := start_k + m)
            batch = (t[None] for t in (inputs["q"][rows], inputs["k"][keys], inputs["v"][keys]))
            alone, alone_lse = flash_attention_ref(*batch, sinks=inputs["sinks"], **options)
            torch.testing.assert_close(out[rows], alone[0])
            torch.testing.assert_close(lse[:, rows], alone_lse[0])
    assert start_q == 16
    assert out[16:].eq(0).all()
    assert lse[:, 16:].eq(-torch.inf).all()


@both_ways
@pytest.mark.parametrize(("lengths", "H"), [(((20, 33), (9, 0), (5, 5)), 2), (((2, 9), (1, 0), (1, 5)), 3)], ids=str)
def test_rows_behind_the_last_sequence(lengths, H, deterministic, device, poisoned):
    shape = {"lengths": lengths, "H": H, "Hk": 1, "D": 48, "Dv": 16, "sinks": True, "behind": 40}
    inputs = attention_varlen_inputs(torch.float32, device, **shape)
    results = []
    for held in (0.0, torch.nan):
        for name in ("q", "k", "v"):
            inputs[name] = inputs[name].detach().clone()
            inputs[name][-40:] = held
            inputs[name].requires_grad_()
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), map(max, zip(*lengths, strict=True)), strict=True))
        options = {"causal": True, "return_lse": True, "deterministic": deterministic}
        results.append(run(ops.flash_attention_varlen, inputs, {**options, **longest}))
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name]), name
    for name in ("out0", "dq", "dk", "dv"):
        assert results[0][name][-40:].eq(0).all()
        assert results[0][name].isfinite().all()
    assert results[0]["out1"][:, -40:].eq(-torch.inf).all()
    without_keys = slice(lengths[0][0], lengths[0][0] + lengths[1][0])
    assert all(results[0][name][without_keys].eq(0).all() for name in ("out0", "dq"))


@both_ways
def test_padding_beside_scores_far_below_zero(deterministic, device, poisoned):
    inputs = attention_varlen_inputs(torch.float32, device, ((20, 33), (9, 21)), H=2, Hk=1, D=15)
    run_far_below_zero(varlen, inputs, deterministic)


@pytest.mark.parametrize("lengths", [((0, 0),), ((0, 3),), ((3, 0),)], ids=str)
def test_nothing_to_attend(lengths, device, poisoned):
    inputs = attention_varlen_inputs(torch.float32, device, lengths, H=2, Hk=1, D=16, sinks=True)
    got = run(varlen, inputs, {"return_lse": True})
    assert got.pop("out1").eq(-torch.inf).all()
    assert set(got) == {"out0", "dq", "dk", "dv", "dsinks"}
    assert all(t.eq(0).all() for t in got.values())


def test_decoding_splits_the_keys(launched, monkeypatch, device, poisoned):
    monkeypatch.setattr(portable_forward, "num_programs", lambda *_: 20)
    shape = {
        "lengths": ((1, 300 if device == "cpu" else 2000), (0, 20), (2, 70)),
        "H": 2,
        "Hk": 1,
        "D": 16,
        "sinks": True,
    }
    check(lambda: attention_varlen_inputs(torch.float32, device, **shape), {"causal": True}, draws=2)
    assert launched[1][0] == "_merge_kernel"


def test_longest_sequences_may_be_overstated(device, poisoned):
    inputs = attention_varlen_inputs(torch.float32, device, ((9, 20), (3, 30)), H=2, Hk=1, D=16)
    for longest in ((9, 30), (70, 80), (2**20, 2**20)):
        options = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        assert_accurate(varlen, varlen_ref, lambda: inputs, options, k=2)


class Parts(torch.autograd.Function):
    """Whole attention from that of every part of the queries over every part of the keys."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, bias, mask, cu_q, cu_k, cuts, softcap, left, right):
        ctx.tensors = q, k, v, sinks, bias, mask, cu_q, cu_k
        ctx.cuts, ctx.scalars = cuts, (q.shape[-1] ** -0.5, softcap, left, right)
        outs, lses = [], []
        for rows in Parts.slices(cuts[0]):
            parts = []
            for keys in Parts.slices(cuts[1]):
                tensors = q[:, rows], k[:, keys], v[:, keys], None
                parts.append(attention_fwd(*tensors, *Parts.masking(ctx, rows, keys))[:2])
            out, lse = (torch.stack(t) for t in zip(*parts, strict=True))
            most = lse if sinks is None else torch.cat((lse, sinks[:, None].expand_as(lse[:1])))
            whole = most.logsumexp(0).masked_fill(lse.amax(0) == -torch.inf, -torch.inf)
            weights = (lse - whole.masked_fill(whole == -torch.inf, 0)).exp()
            outs.append((out * weights.transpose(2, 3)[..., None]).sum(0).to(q.dtype))
            lses.append(whole)
        ctx.rows = list(zip(outs, lses, strict=True))
        return torch.cat(outs, 1), torch.cat(lses, 2)

    @staticmethod
    def slices(cuts):
        return [slice(a, b) for a, b in itertools.pairwise(cuts)]

    @staticmethod
    def masking(ctx, rows, keys):
        """Return the mask of a part: its share of the bias and of every document, and its positions."""
        q, k, _, _, bias, mask, cu_q, cu_k = ctx.tensors
        size = rows.stop - rows.start, keys.stop - keys.start
        if cu_q is None:
            offsets = torch.full(q.shape[:1], rows.start - keys.start + k.shape[1] - q.shape[1], device=q.device)
            bias = bias if bias is None else bias[:, :, rows, keys]
            mask = mask if mask is None else mask[:, keys].contiguous()
            return bias, mask, None, None, offsets.int(), None, *size, *ctx.scalars
        cu_q, cu_k = cu_q.clamp(rows.start, rows.stop), cu_k.clamp(keys.start, keys.stop)
        offsets = (cu_q - cu_k)[:-1].contiguous()
        return None, None, cu_q - rows.start, cu_k - keys.start, offsets, None, *size, *ctx.scalars

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, bias, *_ = ctx.tensors
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        dsinks, dbias = (None if t is None else torch.zeros_like(t) for t in (sinks, bias))
        for rows, (out, lse) in zip(Parts.slices(ctx.cuts[0]), ctx.rows, strict=True):
            of_rows, part = attention_delta(dout[:, rows], out, lse, None, dlse[:, :, rows], sinks)
            if sinks is not None:
                dsinks += part
            for keys in Parts.slices(ctx.cuts[1]):
                tensors = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], of_rows
                masking, needs = Parts.masking(ctx, rows, keys), [True, True, True, bias is not None]
                *grads, of_bias = attention_bwd(*tensors, *masking, rows.start % 2 == 0, needs)
                for total, at, grad in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
                    total[:, at] += grad
                if bias is not None:
                    dbias[:, :, rows, keys] = of_bias
        return dq, dk, dv, dsinks, dbias, *(None,) * 7


@pytest.mark.parametrize(
    ("cuts", "window"),
    [
        (((0, 40, 70), (0, 40, 70)), (-1, -1)),
        (((0, 40, 70), (0, 40, 70)), (30, 0)),
        (((0, 70), (0, 9, 41, 70)), (-1, 0)),
        (((0, 33, 34, 70), (0, 70)), (5, 20)),
    ],
    ids=str,
)
def test_parts_of_documents_merge(cuts, window, device, poisoned):
    lengths = [(n, n) for n in (25, 0, 33, 1, 9)]  # `behind` adds two rows after the last sequence

    def parts(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks):
        tensors = *(t[None] for t in (q, k, v)), sinks, None, None, cu_seqlens_q, cu_seqlens_k
        out, lse = Parts.apply(*tensors, cuts, None, *window)
        return out[0], lse[0]

    def whole(**inputs):
        return varlen_ref(**inputs, window=window, return_lse=True)

    make = lambda: attention_varlen_inputs(torch.float32, device, lengths, H=2, Hk=1, D=16, sinks=True, behind=2)  # noqa: E731
    fns = (finite(lambda return_lse, fn=fn, **inputs: fn(**inputs)) for fn in (parts, whole))
    assert_accurate(*fns, make, {}, k=2)


def test_parts_of_batches_merge(device, poisoned):
    S = 40

    def parts(q, k, v, bias, key_padding_mask):
        cuts = (0, 33, S), (0, 9, 41, 70)
        return Parts.apply(q, k, v, None, bias, key_padding_mask, None, None, cuts, 4.0, 30, 0)

    def whole(**inputs):
        return flash_attention_ref(**inputs, causal=True, window=(30, -1), softcap=4.0, return_lse=True)

    shape = {"B": 2, "S": S, "Sk": 70, "H": 2, "Hk": 1, "D": 16, "bias": "bhsk", "padded": True}
    make = lambda: attention_inputs(torch.float32, device, **shape)  # noqa: E731
    fns = (finite(lambda return_lse, fn=fn, **inputs: fn(**inputs)) for fn in (parts, whole))
    assert_accurate(*fns, make, {}, k=2)


def test_each_batch_has_its_own_position(device, poisoned):
    """Windows that end everywhere within a block, and keys that stand wholly behind or before the queries."""
    S, Sk, left, right = 18, 34, 9, 2
    offsets = torch.tensor([*range(16), -50, 40, 90], dtype=torch.int32, device=device)
    queries, keys = torch.arange(S, device=device)[:, None], torch.arange(Sk, device=device)
    distance = keys - queries - offsets[:, None, None, None]

    def kernel(q, k, v, bias):
        masking = Masking(bias, None, None, None, offsets, None, S, Sk, 0.25, None, left, right)
        return apply(_Attention, q, k, v, None, *masking, True)

    def whole(q, k, v, bias):
        return _attend_ref(q, k, v, (distance >= -left) & (distance <= right), 0.25, None, None, bias)

    make = lambda: attention_inputs(torch.float32, device, B=19, S=S, Sk=Sk, H=1, Hk=1, D=16, bias="bsk")  # noqa: E731
    fns = (finite(lambda return_lse, fn=fn, **inputs: fn(**inputs)) for fn in (kernel, whole))
    assert_accurate(*fns, make, {}, k=2)


lengths = st.integers(0, 5) | st.integers(0, 70)


@given(
    lengths=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3), same=st.booleans(),
    behind=st.integers(0, 3), heads=st.sampled_from(HEADS), causal=st.booleans(),
    window=st.tuples(windows, windows), deterministic=st.booleans(),
)  # fmt: skip
def test_lengths(lengths, same, heads, causal, window, deterministic, **shape):
    torch.manual_seed(0)
    lengths = [(q, q) if same else (q, k) for q, k in lengths]
    # Sinks are needed: without them, rows that see a single key have a dscores of rounding error alone.
    shape |= {"lengths": lengths, "sinks": True, **heads}
    options = {"causal": causal, "window": window, "deterministic": deterministic}
    check(lambda: attention_varlen_inputs(torch.float32, DEVICE, **shape), options, draws=2 if DEVICE == "cpu" else 8)


def test_compile_over_lengths(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    compiled = torch.compile(varlen, fullgraph=True, backend=counter)
    for n in range(20, 24):
        inputs = attention_varlen_inputs(torch.float32, device, ((n, n), (3, 3)), H=2, Hk=1, D=16)
        options = {"causal": True, "deterministic": True}
        for a, b in zip(*(run(f, inputs, options).values() for f in (compiled, varlen)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


Q, K = torch.randn(9, 4, 8), torch.randn(12, 2, 8)
CU_Q, CU_K = torch.tensor([0, 5, 9]), torch.tensor([0, 12, 12])


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, "q must have 3 dimensions", {"q": Q[None], "k": K[None], "v": K[None]}),
        (ValueError, "k must have 3 dimensions", {"k": K[None]}),
        (ValueError, "k must have the batch and the head width", {"k": K[..., :4]}),
        (ValueError, "v must have the shape of k", {"v": K[:5]}),
        (TypeError, "cu_seqlens_q must be int32 or int64", {"cu_seqlens_q": CU_Q.float()}),
        (TypeError, "cu_seqlens_k must be int32 or int64 on cpu", {"cu_seqlens_k": CU_K.to("meta")}),
        (ValueError, "cu_seqlens_k must have the shape", {"cu_seqlens_k": CU_K[:2]}),
        (ValueError, "cu_seqlens_q must have the shape", {"cu_seqlens_q": CU_Q[None], "cu_seqlens_k": CU_K[None]}),
        (TypeError, "cu_seqlens_q must be a tensor, got list", {"cu_seqlens_q": [0, 5, 9]}),
        (TypeError, "max_seqlen_q must be an integer, got float", {"max_seqlen_q": 5.0}),
        (TypeError, "max_seqlen_q must be an integer, got NoneType", {"max_seqlen_q": None}),
        (TypeError, "deterministic must be True or False or None", {"deterministic": CU_K}),
        (TypeError, "max_seqlen_k must be an integer, got Tensor", {"max_seqlen_k": CU_K[1]}),
        (ValueError, "max_seqlen_k must be at least 0, got -1", {"max_seqlen_k": -1}),
        (TypeError, "causal must be True or False", {"causal": "x"}),
        (ValueError, "window must be two integers", {"window": (-2, 0)}),
        (ValueError, r"sinks must have shape \[4\]", {"sinks": torch.ones(2)}),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, changed):
    arguments = {
        "q": Q,
        "k": K,
        "v": K,
        "cu_seqlens_q": CU_Q,
        "cu_seqlens_k": CU_K,
        "max_seqlen_q": 5,
        "max_seqlen_k": 12,
    }
    with pytest.raises(error, match=message):
        ops.flash_attention_varlen(**{**arguments, **changed})
