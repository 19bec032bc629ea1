"""Log-probabilities of tokens from a patched model equal those of its logits."""

import copy

import pytest
import torch
from test_patches_peft import adapted
from test_trainer import LOSS_AND_NORMS
from tiny_models import tiny

from liger_like import patch, token_logprobs
from liger_like.patches import trl_code

pytestmark = pytest.mark.filterwarnings("error:liger_like")
OUTPUTS = ("logprob", "entropy", "mean_logit", "correct")


def inputs(device):
    ids = torch.randint(3, 101, (2, 9), device=device)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def expected(model, batch, labels, temperature):
    """Numbers of the tokens from the logits."""
    z = model(**batch).logits[:, :-1].float() / temperature
    target = labels[:, 1:]
    logp, counted = z.log_softmax(-1), target != -100
    numbers = {
        "logprob": logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        "entropy": -(logp.exp() * logp).sum(-1),
        "mean_logit": z.detach().mean(-1),
        "correct": z.argmax(-1) == target,
    }
    return {name: number * counted for name, number in numbers.items()}


def check(model, original, batch, labels, temperature=0.7):
    found = token_logprobs(model, **batch, labels=labels, outputs=OUTPUTS, temperature=temperature)
    wanted = expected(original, batch, labels, temperature)
    assert found.lse is None
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close({name: getattr(found, name) for name in OUTPUTS}, wanted, check_dtype=False, **close)
    for this, numbers in ((model, found._asdict()), (original, wanted)):
        this.zero_grad()
        weights = torch.linspace(-1, 1, numbers["logprob"].numel(), device=labels.device).view_as(numbers["logprob"])
        ((numbers["logprob"] + 0.3 * numbers["entropy"]) * weights).sum().backward()
    grads = [{n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (model, original)]
    torch.testing.assert_close(*grads, **close)


@pytest.mark.parametrize(
    ("family", "config"),
    [("Llama", {}), ("Gemma2", {}), ("Granite", {}), ("Llama", {"tie_word_embeddings": True})],
    ids=str,
)
def test_families(family, config, device, references):
    """With a softcap, a scale, and tied weights; in training and in evaluation."""
    model = tiny(family, device, num_hidden_layers=1, **config)
    original = copy.deepcopy(model)
    patch(model)
    check(model, original, *inputs(device))
    check(model.eval(), original.eval(), *inputs(device))


def test_lora(device, references):
    original = adapted(tiny("Llama", device, num_hidden_layers=1), target_modules=["lm_head", "q_proj"])
    model = copy.deepcopy(original)
    patch(model)
    check(model, original, *inputs(device))


def test_the_kernel(device):
    """The op itself runs, in the head's forward."""
    model = tiny("Llama", device, num_hidden_layers=1)
    original = copy.deepcopy(model)
    patch(model, **LOSS_AND_NORMS)
    check(model, original, *inputs(device))


def test_operands_of_two_dtypes(device, references):
    """TRL casts hidden states to fp32 where the head's weight is not; autocast casts both."""
    x, weight, target = torch.randn(3, 8, device=device), torch.randn(11, 8, device=device), torch.tensor([1, 2, 3])
    for dtype in (torch.float16, torch.float32):
        numbers = trl_code.token_numbers(x, weight.to(dtype), target.to(device))
        logits = x @ weight.to(dtype).float().T
        expected = logits.log_softmax(-1).gather(-1, target[:, None].to(device))[:, 0]
        torch.testing.assert_close(numbers.logprob, expected)


def test_errors(device, references):
    model, (batch, labels) = tiny("Llama", device, num_hidden_layers=1), inputs(device)
    with pytest.raises(ValueError, match=r"model must be patched, with its loss: call liger_like.patch\(model\) first"):
        token_logprobs(model, **batch, labels=labels)
    patch(model)
    with pytest.raises(TypeError, match=r"labels must be a tensor \[B, S\], got NoneType"):
        token_logprobs(model, **batch, labels=None)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        token_logprobs("model", **batch, labels=labels)
    with pytest.raises(RuntimeError, match=r"only scales and softcaps its logits, one row per label"):
        token_logprobs(model, **batch, labels=labels, logits_to_keep=3)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(RuntimeError, match=r"needs a patched head without hooks: test_tokens"):
        token_logprobs(model, **batch, labels=labels)
    handle.remove()
    model.lm_head = torch.nn.Linear(32, 101, device=device)
    with pytest.raises(RuntimeError, match=r"needs a patched head without hooks: it changed after patching"):
        token_logprobs(model, **batch, labels=labels)
