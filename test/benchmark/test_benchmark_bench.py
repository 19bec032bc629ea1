"""``liger-like bench``: what it measures without a GPU, what it refuses to time, the files it writes, and its peers."""

import csv
import fcntl
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from benchmark.common import markdown, measure
from benchmark.kernels import bench, bench_report, contestants
from benchmark.kernels.bench_shapes import SHAPES, Case, cases
from liger_like.ops.glu import swiglu_ref
from liger_like.runtime import support

no_gpu = pytest.mark.skipif(bench.GPU, reason="measures in full where there is a GPU")
CEILINGS = {"GB/s": 10.0, "TFLOP/s": 1.0}


@no_gpu
def test_all_of_it_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(support, "INTERPRET", False)
    monkeypatch.setattr(bench, "rounded", lambda result: result)  # rounded rates would not give the rounded shares

    def merged(*results, true=bench.merged):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        return true(*results)

    monkeypatch.setattr(bench, "merged", merged)
    arguments = ["--quick", "--peer", "torch", "--out", str(tmp_path)]
    run(monkeypatch, *arguments)
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert [case["op"] for case in result["cases"]] == [*contestants.OPS]
    assert result["cases"][0]["of"] == "Llama-3.2-1B"
    for case in result["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        assert {"liger_like"} < rows.keys() == {n for n in rows if n.partition(",")[0] in ("liger_like", "torch")}
        for row in rows.values():
            if row["name"] != "torch, cuDNN":
                assert row["wall_us"] > 0
                assert 0 < row["error"] <= contestants.OPS[case["op"]].spec.k
                assert row["share"] == pytest.approx(row["rate"] / result["ceilings"][case["unit"]])
    with path.with_suffix(".csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert [line["name"] for line in lines] == [row["name"] for case in result["cases"] for row in case["rows"]]
    assert float(lines[0]["wall_us"]) == result["cases"][0]["rows"][0]["wall_us"]
    assert path.with_suffix(".md").read_text() == bench_report.tables(result)
    assert_pictures_are_current(path)
    monkeypatch.setattr(bench_report, "pictures", lambda _: {})  # drawing takes seconds
    run(monkeypatch, *arguments, "--op", "rms_norm")
    again = json.loads(path.read_text())
    assert again["cases"][1:] == result["cases"][1:]
    assert again["cases"][0] != result["cases"][0]


def assert_pictures_are_current(path):
    """Assert that pictures of these results stand beside them, and no others."""
    result = json.loads(path.read_text())
    pictures = {path.with_name(bench_report.picture_name(result, name)) for name in bench_report.pictures(result)}
    assert pictures == {*path.parent.glob(f"{path.stem}*.png")}
    assert all(markdown.digest_of([path]).encode() in picture.read_bytes() for picture in pictures)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark.kernels.bench", *arguments])
    bench.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "needs a GPU", marks=no_gpu),
        (["--op", "norm"], "no norm; there are rms_norm, "),
        (["--peer", "Lieger"], "no Lieger; there are torch, "),
        (["--shape", "Llama"], "no Llama; there are Llama-3.2-1B, "),
    ],
)
def test_what_it_does_not_know(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def broken(inputs):
    raise RuntimeError("theirs")


def gated(by=lambda up: up, factor=1.0):
    return contestants.named(lambda gate, up: swiglu_ref(gate, by(up)) * factor)


BUILDS = {
    "liger_like": gated(),
    "inexact": gated(factor=1.01),
    "nan": gated(lambda up: torch.where(up > 1e9, up.sqrt(), up)),  # NaN in the last gradient alone
    "one gradient": gated(lambda up: 1.01 * up - 0.01 * up.detach()),
    "detached": gated(torch.Tensor.detach),
    "broken": broken,
    "other": broken,
}


@no_gpu
def test_what_is_wrong_has_no_time(monkeypatch):
    op = SimpleNamespace(spec=contestants.SPECS["swiglu"], options={}, contestants=lambda: BUILDS)
    monkeypatch.setitem(contestants.OPS, "swiglu", op)
    case = bench.measure(Case("swiglu", {"lead": (16,), "N": 64}, ["a", "b"]), {*BUILDS} - {"other"}, CEILINGS, 1)
    assert (case["shape"], case["of"], case["unit"]) == ("T 16 N 64", "a, b", "GB/s")
    ours, *others = case["rows"]
    assert ours["error"] <= 1.1
    assert ours["rate"] == pytest.approx(8 * 16 * 64 * 2 / ours["wall_us"] / 1e3)
    assert ours["share"] == ours["rate"] / 10
    reasons = {row["name"]: row["reason"] for row in others}
    assert reasons == {
        **dict.fromkeys(("inexact", "nan", "one gradient"), "wrong"),
        "detached": "ValueError: no gradient of up",
        "broken": "RuntimeError: theirs",
    }
    assert [row["name"] for row in others if row.keys() - {"name", "reason", "error"}] == []
    assert 1.1 < others[0]["error"] < 10
    assert math.isnan(others[1]["error"])


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["swiglu", "fused_linear_cross_entropy"])
def test_on_a_gpu(op):
    shape = {**SHAPES["Llama-3-8B"][op][0], "lead": (512,)}
    several = bench.measure(Case(op, shape, []), {"liger_like", "torch"}, CEILINGS, 1)["rows"]
    for ours in several:
        assert ours["error"] <= 1.1
        assert min(ours[key] for key in ("wall_us", "host_us", "mib", "rate", "share", "forward_us", "us")) > 0
        assert "reason" not in ours
        if op == "swiglu" or ours["name"] == "torch":  # our loss computes gradients in its forward
            assert ours["forward_us"] < ours["us"]
            assert 1.2 * ours["forward_us"] < ours["wall_us"]  # wall_us covers both passes
        if op == "swiglu":  # only launch-bound ops are faster in a graph
            assert ours["us"] < ours["wall_us"]


