"""Let a rewritten forward compute its projections of one input at once, which is one kernel in decode steps."""

import ast
from itertools import groupby
from types import CodeType, FunctionType
from typing import Any

from liger_like.ops.few_rows import linears
from liger_like.patches.rewriting import compiled

NAMES = {"_liger_like_linears": linears}  # names of the rewritten code
RESULTS = "_liger_like_projections"
UNSURE = ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension | ast.NamedExpr  # these may not call, or call again


def together(forward: FunctionType, definition: ast.FunctionDef, *names: str) -> CodeType:
    """Return the code of ``definition``, a tree of ``forward``, with ``names`` and ``NAMES`` as free variables.

    Consecutive statements that each call another part of self on the same name get the results of one call:
    ``q = self.q(x).view(shape); k = self.k(x)`` becomes
    ``results = linears(x, self.q, self.k); q = results.pop(0).view(shape); k = results.pop(0)``.
    """
    groups = [
        calls
        for node in ast.walk(definition)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(body, list)
        for calls in _groups(body)
    ]
    return compiled(forward, _Together(groups).visit(definition), *NAMES, *names)


def _groups(body: list[ast.stmt]) -> list[dict[ast.stmt, ast.Call]]:
    """Return the calls of projections by statement, for each run of several that have the same argument."""
    calls = [(statement, _projection(statement)) for statement in body]
    runs = [dict(run) for _, run in groupby(calls, lambda each: each[1] and ast.unparse(each[1].args[0]))]
    parts = [{ast.unparse(call.func) for call in run.values() if call is not None} for run in runs]
    return [run for run, names in zip(runs, parts, strict=True) if len(run) == len(names) > 1]  # type: ignore[misc]


def _projection(statement: ast.stmt) -> ast.Call | None:
    """Return the call of a part of self on a name that ``statement`` assigns, if it uses the name but once."""
    code = [*ast.walk(statement)]
    calls: list[Any] = [node for node in code if _is_projection(node)]
    if not isinstance(statement, ast.Assign) or len(calls) != 1 or any(isinstance(node, UNSURE) for node in code):
        return None
    call: ast.Call = calls[0]
    (argument,) = calls[0].args
    uses = [node for node in code if isinstance(node, ast.Name) and node.id == argument.id]
    return call if len(uses) == 1 else None


def _is_projection(node: Any) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self")), args=[ast.Name()], keywords=[]):
            return True
    return False


class _Together(ast.NodeTransformer):
    """Transformer that puts one call before each group of calls, and its results in their places."""

    def __init__(self, groups: list[dict[ast.stmt, ast.Call]]) -> None:
        self.first = {next(iter(group)): [*group.values()] for group in groups}
        self.calls = {call for group in groups for call in group.values()}

    def visit_Assign(self, node: ast.Assign) -> Any:
        calls = self.first.get(node)
        self.generic_visit(node)
        if calls is None:
            return node
        (name,) = NAMES
        value = ast.Call(ast.Name(name, ast.Load()), [calls[0].args[0], *(call.func for call in calls)], [])
        assigned = ast.Assign([ast.Name(RESULTS, ast.Store())], value)
        return [ast.copy_location(assigned, node), node]

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if node not in self.calls:
            return node
        # the list does not hold a result any longer than the forward does
        return ast.Call(ast.Attribute(ast.Name(RESULTS, ast.Load()), "pop", ast.Load()), [ast.Constant(0)], [])
