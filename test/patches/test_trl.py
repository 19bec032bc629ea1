"""TRL's trainers on patched models learn what they learn on unpatched ones, and our op runs in the place of TRL's."""

import copy
import functools
import types

import peft
import pytest
import torch
import transformers
import trl
import trl_trainers
from test_trainer import LOSS_AND_NORMS, assert_same
from tiny_models import tiny
from trl.trainer import utils

from liger_like.patches import trl_code, trl_head, trl_pairs
from liger_like.patches import trl_trainers as plans
from liger_like.patching import patch, unpatch
from liger_like.trainer import PatchCallback, patch_trainer

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
VARYING = ("_runtime", "_per_second", "step_time", "total_flos")  # the ends of the names of metrics that are no results
HEAD = ["SFT", "SFT dft", "DPO", "KTO", "GRPO", "RLOO", "GMPO"]  # the trainers that call TRL's fused head
METHODS = {"Distillation": "_compute_loss", "ORPO": "concatenated_forward", "CPO": "concatenated_forward"}


@pytest.fixture
def ran(monkeypatch):
    return trl_trainers.spy(monkeypatch)


@pytest.fixture
def made(device, tmp_path):
    """Make the same trainer at every call, patched or not, on models in ``models``."""

    def make(kind, how="unpatched", options=LOSS_AND_NORMS, adapters=None, **arguments):
        models = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            models.append(tiny("Llama", device, num_hidden_layers=1))
        callback = PatchCallback(**options)
        if how == "before":
            for model in models:
                patch(model, **options)
        if adapters:
            arguments["adapters"] = peft.LoraConfig(r=4, init_lora_weights=False, **adapters)
        torch.manual_seed(3)
        callbacks = [callback] * (how == "callback")
        trainer = trl_trainers.make(
            kind, models[0], tmp_path, models[1], callbacks, use_cpu=device == "cpu", **arguments
        )
        trainer.models, trainer.patching = models, callback
        if how == "patch_trainer":
            callback.report = patch_trainer(trainer, **options)
        return trainer

    return make


def learnt(trainer):
    """Return the results of each step, and the weights at the end."""
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    logs = [{k: v for k, v in entry.items() if not k.endswith(VARYING)} for entry in logs]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_learnt(trainer, expected):
    assert_same_run(learnt(trainer), expected)


def assert_same_run(got, expected):
    assert_same(got[0], expected[0], rtol=2e-4, atol=2e-5)
    # Adam divides by the gradient's size: where the gradient is a rounding error, so is the step's direction
    close = [torch.isclose(got[1][name], p, atol=1e-4) for name, p in expected[1].items()]
    assert torch.cat([x.flatten() for x in close]).float().mean() > 0.99


def head_rows(report):
    return [row for row in report.rows if row.pattern in ("trl head", "lm_head")]


def assert_original(trainer):
    """Nothing of the models, of TRL's function on them or of the trainer is ours."""
    for model in trainer.models:
        assert not any(hasattr(type(module), "_liger_like") for module in model.modules())
        function = trl_code.fused_forward(model)
        if function is not None:
            assert function.__globals__ is vars(utils)
            assert function.__wrapped__ is transformers.LlamaForCausalLM.forward
            assert trl_code.kept_forward(function).__func__ is transformers.LlamaForCausalLM.forward
    assert not {*METHODS.values()} & {*vars(trainer)}


