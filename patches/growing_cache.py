"""Layer of transformers' dynamic cache that does not copy itself for each token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 32  # tokens, or an eighth of the cache if that is more: then few steps copy, and little memory is unused


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Layer whose keys and values [B, Hk, S, D] are the beginning of larger tensors, which take the next tokens.

    Tokens are appended in place only behind the tensors that the last ``update`` of this memory returned. All other
    methods are those of transformers: they set other keys and values, which the next ``update`` copies. So tensors that
    an update has returned never change. Copies of a layer, and pickled layers, have no such memory until they grow.
    """

    keys: Tensor
    values: Tensor
    _memory: "list[_Memory] | None" = None  # of keys and values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all; graphs, and tensors that torch.cat converts, need its copy."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new: tuple[Tensor, ...] = (key_states, value_states)
        held: tuple[Any, ...] = (self.keys, self.values)
        if torch.is_grad_enabled() or not all(map(_alike, held, new)):
            self._memory = None
            return super().update(key_states, value_states, *args, **kwargs)
        total = (held[0].shape[2] if held[0].numel() else 0) + key_states.shape[2]
        self._memory = self._with_room(total) or self._grown(held, new, total + max(ROOM, total // 8))
        self._memory = [_append(*each) for each in zip(self._memory, new, strict=True)]
        self._use(self._memory)
        return self.keys, self.values

    def reserve(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the memory of keys and values [B, Hk, R, D], with room for ``tokens`` in all; the rest is zeros."""
        held: tuple[Any, ...] = (self.keys, self.values)
        self._memory = self._with_room(tokens) or self._grown(held, held, tokens)
        self._use(self._memory)
        for memory in self._memory:
            memory.rows[:, :, memory.used.shape[2] :].zero_()
        return self._memory[0].rows, self._memory[1].rows

    def is_in(self, rows: tuple[Tensor, Tensor]) -> bool:
        """Return True if keys and values are the beginning of ``rows``, which are those of ``reserve``."""
        held = self.keys, self.values
        memory = self._memory or ()
        return len(memory) == 2 and all(m.rows is r and m.used is t for m, r, t in zip(memory, rows, held, strict=True))

    def extend(self) -> None:
        """Count the token behind the last one, which the caller has written there."""
        self._memory = [m._replace(used=m.rows[:, :, : m.used.shape[2] + 1]) for m in self._memory or ()]
        self._use(self._memory)

    def _with_room(self, tokens: int) -> "list[_Memory] | None":
        """Return the memory if it may be written, and holds keys and values alone with room for ``tokens`` in all."""
        memories, held = self._memory or [], (self.keys, self.values)
        fits = all(_has_room(memory, t, tokens) for memory, t in zip(memories, held, strict=False))
        return memories if fits and memories else None

    def _grown(self, held: tuple[Any, ...], new: tuple[Any, ...], tokens: int) -> "list[_Memory]":
        self._memory = None  # frees rows that the layer has left
        return [_larger(t, like, tokens) for t, like in zip(held, new, strict=True)]

    def _use(self, memories: "list[_Memory]") -> None:
        self.keys, self.values = (memory.used for memory in memories)


class _Memory(NamedTuple):
    """Tensor ``rows`` [B, Hk, R, D] and its beginning ``used``, the result of the last update."""

    rows: Tensor
    used: Tensor


def _alike(held: Tensor, new: Tensor) -> bool:
    """Return True if both are plain tensors that differ in their number of tokens alone; ``held`` may be empty."""
    sizes = [(*t.shape[:2], *t.shape[3:], t.dtype, t.device) for t in (held if held.numel() else new[:, :, :0], new)]
    return type(new) is Tensor and new.dim() == 4 and held.dtype == new.dtype and sizes[0] == sizes[1]


def _has_room(memory: _Memory, held: Any, tokens: int) -> bool:
    writable = torch.is_inference_mode_enabled() or not memory.rows.is_inference()
    return memory.used is held and writable and tokens <= memory.rows.shape[2]


def _larger(held: Tensor, like: Tensor, tokens: int) -> _Memory:
    """Return a copy of ``held`` with room for so many ``tokens``, which have the sizes of those of ``like``."""
    length = held.shape[2] if held.numel() else 0
    rows = like.new_empty(*like.shape[:2], tokens, like.shape[3])
    used = rows[:, :, :length]
    if length:
        used.copy_(held)
    return _Memory(rows, used)


def _append(memory: _Memory, new: Tensor) -> _Memory:
    length = memory.used.shape[2]
    total = length + new.shape[2]
    memory.rows[:, :, length:total] = new
    return memory._replace(used=memory.rows[:, :, :total])


def let_grow(cache: Any) -> None:
    """Give the dynamic layers of ``cache`` this update; others, such as those of windows, keep theirs."""
    cache = getattr(cache, "self_attention_cache", cache)
    if not getattr(cache, "offloading", False):
        for layer in getattr(cache, "layers", ()):
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer
