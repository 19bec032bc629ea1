"""The report of the sweeps: tables and pictures of what is in results/."""

import pytest
from matplotlib.figure import Figure

from benchmark.common import markdown, measure
from benchmark.training import sweeps, sweeps_report


def row(batch, sequence, ms):
    return {"batch": batch, "sequence": sequence, "ms": ms, "tokens": batch * sequence / ms * 1e3, "gib": ms / 10}


FAILED = {"reason": "out of | memory"}
MEMORY = {
    "gib": {"before": [5.0, 5.0], "forward": [1.0, 2.0], "backward": [0.0, 3.0]},
    "ends": {"forward": 0.5, "backward": 1.0},
}
RESULT = {
    "gpu": "GPU",
    "date": "2026-01-01",
    "versions": {"torch": "2.0"},
    "parts": {
        "batch": {
            "transformers": [row(1, 1024, 100.0), {"batch": 4, "sequence": 1024, **FAILED}],
            "liger_like": [row(1, 1024, 50.0), row(4, 1024, 80.0), row(8, 1024, 200.0)],
        },
        "sequence": {"Liger": [{"batch": 4, "sequence": 512, **FAILED}]},
        "ablation": {"none": [{"ms": 300.0, "gib": 50.0}], "norm alone": [{"ms": 240.0, "gib": 40.0}], "all": [FAILED]},
        "graph": {
            "liger_like": [{"launched_ms": 40.0, "ms": 20.0, "tokens": 51200.0, "gib": 12.0}],
            "Liger": [{"launched_ms": 50.0, **FAILED}],
        },
        "memory": {"transformers": [FAILED], "liger_like": [MEMORY]},
        "profile": {
            "transformers": [{"ms": 9.0, "groups": {"attention": 3.0, "other": 4.0}}],
            "liger_like": [FAILED],
        },
    },
}
TABLES = r"""### One GPU, 2026-01-01

torch 2.0.

By batch, checkpointed: tokens/s and peak GiB:

|  | transformers | liger_like |
|---|---|---|
| B 1 S 1024 | 10,240, 10.0 | 20,480, 5.0 |
| B 4 S 1024 | out of \| memory | 51,200, 8.0 |
| B 8 S 1024 |  | 40,960, 20.0 |

By sequence, checkpointed: tokens/s and peak GiB:

|  | Liger |
|---|---|
| B 4 S 512 | out of \| memory |

Patched in part, in turns:

| patched | step ms | of none | peak GiB |
|---|---|---|---|
| none | 300.0 | 1.000 | 50.0 |
| norm alone | 240.0 | 0.800 | 40.0 |
| all | out of \| memory | - | - |

A small step, its kernels launched one by one, and as one CUDA graph:

|  | launched ms | graph ms | tokens/s | peak GiB |
|---|---|---|---|---|
| liger_like | 40.0 | 20.0 | 51,200 | 12.0 |
| Liger | 50.0 | out of \| memory | - | - |

Memory in a step by when it was allocated, at its peak:

|  | peak GiB | before | forward | backward |
|---|---|---|---|---|
| transformers | out of \| memory | - | - | - |
| liger_like | 10.0 | 5.0 | 2.0 | 3.0 |

Time in a step by what it was for, ms:

|  | transformers | liger_like |
|---|---|---|
| attention | 3.0 | - |
| other | 4.0 | - |
| all of these | 7.0 | 0.0 |
| the step | 9.0 | out of \| memory |
"""


def test_tables():
    assert sweeps_report.tables(RESULT) == TABLES


def test_report(results):
    """Pictures and tables appear with the results that they show."""
    sweeps_report.write_report()
    notes, figures = sweeps_report.NOTES, sweeps_report.FIGURES
    assert "old" not in notes.read_text() + figures.read_text()
    assert "![" not in notes.read_text()
    assert figures.read_text() == f"before\n{sweeps_report.BEGIN}{sweeps_report.END}after\n"
    parts = {part: RESULT["parts"][part] for part in ("batch", "profile")}
    measure.update(RESULT | {"parts": parts}, "sweeps", sweeps.PARTS)
    sweeps_report.write_report()
    assert sorted(path.name for path in results.glob("*.png")) == ["profile.png", "sweeps.png"]
    assert sweeps_report.ABOUT_GRAPH not in figures.read_text()
    measure.update(RESULT, "sweeps", sweeps.PARTS)
    sweeps_report.write_report()
    for name in sweeps_report.PICTURES:
        assert f"](results/{name}.png)" in notes.read_text()
        assert f"](results/{name}.png)" in figures.read_text()
        assert markdown.digest("sweeps").encode() in (results / f"{name}.png").read_bytes()
    assert TABLES in notes.read_text()
    graph = TABLES.partition("as one CUDA graph:\n")[2].partition("\n\nMemory")[0]
    assert sweeps_report.ABOUT_GRAPH + graph in figures.read_text()


def test_pictures_are_current():
    for name, picture in sweeps_report.PICTURES.items():
        path = sweeps_report.file_of(name)
        assert path.exists() == bool(picture.of(markdown.results("sweeps")))
        assert not path.exists() or markdown.digest("sweeps").encode() in path.read_bytes()


def test_lines_end_where_the_next_shape_failed():
    figure = Figure()
    others = {name: [] for name in sweeps.CONTESTANTS}
    sweeps_report.draw_sweeps(figure, RESULT | {"parts": {"batch": RESULT["parts"]["batch"], "sequence": others}})
    throughput, _, memory, _ = figure.axes
    assert [text.get_text() for text in throughput.texts] == ["transformers", "liger_like"]
    for ax, first, last in ((throughput, 10.24, 40.96), (memory, 10.0, 20.0)):
        theirs, cross, ours = (line.get_xydata().tolist() for line in ax.lines)
        assert theirs == cross == [[1, first]]
        assert [x for x, _ in ours] == [1, 4, 8]
        assert ours[-1][1] == pytest.approx(last)
