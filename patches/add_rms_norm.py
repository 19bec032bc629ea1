"""Recogniser for decoder layers that add to the residual stream and normalise the sum: one kernel does both.

The layer's class gets a copy of its own forward in which ``x = residual + y``, ``residual = x``, ``x = self.norm(x)``
become one assignment. If the norm has a hook, or the kernel would compute something else, sum and norm run separately.
"""

import ast
import functools
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_like.ops.rms_norm import add_rms_norm
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, where, with_methods
from liger_like.patches.forms import definition_of
from liger_like.patches.rewriting import compiled, plain_forward, with_names, with_renames
from liger_like.patches.rms_norm import MODES, RMSNorm, fusible

NAME = "_liger_like_add_and_normalise"
NORM = RMSNorm()


class Sites(NamedTuple):
    """Names of the norms that follow an addition, and the forward's code with one call for each addition and norm."""

    norms: tuple[str, ...]
    code: CodeType


class AddRMSNorm(Recogniser):
    """Recogniser for layers that normalise a residual sum with an RMSNorm."""

    pattern = "add_rms_norm"
    options = ("norm",)

    def looks_like(self, module: nn.Module) -> bool:
        """Return False: the report lists the norms by themselves."""
        return False

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the names of the norms' patterns, joined by commas. Raises UnrecognisedError."""
        cls: Any = type(module)
        variants = [NORM.variant(getattr(module, name), model) for name in _sites(cls).norms]
        if not {*variants} <= MODES.keys():
            raise UnrecognisedError("no kernel for its norms")
        return ", ".join(variants)

    def methods(self, cls: Any, variant: str) -> dict[str, Any]:
        """Return the forward of ``cls`` with one call for each addition and norm."""
        forward: Any = plain_forward(cls)
        return {"forward": with_renames(cls, with_names(forward, {NAME: _add_and_normalise}, _sites(cls).code))}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a layer that has only its norms, over 8 features."""
        cls: Any = type(module)
        names = zip(_sites(cls).norms, variant.split(", "), strict=True)
        return bare(cls, **{name: NORM.miniature(getattr(module, name), of_norm) for name, of_norm in names})

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with six rows, added and normalised by each of the norms."""
        cls: Any = type(module)
        norms = [getattr(module, name) for name in _sites(cls).norms]
        kinds = zip(norms, variant.split(", "), strict=True)
        patched = [with_methods(norm, NORM.methods(type(norm), of_norm)) for norm, of_norm in kinds]
        parameters = tuple(p for norm in norms for p in norm.parameters() if p.numel())

        def separate(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
            return tuple(y for norm in norms for y in (norm(residual + x), residual + x))

        def together(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
            return tuple(y for norm in patched for y in _add_and_normalise(norm, x, residual))

        inputs = tuple(random_like(parameters[0], 2, 3, parameters[0].numel()) for _ in range(2))
        return Trial(separate, together, inputs, parameters)


def _add_and_normalise(norm: Any, x: Any, residual: Tensor) -> tuple[Tensor, Tensor]:
    if fusible(norm) and isinstance(x, Tensor) and x.shape == residual.shape and x.dtype == residual.dtype:
        weight, eps, offset, casting_mode = norm.fused_arguments()
        return add_rms_norm(x, residual, weight, eps, offset=offset, casting_mode=casting_mode)
    total = residual + x
    return norm(total), total


@functools.cache
def _sites(cls: Any) -> Sites:
    """Find the additions followed by a norm. Raises UnrecognisedError if there are none."""
    forward, norms = plain_forward(cls), []
    if forward is None:
        raise UnrecognisedError(f"{where(cls.forward)} is decorated")
    definition = definition_of(forward)
    body = definition.body
    for index in reversed(range(len(body) - 2)):
        match body[index : index + 3]:
            case [
                ast.Assign(
                    targets=[ast.Name(id=total)], value=ast.BinOp(op=ast.Add(), left=ast.Name() as residual, right=y)
                ),
                ast.Assign(targets=[ast.Name(id=kept)], value=ast.Name(id=same)),
                ast.Assign(
                    targets=[ast.Name(id=normed)],
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id="self")) as norm, args=[ast.Name(id=given)], keywords=[]
                    ),
                ),
            ] if total == same == normed == given:
                targets = ast.Tuple([ast.Name(name, ast.Store()) for name in (total, kept)], ast.Store())
                call = ast.Call(ast.Name(NAME, ast.Load()), [norm, y, residual], [])
                body[index : index + 3] = [ast.copy_location(ast.Assign([targets], call), body[index])]
                norms.append(norm.attr)
    if not norms:
        raise UnrecognisedError(f"{where(forward)} does not normalise a residual sum that it keeps")
    return Sites(tuple(reversed(norms)), compiled(forward, definition, NAME))
