"""Context parallel: batches, and what attention computes whose sequences are spread over processes."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from liger_like.ops.attention import flash_attention_ref
from liger_like.parallel import context_parallel
from liger_like.parallel._spread_attention import METHODS, Shards, _pieces
from liger_like.parallel.context_parallel import LAYOUTS, ContextParallel

CU_SEQLENS = torch.tensor([0, 5, 6, 19, 24, 40, 48])  # the 48 tokens of two rows of 24
CASES = {
    "causal": ({}, False),
    "window": ({"left": 4}, False),
    "long window": ({"left": 13, "softcap": 2.0}, False),
    "documents": ({}, True),
    "documents and window": ({"left": 3, "scale": 0.5}, True),
}


def close(got, expected, name):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def counts(method, n):
    """How often a forward and a backward of ``n`` processes communicate."""
    if n == 1:
        return {}, {}
    return {
        "allgather": ({"_allgather_base_": 1}, {"_allgather_base_": 1, "_reduce_scatter_base_": 1}),
        "ring": ({"transfers": n - 1}, {"transfers": 2 * n - 1}),
        "ulysses": ({"alltoall_base_": 2}, {"alltoall_base_": 2}),
    }[method]


def counted(call):
    """Return the result of ``call``, and its number of communications by operation."""
    with CommDebugMode() as mode, mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as ring:
        result = call()
    found = {op.__name__: n for op, n in mode.get_comm_counts().items()}
    return result, found | ({"transfers": ring.call_count} if ring.called else {})


def attention_case(case, key_heads, scale=1, device="cpu", dtype=torch.float64):
    """Arguments, with a gradient of the output, and options."""
    torch.manual_seed(0)
    (S, H), (options, has_documents) = (24 * scale, 2 * key_heads), CASES[case]
    shapes = {"q": (S, H, 8), "k": (S, key_heads, 8), "v": (S, key_heads, 4), "dout": (S, H, 4)}
    widths = {name: (2, *shape[:-1], scale * shape[-1]) for name, shape in shapes.items()} | {"sinks": (H,)}
    inputs = {name: torch.randn(shape, dtype=dtype, device=device) for name, shape in widths.items()}
    cu_seqlens = scale * CU_SEQLENS.to(device) if has_documents else None
    return inputs, {"left": -1, **options, "cu_seqlens": cu_seqlens}


def gradients(out, leaves, dout):
    grads = torch.autograd.grad(out, leaves.values(), dout)
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def whole(inputs, options):
    """Return the results of one process."""
    options = dict(options)
    spans, left, cu_seqlens = None, options.pop("left"), options.pop("cu_seqlens")
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    dout, S = leaves.pop("dout").detach(), inputs["q"].shape[1]
    if cu_seqlens is not None:
        rows = torch.arange(2 * S, device=dout.device)
        document = torch.bucketize(rows, cu_seqlens, right=True)
        spans = torch.stack((cu_seqlens[document - 1], cu_seqlens[document])) - rows // S * S
        spans = spans.view(2, 2, S).int()
    out = flash_attention_ref(**leaves, causal=True, window=(left, -1), spans=spans, **options)
    return gradients(out, leaves, dout)


def across(cp, inputs, options):
    """Return this process's part of the results, and the sum of the gradients of the sinks."""
    parts = {name: t if name == "sinks" else cp.shards.own(t) for name, t in inputs.items()}
    dout = parts.pop("dout")
    leaves = {name: t.detach().requires_grad_() for name, t in parts.items()}
    out, forward = counted(lambda: cp.attend(**leaves, **options))
    results, backward = counted(lambda: gradients(out, leaves, dout))
    assert (forward, backward) == counts(cp.method, cp.shards.size)
    dist.all_reduce(results["dsinks"], group=cp.shards.group)
    return results


def part_of(shards, results):
    return {name: t if name == "dsinks" else shards.own(t) for name, t in results.items()}


def check_attention(mesh, method, layout, case, dtype):
    inputs, options = attention_case(case, mesh.size(), dtype=dtype)
    cp = context_parallel(mesh, method=method, layout=layout)
    expected = part_of(cp.shards, whole(inputs, options))
    for name, t in across(cp, inputs, options).items():
        close(t, expected[name], f"{method}, {layout}, {case}, {dtype}, {name}")


def check_errors(cp, inputs, options, label):
    """The error is at most twice that of plain torch in one process."""
    same = part_of(cp.shards, whole(inputs, options))
    exact = part_of(cp.shards, whole({name: t.double() for name, t in inputs.items()}, options))
    for name, t in across(cp, inputs, options).items():
        error, allowed = (float((x - exact[name]).norm()) for x in (t, same[name]))
        limit = 2 * allowed + 1e-6 * float(exact[name].norm())
        assert error <= limit, f"{label}, {name}: {error} > {limit}"


