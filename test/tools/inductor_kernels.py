"""Compiles the kernels that Inductor writes around the losses, norms and gated units, for a GPU that is not here.

    TRITON_INTERPRET=0 python test/tools/inductor_kernels.py
    TRITON_INTERPRET=0 python test/tools/inductor_kernels.py --every 16      one call of an op in 16

A graph is traced on the CPU, moved to a GPU without data, and lowered; Triton then compiles each kernel for sm_90, as
Inductor's workers do. Exit code 1, with a line for each kernel that does not compile.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import triton
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget

from liger_like.runtime import support
from liger_like.testing import SPECS, OpSpec

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=2**16, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, warp_size=32, total_memory=80 << 30, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10, gcnArchName="",
)  # fmt: skip
DRIVER = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
ROWS = 1500  # Inductor sums over more than 1024 numbers in a loop
FEW_ROWS = 8  # a graph of the definition
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


def calls() -> Iterator[tuple[OpSpec, dict[str, Any], dict[str, Any]]]:
    """Ops whose graphs hold plain torch: each option without optional tensors, and no option with all of them."""
    for spec in SPECS:
        least, *_ = shapes = spec.test_shapes
        if "N" in least:
            yield from ((spec, shape | {"lead": (ROWS,)}, {}) for shape in (least, max(shapes, key=len)))
        if "V" in least:
            yield from ((spec, least | {"lead": (ROWS,)}, options) for options in spec.options)
            yield from ((spec, max(shapes, key=len) | {"lead": (rows,)}, {}) for rows in (FEW_ROWS, ROWS))


def graphs_of(spec: OpSpec, shape: dict[str, Any], options: dict[str, Any]) -> list[GraphModule]:
    """Return the graphs of a call and of its backward, which are not run."""
    found: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        found.append(graph)
        return lambda *args: sys.exit("a graph for a GPU cannot run here")

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    inputs = spec.inputs(torch.bfloat16, "cpu", **shape)
    with contextlib.suppress(SystemExit):
        torch.compile(spec.fn, backend=backend, fullgraph=True)(**inputs, **options)
    return found


def code_of(graph: GraphModule) -> str:
    """Return the program that Inductor writes for a graph on a GPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": GPU}
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with mode:
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU) for t in values]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)  # type: ignore[no-untyped-call]
    with V.set_fake_mode(mode), V.set_real_inputs(inputs), DebugContext():
        decompose_auto_functionalized(graph.graph)  # Inductor has it done by then
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def as_on_gpu() -> contextlib.ExitStack:
    """Let torch find an H100."""
    stack = contextlib.ExitStack()
    given: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H100,
        "get_device_capability": (9, 0), "is_current_stream_capturing": False,
    }  # fmt: skip
    functions = {name: lambda *args, it=value: it for name, value in given.items()}
    stack.enter_context(patch.multiple(torch.cuda, **functions))
    interface = {"get_device_properties": H100, "get_compute_capability": 90}
    static = {name: staticmethod(lambda *args, it=value: it) for name, value in interface.items()}
    stack.enter_context(patch.multiple(CudaInterface, **static))
    stack.enter_context(patch.object(scheduler, "has_triton", lambda: True))
    stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser(prog="inductor_kernels.py")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one call in N")
    every = parser.parse_args().every
    torch._functorch.config.force_non_lazy_backward_lowering = True  # both graphs before the first runs
    triton.runtime.driver.set_active(DRIVER)  # type: ignore[arg-type]
    wrong: list[str] = []
    seen: set[str] = set()
    # first is a call for whose loss Triton 3.6 once made no code, so that every sample has it
    for spec, shape, options in sorted(calls(), key=lambda call: call[0].name != "fused_linear_divergence")[::every]:
        with patch.object(support, "INTERPRET", True):  # ops instead of their definitions
            graphs = graphs_of(spec, shape, options)
        with as_on_gpu(), fresh_cache():
            kernels = [kernel for graph in graphs for kernel in KERNEL.findall(code_of(graph)) if kernel[1] not in seen]
            for name, source in kernels:
                seen.add(source)
                try:
                    getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
                except Exception as error:
                    wrong.append(f"{spec.name} {shape} {options}: {name}: {error}")
    print(*wrong, f"Triton {triton.__version__}: {len(seen)} kernels of Inductor compiled", sep="\n")
    sys.exit(bool(wrong) or not seen)


if __name__ == "__main__":
    main()
