"""The trace of a model's step, whole, or of a few of its layers and replayed for all.

The layers of a model repeat with a period. A trace of the first ones, of two periods and of the last layer has all that
happens in a step: its changes of memory are cut where layers begin and end, and the cuts of a period are played again
for the layers that were left out. The two periods must agree, else the whole model is traced.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from liger_like.planning import _models
from liger_like.planning._allocator import Change
from liger_like.planning._clock import SENT, TURN, Clock
from liger_like.planning._machine import GPU
from liger_like.planning._prediction import Prediction, changes_of, predicted
from liger_like.planning._replicas import Named, replicated, trained
from liger_like.planning._settings import Setting
from liger_like.planning._trace import RefusedError, said, traced
from liger_like.planning._tracer import Tracer

WIDEST = 8  # layers of a period, at most
PASSES = 3  # that are traced: the first, one of those between, and the last
SHORT = 64  # tokens of the first step
Name = tuple[str, int]  # of a cut: what begins, and the layer or the pass


class Mark(NamedTuple):
    """Where a cut begins: the numbers of changes and of ops before it, and the clock's times then."""

    name: Name
    changes: int
    ops: int
    times: dict[str, float]


class Cuts(NamedTuple):
    """How layers repeat: ``first`` layers of their own, periods of ``period``, the ``rest`` behind the two traced ones,
    and a last layer; ``layers`` in all.
    """

    first: int
    period: int
    rest: int
    layers: int

    @property
    def kept(self) -> int:
        """Return the number of layers to trace: those before the periods, two periods, the rest and the last."""
        return self.first + 2 * self.period + self.rest + 1

    def place(self, layer: int) -> int:
        """Return the traced layer that is played for ``layer``: near both ends its own, else of the first period."""
        behind = self.layers - 1 - layer
        if layer < self.first:
            return layer
        if behind <= self.period + self.rest:
            return self.kept - 1 - behind
        return self.first + (layer - self.first) % self.period

    def layers_of(self, place: int) -> list[int]:
        """Return the layers whose states those of the traced layer ``place`` are; the second period's are none."""
        if place < self.first:
            return [place]
        if place == self.kept - 1:
            return [self.layers - 1]
        if place < self.first + self.period:
            return [*range(place, self.layers - 1, self.period)]
        return []


def cuts_of(config: Any, layers: list[nn.Module], setting: Setting) -> Cuts | None:
    """Return how ``layers`` repeat in a step of ``setting``, or None if no fewer than all show it.

    Layers that share a checkpoint are in one period. Collectives of FSDP2 lag a checkpoint behind, and copies to
    the host two: so many layers more before and periods more behind differ from the others. The passes of a pipeline
    overlap, so no layer of it is left out.
    """
    if setting.pp > 1:
        return None
    margin, shared = 2 if setting.checkpoint_on_host else int(setting.dtype == "fp32"), setting.checkpoint_layers
    text = config.get_text_config()
    lists = [v for v in text.to_dict().values() if isinstance(v, list) and len(v) == len(layers)]
    kinds = [
        (
            [(name, type(module)) for name, module in layer.named_modules()],
            [(name, p.shape, p.dtype) for name, p in layer.named_parameters()],
            [values[i] for values in lists],
        )
        for i, layer in enumerate(layers)
    ]
    count = len(layers)
    for period in range(shared, WIDEST + 1, shared):
        for first in range((1 + margin) * shared, (1 + margin) * shared + WIDEST):
            if all(kinds[i] == kinds[i + period] for i in range(first, count - 1 - period)):
                cuts = Cuts(first, period, (count - 1 - first) % period + margin * period, count)
                # the last layer takes the place of one of its kind, whose mask the model gives it
                same = kinds[-1][2] == kinds[min(cuts.kept, count) - 1][2]
                if same and cuts.kept < count:
                    return cuts
    return None


def shorten(model: Any, cuts: Cuts) -> list[nn.Module]:
    """Leave the layers out of ``model`` that ``cuts`` does not keep; return those kept."""
    layers = _models.layers_of(model)
    holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and [*m] == layers)
    kept = [*layers[: cuts.kept - 1], layers[-1]]
    holder._modules = {str(i): layer for i, layer in enumerate(kept)}
    return kept


