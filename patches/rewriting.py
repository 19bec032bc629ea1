"""Copy a class's own forward with some of its calls replaced."""

import ast
import functools
from types import CellType, CodeType, FunctionType
from typing import Any

from liger_like.patches.forms import definition_of


def with_names(function: FunctionType, changed: dict[str, Any], code: CodeType | None = None) -> FunctionType:
    """Return a copy of ``function`` in which the names of ``changed`` have these values, and run ``code`` if given.

    They become free variables, as ``compiled`` makes them. All other names are still those of the function's module.
    Raises UnrecognisedError if the function has no source.
    """
    if code is None:  # getsource would follow __wrapped__
        plain = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        code = compiled(function, definition_of(plain), *changed)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in changed.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    clone = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    functools.update_wrapper(clone, function)
    clone.__kwdefaults__ = function.__kwdefaults__
    del clone.__dict__["__wrapped__"]
    return clone


def with_globals(function: FunctionType, changed: dict[str, Any]) -> FunctionType:
    """Return a copy of ``function`` whose globals are updated by ``changed``, where others look them up.

    The copy sees no later change of the module's globals: torch.compile guards globals in a plain dict alone.
    """
    namespace = {**function.__globals__, **changed}
    # with a __name__, torch.compile would look the globals up in that module, where they are unchanged
    del namespace["__name__"]
    clone = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    functools.update_wrapper(clone, function)
    clone.__kwdefaults__ = function.__kwdefaults__
    del clone.__dict__["__wrapped__"]
    return clone


def rewrapped(function: FunctionType, inner: FunctionType) -> FunctionType:
    """Return ``inner`` in copies of the decorators of ``function``, each of which holds the function that it wraps."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return inner
    again = rewrapped(wrapped, inner)
    cells = (CellType(again) if cell.cell_contents is wrapped else cell for cell in function.__closure__ or ())
    clone = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    functools.update_wrapper(clone, function)
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__wrapped__ = again  # type: ignore[attr-defined]
    return clone


def compiled(function: FunctionType, definition: ast.FunctionDef, *names: str) -> CodeType:
    """Return the code of ``definition``, a tree of ``function``, with ``names`` as free variables.

    Line numbers stay the same.
    """
    # defaults and annotations may contain code objects, and exactly one is expected below
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.decorator_list, definition.returns = [], None
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    free = ", ".join(sorted({*names, *function.__code__.co_freevars}))
    around = ast.parse(f"def around({free}): pass")
    around.body[0].body = [definition]  # type: ignore[attr-defined]
    code: CodeType = compile(
        ast.fix_missing_locations(around), function.__code__.co_filename, "exec", dont_inherit=True
    )
    for _ in range(2):  # that of ``around`` is in the module's, and in it that of the function
        (code,) = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code


def plain_forward(cls: Any) -> FunctionType | None:
    """Return the forward that a family wrote, without transformers' wrappers; None if it has other decorators."""
    forward = without_renames(_unchecked(cls))
    plain = isinstance(forward, FunctionType) and not forward.__closure__ and not hasattr(forward, "__wrapped__")
    return forward if plain else None


def with_renames(cls: Any, forward: FunctionType) -> FunctionType:
    """Return ``forward`` with the decorators of the forward of ``cls`` that ``plain_forward`` left out.

    Subclasses of a layer get the checkpointing wrapper by themselves.
    """
    return rewrapped(_unchecked(cls), forward)


def _unchecked(cls: Any) -> Any:
    forward = cls.forward
    if isinstance(forward, FunctionType) and forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def without_renames(forward: Any) -> Any:
    """Return ``forward`` without the decorators by which transformers takes an argument by its old name, too."""
    while isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward
