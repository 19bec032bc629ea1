"""Experts through transformers' interface: what patched models compute, and what is left alone."""

import copy
import pickle

import peft
import pytest
import torch
import transformers
from test_patches_mlp import CHANGES
from tiny_models import assert_exact, batch, results, rows, tiny
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import liger_like.patching
from benchmark.coverage.coverage import differences
from liger_like.doctor import tiny as doctored
from liger_like.patches import balance, experts
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
OTHERS = {"norm": False, "rope": False, "attention": False, "loss": False}
SIZES = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "Mixtral": {"intermediate_size": 24},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 6},
    "Olmoe": {"intermediate_size": 24},
    "DeepseekV3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "GptOss": {"intermediate_size": 24, "swiglu_limit": 0.3},
    "Phimoe": {"intermediate_size": 24, "router_jitter_noise": 10.0},  # less leaves its router without gradients
    "GraniteMoe": {"intermediate_size": 24, "hidden_act": "gelu"},
}
VARIANTS = {"GptOss": "clamped swiglu, up + 1", "GraniteMoe": "geglu erf"}
OTHER_FORMS = {  # of experts that doctor's models have
    "DeepseekV4ForCausalLM": "clamped swiglu",
    "HYV4ForCausalLM": "clamped swiglu",
    "MiniMaxM3VLForCausalLM": "clamped swiglu, up + 1",
}


def model_of(family, device, **config):
    model = tiny(family, device, **SIZES | FAMILIES[family] | {"experts_implementation": "eager"} | config)
    return model.train(family != "Phimoe")  # its router samples in training


def pair(family, device, **config):
    """A model whose experts are patched, and its twin, whose experts run one by one."""
    original = model_of(family, device, **config)
    patched = copy.deepcopy(original)
    patch(patched, strict=True, **OTHERS)
    return patched, original


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def traces(model):
    return [(type(m), {name: value for name, value in vars(m).items() if name != "training"}) for m in model.modules()]


