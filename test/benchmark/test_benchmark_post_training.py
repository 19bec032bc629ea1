"""The head of post-training: its contestants are right, wrong ones are seen, runs share their results, the report."""

import sys
from functools import partial

import pytest
import torch

import liger_like
from benchmark.common import markdown, measure
from benchmark.kernels import post_training, post_training_report
from benchmark.kernels import post_training_contestants as contestants
from benchmark.kernels.losses_report import GEMMS

TINY, PART = post_training.QUICK.values()
IN_TORCH = ("torch, chunks", "torch, whole logits")


def token_loss(x, weight, target, loss_fn, *numbers):
    return loss_fn(liger_like.fused_linear_logprobs(x, weight, target), *numbers).sum()


def mean_divergence(x, weight, teacher_x, teacher_weight, mask, beta):
    counts = slice(None) if mask is None else mask
    pairs = (x, weight), (teacher_x, teacher_weight)
    return contestants.divergence(*((a @ b.t()).log_softmax(-1)[counts] for a, b in pairs), beta).mean()


# the definitions of two ops, where the package lacks them
OPS = {"fused_linear_token_loss": token_loss, "fused_linear_divergence": mean_divergence}


@pytest.fixture(autouse=True)
def plain_torch(references, monkeypatch):
    """It is quicker, and the kernels have tests of their own."""
    for name, op in OPS.items():
        if not hasattr(liger_like, name):
            monkeypatch.setattr(liger_like, name, op, raising=False)
    monkeypatch.setattr(post_training, "ROUNDS", 1)
    monkeypatch.setattr(post_training, "REPEATS", 1)


def test_cases_and_shapes():
    assert [shape[:3] for shape in post_training.SHAPES.values()][:4] == [
        (8192, 4096, 151936),
        (16384, 2048, 248320),
        (32768, 2880, 201088),
        (8192, 4096, 128256),
    ]
    assert post_training.SHAPES["S1-25"] == (*post_training.SHAPES["S1"][:4], 0.25)
    assert all(list(case)[:2] == [GEMMS, "liger_like"] for case in contestants.CASES.values())
    names = {name for case in contestants.CASES.values() for name in case}
    assert {name.partition(",")[0] for name in names} == {
        GEMMS,
        "liger_like",
        "torch",
        "torch.compile",
        "TRL",
        "verl",
        "Liger",
        "CCE",
    }


