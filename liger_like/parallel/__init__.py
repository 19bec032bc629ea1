"""The kernels under torch.distributed: ..."""

from liger_like.parallel.checkpoint import checkpoint_policy
from liger_like.parallel.gradients import finalize_partial_grads

__all__ = ["checkpoint_policy", "finalize_partial_grads"]
