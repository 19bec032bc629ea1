"""Find functions of torch, transformers or a model that other libraries have replaced."""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional as F  # noqa: N812  # as torch has it
from torch.nn.modules import module as hooked

from liger_like.patches import original, trl_code, where
from liger_like.runtime.support import HOOKS

WRAPPERS = ("accelerate", "torch")  # libraries whose wrappers call the forward that they wrap
LIBRARIES = (*WRAPPERS, "transformers", "functools")  # their decorators belong to the code of many models
# prefixes of modules whose hooks act around a call, whatever its values: they gather, move, make or count weights
AROUND = (
    *("torch.distributed.", "torch.nn.utils.", "torch.utils.module_tracker."),
    *("accelerate.", "deepspeed.", "trl.", "liger_like."),
)


def bound_forwards(module: nn.Module) -> list[str]:
    """Return the names of the instance attributes of ``module`` that hold its class's forward, bound."""
    return _bound(module, type(module).forward)


def _bound(module: nn.Module, function: Any) -> list[str]:
    """Return the names of the instance attributes of ``module`` that hold ``function``, bound.

    accelerate's hooks (``device_map``) keep the forward that they call in ``_old_forward``; removing the hooks leaves
    ``forward`` on the instance. accelerate's mixed precision keeps the forward in ``_original_forward``.
    """
    names = ("forward", "_old_forward", "_original_forward")
    return [name for name in names if getattr(vars(module).get(name), "__func__", None) is function]


def rebind_forward(module: Any, cls: type[Any]) -> None:
    """Replace the class's forward by that of ``cls`` wherever the instance ``module`` or its wrappers hold it."""
    replace_forward(module, type(module).forward, cls.forward)


def replace_forward(module: nn.Module, old: Any, new: Any) -> None:
    """Replace the function ``old``, also bound, wherever the instance ``module`` or its wrappers hold it."""
    bound = MethodType(new, module)
    for link in _wrappers(module):
        for cell in getattr(link, "__closure__", None) or ():
            if cell.cell_contents is old:
                cell.cell_contents = new
            elif getattr(cell.cell_contents, "__func__", None) is old:
                cell.cell_contents = bound
        for name in [name for name, value in vars(link).items() if value is old]:
            setattr(link, name, new)
    for name in _bound(module, old):
        vars(module)[name] = bound


def _wrappers(module: nn.Module) -> list[Any]:
    """Return the wrappers around the class's forward, as mixed precision adds; empty unless all are of known code."""
    forward = vars(module).get("forward")
    links: list[Any] = [getattr(forward, "__func__", forward)]
    while links[-1] is not type(module).forward:
        known = not trl_code.refusal(links[-1]) if trl_code.is_of_trl(links[-1]) else _library(links[-1]) in WRAPPERS
        if not known or not hasattr(links[-1], "__wrapped__"):
            return []
        links.append(links[-1].__wrapped__)
    return links[:-1]


def foreign_forward(module: nn.Module) -> str:
    """Return the name of the function that replaced the forward on the instance ``module``.

    The name is empty if nothing replaced the forward, or if only wrappers of known libraries surround it.
    """
    links = _wrappers(module)
    # TRL's function says that it wraps the class's forward, but calls the forward that the instance had
    kept = [trl_code.kept_forward(link) for link in links if trl_code.is_of_trl(link)]
    return "" if links and not kept else _foreign(module, *kept or [vars(module).get("forward")])


def _foreign(module: nn.Module, forward: Any) -> str:
    """Return the name of ``forward`` unless it is the class's forward, bound, or a hook of accelerate around it."""
    function: Any = getattr(forward, "func", forward)  # unpacks a functools.partial
    hooks = getattr(function, "__module__", None) == "accelerate.hooks"
    own = getattr(forward, "__func__", None) is type(module).forward
    return "" if forward is None or own or (hooks and bound_forwards(module)) else _name(function)


def foreign_decorator(forward: Any) -> str:
    """Return the full name of a decorator's function around the class's ``forward`` that is of no known library."""
    while hasattr(forward, "__wrapped__"):
        if _library(forward) not in LIBRARIES:
            return _name(forward)
        forward = forward.__wrapped__
    return ""


def hook_on(module: nn.Module) -> str:
    """Return the name of a hook on ``module``, or on all modules, that may read inputs or outputs; empty if none."""
    for kind in HOOKS:
        for hooks in (getattr(module, kind), getattr(hooked, f"_global{kind}")):
            for hook in hooks.values():
                function = hook.func if isinstance(hook, functools.partial) else hook
                if not f"{function.__module__}.".startswith(AROUND):
                    return where(function)
    return ""


def changed(module: nn.Module) -> str:
    """Return the name of a hook on ``module``, or of a function that replaced its forward; empty if none."""
    return hook_on(module) or ("forward" in module.__dict__ and foreign_forward(module)) or ""


def replaced_in_class(cls: type[Any]) -> list[str]:
    """Return a sentence for the forward of ``cls``, and for each function of its module it calls, if replaced."""
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
    """Return a sentence for each function of torch.nn.functional that was replaced in this process."""
    return [
        f"torch.nn.functional.{name} was replaced by {_name(value)}"
        for name, value in vars(F).items()
        if name.islower() and callable(value) and _library(value) not in ("torch", "")
    ]


def _library(function: Callable[..., Any]) -> str:
    """Return the top-level package that defines ``function``, whatever functools.wraps copied onto it."""
    if isinstance(function, functools.partial):
        return _library(function.func)
    function = getattr(function, "__func__", function)
    if hasattr(function, "__code__"):
        return str(function.__globals__.get("__name__", function.__module__)).partition(".")[0]
    has_own = isinstance(function, type) or not hasattr(function, "__wrapped__")
    return str(getattr(function if has_own else type(function), "__module__", None) or "").partition(".")[0]


def _name(function: Any) -> str:
    """Return the full name under which ``function`` was defined."""
    code = getattr(function, "__code__", None)
    if code is None:
        return where(function)
    home = function.__globals__.get("__name__", function.__module__)
    return f"{home}.{getattr(code, 'co_qualname', code.co_name)}"
