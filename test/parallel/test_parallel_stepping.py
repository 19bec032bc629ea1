"""The optimizer's step within the backward."""

import copy
import gc
import weakref

import pytest
import torch
from distributed import run
from tiny_models import batch, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_like.parallel import step_in_backward


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def adam_in_8_bits(parameters):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=1)


def stepped(model, optimizer, inputs):
    """Return losses and parameters of three steps; without ``optimizer`` the backward steps."""
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        loss.backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        losses.append(loss.detach())
    return losses, [getattr(p, "full_tensor", lambda p=p: p.detach())() for p in model.parameters()]


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("tied", "optimizer"), [(False, adam), (True, adam), (False, adam_in_8_bits)])
def test_updates(tied, optimizer):
    """Updates are those of one optimizer, bit for bit, and at most one parameter has a gradient at a time."""
    model, inputs = tiny("Llama", tie_word_embeddings=tied), batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.norm.weight.requires_grad_(False)
    other, alive = copy.deepcopy(model), []

    def note(*_):
        alive.append(sum(p.grad is not None for p in other.parameters()))

    def make(parameters):
        one = optimizer(parameters)
        one.register_step_pre_hook(note)
        return one

    optimizers = step_in_backward(other, make)
    assert [*optimizers] == [name for name, p in model.named_parameters() if p.requires_grad]
    same(stepped(other, None, inputs), stepped(model, optimizer(model.parameters()), inputs))
    assert alive == [1] * 3 * len(optimizers)


def sharded(rank):
    model, inputs = tiny("Llama"), batch()
    found = []
    for within in (False, True):
        spread = copy.deepcopy(model)
        for module in (*spread.model.layers, spread):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        optimizer = None if within else adam(spread.parameters())
        if within:
            step_in_backward(spread, adam)
        found.append(stepped(spread, optimizer, inputs))
    same(*found)


def test_fsdp2():
    run(sharded, 2)


def replicated(rank):
    """Wrappers that reduce gradients after the step: ranks would train apart."""
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        options = {"device_id": torch.device("cpu")} if wrapper is FullyShardedDataParallel else {}
        with pytest.raises(ValueError, match=f"must be sharded by fully_shard or not at all, got {wrapper.__name__}"):
            step_in_backward(torch.nn.Sequential(wrapper(torch.nn.Linear(2, 2), **options)), adam)
    model = torch.nn.Linear(2, 2)
    step_in_backward(model, adam)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of (weight|bias) is left from before this backward"):
        wrapped(torch.ones(1, 2)).sum().backward()


def test_replicas():
    run(replicated, 1)


def test_memory():
    """A model and its optimizers are freed once nothing refers to them."""
    model = torch.nn.Linear(2, 2)
    step_in_backward(model, adam)
    model(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(model.weight)
    del model
    gc.collect()
    assert alive() is None


def test_errors():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="gradients must be None before the first step, got that of weight"):
        step_in_backward(model, adam)
    model.zero_grad()
    step_in_backward(model, adam)
    with pytest.raises(RuntimeError, match="weight has a hook of accumulated gradients already"):
        step_in_backward(model, adam)
    with pytest.raises(ValueError, match="model must have a parameter that requires a gradient, got none"):
        step_in_backward(torch.nn.ReLU(), adam)
    with pytest.raises(TypeError, match="model must be a Module, got list"):
        step_in_backward([torch.nn.Linear(2, 2)], adam)
