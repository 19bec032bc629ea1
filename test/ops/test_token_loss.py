"""Sums of losses of tokens in one pass: equal to their parts, units, ignored tokens, errors and edge cases."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from liger_like import losses, ops
from liger_like.ops.losses import dw_sum
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss_ref
from liger_like.runtime import support
from liger_like.testing import SPECS, assert_accurate

SPEC = next(s for s in SPECS if s.name == "fused_linear_token_loss")
EPSILONS = {"epsilon": 0.1, "epsilon_high": 0.3}
B, S = 4, 10


def inputs_of(device, lead=(45,), dtype=torch.float32, **shape):
    return SPEC.inputs(dtype, device, lead=lead, **{"H": 24, "V": 97, "per_token": True, **shape})


def call(loss_fn, inputs, *per_token, fn=ops.fused_linear_token_loss, **options):
    """Return the loss, and its gradients by the leaves of ``inputs``, of a dict of x, weight, target and others."""
    x, weight, target = (inputs[name] for name in ("x", "weight", "target"))
    out = fn(x, weight, target, loss_fn, *per_token, **options)
    loss = out[0] if isinstance(out, tuple) else out
    leaves = [t for t in (x, weight, *per_token) if t.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def policy_inputs(device):
    inputs = SPEC.inputs(torch.float32, device, lead=(B, S), H=16, V=50)
    advantage = torch.randn(B, device=device)
    logprob = ops.fused_linear_logprobs(**inputs).logprob.detach()
    near = [logprob + 0.3 * torch.randn(B, S, device=device) for _ in range(2)]
    return inputs, advantage, near, inputs["target"] != -100


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "dft", "entropy"])
def test_sums_over_tokens_are_those_of_the_losses(name, device):
    """The same as the log-probabilities and the loss, one after the other; both with the functions of the losses."""
    inputs, advantage, (old, ref), mask = policy_inputs(device)
    per_token = advantage[:, None].expand(B, S), old, ref
    share = mask.sum() ** -1.0
    outputs = ("logprob", "entropy") if name == "entropy" else ("logprob",)
    tokens = ops.fused_linear_logprobs(**inputs, outputs=outputs, chunk_rows=8)
    policy = losses.token_policy(**EPSILONS, beta=0.0 if name == "ppo" else 0.2)
    fn = lambda tokens, share, *others: share * policy(tokens, *others)  # noqa: E731
    if name == "grpo":
        share = 1 / (mask.sum(1) * B)
        whole, _ = losses.grpo(tokens.logprob, advantage, mask, old, ref, **EPSILONS, beta=0.2)
    elif name == "dapo":
        whole, _ = losses.dapo(tokens.logprob, advantage, mask, old, ref, **EPSILONS, beta=0.2)
    elif name == "ppo":
        policy = losses.token_policy(epsilon=0.1)
        whole, _ = losses.ppo(tokens.logprob, per_token[0], mask, old, epsilon=0.1)
    elif name == "dft":
        fn = lambda tokens, share, *others: share * losses.token_dft(tokens)  # noqa: E731
        whole, _ = losses.dft(tokens.logprob, mask)
    else:
        fn = lambda tokens, share, *others: share * (policy(tokens, *others) - 0.1 * tokens.entropy)  # noqa: E731
        whole, _ = losses.dapo(tokens.logprob, advantage, mask, old, ref, **EPSILONS, beta=0.2)
        whole = whole - 0.1 * tokens.entropy.sum() * share
    weights = share.expand(B) if share.dim() == 0 else share
    got = call(fn, inputs, weights[:, None].expand(B, S), *per_token, outputs=outputs, chunk_rows=8)
    want = torch.autograd.grad(whole, (inputs["x"], inputs["weight"]))
    torch.testing.assert_close(got, (whole.detach(), *want), rtol=1e-4, atol=1e-6)
    assert all(grad.any() for grad in want)


def test_policy_without_older_log_probabilities(device):
    inputs, advantage, _, mask = policy_inputs(device)
    got = call(losses.token_policy(), inputs, advantage[:, None].expand(B, S))
    whole, _ = losses.dapo(ops.fused_linear_logprobs(**inputs).logprob, advantage, mask, num_items=1)
    want = torch.autograd.grad(whole, (inputs["x"], inputs["weight"]))
    torch.testing.assert_close(got, (whole.detach(), *want), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="ref_logprob must be given"):
        call(losses.token_policy(beta=0.1), inputs, advantage[:, None].expand(B, S))
    with pytest.raises(ValueError, match="epsilon_high must be finite"):
        losses.token_policy(epsilon_high=-1.0)


def test_order_of_tokens_does_not_matter(device):
    inputs = inputs_of(device, (45,))
    order = torch.randperm(45, device=device)
    x, y, advantage, value = (inputs[name] for name in ("x", "target", "advantage", "value"))
    fn = lambda tokens, advantage, value: advantage * (tokens.logprob - value).square()  # noqa: E731
    results = []
    for index in (torch.arange(45, device=device), order):
        rows = {"x": x[index].detach().requires_grad_(), "weight": inputs["weight"], "target": y[index]}
        loss, dx, dw, dv = call(fn, rows, advantage[index], value[index].detach().requires_grad_(), chunk_rows=16)
        results.append((loss, dx[index.argsort()], dw, dv[index.argsort()]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("kept", "dtype"), [(0, torch.float32), (20, torch.float32), (40, torch.float32), (20, torch.float16)], ids=str
)
def test_ignored_tokens_take_no_part(kept, dtype, device):
    """Their losses are NaN, and so are their gradients."""
    T, V = 40, 53
    x, w = (torch.randn(n, 24, device=device).to(dtype).requires_grad_() for n in (T, V))
    y, index = torch.full((T,), -100, device=device), torch.randperm(T, device=device)[:kept]
    y[index] = torch.randint(0, V, (kept,), device=device)
    a = torch.full((T,), float("nan"), device=device).index_fill(0, index, 1.7).requires_grad_()
    ids = torch.randint(0, V, (T, 2), device=device)

    def fn(tokens, a):
        return a.square() * (tokens.logprob + tokens.entropy + tokens.logprob_at.sum(-1))

    options = {"outputs": ("entropy",), "chunk_rows": 16}
    found = [call(fn, {"x": x, "weight": w, "target": y}, a, ids=ids, **options)]
    with support.as_in_graph():
        found.append(call(fn, {"x": x, "weight": w, "target": y}, a, ids=ids, **options))
    found.append(call(fn, {"x": x, "weight": w, "target": y}, a, ids=ids, fn=fused_linear_token_loss_ref, **options))
    alone = {"x": x[index].detach().requires_grad_(), "weight": w, "target": y[index]}
    loss, dx, dw, da = call(fn, alone, a.detach()[index].requires_grad_(), ids=ids[index], **options)
    spread = lambda rows: rows.new_zeros(T, *rows.shape[1:]).index_copy(0, index, rows)  # noqa: E731
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for result in found:
        torch.testing.assert_close(result, (loss, spread(dx), dw, spread(da)), **close)
    assert kept == 0 or loss.isfinite()


def gradients_in_fp16(device, sizes, rows=16, weight_dtype=torch.float16):
    """Return pairs of gradients, and exact ones, of chunks of 16 tokens whose losses have these sizes."""
    inputs = SPEC.inputs(torch.float16, device, lead=(16 * len(sizes),), H=24, V=53, bias=True, rank=2)
    inputs["target"].clamp_(min=0)
    inputs["weight"] = inputs["weight"].bfloat16()  # exact in fp16, too
    scale = torch.tensor(sizes, device=device).repeat_interleave(16)
    fn = lambda tokens, scale: scale * tokens.logprob  # noqa: E731
    grads = []
    for function, dtype in ((ops.fused_linear_token_loss, torch.float16), (fused_linear_token_loss_ref, torch.float64)):
        names = "x", "weight", "bias", "lora_a", "lora_b"
        kinds = [weight_dtype if name == "weight" and dtype == torch.float16 else dtype for name in names]
        leaves = [inputs[name].detach().to(kind).requires_grad_() for name, kind in zip(names, kinds, strict=True)]
        x, weight, bias, *lora = leaves
        with torch.autocast(device, torch.float16, enabled=weight_dtype != torch.float16 and dtype == torch.float16):
            loss = function(x, weight, inputs["target"], fn, scale, bias=bias, lora=(*lora, 0.5), chunk_rows=rows)
        grads.append(torch.autograd.grad(loss / max(sizes), leaves))  # the results themselves must not underflow
    return [(got.double(), want) for got, want in zip(*grads, strict=True)]


@pytest.mark.parametrize(
    "sizes",
    [(1e2, 1e-5, 1e-5), (1e-5, 1e-5, 1e2), (1e9, 1e9, 1e9), (0.0, 0.0, 1e-9), (1.0, 9.0, 100.0, 100.0), (1e-6, 3e-5)],
)
def test_fp16_gradients_of_any_size(sizes, device):
    """The gradients of chunks differ by up to 10^7: rows of dx keep the units that they have."""
    (dx, exact), *pairs = gradients_in_fp16(device, sizes)
    rows = zip(dx.split(16), exact.split(16), sizes, strict=True)
    pairs += [(got, want) for got, want, size in rows if size > 1e-3 * max(sizes)]
    for got, want in pairs:
        assert (got - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("case", ["one chunk", "sums in 16 bits"])
def test_units_of_fp16_where_they_could_not_change(case, device, monkeypatch):
    """Within a chunk, and in sums of a weight in bf16."""
    if device == "cpu" and case != "one chunk":
        monkeypatch.setattr(dw_sum, "architecture", lambda device: 10)
    weight_dtype, rows = (torch.float16, 48) if case == "one chunk" else (torch.bfloat16, 16)
    for got, want in gradients_in_fp16(device, (1.0, 1.0, 1e3), rows, weight_dtype):
        assert (got - want).norm() <= 6e-3 * want.norm()


@pytest.mark.parametrize("columns", [24, 12])
def test_negative_log_probabilities_are_the_cross_entropy(columns, device, monkeypatch):
    """Also where the weight's gradient is summed in 16 bits, which the last chunk joins in the backward."""
    if device == "cpu":
        monkeypatch.setattr(dw_sum, "architecture", lambda device: 10)
    inputs = SPEC.inputs(torch.bfloat16, device, lead=(40,), H=columns, V=97)
    leaves = inputs["x"], inputs["weight"]
    want = ops.fused_linear_cross_entropy(**inputs, reduction="sum", chunk_rows=16)
    got = ops.fused_linear_token_loss(
        **inputs, loss_fn=lambda t: -t.logprob, chunk_rows=16, logits_dtype=torch.bfloat16
    )
    torch.testing.assert_close(got, want)
    for factor in (1.0, -0.3):
        grads = [torch.autograd.grad(factor * loss, leaves, retain_graph=True) for loss in (got, want)]
        assert all(map(torch.equal, *grads))