def test_a_shape_that_cannot_be_measured(monkeypatch):
    def out_of_memory(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(bench, "Truth", out_of_memory)
    rows = bench.measure(cases(["swiglu"], SHAPES)[0], {"liger_like", "torch"}, CEILINGS, 1)["rows"]
    assert rows == [{"name": name, "reason": "out of memory"} for name in ("liger_like", "torch")]


def waiting(inputs):
    forward = gated()(inputs)
    forward.waits = True
    return forward


@no_gpu
def test_rows_of_a_gpu(monkeypatch):
    """Use a clock that returns 10 us for a forward and 40 us for both; one contestant cannot be captured."""
    several, pools = measure.Repeats(graph=5, replays=4, eager=2), []

    def captured(step, times, pool):
        forward = step.__self__.forward if hasattr(step, "__self__") else step
        if hasattr(forward, "waits"):
            raise RuntimeError("waits")
        pools.append(pool)
        return SimpleNamespace(replay=lambda: (0.01 if step is forward else 0.04) * times)

    def gpu_times(step, repeats, prepare):
        prepare()
        return [step()] * repeats

    builds = {"liger_like": gated(), "waiting": waiting, "inexact": BUILDS["inexact"]}
    op = SimpleNamespace(spec=contestants.SPECS["swiglu"], options={}, contestants=lambda: builds)
    monkeypatch.setitem(contestants.OPS, "swiglu", op)
    monkeypatch.setattr(bench, "GPU", True)
    monkeypatch.setattr(bench, "repeats", lambda setting: several)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(measure, "captured", captured)
    monkeypatch.setattr(measure, "gpu_times", gpu_times)
    monkeypatch.setattr(measure, "peak_mib", lambda step: (3.0, step()))
    monkeypatch.setattr(measure, "kept_mib", lambda forward: 2.0)
    case = bench.measure(Case("swiglu", {"lead": (16,), "N": 64}, []), builds, CEILINGS, 1)
    ours, waits, inexact = case["rows"]
    assert [ours[key] for key in bench_report.TIMES[:3]] == pytest.approx([10, 30, 40])
    assert ours["rate"] == pytest.approx(8 * 16 * 64 * 2 / 40e3)
    assert waits["reason"] == "RuntimeError: waits"
    assert waits["rate"] == pytest.approx(8 * 16 * 64 * 2 / waits["wall_us"] / 1e3)
    assert not {"us", "forward_us", "backward_us"} & waits.keys()
    assert all(
        (row["kept_mib"], row["mib"]) == (2, 3) and row["wall_us"] > 0 and row["host_us"] > 0 for row in (ours, waits)
    )
    assert inexact.keys() == {"name", "error", "reason"}
    assert pools == ["pool", "pool"]


@no_gpu
def test_repeats_fill_a_round(monkeypatch):
    setting = measure.Setting(gated(), contestants.SPECS["swiglu"].inputs(torch.float32, "cpu", (2,), 8), [])
    setting.step = lambda: None
    for us, expected in ((10.0, (5, 4, 20)), (7e3, (3, 3, 3)), (3e4, (1, 1, 1))):
        monkeypatch.setattr(bench, "microseconds", lambda *_, us=us: [us])
        assert bench.repeats(setting) == expected


def test_upstream_of_a_loss_is_one():
    losses, norms = (
        (contestants.OPS[op].spec, bench.tiny(SHAPES["Llama-3-8B"][op][0])) for op in ("cross_entropy", "rms_norm")
    )
    (one,), (several,) = (
        measure.upstream_of(spec.ref, spec.inputs(torch.float32, "cpu", **s)) for spec, s in (losses, norms)
    )
    assert one == 1
    assert several.std() == pytest.approx(1, abs=0.2)


def test_torch_is_never_wrong():
    """RoPE as models have it rounds more often than the reference: that is what others may do, too."""
    op = contestants.OPS["rope"]
    shape = bench.tiny(SHAPES["Llama-3-8B"]["rope"][0])
    truth = bench.Truth(op, shape)
    plain = op.contestants()["torch"]
    reference = truth.errors(contestants.named(op.spec.ref))
    assert truth.check(plain) == {"error": pytest.approx(1, rel=1e-3)}
    assert all(truth.torch[name] > 1.2 * error for name, error in reference.items())


def test_shapes_of_models():
    found = cases(contestants.OPS, SHAPES)
    assert {case.op for case in found} == {*contestants.OPS}
    assert {op.spec.name for op in contestants.OPS.values()} == {*contestants.SPECS}
    (norm,) = (case for case in found if case.op == "rms_norm" and "Qwen3-8B" in case.of)
    assert norm == Case(
        "rms_norm", {"lead": (16384,), "N": 4096, "weight": True}, ["Llama-3-8B", "Qwen3-8B", "rows", "hidden"]
    )
    assert [case.of for case in cases(["rms_norm"], ["Qwen3-8B"])] == [norm.of]
    for case in found:
        spec, options = contestants.OPS[case.op].spec, contestants.OPS[case.op].options
        assert all(n > 0 for n in spec.cost(2, **case.shape, **options)[:2])
        few = bench.fewer(case.shape)
        tensors = spec.inputs(torch.bfloat16, "meta", **few) if "lead" in few or "Sk" in few else {}
        weights = few.get("H", 0) * max(few.get("V", 0), 2 * few.get("E", 0) * few.get("I", 0))
        assert all(t.numel() <= max(bench.ELEMENTS, weights) for t in tensors.values())
        assert few.get("S", 0) <= bench.SCORES or "Sk" not in few
        assert sum(n for n, _ in few.get("lengths", ())) <= bench.SCORES
        assert {key: few[key] for key in few.keys() & {*"DHNV", "Hk", "Dv"}}.items() <= case.shape.items()
    long = cases(["flash_attention"], ["sequence"])[-1]
    assert bench.fewer(long.shape) == {**long.shape, "S": 1024, "Sk": 1024}


def test_gpu_state(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n[ $1 = --id=GPU-12 ] && echo 570.1, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12"))
    state = measure.gpu_state()
    assert (state["driver_version"], state["clocks.max.sm"]) == ("570.1", "1980 MHz")
    result = {"gpu": "GPU", "date": "2026-01-01", "versions": {}, "state": state}
    assert "driver_version 570.1, clocks.sm 345 MHz, " in "\n".join(markdown.heading(result))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="13"))
    assert measure.gpu_state() == {}
    monkeypatch.setenv("PATH", "")
    assert measure.gpu_state() == {}


