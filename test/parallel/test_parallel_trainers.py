"""transformers' Trainer and TRL's SFTTrainer under FSDP2: with patched models, adapted or not, they log and learn what
they do with unpatched ones.
"""

import importlib.util

import datasets
import pytest
import torch
from distributed import as_accelerate_launches, run
from test_accelerate import FOLDER
from test_parallel_fsdp import assert_same, full
from test_patches_peft import adapted, in_four_bits
from test_trainer import collate, examples
from tiny_models import tiny
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_trainers import spy, tokenizer

from liger_like import patch
from liger_like.trainer import PatchCallback

SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-2,
    "logging_steps": 1,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
LORA = {"target_modules": "all-linear"}
CASES = [
    (Trainer, {}),
    (Trainer, {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["norm"]}),
    (Trainer, {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]}),
    (SFTTrainer, {}),
    (SFTTrainer, LORA),
]


def made(adapters, saved=None):
    """The same model at every call; from ``saved``, in four bits of a dtype that FSDP shards."""
    torch.manual_seed(1)
    if saved is None:
        model = tiny("Llama", num_hidden_layers=1)
    else:
        model = in_four_bits(saved, bnb_4bit_quant_storage=torch.float32)
    return adapted(model, **adapters) if adapters else model


def learnt(cls, model, folder, *callbacks):
    """Return the log of each step, and the whole trained parameters at the end."""
    torch.manual_seed(2)
    data = examples()
    if cls is Trainer:
        arguments, options = TrainingArguments(folder, **SETTINGS), {"data_collator": collate}
    else:
        arguments = SFTConfig(folder, gradient_checkpointing=False, **SETTINGS)
        data = datasets.Dataset.from_list([{name: x.tolist() for name, x in row.items()} for row in data])
        options = {"processing_class": tokenizer()}
    this = cls(model, arguments, train_dataset=data, callbacks=[*callbacks], **options)
    this.train()
    assert isinstance(this.model, FSDPModule)
    logs = [entry for entry in this.state.log_history if "loss" in entry]
    assert len(logs) == 2
    logged = {f"{key} {i}": torch.tensor(entry[key]) for i, entry in enumerate(logs) for key in ("loss", "grad_norm")}
    return logged | {name: full(p) for name, p in this.model.named_parameters() if p.requires_grad}


def compare(rank, folder, saved):
    """Patched before the trainer shards the model, and by the callback after it."""
    as_accelerate_launches(FOLDER / "fsdp2.yaml", "--mixed_precision", "no")
    ran = spy(pytest.MonkeyPatch())
    quantised = [(Trainer, LORA, saved)] if saved else []
    for cls, *how in [*CASES, *quantised]:
        expected = learnt(cls, made(*how), folder)
        assert not ran.ours
        model = made(*how)
        patch(model, strict=True)
        for this, *callbacks in ((model,), (made(*how), PatchCallback(strict=True))):
            assert_same(learnt(cls, this, folder, *callbacks), expected)
            assert bool(ran.ours) == (cls is SFTTrainer)
            ran.ours.clear()


def test_fsdp(monkeypatch, tmp_path):
    """Also in four bits, if bitsandbytes is installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long
    saved = None
    if importlib.util.find_spec("bitsandbytes"):
        saved = tmp_path / "saved"
        made({}).save_pretrained(saved)
    run(compare, 2, tmp_path, saved)
