"""Compiled graphs hold plain torch or launches of kernels where they can, not library ops."""

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import cross_entropy, linear
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from liger_like import fused_linear_divergence, load_balancing_loss, moe_experts
from liger_like.ops import glu_linear as gated
from liger_like.ops.attention.choice import is_small
from liger_like.ops.attention.masking import Masking
from liger_like.ops.glu import GLUS
from liger_like.ops.glu_linear import glu_linear
from liger_like.ops.losses import chunks, last_chunk
from liger_like.ops.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_like.ops.losses.vocab_shards import WHOLE
from liger_like.testing import SPECS, run

BY_NAME = {spec.name: spec for spec in SPECS}
# op: one of its kernels
LAUNCHED = {"rope": "_rope", "qk_norm_rope": "_qk_norm_rope_bwd", "flash_attention": "_attention_dq"}
TOOL = Path(__file__).parents[1] / "tools" / "inlined_kernels.py"
on_rows = pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu"])


class NotRunError(Exception):
    """A graph that is only looked at was called."""


def graphs_of(call, runs=False, **options):
    """Return the graphs of a call that is compiled and of its backward, which run only if ``runs``.

    ``options`` are those of aot_autograd.
    """
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph if runs else refuse

    def refuse(*args):
        raise NotRunError

    torch._dynamo.reset()
    partition = min_cut_rematerialization_partition
    # both graphs before the first is called
    end = contextlib.nullcontext() if runs else pytest.raises(NotRunError)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True), end:
        call(aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition, **options))
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
    gate.requires_grad_()
    got, expected = (
        [out := module(gate, up), *torch.autograd.grad(out.sum(), (gate, *module.parameters()))]
        for module in (exported, unit)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["moe_experts", "load_balancing_loss", "fused_linear_divergence"])
def test_an_export_serves_other_sizes(name, strict):
    """Each op with a batch and a length that are free, as in transformers' models."""

    class Call(torch.nn.Module):
        def forward(self, x, mask):
            if name == "moe_experts":
                index = mask.long()[..., None].expand(*mask.shape, 2)
                weights = x[..., :2].softmax(-1)
                return moe_experts(x, gate_up, down, index, weights)
            if name == "load_balancing_loss":
                return load_balancing_loss(x, 2, mask=mask)
            return fused_linear_divergence(x, head, x * 2, head, mask)

    gate_up, down, head = torch.randn(4, 12, 8), torch.randn(4, 8, 6), torch.randn(11, 8)
    first, second = ((torch.randn(*lead, 8), torch.rand(lead) > 0.3) for lead in ((2, 5), (3, 7)))
    free = {0: torch.export.Dim("B", min=1, max=64), 1: torch.export.Dim("T", min=1, max=64)}
    exported = torch.export.export(Call(), first, dynamic_shapes=(free, free), strict=strict).module()
    torch.testing.assert_close(exported(*second), Call()(*second))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_a_gated_unit_before_a_layer_is_plain_torch_and_saves_no_result(act, device):
    linear = torch.nn.Linear(6, 4, bias=False, device=device)
    gate, up = (torch.randn(3, 6, device=device, requires_grad=True) for _ in range(2))

    def step(backend):
        torch.compile(glu_linear, backend=backend, fullgraph=True)(act, linear, gate, up).sum().backward()

    forward, backward = graphs_of(step)
    assert not [node for node in (*forward.nodes, *backward.nodes) if "liger_like" in str(node.target)]
    (result, *saved) = forward.output_node().args[0]
    assert result.op == "call_function"
    assert {node.op for node in saved if node.meta["val"].shape == gate.shape} == {"placeholder"}


