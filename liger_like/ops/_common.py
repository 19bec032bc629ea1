"""What the ops share: where a kernel may run, how an op is registered, how rows are seen and tiled, how input is
refused.
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from liger_like.ops._fallback import NotCompiledError, start

LIBRARY = torch.library.Library("liger_like", "DEF")
INTERPRET: bool = triton.knobs.runtime.interpret  # read once, as the decorators of the kernels read it
# the versions whose launcher ``launch`` calls as Triton itself does
DIRECT = torch.version.hip is None and triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
TWICE = "trying to differentiate twice: the ops of liger_like are differentiable once, so not with create_graph=True"
# Options of every launch unless it passes its own. Whether a product and a sum are rounded once or twice would else be
# decided by the version: fused up to Triton 3.9, not fused from 3.10 on.
OPTIONS = {"enable_fp_fusion": True}
_RUNTIME = triton.knobs.runtime
_COMPILED: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_PLAIN = {Tensor, torch.nn.Parameter, int, float, str, bool, list, type(None)}
FLOAT_MAX = torch.finfo(torch.float32).max
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
F = TypeVar("F", bound=Callable[..., Any])
REASONS: list[str] | None = None  # of ``refused``, while ``explain`` listens
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refused(reason: str) -> bool:
    """False, for the end of a condition that an implementation has; ``explain`` gets to know the reason."""
    if REASONS is not None:
        REASONS.append(reason)
    return False


def use_kernel(x: Tensor) -> bool:
    """Whether the Triton kernel takes ``x``; the plain-torch reference runs otherwise."""
    return (x.dtype in KERNEL_DTYPES or refused("kernels take float32, float16 and bfloat16")) and (
        x.is_cuda
        or (INTERPRET and x.device.type == "cpu")
        or refused("kernels run on GPUs, and interpreted on a CPU where TRITON_INTERPRET=1")
    )


def op(
    schema: str, fake: Callable[..., Any], *tags: torch.Tag, flops: Callable[..., int] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated launcher as ``torch.ops.liger_like.<name>``.

    ``fake`` returns outputs without data. ``flops``, for an op that multiplies matrices, returns what torch's
    FlopCounterMode counts. The launcher runs on the GPU of its first tensor, so that models spread over several GPUs
    launch on the right one. It runs again where a newer Triton cannot compile the Gluon kernel that it chose. The
    returned function calls it directly, or through the dispatcher if a mode or a profiler is active.
    """

    def register(launch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def on_device(x: Tensor, *args: Any) -> Any:
            if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
                with torch.cuda.device(x.device):
                    return on_device(x, *args)
            while True:
                try:
                    return launch(x, *args)
                except NotCompiledError as error:
                    error.fall_back()

        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_like::{name}", fake, lib=LIBRARY)
        packet = getattr(torch.ops.liger_like, name)
        dispatched = packet.default
        if flops is not None:
            register_flop_formula(packet, get_raw=True)(lambda *args, out_val: flops(*args))

        @functools.wraps(launch)
        def run(*args: Any) -> Any:
            return dispatched(*args) if torch.compiler.is_compiling() or _heard(args) else on_device(*args)

        return run

    return register


def _heard(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher has more to do than to call the launcher: for a mode, a profiler, a tensor subclass or a
    tensor without data, which the first argument would be.
    """
    listens = torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled() or args[0].is_meta
    return listens or not _PLAIN.issuperset(map(type, args))


def on_shards(rule: Callable[..., Any] | str) -> Callable[[F], F]:
    """Let the decorated op take DTensors by a ``rule`` of ``liger_like.parallel``, a function of the op's arguments; or
    refuse them, and say what to use instead.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            kinds = {*map(type, args), *map(type, kwargs.values())}
            if not any(kind.__name__ == "DTensor" for kind in kinds - _PLAIN):  # of a name, torch 2.11 can compile it
                return function(*args, **kwargs)
            from liger_like.parallel._sharding import run_on_shards

            return run_on_shards(function, rule, args, kwargs)

        return run

    return decorate


class _Once(torch.autograd.Function):
    """Gradients as they are, whose derivative by the other tensors is not known."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(TWICE)


class _ReadOnce:
    """A context whose saved tensors are read once, as a checkpoint gives them out once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a second differentiation of ``backward`` raise; costs time only where a graph of the gradients is asked for.

    torch's own decorator does not connect the error with the inputs of the function: a second derivative by these alone
    is silently zero. What makes its gradients in the forward (``ctx.grads_now``) keeps no inputs, and raises at once.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if getattr(ctx, "grads_now", False):
            raise RuntimeError(TWICE)
        context = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(context, *grads)
        results = results if isinstance(results, tuple) else (results,)
        given = [t for t in (*grads, *context.saved_tensors) if t is not None and t.requires_grad]
        made = [result for result in results if result is not None]
        # a linear function has saved nothing: zero is its second derivative by its inputs, but sums of it raise
        once: Any = _Once.apply
        connected = iter(once(len(made), *made, *(given or [made[0].new_empty(0, requires_grad=True)])))
        return tuple(result if result is None else next(connected) for result in results)

    return run


def apply(function: Any, *args: Any) -> Any:
    """Return ``function.apply(*args)``; under torch.compile a tensor that is passed again is passed as a view.

    torch 2.11 computes wrong gradients for a tensor in two places, and newer versions refuse to compile it.
    """
    if not torch.compiler.is_compiling():
        return function.apply(*args)
    distinct: list[Any] = []
    for arg in args:
        again = isinstance(arg, Tensor) and any(arg is other for other in distinct)
        distinct.append(arg.view_as(arg) if again else arg)
    return function.apply(*distinct)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    floats: tuple[float, ...] = (),
    descriptors: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Run ``kernel[grid](*descriptors, *tensors, *sizes, *floats, **options)`` in less host time.

    ``options`` holds the kernel's constants and Triton's launch options. The dtype and the block of a descriptor
    determine its layout.

    Triton inspects all arguments at every call to find the compiled kernel. This function looks it up by a key of all
    that Triton specialises on, and runs it the way Triton does. Sizes and floats are converted first, since Triton
    would compile another kernel for an int where a float is meant. Triton itself launches in the interpreter, under
    hooks, with tensors that are not aligned to 16 bytes, on AMD (which also specialises on tensor sizes), and in
    versions that ``DIRECT`` does not list.
    """
    options = OPTIONS | options
    sizes, floats = (*map(int, sizes),), (*map(float, floats),)
    # with types: 1, 1.0 and True are equal, but not to a kernel
    key, pointers, bits = [id(kernel), *options, *options.values(), *map(type, options.values())], [], 0
    for tensor in tensors:
        pointer = dtype = None
        if tensor is not None:
            pointer, dtype = tensor.data_ptr(), tensor.dtype
            bits |= pointer
        pointers.append(pointer)
        key.append(dtype)
    for descriptor in descriptors:
        key += descriptor.base.dtype, *descriptor.block_shape
    for size in sizes:
        key.append(size if size < 2 else 16 | size & 15 | size >> 31 << 5)
    given = *descriptors, *tensors, *sizes, *floats
    hooked = _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls
    if INTERPRET or not DIRECT or bits & 15 or hooked or kernel.pre_run_hooks:
        start(kernel, grid, given, options)
        return
    device = tensors[0].get_device()  # type: ignore[union-attr]
    known = device, *key
    found = _COMPILED.get(known)
    if found:
        run, function, metadata, constants = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        grid += (1,) * (3 - len(grid))
        run(*grid, stream, function, metadata, None, None, None, *descriptors, *pointers, *sizes, *floats, *constants)
    else:
        compiled = start(kernel, grid, given, options)
        constants = [options[param.name] for param in kernel.params[len(given) :]]
        _COMPILED[known] = compiled.run, compiled.function, compiled.packed_metadata, constants


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., N] as [M, N] with a contiguous last dimension; copies only where no view has that form."""
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def with_stride(x: Tensor) -> tuple[Tensor, int]:
    """``x`` [..., N] as memory of rows with a contiguous last dimension, and the stride from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows(x)
    return x, x.stride(0)


def dense(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of the strides of ``x``, if it is dense, as transposed heads are; but with a contiguous last dimension."""
    like = torch.empty_like(x, dtype=dtype)
    return like if like.stride(-1) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


def packed(vector: Tensor | None) -> Tensor | None:
    """``vector`` with stride 1, as kernels read vectors; copies only where it has another."""
    return None if vector is None else vector.contiguous()


def is_last_backward() -> bool:
    """Within a backward: whether what it saved may be overwritten, since it runs without ``retain_graph``.

    Never so in traced code, which must not modify what it saved.
    """
    return not (torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())


@functools.cache
def architecture(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU, else 0."""
    on_nvidia = device.type == "cuda" and not torch.version.hip
    return torch.cuda.get_device_capability(device)[0] if on_nvidia else 0


@functools.cache
def num_programs(device: torch.device, each: int = 4) -> int:
    """Programs of a persistent kernel: ``each`` per multiprocessor; few in the interpreter, which runs them in turn."""
    return each * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def load_tile(ptr, stride_m, offs_m, offs_n, M, N, EVEN: tl.constexpr = False):
    """Rows ``offs_m`` (int64: rows times stride pass 2^31) and columns ``offs_n`` in fp32, zero outside [M, N].

    ``EVEN``: no column is outside.
    """
    mask = (offs_m < M)[:, None] if EVEN else (offs_m < M)[:, None] & (offs_n < N)[None, :]
    return tl.load(ptr + offs_m[:, None] * stride_m + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, stride_m, offs_m, offs_n, M, N, value, EVEN: tl.constexpr = False):
    """Store what ``load_tile`` would load, rounded to the dtype of ``ptr``."""
    mask = (offs_m < M)[:, None] if EVEN else (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + offs_m[:, None] * stride_m + offs_n[None, :], value, mask=mask)


@triton.jit
def load_weight(ptr, offs_n, N):
    """Elements ``offs_n`` of a vector in its dtype, zero beyond N; None without one."""
    w = None
    if ptr is not None:
        w = tl.load(ptr + offs_n, mask=offs_n < N, other=0.0)
    return w


@triton.jit
def load_vector(ptr, offs_n, N):
    """Elements ``offs_n`` of a vector in fp32, zero beyond N."""
    return load_weight(ptr, offs_n, N).to(tl.float32)


@triton.jit(do_not_specialize=["P"])
def sum_rows_kernel(x_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum P rows of N fp32 numbers, always in the same order."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for p in range(0, P, BLOCK_P):
        total += load_tile(x_ptr, N, p + tl.arange(0, BLOCK_P).to(tl.int64), offs_n, P, N)
    tl.store(out_ptr + offs_n, tl.sum(total, axis=0), mask=offs_n < N)


@triton.jit
def accumulate(ptr, offs, mask, again, value):
    """Add ``value`` to the program's own memory, or store it there if this is not ``again``."""
    tl.store(ptr + offs, value + tl.load(ptr + offs, mask=tl.where(again, mask, False), other=0.0), mask=mask)


@triton.jit
def tanh_and_slope(x, EXACT: tl.constexpr):
    """tanh(x) and its derivative in fp32; ``EXACT``: to a relative error, not just an absolute one."""
    if not EXACT:
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
        return y, 1.0 - y * y
    # e = exp(-2|x|), tanh |x| = (1 - e) / (1 + e), its slope 4e / (1 + e)^2; near 0, where that cancels, the series
    e = tl.exp(-2.0 * tl.abs(x))
    x2 = x * x
    near = -17.0 / 315 + x2 * (62.0 / 2835 - 1382.0 / 155925 * x2)
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * near)))
    y = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where(x2 < 0.1, near, y), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """``x`` as it would be after a round trip through ``dtype``."""
    return x.to(dtype).to(tl.float32)