def apart(q, k):
    return q.transpose(1, 2), k.transpose(1, 2)


def attend(q, k, v, causal, window_size):
    """Take the arguments of FlashAttention-4."""
    assert (causal, window_size) == (True, (None, None))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


def attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    assert cu_seqlens_k.diff().max() == max_seqlen_k
    parts = (t.split(cu_seqlens_q.diff().tolist()) for t in (q, k, v))
    return torch.cat([attend(*(t[None] for t in three), **options)[0][0] for three in zip(*parts, strict=True)])


def norm(x, weight, residual=None, eps=None, prenorm=False):
    s = x if residual is None else x + residual
    return (
        (contestants.torch_rms_norm(s, weight), s)[: 1 + prenorm] if prenorm else contestants.torch_rms_norm(s, weight)
    )


def rotate(x, cos, sin):
    """On [B, S, H, D], cos and sin [S, R / 2]."""
    cos, sin = (torch.cat((t, t), -1)[None] for t in (cos, sin))
    return contestants.torch_rope(*apart(x, x), cos, sin)[0].transpose(1, 2)


def batch_loss(logits, labels):
    return contestants.torch_cross_entropy(logits.flatten(0, 1), labels.flatten())


LIBRARIES = {
    "quack": {"rmsnorm": norm, "cross_entropy": contestants.torch_cross_entropy},
    "quack.rotary": {"apply_rotary_emb": rotate},
    "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": contestants.torch_linear_cross_entropy},
    "unsloth.kernels.rms_layernorm": {"Fast_RMS_Layernorm": SimpleNamespace(apply=lambda x, w, eps: norm(x, w))},
    "unsloth.kernels.rope_embedding": {
        "fast_rope_embedding": lambda q, k, cos, sin: contestants.torch_rope(q, k, cos[None], sin[None])
    },
    "unsloth.kernels.cross_entropy_loss": {"fast_cross_entropy_loss": batch_loss},
    "flash_attn.cute": {"flash_attn_func": attend, "flash_attn_varlen_func": attend_packed},
}
NEW = {"quack": 5, "Unsloth": 3, "flash-attn-4": 2}


