"""Models with adapters: LoRA on any layer, the head included, trained copies, and heads that are quantised."""

import contextlib
import copy
import importlib.util
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
from tiny_models import assert_exact, results, rows, tiny
from tiny_models import batch as long_batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from liger_like.patches import heads
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
ADAPTERS = {
    "head": {"target_modules": ["lm_head"]},
    "projections": {"target_modules": "all-linear"},
    "head and projections": {"target_modules": ["lm_head", "up_proj"], "lora_alpha": 3, "use_rslora": True},
    "head as a copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "norms as copies": {"target_modules": ["lm_head"], "modules_to_save": ["norm"]},
}


HEAD = {"norm": False, "rope": False, "mlp": False, "attention": False}
MLP_AND_HEAD = HEAD | {"mlp": True}


def batch(device):
    return long_batch(device, length=6)


def adapted(model, **options):
    """The same adapters for models of the same weights."""
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **{"init_lora_weights": False, **options}))


def pair(adapters, device, order="after", what=HEAD):
    """A model with adapters that was patched, and one that was not."""
    original = tiny("Llama", device, num_hidden_layers=1)
    model = copy.deepcopy(original)
    if order == "before":
        patch(model, strict=True, **what)
    model, original = adapted(model, **adapters), adapted(original, **adapters)
    patch(model, strict=True, **what)
    return model, original


CASES = [*((name, "after") for name in ADAPTERS if name != "projections"), ("projections", "before")]


