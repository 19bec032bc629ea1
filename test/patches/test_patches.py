"""Patched models compute what unpatched ones do, however they are called."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, assert_exact, batch, errors, results, tiny
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_like.patches import lm_head
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")


def pair(family, device, **config):
    """A patched model and its unpatched twin."""
    original = tiny(family, device, **config)
    patched = copy.deepcopy(original)
    patch(patched, strict=True)
    return patched, original


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_exact(family, device):
    patched, original = pair(family, device)
    inputs = batch(device)
    assert_exact(patched, original, inputs)
    assert patched(**inputs).logits is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pattern_of_a_family_is_patched(family, device):
    report = patch(tiny(family, device))
    rotary = "qk_norm_rope" if family == "Qwen3" else "rope"
    expected = {"rms_norm", rotary, "glu_mlp", "attention", "lm_head", "generation"}
    assert {row.pattern for row in report.patched} == expected
    assert not report.skipped


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_exact_in_bfloat16(family, device):
    original = tiny(family, device, torch.bfloat16, hidden_size=64, intermediate_size=128)
    patched = copy.deepcopy(original)
    patch(patched, strict=True)
    # rounding makes one gradient of one batch better or worse by chance: compare all gradients of several batches
    pairs = [pair for _ in range(8) for pair in errors(patched, original, batch(device, length=64)).values()]
    error, allowed = (math.sqrt(sum(e * e for e in side)) for side in zip(*pairs, strict=True))
    assert error <= 1.1 * allowed


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
def test_logits_are_real_outside_of_training(family, device):
    patched, original = pair(family, device)
    inputs = batch(device)
    ids = {"input_ids": inputs["input_ids"]}
    torch.testing.assert_close(patched(**ids).logits, original(**ids).logits)
    got, expected = patched.eval()(**inputs), original.eval()(**inputs)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


def test_student_and_teacher(device):
    """A loss of the logits of both, of which one is patched; calls without labels give them."""
    student, original = pair("Llama", device, num_hidden_layers=1)
    teacher = tiny("Llama", device, num_hidden_layers=1).eval()
    ids = batch(device, length=6)["input_ids"]
    with torch.no_grad():
        wanted = teacher(ids).logits.softmax(-1)
    results = []
    for model in (student, original):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), wanted.flatten(0, 1))
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    torch.testing.assert_close(*results)
    assert teacher.train()(ids, labels=ids).logits is not None


def test_partial_rotary_width_is_what_phi3_has(device):
    model = tiny("Phi3", device)
    cos, _ = model.model.rotary_emb(torch.zeros(1, device=device), torch.arange(3, device=device)[None])
    assert cos.shape[-1] == model.config.head_dim // 2


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_config_options(change, device):
    assert_exact(*pair("Llama", device, **change), batch(device))


def test_head_with_bias(device):
    original = tiny("Llama", device)
    original.lm_head.bias = torch.nn.Parameter(torch.randn(original.config.vocab_size, device=device))
    patched = copy.deepcopy(original)
    patch(patched, strict=True)
    assert_exact(patched, original, batch(device))


def padded(inputs):
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 9:] = mask[1, :2] = 0
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def packed(inputs):
    positions = torch.cat((torch.arange(5), torch.arange(7)))
    return {**inputs, "position_ids": positions.to(inputs["input_ids"].device).expand(2, -1)}


def shifted(inputs):
    targets = inputs["labels"].roll(-1, dims=1)
    return {**inputs, "shift_labels": targets.masked_fill(targets % 5 == 0, -100)}


def sliced(inputs):
    labels = inputs["labels"]
    return {**inputs, "labels": labels[:, -4:], "shift_labels": labels[:, -4:].contiguous(), "logits_to_keep": 4}


CALLS = {
    "padding": padded,
    "packed documents": packed,
    "shift_labels": shifted,
    "logits_to_keep": sliced,
    "num_items int": lambda inputs: {**inputs, "num_items_in_batch": 37},
    "num_items tensor": lambda inputs: {**inputs, "num_items_in_batch": torch.tensor(37)},
    "ignore_index": lambda inputs: {
        **inputs,
        "labels": inputs["labels"].masked_fill(inputs["labels"] < 0, 7),
        "ignore_index": 7,
    },
    "inputs_embeds": lambda inputs: {
        "labels": inputs["labels"],
        "inputs_embeds": torch.randn(2, 12, 32).to(inputs["labels"].device),
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_calls(call, device):
    patched, original = pair("Llama", device)
    inputs = CALLS[call](batch(device))
    assert_exact(patched, original, inputs)
    assert patched(**inputs).logits is None


def test_all_labels_ignored(device):
    patched, _ = pair("Llama", device)
    inputs = batch(device)
    inputs["labels"].fill_(-100)
    got = results(patched, inputs)
    assert len(got) == 1 + len([*patched.parameters()])
    assert all(not t.any() for t in got.values())


def test_positional_labels_and_tuple_outputs(device):
    patched, original = pair("Llama", device)
    ids, labels = batch(device).values()
    got = patched(ids, None, None, None, None, labels, return_dict=False)
    expected = original(ids, None, None, None, None, labels, return_dict=False)
    torch.testing.assert_close(got[0], expected[0])
    assert [type(value) for value in got[1:]] == [type(value) for value in expected[2:]]  # without the logits


def test_hidden_states_and_attentions_are_returned(device):
    patched, original = pair("Llama", device, attn_implementation="eager")
    inputs = {**batch(device), "output_hidden_states": True, "output_attentions": True}
    got, expected = patched(**inputs), original(**inputs)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states)
    torch.testing.assert_close(got.attentions, expected.attentions)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    patched, original = pair("Llama", device)
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    assert_exact(patched, original, batch(device))


def test_autocast(device):
    patched, original = pair("Llama", device)
    inputs = batch(device)
    with torch.autocast(device, torch.float16):
        got, expected = results(patched, inputs), results(original, inputs)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in expected.items()}
    for name, t in expected.items():
        assert (got[name] - t).norm() <= 4 * torch.finfo(torch.float16).eps * t.norm(), name


def test_generate(device):
    patched, original = pair("Qwen3", device)
    ids = batch(device)["input_ids"]
    got, expected = (m.eval().generate(ids, max_new_tokens=8, do_sample=False) for m in (patched, original))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("patch_first", [True, False])
def test_fully_sharded(patch_first):
    """The head is a unit of its own: its weight is there inside its call only."""
    original = tiny("Llama")
    model = copy.deepcopy(original)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        if patch_first:
            patch(model, strict=True)
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh)
        if not patch_first:
            patch(model, strict=True)
        inputs = batch()
        got, expected = results(model, inputs), results(original, inputs)
        assert model(**inputs).logits is None
        for name, t in expected.items():
            torch.testing.assert_close(got[name].full_tensor() if name != "loss" else got[name], t)
        if patch_first:
            with pytest.raises(RuntimeError, match=r"FSDP.* was put on top of a patched class"):
                unpatch(model)
        else:
            unpatch(model)
            assert type(model).__name__ == "FSDPLlamaForCausalLM"
            assert model(**inputs).logits is not None
    finally:
        dist.destroy_process_group()


def too_few_logits(model, inputs):
    model(**inputs, logits_to_keep=4)


def another_vocabulary(model, inputs):
    model.config.vocab_size = 50
    model(**inputs)


@pytest.mark.parametrize("call", [too_few_logits, another_vocabulary])
def test_errors_are_those_of_the_unpatched_model(call, device):
    patched, original = pair("Llama", device)
    inputs = batch(device)
    with pytest.raises((ValueError, RuntimeError)) as expected:
        call(original, inputs)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        call(patched, inputs)


def test_an_error_in_the_forward_leaves_the_head_as_it_was(device):
    patched, original = pair("Llama", device)
    inputs = batch(device)
    with pytest.raises(ValueError, match="specify exactly one"):
        patched(**inputs, inputs_embeds=torch.zeros(2, 12, 32, device=device))
    hidden = torch.randn(2, 3, 32, device=device)
    torch.testing.assert_close(patched.lm_head(hidden), original.lm_head(hidden))


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_compile_without_graph_breaks(family, device):
    patched, original = pair(family, device)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    inputs = {**batch(device), "use_cache": False}
    loss = compiled(**inputs).loss
    loss.backward()
    expected = results(original, inputs)
    torch.testing.assert_close(loss, expected.pop("loss"))
    for name, gradient in expected.items():
        torch.testing.assert_close(patched.get_parameter(name).grad, gradient)


def test_steps_of_a_compiled_model(device):
    """Later steps run the graph of the first, also in a thread whose state of the patches no earlier test has made."""
    patched, original = pair("Llama", device)
    inputs = {**batch(device), "use_cache": False}

    def losses(model, call):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                loss = call(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(list, losses(patched, compiled)).result()
    torch.testing.assert_close(got, [*losses(original, original)])


def on_gpu():
    """A patched model; the logits of 2 x 1536 tokens are more than one chunk."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=40000, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    patch(model)
    return model


@pytest.mark.gpu
def test_compiled_into_cuda_graphs():
    """A patched model with its loss, of other tokens in each step."""
    model = on_gpu()
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    counters.clear()
    for _ in range(5):
        tokens = torch.randint(model.config.vocab_size, (2, 1536), device="cuda")
        labels = tokens.masked_fill(torch.rand(tokens.shape, device="cuda") < 0.3, -100)
        results = []
        for form in (compiled, model):
            model.zero_grad()
            loss = form(input_ids=tokens, labels=labels, use_cache=False).loss
            loss.backward()
            results.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters())])
        for got, expected in zip(*results, strict=True):
            assert (got - expected).norm() <= 2e-2 * expected.norm()
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_as_one_cuda_graph(compiled):
    """Replayed for other tokens, it gives the gradients of a step of which each kernel is launched."""
    model = on_gpu()
    twin = copy.deepcopy(model)
    if compiled:
        model.compile(dynamic=False)
    tokens, labels = torch.randint(model.config.vocab_size, (2, 2, 1536), device="cuda")

    def step(model):
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model)
            model.zero_grad()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(model)
    for _ in range(3):
        tokens.random_(model.config.vocab_size)
        labels.copy_(tokens.masked_fill(torch.rand(tokens.shape, device="cuda") < 0.3, -100))
        graph.replay()
        twin.zero_grad()
        torch.testing.assert_close(captured, step(twin), rtol=1e-3, atol=0)
        for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert (got.grad - expected.grad).norm() <= 2e-2 * expected.grad.norm()


def lazy(device, bias=False):
    head = patch(tiny("Llama", device)).model.lm_head
    hidden = torch.randn(2, 3, head.in_features, device=device, requires_grad=True)
    return lm_head.LazyLogits(head, hidden), hidden


def test_lazy_logits_record_scale_and_softcap(device):
    z, _ = lazy(device)
    assert (z.float() * 2 / 4).scale_and_softcap() == (0.5, None)
    assert (3 * torch.tanh(z / 4) * 2).scale_and_softcap() == (1.5, 6)
    assert z.tanh().tanh().scale_and_softcap() is None
    assert (z.tanh() * -1).scale_and_softcap() is None
    assert z.made is None


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z + 1,
        lambda z: 1 - z,
        lambda z: -z,
        lambda z: z[:, -1:, :],
        lambda z: z * torch.ones(1, device=z.device),
        lambda z: z / torch.full((1,), 2.0, device=z.device),
        lambda z: (z / 3).softmax(-1),
        lambda z: torch.log_softmax(z * 2, dim=-1),
        lambda z: torch.cat([z, z], dim=1),
        lambda z: torch.tanh(z.float() / 2).view(-1, z.shape[-1]),
        lambda z: torch.nn.functional.cross_entropy(z.float().transpose(1, 2), z.argmax(-1)),
    ],
)
def test_lazy_logits_become_real_when_used(use, device):
    z, hidden = lazy(device)
    real = torch.nn.functional.linear(hidden, z.head.weight)
    got, expected = use(z), use(real)
    got = got.real() if isinstance(got, lm_head.LazyLogits) else got
    torch.testing.assert_close(got, expected)
    (got_grad,), (expected_grad,) = (torch.autograd.grad(y.square().sum(), hidden) for y in (got, expected))
    torch.testing.assert_close(got_grad, expected_grad)


def test_the_loss_of_logits_that_were_changed_in_place_is_theirs(device):
    z, _ = lazy(device)
    labels = torch.randint(101, (2, 3), device=device)
    z[..., 0] = 9.0
    loss = lm_head.causal_lm_loss(ForCausalLMLoss, z, labels, 101)
    torch.testing.assert_close(loss, ForCausalLMLoss(z.made, labels, 101))
    assert not z.fused


def test_a_loss_that_uses_the_logits_is_not_fused_and_warned_of(device):
    patched, original = pair("Llama", device)
    inputs = batch(device)

    def weighted(logits, labels, vocab_size, **kwargs):
        weight = torch.linspace(1, 2, vocab_size, device=device, dtype=logits.dtype)
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), weight)

    for model in (patched, original):
        model.loss_function = weighted
    with pytest.warns(UserWarning, match="not fused"):
        assert_exact(patched, original, inputs)
    with pytest.warns(UserWarning, match="not fused"):
        assert torch.is_tensor(patched(**inputs).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_a_trace_of_torch_jit_serves_other_sizes(family, device):
    patched, original = (model.eval().requires_grad_(False) for model in pair(family, device))
    logits = lambda model: lambda ids: model(ids, use_cache=False).logits  # noqa: E731
    traced = torch.jit.trace(logits(patched), batch(device)["input_ids"], check_trace=False)
    for rows, length in ((2, 12), (1, 7), (3, 20)):
        ids = batch(device, rows, length)["input_ids"]
        torch.testing.assert_close(traced(ids), logits(original)(ids))
