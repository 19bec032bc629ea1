"""Check the options of ``patch``, which other entry points take, too."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

SWITCHES = ("norm", "rope", "mlp", "attention", "loss", "lora", "strict")
FORMS = {"mlp": ("tiled",)}  # values of a switch besides True and False
VERIFY = ("fingerprint", "numeric")
P = ParamSpec("P")
R = TypeVar("R")


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless ``options`` are valid keyword arguments of ``patch``."""
    for name, value in options.items():
        if name not in (*SWITCHES, "verify"):
            raise TypeError(f"patch takes no option {name!r}: its options are {', '.join(SWITCHES)} and verify")
        forms = FORMS.get(name, ())
        if name in SWITCHES and not isinstance(value, bool) and value not in forms:
            raise TypeError(f"{name} must be {', '.join(('True', *map(repr, forms)))} or False, got {value!r}")
        if name == "verify" and value not in VERIFY:
            raise ValueError(f"verify must be 'fingerprint' or 'numeric', got {value!r}")


def checks_options(patch: Callable[P, R]) -> Callable[P, R]:
    """Return ``patch`` with its options checked first: Python's own error does not name the valid options."""

    @functools.wraps(patch)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        check_options({name: value for name, value in options.items() if name != "model"})
        return patch(*args, **options)

    return checked
