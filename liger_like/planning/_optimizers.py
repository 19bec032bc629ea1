"""Optimizers of a trace: torch's own, and a stand-in for that of bitsandbytes, whose kernels need a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SMALL, BLOCK, MAP = 4096, 256, 256  # elements: below that moments are in fp32; of one scale; of a map of 8 bits
LIBRARY = torch.library.Library("liger_like_planning", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("fused_adamw8bit_(Tensor(a!) parameter, Tensor grad, Tensor(b!)[] states) -> ()")  # type: ignore[no-untyped-call]
LIBRARY.impl("fused_adamw8bit_", lambda parameter, grad, states: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
UPDATE = torch.ops.liger_like_planning.fused_adamw8bit_.default  # what the clock sees of a step


class AdamW8bit(torch.optim.Optimizer):
    """Optimizer that allocates what ``bitsandbytes.optim.AdamW8bit`` does (Dettmers et al., arXiv:2110.02861).

    A moment takes one byte an element and a scale in fp32 for 256 of them, or fp32 where there are fewer than 4096
    elements. Two maps from 8 bits to values are shared by all parameters. The update itself allocates nothing.
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.maps: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the states of parameters that have none, and read and write all of them."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[parameter]:
                self.state[parameter] = self._moments(parameter)
            UPDATE(parameter, parameter.grad, [*self.state[parameter].values()])

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.numel() < SMALL:
            return {f"state{i}": torch.empty_like(parameter, dtype=torch.float32) for i in (1, 2)}
        self.maps = self.maps or [parameter.new_empty(MAP, dtype=torch.float32) for _ in range(2)]
        found = {}
        for i in (1, 2):
            found[f"state{i}"] = torch.empty_like(parameter, dtype=torch.uint8)
            found[f"absmax{i}"] = parameter.new_empty(-(-parameter.numel() // BLOCK), dtype=torch.float32)
            found[f"qmap{i}"] = self.maps[i - 1]
        return found


def optimizer_of(name: str, parameters: Sequence[Tensor]) -> Any:
    """Return the optimizer ``name`` of ``Setting`` for ``parameters``."""
    if name == "adamw8bit":
        return AdamW8bit(parameters, lr=1e-5)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return kind(parameters, lr=1e-5, fused=True)
