"""Patch Hugging Face models: recognised modules run kernels, all others are left alone and reported.

``patch`` gives a module a subclass of its own class, of the same name, that overrides the forward. For attention and
experts it gives the modules of a model a view of their config that names other implementations. ``unpatch`` restores
class and config. Nothing else changes, inside or outside the model. ``liger_like.patches`` defines the recognised
patterns and their replacements.
"""

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_like._options import SWITCHES, check_options, checks_options
from liger_like._subclasses import become, origin_of, swap
from liger_like.patches import (
    NAME,
    NothingToDoError,
    Recogniser,
    UnrecognisedError,
    generation,
    latents,
    packed_lora,
    trl_head,
    unpacked,
    where,
)
from liger_like.patches.catalogue import ATTENTION, EXPERTS, INTERFACES, RECOGNISERS
from liger_like.patches.config_views import give_views, take_views
from liger_like.patches.foreign import foreign_forward, replaced_in_class, replaced_in_torch
from liger_like.patches.trials import compare
from liger_like.patches.trl_code import fused_forward, stand_in

PATCHED, ALREADY, SKIPPED, ABSENT = "patched", "already patched", "skipped", "absent"
RUNNING = PATCHED, ALREADY
SEED = 7_406_193_581  # of a module's trial: nobody's weights are drawn by it, whose first numbers would be the inputs

raise_errors = False  # the tests set it: there an unexpected exception is a bug, not a reason to skip the module
_confirmed: set[tuple[type[Any], str, str]] = set()


@dataclass(frozen=True)
class Row:
    """Row of a report: ``count`` modules of class ``cls`` with the same outcome.

    ``status`` is "patched", "already patched", "skipped" (the module looks like the pattern but was left alone for
    ``reason``) or "absent" (the model has no such module, or liger_like has no kernel for it). ``error`` is the largest
    relative difference between original and replacement that verify="numeric" found. It is None where nothing is
    compared: for modules left alone, TRL's head, and generation, which runs the ops of attention.
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
    """Report of what ``patch`` did to ``model``.

    Print it, read its ``rows``, or use it as a context manager that unpatches the model at the end.
    """

    model: nn.Module = dataclasses.field(repr=False)
    rows: tuple[Row, ...]

    @property
    def patched(self) -> tuple[Row, ...]:
        """Return the rows of modules that run kernels."""
        return tuple(row for row in self.rows if row.status in RUNNING)

    @property
    def skipped(self) -> tuple[Row, ...]:
        """Return the rows of modules that run no kernel: status "skipped" or "absent"."""
        return tuple(row for row in self.rows if row.status not in RUNNING)

    def to_dict(self) -> dict[str, Any]:
        """Return the model's class name and the rows as plain data, for JSON."""
        return {"model": type(self.model).__name__, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def unpatch(self) -> None:
        """Restore the model, as ``liger_like.unpatch`` does."""
        unpatch(self.model)

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        """Return a table with one line per row."""
        lines = [tuple(field.name for field in dataclasses.fields(Row))]
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:.1e}"
            lines.append((row.pattern, row.cls, row.variant, str(row.count), row.status, row.reason, error))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


