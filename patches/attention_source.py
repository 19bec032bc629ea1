"""Read the source of an attention's forward: its arguments to transformers' interface, and its use of masks."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from liger_like.patches import UnrecognisedError, bare, where
from liger_like.patches.foreign import foreign_decorator

# functions of transformers that make a mask; others look for padding, as for chunks
MAKERS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_recurrent_attention_mask"}
# calls that a count of positions may consist of
COUNTING = {"arange", "expand", "get_seq_length", "repeat", "unsqueeze", "view"}


def eager_function(cls: type[Any]) -> Callable[..., Any] | None:
    """Return the eager function that the forward of ``cls`` passes to transformers' interface, or None."""
    forward = inspect.unwrap(cls.forward)
    if not isinstance(forward, FunctionType) or "get_interface" not in forward.__code__.co_names:
        return None
    names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    # some Python modules define two, with a prefix in the name: one for text and one for images
    return forward.__globals__.get(names[0]) if names else None


@functools.cache
def tree_of(function: Callable[..., Any]) -> ast.AST:
    """Parse ``function`` beneath its decorators. Raises UnrecognisedError if it has no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError) as error:  # the source of a lambda may be part of an expression
        raise UnrecognisedError(f"{where(function)} has no source") from error


def looks_into_its_mask(cls: Any) -> bool:
    """Return True if the forward of ``cls`` does more with its mask than pass it to the interface.

    A Mask is not a tensor and cannot be sliced, extended or combined. Code that runs only for the eager implementation
    does not count.
    """
    masks = {name for name in inspect.signature(inspect.unwrap(cls.forward)).parameters if "mask" in name}
    pending, uses = [tree_of(cls.forward)], []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "eager" in ast.unparse(node.test):
            pending += [node.test, *node.orelse]
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "attention_interface":
            uses += [*node.args, *[keyword.value for keyword in node.keywords]]
        elif isinstance(node, ast.Attribute | ast.Subscript):
            uses.append(node.value)
        elif isinstance(node, ast.BinOp):
            uses += [node.left, node.right]
    return any(isinstance(use, ast.Name) and use.id in masks for use in uses)


@functools.cache
def looks_into_a_mask_it_makes(cls: Any) -> bool:
    """Return True if the forward of ``cls`` does more with a mask that transformers made than pass it on.

    An index into a dict of masks only picks one. A sum with a mask, or a call of torch with one, does more.
    """
    code = [*ast.walk(tree_of(cls.forward))]
    made = {
        ast.unparse(node.targets[0]): node
        for node in code
        if isinstance(node, ast.Assign) and re.match(r"({.*)?create_\w*mask\(", ast.unparse(node.value))
    }
    dicts = {name for name, node in made.items() if isinstance(node.value, ast.Dict)}
    read = [node.value for node in code if isinstance(node, ast.Attribute | ast.Subscript)]
    uses = [use for use in read if ast.unparse(use) not in dicts]
    for node in code:
        if isinstance(node, ast.BinOp):
            uses += [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            uses += [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    return any(isinstance(use, ast.Name) and use.id in made and use.lineno > made[use.id].lineno for use in uses)


def only_makes_masks(forward: Callable[..., Any]) -> bool:
    """Return True if ``forward`` counts positions that it is not given, and only makes masks of its mask.

    It does so by MAKERS, which look at no more of a mask than that it does not have two dimensions.
    """
    forward = inspect.unwrap(forward)
    return isinstance(forward, FunctionType) and _only_makes_masks(forward, _makers(forward))


def _makers(forward: FunctionType) -> frozenset[str]:
    """Return the names by which ``forward`` finds MAKERS of transformers; other code may have its own functions."""
    own = {*forward.__code__.co_varnames, *forward.__code__.co_cellvars}
    return frozenset(name for name in MAKERS - own if _is_maker(forward.__globals__.get(name)))


def _is_maker(function: Any) -> bool:
    theirs = getattr(inspect.unwrap(function), "__module__", None) == "transformers.masking_utils"
    return theirs and not foreign_decorator(function)


@functools.cache
def _only_makes_masks(forward: FunctionType, makers: frozenset[str]) -> bool:
    if not {"attention_mask", "position_ids"} <= {*[*inspect.signature(forward).parameters][2:]}:
        return False
    try:
        code = [*ast.walk(tree_of(forward))]
    except UnrecognisedError:
        return False
    counted = [node for node in code if isinstance(node, ast.If) and ast.unparse(node.test) == "position_ids is None"]
    above = {part: node for node in code for part in ast.iter_child_nodes(node)}
    passed = {"attention_mask"}
    assigned = (node for node in code if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    for node in sorted(assigned, key=lambda node: node.lineno):
        match node.value:
            case ast.IfExp(body=ast.Name(id=one), orelse=ast.Name(id=other)) if {one, other} <= makers:
                makers |= {ast.unparse(node.targets[0])}
            case ast.Dict(values=values) if passed & {*map(ast.unparse, values)}:
                passed.add(ast.unparse(node.targets[0]))
    read = [node for node in code if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    made = bool(counted) and all(_counts(node.body) for node in counted)
    return made and all(_is_for_a_mask(node, above, makers) for node in read if node.id in passed)


def _counts(body: list[ast.stmt]) -> bool:
    """Return True if ``body`` computes positions that rise by one: a range, perhaps moved and of another shape."""
    code = [node for each in body for node in ast.walk(each)]
    calls = [node for node in code if isinstance(node, ast.Call)]
    names = [getattr(call.func, "attr", "") for call in calls]
    ranges = [call for call, name in zip(calls, names, strict=True) if name == "arange"]
    moved = all(isinstance(node.op, ast.Add) for node in code if isinstance(node, ast.BinOp | ast.AugAssign))
    return moved and {*names} <= COUNTING and bool(ranges) and all(len(call.args) < 3 for call in ranges)


def _is_for_a_mask(node: ast.AST, above: dict[ast.AST, ast.AST], makers: frozenset[str]) -> bool:
    """Return True if ``node`` is an argument of ``makers``, or of the question whether it is a dict."""
    match above[node]:
        case ast.Dict(keys=keys, values=values) as together:
            to: Any = above[together]
            named = isinstance(to, ast.Assign) and [type(target) for target in to.targets] == [ast.Name]
            return named and _is_plain([ast.unparse(key).strip("'") if key else "" for key in keys], values)
        case ast.NamedExpr(target=ast.Name(id=name)) as alias:  # if not isinstance(name := mask, dict): name = ...
            negated: Any = above[above[alias]]
            asked: Any = above[negated]
            body = asked.body if isinstance(asked, ast.If) and isinstance(negated, ast.UnaryOp) else []
            replaced = [ast.unparse(each.targets[0]) for each in body if isinstance(each, ast.Assign)]
            return name in replaced and _is_for_a_mask(alias, above, makers)
        case ast.keyword(arg=None | "attention_mask") as keyword:
            call: Any = above[keyword]
            plain = _is_plain([each.arg or "" for each in call.keywords], [each.value for each in call.keywords])
            return ast.unparse(call.func) in makers and not call.args and plain
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="dict")]):
            return True
    return False


def _is_plain(names: list[str], values: list[ast.expr]) -> bool:
    """Return True if arguments of a maker have no blocks to overlay, and the config whose attention is ours."""
    given = dict(zip(names, map(ast.unparse, values), strict=True))
    return "block_sequence_ids" not in given and given.get("config", "self.config") == "self.config"


@functools.cache
def keywords_of(cls: Any) -> dict[str, Any]:
    """Return the compiled keyword arguments that the forward of ``cls`` gives the interface, by name.

    Raises UnrecognisedError if the forward does not call ``attention_interface``.
    """
    calls = [node for node in ast.walk(tree_of(cls.forward)) if isinstance(node, ast.Call)]
    keywords = [k for call in calls if ast.unparse(call.func) == "attention_interface" for k in call.keywords]
    if not keywords:
        raise UnrecognisedError(f"{where(cls.forward)} does not call attention_interface")
    return {k.arg: compile(ast.Expression(k.value), k.arg, "eval") for k in keywords if k.arg is not None}


def options_of(module: nn.Module, wanted: set[str]) -> dict[str, Any]:
    """Return the values that ``module`` passes in training for the keywords ``wanted``. Raises UnrecognisedError."""
    cls: Any = type(module)
    keywords = keywords_of(cls)
    trained = bare(cls)
    vars(trained).update(vars(module), training=True)
    names = inspect.unwrap(cls.forward).__globals__ | {"self": trained}
    try:
        return {name: eval(keywords[name], names) for name in wanted & keywords.keys()}
    except (NameError, AttributeError) as error:
        raise UnrecognisedError(f"its attention options cannot be computed before the forward: {error}") from error
