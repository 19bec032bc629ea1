"""Choose the experts' kernels for Hopper: the calls that they accept, and the modules that hold them.

A module is imported at the first call that it accepts, since a Triton newer than the tested ones may fail to import it.
"""

from typing import Any

from torch import Tensor

from liger_like.runtime.fallback import BROKEN, gluon_module
from liger_like.runtime.layout import dense
from liger_like.runtime.support import refused
from liger_like.runtime.tma import NO_TMA, moved_by_tma, on_hopper

ROWS, DOWN_BWD, DEPTH = (f"liger_like.ops.experts.hopper.{name}" for name in ("rows", "down_bwd", "depth"))
NOT_SORTED = "the experts' kernels for Hopper GPUs take bfloat16 and float16, and widths that are multiples of 8"


def sorts_rows(x: Tensor, *weights: Tensor) -> bool:
    """Return True if products of rows of ``x`` with ``weights`` [E, M, N] want the rows sorted, by a copy before.

    TMA moves no rows that are elsewhere. Other kernels gather them in the product.
    """
    return on_hopper(x, *weights)


def hopper_kernels(name: str, x: Tensor | None, *others: Tensor | None) -> Any:
    """Return the module ``name``, or False if its kernels do not accept sorted rows ``x`` and ``others``.

    ``others`` are the weights, adapters and results [..., N] that TMA moves. ``x`` is None if the rows are not sorted.
    """
    moved = [t for t in others if t is not None]
    return (
        ((x is not None and sorts_rows(x, *moved)) or refused(NOT_SORTED))
        and (all(map(moved_by_tma, (x, *moved))) or refused(NO_TMA))
        and (name not in BROKEN or refused(f"{name} {BROKEN[name]}"))
        and gluon_module(name)
    )


def in_layout(v: Tensor | None, x: Tensor, transposed: bool) -> Tensor | None:
    """Return ``v`` [E, R, N] in the layout of w [E, N, K], or [E, K, N] if ``transposed``, where Hopper's kernels run.

    TMA reads both in the same blocks. ``lora.factors`` gives B in the layout of its w, so that this copies A alone, and
    only for experts [E, K, N].
    """
    return v if v is None or transposed or not sorts_rows(x) else dense(v.mT)
