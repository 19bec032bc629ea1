"""The kernels under torch.distributed: models and tensors that are spread over processes."""

from liger_like.parallel.context_parallel import context_parallel

__all__ = ["context_parallel"]
