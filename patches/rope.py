"""Recogniser for rotary embeddings: the forward calls module-level functions on heads and tables of cos and sin.

The attention class gets a copy of its own forward that finds other functions under these global names. The Python
module keeps its functions, so no other model changes, and a recomputed checkpoint runs the same forward.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.rope import rope
from liger_like.patches import Recogniser, Trial, UnrecognisedError, bare, random_like, where
from liger_like.patches.forms import definition_of, match
from liger_like.patches.projections import NAMES, together
from liger_like.patches.rewriting import rewrapped, with_names, without_renames
from liger_like.patches.rotary_functions import KINDS, PATTERNS, Kind

BY_NAME = {pattern.__name__: kind for pattern, kind in KINDS.items()}


class Rope(Recogniser):
    """Recogniser for attention modules whose rotary functions all have the form of one of PATTERNS."""

    pattern = "rope"
    options = ("rope",)

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for modules whose forward calls a rotary function."""
        return bool(functions_of(type(module)))

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return the names of the rotary functions' patterns, joined by commas. Raises UnrecognisedError."""
        cls = type(module)
        functions = functions_of(cls)
        if not functions:
            raise UnrecognisedError("calls no rotary function")
        variants = [match(function, None, PATTERNS)[0] for function in functions.values()]
        _undecorated(cls)
        for tables in {BY_NAME[variant].tables for variant in variants} & {"full", "repeat"}:
            _require_tables(tables, module, model)
        return ", ".join(variants)

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward of ``cls`` with its rotary functions replaced, and its projections at once."""
        forward, decorate = _undecorated(cls)
        names = NAMES | _replacements(cls)
        code = together(forward, definition_of(forward), *names)
        return {"forward": decorate(with_names(forward, names, code))}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a module with an empty weight, for its dtype: the trial runs only the functions."""
        return bare(type(module), weight=nn.Parameter(torch.empty(0, device="cpu", dtype=torch.float32)))

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of the functions alone, with 3 query and 2 key heads of 8 features and 5 positions."""
        originals, replacements = functions_of(type(module)), _replacements(type(module))
        parameter = next(module.parameters())
        calls = []
        for name, pattern in zip(originals, variant.split(", "), strict=True):
            _, names = match(originals[name], None, PATTERNS)
            kind = BY_NAME[pattern]
            calls.append((name, names, tables_of(kind, 4 if kind.partial else 8, parameter), kind.dim))
        dims = {dim for *_, dim in calls}
        if len(dims) > 1:
            raise UnrecognisedError("its rotary functions expect the heads in different dimensions")
        shapes = [(2, h, 5, 8) if dims == {1} else (2, 5, h, 8) for h in (3, 2)]

        def run(functions: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            outputs: list[Tensor] = []
            for name, names, tables, _ in calls:
                given = {names[role]: table for role, table in tables.items()}
                if "k" in names:
                    outputs += functions[name](**{names["q"]: q, names["k"]: k}, **given)
                else:
                    outputs += [functions[name](**{names["q"]: x}, **given) for x in (q, k)]
            return tuple(outputs)

        inputs = tuple(random_like(parameter, *shape) for shape in shapes)
        return Trial(functools.partial(run, originals), functools.partial(run, replacements), inputs)


def _undecorated(cls: Any) -> tuple[FunctionType, Callable[..., Any]]:
    """Return the forward of ``cls`` without its decorators, and a function that decorates another forward so.

    Raises UnrecognisedError for a decorator other than torch.no_grad() and new names of arguments.
    """
    decorate = functools.partial(rewrapped, cls.forward)
    forward = without_renames(cls.forward)
    if hasattr(forward, "__wrapped__"):
        context = inspect.getclosurevars(forward).nonlocals.get("ctx_factory")
        if isinstance(getattr(context, "__self__", None), torch.no_grad):
            forward = without_renames(forward.__wrapped__)
    if hasattr(forward, "__wrapped__"):
        raise UnrecognisedError(f"{where(cls.forward)} is decorated")
    return forward, decorate


def functions_of(cls: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the global functions that the forward of ``cls`` calls and whose names contain "rotary" or "rope"."""
    forward = inspect.unwrap(cls.forward)
    if not isinstance(forward, FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if "rotary" in name or "rope" in name]
    return {name: forward.__globals__[name] for name in names if callable(forward.__globals__.get(name))}


def _replacements(cls: type[Any]) -> dict[str, Callable[..., Any]]:
    return {name: replacement(function) for name, function in functions_of(cls).items()}


