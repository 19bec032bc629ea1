"""TRL's trainers of models that they make themselves or that are on a server: AsyncGRPO, GRPO's reference, teachers."""

import queue

import numpy
import pytest
import torch
import trl
import trl_trainers
from test_trainer import LOSS_AND_NORMS
from test_trl import assert_learnt, assert_original, head_rows, learnt, made, ran  # noqa: F401  # fixtures
from tiny_models import tiny
from trl.experimental import async_grpo, server_distillation
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.generation import vllm_client
from trl.trainer import grpo_trainer

from liger_like.trainer import patch_trainer

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]


def nothing(*_, **__):
    """Stand in for what needs a server."""


class Worker:
    """Rollouts without a server: samples of two prompt tokens and three of a completion, in groups of two."""

    start = stop = update_model_version = check_health = nothing

    def __init__(self):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        random, mask = numpy.random.default_rng(0), numpy.array([0, 0, 1, 1, 1])
        for i in range(12):
            ids, advantage = random.integers(3, 100, 5), float(random.normal())
            old = (-4.6 * mask).astype(numpy.float32)
            self.rollout_buffer.put(RolloutSample([], [], ids, mask, old, advantage, 0, i // 2, {}))


class Transfer:
    init_weight_transfer = pause = send_weights = resume = destroy = nothing


@pytest.fixture
def make_async(device, tmp_path, monkeypatch):
    """Make the same AsyncGRPOTrainer at every call, without vLLM, and with an attention that a CPU has."""

    def model(*_, **__):
        torch.manual_seed(1)
        return tiny("Llama", device, num_hidden_layers=1)

    monkeypatch.setattr(async_grpo_trainer, "create_model_from_path", model)
    for name in ("VLLMClient", "register_tree_attention", "get_peak_flops_per_device"):
        monkeypatch.setattr(async_grpo_trainer, name, nothing)

    def make():
        common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
        common |= {"max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        common |= {"use_cpu": device == "cpu", "bf16": False, "gradient_checkpointing": False, "token_budget": 0}
        trainer = async_grpo.AsyncGRPOTrainer(
            "tiny",
            args=async_grpo.AsyncGRPOConfig(str(tmp_path), epsilon=9.0, weight_sync_steps=9, **common),
            train_dataset=trl_trainers.datasets.Dataset.from_list(trl_trainers.PROMPTS * 6),
            processing_class=trl_trainers.tokenizer(),
            rollout_worker=Worker(),
            weight_transfer=Transfer(),
        )
        trainer.models = [trainer.model]
        return trainer

    return make


def losses(trainer):
    trainer.train()
    numbers = ("loss", "grad_norm", "ratio", "kl", "entropy")
    logs = [[entry[name] for name in numbers] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    assert all(entry[1] > 0 for entry in logs)
    return torch.tensor(logs)


def test_async_grpo(make_async, ran):  # noqa: F811
    expected = losses(make_async())
    assert ran.theirs
    assert not ran.ours
    ran.theirs = 0
    trainer = make_async()
    report = patch_trainer(trainer, **LOSS_AND_NORMS)
    assert {row.status for row in head_rows(report)} == {"patched"}
    torch.testing.assert_close(losses(trainer), expected, rtol=2e-4, atol=2e-5)
    assert ran.ours
    assert not ran.theirs
    report.unpatch()
    assert_original(trainer)


def test_reference_model_of_grpo(made, ran, device, monkeypatch):  # noqa: F811
    """The loss compares with the log-probabilities of a model that the trainer loads; they come from our op, too."""

    def reference(*_, **__):
        torch.manual_seed(2)
        return tiny("Llama", device, num_hidden_layers=1)

    monkeypatch.setattr(grpo_trainer, "create_model_from_path", reference)
    expected = learnt(made("GRPO", beta=0.3))
    assert all(entry["kl"] > 0 for entry in expected[0])
    ran.theirs = 0
    trainer = made("GRPO", "callback", beta=0.3)
    assert_learnt(trainer, expected)
    assert ran.ours
    assert not ran.theirs
    assert {row.count for row in head_rows(trainer.patching.report)} == {2}
    trainer.models.append(trainer.ref_model)
    trainer.patching.report.unpatch()
    assert_original(trainer)


def test_teacher_on_a_server(device, tmp_path, monkeypatch):
    """The student's logits are compared with a few numbers: the head is left alone, and reported."""
    monkeypatch.setattr(vllm_client, "VLLMClient", nothing)
    common = {"report_to": [], "use_cpu": device == "cpu", "bf16": False, "max_completion_length": 5}
    trainer = server_distillation.ServerDistillationTrainer(
        tiny("Llama", device, num_hidden_layers=1),
        server_distillation.ServerDistillationConfig(
            str(tmp_path), per_device_train_batch_size=2, teacher_model_server_url="http://localhost", **common
        ),
        train_dataset=trl_trainers.datasets.Dataset.from_list(trl_trainers.PROMPTS * 6),
        processing_class=trl_trainers.tokenizer(),
    )
    report = patch_trainer(trainer, **LOSS_AND_NORMS)
    (row,) = head_rows(report)
    reason = f"the loss of TRL {trl.__version__}'s ServerDistillationTrainer reads the logits"
    assert (row.status, row.reason) == ("skipped", reason)
    assert {row.pattern for row in report.patched} == {"rms_norm"}
