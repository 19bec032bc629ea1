"""Let models whose attention is patched generate by our kernels: a subclass of the model's class overrides methods.

``generate`` gets a dynamic cache that grows in place. Static caches need no more than the masks of ``attention``.

``generate_batch`` and TRL's rollouts by it start at ``init_continuous_batching``. transformers chooses what runs by the
name of the attention in the config, so the model's view of its config has another name while a manager runs.
"""

import contextlib
import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from liger_like.patches import NAME, latents, paged
from liger_like.runtime.support import unhooked

PATTERN, VARIANT = "generation", "paged cache"
CACHES = ("past_key_values", "cache")  # names that transformers gives a cache
TABLE_SETTINGS = "max_blocks_per_request", "decode_compile_config", "use_cuda_graph"
WORK = "warmup", "_run_generation_loop"  # methods of a manager that create its cache and run the model
KEPT = "_cached_continuous_batching_manager"  # attribute of a model that keeps a manager for later batches
_managers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that read and write the cache by our ops
_users: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by model: how many need the other name now
_naming = threading.Lock()


def generates(module: nn.Module) -> bool:
    """Return True if ``module`` has transformers' methods of generation."""
    return hasattr(type(module), "init_continuous_batching") and hasattr(module, "config")


def is_hooked(cls: type[Any]) -> bool:
    """Return True if ``cls`` has the methods of ``hook``, perhaps beneath another library's subclass."""
    return hasattr(cls, "_liger_like_below")


def below(cls: type[Any]) -> type[Any]:
    """Return the class that ``hook`` put its subclass on, or ``cls`` if it is no such subclass."""
    return vars(cls).get("_liger_like_below", cls)  # type: ignore[no-any-return]


def hook(module: Any) -> None:
    """Override the methods of generation of ``module``; do nothing where that is done."""
    if not is_hooked(type(module)):
        cls: Any = type(module)
        module.__class__ = _subclass(cls)


def unhook(module: Any) -> None:
    """Restore the methods, and end a kept manager whose cache only our ops can read."""
    if is_hooked(type(module)):
        _end_kept(module, ours=True)
        module.__class__ = below(type(module))


def _end_kept(model: Any, ours: bool) -> None:
    """Drop the manager that ``model`` keeps: one of ours if ``ours``, else one of transformers."""
    kept = vars(model).get(KEPT)
    if kept is not None and (kept in _managers) == ours:
        model.destroy_cached_continuous_batching_manager()


@functools.cache
def _subclass(cls: Any) -> type[Any]:
    """Return a subclass of ``cls`` with the same name, whose instances generate by our kernels."""

    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Return a manager as transformers does, for which our ops read and write the cache."""
        arguments = generation_config, continuous_batching_config, workload_hints
        start = functools.partial(cls.init_continuous_batching, self)
        ours = all(config._attn_implementation in (NAME, paged.name()) for config in _configs(self))
        _end_kept(self, ours=not ours)
        return _start(self, start, *arguments) if ours else start(*arguments)

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Add a cache to ``model_kwargs`` as transformers does; a dynamic one then grows in place.

        Its steps may replay a graph: the config, a copy of this call, then has them in place of torch.compile's.
        """
        from liger_like.patches import decode_graphs, growing_cache  # these import transformers

        given = {name for name in CACHES if model_kwargs.get(name) is not None}
        cls._prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        for name in ({*CACHES} & model_kwargs.keys()) - given:
            growing_cache.let_grow(model_kwargs[name])
            if step := decode_graphs.step_for(generation_config, generation_mode, model_kwargs[name]):
                generation_config.compile_config = step

    def _valid_auto_compile_criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Return True if the decode steps of a call take another function than the forward."""
        is_ours = _is_step(generation_config.compile_config)
        return is_ours or cls._valid_auto_compile_criteria(self, model_kwargs, generation_config)

    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        """Return that function."""
        if _is_step(compile_config):
            return functools.partial(compile_config, self)
        return cls.get_compiled_call(self, compile_config)

    overridden = (
        init_continuous_batching,
        _prepare_cache_for_generation,
        _valid_auto_compile_criteria,
        get_compiled_call,
    )
    own = (
        {each.__name__: each for each in overridden}
        if hasattr(cls, init_continuous_batching.__name__)
        else latents.methods(cls, {NAME, paged.name()})
    )
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {"_liger_like_below": cls, "__reduce_ex__": _reduce_ex}
    body |= own
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Reduce as the class below does: pickle finds a class by its name, which finds the original."""
    make, args, *rest = type(self)._liger_like_below.__reduce_ex__(self, protocol)
    return _instance, (make, tuple(below(arg) if isinstance(arg, type) else arg for arg in args)), *rest