def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of ``original`` that runs ``rope``, or ``original`` if they do not fit."""
    fitted = adapter(original)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = fitted(rope, args, kwargs)
        return original(*args, **kwargs) if rotated is None else rotated

    return rotate


def adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f(turn, args, kwargs)``, which maps the arguments of ``original`` onto ``turn``.

    ``turn`` has the signature of ``rope``, and may return None. ``f`` returns None if the arguments do not fit.
    """
    variant, names = match(original, None, PATTERNS)
    kind, parameters = BY_NAME[variant], [*inspect.signature(original).parameters]

    def fitted(turn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        heads = [given[names[role]] for role in ("q", "k") if role in names]
        if kind.tables == "complex":
            cos, sin = torch.view_as_real(given[names["angles"]]).unbind(-1)
        else:
            cos, sin = given[names["cos"]], given[names["sin"]]
        dim = given.get(names["unsqueeze_dim"], kind.dim) if "unsqueeze_dim" in names else kind.dim
        turned = _turned(turn, kind, heads, cos, sin, dim)
        return turned[0] if turned is not None and len(heads) == 1 else turned

    return fitted


# (dimensions of heads, dimensions of tables, unsqueezed dimension) -> (heads lack a batch, unsqueeze_dim of ``rope``)
PLACES = {
    (4, 3, 1): (False, 1),
    (4, 3, 2): (False, 2),
    (4, 3, -2): (False, 2),
    (4, 2, 0): (False, 1),
    (3, 2, 1): (True, 2),
    (3, 2, -2): (True, 2),
}


def _turned(
    turn: Callable[..., Any], kind: Kind, heads: list[Tensor], cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor] | None:
    """Return the rotated queries and keys in the dtypes of ``kind``, or None if the shapes do not fit.

    ``heads`` has one or two tensors; for one, the second result is empty.
    """
    place = PLACES.get((heads[0].dim(), cos.dim(), unsqueeze_dim))
    if place is None or heads[0].dim() != heads[-1].dim() or heads[0].shape[-1] != heads[-1].shape[-1]:
        return None
    unbatched, dim = place
    if unbatched:
        heads = [x.unsqueeze(0) for x in heads]
    batch, tokens, width = heads[0].shape[0], 3 - dim, cos.shape[-1] * (2 if kind.tables in ("half", "complex") else 1)
    fits = all(x.shape[0] == batch and x.shape[tokens] == cos.shape[-2] for x in heads)
    fits = fits and (cos.dim() == 2 or cos.shape[0] in (1, batch)) and cos.shape == sin.shape
    if not fits or width > heads[0].shape[-1] or (width < heads[0].shape[-1] and not kind.partial):
        return None
    if kind.rounds is None:
        heads = [x.to(torch.promote_types(x.dtype, cos.dtype)) for x in heads]
    elif kind.rounds == "first" and heads[0].dtype != heads[-1].dtype:
        return None
    # ``turn`` takes two tensors: a single one is paired with an empty one
    q, k = heads if len(heads) == 2 else (heads[0], heads[0].narrow(dim, 0, 0))
    cos_layout = {"first": "full", "complex": "half"}.get(kind.tables, kind.tables)
    sin = sin if kind.sign > 0 else -sin
    turned: tuple[Tensor, Tensor] | None = turn(
        q, k, cos, sin, layout=kind.layout, cos_layout=cos_layout, unsqueeze_dim=dim, rotary_dim=width
    )
    if turned is None or not unbatched:
        return turned
    return turned[0].squeeze(0), turned[1].squeeze(0)


def tables_of(kind: Kind, width: int, like: Tensor) -> dict[str, Tensor]:
    """Return the tables of 5 positions for a rotation of ``width`` features, by role (cos and sin, or angles)."""
    angles = torch.arange(5, device="cpu")[None, :, None] / 10 ** torch.linspace(0, 2, width // 2, device="cpu")
    if kind.tables == "complex":
        return {"angles": torch.polar(torch.ones_like(angles), angles).to(like.device)}
    if kind.tables == "repeat":
        angles = angles.repeat_interleave(2, dim=-1)
    elif kind.tables != "half":
        angles = torch.cat((angles, angles if kind.tables == "full" else angles.square()), dim=-1)
    return {name: table.to(like) for name, table in (("cos", angles.cos()), ("sin", angles.sin()))}


def _require_tables(tables: str, module: nn.Module, model: nn.Module) -> None:
    """Raise UnrecognisedError unless the rotary embeddings nearest to ``module`` return tables of this layout.

    The embeddings are rebuilt from their config: the live ones may be on the meta device, and some change as they run.
    """
    for embedding in _rotary_embeddings(module, model):
        cls: Any = type(embedding)
        built, called = (inspect.signature(function).parameters for function in (cls.__init__, cls.forward))
        needed = {name for name, parameter in built.items() if parameter.default is parameter.empty} - {"self"}
        config, names = getattr(embedding, "config", None), [*called]
        if needed != {"config"} or config is None or names not in (_CALLED, [*_CALLED, "layer_type"]):
            raise UnrecognisedError(f"{where(cls)} is not built from a config alone and called on (x, position_ids)")
        try:
            with torch.device("cpu"):
                found = _tables(cls(config), "layer_type" in called)
        except Exception as error:  # the model's own code may raise anything; the model would not run either
            raise UnrecognisedError(f"{where(cls)} raises {type(error).__name__}: {error}") from error
        for table in found:
            parts = table.chunk(2, dim=-1) if tables == "full" else (table[..., ::2], table[..., 1::2])
            if not torch.equal(*parts):
                raise UnrecognisedError(f"the {_PARTS[tables]} of {cls.__name__}'s cos or sin differ")


def _tables(embedding: Any, layered: bool) -> list[Tensor]:
    """Return cos and sin of 3 positions from ``embedding``; if ``layered``, for each type of layer."""
    ids = torch.arange(3)[None]
    if hasattr(embedding, "mrope_section"):  # needs ids for time, height and width
        ids = ids.expand(3, 1, 3)
    kinds = [{"layer_type": kind} for kind in embedding.rope_type] if layered else [{}]
    return [table for kind in kinds for table in embedding(torch.zeros(1), ids, **kind)]


_CALLED = ["self", "x", "position_ids"]
_PARTS = {"full": "halves", "repeat": "neighbours"}


def _rotary_embeddings(module: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings in the smallest part of ``model`` that contains ``module`` and an embedding."""
    names = {part: name for name, part in model.named_modules()}
    embeddings = {name: part for part, name in names.items() if re.search("Rotary.*Embedding", type(part).__name__)}
    path = names[module].split(".")
    for depth in reversed(range(len(path))):
        prefix = "".join(f"{name}." for name in path[:depth])
        found = [part for name, part in embeddings.items() if name.startswith(prefix)]
        if found:
            return found
    raise UnrecognisedError("the model has no rotary embedding module")
