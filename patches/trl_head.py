"""Let TRL's fused head run our op: a copy of its function with other globals takes its place on the instance.

The copy has TRL's code and closure. No code and no module of TRL changes, and ``unhook`` puts TRL's function back. The
op runs inside the head module, if that is patched, so that hooks which gather its weight run, and adapters count.
"""

import contextlib
import functools
import warnings
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from liger_like.ops.losses.linear_logprobs import TokenOutputs
from liger_like.patches.foreign import replace_forward
from liger_like.patches.heads import hook_in, loss_of, obstacle
from liger_like.patches.rewriting import with_globals
from liger_like.patches.trl_code import (
    NUMBERS,
    StandIn,
    apply,
    fused_forward,
    gathered,
    is_fused,
    refusal,
    stand_in,
    token_numbers,
)

PATTERN = "trl head"


class TokenHead(StandIn):
    """Stand-in for TRL's autograd function that computes the numbers of tokens with the head of ``model``.

    ``options``: further arguments of ``fused_linear_logprobs``.
    """

    def __init__(self, function: FunctionType, model: Any) -> None:
        super().__init__(function)
        self.model, self.options = model, dict[str, Any]()

    def apply(self, *args: Any) -> tuple[Tensor | None, ...]:
        """Return the results of TRL's autograd function."""
        numbers: Any = functools.partial(apply, run=self._run)
        return numbers(*args)  # type: ignore[no-any-return]

    def _run(self, x: Tensor, weight: Any, target: Tensor, bias: Any, **options: Any) -> TokenOutputs:
        head, options = self.model.get_output_embeddings(), {**options, **self.options}
        patched = hasattr(type(head), "_kind")
        if hasattr(head, "base_layer") and (not patched or obstacle(head)):
            raise RuntimeError("the adapters of the head changed after patching: call liger_like.patch again")
        # a deep copy of the model has a weight of its own, and hooks that read logits do not run in TRL's head either
        through = patched and weight is head.weight and not hook_in(head)
        if through:
            numbers: Any = loss_of(head, x, {"op": token_numbers, "target": target, **options})
            return numbers  # type: ignore[no-any-return]
        weight, bias = gathered(weight, bias)
        return token_numbers(x, weight, target, bias, **options)


def obstacle_of(function: FunctionType, model: Any, patched: bool) -> str:
    """Return why TRL's ``function`` on ``model`` is left alone; empty if it is not. ``patched``: lm_head is patched."""
    weight = model.get_output_embeddings().weight
    sharded = not patched and (hasattr(weight, "device_mesh") or hasattr(weight, "ds_id"))
    return refusal(function) or ("its weight is sharded, and lm_head is left alone" if sharded else "")


def hook(model: nn.Module) -> None:
    """Replace TRL's function on the instance ``model`` by a copy that runs our op; do nothing where that is done."""
    function = fused_forward(model)
    if function is not None and stand_in(function) is None:
        replace_forward(model, function, _copied(function, model))


def unhook(model: nn.Module) -> None:
    """Put TRL's function back."""
    function = fused_forward(model)
    copied = stand_in(function)
    if copied is not None:
        copied.function.__wrapped__ = function.__wrapped__  # type: ignore[union-attr]
        replace_forward(model, function, copied.function)


def hooked(model: nn.Module, forward: Any) -> Any:
    """Return ``forward``, or a copy that runs our op if it is TRL's fused head; warn if that has other code."""
    function: Any = getattr(forward, "__func__", None)
    if not is_fused(function) or stand_in(function) is not None:
        return forward
    if reason := refusal(function):
        warnings.warn(f"liger_like: the model's loss does not run in TRL's head: {reason}", stacklevel=3)
        return forward
    return MethodType(_copied(function, model), model)


def _copied(function: FunctionType, model: nn.Module) -> FunctionType:
    """Return a copy of TRL's ``function`` that gathers no weight by itself: the hooks of the head module do so."""
    names = {
        NUMBERS: TokenHead(function, model),
        "DTensor": (),  # isinstance(weight, ()) is False
        "maybe_gather_lm_head_ctx": lambda *parameters: contextlib.nullcontext(),
    }
    copy = with_globals(function, names)
    copy.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]  # the signature that generate looks at
    return copy