@no_gpu
def test_how_libraries_are_called(monkeypatch):
    """Replace peers by functions of torch that take the same arguments."""
    monkeypatch.setattr(measure, "version", lambda package: "1")
    monkeypatch.setattr(support, "INTERPRET", False)
    for module, functions in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))
    called = []
    for name, op in contestants.OPS.items():
        shape = bench.tiny({**op.spec.bench_shapes[0]})
        truth = bench.Truth(op, shape)
        for peer, build in op.contestants().items():
            if peer in NEW:
                assert truth.check(build)["error"] < op.spec.k, (name, peer)
                called.append(peer)
    assert {peer: called.count(peer) for peer in NEW} == NEW


def row(name, us, share, **more):
    return {"name": name, "forward_us": 1.0, "backward_us": us - 1, "us": us, "wall_us": us + 100, "host_us": 9.0} | {
        "kept_mib": 2.0, "mib": 3.0, "rate": 100.5, "share": share, "error": 0.996, **more
    }  # fmt: skip


def case(op, shape, of, *rows):
    return {"op": op, "shape": shape, "of": of, "unit": "GB/s", "rows": [*rows]}


WAITS = {"name": "liger_like", "wall_us": 8.0, "rate": 10.0, "share": 0.25, "error": 1.0, "reason": "waits"}
WRONG = {"name": "fla", "error": 3.0, "reason": "wrong"}
SHORT = {**row("Liger", 8.0, 0.4, reason="out of memory"), "wall_us": None}
RESULT = {
    "gpu": "A GPU",
    "date": "2026-01-01",
    "quick": False,
    "versions": {"torch": "2.0"},
    "ceilings": {"GB/s": 4321.2, "TFLOP/s": 700.0},
    "cases": [
        case(
            "rms_norm",
            "T 8 N 4",
            "a",
            row("liger_like", 4.0, 0.9),
            row("torch", 6.0, 0.5),
            row("liger_like, slow", 2.0, 0.1),
        ),
        case("rms_norm", "T 8 N 8", "b, rows", row("liger_like", 4.0, 0.8), row("torch", 3.0, 0.5), WRONG, SHORT),
        case("rope", "B 1", "a", WAITS, {"name": "torch", "wall_us": 12.0, "rate": 7.0, "share": 0.1, "error": 1.0}),
        case("swiglu", "T 8 N 4", "a", row("liger_like", 4.0, 0.5)),
    ],
}
HEAD = """\
### One A GPU, 2026-01-01

torch 2.0.

Ceilings, of a copy and of a product of matrices: 4321 GB/s and 700 TFLOP/s.
"""
OVERVIEW = f"""\
{HEAD}
| op | shapes | of the ceiling | best other's time | least | by |
|---|---|---|---|---|---|
| rms_norm | 2 | 80% to 90% | 1.12 | 0.75 | torch, T 8 N 8 |
| rope | 1 | 25% to 25% | 1.50 | 1.50 | torch, B 1 |
| swiglu | 1 | 50% to 50% | - | - | - |

All rows: [Markdown](results/bench-a-gpu-2026-01-01.md), [csv](results/bench-a-gpu-2026-01-01.csv).

![Norms](results/bench-a-gpu-2026-01-01-norms.png)

![GLU and RoPE](results/bench-a-gpu-2026-01-01-glu-and-rope.png)
"""


