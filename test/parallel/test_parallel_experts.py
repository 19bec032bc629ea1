"""Expert parallelism: models whose experts are spread over processes compute what one process does."""

import copy
import functools
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_parallel_fsdp import MAX_NORM, assert_same, full, gradients, shares
from test_patches_experts import FAMILIES, SIZES
from tiny_models import tiny
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from liger_like import nn, patch, unpatch
from liger_like.parallel import expert_parallel

H, E, K, T = 16, 4, 2, 6


def mixture(device="cpu"):
    experts = nn.Experts(E, H, 8, limit=7.0, alpha=1.702, transposed=True, interleaved=True, bias=True)
    return nn.MoE(nn.Router(H, E, K), experts, shared_experts=nn.SwiGLUMLP(H, 8)).to(device)


def by_mesh(model):
    """Parameters in groups that share a mesh, for the optimizer and for clipping, as the docs say."""
    groups = defaultdict(list)
    for parameter in model.parameters():
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())


def clipped_step(model):
    """As that of test_parallel_fsdp, but by groups."""
    groups = by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1, eps=0.01)
    norms = [full(get_total_norm([p.grad for p in group])) for group in groups]
    norm = torch.stack(norms).norm()
    assert norm > MAX_NORM
    for group in groups:
        clip_grads_with_norm_(group, MAX_NORM, norm)
    optimizer.step()
    return {"norm": norm, **{name.removeprefix("module."): full(p) for name, p in model.named_parameters()}}


def by_ddp(model, mesh, **options):
    expert_parallel(model, mesh, **options)
    return DistributedDataParallel(model)


def by_fsdp(model, mesh, **options):
    experts = expert_parallel(model, mesh, **options)
    for module in (*model.model.layers, model):
        fully_shard(module, ignored_params=experts)
    return model


def by_grid(model, mesh, **options):
    expert_parallel(model, mesh["ep"], **options)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare_models(rank, wrappers, shape):
    processes = dist.get_world_size()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
    for family in ("Qwen3Moe", "GptOss"):
        experts = {"num_experts": 4, "num_hidden_layers": 1}
        original = tiny(family, **SIZES | FAMILIES[family] | experts)
        whole, rows = shares(processes)
        model = copy.deepcopy(original)
        _, expected, _ = gradients(model, whole)
        expected |= clipped_step(model)
        for wrap in wrappers:
            model = copy.deepcopy(original)
            patch(model, strict=True)
            model = wrap(model, mesh)
            _, got, counts = gradients(model, rows[rank], processes)
            print(wrap.__name__, counts)
            assert_same(got | clipped_step(model), expected)
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            print({k: v.shape for k, v in state.items()})


@pytest.fixture
def plain(monkeypatch):
    """Processes that start now run the references of the ops: interpreted kernels take a hundred times as long."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("plain")
def test_models_in_two():
    run(compare_models, 2, (by_ddp, by_fsdp), (2,))


@pytest.mark.usefixtures("plain")
def test_models_in_four():
    run(compare_models, 4, (by_grid,), (2, 2))
