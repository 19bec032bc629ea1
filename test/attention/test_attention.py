"""Attention over batches: every combination of two options, edges of masks, splits, what is launched, bad input."""

import itertools
import random

import pytest
import torch
from conftest import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from liger_like import ops
from liger_like.ops.attention import attention_delta, attention_fwd, flash_attention_ref
from liger_like.testing import assert_accurate, run
from liger_like.testing.inputs import attention_inputs

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
EVERYTHING = {"B": 1, "S": 9, "Sk": 20, "H": 2, "Hk": 1, "D": 16, "sinks": True, "bias": "hsk", "padded": True}
both_ways = pytest.mark.parametrize("deterministic", [False, True])


def each(name, *values):
    return [{name: value} for value in values]


SHAPES = [
    each("sinks", False, True),
    each("padded", False, True),
    each("bias", None, "bhsk", "hk", "sk"),
    [{"H": 2, "Hk": 2}, {"H": 4, "Hk": 2}, {"H": 3, "Hk": 1}],
    [*each("D", 16, 32, 64, 80, 96, 112, 128, 192, 256), {"D": 192, "Dv": 128}, {"D": 16, "Dv": 96}],
    [{"S": S, "Sk": Sk} for S, Sk in ((33, 33), (5, 37), (37, 20), (2, 70))],
]
OPTIONS = [
    [{}, {"causal": True}, {"window": (12, 3)}, {"causal": True, "window": (11, 7)}],
    each("softcap", None, 4.0),
    each("scale", None, 0.3),
    each("deterministic", False, True),
]
LSE = ["unused", "returned", "differentiated"]


def pairwise(*axes):
    """Rows, of one value out of each axis, in which every two values of two axes meet."""
    draw = random.Random(0)
    cells = [[(axis, i) for i in range(len(values))] for axis, values in enumerate(axes)]
    unmet = {pair for a, b in itertools.combinations(cells, 2) for pair in itertools.product(a, b)}
    rows = []
    while unmet:
        row = dict(min(unmet))
        for axis in draw.sample(range(len(axes)), len(axes)):
            if axis not in row:
                new = [sum(tuple(sorted((cell, other))) in unmet for other in row.items()) for cell in cells[axis]]
                row[axis] = draw.choice([i for i, n in enumerate(new) if n == max(new)])
        unmet -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append([values[row[axis]] for axis, values in enumerate(axes)])
    return rows


ROWS = pairwise(*SHAPES, *OPTIONS, LSE, DTYPES)


def finite(fn, lse="differentiated"):
    """``fn`` with an lse of 0 where it is -inf, so that errors have a norm."""

    def call(**kwargs):
        if lse == "unused":
            return fn(**kwargs)
        out, rows = fn(**kwargs, return_lse=True)
        rows = rows.where(rows != -torch.inf, 0)
        return out, rows if lse == "differentiated" else rows.detach()

    return call


def check(make_inputs, options, lse="differentiated", draws=1):
    fns = (finite(fn, lse) for fn in (ops.flash_attention, flash_attention_ref))
    assert_accurate(*fns, make_inputs, options, draws, k=2)


def test_reference_is_attention():
    """Against torch's own, under a mask that is written down pair by pair."""
    S, Sk = 5, 9
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64) for n, h in ((S, 4), (Sk, 2), (Sk, 2)))
    bias, visible = torch.randn(S, Sk, dtype=torch.float64), torch.rand(2, Sk) < 0.8
    visible[:, 4:] = True
    for causal, (left, right) in (
        (False, (-1, -1)),
        (True, (-1, -1)),
        (True, (3, 7)),
        (False, (2, 1)),
        (False, (0, -1)),
    ):
        seen = torch.empty(2, 1, S, Sk, dtype=torch.bool)
        for b, i, j in itertools.product(range(2), range(S), range(Sk)):
            ahead = j - (i + Sk - S)
            in_window = (left < 0 or -ahead <= left) and (right < 0 or ahead <= right) and not (causal and ahead > 0)
            seen[b, 0, i, j] = in_window and visible[b, j]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), bias.masked_fill(~seen, -torch.inf), scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        options = {"causal": causal, "window": (left, right), "scale": 0.3}
        got = ops.flash_attention(q, k, v, bias=bias, key_padding_mask=visible, **options)
        torch.testing.assert_close(got, expected)
    s = 2 * torch.tanh(q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).mT / 8**0.5 / 2)
    sinks = torch.randn(4, dtype=torch.float64)
    p = torch.cat((s, sinks[:, None, None].expand(2, 4, S, 1)), -1).softmax(-1)[..., :-1]
    out, lse = ops.flash_attention(q, k, v, softcap=2.0, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out.transpose(1, 2), p @ v.transpose(1, 2).repeat_interleave(2, 1))
    torch.testing.assert_close(lse, (s.exp().sum(-1) + sinks.exp()[:, None]).log())


