"""A decode step of the attention of one DeepSeek-V3 layer over cached latents: contestants of ``generation``.

The copy is not the only floor: 128 heads make 279 KFLOP of products for the 1152 bytes of a key.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812  # as torch has it

from benchmark.common.measure import Step
from benchmark.common.processes import DEVICE
from benchmark.generation.layers import PAGE, Shape, copy, normal
from liger_like import flash_attention_paged

HEADS, LATENT, ROTATED, NOPE, VALUES = 128, 512, 64, 128, 128
SCALE = (NOPE + ROTATED) ** -0.5


def ours(shape: Shape) -> Step:
    """Return our attention over latents in pages all over the cache; queries and values in the space of latents."""
    B, S = shape.batch, shape.keys
    pages = -(-S // PAGE)
    k_cache, v_cache = (normal(B * pages, PAGE, 1, width) for width in (ROTATED, LATENT))
    table = torch.randperm(B * pages, device=DEVICE).int().view(B, pages)
    lengths = torch.full((B,), S, dtype=torch.int32, device=DEVICE)
    q, qv = normal(B, HEADS, ROTATED), normal(B, HEADS, LATENT)
    return partial(flash_attention_paged, q, k_cache, v_cache, table, lengths, qv=qv, scale=SCALE)


def expanded_sdpa(shape: Shape) -> Step:
    """Return torch's SDPA over the keys and values of each head, which are there already."""
    B, S = shape.batch, shape.keys
    q, k, v = (normal(B, HEADS, n, width) for n, width in ((1, NOPE + ROTATED), (S, NOPE + ROTATED), (S, VALUES)))
    return partial(F.scaled_dot_product_attention, q, k, v, scale=SCALE)


def expanding_sdpa(shape: Shape) -> Step:
    """Return what transformers does in each step: expand the latents to keys and values, then torch's SDPA."""
    B, S = shape.batch, shape.keys
    q, latents, rotated = normal(B, HEADS, 1, NOPE + ROTATED), normal(B, S, LATENT), normal(B, 1, S, ROTATED)
    weight = normal(HEADS * (NOPE + VALUES), LATENT) * LATENT**-0.5

    def step() -> torch.Tensor:
        nope, v = (latents @ weight.T).view(B, S, HEADS, -1).transpose(1, 2).split((NOPE, VALUES), -1)
        k = torch.cat((nope, rotated.expand(-1, HEADS, -1, -1)), -1)
        return F.scaled_dot_product_attention(q, k, v, scale=SCALE)

    return step


CONTESTANTS: dict[str, Callable[[Shape], Step]] = {
    "copy of as many bytes": copy,
    "liger_like": ours,
    "SDPA, expanded keys": expanded_sdpa,
    "expansion and SDPA, as transformers": expanding_sdpa,
}
