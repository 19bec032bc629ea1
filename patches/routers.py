"""Recogniser for the routers of mixtures of experts: the product with the gate's weight, then ``moe_route``."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # as transformers has it

from liger_like.ops.router import checked_settings, moe_route
from liger_like.ops.router_logits import router_logits
from liger_like.patches import (
    NothingToDoError,
    Recogniser,
    Trial,
    UnrecognisedError,
    bare,
    random_like,
    random_parameter,
    where,
)
from liger_like.patches.forms import match
from liger_like.runtime.support import autocast_dtype, use_kernel


def softmax_normalised_or_not(self: Any, x: Tensor) -> Any:
    """Match Qwen's routers: the weights are those of the softmax, normalised if the config says so."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x, self.weight)
    scores = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1)
    weights, index = torch.topk(scores, self.top_k, dim=-1)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), index


def softmax_normalised(self: Any, x: Tensor) -> Any:
    """Match the same, always normalised."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x, self.weight)
    scores = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1)
    weights, index = torch.topk(scores, self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), index


def softmax_normalised_fp32(self: Any, x: Tensor) -> Any:
    """Match Mixtral's routers, whose weights stay in fp32."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x, self.weight)
    scores = torch.nn.functional.softmax(logits.float(), dim=-1)
    weights, index = torch.topk(scores, self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, index


def softmax(self: Any, x: Tensor) -> Any:
    """Match Jamba's routers, whose weights are not normalised."""
    logits = F.linear(x, self.weight)
    scores = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float)
    weights, index = torch.topk(scores, self.top_k, dim=-1)
    return logits, weights.to(x.dtype), index


def softmax_of_top(self: Any, x: Tensor) -> Any:
    """Match Granite's routers."""
    logits = F.linear(x, self.weight).float()
    top, index = logits.topk(self.top_k, dim=-1)
    return logits, torch.softmax(top, dim=-1).to(x.dtype), index


def softmax_of_top_index_first(self: Any, x: Tensor) -> Any:
    """Match Granite's routers in transformers 5.17, which return the logits last."""
    logits = F.linear(x, self.weight).float()
    top, index = logits.topk(self.top_k, dim=-1)
    return index, torch.softmax(top, dim=-1).to(x.dtype), logits


def softmax_of_top_with_bias(self: Any, x: Tensor) -> Any:
    """Match GPT-OSS' routers."""
    logits = F.linear(x, self.weight, self.bias)
    top, index = torch.topk(logits, self.top_k, dim=-1)
    return logits, torch.nn.functional.softmax(top, dim=1, dtype=top.dtype), index


def sigmoid(self: Any, x: Tensor) -> Any:
    """Match MiniMax-M3's routers."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x.to(self.weight.dtype), self.weight)
    scores = F.sigmoid(logits.float())
    _, index = torch.topk(scores + self.correction, self.top_k, dim=-1, sorted=False)
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, index


def sigmoid_with_argument(self: Any, x: Tensor, correction: Tensor) -> Any:
    """Match MiniMax-M2's routers, which are given the correction."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x.to(self.weight.dtype), self.weight)
    scores = nn.functional.sigmoid(logits.float())
    _, index = torch.topk(scores + correction, self.top_k, dim=-1, sorted=False)
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, index


def sigmoid_fp32_with_argument(self: Any, x: Tensor, correction: Tensor) -> Any:
    """Match Hunyuan 3's routers: logits in fp32."""
    x = x.reshape(-1, self.width)
    logits = F.linear(x.float(), self.weight.float())
    scores = torch.sigmoid(logits)
    _, index = torch.topk(scores + correction, self.top_k, dim=-1, sorted=False)
    weights = scores.gather(1, index)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * self.scale, index


def sigmoid_fp32_groups(self: Any, x: Tensor) -> Any:
    """Match DeepSeek-V3's routers: logits in fp32, a correction of the choice, and the best groups of experts."""
    x = x.view(-1, self.width)
    logits = F.linear(x.type(torch.float32), self.weight.type(torch.float32))
    scores = logits.sigmoid()
    choice = scores + self.correction
    by_group = choice.view(-1, self.groups, self.experts // self.groups).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(by_group, k=self.chosen, dim=-1, sorted=False)[1]
    chosen = torch.zeros_like(by_group)
    chosen.scatter_(1, best, 1)
    chosen = chosen.unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups).reshape(-1, self.experts)
    choice = choice.masked_fill(~chosen.bool(), float("-inf"))
    index = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights * self.scale, index


def softmax_fp32_groups(self: Any, x: Tensor) -> Any:
    """Match DeepSeek-V2's routers: logits in fp32, with or without groups of experts."""
    x = x.view(-1, self.width)
    logits = F.linear(x.type(torch.float32), self.weight.type(torch.float32))
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if self.method == "greedy":
        weights, index = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
    elif self.method == "group_limited_greedy":
        by_group = scores.view(-1, self.groups, self.experts // self.groups).max(dim=-1).values
        best = torch.topk(by_group, k=self.chosen, dim=-1, sorted=False)[1]
        chosen = torch.zeros_like(by_group)
        chosen.scatter_(1, best, 1)
        chosen = chosen.unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups).reshape(-1, self.experts)
        scores = scores.masked_fill(~chosen.bool(), 0.0)
        weights, index = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
    return logits, weights * self.scale, index


