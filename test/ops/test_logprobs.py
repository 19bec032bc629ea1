"""Results, routes, errors and edge cases of ``fused_linear_logprobs``."""

import pytest
import torch
from torch.nn.functional import linear

from liger_like import ops
from liger_like.ops.losses import products as product_parts
from liger_like.ops.losses.linear_logprobs import OUTPUTS, fused_linear_logprobs_ref
from liger_like.ops.losses.rows import top_words
from liger_like.testing import SPECS, assert_accurate

SPEC = next(s for s in SPECS if s.name == "fused_linear_logprobs")
HALF = (torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu))
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def inputs_of(device, lead=(45,), dtype=torch.float32, **shape):
    return SPEC.inputs(dtype, device, lead=lead, **{"H": 24, "V": 97, **shape})


def draws(device):
    return 8 if device == "cpu" else 60


def trained(inputs, *names):
    return {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}


@pytest.mark.parametrize("options", [{}, {"keep_logits": 1 << 20}, {"temperature": 0.5}], ids=str)
def test_large_scores(options, device):
    """Near 10^4 nothing cancels: where the scores are exact, the results are as exact as those of small scores."""
    x, weight = torch.randint(-3, 4, (6, 24), device=device).float(), torch.randn(97, 24, device=device).sign() / 4
    x[:, 0], weight[:, 0] = 100.0, 100.0
    target = torch.arange(6, device=device)
    asked = {"outputs": ("logprob", "entropy"), **options}
    got = ops.fused_linear_logprobs(x, weight, target, **asked)
    want = fused_linear_logprobs_ref(x.double(), weight.double(), target, **asked)
    assert linear(x, weight).abs().min() > 9900
    for name in asked["outputs"]:
        torch.testing.assert_close(getattr(got, name).double(), getattr(want, name), rtol=1e-6, atol=1e-6)


def test_results_are_those_of_the_logits(device):
    inputs = {n: t.detach() for n, t in inputs_of(device, (4, 9), bias=True, ids=3).items()}
    y, ids, ignored = inputs["target"], inputs["ids"], inputs["target"] == -100
    ids[..., 1] = ids[..., 0]
    got = ops.fused_linear_logprobs(**inputs, outputs=OUTPUTS, topk=4, softcap=5.0, logit_scale=1.3, temperature=0.7)
    logits = linear(inputs["x"], inputs["weight"], inputs["bias"])
    z = 5 * torch.tanh(1.3 * logits / 5) / 0.7
    logp = z.log_softmax(-1)
    want = {
        "logprob": logp.gather(-1, y.clamp(0)[..., None])[..., 0],
        "entropy": torch.distributions.Categorical(logits=z).entropy(),
        "lse": z.logsumexp(-1),
        "argmax": z.argmax(-1),
        "correct": z.argmax(-1) == y,
        "mean_logit": z.mean(-1),
        "log_sum_sq_prob": logp.exp().square().sum(-1).log(),
        "logprob_at": logp.gather(-1, ids.clamp(0)).masked_fill(ids < 0, 0),
        "topk_logprob": logp.topk(4).values,
        "topk_ids": logp.topk(4).indices,
    }
    assert got._fields == tuple(want)
    for name, result in got._asdict().items():
        torch.testing.assert_close(result[~ignored], want[name][~ignored], msg=lambda m, name=name: f"{name}: {m}")
        assert (result[ignored] == (-1 if name in ("argmax", "topk_ids") else 0)).all(), name
    assert got.argmax.dtype == got.topk_ids.dtype == torch.int64


