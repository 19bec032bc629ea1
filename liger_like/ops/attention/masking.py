"""Options of attention as one object, and the constants, strides and schedules that its launchers derive from it."""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from liger_like.runtime.support import l2_bytes, num_programs

MASKING_SCHEMA = (
    "Tensor? bias, Tensor? key_padding_mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? offsets,"
    " Tensor? spans, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float? softcap, int left, int right"
)


class Masking(NamedTuple):
    """Masks and scaling of the scores, in the order of the library ops' arguments; tensors first.

    ``offsets`` [number of sequences]: position of a sequence's first query minus that of its first key; None: the last
    query and the last key have the same position. ``spans`` [2, B, S], int32: the first key that a query may see, and
    the key after the last, neither decreasing along S. ``left`` and ``right``: keys that a query sees beside its
    position; -1: all.
    """

    bias: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    offsets: Tensor | None
    spans: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    softcap: float | None
    left: int
    right: int

    def pointers(self) -> tuple[Tensor | None, ...]:
        """Return the tensors in the order of the kernels' arguments."""
        return self[:TENSORS]

    def bias_strides(self) -> tuple[int, int, int, int]:
        """Return the strides of the bias as [B, H, S, Sk]; 0 where it is broadcast."""
        if self.bias is None:
            return 0, 0, 0, 0
        b, h, s, k = (0 if n == 1 else t for n, t in zip(self.bias.shape, self.bias.stride(), strict=True))
        return b, h, s, k

    @property
    def sequences(self) -> int:
        """Number of packed sequences; 0 for a batch."""
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def uneven(self) -> bool:
        """Return True if some blocks see many more keys than others: under a causal mask, which spans may be."""
        causal = self.right >= 0 and not 0 <= self.left < self.max_seqlen_k
        return not self.sequences and (self.spans is not None or causal)

    def constants(self) -> dict[str, Any]:
        """Return the constexprs of every kernel that computes scores."""
        return {
            "SOFTCAP": self.softcap,
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "SEQUENCES": room_for(self.sequences),
        }

    def num_blocks(self, rows: int, block: int) -> int:
        """Return the number of blocks of ``rows`` of a batch, or an upper bound for packed sequences and the rows after
        them.
        """
        return rows // block + self.sequences + 1 if self.sequences else -(-rows // block)


TENSORS = Masking._fields.index("max_seqlen_q")  # the fields before it are tensors
FIELDS = len(Masking._fields)


def room_for(sequences: int) -> int:
    """Return a number above ``sequences``, out of few, so that few kernels are compiled."""
    room = 32
    while room <= sequences:
        room *= 8
    return room


def heads_in_l2(masking: Masking, k: Tensor, v: Tensor, group: int) -> int:
    """Return the number of query heads whose blocks run at the same time: their keys and values fit into 16 MiB of L2.

    If blocks are uneven, up to twice as many take part, in even sections: each section begins with its longest blocks.
    """
    B, _, HK, D = k.shape
    each = masking.max_seqlen_k * (D + v.shape[-1]) * k.element_size()
    uneven = masking.uneven or masking.sequences > 0
    heads = min(max(1, ((32 if uneven else 16) << 20) // max(1, each)), B * HK)
    return (_even_section(heads, B * HK) if uneven else heads) * group


def key_heads_together(masking: Masking, q: Tensor, k: Tensor, v: Tensor, block: int) -> int:
    """Return the number of key heads whose blocks run at the same time.

    They fill the GPU. If blocks are uneven, more heads take part as long as their queries fit into half of L2: the long
    blocks of all of them come first, and short ones end the kernel.
    """
    count = max(1, masking.sequences)
    together = max(1, num_programs(k.device, 1) // max(1, -(-k.shape[1] // count // block)))
    if not masking.uneven:
        return together
    S, D = q.shape[1], q.shape[-1]
    each = S * (D + v.shape[-1]) * 4  # about 8 bytes for a feature: q, dout and the fp32 sum of dq
    heads = k.shape[0] * k.shape[2]
    return _even_section(min(max(together, l2_bytes(k.device) // 2 // max(1, each)), heads), heads)


@functools.cache
def _even_section(limit: int, heads: int) -> int:
    """Return the largest number of heads, up to ``limit``, into which ``heads`` are split with little left over.

    A small last section would begin its long blocks when all others end.
    """
    return max(range(limit, limit // 2, -1), key=lambda n: min(((heads - 1) % n + 1) / n, 0.9))


def constants_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the sizes of heads and their strides from row to row, which are the same for all batches of a model."""
    (H, D), (HK, DV) = q.shape[2:], v.shape[2:]
    strides = {"STRIDE_Q": q.stride(1), "STRIDE_K": k.stride(1), "STRIDE_V": v.stride(1)}
    return {"H": H, "HK": HK, "D": D, "DV": DV, **strides}


def strides_of(*tensors: Tensor) -> list[int]:
    """Return the strides of each tensor from batch to batch and from head to head."""
    return [stride for x in tensors for stride in (x.stride(0), x.stride(2))]
