"""Checkpoints on the host, through copies that happen as late as they may and leave NaN until then."""

import contextlib
import copy
import gc
from collections import Counter
from typing import ClassVar

import pytest
import torch
from distributed import run
from tiny_models import batch, results, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as of_torch

from liger_like import patch
from liger_like.ops import tiled_mlp
from liger_like.parallel import host_memory, offload, offload_checkpoints

PAGE, SLAB = 64, 256  # bytes
ROWS, SIZE = 3, 16
INPUT = ROWS * SIZE * 4  # bytes of a layer's input, three pages
GIB = offload.GIB


class Piece:
    """Bytes of a tensor, which may be freed meanwhile."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.start, self.length = tensor.storage_offset(), len(tensor)

    def tensor(self):
        if self.storage.expired():
            return None
        memory = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(memory, self.start, (self.length,), (1,))


class Late:
    """Copies that happen when somebody waits for them or for later ones; until then targets hold NaN.

    A source that was freed meanwhile gives NaN, a target that was freed fails.
    """

    log: ClassVar = []

    def __init__(self, device):
        self.queue, self.done = [], 0

    def memory(self, size):
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in each dtype

    def current(self):
        return None

    def start(self, pairs, owner):
        for target, source in pairs:
            target.fill_(255)
            self.queue.append((Piece(target), Piece(source)))
        self.log.append("start")
        return self.done + len(self.queue)

    def wait(self, end, tensor):
        self.log.append("wait")
        while self.done < end:
            target, source = (piece.tensor() for piece in self.queue.pop(0))
            assert target is not None
            target.fill_(255) if source is None else target.copy_(source)
            self.done += 1

    def waited(self):
        return 0.0


class Net(torch.nn.Module):
    """Layers of one product each, checkpointed, and a loss."""

    def __init__(self, layers=5, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE) for _ in range(layers))
        self.options = {"use_reentrant": False, **options}

    def forward(self, x):
        self.inputs = []
        x = x * 1
        for layer in self.layers:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            x = of_torch.checkpoint(lambda h, layer=layer: layer(h).tanh() + h, x, **self.options)
        return x.square().sum()

    def on_device(self):
        """Return which inputs have not been freed."""
        return [i for i, storage in enumerate(self.inputs) if not storage.expired()]


def copy_late(monkeypatch, page, slab):
    """Let tensors on the CPU leave by late copies, in pages and slabs of so many bytes."""
    monkeypatch.setitem(host_memory.ENGINES, "cpu", Late)
    monkeypatch.setattr(Late, "log", [])
    monkeypatch.setattr(host_memory, "SLAB", slab)
    for module in (host_memory, offload):
        monkeypatch.setattr(module, "PAGE", page)


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    copy_late(monkeypatch, PAGE, SLAB)


def inputs(rows=ROWS):
    return torch.randn(rows, SIZE, requires_grad=True)


def gradients(net, x):
    return torch.autograd.grad(net(x), [x, *net.parameters()])


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("keep_last", "reentrant"), [(1, False), (2, False), (9, False), (1, True)])
def test_gradients(keep_last, reentrant):
    net, x = Net(use_reentrant=reentrant), inputs()
    expected = net(x)
    expected.backward()
    expected = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad()
    with offload_checkpoints(keep_last=keep_last) as host:
        net(x).backward()
    same([x.grad, *(p.grad for p in net.parameters())], expected)
    away = max(0, 5 - keep_last)
    assert (host.out, host.back) == (away * INPUT, away * INPUT)
    assert host.out_gib == host.back_gib == host.out / GIB


def test_what_is_on_the_device():
    """Two inputs in the forward, the last and one that leaves; in the backward the next one comes."""
    net, seen = Net(), []
    for layer in net.layers:
        layer.register_forward_hook(lambda *_: seen.append(net.on_device()))
    with offload_checkpoints() as host:
        loss = net(inputs())
        assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
        coming = []
        for layer in net.layers:
            layer.weight.register_hook(lambda _: coming.append(len(host.coming)))
        loss.backward()
    assert coming == [1, 1, 1, 1, 0]
    assert not net.on_device()
    del loss
    assert len(host.pages[torch.device("cpu")].free) * PAGE == host.budget.size - host.budget.rest


def test_copies_overlap():
    """The input of a layer leaves while the next layer runs, and comes while the backward of the layer behind runs."""
    with offload_checkpoints():
        loss = Net(4)(inputs())
        assert Late.log == ["start", *["wait", "start"] * 2]
        Late.log.clear()
        loss.backward()
    # the last copy out, then for each layer the copy of the one before starts once its own is there
    assert Late.log == ["wait", "start", *["wait", "start"] * 2, "wait"]


def test_two_backwards():
    net, x = Net(), inputs()
    with offload_checkpoints() as host:
        loss = net(x)
        first, again = (torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True) for _ in range(2))
    same(again, first)
    same(first, gradients(net, x))
    assert host.back == 2 * host.out


def test_two_forwards():
    """As of a model and its second batch, before either has its backward."""
    net, xs = Net(3), [inputs(), inputs()]
    expected = [gradients(net, x) for x in xs]
    with offload_checkpoints() as host:
        losses = [net(x) for x in xs]
        same([torch.autograd.grad(loss, [x, *net.parameters()]) for loss, x in zip(losses, xs, strict=True)], expected)
    assert host.out == host.back == 5 * INPUT


def test_an_exception_before_the_backward():
    net, x = Net(), inputs()
    expected = gradients(net, x)
    host = offload_checkpoints()
    with contextlib.suppress(KeyError), host:
        loss = net(x)
        raise KeyError
    same(torch.autograd.grad(loss, [x, *net.parameters()]), expected)  # outside, too
    with host:
        same(gradients(net, x), expected)


def test_an_exception_in_the_backward():
    net, x = Net(), inputs()
    expected = gradients(net, x)
    handle = net.layers[2].weight.register_hook(lambda _: 1 / 0)
    host = offload_checkpoints()
    with pytest.raises(ZeroDivisionError), host:
        gradients(net, x)
    handle.remove()
    gc.collect()
    with host:
        same(gradients(net, x), expected)
    assert host.budget.size - host.budget.rest == len(host.pages[torch.device("cpu")].free) * PAGE


def test_without_gradients():
    net = Net()
    with offload_checkpoints() as host, torch.no_grad():
        net(inputs())
    assert (host.out, Late.log) == (0, [])


def test_batches_of_other_lengths():
    """Pages are used again, whatever took them before, and no memory is pinned that was not needed before."""
    net, host = Net(), offload_checkpoints()
    pinned = []
    for rows in (5, 2, 3, 5, 1):
        x = inputs(rows)
        expected = gradients(net, x)
        with host:
            same(gradients(net, x), expected)
        pinned.append(host.budget.size - host.budget.rest)
    assert pinned == [4 * 5 * SIZE * 4 // SLAB * SLAB] * 5


@pytest.mark.parametrize("pages", [0, 2, 3, 7, 9])
def test_full(pages):
    """Layers for which there is no room stay, and the first ones are away."""
    net, x = Net(), inputs()
    expected = gradients(net, x)
    with offload_checkpoints(host_gib=(pages * PAGE + 1) / GIB) as host:
        loss = net(x)
        assert net.on_device() == [*range(min(pages // 3, 3), 5)]
        same(torch.autograd.grad(loss, [x, *net.parameters()]), expected)
    assert host.out == host.back == pages // 3 * INPUT


def small(x):
    return x[:1, : PAGE // 4 - 1].clone()


def part(x):
    return torch.cat([x, x])[:ROWS]


def strided(x):
    return x.clone().as_strided((ROWS * SIZE // 2, 2), (1, 0))


def parameter(x):
    return torch.nn.Parameter(x.detach())


def conjugate(x):
    return torch.complex(x, x).conj()


def negative(x):
    return torch._neg_view(x)


@pytest.mark.parametrize("change", [small, part, strided, parameter, conjugate, negative])
def test_what_stays(change):
    """The input of a second layer may leave, so the first layer's would be sent."""
    x = inputs()
    with offload_checkpoints() as host:
        y = of_torch.checkpoint(torch.tanh, change(x), use_reentrant=False)
        last = of_torch.checkpoint(torch.tanh, x * 1, use_reentrant=False)
        (y.real.sum() + last.sum()).backward()
    assert host.out == 0


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_change_in_place(after):
    """Raises before a copy and during it, as torch does; after it the host has the right values."""
    layers, x = [torch.nn.Linear(SIZE, SIZE) for _ in range(3)], inputs()
    h = first = x * 1
    with offload_checkpoints():
        for count, layer in enumerate(layers, 1):
            h = of_torch.checkpoint(lambda t, layer=layer: layer(t).tanh(), h, use_reentrant=False)
            if count == after:
                first.detach().zero_()
        if after == 3:
            got = torch.autograd.grad(h.sum(), x)
        else:
            with pytest.raises(RuntimeError, match="was modified in place after it was saved"):
                h.sum().backward()
    if after == 3:
        h = x
        for layer in layers:
            h = layer(h).tanh()
        same(got, torch.autograd.grad(h.sum(), x))