def test_rows_of_several_numbers_for_each_token(device):
    """A teacher's best words, with gradients for its log-probabilities."""

    def distance(tokens, teacher):
        return (teacher.exp() * (teacher - tokens.logprob_at)).sum(-1)

    def make():
        inputs = inputs_of(device, (5, 7), ids=4, per_token=False)
        return inputs | {"teacher": torch.randn(5, 7, 4, device=device, requires_grad=True)}

    def alone(fn):
        def loss(x, weight, target, teacher, ids, **options):
            return fn(x, weight, target, distance, teacher, ids=ids, **options)[0]

        return loss

    pair = alone(ops.fused_linear_token_loss), alone(fused_linear_token_loss_ref)
    assert_accurate(*pair, make, {"chunk_rows": 16, "temperature": 2.0})


@pytest.mark.parametrize(
    ("trained", "products"), [("x weight", 3), ("x", 2), ("weight", 2), ("", 1), ("value", 1)], ids=str
)
def test_products(trained, products, device):
    """All in the forward; a gradient of other numbers needs none."""
    inputs = {n: t.detach().requires_grad_(n in trained.split()) for n, t in inputs_of(device, (48,)).items()}
    inputs["target"].clamp_(min=0)
    fn = lambda tokens, value: (tokens.logprob - value).square()  # noqa: E731
    x, weight, target, value = (inputs[name] for name in ("x", "weight", "target", "value"))
    with FlopCounterMode(display=False) as forward:
        loss = ops.fused_linear_token_loss(x, weight, target, fn, value, chunk_rows=16)
    with FlopCounterMode(display=False) as backward:
        if trained:
            loss.backward()
    assert forward.get_total_flops() == products * 2 * 48 * 24 * 97
    assert backward.get_total_flops() == 0
    assert loss.requires_grad == bool(trained)
    if trained == "value":
        want = 2 * (value - ops.fused_linear_logprobs(x, weight, target).logprob)
        torch.testing.assert_close(value.grad, want.detach())


