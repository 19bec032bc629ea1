"""``explain``: report which implementation a call runs on this machine, and why not another implementation."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.runtime import checks, support
from liger_like.runtime.launcher import recorded

TILE = ("BLOCK", "STAGES", "GROUPS", "PACK", "num_")  # prefixes of the constants that are shown


class Launch(NamedTuple):
    """Launches of one kernel: its language, its constants and options, and the number of programs of each launch."""

    kernel: str
    language: str
    constants: dict[str, Any]
    programs: list[int]

    def __str__(self) -> str:
        counts = [f"{self.programs.count(n)} x {n}" for n in dict.fromkeys(self.programs)]
        tile = [f"{name} {value}" for name, value in self.constants.items() if name.startswith(TILE)]
        return f"{self.kernel} ({self.language}), {' + '.join(counts)} programs: {', '.join(tile)}"


class Explanation(NamedTuple):
    """Result of ``explain``: the op, its implementation, its launches, and the reasons against other implementations.

    ``implementation`` is the languages of the launched kernels, "plain torch", or "nothing to compute" for empty input.
    """

    op: str
    implementation: str
    launches: list[Launch]
    reasons: list[str]

    def __str__(self) -> str:
        head = f"{self.op}: {self.implementation}"
        return "\n  ".join([head, *map(str, self.launches), *(f"because {reason}" for reason in self.reasons)])


def explain(
    op: str | Callable[..., Any],
    shape: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    **options: Any,
) -> Explanation:
    """Run ``op``, a function of ``liger_like`` or its name, forward and backward, and report which kernels it launched.

    ``shape`` has sizes as in ``liger_like.testing.SPECS``, such as ``{"lead": (16384,), "N": 4096, "weight": True}``,
    for random inputs of ``dtype`` on ``device`` (None: the GPU if there is one, else the CPU). It may have tensors by
    argument name instead, since strides can decide, too. ``options`` are those of the op. The call takes the memory
    that the op takes. No other thread may launch kernels meanwhile.

    Raises ValueError for an unknown op, TypeError for an unknown or missing name in ``shape`` or ``options``.
    """
    from liger_like import ops
    from liger_like.testing import SPECS

    specs = {spec.name: spec for spec in SPECS}
    name = op if isinstance(op, str) else getattr(op, "__name__", op)
    checks.require_choice("op", name, tuple(specs))
    checks.require_type("dtype", dtype, torch.dtype)
    spec, device = specs[str(name)], str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(shape, Mapping):
        raise TypeError(f"shape must be a dict of sizes or tensors, got {type(shape).__name__}")
    arguments = inspect.signature(getattr(ops, spec.name)).parameters
    if any(isinstance(value, Tensor) for value in shape.values()):
        _require_names("shape", shape, arguments)
        inputs = {n: t.detach().requires_grad_(t.requires_grad) for n, t in shape.items() if isinstance(t, Tensor)}
        options |= {n: value for n, value in shape.items() if n not in inputs}
    else:
        sizes = {n: p for n, p in inspect.signature(spec.inputs).parameters.items() if n not in ("dtype", "device")}
        _require_names("shape", shape, sizes)
        if missing := [n for n, p in sizes.items() if p.default is p.empty and n not in shape]:
            raise TypeError(f"shape must have {', '.join(missing)} for {spec.name}, got {', '.join(shape)}")
        if not isinstance(shape.get("lead", ()), tuple | list):
            raise TypeError(f"shape['lead'] must be a tuple of integers, got {shape['lead']!r}")
        inputs = spec.inputs(dtype, device, **shape)
    _require_names("options", options, [n for n in arguments if n not in inputs])
    with support.collected_reasons() as reasons:
        launches = _launches(lambda: spec.fn(**inputs, **options))
    languages = " and ".join(dict.fromkeys(launch.language for launch in launches))
    without = "plain torch" if reasons else "nothing to compute"
    return Explanation(spec.name, languages or without, launches, [*dict.fromkeys(reasons)])


def _require_names(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError unless all names ``given`` in ``argument`` are ``known``."""
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{argument} must be out of {', '.join(known)}, got {', '.join(unknown)}")


def _launches(call: Callable[[], Any]) -> list[Launch]:
    """Return the launches of ``call`` and its backward, grouped by kernel and constants."""
    with recorded() as made:
        result = call()
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
        outputs = [t for t in outputs if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    launches: dict[str, Launch] = {}
    for kernel, grid, options in made:
        gluon = not support.INTERPRET and kernel.is_gluon()
        language = "interpreted Triton" if support.INTERPRET else "Gluon for Hopper" if gluon else "Triton"
        launch = launches.setdefault(f"{id(kernel)} {options}", Launch(kernel.__name__, language, options, []))
        launch.programs.append(torch.Size(grid).numel())
    return [*launches.values()]
