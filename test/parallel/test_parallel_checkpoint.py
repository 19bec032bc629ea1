"""Recomputation of a checkpointed region in the backward."""

import copy
import functools
import inspect
import pickle
import warnings
from collections import Counter

import pytest
import torch
from distributed import run
from functorch.compile import min_cut_rematerialization_partition
from tiny_models import batch, results, tiny
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import liger_like
from liger_like.ops.glu_linear import glu_linear
from liger_like.parallel import checkpoint_policy

MATMULS = ("mm", "addmm", "bmm")


class Count(TorchDispatchMode):
    """How often each op runs, by its name; matrix products are one."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0]
        self.counts["matmul" if name in MATMULS else name] += 1
        return op(*args, **(kwargs or {}))


class Block(torch.nn.Module):
    """All that a layer has, and a loss."""

    def __init__(self, device):
        super().__init__()
        self.norm = liger_like.nn.RMSNorm(16)
        self.qkv, self.up, self.head = (torch.nn.Linear(16, n, bias=False) for n in (48, 32, 24))
        self.to(device)

    def forward(self, x, target):
        h = self.norm(x)
        q, k, v = self.qkv(h).unflatten(-1, (3, 1, 16)).unbind(-3)
        angle = torch.linspace(0, 1, x.shape[1], device=x.device)[:, None].expand(-1, 16)
        q, k = liger_like.rope(q, k, angle.cos(), angle.sin(), unsqueeze_dim=2)
        h = x + liger_like.flash_attention(q, k, v, causal=True).flatten(-2)
        h = h + liger_like.swiglu(self.up(h))
        # in a compiled graph few tokens would run plain torch
        return liger_like.fused_linear_cross_entropy(h, self.head.weight, target, chunk_rows=1024)


# op: its name in the policy; each runs once, and again in the backward unless it is saved
ONCE = {
    "rms_norm_fwd": "norm",
    "rope": "rope",
    "attention_fwd": "attention",
    "glu_fwd": "glu",
    "linear_cross_entropy": "loss",
}


def gradients(block, call):
    block.zero_grad()
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, device=block.up.weight.device, requires_grad=True)
    target = torch.randint(24, (2, 8), device=x.device)
    call(x, target).backward()
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("save", [(), ("attention", "loss"), ("matmul", "attention", "loss"), ("norm", "glu", "rope")])
def test_what_is_saved_runs_once(save, device):
    block = Block(device)
    call = functools.partial(checkpoint, block, use_reentrant=False, context_fn=checkpoint_policy(save))
    with Count() as plain:
        expected = gradients(block, block)
    with Count() as count:
        got = gradients(block, call)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    again = {name: count.counts[name] - plain.counts[name] for name in (*ONCE, "matmul")}
    matmuls = {"matmul": 0 if "matmul" in save else 2}
    assert again == {name: int(group not in save) for name, group in ONCE.items()} | matmuls


def test_it_can_be_pickled():
    """Copy the policy as Trainer copies its arguments."""
    policy = checkpoint_policy(("norm",))
    again = pickle.loads(pickle.dumps(policy))
    assert (again.func, again.args) == (policy.func, policy.args)


def test_a_group_that_there_is_not():
    with pytest.raises(ValueError, match=r"save must be out of matmul, attention,.* got .'attn'"):
        checkpoint_policy(("matmul", "attn"))
    with pytest.raises(TypeError, match="save must be a tuple of groups or ops, got str"):
        checkpoint_policy("attention")


def checkpointed(model, save):
    """Its layers, as Hugging Face users do it."""
    kwargs = {"use_reentrant": False, "context_fn": checkpoint_policy(save)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers will rename the argument
        model.gradient_checkpointing_enable(kwargs)
    return model


def patched(device="cpu"):
    model = tiny("Llama", device, num_hidden_layers=1)
    liger_like.patch(model)
    return model


@pytest.mark.parametrize("save", [(), ("matmul", "attention")])
def test_hugging_face(save, device):
    model, inputs = patched(device), batch(device, rows=1, length=8)
    with Count() as plain:
        expected = results(model, inputs)
    with Count() as count:
        got = results(checkpointed(model, save), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    names = ("rms_norm_fwd", "rope", "attention_fwd", "glu_linear_fwd", "linear_cross_entropy", "matmul")
    again = [count.counts[name] - plain.counts[name] for name in names]
    # the backward does not repeat the last product and its inputs: nothing reads them
    assert again == ([2, 1, 0, 0, 0, 0] if save else [2, 1, 1, 0, 0, 6])


@pytest.mark.parametrize(("save", "again"), [((), [1, 1, 0, 0]), (("matmul",), [1, 0, 0, 0])])
def test_mixture_of_experts(save, again, device):
    """The backward does not repeat the product with down, nor the sum of its rows: nothing reads them."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    model, inputs = tiny("Qwen3Moe", device, **sizes), batch(device, rows=1, length=8)
    liger_like.patch(model, norm=False, rope=False, attention=False)
    with Count() as plain:
        expected = results(model, inputs)
    with Count() as count:
        got = results(checkpointed(model, save), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    names = ("moe_rows", "moe_gate_up", "moe_rows_times", "moe_combine")
    assert [plain.counts[name] for name in names] == [1, 1, 2, 2]  # two of them have a part in the backward
    assert [count.counts[name] - plain.counts[name] for name in names] == again


GATED = (*inspect.signature(checkpoint_policy).parameters["save"].default, "glu_linear")


@pytest.mark.parametrize(
    ("save", "behind", "again"),
    [(GATED[:-1], torch.nn.Identity, 0), (GATED[:-1], torch.nn.LayerNorm, 1), (GATED, torch.nn.LayerNorm, 0)],
)
def test_the_product_behind_a_gated_unit(save, behind, again, device):
    """It is not kept by itself, and made again where what follows keeps it."""
    linear, norm = torch.nn.Linear(8, 4, device=device), behind(4).to(device)
    gate, up = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    upstream = torch.randn(4, device=device)

    def layer(gate, up):
        return norm(glu_linear("silu", linear, gate, up))

    leaves = (gate, up, linear.weight)
    expected = torch.autograd.grad(layer(gate, up), leaves, upstream)
    with Count() as count:
        out = checkpoint(layer, gate, up, use_reentrant=False, context_fn=checkpoint_policy(save))
        got = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert count.counts["glu_linear_fwd"] == 1 + again


@pytest.mark.parametrize(("options", "again"), [({}, 1), ({"context_fn": checkpoint_policy()}, 0)], ids=["", "policy"])
def test_compiled(options, again, device):
    """Also in one graph, the backward has the ops whose results are not saved, and no other op of the forward."""
    graphs = []

    def keep(graph, inputs):
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(op.__name__.partition(".")[0] for op in calls))
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    block = Block(device)
    call = functools.partial(checkpoint, block, use_reentrant=False, **options)
    expected = gradients(block, block)
    got = gradients(block, torch.compile(lambda x, target: call(x, target), backend=backend, fullgraph=True))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    forward, backward = graphs
    # the norm and the gated unit are no ops of this package in a graph; the norm has a rsqrt
    assert [forward[name] for name in ("rsqrt", *ONCE)] == [1, 0, 1, 1, 0, 1]
    assert [backward[name] for name in ("rsqrt", "rms_norm_fwd", "glu_fwd", "attention_fwd")] == [1, 0, 0, again]
    assert backward["rope"] == 2  # RoPE's backward is the same op


