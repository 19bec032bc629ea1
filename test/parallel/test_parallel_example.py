"""The example of all kinds of parallelism: every product of them gives the losses of one process."""

import pytest
import torch
from distributed import run
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from examples import parallel

PRODUCTS = [
    ({"pp": 1, "fsdp": 2, "cp": 1, "tp": 2}, "none", 3),
    ({"pp": 1, "fsdp": 2, "cp": 2, "tp": 1}, "selective", 2),
    ({"pp": 1, "fsdp": 1, "cp": 2, "tp": 2}, "full", 3),
    ({"pp": 2, "fsdp": 1, "cp": 2, "tp": 1}, "none", 2),
    ({"pp": 2, "fsdp": 1, "cp": 1, "tp": 2}, "selective", 3),
]


def losses_of_products(rank):
    config, lr = parallel.MODELS["tiny"], 1e-3
    batches = torch.randint(config.vocab_size, (3, 4, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for sizes, checkpointing, zero in PRODUCTS:
        losses = parallel.train(sizes, config, batches, checkpointing, lr, seed=0, zero=zero)
        assert losses == pytest.approx(expected, rel=1e-4), (sizes, losses, expected)


@pytest.mark.skipif(parallel.GPU, reason="on GPUs it is bf16, and other losses")
def test_products(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # interpreted kernels are slow, and have tests of their own
    run(losses_of_products, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tp", "2"], "must have the product 1"), (["--batch", "0"], "--batch"), (["--size", "9b"], "--size")],
)
def test_bad_options_are_named(options, message):
    result = CliRunner().invoke(parallel.app, options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
