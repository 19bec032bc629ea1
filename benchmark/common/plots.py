"""Draws the pictures of the reports in one style: colours, markers, fonts, titles, and how a file is written."""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.markdown import Row

OURS = "liger_like"
# Library: its colour. Ours alone is strong; no reader must tell red from green.
COLORS = {
    OURS: "#0050d0",
    "torch": "#a0a0a0",
    "transformers": "#808080",
    "torch.compile": "#585858",
    "flex_attention": "#585858",
    "Liger": "#e69f00",
    "fla": "#b0559c",
    "quack": "#a5703f",
    "Unsloth": "#6fcfc0",
    "CCE": "#b0559c",
    "flash-attn-4": "#e69f00",
    "bmm": "#000000",
}
MARKERS = {
    OURS: "o",
    "liger_like, recompute": "<",
    "liger_like, dw in fp32": ">",
    "liger_like, logits kept": ">",
    "liger_like, deterministic": "<",
    "torch": "s",
    "torch, math": "P",
    "torch, flash": "X",
    "torch, cuDNN": "s",
    "torch, loop": "X",
    "transformers": "h",
    "torch.compile": "D",
    "flex_attention": "D",
    "Liger": "^",
    "Liger, dw in fp32": "^",
    "fla": "v",
    "quack": "P",
    "Unsloth": "X",
    "CCE": "v",
    "CCE, exact": "d",
    "flash-attn-4": "^",
    "bmm": "P",
}
QUIET, GRID = "#606060", "#dddddd"  # colours of lines that are not contestants
WIDTH = 11.5  # inches
STYLE = {
    "figure.dpi": 100,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.title_fontsize": 13,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
}


def color(name: str) -> str:
    """Return the colour of a contestant's library: its name up to a comma."""
    return COLORS[name.partition(",")[0]]


def marker(name: str) -> dict[str, Any]:
    """Return how `Axes.plot` marks a contestant: ours large, the others small and in front of it."""
    size, depth = (11, 2) if name == OURS else (7.5, 3)
    options = {"color": color(name), "marker": MARKERS[name], "markersize": size, "zorder": depth}
    return {**options, "linestyle": "", "markeredgecolor": "white"}


def title(figure: Any, text: str, result: Row, axes: Iterable[Any] = ()) -> None:
    """Say above a figure what it shows, on which GPU and versions that was measured, and who is who in AXES."""
    versions = (f"{name} {result['versions'].get(name)}" for name in ("torch", "triton", "transformers"))
    known = [version for version in versions if not version.endswith("None")]
    lines = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    text = f"{text}\n{', '.join((result['gpu'], *known, result['date']))}"
    columns = len(lines) if len(lines) < 8 else -(-len(lines) // 2)
    figure.legend(lines.values(), lines, title=text, loc="outside upper center", ncols=columns)


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Return places in the same order, moved as little as needed to be GAP apart."""
    order = sorted(range(len(places)), key=places.__getitem__)
    up = [places[i] for i in order]
    down = [*up]
    for i in range(1, len(order)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    moved = {i: (high + low) / 2 for i, high, low in zip(order, up, down, strict=True)}
    return [moved[i] for i in range(len(places))]


def label_ends(ax: Any, ends: Sequence[tuple[str, float]], gap: float) -> None:
    """Write names right of the axes, each at the height where its line ends; GAP is a share of the axis."""
    heights = apart([y for _, y in ends], gap * ax.get_ylim()[1])
    for (name, _), y in zip(ends, heights, strict=True):
        ax.text(1.02, y, name, color=color(name), va="center", transform=ax.get_yaxis_transform())


def drawn(draw: Callable[[Any, Row], None], results: Sequence[Row], height: float) -> Any:
    """Return a figure in which DRAW drew each result, one below another, each HEIGHT inches high."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height * len(results)), layout="constrained")
        for part, result in zip(figure.subfigures(len(results), squeeze=False).flat, results, strict=True):
            draw(part, result)
    return figure


def save(figure: Any, path: Path, digest: str) -> None:
    """Write a picture of few colours, thus small, that carries the digest of the results it was drawn from."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    comment = PngInfo()
    comment.add_text("Comment", digest)
    with io.BytesIO() as file:
        figure.savefig(file)
        Image.open(file).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(
            path, pnginfo=comment, optimize=True
        )
