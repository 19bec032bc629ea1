"""Checkpoints that several layers share."""

import copy
import functools

import pytest
import torch
from distributed import run
from test_parallel_checkpoint import Count
from test_parallel_offload import Late, copy_late, same
from tiny_models import batch, results, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from liger_like import patch
from liger_like.parallel import checkpoint_policy, group_checkpoints, host_memory, offload, offload_checkpoints

LAYERS = 5
INPUT = 2 * 12 * 32 * 4  # bytes of a layer's input
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    copy_late(monkeypatch, 512, 4096)


def checkpointed(name="Llama", layers=LAYERS):
    model = tiny(name, num_hidden_layers=layers, attn_implementation="eager" if name == "Gemma2" else "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize(("name", "layers"), [("Llama", 1), ("Llama", 2), ("Gemma2", 3), ("Llama", 9)])
def test_results(name, layers):
    """Values, recomputed products, and the inputs that leave for the host: those of the groups but the last."""
    model, inputs = checkpointed(name), batch()
    with Count() as before:
        expected = results(model, inputs)
    group_checkpoints(model, layers)
    with Count() as count, offload_checkpoints() as host:
        got = results(model, inputs)
    same(got, expected)
    groups = -(-LAYERS // layers)
    if name == "Llama":  # the next layer needs the last product
        assert count.counts["matmul"] == before.counts["matmul"] + LAYERS - groups
    assert host.out == host.back == (groups - 1) * INPUT


def test_attention_on_the_host():
    model, inputs = checkpointed(), batch()
    expected = results(model, inputs)
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": checkpoint_policy((), host=("attention",))}
    )
    group_checkpoints(model, 2)
    with Count() as count, offload_checkpoints() as host:
        same(results(model, inputs), expected)
    assert count.counts[ATTENTION] == LAYERS
    assert host.out == host.back == (2 + 4) * INPUT  # of four layers in two groups


def test_other_numbers_and_none():
    """A later call regroups, and torch's own checkpoints come back as they were enabled."""
    model, inputs = checkpointed(), batch()
    expected = results(model, inputs)
    kept = []
    for layers in (2, 4, None):
        if layers is None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            group_checkpoints(model, layers)
        with offload_checkpoints() as host:
            same(results(copy.deepcopy(model), inputs), expected)
        kept.append(host.out // INPUT)
    assert kept == [2, 1, 4]


def test_a_forward_that_failed():
    model, inputs = checkpointed(), batch()
    expected = results(model, inputs)
    group_checkpoints(model, 2)
    handle = model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    handle.remove()
    same(results(model, inputs), expected)


class Layer(torch.nn.Linear):
    gradient_checkpointing = True

    def __init__(self, several=False, **options):
        super().__init__(4, 4)
        self.several = several
        self._gradient_checkpointing_func = functools.partial(checkpoint, **options)

    def forward(self, x):
        return self._gradient_checkpointing_func(self.call, x)

    def call(self, x):
        y = super().forward(x).tanh()
        return (y, x) if self.several else y


class Net(torch.nn.Module):
    """Layers with something between them."""

    def __init__(self, between, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(**{"use_reentrant": False, **options}) for _ in range(2))
        self.between = between

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return x.sum()


def test_models_that_cannot_share():
    x = torch.randn(3, 4, requires_grad=True)
    net = Net(lambda x: x + 1)
    group_checkpoints(net, 2)
    with pytest.raises(RuntimeError, match=r"layers\.1 must get the output of the layer before as it is"):
        net(x)
    net = Net(lambda x: x, several=True)
    group_checkpoints(net, 2)
    with pytest.raises(TypeError, match=r"layers\.0 must return a tensor to share a checkpoint, got tuple"):
        net(x)
    with pytest.raises(ValueError, match="must have checkpoints with use_reentrant=False, got others"):
        group_checkpoints(Net(None, use_reentrant=True), 2)
    with pytest.raises(TypeError, match=r"layers\.0 must get .* first positional argument .*, got NoneType"):
        net.layers[0]._gradient_checkpointing_func(net.layers[0].call)
    net.layers[0]._gradient_checkpointing_func = lambda call, x: call(x)
    with pytest.raises(ValueError, match="must have checkpoints with use_reentrant=False, got others"):
        group_checkpoints(net, 2)
    with pytest.raises(TypeError, match="model must be a Module, got list"):
        group_checkpoints([net], 2)
    with pytest.raises(ValueError, match="must have checkpointed layers, got none"):
        group_checkpoints(tiny("Llama"), 2)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        group_checkpoints(net, 0)


def test_a_layer_that_is_left_out():
    """NaN says so."""
    net = Net(lambda x: x)
    group_checkpoints(net, 2)
    assert net.layers[0](torch.randn(3, 4)).isnan().all()


def sharded(rank):
    """Layers of a group are one unit of FSDP2: gradients are those without it, and fewer are gathered."""
    host_memory.ENGINES["cpu"] = Late
    offload.PAGE, host_memory.PAGE, host_memory.SLAB = 512, 512, 4096
    model, inputs = checkpointed(layers=3), batch()
    patch(model, mlp=False, norm=False, rope=False, attention=False, loss=False)
    found = []
    for layers in (1, 2):
        spread = copy.deepcopy(model)
        group_checkpoints(spread, layers)
        units = [[*spread.model.layers[i : i + layers]] for i in range(0, 3, layers)]
        for unit in (*units, spread):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        with CommDebugMode() as counted, offload_checkpoints() as host:
            values = results(spread, inputs)
        gathered = counted.get_comm_counts()[torch.ops.c10d._allgather_base_]
        found.append(({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in values.items()}, gathered))
        assert host.out == host.back == (len(units) - 1) * INPUT
    same(found[1][0], found[0][0])
    net = Net(lambda x: x)
    net.layers[0] = FullyShardedDataParallel(net.layers[0], device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="layers must be sharded by fully_shard or not at all, got FullySharded"):
        group_checkpoints(net, 2)
    assert found[0][1] - found[1][1] == 2 * (3 - 2)


def test_fsdp2():
    run(sharded, 2)