@pytest.mark.parametrize("kind", [*HEAD, *METHODS])
def test_trainers(kind, made, ran):
    """Patched before the trainer is made, by the callback and by patch_trainer; also restored."""
    expected = learnt(made(kind))
    assert bool(ran.theirs) == (kind not in ("ORPO", "CPO"))  # these read the logits
    assert not ran.ours
    ways = ["callback", "before"] if kind in HEAD else ["callback"]  # the method of a trainer is not of the model
    if kind in ("SFT", "DPO", "Distillation"):
        ways.append("patch_trainer")  # the callback calls it
    for how in ways:
        ran.theirs, ran.ours = 0, []
        trainer = made(kind, how)
        assert_learnt(trainer, expected)
        assert ran.ours
        assert not ran.theirs
        if kind in HEAD and how != "before":
            assert {options["uniform_gradient"] for options in ran.ours} == {kind == "SFT"}
        if how != "before":
            rows = head_rows(trainer.patching.report)
            assert {row.status for row in rows} == {"patched"}
            assert {row.pattern for row in rows} == (
                {"trl head"} if kind == "Distillation" else {"trl head", "lm_head"}
            )
            trainer.patching.report.unpatch()
        else:
            for model in trainer.models:
                unpatch(model)
        assert_original(trainer)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("DPO", {"adapters": {"target_modules": ["q_proj"]}}),  # the reference is the model without adapters
        ("GRPO", {"gradient_checkpointing": True, "temperature": 0.9}),
        ("SFT", {"bf16": True}),  # accelerate wraps TRL's forward
        ("GRPO", {"cast_lm_head_to_fp32": True}),  # TRL replaces the forward of the head
        ("SFT", {"adapters": {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]}}),
        ("CPO", {"loss_type": "sigmoid", "cpo_alpha": 0.0}),
    ],
    ids=str,
)
def test_arguments(kind, arguments, made, ran):
    expected = learnt(made(kind, **arguments))
    ran.theirs = 0
    trainer = made(kind, "callback", **arguments)
    if "bf16" in arguments:
        logs, _ = learnt(trainer)
        assert_same(logs, expected[0], rtol=2e-2, atol=2e-2)
    else:
        assert_learnt(trainer, expected)
    assert ran.ours
    assert not ran.theirs
    rows = head_rows(trainer.patching.report)
    assert {row.status for row in rows if row.pattern == "trl head"} == {"patched"}
    assert ("cast_lm_head_to_fp32" in arguments) == any("cast_forward_to_fp32" in row.reason for row in rows)
    trainer.patching.report.unpatch()
    assert_original(trainer)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])  # others of TRL weigh batches by themselves
def test_accumulation(kind, made, ran):
    """Eight rows at once or one by one."""
    runs = []
    for rows, steps in ((8, 1), (1, 8)):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "max_steps": 3}
        runs.append(made(kind, "callback", num_train_epochs=3, **sizes))
    expected = learnt(runs[0])
    logs, weights = learnt(runs[1])
    for entry, other in zip(logs, expected[0], strict=True):
        assert_same({k: entry[k] for k in ("loss", "grad_norm")}, {k: other[k] for k in ("loss", "grad_norm")})
    assert_same(weights["lm_head.weight"], expected[1]["lm_head.weight"], atol=1e-3)
    assert not ran.theirs


def test_pairs_of_other_code_are_left_alone(made):
    """By a method of the user's, or for a loss that the numbers of tokens do not give."""
    trainer = made("ORPO")
    trainer.aux_loss_enabled = True
    (row,) = head_rows(patch_trainer(trainer, **LOSS_AND_NORMS))
    assert (row.status, row.reason) == ("skipped", "the model has a router's loss")

    class Mine(type(trainer)):
        def get_batch_logps(self, *args, **kwargs):
            raise NotImplementedError

    trainer.__class__ = Mine
    (row,) = head_rows(patch_trainer(trainer, **LOSS_AND_NORMS))
    assert (row.status, row.reason) == ("skipped", "concatenated_forward of Mine is not recognised")
    assert trl_pairs.METHOD not in vars(trainer)


def test_pairs_need_a_patched_loss(made):
    trainer = made("CPO")
    trainer.model.lm_head.forward = functools.partial(torch.nn.Linear.forward, trainer.model.lm_head)
    lm_head, row = head_rows(patch_trainer(trainer, **LOSS_AND_NORMS))
    assert (lm_head.status, row.status) == ("skipped", "skipped")
    assert row.reason == "its model's lm_head is left alone"
    assert trl_pairs.METHOD not in vars(trainer)


