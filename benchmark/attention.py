"""Times attention on a GPU against torch's flash and cuDNN back-ends and compiled flex_attention.

    make bench-attention                     measures, writes results/ and from it the report
    python -m benchmark.attention --quick    the first shapes, printed only
    python -m benchmark.attention --report   the report again, without a GPU

Kernels alone: the replay of a CUDA graph of one forward, or of one forward and backward, in bf16, on random data; the
time of a backward is the difference. FLOPs are those of the products that the mask leaves, two of the forward and five
of the backward, whatever a contestant computes beside them. All contestants of a shape are measured in the same rounds,
in random order.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmark.attention_report import tables, write_report
from benchmark.markdown import Row
from benchmark.measure import Step, attempt, captured, environment, gpu_times, peak_mib, rounded, save, settle
from liger_like import testing
from liger_like.ops.attention import _hopper

SPECS = {spec.name: spec for spec in testing.SPECS}
PORTABLE = "liger_like, portable"
REPLAYS, ROUNDS, QUICK_ROUNDS, QUICK_CASES = 4, 7, 3, 3
BACKENDS = {"torch, flash": SDPBackend.FLASH_ATTENTION, "torch, cuDNN": SDPBackend.CUDNN_ATTENTION}


class Case(NamedTuple):
    """A row of ``testing.SPECS``, one of its shapes, and a mask."""

    spec: testing.OpSpec
    shape: Mapping[str, Any]
    options: Mapping[str, Any]

    def text(self) -> str:
        """For the report."""
        shape = self.shape
        sizes = {key: shape[key] for key in ("B", "S", "H", "Hk", "D", "Dv") if key in shape}
        documents = [f"{len(shape['lengths'])} documents"] if "lengths" in shape else []
        masks = [key if value is True else f"{key} {value[0] + 1}" for key, value in self.options.items()]
        return ", ".join((" ".join(f"{key} {n}" for key, n in sizes.items()), *documents, *masks))


def cases() -> list[Case]:
    """Every shape of the table, causal and not, and a window."""
    causal, window = {"causal": True}, {"causal": True, "window": (1023, 0)}
    batch, packed = SPECS["flash_attention"], SPECS["flash_attention_varlen"]
    full = [Case(batch, shape, options) for shape, options in itertools.product(batch.bench_shapes, (causal, {}))]
    varlen = [Case(packed, shape, causal) for shape in packed.bench_shapes]
    return [*full, Case(batch, batch.bench_shapes[0], window), *varlen]


def block_mask(case: Case, inputs: testing.Inputs) -> BlockMask | None:
    """What flex_attention is told of the mask."""
    device, S = inputs["q"].device, inputs["q"].shape[-3]
    left = case.options.get("window", (S, 0))[0]
    documents = None
    if "cu_seqlens_q" in inputs:
        rows = torch.arange(S, device=device)
        documents = torch.bucketize(rows, inputs["cu_seqlens_q"], right=True)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = (i >= j) & (i - j <= left)
        return mask if documents is None else mask & (documents[i] == documents[j])

    return create_block_mask(seen, None, None, S, S, device=device) if case.options else None


def contestants(case: Case, inputs: testing.Inputs) -> dict[str, Callable[..., Tensor]]:
    """Functions of q, k and v."""
    packed: dict[str, Any] = {key: t for key, t in inputs.items() if key.startswith("cu_")}
    if packed:
        packed |= {"max_seqlen_q": max(n for n, _ in case.shape["lengths"])}
        packed |= {"max_seqlen_k": max(n for _, n in case.shape["lengths"])}

    def ours(deterministic: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = case.spec.fn(q=q, k=k, v=v, deterministic=deterministic, **packed, **case.options)
        return out

    compiled, mask = torch.compile(flex_attention, dynamic=False, fullgraph=True), block_mask(case, inputs)

    def heads_first(fn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On [B, H, S, D] views."""
        q, k, v = ((t if t.dim() == 4 else t.unsqueeze(0)).transpose(1, 2) for t in (q, k, v))
        return fn(q, k, v, enable_gqa=True).transpose(1, 2)

    def with_backend(backend: SDPBackend, *qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return heads_first(partial(F.scaled_dot_product_attention, is_causal=bool(case.options)), *qkv)

    fns = dict.fromkeys(("liger_like", PORTABLE), partial(ours, False))
    fns["liger_like, deterministic"] = partial(ours, True)
    if not packed and "window" not in case.options:
        fns |= {name: partial(with_backend, backend) for name, backend in BACKENDS.items()}
    return fns | {"flex_attention": partial(heads_first, partial(compiled, block_mask=mask))}


def kernel_us(graph: torch.cuda.CUDAGraph, step: Step) -> list[float]:
    """Of a graph of ``step``, which holds the tensors that the graph reads."""
    return [ms * 1e3 for ms in gpu_times(graph.replay, REPLAYS)]


def gpu_row(name: str, fn: Callable[..., Tensor], inputs: testing.Inputs) -> Row:
    """Peak memory, and timers of the kernels; one contestant runs on the portable ones, whatever the GPU has."""
    qkv = [inputs[name].detach().clone().requires_grad_() for name in ("q", "k", "v")]
    upstream = torch.randn_like(fn(*qkv))
    steps: dict[str, Step] = {
        "forward_us": lambda: fn(*qkv),
        "us": lambda: torch.autograd.grad(fn(*qkv), qkv, upstream),
    }
    with mock.patch.object(_hopper, "WIDTHS", () if name == PORTABLE else _hopper.WIDTHS):
        mib = peak_mib(steps["us"])[0]
        return {"mib": mib, **{key: partial(kernel_us, captured(step), step) for key, step in steps.items()}}


def measure(case: Case, rounds: int) -> Row:
    """A row of each contestant."""
    torch.manual_seed(0)
    torch.compiler.reset()  # else flex_attention meets the limit of recompilations
    inputs = case.spec.inputs(torch.bfloat16, "cuda", **case.shape)
    rows = [{"name": n, **attempt(partial(gpu_row, n, fn, inputs))} for n, fn in contestants(case, inputs).items()]
    settle(rows, rounds)
    *_, flops = case.spec.cost(2, **case.shape, **case.options)
    return {"shape": case.text(), "flops": flops, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.attention")
    parser.add_argument("--quick", action="store_true", help="the first shapes, printed only")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --report)")
        chosen, rounds = (cases()[:QUICK_CASES], QUICK_ROUNDS) if options.quick else (cases(), ROUNDS)
        result = rounded({**environment(), "cases": [measure(case, rounds) for case in chosen]})
        print(tables(result))
        if options.quick:
            return
        save(result, "attention")
    write_report()


if __name__ == "__main__":
    main()
