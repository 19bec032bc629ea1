"""Linear layers with PEFT's adapters: two matrices run three products in the forward, all else is PEFT's."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from test_patches_peft import adapted, batch
from tiny_models import assert_exact, results, rows, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from liger_like.parallel import checkpoint_policy
from liger_like.patches import lora
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
ONLY = {"norm": False, "rope": False, "mlp": False, "attention": False, "loss": False}
LAYERS = {"target_modules": "all-linear", "lora_alpha": 6}


@pytest.fixture
def run(monkeypatch):
    """Calls of the autograd function, but for those of the small layer on which ``patch`` tries it."""
    calls, forward = [], lora._AdaptedLinear.forward

    def counted(ctx, x, *args):
        if x.shape[-1] != 4:
            calls.append((x, *args))
        return forward(ctx, x, *args)

    monkeypatch.setattr(lora._AdaptedLinear, "forward", staticmethod(counted))
    return calls


def layer_of(device="cpu", dtype=torch.float32, bias=False, adapter_dtype=None, **options):
    """A linear layer of 24 features and 40 outputs with an adapter, in PEFT's class."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(24, 40, bias=bias)})
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["layer"], "init_lora_weights": False} | options
    layer = peft.inject_adapter_in_model(peft.LoraConfig(**options), model)["layer"].to(device, dtype).train()
    for name, p in layer.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(adapter_dtype or dtype)
    return layer


def pair(device="cpu", **options):
    """A patched layer and its twin."""
    original = layer_of(device, **options)
    patched = copy.deepcopy(original)
    patch(patched, strict=True, **ONLY)
    return patched, original


