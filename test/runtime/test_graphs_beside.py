"""GraphedStep updates weights beside the backward, where this gives what a loop gives."""

import copy
import weakref
from contextlib import contextmanager

import pytest
import torch
from test_graphs import ROUNDS, Loop, adamw, assert_same, llama
from tiny_models import Mean, batch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from liger_like import GraphedStep, graphs

pytestmark = pytest.mark.usefixtures("references")
SMALL = 9000  # a part of the weights of a tiny model; the last ones are fewer


def sgd(model, device, **options):
    return torch.optim.SGD(model.parameters(), lr=1e-2, fused=True, **options)


class Streams:
    """Two streams that note who waits for whom, and the gradients that are alive when the last one waits."""

    def __init__(self, monkeypatch, step):
        self.current, self.events, self.gradients = self, [], []
        self.beside = step._beside = Stream("beside", self)
        self.main = self.current = Stream("main", self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        for p in step.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: self.gradients.append(weakref.ref(p.grad)))
        step.optimizer.register_step_pre_hook(lambda *_: self.events.append(f"update on {self.current.name}"))

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, name, streams):
        self.name, self.streams = name, streams

    def wait_stream(self, other):
        alive = sum(gradient() is not None for gradient in self.streams.gradients)
        self.streams.events.append(f"{self.name} waits for {other.name}, {alive} gradients")


@pytest.mark.parametrize(
    "make",
    [
        lambda model, device: adamw(model, device, fused=True),
        lambda model, device: adamw(model, device, foreach=True),
        lambda model, device: sgd(model, device, momentum=0.9),
    ],
    ids=["fused AdamW", "AdamW", "SGD"],
)
def test_updates_beside_the_backward(make, monkeypatch):
    """Each update waits for its gradients; these are kept until the backward's stream has waited for all updates."""
    model, twin = llama("cpu", tie_word_embeddings=True)
    step, loop = GraphedStep(model, make(model, "cpu")), Loop(twin, make(twin, "cpu"))
    streams = Streams(monkeypatch, step)
    monkeypatch.setattr(graphs, "PART", SMALL)
    for _ in range(3):
        inputs = batch()
        step._inspect()
        loss, norm = step._step_beside(**inputs)
        assert torch.equal(loss, loop(**inputs))
        assert norm is None
        assert all(p.grad is None for p in model.parameters())
        first, *before, last = streams.events
        assert first == "beside waits for main, 0 gradients"  # the streams can join even after an error
        count = len(list(model.parameters()))
        assert last == f"main waits for beside, {count} gradients"
        assert [event.partition(",")[0] for event in before[::2]] == ["beside waits for main"] * (len(before) // 2)
        assert before[1::2] == ["update on beside"] * (len(before) // 2)
        assert 4 <= len(before) // 2 <= 20
        assert before[0] != before[2]  # the backward went on in between
        streams.events.clear()
        streams.gradients.clear()
    assert_same(model, twin)
    assert not any(len(p._post_accumulate_grad_hooks) > 1 for p in model.parameters())  # one is the test's


class Detached(nn.Module):
    """The backward reads a weight after its gradient is complete."""

    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, device=device))
        self.first = nn.Linear(4, 4, device=device)

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.weight.detach()
        return (x @ self.weight).square().mean()


class Twice(nn.Module):
    """Reentrant checkpoints give a weight two gradients."""

    def __init__(self, device):
        super().__init__()
        self.shared = nn.Linear(4, 4, device=device)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.shared(x)), x, use_reentrant=True, preserve_rng_state=False)
        return x.square().mean()


class Reader(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x):
        return torch.tanh(x @ self.other.weight.detach())


class Recomputed(nn.Module):
    """A checkpoint reads a weight again after its gradient is complete, without a check of its version."""

    def __init__(self, device):
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, device=device) for _ in range(2))
        self.reader = Reader(self.last)

    def forward(self, x):
        x = checkpoint(self.reader, self.first(x), use_reentrant=False, preserve_rng_state=False)
        return self.last(x).square().mean()


