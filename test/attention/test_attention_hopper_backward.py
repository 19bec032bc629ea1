"""The backward of attention for Hopper: which calls it takes, its gradients, and races, which would show as gradients
that move.
"""

import pytest
import torch
from conftest import DEVICE

from liger_like import ops
from liger_like.ops.attention import attention_delta, choice, flash_attention_ref, flash_attention_varlen_ref
from liger_like.ops.attention import backward as attention_backward
from liger_like.ops.attention.backward import attention_bwd
from liger_like.ops.attention.hopper import backward as hopper_backward
from liger_like.ops.attention.hopper import backward_192 as hopper_backward_192
from liger_like.ops.attention.hopper import backward_256 as hopper_backward_256
from liger_like.runtime.support import architecture
from liger_like.testing import assert_accurate, run
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs

AT_ONCE = {"_attention_bwd_hopper_kernel"}
IN_TWO = {"_attention_dkv_hopper_kernel", "_attention_dq_hopper_kernel"}
OF_192 = {"_attention_dkv_192_hopper_kernel", "_attention_dq_hopper_kernel"}
HOPPER = {(64, 64): AT_ONCE, (128, 128): AT_ONCE, (192, 128): OF_192, (256, 256): IN_TWO}
PORTABLE = {"_attention_dkv_kernel", "_attention_dq_kernel"}
DTYPES = [torch.bfloat16, torch.float16]
HEADS = {"H": 16, "Hk": 4}  # most tests share them, since other sizes compile other kernels
KINDS = [(*widths, dtype) for widths in HOPPER for dtype in DTYPES]
each_kind = pytest.mark.parametrize(("D", "Dv", "dtype"), KINDS, ids=str)


def gpu(test):
    elsewhere = DEVICE == "cuda" and architecture(torch.device(DEVICE, 0)) != 9
    return pytest.mark.gpu(pytest.mark.skipif(elsewhere, reason="needs a Hopper GPU")(test))


def kernels(launched):
    """Return the launched kernels of the backward, without those that prepare it."""
    return {name for name, _ in launched} & {*AT_ONCE, *IN_TWO, *OF_192, *PORTABLE}


def kernels_for(D, Dv, softcap=None):
    """Return the kernels for Hopper of a call that needs all gradients; a softcap has no kernel for 192 features."""
    names = HOPPER[choice.widths_of(D, Dv)]
    return IN_TWO if softcap and names == OF_192 else names


def heads_of(D, H=2, Hk=1, S=24, dtype=torch.float16, device="cpu", Dv=None):
    shapes = (H, D), (Hk, D), (Hk, Dv or D), (H, Dv or D)
    return [torch.randn(1, S, *shape, device=device, dtype=dtype) for shape in shapes]


def backward(q, k, v, dout, *, deterministic=False, needs=(True, True, True, False), bias=None):
    B, S, H, _ = q.shape
    out, lse = torch.zeros_like(dout), torch.zeros(B, H, S, device=q.device)
    rows, _ = attention_delta(dout, out, lse, None, None, None)
    scalars = S, k.shape[1], 0.125, None, -1, 0
    return attention_bwd(dout, q, k, v, rows, bias, None, None, None, None, None, *scalars, deterministic, [*needs])


@pytest.fixture
def takes(monkeypatch):
    """Return the kernels for Hopper that a call runs."""
    done = []

    def add_gradients(dout, q, k, v, rows, masking, splits, dk, dv):
        done.append("all")
        return torch.zeros_like(q)

    def fill_dkv(dout, q, k, v, rows, masking, splits, dk, dv):
        done.append("dkv")

    def make_dq(dout, q, k, v, rows, masking):
        done.append("dq")
        return torch.zeros_like(q)

    monkeypatch.setattr(hopper_backward, "add_gradients", add_gradients)
    monkeypatch.setattr(hopper_backward_192, "fill_dkv", fill_dkv)
    monkeypatch.setattr(hopper_backward_256, "fill_dkv", fill_dkv)
    monkeypatch.setattr(hopper_backward_256, "make_dq", make_dq)
    monkeypatch.setattr(choice, "INTERPRET", False)
    monkeypatch.setattr(choice, "architecture", lambda device: 9)

    def takes(*tensors, **options):
        done.clear()
        backward(*tensors, **options)
        return [*done]

    return takes


