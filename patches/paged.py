"""Attention of transformers' continuous batching: the function that reads and writes its paged cache by our ops.

transformers' own functions copy the keys of all sequences for each layer and step. The versions of transformers keep
the cache in different ways, which ``_layer_of`` alone knows.
"""

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_like.ops.attention import flash_attention_varlen
from liger_like.ops.attention.paged import flash_attention_paged, paged_write
from liger_like.patches.latents import Latents, decode

FLASH = "liger_like_flash"  # transformers makes no masks for a name with "flash", and turns its CUDA graphs on
SCORES = {"scale": "scaling", "softcap": "softcap", "sinks": "s_aux"}  # arguments of the ops, as transformers has them


@functools.cache
def name() -> str:
    """Return the name under which ``attend`` is registered: older versions of transformers need a prefix."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return f"paged|{FLASH}" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else FLASH


def register() -> None:
    """Register ``attend`` with transformers; repeated calls are harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(name(), attend)


@functools.cache
def cache_class(cls: Any) -> type[Any]:
    """Return a subclass of transformers' paged cache whose ``update`` leaves all work to ``attend``.

    Newer models call ``update`` before the attention, and do not pass the cache on. A subclass is returned as it is.
    """
    if hasattr(cls, "_liger_like_cache"):
        return cls  # type: ignore[no-any-return]

    def update(self: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        kwargs["cache"] = self
        return key, value

    return type(cls.__name__, (cls,), {"update": update, "_liger_like_cache": True})


def clear(cache: Any) -> None:
    """Fill ``cache`` with zeros, as newer versions of transformers do.

    The warm-up of its CUDA graphs reads keys that were never written. If these are NaN, sampling ends the process.
    """
    for tensor in (*getattr(cache, "key_cache", ()), *getattr(cache, "value_cache", ())):
        tensor.zero_()


def join_rows(processor: Any) -> None:
    """Put the keys and values of each page of a cache one behind the other, as newer versions of transformers do.

    ``processor`` has the cache. Its manager, which moves pages to the host, keeps views of it: they are replaced, too.
    """
    cache: Any = processor.cache
    offloading: Any = getattr(processor, "offloading_manager", None)
    for i, keys in enumerate(getattr(cache, "key_cache", ())):
        page = cache.block_size, *keys.shape[1:]
        pages = keys.new_zeros(keys.shape[0] // page[0], 2, *page)
        cache.key_cache[i], cache.value_cache[i] = pages.unbind(1)
    if hasattr(offloading, "_gpu_key_views"):
        offloading._gpu_key_views, offloading._gpu_value_views = cache.key_cache, cache.value_cache


class _Layer(NamedTuple):
    """Part of the cache that belongs to a layer.

    ``caches``: its pages of keys and of values, [N, P, Hk, D] each. ``group``: the index of its block table and lists
    of slots. ``window``: the number of keys that a query sees, its own included; None if it sees all.
    """

    caches: tuple[Tensor, Tensor]
    group: int
    window: int | None


def _layer_of(cache: Any, index: int) -> _Layer:
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[index]
        return _Layer(allocator._kv_page_views[index], allocator.index, getattr(allocator, "sliding_window", None))
    group, row = cache.layer_index_to_group_indices[index]
    shape = -1, cache.block_size, *cache.cache_shape[1:]
    pages = cache.key_cache[row].view(shape), cache.value_cache[row].view(shape)
    return _Layer(pages, group, getattr(cache.group_cache_managers[group], "sliding_window", None))


def _counts(options: dict[str, Any], window: int | None) -> tuple[Tensor, Tensor, int]:
    """Return where the rows and the keys of sequences start, and the most rows of one."""
    kind = "full_attention" if window is None else "sliding_attention"
    lengths, longest = options["cu_seq_lens_k"], "max_length_q" if "max_length_q" in options else "max_seqlen_q"
    return options["cu_seq_lens_q"], lengths[kind] if isinstance(lengths, dict) else lengths, options.get(longest, 1)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention of ``query`` [1, H, T, D], the new tokens of all sequences, and write their keys to the cache.

    Returns [1, T, H, D] and None. ``key`` and ``value`` [1, Hk, T, D] are those of the new tokens. ``options`` are what
    transformers passes in continuous batching: the cache, and either a block table, if each sequence has one new token,
    or the slots of all keys. A window's slots are a ring: new keys replace those that the first new queries still
    see, and have no slot in the list of the keys to read. So keys are written after the reads.

    Where transformers pads batches, as for its CUDA graphs, that list is never empty: new prompts take the paged op,
    too. Otherwise a batch of new prompts alone takes ``flash_attention_varlen``.

    Raises RuntimeError without ``cache``: the model is called by others before continuous batching has ended.
    """
    options = {name: option for name, option in options.items() if option is not None}
    if "cache" not in options:
        raise RuntimeError("the model is in continuous batching: call stop() of its manager before any other forward")
    layer = _layer_of(options["cache"], module.layer_idx)  # type: ignore[arg-type]
    if isinstance(key, Latents):
        return _attend_latents(module, query, key, layer, options)[None], None
    (k_cache, v_cache), group, window = layer
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scores: dict[str, Any] = {name: options.get(key) for name, key in SCORES.items()}
    scores["window"] = (-1 if window is None else window - 1, 0)
    rows, lengths, longest = _counts(options, window)
    if "block_table" in options:
        table = options["block_table"][group]
        out: Any = flash_attention_paged(q, k_cache, v_cache, table, lengths, k=k, v=v, **scores)
        paged_write(k, v, k_cache, v_cache, pages=table, lengths=lengths)
        return out[None], None
    slots = options["read_index"][group]
    if slots.shape[0]:
        more: dict[str, Any] = {"cu_seqlens_q": rows, "max_seqlen_q": longest, "k": k, "v": v}
        out = flash_attention_paged(q, k_cache, v_cache, slots, lengths, **more, **scores)
    else:  # all sequences are new
        out = flash_attention_varlen(q, k, v, rows, rows, longest, longest, causal=True, **scores)
    paged_write(k, v, k_cache, v_cache, options["write_index"][group])
    return out.contiguous()[None], None  # some families call view on it; a kernel's output is contiguous already


def _attend_latents(module: Any, query: Tensor, new: Latents, layer: _Layer, options: dict[str, Any]) -> Tensor:
    """Write the ``new`` latents, and return attention [T, H, Dv] over those of each sequence.

    New prompts alone are expanded to keys and values, which takes fewer products than attention over latents.
    """
    keys, _ = layer.caches  # a page's values lie behind its keys: both have room for its latents and rotated features
    (N, P, _, half), width = keys.shape, new.latents.shape[-1]
    rows_of_pages = keys.as_strided((N, P, 1, 2 * half), (keys.stride(0), 2 * half, 2 * half, 1))
    latents, rotated = rows_of_pages[..., :width], rows_of_pages[..., width : width + new.rotated.shape[-1]]
    q, k, v = (t[0].transpose(0, 1) for t in (query, new.rotated, new.latents))
    scores: dict[str, Any] = {name: options.get(key) for name, key in SCORES.items()}
    rows, lengths, longest = _counts(options, layer.window)
    if "block_table" in options:
        table = options["block_table"][layer.group]
        paged_write(k, v, rotated, latents, pages=table, lengths=lengths)
        return decode(module, q, rotated, latents, table, lengths, **scores)
    paged_write(k, v, rotated, latents, options["write_index"][layer.group])
    slots = options["read_index"][layer.group]
    if slots.shape[0]:
        scores |= {"cu_seqlens_q": rows, "max_seqlen_q": longest}
        return decode(module, q, rotated, latents, slots, lengths, **scores)
    k, v = (t[0].transpose(0, 1) for t in new.expanded(module))
    out: Any = flash_attention_varlen(q, k, v, rows, rows, longest, longest, causal=True, **scores)
    return out.contiguous()  # type: ignore[no-any-return]
