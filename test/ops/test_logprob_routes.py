"""The routes by which ``fused_linear_logprobs`` computes its gradients, and their memory."""

import pytest
import torch
from test_logprobs import HALF, SPEC, draws, each_half, inputs_of, trained

from liger_like import ops
from liger_like.ops.losses import linear_logprobs, slices, steps
from liger_like.ops.losses import products as product_parts
from liger_like.ops.losses.linear_logprobs import OUTPUTS, fused_linear_logprobs_ref
from liger_like.runtime import support
from liger_like.testing import assert_accurate, compare


def products(monkeypatch):
    """A list that gets the rows of every product with logits or with their gradient."""
    rows = []

    def counting(module, name, row):
        fn = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (rows.append(args[row].shape[0]), fn(*args)))

    for module in (steps, slices):
        counting(module, "store_logits", 0)
        counting(module, "addmm", 0)
    return rows


def logprob_of(fn):
    return lambda **kwargs: fn(**kwargs).logprob


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_frozen_head(dtype, device, monkeypatch, poisoned):
    """The forward computes dx, which the backward scales; an entropy without gradient does not matter."""
    options = {"chunk_rows": 16, "temperature": 1.4, "outputs": ("logprob", "entropy")}
    make = lambda: trained(inputs_of(device, (41,), dtype, bias=True), "x")  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(linear_logprobs, "recomputed", None)
        number = 1 if dtype == torch.float32 else draws(device)
        assert_accurate(logprob_of(SPEC.fn), logprob_of(SPEC.ref), make, options, number)
    rows, inputs = products(monkeypatch), make()
    out = ops.fused_linear_logprobs(**inputs, chunk_rows=16)
    assert sum(rows) == 2 * max(16, int((inputs["target"] != -100).sum()))
    rows.clear()
    out.logprob.sum().backward()
    assert not rows


def test_frozen_head_with_a_trained_low_rank_input(device, monkeypatch):
    monkeypatch.setattr(linear_logprobs, "recomputed", None)
    make = lambda: trained(inputs_of(device, (41,), rank=4), "x", "lora_a")  # noqa: E731
    assert_accurate(SPEC.fn, SPEC.ref, make, {"chunk_rows": 16})


@pytest.mark.parametrize("names", [("x",), ("x", "weight", "bias")], ids=str)
@pytest.mark.parametrize("given", ["entropy", "logprob_at"])
def test_gradients_of_the_forward_do_not_serve_another_result(given, names, device):
    """Frozen heads and a uniform gradient are for ``logprob``: with others the backward computes the logits again."""
    both = lambda fn: lambda **kwargs: (lambda out: (out.logprob, getattr(out, given)))(fn(**kwargs))  # noqa: E731
    make = lambda: trained(inputs_of(device, (41,), bias=True, ids=2), *names)  # noqa: E731
    options = {"chunk_rows": 16, "outputs": ("logprob", "entropy"), "uniform_gradient": True}
    assert_accurate(both(SPEC.fn), both(SPEC.ref), make, options)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_uniform_gradient(dtype, device, monkeypatch, poisoned):
    """As of a mean: the forward has computed all gradients."""
    monkeypatch.setattr(linear_logprobs, "recomputed", None)
    mean = lambda fn: lambda **kwargs: fn(**kwargs).logprob.sum() * -0.03  # noqa: E731
    options = {"chunk_rows": 16, "uniform_gradient": True, "temperature": 0.8}
    make = lambda: inputs_of(device, (41,), dtype, bias=True, rank=4)  # noqa: E731
    assert_accurate(mean(SPEC.fn), mean(SPEC.ref), make, options, 1 if dtype == torch.float32 else draws(device))


@pytest.mark.parametrize("rows", [16, None])
def test_uniform_gradient_behind_an_ignored_prompt(rows, device, monkeypatch):
    """A single chunk leaves the tokens in their order: the first ones may be ignored."""
    monkeypatch.setattr(linear_logprobs, "recomputed", None)
    inputs = trained(inputs_of(device, (41,)), "x", "weight")
    inputs["target"][:4], inputs["target"][4] = -100, 3
    leaves = inputs["x"], inputs["weight"]
    got = torch.autograd.grad(SPEC.fn(**inputs, uniform_gradient=True, chunk_rows=rows).logprob.sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(SPEC.ref(**inputs).logprob.sum(), leaves))


@pytest.mark.parametrize("kind", ["random", "one", "nan"])
def test_gradient_that_is_not_uniform(kind, device, monkeypatch):
    calls, right = [], linear_logprobs.recomputed
    monkeypatch.setattr(linear_logprobs, "recomputed", lambda *args: (calls.append(1), right(*args))[1])
    inputs = trained(inputs_of(device, (41,)), "x", "weight")
    inputs["target"][:2] = 3
    upstream = torch.randn(41, device=device) if kind == "random" else torch.ones(41, device=device)
    upstream[1] = {"random": 1.0, "one": 1.001, "nan": float("nan")}[kind]
    grads = [
        torch.autograd.grad(fn(**inputs, uniform_gradient=True).logprob, (inputs["x"], inputs["weight"]), upstream)
        for fn in (SPEC.fn, SPEC.ref)
    ]
    assert calls == [1]
    torch.testing.assert_close(*grads, equal_nan=True)
    assert grads[0][0].isfinite().all(-1).sum() == (40 if kind == "nan" else 41)


@pytest.mark.parametrize("names", [("x",), ("x", "weight")], ids=str)
def test_upstream_of_ignored_tokens_does_not_matter(names, device):
    inputs = trained(inputs_of(device, (41,)), *names)
    ignored = inputs["target"] == -100
    upstream = torch.full((41,), 0.7, device=device)
    leaves = [inputs[name] for name in names]
    want = torch.autograd.grad(ops.fused_linear_logprobs(**inputs, chunk_rows=16).logprob, leaves, upstream)
    for uniform in (False, True):
        out = ops.fused_linear_logprobs(**inputs, chunk_rows=16, uniform_gradient=uniform)
        got = torch.autograd.grad(out.logprob, leaves, upstream.masked_fill(ignored, float("nan")))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [10, 26, 100])
@pytest.mark.parametrize("entropy", [False, True])
def test_kept_logits(rows, entropy, device, monkeypatch, poisoned):
    """Some of the tokens, or all: their logits are not computed again, in slices of 32 columns at least."""
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", 32)
    inputs = inputs_of(device, (41,), bias=True, rank=4, ids=3)
    options = {"chunk_rows": 16, "keep_logits": rows * 112 * 4, "softcap": 7.0}
    options["outputs"] = ("logprob", "entropy") if entropy else ("logprob",)
    assert_accurate(SPEC.fn, SPEC.ref, lambda: inputs, options)
    again, right = [], slices.store_logits
    monkeypatch.setattr(slices, "store_logits", lambda z, *args: (again.append(len(z)), right(z, *args)))
    SPEC.fn(**inputs, **options).logprob.sum().backward()
    counted = int((inputs["target"] != -100).sum())
    assert set(again) == ({counted - rows} if counted > rows else set())
    assert len(again) != 1


@each_half
def test_logits_kept_as_exponentials(dtype, device, poisoned):
    """If all are kept, gradients are as exact as from logits in fp32."""
    make = lambda: inputs_of(device, (41,), dtype, bias=True, rank=4)  # noqa: E731
    options = {"chunk_rows": 16, "outputs": ("logprob", "entropy"), "keep_logits": 2**20, "temperature": 0.3}
    assert_accurate(SPEC.fn, SPEC.ref, make, options, draws(device))


@each_half
@pytest.mark.parametrize(
    ("rows", "shape", "more"), [(30, {}, {}), (2**20, {}, {"softcap": 7.0}), (2**20, {"ids": 2}, {})], ids=str
)
def test_kept_logits_in_half_precision(rows, shape, more, dtype, device, poisoned):
    """Results come from logits in fp32, gradients from logits rounded to the dtype, whose rows still sum to zero."""
    make = lambda: inputs_of(device, (41,), dtype, bias=True, **shape)  # noqa: E731
    options = {"chunk_rows": 16, "outputs": ("logprob", "entropy")} | more
    kept = lambda **kwargs: SPEC.fn(**kwargs, keep_logits=rows * 112 * 2)  # noqa: E731
    rounded = lambda **kwargs: SPEC.ref(**kwargs, logits_dtype=kwargs["x"].dtype)  # noqa: E731
    results = [compare(fn, SPEC.ref, make, options, draws(device)) for fn in (kept, rounded)]
    for found, allowed in zip(*results, strict=True):
        if found.name.startswith("out"):
            assert found.passes(), found
        else:
            assert found.kernel <= 1.1 * allowed.kernel, (found, allowed)
    inputs = make()
    out = kept(**inputs, chunk_rows=16, **more)
    (dbias,) = torch.autograd.grad(out.logprob.sum(), inputs["bias"])
    # slopes of a softcap leave no sum of 0
    assert "softcap" in more or abs(float(dbias.double().sum())) <= 0.02 * float(dbias.double().abs().sum())


