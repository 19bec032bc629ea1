"""Compiled graphs hold plain torch or launches of kernels where they can, not library ops."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from liger_like.ops.attention.choice import is_small
from liger_like.ops.attention.masking import Masking
from liger_like.ops.glu_linear import glu_linear
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_like.testing import SPECS, run

BY_NAME = {spec.name: spec for spec in SPECS}
# op: one of its kernels
LAUNCHED = {"rope": "_rope", "qk_norm_rope": "_qk_norm_rope_bwd", "flash_attention": "_attention_dq"}
TOOL = Path(__file__).parents[1] / "tools" / "inlined_kernels.py"
on_rows = pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu"])


class NotRunError(Exception):
    """A graph that is only looked at was called."""


def graphs_of(call):
    """Return the graphs of a call that is compiled and of its backward, which do not run."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return refuse

    def refuse(*args):
        raise NotRunError

    torch._dynamo.reset()
    partition = min_cut_rematerialization_partition
    # both graphs before the first is called
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True), pytest.raises(NotRunError):
        call(aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition))
    return graphs


@on_rows
def test_norms_and_gated_units_are_plain_torch(name, device):
    spec = BY_NAME[name]
    inputs = spec.inputs(torch.float32, device, **{**spec.test_shapes[0], "lead": (4, 3)})
    graphs = graphs_of(lambda backend: run(torch.compile(spec.fn, backend=backend, fullgraph=True), inputs, {}))
    assert len(graphs) == 2
    assert not [node for graph in graphs for node in graph.nodes if "liger_like" in str(node.target)]


@on_rows
def test_results_are_contiguous_in_a_graph_too(name, device):
    spec = BY_NAME[name]
    inputs = spec.inputs(torch.float32, device, **{**spec.test_shapes[0], "lead": (4, 3)})
    turned = {name: t.transpose(0, 1) if t.dim() == 3 else t for name, t in inputs.items()}
    for call in (spec.fn, torch.compile(spec.fn, backend="aot_eager", fullgraph=True)):
        outputs = call(**turned)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            assert output.is_contiguous()


def test_strict_export_of_glu_linear(device):
    class Unit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 4, bias=False)

        def forward(self, gate, up):
            return glu_linear("silu", self.linear, gate, up)

    unit = Unit().to(device)
    gate, up = (torch.randn(3, 6, device=device) for _ in range(2))
    exported = torch.export.export(unit, (gate, up), strict=True).module()
    torch.testing.assert_close(exported(gate, up), unit(gate, up))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_the_input_of_the_layer_behind_a_gated_unit_is_not_saved(act, device):
    linear = torch.nn.Linear(6, 4, bias=False, device=device)
    gate, up = (torch.randn(3, 6, device=device, requires_grad=True) for _ in range(2))

    def step(backend):
        torch.compile(glu_linear, backend=backend, fullgraph=True)(act, linear, gate, up).sum().backward()

    forward, _ = graphs_of(step)
    (result, *saved) = forward.output_node().args[0]
    assert result.op == "call_function"
    assert {node.op for node in saved if node.meta["val"].shape == gate.shape} == {"placeholder"}


def test_kernels_of_a_compiled_graph():
    """The interpreter's kernels cannot be traced, so this runs in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    checked = subprocess.run([sys.executable, TOOL], env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "variants of kernels lowered" in checked.stdout


@pytest.mark.parametrize(
    ("tokens", "options", "dynamic", "is_op"),
    [
        (1024, {}, False, False),
        (1025, {}, False, True),
        (8, {"chunk_rows": 4}, False, True),
        (8, {}, True, True),
        (8, {}, None, True),
    ],
)
def test_the_loss_of_few_tokens_is_plain_torch(tokens, options, dynamic, is_op, device):
    """The choice must not compile the graph again for each number of tokens."""
    inputs = BY_NAME["fused_linear_cross_entropy"].inputs(torch.float32, device, lead=(tokens,), H=4, V=5)
    if dynamic is None:
        for name in ("x", "target"):
            torch._dynamo.mark_dynamic(inputs[name], 0, min=2, max=1000)

    def step(backend):
        loss = torch.compile(fused_linear_cross_entropy, backend=backend, fullgraph=True, dynamic=dynamic)
        loss(inputs["x"], inputs["weight"], inputs["target"], **options).backward()

    found = [node for graph in graphs_of(step) for node in graph.nodes if "liger_like" in str(node.target)]
    assert bool(found) == is_op


def test_attention_stays_an_op_unless_it_is_small_and_of_fixed_size():
    def small(tokens, **masks):
        q = torch.empty(1, tokens, 16, 64, device="meta")
        nothing = dict.fromkeys(Masking._fields)
        return is_small(q, q, q, *{**nothing, "max_seqlen_q": tokens, "max_seqlen_k": tokens, **masks}.values())

    assert small(1024)
    assert not small(4096)
    assert not small(1024, cu_seqlens_q=torch.empty(3, device="meta"))
    assert not small(1024, max_seqlen_k=ShapeEnv().create_unbacked_symint())


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHED)
def test_inductor_launches_the_kernels(name):
    """Inductor copies outputs if it does not see which tensors a kernel writes, so there must be no copy."""
    spec = BY_NAME[name]
    inputs = spec.inputs(torch.bfloat16, "cuda", **spec.test_shapes[0])
    torch._dynamo.reset()
    _, codes = run_and_get_code(lambda: run(torch.compile(spec.fn, fullgraph=True), inputs, {}))
    calls = [line for code in codes for line in code.splitlines() if ".run(" in line or "torch.ops." in line]
    assert any(LAUNCHED[name] in line for line in calls)
    assert not [line for line in calls if re.search(r"torch\.ops\.liger_like|(?<!to_)copy_", line)]
