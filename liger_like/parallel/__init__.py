"""The kernels under torch.distributed: models and tensors that are spread over processes."""

from liger_like.parallel.vocab_parallel import VocabParallelHead, vocab_parallel_cross_entropy

__all__ = ["VocabParallelHead", "vocab_parallel_cross_entropy"]
