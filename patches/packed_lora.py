"""Spare PEFT's adapters of packed experts a sum of all weights in each forward, which only checks its own shape.

PEFT registers a parametrisation in each forward. To check it, torch adds the adapter to the weights of all experts and
drops the sum. The wrapper of the experts gets a copy of PEFT's method that registers without this check, and without
counting a change of the weights.
"""

import functools
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

from torch import nn
from torch.autograd import grad_mode

from liger_like.patches import UnrecognisedError
from liger_like.patches.experts import PACKED, is_folded
from liger_like.patches.rewriting import rewrapped, with_names

METHOD = "_activate_lora"


def hook(model: nn.Module) -> None:
    """Replace PEFT's method on each wrapper of packed weights in ``model``."""
    for module in model.modules():
        method = _unchecked(getattr(type(module), METHOD, None))
        if getattr(module, "parameter_name", None) in PACKED and method is not None:
            vars(module)[METHOD] = MethodType(method, module)


def unhook(module: nn.Module) -> None:
    """Put PEFT's method back."""
    method = vars(module).get(METHOD)
    if method is not None and method.__func__ is _unchecked(getattr(type(module), METHOD)):
        del vars(module)[METHOD]


@functools.cache
def _unchecked(method: Any) -> Any:
    """Return a copy of ``method`` that registers adapters with factors unchecked, or None without source."""
    if method is None:
        return None
    parametrize = SimpleNamespace(**vars(nn.utils.parametrize) | {"register_parametrization": _register})
    utils = SimpleNamespace(**vars(nn.utils) | {"parametrize": parametrize})
    try:
        inner = with_names(method.__wrapped__, {"nn": SimpleNamespace(**vars(nn) | {"utils": utils})})
    except (AttributeError, UnrecognisedError):  # no context manager, or no source
        return None
    return rewrapped(method, inner)


def _register(module: nn.Module, name: str, parametrization: Any) -> nn.Module:
    unsafe = is_folded(type(parametrization).forward)
    weight: Any = module._parameters.get(name)
    counted = weight is not None and not weight.is_inference()
    # torch sets the weight to itself: the backward of an earlier forward, which reads it, would take that for a change
    with grad_mode._unsafe_preserve_version_counter(weight) if counted else nullcontext():
        return nn.utils.parametrize.register_parametrization(module, name, parametrization, unsafe=unsafe)