def test_loss_of_lse_alone(device, poisoned):
    def make():
        inputs = attention_inputs(torch.float32, device, **EVERYTHING)
        return inputs | {"v": inputs["v"].detach()}

    only = lambda fn: lambda **kwargs: fn(**kwargs, return_lse=True)[1]  # noqa: E731
    for deterministic in (False, True):
        options = {"deterministic": deterministic}
        assert_accurate(only(ops.flash_attention), only(flash_attention_ref), make, options, draws=2, k=2)


@both_ways
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys(sinks, deterministic, device, poisoned):
    def grads_of(dead, make, **options):
        inputs = make()
        out, lse = ops.flash_attention(**inputs, **options, deterministic=deterministic, return_lse=True)
        assert out[dead].eq(0).all()
        assert lse.transpose(1, 2)[dead].eq(-torch.inf).all()
        leaves = {n: t for n, t in inputs.items() if t.requires_grad}
        upstream = torch.randn_like(out), torch.randn_like(lse)
        grads = dict(zip(leaves, torch.autograd.grad((out, lse), list(leaves.values()), upstream), strict=True))
        assert grads["q"][dead].eq(0).all()
        assert all(grad.isfinite().all() for grad in grads.values())
        live = ~dead
        assert out[live].ne(0).all()
        assert lse.transpose(1, 2)[live].isfinite().all()
        return grads

    shape = {"B": 2, "H": 2, "Hk": 1, "D": 16, "sinks": sinks}
    make = lambda S, Sk, **more: attention_inputs(torch.float32, device, S=S, Sk=Sk, **shape, **more)  # noqa: E731
    dead = torch.zeros(2, 40, dtype=torch.bool, device=device)
    dead[:, :35] = True
    grads_of(dead, lambda: make(40, 5), causal=True)
    grads_of(dead, lambda: make(40, 5), window=(3, 0))

    def hidden():
        inputs = make(40, 20, padded=True, bias="bhsk")
        inputs["key_padding_mask"][1] = False
        return inputs

    dead = torch.zeros_like(dead)
    dead[1] = True
    grads = grads_of(dead, hidden)
    assert all(grads[n][1].eq(0).all() for n in ("k", "v", "bias"))

    def forbidden():
        inputs = make(40, 20, bias="sk")
        with torch.no_grad():
            inputs["bias"][..., 7, :] = -torch.inf
            inputs["bias"][..., 8, 3:] = -torch.inf
        return inputs

    dead = torch.zeros_like(dead)
    dead[:, 7] = True
    assert grads_of(dead, forbidden)["bias"][..., 7, :].eq(0).all()


@both_ways
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("B", [0, 1])
def test_nothing_to_attend(B, lengths, deterministic, device, poisoned):
    S, Sk = lengths
    shape = {"B": B, "S": S, "Sk": Sk, "H": 2, "Hk": 1, "D": 16, "sinks": True, "padded": True}
    inputs = attention_inputs(torch.float32, device, **shape)
    inputs["key_padding_mask"].fill_(False)
    got = run(ops.flash_attention, inputs, {"return_lse": True, "deterministic": deterministic})
    assert got.pop("out1").eq(-torch.inf).all()
    assert {n: t.shape for n, t in got.items()} == {
        "out0": (B, S, 2, 16), **{f"d{n}": t.shape for n, t in inputs.items() if t.requires_grad}
    }  # fmt: skip
    assert all(t.eq(0).all() for t in got.values())


@both_ways
@pytest.mark.parametrize("S", [2, 40])
def test_hidden_keys_may_hold_anything(S, deterministic, device, poisoned):
    inputs = attention_inputs(
        torch.float32, device, B=1, S=S, Sk=140, H=2, Hk=1, D=48, Dv=16, sinks=True, bias="hk", padded=True
    )
    hidden = ~inputs["key_padding_mask"]
    results = []
    for held in (0.0, torch.nan):
        for name in ("k", "v"):
            inputs[name] = inputs[name].detach().masked_fill(hidden[..., None, None], held).requires_grad_()
        options = {"window": (100, 60), "return_lse": True, "deterministic": deterministic}
        results.append(run(ops.flash_attention, inputs, options))
    for name, t in results[0].items():
        assert t.isfinite().all(), name
        assert torch.equal(t, results[1][name]), name
    assert all(results[0][n][hidden].eq(0).all() for n in ("dk", "dv"))


def test_any_layout_gives_the_same_bits(device, poisoned):
    inputs = attention_inputs(torch.float16, device, **{**EVERYTHING, "bias": "hk"})
    options = {"causal": True, "return_lse": True}

    def grads(inputs, change):
        leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in inputs.items()}
        out, lse = ops.flash_attention(**{n: change(n, t) for n, t in leaves.items()}, **options)
        generator = torch.Generator().manual_seed(0)
        dout = torch.randn(out.shape, generator=generator).to(out)
        dlse = torch.randn((*lse.shape[:2], 1), generator=generator).to(lse).expand(lse.shape)
        if change is heads_first:
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            dlse = dlse.contiguous()
        grads = torch.autograd.grad((out, lse), [t for t in leaves.values() if t.requires_grad], (dout, dlse))
        return out, lse, *grads

    def heads_first(name, t):
        if name in ("q", "k", "v"):
            wide = torch.nn.functional.pad(t.transpose(1, 2), (3, 5)).contiguous()
            return wide[..., 3:-5].transpose(1, 2)
        return t.expand(1, 2, 9, 20) if name == "bias" else t.repeat_interleave(2, -1)[..., ::2]

    same = grads(inputs, lambda name, t: t.expand(1, 2, 9, 20).contiguous() if name == "bias" else t)
    for a, b in zip(same, grads(inputs, heads_first), strict=True):
        assert torch.equal(a, b)
    expanded = torch.ones((), device=device, dtype=torch.float16).expand(1, 9, 2, 16)
    results = []
    for dout in (expanded, expanded.contiguous()):
        out = ops.flash_attention(**inputs)
        results.append(torch.autograd.grad(out, inputs["q"], dout)[0])
    assert torch.equal(*results)


def run_far_below_zero(fn, inputs, deterministic):
    """Scores of about -100, beside which a 0 of padding that counted as exp(100) would be infinite."""

    def call(q, k, **kwargs):
        q, k = (torch.nn.functional.pad(t, (0, 1), value=value) for t, value in ((q, 1.0), (k, -400.0)))
        return fn(q=q, k=k, **kwargs)

    for name, t in run(call, inputs, {"deterministic": deterministic, "return_lse": True}).items():
        assert t.isfinite().all(), name


@both_ways
@pytest.mark.parametrize("padded", [False, True])
def test_padding_beside_scores_far_below_zero(padded, deterministic, device, poisoned):
    inputs = attention_inputs(torch.float32, device, B=1, S=35, Sk=37, H=2, Hk=1, D=15, padded=padded)
    run_far_below_zero(ops.flash_attention, inputs, deterministic)


def test_softcap_far_above_the_scores(device):
    """Near 0, where tanh is nearly linear, its relative error counts."""
    make = lambda: attention_inputs(torch.float32, device, B=1, S=9, Sk=20, H=2, Hk=1, D=16)  # noqa: E731
    check(make, {"softcap": 300.0}, draws=2)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_sinks_and_bias_of_another_dtype(dtype, device):
    def make():
        inputs = attention_inputs(dtype, device, **{**EVERYTHING, "Sk": 40})
        return inputs | {n: inputs[n].detach().float().requires_grad_() for n in ("sinks", "bias")}

    check(make, {}, draws=4)


def test_gradient_of_a_broadcast_bias_is_a_sum(device, poisoned):
    """A bias that is the same for all keys of a row has a gradient that cancels: there is no norm to compare with."""
    shape = {"B": 2, "S": 33, "Sk": 40, "H": 2, "Hk": 1, "D": 16, "padded": True}
    inputs = {n: t.detach() for n, t in attention_inputs(torch.float32, device, **shape).items()}

    def run_with(bias):
        options = {"window": (20, 9), "softcap": 4.0}
        return run(ops.flash_attention, {**inputs, "bias": bias.requires_grad_()}, options).values()

    for axes in ("", "b", "h", "s", "k", "bh", "sk", "bhsk"):
        sizes = [n if axis in axes else 1 for axis, n in zip("bhsk", (2, 2, 33, 40), strict=True)]
        bias = torch.randn(sizes, device=device)
        same_out, each = run_with(bias.expand(2, 2, 33, 40).contiguous())
        out, dbias = run_with(bias)
        assert torch.equal(out, same_out)
        dims = [i for i, axis in enumerate("bhsk") if axis not in axes]
        exact, unit = (t.double().sum(dims, keepdim=True) if dims else t.double() for t in (each, each.abs()))
        assert ((dbias - exact).abs() <= 1e-6 * unit).all()


