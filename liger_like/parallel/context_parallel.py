"""Training on sequences that are spread over processes: every token is on one of them, and only attention looks at
those of others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from liger_like.ops.attention.checks import check_heads, check_offsets, check_options
from liger_like.parallel._spread_attention import METHODS, Shards
from liger_like.patches import attention
from liger_like.runtime.checks import require_choice, require_integer, require_type

LAYOUTS = {"contiguous": False, "zigzag": True}


def context_parallel(mesh: DeviceMesh, *, method: str = "allgather", layout: str = "zigzag") -> "ContextParallel":
    """A context in which sequences are spread over ``mesh``, of one dimension, and in which patched models attend to
    the tokens of all its processes::

        with context_parallel(mesh["cp"]) as cp:
            model(**cp.shard(batch)).loss.backward()

    ``method``: how queries meet keys. "allgather": keys and values are gathered, for the backward again, and their
    gradients reduced and scattered. "ring": they go from process to process while attention with those that are there
    is computed; no more than two processes' keys and values are ever in memory. "ulysses": for attention, every
    process gets all tokens of some of its heads; the mesh's size must divide the number of key heads.
    ``layout``: the tokens of a process. "zigzag": a chunk from the front of the sequence and one from the back, so that
    causal attention is as much work for all. "contiguous": one piece.

    torch.compile may have the layers of a model, not the whole: masks are made outside of graphs.

    Attention is causal, with or without windows, documents and sinks; a model that asks for other masks gets an error.
    All processes of the mesh are to get the same batch. The loss and all gradients of parameters are parts, which add
    up to those of one process: sum the gradients over the mesh, or, where DDP or FSDP take their mean over it,
    multiply the loss by its size.

    Raises TypeError if ``mesh`` is none, ValueError for one of several dimensions or an unknown name, and RuntimeError
    at the end if the model that got a batch did not attend through it, since it was not patched.
    """
    require_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: take one by its name, as mesh['cp']")
    require_choice("method", method, tuple(METHODS))
    require_choice("layout", layout, tuple(LAYOUTS))
    return ContextParallel(Shards(mesh.get_group(), mesh.get_local_rank(), mesh.size(), LAYOUTS[layout]), method)


class ContextParallel:
    """What ``context_parallel`` returns."""

    def __init__(self, shards: Shards, method: str) -> None:
        self.shards, self.method = shards, method
        self._outer: list[Any] = []
        self._awaits_attention = self._awaits_documents = False

    def __enter__(self) -> "ContextParallel":
        self._outer.append(attention.context)
        attention.context = self
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        attention.context = self._outer.pop()
        if self._awaits_attention and error is None:
            raise RuntimeError(
                "no attention ran across the processes of context_parallel: patch the model with liger_like.patch"
            )

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This process's part of ``batch``, the arguments of a transformers model: all tensors [B, S, ...].

        S is padded to a multiple of the number of chunks. "labels" are shifted first, to "shift_labels"; labels that
        are not ignored (-100) are counted, over all processes, as "num_items_in_batch", unless that is given.
        "position_ids" [B, S] are given if they are not. Documents, told by "cu_seq_lens_q" (of the rows one after
        the other) or else by positions that do not rise by one, become "cu_seq_lens_q" and "cu_seq_lens_k" of the whole
        batch. "attention_mask" [B, S] may hide tokens at either end of a row, which nobody else sees then.

        Raises TypeError if ``batch`` is no mapping, and ValueError for tensors that are missing or do not fit.
        """
        require_type("batch", batch, Mapping)
        tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
        if tokens is None:
            raise ValueError(f"batch must have input_ids or inputs_embeds, got {', '.join(batch) or 'an empty one'}")
        B, S = tokens.shape[:2]
        starts = _starts(batch, tokens)
        masks = "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"
        batch = {name: value for name, value in batch.items() if name not in masks and value is not None}
        positions = batch.get("position_ids", torch.arange(S, device=tokens.device)[None])
        batch["position_ids"] = positions.expand(B, S)
        if "labels" in batch and "shift_labels" not in batch:
            batch["shift_labels"] = pad(batch["labels"][:, 1:], (0, 1), value=-100)
        if "shift_labels" in batch:
            batch["labels"] = batch["shift_labels"]
            batch.setdefault("num_items_in_batch", (batch["labels"] != -100).sum())
        more = -S % len(self.shards.order)
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.shape[:2] == (B, S):
                sides = (0, 0) * (value.dim() - 2) + (0, more)
                batch[name] = self.shards.own(pad(value, sides, value=-100 if "labels" in name else 0))
        self._awaits_attention, self._awaits_documents = True, starts is not None
        if starts is not None:
            starts = pad(starts, (0, more))
            starts[:, 0] = True
            cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel()).int()
            batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # transfers between processes stay out of graphs
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, left: int = -1, cu_seqlens: Tensor | None = None,
        scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
        deterministic: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of this process's ``q`` [B, s, H, D] over all processes' ``k`` [B, s, Hk, D] and ``v``
        [B, s, Hk, Dv]: [B, s, H, Dv], with gradients for q, k, v and, of this process's queries or heads, ``sinks``.

        A query sees ``left`` keys before its own (-1: all), within its document, which begin at ``cu_seqlens`` [n + 1]
        in the rows of the whole batch one after the other. Otherwise as ``flash_attention``.

        Raises TypeError or ValueError for arguments that do not fit, and RuntimeError if the batch has documents but
        ``cu_seqlens`` is None.
        """
        scale, softcap = check_options(True, scale, (-1, -1), softcap, deterministic)
        check_heads(q, k, v, sinks, 4)
        left = require_integer("left", left, -1)
        if cu_seqlens is not None:
            tokens = q.shape[0] * q.shape[1] * self.shards.size
            check_offsets("cu_seqlens", cu_seqlens, q, tokens, tokens)
        if k.shape[1] != q.shape[1] or q.shape[1] % len(self.shards.chunks()):
            raise ValueError(
                f"context_parallel needs as many queries as keys, got {q.shape[1]} and {k.shape[1]} tokens: use .shard"
            )
        if self._awaits_documents and cu_seqlens is None:
            raise RuntimeError("the batch has documents, but the model hands no cu_seq_lens_q to its attention")
        self._awaits_attention = self._awaits_documents = False
        starts = None
        if cu_seqlens is not None:
            B, S = q.shape[0], q.shape[1] * self.shards.size
            rows = torch.arange(B * S, device=q.device)
            document = torch.bucketize(rows, cu_seqlens, right=True) - 1
            starts = (cu_seqlens[document] - (rows - rows % S)).clamp(min=0).view(B, S)
        return METHODS[self.method](self.shards, q, k, v, sinks, starts, left, scale, softcap, deterministic)


def _starts(batch: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """Where documents start [B, S], except at the first token; None if all do. Raises ValueError."""
    starts = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    mask, cu_seqlens, positions = (batch.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    for name, t in (("attention_mask", mask), ("position_ids", positions)):
        if t is not None and (t.dim() != 2 or t.shape[1] != starts.shape[1]):
            raise ValueError(f"{name} must have shape {list(starts.shape)}, got {list(t.shape)}")
    if mask is not None and not mask.all():
        mask = mask.bool()
        starts[:, 1:] = mask[:, 1:] & ~mask[:, :-1]
        if (starts.sum(1) + mask[:, 0] > 1).any():
            raise ValueError("attention_mask must show neighbouring tokens: context_parallel knows no gaps")
    elif cu_seqlens is not None:
        starts.view(-1)[cu_seqlens[cu_seqlens < starts.numel()].long()] = True
    elif mask is None and positions is not None:
        starts[:, 1:] = positions.diff(dim=1) != 1
    starts[:, 0] = False
    return starts if starts.any() else None
