"""Copies of a class's own forward in which some calls are others."""

import ast
import functools
from types import CodeType, FunctionType
from typing import Any


def with_globals(function: FunctionType, changed: dict[str, Any], code: CodeType | None = None) -> FunctionType:
    """A copy of ``function`` that sees ``changed`` under those global names, and runs ``code`` if it is given."""
    namespace = {**function.__globals__, **changed}
    # torch.compile would look these names up in the module of this name, where they still are what they were
    del namespace["__name__"]
    code = code or function.__code__
    clone = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    functools.update_wrapper(clone, function)
    clone.__kwdefaults__ = function.__kwdefaults__
    del clone.__dict__["__wrapped__"]
    return clone


def compiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    """The code of ``definition``, which was made from that of ``function``; its lines are where they were."""
    # that of the defaults and annotations is another
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
    """The forward that a family wrote, which transformers may have wrapped for checkpointing; None: it is decorated."""
    forward = cls.forward
    if isinstance(forward, FunctionType) and forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    plain = isinstance(forward, FunctionType) and not forward.__closure__ and not hasattr(forward, "__wrapped__")
    return forward if plain else None
