"""Find the functions that other libraries put in the place of torch's, transformers' or a model's own."""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional as F  # noqa: N812  # as torch has it
from torch.nn.modules import module as hooked

from liger_like.patches import original, where
from liger_like.runtime.support import HOOKS

WRAPPERS = ("accelerate", "torch")  # their wrappers call the forward that they wrap
LIBRARIES = (*WRAPPERS, "transformers", "functools")  # their decorators are part of many models' own code
# their hooks act around a call, whatever it returns: they gather, move, make or count weights
AROUND = (
    *("torch.distributed.", "torch.nn.utils.", "torch.utils.module_tracker."),
    *("accelerate.", "deepspeed.", "trl.", "liger_like."),
)


def bound_forwards(module: nn.Module) -> list[str]:
    """List the attributes of ``module`` itself that hold its class's forward, bound.

    Hooks of accelerate (``device_map``) keep the forward that they run in ``_old_forward``, and leave ``forward`` when
    they are removed; its mixed precision keeps it in ``_original_forward``.
    """
    names = ("forward", "_old_forward", "_original_forward")
    return [name for name in names if getattr(vars(module).get(name), "__func__", None) is type(module).forward]


def rebind_forward(module: Any, cls: type[Any]) -> None:
    """Let what ``module`` itself holds of its class's forward hold that of ``cls``."""
    own = type(module).forward
    for link in _wrappers(module):
        for cell in getattr(link, "__closure__", None) or ():
            if cell.cell_contents is own:
                cell.cell_contents = cls.forward
        for name in [name for name, value in vars(link).items() if value is own]:
            setattr(link, name, cls.forward)
    for name in bound_forwards(module):
        setattr(module, name, MethodType(cls.forward, module))


def _wrappers(module: nn.Module) -> list[Any]:
    """List the wrappers around the class's forward (mixed precision); empty unless all are of WRAPPERS."""
    forward = vars(module).get("forward")
    links: list[Any] = [getattr(forward, "__func__", forward)]
    while links[-1] is not type(module).forward:
        if _library(links[-1]) not in WRAPPERS or not hasattr(links[-1], "__wrapped__"):
            return []
        links.append(links[-1].__wrapped__)
    return links[:-1]


def foreign_forward(module: nn.Module) -> str:
    """Name the function that replaced the forward of ``module`` itself; empty if there is none, or only wrappers."""
    forward, bound = vars(module).get("forward"), bound_forwards(module)
    function: Any = getattr(forward, "func", forward)  # of a partial
    hooks = getattr(function, "__module__", None) == "accelerate.hooks"
    if forward is None or "forward" in bound or (hooks and bound) or _wrappers(module):
        return ""
    return _name(function)


def hook_on(module: nn.Module) -> str:
    """Name a hook on ``module``, or on all modules, that may want what is given to it and what it returns."""
    for kind in HOOKS:
        for hooks in (getattr(module, kind), getattr(hooked, f"_global{kind}")):
            for hook in hooks.values():
                function = hook.func if isinstance(hook, functools.partial) else hook
                if not f"{function.__module__}.".startswith(AROUND):
                    return where(function)
    return ""


def replaced_in_class(cls: type[Any]) -> list[str]:
    """Say what replaced the forward of ``cls``, and the functions of its module that the forward calls."""
    owner = next((base for base in original(cls).__mro__ if "forward" in vars(base)), None)
    if owner is None:
        return []
    forward, home = inspect.unwrap(vars(owner)["forward"]), owner.__module__.partition(".")[0]
    found = []
    if _library(forward) not in (home, *LIBRARIES):
        found.append(f"{where(owner)}.forward was replaced by {_name(forward)}")
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and _library(function) not in (home, *LIBRARIES):
            found.append(f"{forward.__globals__['__name__']}.{name} was replaced by {_name(function)}")
    return found


def replaced_in_torch() -> list[str]:
    """Say which functions of torch.nn.functional were replaced in this process."""
    return [
        f"torch.nn.functional.{name} was replaced by {_name(value)}"
        for name, value in vars(F).items()
        if name.islower() and callable(value) and _library(value) not in ("torch", "")
    ]


def _library(function: Callable[..., Any]) -> str:
    """Return the top-level package that ``function`` was written in, whatever functools.wraps says."""
    if isinstance(function, functools.partial):
        return _library(function.func)
    function = getattr(function, "__func__", function)
    if hasattr(function, "__code__"):
        return str(function.__globals__.get("__name__", function.__module__)).partition(".")[0]
    has_own = isinstance(function, type) or not hasattr(function, "__wrapped__")
    return str(getattr(function if has_own else type(function), "__module__", None) or "").partition(".")[0]


def _name(function: Any) -> str:
    """Return the full name that ``function`` was written under."""
    code = getattr(function, "__code__", None)
    if code is None:
        return where(function)
    return f"{function.__globals__['__name__']}.{getattr(code, 'co_qualname', code.co_name)}"