@pytest.mark.parametrize("axes", ["k", "sk", "hsk"])
def test_bias_of_fewer_dimensions(axes, device):
    def fewer(fn):
        return lambda bias, **kwargs: fn(bias=bias[(0,) * (4 - len(axes))], **kwargs)

    shape = {**EVERYTHING, "B": 2, "Dv": 8, "bias": axes}
    make = lambda: attention_inputs(torch.float32, device, **shape)  # noqa: E731
    assert_accurate(*(fewer(f) for f in (ops.flash_attention, flash_attention_ref)), make, {}, draws=2, k=2)


@pytest.mark.parametrize("spans", [False, True])
def test_every_set_of_frozen_inputs_gives_the_same_bits(spans, device, poisoned):
    inputs = attention_inputs(torch.float32, device, **EVERYTHING, spans=spans)
    names = [n for n, t in inputs.items() if t.requires_grad]
    full = run(ops.flash_attention, inputs, {})
    for trained in itertools.chain.from_iterable(itertools.combinations(names, r) for r in range(1, len(names))):
        got = run(ops.flash_attention, {n: t.detach().requires_grad_(n in trained) for n, t in inputs.items()}, {})
        assert set(got) == {"out0", *(f"d{n}" for n in trained)}
        for name, t in got.items():
            assert torch.equal(t, full[name]), (trained, name)


@both_ways
def test_gradients_that_nobody_needs_have_the_shape_that_is_traced(deterministic, device):
    inputs = attention_inputs(torch.float32, device, B=1, S=9, Sk=20, H=2, Hk=1, D=16, Dv=8, bias="hsk")
    q, k, v, bias = (t.detach() for t in inputs.values())
    masking = (bias, *[None] * 5, 9, 20, 0.25, None, -1, -1)
    out, lse, sums = attention_fwd(q, k, v, None, *masking)
    dout = torch.randn_like(out)
    rows, _ = attention_delta(dout, out, lse, sums, None, None)
    for needs in itertools.product([False, True], repeat=4):
        args = (dout, q, k, v, rows, None, *masking, deterministic, list(needs))
        op = torch.ops.liger_like.attention_bwd.default
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_repeats_bit_for_bit(device):
    inputs = attention_inputs(torch.float16, device, **EVERYTHING)
    repeats = 200 if device == "cuda" else 2  # the interpreter runs programs in a fixed order
    first, *others = (run(ops.flash_attention, inputs, {"deterministic": True}) for _ in range(repeats))
    assert all(torch.equal(t, other[name]) for other in others for name, t in first.items())


@pytest.mark.parametrize("widths", [(264, 16), (16, 264)], ids=str)
def test_wider_heads_run_the_reference(widths, launched, device):
    D, Dv = widths
    inputs = attention_inputs(torch.float32, device, B=1, S=3, Sk=5, H=2, Hk=1, D=D, Dv=Dv)
    got, expected = (run(fn, inputs, {"causal": True}) for fn in (ops.flash_attention, flash_attention_ref))
    assert all(torch.equal(t, expected[name]) for name, t in got.items())
    assert not launched


def merged(parts):
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(map(str, (*merged(row[:-2]).values(), *row[-2:]))) for row in ROWS])
def test_pairs_of_options(row, device, poisoned):
    *parts, lse, dtype = row
    shape, options = merged(parts[: len(SHAPES)]), merged(parts[len(SHAPES) :])
    # The gradient of the sinks has few elements, so the rounding error of one draw is luck: judge many draws at once.
    draws = 2 + 2 * shape["sinks"] if dtype == torch.float32 or DEVICE == "cpu" else 128
    check(lambda: attention_inputs(dtype, device, B=1, **shape), options, lse, draws)


def test_pairwise_holds_every_pair():
    axes = *SHAPES, *OPTIONS, LSE, DTYPES
    for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2):
        assert all([x, y] in [[row[i], row[j]] for row in ROWS] for x in a for y in b)


HEADS = [{"H": 2, "Hk": 1, "D": 13, "Dv": 40}, {"H": 2, "Hk": 2, "D": 24, "Dv": 9}]  # few: each compiles kernels
windows = st.one_of(st.just(-1), st.integers(1, 80))


@given(
    B=st.integers(0, 1), S=st.integers(0, 70), Sk=st.integers(0, 70), heads=st.sampled_from(HEADS),
    sinks=st.booleans(), padded=st.booleans(), causal=st.booleans(), window=st.tuples(windows, windows),
    deterministic=st.booleans(),
)  # fmt: skip
def test_lengths(heads, causal, window, deterministic, **shape):
    torch.manual_seed(0)
    shape["sinks"] |= shape["Sk"] == 1  # one key without a sink: dscores is rounding error
    make = lambda: attention_inputs(torch.float32, DEVICE, **shape, **heads)  # noqa: E731
    check(make, {"causal": causal, "window": window, "deterministic": deterministic}, draws=2 if DEVICE == "cpu" else 8)


@pytest.mark.parametrize("queries", [None, 1], ids=["training", "decoding"])
def test_compile_over_lengths(queries, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    compiled = torch.compile(ops.flash_attention, fullgraph=True, backend=counter)
    for Sk in range(20, 24):
        inputs = attention_inputs(torch.float32, device, B=1, S=queries or Sk, Sk=Sk, H=2, Hk=1, D=16)
        options = {"causal": True, "deterministic": True}
        for a, b in zip(*(run(f, inputs, options).values() for f in (compiled, ops.flash_attention)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "q must be a tensor", {"q": [1.0]}),
        (TypeError, "k must be floating point", {"k": K.int()}),
        (TypeError, "k must have the dtype of q", {"k": K.half()}),
        (ValueError, "v must have 4 dimensions", {"v": K[0]}),
        (ValueError, "q must have 4 dimensions", {"q": Q[0], "k": K[0], "v": K[0]}),
        (ValueError, "v must be on cpu", {"v": K.to("meta")}),
        (ValueError, "k must have the batch and the head width", {"k": K[..., :4]}),
        (ValueError, "k must have the batch and the head width", {"k": K[:1], "v": K[:1]}),
        (ValueError, "v must have the shape of k", {"v": K[:, :6]}),
        (ValueError, "v must have the shape of k", {"v": K[:, :, :1]}),
        (ValueError, "heads of k, 2, must divide those of q, 3", {"q": Q[:, :, :3]}),
        (ValueError, "scale must be positive", {"scale": 0.0}),
        (ValueError, "softcap must be positive", {"softcap": -1.0}),
        (ValueError, "window must be two integers", {"window": (1, 2, 3)}),
        (ValueError, "window must be two integers", {"window": (-2, 0)}),
        (ValueError, "window must be two integers", {"window": (1.5, 0)}),
        (ValueError, r"sinks must have shape \[4\]", {"sinks": torch.ones(2)}),
        (ValueError, "bias must be broadcastable", {"bias": torch.ones(2, 2, 5, 7)}),
        (ValueError, "bias must be broadcastable", {"bias": torch.ones(1, 1, 1, 5, 7)}),
        (TypeError, "bias must be floating point", {"bias": torch.ones(5, 7).bool()}),
        (TypeError, "key_padding_mask must be bool on cpu", {"key_padding_mask": torch.ones(2, 7)}),
        (TypeError, "key_padding_mask must be bool on cpu", {"key_padding_mask": torch.ones(2, 7).bool().to("meta")}),
        (ValueError, r"key_padding_mask must have shape \[2, 7\]", {"key_padding_mask": torch.ones(2, 5).bool()}),
        (TypeError, "key_padding_mask must be a tensor, got list", {"key_padding_mask": [[True] * 7] * 2}),
        (TypeError, "bias must be a tensor, got list", {"bias": [0.0]}),
        (TypeError, "bias must be a tensor, got list", {"bias": [0.0], "k": K[:, :0], "v": K[:, :0]}),
        (TypeError, "spans must be a tensor, got list", {"spans": [[0], [1]]}),
        (TypeError, "sinks must be a tensor, got float", {"sinks": 1.0}),
        (TypeError, "window must be two integers.*got None", {"window": None}),
        (TypeError, "window must be two integers.*got 3", {"window": 3}),
        (TypeError, "scale must be a number, got str", {"scale": "a"}),
        (ValueError, "scale must be positive and finite", {"scale": float("nan")}),
        (TypeError, "softcap must be a number, got str", {"softcap": "a"}),
        (ValueError, "softcap must be positive and finite, got inf", {"softcap": float("inf")}),
        (TypeError, "causal must be True or False, got 'x'", {"causal": "x"}),
        (TypeError, "return_lse must be True or False, got 1", {"return_lse": 1}),
        (TypeError, "deterministic must be True or False or None, got 'no'", {"deterministic": "no"}),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, changed):
    with pytest.raises(error, match=message):
        ops.flash_attention(**{"q": Q, "k": K, "v": K, **changed})
