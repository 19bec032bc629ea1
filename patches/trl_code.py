"""Recognise the code of TRL's fused head, which many of its trainers call instead of the model's own loss.

TRL's ``add_fused_lm_head`` sets a function as the forward of the model. Called with ``fused_lm_head=True``, it runs the
backbone and passes hidden states and the head's weight to an autograd function, which it finds under a global name.
Otherwise it calls the forward that the model had before.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.ops.losses.linear_logprobs import TokenOutputs, fused_linear_logprobs
from liger_like.runtime.support import autocast_dtype

NUMBERS = "_ChunkedLogProbFunction"  # the global name of the autograd function
CALLED = {NUMBERS, "DTensor", "maybe_gather_lm_head_ctx"}  # the names that a copy of TRL's function looks up elsewhere
PARAMETERS = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
# the results of TRL's autograd function, in their order, and the names of ours
OUTPUTS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "correct",
}


class StandIn:
    """Object that a copy of TRL's function ``function`` finds under the name of TRL's autograd function."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function


def version() -> str:
    """Return "TRL" with its version."""
    return f"TRL {importlib.metadata.version('trl')}"


def is_of_trl(function: Any) -> bool:
    """Return True for a function that TRL defines, or for a copy of its fused forward that runs our op."""
    names = getattr(function, "__globals__", {})
    return isinstance(names.get(NUMBERS), StandIn) or str(names.get("__name__")).partition(".")[0] == "trl"


def is_fused(function: Any) -> bool:
    """Return True for TRL's fused forward and for a copy of it."""
    return is_of_trl(function) and "fused_lm_head" in function.__code__.co_varnames


def fused_forward(module: nn.Module) -> FunctionType | None:
    """Return TRL's fused forward, or our copy of it, on the instance ``module`` or under wrappers there; else None."""
    forward: Any = vars(module).get("forward")
    function: FunctionType | None = getattr(forward, "__func__", forward)
    while function is not None and not is_fused(function):
        function = getattr(function, "__wrapped__", None)
    return function


def stand_in(function: FunctionType | None) -> Any:
    """Return the object that stands for TRL's autograd function in ``function``, None if ``function`` is no copy."""
    found = getattr(function, "__globals__", {}).get(NUMBERS)
    return found if isinstance(found, StandIn) else None


def kept_forward(function: FunctionType) -> Any:
    """Return the forward that TRL's ``function`` calls without ``fused_lm_head``, or None if it keeps none."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["original_forward"].cell_contents if "original_forward" in cells else None


def refusal(function: FunctionType) -> str:
    """Return why a copy of TRL's ``function`` cannot run our op; empty if it can."""
    copied = stand_in(function)
    if copied is not None:
        function = copied.function
    if kept_forward(function) is None:
        return f"{version()} has another fused head: its forward keeps no original_forward"
    return _refusal(function.__code__, function.__globals__.get(NUMBERS))


@functools.cache
def _refusal(code: CodeType, numbers: Any) -> str:
    missing = CALLED - {*code.co_names}
    if missing:
        return f"{version()} has another fused head: its forward does not call {', '.join(sorted(missing))}"
    try:
        found = (*inspect.signature(numbers.forward).parameters,)
        if found != PARAMETERS:
            return f"{version()} has another fused head: its autograd function takes {', '.join(found)}"
        difference = _difference(numbers.apply)
    except Exception as error:
        return f"trying the fused head of {version()} raised {type(error).__name__}: {error}"
    if not difference <= 1e-5:  # true for a NaN, too
        return f"{version()} has another fused head: its numbers differ by {difference:.1e}"
    return ""


def _difference(theirs: Callable[..., Any]) -> float:
    """Return the largest difference of results and gradients between TRL's autograd function and ours."""
    random = torch.Generator("cpu").manual_seed(0)
    options: Any = {"generator": random, "device": "cpu", "dtype": torch.float32}
    results = []
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        values = [torch.randn(*shape, **options) for shape in ((5, 8), (11, 8), (11,))]
        target = torch.tensor([3, 0, 10, 7, 7], device="cpu")
        upstream = [torch.randn(5, **options) for _ in range(2)]
        functions: tuple[Callable[..., Any], ...] = theirs, apply
        for function in functions:
            leaves = [value.requires_grad_() for value in values]
            numbers: Any = function(*leaves, target, 0.7, 32768, 2.0, 1.3, (*OUTPUTS,))
            grads = torch.autograd.grad(numbers[:2], leaves, upstream)
            results.append([each.detach().double() for each in (*numbers, *grads)])
    return max(float((ours - expected).abs().max()) for expected, ours in zip(*results, strict=True))


def operands(x: Tensor, *tensors: Any) -> list[Any]:
    """Return weights and biases, of which some may be None, in the dtype of ``x``; autocast casts them itself."""
    return [*tensors] if autocast_dtype(x) else [t if t is None else t.to(x.dtype) for t in tensors]


def gathered(*tensors: Any) -> list[Any]:
    """Return tensors, of which some may be None, as a whole, if they are sharded.

    Their gradient is the mean over processes, as FSDP2 takes it for the weights that it gathers itself.
    """
    return [_whole(t) if hasattr(t, "full_tensor") else t for t in tensors]


def _whole(t: Any) -> Tensor:
    from torch.distributed.tensor import Partial  # only where it is used: it imports all of torch.distributed.tensor

    whole: Tensor = t.full_tensor(grad_placements=[Partial("avg")] * t.device_mesh.ndim)
    return whole


def token_numbers(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> TokenOutputs:
    """Return ``fused_linear_logprobs`` with operands in the dtype of ``x``."""
    weight, bias = operands(x, weight, bias)
    return fused_linear_logprobs(x, weight, target, bias, **options)


def apply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
    run: Callable[..., TokenOutputs] = token_numbers,
) -> tuple[Tensor | None, ...]:
    """Return the results of TRL's autograd function, computed by ``run``; our op chooses its chunks itself."""
    results = run(
        hidden,
        weight,
        targets,
        bias,
        temperature=temperature,
        softcap=final_logit_softcapping,
        logit_scale=logit_scale,
        outputs=tuple(ours for theirs, ours in OUTPUTS.items() if theirs in ("log_probs", *outputs)),
    )
    return tuple(getattr(results, name) for name in OUTPUTS.values())
