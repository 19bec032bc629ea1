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
        if self._memory is None or not all(map(_has_room, self._memory, held, new)):
            self._memory = None  # frees rows that the layer has left
            self._memory = [_larger(*each) for each in zip(held, new, strict=True)]
        self._memory = [_append(*each) for each in zip(self._memory, new, strict=True)]
        self.keys, self.values = (memory.used for memory in self._memory)
        return self.keys, self.values


class _Memory(NamedTuple):
    """Tensor ``rows`` [B, Hk, R, D] and its beginning ``used``, the result of the last update."""

    rows: Tensor
    used: Tensor


def _alike(held: Tensor, new: Tensor) -> bool:
    """Return True if both are plain tensors that differ in their number of tokens alone; ``held`` may be empty."""
    sizes = [(*t.shape[:2], *t.shape[3:], t.dtype, t.device) for t in (held if held.numel() else new[:, :, :0], new)]
    return type(new) is Tensor and new.dim() == 4 and held.dtype == new.dtype and sizes[0] == sizes[1]


def _has_room(memory: _Memory, held: Tensor, new: Tensor) -> bool:
    writable = torch.is_inference_mode_enabled() or not memory.rows.is_inference()
    return memory.used is held and writable and held.shape[2] + new.shape[2] <= memory.rows.shape[2]


def _larger(held: Tensor, new: Tensor) -> _Memory:
    """Return a copy of ``held`` with room for ``new`` and more."""
    length = held.shape[2] if held.numel() else 0
    total = length + new.shape[2]
    rows = new.new_empty(*new.shape[:2], total + max(ROOM, total // 8), new.shape[3])
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
