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
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

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

    def __call__(self, tensors: list[Any], pointers: list[Any]) -> None:
        op, args, kwargs = self
        tensors.append(op(*[take(tensors) for take in args], **{name: take(tensors) for name, take in kwargs.items()}))


class _Make(NamedTuple):
    """An allocation of large memory that no launch before reads: its places among the tensors and the pointers."""

    make: Callable[[], Tensor]
    place: int
    pointer: int

    def __call__(self, tensors: list[Any], pointers: list[Any]) -> None:
        make, place, pointer = self
        tensors[place] = t = make()
        pointers[pointer] = t.data_ptr()


class _Free(NamedTuple):
    """The end of large memory that no later launch reads: its place among the tensors."""

    place: int

    def __call__(self, tensors: list[Any], pointers: list[Any]) -> None:
        tensors[self.place] = None


_Step = _Launch | _Call | _Make | _Free


class _Memory(int):
    """The base of a descriptor: Triton asks for nothing but the pointer."""

    data_ptr = int.__int__


class Plan(NamedTuple):
    """The memory that an op allocates, the offsets of its views, its launches and its calls of torch.

    ``results`` are places among the memory, the tensors of the call and the results of calls, one or several. Large
    memory is allocated before its first step and freed behind its last, as the launcher does; its maker is None.
    """

    makers: tuple[Callable[[], Tensor] | None, ...]
    views: tuple[tuple[int, int], ...]
    steps: tuple[_Step, ...]
    calls: bool  # torch
    results: int | tuple[int | None, ...] | None
    device: int
    hooks: tuple[list[Any], ...]  # of the kernels: empty lists until somebody adds a hook

    def __call__(self, pointers: list[Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Launch for the inputs at ``pointers``, the tensors of ``args`` and ``kwargs``, and return the results."""
        makers, views, steps, calls, results, device, _ = self
        memory: list[Any] = [make and make() for make in makers]
        pointers += [t if t is None else t.data_ptr() for t in memory]
        if calls:
            memory += tensors_of((*args, *kwargs.values()))
        for place, offset in views:
            pointers.append(pointers[place] + offset)
        pointers.append(None)
        stream = torch._C._cuda_getCurrentRawStream(device)
        for step in steps:
            if type(step) is not _Launch:
                step(memory, pointers)  # type: ignore[operator]
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
    descriptor.__dict__ = fields | {"base": _Memory(pointers[place])}
    return descriptor


class _Seen:
    """Stands for a tensor in a recording, which does not hold it: the launcher frees memory as it does without."""

    def __init__(self, t: Tensor) -> None:
        self.layout = t.shape, t.stride(), t.dtype, t.storage_offset()
        self.nbytes = t.untyped_storage().nbytes()


class Recording(TorchDispatchMode):
    """A record of what a launcher does with ``tensors``."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.seen: Any = WeakTensorKeyDictionary()  # what stands for a tensor
        self.held: list[_Seen] = []  # so that no other gets their ids
        self.inputs, self.device = len(tensors), tensors[0].get_device()
        self.places: dict[int, tuple[int, int]] = {}  # of inputs, of memory, and of their views
        self.makers: list[Any] = []
        self.steps: list[tuple[Any, ...]] = []  # launches and ops of torch
        self.made: dict[int, _Seen] = {}  # results of these ops, but for views of inputs and memory
        self.complete = True
        for i, t in enumerate(tensors):
            self._place(t, i, 0)
        for t in LASTING:
            self._make(partial(_same, t), t)

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
            self._make(partial(torch.empty_strided, tuple(out.shape), out.stride(), **_kind(out)), out)
        elif func is _ATEN.clone.default and self._knows(args[0]):  # as contiguous() copies
            self._make(partial(torch.empty_strided, tuple(out.shape), out.stride(), **_kind(out)), out)
            copied, source = self.seen[out], self.seen[args[0]]
            self.steps.append((_ATEN.copy_.default, (copied, source), {}, copied))
        elif func in _ZEROS:
            self._make(partial(torch.zeros, tuple(out.shape), **_kind(out)), out)
        elif (func in _VIEWS or func in _CALLS) and all(map(self._knows, tensors)) and _on_one_device(tensors, out):
            known = tree_map_only(Tensor, self.seen.__getitem__, (args, kwargs))
            if func in _VIEWS and id(known[0][0]) in self.places:
                place, offset = self.places[id(known[0][0])]
                self._place(out, place, offset + _start(out) - _start(args[0]))
            elif isinstance(out, Tensor) and not self._knows(out):  # an op in place returns its argument
                seen = self._see(out)
                self.made[id(seen)] = seen
            self.steps.append((func, *known, tree_map_only(Tensor, self.seen.__getitem__, out)))
        else:
            self.refuse()
        return out

    def _knows(self, t: Tensor) -> bool:
        return t in self.seen

    def _make(self, make: Callable[[], Tensor], t: Tensor) -> None:
        self.makers.append((self._place(t, self.inputs + len(self.makers), 0), make))

    def _place(self, t: Tensor, place: int, offset: int) -> _Seen:
        seen = self._see(t)
        self.places[id(seen)] = place, offset
        return seen

    def _see(self, t: Tensor) -> _Seen:
        self.seen[t] = seen = _Seen(t)
        self.held.append(seen)
        return seen

    def refuse(self) -> None:
        """Forget everything: no plan can repeat this call."""
        self.complete = False
        for record in (self.seen, self.held, self.places, self.makers, self.steps, self.made):
            record.clear()

    def add(
        self, kernel: Any, found: tuple[Any, ...], grid: tuple[int, ...], descriptors: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Note a launch."""
        given = (*tensors, *(d and d.base for d in descriptors))
        if not all(t is None or id(self.seen.get(t)) in self.places for t in given):
            self.refuse()
            return
        seen = [t if t is None else self.seen[t] for t in tensors]
        described = [d and (type(d), vars(d) | {"base": None}, self.seen[d.base]) for d in descriptors]
        self.steps.append((None, kernel, found, grid, described, seen, numbers))

    def plan(self, results: Any) -> Plan | None:
        """Return a plan that repeats the call, which has returned ``results``, or None if no plan can."""
        several = results if type(results) is tuple else (results,)
        wholes = [self._whole(self.seen.get(t)) if isinstance(t, Tensor) else None for t in several]
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
        firsts, lasts = self._lives(steps, makers, wholes, spots)
        taken: list[_Step] = []
        count = len(slots)
        for number, (op, *step) in enumerate(steps):
            taken += [_Make(makers[i][1], slots[id(makers[i][0])], order[i, 0]) for i in firsts if firsts[i] == number]
            if op is None:
                taken.append(_launch(*step, pointers))
            elif op in _VIEWS and step[-1].layout == step[0][0].layout:
                slots[id(step[-1])] = slots[id(step[0][0])]
            else:
                taken.append(_call(op, *step, slots))
                slots.setdefault(id(step[-1]), count)
                count += 1
            taken += [_Free(slots[id(makers[i][0])]) for i in lasts if lasts[i] == number]
        found = [t if t is None else slots[id(t)] for t in wholes]
        return Plan(
            makers=tuple(None if i in firsts else make for i, (_, make) in makers.items()),
            views=tuple((order[place, 0], offset) for place, offset in views),
            steps=tuple(taken),
            calls=any(type(step) is _Call for step in taken),
            results=tuple(found) if several is results else found[0],
            device=self.device,
            hooks=tuple(kernel.pre_run_hooks for op, kernel, *_ in steps if not op),
        )

    def _share(self, makers: dict[int, Any], read: set[int]) -> dict[int, tuple[int, int]]:
        """Let small memory that only kernels read take one allocation; return where it is: the place and the offset."""
        empty = {i: t for i, (t, make) in makers.items() if make.func is torch.empty_strided and id(t) not in read}
        alone = [i for i, t in empty.items() if t.nbytes <= SMALL]
        places, size, place = {}, 0, self.inputs + len(self.makers)
        for i in alone if len(alone) > 1 else ():
            t, make = makers.pop(i)
            places[i] = place, size
            size += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        if places:
            kind = make.keywords | {"dtype": torch.uint8}
            makers[place] = None, partial(torch.empty_strided, (size,), (1,), **kind)
        return places

    def _lives(
        self, steps: list[Any], makers: dict[int, Any], results: list[_Seen | None], spots: dict[tuple[int, int], Any]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the first steps that read large memory, but for the first of all, and the last, but for results."""
        uses: dict[int, list[int]] = {}
        for number, (op, *step) in enumerate(steps):
            for t in _given(step) if op is None else _seen_in((*step[0], *step[1].values(), step[2])):
                uses.setdefault(self.places.get(id(t), (-1, 0))[0], []).append(number)
        apart = {place for place, offset in spots if offset}  # the pointers of views are computed first
        kept = {*map(id, results)}
        large = {i: t for i, (t, _) in makers.items() if i in uses and t.nbytes > SMALL}
        firsts = {i: uses[i][0] for i in large if uses[i][0] and i not in apart}
        return firsts, {i: uses[i][-1] for i, t in large.items() if id(t) not in kept}

    def _whole(self, t: _Seen | None) -> _Seen | None:
        """Return the tensor that was made and is ``t`` as a whole, else None."""
        if id(t) in self.made:
            return t
        place, offset = self.places.get(id(t), (-1, 0))
        if t is None or place < self.inputs or offset:
            return None
        made: _Seen = self.makers[place - self.inputs][0]
        return made if made.layout == t.layout else None

    def _needed(self, results: list[_Seen | None]) -> tuple[list[Any], set[int], dict[tuple[int, int], None]]:
        """Return the steps but for views of which only kernels read, the ids of the tensors that the steps or
        ``results`` read, and the spots that kernels read.
        """
        steps, read, spots = [], {*map(id, results)}, {}
        for op, *step in reversed(self.steps):
            if op is None:
                spots |= {self.places[id(t)]: None for t in _given(step)}
            elif op in _VIEWS and id(step[-1]) not in read:
                continue
            else:
                args, kwargs, _ = step
                read |= {*map(id, _seen_in((*args, *kwargs.values())))}
            steps.append((op, *step))
        return steps[::-1], read, spots


def _given(step: list[Any]) -> list[_Seen]:
    """Return the tensors that a launch reads, with those of its descriptors."""
    *_, descriptors, tensors, _ = step
    return [t for t in (*tensors, *(d and d[2] for d in descriptors)) if t is not None]


def tensors_of(values: Iterable[Any], kind: type[Any] = Tensor) -> list[Any]:
    """Return the tensors among ``values``, and in their lists."""
    found = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif type(value) is list:
            found += [item for item in value if isinstance(item, kind)]
    return found


_seen_in = partial(tensors_of, kind=_Seen)


def _on_one_device(tensors: list[Tensor], out: Any) -> bool:
    """Return True unless an op copies to another device: the host may read such a copy, as ``tolist`` does."""
    return len({t.device for t in tensors_of((*tensors, out))}) == 1


def _kind(t: Tensor) -> dict[str, Any]:
    return {"dtype": t.dtype, "device": t.device}


def _same(t: Tensor) -> Tensor:
    return t


def _start(t: Tensor) -> int:
    """Return the offset of ``t`` in its storage, in bytes: without elements it has no pointer."""
    return t.storage_offset() * t.element_size()


def _launch(
    kernel: Any, found: tuple[Any, ...], grid: tuple[int, ...], descriptors: tuple[Any, ...],
    tensors: tuple[_Seen | None, ...], numbers: tuple[Any, ...], places: dict[int, int],
) -> _Launch:  # fmt: skip
    run, function, metadata, constants = found
    described = [d and (*d[:2], places[id(d[2])]) for d in descriptors]
    take = taker([places[id(t)] for t in tensors])
    before = function, metadata, None, None, None
    return _Launch(run, grid, before, tuple(described), take, (*numbers, *constants))


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any, slots: dict[int, int]) -> _Call:
    def take(arg: Any) -> Callable[[list[Any]], Any]:
        if isinstance(arg, _Seen):
            return itemgetter(slots[id(arg)])
        if type(arg) is list and _seen_in(arg):
            parts = [*map(take, arg)]
            return lambda tensors: [part(tensors) for part in parts]
        return lambda tensors: arg

    return _Call(op, tuple(map(take, args)), {name: take(arg) for name, arg in kwargs.items()})


def taker(places: list[int]) -> Callable[[list[int | None]], tuple[int | None, ...]]:
    """Return a function that returns the items of a list at ``places``; itemgetter returns no tuple of one item."""
    return itemgetter(*places) if len(places) > 1 else lambda pointers: (pointers[places[0]],)
