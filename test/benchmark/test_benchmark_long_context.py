"""The benchmark of long sequences: its tiny form, and its report."""

import json

import pytest
from test_parallel_offload import Late

from benchmark.training import long_context, long_context_report
from liger_like.parallel import host_memory, offload


@pytest.mark.skipif(long_context.GPU, reason="on a GPU it is bf16 and true copies: --quick")
def test_tiny_form(monkeypatch, references, capsys):
    """Each contestant trains; offloaded ones copy, more with attention's results, half with two layers a checkpoint."""
    monkeypatch.setitem(host_memory.ENGINES, "cpu", Late)
    for module in (host_memory, offload):
        monkeypatch.setattr(module, "PAGE", 1024)
    monkeypatch.setattr(host_memory, "SLAB", 1 << 16)
    monkeypatch.setattr(long_context, "GPU", False)
    monkeypatch.setattr(long_context.Processes, "run", lambda self, worker, *args: [*worker(*args)])
    long_context.main(["--quick", "--host-gib", "0.001"])
    printed = capsys.readouterr().out
    rows = [eval(line.partition(": ")[2].rpartition(", ")[0]) for line in printed.splitlines() if ", round 0, " in line]
    assert all(row["ms"] for row in rows)
    ours = [row["host"] * (1 << 30) for row in rows]
    size = 64 * long_context.CONFIGS["tiny"].hidden_size * 2  # bf16
    assert ours[:5] == [0, 0, 2 * size, 0, 2 * size]
    assert ours[5] >= 2 * size
    assert ours[6] == size
    assert printed.count("| 3 layers, 64 tokens |") == len(rows)


RESULT = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0"},
    "copies": {"alone": {"TFLOP/s": 700.0}, "out": {"GB/s": 50.04, "TFLOP/s": 690.0}},
    "settings": {
        "4 layers, 65,536 tokens": {
            "transformers": {"reason": "out of memory"},
            "liger_like": {"ms": 1000.0, "tokens": 65536.0, "floor": 900.0, "gib": 40.0, "host": 0.0, "waited": 0.0},
            "liger_like, offloaded": {
                "ms": 1005.0,
                "tokens": 65210.0,
                "floor": 900.0,
                "gib": 38.5,
                "host": 1.5,
                "waited": 0.25,
            },
        }
    },
}
TABLES = """### One GPU, 2026-01-01

torch 2.0.

Copies of 1 GiB, and matrix products beside them:

|  | GB/s | products, TFLOP/s |
|---|---|---|
| alone | - | 700 |
| out | 50.0 | 690 |

Training steps:

| Llama-3-8B |  | step ms | tokens/s | of floor | time / liger_like's | by offloading | GPU GiB | host GiB | waited ms |
|---|---|---|---|---|---|---|---|---|---|
| 4 layers, 65,536 tokens | transformers | out of memory | - | - | - | - | - | - | - |
| 4 layers, 65,536 tokens | liger_like | 1,000 | 65,536 | 90% | 1.000 | - | 40.0 | 0.00 | 0.0 |
| 4 layers, 65,536 tokens | liger_like, offloaded | 1,005 | 65,210 | 90% | 1.005 | +0.5% | 38.5 | 1.50 | 0.2 |
"""


def test_tables():
    notes = f"before\n{long_context_report.BEGIN}old{long_context_report.END}after\n"
    assert long_context_report.with_tables(notes, [RESULT]) == notes.replace("old", TABLES)


def test_results_are_merged(results, monkeypatch):
    """A later run replaces its own contestants and keeps all others; settings stay in their order."""
    monkeypatch.setattr(long_context, "RESULTS", results)
    long_context.keep(RESULT)
    (text,) = RESULT["settings"]
    shorter = "4 layers, 32,768 tokens"
    later = {key: RESULT[key] for key in ("gpu", "date", "versions")}
    later |= {"settings": {text: {"liger_like": {"ms": 990.0}}, shorter: {"Liger": {"ms": 1.0}}}}
    long_context.keep(later)
    (file,) = results.glob("long-context-*.json")
    kept = json.loads(file.read_text())
    assert kept["copies"] == RESULT["copies"]
    assert kept["settings"] == {
        text: RESULT["settings"][text] | later["settings"][text],
        shorter: {"Liger": {"ms": 1.0}},
    }
    assert list(kept["settings"]) == [shorter, text]
    assert list(kept["settings"][text]) == ["transformers", "liger_like", "liger_like, offloaded"]