def test_verl_without_what_its_packages_import(tmp_path, monkeypatch):
    """Its wheel without dependencies suffices."""
    folder = tmp_path / "verl" / "utils" / "kernel"
    folder.mkdir(parents=True)
    for package in (folder.parents[1], folder.parent):
        (package / "__init__.py").write_text("import ray")
    (folder / "linear_cross_entropy.py").write_text("def linear_cross_entropy(x, weight, target): return x, weight")
    monkeypatch.syspath_prepend(tmp_path)
    contestants.verl_function.cache_clear()
    assert contestants.verl(1, 2, 3, False) == (1, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    contestants.verl_function.cache_clear()


@pytest.mark.parametrize("shape", [TINY, PART], ids=["all", "part"])
def test_contestants_are_right(shape, monkeypatch):
    """Ours, TRL's and those in torch return the same numbers, whether or not prompts are ignored."""
    truth = post_training.Truth(post_training.make_data(shape, torch.float32))
    assert int(truth.data.kept().sum()) == shape.T * shape.share
    found = {}
    for case, several in contestants.CASES.items():
        chosen = {n: c for n, c in several.items() if n.startswith(("liger_like", "TRL", GEMMS)) or n in IN_TORCH}
        rows = post_training.measure(chosen, truth.data, truth.of(case), truth.rows)
        assert rows.keys() == chosen.keys()
        for name, row in rows.items():
            assert "reason" not in row, (case, name, row)
            assert row["ms"] > 0
            assert max(row["errors"].values(), default=0) < 1e-5, (case, name)
        found[case] = {*rows["liger_like"]["errors"]}
    tokens = {"logprob", "dx"}
    assert found == {
        "logprob": tokens,
        "logprob + entropy": {*tokens, "entropy"},
        "logits kept": tokens,
        "frozen head": tokens,
        "GRPO step": {"loss", "dx"},
        "DPO step": {"loss", "dx"},
        "forward KL": {"dx"},
        "JSD": {"dx"},
    }


def test_errors_are_seen():
    """A function that is off by 1 % shows it in each number."""

    def inexact(*args):
        return tuple(t if t is None else 1.01 * t for t in contestants.whole_logits(*args))

    truth = post_training.Truth(post_training.make_data(TINY, torch.float32))
    for case, build in (
        ("logprob + entropy", contestants.per_token(inexact, entropy=True)),
        ("GRPO step", contestants.grpo_by(inexact)),
        ("JSD", contestants.loss_of(lambda data: 1.01 * contestants.torch_divergence(data, 0.5))),
        ("forward KL", contestants.loss_of(partial(contestants.torch_divergence, beta=0.5))),
    ):
        row = post_training.row_of(build, truth.data, truth.of(case), truth.rows)
        assert min(row["errors"].values()) > 5e-3, case


HEAD = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.0"}}
ERRORS = {"logprob": 1e-5, "dx": 2e-3}
FIRST, SECOND = (post_training.name_of(post_training.SHAPES["S1"], case) for case in ("logprob", "JSD"))
TABLES = f"""### One GPU, 2026-01-01

torch 2.0.

{FIRST}:

|  | ms | of three GEMMs | peak MiB | error of logprob | error of dx |
|---|---|---|---|---|---|
| three GEMMs | 40.0 | 1.00 | 10 | - | - |
| liger_like | 60.0 | 1.50 | 20 | 1.0e-05 | 2.0e-03 |
| TRL | out of memory | - | - | - | - |

{SECOND}:

|  | ms | of three GEMMs | peak MiB |
|---|---|---|---|
| TRL | 60.0 | - | 20 |
"""
OVERVIEW = f"""GPU, 2026-01-01:

| shape, case | three GEMMs | liger_like | TRL |
|---|---|---|---|
| {FIRST} | 40.0, 10 | 60.0, 20 | out of memory |
| {SECOND} |  |  | 60.0, 20 |
"""


def test_runs_that_share_the_work(results, monkeypatch, tmp_path):
    """Cases and contestants of several runs meet in one file, in order, and in both pages."""
    pages = [tmp_path / name for name in ("notes.md", "figures.md")]
    for name, page in zip(("NOTES", "FIGURES"), pages, strict=True):
        page.write_text(f"a\n{post_training_report.BEGIN}old\n{post_training_report.END}b\n")
        monkeypatch.setattr(post_training_report, name, page)
    answers = {GEMMS: {"ms": 40.0, "mib": 10.0, "errors": {}}, "TRL": {"reason": "out of memory"}}
    row = {"ms": 60.0, "mib": 20.0}

    def measured(chosen, *_):
        return {name: answers.get(name, {**row, "errors": ERRORS}) for name in chosen}

    monkeypatch.setattr(post_training, "GPU", True)
    monkeypatch.setattr(post_training, "make_data", lambda *_: None)
    monkeypatch.setattr(post_training, "measure", measured)
    monkeypatch.setattr(post_training, "environment", lambda *_: {**HEAD})
    truth = type("Truth", (), {"data": None, "rows": None, "of": lambda self, case: {}})
    monkeypatch.setattr(post_training, "Truth", lambda data: truth())
    for arguments in (["logprob", "TRL"], ["JSD", "TRL"], ["logprob", "liger_like", GEMMS]):
        if arguments[0] == "JSD":
            answers["TRL"] = row
        names = ["--cases", arguments[0], "--contestants", *arguments[1:]]
        monkeypatch.setattr(sys, "argv", ["", "--shapes", "S1", *names])
        post_training.main()
    (result,) = markdown.results(post_training_report.PREFIX)
    assert post_training_report.tables(result) == TABLES
    assert [page.read_text() for page in pages] == [
        f"a\n{post_training_report.BEGIN}{text}{post_training_report.END}b\n" for text in (TABLES, OVERVIEW)
    ]


def test_who_is_left_out(monkeypatch):
    """Without its package a contestant is left out alone."""
    monkeypatch.setattr(measure, "version", lambda package: None if package == "liger-kernel" else "1")
    for case in contestants.CASES.values():
        assert {*case} - {*measure.present(case)} == {name for name in case if name.startswith("Liger")}


def test_who_cannot_be_asked_for(monkeypatch, capsys):
    """A contestant that is named must be there."""
    monkeypatch.setattr(measure, "version", lambda package: None if package == "liger-kernel" else "1")
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--contestants", "TRL", "Liger"])
    with pytest.raises(SystemExit):
        post_training.main()
    assert "the packages of these contestants are not installed: Liger\n" in capsys.readouterr().err
