"""A tape of torch's ops and the numbers in their calls, which stands for a CUDA graph on a CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Tape(TorchDispatchMode):
    """Record of the ops that torch runs, which ``run`` repeats with the same numbers on the same memory."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._schema.is_mutable:
            self.before += [(t, t.clone()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = op(*args, **(kwargs or {}))
        held = tree_map_only(torch.nn.Parameter, lambda t: t.data, (args, kwargs or {}))  # ``t.data`` may be replaced
        self.calls.append((op, *held, results))
        return results

    def undo(self):
        """Restore the memory that the ops have written to: a capture does not run them."""
        for t, before in reversed(self.before):
            t.copy_(before)

    def run(self, results):
        """Write the results of the ops to the memory of the recorded ``results``."""
        made = {}

        def now(inputs):
            return tree_map_only(torch.Tensor, lambda t: made.get(id(t), t), inputs)

        for op, args, kwargs, recorded in self.calls:
            again = op(*now(args), **now(kwargs))
            made |= {id(old): new for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True)}
        for old, new in zip(tree_leaves(results), tree_leaves(now(results)), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)


class Graphs(list):
    """Captured steps: the number of replays of each."""

    def capture(self, work, device):
        with Tape() as tape:
            results = work()
        tape.undo()
        for t in tree_leaves(results):
            if isinstance(t, torch.Tensor):
                t.fill_(-1)
        self.append(0)
        place = len(self) - 1

        def replay():
            self[place] += 1
            tape.run(results)
            return results

        return replay