def trace_step(
    model: Any, setting: Setting, gpu: GPU | str | float, layers: list[nn.Module] | None = None, index: int = 0
) -> tuple[list[Change], list[Change], Clock, list[Mark]]:
    """Return what the second of two steps of ``model``, on "meta", finds in memory, and its changes, time and marks.

    There are marks where each of ``layers`` begins and ends. ``index``: of the stage, in a pipeline. Raises
    RefusedError if the model, or a way to train it, refuses the step.
    """
    marks: list[Mark] = []
    with contextlib.ExitStack() as stack:
        context = None
        if setting.dtype == "fp32":
            stack.enter_context(_models.processes(setting.gpus, index * setting.gpus // setting.pp))
            mesh = _models.mesh_of(setting)
            model = _models.shard(model, mesh, setting)
            context = _models.context_of(setting, mesh)
        given = _models.inputs_of(setting, context)
        short = given if context else _models.inputs_of(dataclasses.replace(setting, micro_batch=1, seq=SHORT), None)
        trace = stack.enter_context(traced(gpu))
        _models.materialise(model)
        trace.know(model)
        step = _models.step_of(model, setting, context, index)
        _run(step, setting, short, 1)  # makes the optimizer's state
        trace.restart()
        tracer, clock = trace.parts
        if layers is not None:
            for hook in _marking(model, layers, lambda *name: marks.append(_mark(name, tracer, clock))):
                stack.callback(hook.remove)
        _run(step, setting, given, setting.accumulation)
        return *changes_of(tracer), clock, marks


def _run(step: Callable[..., None], setting: Setting, given: dict[str, Any], passes: int) -> None:
    try:
        step(given, passes)
    except Exception as error:  # whatever the model, or a way to train it, is not made for
        if hasattr(error, "traced"):  # an op's
            raise
        raise RefusedError(f"a step with {setting.text()} fails: {said(error)}") from error


def _mark(name: Any, tracer: Tracer, clock: Clock) -> Mark:
    return Mark(name, len(tracer.events), len(clock.ops), _times(clock))


def _times(clock: Clock) -> dict[str, float]:
    return {**clock.groups, SENT: clock.sent}


def _marking(model: nn.Module, layers: list[nn.Module], mark: Callable[[str, int], None]) -> list[Any]:
    """Return hooks that call ``mark`` where a pass, a layer's forward and its backward begin, and where they end."""

    def begin(i: int) -> Callable[..., None]:
        return lambda module, args: None if _in_backward() else mark("forward", i)

    def end(i: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if not _in_backward():
                mark("after", i)
                output = output[0] if isinstance(output, tuple) else output
                if output.requires_grad:  # a layer that waits for its checkpoint has no backward of its own
                    output.register_hook(lambda grad: mark("backward", i))

        return hook

    hooks: list[Any] = [model.register_forward_pre_hook(lambda module, args: mark("pass", 0))]
    for i, layer in enumerate(layers):
        hooks += [layer.register_forward_pre_hook(begin(i)), layer.register_forward_hook(end(i))]
    hooks.append(register_optimizer_step_pre_hook(lambda *_: None if _in_backward() else mark("end", 0)))
    return hooks


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


class Segment(NamedTuple):
    """Events of a trace from one mark to the next."""

    changes: list[Change]
    ops: list[tuple[float, float]]
    times: dict[str, float]

    def outline(self) -> tuple[int, int]:
        """Return how high the memory rises, and where it ends, from where it was."""
        level = rise = 0
        for change in self.changes:
            level += change.size
            rise = max(rise, level) if change.counts else rise
        return rise, level


def replayed(model: Any, cuts: Cuts, setting: Setting, gpu: GPU | str | float) -> Prediction | None:
    """Return what a whole trace of ``model`` would say, from those of its layers that ``cuts`` keeps.

    Returns None if the layers do not repeat. Layers that are left out are lost.
    """
    parameters = trained(model)
    kept = shorten(model, cuts)
    factor = _bytes(parameters) / _bytes(trained(model))
    turns = (len(trained(model)), len(parameters)) if setting.optimizer == "adamw8bit" else None
    start, changes, clock, marks = trace_step(model, _few_passes(setting), gpu, kept)
    passes = _segments(changes, marks, clock)
    for segments in passes:
        for place in range(cuts.first, cuts.first + cuts.period):
            for name in ("forward", "after", "backward"):
                one, other = (segments.get((name, p)) for p in (place, place + cuts.period))
                if one is None and other is None and (place + 1) % setting.checkpoint_layers:
                    continue  # it waits for the layers that share its checkpoint
                if one is None or other is None or one.outline() != other.outline():
                    return None
    played = _Played(cuts)
    begins: list[tuple[int, dict[str, float]]] = []
    for segments in passes:
        begins.append((len(played.ops), dict(played.times)))
        played.outside(segments["pass", 0])
        for layer in range(cuts.layers):
            played.inside(segments, "forward", layer)
            played.inside(segments, "after", layer)
        for layer in reversed(range(cuts.layers)):
            played.inside(segments, "backward", layer)
    if end := passes[-1].get(("end", 0)):  # absent if the optimizer steps in the backward
        played.outside(_scaled(end, factor, turns))
    clock.ops, clock.sent, clock.groups = played.ops, played.times.pop(SENT), defaultdict(float, played.times)
    _repeat(clock, begins, setting.accumulation)
    start = replicated(_spread(start, cuts), clock, setting, parameters)
    return predicted(start, played.changes, clock, setting.accumulation)


def whole(model: Any, setting: Setting, gpu: GPU | str | float, index: int = 0) -> Prediction:
    """Return what a trace of all layers of ``model`` says, or of the stage ``index``."""
    parameters, few = trained(model), _few_passes(setting)
    start, changes, clock, marks = trace_step(model, few, gpu, [], index)
    if setting.pp == 1:
        begins = [(mark.ops, mark.times) for mark in marks if mark.name[0] == "pass"]
        _repeat(clock, begins, setting.accumulation)
    return predicted(replicated(start, clock, setting, parameters), changes, clock, setting.accumulation)


def _few_passes(setting: Setting) -> Setting:
    """Return ``setting`` with the passes that need a trace; those of a pipeline overlap."""
    return setting if setting.pp > 1 else dataclasses.replace(setting, accumulation=min(setting.accumulation, PASSES))


def _repeat(clock: Clock, begins: list[tuple[int, dict[str, float]]], passes: int) -> None:
    """Let ``clock`` count ``passes``: those between the first and the last are as the second one.

    ``begins``: ops and times where each traced pass begins.
    """
    if passes > PASSES:
        (begin, before), (end, after) = begins[1:]
        times = {group: seconds - before.get(group, 0.0) for group, seconds in after.items()}
        clock.repeat(begin, end, times, passes - PASSES)


def _scaled(end: Segment, factor: float, turns: tuple[int, int] | None = None) -> Segment:
    """Return the optimizer's step for ``factor`` times as many bytes of parameters.

    ``turns``: how many parameters were traced, and are in all, if the host updates them one by one.
    """
    few, many = turns or (0, 0)
    times = end.times | {"optimizer": factor * (end.times["optimizer"] - few * TURN) + many * TURN}
    longer, more = sum(times.values()) / sum(end.times.values()), many / few if few else 1.0
    return Segment(end.changes, [(more * host, longer * gpu) for host, gpu in end.ops], times)


def _bytes(parameters: list[Named]) -> int:
    return sum(p.nbytes for _, p in parameters)


def _segments(changes: list[Change], marks: list[Mark], clock: Clock) -> list[dict[Name, Segment]]:
    """Return the segments of each pass by name."""
    last = Mark(("", 0), len(changes), len(clock.ops), _times(clock))
    marks[0] = Mark(marks[0].name, 0, 0, {})  # the inputs are made before the model runs
    passes: list[dict[Name, Segment]] = []
    for mark, then in zip(marks, [*marks[1:], last], strict=True):
        if mark.name[0] == "pass":
            passes.append({})
        times = {group: seconds - mark.times.get(group, 0.0) for group, seconds in then.times.items()}
        ops = clock.ops[mark.ops : then.ops]
        passes[-1][mark.name] = Segment(changes[mark.changes : then.changes], ops, times)
    return passes


class _Played:
    """The changes and times of all layers, as they are played."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self.changes: list[Change] = []
        self.ops: list[tuple[float, float]] = []
        self.times: dict[str, float] = {SENT: 0.0}

    def outside(self, segment: Segment) -> None:
        self._add(_spread(segment.changes, self.cuts), segment)

    def inside(self, segments: dict[Name, Segment], name: str, layer: int) -> None:
        place = self.cuts.place(layer)
        if segment := segments.get((name, place)):
            by = layer - place
            self._add([_moved(change, change.part.layer, by) for change in segment.changes], segment)

    def _add(self, changes: list[Change], segment: Segment) -> None:
        self.changes += changes
        self.ops += segment.ops
        for group, seconds in segment.times.items():
            self.times[group] = self.times.get(group, 0.0) + seconds


def _moved(change: Change, layer: int | None, by: int) -> Change:
    return change if layer is None else change._replace(part=change.part._replace(layer=layer + by))


def _spread(changes: list[Change], cuts: Cuts) -> list[Change]:
    """Return ``changes`` outside of layers, with those of a traced layer once for each layer that it stands for."""
    found: list[Change] = []
    for change in changes:
        place = change.part.layer
        layers = [] if place is None else cuts.layers_of(place)
        found += [change] if place is None else [_moved(change, layer, 0) for layer in layers]
    return found
