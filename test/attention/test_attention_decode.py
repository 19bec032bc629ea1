"""Attention of decode steps over the keys of a cache: few rows, whose keys several programs share."""

from functools import partial

import pytest
import torch
from test_attention import check

from liger_like.ops.attention import tiles
from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.testing.inputs import attention_inputs


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("gpu", "D"), [(gpu, D) for gpu, tables in tiles.TILES.items() for D in tables["few"]])
def test_tiles_of_decode_steps(gpu, D, options, monkeypatch, device, poisoned):
    """Rows are the heads of a group: a block has 16 of them, the fewest of a product; on Hopper 64 at 128 features."""
    launch, rows = portable_forward.launch, []

    def noted(kernel, *args, **constants):
        rows.extend(value for name, value in constants.items() if name == "BLOCK_M")  # the merge has no blocks
        launch(kernel, *args, **constants)

    monkeypatch.setattr(tiles, "gpu_class", lambda device: gpu)
    monkeypatch.setattr(portable_forward, "launch", noted)
    more = {"bias": "hsk"} if options else {"spans": True}
    for S in (1, 3):  # 8 and 24 rows
        shape = {"B": 2, "S": S, "Sk": 300, "H": 16, "Hk": 2, "D": D, "Dv": min(D, 128), "padded": True, **more}
        with torch.no_grad():
            check(partial(attention_inputs, torch.float16, device, **shape), options)
    few, many = (tiles.TILES[gpu][kernel] for kernel in ("few", "fwd"))
    of = [pair[bool(options)] for pair in (few[D], next(pair for widest, pair in many.items() if widest >= D))]
    assert rows[0] == of[0].block_m == (64 if (gpu, D) == ("hopper", 128) else 16)
    assert rows[-1] == max(of, key=lambda tile: tile.block_m).block_m