@pytest.mark.parametrize(("adapters", "order"), [*CASES, ("head", "before"), ("head as a copy", "before")])
def test_adapters(adapters, order, device):
    model, original = pair(ADAPTERS[adapters], device, order, {})
    inputs = batch(device)
    trained = {name for name, p in original.named_parameters() if p.requires_grad}
    assert results(model, inputs).keys() == {"loss", *trained}
    assert_exact(model, original, inputs)
    assert model(**inputs).logits is None
    unpatch(model)
    assert {name: type(m) for name, m in model.named_modules()} == {n: type(m) for n, m in original.named_modules()}
    assert not any("_read_later" in vars(m) for m in model.modules())
    assert_exact(model, original, inputs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("adapters", ["head", "head as a copy"])
def test_copies_are_patched_and_independent(adapters, copied, device):
    model, original = pair(ADAPTERS[adapters], device)
    twin = copied(model)
    unpatch(model)
    inputs = batch(device)
    torch.testing.assert_close(results(twin, inputs), results(original, inputs))
    assert twin(**inputs).logits is None
    assert model(**inputs).logits is not None


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("adapters", ["head", "head as a copy"])
def test_fully_sharded(adapters, order):
    original = adapted(tiny("Llama", num_hidden_layers=1), **ADAPTERS[adapters])
    model = copy.deepcopy(original)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if order == "before":
            patch(model, strict=True, **HEAD)
        for module in (model.get_output_embeddings(), model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        patch(model, strict=True, **HEAD)
        inputs = batch("cpu")
        got, expected = results(model, inputs), results(original, inputs)
        assert model(**inputs).logits is None
        for name, t in expected.items():
            torch.testing.assert_close(got[name].full_tensor() if name != "loss" else got[name], t)
    finally:
        dist.destroy_process_group()


def test_the_report_tells_of_the_adapters(device):
    model, _ = pair(ADAPTERS["head"], device)
    found = [(row.cls, row.variant, row.count, row.status) for row in rows(patch(model), "lm_head")]
    parts = ("LlamaForCausalLM", "fused loss"), ("Linear", "lazy logits, LoRA"), ("Linear", "lazy logits")
    assert found == [(*part, 1, "already patched") for part in parts]


def test_verified_numerically(device):
    for adapters in ("head and projections", "head as a copy"):
        model = adapted(tiny("Llama", device, num_hidden_layers=1), **ADAPTERS[adapters])
        report = patch(model, verify="numeric", strict=True)
        assert all(row.error is not None for row in report.patched if row.pattern != "generation")
        assert model(**batch(device)).logits is None


def test_a_wrong_term_is_refused(device, monkeypatch):
    right = heads._low_rank
    monkeypatch.setattr(heads, "_low_rank", lambda *args: right(*args) * 1.01)
    report = patch(adapted(tiny("Llama", device, num_hidden_layers=1), **ADAPTERS["head"]), verify="numeric")
    (row,) = [row for row in rows(report, "lm_head") if row.status == "skipped"]
    assert "the replacement differs by" in row.reason


def test_patched_first_and_not_again(device):
    """The head is hidden by its adapter, so that its loss is not fused; nothing of the adapter is lost."""
    original = tiny("Llama", device, num_hidden_layers=1)
    model = copy.deepcopy(original)
    patch(model)
    model, original = (adapted(m, **ADAPTERS["head"]) for m in (model, original))
    with pytest.warns(UserWarning, match="the head changed after patching, patch again"):
        assert_exact(model, original, batch(device))


def test_dropout(device):
    model, original = pair({**ADAPTERS["head and projections"], "lora_dropout": 0.4}, device)
    inputs, losses = batch(device), []
    for m in (original, model):
        torch.manual_seed(2)
        losses.append(results(m, inputs))
    for name, expected in losses[0].items():
        torch.testing.assert_close(losses[1][name], expected)
    torch.manual_seed(3)
    assert abs(results(model, inputs)["loss"] - losses[1]["loss"]) > 1e-4
    assert model(**inputs).logits is None


@pytest.mark.parametrize("change", ["second", "both", "disabled", "merged", "unloaded"])
def test_adapters_are_the_active_ones(change, device):
    models = pair(ADAPTERS["head"], device)
    inputs = batch(device)
    before = results(models[0], inputs)["loss"]
    changed = []
    for model in models:
        torch.manual_seed(4)
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
        if change == "second":
            model.set_adapter("second")
        elif change == "both":
            model.base_model.set_adapter(["default", "second"])
        elif change == "disabled":
            model.base_model.disable_adapter_layers()
        elif change == "merged":
            model.merge_adapter()
        model.requires_grad_()
        changed.append(model.unload() if change == "unloaded" else model)
    assert_exact(*changed, inputs)
    loss = results(changed[0], inputs)["loss"]
    assert changed[0](**inputs).logits is None
    assert (abs(loss - before) > 1e-4) == (change != "merged")


def test_softcap_and_first_words_with_an_adapter(device):
    original = nn.Linear(8, 11, device=device)
    head = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False), nn.ModuleDict({"head": original})
    )["head"]
    from liger_like.patches import lm_head

    fused = copy.deepcopy(head, {id(p): p for p in head.parameters()})
    for part, kind in heads.parts_of(fused):
        part.__class__ = type("Fused", (type(part),), lm_head._head_methods(type(part), kind))
    hidden = torch.randn(2, 5, 8, device=device, requires_grad=True)
    labels = torch.randint(7, (10,), device=device)

    def loss(logits):
        z = (torch.tanh(logits[..., :7] / 3) * 3).view(-1, 7)
        return nn.functional.cross_entropy(z, labels)

    lazy = lm_head.LazyLogits(fused, hidden)
    got, expected = loss(lazy), loss(head(hidden))
    assert lazy.fused
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    for x, y in zip(
        (got, *torch.autograd.grad(got, leaves)), (expected, *torch.autograd.grad(expected, leaves)), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("half", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_adapters_of_a_wider_dtype(half, device):
    """Adapters as PEFT makes them for 16-bit models, compared with the same model in float64."""
    model, original = pair(ADAPTERS["head"], device)
    for m in (model, original):
        m.to(half)
        for name, p in m.named_parameters():
            if "lora_" in name:
                p.data = p.data.float()
    inputs = batch(device)
    got, same = results(model, inputs), results(original, inputs)
    exact = results(copy.deepcopy(original).double(), inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in same.items()}
    for name, t in exact.items():
        error, allowed = (float((x[name] - t).double().norm() / t.double().norm()) for x in (got, same))
        assert error <= allowed + torch.finfo(half).eps, name


def test_autocast(device):
    model, original = pair(ADAPTERS["head and projections"], device)
    inputs = batch(device)
    with torch.autocast(device, torch.float16):
        got, expected = results(model, inputs), results(original, inputs)
    assert model(**inputs).logits is None
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in expected.items()}
    for name, t in expected.items():
        assert (got[name] - t).norm() <= 4 * torch.finfo(torch.float16).eps * t.norm(), name


def test_compile_without_graph_breaks(device):
    model, original = pair(ADAPTERS["head"], device)
    inputs = {**batch(device), "use_cache": False}
    loss = torch.compile(model.base_model.model, fullgraph=True, backend="aot_eager")(**inputs).loss
    loss.backward()
    expected = results(original, inputs)
    torch.testing.assert_close(loss, expected.pop("loss"))
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "is a DoraLinearVariant"), ({"lora_bias": True}, "more than two matrices")],
)
def test_what_is_more_than_lora_is_not_fused_and_reported(options, reason, order, device):
    original = tiny("Llama", device, num_hidden_layers=1)
    original.lm_head.bias = nn.Parameter(torch.randn(101, device=device))
    model = copy.deepcopy(original)
    if order == "before":
        patch(model)
    model, original = (adapted(m, **ADAPTERS["head"], **options) for m in (model, original))
    (row,) = [row for row in rows(patch(model), "lm_head") if row.status == "skipped"]
    assert row.cls == "LlamaForCausalLM"
    assert reason in row.reason
    assert {row.pattern for row in patch(model).patched} >= {"rms_norm", "rope", "glu_mlp", "attention"}
    with pytest.warns(UserWarning, match="not fused") if order == "before" else contextlib.nullcontext():
        assert_exact(model, original, batch(device))