def flops_of_products(call):
    """Return the FLOPs of the matrix products of a call: torch.compile compiles nothing under a FlopCounterMode."""
    with torch.profiler.profile(with_flops=True) as profiler:
        result = call()
    return result, sum(e.flops for e in profiler.key_averages() if e.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize(("between", "forward", "backward"), [(True, 3, 0), (False, 1, 3)])
def test_products_with_compiled_graphs(between, forward, backward, device):
    """``torch.compiler.disable`` calls the op between two graphs; a graph that holds it makes one product more."""
    inputs = inputs_of(device, (48,), per_token=False)
    inputs["target"].clamp_(min=0)
    op = torch.compiler.disable(ops.fused_linear_token_loss) if between else ops.fused_linear_token_loss
    graphs = []

    @torch.compile(backend=lambda graph, example: graphs.append(graph) or graph, fullgraph=not between)
    def step(x, weight, target):
        return 0.5 * op(2 * x, weight, target, lambda tokens: tokens.logprob.square(), chunk_rows=16)

    step(**inputs)
    assert len(graphs) == 1 + between
    product = 2 * 48 * 24 * 97
    loss, flops = flops_of_products(lambda: step(**inputs))
    assert flops == forward * product
    assert flops_of_products(loss.backward)[1] == backward * product
    want = ops.fused_linear_logprobs(2 * inputs["x"], inputs["weight"], inputs["target"]).logprob
    torch.testing.assert_close(loss, 0.5 * want.square().sum())


def test_results_come_without_gradient(device):
    inputs = inputs_of(device, (3, 7), per_token=False)
    fn = lambda tokens: -tokens.logprob  # noqa: E731
    loss, tokens = ops.fused_linear_token_loss(**inputs, loss_fn=fn, outputs=("entropy", "argmax"), topk=2)
    assert loss.requires_grad
    asked = {n: t for n, t in tokens._asdict().items() if t is not None}
    assert [*asked] == ["entropy", "argmax", "topk_logprob", "topk_ids"]
    want = ops.fused_linear_logprobs(**inputs, outputs=("entropy", "argmax"), topk=2)._asdict()
    for name, t in asked.items():
        assert not t.requires_grad
        torch.testing.assert_close(t, want[name].detach())
    assert ops.fused_linear_token_loss(**inputs, loss_fn=fn, outputs=("logprob",))[1].logprob.shape == (3, 7)
    assert isinstance(ops.fused_linear_token_loss(**inputs, loss_fn=fn), torch.Tensor)


def test_losses_without_gradient(device):
    """A function of results that have none gives no gradient, and one that does not use a result costs none."""
    inputs = inputs_of(device, (20,), per_token=False)
    loss, tokens = ops.fused_linear_token_loss(**inputs, loss_fn=lambda t: t.lse, outputs=("lse", "entropy"))
    torch.testing.assert_close(loss, tokens.lse.sum())
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (inputs["x"], inputs["weight"])))