@pytest.mark.parametrize(("least", "dynamic"), [(0, False), (1, False), (0, True)])
def test_a_large_gated_unit_before_a_layer_launches_the_kernels(least, dynamic, device, monkeypatch):
    """From LARGE bytes on, of sizes that the compiler knows: the backward then takes no memory for the result."""
    linear = torch.nn.Linear(6, 4, device=device)
    gate, up = (torch.randn(3, 6, device=device, requires_grad=True) for _ in range(2))
    monkeypatch.setattr(gated, "LARGE", gate.nbytes + least)

    def step(backend):
        compiled = torch.compile(glu_linear, backend=backend, fullgraph=True, dynamic=dynamic)
        compiled("silu", linear, gate, up).sum().backward()

    forward, backward = graphs_of(step)
    found = {*re.findall(r"liger_like\.(\w+)|(triton_kernel_wrapper)", f"{forward} {backward}")}
    ops = {("glu_linear_fwd", ""), ("glu_bwd_y_for_dy", "")}
    launches = {("", "triton_kernel_wrapper")}  # test/tools/inlined_kernels.py looks at them
    launched = least == 0 and not dynamic
    assert found == (set() if not launched else launches if device == "cuda" else ops)
    tensors = (node for node in forward.output_node().args[0][1:] if isinstance(node.meta["val"], torch.Tensor))
    saved = [node for node in tensors if node.meta["val"].shape == gate.shape]
    assert {node.op for node in saved} == {"placeholder"}


@pytest.mark.parametrize("act", GLUS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["", "in a checkpoint"])
def test_a_large_gated_unit_before_a_layer_is_exact(act, packed, within, device, monkeypatch):
    monkeypatch.setattr(gated, "LARGE", 1)
    linear = torch.nn.Linear(6, 4, device=device, dtype=torch.float16)
    gates = [torch.randn(3, 5, 12 if packed else 6, device=device, dtype=torch.float16) for _ in range(2 - packed)]

    def call(x, *gates):
        fn = partial(glu_linear, act, linear)
        gates = [gate * x for gate in gates]
        return checkpoint(fn, *gates, use_reentrant=False) if within else fn(*gates)

    def gradients(call):
        x, *leaves = (t.clone().requires_grad_() for t in (gates[0].new_ones(1), *gates))
        out = call(x, *leaves)
        return out, *torch.autograd.grad(out, [x, *leaves, *linear.parameters()], torch.ones_like(out))

    torch._dynamo.reset()
    found = gradients(torch.compile(call, backend="aot_eager", fullgraph=True))
    for got, expected in zip(found, gradients(call), strict=True):
        torch.testing.assert_close(got, expected)


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


def test_the_loss_of_few_tokens_passes_over_the_logits_as_torch_does(device):
    inputs = BY_NAME["fused_linear_cross_entropy"].inputs(torch.bfloat16, device, lead=(6,), H=4, V=5)

    def of_torch(x, weight, target):
        return cross_entropy(linear(x, weight).float(), target)

    def passes(loss):
        def step(backend):
            compiled = torch.compile(loss, backend=backend, fullgraph=True)
            compiled(inputs["x"], inputs["weight"], inputs["target"]).backward()

        graphs = graphs_of(step, decompositions=select_decomp_table())
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        return Counter(
            str(node.target)
            for node in nodes
            if getattr(node.meta["val"], "shape", None) == (6, 5) and "view" not in str(node.target)
        )

    assert passes(fused_linear_cross_entropy) == passes(of_torch)


@pytest.mark.parametrize("in_cuda_graph", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fused_linear_cross_entropy", {}),
        ("fused_linear_cross_entropy", {"recompute": True}),
        ("fused_linear_logprobs", {"keep_logits": 10**6}),
        ("fused_linear_divergence", {}),
    ],
)
def test_in_a_cuda_graph_the_host_reads_no_count(name, options, in_cuda_graph, device, monkeypatch):
    spec, sorts, outputs = BY_NAME[name], [], []
    inputs = spec.inputs(torch.float32, device, **{**spec.test_shapes[0], "lead": (10,)})
    options = options | {"chunk_rows": 4}
    expected = run(spec.fn, inputs, options)
    kept_first = chunks.kept_first
    monkeypatch.setattr(chunks, "kept_first", lambda *args, many: sorts.append(many) or kept_first(*args, many=many))
    with config.patch({"triton.cudagraphs": in_cuda_graph}):
        graphs = graphs_of(
            lambda backend: outputs.append(
                run(torch.compile(spec.fn, backend=backend, fullgraph=True), inputs, options)
            ),
            runs=True,
        )
    bounds = [
        node.meta["val"][7] for graph in graphs for node in graph.nodes
        if str(node.target).startswith("liger_like.linear_") and len(node.meta["val"]) > 7
    ]  # fmt: skip
    assert [(len(t), t.device.type) for t in bounds] == [(0, device) if in_cuda_graph else (3, "cpu")]
    assert sorts == [not in_cuda_graph]
    torch.testing.assert_close(outputs[0], expected)


