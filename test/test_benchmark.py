"""The benchmark of the losses: its report is that of its results, and what it holds for exact is."""

import torch

from benchmark import losses, losses_report, markdown
from liger_like.ops.linear_cross_entropy import fused_linear_cross_entropy_ref

ERRORS = {"loss": 1e-7, "dx": 2e-3, "dw": 1e-3}
RESULT = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0", "peer": None},
    "fused": [
        {
            "T": 1000,
            "H": 1000,
            "V": 1000,
            "kept": kept,
            "rows": [
                {"name": losses.GEMMS, "ms": 2.0, "mib": 10.0},
                {"name": losses.EAGER, "ms": 4.0, "mib": 30.4} | errors,
                {"name": "ours", "ms": 3.0, "mib": 20.0} | ({"errors": ERRORS | {"dw": 5e-4}} if errors else {}),
                {"name": "theirs", "reason": "out of | memory"},
            ],
        }
        for kept, errors in ((1000, {"errors": ERRORS}), (250, {}))
    ],
    "cross_entropy": {
        "M": 10,
        "V": 20,
        "bytes": 6_000_000,
        "rows": [
            {"name": "ours", "kernel_ms": 2.0, "wall_ms": 3.0},
            {"name": "theirs", "wall_ms": 6.0, "reason": "waits"},
        ],
    },
}
TABLES = r"""### One GPU, 2026-01-01

torch 2.0.

Not installed, so not measured: peer.

fused_linear_cross_entropy, T 1000, H 1000, V 1000:

|  | ms | of three GEMMs | TFLOP/s | peak MiB | loss | dx | dw | dw / torch's |
|---|---|---|---|---|---|---|---|---|
| three GEMMs | 2.0 | 1.00 | 3 | 10 | - | - | - | - |
| torch | 4.0 | 2.00 | 2 | 30 | 1.0e-07 | 2.0e-03 | 1.0e-03 | 1.00 |
| ours | 3.0 | 1.50 | 2 | 20 | 1.0e-07 | 2.0e-03 | 5.0e-04 | 0.50 |
| theirs | out of \| memory | - | - | - | - | - | - | - |

fused_linear_cross_entropy, T 1000, H 1000, V 1000, 250 labels not ignored:

|  | ms | of three GEMMs | TFLOP/s | peak MiB |
|---|---|---|---|---|
| three GEMMs | 2.0 | 1.00 | 1 | 10 |
| torch | 4.0 | 2.00 | 0 | 30 |
| ours | 3.0 | 1.50 | 0 | 20 |
| theirs | out of \| memory | - | - | - |

cross_entropy, 10 x 20:

|  | kernels ms | GB/s | eager wall ms | GB/s |
|---|---|---|---|---|
| ours | 2.000 | 3 | 3.000 | 2 |
| theirs | waits | - | 6.000 | 1 |
"""


def test_tables() -> None:
    assert losses_report.tables(RESULT) == TABLES


def test_report_is_current() -> None:
    files, notes = markdown.result_files("losses"), markdown.NOTES.read_text()
    current = losses_report.with_tables(notes, markdown.results("losses"))
    assert current == notes, "run python -m benchmark.losses --report"
    if files:
        assert losses_report.digest(files).encode() in losses_report.PICTURE.read_bytes()
    else:
        assert not losses_report.PICTURE.exists()


def test_exact() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64).requires_grad_() for n in (7, 11))
    target = torch.randint(11, (7,))
    expected = losses.step_of(fused_linear_cross_entropy_ref, x, weight, target)()
    for got, true in zip(losses.exact(x, weight, target, rows=3), expected, strict=True):
        torch.testing.assert_close(got, true)
