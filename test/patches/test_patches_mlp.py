"""Gated MLPs of every kind: the classes of transformers against themselves."""

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from tiny_models import rows
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.inkling.modeling_inkling import InklingMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.modernbert_decoder.modeling_modernbert_decoder import ModernBertDecoderMLP
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

from liger_like.ops import glu, glu_linear, tiled_mlp
from liger_like.patches import glu_mlp
from liger_like.patching import patch, unpatch

CONFIG = SimpleNamespace(
    hidden_size=16,
    intermediate_size=24,
    hidden_act="silu",
    hidden_activation="gelu",
    mlp_bias=True,
    use_bias=True,
    residual_dropout=0.0,
    mlp_dropout=0.0,
    rms_norm_eps=1e-5,
    mlp_multipliers=(1.5, 0.5),
    block_auto_adjust_ff_dim=False,
)


class FloatMLP(LlamaMLP):
    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


MLPS = {
    "split": LlamaMLP(CONFIG),
    "split_silu": Lfm2MLP(CONFIG),
    "split_float": FloatMLP(CONFIG),
    "split_inner": BitNetMLP(CONFIG),
    "split_dropout": SeedOssMLP(CONFIG),
    "split_scaled": InklingMLP(CONFIG),
    "split_scaled_gate": FalconH1MLP(CONFIG),
    "packed": Phi3MLP(CONFIG),
    "packed_up_gate": MoonshineDecoderMLP(CONFIG, "silu"),
    "packed_inner": ModernBertDecoderMLP(CONFIG),
}


def outcome(module, x):
    """The output and every gradient."""
    x = x.detach().requires_grad_()
    y = module(x)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], upstream)]


def counted(monkeypatch):
    calls, true = [], glu_linear.use_kernel
    for module, name in ((glu, "use_row_kernel"), (glu_linear, "use_kernel")):
        monkeypatch.setattr(module, name, lambda x: calls.append(1) or true(x))
    return calls


def test_every_kind_has_a_class():
    assert {pattern.__name__ for pattern in glu_mlp.PATTERNS} == MLPS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pattern", MLPS)
def test_mlps_are_what_they_were(pattern, dtype, device, monkeypatch):
    original = copy.deepcopy(MLPS[pattern])
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.5)
    original.to(device, dtype)
    assert glu_mlp.match(type(original).forward, type(original), glu_mlp.PATTERNS)[0] == pattern
    calls, model = counted(monkeypatch), nn.Sequential(copy.deepcopy(original))
    (row,) = rows(patch(model, verify="numeric", norm=False), "glu_mlp")
    assert row.status == "patched"
    calls.clear()
    x = torch.randn(2, 3, 16, device=device, dtype=dtype)
    for got, expected in zip(outcome(model[0], x), outcome(original, x), strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    assert calls
    unpatch(model)
    assert type(model[0]) is type(original)


def test_dropout_stays(device):
    model = nn.Sequential(SeedOssMLP(SimpleNamespace(**vars(CONFIG) | {"residual_dropout": 0.5}))).to(device)
    assert rows(patch(model), "glu_mlp")[0].status == "patched"
    assert (model(torch.randn(4, 16, device=device)) == 0).any()
    assert not (model.eval()(torch.randn(4, 16, device=device)) == 0).any()


def test_projections_may_wrap_a_linear(device):
    mlp = LlamaMLP(CONFIG)
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Hardtanh())  # as Gemma 4's projections, which clip their output
    (row,) = rows(patch(nn.Sequential(mlp).to(device), verify="numeric"), "glu_mlp")
    assert row.status == "patched"
    assert row.error is not None


def test_mlps_without_a_gate_are_nothing_to_patch(device):
    report = patch(nn.Sequential(Starcoder2MLP(CONFIG)).to(device), strict=True)
    (row,) = rows(report, "glu_mlp")
    assert (row.cls, row.status, row.reason) == ("Starcoder2MLP", "absent", "has no gate")


@pytest.mark.parametrize(
    "name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"]
)
def test_activations(name, device):
    model = nn.Sequential(LlamaMLP(SimpleNamespace(**vars(CONFIG) | {"hidden_act": name}))).to(device)
    original = copy.deepcopy(model)
    (row,) = rows(patch(model, strict=True, verify="numeric"), "glu_mlp")
    assert row.variant in glu_mlp.KERNELS
    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_activations_of_torch(approximate, device):
    model = nn.Sequential(LlamaMLP(CONFIG)).to(device)
    model[0].act_fn = nn.GELU(approximate=approximate)
    (row,) = rows(patch(model, strict=True, verify="numeric"), "glu_mlp")
    assert row.variant == {"tanh": "geglu tanh", "none": "geglu erf"}[approximate]


def test_a_namesake_of_an_activation_is_refused(device):
    model = nn.Sequential(LlamaMLP(CONFIG)).to(device)
    model[0].act_fn = type("SiLU", (nn.Module,), {"forward": lambda self, x: ACT2FN["gelu"](x)})()
    (row,) = rows(patch(model, verify="numeric"), "glu_mlp")
    assert row.status == "skipped"


def doubled(*args):
    """A hook: of what is last, whatever it is given."""
    return tuple(2 * t for t in args[1]) if isinstance(args[1], tuple) and len(args) == 2 else 2 * args[-1]


def doubled_gradient(module, inputs, outputs):
    return (2 * inputs[0],)