def assert_same_logits(patched, original, inputs):
    with torch.no_grad():
        got, same, exact = (m.eval()(**inputs).logits for m in (patched, original, copy.deepcopy(original).double()))
    assert (got - exact).norm() <= 1.1 * (same - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_kernels(family, device, calls, monkeypatch):
    """The model's kernels, interpreted on a CPU; ``defined`` leaves them out below."""
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    original = model_of(family, device, num_hidden_layers=1)
    patched = copy.deepcopy(original)
    patch(patched, strict=True, verify="numeric", **OTHERS)
    calls.clear()
    inputs = batch(device, rows=1, length=10)
    assert_exact(patched, original, inputs)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_is_patched_where_nothing_has_gradients(mode, device, monkeypatch):
    monkeypatch.setattr(liger_like.patching, "_confirmed", set())
    balance._agrees.cache_clear()
    model = model_of("Mixtral", device)
    with mode():
        report = patch(model, strict=True, **OTHERS | {"loss": True})
    assert "fused loss, load balancing" in [row.variant for row in report.patched]
    assert {row.pattern for row in report.patched} >= {"experts", "router"}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_are_those_of_experts_run_one_by_one(family, device, defined):
    original = model_of(family, device)
    patched, inputs = copy.deepcopy(original), batch(device, rows=8)  # of few tokens a router's gradient cancels
    (row,) = rows(patch(patched, strict=True, verify="numeric", **OTHERS), "experts")
    layers = len(experts_of(original))
    assert (row.variant, row.count, row.status) == (VARIANTS.get(family, "swiglu"), layers, "patched")
    defined.clear()
    assert_exact(patched, original, inputs)
    assert_same_logits(patched, original, inputs)
    assert len(defined) == 2 * layers
    assert rows(patch(patched), "experts")[0].status == "already patched"
    unpatch(patched)
    assert not any("_liger_like_gate" in vars(module) for module in patched.modules())
    assert {m.config._experts_implementation for m in experts_of(patched)} == {"eager"}
    torch.testing.assert_close(results(patched, inputs), results(original, inputs), rtol=0, atol=0)
    assert len(defined) == 2 * layers


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms(name, device, defined, monkeypatch):
    monkeypatch.setattr(doctored, "LAYERS", 1)
    cls = getattr(transformers, name)
    model = doctored.build(cls, cls.config_class()).to(device)
    inputs, expected = doctored.first_that_run(model)
    (row,) = rows(patch(model, verify="numeric", **OTHERS), "experts")
    assert (row.variant, row.status) == (OTHER_FORMS[name], "patched")
    defined.clear()
    assert not differences(doctored.results(model, inputs), expected)
    assert defined


def test_nothing_of_transformers_changes(device):
    before = dict(ALL_EXPERTS_FUNCTIONS)
    model = model_of("Mixtral", device, experts_implementation="grouped_mm")
    config, was = model.config, traces(model)
    written = config.to_json_string()
    patch(model, strict=True, **OTHERS)
    after = dict(ALL_EXPERTS_FUNCTIONS)
    assert after.pop("liger_like") is experts.run
    before.pop("liger_like", None)
    assert after == before
    assert (model.config._experts_implementation, model.config._attn_implementation) == ("liger_like", "sdpa")
    assert (config._experts_implementation, model.config.to_json_string()) == ("grouped_mm", written)
    unpatch(model)
    assert traces(model) == was
    assert all(module.config is config for module in model.modules() if hasattr(module, "config"))


def test_a_model_without_experts_keeps_the_name_of_theirs(device):
    model = tiny("Llama", device)
    before = model.config._experts_implementation
    patch(model, strict=True)
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("liger_like", before)


def test_experts_and_attention_share_a_view(device):
    model = model_of("Mixtral", device)
    report = patch(model)
    found = {row.pattern for row in report.patched}
    assert found == {"rms_norm", "rope", "experts", "router", "attention", "lm_head", "generation"}
    assert model.config is experts_of(model)[0].config
    names = lambda: (model.config._attn_implementation, model.config._experts_implementation)  # noqa: E731
    assert names() == ("liger_like", "liger_like")
    model.set_attn_implementation("eager")
    assert names() == ("eager", "liger_like")
    patch(model, attention=False)
    assert names() == ("eager", "liger_like")
    patch(model)
    assert names() == ("liger_like", "liger_like")


def test_a_copy_of_a_config_has_attributes_of_its_own(device):
    """transformers makes the config of a layer so, and takes attributes out of the copy."""
    model = model_of("Mixtral", device)
    config = model.config
    patch(model)
    copied = copy.copy(model.config)
    copied.num_experts_per_tok = 1
    del copied.vocab_size
    assert (model.config.num_experts_per_tok, model.config.vocab_size) == (2, 101)
    assert copied._experts_implementation == "liger_like"
    copied._experts_implementation = "eager"
    assert model.config._experts_implementation == "liger_like"
    unpatch(model)
    assert model.config is config


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_where_no_kernel_can_run_experts_run_as_before(implementation, references, calls):
    original = model_of("Qwen3Moe", "cpu", experts_implementation=implementation)
    model, inputs = copy.deepcopy(original), batch("cpu")
    patch(model, strict=True, **OTHERS)
    calls.clear()
    torch.testing.assert_close(results(model, inputs), results(original, inputs), rtol=0, atol=0)
    assert not calls


def test_float64(device, calls):
    original = model_of("GptOss", device).double()
    model, inputs = copy.deepcopy(original), batch(device)
    patch(model, strict=True, **OTHERS)
    calls.clear()
    torch.testing.assert_close(results(model, inputs), results(original, inputs), rtol=0, atol=0)
    assert not calls


def test_a_user_may_choose_another_implementation_and_come_back(device, defined):
    model = model_of("Mixtral", device)
    patch(model, **OTHERS)
    inputs = batch(device)
    again = {
        "eager": lambda: model.set_experts_implementation("liger_like"),
        "grouped_mm": lambda: patch(model, **OTHERS),
    }
    for chosen, ours in again.items():
        defined.clear()
        model.set_experts_implementation(chosen)
        model(**inputs)
        assert not defined
        ours()
        defined.clear()
        model(**inputs)
        assert len(defined) == 2
    unpatch(model)
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("liger_like")  # the name is known, but no module has a gate
    defined.clear()
    model(**inputs)
    assert not defined


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_generate(family, device, defined, monkeypatch):
    """The prompt has more rows than experts, so kernels run it; decoding copies the weights of its few rows."""
    patched, original = (model.eval() for model in pair(family, device))
    decoded, batched = [], ALL_EXPERTS_FUNCTIONS["batched_mm"]
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", lambda *args: decoded.append(1) or batched(*args)
    )
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ids = batch(device, length=7)["input_ids"]
    defined.clear()
    got = patched.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert (len(defined), len(decoded)) == (2, 6)
    expected = original.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits)
    assert patched.config._experts_implementation == "liger_like"


def test_few_rows_with_gradients_run_the_op(device, defined):
    patched, original = pair("Mixtral", device, num_local_experts=8)
    ids = batch(device, rows=1, length=4)["input_ids"]  # 8 rows, as many as experts
    defined.clear()
    assert_exact(patched, original, {"input_ids": ids, "labels": ids})
    assert len(defined) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device, defined):
    patched, original = pair("Qwen3Moe", device)
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    defined.clear()
    assert_exact(patched, original, batch(device))
    assert len(defined) == 4


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_compiled_whole(family, device, calls):
    patched, original = pair(family, device, num_hidden_layers=1)
    inputs = {**batch(device, rows=1, length=10), "use_cache": False}
    torch._dynamo.reset()
    calls.clear()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    loss = compiled(**inputs).loss
    loss.backward()
    expected = results(original, inputs)
    torch.testing.assert_close(loss, expected.pop("loss"))
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get(name), rtol=1e-4, atol=1e-6)


