"""Patched models on the meta device, where torch has no autocast and no kernel runs."""

import copy

import pytest
from tiny_models import ATTENTION, FAMILIES, batch, tiny

from liger_like.patching import patch


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("family", sorted({*FAMILIES, *ATTENTION} - {"GptOss"}))  # its experts need values
def test_forward_on_the_meta_device(family, labels):
    """Shapes and dtypes are those of the unpatched model; it trains, too."""
    original = tiny(family)
    patched = copy.deepcopy(original)
    patch(patched)
    inputs = {name: t.to("meta") for name, t in batch().items() if labels or name != "labels"}
    got, expected = patched.to("meta")(**inputs), original.to("meta")(**inputs)
    if labels:
        assert (got.loss.shape, got.loss.dtype, got.loss.device) == (
            expected.loss.shape,
            expected.loss.dtype,
            expected.loss.device,
        )
        got.loss.backward()
        assert all(p.grad.is_meta for p in patched.parameters() if p.requires_grad and p.grad is not None)
    else:
        assert (got.logits.shape, got.logits.dtype, got.logits.is_meta) == (
            expected.logits.shape,
            expected.logits.dtype,
            True,
        )
