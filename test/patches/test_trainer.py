"""transformers' Trainer, on models patched before it or by the callback."""

import copy
import importlib.util

import pytest
import torch
from tiny_models import tiny
from transformers import Trainer, TrainingArguments, default_data_collator

from examples.graphed_trainer import GraphedTrainer
from liger_like.patching import patch
from liger_like.trainer import PatchCallback

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]


def examples(count=16):
    """Token ids of uneven lengths, of which uneven parts have labels."""
    made = []
    for _ in range(count):
        ids = torch.randint(3, 101, (int(torch.randint(4, 10, ())),))
        labels = ids.clone()
        labels[: int(torch.randint(len(ids) - 2, ()))] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(chosen):
    """Padded at the right."""

    def padded(name, value):
        return torch.nn.utils.rnn.pad_sequence([x[name] for x in chosen], batch_first=True, padding_value=value)

    batch = {name: padded(name, value) for name, value in (("input_ids", 0), ("labels", -100)) if name in chosen[0]}
    return batch | {"attention_mask": (batch["input_ids"] != 0).long()}


@pytest.fixture
def trainer(device, tmp_path):
    """Makes a Trainer of two steps."""

    def make(
        model, callbacks=(), compute_metrics=None, trained=None, evaluated=None, cls=Trainer, adamw=None, **arguments
    ):
        settings = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
        settings |= {"use_cpu": device == "cpu", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        return cls(
            model=model,
            args=TrainingArguments(str(tmp_path), **settings | arguments),
            data_collator=collate,
            train_dataset=trained,
            eval_dataset=evaluated,
            callbacks=[*callbacks],
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=adamw and (torch.optim.AdamW, adamw),
        )

    return make


# what the Trainer touches: interpreting the other kernels would take long
LOSS_AND_NORMS = {"rope": False, "mlp": False, "attention": False}


def pair(device, **config):
    original = tiny("Llama", device, num_hidden_layers=1, **config)
    model = copy.deepcopy(original)
    patch(model, strict=True, **LOSS_AND_NORMS)
    return model, original


def trained(trainer, model, examples, **arguments):
    """Return the log of each step, and the weights at the end."""
    this = trainer(copy.deepcopy(model), trained=examples, **arguments)
    this.train()
    logs = [{k: entry[k] for k in ("loss", "grad_norm")} for entry in this.state.log_history if "loss" in entry]
    assert len(logs) == 2
    return logs, dict(this.model.named_parameters())


def assert_same(got, expected, **tolerance):
    torch.testing.assert_close(got, expected, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


def test_accumulated_gradients_of_uneven_labels(trainer, device):
    """Each step is of eight examples, at once or one by one: every label counts the same."""
    model, original = pair(device)
    data, runs = examples(), []
    for this, rows_, steps in ((original, 8, 1), (model, 8, 1), (model, 1, 8)):
        sizes = {"per_device_train_batch_size": rows_, "gradient_accumulation_steps": steps}
        runs.append(trained(trainer, this, data, **sizes))
    for logs, weights in runs[1:]:
        assert_same(logs, runs[0][0])
        # AdamW divides by the gradient's size: where the gradient is a rounding error, so is the step's direction
        close = [torch.isclose(weights[name], p, atol=1e-4) for name, p in runs[0][1].items()]
        assert torch.cat([x.flatten() for x in close]).float().mean() > 0.99


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"average_tokens_across_devices": False},
        pytest.param({"bf16": True}, marks=pytest.mark.gpu),
        pytest.param({"bf16": True, "torch_compile": True}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_arguments(arguments, trainer, device):
    model, original = pair(device)
    data = examples()
    (got, _), (expected, _) = (trained(trainer, m, data, **arguments) for m in (model, original))
    assert_same(got, expected, **({"rtol": 2e-2} if "bf16" in arguments else {}))


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=8"}


@pytest.mark.parametrize(
    ("optim", "arguments"),
    [
        ("adamw_torch_fused", {}),
        pytest.param("galore_adamw", LOW_RANK, marks=needs("galore_torch")),
        pytest.param("galore_adamw_layerwise", LOW_RANK, marks=needs("galore_torch")),
        pytest.param("adamw_bnb_8bit", {}, marks=[needs("bitsandbytes"), pytest.mark.gpu]),
        pytest.param("paged_adamw_8bit", {}, marks=[needs("bitsandbytes"), pytest.mark.gpu]),
    ],
)
def test_optimizers(optim, arguments, trainer, device):
    """Also one that steps within the backward, and those whose states have a rank of 8, or 8 bits."""
    data, steps = examples(), []
    for model in pair(device, intermediate_size=256):  # large enough for 8 bits
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        this = trainer(model, trained=data, optim=optim, adam_epsilon=1e-2, **arguments)
        this.train()
        steps.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        dtypes = {t.dtype for state in this.optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
        assert (torch.uint8 in dtypes) == ("8bit" in optim)
    for name, step in steps[1].items():
        assert (steps[0][name] - step).norm() <= 1e-3 * step.norm() > 0, name  # rounding to 8 bits may differ


def test_the_fused_loss_is_what_trains(trainer, device, monkeypatch):
    """Without a smoother, which computes its own loss from real logits."""
    seen = []
    compute_loss = Trainer.compute_loss

    def spied(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = compute_loss(self, model, inputs, return_outputs=True, **kwargs)
        seen.append(outputs.logits is None)
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(Trainer, "compute_loss", spied)
    model, _ = pair(device)
    trained(trainer, model, examples())
    trained(trainer, model, examples(), label_smoothing_factor=0.1)
    assert seen == [True] * 2 + [False] * 2


def test_evaluation(trainer, device):
    """Evaluate with labels, with and without logits for metrics."""
    data, results = examples(6), []

    def accuracy(prediction):
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": right[prediction.label_ids[:, 1:] != -100].mean()}

    for model in pair(device):
        settings = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": accuracy}
        this = trainer(model, trained=data, evaluated=data, **settings)
        this.train()
        evaluated = [entry for entry in this.state.log_history if "eval_loss" in entry]
        assert len(evaluated) == 2
        results.append([(entry["eval_loss"], entry["eval_accuracy"]) for entry in evaluated])
        unlabelled = this.predict([{"input_ids": x["input_ids"]} for x in data])
        assert unlabelled.predictions.shape[-1] == 101
        results[-1] += [torch.from_numpy(unlabelled.predictions), this.evaluate(data)["eval_loss"]]
    assert_same(results[0], results[1], atol=1e-3)


def test_callback(trainer, device, capsys):
    data = examples()
    original = tiny("Llama", device, num_hidden_layers=1)
    callback = PatchCallback(**LOSS_AND_NORMS)
    this = trainer(copy.deepcopy(original), [callback], trained=data)
    this.train()
    assert str(callback.report) in capsys.readouterr().out
    assert {row.pattern for row in callback.report.patched} == {"rms_norm", "lm_head"}
    callback.report.unpatch()
    assert {type(m) for m in this.model.modules()} == {type(m) for m in original.modules()}
    logs = [entry["loss"] for entry in this.state.log_history if "loss" in entry]
    assert_same(logs, [entry["loss"] for entry in trained(trainer, original, data)[0]])


def test_graphed_trainer(trainer, device):
    """The example's Trainer logs and learns as the Trainer does; on a GPU it replays most of the eight steps."""
    model, _ = pair(device)
    ids = torch.randint(3, 101, (64, 9))
    data = [{"input_ids": row, "labels": row.where(torch.arange(9) > i % 7, -100)} for i, row in enumerate(ids)]
    settings = {"max_steps": 8, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    settings["adamw"] = {"lr": 1e-2, "fused": True, "capturable": device == "cuda"}
    runs = []
    for cls in (Trainer, GraphedTrainer):
        this = trainer(copy.deepcopy(model), trained=data, cls=cls, **settings)
        this.data_collator = default_data_collator  # without a mask, which only ordinary steps look at
        this.train()
        logs = [[entry[k] for k in ("loss", "grad_norm", "learning_rate")] for entry in this.state.log_history[:8]]
        runs.append((torch.tensor(logs), dict(this.model.named_parameters())))
    assert_same(*runs)
    assert bool(this.graphed._captured) == (device == "cuda")
