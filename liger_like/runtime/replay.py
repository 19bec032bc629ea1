"""Repeat the launches of an op for inputs like earlier ones, without the Python that prepares them.

Inputs are alike if they have the same signature: sizes, strides, dtypes, devices, alignment and all other arguments.
At the second call of a signature a ``Recording`` notes what the launcher does, and later calls follow a ``Plan``. In
grad mode a ``Node`` follows the plan of the forward, and makes the node of the backward. A launcher that does more than
a plan can is called each time.
"""

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from liger_like.runtime import fallback, launcher, machine, support
from liger_like.runtime.recording import Plan, Recording, taker, tensors_of

MOST = 4096  # signatures that are kept
# by launcher and signature: True after one call, False for no plan
PLANS: "dict[tuple[Any, ...], Plan | Node | bool]" = {}
_SCALARS = {int, str, bool, type(None), torch.dtype}


class Link(NamedTuple):
    """The launches of an autograd function's forward, then the node of its backward.

    ``take`` gets the arguments of the function from those of the call, the constants of the ``Node`` and the results of
    the links before.
    """

    plan: Plan
    function: Any
    take: Callable[[list[Any]], tuple[Any, ...]]


class Node(NamedTuple):
    """A plan of a function in grad mode: its autograd functions, one after the other.

    ``pick`` gets the results of the call from those of the last one; None: all. ``hooks`` are those of the kernels.
    """

    links: tuple[Link, ...]
    constants: tuple[Any, ...]
    pick: Callable[[Any], Any] | None
    hooks: tuple[list[Any], ...]

    def __call__(self, pointers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        links, constants, pick, _ = self
        values = [*args, *kwargs.values(), *constants]
        results: Any = None
        for plan, function, take in links:
            if results is not None:
                values += _several(results)
                pointers = [*pointers, *(t.data_ptr() for t in tensors_of(_several(results)))]
            results = function.apply(*take(values), plan([*pointers]))
        return results if pick is None else pick(results)


class _Watched(threading.local):
    """Hold what ``applied`` did in the call that is recorded. ``tensors`` are those of the call and those that its
    autograd functions have returned, None without a call.
    """

    tensors: list[Tensor] | None = None
    applied: list[tuple[Any, ...]]


_watched = _Watched()


def inputs_of(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that the node of ``function`` gets: the first ``function.inputs`` if it has some, or all."""
    return args[: getattr(function, "inputs", None)]


def applied(function: Any, args: tuple[Any, ...]) -> Any:
    """Return ``function.apply(*inputs, results)`` for the results of ``function.launch(*args)``."""
    inputs = inputs_of(function, args)
    if _watched.tensors is None:
        with torch.no_grad():
            results = function.launch(*args)
        return function.apply(*inputs, results)
    with torch.no_grad(), Recording(_watched.tensors) as recording, launcher.told(recording):
        results = function.launch(*args)
    found = function.apply(*inputs, results)
    _watched.applied.append((recording.plan(results), function, inputs, found))
    _watched.tensors = [*_watched.tensors, *tensors_of(_several(found))]
    return found


def _several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _node(values: tuple[Any, ...], results: Any) -> Node | None:
    """Return the node of the calls of ``applied``, from the arguments ``values`` of the function that returned
    ``results``, or None if the function does more.
    """
    calls = _watched.applied
    constants = [arg for *_, args, _ in calls for arg in args if not isinstance(arg, Tensor)]
    hidden = any(isinstance(leaf, Tensor) for leaf in tree_leaves(constants))
    if not calls or hidden or any(plan is None or plan.calls for plan, *_ in calls):
        return None
    places = {id(value): i for i, value in enumerate(values) if isinstance(value, Tensor)}
    following, count = iter(range(len(values), len(values) + len(constants))), len(values) + len(constants)
    links = []
    for plan, function, args, found in calls:
        take = [places.get(id(arg)) if isinstance(arg, Tensor) else next(following) for arg in args]
        if None in take:
            return None
        links.append(Link(plan, function, taker(take)))  # type: ignore[arg-type]
        places |= {id(t): i for i, t in enumerate(_several(found), count)}
        count += len(_several(found))
    outputs = {id(t): i for i, t in enumerate(_several(found))}
    picked = [outputs.get(id(t)) for t in (results if type(results) is tuple else (results,))]
    if results is not found and None in picked:
        return None
    pick = None if results is found else taker(picked) if type(results) is tuple else itemgetter(*picked)
    return Node(tuple(links), tuple(constants), pick, tuple(hook for plan, *_ in calls for hook in plan.hooks))


def is_here(x: Any) -> bool:
    """Return True if ``x`` is a plain tensor on the current GPU."""
    return type(x) in (Tensor, Parameter) and x.is_cuda and x.get_device() == torch._C._cuda_getDevice()


def signature(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return all that a launcher may look at but the values of tensors, and the pointers of the tensors.

    Returns None if an argument is of an unknown kind, if the first is not on the current GPU, if somebody watches
    launches, and if a machine is pretended. Returns None, too, for a tensor whose memory is no array of its values, and
    for values on another device: the host may read them, and no recording notices that.
    """
    hooked = launcher._RUNTIME.launch_enter_hook.calls or launcher._RUNTIME.launch_exit_hook.calls
    watched = hooked or launcher._recorded is not None or support._reasons is not None
    if watched or machine.current is not None or not args or not is_here(args[0]):
        return None
    casts = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")  # products of torch
    key: list[Any] = [casts, *launcher.OPTIONS.values(), *fallback.BROKEN]
    pointers: list[Any] = []
    here = args[0].get_device()
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            try:
                pointer, device, strides = arg.data_ptr(), arg.get_device(), arg.stride()
            except RuntimeError:  # sparse and nested tensors have none; asking them for their layout costs time
                return None
            if arg.is_neg() or ((device != here or not pointer) and arg.numel()):
                return None
            pointers.append(pointer)
            key += arg.shape, strides, arg.dtype, device, pointer & 15, arg.requires_grad
        elif kind in _SCALARS:  # with types: 1 and True are equal
            key += kind, arg
        elif kind is float:
            key += kind, arg or str(arg)  # 0.0 and -0.0 are equal
        elif (kind is list or kind is tuple) and {*map(type, arg)} <= _SCALARS:
            key += kind, *arg, *map(type, arg)
        else:
            return None
    return tuple(key), pointers


def repeat(
    launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...], pointers: list[Any]
) -> Any:
    """Return ``launch(*args, **kwargs)``, by a plan if there is one; ``key``, ``pointers`` are their signature."""
    key = launch, *kwargs, *key
    plan = PLANS.get(key)
    if type(plan) is Plan and not any(plan.hooks):
        return plan(pointers, args, kwargs)
    tensors = _second(plan, args, kwargs)
    if tensors is None:
        results = launch(*args, **kwargs)
        _note(key)
        return results
    with Recording(tensors) as recording, launcher.told(recording):
        results = launch(*args, **kwargs)
    PLANS[key] = recording.plan(results) or False
    return results


def repeat_with_node(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...],
    pointers: list[Any],
) -> Any:  # fmt: skip
    """Return ``function(*args, **kwargs)`` in grad mode, by a plan and a new node of the backward if there is a plan.

    ``key`` and ``pointers`` are the signature of the arguments.
    """
    key = function, torch.are_deterministic_algorithms_enabled(), *kwargs, *key
    node = PLANS.get(key)
    if type(node) is Node and not any(node.hooks):
        return node(pointers, args, kwargs)
    tensors = _second(node, args, kwargs)
    if tensors is None:
        results = function(*args, **kwargs)
        _note(key)
        return results
    before = vars(_watched).copy()
    _watched.tensors, _watched.applied = tensors, []
    try:
        results = function(*args, **kwargs)
        PLANS[key] = _node((*args, *kwargs.values()), results) or False
    finally:
        vars(_watched).update({"tensors": None, "applied": []} | before)
    return results


def _note(key: tuple[Any, ...]) -> None:
    """Note that a call of ``key`` is done. Only then all of its kernels are compiled, and a recording finds them."""
    if key not in PLANS:
        if len(PLANS) >= MOST:
            once = [known for known, plan in [*PLANS.items()] if plan is True]  # of sizes that differ in each step
            for known in once if len(once) > MOST // 2 else [*PLANS]:
                PLANS.pop(known, None)
        PLANS[key] = True


def _second(plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """Return the tensors of a call if it is the second of its key, which is recorded: ``plan`` is then True."""
    tensors = tensors_of((*args, *kwargs.values()))
    several = len({*map(id, tensors)}) == len(tensors)  # a plan must know the arguments apart
    return tensors if plan is True and several else None
