"""The context in which a step is traced."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_like.planning._clock import MODE, Clock
from liger_like.planning._machine import GPU, gpu_of
from liger_like.planning._prediction import Prediction, changes_of, predicted
from liger_like.planning._stand_ins import standing_in
from liger_like.planning._tracer import Tracer


class NotTracedError(Exception):
    """Signal that a step cannot be traced; the message names the op and the module."""


class RefusedError(NotTracedError):
    """Signal that a model, or a way to train it, refuses a step; the message names the setting."""


class Trace:
    """A step that is traced: after the context, its ``Prediction``'s fields."""

    def __init__(self, tracer: Tracer, gpu: GPU) -> None:
        self._tracer, self._gpu = tracer, gpu
        self._clock = tracer.watch = Clock(gpu)
        tracer.listen = self._listen
        self._prediction: Prediction | None = None

    def know(self, model: torch.nn.Module) -> None:
        """Take the names of modules from ``model``, and its head for the loss's."""
        self._tracer.know(model)

    def restart(self) -> None:
        """Forget what happened so far: what is in memory now is where the step starts."""
        gc.collect()
        self._tracer.restart()
        self._clock = self._tracer.watch = Clock(self._gpu)

    def _sent(self, size: int) -> None:
        """Count ``size`` bytes that checkpoints take of the host."""
        self._clock.sent += size

    def _listen(self, seconds: float = MODE) -> None:
        """Count ``seconds`` of the host, by default a mode's for an op, except within an op that is counted whole."""
        if self._tracer.watch is not None:
            self._clock.listen(seconds)

    @property
    def parts(self) -> tuple[Tracer, Clock]:
        """Return the tracer and the clock of the step."""
        return self._tracer, self._clock

    @property
    def prediction(self) -> Prediction:
        """Return what the trace says so far."""
        return self._prediction or predicted(*changes_of(self._tracer), self._clock)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.prediction, name)


@contextlib.contextmanager
def traced(gpu: GPU | str | float = "h200") -> Iterator[Trace]:
    """Trace a training step that is built and run within the context, as ``gpu`` would run it::

        with traced("h200") as t:
            model = build().to("cpu")  # tensors are on the CPU and have no data
            step()
        t.gib, t.by_kind, t.by_module

    Nothing of the context is left after it, or after an exception. Raises NotTracedError if the step reads data,
    ValueError for an unknown ``gpu``. For the memory of a later step call ``t.restart()`` before it.
    """
    of = gpu_of(gpu)
    tracer = Tracer(of.workspace)
    trace = Trace(tracer, of)
    try:
        with (
            _older_objects_kept(),
            FakeTensorMode(allow_non_fake_inputs=True),
            standing_in(of, trace._sent, trace._listen),
            tracer.listening(),
        ):
            yield trace
            trace._prediction = trace.prediction
    except Exception as error:
        if not hasattr(error, "traced"):
            raise
        op, module = error.traced
        raise NotTracedError(f"cannot be traced: {op}, {module or 'outside of modules'}: {said(error)}") from error


@contextlib.contextmanager
def _older_objects_kept() -> Iterator[None]:
    """Let ``gc`` look for the garbage of the context alone, which takes much less time."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def said(error: Exception) -> str:
    """Return the message of ``error`` in a line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