@pytest.mark.parametrize("cls", [Detached, Twice, Recomputed])
def test_weights_that_are_needed_after_their_update(cls, device, monkeypatch):
    """No update is wrong: the capture fails, and another one updates after the backward."""
    monkeypatch.setattr(graphs, "PART", 1)
    model = cls(device)
    twin = copy.deepcopy(model)
    steps = GraphedStep(model, sgd(model, device)), sgd(twin, device)
    for _ in range(ROUNDS):
        x = torch.randn(3, 4, device=device)
        loss = twin(x)
        loss.backward()
        steps[1].step()
        steps[1].zero_grad()
        assert torch.equal(steps[0](x), loss.detach())
    assert_same(model, twin)
    if device == "cuda":
        assert len(steps[0]._captured) == 1
        return
    streams = Streams(monkeypatch, steps[0])
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|needed after its update"):
        steps[0]._step_beside(x)
    assert streams.events[-1].startswith("main waits for beside")
    assert not torch.nn.modules.module._global_forward_pre_hooks
    graphs._check_graphs(model)  # the error left no backward graph, which the next capture would refuse


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


def hooked_after(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def replaced(optimizer):
    step = optimizer.step
    optimizer.step = lambda: step()


def scheduled(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0)


class Other(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)


@pytest.mark.parametrize(
    ("cls", "change", "separate"),
    [
        (torch.optim.SGD, scheduled, True),
        (torch.optim.Adam, scheduled, True),
        (torch.optim.AdamW, scheduled, True),
        (torch.optim.SGD, hooked, False),
        (torch.optim.SGD, hooked_after, False),
        (torch.optim.SGD, replaced, False),
        (Other, scheduled, False),
        (torch.optim.LBFGS, scheduled, False),
    ],
)
def test_what_is_updated_beside_the_backward(cls, change, separate, monkeypatch):
    """A capture that may not, or fails, is followed by one of the ordinary step."""
    model = Mean()
    optimizer = cls(model.parameters(), lr=0.1)
    change(optimizer)
    step = GraphedStep(model, optimizer)
    tried = []

    def capture(work, args, kwargs):
        tried.append(work.__name__)
        if work == step._step_beside:
            model.first.weight.grad = torch.zeros_like(model.first.weight)
            raise RuntimeError("fails")
        assert model.first.weight.grad is None

    monkeypatch.setattr(step, "_capture", capture)
    step._inspect()
    step._capture_fastest(step._step, (), {})
    assert tried == ["_step_beside"] * separate + ["_step"]
    tried.clear()
    step._capture_fastest(step._backward, (), {})
    step._capture_fastest(step._update, (), {})
    step.max_norm = 1.0
    step._capture_fastest(step._step, (), {})
    assert tried == ["_backward", "_update", "_step"]


def test_hooks_of_all_optimizers():
    optimizer = torch.optim.SGD(Mean().parameters())
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        hook = register(lambda *_: None)
        assert not graphs._updates_separately(optimizer)
        hook.remove()
    assert graphs._updates_separately(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_graphs_train_as_a_loop(accumulate, monkeypatch):
    """Replays of two shapes and a scheduler, with parts of a few weights."""
    monkeypatch.setattr(graphs, "PART", SMALL)
    updates = []
    step_of = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (updates.append(None), step_of(self))[1])
    model, twin = llama("cuda", tie_word_embeddings=True)
    steps = GraphedStep(model, adamw(model, "cuda", fused=True)), Loop(twin, adamw(twin, "cuda", fused=True))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, 3 * ROUNDS) for step in steps]
    for _ in range(ROUNDS):
        short, long = batch("cuda"), batch("cuda", rows=1, length=30)
        for step, scheduler in zip(steps, schedulers, strict=True):
            if accumulate:
                step.accumulate(**short)
            for inputs in (short, long):
                step(**inputs)
                scheduler.step()
    assert_same(model, twin)
    assert len(steps[0]._captured) == (3 if accumulate else 2)
    assert len(updates) > 2 * ROUNDS + 10  # those of the loop, those before captures, and several of a capture
