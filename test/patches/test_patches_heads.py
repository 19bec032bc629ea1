"""Heads whose logits go to torch's cross-entropy, by way of biases and choices of rows."""

import copy

import peft
import pytest
import torch
import transformers
from tiny_models import CONFIG, batch, results, rows, tiny
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules import module as hooked
from torch.utils.flop_counter import FlopCounterMode

from liger_like.patches import heads, lm_head
from liger_like.patching import patch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 101}
SMALL |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 101, "dropout_rate": 0.0}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}
MODELS = {
    "BartForCausalLM": SMALL,
    "BartForConditionalGeneration": SMALL,
    "WhisperForCausalLM": SMALL,
    "T5ForConditionalGeneration": T5,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, device):
    cls = getattr(transformers, name)
    original = cls(cls.config_class(**MODELS[name])).to(device).train()
    if "final_logits_bias" in dict(original.named_buffers()):
        torch.nn.init.normal_(original.final_logits_bias)
    model = copy.deepcopy(original)
    (row,) = rows(patch(model, norm=False, rope=False, mlp=False, attention=False), "lm_head")[:1]
    assert row.status == "patched"
    inputs = batch(device)
    if name.startswith("Whisper"):
        inputs["encoder_outputs"] = (torch.randn(2, 5, 32, device=device),)
    torch.testing.assert_close(results(model, inputs), results(original, inputs))
    assert model(**inputs).logits is None


class OwnLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids, use_cache=False)[0])
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def test_torch_s_loss_is_compiled_without_graph_breaks(device):
    """The loss from logits: torch.compile does not trace a torch function into a tensor's stand-in."""
    original = tiny("Llama", device)
    original.__class__ = OwnLoss
    model = copy.deepcopy(original)
    assert rows(patch(model), "lm_head")[0].status == "patched"
    inputs = batch(device)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    torch.testing.assert_close(loss, original(**inputs))
    torch.testing.assert_close(model(**inputs), original(**inputs))


def shifted(z):
    return z[..., :-1, :].contiguous().view(-1, z.size(-1))


def masked(z):
    return z[:, :-1, :][torch.ones(2, 4, device=z.device).tril() == 1].float() * 2


def biased(z):
    return (z + torch.linspace(-1, 1, CONFIG["vocab_size"], device=z.device)).view(-1, z.shape[-1]) / 3


def softcapped(z):
    return torch.tanh(z.view(-1, z.shape[-1]) / 2) * 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("use", [shifted, masked, biased, softcapped])
def test_losses(use, reduction, device):
    head = patch(tiny("Llama", device)).model.lm_head
    hidden = torch.randn(2, 5, head.in_features, device=device, requires_grad=True)
    z, real = lm_head.LazyLogits(head, hidden), F.linear(hidden, head.weight)
    labels = torch.randint(101, use(real).shape[:-1], device=device)
    labels[1] = 7
    options = {"reduction": reduction, "ignore_index": 7, "label_smoothing": 0.1}
    got, expected = (F.cross_entropy(use(logits), labels, **options) for logits in (z, real))
    torch.testing.assert_close(got, expected)
    assert z.fused
    assert z.made is None
    for leaf in (hidden, head.weight):
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0] for y in (got, expected)))


@pytest.mark.parametrize(
    "call",
    [
        lambda z, labels: F.cross_entropy(z.view(-1, 101), labels, torch.ones(101, device=labels.device)),
        lambda z, labels: F.cross_entropy(z.view(-1, 101), F.one_hot(labels, 101).float()),
        lambda z, labels: F.cross_entropy(z.transpose(1, 2), labels.view(2, 5)),
        lambda z, labels: F.cross_entropy(z.tanh().tanh().view(-1, 101), labels),
    ],
)
def test_other_losses_are_torch_s(call, device):
    head = patch(tiny("Llama", device)).model.lm_head
    hidden, labels = torch.randn(2, 5, head.in_features, device=device), torch.randint(101, (10,), device=device)
    z = lm_head.LazyLogits(head, hidden)
    torch.testing.assert_close(call(z, labels), call(F.linear(hidden, head.weight), labels))
    assert z.made is not None


def test_rows_of_logits_that_were_changed_are_theirs(device):
    head = patch(tiny("Llama", device)).model.lm_head
    z = lm_head.LazyLogits(head, torch.randn(2, 5, head.in_features, device=device))
    labels, flat = torch.randint(101, (10,), device=device), z.view(-1, 101)
    z[..., 0] = 9.0
    torch.testing.assert_close(F.cross_entropy(flat, labels), F.cross_entropy(z.made.view(-1, 101), labels))


def test_the_dtype_of_the_loss_is_torch_s(device):
    head = patch(tiny("Llama", device)).model.lm_head.half()
    hidden, labels = torch.randn(4, 32, device=device).half(), torch.randint(101, (4,), device=device)
    z = lm_head.LazyLogits(head, hidden)
    assert F.cross_entropy(z, labels).dtype == torch.float16
    assert F.cross_entropy(z.float(), labels).dtype == torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_the_first_words_of_the_vocabulary(bias, device):
    """Some heads are padded."""
    original = torch.nn.Linear(8, 11, bias=bias, device=device)
    head = copy.copy(original)
    head.__class__ = type("Fused", (torch.nn.Linear,), lm_head._head_methods(torch.nn.Linear, heads.LINEAR))
    hidden = torch.randn(2, 5, 8, device=device, requires_grad=True)
    labels = torch.randint(7, (2, 5), device=device)
    lazy = lm_head.LazyLogits(head, hidden).float()[..., :7] * 2.0
    assert lazy.shape == (2, 5, 7)
    assert lazy[..., :20].shape == (2, 5, 7)
    leaves = [hidden, *original.parameters()]
    got = lm_head.causal_lm_loss(None, lazy, labels, 7)
    assert lazy.fused
    expected = transformers.loss.loss_utils.ForCausalLMLoss(original(hidden)[..., :7] * 2.0, labels, 7)
    for x, y in zip(
        (got, *torch.autograd.grad(got, leaves)), (expected, *torch.autograd.grad(expected, leaves)), strict=True
    ):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(lazy.real(), original(hidden)[..., :7] * 2.0)


HOOKS = {
    "register_forward_hook": lambda head, args, output: output * 0.5,
    "register_forward_pre_hook": lambda head, args: (args[0] * torch.arange(args[0].shape[1])[:, None].to(args[0]),),
    "register_full_backward_hook": lambda head, inputs, outputs: (inputs[0] * outputs[0].shape[-1],),
    "register_full_backward_pre_hook": lambda head, outputs: (outputs[0] * outputs[0].shape[-1],),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_head_see_logits(kind, order, device):
    """A recorded shape and the values: hooks come and go between forwards, and the warning goes with them."""
    model, inputs, seen = tiny("Llama", device, num_hidden_layers=1), batch(device), []
    original = copy.deepcopy(model)

    def hook(module, *args):
        seen.append([tuple(t.shape) for arg in args for t in (arg if isinstance(arg, tuple) else (arg,))])
        return HOOKS[kind](module, *args)

    if order == "after":
        patch(model, strict=True)
    handles = [getattr(m.lm_head, kind)(hook) for m in (model, original)]
    patch(model, strict=True)
    with pytest.warns(UserWarning, match=r"the head has a hook or a new forward, .*hook; this loss is not fused"):
        got = results(model, inputs)
    torch.testing.assert_close(got, results(original, inputs))
    assert len(seen) == 2
    assert seen[0] == seen[1]
    for handle in handles:
        handle.remove()
    assert model(**inputs).logits is None
    torch.testing.assert_close(results(model, inputs), results(original, inputs))


def test_hooks_with_keywords_and_of_all_modules_see_logits(device):
    model, inputs, seen = patch(tiny("Llama", device, num_hidden_layers=1)).model, batch(device), []
    record = lambda module, args, kwargs, output: seen.append((kwargs, output.shape))  # noqa: E731
    with model.lm_head.register_forward_hook(record, with_kwargs=True), pytest.warns(UserWarning, match="not fused"):
        model(**inputs)
    assert seen == [({}, (2, 12, 101))]
    everywhere = lambda module, args, output: seen.append(output.shape) if module is model.lm_head else None  # noqa: E731
    with hooked.register_module_forward_hook(everywhere), pytest.warns(UserWarning, match="not fused"):
        model(**inputs)
    assert seen[1:] == [(2, 12, 101)]


@pytest.mark.parametrize("part", ["base_layer", "lora_B.default"])
def test_hooks_on_a_part_of_the_head(part, device):
    model = tiny("Llama", device, num_hidden_layers=1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    original, inputs = copy.deepcopy(model), batch(device)
    patch(model, strict=True)
    for m in (model, original):
        m.get_output_embeddings().get_submodule(part).register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.warns(UserWarning, match="not fused"):
        torch.testing.assert_close(results(model, inputs), results(original, inputs))


def test_hooks_that_count_leave_the_loss_fused(device):
    """torch's counter has hooks on all modules; what sharding hooks to the head is in the tests of FSDP."""
    model = patch(tiny("Llama", device, num_hidden_layers=1)).model
    with FlopCounterMode(display=False):
        assert model(**batch(device)).logits is None


def test_compiled_models_hear_hooks(device):
    model, inputs = tiny("Llama", device, num_hidden_layers=1), batch(device)
    original = copy.deepcopy(model)
    patch(model)
    for m in (model, original):
        m.lm_head.register_forward_hook(HOOKS["register_forward_hook"])
    with pytest.warns(UserWarning, match="not fused"):
        loss = torch.compile(model, backend="eager")(**inputs).loss
    torch.testing.assert_close(loss, original(**inputs).loss)
