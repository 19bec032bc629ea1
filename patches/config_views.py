"""Make views of transformers configs: a view names other implementations and shares all else."""

import copy
import functools
import types
from typing import Any

from torch import nn

from liger_like.patches import NAME, attention, experts, paged

ATTRIBUTES = tuple(cls.implementation for cls in (attention.Attention, experts.Experts))


def give_views(model: nn.Module, chosen: dict[str, dict[int, bool]]) -> None:
    """Give the modules of ``model`` views of their configs.

    ``chosen`` says by attribute of a config, and by id of the config, whether its view names liger_like there. A config
    gets a view if it is chosen or if one of its sub-configs gets a view.
    """
    views: dict[int, Any] = {}

    def view_of(config: Any) -> Any:
        if id(config) not in views:
            parts = {name: getattr(config, name, None) for name in config.sub_configs}
            own = {name: part if part is None else view_of(part) for name, part in parts.items()}
            below = {attribute for part in own.values() for attribute in _named(part)}
            named = {a for a, configs in chosen.items() if configs.get(id(config), a in below)} | {*_named(config)}
            changed = named > {*_named(config)} or any(own[name] is not part for name, part in parts.items())
            views[id(config)] = _view(config, dict.fromkeys(sorted(named), NAME), own) if changed else config
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


def _named(config: Any) -> tuple[str, ...]:
    """Return the attributes for which a view has a name of liger_like; empty for any other config."""
    return (*getattr(config, "_liger_like_named", ()),)


def _view(config: Any, named: dict[str, str], parts: dict[str, Any]) -> Any:
    """Return a config that shares all attributes of ``config`` except its sub-configs and those that are ``named``."""
    attention.register()  # unpickling in another process calls this function before anything registers the name
    experts.register()
    paged.register()
    original = getattr(config, "_liger_like_original", config)
    cls: Any = type(original)
    view: Any = object.__new__(_view_class(cls))
    object.__setattr__(view, "__dict__", vars(original))
    view._liger_like_original, view._liger_like_named = original, named
    for name, part in parts.items():
        setattr(view, name, part)
    return view


def _implementation(attribute: str) -> property:
    def implementation(self: Any) -> Any:
        if attribute in self._liger_like_named:
            return self._liger_like_named[attribute]
        if attribute not in vars(self):
            raise AttributeError(attribute)
        return vars(self)[attribute]

    def choose(self: Any, name: Any) -> None:
        # the user's choice must outlive the view, so it is written to the shared attributes
        own = name in (NAME, paged.name())
        others = {each: named for each, named in self._liger_like_named.items() if each != attribute}
        self._liger_like_named = others | {attribute: name} if own else others
        if not own:
            vars(self)[attribute] = name

    return property(implementation, choose)


@functools.cache
def _view_class(cls: Any) -> type[Any]:
    """Return a subclass of a config's class for views, which are constructed and copied like instances of ``cls``.

    The slots hold a view's own values and take precedence over the shared attributes.
    """
    parts = tuple(cls.sub_configs)

    def own(self: Any) -> dict[str, Any]:
        return {name: getattr(self, name) for name in parts}

    def reduce_ex(self: Any, protocol: Any) -> Any:
        return _view, (self._liger_like_original, self._liger_like_named, own(self))

    def shallow(self: Any) -> Any:  # else the copy would share its attributes with the original config
        return _view(copy.copy(self._liger_like_original), self._liger_like_named, own(self))

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    # the view does not pretend to be a ``cls`` by its ``__class__``: torch.compile looks there for data descriptors
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__new__": new, "__reduce_ex__": reduce_ex}
    body["__copy__"] = shallow
    body |= {attribute: _implementation(attribute) for attribute in ATTRIBUTES}
    body |= {"__slots__": ("_liger_like_original", "_liger_like_named", *parts)}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
