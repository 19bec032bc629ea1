"""Options, errors and edge cases of the routers of experts and of their loss."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax.modeling_minimax import MiniMaxTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from liger_like import explain, nn, ops
from liger_like.ops.load_balancing import load_balancing_loss_ref
from liger_like.ops.router import moe_route_ref
from liger_like.testing import assert_accurate

H, E, K = 16, 24, 3
LIMITED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "topk_method": "group_limited_greedy"}
# class of transformers, values of its config, options of ours
ROUTERS = {
    "Mixtral": (MixtralTopKRouter, {}, {}),
    "Qwen3-MoE": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, {}),
    "Qwen3-MoE, as it is": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, {"normalize": False}),
    "MiniMax": (MiniMaxTopKRouter, {}, {}),
    "MiniMax-M2": (MiniMaxM2TopKRouter, {}, {"score": "sigmoid", "correction": True}),
    "Granite": (GraniteMoeTopKRouter, {}, {"score": "softmax_of_top"}),
    "GPT-OSS": (GptOssTopKRouter, {}, {"score": "softmax_of_top", "bias": True}),
    "LFM2": (
        Lfm2MoeTopKRouter,
        {"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 0.5},
        {"score": "sigmoid", "eps": 1e-6, "scale": 0.5, "correction": True},
    ),
    "DeepSeek-V2": (
        DeepseekV2TopkRouter,
        LIMITED,
        {"normalize": False, "scale": 2.5, "groups": (4, 2, "max"), "fp32": True},
    ),
    "DeepSeek-V2 Lite": (
        DeepseekV2TopkRouter,
        LIMITED | {"topk_method": "greedy"},
        {"normalize": False, "scale": 2.5, "fp32": True},
    ),
    "Mistral 4": (
        Mistral4TopkRouter,
        LIMITED | {"norm_topk_prob": True},
        {"eps": 1e-20, "scale": 2.5, "groups": (4, 2, "top2")},
    ),
    "DeepSeek-V3": (
        DeepseekV3TopkRouter,
        LIMITED | {"norm_topk_prob": True},
        {"score": "sigmoid", "eps": 1e-20, "scale": 2.5, "correction": True, "groups": (4, 2, "top2"), "fp32": True},
    ),
}
ARGUMENT = {"MiniMax-M2", "LFM2"}  # their block holds the correction and passes it on


def dense(weights, index, experts=E):
    """Return the weights as [T, E], which have no order."""
    return weights.new_zeros(*weights.shape[:-1], experts).scatter(-1, index, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers(name, device, poisoned):
    router, values, options = ROUTERS[name]
    sizes = {"hidden_size": H, "num_local_experts": E, "num_experts": E, "num_experts_per_tok": K}
    theirs = router(SimpleNamespace(**sizes, **values)).to(device)
    for t in theirs.parameters():
        torch.nn.init.normal_(t)
    ours = nn.Router(H, E, K, **options).to(device)
    correction = torch.randn(E, device=device) * 0.3
    state, given = theirs.state_dict(), ()
    if options.get("correction"):
        state["e_score_correction_bias"] = correction
        given = (correction,) if name in ARGUMENT else ()
        if not given:
            theirs.e_score_correction_bias.copy_(correction)
    ours.load_state_dict(state)
    x, upstream = torch.randn(50, H, device=device), torch.randn(50, E, device=device)
    results = []
    for module, args in ((ours, ()), (theirs, given)):
        leaf = x.clone().requires_grad_()
        outputs = module(leaf, *args)  # in an order that depends on the version
        index, weights, logits = sorted(outputs, key=lambda t: (t.is_floating_point(), t.shape[-1]))
        chosen = dense(weights, index)
        dx, dw = torch.autograd.grad(chosen, (leaf, module.weight), upstream)
        results.append((logits, chosen, index.sort(-1).values, dx, dw))
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 60, "score": "softmax", "eps": 0.1},
        {"top_k": 8, "score": "sigmoid", "eps": 0.5, "scale": 2.5},
        {"top_k": 30, "score": "sigmoid", "groups": (6, 3, "top2")},
        {"top_k": 5, "score": "softmax", "groups": (5, 2, "top2")},
        {"top_k": 20, "score": "softmax_of_top", "groups": (3, 1, "max")},
        {"top_k": 9, "score": "sigmoid", "normalize": False, "groups": (60, 9, "max")},
        {"top_k": 7, "score": "softmax", "groups": (1, 1, "top2")},
        {"top_k": 8, "scale": 2.5, "dtype": torch.float16},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_groups_and_counts_of_experts(options, biased, device, poisoned):
    def inputs():
        logits = torch.randn(2, 19, 60, device=device).requires_grad_()
        return {"logits": logits} | ({"bias": torch.randn(60, device=device) * 0.1} if biased else {})

    assert_accurate(ops.moe_route, moe_route_ref, inputs, options, draws=2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_top"])
def test_many_experts(score, device):
    for experts, kernel in ((4096, True), (4097, False)):
        logits = torch.randn(2, experts, device=device)
        weights, index = ops.moe_route(logits, 9, score=score)
        assert torch.equal(index, logits.topk(9).indices)
        torch.testing.assert_close((weights, index), moe_route_ref(logits, 9, score=score))
        loss = ops.load_balancing_loss(logits.repeat(2, 1), 9)
        torch.testing.assert_close(loss, load_balancing_loss_ref(logits, 9))
        assert bool(explain("moe_route", {"logits": logits.requires_grad_()}, top_k=9).launches) == kernel
        assert bool(explain("load_balancing_loss", {"logits": logits}, top_k=9).launches) == kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and the reference
def test_order_of_equal_scores(dtype, device):
    """The lower expert comes first; zero has no sign, and NaN comes first and stays in its row."""
    inf, nan = torch.inf, torch.nan
    rows = [[1, 2, 2, 1, 2, 0], [0, -0.0, 0, -0.0, 0, 0], [-inf, 1, -inf, -inf, -inf, 1], [0, 5, nan, inf, -nan, 7]]
    logits = torch.tensor(rows, dtype=dtype, device=device)
    weights, index = ops.moe_route(logits, 4)
    assert index.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [1, 5, 0, 2], [2, 4, 3, 5]]
    expected = F.softmax(logits.gather(-1, index), -1)
    torch.testing.assert_close(weights, expected, equal_nan=True)
    assert weights.isnan().any(-1).tolist() == [False, False, False, True]
    groups = ops.moe_route(torch.zeros(1, 6, dtype=dtype, device=device), 3, groups=(3, 2, "top2"))[1]
    assert groups.tolist() == [[0, 1, 2]]


def test_groups_with_experts_that_are_switched_off(device):
    """An expert of a chosen group comes before all others, whatever its score."""
    logits = torch.tensor([[0.0, 0.0, 5.0, -torch.inf]], device=device)
    for dtype in (torch.float32, torch.float64):  # the kernel, and the reference
        index = ops.moe_route(logits.to(dtype), 2, groups=(2, 1, "max"), normalize=False)[1]
        assert index.tolist() == [[2, 3]]


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_padding_may_hold_anything(bad, device):
    logits = torch.randn(40, 6, device=device)
    logits[3] = bad
    mask = torch.ones(40, device=device)
    mask[3] = 0
    for dtype in (torch.float32, torch.float64):
        leaf = logits.detach().to(dtype).requires_grad_()
        loss = ops.load_balancing_loss(leaf, 2, mask=mask)
        loss.backward()
        assert loss.isfinite()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[3].any()


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_logits_of_every_size(bias, device):
    """Neither do saturated scores lose their order, nor do chosen scores that underflow make 0 / 0."""
    logits = torch.tensor([[30.0, 40, 50, 60], [-400, -300, -200, -100], [1e4, 1e4 - 1, 0, -1e4]], device=device)
    correction = torch.tensor([bias, bias, 0, 0], device=device) if bias else None
    for score in ("softmax", "sigmoid"):
        weights, index = ops.moe_route(logits, 2, score=score, bias=correction)
        expected = [[0, 1]] * 3 if bias else [[3, 2], [3, 2], [0, 1]]
        assert index.sort(-1).values.tolist() == [sorted(row) for row in expected]
    weights, index = ops.moe_route(logits, 2, bias=correction)
    torch.testing.assert_close(weights, F.softmax(logits.gather(-1, index), -1))


def test_only_weights_have_a_gradient(device):
    logits = torch.randn(5, 8, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    weights, index = ops.moe_route(logits, 2, score="sigmoid", bias=bias)
    assert (weights.dtype, index.dtype, index.requires_grad) == (torch.float32, torch.int64, False)
    dlogits, dbias = torch.autograd.grad(weights.square().sum(), (logits, bias), allow_unused=True)
    assert dbias is None
    assert ((dlogits != 0).sum(-1) == 2).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_top"])
def test_equal_gradients_of_normalised_weights_cancel(score, device):
    """Their sum is constant; rounding would leave noise."""
    logits = torch.randn(50, 24, device=device, requires_grad=True)
    weights, _ = ops.moe_route(logits, 5, score=score, scale=0.7)
    (dlogits,) = torch.autograd.grad(-0.3 * weights.sum(), logits)
    assert not dlogits.any()


def test_the_backward_keeps_logits_and_index(device):
    logits, kept = torch.randn(5, 8, device=device).half().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, index = ops.moe_route(logits, 2, eps=0.1)
    assert [t.data_ptr() for t in kept] == [logits.data_ptr(), index.data_ptr()]


def test_rows_do_not_depend_on_the_batch(device):
    logits = torch.randn(65, 48, device=device)
    for rows in (1, 7, 64):
        for few, many in zip(ops.moe_route(logits[:rows], 4), ops.moe_route(logits, 4), strict=True):
            assert torch.equal(few, many[:rows])


def layers_of(count, device, rows=(2, 11)):
    shape = torch.Size(rows).numel(), E
    return tuple((torch.randn(shape, device=device) + torch.linspace(0, 2, E, device=device)) for _ in range(count))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("padding", [None, torch.int64, torch.bool, torch.float32])
def test_the_loss_of_transformers(count, padding, device, poisoned):
    layers, mask = layers_of(count, device), None
    if padding:
        mask = torch.ones(2, 11, dtype=padding, device=device)
        mask[0, :4] = mask[1, 10:] = 0
    results = []
    for loss in (
        lambda given: ops.load_balancing_loss(given, K, mask=mask),
        lambda given: load_balancing_loss_func(given, E, K, mask),
        lambda given: load_balancing_loss_ref(given, K, mask=mask),
    ):
        leaves = tuple(t.clone().requires_grad_() for t in layers)
        value = loss(leaves)
        results.append((value, *torch.autograd.grad(3 * value, leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[2], results[1], rtol=1e-5, atol=1e-7)


def test_the_loss_of_one_tensor_is_that_of_its_layers(device):
    layers = layers_of(3, device)
    expected = ops.load_balancing_loss(layers, K)
    torch.testing.assert_close(ops.load_balancing_loss(torch.stack(layers), K), expected)
    torch.testing.assert_close(ops.load_balancing_loss(list(layers), K), expected)


def test_even_and_uneven_loads(device):
    """The loss is K if the rows spread evenly, and E if K = 1 and all rows have one expert."""
    even = 30 * torch.eye(E, device=device)
    assert ops.load_balancing_loss(even, 1).item() == pytest.approx(1)
    assert ops.load_balancing_loss(even[:1].expand(E, E), 1).item() == pytest.approx(E)


def test_even_loads_have_no_gradient(device):
    """The experts' shares are equal; rounding would leave noise."""
    logits = torch.randn(50, 6, device=device, requires_grad=True)
    (dlogits,) = torch.autograd.grad(0.3 * ops.load_balancing_loss(logits, 6), logits)
    assert not dlogits.any()


@pytest.mark.parametrize("rows", [0, 5])
def test_no_rows_give_no_loss(rows, device):
    logits = torch.randn(rows, E, device=device, requires_grad=True)
    for fn in (ops.load_balancing_loss, load_balancing_loss_ref):
        loss = fn(logits, K, mask=torch.zeros(rows, dtype=torch.bool, device=device))
        (dlogits,) = torch.autograd.grad(loss, logits)
        assert loss.item() == 0
        assert not dlogits.any()


def test_gradients_of_some_layers(device):
    layers = layers_of(3, device)
    layers[1].requires_grad_()
    (some,) = torch.autograd.grad(ops.load_balancing_loss(layers, K), layers[1:2])
    for layer in layers:
        layer.requires_grad_()
    assert torch.equal(some, torch.autograd.grad(ops.load_balancing_loss(layers, K), layers)[1])


def test_layers_compile(device):
    torch._dynamo.reset()
    layers, mask = layers_of(3, device), torch.rand(2, 11, device=device) < 0.7
    step = lambda given: ops.load_balancing_loss(given, K, mask=mask)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    results = []
    for fn in (compiled, step):
        leaves = tuple(t.clone().requires_grad_() for t in layers)
        loss = fn(leaves)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
def test_loss_of_more_than_2_31_elements():
    rows = 2**31 // 4096 + 9
    logits = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(rows, dtype=torch.bool, device="cuda")
    mask[-8:] = True
    results = []
    for given, weight in ((logits, mask), (logits[-8:], None)):
        given = given.clone().requires_grad_()
        loss = ops.load_balancing_loss(given, 3, mask=weight)
        results.append((loss, torch.autograd.grad(loss, given)[0][-8:]))
    torch.testing.assert_close(*results)


