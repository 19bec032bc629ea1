"""Repeat the launches of an op for inputs like earlier ones, without the Python that prepares them.

A launcher that only allocates, views and launches does the same for all inputs of one signature: sizes, strides,
dtypes, devices, alignment and all other arguments. At the second call of a signature a ``Recording`` notes what the
launcher allocates, and which pointers, sizes and constants each of its kernels gets. Later calls only allocate and
launch. A launcher that does anything else is called each time.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from liger_like.runtime import fallback, launcher, machine, support

MOST = 4096  # signatures that are kept
_ATEN = torch.ops.aten
_MAKES = {
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
_VIEWS = {
    _ATEN.alias.default,
    _ATEN.detach.default,
    _ATEN.expand.default,
    _ATEN.permute.default,
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.squeeze.dim,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
}
PLANS: "dict[tuple[Any, ...], Plan | bool]" = {}  # by launcher and signature: True after one call, False for no plan
_SCALARS = {int, str, bool, type(None), torch.dtype}


class _Launch(NamedTuple):
    """A compiled kernel with all of its arguments but the pointers, which are taken from those of the call."""

    run: Callable[..., None]
    grid: tuple[int, ...]
    before: tuple[Any, ...]  # between the stream and the descriptors
    descriptors: tuple[tuple[type, dict[str, Any], int] | None, ...]  # types, fields and places of their pointers
    take: Callable[[list[int | None]], tuple[int | None, ...]]
    after: tuple[Any, ...]


class _Memory:
    """The base of a descriptor: Triton asks for nothing but the pointer."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class Plan(NamedTuple):
    """The memory that an op allocates, the offsets of its views, and its launches; ``results`` are places in the
    memory, one or several.
    """

    makers: tuple[Callable[[], Tensor], ...]
    views: tuple[tuple[int, int], ...]
    launches: tuple[_Launch, ...]
    results: int | tuple[int, ...] | None
    device: int
    hooks: tuple[list[Any], ...]  # of the kernels: empty lists until somebody adds a hook

    def __call__(self, pointers: list[Any]) -> Any:
        """Launch for inputs at ``pointers``, and return the results."""
        makers, views, launches, results, device, _ = self
        memory = [make() for make in makers]
        pointers += [t.data_ptr() for t in memory]
        for place, offset in views:
            pointers.append(pointers[place] + offset)
        pointers.append(None)
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, grid, before, descriptors, take, after in launches:
            described = [d and _described(*d, pointers) for d in descriptors] if descriptors else ()
            run(*grid, stream, *before, *described, *take(pointers), *after)
        if type(results) is tuple:
            return tuple([memory[i] for i in results])
        return None if results is None else memory[results]


def _described(kind: type, fields: dict[str, Any], place: int, pointers: list[Any]) -> Any:
    """Return a new descriptor of the memory at ``place``: two threads may follow a plan at once."""
    descriptor = object.__new__(kind)
    vars(descriptor).update(fields, base=_Memory(pointers[place]))
    return descriptor