def test_kept_logits_of_a_graph_that_is_kept(device):
    inputs = inputs_of(device, (41,))
    leaves = inputs["x"], inputs["weight"]
    out = ops.fused_linear_logprobs(**inputs, keep_logits=2**20)
    upstream = torch.randn(41, device=device)
    first = torch.autograd.grad(out.logprob, leaves, upstream, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.logprob, leaves, upstream)))


@pytest.mark.parametrize("options", [{}, {"keep_logits": 2**20}, {"uniform_gradient": True}], ids=str)
@pytest.mark.parametrize("kept", [0, 5, 20, 64])
def test_ignored_tokens_take_no_part(options, kept, device):
    x, w = torch.randn(64, 24, device=device, requires_grad=True), torch.randn(101, 24, device=device)
    w.requires_grad_()
    y = torch.full((64,), -100, device=device)
    index = torch.randperm(64, device=device)[:kept]
    y[index] = torch.randint(0, 101, (kept,), device=device)
    ids = torch.randint(0, 101, (64, 2), device=device)
    options = options | {"chunk_rows": 16, "outputs": OUTPUTS, "topk": 3}
    results = [
        ops.fused_linear_logprobs(a, w, b, ids=c, **options)
        for a, b, c in ((x, y, ids), (x[index], y[index], ids[index]))
    ]
    for whole, alone in zip(*results, strict=True):
        torch.testing.assert_close(whole[index], alone)
    grads = [torch.autograd.grad(out.logprob.sum(), (x, w)) for out in results]
    torch.testing.assert_close(*grads)
    with support.as_in_graph():
        out = ops.fused_linear_logprobs(x, w, y, ids=ids, **options)
        torch.testing.assert_close(torch.autograd.grad(out.logprob.sum(), (x, w)), grads[1])


@pytest.mark.parametrize(
    "options", [{"keep_logits": 2**20}, {"uniform_gradient": True}, {"keep_logits": 9000}], ids=str
)
def test_routes_compile(options, device):
    torch._dynamo.reset()
    compiled = torch.compile(SPEC.fn, fullgraph=True, backend="aot_eager")
    options = options | {"chunk_rows": 16, "outputs": ("logprob", "entropy")}
    for names in (("x",), ("x", "weight")):
        make = lambda: trained(inputs_of(device, (41,), ids=2), *names)  # noqa: B023, E731
        assert_accurate(compiled, SPEC.ref, make, options)


@pytest.mark.gpu
def test_more_than_2_31_logits_are_kept():
    """A single chunk of rows that start beyond 2^31 elements."""
    T, V = 8400, 262144
    x = torch.randn(T, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, V, (T,), device="cuda")
    out = ops.fused_linear_logprobs(x, w, y, keep_logits=2**40, logits_dtype=torch.bfloat16)
    rows = slice(T - 64, T)
    want = fused_linear_logprobs_ref(x[rows], w, y[rows], logits_dtype=torch.bfloat16)
    torch.testing.assert_close(out.logprob[rows], want.logprob, rtol=1e-3, atol=1e-3)
    upstream = torch.zeros(T, device="cuda").index_fill(0, torch.arange(T - 64, T, device="cuda"), 1.0)
    got = torch.autograd.grad(out.logprob, (x, w), upstream)
    exact = torch.autograd.grad(want.logprob.sum(), (x, w))
    for a, b in zip(got, exact, strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


@pytest.mark.gpu
def test_graph_capture():
    inputs = inputs_of("cuda", (45,), torch.bfloat16, ids=2)
    leaves = inputs["x"], inputs["weight"]

    def step():
        out = ops.fused_linear_logprobs(**inputs, outputs=("logprob", "entropy"), chunk_rows=16, uniform_gradient=True)
        return out.logprob.detach(), *torch.autograd.grad((out.logprob + out.entropy).sum(), leaves)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("route", [{}, {"keep_logits": 2**40}, {"uniform_gradient": True}], ids=str)
def test_peak_memory(route):
    """Less than the logits of all tokens in bf16, or no more than these and the gradients."""
    T, H, V = 8192, 512, 65536
    x, w = (torch.randn(n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (T, V))
    y = torch.randint(0, V, (T,), device="cuda")
    ops.fused_linear_logprobs(x[:64], w, y[:64], **route).logprob.sum().backward()
    x.grad = w.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.fused_linear_logprobs(x, w, y, **route).logprob.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (V + T) * H
    chunk = 6 * 1024 * V
    bound = {"keep_logits": 2 * T * V + chunk, "uniform_gradient": chunk + 4 * V * H}.get(next(iter(route), ""), chunk)
    assert peak <= 1.1 * (bound + gradients + 8 * T * H), (peak >> 20, bound >> 20)
