"""Recogniser for RMSNorms of queries and keys followed by a rotary function: one kernel does all three.

The attention class gets a copy of its own forward. In the copy, each call of a norm is replaced by its argument, and
the rotary call by a function that takes the norms as well. If the kernel would compute something else, or if a norm has
a hook, that function calls norms and rotary function separately.
"""

import ast
import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_like.ops.qk_norm_rope import qk_norm_rope
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, where, with_methods
from liger_like.patches.forms import definition_of
from liger_like.patches.projections import NAMES, together
from liger_like.patches.rewriting import plain_forward, with_names, with_renames
from liger_like.patches.rms_norm import MODES, RMSNorm, fusible
from liger_like.patches.rope import BY_NAME, Rope, adapter, functions_of, replacement, tables_of

NAME = "_liger_like_norm_and_rotate"
ROPE, NORM = Rope(), RMSNorm()


class Sites(NamedTuple):
    """Names of a forward's two norms and of its rotary function, and the rewritten code of the forward."""

    norms: tuple[str, str]
    rotary: str
    code: CodeType


class QKNormRope(Recogniser):
    """Recogniser for attention that applies RMSNorm to each head of queries and keys, then one rotary function."""

    pattern = "qk_norm_rope"
    options = ("rope", "norm")

    def looks_like(self, module: nn.Module) -> bool:
        """Return False: if they are not fused, the report lists norms and rotary function by themselves."""
        return False

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the pattern of the norms and of the rotary function, as "norm; rotary". Raises UnrecognisedError."""
        rotary = ROPE.variant(module, model)
        q_norm, k_norm = (getattr(module, name) for name in _sites_of(module).norms)
        variants = [NORM.variant(norm, model) for norm in (q_norm, k_norm)]
        if variants[0] != variants[1] or type(q_norm) is not type(k_norm) or variants[0] not in MODES:
            raise UnrecognisedError("no kernel for its norms")
        return f"{variants[0]}; {rotary}"

    def methods(self, cls: Any, variant: str) -> dict[str, Any]:
        """Return the forward of ``cls`` without the norms and with another rotary function."""
        sites: Sites = _sites(cls)
        changed = NAMES | {NAME: _norm_and_rotate(functions_of(cls)[sites.rotary])}
        forward: Any = plain_forward(cls)
        return {"forward": with_renames(cls, with_names(forward, changed, sites.code))}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return an attention that has only its norms, over 8 features."""
        sites = _sites_of(module)
        norms = {name: NORM.miniature(getattr(module, name), variant.split("; ")[0]) for name in sites.norms}
        return bare(type(module), **norms)

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of norms and rotary function alone, with 3 query heads, 2 key heads and 5 positions."""
        sites = _sites_of(module)
        original = functions_of(type(module))[sites.rotary]
        norms = [getattr(module, name) for name in sites.norms]
        of_norms, of_rotary = variant.split("; ")
        patched = [with_methods(norm, NORM.methods(type(norm), of_norms)) for norm in norms]
        parameters = tuple(p for norm in norms for p in norm.parameters() if p.numel())
        kind, width = BY_NAME[of_rotary], parameters[0].numel()
        tables = tables_of(kind, width // 4 * 2 if kind.partial else width, parameters[0]).values()
        shapes = [(2, h, 5, width) if kind.dim == 1 else (2, 5, h, width) for h in (3, 2)]
        fused = functools.partial(_norm_and_rotate(original), *patched)

        def separate(q: Tensor, k: Tensor) -> Any:
            return original(norms[0](q), norms[1](k), *tables)

        def together(q: Tensor, k: Tensor) -> Any:
            return fused(q, k, *tables)

        return Trial(separate, together, tuple(random_like(parameters[0], *shape) for shape in shapes), parameters)


def _norm_and_rotate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f(q_norm, k_norm, *args)``, where ``args`` are the arguments of the rotary function ``original``."""
    rotate, fitted = replacement(original), adapter(original)

    def norm_and_rotate(q_norm: Any, k_norm: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        if fusible(q_norm) and fusible(k_norm):
            q_weight, *options = q_norm.fused_arguments()
            k_weight, *same = k_norm.fused_arguments()
            if options == same and q.dtype == k.dtype == q_weight.dtype == k_weight.dtype:
                eps, offset, casting_mode = options

                def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **layouts: Any) -> Any:
                    # q was cast to the wider dtype of heads and tables, but the norms round to their weight's dtype
                    if q.dtype != q_weight.dtype:
                        return None
                    options = {"offset": offset, "casting_mode": casting_mode, **layouts}
                    return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, **options)

                rotated = fitted(turn, (q, k, *args), kwargs)
                if rotated is not None:
                    return rotated
        return rotate(q_norm(q), k_norm(k), *args, **kwargs)

    return norm_and_rotate


def _sites_of(module: nn.Module) -> Sites:
    cls: Any = type(module)
    return _sites(cls)


@functools.cache
def _sites(cls: Any) -> Sites:
    """Find norms and rotary call in the forward of ``cls``, and rewrite its code.

    Raises UnrecognisedError unless queries and keys are normalised, at most transposed, and then rotated.
    """
    forward = plain_forward(cls)
    if forward is not None:
        definition = definition_of(forward)
        for index, statement in enumerate(definition.body):
            match statement:
                case ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=q), ast.Name(id=k)])],
                    value=ast.Call(func=ast.Name(id=rotary), args=[ast.Name(id=old_q), ast.Name(id=old_k), *_]) as call,
                ) if [*functions_of(cls)] == [rotary] and (q, k) == (old_q, old_k):
                    norms = [_norm_of(name, definition.body[:index]) for name in (q, k)]
                    if None not in norms:
                        names = norms[0].func.attr, norms[1].func.attr
                        return Sites(names, rotary, together(forward, _Rewrite(norms, call).visit(definition), NAME))
    raise UnrecognisedError(f"{where(cls.forward)} does not rotate queries and keys right after their norms")


def _norm_of(name: str, statements: list[ast.stmt]) -> Any:
    """Return the call of the norm that made ``name``, or None if ``name`` was since used in another way.

    Transposing the dimensions 1 and 2 is allowed.
    """
    for statement in reversed(statements):
        if not any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            continue
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != name:
            return None
        value: Any = statement.value
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and ast.unparse(value).endswith(".transpose(1, 2)")
        ):
            value = value.func.value
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self")), args=[_], keywords=[]):
                return value
            case ast.Name(id=same) if same == name:
                continue
        return None
    return None


class _Rewrite(ast.NodeTransformer):
    """Transformer that removes the calls of ``norms`` and passes the norms to the replacement of ``rotary_call``."""

    def __init__(self, norms: list[ast.Call], rotary_call: ast.Call) -> None:
        self.norms, self.rotary_call = norms, rotary_call

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if node in self.norms:
            return node.args[0]
        if node is self.rotary_call:
            node.func, node.args = ast.Name(NAME, ast.Load()), [*(norm.func for norm in self.norms), *node.args]
        return node
