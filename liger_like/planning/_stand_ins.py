"""Answers that a trace without a GPU needs where torch and transformers ask for data or for a device.

Each was found by running: tensors of a trace are on the CPU, without data. ``standing_in`` is the only door.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from triton.tools import tensor_descriptor

from liger_like.parallel.checkpoint import Homewards, Outwards
from liger_like.parallel.host_memory import ENGINES, PAGE
from liger_like.runtime import gluon
from liger_like.runtime.machine import Machine, pretended

_aten = torch.ops.aten
# of selective checkpoints, in the forward and in the recomputation
MODES: Any = _CachingTorchDispatchMode, _CachedTorchDispatchMode, Outwards, Homewards


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


# products of bf16 with results in fp32, which a CPU has not
CUDA_ONLY: dict[Any, Callable[..., Any]] = {
    _aten.mm.dtype: _mm,
    _aten.addmm.dtype_out: lambda *args, out, **kwargs: out,
}


def workspace_of(name: str, args: tuple[Any, ...]) -> int:
    """Return bytes that a CUDA kernel of torch allocates and frees within the op.

    Flash attention's backward sums dq in fp32, with rows padded to 128 and heads to 32 features; under grouped queries
    it makes dk and dv of all heads first.
    """
    if name != "aten::_scaled_dot_product_flash_attention_backward":
        return 0
    q, k = args[1], args[2]
    B, H, S, D = q.shape
    rows = 128 * math.ceil(S / 128)
    size = 4 * B * H * rows * (32 * math.ceil(D / 32) + 1)
    return int(size if k.shape[1] == H else size + 2 * B * S * H * D * q.element_size())


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``scaled_dot_product_attention`` by the kernel that a Hopper GPU takes.

    That is flash attention, cuDNN's for values of another width than keys, whose results have the layout of ``q``, and
    with a mask or more than 256 features the memory-efficient one.
    """
    D, Dv = q.shape[-1], v.shape[-1]
    scale = D**-0.5 if scale is None else scale
    if attn_mask is None and D == Dv <= 256:
        return _flash(q, k, v, dropout_p, is_causal, scale)
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if attn_mask is None and max(D, Dv) <= 256:
        args = q, k, v, None, True, dropout_p, is_causal, False
        return _aten._scaled_dot_product_cudnn_attention(*args, scale=scale)[0]  # type: ignore[no-any-return]
    mask = None if attn_mask is None else attn_mask.expand(q.shape[0], q.shape[1], -1, -1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    result = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout_p, is_causal, scale=scale)
    return result[0]  # type: ignore[no-any-return]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float) -> Tensor:
    """Run flash attention on heads padded to a multiple of 8 features, as torch pads them."""
    D = q.shape[-1]
    if D % 8:
        q, k, v = (torch.nn.functional.pad(t, (0, -D % 8)) for t in (q, k, v))
    out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :D]  # type: ignore[no-any-return]


class Copies:
    """Copies to the host and back that move nothing. The host's memory is on "meta", so the trace does not count it."""

    def __init__(self, sent: Callable[[int], None]) -> None:
        self.sent = sent

    def memory(self, size: int) -> Tensor:
        """Return ``size`` bytes of the host."""
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def current(self) -> None:
        """Return no stream."""

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], owner: None) -> None:
        """Note the pages that copies to the host fill."""
        self.sent(PAGE * math.ceil(sum(len(source) for target, source in pairs if target.is_meta) / PAGE))

    def wait(self, end: None, tensor: Tensor) -> None:
        """Wait for nothing."""


def _seen(original: Callable[..., Any], listen: Callable[[], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        listen()
        return original(*args, **kwargs)

    return run


@contextlib.contextmanager
def standing_in(machine: Machine, sent: Callable[[int], None], listen: Callable[[], None]) -> Iterator[None]:
    """Let ops, torch's attention and transformers' masks do within the context what they do on ``machine``.

    Checkpoints call ``sent`` with the bytes that they take of the host, and selective ones ``listen`` for each op that
    their modes see.

    transformers makes a mask for a tensor without data, and looks for packed documents in the data.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended(machine))
        stack.enter_context(mock.patch.dict(ENGINES, cpu=lambda device: Copies(sent)))
        replaced: list[tuple[Any, str, Any]] = [
            (torch.nn.functional, "scaled_dot_product_attention", attention),
            # it logs each failure, which the caller of a trace gets as an exception
            (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        ]
        for kind in (gluon.TensorDescriptor, tensor_descriptor.TensorDescriptor):
            replaced.append((kind, "__post_init__", lambda self: None))  # it checks the address
        for kind in MODES:
            replaced.append((kind, "__torch_dispatch__", _seen(kind.__torch_dispatch__, listen)))
        masks = sys.modules.get("transformers.masking_utils")
        if masks is not None:
            replaced += [
                (masks, "is_tracing", lambda tensor=None: False),
                (masks, "find_packed_sequence_indices", lambda position_ids: None),
            ]
        for module, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield
