"""Forwards of one patched model in several threads: none leaves anything behind that another could see."""

import copy
import threading

import pytest
import torch
from tiny_models import batch, results, tiny

from liger_like.patching import patch

pytestmark = pytest.mark.filterwarnings("error:liger_like")


def pair(device):
    original = tiny("Llama", device)
    model = copy.deepcopy(original)
    patch(model, strict=True)
    return model, original


def test_threads_do_not_see_each_others_labels(device):
    """One waits in the middle of its forward, with labels, while the other calls the head of the same model."""
    model, original = pair(device)
    inputs, inside, seen = batch(device), threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is other:
            inside.set()
            assert seen.wait(60)

    losses = []
    other = threading.Thread(target=lambda: losses.append(model(**inputs)))
    model.model.register_forward_hook(wait)
    other.start()
    assert inside.wait(60)
    output = model(input_ids=inputs["input_ids"])
    hidden = torch.randn(2, 3, 32, device=device)
    from_head = model.lm_head(hidden)
    seen.set()
    other.join()
    assert torch.is_tensor(output.logits)
    torch.testing.assert_close(output.logits, original(input_ids=inputs["input_ids"]).logits)
    torch.testing.assert_close(from_head, original.lm_head(hidden))
    assert losses[0].logits is None
    torch.testing.assert_close(losses[0].loss, original(**inputs).loss)


def test_a_forward_leaves_no_state_on_modules(device):
    """Neither with labels nor without, so that replicas and threads share nothing."""
    model, _ = pair(device)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    results(model, batch(device))
    model(input_ids=batch(device)["input_ids"])
    assert {name: vars(m).keys() for name, m in model.named_modules()} == {n: v.keys() for n, v in before.items()}
