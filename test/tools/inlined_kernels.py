"""Lowers the kernels that compiled graphs launch themselves as Inductor does, for a GPU that is not here.

    TRITON_INTERPRET=0 python test/tools/inlined_kernels.py

Exit code 1, with a line for each finding: a graph holds a library op, torch takes a tensor that a kernel reads for one
that it writes (and would copy it), a kernel calculates in fp64, as which Inductor passes floats, or a graph of a router
is for one number of tokens.
"""

import itertools
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import triton
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx import Node
from torch.utils.checkpoint import checkpoint
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import ir
from triton.runtime import Autotuner

from liger_like import ops
from liger_like.ops import glu, glu_linear, router_logits
from liger_like.parallel import checkpoint_policy
from liger_like.testing import SPECS, OpSpec

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"
}  # fmt: skip
INLINED = ("rope", "qk_norm_rope", "flash_attention", "moe_route", "load_balancing_loss")
CAST = re.compile(r"^tt\.func |^#loc|arith\.truncf ")  # what may hold an argument in fp64
WRITTEN = {
    "_rope_kernel": {"q_out_ptr", "k_out_ptr"},
    "_qk_norm_rope_bwd_kernel": {"dq_ptr", "dk_ptr", "dw_ptr"},
    "sum_rows_kernel": {"out_ptr"},
    "_attention_fwd_kernel": {"out_ptr", "lse_ptr", "sums_ptr"},
    "_merge_kernel": {"out_ptr", "lse_ptr", "sums_ptr"},
    "_delta_kernel": {"stats_ptr", "dsinks_ptr"},
    "_attention_dkv_kernel": {"dk_ptr", "dv_ptr"},
    "_attention_dq_kernel": {"dq_ptr"},
    "_attention_dbias_kernel": {"dbias_ptr"},
    "_router_logits_kernel": {"logits_ptr"},
    "_moe_route_fwd_kernel": {"weights_ptr", "index_ptr"},
    "_moe_route_bwd_kernel": {"dlogits_ptr"},
    "_load_balancing_fwd_kernel": {"sums_ptr"},
    "_load_balancing_loss_kernel": {"loss_ptr", "slope_ptr"},
    "_load_balancing_bwd_kernel": {"dlogits_ptr"},
    "_glu_fwd_kernel": {"y_ptr"},
    "_glu_bwd_kernel": {"dy_ptr", "dgate_ptr", "dup_ptr"},
}


def graph_nodes(fn: Any, inputs: dict[str, Any], options: dict[str, Any]) -> list[Node]:
    """Return the nodes of the graphs of a call and of its backward, which are not run."""
    found: list[Node] = []

    def keep(graph: Any, _: Any) -> Any:
        found.extend(graph.graph.nodes)
        return lambda *args: sys.exit("a graph for a GPU cannot run here")

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    try:
        torch.compile(fn, backend=backend, fullgraph=True)(**inputs, **options)
    except SystemExit:
        return found
    raise AssertionError("the graph ran")


def rope_of_some(q: Tensor, angle: Tensor, kept: Tensor) -> Tensor:
    """Rotate the tokens that ``kept`` marks."""
    tokens = kept.nonzero().squeeze(1)
    return ops.rope(q[:, :, tokens], q[:, :, tokens], angle[tokens], angle[tokens])[0]


def values(node: Node) -> tuple[Any, dict[str, Any]]:
    """Return the kernel of a launch, and its arguments by name."""
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    given: Any = node.kwargs["kwargs"]
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
    known = {name: value.meta["val"] if isinstance(value, Node) else value for name, value in given.items()}
    return kernel.fn if isinstance(kernel, Autotuner) else kernel, {**known, **constants}