@pytest.mark.parametrize("kind", ["GKD", "TPO", "Reward"])
def test_trainers_that_read_logits_are_reported(kind, made, ran, device, tmp_path):
    """Their models are patched but for the head; with strict=True nothing stays patched."""
    if kind == "Reward":
        model = transformers.LlamaForSequenceClassification(tiny("Llama", num_hidden_layers=1, num_labels=1).config)
        trainer = trl.RewardTrainer(
            model,
            trl.RewardConfig(str(tmp_path), report_to=[], use_cpu=device == "cpu", bf16=False),
            train_dataset=trl_trainers.datasets.Dataset.from_list(trl_trainers.PAIRS),
            processing_class=trl_trainers.tokenizer(),
        )
    else:
        trainer = made(kind)
    report = patch_trainer(trainer, **LOSS_AND_NORMS)
    (row,) = head_rows(report)
    assert row.cls == f"{kind}Trainer"
    if kind == "Reward":
        assert (row.status, row.reason) == ("absent", "the model has no language-model head")
        return
    assert (row.status, row.reason) == (
        "skipped",
        f"the loss of TRL {trl.__version__}'s {kind}Trainer reads the logits",
    )
    assert {row.pattern for row in report.patched} == {"rms_norm"}
    with pytest.raises(ValueError, match="strict=True, but modules would be left alone"):
        patch_trainer(trainer, strict=True, **LOSS_AND_NORMS)
    assert_original(trainer)
    (row,) = head_rows(patch_trainer(trainer, loss=False)) or [None]
    assert row is None


class Other(torch.autograd.Function):
    """A function of another TRL: its arguments are others."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size):
        raise NotImplementedError


class Wrong(torch.autograd.Function):
    """A function of another TRL: its results come in another order."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
    ):
        numbers = torch.randn(5, len(hidden))
        return (*(numbers * (hidden.sum() + weight.sum() + bias.sum())),)

    @staticmethod
    def backward(ctx, *grads):
        return (*(torch.ones(shape) for shape in ((5, 8), (11, 8), 11)), *[None] * 6)


REASONS = {
    Other: "its autograd function takes ctx, hidden, weight, bias, targets, temperature, chunk_size",
    Wrong: "its numbers differ by",
}


@pytest.mark.parametrize("function", REASONS, ids=lambda function: function.__name__)
def test_another_trl_is_left_alone(function, made, ran, monkeypatch):
    trainer = made("SFT", "before")
    theirs = vars(trainer.model)["forward"].__func__.__code__
    monkeypatch.setattr(utils, trl_code.NUMBERS, function)
    reason = f"TRL {trl.__version__} has another fused head: {REASONS[function]}"
    with pytest.warns(UserWarning, match=f"the model's loss does not run in TRL's head: {reason}"):
        utils.add_fused_lm_head(trainer.model)
    assert vars(trainer.model)["forward"].__func__.__globals__ is vars(utils)
    assert vars(trainer.model)["forward"].__func__.__code__ is theirs
    trainer = made("SFT")
    report = patch_trainer(trainer, **LOSS_AND_NORMS)
    lm_head, head = head_rows(report)
    assert (lm_head.status, head.status) == ("skipped", "skipped")
    assert "forward was replaced by trl.trainer.utils" in lm_head.reason
    assert reason in head.reason
    assert vars(trainer.model)["forward"].__func__.__globals__ is vars(utils)


def test_another_divergence_is_left_alone(made, monkeypatch):
    def other(student, teacher):
        raise NotImplementedError

    trainer = made("Distillation")
    monkeypatch.setitem(type(trainer)._compute_loss.__globals__, plans.DIVERGENCE, other)
    (row,) = head_rows(patch_trainer(trainer, **LOSS_AND_NORMS))
    assert row.status == "skipped"
    assert row.reason == f"TRL {trl.__version__} computes another divergence: its function takes student, teacher"
    assert "_compute_loss" not in vars(trainer)


def test_options(made, ran):
    """They reach the op, and a second call changes them."""
    trainer = made("DPO", "patch_trainer", {**LOSS_AND_NORMS, "keep_logits": 1000})
    trainer.train()
    assert {options["keep_logits"] for options in ran.ours} == {1000}
    patch_trainer(trainer, **LOSS_AND_NORMS)
    (head,) = {trl_code.stand_in(trl_code.fused_forward(trainer.model))}
    assert head.options == {"keep_logits": 0, "logits_dtype": torch.float32, "uniform_gradient": False}
    with pytest.raises(ValueError, match="keep_logits must be at least 0, got -1"):
        PatchCallback(keep_logits=-1)
    with pytest.raises(TypeError, match=r"trainer must be a transformers.Trainer, got LlamaForCausalLM"):
        patch_trainer(trainer.model)