def test_a_change_of_what_stays():
    """torch itself does not watch tensors that pass hooks."""
    with offload_checkpoints():
        y = of_torch.checkpoint(torch.tanh, inputs(), use_reentrant=False) * 1
        loss = y.square().sum()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="was modified in place after it was saved"):
        loss.backward()


def test_copies_end_before_their_memory_is_freed():
    """As of a backward outside, through the last layers alone: the copy that it started has no reader."""
    with offload_checkpoints() as host:
        net = Net()
        loss = net(inputs())
    torch.autograd.grad(loss, net.layers[3].weight)
    assert host.coming
    Late.log.clear()
    del loss, host
    gc.collect()
    assert Late.log == ["wait"]


def test_what_the_loss_saves_stays():
    """Only the input of the first layer leaves, though the square saves its input, too."""
    with offload_checkpoints() as host:
        Net(2)(inputs()).backward()
    assert host.out == INPUT


def test_a_graph_without_backward_is_freed():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no checkpoint"), offload_checkpoints(1):
        y = x.exp()  # saves its result
    saved = StorageWeakRef(y.untyped_storage())
    del y
    assert saved.expired()


def test_no_checkpoint():
    with pytest.raises(RuntimeError, match="found no checkpoint: call "), offload_checkpoints():
        torch.nn.Linear(4, 4)(torch.ones(4)).sum().backward()


