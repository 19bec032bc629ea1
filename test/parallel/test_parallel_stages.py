"""Stages of ``spread`` under tensor parallelism: the gradients of one process, and nothing left on the modules."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run
from tiny_models import random
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM, SeedOssConfig, SeedOssForCausalLM

import liger_like
from examples import parallel
from liger_like.parallel import checkpoint_policy
from liger_like.parallel.stages import spread
from liger_like.parallel.tokens import gather_parts, sum_parts
from liger_like.runtime.support import unhooked

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": False, "pad_token_id": None}
BIASES = {"attention_bias": True, "mlp_bias": True}
UNDROPPED = {"attention_dropout": 0.0, "residual_dropout": 0.0}
LLAMA, OLMO, SEED = (
    (LlamaForCausalLM, LlamaConfig),
    (OlmoForCausalLM, OlmoConfig),
    (SeedOssForCausalLM, SeedOssConfig),
)
CASES = [  # model, changes of its config, mesh, checkpoints or "compiled", and whether MLPs are patched
    (LLAMA, BIASES, {"tp": 2}, "compiled", True),
    (LLAMA, BIASES, {"tp": 2}, "none", True),
    (LLAMA, BIASES, {"tp": 2}, "selective", True),
    (LLAMA, BIASES, {"tp": 2}, "full", False),
    (OLMO, {}, {"tp": 2}, "none", True),  # norms without weights
    (SEED, UNDROPPED, {"tp": 2}, "none", True),  # MLPs with dropout at their end
    (LLAMA, BIASES, {"tp": 2, "fsdp": 2}, "full", True),
    (LLAMA, BIASES, {"tp": 2, "pp": 2}, "selective", True),
    (LLAMA, BIASES, {"tp": 2, "pp": 2}, "full", True),
]


class Weight(nn.Module):
    """A layer that is not linear."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))


def mesh_of(sizes):
    whole = {name: sizes.get(name, 1) for name in ("pp", "fsdp", "cp", "tp")}
    return dist.init_device_mesh("cpu", tuple(whole.values()), mesh_dim_names=tuple(whole))


def made(kind, fields, seed=0):
    """A model of random weights, the same in all processes."""
    torch.manual_seed(seed)
    cls, config = kind
    return random(cls(config(**SIZES | fields)))


def results(model, ids):
    """The loss and the gradients of one process, by the names that stages have."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    loss = nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}


def hidden_parameters(stage):
    """The names of parameters that something on their module hides."""
    return [f"{path}.{name}" for path, m in stage.named_modules() for name in m._parameters if name in vars(m)]


def check_step(kind, fields, sizes, checkpoints, mlp):
    model, ids = made(kind, fields), torch.randint(SIZES["vocab_size"], (4, 8))
    loss, gradients = results(copy.deepcopy(model), ids)
    names, mesh = {name.removeprefix("model.") for name in model.state_dict()}, mesh_of(sizes)
    liger_like.patch(model, mlp=mlp)
    if checkpoints not in ("none", "compiled"):
        policy = {"context_fn": checkpoint_policy()} if checkpoints == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **policy})
    stage = spread(model, mesh)
    for layer in stage.layers.values() if checkpoints == "compiled" else ():
        layer.compile(backend="aot_eager")
    parameters = dict(stage.named_parameters())
    assert parameters.keys() == {n for n in names if n in stage.state_dict()} == stage.state_dict().keys()
    assert sizes.get("pp", 1) > 1 or parameters.keys() == names
    step = parallel.step_of(stage, mesh, 4 if sizes.get("pp", 1) > 1 else 1, ids[:, 1:].numel())
    # layers share graphs; one function of transformers is around the forwards of a layer and of its two subclasses
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        found = step(ids)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert not hidden_parameters(stage)
    return stage, gradients


def check_steps(rank, cases):
    for case in cases:
        stage, gradients = check_step(*case)
        if len(case[2]) == 1:
            norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0).full_tensor()
            expected = torch.stack([grad.norm() for grad in gradients.values()]).norm()
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_one_process(world_size, monkeypatch):
    """With biases, which no process but the first adds to a sum; checkpointed; with MLPs that are patched or not."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    run(check_steps, world_size, [case for case in CASES if 2 ** len(case[2]) == world_size])