def test_which_calls_it_takes(takes, monkeypatch, device):
    """The one-pass kernel takes heads that fit and tensors that TMA moves, if dq and one of dk and dv are needed."""
    q, k, v, dout = heads_of(64, device=device)
    assert takes(q, k, v, dout) == ["all"]
    assert takes(*heads_of(128, device=device)) == ["all"]
    assert takes(*heads_of(96, device=device)) == ["all"]
    assert takes(q, k, v, dout, needs=(True, False, True, False)) == ["all"]
    assert not takes(q, k, v, dout, deterministic=True)
    assert not takes(q, k, v, dout, needs=(False, True, True, False))
    assert not takes(q, k, v, dout, needs=(True, False, False, False))
    assert not takes(q, k, v, dout, bias=torch.zeros(1, 1, 1, 24, device=device))
    assert not takes(*heads_of(32, device=device))
    assert not takes(*(t.float() for t in (q, k, v, dout)))
    assert takes(q, k, v, torch.randn(1, 24, 2, 72, dtype=torch.float16, device=device)[..., :64])
    assert not takes(q, k, v, torch.randn(1, 24, 2, 65, dtype=torch.float16, device=device)[..., :64])
    assert not takes(q, k, v, torch.ones(1, 1, 1, 64, dtype=torch.float16, device=device).expand_as(q))
    monkeypatch.setattr(choice, "architecture", lambda device: 10)
    assert not takes(q, k, v, dout)


def test_which_calls_with_wide_heads_it_takes(takes, monkeypatch, device):
    """Each of the two kernels runs for any needed gradients."""
    q, k, v, dout = heads_of(256, device=device)
    for D, Dv in ((192, 192), (192, 128), (136, 64)):
        assert takes(*heads_of(D, Dv=Dv, device=device)) == ["dkv", "dq"]
    assert not takes(*heads_of(152, device=device))
    for deterministic in (False, True):
        assert takes(q, k, v, dout, deterministic=deterministic) == ["dkv", "dq"]
        assert takes(q, k, v, dout, deterministic=deterministic, needs=(True, False, False, False)) == ["dq"]
        assert takes(q, k, v, dout, deterministic=deterministic, needs=(False, False, True, False)) == ["dkv"]
    assert not takes(q, k, v, dout, bias=torch.zeros(1, 1, 1, 24, device=device))
    assert not takes(*(t.float() for t in (q, k, v, dout)))
    assert not takes(q, k, v, torch.ones(1, 1, 1, 256, dtype=torch.float16, device=device).expand_as(q))
    monkeypatch.setattr(choice, "architecture", lambda device: 10)
    assert not takes(q, k, v, dout)


def grads_of(inputs, options, seed=0, fn=ops.flash_attention):
    return {name: t for name, t in run(fn, inputs, options, seed).items() if name.startswith("d")}


def assert_same(got, expected, what=""):
    """To the bit; dq of what is made at once, whose summands come in any order in fp32, but for what that rounds."""
    assert torch.equal(got["dk"], expected["dk"]), f"dk {what}"
    assert torch.equal(got["dv"], expected["dv"]), f"dv {what}"
    a, b = (x["dq"].float() for x in (got, expected))
    if a.shape[-1] > 128:
        assert torch.equal(a, b), f"dq {what}"
    unit = torch.finfo(got["dq"].dtype).eps
    assert ((a - b).abs() <= unit * b.abs() + 1e-5 * b.abs().max()).all(), f"dq {what}"


def portable_grads(monkeypatch, inputs, options):
    with monkeypatch.context() as patch:
        patch.setattr(attention_backward, "hopper_kernels", lambda *_: False)
        return grads_of(inputs, {**options, "deterministic": True})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (192, 128), (256, 256)])
def test_which_kernels_run(D, Dv, deterministic, launched, device):
    tensors = heads_of(D, Dv=Dv, device=device)
    backward(*tensors, deterministic=deterministic)
    portable = architecture(tensors[0].device) != 9 or (deterministic and HOPPER[D, Dv] == AT_ONCE)
    assert kernels(launched) == (PORTABLE if portable else HOPPER[D, Dv])


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window": (100, -1)},
    {"window": (40, 70)},
    {"softcap": 20.0},
    {"softcap": 2.0, "causal": True},
]
LENGTHS = [(63, 63), (65, 65), (127, 129), (129, 127), (200, 901), (700, 300), (1, 700), (513, 513)]