@checks_options
def patch(
    model: nn.Module,
    *,
    norm: bool = True,
    rope: bool = True,
    mlp: bool | str = True,
    attention: bool = True,
    loss: bool = True,
    lora: bool = True,
    strict: bool = False,
    verify: str = "fingerprint",
) -> PatchReport:
    """Patch every recognised module of ``model`` to run a kernel, and return the report.

    The model computes the same results and is used in the same way. A module is recognised by the form of its forward.
    The match is confirmed by running original and replacement, forward and backward, on a small module of the class.
    ``verify="numeric"`` also runs both on the module itself and leaves it alone if they differ. In training with labels
    the loss is computed without logits, and the output's ``logits`` are None. Attention obeys the masks of eager
    attention; if attention weights are requested, eager attention runs. A second call patches modules that are new.
    With ``mlp="tiled"`` gated MLPs take a tile of tokens at a time, for long sequences.

    If examining a module raises, the module is left alone and the report names the exception. Warns if no module runs a
    kernel, or if attention is skipped for dropout. Raises TypeError if ``model`` is not a torch.nn.Module, an option is
    unknown or a switch is no bool. Raises ValueError for an unknown ``verify``, or with ``strict=True`` if a module
    that looks like a pattern would be left alone; the model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = {"norm": norm, "rope": rope, "mlp": mlp, "loss": loss, "attention": attention, "lora": lora}
    rows: list[Row] = []
    swaps: dict[nn.Module, type[Any]] = {}
    interfaces: list[tuple[Recogniser, _Found]] = []
    for option in filter(wanted.get, wanted):
        every = [each for each in (*RECOGNISERS.values(), *INTERFACES) if each.options[0] == option]
        recognisers = [each.with_option(wanted[option]) for each in every]
        before = len(rows)
        for recogniser in recognisers:
            if recogniser.implementation:
                interfaces.append((recogniser, _examine_interface(recogniser, model, verify)))
                rows += interfaces[-1][1].rows
                continue
            on = all(wanted[name] for name in recogniser.options)
            others = (m for m in model.modules() if m not in swaps and (on or origin_of(m) is not None))
            found = [fate for module in others for fate in _examine(recogniser, module, model, verify)]
            rows += _grouped([row for row, _ in found])
            swaps.update(swap for _, swap in found if swap is not None)
        if len(rows) == before and option != "lora":  # most models have no adapters
            patterns = ", ".join({recogniser.pattern: None for recogniser in recognisers})
            rows.append(Row(patterns, "", "", 0, ABSENT, "the model has none"))
    trl = _examine_trl(model, swaps) if loss else {}
    rows += _grouped(list(trl.values()))
    generating = _examine_generation(model, interfaces)
    rows += _grouped(list(generating.values()))
    report = PatchReport(model, tuple(rows))
    if strict and any(row.status == SKIPPED for row in rows):
        raise ValueError(f"strict=True, but modules would be left alone:\n{report}")
    for module, cls in swaps.items():
        become(module, cls)
    for module in (module for module, row in trl.items() if row.status == PATCHED):
        trl_head.hook(module)
    for recogniser, found_there in interfaces:
        for module, variant in found_there.patched.items():
            vars(module).update(recogniser.methods(type(module), variant))
    if any(found_there.patched for _, found_there in interfaces):
        give_views(model, {recogniser.implementation: found_there.configs for recogniser, found_there in interfaces})
        for module in model.modules():
            unpacked.hook(module)
    with_latents = [m for _, found in interfaces for m, variant in found.running.items() if latents.VARIANT in variant]
    for module in (*with_latents, *(module for module, row in generating.items() if row.status != SKIPPED)):
        generation.hook(module)
    if any(row.pattern == EXPERTS.pattern for row in report.patched):
        packed_lora.hook(model)
    _warn(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Restore the original class and config of every patched module of ``model``; do nothing if none is patched.

    Raises TypeError if ``model`` is not a torch.nn.Module, and RuntimeError if another library has since subclassed a
    patched class, as FSDP2's fully_shard does, or if ``expert_parallel`` has sharded its patched experts.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(vars(module).keys() >= {"_liger_like_gate", "_liger_like_op"} for module in model.modules()):
        raise RuntimeError("a model whose experts expert_parallel has sharded cannot be unpatched")
    patched = [module for module in model.modules() if origin_of(module) is not None]
    for module in model.modules():
        cls = type(module)
        covered = generation.is_hooked(cls) and generation.below(cls) is cls
        if covered or (origin_of(module) is not None and "_liger_like" not in vars(generation.below(cls))):
            raise RuntimeError(f"{where(cls)} was put on top of a patched class; undo that first")
    for module in model.modules():
        generation.unhook(module)
    for module in patched:
        origin = type(module)._liger_like  # type: ignore[attr-defined]
        become(module, origin.cls)
        RECOGNISERS[origin.pattern].forget(module)
    for module in model.modules():
        unpacked.unhook(module)
        trl_head.unhook(module)
        packed_lora.unhook(module)
        for interface in INTERFACES:
            interface.forget(module)
    take_views(model)


class AutoModelForCausalLM:
    """Factory like ``transformers.AutoModelForCausalLM`` that also patches; it warns if modules are left alone.

    Keyword arguments of ``patch`` (``norm``, ``verify``, ...) go to ``patch``, all others to transformers.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a patched model with the weights that transformers loads. Raises as ``patch`` does for its options."""
        from transformers import AutoModelForCausalLM as Auto

        options = _take_options(kwargs)
        return _patched(Auto.from_pretrained(*args, **kwargs), options)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a patched model with random weights from a config. Raises as ``patch`` does for its options."""
        from transformers import AutoModelForCausalLM as Auto

        options = _take_options(kwargs)
        return _patched(Auto.from_config(*args, **kwargs), options)  # type: ignore[no-untyped-call]


def _take_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of ``patch`` from ``kwargs`` and return them, checked."""
    options = {name: kwargs.pop(name) for name in (*SWITCHES, "verify") if name in kwargs}
    check_options(options)
    return options


def _patched(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    report = patch(model, **options)
    if any(row.status == SKIPPED for row in report.rows):
        warnings.warn(f"liger_like: some modules were left alone:\n{report}", stacklevel=3)
    return model


def _warn(report: PatchReport) -> None:
    """Warn the caller of ``patch`` if no module runs a kernel, or if attention is skipped for its dropout."""
    if not report.patched:
        name = type(report.model).__name__
        warnings.warn(f"liger_like: no module of {name} runs a kernel; print the report for the reasons", stacklevel=4)
    for row in report.rows:
        if row.pattern == ATTENTION.pattern and "dropout" in row.reason:
            warnings.warn(f"liger_like: {row.cls} runs no kernel: {row.reason}", stacklevel=4)


class _Found(NamedTuple):
    """Modules of an interface: their rows, the variants of those to patch, and by id which configs are to name it.

    ``running``: the variants of those to patch and of those that are patched already.
    """

    rows: list[Row]
    patched: dict[nn.Module, str]
    configs: dict[int, bool]
    running: dict[nn.Module, str]


Fate = tuple[Row, tuple[nn.Module, type[Any]] | None]


def _examine(recogniser: Recogniser, module: nn.Module, model: nn.Module, verify: str) -> list[Fate]:
    """Return a row and the new class for ``module`` and for each module that changes with it."""
    try:
        return _fates(recogniser, module, model, verify)
    except Exception as error:
        if not _looks_like(recogniser, module):
            return []
        return [(_left(recogniser, module, error), None)]


def _fates(recogniser: Recogniser, module: nn.Module, model: nn.Module, verify: str) -> list[Fate]:
    """Do the work of ``_examine``. Raises UnrecognisedError, and any exception of the model's own code."""
    origin = origin_of(module)
    if origin is not None and origin.pattern != recogniser.pattern:
        return []
    for part in recogniser.depends_on(module, model):
        _require_own_forward(part)

    def fate(status: str, variant: str, of: nn.Module = module, error: float | None = None) -> Row:
        return Row(recogniser.pattern, type(of).__name__, variant, 1, status, error=error)

    if origin is not None and all(origin_of(part) for part, _ in recogniser.swaps(module, origin.variant)):
        return [(fate(ALREADY, origin.variant), None)]
    variant = recogniser.variant(module, model)
    error = _verify(recogniser, module, variant, live=verify == "numeric")
    # a patched model may have a new head, which is still to be patched
    already: list[Fate] = [] if origin is None else [(fate(ALREADY, origin.variant), None)]
    return already + [
        (fate(PATCHED, variant, part, error), swap(part, recogniser.pattern, variant))
        for part, variant in recogniser.swaps(module, variant)
        if origin_of(part) is None
    ]


def _require_own_forward(module: nn.Module) -> None:
    if foreign := foreign_forward(module):
        raise UnrecognisedError(f"its forward was replaced by {foreign}")


def _looks_like(recogniser: Recogniser, module: nn.Module) -> bool:
    """Return True if the report must mention ``module``, also if the module's own code raises here."""
    try:
        return recogniser.looks_like(module)
    except Exception:
        if raise_errors:
            raise
        return True


def _left(recogniser: Recogniser, module: nn.Module, error: Exception) -> Row:
    """Return the row of a module that is left alone for ``error``."""
    reason = _reason(error, module)
    status = ABSENT if isinstance(error, NothingToDoError) and reason == str(error) else SKIPPED
    return Row(recogniser.pattern, type(module).__name__, "", 1, status, reason)


def _reason(error: Exception, module: nn.Module) -> str:
    """Return the reason why ``module`` is left alone, with the functions that other libraries have replaced."""
    reasons = [str(error)]
    if not isinstance(error, UnrecognisedError):
        if raise_errors:
            raise error
        first, *_ = str(error).splitlines() or [""]
        reasons = [f"trying it raised {type(error).__name__}: {first}", *replaced_in_torch()]
    return "; ".join((*reasons, *replaced_in_class(type(module))))


def _examine_interface(recogniser: Recogniser, model: nn.Module, verify: str) -> _Found:
    """Examine the modules that transformers runs by the implementation that their config names.

    All modules of a config share its implementation: one unrecognised module keeps the others from being patched.
    """
    found: list[tuple[nn.Module, Row]] = []
    for module in (module for module in model.modules() if _looks_like(recogniser, module)):
        fate = functools.partial(Row, recogniser.pattern, type(module).__name__)
        try:
            for part in recogniser.depends_on(module, model):
                _require_own_forward(part)
            variant = recogniser.variant(module, model)
            named = getattr(module.config, recogniser.implementation) == NAME
            if named and vars(module).keys() >= {*recogniser.state}:
                row = fate(variant, 1, ALREADY)
            else:
                difference = _verify(recogniser, module, variant, live=verify == "numeric")
                row = fate(variant, 1, PATCHED, error=difference)
        except Exception as error:
            row = _left(recogniser, module, error)
        found.append((module, row))
    ids = [id(getattr(module, "config", None)) for module, _ in found]
    others = {config: row for config, (_, row) in zip(ids, found, strict=True) if row.status == SKIPPED}
    rows = [
        dataclasses.replace(row, status=SKIPPED, reason=f"shares its config with {others[config].cls}", error=None)
        if row.status == PATCHED and config in others
        else row
        for config, (_, row) in zip(ids, found, strict=True)
    ]
    patched = {module: row.variant for (module, _), row in zip(found, rows, strict=True) if row.status == PATCHED}
    configs = dict.fromkeys(ids, False)
    configs |= {config: True for config, row in zip(ids, rows, strict=True) if row.status == PATCHED}
    running = {module: row.variant for (module, _), row in zip(found, rows, strict=True) if row.status in RUNNING}
    return _Found(_grouped(rows), patched, configs, running)


def _examine_trl(model: nn.Module, swaps: dict[nn.Module, type[Any]]) -> dict[nn.Module, Row]:
    """Return a row for each module whose forward is TRL's fused head."""
    rows = {}
    for module in model.modules():
        function = fused_forward(module)
        if function is not None:
            patched = module in swaps or origin_of(module) is not None
            reason = trl_head.obstacle_of(function, module, patched)
            status = SKIPPED if reason else PATCHED if stand_in(function) is None else ALREADY
            rows[module] = Row(trl_head.PATTERN, type(module).__name__, "", 1, status, reason)
    return rows


def _examine_generation(model: nn.Module, interfaces: list[tuple[Recogniser, _Found]]) -> dict[nn.Module, Row]:
    """Return a row for each module with transformers' methods of generation, if there is attention among its parts."""
    found = [found for recogniser, found in interfaces if recogniser is ATTENTION and found.configs]
    rows = {}
    for module in (module for module in model.modules() if found and generation.generates(module)):
        text = generation.text_config(module)
        if id(text) not in found[0].configs:  # there is attention in other parts alone
            continue
        named = found[0].configs[id(text)] or text._attn_implementation == NAME
        status = SKIPPED if not named else ALREADY if generation.is_hooked(type(module)) else PATCHED
        reason = "" if named else "its attention runs no kernel"
        rows[module] = Row(generation.PATTERN, type(module).__name__, generation.VARIANT, 1, status, reason)
    return rows


def _verify(recogniser: Recogniser, module: nn.Module, variant: str, *, live: bool) -> float | None:
    """Try the replacement on a miniature, once per class; if ``live``, return its error on ``module`` itself.

    Raises UnrecognisedError if original and replacement differ.
    """
    methods = recogniser.methods(type(module), variant)
    key = (type(module), recogniser.pattern, variant)
    training = [(part, part.training) for part in module.modules()]
    # trials use only the CPU generator, whose state is restored; they run without dropout, so that two runs can agree
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        if key not in _confirmed:
            torch.default_generator.manual_seed(0)
            for dtype in (torch.float32, torch.float16):
                small = recogniser.miniature(module, variant).to(dtype)
                compare(recogniser.trial(small, variant, methods), "a miniature")
            _confirmed.add(key)
        if not live:
            return None
        torch.default_generator.manual_seed(SEED)  # whether the class was confirmed now or before: errors repeat
        if any(p.is_meta or not p.is_floating_point() or hasattr(p, "device_mesh") for p in module.parameters()):
            raise UnrecognisedError("verify='numeric' needs floating-point weights, neither sharded nor on meta")
        try:
            return compare(recogniser.trial(module.eval(), variant, methods), "the module")
        finally:
            for part, mode in training:
                part.training = mode


def _grouped(rows: list[Row]) -> list[Row]:
    """Return the rows with equal ones merged: counts are added, and the largest error is kept."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(dataclasses.replace(row, error=None), []).append(row)
    return [
        dataclasses.replace(
            key, count=len(group), error=max((row.error for row in group if row.error is not None), default=None)
        )
        for key, group in groups.items()
    ]