@pytest.mark.parametrize("descending", [False, True])
def test_largest_logit_moves_over_the_blocks(device, descending):
    z = torch.linspace(30, -30, 20000, device=device)[None] * (1 if descending else -1)
    y, ids = torch.tensor([9000], device=device), torch.tensor([[0, 19999]], device=device)
    got = ops.fused_linear_logprobs(z.new_ones(1, 1), z.mT, y, outputs=OUTPUTS, ids=ids, topk=3)
    logp = z.log_softmax(-1)
    torch.testing.assert_close(got.log_sum_sq_prob, (2 * logp).logsumexp(-1))
    torch.testing.assert_close(got.mean_logit, z.mean(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(got.logprob_at, logp[:, [0, -1]])
    torch.testing.assert_close(got.topk_logprob, logp.topk(3).values)


def test_only_what_was_asked_for(device):
    inputs = inputs_of(device)
    given = lambda **options: [n for n, t in ops.fused_linear_logprobs(**inputs, **options)._asdict().items() if t is not None]  # noqa: E731, E501  # fmt: skip
    assert given() == ["logprob"]
    assert given(outputs=("correct", "lse")) == ["lse", "correct"]
    assert given(outputs=(), topk=2) == ["topk_logprob", "topk_ids"]
    out = ops.fused_linear_logprobs(**inputs_of(device, ids=2), outputs=OUTPUTS, topk=2)
    assert [n for n, t in out._asdict().items() if t.requires_grad] == ["logprob", "entropy", "logprob_at"]


@each_half
def test_logits_are_not_rounded(dtype, device):
    """Products of half-precision operands are exact in fp32 but for their sum."""
    inputs = inputs_of(device, (64,), dtype, H=32, V=500, bias=True, ids=2)
    exact = {n: t.detach().double() if t.is_floating_point() else t for n, t in inputs.items()}
    want = fused_linear_logprobs_ref(**exact, outputs=("logprob", "entropy"), topk=3)
    errors = {}
    for logits_dtype in (torch.float32, dtype):
        got = ops.fused_linear_logprobs(**inputs, outputs=("logprob", "entropy"), topk=3, logits_dtype=logits_dtype)
        pairs = [(got.logprob, want.logprob), (got.entropy, want.entropy), (got.logprob_at, want.logprob_at)]
        errors[logits_dtype] = [float((a - b).abs().max()) for a, b in pairs]
    assert max(errors[torch.float32]) <= 1e-5
    assert min(errors[dtype]) >= 1e-4
    got = ops.fused_linear_logprobs(**inputs, topk=3)
    torch.testing.assert_close(got.topk_logprob.double(), want.topk_logprob, rtol=0, atol=1e-5)


@each_half
def test_logits_that_are_rounded(dtype, device):
    make = lambda: inputs_of(device, (41,), dtype, rank=4, bias=True, ids=3)  # noqa: E731
    options = {"logits_dtype": dtype, "outputs": ("logprob", "entropy"), "chunk_rows": 16}
    assert_accurate(SPEC.fn, SPEC.ref, make, options, draws(device))


@pytest.mark.parametrize("each", ["logprob", "entropy", "logprob_at"])
@pytest.mark.parametrize("columns", [32, 2048])
def test_gradient_of_each_result_alone(each, columns, device, monkeypatch, poisoned):
    """Slices of 32 columns: ids and labels are in one of several."""
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", columns)
    make = lambda: inputs_of(device, (37,), bias=True, ids=5)  # noqa: E731
    alone = lambda fn: lambda **kwargs: getattr(fn(**kwargs), each)  # noqa: E731
    options = {"outputs": ("logprob", "entropy"), "softcap": 6.0, "temperature": 1.2, "chunk_rows": 16}
    assert_accurate(alone(SPEC.fn), alone(SPEC.ref), make, options)


def test_ids_that_occur_several_times(device):
    inputs = inputs_of(device, (19,), ids=6)
    inputs["ids"][:, 1:4] = inputs["ids"][:, :1]
    inputs["ids"][:, 4] = inputs["target"].clamp(min=0)
    assert_accurate(SPEC.fn, SPEC.ref, lambda: inputs, {})


@pytest.mark.parametrize("names", [("x",), ("x", "weight")], ids=str)
@pytest.mark.parametrize("options", [{}, {"keep_logits": 2**20}, {"uniform_gradient": True}], ids=str)
@pytest.mark.parametrize("rows", [0, 1])
def test_few_tokens(rows, options, names, device):
    inputs = trained(inputs_of(device, (rows,)), *names)
    inputs["target"].fill_(1)
    grads = [
        torch.autograd.grad(fn(**inputs, **options).logprob.sum(), [inputs[name] for name in names])
        for fn in (SPEC.fn, SPEC.ref)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("where", ["no word", "ignored"])
def test_fp16_gradients_beside_large_ones_that_do_not_count(where, device):
    inputs = trained(inputs_of(device, (41,), torch.float16, ids=2), "x", "weight")
    inputs["target"][0], inputs["ids"][:, 1] = -100, -1
    upstream = [torch.ones(41, device=device), torch.ones(41, 2, device=device)]
    grads = []
    for large in (1, 1e9):
        if where == "ignored":
            upstream[0][0] = large
        else:
            upstream[1][:, 1] = large
        out = ops.fused_linear_logprobs(**inputs)
        grads.append(torch.autograd.grad([out.logprob, out.logprob_at], [inputs["x"], inputs["weight"]], upstream))
    torch.testing.assert_close(grads[1], grads[0])


def test_words_of_equal_scores_come_in_order(device):
    """With the identity as the head, the logits are x."""
    z, y = torch.randint(-3, 4, (300, 50), device=device).float(), torch.zeros(300, dtype=torch.int64, device=device)
    for scale in (1.0, -2.0, 0.0):
        order = (z * scale).sort(dim=1, descending=True, stable=True).indices
        for k in (1, 7, 50):
            assert torch.equal(top_words(z, k, scale), order[:, :k])
        out = ops.fused_linear_logprobs(z[:30], torch.eye(50, device=device), y[:30], topk=7, logit_scale=scale)
        assert torch.equal(out.topk_ids, order[:30, :7])
    nothing = torch.full((2, 9), float("nan"), device=device)
    assert torch.equal(top_words(nothing, 3, 1.0).cpu(), torch.arange(3).expand(2, 3))


def test_gradient_is_added_to_an_existing_one(device):
    inputs = inputs_of(device, (41,))
    upstream = torch.randn(41, device=device)
    (want,) = torch.autograd.grad(ops.fused_linear_logprobs(**inputs).logprob, inputs["weight"], upstream)
    inputs["weight"].grad = torch.ones_like(want)
    memory = inputs["weight"].grad.data_ptr()
    ops.fused_linear_logprobs(**inputs, accumulate_grad=True).logprob.backward(upstream)
    torch.testing.assert_close(inputs["weight"].grad, want + 1)
    assert inputs["weight"].grad.data_ptr() == memory


def test_autocast(device):
    leaves = [torch.randn(n, 16, device=device, requires_grad=True) for n in (6, 40)]
    y = torch.randint(0, 40, (6,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        out = ops.fused_linear_logprobs(*leaves, y).logprob
    half = [t.detach().half().requires_grad_() for t in leaves]
    same = ops.fused_linear_logprobs(*half, y).logprob
    assert torch.equal(out, same)
    got, want = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(same.sum(), half)
    assert [t.dtype for t in got] == [torch.float32] * 2
    torch.testing.assert_close(got[0], want[0].float(), rtol=0, atol=0)
    torch.testing.assert_close(got[1].half(), want[1], rtol=1e-3, atol=1e-4)


def test_nan_stays_in_its_row(device):
    inputs = trained(inputs_of(device, (5,), ids=2), "x")
    inputs["target"].fill_(3)
    inputs["x"].data[1] = float("nan")
    out = ops.fused_linear_logprobs(**inputs, outputs=("logprob", "entropy"), topk=2)
    (out.logprob + out.entropy + out.logprob_at.sum(-1)).sum().backward()
    assert (
        out.logprob.isnan().tolist() == inputs["x"].grad.isnan().any(-1).tolist() == [False, True, False, False, False]
    )


X, HEAD, Y = torch.randn(3, 8), torch.randn(11, 8), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "temperature must be positive", {"temperature": 0.0}),
        (ValueError, "outputs must be out of", {"outputs": ("loss",)}),
        (TypeError, "outputs must be a tuple", {"outputs": "logprob"}),
        (TypeError, "ids must be int64, got torch.int32", {"ids": Y[:, None].int()}),
        (ValueError, r"ids must have shape \[3, 'K'\] with K of at least 1, got \[3\]", {"ids": Y}),
        (ValueError, r"ids must have shape .* got \[3, 0\]", {"ids": Y[:, None][:, :0]}),
        (ValueError, "ids must be on cpu", {"ids": Y[:, None].to("meta")}),
        (ValueError, "ids holds label 11, which is neither in", {"ids": Y[:, None] + 9}),
        (ValueError, "ids holds label -2, which is neither in .* nor no word = -1", {"ids": Y[:, None] - 2}),
        (ValueError, "topk must be at least 0", {"topk": -1}),
        (ValueError, "topk must be at most 11, got 12", {"topk": 12}),
        (TypeError, "topk must be an integer", {"topk": True}),
        (ValueError, "logits_dtype must be one of torch.float32, got", {"logits_dtype": torch.bfloat16}),
        (ValueError, "keep_logits must be at least 0", {"keep_logits": -1}),
        (ValueError, "uniform_gradient must be one of", {"uniform_gradient": 1}),
        (ValueError, "accumulate_grad must be one of", {"accumulate_grad": None}),
        (ValueError, "chunk_rows must be at least 1", {"chunk_rows": 0}),
        (ValueError, "softcap must be positive", {"softcap": 0.0}),
        (TypeError, "lora must be", {"lora": (X,)}),
        (ValueError, r"bias must have shape \[11\]", {"bias": X[0]}),
    ],
)
def test_error_names_the_argument(error, message, options):
    with pytest.raises(error, match=message):
        ops.fused_linear_logprobs(X, HEAD, Y, **options)


def test_at_most_128_words():
    with pytest.raises(ValueError, match="topk must be at most 128"):
        ops.fused_linear_logprobs(X, torch.randn(300, 8), Y, topk=129)


def test_label_out_of_range_on_the_cpu():
    for fn in (ops.fused_linear_logprobs, fused_linear_logprobs_ref):
        with pytest.raises(ValueError, match="label 11"):
            fn(X, HEAD, Y + 9)


@pytest.mark.gpu
def test_ids_out_of_range_on_a_gpu():
    """They are never used as an index, and stand for no word."""
    inputs = inputs_of("cuda", (30,), ids=3)
    inputs["ids"][:, 0], inputs["ids"][:, 1] = 10**9, -(10**9)
    out = ops.fused_linear_logprobs(**inputs)
    assert not out.logprob_at[:, :2].any()
    got = torch.autograd.grad(out.logprob_at.sum(), inputs["x"])
    alone = ops.fused_linear_logprobs(**inputs | {"ids": inputs["ids"][:, 2:]}).logprob_at
    torch.testing.assert_close(got, torch.autograd.grad(alone.sum(), inputs["x"]))
