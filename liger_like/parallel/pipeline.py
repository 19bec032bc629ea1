"""Pipeline parallel: the fused loss on the last stage of a schedule of ``torch.distributed.pipelining``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_like.nn import check_options
from liger_like.ops import fused_linear_cross_entropy
from liger_like.patches.heads import loss_of


def pipeline_loss(head: nn.Module, num_items: int | Tensor | None = None, **options: Any) -> Callable[..., Tensor]:
    """The ``loss_fn`` of a schedule whose last stage returns hidden states [..., H], not logits.

    It takes them and the target [...], of each position the token to predict (labels already shifted), and computes the
    fused loss inside of ``head``, the output layer of a model that ``liger_like.patch`` has patched, so that what is
    hooked to it (FSDP2, say) acts. The head must be a part of the last stage's module, where zero-bubble schedules look
    for weights. ``options`` are those of ``fused_linear_cross_entropy``: a model that scales its logits or caps them
    needs ``logit_scale`` or ``softcap``.

    ``num_items`` is the number of labels that count in all micro-batches of all processes that share a step, an int or
    a tensor, or what else the sum shall be divided by. Micro-batches then weigh as many labels as they have, their
    losses add up to that of the batch, and the schedule must not divide: give it ``scale_grads=False``. A step whose
    number differs passes it on: ``schedule.step(..., loss_kwargs={"num_items": n})``. Without any, each micro-batch's
    loss is the mean over its own labels, of which ``scale_grads=True`` takes the mean.

    A schedule without a ``loss_fn`` runs no backward: the other stages need one, too, which is not called.

    Raises TypeError if ``head`` is no such layer, and as ``fused_linear_cross_entropy`` does for wrong ``options``.
    """
    if not hasattr(type(head), "_kind"):
        raise TypeError(
            f"head must be the output layer of a model that liger_like.patch has patched, got {type(head).__name__}"
        )
    elsewhere = "class_weight", "num_items"  # the first is checked by the loss, beside the head
    check_options(fused_linear_cross_entropy, {n: v for n, v in options.items() if n != "class_weight"}, *elsewhere)
    number = num_items

    def loss_fn(hidden: Tensor, target: Tensor, num_items: int | Tensor | None = number) -> Tensor:
        return loss_of(head, hidden, {**options, "target": target, "num_items": num_items})

    return loss_fn
