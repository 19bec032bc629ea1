"""What a training step needs, before there is a GPU: its peak memory by a trace of tensors without data.

``predict`` traces a model from its config; ``traced`` is a context for a step of one's own. Both run on any CPU.
"""

from collections.abc import Callable
from typing import Any

from liger_like.planning import _models
from liger_like.planning._layers import replayed, trace_step
from liger_like.planning._machine import GPU, GPUS
from liger_like.planning._prediction import Prediction, predicted
from liger_like.planning._settings import Setting
from liger_like.planning._trace import NotTracedError, Trace, traced

__all__ = ["GPUS", "NotTracedError", "Prediction", "Setting", "Trace", "predict", "predict_model", "traced"]


def predict(config: Any, setting: Setting, gpu: GPU | str | float = "h200") -> Prediction:
    """Return memory and time of a training step of the model of ``config``: a config.json, its folder, or a config.

    Raises NotTracedError if the model asks for data, ``liger_like.doctor.NotExaminedError`` for a config that is not
    known, ValueError for an unknown ``gpu``.
    """
    config, cls = _models.model_class(config)
    return predict_model(lambda: _models.build(config, cls, setting), setting, gpu)


def predict_model(make: Callable[[], Any], setting: Setting, gpu: GPU | str | float = "h200") -> Prediction:
    """Return memory and time of a training step of the model that ``make`` returns: a causal language model on "meta",
    patched and checkpointed as it will be trained. Only sizes, dtype and sharding of ``setting`` count.

    A few layers are traced and replayed for all, or the whole model if its layers do not repeat. Raises as ``predict``.
    """
    return replayed(make(), setting, gpu) or predicted(*trace_step(make(), setting, gpu)[:3])
