"""Context parallelism: sequences are sharded over processes, and only attention reads tokens of other processes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from liger_like.ops.attention.checks import check_heads, check_offsets, check_options
from liger_like.ops.load_balancing import loss_of, sums_of
from liger_like.parallel._spread_attention import METHODS, Shards, attend_to_own
from liger_like.patches import attention
from liger_like.runtime.checks import require_choice, require_integer, require_type

LAYOUTS = {"contiguous": False, "zigzag": True}
# transformers' types of layers that read earlier tokens by a convolution or a recurrence, perhaps beside attention
RECURRENT = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"}


def context_parallel(mesh: DeviceMesh, *, method: str = "allgather", layout: str = "zigzag") -> "ContextParallel":
    """Return a context in which patched models attend over sequences sharded over ``mesh``, of one dimension::

        with context_parallel(mesh["cp"]) as cp:
            model(**cp.shard(batch)).loss.backward()

    ``method`` says how queries meet keys. "allgather": keys and values are gathered, in the backward again, and their
    gradients are reduce-scattered. "ring": keys and values travel from process to process while attention with the
    present ones is computed; at most two processes' keys and values are in memory. "ulysses": for attention, every
    process gets all tokens of some heads; the mesh's size must divide the number of key heads. ``layout`` says which
    tokens a process has. "zigzag": one chunk from the front of the sequence and one from the back, which balances the
    work of causal attention. "contiguous": one piece.

    Compile the layers of a model, not the whole model: masks are made outside of graphs.

    Attention is causal, with or without windows, documents and sinks; other masks raise, and so do models with other
    layers that read earlier tokens: convolutions and linear attention. All processes of the mesh must get the same
    batch. The loss and the parameters' gradients are partial sums: sum the gradients over the mesh, or, if DDP or FSDP
    average them over it, multiply the loss by the mesh's size.

    Raises TypeError if ``mesh`` is not a DeviceMesh, ValueError if it has several dimensions or a name is unknown. The
    context raises RuntimeError at its end if no attention ran through it, since the model was not patched.
    """
    require_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: take one by its name, as mesh['cp']")
    require_choice("method", method, tuple(METHODS))
    require_choice("layout", layout, tuple(LAYOUTS))
    return ContextParallel(Shards(mesh.get_group(), mesh.get_local_rank(), mesh.size(), LAYOUTS[layout]), method)


class ContextParallel:
    """Context of ``context_parallel``: shards batches, and runs attention across processes."""

    def __init__(self, shards: Shards, method: str) -> None:
        self.shards, self.method = shards, method
        self._outer: list[Any] = []
        self._awaits_attention = self._awaits_documents = False
        self._visible: Tensor | None = None  # [B, s], if some tokens of the last batch are padding

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
        """Return this process's part of ``batch``, the arguments of a transformers model: all tensors [B, S, ...].

        S is padded to a multiple of the number of chunks. "labels" are first shifted to "shift_labels". Unless the
        batch has "num_items_in_batch", this is the number of labels that are not ignored (-100), over all processes.
        "position_ids" [B, S] are added if missing. Documents are read from "cu_seq_lens_q" (offsets into the
        concatenated rows), else from positions that do not rise by one; the result has "cu_seq_lens_q" and
        "cu_seq_lens_k" of the whole batch. "attention_mask" [B, S] may hide tokens at either end of a row; no visible
        token then sees them. The load balancing loss leaves them out, too, and expects the batch that was sharded last.

        Raises TypeError if ``batch`` is not a mapping, ValueError for missing tensors and wrong shapes.
        """
        require_type("batch", batch, Mapping)
        tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
        if tokens is None:
            raise ValueError(f"batch must have input_ids or inputs_embeds, got {', '.join(batch) or 'an empty one'}")
        B, S = tokens.shape[:2]
        starts, visible = _starts(batch, tokens)
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
        if more and visible is None:
            visible = torch.ones(B, S, dtype=torch.bool, device=tokens.device)
        self._visible = None if visible is None else self.shards.own(pad(visible, (0, more)))
        if starts is not None:
            starts = pad(starts, (0, more))
            starts[:, 0] = True
            cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel()).int()
            batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return batch

    def require_attention(self, layer_types: Collection[str]) -> None:
        """Raise ValueError for ``layer_types`` of a config whose layers would see this process's tokens alone."""
        if found := sorted(RECURRENT.intersection(layer_types)):
            raise ValueError(
                f"context_parallel knows no layers but attention that read earlier tokens; this model has {found[0]!r}"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as attend
    def balance(self, layers: Sequence[Tensor], top_k: int) -> Tensor:
        """Return this process's part of the load balancing loss [] of routers over the tokens of all processes.

        ``layers``: the logits [..., E] of this process's part of the last batch of ``shard``, whose padding does not
        count. Shares of experts are constants of that loss, so they are summed over the processes; probabilities are of
        this process's tokens. The sum of the parts is the loss.

        Raises ValueError if that batch has padding and another number of tokens.
        """
        tokens = layers[0].shape[:-1].numel()
        if self._visible is not None and self._visible.numel() != tokens:
            raise ValueError(
                f"routers must see the {self._visible.numel()} tokens of the last .shard, of which some are padding, "
                f"got {tokens}"
            )
        counts, probabilities, rows = sums_of(layers, top_k, self._visible)
        chosen = torch.cat((counts, rows[None]))
        dist.all_reduce(chosen, group=self.shards.group)
        return loss_of(chosen[:-1], probabilities, chosen[-1])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # transfers between processes stay out of graphs
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, left: int = -1, cu_seqlens: Tensor | None = None,
        scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
        deterministic: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Return causal attention [B, s, H, Dv] of this process's ``q`` [B, s, H, D] over the keys of all processes.

        ``k`` [B, s, Hk, D] and ``v`` [B, s, Hk, Dv] are this process's part. q, k and v get complete gradients,
        ``sinks`` [H] the gradient of this process's queries or heads. A query sees ``left`` keys before its own (-1:
        all) within its document; ``cu_seqlens`` [n + 1] are the documents' offsets into the concatenated rows of the
        whole batch. Other arguments are those of ``flash_attention``.

        Raises TypeError or ValueError for invalid arguments, RuntimeError if the batch has documents but ``cu_seqlens``
        is None.
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
        run = METHODS[self.method] if self.shards.size > 1 else attend_to_own
        return run(self.shards, q, k, v, sinks, starts, left, scale, softcap, deterministic)


def _starts(batch: Mapping[str, Any], tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return masks [B, S] of the first tokens of documents, except at the start of rows, and of the visible tokens.

    The first is None without such tokens, the second if all tokens are visible.

    Raises ValueError for wrong shapes and for an attention mask with gaps.
    """
    starts = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    mask, cu_seqlens, positions = (batch.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    for name, t in (("attention_mask", mask), ("position_ids", positions)):
        if t is not None and (t.dim() != 2 or t.shape[1] != starts.shape[1]):
            raise ValueError(f"{name} must have shape {list(starts.shape)}, got {list(t.shape)}")
    visible = None
    if mask is not None and not mask.all():
        mask = visible = mask.bool().expand_as(starts)
        starts[:, 1:] = mask[:, 1:] & ~mask[:, :-1]
        if (starts.sum(1) + mask[:, 0] > 1).any():
            raise ValueError("attention_mask must hide tokens at the ends of a row only, got a row with a gap")
    elif cu_seqlens is not None:
        starts.view(-1)[cu_seqlens[cu_seqlens < starts.numel()].long()] = True
    elif mask is None and positions is not None:
        starts[:, 1:] = positions.diff(dim=1) != 1
    starts[:, 0] = False
    return (starts if starts.any() else None), visible
