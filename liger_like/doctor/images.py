"""Two images for any class of transformers that takes them, in the layouts that processors give them."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

GRID = 4  # patches along a side
DEFAULTS = {"image": 32, "patch": 8}


def layouts(size: int, patch: int) -> Iterator[dict[str, Tensor]]:
    """Two images of ``size`` pixels along a side, or of GRID patches of ``patch``."""
    grid, count = torch.tensor([[1, GRID, GRID]] * 2), 2 * GRID**2
    merged = {"image_merge_sizes": torch.tensor([2, 2])}
    for flat in ((2 * 3 * patch**2,), (3 * patch**2,), (3, patch, patch)):  # the first: as frames of a video, twice
        for more in ({}, merged):
            yield {"pixel_values": torch.rand(count, *flat), "image_grid_thw": grid, **more}
    patches = torch.rand(2, GRID**2, 3 * patch**2)
    shape = {"spatial_shapes": grid[:, 1:], "pixel_attention_mask": torch.ones(2, GRID**2, dtype=torch.int64)}
    yield {"pixel_values": patches, **shape}
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1)
    yield {"pixel_values": patches, "image_position_ids": places.expand(2, -1, -1)}
    yield {"pixel_values": torch.rand(1, 3, patch, count * patch), "target_sizes": grid[:, 1:]}  # all in one strip
    sizes = torch.tensor([[size, size]] * 2)
    for parts in ((), (1,)):
        yield {"pixel_values": torch.rand(2, *parts, 3, size, size), "image_sizes": sizes}
        yield {"pixel_values": torch.rand(2, *parts, 3, size, size)}
    # both halves of an image, and the whole
    yield {"pixel_values": torch.rand(2, 3, 3, size, size), "image_sizes": torch.tensor([[size, 2 * size]] * 2)}


def along_a_side(size: Any) -> int:
    return size if isinstance(size, int) else size[0]


def images_for(model: Any) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The layouts that ``model`` computes features of, and how many words of each row stand for them."""
    config: Any = model.config
    features = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if features is None or not hasattr(config, "vision_config") or getattr(config, "image_token_id", None) is None:
        return
    size, patch = (along_a_side(getattr(config.vision_config, f"{name}_size", n)) for name, n in DEFAULTS.items())
    taken = {*inspect.signature(features).parameters, *inspect.signature(model.forward).parameters}
    torch.manual_seed(3)
    for images in layouts(size, patch):
        if images.keys() <= taken:
            images = {name: t.to(model.device) for name, t in images.items()}
            try:
                with torch.no_grad():
                    outputs = features(**images)
            except Exception:  # another layout
                continue
            found = outputs.last_hidden_state if outputs.pooler_output is None else outputs.pooler_output
            words = sum(part.shape[:-1].numel() for part in ([found] if isinstance(found, Tensor) else found))
            if words and words % 2 == 0:
                yield images, words // 2
