"""Patched models under DeepSpeed's ZeRO, where it is installed: what one process computes."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from distributed import as_torchrun_does, run
from test_parallel_fsdp import assert_same, gradients, shares
from test_parallel_mixtures import counted, mixture
from test_patches_peft import adapted
from tiny_models import tiny

from liger_like import patch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
LORA = {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["norm"]}


def compare(rank):
    as_torchrun_does()
    import deepspeed

    whole, rows = shares(2)
    made = counted()
    llamas = [tiny("Llama"), tiny("Llama", tie_word_embeddings=True), adapted(tiny("Llama"), **LORA)]
    mixtures = [mixture("Qwen3Moe"), mixture("GptOss")]
    for stage in (1, 2, 3):
        # shard small parameters, too
        zero = {"stage": stage} if stage < 3 else {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        for original in (*llamas, *mixtures):
            _, expected, _ = gradients(copy.deepcopy(original), whole)
            for patched_first in (True, False):
                model = copy.deepcopy(original)
                if patched_first:
                    patch(model, strict=True)
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
                if not patched_first:
                    patch(model, strict=True)
                made.clear()
                output = engine(**rows[rank])
                assert output.logits is None
                assert len(made) == (original in mixtures)
                engine.backward(output.loss * 2)  # DeepSpeed takes the mean over processes
                loss = output.loss.detach().clone()
                dist.all_reduce(loss)
                whole_gradient = deepspeed.utils.safe_get_full_grad
                trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
                got = {f"gradient of {name}": whole_gradient(p) for name, p in trained}
                assert_same({"loss": loss, **got}, expected)
                engine.step()


def test_zero(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run(compare, 2)
