"""Count the memory of a step on tensors without data: which storage is allocated when, by which op of which module.

A storage counts from the op that returns it first until Python and autograd let go of it, rounded up as torch's
allocator rounds. Launchers of liger_like's ops run, so their temporaries count. Modules are known by hooks, in the
backward by the sequence numbers of autograd's nodes; parameters, gradients and states by the optimizer's hooks.
"""

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_like.planning._clock import DTENSOR, STEP
from liger_like.planning._stand_ins import CUDA_ONLY, workspace_of
from liger_like.runtime import machine
from liger_like.runtime.registry import LAUNCHERS

ROUND = 512  # bytes: the unit of torch's allocator
SUM = torch.ops.aten.add.Tensor
DEVICE_OF = torch.ops.prim.device.default
# its launcher reads the host
FROM_FAKE = {torch.ops.liger_like.linear_cross_entropy_last.default}
GATHERING = "fsdp", "c10d", "_c10d_functional"
LOSSES = "linear_cross_entropy", "cross_entropy", "nll_loss", "log_softmax", "linear_logprobs", "linear_token_loss"
KINDS = "parameters", "gradients", "optimizer", "workspace", "loss", "activations", "recomputed", "gathered", "backward"


class Live:
    """A storage: its bytes now, the op and the module that allocated it, and its kind."""

    __slots__ = ("kind", "module", "op", "size")

    def __init__(self, size: int, op: str, module: str, kind: str) -> None:
        self.size, self.op, self.module, self.kind = size, op, module, kind


Event = tuple[Live, int, bool]  # a storage, the bytes that it grows by, and whether the new sum counts for the peak


def rounded(size: int) -> int:
    """Return the bytes that torch's allocator gives for ``size``."""
    return -(-size // ROUND) * ROUND


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records every change of memory in ``events``; ``start`` holds the memory before the first one."""

    def __init__(self, workspace: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, Live] = {}
        self.start: list[tuple[Live, int]] = [(Live(workspace, "cuBLAS", "", "workspace"), workspace)]
        self.events: list[Event] = []
        self.stack: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.owners: dict[Any, str] = {}  # names of modules by parameter
        self.nodes: list[tuple[int, str]] = [(0, "")]  # from which sequence number on autograd's nodes are whose
        self.heads: set[str] = {""}  # modules of the loss: the head, and the root that calls it
        self.stepping = self.paused = False
        self.watch: Callable[[Any, Any, Any, Any], None] | None = None  # the clock's
        self.listen: Callable[[float], None] = lambda seconds: None  # gets the host's time of Python beside the ops

    # ------------------------------------------------------------ what is allocated

    def restart(self) -> None:
        """Forget the events so far: what is live now is the start."""
        self.start = [self.start[0], *((entry, entry.size) for entry in self.live.values())]
        self.events.clear()

    def grow(self, entry: Live, size: int, counts: bool = True) -> None:
        self.events.append((entry, size, counts))

    def add(self, storage: torch.UntypedStorage, op: str, counts: bool = True) -> None:
        """Count ``storage`` if it is new, and its change if it was resized."""
        key, size = storage._cdata, rounded(storage.nbytes())
        entry = self.live.get(key)
        if entry is not None:
            if size != entry.size:
                self.grow(entry, size - entry.size)
                entry.size = size
            return
        self.live[key] = entry = Live(size, op, *self.place(op))
        weakref.finalize(storage, self.free, key)
        self.grow(entry, size, counts)

    def free(self, key: int) -> None:
        entry = self.live.pop(key)
        self.grow(entry, -entry.size)

    def place(self, op: str) -> tuple[str, str]:
        """Return module and kind of what is allocated now."""
        node = torch._C._current_autograd_node()
        space, _, name = op.partition("::")
        if self.stepping:
            return "", "optimizer"
        if space in GATHERING:
            return self.stack[-1] if self.stack else "", "gathered"
        if node is None:
            module = self.stack[-1] if self.stack else ""
            kind = "activations"
        elif self.stack:
            module, kind = self.stack[-1], "recomputed"
        else:
            found = bisect.bisect_right(self.nodes, node._sequence_nr(), key=lambda pair: pair[0])
            module, kind = self.nodes[found - 1][1], "backward"
        if name.startswith(LOSSES) or (module in self.heads and (self.stack or node is not None)):
            kind = "loss"
        return module, kind

    def label(self, tensor: Any, kind: str, module: str) -> None:
        """Give the storage of ``tensor``, the local one of a DTensor, this kind and module."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if isinstance(tensor, Tensor):
            entry = self.live.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                entry.kind, entry.module = kind, module

    # ------------------------------------------------------------ what runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return args[0].fake_device
        if self.paused:
            return func(*args, **kwargs)
        if any(kind.__name__ == "DTensor" for kind in types):
            self.listen(DTENSOR)
            return NotImplemented  # its local tensors come by
        name = func._schema.name
        try:
            out = self.run(func, name, args, kwargs)
        except Exception as error:
            # where it happened: exceptions of other libraries rarely say
            error.traced = getattr(error, "traced", (name, self.stack[-1] if self.stack else ""))  # type: ignore[attr-defined]
            raise
        # autograd sums gradients in place, but not while a mode listens: then the term that the sum replaces is freed
        # before the next op, unless it is a view, whose base lives
        summed = func is SUM and not self.stack and torch._C._current_autograd_node() is not None
        counts = not (summed and not args[0]._is_view())
        for t in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:  # the host's memory is on "meta"
                self.add(t.untyped_storage(), name, counts)
        return out

    def run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an op: by its launcher, by a stand-in of an op that only GPUs have, or on tensors without data."""
        launcher, watch = LAUNCHERS.get(func), self.watch
        if launcher is not None and func not in FROM_FAKE:
            self.watch = None  # the clock counts the whole op
            try:
                with self:
                    out = launcher(*args, **kwargs)
            finally:
                self.watch = watch
        elif func in CUDA_ONLY:
            out = CUDA_ONLY[func](*args, **kwargs)
        else:
            within = workspace_of(name, args)
            entry = Live(within, name, *self.place(name)) if within else None
            if entry:
                self.grow(entry, within)
            out = func(*args, **kwargs)
            if entry:
                for t in tree_leaves(out):
                    if isinstance(t, Tensor):
                        self.add(t.untyped_storage(), name)
                self.grow(entry, -within)
        if watch is not None:
            watch(func, args, kwargs, out)
        return out

    # ------------------------------------------------------------ where it runs

    @contextlib.contextmanager
    def listening(self, model: nn.Module | None = None) -> Iterator["Tracer"]:
        """Record within the context. Modules that are not of ``model`` get names of their classes."""
        if model is not None:
            self.know(model)
        with contextlib.ExitStack() as stack:
            hooks = [
                nn.modules.module.register_module_forward_pre_hook(self._enter),
                nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            resize, tracer = torch.UntypedStorage.resize_, self

            def resized(storage: torch.UntypedStorage, size: int) -> Any:
                result = resize(storage, size)
                entry = tracer.live.get(storage._cdata)
                if entry is not None:
                    if entry.kind != "loss":  # FSDP2 frees and makes whole parameters so
                        entry.kind = "gathered"
                    tracer.add(storage, entry.op)
                return result

            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(self._quiet_inference())
            stack.enter_context(self)
            stack.enter_context(mock.patch.object(machine, "own_modes", torch._C._len_torch_dispatch_stack()))
            yield self

    def know(self, model: nn.Module) -> None:
        """Take the names of modules from ``model``, and its output embeddings for the head of the loss."""
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = {
            tensor: name
            for module, name in self.names.items()
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        for parameter, name in self.owners.items():
            self.label(parameter, "parameters", name)
        find: Any = getattr(model, "get_output_embeddings", None)
        head: Any = find() if find else getattr(model, "lm_head", None)
        self.heads = {"", self.names.get(head, "")}

    @contextlib.contextmanager
    def _quiet_inference(self) -> Iterator[None]:
        """Count nothing while DTensor infers shapes: it makes whole tensors, the first time that it sees an op."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            yield
            return
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        original, tracer = ShardingPropagator._propagate_tensor_meta_non_cached, self

        def quiet(*args: Any, **kwargs: Any) -> Any:
            before, tracer.paused = tracer.paused, True
            try:
                return original(*args, **kwargs)
            finally:
                tracer.paused = before

        with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", quiet):
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(module)
        name = name if name is not None else self.stack[-1] if self.stack else type(module).__name__
        self.stack.append(name)
        self.nodes.append((torch._C._autograd._get_sequence_nr(), name))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        self.nodes.append((torch._C._autograd._get_sequence_nr(), self.stack[-1] if self.stack else ""))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.listen(STEP)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self.owners.get(parameter, "")
                self.label(parameter, "parameters", owner)
                self.label(parameter.grad, "gradients", owner)
        self.stepping = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.stepping = False
        if torch._C._current_autograd_node() is None:  # else the backward goes on
            self.nodes = [(0, "")]
        for parameter, state in optimizer.state.items():
            for value in state.values():
                self.label(value, "optimizer", self.owners.get(parameter, ""))