@gpu
@each_kind
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients(mask, D, Dv, dtype, launched, poisoned):
    for S, Sk in LENGTHS:
        shape = {
            "B": 2,
            "S": S,
            "Sk": Sk,
            **HEADS,  # many heads: the gradient of one sink may be accurate or not by luck
            "D": D,
            "Dv": Dv,
            "sinks": S % 3 == 0,
        }
        make = lambda: attention_inputs(dtype, "cuda", **shape)  # noqa: B023, E731
        options = {**mask, "deterministic": False}
        assert_accurate(ops.flash_attention, flash_attention_ref, make, options, draws=8, k=2)
    assert kernels(launched) == kernels_for(D, Dv, mask.get("softcap"))


@gpu
@each_kind
def test_gradients_in_spans(D, Dv, dtype, launched, poisoned):
    for S, Sk in ((300, 300), (65, 700), (700, 65)):
        shape = {"B": 2, "S": S, "Sk": Sk, **HEADS, "D": D, "Dv": Dv, "spans": True}
        make = lambda: attention_inputs(dtype, "cuda", **shape)  # noqa: B023, E731
        for mask in ({}, {"causal": True}, {"softcap": 2.0, "causal": True}):
            options = {**mask, "deterministic": False}
            assert_accurate(ops.flash_attention, flash_attention_ref, make, options, draws=4, k=2)
    assert kernels(launched) == kernels_for(D, Dv) | kernels_for(D, Dv, softcap=2.0)


@gpu
@each_kind
def test_few_key_heads_split_the_query_heads(D, Dv, dtype, launched, poisoned):
    shape = {"B": 1, "S": 300, "Sk": 300, "H": 12, "Hk": 1, "D": D, "Dv": Dv}
    make = lambda: attention_inputs(dtype, "cuda", **shape)  # noqa: E731
    options = {"causal": True, "deterministic": False}
    assert_accurate(ops.flash_attention, flash_attention_ref, make, options, draws=4, k=2)
    name = next(name for name in HOPPER[D, Dv] if "dq" not in name)
    assert (name, (5 if D == 256 else 3, 12)) in launched


@gpu
@each_kind
def test_as_the_portable_kernels(D, Dv, dtype, monkeypatch, poisoned):
    """Many programs, each over many blocks."""
    inputs = attention_inputs(dtype, "cuda", B=3, S=2100, Sk=2000, **HEADS, D=D, Dv=Dv, sinks=True)
    for mask in ({}, {"causal": True}, {"window": (300, 200)}):
        got, expected = grads_of(inputs, {**mask, "deterministic": False}), portable_grads(monkeypatch, inputs, mask)
        for name, t in expected.items():
            assert (got[name].float() - t.float()).norm() <= 1e-2 * t.float().norm(), name


@gpu
@each_kind
def test_scores_far_below_zero(D, Dv, dtype, poisoned):
    """A score of 0, of padding, would be exp(100) beside them, which is infinite."""
    for S, Sk in ((70, 70), (130, 200)):
        inputs = attention_inputs(dtype, "cuda", B=1, S=S, Sk=Sk, **HEADS, D=D, Dv=Dv)
        with torch.no_grad():
            inputs["q"][..., 0], inputs["k"][..., 0] = 10.0, -10.0
        for name, t in grads_of(inputs, {"scale": 1.0, "deterministic": False}).items():
            assert t.isfinite().all(), name


LENGTHS_OF_SEQUENCES = (
    ((300, 300), (0, 5), (7, 0), (128, 128), (1, 1), (129, 65), (0, 0), (64, 190)),
    tuple((n, n) for n in range(1, 60, 3)),
)