def attention_worker(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for method in METHODS:
        for case in CASES:
            for layout in LAYOUTS if world_size == 2 else ("zigzag",):
                check_attention(mesh, method, layout, case, torch.float64)  # runs plain torch
    for method in METHODS if world_size == 2 else ():
        for case in ("causal", "documents and window"):
            check_attention(mesh, method, "zigzag", case, torch.float32)  # runs the kernels
        inputs, options = attention_case("causal", world_size, dtype=torch.float32)
        for name in ("q", "k"):  # few bits, so that products are exact
            inputs[name] = inputs[name].mul(8).round() / 8
        inputs["q"][..., 0] = 8
        inputs["k"][..., 0] += 1000  # scores near 2800: fp32 leaves few bits of lse to the log of the sum
        check_errors(context_parallel(mesh, method=method), inputs, options, f"{method}, large scores")
    if world_size == 4:  # groups of processes that are not neighbours
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))["cp"]
        for method in METHODS:
            check_attention(mesh, method, "zigzag", "documents and window", torch.float64)


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_is_that_of_one_process(world_size):
    run(attention_worker, world_size, world_size)


def gpu_worker(rank):
    mesh, device = init_device_mesh("cuda", (2,)), f"cuda:{rank}"
    for method, layout, case in itertools.product(METHODS, LAYOUTS, CASES):
        inputs, options = attention_case(case, 16, 16, device, torch.bfloat16)  # 16 heads, thus 16 sinks
        inputs["sinks"] = inputs["sinks"].float()  # the error of few bf16 numbers is chance
        cp = context_parallel(mesh, method=method, layout=layout)
        check_errors(cp, inputs, options, f"{method}, {layout}, {case}")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_attention_over_nccl():
    run(gpu_worker, 2, backend="nccl")


IDS = torch.arange(1, 25).view(2, 12)


def shard(batch, rank=0, layout="zigzag", size=2):
    """Return this process's part of ``batch``, without communication."""
    return ContextParallel(Shards(None, rank, size, LAYOUTS[layout]), "ring").shard(batch)


def test_shards():
    inputs = {"input_ids": IDS[:, :10], "labels": IDS[:, :10], "use_cache": False}
    parts = [shard(inputs, rank) for rank in range(2)]
    # 12 tokens with padding, in 4 chunks
    assert [part["position_ids"][1].tolist() for part in parts] == [[0, 1, 2, 9, 0, 0], [3, 4, 5, 6, 7, 8]]
    assert [part["input_ids"][1].tolist() for part in parts] == [[13, 14, 15, 22, 0, 0], [16, 17, 18, 19, 20, 21]]
    assert parts[0]["shift_labels"].tolist() == [[2, 3, 4, -100, -100, -100], [14, 15, 16, -100, -100, -100]]
    for part in parts:
        assert part["num_items_in_batch"] == 18
        assert torch.equal(part["labels"], part["shift_labels"])
        assert part.keys() == {"input_ids", "labels", "shift_labels", "position_ids", "num_items_in_batch", "use_cache"}
    assert inputs.keys() == {"input_ids", "labels", "use_cache"}
    assert shard({"input_ids": IDS}, 1, "contiguous")["input_ids"].tolist() == IDS[:, 6:].tolist()


def test_other_tensors_of_tokens_are_sharded_and_what_is_given_is_kept():
    inputs = {"inputs_embeds": torch.randn(2, 12, 3), "shift_labels": IDS, "num_items_in_batch": 5, "other": IDS.T}
    part = shard(inputs, 1)
    assert torch.equal(part["inputs_embeds"], inputs["inputs_embeds"][:, 3:9])
    assert torch.equal(part["shift_labels"], IDS[:, 3:9])
    assert part["num_items_in_batch"] == 5
    assert part["other"] is inputs["other"]


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
RESTARTED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize(
    ("more", "length", "starts"),
    [
        ({}, 12, None),
        ({"attention_mask": torch.ones(2, 12)}, 12, None),
        ({"attention_mask": PADDED[1].expand(2, 12)}, 12, None),
        ({"attention_mask": PADDED}, 12, [0, 2, 12, 24]),
        ({"position_ids": torch.arange(12)[None]}, 12, None),
        ({"position_ids": RESTARTED}, 12, [0, 3, 12, 13, 24]),
        ({"position_ids": RESTARTED[:, :11]}, 11, [0, 3, 12, 13, 24]),
        ({"position_ids": RESTARTED, "attention_mask": torch.ones(2, 12)}, 12, None),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 4, 11, 17, 22, 22])}, 11, [0, 4, 12, 18, 24]),
        ({"cu_seq_lens_q": torch.tensor([0, 12, 24])}, 12, None),
    ],
)
def test_documents_and_padding(more, length, starts):
    part = shard({"input_ids": IDS[:, :length], **more})
    if starts is None:
        assert "cu_seq_lens_q" not in part
    else:
        assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == starts
    assert "attention_mask" not in part


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("position_ids must have shape", {"position_ids": torch.zeros(3, 2, 12)}),
        ("attention_mask must have shape", {"attention_mask": torch.zeros(2, 1, 12, 12)}),
        ("attention_mask must hide tokens at the ends", {"attention_mask": torch.tensor([[1, 0, 1] * 4] * 2)}),
    ],
)
def test_batches_that_do_not_fit(message, more):
    with pytest.raises(ValueError, match=message):
        shard({"input_ids": IDS, **more})
    with pytest.raises(ValueError, match="batch must have input_ids or inputs_embeds, got labels"):
        shard({"labels": IDS})
    with pytest.raises(TypeError, match="batch must be a Mapping, got list"):
        shard([IDS])


