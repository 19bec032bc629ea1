"""Multi-head latent attention in generation: a decode step attends to the cached latents, and expands no key or value.

transformers caches a latent [L] and rotated features [R] for each token, and ``expand_kv`` makes keys and values of all
heads from all of them in each step (DeepSeek-AI, arXiv:2405.04434). With one new token per sequence the query of a head
takes the expansion of keys instead, and its output that of values. The cache is that of transformers, and holds the
same.
"""

import ast
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_like.ops.attention.paged import flash_attention_paged
from liger_like.patches import bare
from liger_like.patches.attention_source import tree_of
from liger_like.runtime.support import autocast_dtype, in_graph, unhooked

VARIANT, EXPANDED = "latents", "expanded latents"
# attributes that the method of a family reads; their numbers in a trial
SIZES = {"qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}
READ = {"kv_b_proj", *SIZES}


class Latents(NamedTuple):
    """Latents [B, 1, S, L] and rotated features [B, 1, S, R], which a cache holds in place of keys and values."""

    latents: Tensor
    rotated: Tensor

    def expanded(self, module: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads, by the method of the family."""
        return type(module)._liger_like_below.expand_kv(module, *self)  # type: ignore[no-any-return]


def methods(cls: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the method that replaces ``expand_kv`` of ``cls`` while its config has one of the ``names``."""

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Any, Any]:
        """Return keys and values as the family does, or in inference what our attention makes them from."""
        if torch.is_grad_enabled() or self.config._attn_implementation not in names:
            return cls.expand_kv(self, kv_nope, k_rot)  # type: ignore[no-any-return]
        return Latents(kv_nope, k_rot), None

    return {"expand_kv": expand_kv}


@functools.cache
def has_latents(cls: Any) -> bool:
    """Return True if the forward of ``cls`` gives what ``expand_kv`` makes to attention, and does no more with it.

    The method must be the known map of latents: it is run with small numbers.
    """
    cls = getattr(cls, "_liger_like_below", cls)
    method = getattr(cls, "expand_kv", None)
    return method is not None and _passes_on(cls) and _is_known(cls)


def _passes_on(cls: Any) -> bool:
    """Return True if keys and values of ``expand_kv`` are the arguments of attention, and are used nowhere else."""
    code = [*ast.walk(tree_of(cls.forward))]
    made = [node for node in code if isinstance(node, ast.Assign) and _calls(node.value, "self.expand_kv")]
    given = [node.args[2:4] for node in code if isinstance(node, ast.Call) and _calls(node, "attention_interface")]
    if (len(made), len(given)) != (1, 1):
        return False
    names = [ast.unparse(name) for name in getattr(made[0].targets[0], "elts", ())]
    uses = [node for node in code if isinstance(node, ast.Name) and node.id in names]
    return [ast.unparse(name) for name in given[0]] == names and len(uses) == 2 * len(names) == 4


def _calls(node: ast.expr, function: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == function


def _is_known(cls: Any) -> bool:
    """Return True if keys are [W_k latent, rotated] and values W_v latent, where kv_b_proj has rows [W_k, W_v]."""
    read = {
        node.attr
        for node in ast.walk(tree_of(cls.expand_kv))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    if read != READ:
        return False
    numbers = torch.linspace(1, 40, 200, device="cpu", dtype=torch.float64).sin()
    linear = bare(nn.Linear, weight=nn.Parameter(numbers[:64].view(16, 4), requires_grad=False), bias=None)
    module = bare(cls, kv_b_proj=linear, **SIZES)
    held = Latents(numbers[64:112].view(2, 1, 6, 4), numbers[112:136].view(2, 1, 6, 2))
    k_nope, values = _per_head(held.latents, linear, SIZES["qk_nope_head_dim"])
    keys = torch.cat((k_nope, held.rotated.expand(-1, 2, -1, -1)), -1)
    made = cls.expand_kv(module, *held)
    return all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(made, (keys, values), strict=True))


def _per_head(latents: Tensor, linear: Any, nope: int) -> tuple[Tensor, ...]:
    weights = linear.weight.unflatten(0, (2, -1))
    made = torch.einsum("bsl,hdl->bhsd", latents[:, 0], weights)
    return made[..., :nope], made[..., nope:]


def decode(
    module: Any, q: Tensor, rotated: Tensor, latents: Tensor, pages: Tensor | None, lengths: Tensor, **options: Any
) -> Tensor:
    """Return attention [T, H, Dv] of ``q`` [T, H, D] over caches of ``rotated`` features and ``latents``.

    The caches, ``pages``, ``lengths`` and ``options`` are arguments of ``flash_attention_paged``.
    """
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.unflatten(0, (q.shape[1], -1))  # [H, nope + Dv, L]
    qv = torch.einsum("thn,hnl->thl", q[..., :nope], weight[:, :nope])
    options = {"scale": q.shape[-1] ** -0.5} | {name: x for name, x in options.items() if x is not None}
    out: Any = flash_attention_paged(q[..., nope:], rotated, latents, pages, lengths, qv=qv, **options)
    return torch.einsum("thl,hdl->thd", out, weight[:, nope:]).contiguous()  # some families call view on it


def decode_seen(module: Any, q: Tensor, held: Latents, seen: "Seen | None", **scores: Any) -> Tensor:
    """Return attention of one new token per sequence, ``q`` [B, H, D], over the tokens of ``held`` that it sees.

    None: it sees all tokens.
    """
    if seen is None:
        lengths = torch.full((q.shape[0],), held.latents.shape[2], dtype=torch.int32, device=q.device)
        return decode(module, q, held.rotated.transpose(1, 2), held.latents.transpose(1, 2), None, lengths, **scores)
    B, _, S, _ = held.latents.shape
    rooms = set() if torch.compiler.is_compiling() else {divmod(c.stride(0), c.stride(2)) for c in held}
    if B > 1 and len(rooms) == 1 and not any(rest for _, rest in rooms):
        ((room, _),) = rooms  # a view also where a cache has room behind the tokens of each sequence
        tokens = (B - 1) * room + S
        latents, rotated = (c.as_strided((tokens, 1, 1, c.shape[3]), (c.stride(2), 1, 1, c.stride(3))) for c in held)
    else:  # Inductor may compute a cache with other strides than it has when traced
        room = S
        latents, rotated = (c.reshape(B * S, 1, 1, c.shape[3]) for c in held)
    return decode(module, q, rotated, latents, *seen.pages(room), **scores)


class Seen:
    """Which tokens of a cache each sequence sees: the layers of a step share it."""

    def __init__(self, seen: Tensor) -> None:
        """Take bool [B, S], True for tokens that are seen."""
        self.lengths = seen.sum(-1, dtype=torch.int32)
        self._tokens = seen.byte().argsort(dim=-1, descending=True, stable=True).int()
        self._pages: dict[int, Tensor] = {}

    @classmethod
    def of(cls, mask: Any, query: Tensor, S: int) -> "Seen":
        """Return which of S tokens ``mask`` shows to a ``query`` [B, H, 1, D] at the last of them."""
        return cls(mask.seen(1, S, query.device)[:, 0, 0].expand(query.shape[0], -1))

    def pages(self, room: int) -> tuple[Tensor, Tensor]:
        """Return the tokens that each sequence sees, in order, among rows of ``room`` tokens; and their numbers."""
        if room not in self._pages:
            first = room * torch.arange(len(self.lengths), dtype=torch.int32, device=self.lengths.device)
            self._pages[room] = self._tokens + first[:, None]
        return self._pages[room], self.lengths


class _Step(NamedTuple):
    """Mask of the layers of a step, and the tokens that it shows. ``layers``: ids of those that have asked.

    ``key``: sizes, and the versions of the mask's tensors, which their owner may change in place.
    """

    mask: Any
    key: tuple[Any, ...]
    seen: Seen
    layers: set[int]


_last: _Step | None = None


def seen_by(module: Any, mask: Any, query: Tensor, S: int) -> Seen:
    """Return the same as ``Seen.of``, once for the layers of a step: they pass the same ``mask``.

    A layer that asks again is in another step. Tensors of inference mode have no version.
    """
    global _last
    if torch.compiler.is_compiling() or in_graph(query):
        return Seen.of(mask, query, S)
    key, last = (len(query), S, query.device, *map(_version, (mask.padding, mask.spans))), _last
    if last is None or last.mask is not mask or last.key != key or id(module) in last.layers:
        _last = last = _Step(mask, key, Seen.of(mask, query, S), set())
    last.layers.add(id(module))
    return last.seen


def _version(t: Tensor | None) -> int | None:
    return None if t is None or t.is_inference() else t._version


def is_plain(module: Any) -> bool:
    """Return True if the weight of ``kv_b_proj`` is all that it computes with.

    An adapter, a quantised or sharded weight, and a hook that moves or gathers it need its call.
    """
    linear = module.kv_b_proj
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) in (Tensor, nn.Parameter)
        and unhooked(linear)
    )


def absorbs(module: Any, query: Tensor, held: Latents) -> bool:
    """Return True if a step of ``query`` [B, H, S, D] may use the weight of ``kv_b_proj`` in place of its call."""
    if query.shape[2] != 1 or not is_plain(module):
        return False
    weight = module.kv_b_proj.weight
    return (
        all(type(t) is Tensor and t.dtype == weight.dtype and t.device == weight.device for t in (query, *held))
        and autocast_dtype(query) in (None, query.dtype)
        and weight.shape[0] == query.shape[1] * (module.qk_nope_head_dim + module.v_head_dim)
    )