def test_entered_twice():
    with offload_checkpoints() as host, pytest.raises(RuntimeError, match="has been entered already"):
        host.__enter__()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"host_gib": 0}, "host_gib must be positive and finite, got 0"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
    ],
)
def test_arguments(options, error):
    with pytest.raises(ValueError, match=error):
        offload_checkpoints(**options)


def test_report():
    with offload_checkpoints(host_gib=1) as host:
        Net(2)(inputs()).backward()
    assert str(host) == "0.00 GiB to the host and 0.00 GiB back, 0.000 s waited, 0.00 of 1.00 GiB of the host pinned"


class _Saver(torch.autograd.Function):
    """Function through which torch 2.11's checkpoint saves its inputs."""

    @staticmethod
    def forward(*inputs):
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError


def test_inputs_saved_through_a_function():
    """torch 2.11 saves them so; the function's caller is torch's checkpoint."""
    save = eval("lambda *inputs: saver.apply(*inputs)", {"saver": _Saver, "__name__": of_torch.__name__})
    x, dummy = inputs(), torch.empty(0, requires_grad=True)
    with offload_checkpoints() as host:
        saved = [save(dummy, x * i) for i in range(3)]
        assert host.out == 2 * INPUT
        same([node.grad_fn.saved_tensors[1] for node in saved[::-1]], [x * 2, x * 1, x * 0])
    assert host.back == 2 * INPUT


def sharded(rank):
    """Under FSDP2 gradients are those without it, bit for bit, and with tiles nearly so, after as many collectives."""
    host_memory.ENGINES["cpu"] = Late
    offload.PAGE, host_memory.PAGE, host_memory.SLAB, tiled_mlp.TILE = PAGE, PAGE, SLAB, 4
    model, inputs = tiny("Llama", num_hidden_layers=3), batch(rows=1, length=8)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, counts = [], []
    for host, mlp in ((None, True), (offload_checkpoints(), True), (offload_checkpoints(), "tiled")):
        spread = copy.deepcopy(model)
        patch(spread, mlp=mlp, norm=False, rope=False, attention=False, loss=False)
        for module in (*spread.model.layers, spread):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        with CommDebugMode() as counted, host or contextlib.nullcontext():
            values = results(spread, inputs)
        found.append({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in values.items()})
        counts.append(Counter(counted.get_comm_counts()))
        assert host is None or host.out == host.back == 2 * 8 * 32 * 4
    same(found[1], found[0])
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-6)
    assert counts[0] == counts[1] == counts[2]


def test_fsdp2():
    run(sharded, 2)
