"""Random inputs of the ops, for the table in ``liger_like.testing``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


def _randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0, grad: bool = True) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_(grad)


def _labels(lead: tuple[int, ...], V: int, device: str, ignored: float = 0.2) -> Tensor:
    labels = torch.randint(0, V, lead, device=device)
    return labels.masked_fill(torch.rand(lead, device=device) < ignored, -100)


def norm_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    N: int,
    residual: bool = False,
    weight: bool = False,
    bias: bool = False,
) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    names = ["x"] + [n for n, asked in (("residual", residual), ("weight", weight), ("bias", bias)) if asked]
    return {n: randn(*(lead if n in ("x", "residual") else ()), N) for n in names}


def rope_inputs(
    dtype: torch.dtype,
    device: str,
    B: int,
    H: int,
    Hk: int,
    S: int,
    D: int,
    R: int,
    layout: str = "full",
    batched: bool = True,
    weights: bool = False,
) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device)
    q, k = (randn(B, S, heads, D).detach().transpose(1, 2).requires_grad_() for heads in (H, Hk))
    angle = torch.rand(*((B,) if batched else ()), S, R // 2, device=device) * 6.3
    angle = {"full": torch.cat((angle, angle), -1), "half": angle, "repeat": angle.repeat_interleave(2, -1)}[layout]
    norms = {n: randn(D) for n in ("q_weight", "k_weight")} if weights else {}
    return {"q": q, "k": k, **norms, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def glu_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], N: int, packed: bool = False) -> Inputs:
    randn = partial(_randn, dtype=dtype, device=device, scale=2.0)
    return {"gate": randn(*lead, 2 * N)} if packed else {n: randn(*lead, N) for n in ("gate", "up")}


def loss_inputs(
    dtype: torch.dtype, device: str, lead: tuple[int, ...], V: int, weighted: bool = False, int32: bool = False
) -> Inputs:
    inputs = {"logits": _randn(*lead, V, dtype=dtype, device=device, scale=3.0), "target": _labels(lead, V, device)}
    if int32:
        inputs["target"] = inputs["target"].int()
    return inputs | ({"weight": torch.rand(V, device=device)} if weighted else {})


def linear_loss_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    V: int,
    bias: bool = False,
    weighted: bool = False,
    rank: int = 0,
    ids: int = 0,
    per_token: bool = False,
) -> Inputs:
    """Return random arguments of a fused linear loss, for ``ids`` words of each token, -1 among them.

    ``per_token`` adds what the function of ``with_loss_of_tokens`` takes.
    """
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"x": randn(*lead, H), "weight": randn(V, H, scale=2 * H**-0.5)}
    inputs["target"] = _labels(lead, V, device)
    if bias:
        inputs["bias"] = randn(V)
    if weighted:
        inputs["class_weight"] = torch.rand(V, device=device)
    if rank:
        inputs |= {"lora_a": randn(rank, H, scale=H**-0.5), "lora_b": randn(V, rank)}
    if ids:
        inputs["ids"] = torch.randint(-1, V, (*lead, ids), device=device)
    if per_token:
        # of one sign: where losses cancel, the rounding of the largest decides the error of their sum
        advantage = torch.rand(lead, device=device)
        inputs |= {"advantage": advantage, "value": _randn(*lead, dtype=dtype, device=device)}
    return inputs


def divergence_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    Ht: int,
    V: int,
    mask: bool = False,
    bias: bool = False,
    rank: int = 0,
) -> Inputs:
    """Return random arguments of ``fused_linear_divergence``, for a teacher of the hidden size ``Ht``."""
    randn = partial(_randn, dtype=dtype, device=device)
    fixed = partial(randn, grad=False)
    # many words have a probability: the rounding errors of few would be chance
    inputs = {"x": randn(*lead, H), "weight": randn(V, H, scale=H**-0.5)}
    inputs |= {"teacher_x": fixed(*lead, Ht), "teacher_weight": fixed(V, Ht, scale=Ht**-0.5)}
    if mask:
        inputs["mask"] = torch.rand(lead, device=device) < 0.8
    if bias:
        inputs |= {"bias": randn(V), "teacher_bias": fixed(V)}
    if rank:
        inputs |= {"lora_a": randn(rank, H, scale=H**-0.5), "lora_b": randn(V, rank)}
    return inputs


def with_loss_of_tokens(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with a function of everything that a loss of tokens can be differentiated by."""

    def loss_fn(tokens: Any, advantage: Tensor, value: Tensor) -> Tensor:
        loss: Tensor = advantage * (tokens.logprob - value).square()
        if tokens.entropy is not None:
            loss = loss + 0.3 * tokens.entropy.square()
        return loss if tokens.logprob_at is None else loss + tokens.logprob_at.sin().sum(-1)

    def call(x: Tensor, weight: Tensor, target: Tensor, advantage: Tensor, value: Tensor, **kwargs: Any) -> Any:
        total = fn(x, weight, target, loss_fn, advantage, value, **kwargs)
        return (total[0], *total[1]) if isinstance(total, tuple) else total

    return call


