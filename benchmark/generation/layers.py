"""A decode step of the attention of one layer: contestants of ``generation`` that read as many keys."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch has it
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmark.common.measure import Step
from benchmark.common.processes import DEVICE, GPU
from liger_like.ops.attention import flash_attention
from liger_like.patches import paged

H, HK, D, PAGE = 32, 8, 128, 256
DTYPE = torch.bfloat16 if GPU else torch.float32


class Shape(NamedTuple):
    """``batch`` sequences that each have one new token, and with it ``keys`` keys.

    ``latent``: features of a key that all heads share, and whose beginning is the value; 0: keys and values apart, of
    ``features`` each.
    """

    batch: int
    keys: int
    latent: int = 0
    features: int = D

    def text(self) -> str:
        more = f" latent {self.latent}" if self.latent else f" D {self.features}" if self.features != D else ""
        return f"B {self.batch} S {self.keys}{more}"

    def bytes(self) -> int:
        return self.batch * self.keys * (self.latent or 2 * HK * self.features) * DTYPE.itemsize


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def copy(shape: Shape) -> Step:
    """Return a copy that reads and writes as many bytes as there are of keys and values: the floor."""
    source = torch.empty(shape.bytes() // 2, device=DEVICE, dtype=torch.uint8).random_()
    return partial(torch.empty_like(source).copy_, source)


class _Rows(NamedTuple):
    """Queries, keys and values of the new tokens as a model passes them, and the paged cache of transformers."""

    module: Any
    new: tuple[Tensor, Tensor, Tensor]
    cache: PagedAttentionCache
    places: dict[str, Any]


def _rows(shape: Shape) -> _Rows:
    B, S, D = shape.batch, shape.keys, shape.features
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=HK, head_dim=D)
    pages = -(-S // PAGE)
    settings = ContinuousBatchingConfig(num_blocks=B * pages, page_size=PAGE, max_batch_tokens=B, max_memory_percent=1)
    cache = PagedAttentionCache(config, settings, torch.device(DEVICE), SimpleNamespace(tp_size=1), DTYPE)
    k_cache, v_cache = cache.cache_allocators["full_attention"]._kv_page_views[0]
    k_cache.normal_()
    v_cache.normal_()
    # a block is a page of keys and one of values; the first blocks are for padding; sequences have blocks all over
    first = (len(k_cache) + 1) // 2 - B * pages
    table = ((torch.randperm(B * pages, device=DEVICE) + first) * 2).int().view(B, pages)
    keys = torch.arange(S, device=DEVICE)
    slots = table.long()[:, keys // PAGE] * PAGE + keys % PAGE
    lengths = torch.arange(B + 1, device=DEVICE, dtype=torch.int32)
    kind = "full_attention"
    places = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": {kind: lengths * S}, "max_length_q": 1}
    places |= {"max_length_k": {kind: S}, "read_index": [slots.view(-1)], "write_index": [slots[:, -1]]}
    new = normal(1, H, B, D), normal(1, HK, B, D), normal(1, HK, B, D)
    module = SimpleNamespace(layer_idx=0, num_key_value_groups=H // HK, is_causal=True)
    return _Rows(module, new, cache, places | {"block_table": table[None]})


def ours(shape: Shape) -> Step:
    """Return the attention of a patched model, with the writes of the new keys."""
    module, new, cache, places = _rows(shape)
    return partial(paged.attend, module, *new, None, cache=cache, **places)


def ours_by_slots(shape: Shape) -> Step:
    """Return the attention of a patched model in a step without block tables, as layers with windows have it."""
    module, new, cache, places = _rows(shape)
    return partial(paged.attend, module, *new, None, cache=cache, **places | {"block_table": None})


def transformers_sdpa(shape: Shape) -> Step:
    """Return the attention of transformers' continuous batching with sdpa, and its mask."""
    module, new, cache, places = _rows(shape)
    B, S = shape.batch, shape.keys
    mask = torch.full((B, B * S), torch.finfo(DTYPE).min, device=DEVICE, dtype=DTYPE)
    for b in range(B):
        mask[b, b * S : (b + 1) * S] = 0
    places["block_table"] = None

    def step() -> Any:  # as models of transformers 5.24 do; the cache changes the dictionary
        options = {**places}
        keys, values = cache.update(*new[1:], module.layer_idx, kwargs=options)
        return sdpa_attention_forward(module, new[0], keys, values, mask[None, None], **options)

    return step


def _dense(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, H, 1, D], and keys and values [B, Hk, S, D] that lie one after the other."""
    B, S, D = shape.batch, shape.keys, shape.features
    return normal(B, H, 1, D), normal(B, HK, S, D), normal(B, HK, S, D)


def ours_dense(shape: Shape) -> Step:
    """Return the attention of a patched model in ``generate``, nothing written: each row has spans, as if padded."""
    q, k, v = (t.transpose(1, 2) for t in _dense(shape))
    ends = torch.tensor([0, shape.keys], device=DEVICE, dtype=torch.int32)
    return partial(flash_attention, q, k, v, spans=ends[:, None, None].expand(-1, shape.batch, 1))


def dense_sdpa(shape: Shape) -> Step:
    """Return torch's SDPA over keys that lie one after the other, nothing written."""
    return partial(F.scaled_dot_product_attention, *_dense(shape), enable_gqa=True)


def flex_paged(shape: Shape) -> Step:
    """Return torch's flex attention over its own paged cache, nothing written."""
    B, S, D = shape.batch, shape.keys, shape.features
    size = 128
    manager = PagedAttention(B * -(-S // size), size, B, device=DEVICE)
    for b in range(B):
        manager.reserve(torch.tensor(b, device=DEVICE), torch.tensor(S, device=DEVICE))
    mask = create_block_mask(lambda b, h, i, j: j < S, B, None, 1, S, device=DEVICE)
    paged_mask = manager.convert_logical_block_mask(mask)
    score = manager.get_score_mod(None)
    width = manager.n_pages * size
    q, k, v = normal(B, H, 1, D), normal(1, HK, width, D), normal(1, HK, width, D)
    attend = torch.compile(flex_attention) if GPU else flex_attention
    return partial(attend, q, k, v, score_mod=score, block_mask=paged_mask, enable_gqa=True)


CONTESTANTS: dict[str, Callable[[Shape], Step]] = {
    "copy of as many bytes": copy,
    "liger_like": ours,
    "liger_like, slots": ours_by_slots,
    "liger_like, dense keys": ours_dense,
    "SDPA, dense keys": dense_sdpa,
    "transformers, paged sdpa": transformers_sdpa,
    "flex PagedAttention": flex_paged,
}
