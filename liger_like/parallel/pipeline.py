"""Pipeline parallelism: the fused loss on the last stage of a schedule of ``torch.distributed.pipelining``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_like.nn import check_options
from liger_like.ops import fused_linear_cross_entropy
from liger_like.patches.heads import loss_of


def pipeline_loss(head: nn.Module, num_items: int | Tensor | None = None, **options: Any) -> Callable[..., Tensor]:
    """Return the ``loss_fn(hidden, target)`` of a schedule whose last stage returns hidden states [..., H], not logits.

    ``target`` [...] is the token to predict at each position (labels already shifted). ``head`` is the output layer of
    a model that ``liger_like.patch`` has patched. The fused loss is computed in a call of ``head``, so its hooks run
    (those of FSDP2, for example). The head must be a part of the last stage's module, where zero-bubble schedules look
    for weights. ``options`` are those of ``fused_linear_cross_entropy``; a model that scales or caps its logits needs
    ``logit_scale`` or ``softcap``.

    ``num_items``, an int or a tensor, divides the sum of the losses: the number of labels that are not ignored in all
    micro-batches of all processes of a step. The losses of the micro-batches then add up to the batch's loss, and the
    schedule must not divide them: give it ``scale_grads=False``. For a number that changes with the step use
    ``schedule.step(..., loss_kwargs={"num_items": n})``. Without ``num_items`` the loss of a micro-batch is the mean
    over its own labels, and ``scale_grads=True`` averages over micro-batches.

    A schedule without a ``loss_fn`` runs no backward: give one to the other stages, too. They do not call it.

    Raises TypeError if ``head`` is not such a layer, and as ``fused_linear_cross_entropy`` for invalid ``options``.
    """
    if not hasattr(type(head), "_kind"):
        raise TypeError(
            f"head must be the output layer of a model that liger_like.patch has patched, got {type(head).__name__}"
        )
    elsewhere = "class_weight", "num_items"  # the loss checks class_weight against the head
    check_options(fused_linear_cross_entropy, {n: v for n, v in options.items() if n != "class_weight"}, *elsewhere)
    number = num_items

    def loss_fn(hidden: Tensor, target: Tensor, num_items: int | Tensor | None = number) -> Tensor:
        return loss_of(head, hidden, {**options, "target": target, "num_items": num_items})

    return loss_fn
