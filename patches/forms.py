"""Reduce a small pure function to its normal form: the one expression that it returns.

The reduction
* substitutes assignments, and writes assignments under an ``if`` as conditional expressions;
* writes a change in place of a local name (``x /= y``, ``x.scatter_(...)``) as the call whose result has that name;
* inlines calls of the class's own methods and of functions of the same module;
* sorts the operands of + and *, and unifies a few spellings;
* leaves out parameters that are never read, and numbers the attributes of ``self`` in order of appearance.
The form does not depend on names, annotations, docstrings or the division into statements. Two forwards of the same
form compute the same if their attributes do; the numbering says which attribute plays which role.
"""

import ast
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from liger_like.patches import UnrecognisedError, where


@dataclass(frozen=True)
class Form:
    """Normal form of a function: the expression as ``text``, and the names behind its numbers.

    ``attributes`` are the names of self's attributes, or of the parameters if there is no self, in order.
    """

    text: str
    attributes: tuple[str, ...]


@functools.cache
def form_of(function: Callable[..., Any], owner: Any = None) -> Form:
    """Return the form of a function, or of a method of class ``owner``. Raises UnrecognisedError if it has none."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise UnrecognisedError(f"{where(function)} is decorated, or is not a Python function")
    read = _read(function)
    names = [name for name in inspect.signature(function).parameters if name in read]
    arguments = {name: ast.Name(f"a{i}") for i, name in enumerate(names)}
    if owner is not None:
        arguments |= {name: ast.Name("self") for name in [*inspect.signature(function).parameters][:1]}
    expression = _returned(function, owner, dict(arguments))
    attributes: list[str] = []
    for node in _in_order(expression):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            if node.attr not in attributes:
                attributes.append(node.attr)
            node.attr = f"_{attributes.index(node.attr)}"
    return Form(ast.unparse(expression), tuple(names if owner is None else attributes))


def match(
    function: Callable[..., Any], owner: Any, patterns: tuple[Callable[..., Any], ...]
) -> tuple[str, dict[str, str]]:
    """Return the name of the pattern with the form of ``function``, and the names of ``function`` by role.

    A role is a name in the pattern. Its value is the attribute (of a method) or parameter of ``function`` in its place.
    Raises UnrecognisedError if no pattern has this form.
    """
    form = form_of(function, owner)
    for pattern in patterns:
        known = form_of(pattern, None if owner is None else object)
        if known.text == form.text:
            return pattern.__name__, dict(zip(known.attributes, form.attributes, strict=True))
    raise UnrecognisedError(f"{where(function)} matches no known form")


def _in_order(node: ast.AST) -> list[ast.AST]:
    return [node, *(below for child in ast.iter_child_nodes(node) for below in _in_order(child))]


def definition_of(function: FunctionType) -> ast.FunctionDef:
    """Return a fresh syntax tree of ``function``. Raises UnrecognisedError if it has no source."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise UnrecognisedError(f"{where(function)} has no source") from error
    definition, *_ = ast.parse(textwrap.dedent(source)).body
    if not isinstance(definition, ast.FunctionDef):
        raise UnrecognisedError(f"{where(function)} is not a plain function")
    return definition


