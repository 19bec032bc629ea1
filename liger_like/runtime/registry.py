"""Register an op with torch's dispatcher, and say what it does with DTensors."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils.flop_counter import register_flop_formula

from liger_like.runtime.autograd import is_untransformed
from liger_like.runtime.fallback import NotCompiledError
from liger_like.runtime.launcher import is_recorded
from liger_like.runtime.replay import repeat, repeat_with_node, signature
from liger_like.runtime.support import INTERPRET

LIBRARY = torch.library.Library("liger_like", "DEF")
LAUNCHERS: dict[Any, Callable[..., Any]] = {}  # by op, for traces that count what launchers allocate
_LEAVES = {Tensor, torch.nn.Parameter, int, float, str, bool, torch.dtype, type(None)}
_PLAIN = _LEAVES | {list, tuple}
F = TypeVar("F", bound=Callable[..., Any])


def op(
    schema: str,
    fake: Callable[..., Any],
    *tags: torch.Tag,
    flops: Callable[..., int] | None = None,
    inlined: bool | Callable[..., bool] = False,
    in_cuda_graph: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
    replayed: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated launcher as ``torch.ops.liger_like.<name>``.

    ``fake`` returns outputs without data. ``flops``, for an op that multiplies matrices, returns the count for torch's
    FlopCounterMode. The launcher runs on the GPU of its first tensor, so that models spread over several GPUs launch on
    the right one. It runs again if a newer Triton cannot compile the Gluon kernel that it chose. The returned function
    calls the launcher directly, or through the dispatcher if a mode or a profiler is active.

    ``inlined``: torch.compile's graphs hold the launches of Triton kernels in place of the op; for a function, if it
    returns True for the op's arguments. ``in_cuda_graph`` returns the arguments of the op in a graph of torch.compile
    that becomes a CUDA graph. ``replayed``: the launcher looks at nothing but its arguments, so later calls of the same
    signature repeat its launches (``runtime.replay``).
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

        def run_here(args: tuple[Any, ...], known: Any) -> Any:
            """Run the launcher, or repeat its launches: ``known`` is the signature of ``args``, or None."""
            if known is None:
                return on_device(*args)
            try:
                return repeat(launch, args, {}, *known)
            except NotCompiledError as error:
                error.fall_back()
                return on_device(*args)

        def called(*args: Any) -> Any:
            """Run the op for the dispatcher, which compiled graphs call."""
            return run_here(args, signature(args) if replayed and not _is_heard() else None)

        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        LIBRARY.impl(name, called, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_like::{name}", fake, lib=LIBRARY)
        packet = getattr(torch.ops.liger_like, name)
        dispatched = packet.default
        LAUNCHERS[dispatched] = launch
        if inlined and not INTERPRET:
            torch.library.register_torch_dispatch(
                f"liger_like::{name}", FunctionalTensorMode, _inlining(launch, inlined), lib=LIBRARY
            )
        elif in_cuda_graph is not None:
            torch.library.register_torch_dispatch(
                f"liger_like::{name}", FunctionalTensorMode, _changing(in_cuda_graph), lib=LIBRARY
            )
        if flops is not None:
            register_flop_formula(packet, get_raw=True)(lambda *args, out_val: flops(*args))

        @functools.wraps(launch)
        def run(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return dispatched(*args)
            if _is_heard():
                return on_device(*args) if _hears_recording() else dispatched(*args)
            known = signature(args) if replayed else None
            return dispatched(*args) if known is None and _is_special(args) else run_here(args, known)

        return run

    return register


def _inlining(launch: Callable[..., Any], inlined: bool | Callable[..., bool]) -> Callable[..., Any]:
    """Return the rule by which an op becomes launches of its kernels in a compiled graph, as a ``triton_op`` does."""

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # these imports take a second
        from torch.export._trace import custom_triton_ops_decomposition_disabled
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        if not {FunctionalTensor, FakeTensor, Tensor}.issuperset(types):
            return NotImplemented
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        # torch.export keeps the op; launchers compare sizes, which unbacked ones refuse
        kept = custom_triton_ops_decomposition_disabled() or free_unbacked_symbols(tensors)
        if kept or (callable(inlined) and not inlined(*args, **kwargs)):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return launch(*args, **kwargs)

    return rule


def _changing(in_cuda_graph: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[..., Any]:
    """Return the rule that passes other arguments to an op where Inductor makes CUDA graphs of the graph."""

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._inductor import config  # this import takes long

        args = in_cuda_graph(args) if config.triton.cudagraphs else args
        return mode.__torch_dispatch__(op, types, args, kwargs)

    return rule


def _kinds(values: tuple[Any, ...]) -> set[type]:
    """Return the types of ``values`` and of the items of their lists and tuples, such as the logits of layers."""
    kinds = {*map(type, values)}
    if tuple in kinds or list in kinds:
        kinds |= {type(item) for value in values if isinstance(value, tuple | list) for item in value}
    return kinds


def _is_heard() -> Any:
    """Return True while a mode or a profiler is active, which must see the op."""
    return torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled()


def _hears_recording() -> bool:
    """Return True if the only mode is a recording of the function that calls the op."""
    alone = torch._C._len_torch_dispatch_stack() == 1 and not torch._C._autograd._profiler_enabled()
    return alone and is_recorded()


def _is_special(args: tuple[Any, ...]) -> bool:
    """Return True if the dispatcher must handle an argument: a tensor subclass, a first tensor without data, or a
    tensor that is minus its memory, as ``x.conj().imag`` is, or zeros without memory.
    """
    return args[0].is_meta or not _kinds(args) <= _PLAIN or any(map(_is_lazy, args))


def _is_lazy(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_neg() or value._is_zerotensor()
    return isinstance(value, tuple | list) and any(map(_is_lazy, value))


def together(function: F) -> F:
    """Let later calls of the same signature repeat the launches of all ops that the decorated function calls.

    It looks at nothing but its arguments, and in grad mode at whether algorithms must be deterministic.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        again, known = _again(args, {})
        return again(function, args, {}, *known) if known else function(*args)

    return run  # type: ignore[return-value]


def _again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return how a call is repeated, and its signature; None without one."""
    if torch.compiler.is_compiling() or _is_heard() or not is_untransformed():
        return None, None
    again = repeat_with_node if torch.is_grad_enabled() else repeat
    return again, signature((*args, *kwargs.values()))


def on_shards(rule: Callable[..., Any], *, replayed: bool = False) -> Callable[[F], F]:
    """Let the decorated op take DTensors: each rank runs it on its shards, by a ``rule`` (see ``runtime.dtensor``).

    ``replayed``: the op looks at nothing but its arguments, and in grad mode at whether algorithms must be
    deterministic, so later calls of the same signature repeat its launches, without its checks.
    """

    def run(function: F, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from liger_like.runtime.dtensor import run_on_shards  # importing DTensor takes long

        return run_on_shards(function, rule, args, kwargs)

    return _for_dtensors(run, replayed)


def refuses_dtensors(instead: str, *, replayed: bool = False) -> Callable[[F], F]:
    """Let the decorated op raise TypeError for DTensors, with the name of the function to use ``instead``.

    ``replayed``: as for ``on_shards``.
    """

    def run(function: F, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise TypeError(f"{function.__name__} takes no DTensors: use {instead}, or give local tensors (to_local())")

    return _for_dtensors(run, replayed)


def _for_dtensors(handle: Callable[..., Any], replayed: bool) -> Callable[[F], F]:
    """Return a decorator that calls ``handle(function, args, kwargs)`` if an argument is a DTensor."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            again, known = _again(args, kwargs) if replayed else (None, None)
            if known:
                return again(function, args, kwargs, *known)
            if {*map(type, args), *map(type, kwargs.values())} <= _LEAVES:
                return function(*args, **kwargs)
            kinds = _kinds((*args, *kwargs.values())) - _PLAIN
            if any(kind.__name__ == "DTensor" for kind in kinds):  # by name: torch 2.11 can compile that
                return handle(function, args, kwargs)
            return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