@pytest.mark.parametrize("fn", [ops.fused_linear_token_loss, fused_linear_token_loss_ref])
def test_constant_losses(fn, device):
    """They give gradients of 0, also for a number that no loss reads."""
    inputs, value = inputs_of(device, (20,), per_token=False), torch.zeros(20, device=device, requires_grad=True)
    loss, *grads = call(lambda tokens, value: torch.ones_like(tokens.logprob), inputs, value, fn=fn)
    assert loss == (inputs["target"] != -100).sum()
    assert len(grads) == 3
    assert not any(grad.any() for grad in grads)


def test_gradient_is_added_to_an_existing_one(device):
    inputs = inputs_of(device, (41,), per_token=False)
    fn = lambda tokens: tokens.logprob.square()  # noqa: E731
    _, _, want = call(fn, inputs)
    inputs["weight"].grad = torch.ones_like(want)
    memory = inputs["weight"].grad.data_ptr()
    ops.fused_linear_token_loss(**inputs, loss_fn=fn, accumulate_grad=True).backward()
    torch.testing.assert_close(inputs["weight"].grad, want + 1)
    assert inputs["weight"].grad.data_ptr() == memory


def test_autocast(device):
    leaves = [torch.randn(n, 16, device=device, requires_grad=True) for n in (6, 40)]
    y = torch.randint(0, 40, (6,), device=device)
    fn = lambda tokens: tokens.logprob.square()  # noqa: E731
    with torch.autocast(device, dtype=torch.float16):
        loss = ops.fused_linear_token_loss(*leaves, y, fn)
    half = [t.detach().half().requires_grad_() for t in leaves]
    same = ops.fused_linear_token_loss(*half, y, fn)
    assert torch.equal(loss, same)
    got, want = torch.autograd.grad(loss, leaves), torch.autograd.grad(same, half)
    assert [t.dtype for t in got] == [torch.float32] * 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.half(), b, rtol=1e-3, atol=1e-4)


