"""Tell which of TRL's trainers use the fused head, by the code of their methods."""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from liger_like.patches.trl_code import version


def reason_unfused(cls: type[Any]) -> str:
    """Return why a trainer of class ``cls`` runs no op of ours on its head; empty for one that does or may."""
    if not any(base.__module__.partition(".")[0] == "trl" for base in cls.__mro__):
        return ""
    if _mentions(cls, "fused_lm_head"):
        return ""
    how = "reads the logits" if _mentions(cls, "logits") else "does not use TRL's fused head"
    return f"the loss of {version()}'s {cls.__name__} {how}"


def _mentions(cls: type[Any], name: str) -> bool:
    """Return True if a method that a trainer of class ``cls`` runs names ``name``, as a variable, attribute or key."""
    return any(name in words for code in _codes(cls) for words in _words(code))


def _codes(cls: type[Any]) -> Iterator[CodeType]:
    """Yield the code of each method, and of the method that it overrides if it calls ``super``."""
    for name in {name for base in cls.__mro__ for name in vars(base)}:
        for base in (base for base in cls.__mro__ if name in vars(base)):
            method = vars(base)[name]
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if isinstance(code, CodeType):
                yield code
            if code is None or "super" not in code.co_names:
                break


def _words(constant: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the names and the constants of a code object and of all code in it."""
    if isinstance(constant, CodeType):
        yield constant.co_names
        yield constant.co_consts
        for inner in constant.co_consts:
            yield from _words(inner)
    elif isinstance(constant, tuple):
        yield constant
