"""Times the memory-bound ops on a GPU against torch, torch.compile and two other libraries, with memory and host time.

    make bench-ops                                     measures, writes results/ and from it the report
    python -m benchmark.memory_bound --quick           one shape of each op, printed only
    python -m benchmark.memory_bound --only rope,swiglu    those ops, printed only
    python -m benchmark.memory_bound --host            the time on the host, printed only; without a GPU ours alone, and
                                                       what Triton does to launch a kernel is left out
    python -m benchmark.memory_bound --report          the report again, without a GPU

Shapes, inputs and counts of bytes are those of ``testing.SPECS``, in bf16 and under random upstream gradients, which
have the strides of the inputs. All contestants of a shape are measured in the same rounds, in random order.

* kernels: the replay of a CUDA graph of 5 forwards, or of 5 forwards and backwards, divided by 5.
* eager wall: 20 eager forwards and backwards between two waits for the GPU, divided by 20.
* host: 50 eager forwards, or forwards and backwards, of small inputs, issued to an idle GPU and not waited for,
  divided by 50.

Liger overwrites: its RMSNorm, alone and with the residual, writes dx over dy, its GLUs write the gradients over gate
and up, its RoPE rotates q, k, dq and dk where they are. So every contestant has its own inputs and upstream gradients,
and before each replay and each 20 eager steps they are filled anew, untimed, for every contestant alike, the upstream
gradients last. In between the data is overwritten up to 20 times: RoPE keeps its size, that of a GLU shrinks and that
of an RMSNorm grows where the weight is large, by less than bf16 can hold. The small inputs of the host time are not
filled anew: it does not depend on the values.

No cache is flushed: each tensor that grows with the rows has 64 MiB or more (rope's k 32), and what a filling leaves
in the L2 cache is a part of the upstream gradients, which the forward displaces before the backward reads them.

Libraries that are not installed are left out; the report names them.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmark.markdown import Row
from benchmark.measure import (
    Step,
    attempt,
    captured,
    environment,
    gpu_times,
    peak_mib,
    present,
    rounded,
    save,
    settle,
)
from benchmark.memory_bound_report import tables, write_report
from liger_like import testing
from liger_like.ops import _common

Build = Callable[[testing.Inputs], Step]  # of a forward; what it imports is no part of the host's time
Contest = tuple[testing.OpSpec, str, Mapping[str, Build]]

SPECS = {spec.name: spec for spec in testing.SPECS}
GRAPH_STEPS, REPLAYS, EAGER_STEPS, HOST_STEPS = 5, 4, 20, 50
ROUNDS, QUICK_ROUNDS = 7, 1
EPS = 1e-6
HOST_SIZES = {"lead": (16,), "N": 1024, "B": 1, "H": 8, "Hk": 2, "S": 16, "D": 64, "R": 64}
LIGER, FLA_NORM = "liger_kernel.transformers.functional:", "fla.modules.norm.layernorm:"


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch_rms_norm(s, weight), s


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def torch_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up


def torch_geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.gelu(gate, approximate=approximate) * up


def torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of q and k, as the models of transformers do it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    return rotate(q), rotate(k)


def torch_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """With the norm of Qwen3 in transformers: in fp32, rounded before the weight."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    return torch_rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def named(function: Callable[..., Any] | str, **more: Any) -> Build:
    """Calls a function, or what a name stands for, with the inputs by their names."""
    return lambda inputs: partial(resolve_name(function) if isinstance(function, str) else function, **inputs, **more)


def in_order(function: str, **more: Any) -> Build:
    """Calls what a name stands for with the inputs in their order."""
    return lambda inputs: partial(resolve_name(function), *inputs.values(), **more)


def glu(function: str, packed: str = "") -> Build:
    """Calls a function of gate and up, for packed inputs one of both, if there is one, else that of their halves."""

    def build(inputs: testing.Inputs) -> Step:
        gate_up = tuple(inputs.values())
        if len(gate_up) == 2 or packed:
            return partial(resolve_name(function if len(gate_up) == 2 else packed), *gate_up)
        halves = resolve_name(function)
        return lambda: halves(*gate_up[0].chunk(2, -1))

    return build


def liger_qk_norm_rope(inputs: testing.Inputs) -> Step:
    """As in a patched Qwen3: the norms on [B, S, H, D], before the heads are transposed."""
    norm, rope = resolve_name(LIGER + "liger_rms_norm"), resolve_name(LIGER + "liger_rope")
    q, k, q_weight, k_weight, cos, sin = inputs.values()

    def forward() -> Any:
        pairs = (q, q_weight), (k, k_weight)
        return rope(*(norm(x.transpose(1, 2), weight, EPS).transpose(1, 2) for x, weight in pairs), cos, sin)

    return forward


def fla_rope(inputs: testing.Inputs) -> Step:
    """On [B, S, H, D], with cos and sin [S, R / 2] that all sequences share."""
    rotary = resolve_name("fla.modules.rotary.ops:rotary_embedding")
    q, k, *angles = inputs.values()
    cos, sin = (t[0].chunk(2, -1)[0].contiguous() for t in angles)
    return lambda: tuple(rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))


