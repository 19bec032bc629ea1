"""GraphedStep says what a graph cannot hold, and leaves model and process as they were."""

import copy
import re

import pytest
import torch
from tiny_models import Mean
from torch import nn

from liger_like import GraphedStep
from liger_like.graphs import LAUNCHES, MANY_KINDS, _check_graphs


def test_an_error_drops_the_gradients(device):
    model = Mean(device)
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), capturable=device == "cuda"))
    step.accumulate(torch.randn(3, 4, device=device))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.randn(3, 5, device=device))
    assert all(p.grad is None for p in model.parameters())


def test_foreign_gradients(device):
    model = Mean(device)
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), capturable=device == "cuda"))
    x = torch.randn(3, 4, device=device)
    model(x).backward()
    with pytest.raises(ValueError, match=re.escape("no gradients but those of accumulate()")):
        step(x)
    assert model.first.weight.grad is not None
    model.zero_grad()
    step(x)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"x": torch.zeros(2, 4, device="meta")}, ValueError, r"x must be on (cpu|cuda:0), got a tensor on meta"),
        (
            {"x": {"a": [object()]}},
            TypeError,
            r"x\['a'\]\[0\] must be a tensor, a number, a string or None, got object",
        ),
        ({"x": torch.zeros(2, 4, requires_grad=True)}, ValueError, "x must not require a gradient"),
    ],
)
def test_arguments_that_no_graph_can_hold(inputs, error, message, device):
    model = Mean(device)
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), capturable=device == "cuda"))
    with pytest.raises(error, match=message):
        step(**{name: x.to(device) if getattr(x, "requires_grad", False) else x for name, x in inputs.items()})


def test_models_and_optimizers_that_no_graph_can_hold(mesh):
    model = Mean()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="optimizer must be a Optimizer, got float"):
        GraphedStep(model, 1e-3)
    with pytest.raises(ValueError, match="max_norm must be positive and finite, got 0"):
        GraphedStep(model, sgd, max_norm=0)
    with pytest.raises(ValueError, match="one process and GPU, got DistributedDataParallel"):
        GraphedStep(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), sgd)
    with pytest.raises(ValueError, match=re.escape("on one device, got ['cpu', 'meta']")):
        GraphedStep(nn.Sequential(Mean(), Mean("meta")), sgd)
    wrapped = copy.copy(sgd)
    wrapped.optimizer = sgd
    with pytest.raises(ValueError, match=re.escape("got SGD around it: pass optimizer.optimizer")):
        GraphedStep(model, wrapped)
    sharded = torch.distributed.fsdp.fully_shard(Mean(), mesh=mesh)
    with pytest.raises(ValueError, match="one process and GPU, got FSDPModule"):
        GraphedStep(sharded, sgd)


def test_backward_graphs_that_are_alive():
    """Autograd adds gradients on the stream of the oldest graph that is alive, which may be the default stream."""
    model = Mean()
    _check_graphs(model)
    loss = model(torch.randn(3, 4))
    loss.backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="no backward graph when a step is captured, got a graph with first"):
            _check_graphs(model)
    del loss
    _check_graphs(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(torch.randn(3, 4))
        _check_graphs(model)  # not the casts of weights that autocast keeps


@pytest.mark.gpu
def test_a_loss_of_an_earlier_forward():
    model = Mean("cuda")
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), capturable=True))
    x = torch.randn(3, 4, device="cuda")
    loss = model(x)
    for _ in range(LAUNCHES + 1):
        step(x)
    with pytest.raises(ValueError, match="no backward graph when a step is captured"):
        step(x)
    del loss
    step(x)
    assert step._captured


@pytest.mark.parametrize("output", [None, {"loss": torch.zeros(2)}, torch.zeros(2)], ids=str)
def test_models_without_a_loss(output):
    model = Mean()
    model.forward = lambda: output
    step = GraphedStep(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"model must return a loss of shape \[\]"):
        step()


def waits(module, args, output):
    output.sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_wait_for_the_gpu(where):
    """The error leaves the process as it was: random numbers, streams, and a graph once the wait is gone."""
    model = Mean("cuda", dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    step = GraphedStep(model, optimizer)
    x = torch.randn(64, 4, device="cuda")
    hook = {
        "forward": lambda: model.first.register_forward_hook(waits),
        "backward": lambda: model.first.weight.register_hook(lambda grad: print(grad.sum().item())),
        "optimizer": lambda: optimizer.register_step_pre_hook(lambda *_: print(x.sum().item())),
    }[where]()
    for _ in range(LAUNCHES + 1):
        step(x)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a step of Mean cannot be captured.*synchronizing"):
            step(x)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert optimizer.param_groups[0]["lr"] == 1e-3
    torch.rand(3, device="cuda").sum().item()
    hook.remove()
    step(x)
    step(x)
    assert step._captured
    assert not torch.equal(model.first.weight, before[0])


class Counts(torch.optim.SGD):
    """An optimizer that counts its steps on the host."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


@pytest.mark.gpu
def test_optimizers_that_no_graph_can_hold():
    model = Mean("cuda")
    with pytest.raises(ValueError, match="optimizer must be constructed with capturable=True, got AdamW"):
        GraphedStep(model, torch.optim.AdamW(model.parameters(), fused=True))
    step = GraphedStep(model, Counts(model.parameters()))
    x = torch.randn(3, 4, device="cuda")
    for _ in range(LAUNCHES):
        step(x)
    with pytest.raises(ValueError, match="optimizer must keep its state on the GPU, got 'step' of Counts on the host"):
        step(x)


@pytest.mark.gpu
def test_numbers_that_change_are_warned_of():
    model = Mean("cuda")
    step = GraphedStep(model, torch.optim.SGD(model.parameters(), fused=True))
    x = torch.randn(3, 4, device="cuda")
    for times in range(MANY_KINDS - 1):
        step(x, times=times)
    with pytest.warns(UserWarning, match=f"GraphedStep got {MANY_KINDS} kinds of calls"):
        step(x, times=-1)
    assert not step._captured
