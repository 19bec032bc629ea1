"""Random shapes and options against the references, by the comparison rule in fp32."""

import torch
from conftest import DEVICE
from hypothesis import given
from hypothesis import strategies as st

from liger_like.testing import SPECS, assert_accurate

SPEC = {spec.name: spec for spec in SPECS}
leads = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
# A loss runs one program per row, which is slow in the interpreter.
few_rows = leads if DEVICE == "cuda" else st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
widths = st.integers(2, 300)
flags = st.booleans()


def check(name, shape, options):
    torch.manual_seed(0)
    spec = SPEC[name]
    # In a single draw a gradient may happen to cancel to rounding error.
    assert_accurate(spec.fn, spec.ref, lambda: spec.inputs(torch.float32, DEVICE, **shape), options, draws=3)


@given(
    lead=leads,
    N=st.integers(8, 300),  # in narrower rows the gradient of a norm cancels to rounding error
    weight=flags,
    residual=flags,
    eps=st.sampled_from([0.0, 1e-6, 0.1]),
    offset=st.floats(-2, 2),
    casting_mode=st.sampled_from(["llama", "gemma", "none"]),
)
def test_rms_norm(residual, eps, offset, casting_mode, **shape):
    name = "add_rms_norm" if residual else "rms_norm"
    check(name, {"residual": residual, **shape}, {"eps": eps, "offset": offset, "casting_mode": casting_mode})


@given(lead=leads, N=st.integers(8, 300), weight=flags, bias=flags, eps=st.sampled_from([1e-6, 0.1]))
def test_layer_norm(eps, **shape):
    check("layer_norm", shape, {"eps": eps})


@given(
    B=st.integers(1, 3),
    H=st.integers(1, 9),
    Hk=st.integers(1, 9),
    S=st.integers(0, 5),
    half=st.integers(1, 20),
    rest=st.integers(0, 9),
    batched=flags,
    weights=flags,
    layout=st.sampled_from(["half", "interleaved", "interleaved_in_half_out"]),
    cos_layout=st.sampled_from(["full", "half", "repeat"]),
)
def test_rope(half, rest, layout, cos_layout, weights, **shape):
    shape |= {"R": 2 * half, "D": max(8, 2 * half + rest), "layout": cos_layout, "weights": weights}
    options = {"layout": layout, "cos_layout": cos_layout, "rotary_dim": 2 * half}
    check("qk_norm_rope" if weights else "rope", shape, options)


ACTIVATIONS = (("swiglu", {}), ("geglu", {"approximate": "tanh"}), ("geglu", {"approximate": "none"}))


@given(lead=leads, N=widths, packed=flags, op=st.sampled_from(ACTIVATIONS))
def test_glu(op, **shape):
    check(op[0], shape, op[1])


@given(
    lead=leads,
    E=st.integers(2, 30).map(lambda n: 4 * n),
    bias=flags,
    top_k=st.integers(1, 4),
    score=st.sampled_from(["softmax", "sigmoid", "softmax_of_top"]),
    normalize=flags,
    eps=st.sampled_from([0.0, 1e-20, 0.1]),
    scale=st.floats(0.1, 16),
    groups=st.sampled_from([None, (1, 1, "top2"), (2, 1, "max"), (4, 2, "top2"), (4, 3, "max")]),
)
def test_moe_route(lead, E, bias, **options):
    check("moe_route", {"lead": lead, "E": E, "bias": bias}, options)


@given(lead=leads, E=st.integers(4, 60), mask=flags, top_k=st.integers(1, 4))
def test_load_balancing_loss(top_k, **shape):
    check("load_balancing_loss", shape, {"top_k": top_k})


@given(
    lead=leads,
    H=st.integers(8, 70),
    I=st.integers(8, 40),
    E=st.integers(1, 9),
    K=st.integers(1, 4),
    elsewhere=st.integers(3, 5),  # so that a token may draw K of them
    bias=flags,
    rank=st.sampled_from([0, 0, 3, 16]),
    gate=st.sampled_from([{}, {"act": "gelu", "limit": 1.0}, {"act": "gelu_tanh"}, {"alpha": 1.7, "limit": 2.0}]),
    transposed=flags,
    interleaved=flags,
)
def test_moe_experts(gate, transposed, interleaved, **shape):
    check("moe_experts", shape, {**gate, "transposed": transposed, "interleaved": interleaved})


losses = st.fixed_dictionaries(
    {"reduction": st.sampled_from(["mean", "sum", "none"])},
    optional={
        "label_smoothing": st.floats(0, 1),
        "z_loss": st.floats(0, 0.1),
        "softcap": st.floats(1, 50),
        "logit_scale": st.floats(0.1, 3),
    },
)


@given(lead=few_rows, V=widths, weighted=flags, int32=flags, options=losses)
def test_cross_entropy(options, **shape):
    check("cross_entropy", shape, options)


@given(
    lead=few_rows,
    H=st.integers(1, 40),
    V=widths,
    bias=flags,
    weighted=flags,
    rank=st.integers(0, 3),
    chunk_rows=st.integers(1, 40),
    outputs=st.sets(st.sampled_from(["logprob", "lse", "entropy", "argmax", "correct"])).map(tuple),
    options=losses,
)
def test_fused_linear_cross_entropy(chunk_rows, outputs, options, **shape):
    check("fused_linear_cross_entropy", shape, {"chunk_rows": chunk_rows, "outputs": outputs, **options})