def test_an_adapter_of_another_kind_that_comes_later(device):
    models = pair(ADAPTERS["head"], device)
    for model in models:
        torch.manual_seed(5)
        model.add_adapter("dora", peft.LoraConfig(target_modules=["lm_head"], use_dora=True, init_lora_weights=False))
        model.set_adapter("dora")
    with pytest.warns(UserWarning, match="not fused"):
        assert_exact(*models, batch(device))
    (row,) = [row for row in rows(patch(models[0]), "lm_head") if row.status == "skipped"]
    assert "DoraLinearVariant" in row.reason


class Int8Linear(nn.Linear):
    """Its weight is in 8 bits, its forward its own."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device=linear.weight.device)
        scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class QuantisedTensor(torch.Tensor):
    """Pretends to be in fp32; torch's functions see it dequantised."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=values.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __deepcopy__(self, memo):
        return nn.Parameter(QuantisedTensor(self.values.clone(), self.scale), requires_grad=False)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        real = [x.values.float() * x.scale if isinstance(x, cls) else x for x in args]
        return function(*real, **kwargs or {})


def with_own_forward(linear):
    return Int8Linear(linear)


def with_own_tensor(linear):
    int8 = Int8Linear(linear)
    linear.weight = nn.Parameter(QuantisedTensor(int8.weight, int8.scale), requires_grad=False)
    return linear


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("quantised", [with_own_forward, with_own_tensor])
def test_quantised_heads_are_not_fused_and_reported(quantised, lora, device):
    original = tiny("Llama", device, num_hidden_layers=1)
    original.lm_head = quantised(original.lm_head)
    model = copy.deepcopy(original)
    if lora:
        model, original = (adapted(m, **ADAPTERS["head"]) for m in (model, original))
    with pytest.warns(UserWarning, match="runs a kernel"):
        report = patch(model, **HEAD)
    (row,) = rows(report, "lm_head")
    assert row.status == "skipped"
    assert type(original.get_output_embeddings().weight).__name__ in row.reason or "Int8Linear" in row.reason
    inputs = batch(device)
    expected = results(original, inputs)
    for name, t in results(model, inputs).items():
        torch.testing.assert_close(t, expected[name])
    assert model(**inputs).logits is not None


def in_four_bits(saved, **options):
    """All of a saved model's linear layers but its head, by bitsandbytes."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    return LlamaForCausalLM.from_pretrained(saved, quantization_config=config).train()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("adapters", "order"), [("head and projections", "after"), ("head as a copy", "before")])
def test_adapters_of_a_model_in_four_bits(adapters, order, device, tmp_path):
    tiny("Llama", num_hidden_layers=1).save_pretrained(tmp_path)
    model, original = (in_four_bits(tmp_path, bnb_4bit_use_double_quant=True) for _ in range(2))
    if order == "before":
        patch(model, strict=True, **MLP_AND_HEAD)
    prepared = [peft.prepare_model_for_kbit_training(m, True, {"use_reentrant": False}) for m in (model, original)]
    model, original = (adapted(m, **ADAPTERS[adapters]) for m in prepared)
    patch(model, strict=True, **MLP_AND_HEAD)
    assert type(model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")).__name__ == "Linear4bit"
    inputs = batch(device)
    got, expected = results(model, inputs), results(original, inputs)
    assert model(**inputs).logits is None
    torch.testing.assert_close(got, expected)
