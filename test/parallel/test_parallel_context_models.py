"""Context parallel: what patched models compute whose sequences are spread over processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_parallel_context import IDS, close
from test_patches_attention import first_row, masked, packed, with_lengths
from tiny_models import ATTENTION, batch, results, tiny
from torch.distributed.device_mesh import init_device_mesh

from liger_like.ops.load_balancing import load_balancing_loss_ref
from liger_like.parallel import context_parallel
from liger_like.patches import attention
from liger_like.patching import patch

BATCHES = {
    "whole": lambda inputs: inputs,
    "uneven length": lambda inputs: {name: t[:, :11] for name, t in inputs.items()},
    "left padding": lambda inputs: masked(inputs, slice(3)),
    "packed": lambda inputs: packed(first_row(inputs), 8, 4),
    "cu_seq_lens": lambda inputs: with_lengths(packed(first_row(inputs), 3, 8, 1), 3, 8, 1),
}
MODELS = [  # family, changes of its config, batch, method
    ("Llama", {}, "uneven length", "ring"),
    ("Mistral", {"sliding_window": 5}, "left padding", "allgather"),
    ("Qwen3", ATTENTION["Qwen3"], "packed", "ulysses"),
    ("Mistral", {"sliding_window": 5}, "cu_seq_lens", "ring"),
    ("GptOss", ATTENTION["GptOss"], "uneven length", "allgather"),
    ("Mixtral", {"output_router_logits": True}, "whole", "allgather"),
    ("Mixtral", {"output_router_logits": True}, "left padding", "allgather"),
    ("Mixtral", {"output_router_logits": True}, "uneven length", "ring"),
]


def check_model(mesh, family, config, given, method):
    torch.manual_seed(0)
    original = tiny(family, **config, attn_implementation="eager")
    patched, inputs = copy.deepcopy(original), BATCHES[given](batch()) | {"use_cache": False}
    rest = family in ("Llama", "Qwen3")  # slow to interpret; treat each token alone
    patch(patched, norm=rest, rope=rest, mlp=False)
    if given == "packed":
        patched.gradient_checkpointing_enable({"use_reentrant": False})
    expected = results(original, inputs)
    with context_parallel(mesh, method=method) as cp:
        loss = patched(**cp.shard(inputs)).loss
    loss.backward()  # outside of the context
    got = {"loss": loss.detach(), **{name: p.grad for name, p in patched.named_parameters()}}
    assert got.keys() == expected.keys()
    for name, t in got.items():
        dist.all_reduce(t)
        close(t, expected[name], f"{family}, {given}, {method}, {name}")


def model_worker(rank):
    mesh = init_device_mesh("cpu", (2,))
    for model in MODELS:
        check_model(mesh, *model)


def test_models_compute_what_one_process_does():
    run(model_worker, 2)


def model(family="Llama", **config):
    patched = tiny(family, **config)
    patch(patched, norm=False, rope=False, mlp=False)
    return patched


def test_an_unpatched_model_is_no_silent_mistake(mesh):
    with pytest.raises(RuntimeError, match=r"patch the model with liger_like\.patch"), context_parallel(mesh) as cp:
        tiny("Llama")(**cp.shard(batch()))
    message = "batch must have input_ids or inputs_embeds, got an empty one"  # the context passes errors on
    with pytest.raises(ValueError, match=message), context_parallel(mesh) as cp:
        cp.shard({})


def test_models_see_the_context_within_it_only(mesh):
    patched, inputs = model(), batch() | {"use_cache": False}
    with context_parallel(mesh) as outer:
        with context_parallel(mesh, method="ring") as inner:
            assert attention.context is inner
        assert attention.context is outer
        across = patched(**outer.shard(inputs)).loss
    assert attention.context is None
    torch.testing.assert_close(across, patched(**inputs).loss)


def test_routers_that_see_other_tokens_than_those_of_the_batch(mesh):
    with context_parallel(mesh) as cp:
        model()(**cp.shard(masked(batch(), slice(3))), use_cache=False)
        with pytest.raises(ValueError, match=r"see the 24 tokens of the last \.shard, .* got 7"):
            cp.balance([torch.ones(7, 4)], 2)


def test_one_mask_for_all_rows(mesh):
    inputs, logits = batch(), torch.randn(24, 4)
    mask = masked(inputs, slice(3))["attention_mask"][:1]
    with context_parallel(mesh) as cp:
        model()(**cp.shard(inputs | {"attention_mask": mask}), use_cache=False)
        close(cp.balance([logits], 2), load_balancing_loss_ref(logits, 2, mask=mask.expand(2, -1)), "the loss")


def test_compiled_layers(mesh):
    patched, inputs = model(num_hidden_layers=1), batch() | {"use_cache": False}
    expected = results(patched, inputs)
    for layer in patched.model.layers:
        layer.compile(backend="aot_eager")
    with context_parallel(mesh) as cp:
        for name, t in results(patched, cp.shard(inputs)).items():
            close(t, expected[name], name)


def test_what_attention_across_processes_cannot_do(mesh):
    padded = torch.ones(2, 12).tril()
    with context_parallel(mesh):
        for unknown, message in (
            ({"attention_mask": padded}, "pass the inputs that .shard returns"),
            ({"attention_mask": torch.zeros(2, 1, 12, 12)}, "this model has another mask"),
            ({"output_attentions": True}, "neither dropout of attention nor attention weights"),
        ):
            with pytest.raises(ValueError, match=message):
                model()(input_ids=IDS, **unknown)
        with pytest.raises(ValueError, match="this model has another mask"):
            model("Llama4", **ATTENTION["Llama4"])(input_ids=IDS)


@pytest.mark.parametrize(
    ("family", "config", "found"),
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("MiniMax", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_layers_that_read_earlier_tokens_without_attention(mesh, family, config, found):
    """They would see the tokens of one process, and attention beside them would hide that it is not all."""
    hybrid = tiny(family, **config)
    patch(hybrid, norm=False, rope=False, mlp=False, loss=False)
    message = f"no layers but attention that read earlier tokens; this model has '{found}'"
    with pytest.raises(ValueError, match=message), context_parallel(mesh) as cp:
        hybrid(**cp.shard(batch()), use_cache=False)
