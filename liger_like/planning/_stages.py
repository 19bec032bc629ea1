"""The part of a model that one GPU has under tensor and pipeline parallelism, and the passes that it runs.

Both are as in ``examples/parallel.py``: the residual stream is sharded along the sequence, the head by words, and
stages follow 1F1B (Narayanan et al., arXiv:2104.04473). Each stage of a pipeline is traced alone.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.parallel import pipeline_loss
from liger_like.planning._settings import Setting


def options_of(setting: Setting) -> dict[str, Any]:
    """Return the options of FSDP2, which computes in bf16 and reduces in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kept = {"reshard_after_forward": False} if setting.zero == 2 else {}
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), **kept}


def spread_over(model: Any, mesh: Any, setting: Setting) -> nn.Module:
    """Return the stage of this rank of ``mesh``. Raises ValueError for a model or sizes that cannot be spread."""
    from liger_like.parallel.stages import spread

    if setting.seq % (setting.tp * setting.cp):
        raise ValueError(f"seq must be a multiple of tp x cp, {setting.tp * setting.cp}, got {setting.seq}")
    stage: nn.Module = spread(model, mesh, **options_of(setting))
    return stage


def passes_of(stage: Any, setting: Setting, index: int) -> Callable[[dict[str, Any], int], None]:
    """Return a function that runs forward and backward of so many micro-batches on the stage ``index``.

    A stage has as many of them in flight as stages follow, and itself one. As torch's ``PipelineStage`` does, it has
    memory for each hidden state and each gradient that it receives, from its first step on.
    """
    first, last = index == 0, index == setting.pp - 1
    loss_fn = pipeline_loss(stage.lm_head, 1) if last else None
    width = next(iter(stage.layers.values())).mlp.down_proj.out_features
    shape = setting.micro_batch, setting.seq // setting.cp // setting.tp, width
    received: list[Any] = []
    gradients: list[Any] = []

    def memory(needed: bool) -> list[Any]:
        return [torch.empty(shape, dtype=torch.bfloat16) if needed else None for _ in range(setting.accumulation)]

    def forward(i: int, given: dict[str, Any]) -> Tensor:
        own = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in given.items() if isinstance(v, Tensor)}
        x = own["input_ids"] if first else received[i].detach().requires_grad_()
        out: Tensor = stage(x, own["position_ids"])
        return loss_fn(out, own["shift_labels"]) if loss_fn else out

    def run(given: dict[str, Any], passes: int) -> None:
        received.extend([] if received else memory(not first))
        gradients.extend([] if gradients else memory(not last))
        flying: deque[tuple[Tensor, Any]] = deque()
        for i in range(passes):
            flying.append((forward(i, given), gradients[i]))
            if len(flying) == setting.pp - index:
                _backward(*flying.popleft())
        while flying:
            _backward(*flying.popleft())

    return run


def _backward(out: Tensor, gradient: Tensor | None) -> None:
    out.backward(gradient)  # type: ignore[no-untyped-call]
