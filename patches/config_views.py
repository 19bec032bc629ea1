"""Make views of transformers configs: a view names another attention implementation and shares all else."""

import functools
import types
from typing import Any

from torch import nn

from liger_like.patches import attention


def give_views(model: nn.Module, chosen: dict[int, bool]) -> None:
    """Give the modules of ``model`` views of their configs.

    ``chosen`` says by id of a config whether its view names liger_like's attention. A config gets a view if it is
    chosen or if one of its sub-configs gets a view.
    """
    views: dict[int, Any] = {}

    def view_of(config: Any) -> Any:
        if id(config) not in views:
            parts = {name: getattr(config, name, None) for name in config.sub_configs}
            own = {name: part if part is None else view_of(part) for name, part in parts.items()}
            has_views = any(own[name] is not part for name, part in parts.items())
            views[id(config)] = config
            if has_views or chosen.get(id(config)):
                kept = getattr(config, "_liger_like_implementation", None)
                named = attention.NAME if chosen.get(id(config), has_views) else kept
                views[id(config)] = _view(config, named, own)
        return views[id(config)]

    for module in model.modules():
        if hasattr(config := vars(module).get("config"), "_attn_implementation_internal"):
            module.config = view_of(config)


def take_views(model: nn.Module) -> None:
    """Restore the original configs of the modules of ``model``."""
    for module in model.modules():
        original = getattr(vars(module).get("config"), "_liger_like_original", None)
        if original is not None:
            module.config = original


def _view(config: Any, implementation: str | None, parts: dict[str, Any]) -> Any:
    """Return a config that shares all attributes of ``config`` except its sub-configs and, if given, implementation."""
    attention.register()  # unpickling in another process calls this function before anything registers the name
    original = getattr(config, "_liger_like_original", config)
    cls: Any = type(original)
    view: Any = object.__new__(_view_class(cls))
    object.__setattr__(view, "__dict__", vars(original))
    view._liger_like_original, view._liger_like_implementation = original, implementation
    for name, part in parts.items():
        setattr(view, name, part)
    return view


@functools.cache
def _view_class(cls: Any) -> type[Any]:
    """Return a subclass of a config's class for views, which are constructed and copied like instances of ``cls``.

    The slots hold a view's own values and take precedence over the shared attributes.
    """
    parts = tuple(cls.sub_configs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        own = {name: getattr(self, name) for name in parts}
        return _view, (self._liger_like_original, self._liger_like_implementation, own)

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    def implementation(self: Any) -> Any:
        return self._liger_like_implementation or vars(self)["_attn_implementation_internal"]

    def choose(self: Any, name: Any) -> None:
        # the user's choice must outlive the view, so it is written to the shared attributes
        self._liger_like_implementation = attention.NAME if name == attention.NAME else None
        if name != attention.NAME:
            vars(self)["_attn_implementation_internal"] = name

    # the view does not pretend to be a ``cls`` by its ``__class__``: torch.compile looks there for data descriptors
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__new__": new}
    body |= {"_attn_implementation_internal": property(implementation, choose), "__reduce_ex__": reduce_ex}
    body |= {"__slots__": ("_liger_like_original", "_liger_like_implementation", *parts)}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