@functools.cache
def code_of(function: Any) -> list[str]:
    """Return the statements of ``function`` without comments and docstring.

    Raises UnrecognisedError if it has none, or is decorated. They are compared where code has no form.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise UnrecognisedError(f"{where(function)} is decorated, or is not a Python function")
    return [ast.unparse(part) for part in definition_of(function).body if not _is_text(part)]


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def _read(function: FunctionType) -> set[str]:
    """Return the names that occur in the body of ``function``."""
    return {node.id for part in definition_of(function).body for node in ast.walk(part) if isinstance(node, ast.Name)}


def _returned(function: FunctionType, owner: type[Any] | None, names: dict[str, Any]) -> ast.expr:
    """Return the expression that ``function`` returns, with each name replaced by its expression in ``names``."""
    *assignments, last = definition_of(function).body
    if not isinstance(last, ast.Return) or last.value is None:
        raise UnrecognisedError(f"{where(function)} contains more than assignments and a return")
    _assign(assignments, function, owner, names)
    return _Substitute(function, owner, names).visit(last.value)  # type: ignore[no-any-return]


def _assign(statements: list[ast.stmt], function: FunctionType, owner: type[Any] | None, names: dict[str, Any]) -> None:
    """Update ``names`` with the expressions that ``statements`` assign."""
    substitute = _Substitute(function, owner, names).visit
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = substitute(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names[name] = substitute(value)
            case ast.AugAssign(target=ast.Name(id=name), op=operator, value=value):
                own, method = _owned(names, name, function), f"__i{type(operator).__name__.lower()}__"
                names[name] = ast.Call(ast.Attribute(own, method), [substitute(value)], [])
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) as value) if (
                method.endswith("_")
            ):
                _owned(names, name, function)
                names[name] = substitute(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                value = substitute(value)
                names.update(_unpacked(targets, value, function))
            case ast.If(test=test, body=body, orelse=orelse):
                condition, branches = substitute(test), (dict(names), dict(names))
                for block, branch in zip((body, orelse), branches, strict=True):
                    _assign(block, function, owner, branch)
                one, other = ({**dict.fromkeys(branches[1 - i]), **branch} for i, branch in enumerate(branches))
                for name in one:
                    if one[name] is not other[name]:
                        values = (branch[name] or ast.Name("unset") for branch in (one, other))
                        names[name] = ast.IfExp(condition, *values)
            case _:
                raise UnrecognisedError(f"{where(function)} contains more than assignments and a return")


def _owned(names: dict[str, Any], name: str, function: FunctionType) -> ast.expr:
    """Return the value of a local ``name`` that is changed in place. Raises UnrecognisedError if it may be shared."""
    texts = [ast.unparse(value) for value in (names.get(name, ast.Name(name)), *names.values())]
    if name in inspect.signature(function).parameters or texts.count(texts[0]) != 2:
        raise UnrecognisedError(f"{where(function)} changes {name} in place, which may have another name")
    return copy.deepcopy(names[name])  # type: ignore[no-any-return]


def _unpacked(targets: list[ast.expr], value: ast.expr, function: FunctionType) -> dict[str, ast.expr]:
    """Return the expression that each of ``targets``, at most one of them starred, is bound to."""
    starred = [isinstance(target, ast.Starred) for target in targets]
    names = [target.value if isinstance(target, ast.Starred) else target for target in targets]
    if not all(isinstance(name, ast.Name) for name in names):
        raise UnrecognisedError(f"{where(function)} contains more than assignments and a return")
    if isinstance(value, ast.Tuple) and not any(starred):
        parts: list[ast.expr] = value.elts
    else:
        first = starred.index(True) if any(starred) else len(targets)
        ends = [ast.Constant(i if i <= first else i - len(targets)) for i in range(len(targets) + 1)]
        rest = ast.Slice(ends[first] if first else None, ends[first + 1] if first + 1 < len(targets) else None)
        parts = [ast.Subscript(value, rest if star else end) for star, end in zip(starred, ends, strict=False)]
    return {ast.unparse(name): part for name, part in zip(names, parts, strict=True)}


class _Substitute(ast.NodeTransformer):
    """Transformer that replaces local names by their expressions, inlines calls and unifies spellings."""

    def __init__(self, function: FunctionType, owner: type[Any] | None, names: dict[str, Any]) -> None:
        self.function, self.owner, self.names = function, owner, names

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.NamedExpr):
            raise UnrecognisedError(f"{where(self.function)} has an inner scope: a lambda, a comprehension or :=")
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.names.get(node.id, node))

    def visit_Slice(self, node: ast.Slice) -> Any:
        self.generic_visit(node)
        if isinstance(node.lower, ast.Constant) and node.lower.value == 0:
            node.lower = None
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add | ast.Mult):
            # ignores attribute names, which differ between families; swapping two operands changes no result
            node.left, node.right = sorted(
                (node.left, node.right), key=lambda side: re.sub(r"self\.\w+", "self._", ast.unparse(side))
            )
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        # a list and a tuple are the same as an argument
        node.args = [ast.Tuple(arg.elts) if isinstance(arg, ast.List) else arg for arg in node.args]
        match node:
            case ast.Call(func=ast.Attribute(value=x, attr="float"), args=[]):
                return ast.Call(ast.Attribute(x, "to"), [ast.Attribute(ast.Name("torch"), "float32")], [])
            case ast.Call(func=ast.Attribute(value=x, attr="square"), args=[]):
                return ast.Call(ast.Attribute(x, "pow"), [ast.Constant(2)], [])
            case ast.Call(
                func=ast.Attribute(value=x, attr="to"), args=[], keywords=[ast.keyword(arg="dtype", value=y)]
            ):
                return ast.Call(ast.Attribute(x, "to"), [y], [])
            case ast.Call(func=ast.Attribute(value=x, attr="type_as"), args=[y]):
                return ast.Call(ast.Attribute(x, "to"), [ast.Attribute(y, "dtype")], [])
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self") as self_, attr=name)):
                callee, arguments = inspect.getattr_static(self.owner, name, None), [self_, *node.args]
            case ast.Call(func=ast.Name(id=name)):
                callee, arguments = self.function.__globals__.get(name), node.args
            case _:
                return node
        if not isinstance(callee, FunctionType) or callee.__module__ != self.function.__module__:
            return node
        parameters = list(inspect.signature(callee).parameters)
        if node.keywords or len(arguments) != len(parameters):
            raise UnrecognisedError(f"{where(self.function)} calls {name} with keyword arguments or defaults")
        return _returned(callee, self.owner, dict(zip(parameters, arguments, strict=True)))