class Recording(TorchDispatchMode):
    """A record of what a launcher does with ``tensors``."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.held = [*tensors]  # so that no other tensor gets their ids
        self.inputs = len(self.held)
        self.places = {id(t): (i, 0) for i, t in enumerate(self.held)}  # of inputs, of memory, and of their views
        self.makers: list[Any] = []
        self.launches: list[Any] = []
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of torch, and note it if it only allocates or views."""
        kwargs = kwargs or {}
        with self:  # in inference mode reshape() comes whole, and contiguous() even if it does nothing
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if func in _MAKES:
            self._make(torch.empty_strided, out, tuple(out.shape), out.stride())
        elif func is _ATEN.zeros.default:
            self._make(torch.zeros, out, tuple(out.shape))
        elif func in _VIEWS and id(args[0]) in self.places:
            place, offset = self.places[id(args[0])]
            steps = out.storage_offset() - args[0].storage_offset()  # a view without elements has no pointer
            self._place(out, place, offset + steps * out.element_size())
        else:
            self.refuse()
        return out

    def _make(self, make: Callable[..., Tensor], t: Tensor, *sizes: tuple[int, ...]) -> None:
        self._place(t, self.inputs + len(self.makers), 0)
        self.makers.append((make, sizes, {"dtype": t.dtype, "device": t.device}))

    def _place(self, t: Tensor, place: int, offset: int) -> None:
        self.held.append(t)
        self.places[id(t)] = place, offset

    def refuse(self) -> None:
        """Forget everything: no plan can repeat this call."""
        self.complete = False
        for record in (self.held, self.places, self.makers, self.launches):
            record.clear()  # type: ignore[attr-defined]

    def add(
        self, kernel: Any, found: tuple[Any, ...], grid: tuple[int, ...], descriptors: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Note a launch."""
        if all(t is None or id(t) in self.places for t in (*tensors, *(d and d.base for d in descriptors))):
            self.launches.append((kernel, found, grid, descriptors, tensors, numbers))
        else:
            self.refuse()

    def plan(self, results: Any) -> Plan | None:
        """Return a plan that repeats the call, which has returned ``results``, or None if no plan can."""
        several = results if isinstance(results, tuple) else () if results is None else (results,)
        found = [self._memory_of(t) for t in several]
        if not self.complete or None in found:
            return None
        whole = self.inputs + len(self.makers)
        views = [*dict.fromkeys(spot for spot in self.places.values() if spot[1])]
        spots = {(place, 0): place for place in range(whole)} | {spot: whole + i for i, spot in enumerate(views)}
        places = {id(None): whole + len(views)} | {key: spots[spot] for key, spot in self.places.items()}
        launches = []
        for _, (run, function, metadata, constants), grid, descriptors, tensors, numbers in self.launches:
            described = [d and (type(d), vars(d) | {"base": None}, places[id(d.base)]) for d in descriptors]
            take = _taker([places[id(t)] for t in tensors])
            before = function, metadata, None, None, None
            launches.append(_Launch(run, grid, before, tuple(described), take, (*numbers, *constants)))
        hooks = tuple(kernel.pre_run_hooks for kernel, *_ in self.launches)
        one = None if results is None else found[0]
        makers = tuple(partial(make, *sizes, **options) for make, sizes, options in self.makers)
        results, device = tuple(found) if several is results else one, self.held[0].get_device()
        return Plan(makers, tuple(views), tuple(launches), results, device, hooks)

    def _memory_of(self, t: Tensor) -> int | None:
        """Return the index of the memory that ``t`` is, as a whole, else None."""
        place, _ = self.places.get(id(t), (-1, 0))
        if place < self.inputs:
            return None
        _, sizes, options = self.makers[place - self.inputs]
        same = sizes[0] == t.shape and t.dtype == options["dtype"] and t.stride() == sizes[-1]
        return place - self.inputs if same else None


def _taker(places: list[int]) -> Callable[[list[int | None]], tuple[int | None, ...]]:
    """Return a function that returns the items of a list at ``places``; itemgetter returns no tuple of one item."""
    return itemgetter(*places) if len(places) > 1 else lambda pointers: (pointers[places[0]],)


def is_here(x: Any) -> bool:
    """Return True if ``x`` is a plain tensor on the current GPU."""
    return type(x) in (Tensor, Parameter) and x.is_cuda and x.get_device() == torch._C._cuda_getDevice()


def signature(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return all that a launcher may look at but the values of tensors, and the pointers of the tensors.

    Returns None if an argument is of an unknown kind, if the first is not on the current GPU, if somebody watches
    launches, and if a machine is pretended.
    """
    hooked = launcher._RUNTIME.launch_enter_hook.calls or launcher._RUNTIME.launch_exit_hook.calls
    watched = hooked or launcher._recorded is not None or support._reasons is not None
    if watched or machine.current is not None or not args or not is_here(args[0]):
        return None
    key: list[Any] = [*launcher.OPTIONS.values(), *fallback.BROKEN]
    pointers: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            pointer = arg.data_ptr()
            pointers.append(pointer)
            key += arg.shape, arg.stride(), arg.dtype, arg.get_device(), pointer & 15, arg.requires_grad
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
        return plan(pointers)
    if plan is None:
        if len(PLANS) >= MOST:
            PLANS.clear()
        PLANS[key] = True
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    if plan is not True or len({*map(id, tensors)}) < len(tensors):  # a plan must know the arguments apart
        return launch(*args, **kwargs)
    with Recording(tensors) as recording, launcher.told(recording):
        results = launch(*args, **kwargs)
    PLANS[key] = recording.plan(results) or False
    return results