@gpu
@each_kind
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"causal": True, "window": (30, -1)}, {"softcap": 5.0}], ids=str
)
def test_gradients_of_packed_sequences(mask, D, Dv, dtype, launched, poisoned):
    for lengths in LENGTHS_OF_SEQUENCES:
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), map(max, zip(*lengths, strict=True)), strict=True))
        shape = {"lengths": lengths, **HEADS, "D": D, "Dv": Dv, "sinks": True, "behind": 77}
        make = lambda: attention_varlen_inputs(dtype, "cuda", **shape)  # noqa: B023, E731
        options = {**mask, **longest, "deterministic": False}
        assert_accurate(ops.flash_attention_varlen, flash_attention_varlen_ref, make, options, draws=8, k=2)
    assert kernels(launched) == kernels_for(D, Dv, mask.get("softcap"))


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("D", "Dv"), [(48, 48), (80, 80), (96, 96), (88, 96), (80, 128), (136, 72), (192, 64), (160, 160)]
)
def test_narrower_heads(D, Dv, dtype, launched, poisoned):
    """Heads that are filled up with zeros, and values of another width than keys."""
    options = {"causal": True, "deterministic": False}
    shape = {"B": 2, "S": 130, "Sk": 300, **HEADS, "D": D, "Dv": Dv}
    make = lambda: attention_inputs(dtype, "cuda", **shape)  # noqa: E731
    assert_accurate(ops.flash_attention, flash_attention_ref, make, options, draws=4, k=2)
    packed = {"lengths": LENGTHS_OF_SEQUENCES[0], **HEADS, "D": D, "Dv": Dv, "behind": 77}
    make = lambda: attention_varlen_inputs(dtype, "cuda", **packed)  # noqa: E731
    options |= {"max_seqlen_q": 300, "max_seqlen_k": 300}
    assert_accurate(ops.flash_attention_varlen, flash_attention_varlen_ref, make, options, draws=4, k=2)
    assert kernels(launched) == kernels_for(D, Dv)


@gpu
@each_kind
@pytest.mark.parametrize("mask", [{"causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lost", [0, 1, 2, 3], ids=["first", "middle", "last", "behind"])
def test_sequences_with_nan_do_not_touch_others(lost, mask, D, Dv, dtype, poisoned):
    """Rows of another sequence in the same block have no influence, whatever they hold."""
    lengths, behind = ((100, 100), (70, 70), (150, 150)), 50
    shape = {"lengths": lengths, **HEADS, "D": D, "Dv": Dv, "behind": behind}
    inputs = attention_varlen_inputs(dtype, "cuda", **shape)
    start = sum(n for n, _ in lengths[:lost])
    rows = slice(start, start + (*(n for n, _ in lengths), behind)[lost])
    options = {**mask, "max_seqlen_q": 150, "max_seqlen_k": 150, "deterministic": False}
    results = []
    for held in (0.0, torch.nan):
        leaves = {name: t.detach().clone() for name, t in inputs.items()}
        upstream = torch.randn(*leaves["q"].shape[:2], Dv, generator=torch.Generator().manual_seed(0)).to(leaves["q"])
        for t in (leaves["q"], leaves["k"], leaves["v"], upstream):
            t[rows] = held
        for name in "qkv":
            leaves[name].requires_grad_()
        out = ops.flash_attention_varlen(**leaves, **options)
        grads = torch.autograd.grad(out, [leaves[name] for name in "qkv"], upstream)
        others = torch.ones(len(out), dtype=torch.bool, device="cuda")
        others[rows] = False
        results.append({f"d{name}": grad[others] for name, grad in zip("qkv", grads, strict=True)})
    assert all(t.isfinite().all() for t in results[0].values())
    assert_same(results[1], results[0])


@gpu
@each_kind
@pytest.mark.parametrize("mask", [{"causal": True}, {"softcap": 20.0}], ids=str)
def test_repeats(mask, D, Dv, dtype, poisoned):
    """Loading and multiplying warps run side by side: a missing wait would show as a gradient that moves."""
    for seed in range(100):
        inputs = attention_inputs(dtype, "cuda", B=2, S=600 + seed, Sk=600, **HEADS, D=D, Dv=Dv)
        options = {**mask, "deterministic": False}
        first = grads_of(inputs, options, seed)
        assert_same(grads_of(inputs, options, seed), first, f"in round {seed}")


@gpu
@each_kind
def test_packed_sequences_repeat(D, Dv, dtype, poisoned):
    for seed in range(100):
        lengths = tuple((n, n) for n in torch.randint(0, 400, (6,)).tolist())
        inputs = attention_varlen_inputs(dtype, "cuda", lengths, **HEADS, D=D, Dv=Dv, behind=seed)
        options = {"causal": True, "max_seqlen_q": 400, "max_seqlen_k": 400, "deterministic": False}
        first = grads_of(inputs, options, seed, ops.flash_attention_varlen)
        assert_same(grads_of(inputs, options, seed, ops.flash_attention_varlen), first, f"in round {seed}")


def leaves_and_grads(leaves, upstream, options):
    out = ops.flash_attention(*leaves, **options)
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, upstream), strict=True))