def softmax_fp32_normalised_groups(self: Any, x: Tensor) -> Any:
    """Match Mistral Large 4's routers: logits in fp32, and the groups whose two best experts are the best."""
    x = x.view(-1, self.width)
    logits = F.linear(x.float(), self.weight.float())
    scores = logits.softmax(-1)
    by_group = scores.view(-1, self.groups, self.experts // self.groups).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(by_group, k=self.chosen, dim=-1, sorted=False)[1]
    chosen = torch.zeros_like(by_group)
    chosen.scatter_(1, best, 1)
    chosen = chosen.unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups).reshape(-1, self.experts)
    choice = scores.masked_fill(~chosen.bool(), 0.0)
    index = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    total = weights.sum(dim=-1, keepdim=True) + 1e-20
    weights /= total
    weights = weights * self.scale
    return logits, weights, index


class Kind(NamedTuple):
    """Kind of router: how it makes its logits, the dtype of its weights, and the options of ``moe_route``.

    ``logits`` names an entry of LOGITS. The weights have the dtype of the "logits" or the "input", or are in "fp32".
    """

    logits: str
    weights: str
    options: Callable[[dict[str, Any]], dict[str, Any]]
    order: tuple[str, str, str] = ("logits", "weights", "index")


FP32 = "product in fp32"
LOGITS: dict[str, Callable[..., Tensor]] = {
    "product": F.linear,
    "product, then fp32": lambda *args: F.linear(*args).float(),
    "product in the weight's dtype": lambda x, weight, bias: F.linear(x.to(weight.dtype), weight),
    FP32: lambda x, weight, bias: router_logits(x, weight),
}
OF_TOP = {"score": "softmax_of_top"}
KINDS: dict[Callable[..., Any], Kind] = {
    softmax_normalised_or_not: Kind("product", "logits", lambda p: {"normalize": bool(p["normalize"])}),
    softmax_normalised: Kind("product", "logits", lambda p: {}),
    softmax_normalised_fp32: Kind("product", "fp32", lambda p: {}),
    softmax: Kind("product", "input", lambda p: {"normalize": False}),
    softmax_of_top: Kind("product, then fp32", "input", lambda p: OF_TOP),
    softmax_of_top_index_first: Kind(
        "product, then fp32", "input", lambda p: OF_TOP, order=("index", "weights", "logits")
    ),
    softmax_of_top_with_bias: Kind("product", "logits", lambda p: OF_TOP),
    sigmoid: Kind("product in the weight's dtype", "fp32", lambda p: {"score": "sigmoid"}),
    sigmoid_with_argument: Kind("product in the weight's dtype", "fp32", lambda p: {"score": "sigmoid"}),
    sigmoid_fp32_with_argument: Kind(FP32, "fp32", lambda p: {"score": "sigmoid", "eps": 1e-20, "scale": p["scale"]}),
    sigmoid_fp32_groups: Kind(
        FP32,
        "fp32",
        lambda p: {
            "score": "sigmoid",
            "normalize": bool(p["normalize"]),
            "eps": 1e-20,
            "scale": p["scale"],
            "groups": (p["groups"], p["chosen"], "top2"),
        },
    ),
    softmax_fp32_groups: Kind(
        FP32,
        "fp32",
        lambda p: {
            "normalize": False,
            "scale": p["scale"],
            "groups": None if p["method"] == "greedy" else (p["groups"], p["chosen"], "max"),
        },
    ),
    softmax_fp32_normalised_groups: Kind(
        FP32,
        "fp32",
        lambda p: {"eps": 1e-20, "scale": p["scale"], "groups": (p["groups"], p["chosen"], "top2")},
    ),
}
PATTERNS = tuple(KINDS)
BY_NAME = {pattern.__name__: kind for pattern, kind in KINDS.items()}
# of a miniature, by role; any other attribute is that of the module
SIZES = {"width": 6, "experts": 8, "top_k": 2, "groups": 4, "chosen": 2, "scale": 2.5}
SHAPES = {"weight": (8, 6), "bias": (8,)}
NOISE = 0.01  # of the logits' standard deviation, which may not change the choice of experts in the rows of a trial


def route(kind: Kind, parts: dict[str, Any], x: Tensor, correction: Tensor | None) -> tuple[Tensor, ...]:
    """Return logits, weights and index of ``x`` [..., H] in the order of ``kind``; ``parts`` are attributes by role."""
    x = x.reshape(-1, parts["width"]) if "width" in parts else x
    logits = LOGITS[kind.logits](x, parts["weight"], parts.get("bias"))
    dtype = {"logits": logits.dtype, "input": x.dtype, "fp32": None}[kind.weights]
    weights, index = moe_route(logits, parts["top_k"], bias=correction, **kind.options(parts), dtype=dtype)
    outputs = {"logits": logits, "weights": weights, "index": index}
    return tuple(outputs[name] for name in kind.order)


