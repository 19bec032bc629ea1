"""Recognisers, one file per pattern: each defines which modules match and which methods replace theirs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

NAME = "liger_like"  # of our functions among transformers' implementations


class UnrecognisedError(Exception):
    """Signal that a module is left alone; the message is the reason in the report."""


class NothingToDoError(UnrecognisedError):
    """Signal that a module only looks like the pattern: it has nothing that a kernel could replace."""


@dataclass(frozen=True)
class Trial:
    """Pair of functions that must agree on ``inputs``: in outputs and in gradients of inputs and ``parameters``.

    ``depth`` is the length of fp32 sums that the two add up in different orders.
    """

    original: Callable[..., Any]
    replacement: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    depth: int = 0


class Recogniser:
    """Base class of a pattern: recognises modules and makes the methods that replace theirs."""

    pattern: str
    options: tuple[str, ...]  # arguments of ``patch`` that must all be True; the report lists it under the first
    state: tuple[str, ...] = ()  # instance attributes of patched modules; ``unpatch`` removes them
    # the attribute of a config that names what transformers runs for these modules, if views of it patch them
    implementation: str = ""

    def with_option(self, value: bool | str) -> "Recogniser":
        """Return the recogniser for the ``value`` of its first option, which turns it on."""
        return self

    def forget(self, module: nn.Module) -> None:
        """Remove the instance attributes ``state`` from an unpatched ``module``."""
        for name in self.state:
            vars(module).pop(name, None)

    def depends_on(self, module: nn.Module, model: nn.Module) -> list[nn.Module]:
        """Return the modules of ``model`` whose forward must not be replaced if ``module`` is to run a kernel."""
        return [module]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True if a user would expect ``module`` to match: then the report says why it does not."""
        raise NotImplementedError

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the variant that ``module``, a part of ``model``, matches. Raises UnrecognisedError."""
        raise NotImplementedError

    def swaps(self, module: nn.Module, variant: str) -> list[tuple[nn.Module, str]]:
        """Return the modules whose class changes when ``module`` is patched, each with its variant."""
        return [(module, variant)]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the attributes, by name, that the patched subclass of ``cls`` overrides for ``variant``."""
        raise NotImplementedError

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a small fp32 module on the CPU that can run the forward of ``module``'s class."""
        raise NotImplementedError

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of original and replacement on ``module``, live or miniature, with random inputs."""
        raise NotImplementedError


def bare(cls: type[nn.Module], **attributes: Any) -> nn.Module:
    """Return an instance of ``cls`` with only these attributes: a recognised forward reads no others.

    If FSDP2 made ``cls``, the instance has the class beneath it, whose parameters are not sharded.
    """
    module: nn.Module = object.__new__(next(c for c in cls.__mro__ if not issubclass(c, FSDPModule)))  # type: ignore[assignment]
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def with_methods(module: nn.Module, methods: dict[str, Any]) -> nn.Module:
    """Return a copy of ``module`` with these methods; copy and original share their parameters."""
    changed = copy.copy(module)
    vars(changed).pop("forward", None)  # an instance attribute (accelerate's hooks) would hide the new method
    changed.__class__ = type(type(module).__name__, (type(module),), methods)
    return changed


def random_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter of normal random values, fp32 on the CPU whatever the default dtype and device are."""
    return nn.Parameter(torch.randn(*shape, device="cpu", dtype=torch.float32))


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """Return normal random values, drawn on the CPU, with the dtype and device of ``parameter``."""
    return torch.randn(*shape, device="cpu", dtype=torch.float32).to(parameter)


def original(cls: Any) -> Any:
    """Return the class that the patched class ``cls`` was made from, or ``cls`` if it is not patched."""
    origin = getattr(cls, "_liger_like", None)
    return cls if origin is None else origin.cls


def where(function: Callable[..., Any]) -> str:
    """Return the full name of a function or class, for use in a reason."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
