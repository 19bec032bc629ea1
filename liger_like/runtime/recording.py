"""Plans of the launches of an op, and the recordings from which they are made (see ``runtime.replay``).

A launcher that only allocates, views, launches and calls some ops of torch does the same for all inputs of one
signature. A ``Recording`` notes what the launcher allocates, which pointers, sizes and constants each of its kernels
gets, and which tensors each op of torch gets. A ``Plan`` only allocates, launches and calls.
"""

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
_ZEROS = {_ATEN.zeros.default, _ATEN.new_zeros.default}
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
    _ATEN.view.dtype,
}
_CALLS = {  # sizes and strides of their results do not depend on values
    _ATEN._foreach_zero_.default,
    _ATEN._to_copy.default,
    _ATEN.addmm.dtype_out,
    _ATEN.addmm.out,
    _ATEN.arange.out,
    _ATEN.arange.start_out,
    _ATEN.eq.Scalar,
    _ATEN.fill_.Scalar,
    _ATEN.index_select.default,
    _ATEN.index_select.out,
    _ATEN.masked_fill_.Scalar,
    _ATEN.mm.out,
    _ATEN.sum.dim_IntList,
    _ATEN.zero_.default,
}
SMALL = 1 << 20  # bytes; larger memory is better apart, since torch keeps and reuses it
ALIGNMENT = 512  # bytes, of torch's memory on GPUs
LASTING: list[Tensor] = []  # of the process, not of a call: plans may pass it to kernels


class _Launch(NamedTuple):
    """A compiled kernel with all of its arguments but the pointers, which are taken from those of the call."""

    run: Callable[..., None]
    grid: tuple[int, ...]
    before: tuple[Any, ...]  # between the stream and the descriptors
    descriptors: tuple[tuple[type, dict[str, Any], int] | None, ...]  # types, fields and places of their pointers
    take: Callable[[list[int | None]], tuple[int | None, ...]]
    after: tuple[Any, ...]


class _Call(NamedTuple):
    """An op of torch, and functions that take its arguments from the tensors of the call."""

    op: Any
    args: tuple[Callable[[list[Any]], Any], ...]
    kwargs: dict[str, Callable[[list[Any]], Any]]

    def __call__(self, tensors: list[Any]) -> None:
        op, args, kwargs = self
        tensors.append(op(*[take(tensors) for take in args], **{name: take(tensors) for name, take in kwargs.items()}))


