"""Patched models under torch's data-parallel wrappers, and under those that use them: what one process computes."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from distributed import as_torchrun_does, run
from tiny_models import batch, tiny
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from liger_like import patch
from liger_like.runtime.support import use_kernel

MAX_NORM = 0.5  # clips: the gradients of these tests are larger


def head_in_root(model, **options):
    for module in (*model.model.layers, model):
        fully_shard(module, **options)
    return model


def head_alone(model, reshard_after_forward=True, **options):
    fully_shard(model.lm_head, reshard_after_forward=reshard_after_forward, **options)
    return head_in_root(model, **options)


def head_with_norm(model, reshard_after_forward=True):
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=reshard_after_forward)
    return head_in_root(model)


def head_with_embedding(model):
    fully_shard([model.model.embed_tokens, model.lm_head])
    return head_in_root(model)


def every_part_alone(model):
    """Sharded are the very modules that patching looks at."""
    for layer in model.model.layers:
        for part in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp):
            fully_shard(part)
    return head_with_norm(model)


def hybrid(model):
    shape = (2, dist.get_world_size() // 2)
    return head_alone(model, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def fsdp1(model, head_apart=False):
    units = {*model.model.layers, *([model.lm_head] if head_apart else [])}
    policy = CustomPolicy(lambda module: module in units)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def by_accelerate(model):
    """FSDP2 as accelerate's configuration files ask for it."""
    as_torchrun_does()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # without an accelerator accelerate does not choose it
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert isinstance(model, FSDPModule)
    return model


WRAPPERS = {
    "head in root": head_in_root,
    "head alone": head_alone,
    "head alone, kept whole": functools.partial(head_alone, reshard_after_forward=False),
    "head with norm": head_with_norm,
    "head with norm, kept whole": functools.partial(head_with_norm, reshard_after_forward=False),
    "head alone, offloaded": functools.partial(head_alone, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "every part alone": every_part_alone,
    "DDP": DistributedDataParallel,
    "FSDP1": fsdp1,
    "accelerate": by_accelerate,
}
TIED = {"head in root, tied": head_in_root, "head with embedding, tied": head_with_embedding}
# FSDP1 wraps the head alone, so the loss is not fused
UNFUSED = {"FSDP1, head alone": functools.partial(fsdp1, head_apart=True)}


def full(tensor):
    """A copy, also of what one process alone has."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()


def shares(world_size, length=12, device="cpu"):
    """The whole batch, and what each process has of it: fewer labels the higher its rank is, the last of them none."""
    whole = batch(device, rows=2 * world_size, length=length)
    labels = whole["labels"]
    for row in range(2 * world_size):
        labels[row, : row + 1] = -100
    if world_size > 1:
        labels[-2:] = -100
    whole["num_items_in_batch"] = labels[:, 1:].ne(-100).sum()
    rows = [{name: t[2 * r : 2 * r + 2] if t.ndim else t for name, t in whole.items()} for r in range(world_size)]
    return whole, rows


def gradients(model, inputs, processes=1):
    """The output; the loss and every gradient, whole; and the collectives."""
    with CommDebugMode() as collectives:
        output = model(**inputs)
        (output.loss * processes).backward()  # the wrappers take the mean over processes
    loss = output.loss.detach().clone()
    if processes > 1:
        dist.all_reduce(loss)
    with whole_parameters(model, with_grads=True):
        trained = [(clean(name), p) for name, p in model.named_parameters() if p.requires_grad]
        results = {f"gradient of {name}": full(p.grad) for name, p in trained}
    return output, {"loss": loss.cpu(), **results}, dict(collectives.get_comm_counts())


def clipped_step(model):
    """The norm of the gradients that ``gradients`` left, and every parameter after a step with them, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.01, fused=True)
    if isinstance(model, FullyShardedDataParallel):
        norm = model.clip_grad_norm_(MAX_NORM)
    else:
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    assert norm > MAX_NORM
    optimizer.step()
    with whole_parameters(model):
        return {"norm": norm, **{clean(name): full(p) for name, p in model.named_parameters()}}


def train_step(*args):
    output, results, collectives = gradients(*args)
    return output, results | clipped_step(args[0]), collectives


def whole_parameters(model, **options):
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, **options)
    return contextlib.nullcontext()


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def assert_same(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        error = (got[name] - t).double().norm() / t.double().norm()
        assert error <= tolerance, f"{name}: {error:.1e}"


def compare(rank, wrappers, fused=True, device="cpu", **config):
    """Every wrapper, put on before and after patching, beside the unpatched model under it and in one process."""
    processes = dist.get_world_size()
    original = tiny("Llama", device, **config)
    whole, rows = shares(processes, device=device)
    _, expected, _ = train_step(copy.deepcopy(original), whole)
    for name, wrap in wrappers.items():
        _, _, collectives = train_step(wrap(copy.deepcopy(original)), rows[rank], processes)
        if name == "head alone" and use_kernel(torch.empty(0, device=device)):
            (gather,) = (op for op in collectives if "allgather" in str(op))
            collectives[gather] -= 1  # the fused forward computes the gradient: see same_gathers
        for patched_first in (True, False):
            model = copy.deepcopy(original)
            if patched_first:
                patch(model, strict=True)
            model = wrap(model)
            if not patched_first:
                patch(model, strict=fused)
            output, got, counts = train_step(model, rows[rank], processes)
            try:
                assert (output.logits is None) == fused
                assert_same(got, expected)
                assert counts == collectives
            except AssertionError as error:
                raise AssertionError(f"{name}, {'patched first' if patched_first else 'wrapped first'}") from error


def compare_in_bf16(rank):
    """The roundings of a patched model add up to no more than those of an unpatched one, also in the loss."""
    original = tiny("Llama")
    whole, rows = shares(2)
    _, exact, _ = gradients(copy.deepcopy(original).double(), whole)
    results = []
    for wanted in (False, True):
        model = copy.deepcopy(original)
        patch(model, norm=wanted, rope=wanted, mlp=wanted, attention=wanted, loss=wanted)
        head_alone(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        results.append(gradients(model, rows[rank], 2)[1])
    allowed, error = (
        sum(float((got[name] - t).norm() / t.norm()) ** 2 for name, t in exact.items()) ** 0.5 for got in results
    )
    assert 1e-3 < error <= 1.1 * allowed
    unpatched, patched = ({name: t.dtype for name, t in got.items()} for got in results)
    assert patched == unpatched


def compare_offloaded(rank):
    """On a GPU, from parameters that stay in the host's memory, where the optimizer steps."""
    original = tiny("Llama")
    inputs, _ = shares(1, device="cuda")
    _, expected, _ = train_step(copy.deepcopy(original).cuda(), inputs)
    for wrap, patched_first in itertools.product((head_in_root, head_alone), (True, False)):
        model = copy.deepcopy(original)
        if patched_first:
            patch(model, strict=True)
        model = wrap(model, offload_policy=CPUOffloadPolicy())
        if not patched_first:
            patch(model, strict=True)
        output, got, _ = train_step(model, inputs)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert output.loss.is_cuda
        assert output.logits is None
        assert_same(got, expected)


def compare_native(rank, paths):
    """Models that transformers shards as it loads them, so that patching can only come after it.

    It leaves norms out of tensor parallelism, and torch does not clip sharded gradients together with others.
    """
    as_torchrun_does()
    whole, rows = shares(2)
    fsdp, tp = ("fsdp_size", train_step, rows[rank], 2), ("tp_size", gradients, whole, 1)
    for path, (option, step, inputs, processes) in itertools.product(paths, (fsdp, tp)):
        load = functools.partial(LlamaForCausalLM.from_pretrained, path)
        _, expected, _ = step(load().train(), whole)
        original, model = (load(distributed_config=DistributedConfig(**{option: 2})).train() for _ in range(2))
        _, _, collectives = step(original, inputs, processes)
        assert sum(collectives.values())
        report = patch(model)
        assert option == "tp_size" or not report.skipped, str(report)
        _, got, counts = step(model, inputs, processes)
        assert_same(got, expected)
        assert sum(counts.values()) <= sum(collectives.values()), (option, counts, collectives)


@pytest.fixture
def plain(monkeypatch):
    """Processes that start now run the references of the ops: interpreted kernels take a hundred times as long."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def gathers_of(model, inputs, loss=lambda output: output.loss):
    """How often parameters are gathered in a step; and its gradients."""
    model.zero_grad()
    with CommDebugMode() as collectives:
        loss(model(**inputs)).backward()
    (gathers,) = (n for name, n in collectives.get_comm_counts().items() if "allgather" in str(name))
    return gathers, {name: full(p.grad) for name, p in model.named_parameters()}


def same_gathers(rank):
    """A head that is a unit of its own is gathered once, not twice, as long as only its fused loss is trained."""
    original = tiny("Llama", num_hidden_layers=1)
    inputs = batch(length=8)

    def logits_too(output):
        return output.logits[..., :7].float().square().mean()

    ids = {"input_ids": inputs["input_ids"]}
    for wrap, spared in (head_alone, 1), (head_with_norm, 0), (head_in_root, 0):
        plain = wrap(copy.deepcopy(original))
        expected, gradients_of_loss = gathers_of(plain, inputs)
        _, gradients_of_logits = gathers_of(plain, ids, logits_too)
        model = wrap(copy.deepcopy(original))
        patch(model, norm=False, rope=False, mlp=False, attention=False)
        with torch.no_grad():
            model(**ids)
        model.reshard()  # otherwise the backward does it
        for _ in range(2):
            gathers, got = gathers_of(model, inputs)
            assert gathers == expected - spared, (wrap, gathers, expected)
            assert_same(got, gradients_of_loss)
        if not spared:
            continue
        gathers, got = gathers_of(model, ids, logits_too)
        assert gathers == expected
        assert_same(got, gradients_of_logits)
        gathers, got = gathers_of(model, inputs)
        assert gathers == expected
        assert_same(got, gradients_of_loss)
        model = wrap(copy.deepcopy(original))
        with patch(model, norm=False, rope=False, mlp=False, attention=False):
            assert gathers_of(model, inputs)[0] == expected - 1
        gathers, got = gathers_of(model, inputs)
        assert gathers == expected
        assert_same(got, gradients_of_loss)


def compare_all(rank):
    compare(rank, WRAPPERS)
    compare(rank, TIED, tie_word_embeddings=True)
    compare(rank, UNFUSED, fused=False)
    compare_in_bf16(rank)


@pytest.mark.usefixtures("plain")
def test_wrapped_models_compute_what_one_process_does():
    run(compare_all, 2)


@pytest.mark.usefixtures("plain")
def test_hybrid_sharding():
    run(compare, 4, {"hybrid": hybrid})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_over_nccl():
    on_gpus = {name: WRAPPERS[name] for name in ("head in root", "head alone", "head with norm", "DDP")}
    run(compare, 2, on_gpus, True, "cuda", backend="cpu:gloo,cuda:nccl")


@pytest.mark.gpu
def test_parameters_offloaded_from_a_gpu():
    run(compare_offloaded, 1, backend="cpu:gloo,cuda:nccl")


@pytest.mark.usefixtures("plain")
def test_native_sharding_of_transformers(tmp_path):
    paths = [tmp_path / "apart", tmp_path / "tied"]
    for path in paths:  # a vocabulary that two processes can split evenly
        tiny("Llama", tie_word_embeddings=path.name == "tied", vocab_size=104).save_pretrained(path)
    run(compare_native, 2, paths)


def test_weight_of_the_head_is_gathered_once():
    run(same_gathers, 2)
