"""Copy a class's own forward with some of its calls replaced."""

import ast
import functools
from types import CellType, CodeType, FunctionType
from typing import Any


def with_globals(function: FunctionType, changed: dict[str, Any], code: CodeType | None = None) -> FunctionType:
    """Return a copy of ``function`` whose globals are updated by ``changed``; it runs ``code`` if given.

    The copy sees no later change of the module's globals: torch.compile guards globals in a plain dict alone.
    """
    namespace = {**function.__globals__, **changed}
    # with a __name__, torch.compile would look the globals up in that module, where they are unchanged
    del namespace["__name__"]
    code = code or function.__code__
    clone = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
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


def compiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    """Return the code of ``definition``, a rewritten syntax tree of ``function``; line numbers stay the same."""
    # defaults and annotations may contain code objects, and exactly one is expected below
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.decorator_list, definition.returns = [], None
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    module = compile(
        ast.fix_missing_locations(ast.Module([definition], [])),
        function.__code__.co_filename,
        "exec",
        dont_inherit=True,
    )
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    return code


def plain_forward(cls: Any) -> FunctionType | None:
    """Return the forward that a family wrote, without transformers' checkpointing wrapper; None if it is decorated."""
    forward = cls.forward
    if isinstance(forward, FunctionType) and forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    plain = isinstance(forward, FunctionType) and not forward.__closure__ and not hasattr(forward, "__wrapped__")
    return forward if plain else None
