"""Fallback from Gluon kernels to portable ones, for versions of Triton that are newer than the tested ones.

Gluon is experimental: a newer Triton may fail to import or compile Gluon kernels. The op that launches such a kernel
then runs again with the portable kernel, and so do all later calls of the process. With a tested version the error is
raised, since it is a defect.
"""

import functools
import importlib
import warnings
from typing import Any

import torch
import triton

from liger_like.runtime.versions import TESTED, newer_than_tested

BROKEN: dict[str, str] = {}  # module of Gluon kernels -> reason why it is not used


class NotCompiledError(Exception):
    """Error for a module of Gluon kernels that a Triton newer than the tested ones cannot import or compile."""

    def __init__(self, module: str, error: Exception) -> None:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        text = str(getattr(root, "error_message", None) or root).strip()
        self.module, self.reason = module, f"{type(root).__name__}: {text.partition(chr(10))[0]}"
        super().__init__(f"{module}: {self.reason}")

    def fall_back(self) -> None:
        """Mark the module as unusable, and warn if it is the first."""
        if not BROKEN:
            warnings.warn(
                f"liger_like: the Gluon kernels of {self.module} do not compile with Triton {triton.__version__}, which"
                f" is newer than the newest tested version, {TESTED['triton'][1]}: {self.reason}. Portable kernels run"
                " instead, which are slower",
                RuntimeWarning,
                stacklevel=2,
            )
        BROKEN[self.module] = f"does not compile with Triton {triton.__version__}: {self.reason}"


@functools.cache
def gluon_module(name: str) -> Any:
    """Return the imported module ``name`` of Gluon kernels. Raise NotCompiledError if a newer Triton fails on it."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if newer_than_tested("triton"):
            raise NotCompiledError(name, error) from error
        raise


def _is_of_the_gpu(error: Exception) -> bool:
    """Return True for errors of running this or an earlier kernel: out of memory, or an error that CUDA reports."""
    types = torch.OutOfMemoryError, torch.AcceleratorError
    return isinstance(error, types) or str(error).startswith("Triton Error [")


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return ``kernel[grid](*args, **options)``. Raise NotCompiledError if a newer Triton cannot compile Gluon."""
    try:
        return kernel[grid](*args, **options)
    except Exception as error:
        gluon = getattr(kernel, "is_gluon", bool)()
        if gluon and newer_than_tested("triton") and not _is_of_the_gpu(error):
            raise NotCompiledError(kernel.__module__, error) from error
        raise
