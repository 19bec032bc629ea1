"""Calls of the ops for ``compile_check.py``: op, dtype, shape and options."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from liger_like import testing
from liger_like.ops import few_rows
from liger_like.ops.attention.paged import paged_write
from liger_like.ops.glu import GLUS
from liger_like.ops.glu_linear import glu_linear
from liger_like.ops.router import MAX_EXPERTS
from liger_like.ops.router_logits import router_logits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = [*(2**k for k in range(1, 16)), *(3 * 2**k for k in range(3, 14))]  # 2**k fills its block, 3 * 2**k does not
HEAD_WIDTHS = [2**k for k in range(1, 10)]
EXPERTS = [width for width in WIDTHS if 8 <= width <= MAX_EXPERTS]  # of routers
ATTENTION_WIDTHS = ((16, 16), (80, 80), (96, 96), (128, 128), (192, 128), (256, 128))


def calls() -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Every op, dtype, shape and options; few rows but real widths, since a tile depends on the width, not the rows."""
    for spec in testing.SPECS:
        if "attention" in spec.name or "experts" in spec.name:
            continue
        shapes = []
        for shape in (*spec.test_shapes, *spec.bench_shapes):
            few = shape | ({"lead": (2,)} if "lead" in shape else {"B": 1, "S": 2})
            if "V" in shape:
                few |= {key: 32 for key in ("H", "Ht") if key in shape}  # only GEMMs depend on them
            if few not in shapes:
                shapes.append(few)
            for width in HEAD_WIDTHS if "D" in shape else EXPERTS if "E" in shape else WIDTHS:
                wide = few | {key: width for key in ("N", "V", "D", "E") if key in shape}
                if "R" in shape:
                    # rotate the same share of the features
                    wide["R"] = max(2, width * shape["R"] // shape["D"] // 2 * 2)
                    wide["R"] *= 2 if 2 * wide["R"] == width else 1  # rotating half of the features needs an option
                if wide not in shapes:
                    shapes.append(wide)
        for dtype, shape, options in itertools.product(DTYPES, shapes, spec.options):
            yield spec, dtype, shape, options


def unstored_calls() -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Log-probabilities and entropies whose logits in fp32 are not stored; divergences whose products reduce rows."""
    spec, divergence = (
        next(spec for spec in testing.SPECS if spec.name == name)
        for name in ("fused_linear_logprobs", "fused_linear_divergence")
    )
    outputs, routes = (("logprob",), ("logprob", "entropy")), ({}, {"keep_logits": 2**20}, {"uniform_gradient": True})
    for dtype, names, V, route in itertools.product(DTYPES[1:], outputs, (1000, 1024), routes):
        yield spec, dtype, {"lead": (300,), "H": 32, "V": V}, {"outputs": names, "chunk_rows": 128} | route
    for dtype, names, V in itertools.product(DTYPES[1:], ((), ("entropy", "teacher_entropy")), (1000, 1024)):
        shape = {"lead": (300,), "H": 32, "Ht": 40, "V": V}
        yield divergence, dtype, shape, {"outputs": names, "chunk_rows": 128}


def kept_calls() -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Log-probabilities and entropies whose logits are kept as exponentials."""
    spec = next(spec for spec in testing.SPECS if spec.name == "fused_linear_logprobs")
    for dtype, V in itertools.product(DTYPES[1:], (16, 1000, 1024, 24576)):
        yield spec, dtype, {"lead": (2,), "H": 32, "V": V}, {"outputs": ("logprob", "entropy"), "keep_logits": 2**40}


def experts_calls(
    dtypes: Iterable[torch.dtype],
) -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Experts with and without biases and adapters, of widths that fill their tiles, do not, and are not aligned."""
    spec = next(spec for spec in testing.SPECS if spec.name == "moe_experts")
    widths, more = ((512, 256), (960, 960), (100, 75)), ({}, {"bias": True}, {"rank": 4})
    for (H, I), parts, dtype, options in itertools.product(widths, more, dtypes, spec.options):
        yield spec, dtype, {"lead": (2,), "H": H, "I": I, "E": 2, "K": 2} | parts, options


def attention_calls(
    widths: Iterable[tuple[int, int]] = ATTENTION_WIDTHS, dtypes: Iterable[torch.dtype] = DTYPES, Hk: int = 2
) -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Attention with heads of every width, over long rows, in spans, few rows and many keys, and packed sequences."""
    heads: dict[str, Any] = {"H": 4, "Hk": Hk}
    shapes: dict[str, list[dict[str, Any]]] = {
        "flash_attention": [
            heads | {"B": 1, "S": 200, "Sk": 200},
            heads | {"B": 1, "S": 200, "Sk": 200, "bias": "hsk", "padded": True, "sinks": True},
            heads | {"B": 1, "S": 200, "Sk": 200, "spans": True},
            heads | {"B": 1, "S": 200, "Sk": 200, "spans": True, "bias": "hsk", "padded": True},
            heads | {"B": 1, "S": 1, "Sk": 2000, "padded": True},
            heads | {"B": 1, "S": 1, "Sk": 200, "spans": True, "bias": "hsk", "sinks": True},
            heads | {"B": 1, "S": 10, "Sk": 200, "padded": True},
        ],
        "flash_attention_varlen": [heads | {"lengths": ((150, 150), (50, 60)), "sinks": True}],
    }
    flags = ({"deterministic": False}, {"deterministic": True})
    for spec in testing.SPECS:
        for shape, (D, Dv), dtype in itertools.product(shapes.get(spec.name, ()), widths, dtypes):
            for options, flag in itertools.product(spec.options, flags):
                yield spec, dtype, shape | {"D": D, "Dv": Dv}, options | flag


def paged_calls() -> Iterator[tuple[testing.OpSpec, torch.dtype, dict[str, Any], dict[str, Any]]]:
    """Attention over pages that hold blocks of keys or do not, over slots and static caches, with long prompts."""
    spec = next(spec for spec in testing.SPECS if spec.name == "flash_attention_paged")
    heads: dict[str, Any] = {"H": 8, "Hk": 2, "lengths": ((1, 2000), (70, 100))}
    shapes: tuple[dict[str, Any], ...] = (
        {"page": 256, "new": True, "sinks": True},
        {"page": 16},
        {"page": 1, "kind": "slots", "new": True},
        {"page": 1, "kind": "static"},
    )
    for shape, (D, Dv), dtype, options in itertools.product(shapes, ATTENTION_WIDTHS, DTYPES, spec.options):
        yield spec, dtype, heads | shape | {"D": D, "Dv": Dv}, options
    # latents of DeepSeek-V3 and MiniCPM3, whose heads fill blocks or do not
    latents: tuple[dict[str, Any], ...] = ({"page": 256}, {"page": 16, "sinks": True}, *shapes[3:])
    widths = ({"H": 128, "D": 64, "Dv": 512}, {"H": 40, "D": 32, "Dv": 256})
    for shape, width, dtype, options in itertools.product(latents, widths, DTYPES[1:], spec.options):
        yield spec, dtype, heads | shape | width | {"Hk": 1, "latent": True}, options
    yield spec, DTYPES[1], heads | widths[0] | {"Hk": 1, "latent": True, "page": 16, "kind": "slots"}, {}


def run_glu_linear(dtypes: Iterable[torch.dtype]) -> None:
    """Gated units before a linear layer, which have another backward; packed is one tensor of twice the width."""
    for dtype, width, act, packed in itertools.product(dtypes, WIDTHS, GLUS, (1, 2)):
        gates = torch.empty(3 - packed, 2, packed * width, dtype=dtype, requires_grad=True)
        glu_linear(act, torch.nn.Linear(width, 8, dtype=dtype), *gates).sum().backward()


def run_router_logits() -> None:
    """Logits of few and many experts, of widths that fill their blocks, that do not, and that are not aligned."""
    for E, H in itertools.product((8, 60, 256), (2048, 2880, 100, 75)):
        router_logits(*(torch.empty(rows, H, dtype=torch.bfloat16) for rows in (2, E)))


def run_paged_write() -> None:
    """Write rows of narrow and wide heads into paged caches, to slots and to the ends of sequences."""
    ids = torch.zeros(2, 2, dtype=torch.int32)
    for dtype, D in itertools.product(DTYPES, (16, 80, 128, 256)):
        rows, cache = (torch.empty(*sizes, 8, D, dtype=dtype) for sizes in ((2,), (3, 16)))
        paged_write(rows, rows, cache, cache, ids[0].clone())
        paged_write(rows, rows, cache, cache, pages=ids, lengths=ids[0].clone(), cu_seqlens_q=torch.zeros(3).int())


def run_few_rows() -> None:
    """One to three layers of few rows, and gated units: in few and in many programs, with and without bias."""
    units = [(1, None), (2, None), (3, None), *((2, act) for act in GLUS)]

    def run(*counts: int) -> None:
        for dtype, rows, K, N, (layers, act) in itertools.product(DTYPES[1:], counts, (2048, 2880), (64, 256), units):
            weight, bias = torch.empty(N, K, dtype=dtype), torch.empty(N, dtype=dtype) if K == 2880 else None
            with torch.no_grad():
                few_rows.of_few_rows(torch.empty(rows, K, dtype=dtype), [weight] * layers, [bias] * layers, act)

    run(1, 20, 64)
    for tile in few_rows.TILES:
        with patch.multiple(few_rows, TILES=(tile,), num_programs=lambda device, each: 132):
            run(200)