def with_forward(act):
    act.forward = lambda x: 2 * x


CHANGES = {
    "another": lambda m, name: setattr(m, name, nn.ReLU()),
    "another kernel's": lambda m, name: setattr(m, name, nn.GELU()),
    "hook": lambda m, name: getattr(m, name).register_forward_hook(doubled),
    "pre-hook": lambda m, name: getattr(m, name).register_forward_pre_hook(doubled),
    "backward hook": lambda m, name: getattr(m, name).register_full_backward_hook(doubled_gradient),
    "forward": lambda m, name: with_forward(getattr(m, name)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pattern", ["split", "packed"])
def test_the_live_activation_runs(pattern, change, device, monkeypatch):
    original = nn.Sequential(copy.deepcopy(MLPS[pattern])).to(device)
    model = copy.deepcopy(original)
    patch(model, strict=True)
    name = glu_mlp.match(type(original[0]).forward, type(original[0]), glu_mlp.PATTERNS)[1]["act"]
    before = getattr(model[0], name)
    for m in (model, original):
        CHANGES[change](m[0], name)
    calls, x = counted(monkeypatch), torch.randn(3, 16, device=device)
    torch.testing.assert_close(outcome(model[0], x), outcome(original[0], x))
    assert not calls
    setattr(model[0], name, type(before)())
    model(x)
    assert calls


@pytest.mark.parametrize("change", ["hook", "pre-hook", "backward hook", "forward"])
def test_a_changed_activation_is_refused_whatever_was_patched_before(change, device):
    model = nn.Sequential(LlamaMLP(CONFIG)).to(device)
    patch(copy.deepcopy(model), strict=True)
    CHANGES[change](model[0], "act_fn")
    (row,) = rows(patch(nn.Sequential(model, nn.LayerNorm(16))), "glu_mlp")
    assert row.status == "skipped"
    assert "its activation has a hook or a replaced forward: test_patches_mlp." in row.reason


def test_hooks_that_act_around_an_activation_leave_the_kernel(device, monkeypatch):
    """Hooks like ZeRO-3's, which are on every module."""
    hook = lambda *args: None  # noqa: E731
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model = nn.Sequential(LlamaMLP(CONFIG)).to(device)
    model[0].act_fn.register_forward_hook(functools.partial(hook))
    patch(model, strict=True)
    calls = counted(monkeypatch)
    model(torch.randn(3, 16, device=device))
    assert calls


def test_a_tile_at_a_time(device, monkeypatch):
    """The report says it, the gradients are the unpatched module's, and a copy by pickle is tiled, too."""
    monkeypatch.setattr(tiled_mlp, "TILE", 128)
    tiles, forward = [], tiled_mlp._tiled_mlp_fwd
    monkeypatch.setattr(tiled_mlp, "_tiled_mlp_fwd", lambda *args: tiles.append(1) or forward(*args))
    original = nn.Sequential(MLPS["split"], MLPS["packed"], MLPS["split_inner"]).to(device)
    model = copy.deepcopy(original)
    found = {row.cls: row.variant for row in rows(patch(model, mlp="tiled", norm=False, strict=True), "glu_mlp")}
    assert found == {"LlamaMLP": "swiglu, tiled", "Phi3MLP": "swiglu, tiled", "BitNetMLP": "swiglu"}
    again = pickle.loads(pickle.dumps(model))
    x = torch.randn(300, 16, device=device)
    for each in (model, again):
        tiles.clear()
        exact = outcome(copy.deepcopy(original).double(), x.double())
        for got, expected, true in zip(outcome(each, x), outcome(original, x), exact, strict=True):
            assert (got - true).norm() <= 1.1 * (expected - true).norm() + 1e-6 * true.norm()
        assert len(tiles) == 2
    assert rows(patch(model, mlp="tiled"), "glu_mlp")[0].status == "already patched"
    unpatch(model)
    assert [type(module) for module in model] == [type(module) for module in original]


def test_what_is_not_tiled(device):
    """Adapters in half precision, whose gradients a sum over tiles would round."""
    model = nn.Sequential(LlamaMLP(CONFIG).to(torch.float16), LlamaMLP(CONFIG)).to(device)
    for mlp in model:
        mlp.gate_proj = nn.Sequential(mlp.gate_proj)
    variants = [row.variant for row in rows(patch(model, mlp="tiled"), "glu_mlp")]
    assert variants == ["swiglu", "swiglu, tiled"]


def test_the_option():
    with pytest.raises(TypeError, match="mlp must be True, 'tiled' or False, got 'tile'"):
        patch(nn.Sequential(), mlp="tile")


def test_a_graph_guards_no_name_of_an_activation(device):
    """torch.compile skips the guards of an MLP at once unless one of them reads an attribute of a class."""
    model, guarded = nn.Sequential(LlamaMLP(CONFIG), LlamaMLP(CONFIG)).to(device), []

    def keep(guards):
        guarded.extend(guard.name for guard in guards)
        return [True] * len(guards)

    patch(model, norm=False)
    model.compile(fullgraph=True, backend="eager", options={"guard_filter_fn": keep})
    model(x := torch.randn(3, 16, device=device))
    assert guarded
    assert not [name for name in guarded if name.endswith("__name__")]
    model[1].act_fn = nn.ReLU()  # a graph of the other activation must not run
    eager = copy.deepcopy(model)
    unpatch(eager)
    torch.testing.assert_close(model(x), eager[1](eager[0](x)))