def _instance(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    module = make(*args)
    hook(module)
    return module


def _is_step(compile_config: Any) -> bool:
    from liger_like.patches.decode_graphs import DecodeStep  # imports transformers

    return isinstance(compile_config, DecodeStep)


def text_config(model: Any) -> Any:
    """Return the config of the part of ``model`` that writes text, or that of ``model``: the part has a module."""
    text = model.config.get_text_config(decoder=True)  # for some models it is a new copy
    return text if any(vars(part).get("config") is text for part in model.modules()) else model.config


def _configs(model: Any) -> list[Any]:
    """Return the config of ``model``, and that of its text part if that is another."""
    text = text_config(model)
    return [model.config] if text is model.config else [model.config, text]


def _rename(model: Any, name: str) -> None:
    """Set the name of the attention where it is one of ours; other parts of the model keep theirs."""
    for config in _configs(model):
        if config._attn_implementation in (NAME, paged.name()):
            config._attn_implementation_internal = name


@contextlib.contextmanager
def _paged(model: Any) -> Iterator[None]:
    """Let the config of ``model`` name the attention with pages until the last of these contexts ends."""
    with _naming:
        _users[model] = _users.get(model, 0) + 1
        _rename(model, paged.name())
    try:
        yield
    finally:
        with _naming:
            _users[model] -= 1
            if not _users[model]:
                _rename(model, NAME)


def _has_windows(config: Any) -> bool:
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    groups: Any = group_layers_by_attn_type(config)
    return "sliding_attention" in (groups[1] if isinstance(groups, tuple) else groups)


def _start(model: Any, start: Callable[..., Any], generation_config: Any, asked: Any, hints: Any) -> Any:
    """Return the manager that ``start`` makes, for which our attention runs, with block tables for decoding.

    transformers makes tables only for the functions of flash-attention, and has none for layers with windows. The
    tables have as many pages as transformers would choose.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import initialization

    half = _half_row_of_latents(model)
    asked = asked or getattr(generation_config, "continuous_batching_config", None) or ContinuousBatchingConfig()
    asked, resolved = copy.deepcopy(asked), copy.deepcopy(asked)
    initialization.resolve_using_hints(resolved, hints)
    initialization.resolve_without_hints(resolved)
    tables = resolved.max_blocks_per_request and not _has_windows(text_config(model))
    asked.max_blocks_per_request = None  # transformers would warn that it has no tables
    if tables:
        _resolve_compilation(model, asked, resolved)
        asked.decode_compile_config = None  # transformers would warn that it compiles no step without tables
    with _paged(model):
        manager = start(generation_config, asked, hints)
    manager._original_attn_impl = None  # else stop() would restore it
    if manager in _managers:  # it was kept, with its cache
        return manager
    _managers.add(manager)
    if tables:
        settings = manager.continuous_batching_config
        compiled = resolved.decode_compile_config is not None
        for name in TABLE_SETTINGS if compiled else TABLE_SETTINGS[:1]:
            setattr(settings, name, getattr(resolved, name))
    _take_over(manager, model, half)
    return manager


def _take_over(manager: Any, model: Any, half: int) -> None:
    """Let ``manager`` work for ``model`` with our attention and a cache for it, which has keys of ``half`` features."""
    create, step = manager._create_batch_processor, manager._generation_step

    def create_ours() -> Any:
        with _sized(text_config(model), half):
            return _with_our_cache(create(), half)

    def step_of_ours() -> None:
        if model.config._attn_implementation != paged.name():  # another attention would not read the cache
            raise RuntimeError(
                "the attention of the model has changed in continuous batching: call stop() of its manager before that"
            )
        step()

    def named(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _paged(model):
                return method(*args, **kwargs)

        return run

    manager._create_batch_processor, manager._generation_step = create_ours, step_of_ours
    for name in WORK:
        setattr(manager, name, named(getattr(manager, name)))


def _resolve_compilation(model: Any, asked: Any, resolved: Any) -> None:
    """Decide as transformers does with block tables: which steps are compiled, and which of them are CUDA graphs."""
    from transformers.generation.continuous_batching import initialization

    fallback = getattr(text_config(model), "compile_config", None)
    initialization.resolve_compile_configs(resolved, fallback, is_flash_attn=True, decode_fast_path_available=True)
    if resolved.decode_compile_config is not None:
        graphs = bool(asked.q_padding_interval_size or asked.kv_padding_interval_size)
        initialization.decide_use_cuda_graphs(resolved, is_attn_mask_needed=False, cuda_graph_requested=graphs)


def _half_row_of_latents(model: Any) -> int:
    """Return the width of a key whose key and value have room for latents and rotated features; 0: they are no latents.

    Raises ValueError if a layer needs a call of ``kv_b_proj``: a cache of keys would not fit, either. Raises ValueError
    for windows: transformers' cache of a window forgets tokens that attention without a window sees, and is a ring,
    which latents would be written to before they are read.
    """
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if is_hooked(type(m)) and not generates(m)}
    for name, layer in layers.items():
        if not latents.is_plain(layer):
            raise ValueError(
                f"{name}.kv_b_proj must be an nn.Linear without bias, adapter, quantisation and hooks in continuous"
                f" batching, which holds latents; got {_described(layer.kv_b_proj)}"
            )
    config = text_config(model)
    if layers and _has_windows(config):
        kinds, window = (getattr(config, name, None) for name in ("layer_types", "sliding_window"))
        raise ValueError(
            "config must have full attention in each layer in continuous batching of latents, which sees all tokens;"
            f" got layer_types {kinds} and sliding_window {window}"
        )
    return max((-(-(m.kv_b_proj.in_features + m.qk_rope_head_dim) // 2) for m in layers.values()), default=0)


def _described(linear: nn.Module) -> str:
    """Return the class of ``linear``, or what else keeps its weight from being all that it computes with."""
    cls: Any = type(linear)
    if cls is not nn.Linear:  # an adapter's class may be called Linear, too
        return f"{cls.__module__}.{cls.__qualname__}"
    weight: Any = type(linear.weight)
    found = {
        "a bias": linear.bias is not None,
        f"a weight of the class {weight.__name__}": weight not in (Tensor, nn.Parameter),
        "hooks, or a forward of its own": not unhooked(linear),
    }
    return "an nn.Linear with " + " and ".join(what for what, there in found.items() if there)


@contextlib.contextmanager
def _sized(config: Any, half: int) -> Iterator[None]:
    """Let ``config`` say that keys have one head of ``half`` features, unless that is 0, while a cache is made."""
    sizes = {"num_key_value_heads": 1, "head_dim": half} if half else {}
    before = {name: getattr(config, name) for name in sizes if hasattr(config, name)}
    try:
        for name, size in sizes.items():
            setattr(config, name, size)
        yield
    finally:
        for name in sizes:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


def _with_our_cache(processor: Any, half: int) -> Any:
    """Return ``processor``, whose cache passes itself on to our attention; a kept cache has keys of prompts."""
    cls: Any = type(processor.cache)
    if (ours := paged.cache_class(cls)) is not cls:
        if half:
            paged.join_rows(processor)
        paged.clear(processor.cache)
        processor.cache.__class__ = ours
    return processor