def unhooked(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` comes to the forward of its class, and to nothing else."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


def require(name: str, value: Tensor, *, like: Tensor | None = None, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless ``value`` is a floating-point tensor on the device of ``like`` with the given ``shape``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.dim() == 0 or value.shape[-1] == 0:
        raise ValueError(f"{name} must have a last dimension of at least 1, got shape {list(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    if shape is not None and value.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")


def require_type(name: str, value: object, kind: type) -> None:
    """Raise unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``, and of its type: True is not 1."""
    alike = (c for c in choices if isinstance(value, type(c)) and isinstance(value, bool) == isinstance(c, bool))
    if not any(value == choice for choice in alike):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def require_number(
    name: str, value: Any, must: str = "must be finite", low: float = -FLOAT_MAX, high: float = FLOAT_MAX
) -> float:
    """Return ``value`` as a Python float. Raise unless it is a number, of Python or NumPy, in [``low``, ``high``]."""
    if not isinstance(value, int | float) and not isinstance(value, torch.SymInt | torch.SymFloat | numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not torch.compiler.is_compiling() and not low <= value <= high:  # a traced number may have no value
        raise ValueError(f"{name} {must}, got {value}")
    return value if isinstance(value, float) else float(value)


def require_positive(name: str, value: Any) -> float:
    """Return ``value`` as a Python float. Raise unless it is a positive, finite number."""
    return require_number(name, value, "must be positive and finite", low=math.ulp(0.0))


def require_eps(eps: Any) -> float:
    """Return ``eps`` as a Python float. Raise unless it is a non-negative number."""
    eps = require_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps


def require_integer(name: str, value: Any, low: int | None = None) -> int:
    """Return ``value`` as a Python int. Raise unless it is an integer, of Python or NumPy, and at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not torch.compiler.is_compiling():  # a traced number may have no value
        if low is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} must be an integer of 64 bits, got {value}")
    return value if isinstance(value, int | torch.SymInt) else int(value)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on ``device``; None where it is off, as it always is on "meta"."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