@gpu
@each_kind
def test_cuda_graph_equals_eager(D, Dv, dtype, poisoned):
    *leaves, upstream = (t.requires_grad_() for t in heads_of(D, *HEADS.values(), 700, dtype, "cuda", Dv))
    upstream = upstream.detach()
    options = {"causal": True, "deterministic": False}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        leaves_and_grads(leaves, upstream, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = leaves_and_grads(leaves, upstream, options)
    for _ in range(3):
        with torch.no_grad():
            for t in (*leaves, upstream):
                t.copy_(torch.randn_like(t))
        graph.replay()
        assert_same(captured, leaves_and_grads(leaves, upstream, options))


@gpu
@each_kind
def test_two_streams(D, Dv, dtype, poisoned):
    streams = [torch.cuda.Stream() for _ in range(2)]
    options = {"causal": True, "deterministic": False}
    cases = [[t.requires_grad_() for t in heads_of(D, *HEADS.values(), 700, dtype, "cuda", Dv)] for _ in streams]
    cases = [(leaves, upstream.detach()) for *leaves, upstream in cases]
    expected = [leaves_and_grads(*case, options) for case in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(leaves_and_grads(*case, options))
        torch.cuda.synchronize()
        for got, want in zip(results, expected, strict=True):
            assert_same(got, want)


@gpu
@pytest.mark.parametrize(("D", "Dv", "dtype"), [kind for kind in KINDS if kind[0] > 128], ids=str)
def test_wide_heads_repeat_whether_that_is_asked_for_or_not(D, Dv, dtype, launched, poisoned):
    inputs = attention_inputs(dtype, "cuda", B=2, S=600, Sk=600, **HEADS, D=D, Dv=Dv)
    got, expected = (grads_of(inputs, {"causal": True, "deterministic": flag}) for flag in (False, True))
    assert_same(got, expected)
    assert kernels(launched) == HOPPER[D, Dv]


@gpu
@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (256, 256)])
def test_wide_heads_with_some_gradients(D, Dv, launched, poisoned):
    """Each kernel alone gives what both give."""
    tensors = heads_of(D, *HEADS.values(), 300, torch.bfloat16, "cuda", Dv)
    expected = backward(*tensors)
    of_queries = {"_attention_dq_hopper_kernel"}
    for needs, names in (
        ((True, False, False, False), of_queries),
        ((False, True, True, False), HOPPER[D, Dv] - of_queries),
        ((False, False, True, False), HOPPER[D, Dv] - of_queries),
    ):
        launched.clear()
        got = backward(*tensors, needs=needs)
        assert kernels(launched) == names
        for need, a, b in zip(needs, got, expected, strict=True):
            assert torch.equal(a, b) if need else not a.numel()


@gpu
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (192, 128), (256, 256)])
def test_many_heads(D, Dv, monkeypatch, poisoned):
    """More programs than a grid has along any axis but the first."""
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1100, S=33, Sk=33, H=64, Hk=64, D=D, Dv=Dv)
    got, expected = grads_of(inputs, {"deterministic": False}), portable_grads(monkeypatch, inputs, {})
    for name, t in expected.items():
        assert (got[name].float() - t.float()).norm() <= 1e-2 * t.float().norm(), name


@gpu
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (192, 128), (256, 256)])
def test_more_than_2_31_elements(D, Dv, launched):
    S = 2**31 // (HEADS["H"] * D) + 128
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=S, Sk=S, **HEADS, D=D, Dv=Dv)
    options = {"causal": True, "window": (300, -1), "deterministic": False}
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    upstream = torch.randn(1, S, HEADS["H"], Dv, device="cuda", dtype=torch.bfloat16)
    whole = leaves_and_grads(leaves, upstream, options)
    last = [t.detach()[:, -1024:].requires_grad_() for t in leaves]
    part = leaves_and_grads(last, upstream[:, -1024:], options)
    for name in part:
        got, expected = whole[name][:, -512:].float(), part[name][:, -512:].float()
        assert (got - expected).norm() <= 1e-2 * expected.norm(), name
    assert kernels(launched) == HOPPER[D, Dv]
