"""Decode steps of ``generate`` as a CUDA graph: where nothing but tensors of one GPU changes from step to step.

A graph repeats the numbers that Python has passed to kernels. So a step is captured with static layers in place of the
dynamic ones of the cache: they have the same memory, whose size is fixed, and the number of its tokens is a tensor.
Each call of ``generate`` makes its own graph, which lives until the call ends: weights, adapters and sizes may change
between two calls, and nothing has to be noticed then.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from liger_like.graphs import ADAPTERS, LAUNCHES, PLAIN
from liger_like.patches import NAME, packed_lora, unpacked
from liger_like.patches.generation import CACHES, text_config
from liger_like.patches.growing_cache import GrowingLayer
from liger_like.runtime.support import HOOKS, as_in_graph, is_local

DEVICES = {"cuda"}
DRAWS_APART = torch.__version__ >= "2.13"  # older versions let no thread draw random numbers during a capture
DEBUGGING = "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"  # no graph can be captured then
MODES = "greedy_search", "sample"  # beams move in the cache, and assistants take tokens back
MIN_STEPS = 16  # fewer steps may take less time than a capture
ROOM = 256  # tokens, or half of the cache if that is more: then few steps need another graph
FREE = 10  # a graph leaves a tenth of the memory of the GPU free
CHANGING = {"input_ids", "position_ids", "attention_mask"}
CODE = "torch.nn.modules.", "transformers.", "peft.tuners.lora.", "liger_like."  # this does not read or count by itself
# modules of hooks that do nothing in a step but record hidden states: on the device
HARMLESS = {"transformers.utils.output_capturing", unpacked.__name__}
COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}
INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# these make tensors of numbers of the host, by copies that no dispatch mode sees
MADE = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.Tensor.new}
_one_at_a_time = threading.Lock()  # captures; and ``as_in_graph`` is not for several threads


class DecodeStep:
    """Forward of one new token per sequence for the steps of one call of ``generate``.

    The first steps are launched, then one is captured, and later ones replay it. They start anew when the memory of the
    cache is full. Any step that differs from the captured one in more than the values of tensors is an ordinary
    forward. So are all steps of a model that reads its tensors on the host, and those after a change of the model.
    """

    def __init__(self, cache: Any, limit: int) -> None:
        """Take the ``cache`` that was made for the call, and the most tokens of a sequence."""
        self._cache, self._limit = cache, limit
        self._buffers: _Buffers | None = None
        self._of_inputs: list[Any] = []  # what a graph depends on, when one was first considered
        self._of_model: list[Any] = []
        self._weights: list[Tensor] = []  # keep their memory: a replay begins before the host sees that others came
        self._read_first: list[Any] = []
        self._is_fit: bool | None = None  # None: nobody has looked
        self._launched = 0
        self._replay: Callable[[], Any] | None = None

    def __call__(self, model: nn.Module, **inputs: Any) -> Any:
        """Return the output of ``model`` for ``inputs``, as ``model(**inputs)`` would."""
        names = [name for name in CACHES if inputs.get(name) is self._cache]
        if not names or not self._can_replay(model, inputs):
            return model(**inputs)
        if self._buffers is None or self._buffers.is_full():
            self._replay, self._launched = None, 0  # frees the memory of the graph
            self._buffers = _Buffers(self._cache, inputs, self._limit)
        self._buffers.fill(inputs)
        (name,) = names
        if self._replay is not None:
            results = self._replay()
            self._is_fit = _setup(model) == self._of_model  # the host looks while the GPU works
            if not self._is_fit:
                return model(**inputs)
        else:
            with _one_at_a_time:
                results = self._launch(model, inputs | self._buffers.inputs | {name: self._buffers.cache})
        for layer in self._cache.layers:
            layer.extend()
        made = {
            key: self._cache if value is self._buffers.cache else tree_map_only(Tensor, torch.clone, value)
            for key, value in results.items()
        }
        return type(results)(**made)

    def _launch(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the results of a step by its launches, or of the graph where there were enough of them."""
        device = inputs["input_ids"].device
        if self._launched >= LAUNCHES and _can_capture(device.type):  # other threads come and go
            self._replay = capture(lambda: model(**inputs), device)
            return self._replay()
        self._launched += 1
        with as_in_graph():  # the kernels that will be captured
            if self._launched > 1:
                return model(**inputs)
            with _Numbers() as numbers, _Watch() as watch:  # type: ignore[no-untyped-call]
                results = model(**inputs)
        self._is_fit = not (watch.reads or numbers.made)
        return results

    def _can_replay(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Return True if a graph can hold this step. A model that differs may be seen only once a replay has begun."""
        ids = inputs.get("input_ids")  # the chunks of a prompt come here, too, and may be embeddings
        if self._is_fit is False:
            self._replay, self._buffers, self._weights = None, None, []
        if self._is_fit is False or not isinstance(ids, Tensor) or ids.shape[-1] != 1:
            return False
        layers = self._cache.layers
        if any(type(layer) is not GrowingLayer or not layer.is_initialized for layer in layers):
            return False
        of_inputs = _setup_of(inputs)
        if self._is_fit is None:
            self._is_fit = self._limit - layers[0].get_seq_length() > MIN_STEPS and is_fit(model, inputs)
            if self._is_fit:
                self._of_inputs, self._of_model = of_inputs, _setup(model)
                self._weights = [t.detach() for t in (*model.parameters(), *model.buffers())]
                self._read_first = _read_first(model, self._weights)
        elif self._replay is None or self._buffers is None or self._buffers.is_full():
            self._is_fit = _setup(model) == self._of_model
        else:
            self._is_fit = _read_first(model, self._weights) == self._read_first
        if not self._is_fit or of_inputs != self._of_inputs or len({layer.get_seq_length() for layer in layers}) > 1:
            return False
        if self._buffers is not None and not self._buffers.is_full():
            return self._buffers.is_memory_of(layers)
        self._is_fit = has_room(layers, self._limit)
        return self._is_fit


class FixedLayer(StaticLayer):
    """Static layer in the memory of a ``GrowingLayer``; the number of its tokens is a tensor []."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: tuple[Tensor, ...], length: Tensor) -> None:
        super().__init__(max_cache_len=rows[0].shape[2])  # type: ignore[no-untyped-call]
        self.keys, self.values = rows
        self.cumulative_length, self.device = length, length.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token, and return all of the memory."""
        place = self.cumulative_length.view(1)
        self.keys.index_copy_(2, place, key_states)
        self.values.index_copy_(2, place, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values


class _Buffers:
    """Tensors at fixed addresses that a step reads and changes: its inputs and its cache."""

    def __init__(self, cache: Any, inputs: dict[str, Any], limit: int) -> None:
        self._layers = cache.layers
        self._tokens = _tokens(self._layers, limit)
        self._rows = [layer.reserve(self._tokens) for layer in self._layers]
        self._lengths = torch.zeros(len(self._layers), dtype=torch.int64, device=inputs["input_ids"].device)
        self.inputs = {name: given.clone() for name, given in inputs.items() if isinstance(given, Tensor)}
        if (mask := self.inputs.get("attention_mask")) is not None:
            self.inputs["attention_mask"] = mask.new_zeros(mask.shape[0], self._tokens)
        rows = [tuple(t[:, :, : self._tokens] for t in each) for each in self._rows]  # there may have been more already
        self.cache = Cache(layers=[FixedLayer(*each) for each in zip(rows, self._lengths, strict=True)])

    def is_full(self) -> bool:
        return self._layers[0].get_seq_length() == self._tokens  # type: ignore[no-any-return]

    def is_memory_of(self, layers: list[Any]) -> bool:
        """Return True if ``layers`` still hold the beginning of the memory."""
        return all(layer.is_in(rows) for layer, rows in zip(layers, self._rows, strict=True))

    def fill(self, inputs: dict[str, Any]) -> None:
        """Copy the ``inputs``; a mask [B, S] shows nothing of the memory behind the cache."""
        self._lengths.fill_(self._layers[0].get_seq_length())
        for name, buffer in self.inputs.items():
            buffer[..., : inputs[name].shape[-1]].copy_(inputs[name])


def step_for(generation_config: Any, mode: Any, cache: Any) -> DecodeStep | None:
    """Return a step for a call of ``generate``, or None if its steps stay as they are.

    ``disable_compile`` is how users of transformers ask for plain steps, and ``compile_config`` for their own.
    """
    asked = generation_config.compile_config is not None or generation_config.disable_compile
    plain = type(cache) is DynamicCache and cache.layers and all(type(t) is GrowingLayer for t in cache.layers)
    if asked or generation_config.is_assistant or mode not in MODES or not plain:
        return None
    return DecodeStep(cache, generation_config.max_length)


def is_fit(model: Any, inputs: dict[str, Any]) -> bool:
    """Return True if a step of ``model`` is code that is known, for one GPU, in plain inference.

    transformers says which of its models need no number on the host. Adapters are those of PEFT's LoRA.
    """
    device = inputs["input_ids"].device
    kind = device.type
    if kind not in DEVICES or not getattr(model, "_can_compile_fullgraph", False):
        return False
    if text_config(model)._attn_implementation != NAME:  # others may need a mask to leave the rest of the memory out
        return False
    if _is_traced_or_changed(kind) or not _can_capture(kind):
        return False
    tensors = [value for name, value in inputs.items() if name in CHANGING and value is not None]
    return (
        all(is_local(t) and t.device == device for t in (*model.parameters(), *model.buffers(), *tensors))
        and all(isinstance(value, PLAIN) for name, value in inputs.items() if name not in (*CHANGING, *CACHES))
        and getattr(inputs.get("attention_mask"), "ndim", 2) == 2
        and not (inputs.get("output_attentions") or model.config.output_attentions)  # they have the size of the memory
        and getattr(model, "hf_quantizer", None) is None
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        and all(map(_is_known, model.modules()))
    )


def _is_traced_or_changed(kind: str) -> bool:
    """Return True if others see the ops of a step, or change them, while Python calls them."""
    return (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled(kind)
        or torch.compiler.is_compiling()
        or _get_current_dispatch_mode() is not None
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    )


def _can_capture(kind: str) -> bool:
    """Return True if this process can capture graphs, and other threads need not wait for that."""
    here = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not here]
    return (DRAWS_APART or all(type(thread).__module__.startswith("tqdm.") for thread in others)) and (
        kind != "cuda"
        or (
            not torch.version.hip
            and not any(os.environ.get(name, "0") != "0" for name in DEBUGGING)
            and torch.cuda.get_allocator_backend() == "native"
            and not torch.cuda.is_current_stream_capturing()
        )
    )


def _is_known(module: nn.Module) -> bool:
    cls: Any = type(module)
    code = f"{cls.__module__}.", f"{cls.forward.__module__}."
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
    return (
        all(name.startswith(CODE) for name in code)
        and "forward" not in module.__dict__
        and not hasattr(cls, packed_lora.METHOD)  # changes the class of another module within its forward
        and all(hook.__module__ in HARMLESS for hook in hooks)
        and not module.training
        and module._compiled_call_impl is None
    )


def _setup_of(inputs: dict[str, Any]) -> list[Any]:
    """Return what a graph depends on in the ``inputs``, but for values of tensors."""
    setup: list[Any] = [torch.is_inference_mode_enabled()]
    for name, given in inputs.items():
        if name in CHANGING and isinstance(given, Tensor):
            setup += (name, given.shape[:-1], given.dtype, given.device, name == "attention_mask" or given.shape[-1])
        elif name not in CACHES:
            setup += (name, given if isinstance(given, PLAIN) else id(given))
    return setup


def _setup(model: nn.Module) -> list[Any]:
    """Return what a graph depends on in the ``model``, but for values of tensors."""
    hooks_of_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    setup: list[Any] = [*map(len, hooks_of_all)]
    stack: list[Any] = [model]
    while stack:
        module = stack.pop()
        own = module.__dict__
        hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"]), "forward" in own
        setup += (module.__class__, own["training"], *hooks)
        if "merged_adapters" in own:
            setup += (repr(own.get(name)) for name in ADAPTERS)
        for tensors in (own["_parameters"], own["_buffers"]):
            for t in tensors.values():
                if t is not None:
                    setup.append(t.data_ptr())
        stack.extend(child for child in own["_modules"].values() if child is not None)
    return setup


def _read_first(model: Any, weights: list[Tensor]) -> list[Any]:
    """Return what must be as it was before a replay begins: the rows that tokens index, and memory of ``weights``."""
    embedding = model.get_input_embeddings()
    return [embedding, *(t.data_ptr() for t in (*embedding.parameters(), *weights))]


def _tokens(layers: list[Any], limit: int) -> int:
    """Return the tokens that the memory of ``layers`` gets: a multiple of 64, since kernels depend on such sizes."""
    length: int = layers[0].get_seq_length()
    tokens = max(length + ROOM, length * 3 // 2)
    return -(-(min(tokens, limit) if limit > length else tokens) // 64) * 64


def has_room(layers: list[Any], limit: int) -> bool:
    """Return True if the GPU has memory for larger ``layers`` and for a graph."""
    free, total = free_memory(layers[0].keys.device)
    tokens = _tokens(layers, limit)
    grown: int = sum(t.nbytes // t.shape[2] * tokens for layer in layers for t in (layer.keys, layer.values))
    return free - grown >= total // FREE


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that torch can still allocate on a GPU, and those that the GPU has."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def capture(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the kernels of ``work`` again, and returns results that its next call overwrites.

    torch first releases memory that it keeps, such as that of an earlier graph. The workspaces of cuBLAS are part of
    the graph, so that two graphs on two streams do not share them, and of its memory, which ends with the graph.
    """
    graph = torch.cuda.CUDAGraph()
    torch._C._cuda_clearCublasWorkspaces()
    with (
        torch.cuda.stream(torch.cuda.current_stream(device)),  # torch.cuda.graph restores it only after a success
        # "thread_local": other threads may call CUDA meanwhile
        torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"),
    ):
        results = work()
    torch._C._cuda_clearCublasWorkspaces()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Numbers(TorchFunctionMode):
    """Note in ``made`` whether the host makes a tensor of its own numbers on a device."""

    made = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.made |= function in MADE and result.device.type != "cpu"
        return result


_whole: set[Any] = set()  # ops that have no parts


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of the arguments or results of an op; some are in lists or tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note in ``reads`` whether the host needs the values of tensors, or gives values of its own to the device."""

    reads = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op not in _whole:
            with self:  # inference mode does not take ops apart, which read, before it calls this
                results = op.decompose(*args, **kwargs)
            if results is not NotImplemented:
                return results
            _whole.add(op)
        results = op(*args, **kwargs)
        packet = getattr(op, "overloadpacket", None)
        tensors = [*_tensors((*args, *kwargs.values(), results))]
        if packet in INDEXED:
            self.reads |= any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
        else:
            self.reads |= not READS.isdisjoint(getattr(op, "tags", ()))
        self.reads |= len({t.device for t in tensors if t.dim() or packet in COPIES}) > 1
        return results
