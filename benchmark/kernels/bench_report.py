"""Writes csv, Markdown and pictures of what ``bench`` measured, and an overview of it into NOTES.md."""

import csv
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark.common import plots
from benchmark.common.markdown import NOTES, RESULTS, Row, between, digest_of, heading, number, result_files, table
from benchmark.common.measure import slug
from benchmark.common.plots import OURS
from benchmark.kernels.experts import BOUND

BEGIN, END = "<!-- bench: written by `liger-like bench --report` -->\n", "<!-- /bench -->\n"

TIMES = ("forward_us", "backward_us", "us", "wall_us", "host_us")
FIELDS = ("op", "shape", "of", "name", *TIMES, "kept_mib", "mib", "rate", "unit", "share", "error", "reason")
COLUMNS = (
    "shape", "of", "", "forward us", "backward us", "both us", "wall us", "host us", "rate", "of the ceiling",
    "kept MiB", "peak MiB", "error / torch's",
)  # fmt: skip
# picture: its ops
PICTURES = {
    "Norms": ("rms_norm", "add_rms_norm", "layer_norm"),
    "GLU and RoPE": ("swiglu", "geglu", "geglu_exact", "rope", "qk_norm_rope"),
    "Mixtures of experts": ("moe_experts", "moe_experts_lora", "moe_route", "moe_route_groups", "load_balancing_loss"),
    "Losses": (
        "cross_entropy",
        "fused_linear_cross_entropy",
        "fused_linear_logprobs",
        "fused_linear_token_loss",
        "fused_linear_divergence",
    ),
    "Attention": ("flash_attention", "flash_attention_varlen"),
}
CEILINGS = {"GB/s": "a copy", "TFLOP/s": "a GEMM"}
OVERVIEW = ("op", "shapes", "of the ceiling", "best other's time", "least", "by")


def stem(result: Row) -> str:
    """Return the stem of the names of the files of ``result``."""
    return f"{'quick' if result['quick'] else 'bench'}-{slug(result['gpu'])}-{result['date']}"


def cells(case: Row, row: Row) -> list[str]:
    """Return the cells of a row; a reason replaces the first missing time."""
    times = [number(row.get(key), ".1f") for key in TIMES]
    if "reason" in row and "-" in times:
        times[times.index("-")] = row["reason"]
    rate = f"{row['rate']:.4g} {case['unit']}" if "rate" in row else "-"
    specs = {"share": ".0%", "kept_mib": ".0f", "mib": ".0f", "error": ".2f"}
    numbers = (number(row.get(key), spec) for key, spec in specs.items())
    return [case["shape"], case["of"], row["name"], *times, rate, *numbers]


def is_rival(name: str) -> bool:
    return name != BOUND and not name.startswith(OURS)


def by_op(result: Row) -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {}
    for case in result["cases"]:
        rows.setdefault(case["op"], []).extend(cells(case, row) for row in case["rows"])
    return rows


def head(result: Row) -> list[str]:
    ceilings = " and ".join(f"{value:.4g} {unit}" for unit, value in result["ceilings"].items())
    return [*heading(result), f"Ceilings, of a copy and of a product of matrices: {ceilings}.\n"]


def tables(result: Row) -> str:
    """Return one file of results in Markdown."""
    parts = head(result)
    for op, rows in by_op(result).items():
        parts += [f"{op}:\n", table(COLUMNS, rows)]
    return "\n".join(parts)


def times(case: Row) -> dict[str, float]:
    """Return the times by contestant: kernel time, or wall time without one."""
    found = {row["name"]: row.get("us", row.get("wall_us")) for row in case["rows"]}
    return {name: us for name, us in found.items() if us is not None}


def overview(result: Row) -> Iterator[list[str]]:
    """Return, by op, our share of the limit, and the best other time divided by ours: median and least."""
    for op in by_op(result):
        cases = [case for case in result["cases"] if case["op"] == op]
        shares = [row["share"] for case in cases for row in case["rows"] if row["name"] == OURS and "share" in row]
        best = []
        for case in cases:
            us = times(case)
            others = [(time, name) for name, time in us.items() if is_rival(name)]
            if OURS in us and others:
                time, name = min(others)
                best.append((time / us[OURS], f"{name}, {case['shape']}"))
        of_ceiling = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"
        ratios = (
            [f"{statistics.median(ratio for ratio, _ in best):.2f}", f"{min(best)[0]:.2f}", min(best)[1]]
            if best
            else [*"---"]
        )
        yield [op, str(len(shares)), of_ceiling, *ratios]


def with_tables(notes: str, measured: Iterable[Row]) -> str:
    """Return ``notes`` with an overview of each file of results between their markers."""
    parts = []
    for result in measured:
        files = f"{RESULTS.name}/{stem(result)}"
        parts += [*head(result), table(OVERVIEW, overview(result))]
        parts += [f"All rows: [Markdown]({files}.md), [csv]({files}.csv).\n"]
        parts += [f"![{name}]({RESULTS.name}/{picture_name(result, name)})\n" for name in pictures(result)]
    return between(notes, BEGIN, END, "\n".join(parts))


