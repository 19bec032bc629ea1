"""Spare models the search for packed sequences in positions that they count themselves.

transformers looks whether a sequence starts anew in the positions, also in those that the model has just counted
from 0. To do so it waits for the GPU as each forward begins. In a graph it cannot wait, and takes all rows for packed.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from liger_like.patches import NAME
from liger_like.patches.attention_source import only_makes_masks
from liger_like.patches.foreign import foreign_decorator, foreign_forward, hook_on

GIVEN = "attention_mask", "position_ids", "past_key_values", "cache"


class Unpacked:
    """Stands for no attention_mask where positions count from 0: then transformers does not look at them."""

    ndim, shape = 4, (0,) * 4  # as those of a Mask


UNPACKED = Unpacked()


def hook(module: nn.Module) -> None:
    """Hook the forward of ``module`` if it makes masks for our attention; do nothing where that is done."""
    named = getattr(vars(module).get("config"), "_attn_implementation", None) == NAME
    if named and before_forward not in module._forward_pre_hooks.values() and _is_known(module):
        module.register_forward_pre_hook(before_forward, with_kwargs=True)


def unhook(module: nn.Module) -> None:
    """Remove the hook, if there is one."""
    for key in [key for key, each in module._forward_pre_hooks.items() if each is before_forward]:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments, with ``UNPACKED`` as attention_mask if they have no mask, no positions and no cache.

    No other code sees it: other hooks might read it, or add positions that are packed.
    """
    if len(args) > 1 or any(kwargs.get(name) is not None for name in GIVEN):
        return args, kwargs
    ours = module.config._attn_implementation == NAME and _is_alone(module)
    return args, kwargs | {"attention_mask": UNPACKED} if ours else kwargs


def _is_alone(module: Any) -> bool:
    """Return True if no other code gets the arguments. In a graph any other hook counts: torch 2.11 traces no more."""
    if not torch.compiler.is_compiling():
        return not hook_on(module) and _is_known(module)
    others = any(map(len, (module._forward_hooks, hooks._global_forward_hooks)))
    bare = "forward" not in module.__dict__ and len(module._forward_pre_hooks) == 1 and not others
    return bare and _makes_masks(type(module))


def _is_known(module: nn.Module) -> bool:
    """Return True if ``module`` runs a forward that only makes masks of its mask, which may change after patching."""
    return not foreign_forward(module) and _makes_masks(type(module))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _makes_masks(cls: Any) -> bool:
    return not foreign_decorator(cls.forward) and only_makes_masks(cls.forward)
