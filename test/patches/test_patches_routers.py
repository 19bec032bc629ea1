"""Routers of mixtures: what patched routers compute, when the original runs, and what is left alone."""

import copy
import importlib.util
import pickle
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import DEVICE
from test_patches_experts import OTHERS, SIZES
from tiny_models import assert_exact, batch, results, rows, tiny
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as transformers has it
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

import liger_like.patching
from liger_like.patches import routers
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
CONFIG = SimpleNamespace(
    hidden_size=16, num_experts=8, num_local_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
    routed_scaling_factor=2.5, router_scaling_factor=2.5, n_group=4, topk_group=2, topk_method="group_limited_greedy",
    moe_num_experts=8, moe_k=3, moe_norm_min=1e-12,
)  # fmt: skip


class IndexFirstRouter(nn.Module):
    """The routers of Granite in transformers 5.17."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight).float()
        top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)
        top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)
        return top_k_index, top_k_weights, router_logits


CLASSES = {  # pattern -> family and class of transformers
    "softmax normalised or not": ("qwen3_moe", "Qwen3MoeTopKRouter"),
    "softmax normalised": ("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter"),
    "softmax normalised fp32": ("mixtral", "MixtralTopKRouter"),
    "softmax": ("jamba", "JambaTopKRouter"),
    "softmax of top": ("granitemoe_swa", "GraniteMoeSWATopKRouter"),
    "softmax of top with bias": ("gpt_oss", "GptOssTopKRouter"),
    "sigmoid": ("minimax_m3_vl", "MiniMaxM3VLTopKRouter"),
    "sigmoid with argument": ("minimax_m2", "MiniMaxM2TopKRouter"),
    "sigmoid fp32 with argument": ("hy_v3", "HYV3TopKRouter"),
    "sigmoid fp32 groups": ("deepseek_v3", "DeepseekV3TopkRouter"),
    "softmax fp32 groups": ("deepseek_v2", "DeepseekV2TopkRouter"),
    "softmax fp32 normalised groups": ("mistral_large4", "MistralLarge4TextTopkRouter"),
}
OTHER_NUMBERS = {  # the other branches of these patterns
    "softmax normalised or not": {"norm_topk_prob": False},
    "sigmoid fp32 groups": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "softmax fp32 groups": {"topk_method": "greedy"},
}
CASES = {
    **{name: (name, {}) for name in CLASSES},
    **{f"{name}, other numbers": (name, numbers) for name, numbers in OTHER_NUMBERS.items()},
}


def router_of(pattern, device="cpu", dtype=torch.float32, **config):
    """A router of the pattern with random weights, and the arguments of its forward but x."""
    family, name = CLASSES[pattern]
    newer = f"transformers has {name} in newer versions"
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(newer)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, name):
        pytest.skip(newer)
    router = getattr(module, name)(SimpleNamespace(**vars(CONFIG) | config))
    with torch.no_grad():
        for t in (*router.parameters(), *router.buffers()):
            t.normal_()
    correction = [torch.randn(8, device=device)] if pattern.endswith("argument") else []
    return router.to(device, dtype), correction


def pair_of(pattern, device="cpu", dtype=torch.float32, **config):
    """A patched router, its twin, and the arguments of their forward but x."""
    original, given = router_of(pattern, device, dtype, **config)
    patched = copy.deepcopy(original)
    (row,) = rows(patch(nn.Sequential(patched), strict=True, verify="numeric"), "router")
    assert (row.variant, row.status, row.count) == (pattern, "patched", 1)
    return patched, original, given


def everything(router, x, *given):
    """Outputs, with the weights by expert, and gradients: the order of the experts does not count."""
    x = x.detach().requires_grad_()
    logits, weights, index = router(x, *given)
    by_expert = weights.new_zeros(logits.shape).scatter(-1, index, weights)
    upstream = torch.linspace(-1, 2, logits.numel(), device=x.device).view_as(logits)
    loss = (logits * upstream.flip(0)).sum() + (by_expert.float() * upstream).sum()
    return [logits, by_expert, index.sort(-1).values, *torch.autograd.grad(loss, [x, *router.parameters()])]


@pytest.fixture
def calls(monkeypatch):
    """Options of the calls of the op."""
    made, op = [], routers.moe_route
    monkeypatch.setattr(
        routers, "moe_route", lambda *args, **options: made.append((*args[1:], options)) or op(*args, **options)
    )
    return made


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_original(case, device, calls):
    pattern, numbers = CASES[case]
    patched, original, given = pair_of(pattern, device, **numbers)
    calls.clear()
    x = torch.randn(5, 7, 16, device=device)
    if pattern == "softmax" or pattern.startswith("softmax of top"):
        x = x.flatten(0, 1)  # their outputs keep the dimensions of x
    torch.testing.assert_close(everything(patched, x, *given), everything(original, x, *given), rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    unpatch(nn.Sequential(patched))
    assert type(patched) is type(original)


def test_every_pattern_has_a_class():
    index_first = "softmax_of_top_index_first"
    assert {name.replace(" ", "_") for name in CLASSES} == {f.__name__ for f in routers.PATTERNS} - {index_first}


def test_logits_may_come_last(device, calls):
    original = IndexFirstRouter(CONFIG).to(device)
    nn.init.normal_(original.weight)
    patched, x = copy.deepcopy(original), torch.randn(6, 16, device=device)
    (row,) = rows(patch(nn.Sequential(patched), strict=True), "router")
    assert row.variant == "softmax of top index first"
    calls.clear()
    torch.testing.assert_close(patched(x), original(x))
    assert calls


@pytest.mark.parametrize("pattern", CLASSES)
def test_dtypes_of_half_precision_and_autocast(pattern, device):
    patched, original, given = pair_of(pattern, device)
    x = torch.randn(4, 16, device=device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        got, expected = patched(x, *given), original(x, *given)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    patched, original = patched.half(), original.half()
    got, expected = patched(x.half(), *given), original(x.half(), *given)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    torch.testing.assert_close(got[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [name for name in CLASSES if "fp32 " in name])
def test_logits_in_fp32_of_bf16(pattern):
    """The logits differ from those of products in fp32 by the order of sums, and no input is kept in fp32."""
    patched, original, given = pair_of(pattern, "cuda", torch.bfloat16)
    x = torch.randn(512, 16, device="cuda", dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits, *_ = patched(x.clone().requires_grad_(), *given)
    torch.testing.assert_close(logits, original(x, *given)[0], rtol=1e-5, atol=1e-5)
    assert all(t.dtype != torch.float32 for t in kept if t.shape == x.shape)


def test_where_no_kernel_can_run_the_original_runs(references, device, calls):
    patched, original, _ = pair_of("sigmoid fp32 groups")
    calls.clear()
    x = torch.randn(4, 16)
    torch.testing.assert_close(patched(x), original(x), rtol=0, atol=0)
    assert patched.to("meta")(x.to("meta"))[2].shape == (4, 3)
    assert not calls


def test_float64(device, calls):
    patched, original, _ = pair_of("softmax normalised fp32", device)
    patched, original, x = patched.double(), original.double(), torch.randn(4, 16, device=device).double()
    calls.clear()
    torch.testing.assert_close(patched(x), original(x), rtol=0, atol=0)
    assert not calls


def test_the_live_numbers_count(device, calls):
    patched, original, _ = pair_of("sigmoid fp32 groups", device)
    for router in (patched, original):
        router.top_k, router.num_group, router.topk_group, router.norm_topk_prob = 2, 2, 1, False
        router.routed_scaling_factor = 0.5
    calls.clear()
    x = torch.randn(6, 16, device=device)
    torch.testing.assert_close(everything(patched, x), everything(original, x))
    assert calls == [
        (2, {"bias": patched.e_score_correction_bias, "score": "sigmoid", "normalize": False, "eps": 1e-20,
             "scale": 0.5, "groups": (2, 1, "top2"), "dtype": None})
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["softmax normalised or not", "softmax of top with bias", "softmax"])
def test_weights_are_written_in_their_dtype(pattern, device, calls):
    """No further kernel casts them, or their gradient."""
    (patched, _, _), made = pair_of(pattern, device, torch.float16), []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(6, 16, device=device, dtype=torch.float16, requires_grad=True)
    with Ops():
        weights = patched(x)[1]
        weights.backward(torch.ones_like(weights))
    assert weights.dtype == torch.float16
    assert calls
    assert torch.ops.liger_like.moe_route_bwd.default in made
    assert torch.ops.aten._to_copy.default not in made


def test_names_of_arguments(device, calls):
    patched, original, (correction,) = pair_of("sigmoid fp32 with argument", device)
    x = torch.randn(6, 16, device=device)
    calls.clear()
    got = patched(e_score_correction_bias=correction, hidden_states=x)
    torch.testing.assert_close(got[0], original(x, correction)[0])
    assert calls


def test_other_routers_are_absent():
    model = nn.Sequential(Ernie4_5_MoeTopKRouter(CONFIG))
    with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
        (row,) = rows(patch(model, strict=True), "router")
    assert row.status == "absent"
    assert "Ernie4_5_MoeTopKRouter.forward contains more than" in row.reason


def test_numbers_that_do_not_fit():
    router, _ = router_of("sigmoid fp32 groups", num_experts_per_tok=5)
    with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
        (row,) = rows(patch(nn.Sequential(router)), "router")
    assert row.status == "skipped"
    assert row.reason == "its numbers do not fit: top_k must be at most the 4 experts of the chosen groups, got 5"


def test_arguments_that_are_not_read():
    class AnotherRouter(IndexFirstRouter):
        def forward(self, hidden_states, position):
            logits = F.linear(hidden_states, self.weight).float()
            top, index = logits.topk(self.top_k, dim=-1)
            return index, torch.softmax(top, dim=-1).type_as(hidden_states), logits

    with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
        (row,) = rows(patch(nn.Sequential(AnotherRouter(CONFIG))), "router")
    assert row.reason.endswith("AnotherRouter.forward has an argument that it does not read")


def test_equal_scores_are_no_trial():
    router, _ = router_of("softmax normalised fp32")
    nn.init.zeros_(router.weight)
    with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
        (row,) = rows(patch(nn.Sequential(router), verify="numeric"), "router")
    assert row.reason == "its scores are so close that rounding chooses the experts"


def test_a_trial_has_no_equal_scores(device):
    """Where equal experts are the last of the top, torch.topk may choose another one than ours."""
    original, _ = router_of("softmax normalised fp32", device, num_local_experts=64)
    with torch.no_grad():
        original.weight[8:] = original.weight[8]
    (row,) = rows(patch(nn.Sequential(original), strict=True, verify="numeric"), "router")
    assert row.status == "patched"


def test_a_wrong_form_is_found_out(monkeypatch):
    kind = routers.BY_NAME["softmax_normalised_fp32"]
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    for wrong in (
        kind._replace(options=lambda p: {"normalize": False}),
        kind._replace(options=lambda p: {"score": "sigmoid"}),
        kind._replace(weights="input"),
    ):
        monkeypatch.setitem(routers.BY_NAME, "softmax_normalised_fp32", wrong)
        router, _ = router_of("softmax normalised fp32")
        with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
            (row,) = rows(patch(nn.Sequential(router)), "router")
        assert (row.status, "on a miniature the replacement" in row.reason) == ("skipped", True)


FAMILIES = {
    "Mixtral": {"intermediate_size": 24},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 6},
    "DeepseekV3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "GptOss": {"intermediate_size": 24},
    "GraniteMoe": {"intermediate_size": 24},
}


def pair(family, device, implementation="eager", **config):
    """A model whose routers are patched, and its twin."""
    original = tiny(family, device, **SIZES | FAMILIES[family] | {"experts_implementation": implementation} | config)
    patched = copy.deepcopy(original)
    (row,) = rows(patch(patched, strict=True, verify="numeric", **OTHERS), "router")
    assert row.status == "patched"
    patched.set_experts_implementation(implementation)
    return patched, original


@pytest.mark.parametrize("family", FAMILIES)
def test_models_and_their_auxiliary_loss(family, device, calls):
    patched, original = pair(family, device)
    has_loss = family in ("Mixtral", "Qwen3Moe", "GptOss")
    inputs = batch(device) | ({"output_router_logits": True} if has_loss else {})
    calls.clear()
    assert_exact(patched, original, inputs)
    assert len(calls) == sum(type(module).__name__.endswith("Router") for module in patched.modules())
    if has_loss:
        got, expected = patched(**inputs), original(**inputs)
        torch.testing.assert_close(got.router_logits, expected.router_logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.aux_loss, expected.aux_loss)


class SplitRouter:
    """Give experts of other ranks the id 4, as the expert parallelism of transformers 5.17 does behind a router."""

    def __call__(self, module, args, output):
        logits, weights, index, *rest = output
        other = index // 4 != 1
        return logits, weights.masked_fill(other, 0.0), torch.fmod(index, 4).masked_fill(other, 4), *rest


def test_hooks_of_expert_parallelism_see_the_outputs(device, calls):
    patched, original, _ = pair_of("softmax normalised or not", device)
    for router in (patched, original):
        router.register_forward_hook(SplitRouter())
    x = torch.randn(6, 16, device=device)
    calls.clear()
    got, expected = patched(x), original(x)
    assert calls
    torch.testing.assert_close(got, expected)
    assert (got[2] == 4).any()


@pytest.mark.parametrize("order", ["before", "after"])
def test_expert_parallelism_of_old_versions(order, mesh, calls):
    """transformers 5.17 replaces the forward of each router on the instance."""
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    if not hasattr(parallel, "EpRouterParallel"):
        pytest.skip("transformers wraps routers in older versions")
    original, _ = router_of("softmax normalised or not")
    router = copy.deepcopy(original)
    if order == "before":
        patch(nn.Sequential(router), strict=True)
    parallel.EpRouterParallel().install_forward(router, mesh)
    if order == "after":
        with pytest.warns(UserWarning, match="no module of Sequential runs a kernel"):
            (row,) = rows(patch(nn.Sequential(router)), "router")
        assert row.reason.startswith("its forward was replaced by transformers.")
    calls.clear()
    x = torch.randn(6, 16)
    torch.testing.assert_close(router(x), original(x))
    assert len(calls) == (order == "before" and DEVICE == "cpu")  # a router on a CPU beside a GPU runs the reference


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_patched_model(copied, device, calls):
    model, _ = pair("Mixtral", device, num_hidden_layers=1)
    twin, inputs = copied(model), batch(device)
    unpatch(model)
    calls.clear()
    results(model, inputs)
    assert not calls
    results(twin, inputs)
    assert len(calls) == 1


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_compiled_block(family, device):
    patched, original = (model.model.layers[-1].mlp for model in pair(family, device, "batched_mm"))
    x = torch.randn(1, 6, 32, device=device)
    torch._dynamo.reset()
    out = torch.compile(patched, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, original(x), rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(out.square().sum(), patched.gate.weight)
    torch.testing.assert_close(
        got, torch.autograd.grad(original(x).square().sum(), original.gate.weight), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(order, device, calls):
    """LoRA of the gate's weight, which PEFT adds within each forward."""
    original = tiny("Qwen3Moe", device, **SIZES | FAMILIES["Qwen3Moe"] | {"experts_implementation": "eager"})
    patched = copy.deepcopy(original)
    options = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    if order == "before":
        patch(patched, strict=True, **OTHERS)
    adapted = []
    for model in (patched, original):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False)))
    (row,) = rows(patch(adapted[0], **OTHERS), "router")
    assert row.status == {"before": "already patched", "after": "patched"}[order]
    adapted[0].base_model.model.set_experts_implementation("eager")
    calls.clear()
    assert_exact(*adapted, batch(device))
    assert len(calls) == 2
