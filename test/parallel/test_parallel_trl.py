"""TRL's trainers under FSDP2: with models patched before or after they are sharded, they log and learn the same as with
unpatched ones, and our ops run in the place of TRL's.
"""

import copy

import peft
import pytest
import torch
import trl_trainers
from distributed import as_accelerate_launches, run
from test_accelerate import FOLDER
from test_parallel_fsdp import assert_same, full
from test_trl import HEAD, assert_same_run
from test_trl import learnt as learnt_by_shards
from tiny_models import batch, tiny
from torch.distributed.fsdp import FSDPModule, fully_shard
from trl.trainer.utils import add_fused_lm_head

from liger_like import patch, token_logprobs
from liger_like.patches.trl_trainers import divergence_loss
from liger_like.trainer import PatchCallback

# Several forwards of both models for each step; generation by the sharded model; a method of the trainer.
CASES = [
    ("DPO", {}, 6),
    ("KTO", {}, 12),
    ("GRPO", {"gradient_checkpointing": True}, 5),
    ("Distillation", {}, 3),
    ("ORPO", {}, 3),
]
SAVED = {"adapters": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])}


def made(kind, how, folder, **arguments):
    """Return the same trainer at every call, patched or not."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(tiny("Llama", num_hidden_layers=1))
        if how == "before":
            patch(models[-1], strict=True)
    callbacks = [PatchCallback(strict=True)] if how == "callback" else []
    torch.manual_seed(3)
    return trl_trainers.make(kind, models[0], folder, models[1], callbacks, use_cpu=False, **arguments)


def learnt(trainer):
    """Return the results of each step, and the whole weights at the end."""
    logs, weights = learnt_by_shards(trainer)
    reference = getattr(trainer, "ref_model", None)
    assert all(isinstance(model, FSDPModule) for model in (trainer.model, reference) if model is not None)
    assert any(entry["grad_norm"] > 0 for entry in logs)
    return logs, {name: full(p) for name, p in weights.items()}


def in_one_process(rank, folder):
    as_accelerate_launches(FOLDER / "single.yaml", "--cpu", "--mixed_precision", "no")
    trainer = made("DPO", "unpatched", folder, per_device_train_batch_size=4, **SAVED)
    torch.save(learnt_by_shards(trainer), folder / "one")


def compare(rank, folder):
    a_head_of_its_own_unit(rank)
    sharded_heads_of_a_distillation(rank)
    as_accelerate_launches(FOLDER / "fsdp2.yaml", "--mixed_precision", "no")
    ran = trl_trainers.spy(pytest.MonkeyPatch())
    for kind, arguments, calls in CASES:
        expected = learnt(made(kind, "unpatched", folder, **arguments))
        assert bool(ran.theirs) == (kind != "ORPO")  # it reads the logits
        assert not ran.ours
        for how in ("callback", "before")[: 2 if kind in HEAD else 1]:  # a method of a trainer is not of the model
            ran.theirs, ran.ours[:] = 0, []
            assert_same_run(learnt(made(kind, how, folder, **arguments)), expected)
            assert len(ran.ours) == calls
            assert not ran.theirs
        ran.ours.clear()
    # TRL's own head gives each shard of a trained copy the gradient of the tokens of its process alone
    assert_same_run(learnt(made("DPO", "callback", folder, **SAVED)), torch.load(folder / "one"))
    assert not ran.theirs


def a_head_of_its_own_unit(rank):
    """FSDP2 gathers the head's weight in its forward alone; each process has tokens of its own."""
    torch.manual_seed(1)
    whole = tiny("Llama", num_hidden_layers=1)
    ids = batch(rows=4)["input_ids"]
    own = ids[2 * rank : 2 * rank + 2]
    model = copy.deepcopy(whole)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    patch(model, strict=True)
    for part in (model.model.layers[0], model.lm_head, model):
        fully_shard(part)
    logits = whole(input_ids=ids).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected.square().sum().backward()
    for how in ("fused", "token_logprobs", "hooked"):
        model.zero_grad()
        if how == "hooked":  # then the op does not run in the head's forward
            model.lm_head.register_forward_hook(lambda *_: None)
        if how == "token_logprobs":
            found = token_logprobs(model, input_ids=own, labels=own).logprob
        else:
            found = model(input_ids=own, labels=own, fused_lm_head=True).log_probs
        (2 * found.square().sum()).backward()  # FSDP2 takes the mean over processes
        grads = {f"gradient of {name}": full(p.grad) for name, p in model.named_parameters()}
        assert_same(
            {"logprob": found.detach(), **grads},
            {
                "logprob": expected[2 * rank : 2 * rank + 2].detach(),
                **{f"gradient of {name}": p.grad for name, p in whole.named_parameters()},
            },
        )


def sharded_heads_of_a_distillation(rank):
    """The trainer reads the weights of the heads, which are shards if these are units of their own."""
    torch.manual_seed(1)
    whole, other = torch.nn.Linear(8, 11), torch.nn.Linear(6, 11)
    x, teacher_x, mask = torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.ones(2, 5).long()
    sharded = [fully_shard(copy.deepcopy(head)) for head in (whole, other)]

    def loss(student, teacher, rows):
        weights, biases = (student.weight, teacher.weight), (student.bias, teacher.bias)
        return divergence_loss(x[rows], teacher_x[rows], *weights, mask[rows], 0.5, None, *biases)[0]

    loss(whole, other, slice(None)).backward()
    loss(*sharded, slice(rank, rank + 1)).backward()
    assert_same(*({name: full(p.grad) for name, p in head.named_parameters()} for head in (sharded[0], whole)))


def test_fsdp(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long
    run(in_one_process, 1, tmp_path)
    run(compare, 2, tmp_path)
