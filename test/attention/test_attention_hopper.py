"""The attention kernels for Hopper: which calls they take, and their forward, which only such a GPU runs."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from test_attention import finite, pairwise
from test_attention_spans import documents

from liger_like import ops
from liger_like.ops.attention import choice, flash_attention_ref, flash_attention_varlen_ref, tiles
from liger_like.ops.attention import forward as attention_forward
from liger_like.ops.attention.hopper import buffers
from liger_like.ops.attention.hopper import forward as hopper_forward
from liger_like.ops.attention.masking import Masking
from liger_like.runtime.support import architecture
from liger_like.testing import assert_accurate
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs, with_longest

KERNEL = "_attention_fwd_hopper_kernel"
varlen, varlen_ref = map(with_longest, (ops.flash_attention_varlen, flash_attention_varlen_ref))
# D, Dv, and the warp groups that share a block of keys; wider heads have two only
KERNELS = (64, 64, 2), (64, 64, 3), (128, 128, 2), (128, 128, 3), (192, 128, 2), (256, 256, 2)
HEADS = *KERNELS[:2], (80, 80, 3), (96, 96, 2), (96, 96, 3), *KERNELS[3:5], (144, 80, 2), (136, 64, 2), KERNELS[5]
each_width = pytest.mark.parametrize(("D", "Dv", "hopper"), KERNELS, indirect=["hopper"])


def on_hopper(q, k, v, **masks):
    nothing = dict.fromkeys(Masking._fields) | {"max_seqlen_q": 9, "max_seqlen_k": 9, "left": -1, "right": -1}
    return choice.hopper_kernels(choice.FORWARD, Masking(**nothing | masks), q, k, v)


@pytest.fixture
def like_hopper(monkeypatch):
    monkeypatch.setattr(choice, "architecture", lambda device: 9)
    monkeypatch.setattr(choice, "INTERPRET", False)


def heads(B=2, S=9, H=4, D=64, dtype=torch.bfloat16):
    return torch.zeros(B, S, H, D, dtype=dtype)


ONE = torch.ones(1)
TAKEN = {
    "fp16": ([heads(dtype=torch.float16)] * 3, {}),
    "other lengths": ([heads(), heads(S=1, H=1), heads(S=1, H=1)], {}),
    "heads first": ([heads().transpose(1, 2).contiguous().transpose(1, 2)] * 3, {}),
    "parts of one projection": (torch.zeros(2, 9, 12 * 64, dtype=torch.float16).view(2, 9, 12, 64).split(4, 2), {}),
    "widths": ([heads(D=256)] * 3, {}),
    "a width between": ([heads(D=40)] * 3, {}),
    "narrower values": ([heads(D=192), heads(D=192), heads(D=128)], {}),
    "a width between, with narrower values": ([heads(D=136), heads(D=136), heads(D=64)], {}),
    "packed": ([heads(B=1)] * 3, {"cu_seqlens_q": ONE, "cu_seqlens_k": ONE}),
    "options": ([heads()] * 3, {"spans": ONE, "softcap": 2.0, "left": 3, "right": 0}),
}
LEFT = {
    "fp32": ([heads(dtype=torch.float32)] * 3, {}),
    "narrow heads": ([heads(D=32)] * 3, {}),
    "a width too little": ([heads(D=152)] * 3, {}),
    "wide heads": ([heads(D=512)] * 3, {}),
    "narrow values": ([heads(D=128), heads(D=128), heads(D=56)], {}),
    "narrow values of wide heads": ([heads(D=192), heads(D=192), heads(D=56)], {}),
    "wide values": ([heads(), heads(), heads(D=128)], {}),
    "no keys": ([heads(), heads(S=0), heads(S=0)], {}),
    "features apart": ([heads(D=128)[..., ::2]] * 3, {}),
    "rows at any byte": ([heads(), heads(D=68)[..., :64], heads()], {}),
    "starts at any byte": ([heads(), heads(), heads(D=128)[..., 4:68]], {}),
    "results at any byte": ([heads(), heads(), heads(D=64)[..., :60]], {}),
    "expanded": ([heads(), heads(H=1).expand(2, 9, 4, 64), heads()], {}),
    "bias": ([heads()] * 3, {"bias": ONE}),
    "padding": ([heads()] * 3, {"key_padding_mask": ONE}),
    "offsets": ([heads()] * 3, {"offsets": ONE}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_calls_that_are_taken(name, like_hopper):
    tensors, masks = TAKEN[name]
    assert on_hopper(*tensors, **masks)


@pytest.mark.parametrize("name", LEFT)
def test_calls_that_are_left(name, like_hopper):
    tensors, masks = LEFT[name]
    assert not on_hopper(*tensors, **masks)


@pytest.mark.parametrize(("name", "value"), [("architecture", lambda device: 10), ("INTERPRET", True)])
def test_places_where_no_call_is_taken(name, value, like_hopper, monkeypatch):
    assert on_hopper(*[heads()] * 3)
    monkeypatch.setattr(choice, name, value)
    assert not on_hopper(*[heads()] * 3)


@pytest.mark.parametrize("packed", [False, True])
def test_descriptors_end_with_their_rows(packed):
    """TMA moves rows of the batch or the sequence only, by 64 bits of an address; others are outside a dimension."""
    x = torch.zeros(1 if packed else 3, 50, 4, 80, dtype=torch.bfloat16)[..., 8:72]
    cu = torch.tensor([0, 17, 17, 43]) if packed else None
    masking = Masking(**dict.fromkeys(Masking._fields) | {"cu_seqlens_q": cu})
    desc = buffers.descriptor(x, 32, 64, masking)
    assert {*map(type, desc.shape), *map(type, desc.strides)} == {int}
    bytes_of = [stride * x.element_size() for stride in desc.strides[:-1]]
    assert all(n < 1 << 40 and n % 16 == 0 for n in bytes_of), "not what a tensor map takes"
    assert max(desc.shape) < 1 << 31
    like = SimpleNamespace(block_type=SimpleNamespace(shape=desc.block_shape))
    parts = [(0, 0, 17), (0, 17, 17), (0, 17, 43), (0, 43, 50)] if packed else [(b, 0, 50) for b in range(3)]
    for (b, start, end), h, col in itertools.product(parts, (0, 3), (0, 40)):
        for row in range(start, end + 100):
            at = [getattr(i, "value", i) for i in buffers.at.fn(like, buffers.Sequence(b, end), h, row, col)]
            moved = all(0 <= i < n for i, n in zip(at, desc.shape, strict=True))
            assert moved == (row < end)
            if moved:
                address = sum(i * stride for i, stride in zip(at, desc.strides, strict=True)) * x.element_size()
                assert (x.data_ptr() + address) % (1 << 64) == x[b, row, h, col].data_ptr()


# queries, keys, left, right of a window -> warp groups and keys in a block
TILES_OF = {(200, 513, -1, -1): (3, 128), (513, 200, -1, -1): (2, 128), (128, 900, 9, 0): (2, 128)}
TILES_OF |= {(2000, 2000, 600, 0): (3, 64), (2000, 2000, 607, 0): (3, 128)}


@pytest.mark.parametrize("sizes", TILES_OF, ids=str)
def test_launches_take_warp_groups_by_their_keys(sizes, monkeypatch):
    made = []
    monkeypatch.setattr(hopper_forward, "launch", lambda *args, **options: made.append(options))
    q, k, lse = heads(S=sizes[0]), heads(S=sizes[1]), torch.empty(2, 4, sizes[0])
    masks = dict(zip(("max_seqlen_q", "max_seqlen_k", "left", "right"), sizes, strict=True))
    hopper_forward.attention_fwd_hopper(q, k, k, None, Masking(**dict.fromkeys(Masking._fields) | masks), q, lse)
    assert [(options["GROUPS"], options["BLOCK_N"]) for options in made] == [TILES_OF[sizes]]


@pytest.fixture
def hopper(request, launched, monkeypatch):
    """The names of what is launched, on the GPU for which these kernels are.

    Parameter: the warp groups of calls for more than 128 queries without a softcap; others have two, or some windows 3.
    """
    if architecture(torch.device("cuda")) != 9:
        pytest.skip("needs a Hopper GPU")
    if hasattr(request, "param"):
        least = {2: math.inf, 3: -math.inf}[request.param]
        for widths, (*options, _) in tiles.HOPPER_FORWARD.items():
            monkeypatch.setitem(tiles.HOPPER_FORWARD, widths, (*options, least))
    return launched


def frozen(inputs):
    return {n: t.detach() for n, t in inputs.items()}


def forward(fn, inputs, **options):
    return fn(**frozen(inputs), **options, return_lse=True)


def portable(monkeypatch, fn, inputs, **options):
    with monkeypatch.context() as patch:
        patch.setattr(attention_forward, "hopper_kernels", lambda *_: False)
        return forward(fn, inputs, **options)


def assert_near(got, expected):
    """Rows without keys alike, and everything else as near as two roundings of one sum."""
    (out, lse), (same_out, same_lse) = got, expected
    live = same_lse.isfinite()
    assert torch.equal(lse.isfinite(), live)
    assert (out - same_out).float().norm() <= 1e-2 * same_out.float().norm()
    assert (lse - same_lse)[live].norm() <= 1e-5 * same_lse[live].norm() + 1e-5 * live.sum().sqrt()


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window": (70, -1)},
    {"window": (100, 30)},
    {"softcap": 4.0},
    {"causal": True, "softcap": 4.0, "window": (200, -1), "scale": 0.2},
]
SHAPES = {
    "blocks": {"B": 2, "S": 256, "Sk": 256, "H": 4, "Hk": 2, "sinks": True},
    "more keys": {"B": 1, "S": 129, "Sk": 1000, "H": 4, "Hk": 4},
    "fewer keys": {"B": 2, "S": 300, "Sk": 200, "H": 3, "Hk": 1, "sinks": True},
    "spans": {"B": 2, "S": 333, "Sk": 300, "H": 2, "Hk": 2, "spans": True},
}


def some(*axes):
    """Rows in which every two values meet; the third value is one of HEADS."""
    rows = pairwise(*axes)
    ids = [" ".join(map(str, row)) for row in rows]
    return pytest.mark.parametrize(("row", "hopper"), [(row, row[2][2]) for row in rows], ids=ids, indirect=["hopper"])


def assert_right(fn, ref, make_inputs, options, launched, monkeypatch):
    """The result keeps the rule and is near the portable kernel's."""
    launched.clear()
    assert_accurate(finite(fn), finite(ref), lambda: frozen(make_inputs()), options, 4, k=2)
    assert {name for name, _ in launched} == {KERNEL}
    inputs = make_inputs()
    assert_near(forward(fn, inputs, **options), portable(monkeypatch, fn, inputs, **options))


