"""Attention within spans: keys from one to another for every query, as packed documents and chunks have."""

import pytest
import torch
from conftest import DEVICE
from functorch.compile import min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from test_attention import DTYPES, both_ways, check, windows
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from liger_like import ops
from liger_like.ops.attention import flash_attention_ref
from liger_like.testing import run
from liger_like.testing.inputs import attention_inputs

MORE = {
    "plain": ({"S": 70, "Sk": 70}, {}),
    "all masks": ({"S": 40, "Sk": 70, "padded": True}, {"causal": True, "window": (50, -1)}),
    "all scores": ({"S": 40, "Sk": 33, "bias": "hsk", "sinks": True}, {"softcap": 4.0, "window": (-1, 9)}),
    "batches": ({"B": 2, "S": 9, "Sk": 40, "H": 4, "Hk": 2, "D": 96, "Dv": 16}, {"causal": True}),
    "few queries": ({"S": 2, "Sk": 200}, {}),
}


def documents(*lengths, device=DEVICE):
    """The spans of one row of documents."""
    ends = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths))
    starts = ends - torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    return torch.stack((starts, ends))[:, None].int().to(device)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MORE)
def test_spans_beside_other_options(name, dtype, deterministic, device, poisoned):
    more, options = MORE[name]
    shape = {"B": 1, "H": 2, "Hk": 1, "D": 16, "spans": True} | more
    draws = 1 if dtype == torch.float32 else 3 if DEVICE == "cpu" else 32
    check(lambda: attention_inputs(dtype, device, **shape), options | {"deterministic": deterministic}, draws=draws)


def test_reference_sees_the_keys_of_a_span():
    inputs = attention_inputs(torch.float64, "cpu", B=2, S=5, Sk=9, H=2, Hk=1, D=8, spans=True)
    q, k, v, spans = (t.detach() for t in inputs.values())
    out, lse = ops.flash_attention(q, k, v, spans=spans, return_lse=True)
    for b in range(2):
        for i, (start, end) in enumerate(spans[:, b].T.tolist()):
            alone = q[b : b + 1, i : i + 1], k[b : b + 1, start:end], v[b : b + 1, start:end]
            expected, expected_lse = ops.flash_attention(*alone, return_lse=True)
            torch.testing.assert_close(out[b, i], expected[0, 0])
            torch.testing.assert_close(lse[b, :, i], expected_lse[0, :, 0])


@both_ways
def test_documents_are_those_of_varlen(deterministic, device, poisoned):
    lengths = 25, 1, 60, 9
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    options = {"causal": True, "window": (30, -1), "return_lse": True, "deterministic": deterministic}

    def packed(q, k, v, sinks):
        rows = (t[0] for t in (q, k, v))
        out, lse = ops.flash_attention_varlen(*rows, cu_seqlens, cu_seqlens, 60, 60, sinks=sinks, **options)
        return out[None], lse[None]

    inputs = attention_inputs(torch.float32, device, B=1, S=95, Sk=95, H=1, Hk=1, D=16, sinks=True)
    expected = run(packed, inputs, {})
    for name, t in run(ops.flash_attention, inputs | {"spans": documents(*lengths)}, options).items():
        torch.testing.assert_close(t, expected[name], rtol=1e-5, atol=1e-5)


@both_ways
def test_what_is_outside_is_not_read(deterministic, device, poisoned):
    """Rows of another document that hold NaN, in blocks of their own, do not matter: forward and backward skip them."""
    n = 64 if device == "cpu" else 128  # the length of the longest block
    spans = documents(n, 2 * n, n)
    inputs = attention_inputs(torch.float32, device, B=1, S=4 * n, Sk=4 * n, H=1, Hk=1, D=16)
    results = []
    for held in (0.0, torch.nan):
        for t in inputs.values():
            t.data[:, n : 3 * n] = held
        results.append(run(ops.flash_attention, inputs | {"spans": spans}, {"deterministic": deterministic}))
    first, second = results
    for name, t in first.items():
        for rows in (slice(n), slice(3 * n, None)):
            assert torch.equal(t[:, rows], second[name][:, rows]), name
    assert second["dv"][:, n : 3 * n].isnan().all()


@both_ways
def test_empty_spans(deterministic, device, poisoned):
    """Spans anywhere, also with the end before the start, after the last key and before the first."""
    inputs = attention_inputs(torch.float32, device, B=3, S=9, Sk=40, H=1, Hk=1, D=16, sinks=True, bias="bhsk")
    inputs["spans"] = torch.tensor([[[0] * 9, [7] * 9, [-9] * 5 + [30] * 4], [[0] * 9, [3] * 9, [-4] * 5 + [50] * 4]])
    inputs["spans"] = inputs["spans"].int().to(device)
    got = run(ops.flash_attention, inputs, {"return_lse": True, "deterministic": deterministic})
    seen = torch.zeros(3, 9, 40, dtype=torch.bool, device=device)
    seen[2, 5:, 30:] = True
    assert torch.equal(got["out1"][:, 0] != -torch.inf, seen.any(2))
    assert torch.equal(got["dbias"][:, 0] != 0, seen)
    for name, rows in (("out0", seen.any(2)), ("dq", seen.any(2)), ("dk", seen.any(1)), ("dv", seen.any(1))):
        assert torch.equal(got[name][:, :, 0].ne(0).all(-1), rows), name
        assert torch.equal(got[name][:, :, 0].ne(0).any(-1), rows), name
    check(lambda: inputs, {"deterministic": deterministic}, draws=8)  # dsinks has one element, accurate or not by luck


@both_ways
def test_spans_of_a_part_of_the_keys(deterministic, device, poisoned):
    """Return the spans in rows of a part; they may start before it and end after it."""

    def make():
        inputs = attention_inputs(torch.float32, device, B=2, S=33, Sk=70, H=1, Hk=1, D=16, spans=True)
        part = {n: inputs[n].detach()[:, 20:50].requires_grad_() for n in ("k", "v")}
        return inputs | part | {"spans": inputs["spans"] - 20}

    check(make, {"deterministic": deterministic}, draws=2)


def test_few_queries_split_their_spans(launched, device, poisoned):
    Sk = 300 if device == "cpu" else 5000

    def make():
        inputs = attention_inputs(torch.float32, device, B=2, S=2, Sk=Sk, H=2, Hk=1, D=16, sinks=True)
        spans = [[[Sk // 3, Sk // 2], [0, 0]], [[Sk - 9, Sk - 9], [9, 9]]]
        return inputs | {"spans": torch.tensor(spans, dtype=torch.int32, device=device)}

    check(make, {})
    assert launched[0][1][1] > 1  # the number of parts
    assert launched[1][0] == "_merge_kernel"


@given(
    B=st.integers(0, 2), S=st.integers(0, 70), Sk=st.integers(0, 70), group=st.integers(1, 2),
    sinks=st.booleans(), padded=st.booleans(), causal=st.booleans(), window=st.tuples(windows, windows),
    deterministic=st.booleans(), drawn=st.lists(st.tuples(st.integers(-9, 80), st.integers(-9, 80)), min_size=1),
)  # fmt: skip
def test_any_spans(group, causal, window, deterministic, drawn, **shape):
    """A few drawn ones, each for as many queries as any other."""
    torch.manual_seed(0)
    shape["sinks"] |= shape["Sk"] == 1  # one key without a sink: dscores is rounding error
    index = torch.arange(shape["S"]) * len(drawn) // max(1, shape["S"])
    spans = torch.tensor(drawn, dtype=torch.int32).T.sort(-1).values[:, index].to(DEVICE)

    def make():
        inputs = attention_inputs(torch.float32, DEVICE, H=group, Hk=1, D=16, **shape)
        return inputs | {"spans": spans[:, None].repeat(1, shape["B"], 1)}

    options = {"causal": causal, "window": window, "deterministic": deterministic}
    check(make, options, draws=2 if DEVICE == "cpu" else 8)


def test_any_layout_of_spans(device, poisoned):
    inputs = attention_inputs(torch.float32, device, B=2, S=9, Sk=20, H=2, Hk=1, D=16)
    spans = attention_inputs(torch.float32, device, B=1, S=9, Sk=20, H=1, Hk=1, D=16, spans=True)["spans"]
    expanded = run(ops.flash_attention, inputs | {"spans": spans.expand(2, 2, 9)}, {})
    for name, t in run(ops.flash_attention, inputs | {"spans": spans.repeat(1, 2, 1)}, {}).items():
        assert torch.equal(t, expanded[name])


def test_compile_over_lengths(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    compiled = torch.compile(ops.flash_attention, fullgraph=True, backend=counter)
    for S in range(20, 24):
        inputs = attention_inputs(torch.float32, device, B=1, S=S, Sk=S, H=2, Hk=1, D=16, spans=True)
        results = (run(f, inputs, {"deterministic": True}).values() for f in (compiled, ops.flash_attention))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


def test_compiled_layers_share_the_spans_of_keys(device):
    calls = []

    def keep(graph, inputs):
        calls.append([node.target for node in graph.graph.nodes])
        return graph

    def layers(q, k, v, spans):
        for _ in range(3):
            q = ops.flash_attention(q, k, v, spans=spans, causal=True)
        return q

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    inputs = attention_inputs(torch.float32, device, B=1, S=20, Sk=20, H=2, Hk=1, D=16, spans=True)
    got, expected = (run(f, inputs, {}) for f in (torch.compile(layers, backend=backend, fullgraph=True), layers))
    for name, t in got.items():
        torch.testing.assert_close(t, expected[name], rtol=1e-6, atol=1e-6)
    _, backward = calls
    assert backward.count(torch.ops.aten.searchsorted.Tensor) == 1


@pytest.mark.parametrize("fn", [ops.flash_attention, flash_attention_ref])
def test_falling_spans_read_nothing_outside(fn, device, poisoned):
    """They are wrong, and so is what comes of them, but it is made of what is there."""
    inputs = attention_inputs(torch.float32, device, B=1, S=40, Sk=70, H=2, Hk=1, D=16)
    spans = torch.randint(-(2**31), 2**31 - 1, (2, 1, 40), device=device).int()
    assert all(t.isfinite().all() for t in run(fn, inputs | {"spans": spans}, {}).values())


Q = torch.randn(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("error", "message", "spans"),
    [
        (ValueError, r"spans must have shape \[2, 2, 5\], got \[2, 1, 5\]", torch.zeros(2, 1, 5).int()),
        (ValueError, "spans must have shape", torch.zeros(2, 5).int()),
        (TypeError, "spans must be int32 on cpu, got torch.int64", torch.zeros(2, 2, 5).long()),
        (TypeError, "spans must be int32 on cpu, got torch.int32 on meta", torch.zeros(2, 2, 5).int().to("meta")),
    ],
)
def test_error_names_the_argument(error, message, spans):
    with pytest.raises(error, match=message):
        ops.flash_attention(Q, Q, Q, spans=spans)
