"""Peak memory and time of a training step before there is a GPU, by a trace of tensors without data.

``predict`` traces a model from its config; ``traced`` is a context for a step of one's own. Both run on any CPU.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from liger_like.planning import _models
from liger_like.planning._layers import cuts_of, replayed, whole
from liger_like.planning._machine import GPU, GPUS, gpu_of
from liger_like.planning._prediction import Prediction, of_pipeline
from liger_like.planning._search import Plan, searched
from liger_like.planning._settings import MESH, WHOLE, Setting
from liger_like.planning._trace import NotTracedError, Trace, traced
from liger_like.runtime.checks import require_integer, require_positive

__all__ = [
    "GPUS",
    "NotTracedError",
    "Plan",
    "Prediction",
    "Setting",
    "Trace",
    "plan",
    "predict",
    "predict_model",
    "traced",
]


def plan(
    config: Any,
    gpus: int = 1,
    gpu: GPU | str | float = "h200",
    batch: int = 1,
    seq: int = 2048,
    fix: Mapping[str, Any] | None = None,
    host: float | None = None,
    layers: int | None = None,
) -> Plan:
    """Return the ways to train the model of ``config`` on ``gpus`` GPUs, the fastest that fits first.

    ``batch``: rows of ``seq`` tokens of all GPUs in one optimizer step; micro-batch and accumulation are chosen.
    ``fix``: fields of ``Setting`` that are not searched. ``host``: GiB of the host that checkpoints of all GPUs may
    take; None: any. ``layers``: train the first layers of the model alone. Raises what ``predict``
    does, and TypeError or ValueError for a field or a mesh that is not possible.
    """
    fix = dict(fix or {})
    known = {field.name for field in dataclasses.fields(Setting)} - {"seq"}
    if unknown := fix.keys() - known:
        raise ValueError(f"fix must be out of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    for name, value in (("gpus", gpus), ("batch", batch), ("seq", seq)):
        require_integer(name, value, 1)
    if host is not None:
        require_positive("host", host)
    sharded = (gpus > 1 or any(fix.get(name, 1) != 1 for name in MESH)) and fix.get("zero") not in WHOLE
    adapter = _models.adapter_of(config)
    if rank := _models.rank_of(adapter, fix.get("lora", 0)):
        fix["lora"] = rank
    Setting(**{"dtype": "fp32" if sharded else "bf16", "checkpoint": "full"} | fix)  # raises for a field
    of = gpu_of(gpu)
    config, cls = _models.model_class(config)
    config = config if layers is None else _models.shortened(config, layers)
    count = config.get_text_config().num_hidden_layers

    def predicted(setting: Setting) -> Prediction:
        return predict_model(lambda: _models.build(config, cls, setting, adapter), setting, of)

    rows = searched(predicted, of, gpus, batch, seq, fix, host, count)
    return Plan(cls.__name__, _models.parameters_of(config, cls), of, gpus, batch, seq, rows)


def predict(config: Any, setting: Setting, gpu: GPU | str | float = "h200") -> Prediction:
    """Return memory and time of a training step of the model of ``config``: a config.json, its folder, or a config.

    With an adapter_config.json in the folder the adapters of LoRA are trained.
    Raises NotTracedError if the model asks for data or refuses the step, ``liger_like.doctor.NotExaminedError`` for a
    config that is not known, ValueError for an unknown ``gpu``.
    """
    adapter = _models.adapter_of(config)
    setting = dataclasses.replace(setting, lora=_models.rank_of(adapter, setting.lora))
    config, cls = _models.model_class(config)
    return predict_model(lambda: _models.build(config, cls, setting, adapter), setting, gpu)


def predict_model(make: Callable[[], Any], setting: Setting, gpu: GPU | str | float = "h200") -> Prediction:
    """Return memory and time of a training step of the model that ``make`` returns: a causal language model on "meta",
    patched and checkpointed as it will be trained. ``patched``, ``checkpoint``, ``tiled_mlp`` and ``lora`` of
    ``setting`` do not count.

    A few layers are traced and replayed for all, or the whole model if its layers do not repeat. Of a pipeline each
    stage is traced; the memory is that of the GPU that needs the most. Raises as ``predict``.
    """
    model = make()
    if cuts := cuts_of(model.config, _models.layers_of(model), setting):
        if found := replayed(model, cuts, setting, gpu):
            return found
        model = make()
    stages = [whole(make() if index else model, setting, gpu, index) for index in range(setting.pp)]
    return of_pipeline(stages, setting.accumulation)
