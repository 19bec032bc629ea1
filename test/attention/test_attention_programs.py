"""Attention: which kernels are launched, and how their work is split and ordered."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from test_attention import DTYPES, EVERYTHING, both_ways, check

from liger_like import ops
from liger_like.ops import attention
from liger_like.ops.attention import attention_delta, choice, sums, tiles
from liger_like.ops.attention import backward as attention_backward
from liger_like.ops.attention import masking as masks
from liger_like.ops.attention.hopper import backward as hopper_backward
from liger_like.ops.attention.hopper import buffers, products
from liger_like.ops.attention.hopper import forward as hopper_forward
from liger_like.ops.attention.portable import backward as portable_backward
from liger_like.ops.attention.portable import forward as portable_forward
from liger_like.ops.attention.portable.parts import values_first
from liger_like.ops.attention.visibility import schedule
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
        ({"k"}, {"_delta_kernel", "_attention_dkv_kernel", "_round_sums_kernel"}),
        ({"bias"}, {"_delta_kernel", "_attention_dbias_kernel"}),
        ({"q", "v"}, {"_delta_kernel", "_attention_dkv_kernel", "_round_sums_kernel", "_attention_dq_kernel"}),
    ):
        run(ops.flash_attention, {n: t.detach().requires_grad_(n in trained) for n, t in inputs.items()}, {})
        assert {name for name, _ in launched[1:]} == expected
        launched.clear()


@pytest.mark.parametrize("missing", [(), ("dq",), ("dk",), ("dv",), ("dq", "dk")], ids=str)
def test_sums_are_rounded_in_one_launch(missing, device, poisoned):
    """dq is scaled, and the parts of dk and dv are summed; sizes are no multiples of a block, and nobody else's."""
    sizes = {"dq": 2 * sums.BLOCK + 5, "dk": sums.BLOCK + 3, "dv": 3}
    given = {"dq": (), "dk": (3,), "dv": (3,)}
    parts = {name: torch.randn(*lead, sizes[name], device=device) for name, lead in given.items()}
    outs = {n: None if n in missing else torch.full((size + 9,), 7.0, device=device) for n, size in sizes.items()}
    views = {n: None if out is None else out[: sizes[n]] for n, out in outs.items()}
    dq_sum = None if "dq" in missing else parts["dq"]
    sums.round_sums(dq_sum, views["dq"], parts["dk"], parts["dv"], views["dk"], views["dv"], 3, 0.25)
    expected = {"dq": parts["dq"] * 0.25, "dk": parts["dk"].sum(0), "dv": parts["dv"].sum(0)}
    for name, out in outs.items():
        if out is not None:
            torch.testing.assert_close(out[: sizes[name]], expected[name])
            assert (out[sizes[name] :] == 7.0).all()


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
    Sk = 449 if device == "cpu" else 4993  # the last block holds a single key

    def make():
        inputs = attention_inputs(dtype, device, B=1, Sk=Sk, H=2, Hk=1, D=16, **more)
        if "padded" in more:
            inputs["key_padding_mask"][:, Sk // 5 : Sk * 3 // 5] = False  # parts in the middle see no key
        return inputs

    check(make, options, draws=1 if dtype == torch.float32 else 3)
    assert launched[0][1][1] > 2  # the number of parts
    assert launched[1][0] == "_merge_kernel"


@pytest.mark.parametrize(("D", "Dv", "first"), [(24, 12, True), (72, 24, True), (24, 20, False), (192, 128, False)])
def test_narrower_values_are_loaded_before_the_scores(D, Dv, first, device, poisoned):
    """In the place of the keys in shared memory, Triton 3.6 would read other values on Hopper: no row is aligned."""
    assert values_first(D, Dv) is first
    make = lambda: attention_inputs(torch.float16, device, B=1, S=5, Sk=70, H=2, Hk=2, D=D, Dv=Dv)  # noqa: E731
    check(make, {"causal": True})


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
@pytest.mark.parametrize("H", [3, 5])
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


def masking_of(**options):
    """Return the options of a call, of 4096 queries without masks unless they are given."""
    some = {"max_seqlen_q": 4096, "max_seqlen_k": 4096, "scale": 1.0, "left": -1, "right": -1}
    return masks.Masking(**dict.fromkeys(masks.Masking._fields) | some | options)


def test_section_fits_the_cache():
    k = v = torch.empty(1, 4096, 8, 128, dtype=torch.float16)

    def heads(group=4, **options):
        return masks.heads_in_l2(masking_of(**options), k, v, group)

    assert heads(max_seqlen_k=16384) == 2 * 4  # 8 MiB for each key head
    assert heads(max_seqlen_k=2**30) == 4
    assert heads(max_seqlen_k=1) == 8 * 4  # no more than all heads
    assert heads(max_seqlen_k=0, group=1) > 0


@pytest.mark.parametrize("options", [{"right": 0}, {"cu_seqlens_q": torch.zeros(3)}, {"spans": torch.zeros(1)}])
def test_sections_of_uneven_blocks_are_wide_and_even(options):
    """Else a last section of few heads would begin its longest blocks when all others end."""
    k = v = torch.empty(1, 4096, 9, 128, dtype=torch.float16)
    # 6.5 MiB for each key head: two in 16 MiB, four in 32, but three leave no small section
    assert masks.heads_in_l2(masking_of(max_seqlen_k=13312), k, v, 2) == 2 * 2
    assert masks.heads_in_l2(masking_of(max_seqlen_k=13312, **options), k, v, 2) == 3 * 2


def test_sections_of_keys_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(masks, "num_programs", lambda device, each: 132 * each)
    full = masking_of()
    packed = masking_of(cu_seqlens_q=torch.zeros(9))

    def section(masking, keys):
        q = k = v = torch.empty(1, keys, 8, 128, dtype=torch.float16, device="meta")
        return masks.key_heads_together(masking, q, k, v, 128)

    assert section(full, 4096) == 4  # a head has 32 blocks: 132 // 32
    assert section(full, 4097) == 4
    assert section(full, 2**20) == 1
    assert section(full, 5) == section(full, 0) == 132
    assert section(packed, 16384) == 8  # eight sequences, 16 blocks each: 132 // 16
    assert section(packed, 5) == 132


UNEVEN = {
    "full": ({}, False),
    "causal": ({"right": 0}, True),
    "some keys after": ({"right": 70}, True),
    "window": ({"left": 100, "right": 0}, False),
    "a window wider than the keys": ({"left": 4096, "right": 0, "max_seqlen_k": 4096}, True),
    "the widest window": ({"left": 4095, "right": 0, "max_seqlen_k": 4096}, False),
    "keys before": ({"left": 100}, False),
    "spans": ({"spans": torch.zeros(1)}, True),
    "spans in a window": ({"spans": torch.zeros(1), "left": 100, "right": 0}, True),
    "packed": ({"cu_seqlens_q": torch.zeros(9), "right": 0}, False),
    "no sequences": ({"cu_seqlens_q": torch.zeros(1), "right": 0}, True),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_sections_of_uneven_blocks_fill_the_cache(name, monkeypatch):
    options, uneven = UNEVEN[name]
    masking = masking_of(**options)
    assert masking.uneven == uneven
    monkeypatch.setattr(masks, "num_programs", lambda device, each: 132 * each)

    def section(l2, heads=40, Dv=128):
        monkeypatch.setattr(masks, "l2_bytes", lambda device: l2 << 20)
        q, v = (torch.empty(1, 4096, heads, D, dtype=torch.float16, device="meta") for D in (128, Dv))
        return masks.key_heads_together(masking, q, q, v, 128)

    alone = section(0)  # of 32 blocks a head, or of a part of them
    assert alone == 132 // (32 // max(1, masking.sequences))
    assert section(64) == (8 if uneven else alone)  # a head takes 4 MiB of half of it
    assert section(64, Dv=64) == (10 if uneven else alone)
    assert section(50) == (5 if uneven else alone)  # six would leave four of 40
    assert section(64, heads=3) == (3 if uneven else alone)


def test_sections_leave_little_over():
    some = {(1, 9): 1, (8, 8): 8, (5, 8): 4, (6, 8): 4, (10, 16): 8, (10, 19): 10, (10, 18): 9, (3, 4): 2, (11, 21): 11}
    assert {sizes: masks._even_section(*sizes) for sizes in some} == some
    for heads in range(1, 70):
        for limit in range(1, heads + 1):
            size = masks._even_section(limit, heads)
            assert limit / 2 < size <= limit
            # how full the last section is, for each size from which to choose
            shares = {n: (heads % n or n) / n for n in range(limit, limit // 2, -1)}
            enough = min(0.9, max(shares.values()))
            assert size == max(n for n, share in shares.items() if share >= enough)


@pytest.mark.parametrize(
    ("programs", "group", "even", "uneven"),
    [
        (0, 8, 8, 8),
        (1, 8, 8, 8),
        (1, 1, 1, 1),
        (16, 8, 8, 8),
        (17, 8, 4, 8),  # seven would have two heads each, and the last three none
        (44, 8, 3, 4),
        (66, 8, 2, 4),
        (67, 8, 1, 3),
        (132, 8, 1, 2),
        (133, 8, 1, 1),
        (264, 8, 1, 1),
        (1000, 8, 1, 1),
    ],
)
def test_splits_of_a_group(programs, group, even, uneven, monkeypatch):
    monkeypatch.setattr(attention_backward, "num_programs", lambda device, each: 132 * each)
    splits = partial(attention_backward._group_splits, programs, group, device=torch.device("cpu"))
    assert (splits(uneven=False), splits(uneven=True)) == (even, uneven)


@pytest.mark.parametrize("uneven", [False, True])
def test_no_split_of_a_group_is_empty(uneven, monkeypatch):
    monkeypatch.setattr(attention_backward, "num_programs", lambda device, each: 132 * each)
    for programs in range(300):
        for group in range(1, 40):
            splits = attention_backward._group_splits(programs, group, uneven, torch.device("cpu"))
            share = -(-group // splits)
            assert 1 <= splits <= group
            assert (splits - 1) * share < group <= splits * share


PACKED = {"cu_seqlens_q": torch.zeros(4)}  # three sequences
SPANS = {"spans": torch.zeros(1)}
# D, Dv, queries, keys and options of calls with just enough keys for three warp groups, and a number that is too small
THREE_GROUPS = [
    (64, 64, 512, 512, {}, 511),
    (40, 40, 512, 512, {}, 511),
    (80, 80, 512, 512, {}, 511),
    (96, 64, 512, 512, {}, 511),
    (96, 96, 129, 512, {}, 511),
    (96, 104, 1024, 1024, {}, 1023),
    (104, 96, 1024, 1024, {}, 1023),
    (128, 128, 1024, 1024, {}, 1023),
    (128, 128, 2240, 2240, {"right": 0}, 2239),
    (64, 64, 200, 708, {"right": 0}, 707),
    (64, 64, 200, 708, SPANS, 707),
    (64, 64, 200, 708, {"right": 70}, 707),
    (64, 64, 200, 512, {"left": 5}, 511),
    (64, 64, 768, 768, PACKED, 767),
    (64, 64, 1824, 1824, PACKED | {"right": 0}, 1823),
    (64, 64, 512, 512, {"cu_seqlens_q": torch.zeros(1)}, 511),  # no sequence
]


@pytest.mark.parametrize(("D", "Dv", "S", "SK", "options", "fewer"), THREE_GROUPS, ids=str)
def test_many_keys_take_three_warp_groups(D, Dv, S, SK, options, fewer):
    def groups(SK=SK, S=S, **more):
        return tiles.hopper_forward(D, Dv, masking_of(**{"max_seqlen_q": S} | options | more), S, SK).groups

    assert groups() == groups(max_seqlen_q=129) == 3
    assert groups(SK=fewer) == 2
    assert groups(max_seqlen_q=128) == 2
    assert groups(softcap=3.0) == 2


@pytest.mark.parametrize(("left", "right", "block"), [(606, 0, 64), (607, 0, 128), (300, 306, 64), (300, 307, 128)])
def test_windows_take_blocks_by_the_keys_that_they_show(left, right, block):
    for D in (64, 96):
        tile = tiles.hopper_forward(D, D, masking_of(left=left, right=right), 4096, 8192)
        assert (tile.groups, tile.block_n) == (3, block)


def test_windows_wider_than_the_sequence_take_warp_groups_as_none_do():
    for SK in (1, 2300):  # most queries see no key; few
        assert tiles.hopper_forward(64, 64, masking_of(left=9000, right=0), 4096, SK).groups == 2
    assert tiles.hopper_forward(64, 64, masking_of(left=9000, right=0), 4096, 4096).groups == 3


@pytest.mark.parametrize(("D", "Dv", "block"), [(136, 64, 128), (192, 128, 128), (160, 160, 64), (256, 256, 64)])
def test_wide_heads_always_take_two_warp_groups(D, Dv, block):
    for SK, options in ((1, {"right": 0}), (600, {"softcap": 3.0}), (1 << 20, {})):
        loaded = 0 if "softcap" in options else 1  # a softcap needs the registers of the queries
        turns = block == 64 and loaded == 1
        expected = tiles.HopperForward(2, block, 2, turns=turns, loaded=loaded, lazy=True)
        assert tiles.hopper_forward(D, Dv, masking_of(**options), 4096, SK) == expected


@pytest.mark.parametrize(
    ("D", "width", "expected"),
    [
        (40, 64, (64,)),
        (64, 64, (64,)),
        (64, 128, (64,)),  # values beside wider keys
        (72, 128, (64, 16)),
        (80, 128, (64, 16)),
        (88, 128, (64, 32)),
        (96, 128, (64, 32)),
        (104, 128, (128,)),
        (128, 128, (128,)),
        (136, 64, (64,)),  # three buffers of 64
        (192, 64, (64,)),
        (256, 256, (256,)),
    ],
)
def test_products_take_slices_of_narrow_heads(D, width, expected):
    assert buffers.product_widths(D, width) == expected


@pytest.mark.parametrize(
    ("registers", "widths", "expected"),
    [(168, (64,), 1), (169, (64,), 0), (164, (64, 16), 2), (165, (64, 16), 1), (168, (64, 16), 1), (169, (64, 16), 0)],
)
def test_parts_in_registers(registers, widths, expected):
    """64 columns take 16 registers, 16 more columns 4; there are 184."""
    assert products.parts_that_fit(registers, widths) == expected


@pytest.mark.parametrize("width", [32, 64])
def test_dq_is_stored_without_bank_conflicts(width):
    """TMA keeps 16 bytes at a place of their 128 that the row chooses. Odd rows have exchanged columns c and c ^ 16."""
    bases = hopper_backward._turned_layout(width).offset_bases
    places = {}
    for place in range(64 * width):
        row = col = 0
        for i, (rows, cols) in enumerate(bases):
            if place >> i & 1:
                row, col = row ^ rows, col ^ cols
        col ^= 16 * (row & 1)
        assert place == col // 32 * 2048 + row * 32 + (col // 4 % 8 ^ row % 8) * 4 + col % 4
        places[row, col] = place
    for row in range(0, 64, 4):  # half a warp has 8 columns of four rows
        for col in range(0, width, 8):
            stored = [(r, (col + c) ^ 16 * (r & 1)) for r in range(row, row + 4) for c in range(8)]
            assert len({places[at] % 32 for at in stored}) == 32


@triton.jit
def _schedule_kernel(out_ptr, blocks, heads, heads_together):
    block, head = schedule(tl.program_id(0), blocks, heads, heads_together)
    tl.store(out_ptr + 2 * tl.program_id(0), block)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, head)


@pytest.mark.parametrize("heads", [1, 7, 12])
@pytest.mark.parametrize("together", [1, 3, 5, 20])
def test_sections_begin_with_the_last_blocks(heads, together, device):
    blocks = 4
    programs = torch.zeros(blocks * heads, 2, dtype=torch.int32, device=device)
    _schedule_kernel[(len(programs),)](programs, blocks, heads, together)
    programs = [*map(tuple, programs.tolist())]
    assert sorted(programs) == [(block, head) for block in range(blocks) for head in range(heads)]
    sizes = []
    while (first := blocks * sum(sizes)) < len(programs):
        sizes.append(next(n for n in range(1, heads + 1) if programs[first : first + n + 1][-1][0] != blocks - 1))
        section = programs[first : first + blocks * sizes[-1]]
        assert [block for block, _ in section] == [b for b in reversed(range(blocks)) for _ in range(sizes[-1])]
    assert {*sizes[:-1]} <= {together}
    assert sizes[-1] <= together


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


def test_widths_follow_a_change_of_their_table(monkeypatch):
    """Benchmarks empty the table, so that the portable kernels run."""
    assert choice.widths_of(64, 64) == (64, 64)
    monkeypatch.setattr(choice, "WIDTHS", ())
    assert choice.widths_of(64, 64) == (0, 0)


# tiles of three programs, left and right of a window, packed sequences -> whether a counter hands the tiles out
COUNTED = {(9, -1, -1, 0): False, (10, -1, -1, 0): True, (9, 9, 0, 0): False, (6, -1, 0, 0): False}
COUNTED |= {(7, -1, 0, 0): True, (2, -1, -1, 1): True}


@pytest.mark.parametrize("call", COUNTED, ids=str)
def test_many_or_uneven_tiles_are_handed_out_by_a_counter(call, monkeypatch):
    launches = []
    monkeypatch.setattr(hopper_forward, "launch", lambda _, grid, tensors, *__, **___: launches.append((grid, tensors)))
    monkeypatch.setattr(hopper_forward, "num_programs", lambda device, each: 3)
    heads, left, right, sequences = call
    x, lse = torch.zeros(1, 128, heads, 64, dtype=torch.bfloat16), torch.empty(1, heads, 128)
    cu = torch.zeros(sequences + 1) if sequences else None
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 128, "max_seqlen_k": 128}
    masking = masks.Masking(**dict.fromkeys(masks.Masking._fields) | sizes | {"left": left, "right": right})
    hopper_forward.attention_fwd_hopper(x, x, x, None, masking, x, lse)
    [(grid, tensors)] = launches
    assert grid == (3,)
    assert (tensors[-1] is not None) == COUNTED[call]
