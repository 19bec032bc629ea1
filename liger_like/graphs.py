"""A training step as a CUDA graph: forward, backward, clipping and optimizer."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from liger_like.ops.losses.rows import raise_bad_label
from liger_like.runtime.checks import require_positive, require_type
from liger_like.runtime.support import as_in_graph

LAUNCHES = 2  # calls of a kind before its capture: they compile kernels, load libraries and make gradients
MANY_KINDS = 50
PART = 1 << 24  # numbers of weights whose update starts together, beside the backward of others
SEPARATE = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW  # these update each weight by its gradient alone
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
# by which PEFT's layers choose their code, and by which they scale
ADAPTERS = ("merged_adapters", "_disable_adapters", "_active_adapter", "scaling")
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


class _Captured(NamedTuple):
    """A graph, the tensors that it reads its inputs from, and those that it writes its results to."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any


class GraphedStep:
    """Training step that runs as one CUDA graph: forward, backward, clipping and optimizer.

    ``step(**batch)`` calls ``model(**batch)``, which returns a loss [] or an output with a ``loss``. It returns the
    loss [], detached. ``step.accumulate(**batch)`` only adds the gradients of a micro-batch; the next ``step(**batch)``
    adds its own and updates. Gradients are None after an update. ``max_norm``: clip the norm of all gradients as
    ``torch.nn.utils.clip_grad_norm_`` does; ``step.grad_norm`` [] is the norm before.

    The first calls of each kind are ordinary steps. Then a call captures the step, without running it, and replays the
    graph, as do all later calls of that kind. These make a kind: shapes and dtypes of the tensors, values of the other
    arguments, autocast, classes and training mode of the modules, active adapters, and ``requires_grad``, addresses and
    shapes of weights. For a call that updates, ``max_norm``, the addresses of the optimizer's state and its options
    except ``lr`` count, too. A scheduler may change ``lr`` at any time, and dropout draws new numbers in each replay.
    The graphs share one memory pool. Without a GPU every call is an ordinary step.

    Raises TypeError or ValueError for a model, optimizer or argument that no graph can hold, and RuntimeError if the
    capture fails, for example where the model waits for the GPU. The weights are then unchanged, the gradients None.

    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    >>> step = liger_like.GraphedStep(model, optimizer, max_norm=1.0)
    >>> for batch in batches:
    ...     loss = step(**batch)
    ...     scheduler.step()
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> None:
        require_type("model", model, nn.Module)
        require_type("optimizer", optimizer, torch.optim.Optimizer)
        self.model, self.optimizer = model, optimizer
        self.max_norm = None if max_norm is None else require_positive("max_norm", max_norm)
        self.grad_norm: Tensor | None = None
        self.device = _checked_device(model)
        _check_optimizer(optimizer, self.device)
        self._stream: Any = None  # of the captures; without a GPU there are none
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._beside: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._rates: dict[int, Tensor] = {}  # learning rates by group
        self._grads: dict[Tensor, Tensor] = {}  # accumulated gradients by parameter
        self._touched: dict[Any, dict[Tensor, None]] = {}  # by kind: parameters that get a gradient
        self._numbers: dict[Any, int] = {}  # by setup of the model, or of the optimizer
        self._setup: tuple[int, int] = 0, 0  # of the model, of the optimizer
        self._parameters: list[Tensor] = []
        self._launched: Counter[Any] = Counter()
        self._captured: dict[Any, _Captured] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the weights by a batch and the accumulated gradients, and return the batch's loss []."""
        with self._drops_gradients_on_error():
            if any(p.grad is not None for p in self._parameters):
                loss: Tensor = self._accumulate(args, kwargs)
                kind = *self._kind(self._update), tuple(p.grad is not None for p in self._parameters)
                self.grad_norm = self._run(self._update, kind)
            else:
                loss, self.grad_norm = self._run(self._step, self._kind(self._step, args, kwargs), args, kwargs)
            self._drop_gradients()
        return loss

    def accumulate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients of a micro-batch to those of the next update, and return its loss []."""
        with self._drops_gradients_on_error():
            return self._accumulate(args, kwargs)

    def _accumulate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the backward with gradients at addresses that all graphs know."""
        kind = self._kind(self._backward, args, kwargs)
        touched = self._touched.setdefault(kind, {})
        fresh = {p: None for p in touched if p.grad is None}
        for p in fresh:
            p.grad = self._grads[p]
        if fresh:
            torch._foreach_zero_([self._grads[p] for p in fresh])
        before = {p: p.grad._version for p in self._with_gradient()}
        ordinary = self._launched[kind] < LAUNCHES
        loss: Tensor = self._run(self._backward, kind, args, kwargs)
        for p in self._with_gradient():
            if p not in before:
                kept = self._grads.get(p)
                if kept is None or (kept.shape, kept.dtype) != (p.shape, p.dtype):
                    kept = self._grads[p] = p.grad
                p.grad = kept if kept is p.grad else kept.copy_(p.grad)
            if p.grad._version != before.get(p):  # a replay changes no version
                touched[p] = None
            elif ordinary and p in fresh:  # no gradient this time: zeros would let the optimizer update it
                p.grad = None
        return loss

    def _backward(self, *args: Any, **kwargs: Any) -> Tensor:
        torch.clear_autocast_cache()  # a graph casts the weights itself, and leaves none of its casts behind
        loss = _loss(self.model(*args, **kwargs))
        with torch.autocast(self.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache()
        return loss.detach()

    def _update(self) -> Tensor | None:
        norm = None if self.max_norm is None else nn.utils.clip_grad_norm_(self._with_gradient(), self.max_norm)
        self.optimizer.step()
        return norm

    def _step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self._backward(*args, **kwargs), self._update()

    def _step_beside(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Do the work of ``_step`` without clipping; update weights on another stream once they have their gradients.

        The backward's products leave memory bandwidth to the updates. Raises RuntimeError if a weight is needed after
        its update: it gets a second gradient, as from reentrant checkpoints, autograd reads it, or a checkpoint calls a
        module that has it. Not seen: a function in a checkpoint, or a hook, that reads weights of other modules.
        """
        part: dict[Any, None] = {}
        kept: dict[Any, Tensor] = {}  # until both streams join: the allocator does not know that updates read them
        late: list[Tensor] = []

        def update() -> None:
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                self.optimizer.step()
            torch.autograd.graph.increment_version(list(part))  # fused optimizers do not
            for p in part:
                kept[p], p.grad = p.grad, None
            part.clear()

        def add(p: Tensor) -> None:
            if p in kept:
                late.append(p)
            part[p] = None
            if sum(p.numel() for p in part) >= PART:
                update()

        def look(module: nn.Module, _: Any) -> None:
            late.extend(p for p in module.parameters() if p in kept)

        trained: list[Any] = [p for p in self._parameters if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(add) for p in trained]
        hooks.append(register_module_forward_pre_hook(look))
        self._beside.wait_stream(torch.cuda.current_stream())  # it takes part in the capture: the streams can join
        try:
            loss = self._backward(*args, **kwargs)
            update()
        finally:
            for hook in hooks:
                hook.remove()
            torch.cuda.current_stream().wait_stream(self._beside)
        if late:  # raised here, since an error within a backward leaves parts of reentrant ones behind
            raise RuntimeError("a weight is needed after its update")
        return loss, None

    def _run(
        self, work: Callable[..., Any], kind: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the results of ``work``: launched in the first calls of a kind, replayed in later calls."""
        kwargs = kwargs or {}
        if self._stream is None:
            return work(*args, **kwargs)
        with torch.cuda.device(self.device), self._rates_on_device():
            setup = self._setup
            if self._launched[kind] < LAUNCHES:
                if kind not in self._launched and len(self._launched) == MANY_KINDS - 1:
                    warnings.warn(
                        f"liger_like: GraphedStep got {MANY_KINDS} kinds of calls, and replays no kind before its third"
                        " call: pad batches to few lengths, and pass numbers that change as tensors",
                        stacklevel=3,
                    )
                # autograd adds gradients on the stream of the forward: launch on that of the capture
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream), as_in_graph():  # the kernels that will be captured
                    results = work(*args, **kwargs)
                torch.cuda.current_stream().wait_stream(self._stream)
                self._inspect()
                # a launch that made state or a buffer does not count: a capture that fails would leave it unfilled
                self._launched[kind] += self._setup == setup
                return results
            captured = self._captured.get(kind)
            if captured is None:
                captured = self._capture_fastest(work, args, kwargs)
                self._inspect()
                if self._setup == setup:  # else the graph makes the optimizer's state, and must not run again
                    self._captured[kind] = captured
            for static, given in zip(captured.inputs, _tensors(args, kwargs), strict=True):
                static.copy_(given, non_blocking=True)
            captured.graph.replay()
            return tree_map_only(Tensor, torch.clone, captured.results)  # the next replay overwrites them

    def _capture_fastest(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured:
        """Capture a step with updates beside its backward where that works, else with one after the other."""
        if work == self._step and self.max_norm is None and _updates_separately(self.optimizer):
            with suppress(RuntimeError):  # what concerns both is raised below
                return self._capture(self._step_beside, args, kwargs)
            self._drop_gradients()
        return self._capture(work, args, kwargs)

    def _capture(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured:
        _check_state(self.optimizer)
        _check_graphs(self.model)
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        graph = torch.cuda.CUDAGraph()
        # a pool without a graph, since a capture failed or was not kept, cannot be used again
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # torch.cuda.graph restores it only after a success
                # "thread_local": a thread that pins batches may call CUDA meanwhile
                torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
                _waiting_raises(),
            ):
                results = work(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"a step of {type(self.model).__name__} cannot be captured as a CUDA graph; the traceback above shows"
                f" where: {_first(error)}"
            ) from _first(error)
        return _Captured(graph, _tensors(args, kwargs), results)

    def _kind(self, work: Callable[..., Any], *inputs: Any) -> tuple[Any, ...]:
        """Return a key of all that a graph depends on. Raise unless a graph can hold the inputs."""
        paths, tree = tree_flatten_with_path(inputs)
        leaves = tuple((path, self._kind_of(path, leaf)) for path, leaf in paths)
        return work.__name__, self._setup[0] if work == self._backward else self._setup, tree, leaves

    def _kind_of(self, path: tuple[Any, ...], leaf: Any) -> Any:
        name = f"args{path[1]}" if path[0].idx == 0 else path[1].key
        name += keystr(path[2:])
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(f"{name} must be a tensor, a number, a string or None, got {type(leaf).__name__}")
        if not isinstance(leaf, Tensor):
            return type(leaf), leaf
        if leaf.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got a tensor on {leaf.device}")
        if leaf.requires_grad:
            raise ValueError(f"{name} must not require a gradient: a step has no backward beyond its arguments")
        return leaf.shape, leaf.dtype

    def _inspect(self) -> None:
        """Find the parameters, and the numbers of the present setups of the model and of the optimizer."""
        device_type = self.device.type
        model: list[Any] = [torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)]
        optimizer: list[Any] = [self.max_norm]
        parameters: dict[int, Tensor] = {}
        stack: list[nn.Module | None] = [self.model]
        seen: set[int] = set()
        while stack:  # in the order of model.modules(), in half the time
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            model += (type(module), module.training)
            if (config := module.__dict__.get("config")) is not None:  # ``patch`` changes only these entries of it
                model += (getattr(config, name, None) for name in IMPLEMENTATIONS)
            if "merged_adapters" in module.__dict__:
                model += (repr(module.__dict__.get(name)) for name in ADAPTERS)
            for p in module._parameters.values():
                if p is not None:
                    parameters[id(p)] = p
                    model += (p.data_ptr(), p.shape, p.requires_grad)  # a part of a weight keeps the address
            for buffer in module._buffers.values():
                if buffer is not None:
                    model += (buffer.data_ptr(), buffer.shape)
            stack += reversed(module._modules.values())
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                parameters[id(p)] = p
                optimizer.append(p.data_ptr())
            for name, value in group.items():
                if name not in ("params", "lr"):
                    optimizer += (name, value.data_ptr() if isinstance(value, Tensor) else repr(value))
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    optimizer.append(value.data_ptr())
        self._parameters = list(parameters.values())
        self._setup = self._number(model), self._number(optimizer)

    def _number(self, parts: list[Any]) -> int:
        return self._numbers.setdefault(tuple(parts), len(self._numbers))

    def _drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    def _with_gradient(self) -> list[Any]:
        return [p for p in self._parameters if p.grad is not None]

    @contextmanager
    def _drops_gradients_on_error(self) -> Iterator[None]:
        """Check the gradients before the block, and drop them if it raises."""
        self._inspect()
        if any(p.grad is not None and p.grad is not self._grads.get(p) for p in self._parameters):
            raise ValueError("model must have no gradients but those of accumulate(): call model.zero_grad() first")
        try:
            raise_bad_label(self.device)
            yield
        except BaseException:
            self._drop_gradients()
            raise

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Put the learning rates in tensors that the graphs read, so that schedulers may change them."""
        given = [(group, group["lr"]) for group in self.optimizer.param_groups if group.get("lr") is not None]
        for i, (group, lr) in enumerate(given):
            if i not in self._rates:
                self._rates[i] = torch.empty((), device=self.device, dtype=torch.float32)
            group["lr"] = self._rates[i].copy_(lr.reshape(())) if isinstance(lr, Tensor) else self._rates[i].fill_(lr)
        try:
            yield
        finally:
            for group, lr in given:
                group["lr"] = lr


def _tensors(*inputs: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree_flatten_with_path(inputs)[0] if isinstance(leaf, Tensor)]


def _first(error: BaseException) -> BaseException:
    """Return the error that broke a capture: the end of a broken capture raises again."""
    return error.__context__ if isinstance(error, torch.AcceleratorError) and error.__context__ else error


def _loss(output: Any) -> Tensor:
    """Return the loss of a model's output. Raise unless it is a scalar."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(output).__name__} without a loss"
        raise ValueError(f"model must return a loss of shape [], or an output with one (pass labels), got {got}")
    return loss


def _checked_device(model: nn.Module) -> torch.device:
    """Return the device of ``model``. Raise if there are several, or if the model is wrapped or sharded."""
    for module in model.modules():
        for name in (cls.__name__ for cls in type(module).__mro__ if cls.__name__ in WRAPPERS):
            raise ValueError(f"model must be trained by one process and GPU, got {name} around or in it")
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise ValueError("model must be trained by one process and GPU, got DTensors as its parameters")
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1:
        raise ValueError(f"model must have its parameters on one device, got {devices}")
    return torch.device(devices[0])


def _check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    kind = type(optimizer).__name__
    if hasattr(optimizer, "optimizer"):
        raise ValueError(f"optimizer must be torch's own, got {kind} around it: pass optimizer.optimizer")
    if device.type == "cuda" and any(group.get("capturable") is False for group in optimizer.param_groups):
        raise ValueError(f"optimizer must be constructed with capturable=True, got {kind} with capturable=False")


def _updates_separately(optimizer: Any) -> bool:
    """Return True if several steps, each with the gradients of some weights, come to one step with all gradients."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooked = hooked or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    replaced = "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    return type(optimizer) in SEPARATE and not hooked and not replaced


def _check_graphs(model: nn.Module) -> None:
    """Raise if a backward graph is alive: autograd adds gradients on its stream, which no capture may wait for.

    The casts that autocast keeps hold graphs too, even those of a forward without gradients: drop them. After
    an error in a backward, autograd's thread of a GPU holds that graph until it runs another one: run one.
    """
    torch.clear_autocast_cache()
    with torch.enable_grad():
        last = torch.zeros((), device=next(model.parameters()).device, requires_grad=True).clone()
        last.backward()  # type: ignore[no-untyped-call]
    for name, p in model.named_parameters():
        if p.requires_grad:
            for _ in range(2):
                with torch.enable_grad():
                    function: Any = p.view_as(p).grad_fn
                metadata = function.next_functions[0][0].metadata  # of the accumulator, which its graph keeps alive
                if __name__ in metadata:
                    raise ValueError(
                        f"model must have no backward graph when a step is captured, got a graph with {name}: delete"
                        " losses and outputs of earlier forwards, and copies of weights that are not detached"
                    )
                metadata[__name__] = True
                del function, metadata


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer counts on the host: a graph would repeat one count."""
    for state in optimizer.state.values():
        for name, value in state.items():
            counts = isinstance(value, int | float) and not isinstance(value, bool)
            if counts or (isinstance(value, Tensor) and value.device.type == "cpu"):
                kind = type(optimizer).__name__
                raise ValueError(f"optimizer must keep its state on the GPU, got {name!r} of {kind} on the host")


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """Raise where code waits for the GPU, before CUDA does: that would break the capture beyond repair."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is experimental
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