def test_hooks_on_saved_tensors_do_not_see_the_losses(device):
    """As of a checkpoint around the call, which would run it again for what the losses keep."""
    inputs = inputs_of(device, (20,), per_token=False)
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (unpacked.append(1), t)[1]):
        loss = ops.fused_linear_token_loss(**inputs, loss_fn=lambda tokens: tokens.logprob.square())
    assert not unpacked
    loss.backward()
    assert unpacked


def test_tensors_that_the_function_closes_over(device):
    inputs, scale = inputs_of(device, (20,), per_token=False), torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=r"loss_fn must get tensors .* as per_token, but reads one of \[3\]"):
        ops.fused_linear_token_loss(**inputs, loss_fn=lambda tokens: tokens.logprob * scale.square().sum())
    factors = iter((1.0, *scale))  # of the second chunk
    with pytest.raises(ValueError, match="loss_fn must get tensors that require a gradient as per_token"):
        ops.fused_linear_token_loss(**inputs, loss_fn=lambda tokens: tokens.logprob * next(factors), chunk_rows=8)
    with torch.no_grad():
        ops.fused_linear_token_loss(**inputs, loss_fn=lambda tokens: tokens.logprob * scale.square().sum())


def test_without_data(device):
    """In the mode that estimates memory; the host cannot read how many tokens count."""
    inputs = {n: t.detach() for n, t in inputs_of(device, (40,), per_token=False).items()}
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(t).requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
        loss = ops.fused_linear_token_loss(**fake, loss_fn=lambda tokens: tokens.logprob.square(), chunk_rows=16)
        loss.backward()
    assert fake["x"].grad.shape == (40, 24)
    assert fake["weight"].grad.shape == (97, 24)


X, HEAD, Y = torch.randn(3, 8), torch.randn(11, 8), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("error", "message", "loss_fn", "per_token"),
    [
        (TypeError, "loss_fn must be a function, got str", "grpo", ()),
        (ValueError, r"loss_fn must return .* of shape \[3\], got torch.int64", lambda t: t.logprob.long(), ()),
        (ValueError, r"of shape \[3\], got torch.float\d\d of shape \[\]", lambda t: t.logprob.sum(), ()),
        (ValueError, r"of shape \[3\], got tuple", lambda t: (t.logprob,), ()),
        (TypeError, r"per_token\[1\] must be a tensor, got float", lambda t, *_: t.logprob, (X[:, 0], 1.0)),
        (ValueError, r"per_token\[0\] must have shape \[3, '...'\], got \[8\]", lambda t, *_: t.logprob, (X[0],)),
        (ValueError, r"per_token\[0\] must be on cpu", lambda t, *_: t.logprob, (X.to("meta"),)),
    ],
)
def test_error_names_the_argument(error, message, loss_fn, per_token):
    for x in (X, X.double()):
        with pytest.raises(error, match=message):
            ops.fused_linear_token_loss(x, HEAD.to(x.dtype), Y, loss_fn, *per_token)


@pytest.mark.gpu
def test_graph_capture():
    inputs = inputs_of("cuda", (45,), torch.bfloat16, ids=2)
    leaves = inputs["x"], inputs["weight"], inputs["value"]
    fn = SPEC.fn

    def step():
        loss, *_ = fn(**inputs, outputs=("entropy",), chunk_rows=16)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()  # rounded to bf16 in other sums: the graph computes ignored tokens


@pytest.mark.gpu
def test_peak_memory():
    """The gradient of the weight in its own memory, that of x in fp32, and 4 bytes for a chunk's logits."""
    T, H, V = 8192, 512, 65536
    x, w = (torch.randn(n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (T, V))
    y = torch.randint(0, V, (T,), device="cuda")
    fn = lambda tokens: -tokens.logprob  # noqa: E731
    ops.fused_linear_token_loss(x[:64], w, y[:64], fn).backward()
    x.grad = w.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.fused_linear_token_loss(x, w, y, fn).backward()
    peak = torch.cuda.max_memory_allocated() - before
    bound = 2 * V * H + 6 * T * H + 4 * 1024 * V
    assert peak <= 1.1 * bound, (peak >> 20, bound >> 20)
