"""The search for the fastest way that fits, and the command ``liger-like plan``."""

import dataclasses
import json
import sys

import pytest
import torch
import typer

from examples import parallel
from examples.train import CONFIGS
from liger_like import cli
from liger_like.planning import GPUS, Plan, Prediction, Setting, _command, plan
from liger_like.planning._machine import gpu_of, keep, path
from liger_like.planning._report import start
from liger_like.planning._search import Candidate, needed, searched
from liger_like.planning._settings import TOKENS
from liger_like.planning._trace import RefusedError
from liger_like.planning._tracer import KINDS

H200 = GPUS["h200"]
GPT2 = {"model_type": "gpt2", "n_positions": 16, "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 64}
ROBERTA = {"model_type": "roberta", "is_decoder": True, "max_position_embeddings": 18, "num_hidden_layers": 1}  # 2 pad
ROBERTA |= {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
pytestmark = pytest.mark.usefixtures("references")


def prediction(gib, seconds):
    curve = (tuple(gib / len(KINDS) for _ in KINDS),) * 3
    parts = {"parameters": gib}, {-1: gib}, {"": gib}, {-1: {"parameters": gib}}
    return Prediction(gib, *parts, gib, curve, seconds, {"products": seconds}, True)


def rough(asked):
    """Return a model of memory and time: rows take memory unless they are checkpointed, small passes take time.

    Stages of ZeRO take memory or time.
    """

    def predict(setting):
        asked.append(setting)
        each = {"none": 20, "selective": 10, "attention": 4, "full": 2}[setting.checkpoint]
        slow = {"none": 1.0, "selective": 1.1, "attention": 1.2, "full": 1.3}[setting.checkpoint]
        states = {0: 30, 1: 20, 2: 20, 3: 30 / setting.fsdp}[setting.zero]
        slow += 0.01 * setting.zero
        gib = states + each * setting.micro_batch * setting.seq / 2048 / setting.cp
        return prediction(gib, slow * setting.batch + 0.1 * setting.accumulation)

    return predict


def test_the_fastest_that_fits_is_first():
    asked = []
    rows = searched(rough(asked), H200, 2, 64, 2048, {})
    assert rows[0].setting == Setting(4, 2048, accumulation=8, fsdp=2, dtype="fp32", zero=2)
    checkpoints = "none", "selective", "attention", "full"
    assert [(row.setting.checkpoint, row.setting.zero) for row in rows] == [(c, z) for c in checkpoints for z in (2, 3)]
    assert all(row.fits and row.needs <= 139.8 for row in rows)
    assert len(asked) <= 8 * 5  # bisection, not every divisor of 32
    assert not any(setting.cp > 1 for setting in asked)


@pytest.mark.parametrize(("fix", "stages"), [({"dtype": "bf16"}, {0, 1}), ({"zero": 1}, {1}), ({"zero": 2}, {2})])
def test_stages_of_zero_follow_the_dtype(fix, stages):
    rows = searched(rough([]), H200, 4, 8, 2048, fix)
    assert {row.setting.zero for row in rows} == stages
    assert {(row.setting.dtype, row.setting.cp) for row in rows} == {("fp32" if stages == {2} else "bf16", 1)}
    (row,) = searched(rough([]), H200, 1, 8, 2048, fix | {"checkpoint": "full"})
    assert row.setting.gpus == 1  # and no second stage
    (best, *_) = searched(rough([]), dataclasses.replace(H200, memory=1 << 30), 4, 8, 2048, fix)
    assert (best.fits, best.setting.zero) == (False, max(stages))  # the leanest is nearest


def test_many_rows_are_many_passes():
    asked = []
    (row,) = searched(rough(asked), H200, 1, 10**9, 4096, {"checkpoint": "full"})
    assert (row.setting.batch, row.setting.micro_batch) == (10**9, 25)
    assert max(setting.micro_batch for setting in asked) * 4096 < TOKENS  # long traces are tried last


def test_rows_are_shared_only_where_nothing_else_fits():
    rows = searched(rough([]), H200, 4, 4, 2048 * 100, {})
    assert rows[0].fits
    assert rows[0].setting.cp == 2
    assert rows[0].setting.checkpoint == "full"


def test_the_nearest_is_first_if_nothing_fits():
    asked = []
    rows = searched(rough(asked), H200, 1, 1, 2048 * 128, {})
    plain = [setting.checkpoint for setting in asked if not setting.tiled_mlp and not setting.checkpoint_on_host]
    assert plain == ["full"]  # the others need more
    assert not any(row.fits for row in rows)
    assert rows[0].setting.checkpoint == "full"
    assert rows[0].needs == min(row.needs for row in rows)


@pytest.mark.parametrize(("name", "least"), [("cp", 2), ("checkpoint_layers", 2)])
def test_ways_that_the_model_refuses_are_left_out(name, least):
    predict = rough([])

    def refusing(setting):
        if getattr(setting, name) >= least:
            raise RefusedError("refused")
        return predict(setting)

    rows = searched(refusing, H200, 2, 2, 2048 * 128, {})
    every = searched(predict, H200, 2, 2, 2048 * 128, {})
    assert [*map(str, rows)] == [str(row) for row in every if getattr(row.setting, name) < least] != [*map(str, every)]
    with pytest.raises(RefusedError, match="refused"):
        searched(refusing, H200, 2, 2, 2048, {"cp": 2, "checkpoint": "full", name: 2})


def test_what_is_fixed_is_kept():
    rows = searched(rough([]), H200, 4, 8, 2048, {"checkpoint": "full", "cp": 2, "micro_batch": 2})
    fixed = Setting(2, 2048, accumulation=2, checkpoint="full", fsdp=2, cp=2, dtype="fp32")
    assert [row.setting for row in rows] == [dataclasses.replace(fixed, zero=2), fixed]


@pytest.mark.parametrize(("sizes", "groups"), [({}, 0), ({"fsdp": 2}, 1), ({"fsdp": 2, "cp": 2, "pp": 2}, 3)])
def test_what_a_gpu_needs(sizes, groups):
    setting = Setting(**sizes, dtype="fp32")
    assert needed(setting, prediction(50.0, 1.0)) == pytest.approx(1.02 * 50 + 0.6 + groups)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command on a tiny model, and returns exit code, output and errors."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": None} | CONFIGS["tiny"].to_dict()))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*options, path=tmp_path):
        monkeypatch.setattr(sys, "argv", ["liger-like", "plan", str(path), *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_plan(run, tmp_path):
    options = ("--batch", "4", "--seq", "64", "--fix", "checkpoint=none", "micro_batch=4")
    code, out, err = run(*options, "--json", "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found == json.loads((tmp_path / "out/plan.json").read_text())
    (row,) = found["rows"]
    assert row["setting"] == dataclasses.asdict(Setting(4, 64))
    assert row["gib"] == pytest.approx(sum(row["by_kind"].values()))
    assert row["tokens_per_second"] == pytest.approx(256 / row["seconds"])
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_peak_by_layer_and_kind(run):
    code, out, _ = run("--seq", "64", "--gpu", "80", "--fix", "checkpoint=none", "--layers", "1", "--peak")
    headings, *lines = [line.split("  ") for line in out.split("\n\n")[-1].splitlines()]
    assert code == 0
    assert headings[0] == "peak of 1 in GiB"
    assert [line[0] for line in lines] == ["outside of layers", "layer 0", "sum"]


def test_layers_with_the_same_memory_share_a_line():
    parts = {layer: {"parameters": 1.0, "loss": float(layer == 4)} for layer in (-1, 0, 1, 2, 3, 4)}
    found = dataclasses.replace(
        prediction(7.0, 1.0),
        by_kind={"parameters": 6.0, "loss": 1.0},
        by_layer={layer: sum(sizes.values()) for layer, sizes in parts.items()},
        by_layer_and_kind=parts,
    )
    lines = Plan("Llama", 1, H200, 1, 1, 64, (Candidate(Setting(), found, 7.0, True),)).peak().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["outside", "of", "layers", "1.00", "0.00", "1.00"],
        ["layers", "0-3,", "each", "1.00", "0.00", "1.00"],
        ["layer", "4", "1.00", "1.00", "2.00"],
        ["sum", "6.00", "1.00", "7.00"],
    ]


def test_a_setting_is_given_once():
    assert _command.fixed(["tp=2", "lora=4", "tp=2"]) == {"tp": 2, "lora": 4}
    with pytest.raises(ValueError, match="tp must be given once, got 2 and 4"):
        _command.fixed(["tp=2", "tp=4"])


def test_options_are_fields_of_the_setting(run):
    code, out, _ = run("--seq", "64", "--optimizer", "sgd", "--dtype", "bf16", "--fix", "checkpoint=none", "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["setting"] == dataclasses.asdict(Setting(1, 64, optimizer="sgd"))


def test_the_table_and_a_gpu_that_is_too_small(run):
    fixed = ("--fix", "checkpoint=full", "--fix", "tiled_mlp=false", "--fix", "checkpoint_on_host=false")
    code, out, _ = run("--seq", "64", "--gpu", "0.5", "--layers", "1", *fixed)
    lines = out.splitlines()
    assert code == 1
    assert "GPU of 0.5 GiB (uncalibrated)" in lines[0]
    assert lines[2].startswith("-  rows 1, full checkpointing ")
    assert "~" in lines[2]
    assert "~: a guess" in lines[-3]
    assert lines[-1].startswith("nothing fits: the nearest, rows 1, full checkpointing, lacks 0.")


def test_rates_that_were_measured_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = dataclasses.replace(H200, name="mine", tflops=1.0, calibrated=True)
    keep(own)
    assert gpu_of("here") == own
    for damaged in ('{"name": 1}', "{"):
        path().write_text(damaged)
        with pytest.raises(ValueError, match="before it is here, got no rates in "):
            gpu_of("here")


def test_pipelines_have_the_micro_batches_of_the_example():
    rows = searched(rough([]), H200, 4, 16, 2048, {"pp": 2, "checkpoint": "full", "zero": 3})
    assert rows[0].setting == Setting(2, 2048, accumulation=4, checkpoint="full", fsdp=2, pp=2, dtype="fp32")
    assert start(rows[0]).startswith("torchrun --nproc-per-node 4 -m examples.parallel --fsdp 2 --pp 2 --batch 16 ")
    (row,) = searched(rough([]), H200, 2, 16, 2048, {"pp": 2, "checkpoint": "full", "micro_batch": 1})
    assert row.setting.accumulation == 16


def test_commands_that_start():
    def started(**fields):
        setting = Setting(**{"micro_batch": 8, "seq": 2048} | fields)
        return start(Candidate(setting, prediction(1.0, 1.0), 1.0, True))

    assert started(fsdp=2, cp=2, dtype="fp32", checkpoint="full") == (
        "torchrun --nproc-per-node 4 -m examples.parallel --fsdp 2 --cp 2 --batch 16 --seq 2048 --checkpointing full"
    )
    assert "--zero 2 --batch" in started(fsdp=2, dtype="fp32", zero=2)
    assert "FSDP2 over 2 GPUs with reshard_after_forward=False" in started(
        fsdp=2, dtype="fp32", zero=2, checkpoint="attention"
    )
    assert "DistributedDataParallel over 2 GPUs" in started(fsdp=2, zero=0)
    assert "DistributedDataParallel and ZeroRedundancyOptimizer over 2 GPUs" in started(fsdp=2, zero=1)
    assert started() == "liger_like.patch(model), micro-batch 8, accumulation 1"
    assert "checkpoint_policy" in started(checkpoint="selective")


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_the_example_takes_the_command_that_is_printed(checkpoint):
    zero = 2 if checkpoint == "full" else 3
    setting = Setting(2, 64, 4, checkpoint, fsdp=2, tp=2, cp=2, pp=2, dtype="fp32", zero=zero)
    command = start(Candidate(setting, prediction(1.0, 1.0), 1.0, True))
    launcher, options = command.split(" -m examples.parallel ")
    context = typer.main.get_command(parallel.app).make_context("parallel", options.split())
    assert launcher == "torchrun --nproc-per-node 16"
    asked = {"fsdp": 2, "tp": 2, "cp": 2, "pp": 2, "batch": 16, "seq": 64, "checkpointing": checkpoint, "zero": zero}
    assert {name: context.params[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "z9"], "gpu must be out of h200, h100, a100, b200, here, or GiB of memory, got 'z9'"),
        (["--gpus", "4", "--batch", "6", "--fix", "cp=1"], "batch must be a multiple of fsdp, 4, got 6"),
        (["--gpus", "4", "--fix", "fsdp=3"], "fsdp times cp must be gpus, 4, got fsdp 3"),
        (["--batch", "8", "--fix", "micro_batch=3"], "micro_batch times accumulation must be the 8 rows of a GPU"),
        (["--gpus", "2", "--batch", "1", "--seq", "63"], "batch must be a multiple of fsdp, 2, got 1"),
        (["--fix", "xp=2"], "fix must be NAME=VALUE with a name out of"),
        (["--fix", "seq=64"], "fix must be NAME=VALUE with a name out of micro_batch, accumulation, "),
        (["--fix", "cp=two"], "cp must be an integer, got 'two'"),
        (["--fix", "patched=no"], "patched must be true or false, got 'no'"),
        (["--fix", "checkpoint=some"], "checkpoint must be out of none, attention, selective, full, got 'some'"),
        (["--seq", "0"], "seq must be at least 1, got 0"),
        (["--out", __file__], "out must be a folder, got the file "),
        (["--out", f"{__file__}/inside"], "out or the file of rates cannot be used: "),
        (["--gpu", "here"], "gpu must be measured before it is here, got no rates in "),
        (
            ["--gpu", "h100", "--calibrate"],
            "gpu must be here with calibrate, which measures the GPU at hand, got 'h100'",
        ),
        (["--calibrate"], "calibrate needs a GPU that torch can use, got none"),
        (["--gpus", "2", "--fix", "pp=2"], "batch must be a multiple of fsdp x 2 x pp, 4, got 1"),
        (["--gpus", "2", "--fix", "tp=4"], "tp times pp must divide gpus, 2, got tp 4"),
        (
            ["--fix", "checkpoint=full", "--fix", "checkpoint_layers=99"],
            "checkpoint_layers must be at most the model's 2",
        ),
        (["--top", "0"], "top must be at least 1, got 0"),
        (["--layers", "3"], "layers must be at most the model's 2, got 3"),
        (["--host", "-1"], "host must be"),
        (
            ["--fix", "checkpoint=selective", "--fix", "checkpoint_on_host=true"],
            "checkpoint_on_host must be false unless",
        ),
        (
            ["--batch", "8", "--fix", "step_in_backward=true", "--fix", "micro_batch=2"],
            "micro_batch must be all rows of a GPU with step_in_backward, got 2",
        ),
        (["--fix", "cp=--2"], "cp must be an integer, got '--2'"),
        (["--fix", "lora=-1"], "lora must be at least 0, got -1"),
        (["--lora", "-1"], "lora must be at least 0, got -1"),
        (["--optimizer", "lion"], "optimizer must be out of adamw, adamw8bit, sgd, got 'lion'"),
        (["--dtype", "fp16"], "dtype must be out of bf16, fp32, got 'fp16'"),
        (["--lora", "8", "--fix", "lora=4"], "lora must be given once, got 4 and 8"),
        (["--fix", "zero=4"], "zero must be at most 3, got 4"),
        (["--gpus", "2", "--batch", "2", "--fix", "zero=1", "dtype=fp32"], "dtype must be bf16 on 2 GPUs with zero 1"),
        (["--gpus", "2", "--fix", "zero=0", "cp=2"], "cp must be 1 with zero 0, got 2"),
        (["--seq", "100000000"], "seq must be at most 2097152 with cp 1, got 100000000: longer passes are not traced"),
        (["--gpus", "4", "--batch", "4", "--seq", "8388616"], "seq must be at most 8388608 with cp 4, got 8388616"),
        (
            ["--batch", "8", "--seq", "1048576", "--fix", "micro_batch=8"],
            "seq must be at most 262144 with micro_batch 8",
        ),
    ],
)
def test_errors_take_one_line_and_name_the_field(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert err.startswith(f"liger-like: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"model_type": "none_such"}', "no model_type 'none_such'"),
        ('{"model_type": "llama", "quantization_config": {}}', "quantization_config of"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers must be at least 1, got 0"),
        ('{"model_type": "llama", "intermediate_size": -1}', "transformers cannot make LlamaForCausalLM: "),
        (json.dumps(GPT2), "seq must be at most the 16 positions of GPT2LMHeadModel, got 2048"),
        (json.dumps(ROBERTA), "seq must be at most the 16 positions of RobertaForCausalLM, got 2048"),
    ],
)
def test_configs_that_are_refused(run, tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    code, _, err = run(path=path)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_doctor_s_step_has_no_more_tokens_than_the_model_has_positions(tmp_path):
    (tmp_path / "gpt2.json").write_text(json.dumps(GPT2))
    assert " on 1 x 16 tokens takes " in _command.line(tmp_path / "gpt2.json")


def test_a_model_that_reads_data_is_named(run, monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x * x.sum().item())
    code, _, err = run("--seq", "64", "--fix", "patched=false")
    assert code == 2
    assert err.startswith("liger-like: cannot be traced: aten::_local_scalar_dense, model.layers.0.mlp: ")
    assert err.count("\n") == 1


def test_a_model_whose_attention_no_gpus_share(run, tmp_path):
    """The plan of what remains is printed, as is the reason if nothing does."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"n_layer": 2}))
    code, out, err = run("--gpus", "2", "--batch", "2", "--seq", "16", "--gpu", "0.5")
    assert (code, err) == (1, "")
    assert "nothing fits: the nearest, fsdp 2, rows 1, " in out
    code, _, err = run("--gpus", "2", "--batch", "1", "--seq", "16")
    assert code == 2
    assert err.startswith("liger-like: a step with cp 2, rows 1, full checkpointing fails: no attention ran across")
    assert err.count("\n") == 1


def test_a_model_whose_code_fails_is_named(run, tmp_path):
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    fields = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(fields))  # without a decoder_start_token_id
    code, _, err = run("--seq", "16")
    assert code == 2
    assert err.startswith("liger-like: a step with rows 1, full checkpointing fails: ")
    assert "decoder_start_token_id" in err
    assert _command.line(tmp_path).startswith("memory: a step with rows 1, no checkpointing fails: ")


def test_the_line_of_the_doctor(tmp_path, run):
    assert _command.line(tmp_path / "none.json").startswith("memory: ")
    line = _command.line(tmp_path)
    assert line.startswith("memory: a step with AdamW in bf16 on 1 x 2048 tokens takes 0.")


def test_fields_that_are_not_fields():
    with pytest.raises(ValueError, match=r"fix must be out of accumulation, .*, got seq"):
        plan(CONFIGS["tiny"], fix={"seq": 3})
