"""One checkpoint for several layers: fewer inputs are kept, and more layers are alive in the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from liger_like.runtime.checks import require_integer, require_type

Call = Callable[..., Any]


class _Group:
    """Layers that share a checkpoint: all but the last wait, and give out NaN until then."""

    def __init__(self, names: list[str], checkpoint: Call) -> None:
        self.names, self.checkpoint = names, checkpoint
        self.waiting: list[tuple[Call, tuple[Any, ...]]] = []
        self.input: Tensor | None = None  # of the first layer
        self.given: Tensor | None = None  # to the next layer

    def call(self, place: int, layer: Call, x: Any = None, *rest: Any) -> Any:
        """Call the layer at ``place``, or let it wait if it is not the last."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{self.names[place]} must get the hidden states as its first positional argument to share a "
                f"checkpoint, got {type(x).__name__}"
            )
        if place == 0:
            self.waiting, self.input, self.given = [], x, x  # whatever a forward that failed has left
        if place != len(self.waiting) or x is not self.given:
            raise RuntimeError(
                f"{self.names[place]} must get the output of the layer before as it is to share its checkpoint: "
                "do not group the checkpoints of this model"
            )
        self.waiting.append((layer, rest))
        if len(self.waiting) < len(self.names):
            self.given = x.new_full((), torch.nan).expand(x.shape)  # takes no memory
            return self.given
        layers, first = self.waiting, self.input
        self.waiting, self.input, self.given = [], None, None
        return self.checkpoint(lambda x: self._in_turn(layers, x), first)

    def _in_turn(self, layers: list[tuple[Call, tuple[Any, ...]]], x: Any) -> Any:
        for name, (layer, rest) in zip(self.names, layers, strict=True):
            x = layer(x, *rest)
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must return a tensor to share a checkpoint, got {type(x).__name__}")
        return x


class _Member:
    """Checkpoint that a layer calls in the place of torch's."""

    def __init__(self, group: _Group, place: int) -> None:
        self.group, self.place = group, place

    def __call__(self, layer: Call, *args: Any) -> Any:
        return self.group.call(self.place, layer, *args)


def group_checkpoints(model: nn.Module, layers: int) -> None:
    """Let ``layers`` consecutive layers of a Hugging Face ``model`` share a checkpoint, which keeps their first input.

    Call it after ``model.gradient_checkpointing_enable({"use_reentrant": False})``, which undoes it. The inputs of
    checkpoints take the memory of every ``layers``-th layer. In exchange the backward recomputes so many layers at
    once, and holds what all of them keep; each layer is recomputed once, as before. Values do not change. Under FSDP2
    shard the layers of a group together: ``fully_shard([*model.model.layers[:2]])``.

    Raises TypeError or ValueError for ``layers`` below 1, and ValueError if no layer has such a checkpoint or layers
    are in FSDP1. The forward raises RuntimeError where the model changes the hidden states between the layers of a
    group, and TypeError where a layer takes them by keyword or returns more than them.
    """
    require_type("model", model, nn.Module)
    require_integer("layers", layers, 1)
    found = False
    for path, several in model.named_modules():
        members = [*enumerate(several)] if isinstance(several, nn.ModuleList) else []
        members = [(i, layer) for i, layer in members if getattr(layer, "gradient_checkpointing", False)]
        found |= bool(members)
        if any(isinstance(layer, FullyShardedDataParallel) for _, layer in members):
            raise ValueError(f"{path} must be sharded by fully_shard or not at all, got FullyShardedDataParallel")
        for start in range(0, len(members), layers):
            own = members[start : start + layers]
            group = _Group([f"{path}.{i}" for i, _ in own], _checkpoint_of(own[0][1]))
            for place, (_, layer) in enumerate(own):
                layer._gradient_checkpointing_func = _Member(group, place)  # type: ignore[assignment]
    if not found:
        raise ValueError(
            "model must have checkpointed layers, got none: call "
            "model.gradient_checkpointing_enable({'use_reentrant': False})"
        )


def _checkpoint_of(layer: Any) -> Call:
    """Return the checkpoint that ``layer`` calls, which may be in a group already."""
    function: Any = layer._gradient_checkpointing_func
    function = function.group.checkpoint if isinstance(function, _Member) else function
    if getattr(function, "keywords", {}).get("use_reentrant") is not False:
        raise ValueError("model must have checkpoints with use_reentrant=False, got others")
    return function  # type: ignore[no-any-return]
