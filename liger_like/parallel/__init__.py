"""The kernels under torch.distributed: models and tensors that are spread over processes."""

from liger_like.parallel.pipeline import pipeline_loss
from liger_like.parallel.vocab_parallel import VocabParallelHead, vocab_parallel_cross_entropy

__all__ = ["VocabParallelHead", "pipeline_loss", "vocab_parallel_cross_entropy"]