def source(kernel: Any, given: dict[str, Any]) -> ASTSource:
    """Return the kernel with the types that Inductor gives its arguments."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for param in kernel.params:
        value = given[param.name]
        if isinstance(value, Tensor):
            types[param.name] = POINTERS[value.dtype]
        elif isinstance(value, float) and not param.is_constexpr:
            types[param.name] = "fp64"
        elif param.is_constexpr or value is None or value == 1:
            types[param.name], constants[param.name] = "constexpr", value
        else:
            types[param.name] = "i32"
    return ASTSource(kernel, types, constants)


def lowered(kernel: ASTSource) -> str:
    """Return Triton's IR of a kernel: later stages neither add nor remove calculations in fp64."""
    backend = make_backend(TARGET)
    options, stages, context = backend.parse_options({"num_warps": 4}), {}, ir.context()
    backend.add_stages(stages, options, kernel.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    return str(stages["ttir"](kernel.make_ir(TARGET, options, codegen, backend.get_module_map(), context), {}))


def findings(node: Node, seen: set[str]) -> list[str]:
    """Return what is wrong with a launch; each kernel is lowered once for the same constants."""
    kernel, given = values(node)
    name = kernel.fn.__name__
    mutated = {user.args[1] for user in node.users if "getitem" in str(user.target)}
    written = {arg for arg in WRITTEN[name] if given[arg] is not None}
    wrong = [f"{name}: {mutated} counts as written, not {written}"] if mutated != written else []
    kept = source(kernel, given)
    key = f"{name} {kept.signature} {[v for v in kept.constants.values() if not isinstance(v, int)]}"
    if key not in seen:
        seen.add(key)
        lines = (line.strip() for line in lowered(kept).splitlines())
        wrong += [f"{name}: {line}" for line in lines if "f64" in line and not CAST.search(line)]
    return wrong


def calls(spec: OpSpec) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the shape with the most tensors with each option, and the other shapes with the options in turn."""
    shapes = [*{str(shape | {"lead": None}): shape for shape in spec.test_shapes}.values()]  # rows do not matter
    richest = max(shapes, key=len)
    others = [shape for shape in shapes if shape is not richest]
    if spec.name == "flash_attention":
        others.append(richest | {"S": 2, "Sk": 600})  # the keys are split
    return [*itertools.product([richest], spec.options), *zip(others, itertools.cycle(spec.options), strict=False)]


def main() -> None:
    torch._functorch.config.force_non_lazy_backward_lowering = True  # both graphs before the first runs
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: TARGET, get_current_device=lambda: 0)  # type: ignore[arg-type]
    )
    wrong: set[str] = set()
    seen: set[str] = set()
    for spec in (spec for spec in SPECS if spec.name in INLINED):
        with patch.object(sys.modules[getattr(ops, spec.name).__module__], "use_kernel", lambda x: True):
            for shape, options in calls(spec):
                inputs = spec.inputs(torch.bfloat16, "cpu", **shape)
                for node in graph_nodes(spec.fn, inputs, options):
                    if "liger_like" in str(node.target):
                        wrong.add(f"{spec.name}: {node.target} is in the graph")
                    if "triton_kernel_wrapper" in str(node.target):
                        wrong.update(findings(node, seen))
    with patch.object(sys.modules[ops.rope.__module__], "use_kernel", lambda x: True):
        q = torch.randn(1, 2, 6, 8)
        kept = torch.tensor([True, False] * 3)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            nodes = graph_nodes(rope_of_some, {"q": q, "angle": torch.randn(6, 8), "kept": kept}, {})
        if not any("liger_like" in str(node.target) for node in nodes):
            wrong.add("rope: a launch with a size that only the GPU knows")
    for spec in (spec for spec in SPECS if spec.name in ("moe_route", "load_balancing_loss")):
        with patch.object(sys.modules[getattr(ops, spec.name).__module__], "use_kernel", lambda x: True):
            inputs = spec.inputs(torch.bfloat16, "cpu", **spec.test_shapes[0])
            torch._dynamo.mark_dynamic(inputs["logits"], 0)  # raises if the graph is for one number of tokens
            graph_nodes(spec.fn, inputs, {"top_k": 2})
    with patch.object(router_logits, "use_kernel", lambda x: True):
        x, weight = (torch.randn(rows, 32, dtype=torch.bfloat16, requires_grad=True) for rows in (6, 4))
        torch._dynamo.mark_dynamic(x, 0)
        nodes = graph_nodes(router_logits.router_logits, {"x": x, "weight": weight}, {})
        launches = [node for node in nodes if "triton_kernel_wrapper" in str(node.target)]
        wrong.update(*(findings(node, seen) for node in launches))
        if len(launches) != 1:  # the backward is a library op
            wrong.add(f"router_logits: {len(launches)} launches")
    with patch.multiple(glu_linear, use_kernel=lambda x: True, LARGE=1):
        gate, up = (torch.randn(6, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        layer = torch.nn.Linear(32, 8, dtype=torch.bfloat16)
        for act in glu.GLUS:
            inputs = {"act": act, "linear": layer, "gate": gate * 1, "up": up * 1}
            nodes = graph_nodes(glu_linear.glu_linear, inputs, {})
            launches = [node for node in nodes if "triton_kernel_wrapper" in str(node.target)]
            wrong.update(*(findings(node, seen) for node in launches))
            if len(launches) != 2 or any("liger_like" in str(node.target) for node in nodes):
                wrong.add(f"glu_linear: {len(launches)} launches, or a library op")

        def result(gate: Tensor, up: Tensor) -> Tensor:
            unit = partial(glu_linear.glu_linear, "silu", layer)
            policy = checkpoint_policy(("glu_linear",))
            return checkpoint(unit, gate, up, use_reentrant=False, context_fn=policy).square()

        nodes = graph_nodes(result, {"gate": gate, "up": up}, {})
        (_, *kept), *_ = next(node for node in nodes if node.op == "output").args
        if any(node.meta["val"].shape == gate.shape for node in kept if node.op != "placeholder"):
            wrong.add("glu_linear: a checkpoint that saves the layer's result saves the unit's, too")
    wrong.update(f"{name} is in no graph" for name in WRITTEN.keys() - {key.split()[0] for key in seen})
    print(*sorted(wrong), f"{len(seen)} variants of kernels lowered", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
