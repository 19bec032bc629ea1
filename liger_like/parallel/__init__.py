"""The kernels under torch.distributed: models and tensors that are spread over processes."""

from liger_like.parallel.pipeline import pipeline_loss

__all__ = ["pipeline_loss"]