SCALES = {"lora": 0.5, "gate_up_lora": 0.7, "down_lora": 1.2}  # of random adapters


def with_lora(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        for name, scale in SCALES.items():
            if f"{name}_a" in kwargs:
                kwargs[name] = kwargs.pop(f"{name}_a"), kwargs.pop(f"{name}_b"), scale
        return fn(**kwargs)

    return call


def attention_inputs(
    dtype: torch.dtype,
    device: str,
    B: int,
    S: int,
    Sk: int,
    H: int,
    Hk: int,
    D: int,
    Dv: int | None = None,
    sinks: bool = False,
    bias: str | None = None,
    padded: bool = False,
    spans: bool = False,
) -> Inputs:
    """Return random arguments of ``flash_attention``.

    ``bias``: the letters of "bhsk" for the axes along which the bias is not broadcast. ``padded``: random keys are
    hidden, but not the first. ``spans``: random spans, some of them empty.
    """
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"q": randn(B, S, H, D), "k": randn(B, Sk, Hk, D), "v": randn(B, Sk, Hk, Dv or D)}
    if sinks:
        inputs["sinks"] = randn(H)
    if bias is not None:
        inputs["bias"] = randn(*(n if axis in bias else 1 for axis, n in zip("bhsk", (B, H, S, Sk), strict=True)))
    if padded:
        inputs["key_padding_mask"] = torch.rand(B, Sk, device=device) < 0.7
        inputs["key_padding_mask"][:, :1] = True
    if spans:
        ends = torch.randint(Sk + 1, (2, B, S), device=device, dtype=torch.int32).sort(-1).values
        inputs["spans"] = torch.stack((ends[0] * 2 // 3, ends[1]))
    return inputs


def attention_varlen_inputs(
    dtype: torch.dtype,
    device: str,
    lengths: tuple[tuple[int, int], ...],
    H: int,
    Hk: int,
    D: int,
    Dv: int | None = None,
    sinks: bool = False,
    behind: int = 0,
) -> Inputs:
    """Return random arguments of ``flash_attention_varlen``.

    ``lengths``: (queries, keys) of each sequence. ``behind``: rows after the last sequence.
    """
    cu = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    T, Tk = (cu[-1] + behind).tolist()
    batch = attention_inputs(dtype, device, 1, T, Tk, H, Hk, D, Dv, sinks)
    rows = {n: batch[n].detach()[0].requires_grad_() for n in ("q", "k", "v")}
    return {**batch, **rows, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu.T.contiguous().to(device), strict=True))}