class Router(Recogniser):
    """Recogniser for routers whose forward has the form of one of PATTERNS."""

    pattern = "router"
    options = ("mlp",)

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for modules named like a router or gate whose forward takes the top k."""
        cls = type(module)
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        return re.search("(Router|Gate|Gating)$", cls.__name__) is not None and "topk" in getattr(code, "co_names", ())

    def variant(self, module: Any, model: nn.Module) -> str:
        """Return the name of the pattern. Raises UnrecognisedError, or NothingToDoError for any other way to route."""
        pattern, kind, part = _known(type(module))
        parts = _parts(module, part)
        if parts["weight"].dim() == 2:  # ZeRO-3 leaves an empty weight behind
            try:
                checked_settings(len(parts["weight"]), parts["top_k"], **kind.options(parts))
            except (TypeError, ValueError) as error:
                raise UnrecognisedError(f"its numbers do not fit: {error}") from error
        return pattern.replace("_", " ")

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return the forward, which runs the original where no kernel can.

        It also does so for DTensors, and under autocast for logits in fp32, which autocast computes in its dtype.
        """
        _, kind, part = _known(cls)
        names = [*inspect.signature(cls.forward).parameters][1:]

        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
            given, parts = dict(zip(names, args, strict=False)) | kwargs, _parts(self, part)
            x, *rest = (given[name] for name in names)
            autocast = kind.logits == FP32 and autocast_dtype(x) is not None
            if autocast or not use_kernel(x) or any(isinstance(t, DTensor) for t in (x, parts["weight"])):
                return cls.forward(self, *args, **kwargs)
            return route(kind, parts, x, rest[0] if rest else parts.get("correction"))

        return {"forward": forward}

    def miniature(self, module: Any, variant: str) -> nn.Module:
        """Return a router of 6 features to 2 of 8 experts, in 4 groups of which it chooses 2."""
        _, _, part = _known(type(module))
        own = {name: SIZES.get(role, getattr(module, name)) for role, name in part.items()}
        own |= {part[role]: random_parameter(*shape) for role, shape in SHAPES.items() if role in part}
        own |= {part["correction"]: nn.Buffer(random_parameter(8).detach())} if "correction" in part else {}
        return bare(type(module), **own)

    def trial(self, module: Any, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial of at most 6 rows; the order in which a router lists its experts does not count."""
        cls: Any = type(module)
        _, kind, part = _known(cls)
        parts = _parts(module, part)
        experts, width = parts["weight"].shape
        given = [random_like(parts["weight"], experts) for _ in [*inspect.signature(cls.forward).parameters][2:]]
        correction = given[0] if given else parts.get("correction")
        x = _clear(kind, parts, random_like(parts["weight"], 64, width), correction)[:6]

        def by_expert(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            named = dict(zip(kind.order, outputs, strict=True))
            logits, weights, index = (named[name] for name in ("logits", "weights", "index"))
            return logits, weights.new_zeros(logits.shape).scatter(-1, index, weights)

        def original(x: Tensor) -> tuple[Tensor, Tensor]:
            return by_expert(cls.forward(module, x, *given))

        def replacement(x: Tensor) -> tuple[Tensor, Tensor]:
            return by_expert(route(kind, parts, x, correction))

        return Trial(original, replacement, (x,), tuple(module.parameters()), depth=max(experts, width))


def _known(cls: Any) -> tuple[str, Kind, dict[str, str]]:
    """Return the pattern of a router's class with its kind, and its attributes by role. Raises NothingToDoError."""
    try:
        pattern, part = match(cls.forward, cls, PATTERNS)
    except UnrecognisedError as error:
        raise NothingToDoError(str(error)) from None
    known = next(each for each in PATTERNS if each.__name__ == pattern)
    if len(inspect.signature(cls.forward).parameters) != len(inspect.signature(known).parameters):
        raise UnrecognisedError(f"{where(cls.forward)} has an argument that it does not read")
    return pattern, BY_NAME[pattern], part


def _parts(module: Any, part: dict[str, str]) -> dict[str, Any]:
    return {role: getattr(module, name) for role, name in part.items()}


@torch.no_grad()
def _clear(kind: Kind, parts: dict[str, Any], x: Tensor, correction: Tensor | None) -> Tensor:
    """Return the rows of ``x`` whose choice of experts does not hang on rounding. Raises UnrecognisedError."""
    logits = LOGITS[kind.logits](x, parts["weight"], parts.get("bias")).float()
    spread = NOISE * logits.std(-1, keepdim=True).clamp(min=1e-3)
    choices = [
        moe_route(z, parts["top_k"], bias=correction, **kind.options(parts))[1].sort(-1).values
        for z in (logits, *(logits + spread * random_like(logits, *logits.shape) for _ in range(3)))
    ]
    clear = torch.stack([(choice == choices[0]).all(-1) for choice in choices]).all(0)
    if not clear.any():
        raise UnrecognisedError("its scores are so close that rounding chooses the experts")
    return x[clear]
