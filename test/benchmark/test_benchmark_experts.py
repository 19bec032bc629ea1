"""``liger-like bench --op moe_experts``: its peers, its shapes, and the bound that is no rival."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmark.common import measure
from benchmark.kernels import bench, bench_report, contestants, experts, slower_report
from benchmark.kernels.bench_shapes import Case, cases
from liger_like.runtime import support

CEILINGS = {"TFLOP/s": 1.0}


@pytest.mark.skipif(bench.GPU, reason="measures in full where there is a GPU")
def test_peers_of_the_experts(monkeypatch):
    """All are measured, and a bound without an error; one expert has the rows that the shape says."""

    def fused(x, gate_up, down, index, weights):
        assert index.dtype == torch.int32
        return experts.torch_experts_loop(x, gate_up, down, index, weights)

    monkeypatch.setattr(measure, "version", lambda package: "1")
    monkeypatch.setattr(support, "INTERPRET", False)
    module = SimpleNamespace(LigerFusedMoEFunction=SimpleNamespace(apply=fused))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", module)
    assert {case.of[0] for case in cases(["moe_experts"], ["few rows", "skewed routing"])} == {
        "few rows",
        "skewed routing",
    }
    shape = bench.tiny(cases(["moe_experts"], ["skewed routing"])[-1].shape)
    index = bench.make_inputs(contestants.OPS["moe_experts"], {**shape, "lead": (4000,)})["index"]
    assert (index == 0).double().mean() == pytest.approx(shape["busy"], abs=0.02)
    peers = {*bench.PEERS} - {"torch.compile"}  # takes long
    measured = bench.measure(Case("moe_experts", shape, []), peers, CEILINGS, 1)
    assert measured["shape"] == "T 16 H 8 I 16 E 32 K 2, an expert has 30.0% of the rows"
    rows = {row["name"]: row for row in measured["rows"]}
    assert rows.keys() == {"torch", "torch, loop", "transformers", "Liger", "bmm"}
    assert "error" not in rows.pop("bmm")
    assert all(row["wall_us"] > 0 for row in measured["rows"])
    assert all(row["error"] <= 1.1 for row in rows.values())


@pytest.mark.skipif(bench.GPU, reason="measures in full where there is a GPU")
def test_peers_of_adapters(monkeypatch):
    """All compute the same, with gradients of x, weights and factors alone."""
    monkeypatch.setattr(support, "INTERPRET", False)
    (case, *_) = cases(["moe_experts_lora"], ["adapters"])
    op, shape = contestants.OPS["moe_experts_lora"], bench.tiny(case.shape)
    factors = {f"{name}_lora_{part}" for name in ("gate_up", "down") for part in "ab"}
    assert {n for n, t in bench.make_inputs(op, shape).items() if t.requires_grad} == {"x", "weights", *factors}
    measured = bench.measure(case._replace(shape=shape), {"liger_like", "torch", "transformers"}, CEILINGS, 1)
    assert measured["shape"] == "T 16 H 8 I 16 E 32 K 2, rank 16"
    rows = {row["name"]: row for row in measured["rows"]}
    assert rows.keys() == {"liger_like", "torch", "transformers"}
    assert all(row["error"] <= 1.1 for row in rows.values())


def test_a_bound_is_no_rival():
    rows = [{"name": name, "us": us, "share": 1 / us} for name, us in (("liger_like", 3.0), ("bmm", 1.0), ("a", 2.0))]
    rows = [{**row, "rate": 1.0} for row in rows]
    case = {"op": "moe_experts", "shape": "T 1", "of": "", "unit": "GB/s", "rows": rows}
    assert [line[3] for line in slower_report.slower(case)] == ["a"]
    assert bench_report.bests(case) == ("33%", "50% a")
    assert next(iter(bench_report.overview({"cases": [case]})))[3:] == ["0.67", "0.67", "a, T 1"]