def paged_inputs(
    dtype: torch.dtype,
    device: str,
    lengths: tuple[tuple[int, int], ...],
    H: int,
    Hk: int,
    D: int,
    page: int,
    Dv: int | None = None,
    kind: str = "pages",
    new: bool = False,
    sinks: bool = False,
    behind: int = 0,
    wide: int = 0,
    latent: bool = False,
) -> Inputs:
    """Return random arguments of ``flash_attention_paged``; slots of no key hold NaN.

    ``lengths``: (rows, keys) of each sequence, the rows included. ``kind``: "pages" in any order, "slots" of pages, or
    "static", a page for each sequence. ``new``: the rows bring their keys, and their slots hold NaN, too. ``behind``:
    rows after the last sequence. ``wide``: pages that the table has more than it needs. ``latent``: values are keys.
    """
    randn = partial(_randn, dtype=dtype, device=device, grad=False)
    rows, keys = torch.tensor(((0, 0), *lengths), dtype=torch.int32).T
    B, T, longest = len(lengths), int(rows.sum()) + behind, int(keys.max())
    page = max(page, longest) if kind == "static" else page
    M = -(-longest // page) + wide
    N = B if kind == "static" else B * M + 1
    slots = torch.randperm(N * page).view(-1, page) if kind == "slots" else None
    order = torch.arange(B)[:, None] if kind == "static" else torch.randperm(N)[1:].view(B, M)
    flat = torch.full((N, page), torch.nan).flatten()
    places = [torch.empty(0)]
    for b, (n, length) in enumerate(lengths):
        at = torch.arange(length)
        place = order[b, at // page] * page + at % page
        places.append(place if slots is None else slots.flatten()[place])
        flat[places[-1][: length - n if new else length]] = 0
        order[b, -(-length // page) :] = -1
    dead = flat.view(N, page, 1, 1).to(device)
    inputs = {"q": randn(T, H, D)}
    inputs |= {n: (randn(*dead.shape[:2], Hk, d) + dead).to(dtype) for n, d in (("k_cache", D), ("v_cache", Dv or D))}
    if kind == "pages":
        inputs["pages"] = order.int().to(device)
    if kind == "slots":
        inputs["pages"] = torch.cat(places).int().to(device)
    inputs["lengths"] = (keys.cumsum(0, dtype=torch.int32) if kind == "slots" else keys[1:].contiguous()).to(device)
    if behind or any(n != 1 for n, _ in lengths):
        inputs["cu_seqlens_q"] = rows.cumsum(0, dtype=torch.int32).to(device)
    if new:
        inputs |= {"k": randn(T, Hk, D), "v": randn(T, Hk, Dv or D)}
    if latent:
        inputs["qv"] = randn(T, H, Dv or D)
    return inputs | ({"sinks": randn(H)} if sinks else {})


def with_pages(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with default ``pages``, none, and ``max_seqlen_q``: the number of rows, an upper bound."""

    def call(q: Tensor, **kwargs: Any) -> Any:
        longest = max(1, len(q)) if kwargs.get("cu_seqlens_q") is not None else 1
        return fn(**{"q": q, "pages": None, "max_seqlen_q": longest, **kwargs})

    return call


def with_longest(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with default ``max_seqlen_q`` and ``max_seqlen_k``: the number of rows, an upper bound."""

    def call(q: Tensor, k: Tensor, **kwargs: Any) -> Any:
        return fn(**{"q": q, "k": k, "max_seqlen_q": len(q), "max_seqlen_k": len(k), **kwargs})

    return call


def route_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], E: int, bias: bool = False) -> Inputs:
    inputs = {"logits": _randn(*lead, E, dtype=dtype, device=device, scale=2.0)}
    return inputs | ({"bias": torch.randn(E, device=device) * 0.1} if bias else {})


def balance_inputs(dtype: torch.dtype, device: str, lead: tuple[int, ...], E: int, mask: bool = False) -> Inputs:
    """Return random arguments of ``load_balancing_loss``; one expert is in favour."""
    favour = torch.zeros(E, device=device)
    favour[0] = 3
    logits = (torch.randn(*lead, E, device=device) + favour).to(dtype).requires_grad_()
    return {"logits": logits} | ({"mask": torch.rand(lead, device=device) < 0.7} if mask else {})


def with_top_k(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with a default ``top_k``."""

    def call(*args: Any, top_k: int = 2, **kwargs: Any) -> Any:
        return fn(*args, top_k=top_k, **kwargs)

    return call


def experts_inputs(
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...],
    H: int,
    I: int,
    E: int,
    K: int,
    bias: bool = False,
    elsewhere: int = 0,
    rank: int = 0,
    busy: float = 0.0,
) -> Inputs:
    """Return random arguments of ``moe_experts``, and with ``rank`` of its adapters.

    ``elsewhere``: how many of the ids drawn from are no experts here. ``busy``: the share of the rows that the first
    expert has, at most 1 / K; 0 stands for as many as the others have.
    """
    randn = partial(_randn, dtype=dtype, device=device)
    inputs = {"x": randn(*lead, H), "gate_up": randn(E, 2 * I, H, scale=H**-0.5)}
    inputs["down"] = randn(E, H, I, scale=I**-0.5)
    scores = torch.rand(*lead, E + elsewhere, device=device)
    if busy:
        scores[..., 0] = torch.rand(lead, device=device).lt(busy * K) * 3.0 - 1  # the largest score or the least
    inputs["index"] = scores.topk(K).indices
    inputs["weights"] = torch.rand(*lead, K, device=device).to(dtype).requires_grad_()
    if bias:
        inputs |= {"gate_up_bias": randn(E, 2 * I), "down_bias": randn(E, H)}
    if rank:
        for name, wide, depth in (("gate_up_lora", 2 * I, H), ("down_lora", H, I)):
            inputs[f"{name}_a"] = randn(E, rank, depth, scale=depth**-0.5)
            inputs[f"{name}_b"] = randn(E, wide, rank, scale=rank**-0.5)
    return inputs


def with_transposed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` for experts [E, 2I, H] and [E, H, I], whether its option ``transposed`` is set or not."""

    def call(gate_up: Tensor, down: Tensor, **kwargs: Any) -> Any:
        gate_up, down = (gate_up.mT, down.mT) if kwargs.get("transposed") else (gate_up, down)
        return fn(gate_up=gate_up, down=down, **kwargs)

    return call
