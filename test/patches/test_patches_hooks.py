"""Hooks and forwards that others put on the parts of a patched model: they see, and change, the same as before."""

import contextlib
import copy

import pytest
import torch
from test_patches_own_experts import llama, longcat
from test_patches_separate_experts import build
from tiny_models import batch, results, tiny
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils._pytree import tree_map_only

from liger_like.patching import patch

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("defined")]
FAMILIES = ["Llama", "Qwen3", "Llama4", "LongcatFlash", "Dbrx", "JetMoe"]


def model_of(family, device, monkeypatch):
    if family in ("Dbrx", "JetMoe"):
        return build(family, monkeypatch, device)
    if family == "LongcatFlash":
        return longcat(device, monkeypatch)
    return llama(device, num_hidden_layers=1) if family == "Llama4" else tiny(family, device, num_hidden_layers=1)


def changed(values):
    """Every feature times another factor, plus a number."""

    def one(t):
        return t * torch.linspace(0.5, 1.5, t.shape[-1]).to(t) + 0.1 if t.is_floating_point() and t.dim() else t

    return tree_map_only(Tensor, one, values) if isinstance(values, Tensor | tuple) else None


@contextlib.contextmanager
def replaced(module):
    before = module.forward

    def forward(*args, **kwargs):
        result = before(*args, **kwargs)
        made = changed(result)
        return result if made is None else made

    module.forward = forward
    yield
    del module.forward


def on_all(register, function):
    return lambda module: register(lambda each, *args: function(*args) if each is module else None)


FORWARD = {
    "register_forward_hook": lambda args, output: changed(output),
    "register_forward_pre_hook": changed,
    "register_full_backward_hook": lambda grads, outputs: changed(grads),
}
WAYS = {
    **{
        name: lambda module, name=name, f=f: getattr(module, name)(lambda _, *args: f(*args))
        for name, f in FORWARD.items()
    },
    **{
        f"of all: {name}": on_all(getattr(all_modules, name.replace("register", "register_module")), f)
        for name, f in FORWARD.items()
    },
    "replaced": replaced,
}


# Llama 4 adds to the output of a module in place, which torch forbids where a backward hook is on it
CASES = [(family, way) for family in FAMILIES for way in WAYS if not (family == "Llama4" and "backward" in way)]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_each_part(family, way, device, monkeypatch):
    """Not rotary embeddings: kernels read one of the equal halves of their tables."""
    original = model_of(family, device, monkeypatch)
    patched, inputs = copy.deepcopy(original), batch(device, rows=1, length=7) | {"use_cache": False}
    patch(patched)
    for name, module in original.named_modules():
        if not name or isinstance(module, nn.ModuleList) or "rotary" in name:
            continue
        with WAYS[way](module):
            expected = results(original, inputs)
        with WAYS[way](patched.get_submodule(name)):
            got = results(patched, inputs)
        assert got.keys() == expected.keys(), name
        for key, value in expected.items():
            error, norm = (got[key] - value).norm(), value.norm()
            assert error <= 1e-4 * norm + 1e-6, f"{name}: {key} {error:.1e} of {norm:.1e}"


def test_a_hook_on_the_head_breaks_no_compiled_graph(device):
    """torch.compile cannot trace a warning: it is given while the graph is traced."""
    original = tiny("Llama", device, num_hidden_layers=1)
    patched, inputs = copy.deepcopy(original), batch(device, rows=1, length=7) | {"use_cache": False}
    patch(patched)
    for model in (original, patched):
        model.lm_head.register_forward_hook(lambda _, args, output: changed(output))
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="the head has a hook or a new forward"):
        loss = torch.compile(patched, backend="eager", fullgraph=True)(**inputs).loss
    torch.testing.assert_close(loss, original(**inputs).loss)


def test_the_forward_of_transformers_tensor_parallelism(device):
    """The fused loss takes it off."""
    model = tiny("Llama", device, num_hidden_layers=1)
    names = {"__name__": "transformers.integrations.tensor_parallel", "head": model.lm_head}
    exec("def tp_forward(x): return type(head).forward(head, x)", names)
    model.lm_head.forward = names["tp_forward"]
    patch(model, strict=True)
    assert model(**batch(device)).logits is None


def test_a_forward_that_is_set_on_all_linear_layers(device, monkeypatch):
    """Neither the fused loss nor a kernel of MLPs knows it."""
    original = tiny("Llama", device, num_hidden_layers=1)
    patched, inputs = copy.deepcopy(original), batch(device, rows=1, length=7) | {"use_cache": False}
    patch(patched)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, 1.5 * self.weight, self.bias))
    expected = results(original, inputs)
    with pytest.warns(UserWarning, match=r"the head has a hook or a new forward, .*; this loss is not fused"):
        got = results(patched, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)