@pytest.mark.parametrize("held", [range(8), [1, 6], [3, 4], [0, 7]])
def test_causal_attention_needs_no_spans(held):
    """Nor do windows where keys have no gaps; no key that nobody sees is in a call."""
    mine, q = Shards(None, 1, 4, True).chunks(), torch.zeros(1, 10, 1, 1)
    for piece in _pieces(mine, list(held), q, -1, None):
        chunks = list(held)[piece.keys.start // 5 : piece.keys.stop // 5]
        assert piece.spans is None
        assert max(chunks) <= mine[piece.at]
        assert piece.right == (0 if mine[piece.at] in chunks else -1)
    pieces = list(_pieces(mine, list(range(8)), q, 7, None))
    assert [(piece.left, piece.right, piece.spans) for piece in pieces] == [(7, 0, None)] * 2
    assert [(piece.keys.start, piece.keys.stop) for piece in pieces] == [(0, 10), (20, 35)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_zigzag_is_balanced(size):
    def work(rank):
        mine, q = Shards(None, rank, size, True).chunks(), torch.zeros(1, 10, 1, 1)
        pieces = list(_pieces(mine, list(range(2 * size)), q, -1, None))
        return sum(piece.keys.stop - piece.keys.start for piece in pieces)

    assert {work(rank) for rank in range(size)} == {5 * (2 * size + 1)}


@pytest.mark.parametrize("method", METHODS)
def test_one_process(method, mesh):
    for case in CASES:
        check_attention(mesh, method, "zigzag", case, torch.float64)


def test_what_is_not_known_is_refused(mesh):
    with pytest.raises(ValueError, match="method must be one of 'allgather', 'ring', 'ulysses', got 'sdpa'"):
        context_parallel(mesh, method="sdpa")
    with pytest.raises(ValueError, match="layout must be one of 'contiguous', 'zigzag', got 'stripe'"):
        context_parallel(mesh, layout="stripe")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        context_parallel("cp")
    with pytest.raises(ValueError, match="mesh must have one dimension, got 2"):
        context_parallel(init_device_mesh("cpu", (1, 1)))


def test_key_heads_that_processes_do_not_divide():
    cp = ContextParallel(Shards(None, 0, 2, True), "ulysses")
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="divides the 3 key heads, got 2"):
        cp.attend(q, k, k)
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 3 tokens"):
        cp.attend(q, k[:, :3], k[:, :3])


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "left must be an integer, got str", {"left": "a"}),
        (ValueError, "left must be at least -1, got -2", {"left": -2}),
        (TypeError, "cu_seqlens must be a tensor, got list", {"cu_seqlens": [0, 4]}),
        (TypeError, "scale must be a number, got str", {"scale": "a"}),
        (ValueError, "softcap must be positive", {"softcap": 0.0}),
        (ValueError, r"sinks must have shape \[1\]", {"sinks": torch.ones(2)}),
        (TypeError, "deterministic must be True or False or None", {"deterministic": "no"}),
    ],
)
def test_error_names_the_argument(error, message, arguments):
    q = torch.randn(1, 4, 1, 8)
    for method in METHODS:
        with pytest.raises(error, match=message):
            ContextParallel(Shards(None, 0, 1, True), method).attend(q, q, q, **arguments)


def test_documents_that_do_not_arrive(mesh):
    cp = context_parallel(mesh)
    cp.shard({"input_ids": IDS, "position_ids": RESTARTED})
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(RuntimeError, match="hands no cu_seq_lens_q to its attention"):
        cp.attend(q, q, q)
