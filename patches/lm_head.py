"""Recogniser that fuses the language-model head with the loss: the logits are never materialised.

While a model trains with labels, its head returns lazy logits. They record what the model's forward does to them: a
bias, a scale, a softcap, a selection of rows. The loss function, transformers' or torch's, turns the record into one
call of the head module that computes the loss from the hidden states, so hooks for sharding and offloading still run.
Any other use of lazy logits materialises them. A head with other hooks returns real logits.
"""

import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812  # as torch has it

from liger_like.patches import NothingToDoError, Recogniser, Trial, UnrecognisedError, original, random_like, where
from liger_like.patches.balance import with_balance
from liger_like.patches.heads import FORWARDS, LINEAR, hook_in, loss_of, obstacle, parts_of, small_head
from liger_like.patches.trl_code import token_numbers
from liger_like.patches.trl_head import hooked

MODEL, BALANCED = "fused loss", ", load balancing"
TOKENS = "liger_like_tokens"  # the keyword by which token_logprobs asks a patched model for numbers of tokens
ScaleAndSoftcap = tuple[float, float | None]
NUMBER = (int, float)


class _Training(threading.local):
    """Thread-local state: the head whose calls return lazy logits. torch.compile cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.head: Any = None  # not of the class: a traced assignment would add a key, which a guard says is missing


_training = _Training()


class LazyLogits:
    """Placeholder for ``head(hidden)`` [..., V] after ``steps``, which are row-wise tensor methods with arguments.

    ``source``: the lazy logits from which this object was made, with the method and arguments that made it.
    ``words``: the size of the last dimension, if the logits were cut to the first words of the vocabulary.
    """

    def __init__(
        self,
        head: nn.Module,
        hidden: Tensor,
        steps: tuple[tuple[str, tuple[Any, ...]], ...] = (),
        source: tuple["LazyLogits", str, tuple[Any, ...]] | None = None,
        words: int | None = None,
    ) -> None:
        self.head, self.hidden, self.steps, self.source = head, hidden, steps, source
        self.words: Any = head.out_features if words is None else words
        self.fused = False
        self.made: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Return the device that the logits would have."""
        return self.hidden.device

    @property
    def shape(self) -> torch.Size:
        """Return the shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.words))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of dimension ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def _then(self, method: str, *args: Any) -> Any:
        if self.made is not None:  # the real logits may have been changed in place
            return getattr(self.made, method)(*args)
        return LazyLogits(self.head, self.hidden, (*self.steps, (method, args)), (self, method, args), self.words)

    def _part(self, hidden: Tensor, words: int, method: str, *args: Any) -> Any:
        if self.made is not None:
            return getattr(self.made, method)(*args)
        return LazyLogits(self.head, hidden, self.steps, (self, method, args), words)

    def float(self) -> Any:
        """Record the cast; the loss is computed in fp32 in any case."""
        return self._then("float")

    def tanh(self) -> Any:
        """Record a tanh, which makes a softcap with the scales around it."""
        return self._then("tanh")

    def contiguous(self) -> Any:
        """Return the lazy logits themselves."""
        return self

    def view(self, *shape: Any) -> Any:
        """Record a view as [rows, V]; any other view materialises the logits."""
        if shape != (-1, self.shape[-1]):
            return self.real().view(*shape)
        return self._part(self.hidden.reshape(-1, self.hidden.shape[-1]), self.words, "view", *shape)

    def __getitem__(self, index: Any) -> Any:
        """Record a selection of rows (slices, a mask) or of the first words; else materialise the logits."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice):
            words = index[1].stop
            if index[1] == slice(words) and isinstance(words, int) and words > 0:
                return self._part(self.hidden, min(words, self.words), "__getitem__", index)
        if isinstance(index, tuple):
            whole = len(index) == len(self.shape) or any(part is ... for part in index)
            whole = whole and isinstance(index[-1], slice) and index[-1] == slice(None)
            of_rows = whole and all(part is ... or isinstance(part, slice) for part in index)
        else:
            of_rows = isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim < len(self.shape)
        return self._part(self.hidden[index], self.words, "__getitem__", index) if of_rows else self.real()[index]

    def __add__(self, other: Any) -> Any:
        """Record a frozen bias [V] as the first step of a head without a bias; else materialise the logits."""
        of_words = isinstance(other, Tensor) and other.numel() == other.shape[-1] == self.shape[-1] and other.ndim < 3
        if of_words and not (self.steps or other.requires_grad or self.head.bias is not None):
            return self._then("__add__", other)
        return self.real() + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self._then("__mul__", other) if isinstance(other, NUMBER) else self.real() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("__truediv__", other) if isinstance(other, NUMBER) else self.real() / other

    def real(self) -> Tensor:
        """Return the materialised logits, computed as in the unpatched model."""
        if self.made is None and self.source is not None:
            source, method, args = self.source
            self.made = getattr(source.real(), method)(*args)
        elif self.made is None:
            self.made = nn.Module.__call__(self.head, self.hidden)
        return self.made

    def scale_and_softcap(self) -> ScaleAndSoftcap | None:
        """Return (s, None) if the steps equal s * z, (s, cap) if they equal cap * tanh(s * z / cap), else None."""
        scale, cap = 1.0, None
        for method, args in self.steps:
            if method == "tanh":
                if cap is not None:
                    return None
                cap = 1.0
            elif method not in ("float", "__add__"):
                factor = args[0] if method == "__mul__" else 1 / args[0]
                scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
        if cap is None:
            return scale, None
        return (scale * cap, cap) if cap > 0 else None

    def loss(self, target: Tensor, **options: Any) -> Any:
        """Return the result of ``fused_linear_cross_entropy``, or of ``options["op"]``, for ``target`` [...].

        Return None if it cannot be fused.
        """
        known, chain = self.scale_and_softcap(), [self]
        while (source := chain[-1].source) is not None:
            chain.append(source[0])
        if known is None or any(logits.made is not None for logits in chain) or target.shape != self.shape[:-1]:
            return None
        for logits in chain:
            logits.fused = True
        options |= {"target": target.to(self.device), "logit_scale": known[0], "softcap": known[1]}
        if self.steps and self.steps[0][0] == "__add__":
            options["bias"] = self.steps[0][1][0].flatten()[: self.words]
        if self.words < self.head.out_features:
            options["words"] = self.words
        return loss_of(self.head, self.hidden, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if function is F.cross_entropy and isinstance(args[0], cls):
            loss = _cross_entropy(*args, **kwargs or {})
            if loss is not None:
                return loss
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.real, (args, kwargs or {}))
        return function(*args, **kwargs)


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute torch's cross_entropy of lazy logits [rows, V] and a label per row; return None for any other call."""
    plain = weight is None and size_average is None and reduce is None and isinstance(target, Tensor)
    if not plain or target.is_floating_point() or len(logits.shape) != 2:
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss: Tensor | None = logits.loss(target, **options)
    in_fp32 = loss is None or any(method == "float" for method, _ in logits.steps)
    return loss if in_fp32 else loss.to(logits.hidden.dtype)  # type: ignore[union-attr]


def _on_real(method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.real(), method)(*args)


_UNRECORDED = "sub rsub rtruediv matmul rmatmul pow rpow neg setitem len iter eq ne lt le gt ge"
for _name in (f"__{word}__" for word in _UNRECORDED.split()):
    setattr(LazyLogits, _name, _on_real(_name))


def causal_lm_loss(
    original: Callable[..., Tensor],
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the loss of lazy logits without materialising them; else call ``original``, which is ForCausalLMLoss."""
    options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
    if not isinstance(logits, LazyLogits):
        return original(logits, labels, vocab_size, **options, **kwargs)
    target = shift_labels
    if target is None:
        target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.shape[:-1]
    if vocab_size == logits.shape[-1] and target.numel() == rows.numel():
        loss: Tensor | None = logits.loss(target.reshape(rows), ignore_index=ignore_index, num_items=num_items_in_batch)
        if loss is not None:
            return loss
    return original(logits.real(), labels, vocab_size, **options, **kwargs)


class LMHead(Recogniser):
    """Recogniser for models with a linear head and transformers' causal language-model loss or torch's cross-entropy.

    The forward must pass the head's output to one of these losses.
    """

    pattern = "lm_head"
    options = ("loss",)
    state = ("_read_later",)

    def forget(self, module: Any) -> None:
        """Remove the state, and let FSDP2 gather the weight for the backward again."""
        if isinstance(module, FSDPModule):
            module.set_unshard_in_backward(True)
        super().forget(module)

    def depends_on(self, module: Any, model: nn.Module) -> list[nn.Module]:
        """Return ``module``, or for a patched head the models that contain it: their forward fuses the loss."""
        if not hasattr(type(module), "_kind"):
            return [module]
        models = [part for part in model.modules() if self.looks_like(part)]
        return [part for part in models if module in part.get_output_embeddings().modules()]  # type: ignore[operator]

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for a transformers model with an output embedding."""
        if not isinstance(getattr(type(module), "loss_function", None), property):
            return False
        return module.get_output_embeddings() is not None  # type: ignore[operator]

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return "fused loss" with the kind of the head. Raises UnrecognisedError."""
        if not self.looks_like(module):
            raise UnrecognisedError("has no output embedding")
        from transformers.loss.loss_utils import ForCausalLMLoss

        cls: Any = original(type(module))
        (_, kind), *_ = parts_of(module.get_output_embeddings())  # type: ignore[operator]
        if "labels" not in inspect.signature(cls.forward).parameters:
            raise NothingToDoError("its forward takes no labels")
        called = inspect.unwrap(cls.forward).__code__.co_names
        if not {"loss_function", "CrossEntropyLoss", "cross_entropy"} & {*called}:
            raise UnrecognisedError("its forward does not call a loss function")
        loss_function = cls.loss_function.fget(module)
        if "loss_function" in called and loss_function is not ForCausalLMLoss:
            raise UnrecognisedError(f"its loss function is {where(loss_function)}")
        return MODEL + kind.removeprefix(LINEAR)

    def swaps(self, module: nn.Module, variant: str) -> list[tuple[nn.Module, str]]:
        """Return the model and the parts of its head, each with its variant."""
        if variant in FORWARDS:
            return [(module, variant)]
        balanced = with_balance(forward := original(type(module)).forward) is not forward
        return [(module, MODEL + BALANCED * balanced), *parts_of(module.get_output_embeddings())]  # type: ignore[operator]

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the methods of a model or of a head, as ``variant`` says."""
        return _head_methods(cls, variant) if variant in FORWARDS else _model_methods(cls)

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a head of 8 features and 11 words, with a bias if the live head has one."""
        head = module.get_output_embeddings()  # type: ignore[operator]
        (_, kind), *_ = parts_of(head)
        return small_head(kind, head.bias is not None)  # type: ignore[no-any-return]

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with two sequences of 5 tokens, some labels ignored, and scaled logits."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        head: Any = getattr(module, "get_output_embeddings", lambda: module)()
        fused = copy.deepcopy(head, {id(p): p for p in head.parameters()})
        for part, kind in parts_of(fused):
            vars(part).pop("forward", None)  # an instance attribute (accelerate's hooks) would hide the new method
            part.__class__ = type(type(part).__name__, (type(part),), _head_methods(type(part), kind))
        labels = torch.randint(head.out_features, (2, 5), device="cpu").to(head.weight.device)
        labels[0, 2:] = -100

        def separate(x: Tensor) -> Tensor:
            return ForCausalLMLoss(head(x) / 2.0, labels, head.out_features)

        def replacement(x: Tensor) -> Tensor:
            return causal_lm_loss(ForCausalLMLoss, LazyLogits(fused, x) / 2.0, labels, head.out_features)

        inputs = (random_like(head.weight, 2, 5, head.in_features),)
        return Trial(separate, replacement, inputs, tuple(head.parameters()))


def _head_methods(cls: type[Any], kind: str) -> dict[str, Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return LazyLogits(self, *args) if _training.head is self else nn.Module.__call__(self, *args, **kwargs)

    return {"_read_later": False, "_kind": kind, "__call__": call, "forward": FORWARDS[kind](cls)}


def _model_methods(cls: type[Any]) -> dict[str, Any]:
    index = [*inspect.signature(cls.forward).parameters].index("labels") - 1
    traceable = "loss_function" in inspect.unwrap(cls.forward).__code__.co_names
    balanced = with_balance(cls.forward)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), "_liger_like"):  # after ``unpatch``, if another library has kept this forward
            return cls.forward(self, *args, **kwargs)
        if (asked := kwargs.pop(TOKENS, None)) is not None:
            return _token_outputs(self, functools.partial(balanced, self, *args), kwargs, asked)
        labels = args[index] if len(args) > index else kwargs.get("labels")
        head = self.get_output_embeddings()
        lazy = labels is not None and self.training
        if lazy and (not hasattr(type(head), "_kind") or obstacle(head)):
            _warn("the head changed after patching, patch again; this loss is not fused")
            lazy = False
        elif lazy and (found := hook_in(head)):
            reason = f"the head has a hook or a new forward, {found}"
            _warn(f"{reason}; this loss is not fused")
            lazy = False
        # torch.compile does not trace torch's own cross_entropy into __torch_function__ of lazy logits
        if not lazy or (torch.compiler.is_compiling() and not traceable):
            return balanced(self, *args, **kwargs)
        output = _lazily(head, functools.partial(balanced, self, *args, **kwargs))
        if isinstance(output, tuple):
            settled = [(value, _settle(value)) for value in output]
            return tuple(new for old, new in settled if new is not None or old is None)
        if isinstance(output, dict):
            return type(output)(**{name: _settle(value) for name, value in output.items()})
        return _settle(output)

    get_loss_function = cls.loss_function.fget

    def loss_function(self: Any) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss

        current = get_loss_function(self)
        return functools.partial(causal_lm_loss, current) if current is ForCausalLMLoss else current

    set_as_before: Any = cls.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        set_as_before(self, name, hooked(self, value) if name == "forward" else value)

    loss = property(loss_function, cls.loss_function.fset)
    return {"forward": forward, "loss_function": loss, "__setattr__": set_attribute}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn(message: str) -> None:
    """Warn, under torch.compile while it traces: a warning within a graph would break it."""
    warnings.warn(f"liger_like: {message}", stacklevel=3)


def fuses_loss(model: nn.Module) -> bool:
    """Return True if the loss of ``model``, or of a model in it, is patched."""
    variants = (getattr(getattr(type(module), "_liger_like", None), "variant", "") for module in model.modules())
    return any(variant.startswith(MODEL) for variant in variants)


def _lazily(head: Any, forward: Callable[[], Any]) -> Any:
    """Return the result of ``forward``, in which calls of ``head`` return lazy logits."""
    outer, _training.head = _training.head, head
    try:
        return forward()
    finally:
        _training.head = outer


def _token_outputs(model: Any, forward: Callable[..., Any], kwargs: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Return the numbers ``asked`` of each label [B, S] but the first of its row, as TokenOutputs of [B, S - 1].

    With ``asked["shifted"]`` the labels are shifted already, and the numbers are [B, S]. Raises RuntimeError if the
    head or the model does not allow it.
    """
    head, labels, options = model.get_output_embeddings(), kwargs.pop("labels"), {"shifted": False, **asked}
    shifted = options.pop("shifted")
    reason = obstacle(head) if hasattr(type(head), "_kind") else "it changed after patching"
    if reason := reason or hook_in(head):
        raise RuntimeError(f"token_logprobs needs a patched head without hooks: {reason}")
    logits = _lazily(head, functools.partial(forward, **kwargs, return_dict=True)).logits
    target = labels if shifted else F.pad(labels, (0, 1), value=-100)[..., 1:]
    results = logits.loss(target, op=token_numbers, **options) if isinstance(logits, LazyLogits) else None
    if results is None:
        raise RuntimeError("token_logprobs needs a model that only scales and softcaps its logits, one row per label")
    return results if shifted else type(results)(*(None if each is None else each[..., :-1] for each in results))


def _settle(value: Any) -> Any:
    """Return None for logits whose loss was fused, real logits for other lazy logits, and any other value unchanged."""
    if not isinstance(value, LazyLogits):
        return value
    if value.fused and value.made is None:
        return None
    _warn("the model did more with its logits than scale and softcap them; this loss was not fused")
    return value.real()