def outcome(layer, x, dtype=None):
    """The output and every gradient, by name; with ``dtype``, under autocast."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        y = layer(x)
    if y.requires_grad:
        y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **gradients, **({} if x.grad is None else {"x": x.grad})}


def assert_rule(layers, x, dtype=None):
    """The comparison rule for the output and each gradient, and equal dtypes."""
    exact = outcome(copy.deepcopy(layers[1]).double(), x.double())
    got, same, again = (outcome(layer, x, dtype) for layer in (*layers, layers[0]))
    assert got.keys() == same.keys() == exact.keys()
    for name, t in exact.items():
        assert got[name].dtype == same[name].dtype
        assert torch.equal(got[name], again[name])
        error, allowed = (float((r[name] - t).double().norm()) for r in (got, same))
        assert error <= 1.1 * allowed + 1e-6 * float(t.norm()), f"{name}: {error:.2e}, PEFT {allowed:.2e}"


def sample(device="cpu", dtype=torch.float32, *shape, grad=True):
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, 64, 24)), device=device).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact(dtype, bias, device, run):
    layers = pair(device, dtype=dtype, bias=bias)
    assert_rule(layers, sample(device, dtype))
    assert len(run) == 2


@pytest.mark.parametrize("frozen", ["x", "lora_A", "lora_B", "x lora_A", "x lora_B", "lora_A lora_B"])
def test_only_the_gradients_that_are_asked_for(frozen, run):
    layers = pair()
    for layer in layers:
        for name, p in layer.named_parameters():
            p.requires_grad_(p.requires_grad and not any(part in name for part in frozen.split()))
    assert_rule(layers, sample(grad="x" not in frozen))
    assert len(run) == 2


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 3, 5, 24)])
def test_shapes(shape, run):
    assert_rule(pair(), sample("cpu", torch.float32, *shape))
    transposed = sample("cpu", torch.float32, 2, 24, 8).mT
    assert_rule(pair(), transposed)
    assert len(run) == 4


def test_adapters_in_fp32_under_autocast(device, run):
    layers = pair(device, dtype=torch.bfloat16, adapter_dtype=torch.float32)
    assert_rule(layers, sample(device, torch.bfloat16), torch.bfloat16)
    assert len(run) == 2
    kept = layers[0](sample(device, torch.bfloat16)).grad_fn  # without autocast PEFT's own forward runs
    assert "AdaptedLinear" not in kept.name()


def test_gradients_do_not_read_what_they_replace(run):
    """A product with ``beta=0`` ignores the matrix that it gets in place of an addend."""
    patched, _ = pair()
    y = patched(sample())
    with torch.no_grad():
        for part in (patched.lora_A, patched.lora_B):
            part["default"].weight.data.fill_(float("nan"))
    a, b = torch.autograd.grad(y.sum(), [patched.lora_A["default"].weight, patched.lora_B["default"].weight])
    assert b.isfinite().all()
    assert a.isnan().all()
    assert len(run) == 1


@pytest.mark.parametrize("frozen", ["nothing", "lora_A", "lora_B", "x", "x lora_A"])
def test_saves_no_more_than_peft(frozen):
    def saved(layer):
        for name, p in layer.named_parameters():
            p.requires_grad_(p.requires_grad and not any(part in name for part in frozen.split()))
        kept = {}

        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layer(sample(grad="x" not in frozen))
        return sum(kept.values())

    ours, theirs = map(saved, pair())
    assert 0 < ours <= theirs


def test_small_gradients_in_half_precision(device):
    """The factor comes before the gradient of x A^T is rounded: else it would be below what fp16 holds."""
    layers = pair(device, dtype=torch.float16, lora_alpha=256)
    for layer in layers:
        layer.lora_B["default"].weight.data.mul_(1e-3)
    exact, got, same = (
        torch.autograd.grad(
            layer(x), layer.lora_A["default"].weight, torch.full((2, 64, 40), 1e-4, device=device).to(x)
        )[0]
        for layer, x in (
            (copy.deepcopy(layers[1]).double(), sample(device, torch.float64)),
            *((layer, sample(device, torch.float16)) for layer in layers),
        )
    )
    error, allowed = (float((t - exact).norm()) for t in (got, same))
    assert error <= 1.1 * allowed


@pytest.mark.parametrize("shape", [(2, 64, 24), (64, 24)])
def test_results_may_change_in_place(shape, run):
    for layer in pair():
        y = layer(sample("cpu", torch.float32, *shape))
        y.clamp_(-1, 1).sum().backward()
    assert len(run) == 1


def test_autocast_around_the_backward_alone(run):
    """The backward computes in the dtypes of its forward."""
    patched, original = pair()
    weight = patched.lora_A["default"].weight
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            y = patched(sample())
        (got,) = torch.autograd.grad(y.sum(), weight)
    assert len(run) == 1
    (expected,) = torch.autograd.grad(original(sample()).sum(), original.lora_A["default"].weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("policy", [checkpoint_policy(), checkpoint_policy(("matmul",))])
def test_checkpoints_that_keep_products(policy, device):
    original = adapted(tiny("Llama", device, num_hidden_layers=1), **LAYERS)
    model = copy.deepcopy(original)
    patch(model, strict=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
    assert_exact(model, original, batch(device))


def test_counted_operations(run):
    counts = []
    for layer in pair():
        with FlopCounterMode(display=False) as counter:
            layer(sample()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert not run


def test_replicas_have_no_parameters():
    """DataParallel gives replicas their tensors as plain attributes."""
    for part in ("base_layer", "lora_A", "lora_B"):
        patched, _ = pair()
        linear = getattr(patched, part)
        linear = linear if part == "base_layer" else linear["default"]
        weight = linear._parameters.pop("weight").detach()
        linear.__dict__["weight"] = weight
        x = sample()
        expected = patched.base_layer(x) + 1.5 * patched.lora_B["default"](patched.lora_A["default"](x))
        assert lora.operands(patched, x) is None
        torch.testing.assert_close(patched(x), expected)


def test_a_replaced_forward_is_left_alone(monkeypatch):
    forward = peft.tuners.lora.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, x, *args, **kw: forward(self, x, *args, **kw))
    (row,) = rows(patch(nn.Sequential(layer_of(), nn.LayerNorm(40))), "lora")
    assert row.status == "skipped"
    assert "forward was replaced by" in row.reason


def test_sparse_rows_are_peft_s_own():
    patched, original = pair()
    x = sample(grad=False)[0].to_sparse()
    assert torch.equal(patched(x), original(x))


def test_differentiable_once():
    patched, _ = pair()
    x = sample()
    (dx,) = torch.autograd.grad(patched(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


def several(layer):
    layer.update_layer("second", 2, lora_alpha=3, config=peft.LoraConfig(r=2, init_lora_weights=False))
    layer.set_adapter(["default", "second"])


def hooked(part):
    return lambda layer: part(layer).register_forward_hook(lambda module, args, y: y * 2)


def shadowed(layer):
    linear = layer.lora_B["default"]
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 3


def dropped(layer):
    layer.lora_dropout["default"] = nn.Dropout(0.0)


CHANGES = {
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "several": several,
    "dropout": dropped,
    "trained weight": lambda layer: layer.base_layer.weight.requires_grad_(),
    "trained bias": lambda layer: layer.base_layer.bias.requires_grad_(),
    "hook on dropout": hooked(lambda layer: layer.lora_dropout["default"]),
    "hook on A": hooked(lambda layer: layer.lora_A["default"]),
    "hook on the base": hooked(lambda layer: layer.base_layer),
    "another forward of B": shadowed,
    "bias of B": lambda layer: setattr(layer.lora_B["default"], "bias", nn.Parameter(torch.ones(40))),
    "wider adapters": lambda layer: [p.data for p in (layer.lora_A.double(), layer.lora_B.double())[0].parameters()],
    "a variant": lambda layer: layer.update_layer("default", 4, 6, config=peft.LoraConfig(r=4, use_dora=True)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_all_else_is_peft_s_own(change, run):
    """The change comes after patching, so that each call must see it."""
    layers = pair(bias=True)
    for layer in layers:
        torch.manual_seed(2)
        CHANGES[change](layer)
    got, expected = (outcome(layer, sample()) for layer in layers)
    assert not run
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_other_arguments_and_transforms_are_peft_s_own(run):
    patched, original = pair()
    x = sample(grad=False)
    assert torch.equal(patched(x, adapter_names=["__base__"] * 2), original.base_layer(x))
    jvp = [torch.func.jvp(layer, (x,), (x,))[1] for layer in (patched, original)]
    assert torch.equal(*jvp)
    assert not run


def test_switched_adapters_and_scales(run):
    """Each call reads which adapter is active, and its scale."""
    layers = pair()
    for layer in layers:
        torch.manual_seed(2)
        layer.update_layer("second", 2, lora_alpha=3, config=peft.LoraConfig(r=2, init_lora_weights=False))
        layer.set_adapter("second")
        layer.scale_layer(0.3)
    assert_rule(layers, sample())
    with torch.no_grad():
        torch.testing.assert_close(layers[0](sample()), layers[1](sample()))
    assert len(run) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "is a DoraLinearVariant"),
        ({"lora_bias": True}, "more than two matrices"),
        ({"lora_dropout": 0.1}, "has dropout"),
    ],
)
def test_other_adapters_are_left_alone_and_reported(options, reason):
    model = nn.Sequential(layer_of(bias=True, **options), nn.LayerNorm(40))
    (row,) = rows(patch(model), "lora")
    assert (row.status, row.count) == ("absent", 1)
    assert reason in row.reason


def test_models_without_adapters_have_no_row():
    assert not rows(patch(tiny("Llama", num_hidden_layers=1)), "lora")


def test_a_wrong_product_is_refused(monkeypatch):
    monkeypatch.setattr("liger_like.patching._confirmed", set())
    right = lora.operands
    monkeypatch.setattr(lora, "operands", lambda *args: (*right(*args)[:-1], 2.0))
    (row,) = rows(patch(nn.Sequential(layer_of(), nn.LayerNorm(40))), "lora")
    assert row.status == "skipped"
    assert "the replacement differs by" in row.reason


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_models(reentrant, device, run):
    """A whole model; with checkpoints each layer runs twice."""
    original = tiny("Llama", device, num_hidden_layers=1)
    model = copy.deepcopy(original)
    model, original = (adapted(m, **LAYERS) for m in (model, original))
    report = patch(model, strict=True, verify="numeric")
    found = [(row.cls, row.variant, row.count, row.status) for row in rows(report, "lora")]
    assert found == [("Linear", "linear", 7, "patched")]
    run.clear()
    for m in (model, original):
        if reentrant is not None:
            m.enable_input_require_grads()
            m.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = batch(device)
    assert_exact(model, original, inputs)
    assert len(run) == 7 if reentrant is None else 14
    assert rows(patch(model), "lora")[0].status == "already patched"
    unpatch(model)
    run.clear()
    assert_exact(model, original, inputs)
    assert not run


def test_the_head_s_adapter_belongs_to_its_loss(device):
    model = adapted(tiny("Llama", device, num_hidden_layers=1), target_modules=["lm_head", "q_proj"])
    first = rows(patch(model, loss=False), "lora")
    assert [(row.status, row.count) for row in first] == [("patched", 1), ("absent", 1)]
    patch(model, strict=True)
    assert model(**batch(device)).logits is None


def test_fully_sharded(run):
    original = adapted(tiny("Llama", num_hidden_layers=1), **LAYERS)
    model = copy.deepcopy(original)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        patch(model, strict=True)
        run.clear()
        inputs = batch("cpu")
        got, expected = results(model, inputs), results(original, inputs)
        assert len(run) == 7
        for name, t in expected.items():
            torch.testing.assert_close(got[name].full_tensor() if name != "loss" else got[name], t)
        layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
        model.reshard()
        assert lora.operands(layer, sample()) is None  # its weights are sharded now
    finally:
        dist.destroy_process_group()


def test_compiled(run):
    layers = pair()
    compiled = torch.compile(layers[0], fullgraph=True, backend="aot_eager")
    got, expected = outcome(compiled, sample()), outcome(layers[1], sample())
    assert not run
    torch.testing.assert_close({name.removeprefix("_orig_mod."): t for name, t in got.items()}, expected)
