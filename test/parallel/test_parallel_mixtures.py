"""Patched mixtures of experts under the wrappers of torch and transformers: what one process computes."""

import copy
import functools
import itertools

import pytest
from distributed import as_torchrun_does, run
from test_parallel_fsdp import assert_same, gradients, head_in_root, shares, train_step
from tiny_models import tiny
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from liger_like import patch
from liger_like.patches import experts

MIXTURES = ("Mixtral", "Qwen3Moe", "GptOss")
SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24}


def mixture(family, device="cpu", **config):
    """One layer, with a vocabulary that two processes can split evenly."""
    return tiny(
        family, device, **SIZES | {"num_hidden_layers": 1, "vocab_size": 104, "experts_implementation": None} | config
    )


def counted():
    """Let this process run the op where no kernel can; return its calls, which grow."""
    made, op = [], experts.moe_experts
    experts.use_kernel = lambda x: True
    experts.moe_experts = lambda *args, **options: made.append(1) or op(*args, **options)
    return made


def experts_alone(model):
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts)
    return head_in_root(model)


def compare_wrapped(rank):
    made = counted()
    whole, rows = shares(2)
    for family in MIXTURES:
        original = mixture(family)
        _, expected, _ = train_step(copy.deepcopy(original), whole)
        wrappers = (DistributedDataParallel, head_in_root, experts_alone)
        for wrap, patched_first in itertools.product(wrappers, (True, False)):
            _, _, collectives = train_step(wrap(copy.deepcopy(original)), rows[rank], 2)
            model = copy.deepcopy(original)
            if patched_first:
                patch(model, strict=True)
            model = wrap(model)
            if not patched_first:
                patch(model, strict=True)
            made.clear()
            _, got, counts = train_step(model, rows[rank], 2)
            assert_same(got, expected)
            assert (len(made), counts) == (1, collectives), (family, wrap, patched_first)


def compare_expert_parallel(rank, paths):
    """Some ranks' batches are the same (tp_size), others differ (fsdp_size)."""
    as_torchrun_does()
    made = counted()
    whole, rows = shares(2)
    for path, name in itertools.product(paths, ("tp_size", "fsdp_size")):
        load = functools.partial(AutoModelForCausalLM.from_pretrained, path)
        _, expected, _ = gradients(load().train(), whole)
        model = load(distributed_config=DistributedConfig(ep_size=2, **{name: 2})).train()
        assert [row for row in patch(model).patched if row.pattern == "experts"]
        made.clear()
        _, got, _ = gradients(model, *((whole,) if name == "tp_size" else (rows[rank], 2)))
        assert made
        assert_same(got, expected)  # which no NaN is


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take a hundred times as long


def test_wrapped_mixtures_compute_what_one_process_does():
    run(compare_wrapped, 2)


def test_expert_parallelism_of_transformers(tmp_path):
    paths = [tmp_path / family for family in MIXTURES]
    for path in paths:
        mixture(path.name).save_pretrained(path)
    run(compare_expert_parallel, 2, paths)
