"""Patching of Hugging Face models: modules that are recognised run kernels, everything else is left alone and reported.

A module is patched by giving it a subclass of its own class, of the same name, that overrides its forward; attention is
patched by giving the modules of a model a view of their config that names another implementation. ``unpatch`` gives
class and config back. Nothing else of the model changes and nothing outside of it. What is recognised, and what runs in
its place, is in ``liger_like.patches``.
"""

import dataclasses
import functools
import logging
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_like.patches import (
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    attention,
    bound_forwards,
    foreign_forward,
    where,
)
from liger_like.patches.glu_mlp import GLUMLP, Experts
from liger_like.patches.layer_norm import LayerNorm
from liger_like.patches.lm_head import LMHead
from liger_like.patches.qk_norm_rope import QKNormRope
from liger_like.patches.rms_norm import RMSNorm
from liger_like.patches.rope import Rope

ATTENTION = attention.Attention()
PATCHED, ALREADY, SKIPPED, ABSENT = "patched", "already patched", "skipped", "absent"
# In this order: a module is patched by the first that recognises it. Not among them, as it has not been measured to be
# faster in a whole model: patches.add_rms_norm.
RECOGNISERS: dict[str, Recogniser] = {
    recogniser.pattern: recogniser
    for recogniser in (RMSNorm(), LayerNorm(), QKNormRope(), Rope(), GLUMLP(), Experts(), LMHead())
}

_log = logging.getLogger(__name__)
_confirmed: set[tuple[type[Any], str, str]] = set()


class _Origin(NamedTuple):
    """What a patched class was made from."""

    cls: type[Any]
    pattern: str
    variant: str


@dataclass(frozen=True)
class Row:
    """``count`` modules of one class that met one fate.

    ``status`` is "patched", "already patched", "skipped" (looks like the pattern, left alone: ``reason`` says why) or
    "absent" (the model has no such thing, or liger_like has nothing for it). ``error`` is the largest relative
    difference between original and replacement that verify="numeric" found.
    """

    pattern: str
    cls: str
    variant: str
    count: int
    status: str
    reason: str = ""
    error: float | None = None


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` did to ``model``: print it, read its ``rows``, or use it as a context manager that unpatches."""

    model: nn.Module = dataclasses.field(repr=False)
    rows: tuple[Row, ...]

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows of modules that run kernels."""
        return tuple(row for row in self.rows if row.status in (PATCHED, ALREADY))

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The other rows."""
        return tuple(row for row in self.rows if row.status not in (PATCHED, ALREADY))

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain data."""
        return {"model": type(self.model).__name__, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def unpatch(self) -> None:
        """``unpatch`` the model."""
        unpatch(self.model)

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        """A table, one line per row."""
        lines = [tuple(field.name for field in dataclasses.fields(Row))]
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:.1e}"
            lines.append((row.pattern, row.cls, row.variant, str(row.count), row.status, row.reason, error))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def patch(
    model: nn.Module,
    *,
    norm: bool = True,
    rope: bool = True,
    mlp: bool = True,
    attention: bool = True,
    loss: bool = True,
    strict: bool = False,
    verify: str = "fingerprint",
) -> PatchReport:
    """Let every recognised module of ``model`` run a kernel; what the model computes and how it is used stay the same.

    A module is recognised by the form of its forward, confirmed by running original and replacement on a small module
    of its class; ``verify="numeric"`` also runs both on the module itself, forward and backward, and leaves it alone if
    they differ. In training with labels the loss is computed without logits, and the output's ``logits`` are None.
    Attention obeys the masks that eager attention has, and where attention weights are wanted, eager attention computes
    them. Calling it again patches what was not patched before.

    Raises TypeError if ``model`` is no torch.nn.Module; ValueError for an unknown ``verify``, or with ``strict=True``
    if a module that looks like a pattern would be left alone; then nothing is patched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if verify not in ("fingerprint", "numeric"):
        raise ValueError(f"verify must be 'fingerprint' or 'numeric', got {verify!r}")
    wanted = {"norm": norm, "rope": rope, "mlp": mlp, "loss": loss}
    rows: list[Row] = []
    swaps: dict[nn.Module, type[Any]] = {}
    for option in filter(wanted.get, wanted):
        recognisers = [recogniser for recogniser in RECOGNISERS.values() if recogniser.options[0] == option]
        before = len(rows)
        for recogniser in recognisers:
            on = all(wanted[name] for name in recogniser.options)
            others = (m for m in model.modules() if m not in swaps and (on or _origin(m) is not None))
            found = [fate for module in others for fate in _examine(recogniser, module, model, verify)]
            rows += _grouped([row for row, _ in found])
            swaps.update(swap for _, swap in found if swap is not None)
        if len(rows) == before:
            patterns = ", ".join(recogniser.pattern for recogniser in recognisers)
            rows.append(Row(patterns, "", "", 0, ABSENT, "the model has none"))
    configs: dict[int, bool] = {}
    if attention:
        found_attention, configs = _examine_attention(model, verify)
        rows += found_attention or [Row(ATTENTION.pattern, "", "", 0, ABSENT, "the model has none")]
    report = PatchReport(model, tuple(rows))
    if strict and any(row.status == SKIPPED for row in rows):
        raise ValueError(f"strict=True, but modules would be left alone:\n{report}")
    for module, cls in swaps.items():
        _become(module, cls)
    if any(configs.values()):
        _give_views(model, configs)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every patched module of ``model`` its own class back; harmless where nothing is patched.

    Raises TypeError if ``model`` is no torch.nn.Module; RuntimeError if another library has since put its own class on
    top of a patched one (FSDP2's fully_shard does).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    patched = [module for module in model.modules() if _origin(module) is not None]
    for module in patched:
        if "_liger_like" not in vars(type(module)):
            raise RuntimeError(f"{where(type(module))} was put on top of a patched class; undo that first")
    for module in patched:
        origin = type(module)._liger_like  # type: ignore[attr-defined]
        _become(module, origin.cls)
        RECOGNISERS[origin.pattern].forget(module)
    for module in model.modules():
        original = getattr(vars(module).get("config"), "_liger_like_original", None)
        if original is not None:
            module.config = original


class AutoModelForCausalLM:
    """``transformers.AutoModelForCausalLM``, patched after loading; what was left alone is logged as a warning."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        from transformers import AutoModelForCausalLM as Auto

        return _patched(Auto.from_pretrained(*args, **kwargs))

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        from transformers import AutoModelForCausalLM as Auto

        return _patched(Auto.from_config(*args, **kwargs))  # type: ignore[no-untyped-call]


def _patched(model: nn.Module) -> nn.Module:
    report = patch(model)
    if any(row.status == SKIPPED for row in report.rows):
        _log.warning("some modules of %s were left alone:\n%s", type(model).__name__, report)
    return model


def _origin(module: nn.Module) -> _Origin | None:
    return getattr(type(module), "_liger_like", None)


def _examine(
    recogniser: Recogniser, module: nn.Module, model: nn.Module, verify: str
) -> list[tuple[Row, tuple[nn.Module, type[Any]] | None]]:
    """What becomes of ``module`` and of those that change with it: a row of one each, and the class it shall have."""

    def fate(
        status: str, variant: str = "", reason: str = "", error: float | None = None, of: nn.Module = module
    ) -> Row:
        return Row(recogniser.pattern, type(of).__name__, variant, 1, status, reason, error)

    origin = _origin(module)
    if origin is not None and origin.pattern != recogniser.pattern:
        return []
    try:
        if origin is not None and all(_origin(part) for part, _ in recogniser.swaps(module, origin.variant)):
            return [(fate(ALREADY, origin.variant), None)]
        variant = recogniser.variant(module, model)
        foreign = foreign_forward(module)
        if foreign:
            raise UnrecognisedError(f"its forward was replaced by {foreign}")
        error = _verify(recogniser, module, variant, live=verify == "numeric")
    except UnrecognisedError as reason:
        status = ABSENT if isinstance(reason, NothingToDoError) else SKIPPED
        return [(fate(status, reason=str(reason)), None)] if recogniser.looks_like(module) else []
    already = [] if origin is None else [(fate(ALREADY, origin.variant), None)]  # but for a part that is new
    return already + [
        (fate(PATCHED, variant, error=error, of=part), _swap(part, recogniser.pattern, variant))
        for part, variant in recogniser.swaps(module, variant)
        if _origin(part) is None
    ]


def _examine_attention(model: nn.Module, verify: str) -> tuple[list[Row], dict[int, bool]]:
    """A row for each attention, and for the config of each, by id, whether it shall name the implementation.

    All modules of one config have one implementation, so those that are recognised are left alone beside others.
    """
    found: list[tuple[Any, Row]] = []
    for module in filter(ATTENTION.looks_like, model.modules()):
        fate = functools.partial(Row, ATTENTION.pattern, type(module).__name__)
        config: Any = getattr(module, "config", None)
        try:
            variant = ATTENTION.variant(module, model)
            if config._attn_implementation == attention.NAME:
                row = fate(variant, 1, ALREADY)
            else:
                error = _verify(ATTENTION, module, variant, live=verify == "numeric")
                row = fate(variant, 1, PATCHED, error=error)
        except UnrecognisedError as reason:
            row = fate("", 1, SKIPPED, str(reason))
        found.append((config, row))
    others = {id(config): row for config, row in found if row.status == SKIPPED}
    rows = [
        dataclasses.replace(row, status=SKIPPED, reason=f"shares its config with {others[id(config)].cls}", error=None)
        if row.status == PATCHED and id(config) in others
        else row
        for config, row in found
    ]
    return _grouped(rows), {id(config): row.status == PATCHED for (config, _), row in zip(found, rows, strict=True)}


def _verify(recogniser: Recogniser, module: nn.Module, variant: str, *, live: bool) -> float | None:
    """Try the replacement on a miniature, once per class, and if ``live`` on ``module``: the error of the latter."""
    methods = recogniser.methods(type(module), variant)
    key = (type(module), recogniser.pattern, variant)
    training = [(part, part.training) for part in module.modules()]
    # the trials draw from the CPU's generator alone and leave it as it was; without dropout, so that two runs can agree
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        if key not in _confirmed:
            for dtype in (torch.float32, torch.float16):
                small = recogniser.miniature(module, variant).to(dtype)
                _compare(recogniser.trial(small, variant, methods), "a miniature")
            _confirmed.add(key)
        if not live:
            return None
        if any(p.is_meta or not p.is_floating_point() or hasattr(p, "device_mesh") for p in module.parameters()):
            raise UnrecognisedError("verify='numeric' needs whole floating-point weights")
        try:
            return _compare(recogniser.trial(module.eval(), variant, methods), "the module")
        finally:
            for part, mode in training:
                part.training = mode


def _compare(trial: Trial, what: str) -> float:
    """The largest relative difference of outputs and gradients. Raises UnrecognisedError if it is no rounding."""
    errors = []
    for expected, got in zip(_results(trial.original, trial), _results(trial.replacement, trial), strict=True):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            raise UnrecognisedError(
                f"on {what} the replacement gives {got.dtype} {[*got.shape]}, not {expected.dtype} {[*expected.shape]}"
            )
        difference, norm = (got.double() - expected.double()).norm(), expected.double().norm()
        errors.append(difference / norm.clamp(min=torch.finfo(torch.float64).tiny))
    error, bound = float(torch.stack(errors).max()), 4 * torch.finfo(trial.inputs[0].dtype).eps
    if not error <= bound:  # a NaN is none either
        raise UnrecognisedError(f"on {what} the replacement differs by {error:.1e} (relative), more than {bound:.1e}")
    return error


def _results(function: Any, trial: Trial) -> list[Tensor]:
    """Outputs of ``function`` and the gradients of inputs and parameters, for the same random upstream gradient."""
    inputs = [x.detach().requires_grad_() for x in trial.inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator("cpu").manual_seed(1)  # not the seed of the inputs
    upstream = [torch.randn(y.shape, generator=generator, device="cpu").to(y) for y in outputs]
    leaves = [x for x in (*inputs, *trial.parameters) if x.requires_grad]
    return [y.detach() for y in (*outputs, *torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True))]


def _become(module: Any, cls: type[Any]) -> None:
    """Make ``module`` a ``cls``, also where it holds the forward of its class."""
    for name in bound_forwards(module):
        setattr(module, name, types.MethodType(cls.forward, module))
    module.__class__ = cls


def _swap(module: Any, pattern: str, variant: str) -> tuple[nn.Module, type[Any]]:
    cls: Any = type(module)
    return module, _subclass(cls, pattern, variant)


@functools.cache
def _subclass(cls: Any, pattern: str, variant: str) -> type[Any]:
    """A subclass of ``cls`` that passes for it and has the methods of the pattern's variant."""
    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own |= {"_liger_like": _Origin(cls, pattern, variant), "__reduce_ex__": _reduce_ex}
    return types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(own | RECOGNISERS[pattern].methods(cls, variant))
    )


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Pickle and copy by way of the original class: the patched one cannot be found by its name."""
    origin = type(self)._liger_like
    return _instance, tuple(origin), *origin.cls.__reduce_ex__(self, protocol)[2:]


def _instance(cls: Any, pattern: str, variant: str) -> Any:
    patched: Any = _subclass(cls, pattern, variant)
    return patched.__new__(patched)


def _give_views(model: nn.Module, chosen: dict[int, bool]) -> None:
    """Give the modules of ``model`` views of the ``chosen`` configs and of those that have such parts."""
    views: dict[int, Any] = {}

    def view_of(config: Any) -> Any:
        if id(config) not in views:
            parts = {name: getattr(config, name, None) for name in config.sub_configs}
            own = {name: part if part is None else view_of(part) for name, part in parts.items()}
            has_views = any(own[name] is not part for name, part in parts.items())
            views[id(config)] = config
            if chosen.get(id(config), has_views):
                views[id(config)] = _view(config, attention.NAME, own)
            elif has_views:
                views[id(config)] = _view(config, config._attn_implementation, own)
        return views[id(config)]

    for module in model.modules():
        if hasattr(config := vars(module).get("config"), "_attn_implementation_internal"):
            module.config = view_of(config)


def _view(config: Any, implementation: str, parts: dict[str, Any]) -> Any:
    """A config that shares every attribute with ``config`` but for its attention implementation and its parts."""
    attention.register()  # a copy may come to life in another process
    original = getattr(config, "_liger_like_original", config)
    cls: Any = type(original)
    view: Any = object.__new__(_view_class(cls))
    object.__setattr__(view, "__dict__", vars(original))
    view._liger_like_original, view._attn_implementation_internal = original, implementation
    for name, part in parts.items():
        setattr(view, name, part)
    return view


@functools.cache
def _view_class(cls: Any) -> type[Any]:
    """A subclass of a config's class; its slots come before the attributes that it shares, and what is made of it is of
    the class.
    """
    parts = tuple(cls.sub_configs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        own = {name: getattr(self, name) for name in parts}
        return _view, (self._liger_like_original, self._attn_implementation_internal, own)

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    # no ``__class__`` of its own: torch.compile looks there for what comes before the attributes
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__new__": new}
    slots = ("_liger_like_original", "_attn_implementation_internal", *parts)
    body |= {"__slots__": slots, "__reduce_ex__": reduce_ex}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))


def _grouped(rows: list[Row]) -> list[Row]:
    """Rows that differ in ``count`` and ``error`` alone, as one."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(dataclasses.replace(row, error=None), []).append(row)
    return [
        dataclasses.replace(
            key, count=len(group), error=max((row.error for row in group if row.error is not None), default=None)
        )
        for key, group in groups.items()
    ]
