"""What a training step needs, before there is a GPU: its peak memory by a trace of tensors without data.

``predict`` traces a model from its config; ``traced`` is a context for a step of one's own. Both run on any CPU.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_like.planning import _models
from liger_like.planning._machine import GPU, GPUS, gpu_of
from liger_like.planning._prediction import Prediction, changes_of, predicted
from liger_like.planning._settings import Setting
from liger_like.planning._stand_ins import standing_in
from liger_like.planning._tracer import Tracer

__all__ = ["GPUS", "NotTracedError", "Prediction", "Setting", "Trace", "predict", "traced"]


class NotTracedError(Exception):
    """Signal that a step cannot be traced; the message names the op and the module."""


class Trace:
    """A step that is traced: after the context, its ``Prediction``'s fields."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._prediction: Prediction | None = None

    def know(self, model: torch.nn.Module) -> None:
        """Take the names of modules from ``model``, and its head for the loss's."""
        self._tracer.know(model)

    def restart(self) -> None:
        """Forget what happened so far: what is in memory now is where the step starts."""
        gc.collect()
        self._tracer.restart()

    @property
    def prediction(self) -> Prediction:
        """Return what the trace says so far."""
        return self._prediction or predicted(*changes_of(self._tracer))

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
    trace = Trace(tracer)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), standing_in(of), tracer.listening():
            yield trace
            trace._prediction = predicted(*changes_of(tracer))
    except Exception as error:
        if not hasattr(error, "traced"):
            raise
        op, module = error.traced
        raise NotTracedError(f"cannot be traced: {op}, {module or 'outside of modules'}: {_said(error)}") from error


def predict(config: Any, setting: Setting, gpu: GPU | str | float = "h200") -> Prediction:
    """Return the memory of a training step of the model of ``config`` (a config.json, its folder, or a config).

    Raises NotTracedError if the model asks for data, ``liger_like.doctor.NotExaminedError`` for a config that is not
    known, ValueError for an unknown ``gpu``.
    """
    config, cls = _models.model_class(config)
    with contextlib.ExitStack() as stack:
        model = _models.build(config, cls, setting)
        context = None
        if setting.dtype == "fp32":
            stack.enter_context(_models.processes(setting.gpus))
            mesh = _models.mesh_of(setting)
            _models.shard(model, mesh)
            context = _models.context_of(setting, mesh)
        given = _models.inputs_of(setting, context)
        trace = stack.enter_context(traced(gpu))
        _models.materialise(model)
        trace.know(model)
        step = _models.step_of(model, given, setting, context)
        step()  # makes the optimizer's state
        trace.restart()
        step()
        return trace.prediction


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