@pytest.mark.gpu
@some(tuple(SHAPES), MASKS, HEADS, choice.DTYPES)
def test_options(row, hopper, monkeypatch, poisoned):
    name, options, (D, Dv, _), dtype = row
    make = lambda: attention_inputs(dtype, "cuda", **SHAPES[name], D=D, Dv=Dv)  # noqa: E731
    assert_right(ops.flash_attention, flash_attention_ref, make, options, hopper, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", choice.DTYPES, ids=str)
@pytest.mark.parametrize(("blocks", "hopper"), [(3, 2), (2, 3)], ids=["two", "three"], indirect=["hopper"])
@pytest.mark.parametrize("D", [64, 80, 96])
def test_number_of_warp_groups(D, blocks, dtype, hopper, monkeypatch, poisoned):
    make = lambda: attention_inputs(dtype, "cuda", B=1, S=384, Sk=384, H=2, Hk=2, D=D)  # noqa: E731
    forward(ops.flash_attention, make())
    assert hopper == [(KERNEL, (2 * blocks,))]
    assert_right(ops.flash_attention, flash_attention_ref, make, {}, hopper, monkeypatch)


BESIDE_BLOCKS = {2: (1, 63, 65, 127, 129, 4097), 3: (129, 193, 4097)}  # warp groups -> queries


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("S", "D", "Dv", "hopper"),
    [(S, *kernel) for kernel in KERNELS for S in BESIDE_BLOCKS[kernel[2]]],
    indirect=["hopper"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_beside_blocks(S, causal, D, Dv, hopper, monkeypatch, poisoned):
    H = 300 if S == 1 else 4  # with fewer rows the portable kernel would run
    for Sk in {S, 1, 191}:
        make = lambda: attention_inputs(torch.bfloat16, "cuda", B=1, S=S, Sk=Sk, H=H, Hk=1, D=D, Dv=Dv)  # noqa: B023, E731
        assert_right(ops.flash_attention, flash_attention_ref, make, {"causal": causal}, hopper, monkeypatch)


LENGTHS = {
    "ragged": ((1, 1), (0, 0), (300, 300), (128, 128), (5, 5), (63, 63), (0, 0), (257, 257)),
    "other keys": ((200, 30), (0, 70), (70, 0), (1, 400), (129, 127)),
    "long": ((1000, 1000),),
    "many": ((3, 3),) * 300,
}


@pytest.mark.gpu
@some(tuple(LENGTHS), MASKS, HEADS, choice.DTYPES)
def test_packed_sequences(row, hopper, monkeypatch, poisoned):
    name, options, (D, Dv, _), dtype = row
    shape = {"lengths": LENGTHS[name], "H": 4, "Hk": 2, "D": D, "Dv": Dv, "sinks": True, "behind": 40}
    make = lambda: attention_varlen_inputs(dtype, "cuda", **shape)  # noqa: E731
    assert_right(varlen, varlen_ref, make, options, hopper, monkeypatch)
    assert forward(varlen, make(), **options)[0][-40:].eq(0).all()


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_from_other_sequences(causal, D, Dv, hopper, poisoned):
    lengths = LENGTHS["ragged"]
    inputs = attention_varlen_inputs(torch.bfloat16, "cuda", lengths, H=4, Hk=2, D=D, Dv=Dv, behind=40)
    expected = forward(varlen, inputs, causal=causal)
    start = 0
    for n in (*(n for n, _ in lengths), 40):
        rows = torch.zeros(len(inputs["q"]), dtype=torch.bool, device="cuda")
        rows[start : (start := start + n)] = True
        spoilt = {x: inputs[x].detach().masked_fill(rows[:, None, None], torch.nan) for x in ("q", "k", "v")}
        out, lse = forward(varlen, inputs | spoilt, causal=causal)
        assert torch.equal(out[~rows], expected[0][~rows])
        assert torch.equal(lse[:, ~rows], expected[1][:, ~rows])
    assert out[-40:].eq(0).all()
    assert KERNEL in dict(hopper)


@pytest.mark.gpu
@each_width
def test_documents_are_those_of_varlen(D, Dv, hopper, poisoned):
    lengths = 250, 1, 600, 90, 64, 128
    inputs = attention_inputs(torch.bfloat16, "cuda", B=1, S=sum(lengths), Sk=sum(lengths), H=4, Hk=2, D=D, Dv=Dv)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out, lse = forward(ops.flash_attention, inputs, causal=True, spans=documents(*lengths, device="cuda"))
    packed = {n: t[0] for n, t in inputs.items()} | {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert_near((out[0], lse[0]), forward(varlen, packed, causal=True))
    assert [name for name, _ in hopper] == [KERNEL] * 2


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("S", [140, 400])
def test_empty_spans(S, D, Dv, hopper, poisoned):
    """Windows of all rows of a block: before the keys, between them, after them."""
    inputs = attention_inputs(torch.bfloat16, "cuda", B=3, S=S, Sk=300, H=8, Hk=1, D=D, Dv=Dv, sinks=True)
    inputs["v"] = torch.full_like(inputs["v"], torch.nan)
    for start, end in ((-9, -4), (200, 200), (250, 140), (300, 300), (900, 990)):
        spans = torch.empty(2, 3, S, device="cuda", dtype=torch.int32)
        spans[0], spans[1] = start, end
        for causal in (False, True):
            out, lse = forward(ops.flash_attention, inputs, spans=spans, causal=causal)
            assert out.eq(0).all()
            assert lse.eq(-torch.inf).all()
    assert {name for name, _ in hopper} == {KERNEL}


CALLS = {
    "causal": ({"B": 2, "S": 1000, "Sk": 1000, "H": 16, "Hk": 4, "sinks": True}, {"causal": True}),
    "full": ({"B": 2, "S": 700, "Sk": 1000, "H": 16, "Hk": 4}, {}),
    "spans": ({"B": 2, "S": 1000, "Sk": 1000, "H": 16, "Hk": 4, "spans": True}, {"causal": True}),
}


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("name", [*CALLS, "packed"])
def test_repeats_bit_for_bit(name, D, Dv, hopper, poisoned):
    """Loading and multiplying warps run side by side: a missing wait would show as a result that moves."""
    if name == "packed":
        shape = {"lengths": LENGTHS["ragged"] * 4, "H": 16, "Hk": 4, "D": D, "Dv": Dv, "behind": 7}
        cases = [attention_varlen_inputs(torch.bfloat16, "cuda", **shape) for _ in range(4)]
        fn, options = varlen, {"causal": True}
    else:
        shape, options = CALLS[name]
        cases = [attention_inputs(torch.bfloat16, "cuda", **shape, D=D, Dv=Dv) for _ in range(4)]
        fn = ops.flash_attention
    first = [forward(fn, inputs, **options) for inputs in cases]
    for _ in range(100):
        for inputs, expected in zip(cases, first, strict=True):
            got = forward(fn, inputs, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert {name for name, _ in hopper} == {KERNEL}


@pytest.mark.gpu
@each_width
def test_any_layout_gives_the_same_bits(D, Dv, hopper, poisoned):
    inputs = attention_inputs(torch.bfloat16, "cuda", B=2, S=300, Sk=300, H=4, Hk=4, D=D, Dv=Dv)
    q, k, v = (t.detach() for t in inputs.values())
    fused = torch.cat([t.flatten(2) for t in (q, k, v)], 2).split((4 * D, 4 * D, 4 * Dv), 2)
    fused = [t.unflatten(2, (4, -1)) for t in fused]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    at_any_byte = [torch.nn.functional.pad(t, (3, 2))[..., 3:-2] for t in (q, k, v)]
    expected = forward(ops.flash_attention, inputs, causal=True)
    for tensors in (fused, heads_first):
        got = forward(ops.flash_attention, dict(zip("qkv", tensors, strict=True)), causal=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [name for name, _ in hopper] == [KERNEL] * 3
    hopper.clear()
    assert_near(forward(ops.flash_attention, dict(zip("qkv", at_any_byte, strict=True)), causal=True), expected)
    assert [name for name, _ in hopper] == ["_attention_fwd_kernel"]


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("name", CALLS)
def test_cuda_graph_equals_eager(name, D, Dv, hopper, poisoned):
    shape, options = CALLS[name]
    inputs = attention_inputs(torch.bfloat16, "cuda", **shape, D=D, Dv=Dv)
    forward(ops.flash_attention, inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(ops.flash_attention, inputs, **options)
    for _ in range(3):
        for t in frozen(inputs).values():
            if t.is_floating_point():
                t.copy_(torch.randn_like(t))
        graph.replay()
        for a, b in zip(captured, forward(ops.flash_attention, inputs, **options), strict=True):
            assert torch.equal(a, b)
    assert {name for name, _ in hopper} == {KERNEL}


@pytest.mark.gpu
@each_width
def test_two_streams(D, Dv, hopper, poisoned):
    streams = [torch.cuda.Stream() for _ in range(2)]
    shape, options = CALLS["causal"]
    cases = [attention_inputs(torch.bfloat16, "cuda", **shape, D=D, Dv=Dv) for _ in streams]
    expected = [forward(ops.flash_attention, inputs, **options) for inputs in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, inputs in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(forward(ops.flash_attention, inputs, **options))
        torch.cuda.synchronize()
        pairs = zip(itertools.chain(*results), itertools.chain(*expected), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert {name for name, _ in hopper} == {KERNEL}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "options", "hopper"),
    [
        ({"B": 1, "S": 2**31 // 4096 + 9, "Sk": 96, "H": 32, "Hk": 1, "D": 128}, {}, 3),
        (
            {"B": 1, "S": 300, "Sk": 2**31 // 1024 + 9, "H": 8, "Hk": 8, "D": 128},
            {"causal": True, "window": (300, -1)},
            3,
        ),
        ({"B": 3, "S": 65, "Sk": 65, "H": 180_000, "Hk": 1, "D": 64}, {"causal": True}, 2),
    ],
    ids=["queries", "keys", "heads"],
    indirect=["hopper"],
)
def test_more_than_2_31_elements(shape, options, hopper, monkeypatch):
    inputs = attention_inputs(torch.bfloat16, "cuda", **shape)
    assert max(t.numel() for t in inputs.values()) > 2**31
    (out, lse), (same_out, same_lse) = (
        forward(ops.flash_attention, inputs, **options),
        portable(monkeypatch, ops.flash_attention, inputs, **options),
    )
    for b, rows in itertools.product(range(shape["B"]), torch.arange(shape["S"], device="cuda").split(20_000)):
        assert_near((out[b, rows], lse[b, :, rows]), (same_out[b, rows], same_lse[b, :, rows]))
    assert [name for name, _ in hopper] == [KERNEL, "_attention_fwd_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [{"S": 1}, {"bias": "hk"}, {"padded": True}, {"D": 72}, {"D": 128, "Dv": 56}, {"dtype": torch.float32}],
    ids=str,
)
def test_other_calls_stay_with_the_portable_kernel(more, hopper):
    shape = {"B": 1, "S": 200, "Sk": 300, "H": 4, "Hk": 2, "D": 64, "dtype": torch.bfloat16} | more
    forward(ops.flash_attention, attention_inputs(device="cuda", **shape), causal=True)
    assert "_attention_fwd_kernel" in dict(hopper)
    assert KERNEL not in dict(hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [2, 3], indirect=True)
@pytest.mark.parametrize("spans", [False, True])
def test_lengths_do_not_recompile(spans, hopper):
    def kernels():
        caches = hopper_forward._attention_fwd_hopper_kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)

    def call(B, S, Sk):
        shape = {"B": B, "S": S, "Sk": Sk, "H": 4, "Hk": 1, "D": 64, "spans": spans}
        forward(ops.flash_attention, attention_inputs(torch.bfloat16, "cuda", **shape), causal=True)

    call(1, 129, 129)
    before = kernels()
    for n in range(40):
        call(1 + n % 3, 130 + n, 1 + 16 * n)
    assert kernels() <= before + 1
    assert len(hopper) == 41
