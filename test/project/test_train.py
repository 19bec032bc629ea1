"""The example: equal losses exit with 0, a wrong gradient with 1."""

from pathlib import Path

import pytest
import typer
from transformers import PreTrainedModel, Qwen2Config
from typer.testing import CliRunner, Result

import liger_like
from examples import train
from liger_like.ops import glu_linear

SMALL = ["--size", "tiny", "--steps", "6", "--batch", "1", "--seq", "16", "--dtype", "fp32", "--lr", "3e-3"]
app = typer.Typer()
app.command()(train.main)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, [*SMALL, *options])


def test_losses_agree(tmp_path: Path) -> None:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("One ring to rule them all. " * 9)
    result = run("--config", str(tmp_path), "--text", str(text), "--checkpointing")
    assert result.exit_code == 0, result.output
    assert "Qwen2RMSNorm" in result.output
    assert "The losses agree." in result.output


def test_one_percent_too_much_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, backward = liger_like.patch, glu_linear._glu_bwd_y_for_dy

    def patch_then_break(model: PreTrainedModel) -> object:
        report = patch(model)  # this checks the kernels, so they break afterwards
        monkeypatch.setattr(
            glu_linear, "_glu_bwd_y_for_dy", lambda *args: tuple(1.01 * gradient for gradient in backward(*args))
        )
        return report

    monkeypatch.setattr(liger_like, "patch", patch_then_break)
    result = run()
    assert result.exit_code == 1, result.output
    assert "The losses differ" in result.output


@pytest.mark.parametrize(
    ("options", "named"), [(["--seq", "99"], "--seq"), (["--steps", "1"], "--steps"), (["--size", "2b"], "--size")]
)
def test_bad_options_are_named(tmp_path: Path, options: list[str], named: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    result = run("--text", str(text), *options)
    assert result.exit_code == 2
    assert named in result.output
