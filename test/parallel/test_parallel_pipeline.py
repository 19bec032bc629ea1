"""Patched decoder layers as stages of torch's pipeline schedules, with the fused loss on the last."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run
from tiny_models import results, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import pad

from liger_like import patch
from liger_like.parallel import pipeline_loss

MICRO_BATCHES = 4
# the stages of each process
ONE, LOOPED, FOLDED = [[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
SCHEDULES = {
    "GPipe": ONE,
    "1F1B": ONE,
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": FOLDED,
    "DualPipeV": FOLDED,
}


class Stage(nn.Module):
    """Some layers of a model; the last stage returns hidden states, which the loss takes to the head."""

    def __init__(self, model, index, stages):
        super().__init__()
        each = len(model.model.layers) // stages
        self.embed_tokens = model.model.embed_tokens if index == 0 else None
        self.layers = model.model.layers[index * each : (index + 1) * each]
        last = index == stages - 1
        self.norm, self.lm_head = (model.model.norm, model.lm_head) if last else (None, None)
        self.rotary_emb = model.model.rotary_emb

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        embeddings = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=embeddings, attention_mask=None, position_ids=positions)
        return x if self.norm is None else self.norm(x)


def schedule_of(name, model, loss_fn, **options):
    """The schedule, the arguments and the keywords of its step in this process."""
    mine = SCHEDULES[name][dist.get_rank()]
    count = sum(map(len, SCHEDULES[name]))
    stages = [PipelineStage(Stage(model, i, count), i, count, torch.device("cpu")) for i in mine]
    cls = schedules.get_schedule_class(name)
    schedule = cls(stages if count > 2 else stages[0], MICRO_BATCHES, loss_fn=loss_fn, **options)
    return schedule, 0 in mine, count - 1 in mine


def step(schedule, first, last, ids, target, **options):
    """The losses of the micro-batches, where the last stage is."""
    losses = []
    schedule.step(*([ids] if first else []), **({"target": target, "losses": losses, **options} if last else {}))
    return losses


def check(model, losses, last, expected):
    """The result of each process equals that of one process alone."""
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert any("mlp" in name for name in parameters)
    assert ("lm_head.weight" in parameters) == last
    got = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in parameters.items()}
    if last:
        got["loss"] = sum(losses).detach()
    for name, t in got.items():
        error = (t - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-5, f"{name}: {error:.1e}"


def batch_of(model, rows=MICRO_BATCHES, length=8):
    """Tokens, and the next one of each; a micro-batch has fewer the later it comes, the last one none."""
    ids = torch.randint(3, model.config.vocab_size, (rows, length))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 * row] = -100
    labels[-1] = -100
    return ids, labels, pad(labels, (0, 1), value=-100)[:, 1:]


def train(rank, names, patterns):
    original = tiny("Llama", num_hidden_layers=4)
    ids, labels, target = batch_of(original)
    expected = results(original, {"input_ids": ids, "labels": labels})
    count = (target != -100).sum()
    for name in names:
        model = copy.deepcopy(original)
        patch(model, **patterns)
        model.zero_grad()
        schedule, first, last = schedule_of(name, model, pipeline_loss(model.lm_head, count), scale_grads=False)
        losses = step(schedule, first, last, ids, target)
        try:
            check(model, losses, last, expected)
        except AssertionError as error:
            raise AssertionError(name) from error


def train_otherwise(rank):
    """Numbers of labels that change from step to step, or that no one knows; a sharded head."""
    original = tiny("Llama", num_hidden_layers=2)
    ids, labels, target = batch_of(original)
    expected = results(original, {"input_ids": ids, "labels": labels, "num_items_in_batch": 7})
    model = copy.deepcopy(original)
    patch(model)
    model.zero_grad()
    own = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    fully_shard(model.lm_head, mesh=own)
    schedule, first, last = schedule_of("1F1B", model, pipeline_loss(model.lm_head), scale_grads=False)
    losses = step(schedule, first, last, ids, target, loss_kwargs={"num_items": 7})
    check(model, losses, last, expected)

    model = copy.deepcopy(original)
    patch(model)
    model.zero_grad()
    original.zero_grad()
    means = [original(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss for i in range(MICRO_BATCHES - 1)]
    (sum(means) / MICRO_BATCHES).backward()  # the last micro-batch has no labels
    expected = {name: p.grad for name, p in original.named_parameters()}
    schedule, first, last = schedule_of("GPipe", model, pipeline_loss(model.lm_head))
    losses = step(schedule, first, last, ids, target)
    check(model, losses, last, {"loss": sum(means).detach(), **expected})


def train_all(rank):
    train(rank, SCHEDULES, {})
    train_otherwise(rank)


def test_schedules(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long
    run(train_all, 2)


def test_kernels_with_weights_where_the_backward_is_split():
    """Compute gradients of inputs first and of weights later: the shared graph is traversed twice."""
    run(train, 2, ["InterleavedZeroBubble"], {"attention": False, "rope": False, "mlp": False})


def test_head_must_be_patched():
    with pytest.raises(TypeError, match=r"output layer of a model that liger_like\.patch has patched, got Linear"):
        pipeline_loss(nn.Linear(4, 8))
    head = type("Head", (nn.Linear,), {"_kind": ""})(4, 8)
    with pytest.raises(TypeError, match=r"soft_cap must be one of the options of the loss: .*softcap"):
        pipeline_loss(head, soft_cap=30.0)
    assert pipeline_loss(head, softcap=30.0, class_weight=torch.ones(8))
