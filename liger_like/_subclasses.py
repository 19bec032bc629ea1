"""Subclasses of modules' classes, of the same name, that override the methods of a recognised pattern."""

import functools
import types
from typing import Any, NamedTuple

from torch import nn

from liger_like.patches import generation
from liger_like.patches.catalogue import RECOGNISERS
from liger_like.patches.foreign import rebind_forward


class Origin(NamedTuple):
    """Origin of a patched class: the original class, the pattern and its variant."""

    cls: type[Any]
    pattern: str
    variant: str


def origin_of(module: nn.Module) -> Origin | None:
    """Return the origin of the class of ``module``, or None if no pattern has patched it."""
    return getattr(type(module), "_liger_like", None)


def become(module: Any, cls: type[Any]) -> None:
    """Set the class of ``module``, and rebind the class's forward where the instance holds it."""
    rebind_forward(module, cls)
    module.__class__ = cls


def swap(module: Any, pattern: str, variant: str) -> tuple[nn.Module, type[Any]]:
    """Return ``module`` and its new class, which does not have the methods of generation."""
    cls: Any = generation.below(type(module))
    return module, _subclass(cls, pattern, variant)


@functools.cache
def _subclass(cls: Any, pattern: str, variant: str) -> type[Any]:
    """Return a subclass of ``cls`` with the same name and the methods of the pattern's variant."""
    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own |= {"_liger_like": Origin(cls, pattern, variant), "__reduce_ex__": _reduce_ex}
    return types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(own | RECOGNISERS[pattern].methods(cls, variant))
    )


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Reduce through the original class: pickle finds a class by its name, which finds the original."""
    origin = type(self)._liger_like
    return _instance, tuple(origin), *origin.cls.__reduce_ex__(self, protocol)[2:]


def _instance(cls: Any, pattern: str, variant: str) -> Any:
    patched: Any = _subclass(cls, pattern, variant)
    return patched.__new__(patched)
