"""Replays of GraphedStep, by tapes in place of CUDA graphs, train as a loop does."""

import copy
import random

import pytest
import torch
from graphed import graphed
from test_graphs import Loop
from test_graphs_beside import Recomputed, Twice
from tiny_models import Mean

from liger_like import graphs

RATE, OTHER = 2.0**-6, 2.0**-8  # a graph reads rates in fp32


class Means(Mean):
    """A model that fails where it is told to, and whose batches choose whether a layer takes part."""

    fails = 0

    def forward(self, x, deep=True):
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x) if deep else self.second(x).square().mean()


class MeanLoop(Loop):
    """The loop for a model that returns its loss."""

    def accumulate(self, *inputs):
        loss = self.model(*inputs)
        loss.backward()
        return loss.detach()

    def __call__(self, *inputs):
        loss = self.accumulate(*inputs)
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.5, fused=True)


def steps_of(model, monkeypatch, make=adamw, max_norm=None):
    """A step by tapes of ``model`` in float64 and a loop of its twin."""
    twin = copy.deepcopy(model.double())
    step = graphed(monkeypatch, model, make(model), max_norm=max_norm)
    return step, MeanLoop(twin, make(twin), max_norm)


def data():
    return torch.randn(3, 4, dtype=torch.float64)


def close(one, other):
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert (p.grad is None) == (q.grad is None)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_and_changes(seed, max_norm, monkeypatch):
    """Steps, micro-batches, other rates, frozen weights, and the state of the optimizer loaded or cleared."""
    monkeypatch.setattr(graphs, "PART", 8)
    choice = random.Random(seed)
    steps = steps_of(Means(), monkeypatch, max_norm=max_norm)
    saved = [copy.deepcopy(step.optimizer.state_dict()) for step in steps]
    changes = ["rate", "freeze", "load", "save", "clear", "zero"]
    for _ in range(150):
        change = choice.choice(["step"] * 12 + ["accumulate"] * 6 + changes)
        x, deep, rate = data(), choice.random() < 0.8, choice.choice([RATE, OTHER])
        for i, step in enumerate(steps):
            match change:
                case "step":
                    step(x, deep)
                case "accumulate":
                    step.accumulate(x, deep)
                case "rate":
                    step.optimizer.param_groups[0]["lr"] = rate
                case "freeze":
                    step.model.first.requires_grad_(not step.model.first.weight.requires_grad)
                case "save":
                    saved[i] = copy.deepcopy(step.optimizer.state_dict())
                case "load":
                    step.optimizer.load_state_dict(saved[i])
                case "clear":
                    step.optimizer.state.clear()
                case "zero":
                    step.model.zero_grad(set_to_none=rate == RATE)
        close(*steps)
    assert sum(captured.graph.replays for captured in steps[0]._captured.values()) > 20


@pytest.mark.parametrize("cls", [Twice, Recomputed])
def test_state_that_is_made_anew_in_each_step(cls, monkeypatch):
    """A capture beside the backward fails for these models: state that it made would be left unfilled."""
    monkeypatch.setattr(graphs, "PART", 1)
    step, loop = steps_of(cls("cpu"), monkeypatch)
    for _ in range(6):
        x = data()
        for each in (step, loop):
            each.optimizer.state.clear()
            each(x)
        close(step, loop)


def test_micro_batches_after_errors(monkeypatch):
    """A call that raised made no gradients: the capture would make them in memory of its own."""
    step, loop = steps_of(Means(), monkeypatch)
    step.model.fails = 2
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step.accumulate(data())
    for _ in range(5):
        first, second = data(), data()
        for each in (step, loop):
            each.accumulate(first)
            each(second)
        close(step, loop)
    assert len(step._captured) == 2
