"""Layer of transformers' dynamic cache that does not copy itself for each token."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 256  # tokens: copies then are less than 1 % of what attention reads of so many steps


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Layer whose keys and values [B, Hk, S, D] are the beginning of larger tensors, which take the next tokens.

    All other methods are those of transformers. They replace keys and values by others or by a beginning of them, which
    the next ``update`` notices.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all; a gradient and a compiled model need the copy of transformers."""
        wanted = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if wanted or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._keys, self.keys = _appended(self.keys, key_states, vars(self).get("_keys"))
        self._values, self.values = _appended(self.values, value_states, vars(self).get("_values"))
        return self.keys, self.values


def _appended(held: Any, new: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``held`` and after it ``new`` as the beginning of a tensor: of ``memory``, if it has them and room."""
    length = held.shape[-2] if held.dim() == new.dim() else 0
    total = length + new.shape[-2]
    mine = memory is not None and held.data_ptr() == memory.data_ptr() and held.stride() == memory.stride()
    if memory is None or not mine or memory.shape[-2] < total:
        memory = new.new_empty(*new.shape[:2], total + ROOM, new.shape[-1])
        if length:
            memory[:, :, :length] = held
    memory[:, :, length:total] = new
    return memory, memory[:, :, :total]


def let_grow(cache: Any) -> None:
    """Give the dynamic layers of ``cache`` this update; others, such as those of windows, keep theirs."""
    cache = getattr(cache, "self_attention_cache", cache)
    if not getattr(cache, "offloading", False):
        for layer in getattr(cache, "layers", ()):
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer
