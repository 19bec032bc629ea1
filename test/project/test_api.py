"""The public API: names, parameters and defaults are those of api.txt, and each has a docstring."""

import importlib
import inspect
from pathlib import Path

PAGE = Path(__file__).with_name("api.txt")
MODULES = ("", ".losses", ".nn", ".ops", ".parallel", ".patching", ".planning", ".testing", ".trainer")


def parameters(value: object) -> str:
    """Return the parameters of a function or class with their defaults, but without annotations; "" if it has none."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def members(module: object, name: str) -> dict[str, object]:
    names = getattr(module, "__all__", None) or [
        n for n, value in vars(module).items() if getattr(value, "__module__", "") == name and not n.startswith("_")
    ]
    return {f"{name}.{n}": getattr(module, n) for n in names}


def listed() -> dict[str, object]:
    """Return every public function and class by its full name."""
    found: dict[str, object] = {}
    for module in MODULES:
        name = f"liger_like{module}"
        found |= members(importlib.import_module(name), name)
    classes = {name: value for name, value in found.items() if inspect.isclass(value)}
    for name, value in classes.items():
        methods = {f"{name}.{n}": f for n, f in vars(value).items() if not n.startswith("_") and inspect.isfunction(f)}
        found |= methods
    return {name: value for name, value in found.items() if inspect.isfunction(value) or inspect.isclass(value)}


def test_the_public_api_is_as_listed() -> None:
    lines = [f"{name}{parameters(value)}\n" for name, value in sorted(listed().items())]
    assert "".join(lines) == PAGE.read_text(), "the public API has changed: api.txt and CHANGELOG.md must say so"


def test_the_public_api_has_docstrings() -> None:
    assert [name for name, value in listed().items() if not (value.__doc__ or "").strip()] == []