class _Memory:
    """The base of a descriptor: Triton asks for nothing but the pointer."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class Plan(NamedTuple):
    """The memory that an op allocates, the offsets of its views, its launches and its calls of torch.

    ``results`` are places among the memory, the tensors of the call and the results of calls, one or several.
    """

    makers: tuple[Callable[[], Tensor], ...]
    views: tuple[tuple[int, int], ...]
    steps: tuple[_Launch | _Call, ...]
    calls: bool  # torch
    results: int | tuple[int | None, ...] | None
    device: int
    hooks: tuple[list[Any], ...]  # of the kernels: empty lists until somebody adds a hook

    def __call__(self, pointers: list[Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Launch for the inputs at ``pointers``, the tensors of ``args`` and ``kwargs``, and return the results."""
        makers, views, steps, calls, results, device, _ = self
        memory: list[Any] = [make() for make in makers]
        pointers += [t.data_ptr() for t in memory]
        if calls:
            memory += tensors_of((*args, *kwargs.values()))
        for place, offset in views:
            pointers.append(pointers[place] + offset)
        pointers.append(None)
        stream = torch._C._cuda_getCurrentRawStream(device)
        for step in steps:
            if type(step) is _Call:
                step(memory)
                continue
            run, grid, before, descriptors, take, after = step  # type: ignore[misc]
            described = [d and _described(*d, pointers) for d in descriptors] if descriptors else ()
            run(*grid, stream, *before, *described, *take(pointers), *after)
        if type(results) is tuple:
            return tuple([place if place is None else memory[place] for place in results])
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
        self.steps: list[tuple[Any, ...]] = []  # launches and ops of torch
        self.made: dict[int, Tensor] = {}  # results of these ops, but for views of inputs and memory
        self.complete = True
        for t in LASTING:
            self._place(t, self.inputs + len(self.makers), 0)
            self.makers.append((t, partial(_same, t)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of torch, and note it if a plan can repeat it."""
        kwargs = kwargs or {}
        with self:  # in inference mode reshape() comes whole, and contiguous() even if it does nothing
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        tensors = tensors_of((*args, *kwargs.values()))
        if func in _EMPTY:
            self._make(torch.empty_strided, out, tuple(out.shape), out.stride())
        elif func in _ZEROS:
            self._make(torch.zeros, out, tuple(out.shape))
        elif (func in _VIEWS or func in _CALLS) and all(map(self._knows, tensors)) and _on_one_device(tensors, out):
            self.steps.append((func, args, kwargs, out))
            if func in _VIEWS and id(args[0]) in self.places:
                place, offset = self.places[id(args[0])]
                self._place(out, place, offset + _start(out) - _start(args[0]))
            elif isinstance(out, Tensor) and not self._knows(out):  # an op in place returns its argument
                self.held.append(out)
                self.made[id(out)] = out
        else:
            self.refuse()
        return out

    def _knows(self, t: Tensor) -> bool:
        return id(t) in self.places or id(t) in self.made

    def _make(self, make: Callable[..., Tensor], t: Tensor, *sizes: tuple[int, ...]) -> None:
        self._place(t, self.inputs + len(self.makers), 0)
        self.makers.append((t, partial(make, *sizes, dtype=t.dtype, device=t.device)))

    def _place(self, t: Tensor, place: int, offset: int) -> None:
        self.held.append(t)
        self.places[id(t)] = place, offset

    def refuse(self) -> None:
        """Forget everything: no plan can repeat this call."""
        self.complete = False
        for record in (self.held, self.places, self.makers, self.steps, self.made):
            record.clear()  # type: ignore[attr-defined]

    def add(
        self, kernel: Any, found: tuple[Any, ...], grid: tuple[int, ...], descriptors: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Note a launch."""
        if all(t is None or id(t) in self.places for t in (*tensors, *(d and d.base for d in descriptors))):
            self.steps.append((None, kernel, found, grid, descriptors, tensors, numbers))
        else:
            self.refuse()

    def plan(self, results: Any) -> Plan | None:
        """Return a plan that repeats the call, which has returned ``results``, or None if no plan can."""
        several = results if type(results) is tuple else (results,)
        wholes = [t if t is None else self._whole(t) for t in several]
        if not self.complete or any(whole is None is not t for t, whole in zip(several, wholes, strict=True)):
            return None
        steps, read, spots = self._needed(wholes)
        pointed = {place for place, _ in spots}
        makers = {i: maker for i, maker in enumerate(self.makers, self.inputs) if i in pointed or id(maker[0]) in read}
        shares = self._share(makers, read)
        spots = {(place, offset): shares.get(place, (place, 0)) for place, offset in spots}
        spots = {spot: (place, start + spot[1]) for spot, (place, start) in spots.items()}
        views = [*dict.fromkeys(spot for spot in spots.values() if spot[1])]
        order = {spot: i for i, spot in enumerate([*((place, 0) for place in (*range(self.inputs), *makers)), *views])}
        pointers = {key: order[spots[spot]] for key, spot in self.places.items() if spot in spots}
        pointers[id(None)] = len(order)
        slots = {id(t): i for i, t in enumerate([*(t for t, _ in makers.values()), *self.held[: self.inputs]])}
        taken: list[_Launch | _Call] = []
        count = len(slots)
        for op, *step in steps:
            if op is None:
                taken.append(_launch(*step, pointers))
            elif op in _VIEWS and _layout(step[-1]) == _layout(step[0][0]):
                slots[id(step[-1])] = slots[id(step[0][0])]
            else:
                taken.append(_call(op, *step, slots))
                slots.setdefault(id(step[-1]), count)
                count += 1
        found = [t if t is None else slots[id(t)] for t in wholes]
        hooks = tuple(kernel.pre_run_hooks for op, kernel, *_ in steps if not op)
        return Plan(
            tuple(make for _, make in makers.values()), tuple((order[place, 0], offset) for place, offset in views),
            tuple(taken), any(type(step) is _Call for step in taken), tuple(found) if several is results else found[0],
            self.held[0].get_device(), hooks,
        )  # fmt: skip

    def _share(self, makers: dict[int, Any], read: set[int]) -> dict[int, tuple[int, int]]:
        """Let small memory that only kernels read take one allocation; return where it is: the place and the offset."""
        empty = {i: t for i, (t, make) in makers.items() if make.func is torch.empty_strided and id(t) not in read}
        alone = [i for i, t in empty.items() if t.untyped_storage().nbytes() <= SMALL]
        places, size, place = {}, 0, self.inputs + len(self.makers)
        for i in alone if len(alone) > 1 else ():
            t, _ = makers.pop(i)
            places[i] = place, size
            size += -(-t.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        if places:
            makers[place] = None, partial(torch.empty_strided, (size,), (1,), dtype=torch.uint8, device=t.device)
        return places

    def _whole(self, t: Tensor) -> Tensor | None:
        """Return the tensor that was made and is ``t`` as a whole, else None."""
        if id(t) in self.made:
            return t
        place, offset = self.places.get(id(t), (-1, 0))
        if place < self.inputs or offset:
            return None
        made = self.makers[place - self.inputs][0]
        return made if _layout(made) == _layout(t) else None

    def _needed(self, results: list[Tensor | None]) -> tuple[list[Any], set[int], dict[tuple[int, int], None]]:
        """Return the steps but for views of which only kernels read, the ids of the tensors that the steps or
        ``results`` read, and the spots that kernels read.
        """
        steps, read, spots = [], {*map(id, results)}, {}
        for op, *step in reversed(self.steps):
            if op is None:
                *_, descriptors, tensors, _ = step
                given = (*tensors, *(d and d.base for d in descriptors))
                spots |= {self.places[id(t)]: None for t in given if t is not None}
            elif op in _VIEWS and id(step[-1]) not in read:
                continue
            else:
                args, kwargs, _ = step
                read |= {*map(id, tensors_of((*args, *kwargs.values())))}
            steps.append((op, *step))
        return steps[::-1], read, spots


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among ``values``, and in their lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) is list:
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _on_one_device(tensors: list[Tensor], out: Any) -> bool:
    """Return True unless an op copies to another device: the host may read such a copy, as ``tolist`` does."""
    return len({t.device for t in tensors_of((*tensors, out))}) == 1


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.storage_offset()


def _same(t: Tensor) -> Tensor:
    return t


def _start(t: Tensor) -> int:
    """Return the offset of ``t`` in its storage, in bytes: without elements it has no pointer."""
    return t.storage_offset() * t.element_size()


def _launch(
    kernel: Any, found: tuple[Any, ...], grid: tuple[int, ...], descriptors: tuple[Any, ...],
    tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], places: dict[int, int],
) -> _Launch:  # fmt: skip
    run, function, metadata, constants = found
    described = [d and (type(d), vars(d) | {"base": None}, places[id(d.base)]) for d in descriptors]
    take = taker([places[id(t)] for t in tensors])
    before = function, metadata, None, None, None
    return _Launch(run, grid, before, tuple(described), take, (*numbers, *constants))


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any, slots: dict[int, int]) -> _Call:
    def take(arg: Any) -> Callable[[list[Any]], Any]:
        if isinstance(arg, Tensor):
            return itemgetter(slots[id(arg)])
        if type(arg) is list and tensors_of(arg):
            parts = [*map(take, arg)]
            return lambda tensors: [part(tensors) for part in parts]
        return lambda tensors: arg

    return _Call(op, tuple(map(take, args)), {name: take(arg) for name, arg in kwargs.items()})


def taker(places: list[int]) -> Callable[[list[int | None]], tuple[int | None, ...]]:
    """Return a function that returns the items of a list at ``places``; itemgetter returns no tuple of one item."""
    return itemgetter(*places) if len(places) > 1 else lambda pointers: (pointers[places[0]],)