def pictures(result: Row) -> dict[str, Row]:
    """Return by picture the part of the result that it shows."""
    parts = {name: [case for case in result["cases"] if case["op"] in ops] for name, ops in PICTURES.items()}
    return {name: {**result, "picture": name, "cases": cases} for name, cases in parts.items() if cases}


def picture_name(result: Row, picture: str) -> str:
    return f"{stem(result)}-{slug(picture)}.png"


def sizes(case: Row) -> list[int]:
    """Return the numbers in the name of a shape: what the shapes of an op are sorted by."""
    return [int(number) for number in re.findall(r"\d+", case["shape"])]


def bests(case: Row) -> tuple[str, str]:
    """Return the share that ours reaches, and the best share of the others with its contestant."""
    shares = {row["name"]: row["share"] for row in case["rows"] if "share" in row}
    others = [(share, name) for name, share in shares.items() if is_rival(name)]
    return number(shares.get(OURS), ".0%"), "{1:.0%} {0}".format(*max(others)[::-1]) if others else "-"


def notes(cases: list[Row]) -> str:
    """Return which contestants have no mark, or one by another time than the others, and at how many of the shapes."""
    kinds: Counter[tuple[str, str]] = Counter()
    captured = any("us" in row for case in cases for row in case["rows"])
    for case in cases:
        for row in case["rows"]:
            if "share" not in row:
                kinds[row["name"], "too inexact" if row["reason"] == "wrong" else "failed"] += 1
            elif captured and "us" not in row:
                kinds[row["name"], "wall time"] += 1
    counts = {n: "" if n == len(cases) else f" at {n} of {len(cases)}" for n in kinds.values()}
    return "; ".join(f"{name}: {kind}{counts[n]}" for (name, kind), n in kinds.items())


def draw_op(ax: Any, cases: list[Row]) -> None:
    """Mark on a line for each shape the share of the ceiling that each contestant reaches."""
    points: dict[str, list[tuple[float, int]]] = {}
    beside = {"textcoords": "offset points", "va": "center_baseline", "annotation_clip": False}
    for y, case in enumerate(cases):
        for row in case["rows"]:
            if "share" in row:
                points.setdefault(row["name"], []).append((100 * row["share"], y))
        ours, other = bests(case)
        ax.annotate(ours, (1, y), (8, 0), ax.get_yaxis_transform(), color=plots.color(OURS), weight="bold", **beside)
        ax.annotate(other, (1, y), (56, 0), ax.get_yaxis_transform(), color=plots.QUIET, **beside)
    for name in sorted(points, key=[*plots.MARKERS].index):
        ax.plot(*zip(*points[name], strict=True), label=name, **plots.marker(name))
    models = [", ".join(name for name in case["of"].split(", ") if name[0].isupper()) for case in cases]
    ax.set_yticks(range(len(cases)), [f"{m}   {case['shape']}" for m, case in zip(models, cases, strict=True)])
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.grid(axis="y")


def draw(figure: Any, result: Row) -> None:
    """Draw a panel for each op; the ceiling is a dashed line."""
    ops = {op: sorted((c for c in result["cases"] if c["op"] == op), key=sizes) for op in by_op(result)}
    heights = [len(cases) for cases in ops.values()]
    axes = figure.subplots(len(ops), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (op, cases) in zip(axes, ops.items(), strict=True):
        draw_op(ax, cases)
        unit = cases[0]["unit"]
        ax.axvline(100, color=plots.QUIET, linestyle="--", zorder=1)
        ax.set_title(op, loc="left")
        ceiling = f"100 %: {CEILINGS[unit]}, {result['ceilings'][unit]:.4g} {unit}"
        ax.set_title(ceiling, loc="right", weight="normal", size="medium", color=plots.QUIET)
        ax.set_xlabel(notes(cases), loc="right", color=plots.QUIET, fontsize="small")
        ax.xaxis.set_major_formatter("{x:.0f} %")
    for text, x in (("ours", 8), ("best other", 56)):
        axes[0].annotate(text, (1, 1), (x, 7), "axes fraction", "offset points", weight="bold", annotation_clip=False)
    axes[-1].set_xlim(0, None)
    text = f"{result['picture']}: forward and backward in bf16, % of what the GPU reaches (right is better)"
    plots.title(figure, text, result, axes)


def figure(result: Row) -> Any:
    return plots.drawn(draw, [result], 1.2 + 0.6 * len(by_op(result)) + 0.26 * len(result["cases"]))


def write_beside(path: Path) -> None:
    """Write a file of results as csv, Markdown and pictures beside it."""
    result = json.loads(path.read_text())
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for case in result["cases"]:
            of_case = {key: case[key] for key in ("op", "shape", "of", "unit")}
            writer.writerows(of_case | row for row in case["rows"])
    path.with_suffix(".md").write_text(tables(result))
    for name, part in pictures(result).items():
        plots.save(figure(part), path.with_name(picture_name(result, name)), digest_of([path]))


def write_report() -> None:
    """Write the report of all files in results/."""
    files = result_files("bench")
    for path in files:
        write_beside(path)
    NOTES.write_text(with_tables(NOTES.read_text(), [json.loads(path.read_text()) for path in files]))