def test_report():
    begin, end = bench_report.BEGIN, bench_report.END
    assert bench_report.with_tables(f"a\n{begin}old{end}b", [RESULT]) == f"a\n{begin}{OVERVIEW}{end}b"
    text = bench_report.tables(RESULT)
    assert text.startswith(HEAD)
    lines = text.splitlines()
    assert "| T 8 N 4 | a | torch | 1.0 | 5.0 | 6.0 | 106.0 | 9.0 | 100.5 GB/s | 50% | 2 | 3 | 1.00 |" in lines
    assert "| T 8 N 8 | b, rows | fla | wrong | - | - | - | - | - | - | - | - | 3.00 |" in lines
    assert (
        "| T 8 N 8 | b, rows | Liger | 1.0 | 7.0 | 8.0 | out of memory | 9.0 | 100.5 GB/s | 40% | 2 | 3 | 1.00 |"
        in lines
    )
    assert "| B 1 | a | liger_like | waits | - | - | 8.0 | - | 10 GB/s | 25% | - | - | 1.00 |" in lines


def test_committed_files_are_current():
    notes = markdown.NOTES.read_text()
    assert bench_report.with_tables(notes, markdown.results("bench")) == notes, "run liger-like bench --report"
    for path in markdown.result_files("bench"):
        assert path.with_suffix(".md").read_text() == bench_report.tables(json.loads(path.read_text()))
        assert_pictures_are_current(path)


def test_merged():
    """Rows are sorted by shape and contestant, in the order of the table of ops."""
    now = RESULT | {"cases": [{**RESULT["cases"][0], "rows": [row("torch", 5.0, 0.6), row("Liger", 7.0, 0.4)]}]}
    (first, second, *others) = bench.merged({**RESULT, "cases": RESULT["cases"][::-1]}, now)["cases"]
    assert [r["name"] for r in {**first, **second}["rows"]] == ["liger_like", "torch", "liger_like, slow", "Liger"]
    assert second["rows"][1]["us"] == 5.0
    assert [first, *others] == [RESULT["cases"][1], RESULT["cases"][3], RESULT["cases"][2]]
    assert bench.merged({}, now) == now
    without = {"versions": {"torch": "2.1", "liger-kernel": None}}
    assert bench.merged({"versions": {"torch": "2.0", "liger-kernel": "1"}}, now | without)["versions"] == {
        "torch": "2.1",
        "liger-kernel": "1",
    }