@pytest.mark.parametrize("in_cuda_graph", [False, True])
def test_a_tensor_subclass_keeps_the_op(in_cuda_graph, device):
    """AOTAutograd traces the op once for the subclass and then for each of its two tensors."""
    spec = BY_NAME["fused_linear_cross_entropy"]
    inputs = spec.inputs(torch.float32, device, **{**spec.test_shapes[0], "lead": (10,)})
    pairs = {name: TwoTensor(t.detach(), t.detach().clone()) for name, t in inputs.items()}
    with config.patch({"triton.cudagraphs": in_cuda_graph}):
        graphs = graphs_of(
            lambda backend: torch.compile(spec.fn, backend=backend, fullgraph=True)(**pairs, chunk_rows=4)
        )
    results = [
        node.meta["val"] for graph in graphs for node in graph.nodes if "linear_cross_entropy" in str(node.target)
    ]
    assert [len(outs[7]) for outs in results] == [0 if in_cuda_graph else 3] * 2


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 500, 512, 513, 640, 1000])
@pytest.mark.parametrize("chunk_rows", [100, 128, 300])
def test_the_last_chunk_is_known_without_a_read(tokens, chunk_rows, device):
    x, weight = torch.ones(tokens, 4, device=device), torch.ones(3, 4, device=device)
    target = torch.zeros(tokens, dtype=torch.int64, device=device)
    options = chunks.Options(-100, 0.0, 0.0, None, 1.0)
    call = chunks.Forward(
        x, weight, target, None, None, None, None, None, [False] * 5, False, False, chunk_rows, None, torch.float32,
        True, WHOLE, options,
    )  # fmt: skip
    outs = chunks._outputs(call)
    chunks.run_chunks(call, outs, visit=lambda *args: None)
    _, start, end = outs[7].tolist()
    assert last_chunk._last_chunk(tokens, min(tokens, chunk_rows)) == (start, end)


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
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "fused_linear_logprobs", "fused_linear_divergence"])
def test_losses_become_cuda_graphs(name):
    spec = BY_NAME[name]
    compiled = torch.compile(spec.fn, mode="reduce-overhead", fullgraph=True)
    torch._dynamo.reset()
    counters.clear()
    options = {"chunk_rows": 512}
    for seed in range(4):  # recorded at the second
        torch.manual_seed(seed)
        inputs = spec.inputs(torch.bfloat16, "cuda", **{**spec.test_shapes[0], "lead": (1500,)})
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in tree_leaves(run(compiled, inputs, options))]
        for got, expected in zip(found, tree_leaves(run(spec.fn, inputs, options)), strict=True):
            assert (got - expected).norm() <= 1e-2 * expected.norm()
    assert not counters["inductor"]["cudagraph_skips"]
    assert not counters["inductor"]["cudagraph_partitions"]  # counted where there are several


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


@pytest.mark.gpu
def test_a_large_gated_unit_takes_no_more_memory_compiled():
    """In a checkpoint, whose backward computes gate and up again."""
    layers = [torch.nn.Linear(*sizes, device="cuda") for sizes in ((128, 1024), (128, 1024), (1024, 128))]
    x = torch.randn(gated.LARGE // 4096, 128, device="cuda", requires_grad=True)

    def unit(x):
        gate, up, down = layers
        return glu_linear("silu", down, gate(x), up(x))

    def step(x):
        return checkpoint(unit, x, use_reentrant=False)

    def peak(step):
        for _ in range(2):
            step(x).sum().backward()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    torch._dynamo.reset()
    assert peak(torch.compile(step, fullgraph=True)) <= 1.05 * peak(step)
