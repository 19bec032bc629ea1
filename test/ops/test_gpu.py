"""What only a GPU can show: graphs, streams, synchronisation, compilations, tensors of more than 2^31 elements, peak
memory.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from test_ops import differentiable, each_case, each_op, small

from liger_like import ops
from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.ops.losses import dw_sum
from liger_like.testing import SPECS, assert_accurate, compare
from liger_like.testing.inputs import attention_inputs

pytestmark = pytest.mark.gpu
LINEAR = next(s for s in SPECS if s.name == "fused_linear_cross_entropy")
ATTENTION = next(s for s in SPECS if s.name == "flash_attention")
each_way = pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)


def forward_backward(spec, inputs, options, upstream=None):
    """Return outputs and gradients in one list, and the upstream gradients; an op without gradients has none."""
    result = spec.fn(**inputs, **options)
    if not spec.differentiable:
        return [*(result if isinstance(result, tuple) else (result,))], []
    outputs = differentiable(result)
    upstream = [torch.randn_like(t) for t in outputs] if upstream is None else upstream
    return [
        *outputs,
        *torch.autograd.grad(outputs, [t for t in inputs.values() if t.requires_grad], upstream),
    ], upstream


@each_case
def test_no_host_sync(spec, options):
    inputs = spec.inputs(torch.bfloat16, "cuda", **small(spec))
    forward_backward(spec, inputs, options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(spec, inputs, options)
        with torch.no_grad():
            spec.fn(**inputs, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(spec, inputs, options):
    """A graph of forward and backward, what it fills, and the upstream gradients that it reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _, upstream = forward_backward(spec, inputs, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = forward_backward(spec, inputs, options, upstream)
    return graph, captured, upstream


def redraw(spec, inputs, upstream):
    drawn = [t for t in inputs.values() if t.requires_grad or (t.is_floating_point() and not spec.differentiable)]
    with torch.no_grad():
        for t in (*upstream, *drawn):
            t.copy_(torch.randn_like(t).where(~t.isnan(), torch.nan))  # what nobody reads may be NaN


@each_case
def test_cuda_graph_equals_eager(spec, options, poisoned):
    inputs = spec.inputs(torch.bfloat16, "cuda", **small(spec))
    # a graph keeps ignored tokens in its sums, and eager drops them: the results would round differently
    if "target" in inputs:
        inputs["target"].clamp_(min=0)
    if "teacher_x" in inputs:
        inputs["mask"].fill_(True)
    graph, captured, upstream = capture(spec, inputs, options)
    for _ in range(3):
        redraw(spec, inputs, upstream)
        graph.replay()
        eager, _ = forward_backward(spec, inputs, options, upstream)
        for a, b in zip(captured, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@each_op
def test_two_streams(spec, poisoned):
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [spec.inputs(torch.bfloat16, "cuda", **small(spec)) for _ in streams]
    expected, upstream = zip(*(forward_backward(spec, inputs, {}) for inputs in cases), strict=True)
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, inputs, grads in zip(streams, cases, upstream, strict=True):
            with torch.cuda.stream(stream):
                results.append(forward_backward(spec, inputs, {}, grads)[0])
        torch.cuda.synchronize()
        for got, want in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@each_op
def test_a_thread_for_each_stream(spec):
    streams = [torch.cuda.Stream() for _ in range(3)]
    cases = [spec.inputs(torch.bfloat16, "cuda", **small(spec)) for _ in streams]
    expected, upstream = zip(*(forward_backward(spec, inputs, {}) for inputs in cases), strict=True)
    torch.cuda.synchronize()

    def work(stream, inputs, grads):
        with torch.cuda.stream(stream):
            return [forward_backward(spec, inputs, {}, grads)[0] for _ in range(20)]

    with ThreadPoolExecutor(len(streams)) as threads:
        results = [*threads.map(work, streams, cases, upstream)]
    torch.cuda.synchronize()
    for repeated, want in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for got in repeated for a, b in zip(got, want, strict=True))


def compiled_kernels():
    """How many variants of each kernel are compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("liger_like.")]
    kernels = {v for m in modules for v in vars(m).values() if isinstance(v, triton.runtime.jit.JITFunction)}
    return {kernel: sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels}


@each_op
def test_lengths_do_not_recompile(spec):
    shape = small(spec)
    shape.pop("bias", None)  # its strides depend on the lengths

    options = {k: v for k, v in spec.options[-1].items() if k != "chunk_rows"}  # tested below

    def call(rows):
        lengths = {"lead": (rows,), "S": rows, "Sk": rows + 13, "lengths": ((rows, rows + 13), (5, 5))}
        lengths = {name: length for name, length in lengths.items() if name in shape}
        forward_backward(spec, spec.inputs(torch.bfloat16, "cuda", **{**shape, **lengths}), options)

    call(3)
    before = compiled_kernels()
    for rows in range(2, 102):
        call(rows)
    assert sum(compiled_kernels().values()) - sum(before.values()) <= 2


@each_way
def test_lengths_around_a_chunk_do_not_recompile(options):
    def call(rows):
        inputs = LINEAR.inputs(torch.bfloat16, "cuda", lead=(rows,), H=72, V=4000)
        inputs["target"].clamp_(min=0)
        forward_backward(LINEAR, inputs, {**options, "chunk_rows": 256})

    for chunks in (1, 2, 3):
        call(256 * chunks)
    before = compiled_kernels()
    for rows in range(206, 306):
        call(rows)
    assert {k.__name__: n - before[k] for k, n in compiled_kernels().items() if n > before[k]} == {}


ROWS = 2**31 // 4096 + 9
HUGE = {
    "rms_norm": {"lead": (ROWS,), "N": 4096, "weight": True},
    "add_rms_norm": {"lead": (ROWS,), "N": 4096, "weight": True, "residual": True},
    "layer_norm": {"lead": (ROWS,), "N": 4096, "weight": True, "bias": True},
    "rope": {"B": 1, "H": 16, "Hk": 16, "S": 2**31 // 2048 + 9, "D": 128, "R": 128},
    "qk_norm_rope": {"B": 1, "H": 16, "Hk": 16, "S": 2**31 // 2048 + 9, "D": 128, "R": 128, "weights": True},
    "swiglu": {"lead": (ROWS,), "N": 2048, "packed": True},
    "geglu": {"lead": (ROWS,), "N": 4096},
    "moe_route": {"lead": (ROWS,), "E": 4096},
    "cross_entropy": {"lead": (2**31 // 131072 + 9,), "V": 131072},
    "fused_linear_cross_entropy": {"lead": (2**31 // 131072 + 9,), "H": 32, "V": 131072},
    "moe_experts": {"lead": (2**31 // 16384 + 9,), "H": 64, "I": 8192, "E": 2, "K": 1},
}
PER_TOKEN = {"x", "residual", "gate", "up", "q", "k", "logits", "target", "index", "weights"}


@pytest.mark.parametrize("name", HUGE)
def test_more_than_2_31_elements(name):
    spec = next(s for s in SPECS if s.name == name)
    shape = HUGE[name]
    options = {"reduction": "none"} if "entropy" in name else {}
    options |= {"chunk_rows": shape["lead"][0]} if name.startswith("fused") else {}
    inputs = spec.inputs(torch.bfloat16, "cuda", **shape)
    per_token = {n: n in PER_TOKEN for n in inputs}

    def last(t):
        return t[:, :, -8:] if "S" in shape else t[-8:]

    tail = {
        n: last(t).detach().clone().requires_grad_(t.requires_grad) if per_token[n] else t for n, t in inputs.items()
    }
    tail |= {n: inputs[n][..., -8:, :] for n in ("cos", "sin") if n in inputs}
    outputs = differentiable(spec.fn(**inputs, **options))
    upstream = [torch.randn_like(t) for t in outputs]
    names = [n for n, t in inputs.items() if t.requires_grad and per_token[n]]
    grads = torch.autograd.grad(outputs, [inputs[n] for n in names], upstream)
    tail_outputs = differentiable(spec.fn(**tail, **options))
    tail_grads = torch.autograd.grad(tail_outputs, [tail[n] for n in names], [last(t) for t in upstream])
    exact = not name.startswith("fused")  # the order of a GEMM's sum may depend on the number of rows
    for got, want in zip((*outputs, *grads), (*tail_outputs, *tail_grads), strict=True):
        torch.testing.assert_close(last(got), want, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-2)


@pytest.mark.parametrize("recompute", [False, True])
def test_more_than_2_31_logits_at_once(recompute):
    T, H, V = 2**31 // 131072 + 9, 32, 131072
    inputs = LINEAR.inputs(torch.bfloat16, "cuda", lead=(T,), H=H, V=V)

    def grads(chunk_rows, tokens=slice(None)):
        x = inputs["x"][tokens].detach().requires_grad_()
        loss = ops.fused_linear_cross_entropy(
            x, inputs["weight"], inputs["target"][tokens], reduction="sum", chunk_rows=chunk_rows, recompute=recompute
        )
        return torch.autograd.grad(loss, (x, inputs["weight"]))

    (dx, dw), (same_dx, same_dw) = grads(T), grads(2048)
    (tail,) = grads(None, slice(T - 8, T))[:1]
    for got, want in ((dx, same_dx), (dw, same_dw), (dx[-8:], tail)):
        assert (got.float() - want.float()).norm() <= 5e-3 * want.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [128257, 262144])
def test_large_vocabularies(V, dtype):
    for spec in (s for s in SPECS if "entropy" in s.name):
        linear = "linear" in spec.name
        make = lambda: spec.inputs(dtype, "cuda", lead=(600,), V=V, **({"H": 64} if linear else {}))  # noqa: B023, E731
        for how in ({}, {"recompute": True}, {"chunk_rows": 256}) if linear else ({},):
            assert_accurate(spec.fn, spec.ref, make, {"label_smoothing": 0.1, "z_loss": 1e-4, **how})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_rows", [128, 256, 1024, 4096, None])
def test_weight_gradient_is_as_accurate_as_one_product(chunk_rows, dtype):
    make = lambda: LINEAR.inputs(dtype, "cuda", lead=(4096,), H=520, V=4001)  # noqa: E731
    for recompute in (False, True):
        options = {"reduction": "sum", "chunk_rows": chunk_rows, "recompute": recompute}
        comparisons = {c.name: c for c in compare(LINEAR.fn, LINEAR.ref, make, options)}
        assert comparisons["dweight"].passes(), comparisons["dweight"]
        assert comparisons["dx"].passes(), comparisons["dx"]


def test_sums_of_products_repeat_bit_for_bit():
    """Loading and multiplying warps run side by side: a missing wait would show as a result that moves."""
    a, b = (torch.randn(300, n, device="cuda", dtype=torch.bfloat16) for n in (9000, 1032))
    factor = torch.ones(1, device="cuda")

    def summed():
        total = torch.empty(9000, 1032, device="cuda", dtype=torch.float16)
        exponents, out = dw_sum.exponents_like(total), torch.empty_like(total, dtype=torch.bfloat16)
        for accumulate in (False, True, True):
            dw_sum.add_products(total, exponents, a, b, accumulate=accumulate)
        dw_sum.add_products(total, exponents, a, b, accumulate=True, out=out, factor=factor)
        return total, exponents, out

    first = summed()
    assert (first[2].float() - 4 * (a.T @ b).float()).norm() <= 4e-3 * first[2].float().norm()
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(first, summed(), strict=True))


def test_peak_memory_of_the_fused_loss():
    T, H, V = 4096, 1024, 32000
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, V, (T,), device="cuda")
    y[::5] = -100
    mib = 2**20
    chunk, dw, dx = (n * 2 for n in (2048 * V, V * H, T * H))

    def peak(fn):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = fn()
        return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    for options, at_forward, at_backward in (
        ({}, dw + 2 * dx + chunk + 4 * mib, dx + mib),
        ({"recompute": True}, chunk // 2 + dx // 2 + 4 * mib, dw + 2 * dx + 36 * mib),
    ):
        for _ in range(2):  # in the first round cuBLAS allocates its workspace
            x.grad = w.grad = None
            loss, forward, _ = peak(lambda: ops.fused_linear_cross_entropy(x, w, y, **options))  # noqa: B023
            _, backward, _ = peak(loss.backward)
            del loss
        assert forward <= at_forward
        assert backward <= at_backward
    with torch.no_grad():
        _, forward, left = peak(lambda: ops.fused_linear_cross_entropy(x, w, y))
    assert forward <= chunk // 2 + dx // 2 + 4 * mib
    assert left <= mib
    w = torch.randn(4 * V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w.grad = torch.zeros_like(w)
    loss = ops.fused_linear_cross_entropy(x, w, y, recompute=True, accumulate_grad=True)
    _, backward, _ = peak(loss.backward)
    assert backward <= 3 * dx + 132 * mib  # dw goes into w.grad; a slice of logits takes 128 MiB


def test_label_out_of_range_raises_by_the_next_call():
    logits = torch.randn(4, 64, device="cuda", requires_grad=True)
    for label in (64, -1, 2**40):
        y = torch.tensor([1, label, 2, -100], device="cuda")
        loss = ops.cross_entropy(logits, y, reduction="none")
        loss.sum().backward()
        torch.cuda.synchronize()
        assert loss[1] == 0
        assert logits.grad[1].eq(0).all()
        with pytest.raises(ValueError, match=str(label)):
            ops.cross_entropy(logits, y.clamp(-100, 63))
        ops.cross_entropy(logits, y.clamp(0, 63))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_second_gpu(spec, poisoned):
    inputs = spec.inputs(torch.bfloat16, "cuda:1", **small(spec))
    first = spec.inputs(torch.bfloat16, "cuda:0", **small(spec))
    with torch.no_grad():
        for name, t in inputs.items():
            first[name].copy_(t)
    got, upstream = forward_backward(spec, inputs, {})
    want, _ = forward_backward(spec, first, {}, [t.to("cuda:0") for t in upstream])
    assert all(torch.equal(a.to(b.device), b) for a, b in zip(got, want, strict=True))


WIDTHS = [*((d, d) for d in (16, 32, 64, 80, 96, 112, 128, 192, 256)), (192, 128)]
MASKS = [{}, {"causal": True}, {"causal": True, "window": (100, -1)}, {"softcap": 20.0}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_over_many_blocks(mask, widths, dtype):
    D, Dv = widths
    # Many heads and draws, since the gradient of one sink may be accurate or not by luck.
    shape = {"B": 2, "S": 700, "Sk": 901, "H": 16, "Hk": 8, "D": D, "Dv": Dv, "sinks": True, "padded": True}
    make = lambda: attention_inputs(dtype, "cuda", **shape)  # noqa: E731
    for deterministic in (False, True):
        options = {**mask, "deterministic": deterministic}
        assert_accurate(ops.flash_attention, ATTENTION.ref, make, options, draws=8, k=2)


def test_attention_repeats_bit_for_bit():
    inputs = attention_inputs(torch.bfloat16, "cuda", B=2, S=1000, Sk=1000, H=8, Hk=2, D=128, sinks=True, bias="hk")
    options = {"causal": True, "deterministic": True}
    first, upstream = forward_backward(ATTENTION, inputs, options)
    for _ in range(200):
        again, _ = forward_backward(ATTENTION, inputs, options, upstream)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def close(got, expected):
    return (got.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_of_more_than_2_31_scores(deterministic):
    S = 50_000
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=S, Sk=S, H=1, Hk=1, D=64)
    (out, *grads), (dout,) = forward_backward(ATTENTION, inputs, {"causal": True, "deterministic": deterministic})
    q, k, v = (t.detach()[0, :, 0].float().requires_grad_() for t in inputs.values())
    for rows in torch.arange(S, device="cuda").split(2000):
        s = (q[rows] @ k.T / 8).masked_fill(torch.arange(S, device="cuda") > rows[:, None], -torch.inf)
        expected = s.softmax(-1) @ v
        assert close(out[0, rows, 0], expected)
        expected.backward(dout[0, rows, 0].float())
    assert all(close(grad[0, :, 0], t.grad) for grad, t in zip(grads, (q, k, v), strict=True))


def test_attention_bias_of_more_than_2_31_elements():
    S = 47_000
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=S, Sk=S, H=1, Hk=1, D=16, bias="sk")
    (out, dq, *_, dbias), (dout,) = forward_backward(ATTENTION, inputs, {})
    tail = {n: t.detach()[..., -8:, :] if n == "bias" else t.detach() for n, t in inputs.items()}
    tail["q"] = tail["q"][:, -8:]
    tail = {n: t.requires_grad_() for n, t in tail.items()}
    (same_out, same_dq, *_, same_dbias), _ = forward_backward(ATTENTION, tail, {}, (dout[:, -8:],))
    pairs = (out[:, -8:], same_out), (dq[:, -8:], same_dq), (dbias[..., -8:, :], same_dbias)
    assert all(close(got, expected) for got, expected in pairs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_of_more_than_2_31_elements_of_queries(deterministic):
    S = 2**31 // 4096 + 9
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=S, Sk=96, H=32, Hk=1, D=128)
    options = {"deterministic": deterministic}
    dout = torch.zeros_like(inputs["q"])  # dk and dv then come from the last queries alone
    dout[:, -9:] = torch.randn_like(dout[:, -9:])
    (out, dq, *grads), _ = forward_backward(ATTENTION, inputs, options, (dout,))
    tail = {n: t.detach()[:, -9:].requires_grad_() if n == "q" else t for n, t in inputs.items()}
    (same_out, same_dq, *same_grads), _ = forward_backward(ATTENTION, tail, options, (dout[:, -9:],))
    assert close(out[:, -9:], same_out)
    assert close(dq[:, -9:], same_dq)
    assert not dq[:, :-9].any()
    assert all(close(a, b) for a, b in zip(grads, same_grads, strict=True))


def test_attention_of_more_than_2_31_elements_of_keys():
    Sk = 2**31 // 1024 + 9
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=4, Sk=Sk, H=32, Hk=8, D=128)
    options = {"causal": True, "window": (300, -1)}
    (out, *grads), upstream = forward_backward(ATTENTION, inputs, options)
    tail = {n: t.detach()[:, -400:].requires_grad_() for n, t in inputs.items()}
    (same_out, *same_grads), _ = forward_backward(ATTENTION, tail, options, upstream)
    assert close(out, same_out)
    assert all(close(a[:, -400:], b) for a, b in zip(grads, same_grads, strict=True))
    assert not any(grad[:, :-400].any() for grad in grads[1:])


@pytest.mark.parametrize(("S", "stride", "dtype"), [(300, 2**23, torch.bfloat16), (40, 2**27, torch.float32)], ids=str)
def test_attention_over_rows_far_apart(S, stride, dtype, poisoned):
    """So many rows that the last one starts more than 2^31 elements behind the first, or the last one of a block."""
    memory = torch.empty(S * stride, device="cuda", dtype=dtype).as_strided((S, 192), (stride, 1))
    memory.normal_()
    far = {n: memory[:, 64 * i : 64 * (i + 1)].view(1, S, 1, 64) for i, n in enumerate("qkv")}
    upstream = (torch.randn(1, S, 1, 64, device="cuda", dtype=dtype),)
    results = []
    for inputs in (far, {n: t.contiguous() for n, t in far.items()}):
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        results.append(forward_backward(ATTENTION, leaves, {"causal": True}, upstream)[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_attention_of_growing_keys_compiles_few_kernels():
    q = torch.randn(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    before = compiled_kernels()
    for Sk in range(1, 5000, 37):
        k = torch.randn(1, Sk, 2, 64, device="cuda", dtype=torch.bfloat16)
        ops.flash_attention(q, k, k, causal=True)
    new = {kernel: n - before.get(kernel, 0) for kernel, n in compiled_kernels().items()}
    assert new.pop(portable_forward._merge_kernel) <= 6  # one for each power of 2 up to 64 parts
    assert max(new.values()) <= 2
