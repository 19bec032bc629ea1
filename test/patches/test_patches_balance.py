"""The load balancing loss of patched models: fused, where the model's own function computes it."""

import copy
import pickle

import pytest
import torch
from test_patches_experts import SIZES
from test_patches_routers import FAMILIES
from tiny_models import assert_exact, batch, results, rows, tiny
from transformers.models.mixtral import modeling_mixtral

from liger_like.patches import balance
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
VARIANT = "fused loss, load balancing"
OWN = modeling_mixtral.load_balancing_loss_func


@pytest.fixture
def calls(monkeypatch):
    """Calls of the op."""
    made, op = [], balance.load_balancing_loss
    monkeypatch.setattr(
        balance, "load_balancing_loss", lambda *args, **options: made.append(args) or op(*args, **options)
    )
    balance._agrees(OWN)  # whose trial calls the op, once in a process
    made.clear()
    return made


def pair(family, device, **config):
    """A model whose head, routers and loss are patched, and its twin."""
    sizes = SIZES | FAMILIES[family] | {"experts_implementation": "batched_mm", "router_aux_loss_coef": 0.5}
    original = tiny(family, device, **sizes | config)
    patched = copy.deepcopy(original)
    report = patch(patched, norm=False, rope=False, attention=False)
    assert VARIANT in [row.variant for row in rows(report, "lm_head")]
    patched.set_experts_implementation("batched_mm")
    return patched, original


def inputs_of(device, padded=True):
    inputs = batch(device) | {"output_router_logits": True}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, :5] = 0
    return inputs


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_loss_and_gradients(family, padded, device, calls):
    patched, original = pair(family, device)
    inputs = inputs_of(device, padded)
    calls.clear()
    assert_exact(patched, original, inputs)
    assert [len(layers) for layers, _ in calls] == [2]
    for mode in (True, False):
        got, expected = patched.train(mode)(**inputs), original.train(mode)(**inputs)
        torch.testing.assert_close(got.aux_loss, expected.aux_loss)
        torch.testing.assert_close(got.loss, expected.loss)
    assert len(calls) == 3
    unpatch(patched)
    patched(**inputs)
    assert len(calls) == 3


def test_nothing_outside_of_the_model_changes(device, calls):
    _, original = pair("Mixtral", device, num_hidden_layers=1)
    calls.clear()
    original(**inputs_of(device))
    assert modeling_mixtral.load_balancing_loss_func is OWN
    assert not calls


def test_where_no_kernel_can_run(references, calls):
    patched, original = pair("Mixtral", "cpu", num_hidden_layers=1)
    calls.clear()
    inputs = inputs_of("cpu")
    torch.testing.assert_close(patched(**inputs).aux_loss, original(**inputs).aux_loss, rtol=0, atol=0)
    assert not calls


def test_arguments_that_do_not_fit(device, calls):
    fused = balance._fused(OWN)
    z = torch.randn(6, 5, device=device)
    assert (fused(None), fused(z)) == (0, 0)
    torch.testing.assert_close(fused((z, z), 5, 2), OWN((z, z), 5, 2))
    assert len(calls) == 1
    others = {
        "layers of other shapes": ((z, z[:3]), 5, 2),
        "float64": ((z.double(),), 5, 2),
    }
    for name, arguments in others.items():
        torch.testing.assert_close(fused(*arguments), OWN(*arguments), msg=name)
    with pytest.raises(RuntimeError):  # theirs
        fused((z,), 7, 2)
    assert len(calls) == 1


def test_another_function_is_left_alone(device, calls, monkeypatch):
    def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return gate_logits[0].float().mean()

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", load_balancing_loss_func)
    model = tiny("Mixtral", device, **SIZES | {"num_hidden_layers": 1})
    assert [row.variant for row in rows(patch(model), "lm_head")] == ["fused loss", "lazy logits"]
    other_names = lambda z, n, k, m: OWN(z, n, k, m)  # noqa: E731
    raising = lambda gate_logits, num_experts, top_k, attention_mask: 1 / 0  # noqa: E731
    for other in (other_names, raising):
        assert not balance._agrees(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_patched_model(copied, device, calls):
    model, _ = pair("Mixtral", device, num_hidden_layers=1)
    twin = copied(model)
    unpatch(model)
    calls.clear()
    results(twin, inputs_of(device))
    assert len(calls) == 1


def test_compiled_whole(device):
    patched, original = pair("Mixtral", device, num_hidden_layers=1)
    inputs = inputs_of(device, padded=False) | {"use_cache": False}
    patched(**inputs)  # transformers installs the hooks that collect the logits in a first call, which is not compiled
    torch._dynamo.reset()
    loss = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs).loss
    torch.testing.assert_close(loss, original(**inputs).loss)
