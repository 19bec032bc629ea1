"""Choose the kernels that store no logits, and run the forward with them.

They are for Hopper, for log-probabilities and entropies from logits in fp32 with no further terms.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from liger_like.ops.experts.choice import NO_TMA, moved_by_tma, sorts_rows
from liger_like.ops.losses.products import even_step, kept_first
from liger_like.ops.losses.row_kernels import launch_merge
from liger_like.ops.losses.rows import Options, raise_bad_label
from liger_like.runtime.fallback import BROKEN, gluon_module
from liger_like.runtime.support import refused

HOPPER = "liger_like.ops.losses.hopper"
CHUNK_ROWS = 4096  # tokens that are gathered at a time
WORDS = 256  # that share a largest score: the columns of a tile
NOT_PLAIN = (
    "the kernels that store no logits take logits_dtype float32, and no bias, LoRA, softcap, ids, top-k, shard, kept"
    " logits, argmax, correct, mean_logit or log_sum_sq_prob"
)
NOT_HALF = "the kernels that store no logits take bfloat16 and float16 on a Hopper GPU, and H that is a multiple of 8"


def unstored_kernels(x: Tensor, weight: Tensor, logits_dtype: torch.dtype, options: Options, *absent: Any) -> Any:
    """Return the module of the kernels, or False if they do not accept the call; no tensor of ``absent`` may exist.

    Their scores are those of logits that are rounded to nothing.
    """
    plain = options.softcap is None and all(t is None for t in absent) and logits_dtype == torch.float32
    return (
        (plain or refused(NOT_PLAIN))
        and (sorts_rows(x, weight) or refused(NOT_HALF))
        and ((moved_by_tma(x) and moved_by_tma(weight)) or refused(NO_TMA))
        and (HOPPER not in BROKEN or refused(f"{HOPPER} {BROKEN[HOPPER]}"))
        and gluon_module(HOPPER)
    )


def run_unstored(call: Any, outs: tuple[Tensor, ...], kernels: Any) -> None:
    """Fill loss, logprob, lse, entropy, lse_rest, ``order`` and ``chunk_bounds`` of ``linear_cross_entropy_fwd``."""
    x, weight, target, options = call.x, call.weight, call.target, call.options
    if not isinstance(x, FakeTensor):
        raise_bad_label(x.device)
    loss, logprob, lse, entropy, _, lse_rest, order, chunk_bounds = outs[:8]
    (T, H), V = x.shape, len(weight)
    rows = loss, logprob, lse, entropy if entropy.numel() else None, lse_rest
    step = min(T, call.chunk_rows or CHUNK_ROWS)
    count = kept_first(target, options.ignore_index, order, many=step < T and call.reads_count)
    new = x.new_empty
    x_c, at = new((step, H)), new(step, dtype=torch.float32)
    parts = new((3 if entropy.numel() else 2, step, -(-V // WORDS)), dtype=torch.float32)
    start, end, n = 0, step, T
    while start < end:
        index, m = order[start:end], end - start
        torch.index_select(x, 0, index, out=x_c[:m])
        kernels.reduce_logits(x_c[:m], weight, index, target, options.logit_scale, parts[:, :m], at)
        launch_merge(parts[:, :m], at, target, rows, index, options.ignore_index, V)
        if start == 0:
            n = count()
            step = even_step(n - end, step)
        if call.reads_count:
            chunk_bounds.copy_(torch.tensor([n, start, end]))
        start, end = end, max(end, min(end + step, n))