def test_compiled_whole_where_no_kernel_can_run(references, calls):
    patched, original = pair("Mixtral", "cpu", num_hidden_layers=1, experts_implementation="grouped_mm")
    inputs = {**batch("cpu"), "use_cache": False}
    torch._dynamo.reset()
    with torch.no_grad():
        loss = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs).loss
        torch.testing.assert_close(loss, original(**inputs).loss)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(family, dtype, device, defined):
    patched, original = pair(family, device)
    inputs = {**batch(device), "use_cache": False}
    with torch.autocast(device, dtype):
        got, expected = results(patched, inputs), results(original, inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in expected.items()}
    for name, t in expected.items():
        assert (got[name] - t).norm() <= 16 * torch.finfo(dtype).eps * t.norm(), name


@pytest.mark.parametrize("change", CHANGES)
def test_the_live_activation_runs(change, device, defined):
    patched, original = pair("Qwen3Moe", device, num_hidden_layers=1)
    for model in (patched, original):
        CHANGES[change](experts_of(model)[0], "act_fn")
    inputs = batch(device)
    defined.clear()
    torch.testing.assert_close(results(patched, inputs), results(original, inputs))
    assert not defined


def test_the_live_numbers_count(device, defined):
    patched, original = pair("GptOss", device, num_hidden_layers=1)
    for model in (patched, original):
        experts_of(model)[0].limit, experts_of(model)[0].alpha = 0.2, 1.1
    assert_exact(patched, original, batch(device))
    assert [(options["limit"], options["alpha"]) for options in defined[-1:]] == [(0.2, 1.1)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_patched_model(copied, device, defined):
    model = model_of("Mixtral", device, num_hidden_layers=1)
    patch(model, **OTHERS)
    twin, inputs = copied(model), batch(device)
    unpatch(model)
    defined.clear()
    results(model, inputs)
    assert not defined
    results(twin, inputs)
    assert defined
    unpatch(twin)
    assert type(twin.config) is transformers.MixtralConfig
    assert twin.config._experts_implementation == "eager"


TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_adapters(family, order, device, defined):
    """LoRA of packed experts, which PEFT adds to the weights within each forward."""
    original = model_of(family, device)
    patched = copy.deepcopy(original)
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": TARGETS, "init_lora_weights": False}
    if order == "before":
        patch(patched, strict=True, **OTHERS)
    adapted = []
    for model in (patched, original):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(model, peft.LoraConfig(**options)))
    patched, original = adapted
    (row,) = rows(patch(patched, **OTHERS), "experts")
    assert row.status == {"before": "already patched", "after": "patched"}[order]
    defined.clear()
    assert_exact(patched, original, batch(device))
    assert len(defined) == 2
    unpatch(patched)
    assert {m.config._experts_implementation for m in experts_of(patched)} == {"eager"}


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_ids_of_other_ranks_add_nothing(family, device, calls):
    """transformers' expert parallelism gives an expert of another rank the id ``num_experts``, and the weight 0."""
    module = experts_of(model_of(family, device, num_hidden_layers=1))[0]
    module._is_expert_parallel = True
    twin = copy.deepcopy(module)
    twin.config._experts_implementation = "grouped_mm"
    patch(module, strict=True, **OTHERS)
    index = torch.tensor([[0, 4], [4, 2], [4, 4], [3, 1], [4, 0]], device=device)
    x = torch.randn(5, 32, device=device)
    weights = torch.rand(5, 2, device=device).masked_fill(index == 4, 0.0)
    found = []
    calls.clear()
    for experts_ in (module, twin):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
        out = experts_(leaves[0], index, leaves[1])
        found.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *experts_.parameters()])])
    assert calls
    assert all(t.isfinite().all() for t in found[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_experts_within_expert_parallelism_are_patched(mesh, defined):
    """The forward of each instance is that of transformers.distributed, which calls the experts' own."""
    parallel = pytest.importorskip("transformers.distributed.expert_parallel")
    model, twin = (model_of("Mixtral", "cpu") for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for module in experts_of(model):
        parallel.EpDispatchExpertsParallel().install_forward(module, mesh, tp_mesh=mesh, ep_implementation="all_reduce")
    assert rows(patch(model, strict=True, **OTHERS), "experts")[0].status == "patched"
    inputs = batch("cpu")
    defined.clear()
    assert_exact(model, twin, inputs)
    assert len(defined) == 2
