"""Recognisers: one file per pattern says what it recognises and what runs in its place."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class UnrecognisedError(Exception):
    """A module is left alone; the message is the reason that the report gives."""


class NothingToDoError(UnrecognisedError):
    """A module only looks like the pattern: there is nothing that a kernel could replace."""


@dataclass(frozen=True)
class Trial:
    """Two functions that must agree on ``inputs``: in the outputs and in the gradients of inputs and parameters."""

    original: Callable[..., Any]
    replacement: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()


class Recogniser:
    """A pattern of modules and the methods that replace theirs."""

    pattern: str
    options: tuple[str, ...]  # the arguments of ``patch`` that turn it off; it is reported under the first
    state: tuple[str, ...] = ()  # instance attributes that the methods leave behind; unpatching removes them

    def forget(self, module: nn.Module) -> None:
        """Remove what the methods left behind on an unpatched ``module``."""
        for name in self.state:
            vars(module).pop(name, None)

    def depends_on(self, module: nn.Module, model: nn.Module) -> list[nn.Module]:
        """List the modules of ``model`` whose own forward must run for a kernel to run in ``module``."""
        return [module]

    def looks_like(self, module: nn.Module) -> bool:
        """Whether a user would expect ``module`` to match, so that a report must say why it does not."""
        raise NotImplementedError

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """The variant of the pattern that ``module``, a part of ``model``, is. Raises UnrecognisedError."""
        raise NotImplementedError

    def swaps(self, module: nn.Module, variant: str) -> list[tuple[nn.Module, str]]:
        """The modules whose class changes when ``module`` is patched, each with the variant it becomes."""
        return [(module, variant)]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """What a subclass of ``cls`` overrides to be ``variant``."""
        raise NotImplementedError

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """A small fp32 module on the CPU that runs the forward of ``module``'s class."""
        raise NotImplementedError

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """The original and its replacement on ``module``, live or miniature, with random inputs that suit it."""
        raise NotImplementedError


def bare(cls: type[nn.Module], **attributes: Any) -> nn.Module:
    """An instance of ``cls`` that has only these attributes: all that a recognised forward reads.

    Where FSDP2 made the class of a sharded module, it is one of the class below, whose parameters are whole.
    """
    module: nn.Module = object.__new__(next(c for c in cls.__mro__ if not issubclass(c, FSDPModule)))  # type: ignore[assignment]
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def with_methods(module: nn.Module, methods: dict[str, Any]) -> nn.Module:
    """A copy of ``module`` with other methods; they share their parameters."""
    changed = copy.copy(module)
    vars(changed).pop("forward", None)  # hooks around that of the original
    changed.__class__ = type(type(module).__name__, (type(module),), methods)
    return changed


def random_parameter(*shape: int) -> nn.Parameter:
    """Normal random fp32 values on the CPU, whatever the default dtype and device are."""
    return nn.Parameter(torch.randn(*shape, device="cpu", dtype=torch.float32))


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """Normal random values, drawn on the CPU, in the dtype and on the device of ``parameter``."""
    return torch.randn(*shape, device="cpu", dtype=torch.float32).to(parameter)


def original(cls: Any) -> Any:
    """The class that a patched one was made from; others themselves."""
    origin = getattr(cls, "_liger_like", None)
    return cls if origin is None else origin.cls


def where(function: Callable[..., Any]) -> str:
    """The full name of ``function``, for a reason."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