Z, MASK = torch.randn(3, 8), torch.ones(3)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "logits must have a last dimension", lambda: ops.moe_route(Z[:, :0], 1)),
        (ValueError, "top_k must be at least 1, got 0", lambda: ops.moe_route(Z, 0)),
        (ValueError, "top_k must be at most the 8 experts, got 9", lambda: ops.moe_route(Z, 9)),
        (ValueError, "top_k must be at most the 4 experts of", lambda: ops.moe_route(Z, 5, groups=(4, 2, "max"))),
        (ValueError, "score must be one of", lambda: ops.moe_route(Z, 2, score="relu")),
        (ValueError, "eps must not be negative", lambda: ops.moe_route(Z, 2, eps=-1)),
        (ValueError, "dtype must be one of None, torch.float32", lambda: ops.moe_route(Z, 2, dtype=torch.int32)),
        (ValueError, "scale must be finite", lambda: ops.moe_route(Z, 2, scale=float("inf"))),
        (ValueError, r"bias must have shape \[8\], got \[3\]", lambda: ops.moe_route(Z, 2, bias=MASK)),
        (TypeError, "groups must be None or", lambda: ops.moe_route(Z, 2, groups=(4, 2))),
        (ValueError, r"groups\[0\] must divide the number of ex.*8, got 3", lambda:
            ops.moe_route(Z, 2, groups=(3, 1, "max"))),
        (ValueError, r"groups\[1\] must be at most .* 4, got 5", lambda: ops.moe_route(Z, 2, groups=(4, 5, "max"))),
        (ValueError, r"groups\[1\] must be at least 1", lambda: ops.moe_route(Z, 2, groups=(4, 0, "max"))),
        (ValueError, r"groups\[2\] must be one of 'max', 'top2'", lambda: ops.moe_route(Z, 2, groups=(4, 2, "sum"))),
        (ValueError, r"groups\[2\] 'top2' needs groups of", lambda: ops.moe_route(Z, 2, groups=(8, 2, "top2"))),
        (ValueError, "top_k must be at most the 8 experts", lambda: ops.load_balancing_loss(Z, 9)),
        (TypeError, "logits must be a tensor or a sequence", lambda: ops.load_balancing_loss((), 2)),
        (ValueError, r"logits\[1\] must have shape \[3, 8\]", lambda: ops.load_balancing_loss((Z, Z[:2]), 2)),
        (TypeError, r"logits\[1\] must have the dtype", lambda: ops.load_balancing_loss((Z, Z.half()), 2)),
        (ValueError, "mask must have a number for each of the 3", lambda: ops.load_balancing_loss(Z, 2, mask=Z)),
        (TypeError, "mask must be real and need no gradient", lambda:
            ops.load_balancing_loss(Z, 2, mask=MASK.clone().requires_grad_())),
        (ValueError, "mask must be on cpu", lambda: ops.load_balancing_loss(Z, 2, mask=MASK.to("meta"))),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
