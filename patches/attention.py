"""Recogniser for modules that call transformers' attention interface, with its attention and mask functions.

Both functions are registered with transformers as ``liger_like``; a config with that name makes its model call them.
As for eager attention, the mask alone determines which query sees which key. A mask that is a window, padding and a key
range per query (documents) stays a ``Mask`` and is never materialised; any other mask becomes a bias tensor.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_like.ops.attention import flash_attention
from liger_like.patches import NAME, Recogniser, Trial, UnrecognisedError, bare, random_like, random_parameter, where
from liger_like.patches.attention_source import (
    eager_function,
    keywords_of,
    looks_into_a_mask_it_makes,
    looks_into_its_mask,
    options_of,
)
from liger_like.patches.latents import EXPANDED, Latents, absorbs, decode_seen, has_latents, is_plain, seen_by
from liger_like.patches.latents import VARIANT as LATENTS
from liger_like.patches.unpacked import Unpacked
from liger_like.runtime.support import autocast_dtype, in_graph

# keywords that a family may pass: SCORES change the scores, the others repeat what the mask and the shapes say
SCORES = {"dropout", "s_aux", "scaling", "softcap"}
KEYWORDS = SCORES | {
    "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "position_ids", "sliding_window",
}  # fmt: skip
EAGER = {"module", "query", "key", "value", "kwargs"}
VARIANTS = {"s_aux": "sinks", "softcap": "softcap"}
UNKNOWN_MASK = "context_parallel knows causal masks, windows and documents; this model has another mask"
context: Any = None  # the active context_parallel, if any


class Mask(NamedTuple):
    """Attention mask in parts: a query sees the keys in its window and its span that are not padding.

    ``left``, ``right``: window, the number of keys before and after the query's own position; -1 is unbounded.
    Positions are aligned at the end: the last query has the position of the last key.
    ``padding`` [B, Sk]: bool, False for keys that no query sees.
    ``spans`` [2, B, S]: int32, first key and exclusive end for each query. ``in_spans``: ``spans`` exclude all padding.
    ``context``: the context_parallel whose processes hold the other keys, kept for a recomputation after it has ended.
    """

    left: int = -1
    right: int = -1
    padding: Tensor | None = None
    spans: Tensor | None = None
    in_spans: bool = False
    context: Any = None

    @property
    def ndim(self) -> int:
        """Return 4: transformers passes 4-d masks on unchanged."""
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        """Return zeros: transformers reads the shape of a mask that it gets back, but does not use the sizes."""
        return (0,) * self.ndim

    def contiguous(self) -> "Mask":
        """Return the mask itself, in place of a contiguous tensor."""
        return self

    def bias(self, query: Tensor, key: Tensor, hidden: float) -> Tensor:
        """Return a bias [1 or B, 1, S, Sk] for the scores: 0 for visible keys, else ``hidden``."""
        return _bias(self.seen(query.shape[2], key.shape[2], query.device), query.dtype, hidden)

    def seen(self, S: int, Sk: int, device: torch.device) -> Tensor:
        """Return which keys each query sees: bool [1 or B, 1, S, Sk]."""
        queries, keys = (torch.arange(n, device=device) for n in (S, Sk))
        distance = keys - (queries + Sk - S)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)[None, None]
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, :]
        if self.spans is not None:
            starts, ends = self.spans[:, :, None, :, None]
            seen = seen & (keys >= starts) & (keys < ends)
        return seen


def _bias(seen: Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, *,
    mask_function: Callable[..., Any], attention_mask: Any = None, dtype: torch.dtype = torch.float32, **options: Any,
) -> Any:  # fmt: skip
    """Return a Mask, or a bias [B, 1, S, Sk] if no Mask is equivalent: the registered mask function.

    Raises ValueError in context_parallel for layers or a mask that it does not know, or with an ``attention_mask``.
    """
    from transformers.masking_utils import prepare_padding_mask, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if isinstance(attention_mask, Mask):
        return attention_mask
    mask = _recognised(mask_function)
    if isinstance(attention_mask, Unpacked):  # without a cache, transformers takes its shape for the number of keys
        attention_mask, kv_length = None, kv_length or q_length
        if mask is None and "allow_is_bidirectional_skip" not in options and not options.get("use_vmap"):
            mask = Mask(options["local_size"] - 1, 0)  # a graph cannot read the window from the function
    layer_types = getattr(options.get("config"), "layer_types", None) or ()
    if context is not None:
        context.require_attention(layer_types)
        return _across_processes(mask, attention_mask)
    if "linear_attention" in layer_types and isinstance(attention_mask, Tensor):
        # transformers may take the number of keys from the cache of a linear layer, which says 0; the padding mask
        # has the right number
        missing = max(0, attention_mask.shape[-1] - kv_offset - kv_length)
        q_offset, kv_length = q_offset + missing, kv_length + missing
    # a static cache has room after the last query, and its offset may be a device tensor: then positions are unknown
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if mask is None and ends_together and q_length == kv_length and kv_offset == 0 and not options.get("use_vmap"):
        mask = _searched(mask_function, batch_size, q_length, options.get("device"))
    may_skip = options.get("allow_is_bidirectional_skip", options.get("allow_is_causal_skip", True))
    # transformers forbids skipping for decode steps with a static cache, too
    has_room = not ends_together or (q_length == 1 and not may_skip)
    if mask is not None and mask.right == 0 and mask.spans is None and has_room:
        device = q_offset.device if isinstance(q_offset, Tensor) else options.get("device")
        mask = _before_room(mask, torch.arange(q_length, device=device) + (q_offset - kv_offset), batch_size)
    # a caller that forbids skipping goes on to combine the mask; for packed documents skipping is always forbidden
    if mask is not None and not may_skip and mask.spans is None:
        mask = None
    if mask is None or not (ends_together or mask.spans is not None or max(mask.left, mask.right) < 0):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        seen: Any = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
        )  # fmt: skip
        return _bias(seen, dtype)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return mask
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if is_tracing(padding) or in_graph(padding):
        return mask._replace(padding=padding)
    if has_room and mask.spans is not None and q_length == 1:  # a decode step does not wait for the GPU
        first = padding.int().argmax(-1, keepdim=True)
        return mask._replace(padding=padding, spans=_cut(mask.spans, torch.stack((first, first + kv_length))))
    return _without(mask, padding, q_length)


def _before_room(mask: Mask, positions: Tensor, batch: int) -> Mask:
    """Return a causal ``mask`` as spans, for a static cache: it has room for more keys after the last query.

    ``positions`` [S]: the place in the cache of the key that belongs to each query.
    """
    starts = (positions - mask.left).clamp(min=0) if mask.left >= 0 else positions * 0
    return Mask(spans=torch.stack((starts, positions + 1)).int()[:, None].expand(-1, batch, -1))


def _across_processes(mask: Mask | None, padding: Tensor | None) -> Mask:
    """Return ``mask`` with its window alone, for context_parallel.

    Its spans are dropped: positions of one process tell no documents. Raises ValueError for another mask and padding.
    """
    if mask is None or mask.right != 0:
        raise ValueError(UNKNOWN_MASK)
    if padding is not None:
        raise ValueError("attention_mask must not be given in context_parallel: pass the inputs that .shard returns")
    return Mask(mask.left, 0, context=context)


def _without(mask: Mask, padding: Tensor, rows: int) -> Mask:
    """Return ``mask`` restricted to the keys where ``padding`` [B, Sk] is True.

    If each row's visible keys are contiguous, the result has spans, which all kernels take.
    """
    ends = torch.stack((padding.int().argmax(-1), padding.shape[1] - padding.flip(-1).int().argmax(-1)))
    one_piece = padding.sum(-1) == ends[1] - ends[0]
    nothing_hidden, in_spans = torch.stack((padding.all(), one_piece.all())).tolist()  # synchronises once for both
    if nothing_hidden:
        return mask
    if not in_spans:
        return mask._replace(padding=padding)
    spans = _cut(mask.spans, ends[:, :, None].expand(-1, -1, rows))
    return mask._replace(padding=padding, spans=spans, in_spans=True)


def _cut(spans: Tensor | None, ends: Tensor) -> Tensor:
    """Return the intersection of ``spans`` and ``ends``, both [2, B, S], in int32."""
    if spans is not None:
        ends = torch.stack((torch.maximum(ends[0], spans[0]), torch.minimum(ends[1], spans[1])))
    return ends.int()


def _recognised(function: Callable[..., Any]) -> Mask | None:
    """Return the Mask equivalent to one of transformers' functions of (batch, head, query, key), or None."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return Mask(right=0)
    if function is bidirectional_mask_function:
        return Mask()
    # under torch.compile the variables of a closure cannot be read
    if torch.compiler.is_compiling() or function.__module__ != causal_mask_function.__module__:
        return None
    held = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.split(".")[0]:
        case "sliding_window_overlay":
            return Mask(left=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Mask(held["sliding_window"], held["sliding_window"])
        case "remap_positions_for_packed_sequence":  # changes no distance: positions rise by one within a document
            return _recognised(held["mask_function"])
        case "packed_sequence_mask_function":
            documents = held["packed_sequence_mask"]
            ends = [torch.searchsorted(documents, documents, right=right, out_int32=True) for right in (False, True)]
            return Mask(spans=torch.stack(ends))
        case "and_masks":
            parts = [_recognised(part) for part in held["mask_functions"]]
            return None if None in parts else _intersection(parts)
    return None


def _intersection(masks: list[Any]) -> Mask | None:
    """Return the Mask equivalent to all of ``masks`` together, or None if two of them set the same field."""
    fields: dict[str, Any] = {}
    for mask in masks:
        said = {name: value for name, value in mask._asdict().items() if value is not Mask._field_defaults[name]}
        if fields.keys() & said.keys():
            return None
        fields |= said
    return Mask(**fields)


def _searched(function: Callable[..., Any], batch: int, rows: int, device: Any) -> Mask | None:
    """Return the Mask of one of transformers' own intersections by evaluating it, for as many keys as queries.

    The closure is not read, which torch.compile does not allow. Without ``use_vmap`` an intersection consists of
    windows, chunks and documents. So each query sees a contiguous range of keys around its own position. The distance
    to either end of the range is found digit by digit, in base 64. Returns None for any other function.
    """
    from transformers.masking_utils import causal_mask_function

    if function.__name__ != "and_mask":
        return None
    # older versions of torch.compile know only the name of a nested function, not its module
    if not torch.compiler.is_compiling() and function.__module__ != causal_mask_function.__module__:
        return None
    b, queries = torch.arange(batch, device=device)[:, None, None], torch.arange(rows, device=device)[:, None]
    side, digits = torch.arange(-1, 2, 2, device=device).view(2, 1, 1, 1), torch.arange(1, 64, device=device)
    seen = torch.zeros(2, batch, rows, 1, dtype=torch.int64, device=device)
    for unit in (64**4, 64**3, 64**2, 64, 1):  # independent of the length, so one graph serves all lengths
        keys = queries + side * (seen + unit * digits)
        inside = (keys >= 0) & (keys < rows)
        found = inside & function(b, 0, queries, keys.clamp(0, rows - 1))
        seen = seen + unit * found.sum(-1, keepdim=True)
    return Mask(spans=(queries + side * seen + (side > 0)).squeeze(-1).int())


def _within_documents(spans: Tensor | None, query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """Return ``spans`` intersected with the documents, whose offsets in the flattened batch are ``cu_q`` and ``cu_k``.

    Returns int32 [2, B, S].
    """
    B, S = query.shape[0], query.shape[2]
    # each layer asks again: few kernels
    document = torch.bucketize(torch.arange(B * S, device=query.device), cu_q[1:], right=True)
    offsets = torch.cat((cu_k, cu_k[-1:]))  # rows after the last document see no keys
    ends = offsets.unfold(0, len(cu_k), 1).index_select(1, document).view(2, B, S)
    if B > 1:
        ends = ends - key.shape[2] * torch.arange(B, device=query.device)[:, None]
    return _cut(spans, ends)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of ``query`` [B, H, S, D] over ``key``, ``value`` [B, Hk, Sk, ...]: the registered function.

    Returns the output [B, S, H, Dv] and None, or attention weights if the eager function runs.

    ``attention_mask``: a Mask, or a tensor broadcastable to [B, H, S, Sk], bool or added to the scores. If it is None,
    a causal module sees the keys up to the query's position, and any other module sees all keys. Dropout and attention
    weights are computed by the eager function of the module's family.

    Raises TypeError for ``cache`` or ``position_bias``, and ValueError in context_parallel for an unsupported mask,
    dropout or attention weights.
    """
    options = {name: option for name, option in options.items() if option is not None}
    if foreign := options.keys() & {"cache", "position_bias"}:
        raise TypeError(f"liger_like's attention takes no {foreign.pop()}: unpatch, or patch with attention=False")
    S, mask = query.shape[2], attention_mask
    if isinstance(key, Latents):
        if (decoded := _decoded(module, query, key, mask, options)) is not None:
            return decoded, None
        key, value = key.expanded(module)
    if mask is None and S > 1 and options.get("is_causal", getattr(module, "is_causal", True)):
        # without a mask, positions are aligned at the first key
        mask, key, value = Mask(right=0, context=context), key[:, :, :S], value[:, :, :S]
    elif mask is None:
        mask = Mask(context=context)
    elif isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = _bias(mask, query.dtype)
    across = mask.context if isinstance(mask, Mask) else context
    if across is not None:
        if not isinstance(mask, Mask) or mask.right != 0:
            raise ValueError(UNKNOWN_MASK)
        if options.get("dropout") or options.get("output_attentions"):
            raise ValueError("context_parallel computes neither dropout of attention nor attention weights")
    elif isinstance(mask, Mask) and mask.padding is None and "cu_seq_lens_q" in options:
        cu_q = options["cu_seq_lens_q"]
        mask = mask._replace(spans=_within_documents(mask.spans, query, key, cu_q, options.get("cu_seq_lens_k", cu_q)))
    if options.get("dropout") or options.get("output_attentions"):
        return _eager(module, query, key, value, mask, options)
    if dtype := autocast_dtype(query):
        query, key, value = (t.to(dtype) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    scores: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
    scores |= {"sinks": options.get("s_aux"), "deterministic": options.get("deterministic")}
    if across is not None:
        return across.attend(q, k, v, left=mask.left, cu_seqlens=options.get("cu_seq_lens_q"), **scores), None
    if isinstance(mask, Tensor):
        scores |= {"bias": mask}
    else:
        scores |= {"window": (mask.left, mask.right), "spans": mask.spans}
        scores |= {"key_padding_mask": None if mask.in_spans else mask.padding}
    out: Any = flash_attention(q, k, v, **scores)
    return out.contiguous(), None  # some families call view on it; a kernel's output is contiguous already


def _decoded(module: nn.Module, query: Tensor, held: Latents, mask: Any, options: dict[str, Any]) -> Tensor | None:
    """Return attention of one new token per sequence over ``held`` latents; None where it needs keys and values."""
    mask = Mask(context=context) if mask is None else mask
    asked = "cu_seq_lens_q" in options or options.get("dropout") or options.get("output_attentions")
    if asked or not isinstance(mask, Mask) or mask.context is not None or not absorbs(module, query, held):
        return None
    sees_all = mask.left < 0 and mask.padding is None and mask.spans is None
    seen = None if sees_all else seen_by(module, mask, query, held.latents.shape[2])
    scores = {"scale": options.get("scaling"), "softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    return decode_seen(module, query[:, :, 0], held, seen, **scores)[:, None]


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Run the family's eager function. Hidden keys get the least finite score: a softmax over no keys is NaN."""
    least = torch.finfo(query.dtype).min
    if isinstance(mask, Mask):
        bias = mask.bias(query, key, least)
    else:
        bias = mask.clamp(min=max(least, torch.finfo(mask.dtype).min))
    eager: Any = eager_function(type(module))
    return eager(module, query, key, value, bias, **options)  # type: ignore[no-any-return]


def register() -> None:
    """Register both functions with transformers as NAME; repeated calls are harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


class Attention(Recogniser):
    """Recogniser for modules that call transformers' attention interface and whose eager function agrees with ours."""

    pattern = "attention"
    options = ("attention",)
    implementation = "_attn_implementation_internal"

    def looks_like(self, module: nn.Module) -> bool:
        """Return True for modules that call the interface, and for innermost modules named like attention."""
        parts = [part for name, part in module.named_modules() if name]
        return eager_function(type(module)) is not None or (
            _is_attention(module) and not any(_is_attention(part) for part in parts)
        )

    def variant(self, module: nn.Module, model: nn.Module) -> str:
        """Return "plain", or its extras: latents, sinks, softcap. Raises UnrecognisedError."""
        cls: Any = type(module)
        config, eager = getattr(module, "config", None), eager_function(cls)
        if eager is None:
            raise UnrecognisedError(f"{where(cls.forward)} has no eager_attention_forward for transformers to replace")
        if not hasattr(config, self.implementation):
            raise UnrecognisedError("it has no transformers config")
        taken = {*keywords_of(cls), *inspect.signature(eager).parameters} - EAGER
        if taken - KEYWORDS:
            raise UnrecognisedError(f"its attention has unsupported arguments: {', '.join(sorted(taken - KEYWORDS))}")
        owners: dict[Any, None] = {type(m): None for m in model.modules() if getattr(m, "config", None) is config}
        for owner in owners:
            if not getattr(owner, "_supports_attention_backend", True):
                raise UnrecognisedError(f"{where(owner)} does not support other attention implementations")
            if looks_into_a_mask_it_makes(owner):
                raise UnrecognisedError(f"{where(owner.forward)} uses a mask for more than passing it on")
        if looks_into_its_mask(cls):
            raise UnrecognisedError(f"{where(cls.forward)} uses its mask for more than passing it on")
        if getattr(config, "output_attentions", False):
            raise UnrecognisedError("its config asks for attention weights, which the kernels never store")
        options = options_of(module, SCORES)
        if options.get("dropout"):
            raise UnrecognisedError(f"its attention has dropout, {options['dropout']}")
        if not isinstance(options.get("scaling"), int | float | None):
            raise UnrecognisedError(f"its scaling is a {type(options['scaling']).__name__}, not a number")
        extras = [shown for name, shown in VARIANTS.items() if options.get(name) is not None]
        kind = [LATENTS if is_plain(module) else EXPANDED] if has_latents(cls) else []
        return ", ".join(kind + extras) or "plain"

    def methods(self, cls: type[Any], variant: str) -> dict[str, Any]:
        """Return no methods: the module's config changes instead."""
        return {}

    def miniature(self, module: nn.Module, variant: str) -> nn.Module:
        """Return a module with the numbers and the config of ``module``, and with random sinks if it has sinks."""
        sinks = options_of(module, {"s_aux"}).get("s_aux")
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
        parameters = {name: random_parameter(*p.shape) for name, p in module.named_parameters() if p is sinks}
        return bare(type(module), **numbers, **parameters, config=module.config, dtype=random_parameter(1))

    def trial(self, module: nn.Module, variant: str, methods: dict[str, Any]) -> Trial:
        """Return a trial with two rows of 6 queries, one of them padded.

        Scores are about 1 at most: a softmax of larger scores amplifies rounding errors.
        """
        eager: Any = eager_function(type(module))
        options = options_of(module, SCORES - {"dropout"})
        sinks, parameter = options.get("s_aux"), next(module.parameters())
        groups = getattr(module, "num_key_value_groups", 1)
        heads = 2 * groups if sinks is None else len(sinks)
        size = vars(module).get("head_dim") or 8  # some eager functions scale by head_dim and ignore ``scaling``
        q, k, v = (random_like(parameter, 2, h, 6, size) for h in (heads, heads // groups, heads // groups))
        q = q / max(1.0, (options.get("scaling") or 0.0) * size**0.5)
        mask = Mask(3, 0, padding=torch.arange(6, device=q.device) < torch.tensor([[6], [4]], device=q.device))
        bias = mask.bias(q, k, torch.finfo(q.dtype).min)

        def original(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return eager(module, q, k, v, bias, **options)[0]  # type: ignore[no-any-return]

        def replacement(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(module, q, k, v, mask, **options)[0]

        return Trial(original, replacement, (q, k, v), () if sinks is None else (sinks,))


def _is_attention(module: nn.Module) -> bool:
    return re.search(r"attention(\d\w*)?$", type(module).__name__, re.IGNORECASE) is not None