def test_a_callback_that_no_trainer_calls(made, capsys):
    """It patches the model that it is given, by the options of patch."""
    model = made("SFT").model
    for options in ({"loss": False}, {"keep_logits": 5, "logits_dtype": torch.bfloat16}):
        callback = PatchCallback(**LOSS_AND_NORMS, **options)
        callback.on_train_begin(None, transformers.TrainerState(), None, model=model)
        assert callback.report.model is model
        heads = set() if "loss" in options else {"lm_head", "trl head"}
        assert {row.pattern for row in head_rows(callback.report)} == heads
        assert str(callback.report) in capsys.readouterr().out
        callback.report.unpatch()
        assert not any(hasattr(type(module), "_liger_like") for module in model.modules())


def test_what_is_taken_for_the_fused_head(made):
    """TRL's functions with the argument fused_lm_head alone: no function of the user's, and no other one of TRL."""

    def fused(self, fused_lm_head=False):
        return fused_lm_head

    assert trl_code.is_fused(trl_code.fused_forward(made("SFT").model))
    others = fused, utils.add_fused_lm_head, transformers.LlamaForCausalLM.forward, None
    assert not any(map(trl_code.is_fused, others))
    model = torch.nn.Linear(2, 2)
    model.forward = types.MethodType(utils.pad, model)
    assert trl_code.fused_forward(model) is None


def test_lora_on_the_head(made, ran):
    """TRL's trainers refuse it when they are made, and would train without it."""
    trainer = made("SFT")
    model = trainer.model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(adapters, model)
    ids = torch.randint(3, 101, (2, 9), device=model.device)
    runs = []
    for fused in (False, True):
        model.zero_grad()
        if fused:
            patch_trainer(trainer, **LOSS_AND_NORMS)
            logprob = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        else:
            logits = model(input_ids=ids).logits[:, :-1]
            logprob = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        logprob.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert any("lm_head.lora_A" in name for name in grads)
        runs.append((logprob.detach(), grads))
    assert_same(*runs)
    assert ran.ours


def test_adapters_of_the_head_that_came_after_patching(made):
    trainer = made("SFT", "patch_trainer")
    model = trainer.model
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["lm_head"]), model)
    ids = torch.randint(3, 101, (2, 9), device=model.device)
    with pytest.raises(RuntimeError, match=r"the adapters of the head changed after patching: call liger_like.patch"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    patch_trainer(trainer, **LOSS_AND_NORMS)
    assert model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.isfinite().all()


def test_a_deep_copy_runs_on_weights_of_its_own(made, ran):
    model = made("SFT", "patch_trainer").model
    ids = torch.randint(3, 101, (2, 9), device=model.device)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    before = len(ran.ours)
    numbers = [m(input_ids=ids, labels=ids, fused_lm_head=True).log_probs for m in (model, other)]
    assert len(ran.ours) == before + 2
    logits = other.lm_head(other.model(ids).last_hidden_state[:, :-1])
    assert_same(numbers[1], logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0])
    assert not torch.allclose(*numbers)


def test_a_hook_of_the_head_does_not_run(made, ran):
    """It does not in TRL's head, which reads the weight."""
    model = made("SFT", "patch_trainer").model
    ids = torch.randint(3, 101, (2, 9), device=model.device)
    calls = []
    model.lm_head.register_forward_hook(lambda module, args, output: calls.append(output))
    assert model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.isfinite().all()
    assert ran.ours
    assert not calls


def test_a_trainer_of_the_users(made):
    """Its loss calls that of TRL's trainer, or its own code reads the logits."""
    trainer = made("SFT")

    class Calls(type(trainer)):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Reads(type(trainer)):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).logits.mean()

    for cls, status in ((Reads, "skipped"), (Calls, "patched")):
        trainer.__class__ = cls
        assert {row.status for row in head_rows(patch_trainer(trainer, **LOSS_AND_NORMS))} == {status}


def test_a_forward_that_trl_found_replaced(made, device):
    """TRL keeps calling it, so the loss of the class does not run."""
    model = tiny("Llama", device, num_hidden_layers=1)
    model.forward = types.MethodType(lambda self, **kwargs: None, model)
    utils.add_fused_lm_head(model)
    lm_head, head = head_rows(patch(model, **LOSS_AND_NORMS))
    assert "forward was replaced by test_trl" in lm_head.reason
    assert head.status == "patched"
    assert head.pattern == trl_head.PATTERN
