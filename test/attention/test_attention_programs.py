"""Attention: which kernels are launched, and how their work is split and ordered."""

from functools import partial

import pytest
import torch
from test_attention import DTYPES, EVERYTHING, both_ways, check

from liger_like import ops
from liger_like.ops import attention
from liger_like.ops.attention import attention_delta, tiles
from liger_like.ops.attention import masking as masks
from liger_like.ops.attention.portable import backward as portable_backward
from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.testing import run
from liger_like.testing.inputs import attention_inputs


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_deterministic_follows_torch_unless_given(asked, enabled, monkeypatch, device):
    inputs, calls = attention_inputs(torch.float32, device, B=1, S=5, Sk=5, H=1, Hk=1, D=16), []
    backward = attention.attention_bwd
    monkeypatch.setattr(attention, "attention_bwd", lambda *args: calls.append(args[-2]) or backward(*args))
    torch.use_deterministic_algorithms(enabled)
    try:
        run(ops.flash_attention, inputs, {"deterministic": asked})
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [enabled if asked is None else asked]


def test_backward_of_a_frozen_part_launches_only_what_it_needs(launched, device):
    inputs = attention_inputs(torch.float32, device, **EVERYTHING)
    for trained, expected in (
        ({"q"}, {"_delta_kernel", "_attention_dq_kernel"}),
        ({"k"}, {"_delta_kernel", "_attention_dkv_kernel"}),
        ({"bias"}, {"_delta_kernel", "_attention_dbias_kernel"}),
        ({"q", "v"}, {"_delta_kernel", "_attention_dkv_kernel", "_attention_dq_kernel"}),
    ):
        run(ops.flash_attention, {n: t.detach().requires_grad_(n in trained) for n, t in inputs.items()}, {})
        assert {name for name, _ in launched[1:]} == expected
        launched.clear()


DECODES = {
    "plain": ({"S": 1}, {}),
    "sinks": ({"S": 2, "sinks": True}, {"softcap": 3.0}),
    "window": ({"S": 4, "sinks": True}, {"causal": True, "window": (150, -1)}),
    "mask": ({"S": 3, "padded": True}, {"causal": True}),
    "bias": ({"S": 1, "bias": "hsk", "sinks": True}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODES)
def test_few_queries_split_the_keys(name, dtype, launched, device, poisoned):
    more, options = DECODES[name]
    Sk = 321 if device == "cpu" else 4993  # the last block holds a single key

    def make():
        inputs = attention_inputs(dtype, device, B=1, Sk=Sk, H=2, Hk=1, D=16, **more)
        if "padded" in more:
            inputs["key_padding_mask"][:, Sk // 5 : Sk * 3 // 5] = False  # parts in the middle see no key
        return inputs

    check(make, options, draws=1 if dtype == torch.float32 else 3)
    assert launched[0][1][1] > 2  # the number of parts
    assert launched[1][0] == "_merge_kernel"


def test_split_rows_without_keys(launched, device, poisoned):
    Sk = 300 if device == "cpu" else 5000
    inputs = attention_inputs(torch.float32, device, B=2, S=2, Sk=Sk, H=2, Hk=1, D=16, sinks=True, padded=True)
    inputs["key_padding_mask"][0] = False
    got = run(ops.flash_attention, inputs, {"return_lse": True})
    assert launched[1][0] == "_merge_kernel"
    assert got["out1"][0].eq(-torch.inf).all()
    assert all(got[n][0].eq(0).all() for n in ("out0", "dq", "dk", "dv"))
    assert all(got[n][1].isfinite().all() for n in ("out0", "out1", "dq", "dk", "dv"))


@both_ways
@pytest.mark.parametrize("H", [4, 5])
def test_few_key_heads_split_their_group(H, deterministic, launched, device, poisoned):
    make = lambda: attention_inputs(torch.float32, device, B=1, S=9, Sk=12, H=H, Hk=1, D=48, Dv=16)  # noqa: E731
    check(make, {"deterministic": deterministic}, draws=2)
    assert next(grid for name, grid in launched if name == "_attention_dkv_kernel")[1] > 2


@pytest.mark.parametrize("section", [1, 3])
def test_order_of_programs_does_not_matter(section, monkeypatch, device, poisoned):
    inputs = attention_inputs(torch.float32, device, B=1, S=65, Sk=65, H=4, Hk=4, D=16)
    expected = run(ops.flash_attention, inputs, {"causal": True})
    for module in (portable_forward, portable_backward):
        monkeypatch.setattr(module, "heads_in_l2", lambda *_: section)
    monkeypatch.setattr(portable_backward, "key_heads_together", lambda *_: section)
    for name, t in run(ops.flash_attention, inputs, {"causal": True}).items():
        assert torch.equal(t, expected[name]), name


def test_section_fits_the_cache():
    k = v = torch.empty(1, 4096, 8, 128, dtype=torch.float16)
    assert portable_forward.heads_in_l2(k, v, 4096, 4) == 8 * 4  # 2 MiB for each key head
    assert portable_forward.heads_in_l2(k, v, 2**30, 4) == 4
    assert portable_forward.heads_in_l2(k, v, 1, 4) == 8 * 4  # no more than all heads
    assert portable_forward.heads_in_l2(k, v, 0, 1) > 0


def test_sections_of_keys_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(masks, "num_programs", lambda device, each: 132 * each)
    masking = masks.Masking(*[None] * 6, 4096, 4096, 1.0, None, -1, 0)
    packed = masking._replace(cu_seqlens_q=torch.zeros(9))
    section = partial(masks.key_heads_together, block=128, device=torch.device("cpu"))
    assert section(masking, 4096) == 4  # a head has 32 blocks: 132 // 32
    assert section(masking, 4097) == 4
    assert section(masking, 2**20) == 1
    assert section(masking, 5) == section(masking, 0) == 132
    assert section(packed, 16384) == 8  # eight sequences, 16 blocks each: 132 // 16
    assert section(packed, 5) == 132


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("gpu", "D"), [(gpu, D) for gpu, tables in tiles.TILES.items() for D in tables["dkv"]])
def test_tiles_of_every_gpu(gpu, D, options, monkeypatch, device, poisoned):
    """The kernels do not rely on how many queries and keys are in a block; a bias keeps those for Hopper out."""
    monkeypatch.setattr(tiles, "gpu_class", lambda device: gpu)
    more = {"bias": "hsk"} if options else {"padded": True}
    shape = {"B": 1, "S": 131, "Sk": 140, "H": 2, "Hk": 1, "D": D, "Dv": min(D, 128), **more}
    check(partial(attention_inputs, torch.float16, device, **shape), {"causal": True, "window": (90, -1), **options})


def test_rows_of_the_backward_are_followed_by_a_whole_block():
    """Blocks of packed queries start anywhere and are read without a mask."""
    tables = tiles.FP32, *tiles.TILES.values()
    pairs = [pair for table in tables for name in table if name != "fwd" for pair in table[name].values()]
    longest = max(tile.block_m for pair in pairs for tile in pair if tile)
    for S in (1, 127, 128, 129):
        out, lse = torch.empty(1, S, 1, 16, device="meta"), torch.empty(1, 1, S, device="meta")
        assert attention_delta(out, out, lse, None, None, None)[0].shape[3] >= S - 1 + longest
