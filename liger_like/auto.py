"""Factory of patched models."""

import warnings
from typing import Any

from torch import nn

from liger_like._options import SWITCHES, check_options
from liger_like.patching import SKIPPED, patch


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