def test_kernels_give_the_gradients_of_one_process():
    """Kernels are interpreted: a patched MLP fuses activation and projection, and does not call the projection."""
    run(check_steps, 2, CASES[1:2])


def check_placements_and_errors(rank):
    mesh, ids = mesh_of({"tp": 2}), torch.randint(SIZES["vocab_size"], (2, 8))
    model = made(LLAMA, BIASES)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    liger_like.patch(model)
    stage = spread(model, mesh)
    assert [name for name, p in stage.named_parameters() if not p.requires_grad] == ["layers.0.mlp.up_proj.weight"]
    placed = {name.removeprefix("layers.0."): p.placements[-1] for name, p in stage.named_parameters()}
    for name in ("self_attn.q_proj.weight", "self_attn.v_proj.bias", "mlp.up_proj.weight", "mlp.gate_proj.bias"):
        assert placed[name] == Shard(0), name
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert placed[name] == Shard(1), name
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias", "input_layernorm.weight"):
        assert placed[name] == Replicate(), name

    assert unhooked(stage.layers["0"].mlp.down_proj)  # else no kernel runs it with the activation

    step = parallel.step_of(stage, mesh, 1, ids[:, 1:].numel())
    expected = step(ids)

    def fail(module, args):
        raise KeyboardInterrupt

    handle = stage.layers["1"].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        stage(ids, torch.arange(8).expand(2, 8))
    handle.remove()
    assert not hidden_parameters(stage)
    assert torch.equal(step(ids), expected)

    with pytest.raises(ValueError, match="tp must divide the tokens of a sequence, 7, got 2"):
        stage(ids[:, :7], torch.arange(7).expand(2, 7))
    check_refusals(mesh)
    check_dropout(mesh, rank)
    check_tokens(mesh["tp"].get_group(), rank)


def check_refusals(mesh):
    """Refuse layers whose parts would see some of the heads or features: not nn.Linear, or with other parameters."""
    for layer, at, name, part in (
        (0, "self_attn", "q_proj", Weight()),
        (1, "mlp.down_proj", "adapter", Weight()),  # adapters may be in some layers only
        (0, "mlp", "inner", nn.Identity()),
        (0, "self_attn", "sinks", nn.Parameter(torch.zeros(4))),
    ):
        model = made(LLAMA, {})
        liger_like.patch(model)
        setattr(model.model.layers[layer].get_submodule(at), name, part)
        path = at if isinstance(part, nn.Parameter) else f"{at}.{name}"
        with pytest.raises(ValueError, match=f"tp must be 1 for LlamaForCausalLM, got 2: its {path} would see some"):
            spread(model, mesh)


def check_dropout(mesh, rank):
    """Dropout at an MLP's end is that of the sums: half of the values are zero, whatever the processes draw."""
    model = made(SEED, {"attention_dropout": 0.0, "residual_dropout": 0.5})
    liger_like.patch(model)
    stage = spread(model, mesh)
    found = []
    stage.layers["0"].mlp.register_forward_hook(lambda module, args, out: found.append(out))
    torch.manual_seed(rank)
    stage(torch.randint(SIZES["vocab_size"], (8, 16)), torch.arange(16).expand(8, 16))
    assert 0.45 < (found[0] == 0).double().mean() < 0.55


def check_tokens(group, rank):
    """Each of the two functions is the other's derivative, on tensors of any strides."""
    x = torch.arange(12.0).view(3, 4).mT.add(100 * rank).requires_grad_()
    whole = gather_parts(x, group)
    assert torch.equal(whole[1] - whole[0], torch.full((4, 3), 100.0))
    summed = sum_parts((whole * (rank + 1))[..., :2], group)
    assert torch.equal(summed, 3 * x[..., :2])
    summed.backward(torch.ones(2, 4).mT * (1 + rank))
    assert torch.equal(x.grad, torch.tensor([3.0, 3.0, 0.0]).mul(1 + rank).expand(4, 3))


def test_parameters_are_sharded_and_errors_leave_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    run(check_placements_and_errors, 2)
