"""Choose the kernels that store no logits in fp32, and run the forward with them.

They are for Hopper, for log-probabilities and entropies from logits in fp32 with no further terms. Where the gradient
of the logits needs these, they store exponentials in 16 bits in their place. A divergence needs both models'
logits, so its products store them, too, but none is read for its lse.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from liger_like.ops.losses.exponentials import parts_of
from liger_like.ops.losses.products import even_step, kept_first
from liger_like.ops.losses.row_kernels import launch_merge
from liger_like.ops.losses.rows import Options, raise_bad_label
from liger_like.runtime.fallback import BROKEN, gluon_module
from liger_like.runtime.support import refused
from liger_like.runtime.tma import NO_TMA, moved_by_tma, on_hopper

HOPPER = "liger_like.ops.losses.hopper"
CHUNK_ROWS = 4096  # tokens that are gathered at a time
NOT_PLAIN = (
    "the kernels that store no logits take logits_dtype float32, and no bias, LoRA, softcap, ids, top-k, shard, kept"
    " logits in part, argmax, correct, mean_logit or log_sum_sq_prob"
)
NOT_HALF = "the kernels that store no logits take bfloat16 and float16 on a Hopper GPU, and H that is a multiple of 8"


def takes_no_logits(x: Tensor, weight: Tensor, logits_dtype: torch.dtype, options: Options, *absent: Any) -> bool:
    """Return True if the kernels that store no logits take such a call, wherever its operands are in memory.

    All of ``absent`` must be None. The kernels round no score.
    """
    plain = options.softcap is None and all(t is None for t in absent) and logits_dtype == torch.float32
    return (plain or refused(NOT_PLAIN)) and (on_hopper(x, weight) or refused(NOT_HALF))


def loads_operands(x: Tensor, weight: Tensor) -> bool:
    """Return True if these kernels can load the operands, and none was found not to compile."""
    return ((moved_by_tma(x) and moved_by_tma(weight)) or refused(NO_TMA)) and (
        HOPPER not in BROKEN or refused(f"{HOPPER} {BROKEN[HOPPER]}")
    )


def unstored_kernels(x: Tensor, weight: Tensor) -> Any:
    """Return the module of these kernels, or False if they cannot load the operands."""
    return loads_operands(x, weight) and gluon_module(HOPPER)


def reduce_rows(
    x: Tensor, weight: Tensor, target: Tensor, rows: Sequence[Tensor], index: Tensor, options: Options,
    stored: Tensor | None = None, tops: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill loss, logprob, lse, entropy, argmax (not computed) and lse_rest of the tokens ``index``, rows ``x`` [n, H].

    ``stored`` [n, V] gets their logits in fp32, or exponentials in fp16, whose scores ``tops`` [n, parts] gets
    (``exponentials.py``). Empty results stay empty.
    """
    loss, logprob, lse, entropy, _, lse_rest = rows
    n, V = len(x), len(weight)
    parts = x.new_empty((3 if entropy.numel() else 2, n, parts_of(V)), dtype=torch.float32)
    at = x.new_empty(n, dtype=torch.float32)
    gluon_module(HOPPER).reduce_logits(x, weight, index, target, options.logit_scale, parts, at, stored)
    filled = [t if t.numel() else None for t in (loss, logprob, lse, entropy, lse_rest)]
    launch_merge(parts, at, target, filled, index, options.ignore_index, V)
    if tops is not None:
        tops.copy_(parts[0])


def run_unstored(call: Any, outs: tuple[Tensor, ...], results: Any) -> None:
    """Fill loss, logprob, lse, entropy, lse_rest, ``order`` and ``chunk_bounds`` of ``linear_cross_entropy_fwd``.

    ``results`` get the exponentials of all tokens, or of none.
    """
    x, weight, target, options = call.x, call.weight, call.target, call.options
    if not isinstance(x, FakeTensor):
        raise_bad_label(x.device)
    rows, order, chunk_bounds = outs[:6], outs[6], outs[7]
    (T, H), V = x.shape, len(weight)
    kept, tops = results.kept_logits[:, :V].view(torch.float16), results.kept_tops
    step = min(T, call.chunk_rows or CHUNK_ROWS)
    count = kept_first(target, options.ignore_index, order, many=step < T and call.reads_count)
    x_c = x.new_empty((step, H))
    start, end, n = 0, step, T
    while start < end:
        index, part = order[start:end], slice(start, end)
        torch.index_select(x, 0, index, out=x_c[: end - start])
        stored = (kept[part], tops[part]) if len(kept) else ()
        reduce_rows(x_c[: end - start], weight, target, rows, index, options, *stored)
        if start == 0:
            n = count()
            step = even_step(n - end, step)
        if call.reads_count:
            chunk_bounds.copy_(torch.tensor([n, start, end], device="cpu"))
        start, end = end, max(end, min(end + step, n))