class NotRunError(Exception):
    """A graph that is only looked at."""


@pytest.mark.parametrize(
    ("family", "config"),
    [("Llama", {}), ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2})],
)
def test_a_compiled_checkpoint_keeps_the_inputs_of_layers(family, config, device):
    """Neither of the library ops nor of the kernels that Inductor launches is a result kept for the backward."""
    model = tiny(family, device, **config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    liger_like.patch(model)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return not_run

    def not_run(*args):
        raise NotRunError

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    tokens = torch.randint(model.config.vocab_size, (4, 24), device=device)
    with pytest.raises(NotRunError):
        torch.compile(model.model, backend=backend, fullgraph=True)(tokens, use_cache=False)
    result, *saved = graphs[0].output_node().args[0]
    made = [node for node in saved if node.op == "call_function"]
    origins = [node.args[0] if "getitem" in str(node.target) else node for node in made]
    assert not [node for node in origins if "liger_like" in str(node.target)]
    kept = sum(node.meta["val"].nbytes for node in made if isinstance(node.meta["val"], torch.Tensor))
    assert kept <= 2.5 * result.meta["val"].nbytes  # two inputs; the rest are tables and numbers of rows


def sharded(rank):
    """A patched model under FSDP2: the gradients of one process, and what is saved is computed once."""
    model = patched()
    batches = [batch(rows=1, length=8), batch(rows=1, length=8)]
    whole = copy.deepcopy(model)
    expected = [results(whole, inputs) for inputs in batches]
    checkpointed(model, ("matmul", "attention"))
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    with Count() as count:
        results(model, batches[rank])
    for name, parameter in model.named_parameters():
        mean = sum(result[name] for result in expected) / 2
        torch.testing.assert_close(parameter.grad.full_tensor(), mean, rtol=1e-5, atol=1e-5)
    assert [count.counts[name] for name in (*ONCE, "glu_linear_fwd")] == [5, 3, 1, 0, 1, 1]


def test_fsdp2():
    run(sharded, 2)
