"""Result of a trace: the peak, and the kinds, layers and modules that it is made of."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from liger_like.parallel.host_memory import SLAB
from liger_like.planning._allocator import Change, Part, held
from liger_like.planning._clock import Clock
from liger_like.planning._machine import GIB
from liger_like.planning._tracer import KINDS, Live, Tracer

LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
POINTS = 1000  # of a curve, at most


@dataclass(frozen=True)
class Prediction:
    """Memory of a GPU in a training step, in GiB, and its time.

    ``gib``: the peak. ``by_kind``, ``by_layer`` (-1: outside of layers), ``by_module``, ``by_layer_and_kind``: what it
    is made of. ``resting``: what is held between steps. ``curve``: memory over the step by kind, in the order of
    ``KINDS``; a point is the highest of several changes. ``seconds``: time of the step, an estimate by a roofline;
    ``times``: seconds of the GPU by group, of the host, and of copies to it. ``host_gib``: memory of the host for
    checkpoints, pinned in slabs of 1 GiB. ``calibrated``: whether the rates were measured on this GPU. ``allocated``:
    the peak as torch counts it, with up to 1 MiB that a tensor leaves of its block; ``reserved``: what torch's
    allocator then holds of the GPU. With expandable segments nothing is left, and torch counts ``gib``.
    """

    gib: float
    by_kind: dict[str, float]
    by_layer: dict[int, float]
    by_module: dict[str, float]
    by_layer_and_kind: dict[int, dict[str, float]]
    resting: float
    curve: tuple[tuple[float, ...], ...]
    seconds: float
    times: dict[str, float]
    calibrated: bool
    host_gib: int = 0
    allocated: float = 0.0
    reserved: float = 0.0

    @property
    def limited_by(self) -> str:
        """Return what takes the most time, and its share of the step; "host" and "copies" only where the GPU waits."""
        gpu = sum(t for k, t in self.times.items() if k not in ("host", "copies", "bubble"))
        times = {k: t for k, t in self.times.items() if k not in ("host", "copies") or t > gpu}
        name = max(times, key=times.__getitem__, default="")
        return f"{name} {100 * times[name] / self.seconds:.0f} %" if self.seconds else ""


def part_of(entry: Live) -> Part:
    """Return whose memory a storage is."""
    found = LAYER.search(entry.module)
    if found is None:
        return Part(entry.kind, None, entry.module)
    return Part(entry.kind, int(found[1]), entry.module[found.end() :] or "residual")


def changes_of(tracer: Tracer) -> tuple[list[Change], list[Change]]:
    """Return what was there before the events, and the events."""
    parts: dict[int, Part] = {}

    def part(entry: Live) -> Part:
        if id(entry) not in parts:
            parts[id(entry)] = part_of(entry)
        return parts[id(entry)]

    start = [Change(part(entry), size, True) for entry, size in tracer.start]
    return start, [Change(part(entry), size, counts) for entry, size, counts in tracer.events]


def predicted(start: Iterable[Change], changes: Sequence[Change], clock: Clock, passes: int = 1) -> Prediction:
    """Return the prediction of ``changes`` after ``start``, which take the time of ``clock`` in so many ``passes``."""
    start, before = [*start], Counter[Part]()
    for change in start:
        before[change.part] += change.size
    resting = sum(before.values())
    total, peak, at = resting, resting, -1
    for i, change in enumerate(changes):
        total += change.size
        if change.counts and total > peak:
            peak, at = total, i
    made_of, curve = _made_of(before, changes[: at + 1]), _curve(before, changes)
    times = {name: clock.groups[name] for name in sorted(clock.groups)} | {"host": clock.host}
    times |= {"copies": clock.copies} if clock.sent else {}
    slabs = math.ceil(clock.sent / passes / SLAB)  # a pass sends all before any of it comes back
    torchs = (size / GIB for size in held(start, changes))
    result = peak / GIB, *made_of, resting / GIB, curve, clock.seconds, times, clock.calibrated, slabs
    return Prediction(*result, *torchs)


def of_pipeline(stages: Sequence[Prediction], passes: int) -> Prediction:
    """Return the prediction of the stage with the highest peak, in the time of 1F1B.

    The slowest stage sets the pace of ``passes`` micro-batches, and as many more as stages follow the first one: the
    group "bubble" is the time in which its GPU waits.
    """
    largest = max(stages, key=lambda stage: stage.gib)
    if len(stages) == 1:
        return largest
    slowest = max(stages, key=lambda stage: stage.seconds)
    bubble = slowest.seconds * (len(stages) - 1) / passes
    return replace(largest, seconds=slowest.seconds + bubble, times=slowest.times | {"bubble": bubble})


def _made_of(before: Counter[Part], changes: Sequence[Change]) -> tuple[Any, Any, Any, Any]:
    held = before.copy()
    for change in changes:
        held[change.part] += change.size
    kinds: Counter[str] = Counter()
    layers: Counter[int] = Counter()
    modules: Counter[str] = Counter()
    both: dict[int, Counter[str]] = defaultdict(Counter)
    for part, size in held.items():
        kinds[part.kind] += size
        layer = -1 if part.layer is None else part.layer
        layers[layer] += size
        both[layer][part.kind] += size
        modules[part.module or "outside of modules"] += size
    by_kind = {kind: kinds[kind] / GIB for kind in KINDS if kinds[kind]}
    by_module = {name: size / GIB for name, size in modules.most_common() if size}
    by_layer = {layer: layers[layer] / GIB for layer in sorted(layers)}
    by_both = {layer: {kind: both[layer][kind] / GIB for kind in KINDS if both[layer][kind]} for layer in by_layer}
    return by_kind, by_layer, by_module, by_both


def _curve(held: Counter[Part], changes: Sequence[Change]) -> tuple[tuple[float, ...], ...]:
    index = {kind: i for i, kind in enumerate(KINDS)}
    now = [0] * len(KINDS)
    for part, size in held.items():
        now[index[part.kind]] += size
    step = -(-len(changes) // POINTS) or 1
    points, highest, level = [], tuple(now), sum(now)
    for i, change in enumerate(changes):
        now[index[change.part.kind]] += change.size
        if change.counts and (i % step == 0 or sum(now) > level):
            highest, level = tuple(now), sum(now)
        if (i + 1) % step == 0 or i + 1 == len(changes):
            points.append(tuple(size / GIB for size in highest))
            level = -1
    return tuple(points)
