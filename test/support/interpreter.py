"""Spare Triton's interpreter the work that it repeats at every call of a device function and for every value.

Most of its time goes into Python objects that say what a block is. They are made once for each element type and shape
here: types of blocks, and the shapes of their tensors.
"""

import functools
import math
from operator import index
from types import SimpleNamespace

import numpy as np
from triton.language import core
from triton.runtime import interpreter, jit

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_replacements = {}  # of attributes of triton.language, in every launch
_originals = []  # while a kernel runs


def quicken():
    """Let the interpreter search triton.language once, and replace its functions once per launch.

    Without this it does both again for each device function that a kernel calls, and finds them replaced. It checks
    integers for overflow by interpreting six more operations for each one. And it makes both operands of an operation
    anew, although most have the type and the shape of the result: numpy broadcasts them.
    """
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_builtin = _patch_members
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.InterpreterBuilder.create_expand_dims = _expand_dims
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter._validate_np_data_size = _fits
    jit.ConstexprFunction.__call__ = _call_constexpr
    semantic = interpreter.interpreter_semantic
    semantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    semantic.broadcast_impl_value = _broadcast
    semantic.binary_op_type_checking_impl = _operands
    semantic.to_tensor = _to_tensor
    semantic.cast = _cast
    core._unwrap_if_constexpr = _unwrap
    core.dtype.sizes = ()  # of a number
    core.dtype.size = core.dtype._bytes = None  # until they are asked for
    for kind, element in ((core.dtype, lambda self: self), (core.block_type, lambda self: self.element_ty)):
        kind.scalar = functools.cached_property(element)
        kind.scalar.__set_name__(kind, "scalar")
    core.block_type.__new__ = _block_type
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor


def _patch_lang_once(fn):
    """Replace the functions of triton.language, unless the launch has done so."""
    if _originals:
        return None
    if not _replacements:
        # a function whose module names both of the modules whose functions are replaced
        scope = _patch_lang(SimpleNamespace(__globals__={"core": core, "tl": interpreter.tl}))
        _replacements.update({(owner, name): getattr(owner, name) for owner, name, _ in scope._changes})
        scope.restore()
    for (owner, name), function in _replacements.items():
        _originals.append((owner, name, getattr(owner, name, interpreter._MISSING)))
        setattr(owner, name, function)
    scope = interpreter._LangPatchScope()
    scope._changes = _originals  # the end of the launch puts them back, and leaves none
    return scope


@functools.cache
def _members(owner):
    members = interpreter.inspect.getmembers(owner)
    interpreted = _function if interpreter.inspect.ismodule(owner) else _method
    # a builtin is wrapped in Triton's check that a kernel calls it
    return [(name, interpreted(getattr(f, "__wrapped__", f))) for name, f in members if core.is_builtin(f)]


def _function(builtin):
    return functools.partial(builtin, _semantic=interpreter.interpreter_semantic)


def _method(builtin):
    def call(*args, **options):
        options["_semantic"] = interpreter.interpreter_semantic
        return builtin(*args, **options)

    return call


def _patch_members(owner, builder, scope):
    for name, member in _members(owner):
        scope.set_attr(owner, name, member)


_dtypes = {}


def _numpy_dtype(dtype):
    """Look up the dtype by its name: Triton's own function builds its table at every call."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _get_np_dtype(dtype)
    return _dtypes[dtype.name]


_cast_any = interpreter.interpreter_semantic.cast
_EXACT = {("int32", "int64"), ("fp16", "fp32")}  # no check, no rounding


def _cast(x, dtype, *rounding):
    new = dtype.scalar
    if (x.dtype.name, new.name) not in _EXACT or rounding not in ((), (None,)):
        return _cast_any(x, dtype, *rounding)
    return _tensor(interpreter.TensorHandle(x.handle.data.astype(_numpy_dtype(new)), new), new, x.type.sizes)


_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _assert_no_overflow(a, b, op):
    """Raise AssertionError if ``op`` of integers of fewer than 64 bits does not fit in their dtype."""
    dtype = a.dtype
    if dtype.int_bitwidth < 64:
        wide = _WIDE[op.__name__](a.handle.data, b.handle.data, dtype=np.int64)
        least, most = np.minimum.reduce(wide, axis=None), np.maximum.reduce(wide, axis=None)
        fits = dtype.get_int_min_value() <= least and most <= dtype.get_int_max_value()
        assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {op.__name__}"


def _init_handle(self, data, dtype, attr=None):
    """Let Triton look at the data only if its elements are too wide, which is an error."""
    self.data, self.dtype, self.attr = data, dtype, attr or {}
    if data.itemsize > (dtype._bytes or _itemsize(dtype)):
        self.__post_init__()


def _fits(data, dtype):
    return data.itemsize <= (dtype._bytes or _itemsize(dtype))


def _itemsize(dtype):
    """Return the bytes of an element, and keep them with its type."""
    dtype._bytes = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
    return dtype._bytes


def _expand_dims(self, handle, axis):
    return interpreter.TensorHandle(handle.data[(slice(None),) * axis + (None,)], handle.dtype.scalar)


_any_to_tensor = interpreter.interpreter_semantic.to_tensor


def _to_tensor(x, check_type=True):
    return x if type(x) is core.tensor else _any_to_tensor(x, check_type)


_unwrap_all = core._unwrap_if_constexpr
_NESTED = list, tuple, core.tuple


def _unwrap(x):
    if type(x) is core.constexpr:
        return x.value
    return _unwrap_all(x) if isinstance(x, _NESTED) else x


def _call_constexpr(self, *args, _semantic=None, **options):
    return self.fn(*map(_unwrap, args), **{name: _unwrap(value) for name, value in options.items()})


_check_operands = interpreter.interpreter_semantic.binary_op_type_checking_impl
_broadcast_impl_value = interpreter.interpreter_semantic.broadcast_impl_value
_new_block_type = core.block_type.__init__


def _operands(a, b, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
    """Cast nothing that has its type, and make each number once; leave the other cases to Triton."""
    kinds = type(a) is core.tensor, type(b) is core.tensor
    if all(kinds):
        if a.dtype.is_ptr():
            if allow_lhs_ptr and b.dtype.is_int():
                return _typed(a, b)
        elif a.dtype.name == b.dtype.name and not div_or_mod:
            return _typed(a, b)
    elif arithmetic_check and kinds[0] and _takes(a.dtype, b, div_or_mod):
        return a, _constant(b, a.type)
    elif arithmetic_check and kinds[1] and _takes(b.dtype, a, div_or_mod):
        return _constant(a, b.type), b
    return _check_operands(a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _takes(dtype, number, div_or_mod):
    """Return True if a number takes the dtype of a tensor that it meets."""
    if dtype.name == "fp32" or (dtype.name == "fp16" and not div_or_mod):
        return type(number) in (int, float)
    return dtype.name in ("int32", "int64") and type(number) is int and -(2**31) <= number < 2**31


def _constant(number, type):
    """Return a tensor that holds a number, the same one at every call."""
    constants = type.__dict__.setdefault("_constants", {})
    if number not in constants:
        if len(constants) == 99:  # of a loop, each value
            constants.clear()
        constants[number] = _spread(interpreter.interpreter_semantic.scalar_constant(number, type.scalar), type.sizes)
    return constants[number]


def _typed(a, b):
    """Return operands whose types have the common shape; their data keep their shapes, since numpy broadcasts them."""
    m, n = a.type.sizes, b.type.sizes
    if m == n:
        return a, b
    shape = _common(m, n)
    if not shape:
        return _broadcast_impl_value(a, b)
    return _tensor(a.handle, a.dtype, shape), _tensor(b.handle, b.dtype, shape)


def _tensor(handle, dtype, sizes):
    return core.tensor(handle, _block_type(core.block_type, dtype, sizes) if sizes else dtype)


def _broadcast(a, b):
    """Leave a block of the common shape as it is: Triton's own function makes a view of it."""
    m, n = a.type.sizes, b.type.sizes
    if m == n:
        return a, b
    shape = _common(m, n)
    return (_spread(a, shape), _spread(b, shape)) if shape else _broadcast_impl_value(a, b)


@functools.cache
def _common(a, b):
    """Return the shape of a block and a number, or of two blocks of one rank that broadcast, else None."""
    if not a or not b:
        return a or b
    fits = len(a) == len(b) and all(1 in (m, n) or m == n for m, n in zip(a, b, strict=True))
    return tuple(map(max, a, b)) if fits else None


def _spread(x, shape):
    if x.type.sizes == shape:
        return x
    builder, block_type = interpreter.interpreter_builder, _block_type(core.block_type, x.dtype, shape)
    spread = (
        builder.create_broadcast(x.handle, shape) if x.type.is_block() else builder.create_splat(block_type, x.handle)
    )
    return core.tensor(spread, block_type)


def _block_type(cls, element_ty, shape):
    """Return the one type of blocks of this element type and shape."""
    blocks = element_ty.__dict__.setdefault("_blocks", {})
    if type(shape) is tuple and shape in blocks:
        return blocks[shape]
    sizes = tuple([index(size) for size in shape])
    if sizes not in blocks:
        new = object.__new__(cls)
        _new_block_type(new, element_ty, list(shape))
        new.sizes = sizes
        blocks[sizes] = new
    return blocks[sizes]


def _init_block_type(self, element_ty, shape):
    """Keep the fields: ``_block_type`` has filled them."""


def _init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.size or _size(type)


def _size(type):
    """Return the shape and the number of elements of tensors of a type, and keep them there."""
    shape = type.shape if type.is_block() else ()
    type.size = core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))
    return type.size
