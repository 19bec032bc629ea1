"""The examples of TRL's DPO and GRPO learn in a few steps, and print that TRL's head runs our op."""

import re

import pytest
import typer
from typer.testing import CliRunner

from examples import dpo, grpo

STEPS = {dpo: ["--steps", "4", "--batch", "4"], grpo: ["--steps", "10", "--completions", "4"]}


@pytest.mark.parametrize("example", STEPS, ids=lambda example: example.__name__)
def test_it_learns(example, references):
    app = typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, STEPS[example])
    assert result.exit_code == 0, result.output
    assert re.search(r"trl head +LlamaForCausalLM +\d +patched", result.output)
    assert "skipped" not in result.output
