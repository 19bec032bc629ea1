"""Products of the fused losses, and the parts of rows and columns in which they are computed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from liger_like.runtime import machine
from liger_like.runtime.support import in_graph

SLICE_COLUMNS = 4096  # least columns of logits per slice, in new memory where dw has no room: each adds to all of dx


def addmm(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Store a @ b in ``out``, or add it to ``out`` if ``accumulate``; the sum is kept in the dtype of ``out``."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif machine.on_gpu(a):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(accumulate), out=out)


def store_logits(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None
) -> None:
    """Store x weight^T + bias + u b^T in ``out``; no part is rounded to the dtype of x if that of ``out`` is wider."""
    if out.dtype != x.dtype:
        addmm(out if bias is None else out.copy_(bias.expand_as(out)), x, weight.t(), bias is not None)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
    if u is not None:
        addmm(out, u, b.t(), True)


def pitch(V: int) -> int:
    """Return the columns of a buffer for rows of ``V`` logits, which start at multiples of 16 bytes."""
    return -(-V // 16) * 16


def even_step(rest: int, step: int) -> int:
    """Return tokens per chunk for the remaining ``rest``: equal chunks of at most ``step``, in multiples of 128."""
    chunks = max(1, -(-rest // step))
    return min(step, max(1, -(-rest // chunks // 128)) * 128)


def kept_first(target: Tensor, ignore_index: int, order: Tensor, *, many: bool) -> Callable[[], int]:
    """Fill ``order`` with the tokens, and return a function that returns how many of them are computed.

    With ``many`` chunks the tokens that are not ignored come first, so that the rest can be skipped. On a GPU the
    function waits until the stream has counted them; call it after a chunk of products is queued, so that the GPU stays
    busy. A graph under capture cannot wait: it computes all tokens.
    """
    T = target.shape[0]
    traced = machine.current is not None
    if not many or (in_graph(target) and not traced):
        torch.arange(T, out=order, device=order.device)
        return lambda: T
    ignored = target == ignore_index
    torch.argsort(ignored, stable=True, out=order)
    count = (T - ignored.sum()).to(torch.int64)
    if not count.is_cuda:
        return lambda: T if traced else int(count)
    on_host = torch.empty_like(count, device="cpu", pin_memory=True).copy_(count, non_blocking=True)
    known = torch.cuda.Event()
    known.record()

    def ask() -> int:
        known.synchronize()
        return int(on_host)

    return ask


def slices(V: int, column: int, dw_row: int, times: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of slices of a vocabulary of ``V``, in multiples of 128 columns.

    A slice's logits take the memory of dw after the slice's own rows, which is not yet written; a column of logits has
    ``column`` bytes and a row of dw ``dw_row``. Slices are as large as that allows, but not below ``times`` a minimum.
    """
    start = 0
    while start < V:
        fits = (V - start) * dw_row // (column + dw_row) // 128 * 128
        size = max(fits, times * (SLICE_COLUMNS if dw_row else 2 * SLICE_COLUMNS))
        yield start, min(start + size, V)
        start += size


def logits_behind(dw: Tensor, end: int, x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a buffer for logits in ``dtype``, [rows of ``x``, ``columns``].

    It takes the memory of ``dw`` from row ``end`` on if that suffices, else new memory.
    """
    rows, size = x.shape[0], x.shape[0] * pitch(columns) * dtype.itemsize
    free = dw[end:].view(-1).view(torch.uint8)
    if free.numel() < size:
        free = x.new_empty(size, dtype=torch.uint8)
    return free[:size].view(dtype).view(rows, -1)[:, :columns]


def in_memory_of(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape of ``z`` in a dtype that is not wider, whose rows start where those of ``z`` do."""
    return z.view(dtype)[:, : z.shape[1]]
