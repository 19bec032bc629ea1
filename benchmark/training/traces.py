"""One training step as torch recorded it, reduced: memory by the phase that allocated it, time by what it was for."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function, schedule
from transformers import PreTrainedModel

from benchmark.common.markdown import Row
from benchmark.common.measure import Step
from benchmark.common.processes import GPU

Event = Mapping[str, Any]
BEFORE = "before"  # allocated before the step: weights and the optimizer's state
POINTS = 120

PREFIX, OPTIMIZER, ENGINE = "benchmark: ", "Optimizer.", "autograd::engine"  # prefixes of the profiler's event names
OTHER = "other"
# last part of a module's name: its row; the work of its submodules counts for them
GROUP_OF = {
    "self_attn": "attention",
    "norm": "norms",
    "input_layernorm": "norms",
    "post_attention_layernorm": "norms",
    "rotary_emb": "RoPE",
    "mlp": "GLU",
    "": "loss",  # the model without its submodules
    "model": OTHER,
}
PRODUCTS = re.compile(r"aten::(add|badd)?b?mm_?$|_add_products")
LAUNCHES = "cuda", "cuLaunch"  # prefixes of the driver's calls
FORWARD = 0  # the profiler's scope of a forward's events
SUMS = "aten::add", "aten::add_"  # the engine's sums of two gradients of one tensor
GROUPS = ("matrix products", "attention", "norms", "RoPE", "GLU", "loss", "optimizer", OTHER)


def memory(step: Callable[[Callable[[str], None]], None]) -> Row:
    """Return the memory that ``step`` has allocated at each time; ``step`` reports the end of its phases."""
    before = torch.cuda.memory_allocated()
    phases: dict[str, Sequence[Event]] = {}
    seen = 0

    def ended(phase: str) -> None:
        nonlocal seen
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        phases[phase], seen = trace[seen:], len(trace)

    torch.cuda.memory._record_memory_history(context=None, clear_history=True)
    try:
        step(ended)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return levels(before, phases)


def levels(before: int, phases: Mapping[str, Iterable[Event]]) -> Row:
    """Return GiB that were allocated before the step or in each phase and are still there, at up to POINTS times.

    A time stands for as many allocations and frees as any other: the one among them where most was allocated. ``ends``
    are where the phases end, as parts of all times.
    """
    now = {BEFORE: before, **dict.fromkeys(phases, 0)}
    owners: dict[int, str] = {}
    curve: list[tuple[int, ...]] = [tuple(now.values())]
    ends: dict[str, int] = {}
    for phase, events in phases.items():
        for event in events:
            if event["action"] == "alloc":
                owners[event["addr"]] = phase
                now[phase] += event["size"]
            elif event["action"] == "free_requested":
                now[owners.pop(event["addr"], BEFORE)] -= event["size"]
            else:
                continue
            curve.append(tuple(now.values()))
        ends[phase] = len(curve)
    count = min(POINTS, len(curve))
    bounds = [len(curve) * i // count for i in range(count + 1)]
    most = [max(curve[i:j], key=sum) for i, j in itertools.pairwise(bounds)]
    gib = {name: [level[i] / 2**30 for level in most] for i, name in enumerate(now)}
    return {"gib": gib, "ends": {phase: end / len(curve) for phase, end in ends.items()}}


def _recorded(group: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + group):
            return function(*args, **kwargs)

    return run


@contextmanager
def _rotating(forward: Any, name: str = "apply_rotary_pos_emb") -> Iterator[None]:
    """Record the rotary function of ``forward``: a global, or a free variable where patched."""
    free = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    if name not in free:
        with mock.patch.dict(forward.__globals__, {name: _recorded("RoPE", forward.__globals__[name])}):
            yield
        return
    rotate = free[name].cell_contents
    free[name].cell_contents = _recorded("RoPE", rotate)
    try:
        yield
    finally:
        free[name].cell_contents = rotate


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Let the profiler see to which group the work of each module of ``model`` and of its rotary function belongs."""
    modules = [(GROUP_OF.get(name.rpartition(".")[2]), module) for name, module in model.named_modules()]
    with _rotating(inspect.unwrap(type(model.model.layers[0].self_attn).forward)):
        for group, module in modules:
            if group:
                module.forward = _recorded(group, module.forward)
        try:
            yield
        finally:
            for group, module in modules:
                if group:
                    del module.forward


def profile(step: Step) -> dict[str, float]:
    """Return the ms of each group in ``step``: of kernels, or without a GPU of ops on the host.

    The step is traced twice, since setting up the trace slows the first one's kernels down.
    """
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * GPU]
    second = schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=second) as profiler:
        for _ in range(2):
            step()
            if GPU:
                torch.cuda.synchronize()
            profiler.step()
    return times_of(profiler.events())


def times_of(events: Sequence[Any]) -> dict[str, float]:
    """Return the ms of each group from the profiler's events.

    Work of a forward belongs to the innermost module that has a group, work of a backward to that of the forward.
    """
    forward = {  # the last forward of a number: earlier ones have no backward
        event.sequence_nr: event
        for event in sorted(events, key=lambda event: event.time_range.start)
        if event.sequence_nr >= 0 and event.scope == FORWARD and not event.name.startswith(ENGINE)
    }
    totals = dict.fromkeys(GROUPS, 0.0)
    # a CPU event has a GPU event of its name that spans its kernels: count the kernels alone
    ranges = {event.name for event in events if event.device_type == DeviceType.CPU}
    for event in events:
        for name, us in _work(event):
            if not GPU or name not in ranges:
                totals[_group(event, name, forward)] += us / 1e3
    return totals


def _work(event: Any) -> list[tuple[str, float]]:
    """Return names and us of what ``event`` launched on the GPU, or did itself on the host.

    What the profiler notes within a launch, as that its buffer is full, has the launch's kernel as its own, too.
    """
    if GPU:
        within = event.cpu_parent and event.cpu_parent.name.startswith(LAUNCHES)
        return [] if within else [(kernel.name, kernel.duration) for kernel in event.kernels]
    return [(event.name, event.self_cpu_time_total)]


def _group(event: Any, name: str, forward: Mapping[int, Any]) -> str:
    if PRODUCTS.search(event.name) or PRODUCTS.search(name):
        return "matrix products"
    if event.name in SUMS and event.cpu_parent and event.cpu_parent.name.startswith(ENGINE):
        return OTHER
    while event and not event.name.startswith((PREFIX, OPTIMIZER)):
        backward = event.name.startswith(ENGINE)
        event = forward.get(event.sequence_nr) if backward else event.cpu_parent
    if not event:
        return OTHER
    return "optimizer" if event.name.startswith(OPTIMIZER) else str(event.name.removeprefix(PREFIX))
