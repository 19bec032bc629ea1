"""Checkpoints on the host: the inputs of checkpointed layers leave the GPU between forward and backward."""

import sys
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from liger_like.parallel.host_memory import ENGINES, PAGE, Budget, Pages, free_bytes
from liger_like.runtime.checks import require_integer, require_positive
from liger_like.runtime.support import is_local

GIB = 1 << 30
NO_CHECKPOINT = (
    "offload_checkpoints found no checkpoint: call model.gradient_checkpointing_enable({'use_reentrant': False}), and "
    "do not compile the model as a whole"
)
MODIFIED = (
    "a tensor that the backward needs was modified in place after it was saved, by a layer or its caller: write the "
    "operation out of place"
)

ACTIVE: "list[CheckpointOffload]" = []  # the innermost one is last


class Layer:
    """Tensors that a checkpoint keeps: its input and results of ops. They live as long as the graph does."""

    def __init__(self, before: "Layer | None") -> None:
        self.kept: list[weakref.ref[Kept]] = []
        self.before = None if before is None else weakref.ref(before)

    def alive(self) -> list["Kept"]:
        """Return what the graph still holds."""
        return [kept for kept in (ref() for ref in self.kept) if kept is not None]


class Stays:
    """A tensor that stays where it is until the backward. torch does not watch what passes hooks, so this does."""

    def __init__(self, tensor: Tensor) -> None:
        # a tensor that held its own graph would never be freed
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = self.tensor._version

    def load(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was modified."""
        if self.tensor._version != self.version:
            raise RuntimeError(MODIFIED)
        return self.tensor


class Kept:
    """A tensor that is kept for the backward: on its GPU, in pages of the host, or nowhere if it may be made again."""

    pages: list[int] | None = None

    def __init__(self, offload: "CheckpointOffload", tensor: Tensor, layer: Layer, *, needed: bool) -> None:
        self.offload, self.layer, self.needed = offload, layer, needed
        self.tensor: Tensor | None = tensor.detach()
        self.version, self.modified = tensor._version, False
        self.like = torch.empty_like(tensor, device="meta")
        self.size = tensor.numel() * tensor.itemsize
        self.host: Pages = offload.pages_of(tensor.device)
        self.stream = self.host.copies.current()  # it makes the tensor, and uses its memory again
        self.ahead: tuple[Tensor, Any] | None = None  # a copy on its way back, and its end
        layer.kept.append(weakref.ref(self))

    def __del__(self) -> None:
        if self.pages is not None:
            self.host.give(self.pages)

    def load(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was modified before it was copied."""
        return self.offload.load(self)

    def watch(self) -> None:
        """Note whether the tensor has been modified so far."""
        self.modified |= self.tensor is not None and self.tensor._version != self.version

    @property
    def lost(self) -> bool:
        """Return True if the tensor is nowhere."""
        return self.tensor is None and self.pages is None

    def pairs(self, tensor: Tensor, *, out: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the targets and sources of copies from ``tensor`` to the pages, or back."""
        flat, pages = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8), self.pages or []
        parts = [(part, flat[start : start + len(part)]) for start, part in self.host.parts(pages, self.size)]
        return parts if out else [(target, source) for source, target in parts]


class CheckpointOffload:
    """Context manager that ``offload_checkpoints`` returns."""

    def __init__(self, host_bytes: int, keep_last: int) -> None:
        self.budget, self.keep_last = Budget(host_bytes), keep_last
        self.pages: dict[torch.device, Pages] = {}
        self.layer: Layer | None = None
        self.recent: deque[weakref.ref[Layer]] = deque()  # layers that are still on the GPU
        self.leaving: list[tuple[Kept, Any]] = []  # copies to the host, with their ends
        self.coming: list[Kept] = []  # copies back that nobody has read yet
        self.out = self.back = 0  # bytes
        self.packed = self.checkpoints = 0
        self.lock = threading.RLock()  # the backward of each device has a thread of its own

    @property
    def out_gib(self) -> float:
        """Return the GiB that were copied to the host."""
        return self.out / GIB

    @property
    def back_gib(self) -> float:
        """Return the GiB that were copied back."""
        return self.back / GIB

    @property
    def host_gib(self) -> float:
        """Return the GiB of the host that are pinned."""
        return (self.budget.size - self.budget.rest) / GIB

    @property
    def seconds_waited(self) -> float:
        """Return how long GPUs have waited for copies. The host waits here until that is known."""
        with self.lock:
            return sum(pages.copies.waited() for pages in self.pages.values())

    def __str__(self) -> str:
        """Return the figures in one line."""
        return (
            f"{self.out_gib:.2f} GiB to the host and {self.back_gib:.2f} GiB back, {self.seconds_waited:.3f} s waited, "
            f"{self.host_gib:.2f} of {self.budget.size / GIB:.2f} GiB of the host pinned"
        )

    def __enter__(self) -> "CheckpointOffload":
        if self in ACTIVE:
            raise RuntimeError("this offload_checkpoints has been entered already")
        self.hooks = saved_tensors_hooks(self._pack, _unpack)
        self.hooks.__enter__()
        ACTIVE.append(self)
        self.packed = self.checkpoints = 0
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hooks.__exit__(*exception)
        del self.hooks  # it holds a method of this object, and so its memory
        ACTIVE.remove(self)
        self._settle()
        if self.packed and not self.checkpoints and exception[0] is None:
            raise RuntimeError(NO_CHECKPOINT)

    def __del__(self) -> None:
        self._settle()  # copies may be under way if no backward has read them

    def pages_of(self, device: torch.device) -> Pages:
        """Return the pinned memory for tensors of ``device``."""
        if device not in self.pages:
            self.pages[device] = Pages(device, self.budget)
        return self.pages[device]

    def keep(self, tensor: Tensor, *, needed: bool = True) -> Kept | Stays:
        """Return what is to be kept in place of ``tensor``; if it is not ``needed``, it may be lost."""
        if self.layer is None or not _may_leave(tensor):
            return Stays(tensor)
        return Kept(self, tensor, self.layer, needed=needed)

    def load(self, kept: Kept) -> Tensor:
        """Return the tensor again, and start to copy back what the layer before keeps."""
        with self.lock:
            self._land()
            kept.watch()
            if kept.modified:
                raise RuntimeError(MODIFIED)
            before = kept.layer.before and kept.layer.before()
            for other in [k for k in self.coming if k.layer is not kept.layer and k.layer is not before]:
                self._arrived(other)
            self._fetch([kept])
            tensor = kept.tensor if kept.ahead is None else self._arrived(kept)
            if before:
                self._fetch(before.alive())
        return tensor  # type: ignore[return-value]  # the caller asks before whether it is lost

    def _pack(self, tensor: Tensor) -> Kept | Stays:
        self.packed += 1
        if not _by_checkpoint():
            return Stays(tensor)
        self.checkpoints += 1
        if not _may_leave(tensor):
            return Stays(tensor)
        with self.lock:
            self._begin()
            return self.keep(tensor)

    def _begin(self) -> None:
        """Begin a layer: release what the copies of the layer before have read, and start those of the next layer."""
        self._settle()
        self.layer = Layer(self.layer)
        self.recent.append(weakref.ref(self.layer))
        while len(self.recent) > self.keep_last:
            layer = self.recent.popleft()()
            for kept in layer.alive() if layer is not None else ():
                self._send(kept)

    def _send(self, kept: Kept) -> None:
        if kept.tensor is None or kept.pages is not None:
            return
        kept.pages = kept.host.take(kept.size)
        if kept.pages is not None:
            self.leaving.append((kept, kept.host.copies.start(kept.pairs(kept.tensor, out=True), kept.stream)))
            self.out += kept.size
        elif not kept.needed:
            kept.tensor = None

    def _settle(self) -> None:
        """Let the GPU wait for all copies under way, so that their memory may be used again."""
        with self.lock:
            self._land()
            for kept in [*self.coming]:
                self._arrived(kept)

    def _land(self) -> None:
        for kept, end in self.leaving:
            kept.watch()  # a change before the copy ended may be in it
            kept.host.copies.wait(end, kept.tensor)  # type: ignore[arg-type]
            kept.tensor = None
        self.leaving.clear()

    def _fetch(self, several: list[Kept]) -> None:
        for kept in several:
            if kept.tensor is None and kept.pages is not None and kept.ahead is None:
                buffer = torch.empty_like(kept.like, device=kept.host.device)
                pairs, stream = kept.pairs(buffer, out=False), kept.host.copies.current()
                kept.ahead = buffer, kept.host.copies.start(pairs, stream)
                self.coming.append(kept)
                self.back += kept.size

    def _arrived(self, kept: Kept) -> Tensor:
        buffer, end = kept.ahead  # type: ignore[misc]
        kept.ahead = None
        self.coming.remove(kept)
        kept.host.copies.wait(end, buffer)
        return buffer


def _unpack(packed: Kept | Stays) -> Tensor:
    return packed.load()


def _may_leave(tensor: Tensor) -> bool:
    """Return True for a dense tensor that has its memory for itself, is worth a page and is no parameter."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():  # the bytes say less than the values
        return False
    alone = tensor.numel() * tensor.itemsize
    return (
        is_local(tensor)
        and not isinstance(tensor, torch.nn.Parameter)
        and tensor.device.type in ENGINES
        and alone >= PAGE
        and tensor.untyped_storage().nbytes() == alone
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # no element twice
    )


def _by_checkpoint() -> bool:
    """Return True if torch's checkpoint saves the tensor that is being packed: as its input, since it is outermost."""
    frame: Any = sys._getframe(2)
    if frame.f_globals["__name__"] == "torch.autograd.function":  # older versions save inputs through a Function
        frame = frame.f_back
    return bool(frame.f_globals["__name__"] == "torch.utils.checkpoint")


def offload_checkpoints(host_gib: float | None = None, keep_last: int = 1) -> CheckpointOffload:
    """Return a context manager under which the inputs of checkpoints are in the host's memory until the backward.

    Enter it around the forward, or around whole steps; make it once, since its pinned memory is kept for the next step.
    Any checkpoint of torch takes part: ``model.gradient_checkpointing_enable({"use_reentrant": False})``. Copies run on
    a stream of their own. The input of a layer leaves while the next layer runs, and comes back while the layer behind
    it runs its backward; the host waits for neither. Values do not change.

    ``host_gib`` limits the pinned memory in GiB; None takes 80 % of the free memory, divided by the processes of the
    host (``LOCAL_WORLD_SIZE``). Once it is full, later layers stay on the GPU. The last ``keep_last`` layers stay
    there always, since their backward comes at once. Parameters stay, as do tensors of less than 1 MiB, views of larger
    memory, tensors on the CPU and DTensors. The backward raises if a layer modified its input in place.

    The object has the attributes ``out_gib``, ``back_gib``, ``host_gib`` (pinned) and ``seconds_waited``, the time in
    which GPUs had nothing to do but wait for copies; ``print`` shows them.

    Raises TypeError or ValueError for an argument out of range, and RuntimeError in the capture of a CUDA graph. At its
    end it raises RuntimeError if tensors were saved but none by a checkpoint. See Rajbhandari et al., arXiv:2104.07857.
    """
    require_integer("keep_last", keep_last, 1)
    size = free_bytes() if host_gib is None else int(require_positive("host_gib", host_gib) * GIB)
    return CheckpointOffload(size, keep_last)
