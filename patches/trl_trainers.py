"""TRL's trainers: how each computes its loss, and the methods that let it run our ops.

Most trainers call TRL's fused head, which ``trl_head`` replaces. ``DistillationTrainer`` calls a function of its own on
the hidden states of two models: a copy of its method calls ``divergence_loss`` instead. ORPO and CPO read the logits in
a method that ``trl_pairs`` replaces. TRL's code does not change: methods are set on the instance.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_like.ops.losses.linear_divergence import DivergenceOutput, fused_linear_divergence
from liger_like.patches import trl_pairs
from liger_like.patches.rewriting import with_globals
from liger_like.patches.trl_code import gathered, operands, version

DIVERGENCE = "_chunked_divergence_loss"  # the global name of the function that DistillationTrainer calls


class Plan(NamedTuple):
    """How a trainer is to run our ops: by ``methods`` that are set on it, or not at all for ``reason``.

    ``tokens``: the methods need a model whose loss is patched.
    """

    methods: dict[str, Any]
    reason: str = ""
    tokens: bool = False


def plan_of(trainer: Any) -> Plan | None:
    """Return the plan for a trainer of TRL; None for one that calls TRL's fused head or is not of TRL."""
    cls = type(trainer)
    if not any(base.__module__.partition(".")[0] == "trl" for base in cls.__mro__) or _mentions(cls, "fused_lm_head"):
        return None
    method = getattr(cls, "_compute_loss", None)
    compares = isinstance(method, FunctionType) and DIVERGENCE in method.__code__.co_names
    if compares and trainer.teacher_model is not None:  # a teacher on a server has no head here
        return _distillation(trainer, method)  # type: ignore[arg-type]
    if hasattr(cls, trl_pairs.METHOD):
        reason = trl_pairs.refusal(trainer)
        return Plan({}, reason) if reason else Plan(trl_pairs.methods(trainer), tokens=True)
    how = "reads the logits" if _mentions(cls, "logits") else "does not use TRL's fused head"
    return Plan({}, f"the loss of {version()}'s {cls.__name__} {how}")


def _distillation(trainer: Any, method: FunctionType) -> Plan:
    """Return the plan for a trainer whose ``method`` calls the function DIVERGENCE."""
    reason = _refusal(method.__globals__.get(DIVERGENCE))
    heads = (model.get_output_embeddings() for model in (trainer.model, trainer.teacher_model))
    if not reason and any(hasattr(head.weight, "ds_id") for head in heads):
        reason = "the weights of the heads are sharded by ZeRO-3"
    copy = with_globals(method, {DIVERGENCE: divergence_loss})
    return Plan({} if reason else {"_compute_loss": MethodType(copy, trainer)}, reason)


@functools.cache
def _refusal(function: Any) -> str:
    """Return why ``divergence_loss`` cannot take the place of ``function``; empty if it can."""
    try:
        ours, theirs = ((*inspect.signature(each).parameters,) for each in (divergence_loss, function))
        if ours != theirs:
            return f"{version()} computes another divergence: its function takes {', '.join(theirs)}"
        difference = _difference(function)
    except Exception as error:
        return f"trying the divergence of {version()} raised {type(error).__name__}: {error}"
    return "" if difference <= 1e-5 else f"{version()} computes another divergence: it differs by {difference:.1e}"


def _difference(theirs: Callable[..., Any]) -> float:
    """Return the largest difference of results and gradients between ``theirs`` and ``divergence_loss``."""
    random = torch.Generator("cpu").manual_seed(0)
    options: Any = {"generator": random, "device": "cpu", "dtype": torch.float32}
    largest = 0.0
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        shapes = (1, 5, 8), (1, 5, 6), (11, 8), (11, 6)
        values = [torch.randn(*shape, **options) for shape in shapes]
        mask = torch.tensor([[1, 0, 1, 1, 1]], device="cpu")
        for beta in (0.0, 0.3, 1.0):
            results = []
            functions: tuple[Callable[..., Any], ...] = theirs, divergence_loss
            for function in functions:
                leaves = [value.requires_grad_(i in (0, 2)) for i, value in enumerate(values)]
                numbers = function(*leaves, mask, beta, 3, None, None, 1.3, 0.9, 2.0, 3.0, 0.7)
                grads = torch.autograd.grad(numbers[0], [leaves[0], leaves[2]])
                results.append([each.detach().double() for each in (*numbers, *grads)])
            errors = (float((ours - expected).abs().max()) for expected, ours in zip(*results, strict=True))
            largest = max(largest, *errors)
    return largest


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean divergence [], the sum [] of the student's entropy and the number [] of tokens that count."""
    counted = (completion_mask != 0).sum()
    items = counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    own = gathered(student_lm_head_weight, student_lm_head_bias)
    others = gathered(teacher_lm_head_weight, teacher_lm_head_bias)
    weight, bias = operands(student_hidden_states, *own)
    teacher_weight, teacher_bias = operands(teacher_hidden_states, *others)
    result: DivergenceOutput = fused_linear_divergence(  # type: ignore[assignment]
        student_hidden_states,
        weight,
        teacher_hidden_states,
        teacher_weight,
        completion_mask,
        bias,
        teacher_bias,
        beta=beta,
        temperature=temperature,
        softcap=student_final_logit_softcapping,
        logit_scale=student_logit_scale,
        teacher_softcap=teacher_final_logit_softcapping,
        teacher_logit_scale=teacher_logit_scale,
        num_items=items,
        outputs=("entropy",),
    )
    return result.loss, result.entropy.sum(), counted  # type: ignore[union-attr]


def _mentions(cls: type[Any], name: str) -> bool:
    """Return True if a method that a trainer of class ``cls`` runs names ``name``, as a variable, attribute or key."""
    return any(name in words for code in _codes(cls) for words in _words(code))


def _codes(cls: type[Any]) -> Iterator[CodeType]:
    """Yield the code of each method, and of the method that it overrides if it calls ``super``."""
    for name in {name for base in cls.__mro__ for name in vars(base)}:
        for base in (base for base in cls.__mro__ if name in vars(base)):
            method = vars(base)[name]
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if isinstance(code, CodeType):
                yield code
            if code is None or "super" not in code.co_names:
                break


def _words(constant: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the names and the constants of a code object and of all code in it."""
    if isinstance(constant, CodeType):
        yield constant.co_names
        yield constant.co_consts
        for inner in constant.co_consts:
            yield from _words(inner)
    elif isinstance(constant, tuple):
        yield constant
