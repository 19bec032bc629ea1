"""The kernels under torch.distributed: ..."""

from liger_like.parallel.gradients import finalize_partial_grads

__all__ = ["finalize_partial_grads"]