@dataclass(frozen=True)
class Op:
    """A row of ``testing.SPECS`` with its peers: a function in plain torch, which is compiled, too, and libraries."""

    spec: testing.OpSpec
    torch: Callable[..., Any]
    libraries: Mapping[str, Build]
    options: Mapping[str, Any] = field(default_factory=dict)

    def contestants(self) -> dict[str, Build]:
        compiled = torch.compile(self.torch, dynamic=False, fullgraph=True)
        functions = {"liger_like": self.spec.fn, "torch": self.torch, "torch.compile": compiled}
        return {name: named(fn, **self.options) for name, fn in functions.items()} | present(self.libraries)


OPS = {
    "rms_norm": Op(
        SPECS["rms_norm"],
        torch_rms_norm,
        {
            "Liger": in_order(LIGER + "liger_rms_norm", eps=EPS),
            "fla": named(FLA_NORM + "rms_norm", bias=None, eps=EPS),
        },
    ),
    "add_rms_norm": Op(
        SPECS["add_rms_norm"],
        torch_add_rms_norm,
        {
            "Liger": in_order(LIGER + "liger_fused_add_rms_norm", eps=EPS),
            "fla": named(FLA_NORM + "rms_norm", bias=None, eps=EPS, prenorm=True),
        },
    ),
    "layer_norm": Op(
        SPECS["layer_norm"],
        torch_layer_norm,
        {"Liger": in_order(LIGER + "liger_layer_norm", eps=1e-5), "fla": named(FLA_NORM + "layer_norm")},
    ),
    "swiglu": Op(
        SPECS["swiglu"],
        torch_swiglu,
        {
            "Liger": glu(LIGER + "liger_swiglu", packed="liger_kernel.ops:LigerFusedGateUpSiLUMulFunction.apply"),
            "fla": glu("fla.modules.activations:swiglu"),
        },
    ),
    "geglu": Op(SPECS["geglu"], torch_geglu, {"Liger": glu(LIGER + "liger_geglu")}),
    "geglu_exact": Op(SPECS["geglu"], torch_geglu, {}, {"approximate": "none"}),
    "rope": Op(SPECS["rope"], torch_rope, {"Liger": in_order(LIGER + "liger_rope"), "fla": fla_rope}),
    "qk_norm_rope": Op(SPECS["qk_norm_rope"], torch_qk_norm_rope, {"Liger": liger_qk_norm_rope}),
}


class _Empty(torch.autograd.Function):
    """Computes nothing: what every op that is written in Python costs the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, results: Sequence[Tensor]) -> Tensor:
        ctx.results = results
        return results[0].view_as(results[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        _, dx, dw = ctx.results
        return dx, dw, None


def empty(inputs: testing.Inputs) -> Step:
    x, weight = inputs.values()
    return partial(_Empty.apply, x, weight, [torch.empty_like(t, requires_grad=False) for t in (x, x, weight)])


FLOOR: dict[str, Build] = {"empty autograd.Function": empty, "torch's rms_norm": named(torch_rms_norm)}


class Setting:
    """Inputs and upstream gradients of one contestant, and the forward that it builds of them."""

    def __init__(self, build: Build, inputs: testing.Inputs, upstream: Sequence[Tensor]) -> None:
        self.filling = [t.detach() for t in (*inputs.values(), *upstream)]
        copies = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
        self.leaves = [t for t in copies.values() if t.requires_grad]
        self.upstream = [t.clone() for t in upstream]
        self.filled = [t.detach() for t in (*copies.values(), *self.upstream)]
        self.forward = build(copies)

    def step(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.upstream)

    def refill(self) -> None:
        for kept, original in zip(self.filled, self.filling, strict=True):
            kept.copy_(original)


def upstream_of(fn: Callable[..., Any], inputs: testing.Inputs) -> list[Tensor]:
    """Random gradients of what ``fn`` returns, with the strides of the first input of that shape, if there is one."""
    outputs = fn(**inputs)
    like = (
        next((t for t in inputs.values() if t.shape == output.shape), output)
        for output in (outputs if isinstance(outputs, tuple) else (outputs,))
    )
    return [torch.randn_like(t, requires_grad=False) for t in like]


def microseconds(step: Step, steps: int, finish: Step = lambda: None) -> list[float]:
    """The mean of so many steps in a row, as the host sees it."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return [(time.perf_counter() - start) / steps * 1e6]


def wall_us(setting: Setting) -> list[float]:
    setting.refill()
    torch.cuda.synchronize()
    return microseconds(setting.step, EAGER_STEPS, torch.cuda.synchronize)


def kernel_us(graph: torch.cuda.CUDAGraph, refill: Step) -> list[float]:
    return [ms / GRAPH_STEPS * 1e3 for ms in gpu_times(graph.replay, REPLAYS, refill)]


def kernel_timers(setting: Setting) -> Row:
    steps = {"forward_us": setting.forward, "us": setting.step}
    return {key: partial(kernel_us, captured(step, GRAPH_STEPS), setting.refill) for key, step in steps.items()}


def gpu_row(build: Build, inputs: testing.Inputs, upstream: Sequence[Tensor]) -> Row:
    """Peak memory, and timers of the wall time and, if a graph of the kernels can be had, of theirs."""
    setting = Setting(build, inputs, upstream)
    row = {"mib": peak_mib(setting.step)[0], "wall_us": partial(wall_us, setting)}
    return row | attempt(partial(kernel_timers, setting))


def host_row(build: Build, inputs: testing.Inputs, upstream: Sequence[Tensor]) -> Row:
    setting = Setting(build, inputs, upstream)
    setting.step()
    steps = {"forward_us": setting.forward, "us": setting.step}
    return {key: partial(microseconds, step, HOST_STEPS) for key, step in steps.items()}


def shape_text(shape: Mapping[str, Any]) -> str:
    if "lead" in shape:
        return " x ".join(map(str, (*shape["lead"], shape["N"]))) + (", packed" if shape.get("packed") else "")
    return " ".join(f"{key} {shape[key]}" for key in ("B", "S", "H", "Hk", "D"))


def time_shape(name: str, shape: Mapping[str, Any], rounds: int) -> Row:
    """Every contestant on random data of one shape."""
    op = OPS[name]
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.cuda.empty_cache()
    inputs = op.spec.inputs(torch.bfloat16, "cuda", **shape)
    upstream = upstream_of(op.spec.fn, inputs)
    rows = [
        {"name": contestant} | attempt(partial(gpu_row, build, inputs, upstream))
        for contestant, build in op.contestants().items()
    ]
    settle(rows, rounds)
    print(f"{name}, {shape_text(shape)}: measured", flush=True)
    forward, backward, _ = op.spec.cost(torch.bfloat16.itemsize, **shape)
    case = {"op": name, "shape": shape_text(shape), "forward_bytes": forward, "bytes": forward + backward}
    return case | {"rows": rows}


def small_shapes(spec: testing.OpSpec) -> list[dict[str, Any]]:
    shapes = [{key: HOST_SIZES.get(key, value) for key, value in shape.items()} for shape in spec.bench_shapes]
    return [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]


def contests(names: Iterable[str]) -> list[Contest]:
    """Those ops, after what any op costs."""
    return [(SPECS["rms_norm"], "floor", FLOOR), *((OPS[n].spec, n, OPS[n].contestants()) for n in names)]


def time_host(
    contests: Iterable[Contest], rounds: int, device: str = "cuda", wait: Step = torch.cuda.synchronize
) -> list[Row]:
    """Every contestant on small inputs."""
    torch.manual_seed(0)
    torch.compiler.reset()
    rows = []
    for spec, title, contestants in contests:
        for shape in small_shapes(spec):
            inputs = spec.inputs(torch.bfloat16, device, **shape)
            upstream = upstream_of(spec.fn, inputs)
            op = title + (", packed" if shape.get("packed") else "")
            rows += [
                {"op": op, "name": name} | attempt(partial(host_row, build, inputs, upstream))
                for name, build in contestants.items()
            ]
    settle(rows, rounds, wait)
    return rows


def host_alone(names: Iterable[str]) -> Row:
    """What a file in results/ has of the host's time."""
    if torch.cuda.is_available():
        host = time_host(contests(names), ROUNDS)
    else:
        ours = [(spec, title, dict([*contestants.items()][:1])) for spec, title, contestants in contests(names)]
        nothing = patch.object(JITFunction, "run", lambda *_, **__: None)
        with patch.object(_common, "INTERPRET", True), nothing:  # as if the kernels were interpreted
            host = time_host(ours, ROUNDS, "cpu", lambda: None)
    return {**environment("Liger", "fla"), "ops": [], "host": host}


def measure_all(names: Iterable[str], quick: bool) -> Row:
    """The content of a file in results/."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cases = [(name, shape) for name in names for shape in OPS[name].spec.bench_shapes[: 1 if quick else None]]
    return {
        **environment("Liger", "fla"),
        "ops": [time_shape(name, shape, rounds) for name, shape in cases],
        "host": time_host(contests(names), rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.memory_bound")
    parser.add_argument("--quick", action="store_true", help="one shape of each op, printed only")
    parser.add_argument("--only", metavar="OP,...", help=f"these ops, printed only, out of {', '.join(OPS)}")
    parser.add_argument("--host", action="store_true", help="the time on the host alone, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*OPS]
    if unknown := {*names} - {*OPS}:
        parser.error(f"--only: no op is called {', '.join(sorted(unknown))}")
    if options.host:
        print(tables(rounded(host_alone(names))))
        return
    if not options.report:
        if not torch.cuda.is_available():
            parser.error("needs a GPU (all but --host and --report)")
        result = rounded(measure_all(names, options.quick))
        if options.quick or options.only:
            print(tables(result))
            return
        save(result, "memory-bound")
    write_report()


if __name__ == "__main__":
    main()
