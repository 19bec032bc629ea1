"""A step whose CUDA graphs are tapes of torch's ops, for tests without a GPU."""

from contextlib import contextmanager, nullcontext

import torch
from tapes import Tape
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_like import GraphedStep, graphs
from liger_like.runtime.support import as_in_graph


def memory(t):
    return t.untyped_storage().data_ptr()


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class Graph:
    """A tape that is replayed on the memory of its capture, which made no results."""

    def __init__(self):
        self.replays = 0

    def pool(self):
        return 0, 0

    def end(self, tape):
        """Leave memory as it was, and what the ops have allocated unfilled."""
        self.calls, given, made = tape.calls, set(), set()
        for _, args, kwargs, results in self.calls:
            given |= {memory(t) for t in tensors((args, kwargs))} - made
            made |= {memory(t) for t in tensors(results)} - given
        with torch.no_grad():
            tape.undo()
        for t in tensors([results for *_, results in self.calls]):
            if memory(t) in made and t.is_floating_point():
                t.detach().fill_(float("nan"))

    def replay(self):
        self.replays += 1
        tapes = tensors([call[1:] for call in self.calls])
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tapes)):
            for op, *inputs, recorded in self.calls:
                args, kwargs = tree_map_only(Tensor, Tensor.detach, inputs)
                for old, new in zip(tensors(recorded), tensors(op(*args, **kwargs)), strict=True):
                    if memory(old) != memory(new):
                        old.detach().copy_(new)


class Stream:
    def wait_stream(self, other):
        pass


def graphed(monkeypatch, model, optimizer, **options):
    """Return a GraphedStep of a model on the CPU that captures and replays as on a GPU."""

    @contextmanager
    def capture(graph, *_, **__):
        tape = Tape()
        try:
            with as_in_graph(), tape:
                yield
        finally:
            graph.end(tape)

    stream = Stream()
    stand_ins = {
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "device": nullcontext,
        "get_sync_debug_mode": int,
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "_check_state", lambda optimizer: None)  # all state is on the host here
    monkeypatch.setattr(graphs, "_check_graphs", lambda model: None)  # a tape holds the backward graph
    step = GraphedStep(model, optimizer, **options)
    step._stream = step._beside = stream
    return step
