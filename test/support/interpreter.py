"""Spare Triton's interpreter the work that it repeats at every call of a device function and for every value."""

import functools

import numpy as np
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_modules = set()  # modules whose functions were called in this launch


def quicken():
    """Let the interpreter search triton.language once, and replace its functions once per launch and module.

    Without this it does both again for each device function that a kernel calls, and finds them replaced. And it
    checks integers for overflow by interpreting six more operations for each one.
    """
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_builtin = _patch_members
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _assert_no_overflow


def _patch_lang_once(fn):
    is_kernel = not _modules
    if fn.__module__ in _modules:
        return None
    _modules.add(fn.__module__)
    scope = _patch_lang(fn)
    restore = scope.restore

    def end():
        _modules.clear()
        restore()

    if is_kernel:
        scope.restore = end
    return scope


@functools.cache
def _members(owner):
    is_builtin = interpreter.tl.core.is_builtin
    return [(name, member) for name, member in interpreter.inspect.getmembers(owner) if is_builtin(member)]


def _patch_members(owner, builder, scope):
    for name, member in _members(owner):
        interpreter._patch_attr(owner, name, member, builder, scope)


_dtypes = {}


def _numpy_dtype(dtype):
    """Look up the dtype by its name: Triton's own function builds its table at every call."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _get_np_dtype(dtype)
    return _dtypes[dtype.name]


_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _assert_no_overflow(a, b, op):
    """Raise AssertionError if ``op`` of integers of fewer than 64 bits does not fit in their dtype."""
    dtype = a.type.scalar
    if dtype.int_bitwidth < 64:
        wide = _WIDE[op.__name__](a.handle.data, b.handle.data, dtype=np.int64)
        fits = dtype.get_int_min_value() <= wide.min() and wide.max() <= dtype.get_int_max_value()
        assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {op.__name__}"
